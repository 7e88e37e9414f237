"""Schedules of messages, run on plain numbers in one process and counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.runtime.collectives.rounds import CollectiveSchedule, spans_of


@dataclass
class Counts:
    """Rounds, elements over the busiest link direction, messages (posted or taken), most taken in a round, and all
    messages."""

    rounds: int = 0
    sent: int = 0
    messages: int = 0
    incast: int = 0
    total: int = 0


def counted(
    schedule: CollectiveSchedule, length: int, which: Callable[[int, int], bool] = lambda a, b: True, per: int = 1
) -> Counts:
    """What the messages between devices that ``which`` holds of count; ``per``: so many devices share a link."""
    counts, spans = Counts(), spans_of(length, schedule.segments)
    for sends in schedule.rounds:
        sends = tuple(m for m in sends if which(m.source, m.target))
        out, into = defaultdict(int), defaultdict(int)
        posts, takes = defaultdict(int), defaultdict(int)
        for m in sends:
            size = spans[m.last - 1][1] - spans[m.first][0]
            out[m.source // per] += size
            into[m.target // per] += size
            posts[m.source] += 1
            takes[m.target] += 1
        if sends:
            counts.rounds += 1
            counts.sent += max(*out.values(), *into.values())
            counts.messages += max(*posts.values(), *takes.values())
            counts.incast = max(counts.incast, *takes.values())
            counts.total += len(sends)
    return counts


def played(schedule: CollectiveSchedule, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The vectors of all devices after the rounds."""
    spans = spans_of(len(inputs[0]), schedule.segments)
    held = [list(x) for x in inputs]
    source = [list(x) for x in inputs] if schedule.kind == "all_to_all" else held
    for sends in schedule.rounds:
        assert sends, "a round without a message"
        assert all(m.source != m.target for m in sends), "a message to oneself"
        payloads = [source[m.source][spans[m.first][0] : spans[m.last - 1][1]] for m in sends]
        for m, payload in zip(sends, payloads):
            a = spans[m.into][0]
            here = held[m.target][a : a + len(payload)]
            held[m.target][a : a + len(payload)] = [x + y for x, y in zip(here, payload)] if m.add else payload
    return held
