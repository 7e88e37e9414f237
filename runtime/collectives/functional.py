"""Blocking collectives by a named algorithm, for scripts and the profiler. Collective over the channel's ranks.

Lengths are those of flat vectors: all ranks pass the same (or, for parts, the same each), in the same dtype. Receives
are posted when a call begins; those who sum the same lengths again and again take a ``DenseSum``, whose receives stand.
"""

from __future__ import annotations

import torch

from .channel import Channel
from .engine import CollectiveRun
from .rounds import CollectiveSchedule, SegmentMessage, schedule_of

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "receive", "reduce", "reduce_scatter", "scatter",
    "send",
]  # fmt: skip


def all_reduce(
    x: torch.Tensor, channel: Channel, algorithm: str = "ring", op: str = "sum", *, members: int = 0, between: str = ""
) -> torch.Tensor:
    """``x`` of any shape, in place: the sum (or "max") over the ranks. members, between: see ``schedule_of``."""
    schedule = schedule_of("all_reduce", algorithm, channel.size, members=members, between=between)
    return _in_place(x, channel, schedule, op)


def all_gather(
    x: torch.Tensor, channel: Channel, algorithm: str = "ring", *, members: int = 0, between: str = ""
) -> torch.Tensor:
    """[ranks, *shape of x]: everyone's ``x``."""
    schedule = schedule_of("all_gather", algorithm, channel.size, members=members, between=between)
    out = x.new_empty(channel.size, *x.shape)
    out[schedule.place[channel.rank]] = x
    _run(out, channel, schedule)
    return _reordered(out, schedule.place)


def reduce_scatter(
    x: torch.Tensor, channel: Channel, algorithm: str = "ring", op: str = "sum", *, members: int = 0, between: str = ""
) -> torch.Tensor:
    """This rank's row of the sum of everyone's ``x`` [ranks, ...]."""
    schedule = schedule_of("reduce_scatter", algorithm, channel.size, members=members, between=between)
    _check_rows(x, channel)
    work = torch.empty_like(x, memory_format=torch.contiguous_format)
    work[list(schedule.place)] = x
    _run(work, channel, schedule, op)
    return work[schedule.place[channel.rank]].clone()


def all_to_all(x: torch.Tensor, channel: Channel, algorithm: str = "all_to_all") -> torch.Tensor:
    """Row i of ``x`` [ranks, ...] to rank i; row i of the result is from rank i."""
    _check_rows(x, channel)
    x = x.contiguous()
    out = x.clone()
    schedule = schedule_of("all_to_all", algorithm, channel.size)
    CollectiveRun(channel, schedule, x.numel(), x.dtype).run(x.view(-1), out.view(-1))
    return out


def broadcast(
    x: torch.Tensor, channel: Channel, algorithm: str = "tree", root: int = 0, *, members: int = 0
) -> torch.Tensor:
    """``x`` of the root, in place on all."""
    return _in_place(x, channel, schedule_of("broadcast", algorithm, channel.size, root=root, members=members), "sum")


def reduce(
    x: torch.Tensor, channel: Channel, algorithm: str = "tree", op: str = "sum", root: int = 0, *, members: int = 0
) -> torch.Tensor | None:
    """The sum (or "max") over the ranks, on the root; None on the others. ``x`` stays as it is."""
    schedule = schedule_of("reduce", algorithm, channel.size, root=root, members=members)
    out = _in_place(x.clone(memory_format=torch.contiguous_format), channel, schedule, op)
    return out if channel.rank == root else None


def scatter(
    x: torch.Tensor | None, out: torch.Tensor, channel: Channel, algorithm: str = "tree", root: int = 0
) -> torch.Tensor:
    """Row i of the root's ``x`` [ranks, *shape of out] to rank i, into ``out``; ``x`` is None on the others."""
    schedule = schedule_of("scatter", algorithm, channel.size, root=root)
    work = out.new_empty(channel.size, *out.shape)
    if channel.rank == root:
        if x is None or x.shape != work.shape:
            got = None if x is None else list(x.shape)
            raise ValueError(f"the root scatters [ranks, *shape of out] = {list(work.shape)}, but got {got}; pass it")
        work[list(schedule.place)] = x
    _run(work, channel, schedule)
    return out.copy_(work[schedule.place[channel.rank]])


def gather(x: torch.Tensor, channel: Channel, algorithm: str = "tree", root: int = 0) -> torch.Tensor | None:
    """[ranks, *shape of x] on the root, None on the others."""
    schedule = schedule_of("gather", algorithm, channel.size, root=root)
    work = x.new_empty(channel.size, *x.shape)
    work[schedule.place[channel.rank]] = x
    _run(work, channel, schedule)
    return _reordered(work, schedule.place) if channel.rank == root else None


def send(x: torch.Tensor, channel: Channel, to: int) -> None:
    """``x`` to rank ``to``, which calls ``receive`` for as many elements."""
    _run(x.contiguous(), channel, _one_message(channel.size, channel.rank, to))


def receive(x: torch.Tensor, channel: Channel, source: int) -> torch.Tensor:
    """Receive into ``x`` the tensor that rank ``source`` sends."""
    return _in_place(x, channel, _one_message(channel.size, source, channel.rank), "sum")


def _one_message(size: int, source: int, target: int) -> CollectiveSchedule:
    if source == target or not (0 <= source < size and 0 <= target < size):
        raise ValueError(f"a message goes to another of {size} ranks, but got one from {source} to {target}")
    return CollectiveSchedule(
        "send", "direct", size, 1, ((SegmentMessage(source, target, 0, 1, 0, False),),), tuple(range(size))
    )


def _check_rows(x: torch.Tensor, channel: Channel) -> None:
    if x.dim() == 0 or x.shape[0] != channel.size:
        raise ValueError(f"there is a row for each of {channel.size} ranks, but got {list(x.shape)}; reshape it")


def _reordered(x: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    """Rows by rank, from rows by segment."""
    return x if place == tuple(range(len(place))) else x[list(place)]


def _run(x: torch.Tensor, channel: Channel, schedule: CollectiveSchedule, op: str = "sum") -> None:
    CollectiveRun(channel, schedule, x.numel(), x.dtype, op).run(x.view(-1))


def _in_place(x: torch.Tensor, channel: Channel, schedule: CollectiveSchedule, op: str) -> torch.Tensor:
    work = x.contiguous()
    _run(work, channel, schedule, op)
    return x if work is x else x.copy_(work)
