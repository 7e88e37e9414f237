"""Ops in the form for compilers: dropout by a ticket, cross entropy without a gradient of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.ops.local_ops import (
    cross_entropy,
    dropout,
    dropout_ticket,
    plain_cross_entropy,
    ticketed_dropout,
)
from meshwright.compiler.verification.lockstep import LockstepGroup


# ---- ops in the form for compilers
def test_dropout_by_a_ticket_draws_the_same() -> None:
    for mesh, cuts in (((2, 2), ((0, 0), (1, 1))), ((2, 2), ((0, 1), (1, 1))), ((2,), ())):

        def device(comm: Any, cuts: Any = cuts) -> torch.Tensor:
            x = torch.rand(4, 10).requires_grad_()
            with use_context(Context(comm, 3, 1, 2)):
                expected = dropout(x, 0.3, 7, cuts)
                dims = tuple(dict.fromkeys(dim for _, dim in cuts))
                got = ticketed_dropout(x, dropout_ticket(7, cuts), 0.3, dims)
            assert torch.equal(got, expected)
            ones = torch.ones_like(x)
            gradients = [torch.autograd.grad(y, x, ones)[0] for y in (got, expected)]
            assert torch.equal(*gradients)
            return got.detach()

        LockstepGroup(mesh).run(device)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_without_a_gradient_of_its_own(smoothing: float) -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, -100, 2, -100, 1])
    both = [op(logits, target, -100, smoothing) for op in (cross_entropy, plain_cross_entropy)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(value[0], logits)[0] for value in both))
