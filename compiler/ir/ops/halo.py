"""Halo exchange for windows that slide over a cut dim: every block gets the rows that its windows reach from its
neighbours.

Block i of a dim, with ``before`` rows of block i - 1 above it and ``after`` rows of block i + 1 below it, holds every
window of its outputs, so the op runs on it without padding along that dim (Dryden et al., arXiv:1903.06681):

    forward    x_i → [tail of x_(i-1); x_i; head of x_(i+1)], the borders of the whole filled with the op's padding
    backward   gradients of what came are sent back to where it came from, and added there

Several dims are extended one after the other: what the second exchange takes from its neighbours has the rows of the
first already, so corners arrive in two steps. A dim that several mesh axes cut has neighbours across all of them: what
leaves the line along the minor axis goes round to its other end, and from there one line further along the next axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, current_context
from .local_ops import block_index

__all__ = ["average_with_halos", "run_with_halos"]

Halos = Sequence[tuple[int, int, int]]  # (dim, counted from the end; rows before; rows after)
_Axes = tuple[int, ...]


def _exchange_halos(
    before: Tensor | None, after: Tensor | None, axes: _Axes, comm: Comm
) -> tuple[Tensor | None, Tensor | None]:
    """Send ``before`` to the block before this one and ``after`` to the one behind it; what comes from these two,
    zeros beyond the borders of the whole."""
    came = comm.exchange(before, after, axes[-1], len(axes) > 1)
    for k in reversed(range(len(axes) - 1)):
        minor = axes[k + 1 :]
        first = all(comm.index(axis) == 0 for axis in minor)
        last = all(comm.index(axis) == comm.size(axis) - 1 for axis in minor)
        from_before, from_after = came
        # what went round goes on; all along this axis are at the same end of the minor ones, and agree what is empty
        onward = from_before if first or from_before is None else from_before.new_empty(0)
        back = from_after if last or from_after is None else from_after.new_empty(0)
        passed = comm.exchange(back, onward, axes[k], k > 0)
        came = (passed[0] if first else from_before, passed[1] if last else from_after)
    return came


class _Extend(torch.autograd.Function):
    """[..., rows, ...] → [..., before + rows + after, ...] along ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, before: int, after: int, axes: _Axes, fill: float) -> Tensor:
        comm = current_context().comm
        rows = x.shape[dim]
        ctx.comm, ctx.cut = comm, (dim, before, rows, after, axes)
        head = x.narrow(dim, 0, after).contiguous() if after else None
        tail = x.narrow(dim, rows - before, before).contiguous() if before else None
        above, below = _exchange_halos(head, tail, axes, comm)
        block, count = block_index(axes, comm), prod(comm.size(axis) for axis in axes)
        if above is not None and block == 0:
            above.fill_(fill)
        if below is not None and block == count - 1:
            below.fill_(fill)
        return torch.cat([part for part in (above, x, below) if part is not None], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dim, before, rows, after, axes = ctx.cut
        above, block, below = grads[0].split([before, rows, after], dim)
        head, tail = _exchange_halos(
            above.contiguous() if before else None, below.contiguous() if after else None, axes, ctx.comm
        )
        out = block.clone(memory_format=torch.contiguous_format)
        if tail is not None:  # of the rows that went to the block behind
            out.narrow(dim, rows - before, before).add_(tail)
        if head is not None:
            out.narrow(dim, 0, after).add_(head)
        return out, None, None, None, None, None


def _extend(x: Tensor, halos: Halos, axes: dict[int, _Axes], fill: float) -> Tensor:
    for dim, before, after in halos:
        if axes[dim]:
            x = _Extend.apply(x, x.dim() + dim, before, after, axes[dim], fill)
        else:  # uneven padding, which the op itself has no argument for
            x = torch.nn.functional.pad(x, (0, 0) * (-1 - dim) + (before, after), value=fill)
    return x


def run_with_halos(
    op: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    halos: Halos,
    fill: float = 0.0,
    crops: Halos = (),
    depth_axes: _Axes = (),
    height_axes: _Axes = (),
    width_axes: _Axes = (),
    **kwargs: Any,
) -> Tensor:
    """``op(x, *args, **kwargs)`` on this device's block ``x`` [..., depth?, height?, width] and its halos.

    halos: (dim from the end, rows before, rows after) of every dim that is extended, from the neighbours along the axes
    that cut it; ``fill`` stands beyond the borders of the whole. crops: (dim from the end, first, rows) that is this
    device's part of what the op gives. Per dim and side one "send" in the forward, and one in the backward.
    """
    x = _extend(x, halos, {-3: depth_axes, -2: height_axes, -1: width_axes}, fill)
    out = op(x, *args, **kwargs)
    for dim, first, rows in crops:
        out = out.narrow(dim, first, rows)
    return out


def average_with_halos(
    op: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    halos: Halos,
    depth_axes: _Axes = (),
    height_axes: _Axes = (),
    width_axes: _Axes = (),
    **kwargs: Any,
) -> Tensor:
    """``run_with_halos`` for an average over what lies inside the whole: ``op`` counts its padding in, and the
    quotient by the average of ones inside and zeros beyond takes it out again."""
    axes = {-3: depth_axes, -2: height_axes, -1: width_axes}
    comm = current_context().comm
    inside = x.new_ones((1,) * (x.dim() - len(args[0])) + tuple(x.shape[-len(args[0]) :]))
    for dim, before, after in halos:
        rows, block = inside.shape[dim], block_index(axes[dim], comm)
        along = x.new_ones(before + rows + after)
        if block == 0:
            along[:before] = 0
        if block == prod(comm.size(axis) for axis in axes[dim]) - 1:
            along[before + rows :] = 0
        inside = inside.narrow(dim, 0, 1) * along.view(-1, *[1] * (-1 - dim))
    return op(_extend(x, halos, axes, 0.0), *args, **kwargs) / op(inside, *args, **kwargs)
