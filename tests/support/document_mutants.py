"""A network for plans whose documents are changed by chance, and the places in them that can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Network", "places"]


class Network(nn.Module):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
        self.c, self.d = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.relu(self.a(x)))
        return nn.functional.mse_loss(self.d(torch.relu(self.c(x))), y)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))
