"""A pipeline schedule on a clock, without a device: when every action starts and ends, and a picture of it.

An action starts when its stage is free and all its messages are there. A message starts when the action that makes it
has ended, its receiver expects it (the executor posts an action's receives when it comes to the action before) and the
message before it on this direction of the edge is through. With equal stages and free transfers this
gives (m + p − 1)(f + b) for 1F1B and GPipe; ``families`` lists the others.

Seconds are per *virtual stage* (one chunk on one stage), numbered as data flow; with one chunk per stage that is the
stage. An edge between two chunks of one stage is a message as any other, at the seconds given, by default none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Any

from ..errors import ScheduleError
from .families import PIPEDREAM, generate
from .schedule import Action, Edge, Schedule, chain, checked_edges

__all__ = [
    "Message", "Simulation", "grid", "legend", "longest_path", "message_times", "simulate", "simulate_steady_state",
]  # fmt: skip


_DIGITS = {"F": "0123456789", "B": "₀₁₂₃₄₅₆₇₈₉", "I": "⁰¹²³⁴⁵⁶⁷⁸⁹", "W": "₀₁₂₃₄₅₆₇₈₉"}
_STRETCH = (6, 8)  # microbatches per stage of the two pipelines whose difference is what the others add
_IDLE, _END, _ELSEWHERE = "·", "=", " "  # nothing to do, end-of-step work, busy with another chunk


@dataclass(frozen=True)
class Simulation:
    """The times of all actions. Idle time counts up to the last action of any stage, without the end-of-step work.

    ``timeline[s]`` is (start, end, action) in seconds; ``busy_s[s]`` the sum of the stage's actions; ``step_end_s[s]``
    when its end-of-step work is done; ``makespan_s`` the last of these.
    """

    makespan_s: float
    timeline: tuple[tuple[tuple[float, float, Action], ...], ...]
    busy_s: tuple[float, ...]
    step_end_s: tuple[float, ...]

    @property
    def pipeline_s(self) -> float:
        """Seconds until the last action of any stage ends."""
        return max((row[-1][1] for row in self.timeline if row), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all stages' seconds: (p − 1)/(m + p − 1) for equal stages."""
        total = self.pipeline_s * len(self.timeline)
        return 1.0 - sum(self.busy_s) / total if total else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers_s: Mapping[Edge, float] | None = None,
    end_of_step_s: Sequence[float] | None = None,
    backward_transfers_s: Mapping[Edge, float] | None = None,
    backward_weight_s: Sequence[float] | None = None,
) -> Simulation:
    """Run a sound ``schedule`` on a clock: an action starts when its stage is free and its messages are there.

    ``forward_s[q]`` and ``backward_s[q]`` are seconds per microbatch of virtual stage q; of the backward, I takes
    ``backward_s[q] - backward_weight_s[q]`` and W the rest, by default half each. ``transfers_s`` has every edge
    (src, dst) of the graph of virtual stages and the seconds of one message; None or empty means the chain, free of
    cost. The gradient of an edge takes ``backward_transfers_s[edge]``, by default the same. Transfers overlap compute;
    each direction of an edge carries one message at a time, in order, and none before the receiver has come to the
    action ahead of it. ``end_of_step_s[s]`` follows the last action of stage s. ScheduleError on a deadlock.
    """
    p, num = schedule.num_stages, schedule.num_virtual
    end_of_step = [0.0] * p if end_of_step_s is None else list(end_of_step_s)
    weight_s = [seconds / 2 for seconds in backward_s] if backward_weight_s is None else list(backward_weight_s)
    every = "stage" if schedule.chunks == 1 else "stage and chunk"
    for name, values in (("forward_s", forward_s), ("backward_s", backward_s), ("backward_weight_s", weight_s)):
        if len(values) != num:
            raise ValueError(f"{name} has one entry per {every}, but got {len(values)} for {num}")
    if len(end_of_step) != p:
        raise ValueError(f"end_of_step_s has one entry per stage, but got {len(end_of_step)} for {p} stages")
    forward_message = dict(transfers_s) if transfers_s else dict.fromkeys(chain(num), 0.0)
    edges = checked_edges(forward_message, num)
    backward_message = forward_message if backward_transfers_s is None else dict(backward_transfers_s)
    if missing := [edge for edge in edges if edge not in backward_message]:
        raise ValueError(f"backward_transfers_s has every edge of transfers_s, but got none for {missing}")

    input_s = [both - weight for both, weight in zip(backward_s, weight_s)]
    seconds = {"F": forward_s, "B": backward_s, "I": input_s, "W": weight_s}
    works = _works(schedule, seconds, forward_message, {edge: backward_message[edge] for edge in edges})
    starts, ends = _clock(schedule, works)
    step_end = tuple((row[-1] if row else 0.0) + end_of_step[s] for s, row in enumerate(ends))
    timeline = tuple(tuple(zip(*rows)) for rows in zip(starts, ends, schedule.actions))
    busy = tuple(
        sum([works[s][action.kind][action.chunk][0] for action in row]) for s, row in enumerate(schedule.actions)
    )
    return Simulation(max(step_end), timeline, busy, step_end)


