"""Weights that are stored in blocks, whole while a layer runs (ZeRO-3: Rajbhandari et al. 2020).

One node of a program gathers those of a layer, and its backward reduces their gradients into blocks::

    forward     blocks of all ranks → wholes        one all-gather per axis of the cut, the minor one first
    backward    gradients of the wholes → blocks    one reduce-scatter per axis, the major one first

Both are one message for all the tensors (see ``cuts``). Wholes that a backward needs are not kept for it: the layer is
a segment of the program whose gathers are repeated (``segments``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from .context import Comm, current
from .cuts import Cut, place

__all__ = ["gather_blocks"]

Cuts = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
"""The fields of a ``Cut`` per tensor, as a literal of a lowered program; their axes are the same"""


def gather_blocks(blocks: Sequence[torch.Tensor], cuts: Cuts) -> tuple[torch.Tensor, ...]:
    """The whole tensors of which this rank has ``blocks``; differentiable where all of them are."""
    made: tuple[torch.Tensor, ...] = _Gather.apply(cuts, *blocks)
    return made


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cuts: Cuts, *blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.cuts = current().comm, [Cut(*fields) for fields in cuts]
        ctx.shapes = [block.shape for block in blocks]
        ctx.set_materialize_grads(False)
        return _gathered(ctx.comm, ctx.cuts, [block.detach() for block in blocks])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [(cut, shape, grad) for cut, shape, grad in zip(ctx.cuts, ctx.shapes, grads) if grad is not None]
        pieces = iter(_scattered(ctx.comm, there))
        return None, *(None if grad is None else next(pieces) for grad in grads)


def _gathered(comm: Comm, cuts: Sequence[Cut], blocks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    wire = torch.cat([block.reshape(-1) for block in blocks]) if len(blocks) > 1 else blocks[0].reshape(-1)
    for axis in reversed(cuts[0].axes):
        wire = comm.all_gather(wire, axis, 0)
    wire = wire.view(cuts[0].parts, -1)
    out, start = [], 0
    for cut, block in zip(cuts, blocks, strict=True):
        whole = block.new_empty(_whole_shape(cut, block.shape))
        cut.blocks(whole).copy_(place(wire, start, cut, block.shape))
        out.append(whole)
        start += block.numel()
    return tuple(out)


def _scattered(comm: Comm, members: Sequence[tuple[Cut, Sequence[int], torch.Tensor]]) -> list[torch.Tensor]:
    """members: (cut, shape of a block, gradient of the whole)."""
    if not members:
        return []
    first, sizes = members[0][0], [prod(shape) for _, shape, _ in members]
    wire = members[0][2].new_empty((first.parts, sum(sizes)))
    for (cut, shape, grad), start in zip(members, accumulate(sizes, initial=0)):
        place(wire, start, cut, shape).copy_(cut.blocks(grad))
    row = wire.view(-1)
    del wire
    for axis in first.axes:
        row = comm.reduce_scatter(row, axis, 0)
    return [piece.view(shape) for piece, (_, shape, _) in zip(row.split(sizes), members, strict=True)]


def _whole_shape(cut: Cut, shape: Sequence[int]) -> tuple[int, ...]:
    out = list(shape)
    for dim, size in zip(cut.dims, cut.sizes, strict=True):
        out[dim] *= size
    return tuple(out)
