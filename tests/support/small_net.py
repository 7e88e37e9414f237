"""A small net with batch norm and dropout, its batches, and the plain loop that trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import meshwright as mw
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 16


class Net(nn.Module):
    """Two layers with batch norm between them; the output is [B, FEATURES], or the loss if it is given what to hit."""

    def __init__(self, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.norm = nn.BatchNorm1d(4 * FEATURES) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.down(self.dropout(F.gelu(self.norm(self.up(x)))))
        return out if y is None else F.mse_loss(out, y)


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(step: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, size, FEATURES, generator=generator)
    return x, y


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_device(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    m: int = 1,
    loss_of: Callable[..., Tensor] | None = None,
    clip: float | None = None,
    factory: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> dict[str, Any]:
    """A plain loop that accumulates ``m`` contiguous chunks: losses, gradient norms, the trained model."""
    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    losses, norms = [], []
    for inputs in batches:
        optimizer.zero_grad()
        total = 0.0
        for i in range(m):
            chunks = [x.chunk(m)[i] for x in inputs]
            loss = model(*chunks) if loss_of is None else loss_of(model, *chunks)
            (loss / m).backward()
            total += loss.item() / m
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e30)
        norms.append(float(norm))
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "model": model}


def same_state(state: dict[str, Tensor], model: nn.Module) -> None:
    """``state`` is the model's, and loads into it."""
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
    model.load_state_dict(state, strict=True)


def losses_of(parallel: mw.Parallel, batches: Sequence[Sequence[Tensor]]) -> list[float]:
    return [float(parallel.train_step(*inputs)) for inputs in batches]


BATCHES = [batch(0), batch(1), batch(2)]


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)
