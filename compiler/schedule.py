"""Pipeline schedules as values: every stage's list of actions, checked without a device; ``simulate`` times them.

Grammar::

    action   ::= <stage> kind <microbatch>                     "2F0"  "3B1"
    kind     ::= F   forward of one microbatch: receive from every stage with an edge into this one, compute, send
               | B   backward of one microbatch: receive the gradients of everything sent, compute, send back
    schedule ::= name "stages=" p "microbatches=" m newline, then one line of actions per stage

A stage runs its actions in the order written. Stages are nodes of a graph whose *edges* ``(src, dst)``, src < dst, say
who sends activations to whom; by default the chain 0 → 1 → … Skip connections are edges too. A receive blocks, a send
does not, and messages between two stages arrive in the order they were sent: so a schedule is sound if

1. every stage does F and B of every microbatch exactly once, F first                     (``problems``: completeness)
2. along every edge both ends meet the microbatches in the same order, for F and for B    (``problems``: order)
3. the graph "next action of the stage" ∪ "message" has no cycle                          (``problems``: deadlock)

Families. GPipe (Huang et al. 2019) does all forwards, then all backwards. 1F1B (PipeDream, Narayanan et al. 2019; with
the flush of Megatron-LM 2021) starts a backward as early as it can: stage s of p holds at most p − s microbatches.
With equal stages and free transfers both take (m + p − 1)(f + b): the idle part is (p − 1)/m of the work.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "Action",
    "Edge",
    "Schedule",
    "ScheduleError",
    "chain",
    "checked_edges",
    "generate",
    "gpipe",
    "in_flight",
    "in_flight_formula",
    "known_schedules",
    "one_f_one_b",
    "parse",
    "parse_action",
    "problems",
    "run_order",
    "validate",
]

Edge = tuple[int, int]
"""(source stage, destination stage) of an activation; its gradient travels the other way."""


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message lists what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of one stage: ``kind`` "F" (forward) or "B" (backward) of ``microbatch``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    __repr__ = __str__


@dataclass(frozen=True)
class Schedule:
    """``actions[s]`` is what stage s does, in order. Any order can be written; ``validate`` says if it runs."""

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def text(self) -> str:
        """The schedule as lines of text; ``parse`` reverses it."""
        head = f"{self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.actions)])


def parse_action(text: str) -> Action:
    """``"2F0"`` → ``Action(2, "F", 0)``; ValueError on anything else."""
    if not (match := re.fullmatch(r"(\d+)([FB])(\d+)", text)):
        raise ValueError(f"an action is <stage>F<microbatch> or <stage>B<microbatch>, but got {text!r}")
    return Action(int(match[1]), match[2], int(match[3]))


def parse(text: str) -> Schedule:
    """The reverse of ``Schedule.text``; ValueError names what it could not read."""
    head, *rows = text.split("\n")
    match = re.fullmatch(r"(\S+) stages=(\d+) microbatches=(\d+)", head)
    if not match:
        raise ValueError(f"a schedule starts with 'NAME stages=P microbatches=M', but got {head!r}")
    p, m = int(match[2]), int(match[3])
    if len(rows) != p:
        raise ValueError(f"a schedule has one line of actions per stage, but got {len(rows)} lines for {p} stages")
    return Schedule(match[1], p, m, tuple(tuple(map(parse_action, row.split())) for row in rows))


# --- families ---------------------------------------------------------------------------------------------------------


def _check_size(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a schedule needs at least one stage and one microbatch, but got {num_stages} stages and "
            f"{num_microbatches} microbatches; give both as positive numbers"
        )


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order; every stage holds all microbatches."""
    _check_size(num_stages, num_microbatches)
    rows = tuple(tuple(Action(s, kind, k) for kind in "FB" for k in range(num_microbatches)) for s in range(num_stages))
    return Schedule("gpipe", num_stages, num_microbatches, rows)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Stage s of p: min(m, p − s − 1) forwards to warm up, then forward and backward in turn, then what is left."""
    _check_size(num_stages, num_microbatches)
    rows = []
    for s in range(num_stages):
        warm = min(num_microbatches, num_stages - s - 1)
        row = [Action(s, "F", k) for k in range(warm)]
        for k in range(num_microbatches):
            if warm + k < num_microbatches:
                row.append(Action(s, "F", warm + k))
            row.append(Action(s, "B", k))
        rows.append(tuple(row))
    return Schedule("1f1b", num_stages, num_microbatches, tuple(rows))


@dataclass(frozen=True)
class _Family:
    generate: Callable[[int, int], Schedule]
    in_flight: Callable[[int, int, int], int]  # (stage, p, m)


_FAMILIES = {
    "gpipe": _Family(gpipe, lambda stage, p, m: m),
    "1f1b": _Family(one_f_one_b, lambda stage, p, m: min(m, p - stage)),
}


def known_schedules() -> tuple[str, ...]:
    """The names that ``generate`` knows."""
    return tuple(_FAMILIES)


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise ValueError(f"a schedule is one of {', '.join(known_schedules())}, but got {name!r}; choose one of these")
    return _FAMILIES[name]


def generate(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of family ``name``; ValueError with the known names for any other."""
    return _family(name).generate(num_stages, num_microbatches)


