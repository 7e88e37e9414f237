"""Rows sent to the devices of their experts, and back: expert parallelism by all_to_all (GShard, arXiv:2006.16668).

Every device has rows in the order of their experts, 0 … E-1, of which block i lies on device i. How many rows each
expert gets is exchanged first, so no row is dropped or padded:

    there    counts [E] → [p, E/p], what every device sends to each expert here; rows in pieces of these sums;
             what has arrived is in the order (device, expert) and is put in the order (expert, device)
    back     the same steps the other way round

Several axes that cut the experts are taken one after the other, major first: after each, the rows are in the order of
the experts of the block that is left. A gradient goes the way of its row, backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .context import Comm, current

__all__ = ["brought_back", "dispatch"]


@dataclass(frozen=True)
class Move:
    """One axis of the way. sent, received: rows to and from each of its devices; order: where the k-th row of those in
    the order of experts is among those that have arrived; inverse: of ``order``."""

    comm: Comm
    axis: int
    sent: list[int]
    received: list[int]
    order: Tensor
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """[sum of sent, ...] → [sum of received, ...]."""
        return self.comm.all_to_all_uneven(rows, self.axis, self.sent, self.received).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """[sum of received, ...] → [sum of sent, ...]."""
        rows = rows.index_select(0, self.inverse)
        return self.comm.all_to_all_uneven(rows, self.axis, self.received, self.sent)


class _Moved(torch.autograd.Function):
    """Rows the one way, their gradients the other; ``way``: "there" or "back"."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move, way: str) -> Tensor:
        ctx.home = move.there if way == "back" else move.back
        return (move.there if way == "there" else move.back)(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.home(grads[0]), None, None


def dispatch(
    rows: Tensor, sizes: Tensor, counts: list[int], axes: Sequence[int]
) -> tuple[Tensor, list[int], list[Move]]:
    """``rows`` [sum of sizes, H] in the order of experts, of which ``sizes`` [E] says how many each gets (``counts``:
    the same as numbers) → the rows of all devices for the experts here, in the order of these and, for each, of the
    devices; how many each has; and the moves made."""
    moves = []
    for axis in axes:
        move, sizes, counts = _move(current().comm, axis, sizes, counts)
        rows = _Moved.apply(rows, move, "there")
        moves.append(move)
    return rows, counts, moves


def brought_back(rows: Tensor, moves: Sequence[Move]) -> Tensor:
    """The rows in the order in which ``dispatch`` got them, on the devices that they came from."""
    for move in reversed(moves):
        rows = _Moved.apply(rows, move, "back")
    return rows


def _move(comm: Comm, axis: int, sizes: Tensor, counts: list[int]) -> tuple[Move, Tensor, list[int]]:
    """One axis' move of the rows of experts with these counts, and the counts [E / p] of those here."""
    size = comm.size(axis)
    block = len(counts) // size
    arriving = comm.all_to_all(sizes, axis, 0, 0)  # [p · E / p]: of each device for each expert here
    came = [counts_of.tolist() for counts_of in arriving.cpu().split(block)]
    sent = [sum(counts[d * block : (d + 1) * block]) for d in range(size)]
    received = [sum(each) for each in came]
    expert = torch.arange(block, device=sizes.device).repeat(size)
    order = torch.argsort(expert.repeat_interleave(arriving, output_size=sum(received)), stable=True)
    move = Move(comm, axis, sent, received, order, torch.argsort(order))
    return move, arriving.view(size, block).sum(0), [sum(each) for each in zip(*came, strict=True)]
