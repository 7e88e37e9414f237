"""The part of one device in a schedule: its sends and receives in order, each with the messages that it waits for.

Spans are half-open ranges of elements. Large messages travel in chunks, so that one is added while the next arrives,
and a chunk is passed on as soon as it is there::

    send s     may leave once receive ``after`` (the last of an earlier round that overlaps it) is put in its place
    receive i  is put in its place once the sends ``quiet`` (of its own and earlier rounds, from where it goes) are out;
               one that goes there directly is posted once receive ``clear`` is in place and the sends ``quiet`` (of
               earlier rounds) are out

Receives are awaited in the order (round, chunk, source). So whoever waits for a message of round r, chunk c waits for a
device that has everything of the rounds before, and no circle of waiting devices exists.

Several that add to one span keep the order of the devices, own values included: those from lower numbers first gather
in the buffer of the first (KEEP, GATHER), join one's own (CLOSE), and the others are added to that (ADD).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from .rounds import CollectiveSchedule, spans_of

__all__ = ["ADD", "CLOSE", "GATHER", "KEEP", "PUT", "DeviceSchedule", "ReceivedChunk", "SentChunk", "device_schedule"]

PUT, ADD, KEEP, GATHER, CLOSE = "put", "add", "keep", "gather", "close"
_MAX_CHUNKS = 64  # of one message


@dataclass(frozen=True, slots=True)
class SentChunk:
    """A chunk to send: elements [start, stop) to device ``peer``. tag: its number between two devices."""

    peer: int
    start: int
    stop: int
    tag: int
    round: int
    after: int = -1


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """A chunk to receive into elements [start, stop). action: what is done with it; freed: the receive after which its
    buffer is free again."""

    peer: int
    start: int
    stop: int
    tag: int
    round: int
    action: str
    #: the receive after which its buffer is free again
    freed: int = -1
    #: the sends that must be out before it is put in its place
    quiet: tuple[int, ...] = ()
    #: the receive that must be in place before it is posted, if it goes there directly
    clear: int = -1
    #: those of ``quiet`` that belong to earlier rounds
    early: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class DeviceSchedule:
    """The sends and receives of one device. starts[i]: the sends to issue once receive i − 1 is in place (0: at once).
    tags: how many numbers its messages take."""

    arrivals: tuple[ReceivedChunk, ...]
    departures: tuple[SentChunk, ...]
    starts: tuple[tuple[int, ...], ...]
    tags: int

    @property
    def arriving(self) -> int:
        """Elements that it receives."""
        return sum(arrival.size for arrival in self.arrivals)


def _chunks(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    width = max(chunk, -(-(stop - start) // _MAX_CHUNKS))
    return [(a, min(a + width, stop)) for a in range(start, stop, width)]


def _overlap(one: ReceivedChunk | SentChunk, other: ReceivedChunk | SentChunk) -> bool:
    return one.start < other.stop and other.start < one.stop


@lru_cache(maxsize=256)
def device_schedule(schedule: CollectiveSchedule, device: int, length: int, chunk: int) -> DeviceSchedule:
    """The part of ``device`` in a schedule on vectors of ``length`` elements, in chunks of at most ``chunk`` of them
    (more where a message would be more than 64 chunks)."""
    spans = spans_of(length, schedule.segments)
    apart = schedule.kind == "all_to_all"
    coming: list[tuple[int, int, ReceivedChunk]] = []
    leaving: list[tuple[int, SentChunk]] = []
    for number, sends in enumerate(schedule.rounds):
        for m in sends:
            if device not in (m.source, m.target):
                continue
            start, stop = spans[m.first][0], spans[m.last - 1][1]
            shift = spans[m.into][0] - start
            for index, (a, b) in enumerate(_chunks(start, stop, chunk)):
                tag = number * _MAX_CHUNKS + index
                if m.source == device:
                    leaving.append((index, SentChunk(m.target, a, b, tag, number)))
                else:
                    action = ADD if m.add else PUT
                    coming.append((index, number, ReceivedChunk(m.source, a + shift, b + shift, tag, number, action)))
    coming.sort(key=lambda entry: (entry[1], entry[0], entry[2].peer))
    arrivals = _with_ordered_actions([arrival for _, _, arrival in coming], device)
    departures = []
    for _, departure in sorted(leaving, key=lambda entry: (entry[1].round, entry[0])):
        earlier = [i for i, a in enumerate(arrivals) if a.round < departure.round and _overlap(a, departure)]
        departures.append(departure if apart else replace(departure, after=max(earlier, default=-1)))
    if not apart:
        arrivals = [_with_dependencies(i, arrivals, departures) for i in range(len(arrivals))]
    starts: list[list[int]] = [[] for _ in range(len(arrivals) + 1)]
    for index, departure in enumerate(departures):
        starts[departure.after + 1].append(index)
    tags = len(schedule.rounds) * _MAX_CHUNKS
    return DeviceSchedule(tuple(arrivals), tuple(departures), tuple(map(tuple, starts)), tags)


def _with_ordered_actions(arrivals: list[ReceivedChunk], device: int) -> list[ReceivedChunk]:
    """With the actions that keep the order of sums."""
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, arrival in enumerate(arrivals):
        if arrival.action == ADD and arrival.peer < device:
            groups[arrival.round, arrival.start, arrival.stop].append(index)
    done = [replace(arrival, freed=index) for index, arrival in enumerate(arrivals)]
    for lower in groups.values():
        if len(lower) > 1:
            done[lower[0]] = replace(done[lower[0]], action=KEEP, freed=lower[-1])
            for index in lower[1:-1]:
                done[index] = replace(done[index], action=GATHER)
            done[lower[-1]] = replace(done[lower[-1]], action=CLOSE)
    return done


def _with_dependencies(index: int, arrivals: list[ReceivedChunk], departures: list[SentChunk]) -> ReceivedChunk:
    """With what it has to wait for."""
    arrival = arrivals[index]
    out = [s for s, d in enumerate(departures) if d.round <= arrival.round and _overlap(d, arrival)]
    early = tuple(s for s in out if departures[s].round < arrival.round)
    assert arrival.action != PUT or len(early) == len(out), "a span is sent and replaced in one round"
    clear = max((i for i in range(index) if _overlap(arrivals[i], arrival)), default=-1)
    return replace(arrival, quiet=tuple(out), clear=clear, early=early)
