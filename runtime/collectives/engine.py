"""One engine that runs any schedule on a channel.

A hop costs one way of the network if the receive is posted when the message leaves, else a round trip and more: the
sender waits until it hears of the receive. Therefore receives are posted ahead, and for small messages they *stand*:
those of the next calls are posted as soon as the buffer of this one is empty.

    standing   every receive has ``DEPTH`` buffers of its own, which calls use in turn
    otherwise  what is to be added lands in a few buffers in turn; what replaces goes to its place directly
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..errors import PeerError
from .channel import Channel
from .device_schedule import CLOSE, GATHER, KEEP, PUT, ReceivedChunk, device_schedule
from .rounds import CollectiveSchedule

__all__ = ["CHUNK_BYTES", "OPS", "STANDING_BYTES", "CollectiveRun"]

CHUNK_BYTES = 1 << 21
STANDING_BYTES = 4 << 20  # received in one call, up to which receives stand
DEPTH = 2
_MIN_POSTED = 4  # receives posted beyond the one that is awaited, at least

_WAITED_FOR = object()  # a send that has been waited for
OPS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum}


class CollectiveRun:
    """A schedule on vectors of ``length`` elements, made on all ranks of the channel alike.

    ``run`` may be called any number of times, by one thread at a time. standing: whether small messages' receives stay
    posted between the calls (then ``close`` when done). Raises ValueError for an unknown ``op``.
    """

    def __init__(
        self, channel: Channel, schedule: CollectiveSchedule, length: int, dtype: torch.dtype, op: str = "sum", *,
        standing: bool = False, chunk_bytes: int = CHUNK_BYTES,
    ) -> None:  # fmt: skip
        if op not in OPS:
            raise ValueError(f"ranks are combined by {' or '.join(OPS)}, but got {op!r}; use one of them")
        assert schedule.size == channel.size, (schedule.size, channel.size)
        self.channel, self.length, self.combine = channel, length, OPS[op]
        chunk = max(chunk_bytes // dtype.itemsize, 1)
        self.passage = device_schedule(schedule, channel.rank, length, chunk)
        arrivals = self.passage.arrivals
        self.standing = standing and 0 < self.passage.arriving * dtype.itemsize <= STANDING_BYTES
        self.tag = channel.reserve(self.passage.tags) if standing else 0
        self.calls = 0
        self._what = f"{schedule.kind} by {schedule.algorithm} over {schedule.size} ranks"
        if self.standing:
            flat = torch.empty(DEPTH, self.passage.arriving, dtype=dtype)
            self._rows: list[Sequence[torch.Tensor]] = [row.split([a.size for a in arrivals]) for row in flat]
            self._stand = [[self._post(a, buffer) for a, buffer in zip(arrivals, row)] for row in self._rows]
        else:
            self._lend(dtype)

    def _lend(self, dtype: torch.dtype) -> None:
        """Buffers in turn for what does not go to its place directly; receive i may be posted once ``_free[i]`` has
        been put in its place."""
        landing = [i for i, a in enumerate(self.passage.arrivals) if a.action != PUT]
        count = min(max(_MIN_POSTED, 2 * self.channel.size), len(landing))
        size = max((self.passage.arrivals[i].size for i in landing), default=0)
        pool = torch.empty(count, size, dtype=dtype)
        self._ahead = max(count, _MIN_POSTED)
        self._free = [-1] * len(self.passage.arrivals)
        self._buffers: list[torch.Tensor | None] = [None] * len(self.passage.arrivals)
        for turn, index in enumerate(landing):
            self._buffers[index] = pool[turn % count, : self.passage.arrivals[index].size]
            if turn >= count:
                self._free[index] = self.passage.arrivals[landing[turn - count]].freed

    # ---- a call

    def run(self, x: torch.Tensor, out: torch.Tensor | None = None) -> None:
        """Run the rounds on ``x`` [length], in place; for all_to_all from ``x`` into ``out``. Raises PeerError where a
        peer does not answer; ``x`` is anything then."""
        assert x.shape == (self.length,), (x.shape, self.length)  # closed: -1
        if self.channel.failure is not None:
            raise self.channel.failure
        target, turn = x if out is None else out, self.calls % DEPTH
        arrivals = self.passage.arrivals
        self._sends: list[Any] = [None] * len(self.passage.departures)
        self._posted, self._held = 0, -1
        self._landing: Sequence[Any] = self._rows[turn] if self.standing else self._buffers
        self._works = self._stand[turn] if self.standing else [None] * len(arrivals)
        self._ahead_of(0, target)  # before anything leaves, so that what comes finds its place
        self._leave(x, 0)
        for index, arrival in enumerate(arrivals):
            self._ahead_of(index, target)
            self.channel.await_peer(self._works[index], arrival.peer, f"{self._what}, round {arrival.round + 1}")
            for send in arrival.quiet:
                self._sent(send)
            self._put(index, target)
            if self.standing and arrival.freed == index:
                self._stand_again(index)
            self._leave(x, index + 1)
        for send in range(len(self.passage.departures)):
            self._sent(send)
        self.calls += 1

    def close(self) -> None:
        """Let go of the receives that stand, and of their buffers: Gloo forgets them. No calls may follow."""
        self._stand, self._rows, self.length = [], [], -1

    # ---- the parts

    def _post(self, arrival: ReceivedChunk, buffer: torch.Tensor) -> Any:
        return self.channel.receive(buffer, arrival.peer, self.tag + arrival.tag)

    def _stand_again(self, index: int) -> None:
        """Post the receive for a later call, and that of the buffer in which the sum was gathered until now. A peer
        that is gone by then has sent its part of this call: the later one fails."""
        arrivals = self.passage.arrivals
        with suppress(PeerError):  # which the channel keeps
            for number in (self._held, index) if arrivals[index].action == CLOSE else (index,):
                self._works[number] = self._post(arrivals[number], self._landing[number])

    def _ahead_of(self, index: int, target: torch.Tensor) -> None:
        """Post the receives up to a few beyond ``index``, as far as their places are free."""
        arrivals = self.passage.arrivals
        if self.standing or not arrivals:
            return
        while self._posted < min(index + 1 + self._ahead, len(arrivals)):
            number = self._posted
            arrival, buffer = arrivals[number], self._landing[number]
            if buffer is None:
                if arrival.clear >= index or not self._out(arrival.early, arrivals[index].round):
                    return
                buffer = target[arrival.start : arrival.stop]
            elif self._free[number] >= index:
                return
            self._works[number] = self._post(arrival, buffer)
            self._posted += 1

    def _out(self, sends: Sequence[int], current: int) -> bool:
        """True if these sends are done. It waits for those of rounds before the current one: their receivers have
        reached those rounds, or will without us."""
        departures = self.passage.departures
        if any(departures[send].round >= current or self._sends[send] is None for send in sends):
            return False
        for send in sends:
            self._sent(send)
        return True

    def _leave(self, x: torch.Tensor, index: int) -> None:
        for number in self.passage.starts[index]:
            departure = self.passage.departures[number]
            part = x[departure.start : departure.stop]
            self._sends[number] = self.channel.send(part, departure.peer, self.tag + departure.tag)

    def _sent(self, number: int) -> None:
        work, self._sends[number] = self._sends[number], _WAITED_FOR
        if work is not _WAITED_FOR:
            departure = self.passage.departures[number]
            self.channel.await_peer(work, departure.peer, f"{self._what}, round {departure.round + 1}")

    def _put(self, index: int, target: torch.Tensor) -> None:
        """Put the chunk that arrived in its place."""
        arrival, came = self.passage.arrivals[index], self._landing[index]
        if arrival.action == KEEP:
            self._held = index
            return
        if arrival.action in (GATHER, CLOSE):
            gathered = self._landing[self._held]
            self.combine(gathered, came, out=gathered)
            came = gathered
        if arrival.action == GATHER or came is None:  # it is there already
            return
        place = target[arrival.start : arrival.stop]
        if arrival.action == PUT:
            place.copy_(came)
        else:
            self.combine(place, came, out=place)
