"""Sums over ranks of one machine in memory that they share.

Every rank has a row [n] in it. It tells the others when its numbers are there; once all have, each rank adds up its
part of all rows, in the order of ranks, and writes the sum into every row. That moves some 2.5 n numbers with two
ranks, no more than n (1 + 3/p) of them by one rank of p, where a ring over a loopback copies most of them eight times.
"""

from __future__ import annotations

import torch

from .collectives.protocol import Pending, Submit
from .collectives.worker import submit
from .near import Near

__all__ = ["SharedSum"]

_ALIGNED = 64  # elements: parts begin at cache lines


class SharedSum:
    """The sum, by the communication thread, of flat tensors over the ranks of a group that are all near. Made on all of
    them alike, and started in the same order. ``buffer`` [length]: the row of this rank. What is summed there need not
    be copied; other tensors, of any length, go through it piece by piece."""

    def __init__(self, near: Near, length: int, dtype: torch.dtype, submit: Submit = submit) -> None:
        assert near.is_all, "a shared sum is of ranks that share memory"
        self.near, self._submit = near, submit
        mine, self._others = near.share(length * dtype.itemsize)
        self.buffer = mine.view(dtype)
        self._there = near.reserve(2)
        self._done = self._there + 1

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x``, contiguous, in place."""
        flat = x.detach().view(-1)
        if flat.data_ptr() != self.buffer.data_ptr():
            return self._submit(lambda: self._pass(flat))
        self._tell(self._there)
        return self._submit(lambda: self._sum(len(flat)))

    def _pass(self, x: torch.Tensor) -> None:
        for piece in x.split(len(self.buffer)):
            here = self.buffer[: len(piece)]
            here.copy_(piece)
            self._tell(self._there)
            self._sum(len(piece))
            piece.copy_(here)

    def _sum(self, length: int) -> None:
        """The sum of the first elements of all rows, once they are there, in all rows."""
        self._hear(self._there)
        rows = {rank: torch.frombuffer(row, dtype=self.buffer.dtype) for rank, row in self._others.items()}
        rows[self.near.rank] = self.buffer
        part = -(-length // (self.near.size * _ALIGNED)) * _ALIGNED
        mine = slice(min(self.near.rank * part, length), min((self.near.rank + 1) * part, length))
        total, *others = [rows[rank][mine] for rank in sorted(rows)]
        for other in others:
            total.add_(other)
        for other in others:
            other.copy_(total)
        self._tell(self._done)
        self._hear(self._done)

    def _tell(self, kind: int) -> None:
        for peer in self.near.peers:
            self.near.tell(peer, kind)

    def _hear(self, kind: int) -> None:
        for peer in self.near.peers:
            self.near.hear(peer, kind)