@dataclass(slots=True)
class _Maker:
    """One kind of message that a virtual stage makes. ``ended[k]`` is when the action that makes number k ended."""

    ended: list[float | None]
    awaited: dict[int, list[int]]  # microbatch -> stages that wait for it


@dataclass(slots=True)
class _Channel:
    """One direction of an edge."""

    maker: _Maker
    seconds: float
    free_at: float = 0.0


_Work = tuple[float, _Maker, list[_Channel]]
"""Of one kind and chunk of a stage: (seconds, what it makes, what it receives)"""


def _works(
    schedule: Schedule,
    seconds: Mapping[str, Sequence[float]],
    forward_message: Mapping[Edge, float],
    backward_message: Mapping[Edge, float],
) -> list[dict[str, list[_Work]]]:
    """Per stage and kind, the work of each chunk. An action receives messages of its own microbatch."""
    num, m = schedule.num_virtual, schedule.num_microbatches
    forward, backward, nothing = ([_Maker([None] * m, {}) for _ in range(num)] for _ in range(3))
    ahead: list[list[_Channel]] = [[] for _ in range(num)]
    back: list[list[_Channel]] = [[] for _ in range(num)]
    for (src, dst), cost in forward_message.items():
        ahead[dst].append(_Channel(forward[src], cost))
    for (src, dst), cost in backward_message.items():
        back[src].append(_Channel(backward[dst], cost))
    works: list[dict[str, list[_Work]]] = [{kind: [] for kind in seconds} for _ in range(schedule.num_stages)]
    for q, (stage, _) in sorted(enumerate(schedule.places()), key=lambda item: item[1]):  # chunks in their order
        works[stage]["F"].append((seconds["F"][q], forward[q], ahead[q]))
        for kind in "BI":
            works[stage][kind].append((seconds[kind][q], backward[q], back[q]))
        works[stage]["W"].append((seconds["W"][q], nothing[q], []))
    return works


