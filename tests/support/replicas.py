"""The model, the data and the cases of tests in which replicas step by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH, WIDTH, STEPS, LR = 8, 8, 9, 0.05

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Model(nn.Module):
    """Token classification with a tied table, a frozen weight and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1][1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h).flatten(0, 1)


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, y.flatten())


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(12, (BATCH, 5), generator=generator), torch.randint(12, (BATCH, 5), generator=generator)


INNER: dict[str, Factory] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=LR),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}
OUTER: dict[str, Factory | None] = {
    "mean": None,
    "diloco": lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True),
}

# strategy, microbatches, replicas, inner optimizer, delay, local steps, outer optimizer
CASES: dict[str, tuple[str, int, int, str, int, int, str]] = {
    "dga, 1 late": ("dp2", 1, 2, "sgd", 1, 1, "mean"),
    "dga, 4 late": ("dp4", 1, 4, "sgd", 4, 1, "mean"),
    "dga of stages": ("pp2,dp2", 2, 2, "momentum", 2, 1, "mean"),
    "dga of cut weights": ("tp2,dp2", 1, 2, "adamw", 2, 1, "mean"),
    "local": ("dp2", 2, 2, "momentum", 0, 3, "mean"),
    "diloco of stages": ("pp2,dp2", 2, 2, "adamw", 0, 4, "diloco"),
    "diloco, late": ("tp2,dp2", 1, 2, "sgd", 2, 3, "diloco"),
}
ASKED: dict[str, dict[str, Any]] = {  # of cases, what else is asked
    "dga, 1 late": {"recompute": "full", "compile": "eager", "clip_grad_norm": 0.3},
    "dga of stages": {"recompute": "selective", "schedule": "zb-h1", "clip_grad_norm": 0.3},
    "dga of cut weights": {"clip_grad_norm": 0.3},
    "diloco of stages": {"recompute": "full", "schedule": "interleaved"},
    "diloco, late": {"recompute": "selective", "compile": "eager", "clip_grad_norm": 0.3},
}
