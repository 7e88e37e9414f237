"""Tagged messages between ranks that share memory.

The sender copies a message into pages of its own that the receiver has mapped, and tells so; the receiver copies it out
when it needs it, and tells that the pages are free. Neither needs the other one's processor meanwhile. Where ``_ROOMS``
messages of a size are with a peer already, the next one is the backend's: rooms do not grow with what is in flight.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .collectives.channel import PeerError
from .near import Near, own_pages

__all__ = ["Arrival", "NearMessages"]

_ROOMS = 4
_BY_THE_BACKEND = -1


class NearMessages:
    """This rank's messages to and from its peers. Made on all ranks of the group of ``near`` alike."""

    def __init__(self, near: Near) -> None:
        self.near, self.peers = near, near.peers
        self._here = near.reserve(3)
        self._free, self._mapped = self._here + 1, self._here + 2
        self._mine: list[torch.Tensor] = []
        self._theirs: dict[tuple[int, int], mmap.mmap] = {}
        self._empty: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._made: Counter[tuple[int, int]] = Counter()

    def send(self, x: torch.Tensor, peer: int, tag: int) -> bool:
        """Send a contiguous tensor, which may change at once. False: it is to be sent by the backend, as the peer
        expects now."""
        room = self._room(peer, x.nbytes) if x.numel() else _BY_THE_BACKEND
        if room >= 0:
            self._mine[room].copy_(x.view(-1).view(torch.uint8))
        self.near.tell(peer, self._here, tag, room)
        return room >= 0

    def _room(self, peer: int, nbytes: int) -> int:
        size, near = (peer, nbytes), self.near
        empty = self._empty[size]
        while not empty and near.heard(peer, self._free, nbytes):
            empty.append(near.hear(peer, self._free, nbytes))
        if empty:
            return empty.pop()
        if self._made[size] == _ROOMS:
            return _BY_THE_BACKEND
        self._made[size] += 1
        bytes_, pages = own_pages(nbytes)
        self._mine.append(bytes_)
        near.tell(peer, self._mapped, len(self._mine) - 1, nbytes, pages)
        os.close(pages)
        return len(self._mine) - 1

    def _take(self, x: torch.Tensor, peer: int, tag: int) -> bool:
        room, near = self.near.hear(peer, self._here, tag), self.near
        if room == _BY_THE_BACKEND:
            return False
        if (peer, room) not in self._theirs:
            self._theirs[peer, room] = near.pages_of(peer, self._mapped, room)
        x.view(-1).view(torch.uint8).copy_(torch.frombuffer(self._theirs[peer, room], dtype=torch.uint8))
        with suppress(PeerError):  # who sends no more may have left
            near.tell(peer, self._free, x.nbytes, room)
        return True


@dataclass
class Arrival:
    """A message that will be in ``out``, contiguous, once it has been waited for. group: where it comes by the
    backend."""

    messages: NearMessages
    out: torch.Tensor
    peer: int
    tag: int
    group: Any

    def wait(self) -> None:
        """Block until it is here. Raises PeerError."""
        if not self.messages._take(self.out, self.peer, self.tag):
            self.group.recv([self.out], self.peer, self.tag).wait()
