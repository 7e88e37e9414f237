"""The state of a running session as a checkpoint that is nowhere on disk: another session, under another plan, takes it
up over the wire.

Every rank knows of all ranks which blocks they hold and which they ask for. A part of a block that the rank holds
itself is copied; each other part travels once, from one of the ranks that hold it (replicas take turns), so the bytes
moved are those that differ between the plans. Parts of one pair of ranks go together, some 64 MiB a rank at a time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..execution.session import Session
from .storage import Box, StoredTensor
from .training_state import box_of, checkpoint_tensors, training_facts

__all__ = ["LiveState"]

ROUND_BYTES = 2**26  # of each rank, on the way at once


@dataclass(frozen=True)
class _Move:
    """A part of a tensor that one rank gives to another's request, or to its own; box: in the whole tensor."""

    source: int
    target: int
    name: str
    block: Box
    request: int
    box: Box
    nbytes: int


class LiveState:
    """Read like a ``storage.Checkpoint``: what ``fill`` and ``whole`` promise is there after ``finish``. Every method
    is collective but ``fill`` and ``whole``, which each rank calls for what it needs.

    moved_bytes: what this rank has sent so far.
    """

    path = "the running state"
    ranks = 0  # states of generators stay where they are

    def __init__(self, session: Session) -> None:
        self.step, self.rank, self.moved_bytes = session.step, session.rank, 0
        self._device = session.device if session.device.type == "cuda" else torch.device("cpu")
        values = dict(checkpoint_tensors(session))
        self._held = {name: (box_of(value), _local(value)) for name, value in values.items()}
        mine = [(name, tuple(value.shape), value.dtype, self._held[name][0]) for name, value in values.items()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (mine, training_facts(session)))
        self.facts = {**next((facts for _, facts in everyone if facts["groups"]), everyone[0][1]), "extra": {}}
        self.tensors: dict[str, StoredTensor] = {}
        self._holders: dict[str, dict[Box, list[int]]] = defaultdict(dict)
        for rank, (held, _) in enumerate(everyone):
            for name, shape, dtype, box in held:
                self.tensors.setdefault(name, StoredTensor(dtype, shape, ()))
                self._holders[name].setdefault(box, []).append(rank)
        self._asked: list[tuple[str, Box, torch.Tensor]] = []

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Ask for the part ``box`` of a tensor, for ``target``, of that shape."""
        self._asked.append((name, box, target))

    def whole(self, name: str) -> torch.Tensor:
        """Ask for a whole tensor, on the CPU."""
        stored = self.tensors[name]
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, value, tuple((0, size) for size in stored.shape))
        return value

    def finish(self) -> None:
        """Move what was asked for, everywhere."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [(name, box) for name, box, _ in self._asked])
        waiting, size = list[_Move](), 0
        for move in self._moves(everyone):
            if move.source == move.target:
                if move.source == self.rank:
                    self._take(move, self._piece(move))
                continue
            waiting.append(move)
            size += move.nbytes
            if size >= ROUND_BYTES * len(everyone):
                self._exchange(waiting)
                waiting, size = [], 0
        self._exchange(waiting)
        self._asked.clear()

    def _moves(self, asked: list[list[tuple[str, Box]]]) -> Iterator[_Move]:
        """All moves of all ranks, the same on every rank."""
        for rank, requests in enumerate(asked):
            for number, (name, box) in enumerate(requests):
                itemsize = self.tensors[name].dtype.itemsize
                for block, holders in self._holders[name].items():
                    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, block, strict=True))
                    if any(start >= stop for start, stop in common):
                        continue
                    turn = (rank + zlib.crc32(name.encode())) % len(holders)
                    source = rank if rank in holders else holders[turn]
                    nbytes = itemsize * prod(stop - start for start, stop in common)
                    yield _Move(source, rank, name, block, number, common, nbytes)

    def _piece(self, move: _Move) -> torch.Tensor:
        block, values = self._held[move.name]
        return values[_inside(move.box, block)]

    def _take(self, move: _Move, values: torch.Tensor) -> None:
        _, box, target = self._asked[move.request]
        target[_inside(move.box, box)] = values.to(target.device, target.dtype)

    def _exchange(self, moves: list[_Move]) -> None:
        """Send and receive, one message for each pair of ranks."""
        sent, received = defaultdict[int, list[_Move]](list), defaultdict[int, list[_Move]](list)
        for move in moves:
            if move.source == self.rank:
                sent[move.target].append(move)
            if move.target == self.rank:
                received[move.source].append(move)
        packed = {
            target: torch.cat([_bytes(self._piece(move)).to(self._device) for move in mine])
            for target, mine in sent.items()
        }
        buffers = {
            source: torch.empty(sum(move.nbytes for move in mine), dtype=torch.uint8, device=self._device)
            for source, mine in received.items()
        }
        operations = [dist.P2POp(dist.isend, data, target) for target, data in sorted(packed.items())]
        operations += [dist.P2POp(dist.irecv, data, source) for source, data in sorted(buffers.items())]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.moved_bytes += sum(data.numel() for data in packed.values())
        for source, mine in received.items():
            start = 0
            for move in mine:
                shape = [stop - begin for begin, stop in move.box]
                data = buffers[source][start : start + move.nbytes].clone()  # where a view of its dtype may begin
                self._take(move, data.view(self.tensors[move.name].dtype).view(shape))
                start += move.nbytes


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """The place of a box in a block that holds it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)
