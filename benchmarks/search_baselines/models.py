"""Models that the command line has no name for: ``search_baselines.models:NAME``, from the folder ``benchmarks``."""

from __future__ import annotations

import os
from typing import Any

import torch
from meshwright.models.architectures import GPT
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def gpt() -> Made:
    """A GPT of $MESHWRIGHT_LAYERS layers, with the width of gpt-39b unless $MESHWRIGHT_HIDDEN says another."""
    layers = int(os.environ.get("MESHWRIGHT_LAYERS", "48"))
    hidden = int(os.environ.get("MESHWRIGHT_HIDDEN", "8192"))
    with torch.device("meta"):
        model = GPT(51200, layers, hidden, hidden // 128, 1024).half().train()
        tokens = torch.zeros(1024, 1024, dtype=torch.int64)
    return model, (tokens, tokens), {}


class Uneven(nn.Module):
    """A residual network of feed-forward blocks, no two of which have the same width: no layer is like another."""

    def __init__(self, layers: int = 48, hidden: int = 4096, step: int = 256) -> None:
        super().__init__()
        widths = [2 * hidden + step * index for index in range(layers)]
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in widths)
        self.up = nn.ModuleList(nn.Linear(hidden, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, hidden) for width in widths)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return nn.functional.mse_loss(x, y)


def uneven() -> Made:
    """``Uneven`` in half precision, sequence 1,024."""
    with torch.device("meta"):
        x = torch.zeros(1024, 1024, 4096, dtype=torch.float16)
        return Uneven().half().train(), (x, x), {}
