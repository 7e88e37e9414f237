"""A model with one of several custom backwards in its middle: autograd Functions, hooks, checkpoints, derivatives."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

BATCH, WIDTH = 8, 16


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grads[0], None


class Linear(torch.autograd.Function):
    """A linear layer whose weight gets twice its gradient, in the style with a context of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ weight.t() + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, 2 * grads[0].t() @ x, grads[0].sum(0)


class LargestAs(torch.autograd.Function):
    """Quantised by the largest magnitude of the whole tensor: no part of it can be done alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        step = x.abs().max() / 127
        ctx.mark_non_differentiable(step)
        return (x / step).round() * step, step

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class DrawsNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Behind(InPlace):
    """Changes its argument where no version tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x.clone()


class ReadsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


bound_early = Round.apply  # as many modules have it


class Model(nn.Module):
    """Two linear layers with something between; the mean of squares is the loss."""

    def __init__(self, middle: str = "functions") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.middle = middle

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = getattr(self, self.middle)(self.first(x))
        return (self.last(torch.tanh(self.second(h))) - y).square().mean()

    def functions(self, h: Tensor) -> Tensor:
        h = Reverse.apply(bound_early(3 * h), 0.5)
        return h + Linear.apply(h, self.first.weight, self.first.bias)

    def whole(self, h: Tensor) -> Tensor:
        return LargestAs.apply(h)[0]

    def defined_here(self, h: Tensor) -> Tensor:
        class Sign(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.sign()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return grads[0]

        return Sign.apply(h)

    def checkpointed(self, h: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.first(x)), h, use_reentrant=True)

    def data(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).data

    def momentum(self, h: Tensor) -> Tensor:
        self.second.weight.data = 0.9 * self.second.weight.data + 0.1  # as contrastive learning has it
        return h

    def behind(self, h: Tensor) -> Tensor:
        return Behind.apply(h)

    def tensor_hook(self, h: Tensor) -> Tensor:
        h.register_hook(lambda grad: 10 * grad)
        return h

    def derivative(self, h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.second(h).sum(), h, create_graph=True)
        return slope

    def noise(self, h: Tensor) -> Tensor:
        return DrawsNoise.apply(h)

    def dirty(self, h: Tensor) -> Tensor:
        return InPlace.apply(2 * h)

    def module(self, h: Tensor) -> Tensor:
        return ReadsModule.apply(h, self.first)

    def chance(self, h: Tensor) -> Tensor:
        return h * (1 + random.random())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)
