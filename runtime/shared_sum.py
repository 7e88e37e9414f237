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
    """The sum, by the communication thread, of tensors of ``length`` elements over the ranks of a group that are all
    near. Made on all of them alike, and started in the same order. ``buffer`` [length]: the row of this rank; what is
    summed there need not be copied."""

    def __init__(self, near: Near, length: int, dtype: torch.dtype, submit: Submit = submit) -> None:
        assert near.is_all, "a shared sum is of ranks that share memory"
        self.near, self._submit = near, submit
        mine, self._others = near.share(length * dtype.itemsize)
        self.buffer = mine.view(dtype)
        self._there = near.reserve(2)
        self._done = self._there + 1
        part = -(-length // (near.size * _ALIGNED)) * _ALIGNED
        self._part = slice(min(near.rank * part, length), min((near.rank + 1) * part, length))

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x`` in place."""
        if x.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(x)
        for peer in self.near.peers:
            self.near.tell(peer, self._there)
        return self._submit(lambda: self._finish(x))

    @torch.no_grad()
    def _finish(self, x: torch.Tensor) -> None:
        for peer in self.near.peers:
            self.near.hear(peer, self._there)
        theirs = {peer: torch.frombuffer(row, dtype=self.buffer.dtype) for peer, row in self._others.items()}
        rows = theirs | {self.near.rank: self.buffer}
        first, *others = [rows[rank][self._part] for rank in sorted(rows)]
        for other in others:
            first.add_(other)
        for other in others:
            other.copy_(first)
        for peer in self.near.peers:
            self.near.tell(peer, self._done)
        for peer in self.near.peers:
            self.near.hear(peer, self._done)
        if x.data_ptr() != self.buffer.data_ptr():
            x.copy_(self.buffer)
