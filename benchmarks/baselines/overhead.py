"""What the executor's own Python takes: a program of next to no work, run by the executor and in a bare loop.

Both do the same forwards and backwards of the same local program on the same tensors. What the first takes beyond the
second, by the number of actions, is the executor's: choosing, feeding, keeping, tracing.
"""

from __future__ import annotations

import copy
from typing import Any

import meshwright as mw
import torch
from torch import nn

from .interleaved import Build, Contender
from .peers import make_optimizer

__all__ = ["ACTIONS", "actions"]

MICROBATCHES = 64
ACTIONS = 2 * MICROBATCHES


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) - y).square().mean()


def actions() -> list[Build]:
    """The executor, and its program in a loop."""
    torch.manual_seed(0)
    model, (x, y) = _Tiny(), torch.randn(2, 2 * MICROBATCHES, 4)

    def bound() -> Any:
        return mw.parallelize(
            copy.deepcopy(model), example_inputs=(x, y), optimizer=make_optimizer, microbatches=MICROBATCHES
        )

    def executor() -> Contender:
        parallel = bound()
        return Contender("executor", lambda: parallel.forward_backward(x, y), float)

    def loop() -> Contender:
        parallel = bound()
        (part,) = parallel.session.executor.parts
        inputs = {"args.0": x, "args.1": y}
        seed = torch.tensor(1 / MICROBATCHES)

        def step() -> torch.Tensor:
            for leaf in parallel.session.state.parameters.values():
                leaf.grad = None
            losses = []
            for index in range(MICROBATCHES):
                arguments = part.template.copy()
                part.input_sharder.fill(arguments, inputs, index)
                (loss,) = part.forward(*arguments)
                torch.autograd.backward(loss, seed)
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return Contender("program alone", step, float)

    return [executor, loop]