def in_flight_formula(name: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """``in_flight(generate(name, p, m))[stage]`` without generating; depends on the stage only through p − stage."""
    assert 0 <= stage < num_stages, (stage, num_stages)
    return _family(name).in_flight(stage, num_stages, num_microbatches)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the largest number of microbatches whose F is done and whose B is not."""
    out = []
    for row in schedule.actions:
        held = most = 0
        for action in row:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        out.append(most)
    return tuple(out)


# --- validation -------------------------------------------------------------------------------------------------------


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges 0 → 1 → … → p − 1."""
    return tuple((s, s + 1) for s in range(num_stages - 1))


def checked_edges(edges: Iterable[Edge], num_stages: int) -> tuple[Edge, ...]:
    """The edges without repeats; ValueError if one leads back or out of the stages."""
    out = tuple(dict.fromkeys(edges))
    for src, dst in out:
        if not 0 <= src < dst < num_stages:
            raise ValueError(f"an edge goes from a stage to a later one of {num_stages}, but got {src} -> {dst}")
    return out


def _waits_for(action: Action, edges: Sequence[Edge]) -> Iterator[Action]:
    """The actions of other stages whose messages ``action`` receives."""
    for src, dst in edges:
        if action.kind == "F" and dst == action.stage:
            yield Action(src, "F", action.microbatch)
        if action.kind == "B" and src == action.stage:
            yield Action(dst, "B", action.microbatch)


def run_order(schedule: Schedule, edges: Sequence[Edge]) -> tuple[list[Action], list[Action]]:
    """(actions in an order in which they can run, the action that each stuck stage waits in)."""
    near: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        near[edge[0]].append(edge)
        near[edge[1]].append(edge)
    position = [0] * schedule.num_stages
    done: set[Action] = set()
    order: list[Action] = []
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = deque(range(schedule.num_stages))
    while ready:
        stage = ready.popleft()
        row = schedule.actions[stage]
        while position[stage] < len(row):
            action = row[position[stage]]
            missing = next((a for a in _waits_for(action, near[stage]) if a not in done), None)
            if missing is not None:
                waiting[missing].append(stage)
                break
            done.add(action)
            order.append(action)
            position[stage] += 1
            ready.extend(waiting.pop(action, ()))
    return order, [row[at] for at, row in zip(position, schedule.actions) if at < len(row)]


def problems(schedule: Schedule, edges: Iterable[Edge] | None = None) -> list[str]:
    """What keeps ``schedule`` from running over ``edges`` (default: the chain), a sentence each; empty if sound."""
    p, m = schedule.num_stages, schedule.num_microbatches
    edges = chain(p) if edges is None else checked_edges(edges, p)
    if len(schedule.actions) != p:
        return [f"the schedule has {p} stages, but got {len(schedule.actions)} rows of actions"]
    found = []
    for stage, row in enumerate(schedule.actions):
        at: dict[Action, int] = {}
        for index, action in enumerate(row):
            if action.stage != stage or action.kind not in ("F", "B") or not 0 <= action.microbatch < m:
                found.append(f"stage {stage} does F or B of its microbatches 0..{m - 1}, but got {action}")
            elif action in at:
                found.append(f"an action runs once, but got {action} twice")
            at.setdefault(action, index)
        for k in range(m):
            forward, backward = at.get(Action(stage, "F", k)), at.get(Action(stage, "B", k))
            for kind, place in (("F", forward), ("B", backward)):
                if place is None:
                    found.append(f"every stage does F and B of every microbatch, but {stage}{kind}{k} is missing")
            if forward is not None and backward is not None and backward < forward:
                found.append(f"F comes before B, but stage {stage} does {stage}B{k} before {stage}F{k}")
    if found:
        return found
    for src, dst in edges:
        for kind in "FB":
            one, other = ([a.microbatch for a in schedule.actions[s] if a.kind == kind] for s in (src, dst))
            if one != other:
                k = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
                found.append(
                    f"messages arrive in the order they were sent, but {kind} number {k} is of microbatch {one[k]} on "
                    f"stage {src} and of {other[k]} on stage {dst}"
                )
    _, stuck = run_order(schedule, edges)
    if stuck:
        unfinished = {a for s in stuck for a in _rest(schedule, s)}
        waits = [f"{a} waits for {next(w for w in _waits_for(a, edges) if w in unfinished)}" for a in stuck]
        found.append("deadlock: " + ", ".join(waits))
    return found


def _rest(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    row = schedule.actions[action.stage]
    return row[row.index(action) :]


def validate(schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
    """Raise ScheduleError with the ``problems`` of ``schedule`` over ``edges`` (default: the chain), if any."""
    if found := problems(schedule, edges):
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise ScheduleError(f"schedule {schedule.name!r} cannot run: " + "; ".join(found[:5]) + more)
