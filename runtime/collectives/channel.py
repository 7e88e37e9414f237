"""A process group as the algorithms use it: point-to-point messages under tags of their own, with errors that name the
peer.

Sums that run on the communication thread need a group that nobody else communicates over:
``Channel(torch.distributed.new_group(ranks, backend="gloo"))``. Messages need a receive whose buffer is at least as
large, or Gloo ends the process; their sizes follow from the schedule, so all ranks have to make the same sums for the
same lengths and dtypes in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerError, lost_peer

__all__ = ["Channel"]


_FIRST_TAG = 1 << 16  # smaller ones are for calls that leave nothing behind


class Channel:
    """One rank's end of a group: ``rank`` and ``size`` are those within the group. Raises ValueError for a group
    without tagged messages."""

    def __init__(self, group: Any = None) -> None:
        group = dist.group.WORLD if group is None else group
        backend = dist.get_backend(group)
        if "gloo" not in backend:
            raise ValueError(
                f"algorithms of one's own need tagged messages, which Gloo has, but got a group of {backend}; make one "
                'by torch.distributed.new_group(ranks, backend="gloo")'
            )
        self.group: Any = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.failure: PeerError | None = None
        self._next = _FIRST_TAG

    def reserve(self, tags: int) -> int:
        """The first of so many tags that nobody else uses. Alike on all ranks if they ask in the same order."""
        first, self._next = self._next, self._next + tags
        return first

    def send(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        """Start sending ``x``, which must stay as it is until the work has been waited for."""
        try:
            return self.group.send([x], peer, tag)
        except RuntimeError as error:
            raise self._failed(peer, "a message to it", error) from error

    def receive(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        """Start receiving into ``x``."""
        try:
            return self.group.recv([x], peer, tag)
        except RuntimeError as error:
            raise self._failed(peer, "a message from it", error) from error

    def await_peer(self, work: Any, peer: int, what: str) -> None:
        """Wait for a message; raises PeerError for one that does not come or go."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(peer, what, error) from error

    def _failed(self, peer: int, what: str, error: RuntimeError) -> PeerError:
        """The first failure stands: what fails after it does so because of it."""
        if self.failure is None:
            self.failure = lost_peer(what, [dist.get_global_rank(self.group, peer)], error)
        return self.failure
