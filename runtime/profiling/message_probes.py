"""Measurements of messages between two stages, sent as the runtime sends them.

A transfer leaves a rank that computes on. In some schedules it meets one that waits: a relay measures how long it is on
its way then. In others both ends compute, and a message costs what it takes from them: its bytes are moved by the
processors that compute where no other is free, and locks and wakeups keep both from working. Two messages that cross
measure that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any, Protocol

import torch

from ...compiler.plan.cross_mesh import Tile
from ..transport.cross_mesh import Port
from ..transport.shared_memory import SharedMemoryMessages

__all__ = ["PACE_S", "SLOW_S", "RankPair", "sample_count", "time_call", "time_messages"]


_MAX_PACES = 8  # beside messages that cross
_ALONE_SAMPLES, _CROSSING_SAMPLES = 2, 4
_TAG = 1 << 29  # beyond the tags of any plan's transfers


class _Ranks(Protocol):
    device: torch.device
    pace: Callable[[], object]

    def agree(self, values: Sequence[float]) -> Sequence[float]: ...

    def mean(self, value: float | None) -> float: ...


class RankPair:
    """Two ranks that pass messages through the runtime's own ports, a group for each direction."""

    def __init__(
        self, ranks: tuple[int, ...], groups: Sequence[Any], rank: int, nbytes: int, device: torch.device,
        shared_memory: SharedMemoryMessages | None,
    ) -> None:  # fmt: skip
        self.x = torch.ones(max(nbytes // 4, 1), device=device)
        box = ((0, self.x.numel()),)
        first, second = ranks
        there, back = (
            Port.make(
                [Tile(source, target, box, box)], rank, tag, (self.x.numel(),), self.x.dtype,
                device=device, group=group, shared_memory=shared_memory,
            )
            for source, target, tag, group in ((first, second, _TAG, groups[0]), (second, first, _TAG + 1, groups[1]))
        )  # fmt: skip
        self.starts = rank == ranks[0]
        self.out, self.into = (there, back) if self.starts else (back, there)

    def open(self) -> None:
        """Post the first receive: as in training, each is posted while there is something else to do."""
        self.incoming = self.into.receive(0)

    def close(self) -> None:
        """Send what the other end still has a receive for. Both ends have to."""
        sent = self.out.send(self.x, 0)
        self.incoming.wait()
        _finish(sent)

    def turn(self, beside: Callable[[], object], between: Callable[[], object]) -> float:
        """One turn of a token, with compute between a message's arrival and the next one's departure, and as much
        beside its way. Returns the seconds that posting a receive and starting a message took."""
        posted = 0.0
        if not self.starts:
            posted += self._arrived()
            between()
        start = perf_counter()
        sent = self.out.send(self.x, 0)
        posted += perf_counter() - start
        beside()
        if self.starts:
            posted += self._arrived()
            between()
        _finish(sent)
        return posted

    def exchange(self, beside: Callable[[], object]) -> None:
        """A message each way at once, both ends computing until the two have arrived."""
        sent = self.out.send(self.x, 0)
        beside()
        self._arrived()
        _finish(sent)

    def _arrived(self) -> float:
        self.incoming.wait()
        start = perf_counter()
        self.incoming = self.into.receive(0)
        return perf_counter() - start


def _finish(sent: list[tuple[Any, torch.Tensor]]) -> None:
    for work, _ in sent:
        work.wait()


def time_messages(ranks: _Ranks, pair: RankPair | None) -> tuple[list[float], int]:
    """The mean seconds of a message from turns of a relay, half a turn without its own compute; and, not among these,
    for how long it keeps its ends from computing: while it is started, or, if that is more, while two cross. Then the
    samples behind them. Collective; pair: None on ranks that only agree."""
    own: list[float] = []
    posts: list[float] = []

    def timed() -> float:
        if pair is None:
            ranks.pace()
            return 0.0
        start = perf_counter()
        posts.append(pair.turn(ranks.pace, lambda: own.append(time_call(ranks.pace, ranks.device))))
        return perf_counter() - start

    if pair is not None:
        pair.open()
    connecting = timed()
    own.clear()
    posts.clear()
    first = timed()
    connecting, once = ranks.agree([connecting, first])
    count = sample_count(connecting, once, 4 * PACE_S)
    turns = [(first, 0)]
    if count > 1:
        turns = sorted((timed(), k) for k in range(1, count + 1))[:-1]
    away = [k for _, k in turns]
    whole = None if pair is None else sum(seconds / 2 - own[k] for seconds, k in turns) / len(turns)
    post = ranks.mean(None if pair is None else sum(posts[k] for k in away) / len(away))
    way = ranks.mean(whole)
    crossed = _time_crossings(ranks, pair, way) if count > 1 else 0.0
    if pair is not None:
        pair.close()
    return [max(way - post, 1e-7), max(post, crossed)], count


def _time_crossings(ranks: _Ranks, pair: RankPair | None, way_s: float) -> float:
    """The mean seconds by which two messages that cross lengthen the compute beside them; 0 where they are so long on
    their way that it would have to be very long."""
    (once,) = ranks.agree([time_call(ranks.pace, ranks.device)])
    paces = ceil(2 * way_s / max(once, 1e-6))
    if paces > _MAX_PACES:
        return 0.0

    def compute() -> None:
        for _ in range(paces):
            ranks.pace()

    def timed(call: Callable[[], None]) -> float:
        ranks.agree([0.0])  # start together
        return time_call(call, ranks.device)

    crossing = compute if pair is None else partial(pair.exchange, compute)
    alone = min(timed(compute) for _ in range(_ALONE_SAMPLES))
    longer = sorted(timed(crossing) - alone for _ in range(_CROSSING_SAMPLES))[:-1]
    return ranks.mean(None if pair is None else sum(longer) / len(longer))


# ---- How often what follows compute is measured, and how one call is timed


PACE_S = 0.008  # about what a layer of a small model computes between two collectives
SLOW_S = 0.2  # a collective beyond which one sample has to do
_SAMPLES = 12


def sample_count(connecting: float, once: float, usual: float) -> int:
    """The number of samples of a call, by the seconds of its first two runs: one, if both are beyond ``SLOW_S``. One
    alone may have been disturbed."""
    if min(connecting, once) > SLOW_S:
        return 1
    return max(4, min(_SAMPLES, int(_SAMPLES * usual / max(once, 1e-6))))


def time_call(call: Callable[[], object] | None, device: torch.device) -> float:
    """The seconds that the call takes until its last message is here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    if call is not None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return perf_counter() - start