def _clock(
    schedule: Schedule, works: Sequence[Mapping[str, Sequence[_Work]]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Per stage, when its actions start and when they end. Works through each stage as far as its messages let it."""
    starts: list[list[float]] = [[] for _ in works]
    ends: list[list[float]] = [[] for _ in works]
    ready = deque(range(len(works)))
    while ready:
        stage = ready.popleft()
        work, row, begun, ended = works[stage], schedule.actions[stage], starts[stage], ends[stage]
        free_at = ended[-1] if ended else 0.0
        # The stage posts the receives of its next action when it comes to the one before it.
        expects_at = ended[-2] if len(ended) > 1 else 0.0
        for at in range(len(begun), len(row)):
            action = row[at]
            k = action.microbatch
            seconds, maker, channels = work[action.kind][action.chunk]
            for channel in channels:
                if channel.maker.ended[k] is None:
                    channel.maker.awaited.setdefault(k, []).append(stage)
                    break
            else:
                start = free_at
                for channel in channels:
                    arrived = max(channel.maker.ended[k] or 0.0, expects_at, channel.free_at) + channel.seconds
                    channel.free_at = arrived
                    if arrived > start:
                        start = arrived
                expects_at = free_at
                free_at = start + seconds
                begun.append(start)
                ended.append(free_at)
                maker.ended[k] = free_at
                if maker.awaited and k in maker.awaited:
                    ready.extend(maker.awaited.pop(k))
                continue
            break
    stuck = [str(row[len(done)]) for row, done in zip(schedule.actions, ends) if len(done) < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: forever waiting in {', '.join(stuck)}")
    return starts, ends


class _Moment(float):
    """Seconds that remember the latest way to them: ``before``, and what followed on that. A duration is called by
    ``what``, and follows on nothing."""

    __slots__ = ("before", "what")
    before: float | None
    what: Any

    @classmethod
    def lasting(cls, seconds: float, what: Any) -> _Moment:
        """A duration."""
        made = cls(seconds)
        made.before, made.what = None, what
        return made

    def __add__(self, duration: float) -> _Moment:
        made = _Moment(float.__add__(self, duration))
        made.before, made.what = self, duration
        return made

    def __radd__(self, moment: float) -> _Moment:
        made = _Moment(float.__add__(self, moment))
        made.before, made.what = moment, self
        return made


def longest_path(
    schedule: Schedule,
    seconds: Mapping[str, Sequence[float]],
    transfers_s: Mapping[Edge, float],
    backward_transfers_s: Mapping[Edge, float],
    end_of_step_s: Sequence[float],
) -> Counter[tuple[str, int | Edge]]:
    """The actions and messages that follow on each other, and end when ``simulate`` with these seconds does.

    seconds: by kind of action ("F", "B", "I", "W"), per virtual stage. Returned is how many there are of each (kind,
    virtual stage), ("forward", edge) and ("backward", edge), and the stage that ends as ("end", stage). Their seconds
    add up to a lower bound of the makespan, also for all other seconds: what follows on what is the schedule's.
    """
    works = _works(
        schedule,
        {kind: [_Moment.lasting(t, (kind, q)) for q, t in enumerate(some)] for kind, some in seconds.items()},
        {edge: _Moment.lasting(t, ("forward", edge)) for edge, t in transfers_s.items()},
        {edge: _Moment.lasting(t, ("backward", edge)) for edge, t in backward_transfers_s.items()},
    )
    _, ends = _clock(schedule, works)
    lasting = [_Moment.lasting(t, ("end", stage)) for stage, t in enumerate(end_of_step_s)]
    moment: float | None = max(row[-1] + once for row, once in zip(ends, lasting) if row)
    path: Counter[tuple[str, int | Edge]] = Counter()
    while isinstance(moment, _Moment):
        path[moment.what.what] += 1
        moment = moment.before
    return path


@dataclass(frozen=True, slots=True)
class Message:
    """One message on the clock: on its way from ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float
    #: the virtual stages that it comes from and goes to
    source: int
    target: int
    microbatch: int

    @property
    def is_forward(self) -> bool:
        """True if it carries an activation, False if a gradient."""
        return self.source < self.target


def message_times(
    schedule: Schedule,
    simulation: Simulation,
    transfers_s: Mapping[Edge, float],
    backward_transfers_s: Mapping[Edge, float],
) -> list[list[Message]]:
    """Per stage, the messages that it receives in a ``simulate`` with these seconds, in the order of its actions."""
    places = schedule.places()
    virtual = {place: q for q, place in enumerate(places)}
    ended = {
        (action.kind == "F", virtual[stage, action.chunk], action.microbatch): end
        for stage, row in enumerate(simulation.timeline)
        for _, end, action in row
        if action.kind != "W"
    }
    received_by: dict[tuple[bool, int], list[tuple[int, float]]] = {}  # (forward?, target) → source, seconds
    for (source, target), seconds in transfers_s.items():
        received_by.setdefault((True, target), []).append((source, seconds))
    for (target, source), seconds in backward_transfers_s.items():
        received_by.setdefault((False, target), []).append((source, seconds))
    free_at: dict[Edge, float] = {}  # the two directions of an edge are two keys
    out: list[list[Message]] = []
    for stage, row in enumerate(simulation.timeline):
        received: list[Message] = []
        for at, (_, _, action) in enumerate(row):
            if action.kind == "W":
                continue
            here, forward = virtual[stage, action.chunk], action.kind == "F"
            expects_at = row[at - 2][1] if at > 1 else 0.0
            for source, seconds in received_by.get((forward, here), ()):
                made_at = ended[forward, source, action.microbatch]
                start = max(made_at, expects_at, free_at.get((source, here), 0.0))
                free_at[source, here] = start + seconds
                received.append(Message(start, start + seconds, source, here, action.microbatch))
        out.append(received)
    return out


def simulate_steady_state(
    microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers_s: Mapping[Edge, float],
    end_of_step_s: Sequence[float],
    backward_transfers_s: Mapping[Edge, float],
) -> Simulation:
    """One step of 1F1B that has gone on for long and goes on: a stretch of a long pipeline, as long as m more
    microbatches take. A stage's end-of-step work is spread over its backwards. Actions at the ends are cut."""
    p, m = len(forward_s), microbatches
    backward = [b + once / m for b, once in zip(backward_s, end_of_step_s)]
    first, last = (generate(PIPEDREAM, p, count * p) for count in _STRETCH)
    runs = [
        simulate(one, forward_s, backward, transfers_s or None, None, backward_transfers_s or None)
        for one in (first, last)
    ]
    step_s = (runs[1].makespan_s - runs[0].makespan_s) / (last.num_microbatches - first.num_microbatches) * m
    begin_s = next(start for start, _, action in runs[1].timeline[0] if action.microbatch == 2 * p)
    rows = tuple(
        tuple(
            (max(start - begin_s, 0.0), min(end - begin_s, step_s), replace(action, microbatch=action.microbatch % m))
            for start, end, action in row
            if start < begin_s + step_s and end > begin_s
        )
        for row in runs[1].timeline
    )
    busy = tuple(sum(end - start for start, end, _ in row) for row in rows)
    return Simulation(step_s, rows, busy, (step_s,) * p)


def grid(schedule: Schedule, simulation: Simulation | None = None, width: int = 100) -> str:
    """A picture for the terminal: a row per stage, a column per time slot, at most ``width`` columns (never under 24).

    Digits are microbatches modulo 10, large in forward and small in backward, as many columns as the action lasts; of
    a backward in two halves I is raised and W lowered. ``·`` is idle and ``=`` end-of-step work. With several chunks
    per stage there is a row for each, ``stage 2.1`` for chunk 1, blank while the stage works on another chunk. A
    schedule that does not fit keeps its beginning and its end around a ``…``. Without a ``simulation`` forward takes
    one slot and backward two.
    """
    if simulation is None:
        simulation = simulate(schedule, [1.0] * schedule.num_virtual, [2.0] * schedule.num_virtual)
    names = [f"stage {stage}" for stage in range(schedule.num_stages)]
    margin = max(map(len, names)) + 1 + (len(f".{schedule.chunks - 1}") if schedule.chunks > 1 else 0)
    slot_s, columns = _columns(simulation, max(width, 24) - margin)
    lines = []
    for stage, name in enumerate(names):
        shown = [_shown(simulation, stage, (column + 0.5) * slot_s) if column >= 0 else "…" for column in columns]
        for chunk in range(schedule.chunks):
            cells = [cell if isinstance(cell, str) else _cell(cell, chunk) for cell in shown]
            label = f"{name}.{chunk}" if schedule.chunks > 1 else name
            lines.append(label.ljust(margin) + "".join(cells))
    return "\n".join(lines)


def legend(schedule: Schedule) -> str:
    """A legend of the characters of ``grid(schedule)``, in a line."""
    kinds = {action.kind for row in schedule.actions for action in row}
    halves = {"B": "small: backward", "I": "raised: backward of inputs", "W": "lowered: backward of weights"}
    words = ["large digits: forward of that microbatch (mod 10)", *(halves[kind] for kind in "BIW" if kind in kinds)]
    chunks = ["a row per chunk of the stage"] if schedule.chunks > 1 else []
    return ", ".join([*words, f"{_IDLE} idle", f"{_END} end-of-step work", *chunks])


def _columns(simulation: Simulation, room: int) -> tuple[float, list[int]]:
    """(seconds of a column, the columns shown, −1 for the ones left out between beginning and end)."""
    durations = [end - start for row in simulation.timeline for start, end, _ in row if end > start]
    # A slot is the shortest action, but at least a third of the median: one tiny stage shall not fill the picture.
    slot_s = max(min(durations), median(durations) / 3) if durations else 1.0
    num_slots = max(1, ceil(simulation.makespan_s / slot_s - 0.5))
    if num_slots <= room:  # room to spare: finer slots, whole numbers of them so that equal actions look equal
        finer = max(1, min(room // num_slots, 2 if num_slots * 4 > room else 1))
        return slot_s / finer, list(range(num_slots * finer))
    tail = (room - 1) // 2
    return slot_s, [*range(room - 1 - tail), -1, *range(num_slots - tail, num_slots)]


def _shown(simulation: Simulation, stage: int, at_s: float) -> Action | str:
    """The action of a stage at a time, or the character for none."""
    row = simulation.timeline[stage]
    index = bisect_right(row, at_s, key=lambda entry: entry[1])
    if index == len(row):
        return _END if at_s < simulation.step_end_s[stage] else _IDLE
    start, _, action = row[index]
    return action if start <= at_s else _IDLE


def _cell(action: Action, chunk: int) -> str:
    return _DIGITS[action.kind][action.microbatch % 10] if action.chunk == chunk else _ELSEWHERE
