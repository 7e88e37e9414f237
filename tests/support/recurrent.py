"""Models with Python loops over time, in a function and in a module."""

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


class Cell(nn.Module):
    """A gated recurrent net whose loop stands in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, outs = x.new_zeros(x.shape[0], HIDDEN), []
        for t in range(x.shape[1]):
            gate, new = (self.inner(x[:, t]) + self.state(h)).chunk(2, -1)
            h = h + torch.sigmoid(gate) * (torch.tanh(new) - h)
            outs.append(h)
        return torch.stack(outs, 1), h


class Gated(nn.Module):
    """Many layers in a loop by number, two of which are ``Cell``."""

    def __init__(self, layers: int = 32) -> None:
        super().__init__()
        plain = [nn.Linear(HIDDEN, HIDDEN) for _ in range(layers)]
        self.layers, self.cells = nn.ModuleList(plain), nn.ModuleList(Cell() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            x = x + torch.tanh(self.layers[i](x))
        for cell in self.cells:
            x = x + cell(x)[0]
        return (x - y).square().mean()
