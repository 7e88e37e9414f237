"""A model whose blocks contain a Python loop over time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = 8


def decay_scan(x: Tensor, decay: Tensor) -> Tensor:
    """h_t = sigmoid(decay) h_{t-1} + x_t of x [batch, time, channel], in every channel."""
    rate, state, states = torch.sigmoid(decay), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = rate * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.decay = nn.Parameter(torch.linspace(-1, 1, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(decay_scan(self.inner(x), self.decay)))


class Recurrent(nn.Module):
    """Blocks on x [batch, time, HIDDEN], and their mean squared distance from a target."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()
