"""Pipeline schedules, checked without a device: ``actions`` has their grammar, ``schedule_families`` makes them,
``simulate`` times them.

A stage runs its actions in the order written. Virtual stages (one chunk of the model on one stage) are nodes of a graph
whose *edges* ``(src, dst)``, src < dst, say who sends activations to whom; by default the chain 0 → 1 → … Skip
connections are edges too. A receive blocks, a send does not, and messages along an edge arrive in the order they were
sent: so a schedule is sound if

1. every stage does F and a backward (B, or I and W) of every microbatch through each of its chunks exactly once, F
   first and I before W                                                                   (``problems``: completeness)
2. along every edge both ends meet the microbatches in the same order, for F and for B or I     (``problems``: order)
3. the graph "next action of the stage" ∪ "message" has no cycle                             (``problems``: deadlock)

What a forward saves is held until its B, or until its W: an I frees nothing here, since what W needs, the inputs of the
ops with weights and the gradients of their outputs, is about as large.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from .actions import KINDS, Action, Edge, Place, Schedule, ScheduleError, parse, parse_action, placed
from .schedule_families import (
    generate,
    gpipe,
    in_flight_formula,
    interleaved,
    known_schedules,
    one_f_one_b,
    virtual_order,
    zb_h1,
    zb_v,
)

__all__ = [
    "Action",
    "Edge",
    "Place",
    "Schedule",
    "ScheduleError",
    "chain",
    "checked_edges",
    "generate",
    "gpipe",
    "in_flight",
    "in_flight_formula",
    "interleaved",
    "known_schedules",
    "one_f_one_b",
    "parse",
    "parse_action",
    "placed",
    "problems",
    "run_order",
    "validate",
    "virtual_order",
    "zb_h1",
    "zb_v",
]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches held at once: F done, and neither B nor W. One counts per chunk."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    out = []
    for row in schedule.actions:
        held = most = 0
        for action in row:
            held += change[action.kind]
            most = max(most, held)
        out.append(most)
    return tuple(out)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges 0 → 1 → … → p − 1."""
    return tuple((s, s + 1) for s in range(num_stages - 1))


def checked_edges(edges: Iterable[Edge], num_stages: int) -> tuple[Edge, ...]:
    """The edges without repeats; ValueError if one leads back or out of the (virtual) stages."""
    out = tuple(dict.fromkeys(edges))
    for src, dst in out:
        if not 0 <= src < dst < num_stages:
            raise ValueError(f"an edge goes from a stage to a later one of {num_stages}, but got {src} -> {dst}")
    return out


# --- the order in which it runs ---------------------------------------------------------------------------------------

_Key = tuple[bool, int, int]
"""What makes a message: (forward?, virtual stage, microbatch)"""


def _sources(edges: Sequence[Edge], num_virtual: int) -> tuple[list[list[int]], list[list[int]]]:
    """Per virtual stage, the virtual stages (it receives from in forward, it receives from in backward)."""
    ahead: list[list[int]] = [[] for _ in range(num_virtual)]
    back: list[list[int]] = [[] for _ in range(num_virtual)]
    for src, dst in edges:
        ahead[dst].append(src)
        back[src].append(dst)
    return ahead, back


def _receives(
    action: Action, virtual: Mapping[Place, int], sources: tuple[list[list[int]], list[list[int]]]
) -> Iterator[_Key]:
    """What ``action`` waits for."""
    if action.kind != "W":
        forward = action.kind == "F"
        for other in sources[not forward][virtual[action.stage, action.chunk]]:
            yield forward, other, action.microbatch


def _key(action: Action, virtual: Mapping[Place, int]) -> _Key | None:
    """What ``action`` sends."""
    if action.kind == "W":
        return None
    return action.kind == "F", virtual[action.stage, action.chunk], action.microbatch


def run_order(schedule: Schedule, edges: Sequence[Edge]) -> tuple[list[Action], list[Action]]:
    """(actions in an order in which they can run, the action that each stuck stage waits in)."""
    virtual = {place: q for q, place in enumerate(schedule.places())}
    sources = _sources(edges, schedule.num_virtual)
    position = [0] * schedule.num_stages
    done: set[_Key | None] = set()
    order: list[Action] = []
    waiting: dict[_Key | None, list[int]] = defaultdict(list)
    ready = deque(range(schedule.num_stages))
    while ready:
        stage = ready.popleft()
        row = schedule.actions[stage]
        while position[stage] < len(row):
            action = row[position[stage]]
            missing = next((key for key in _receives(action, virtual, sources) if key not in done), None)
            if missing is not None:
                waiting[missing].append(stage)
                break
            made = _key(action, virtual)
            done.add(made)
            order.append(action)
            position[stage] += 1
            ready.extend(waiting.pop(made, ()))
    return order, [row[at] for at, row in zip(position, schedule.actions) if at < len(row)]


# --- validation -------------------------------------------------------------------------------------------------------


def problems(schedule: Schedule, edges: Iterable[Edge] | None = None) -> list[str]:
    """What keeps ``schedule`` from running over ``edges`` (virtual stages; default: the chain), a sentence each; empty
    if sound."""
    p = schedule.num_stages
    edges = chain(schedule.num_virtual) if edges is None else checked_edges(edges, schedule.num_virtual)
    if len(schedule.actions) != p:
        return [f"the schedule has {p} stages, but got {len(schedule.actions)} rows of actions"]
    found = [sentence for stage in range(p) for sentence in _incomplete(schedule, stage)]
    return found or [*_disorder(schedule, edges), *_deadlock(schedule, edges)]


def _incomplete(schedule: Schedule, stage: int) -> Iterator[str]:
    """What one stage does wrong by itself."""
    m, chunks = schedule.num_microbatches, schedule.chunks
    at: dict[Action, int] = {}
    for index, action in enumerate(schedule.actions[stage]):
        known = action.stage == stage and action.kind in KINDS
        if not known or not 0 <= action.microbatch < m or not 0 <= action.chunk < chunks:
            inside = f" and chunks 0..{chunks - 1}" if chunks > 1 else ""
            yield f"stage {stage} does F, B, I and W of its microbatches 0..{m - 1}{inside}, but got {action}"
        elif action in at:
            yield f"an action runs once, but got {action} twice"
        at.setdefault(action, index)
    for chunk in range(chunks):
        for k in range(m):
            f, b, i, w = (Action(stage, kind, k, chunk) for kind in KINDS)
            if b in at and (i in at or w in at):
                yield f"a backward is B, or I and W, but got {b} and {i if i in at else w}"
                continue
            parts = [f, i, w] if i in at or w in at else [f, b]
            for part in parts:
                if part not in at:
                    yield f"every stage does F and B (or I and W) of every microbatch, but {part} is missing"
            for one, other in pairwise(parts):
                if one in at and other in at and at[other] < at[one]:
                    yield f"{one.kind} comes before {other.kind}, but stage {stage} does {other} before {one}"


def _disorder(schedule: Schedule, edges: Iterable[Edge]) -> Iterator[str]:
    """Edges whose ends meet the microbatches in unlike order."""
    places = schedule.places()
    met: dict[tuple[str, Place], list[int]] = defaultdict(list)
    for row in schedule.actions:
        for action in row:
            if action.kind != "W":
                met["F" if action.kind == "F" else "B", (action.stage, action.chunk)].append(action.microbatch)
    for src, dst in edges:
        for kind in "FB":
            one, other = met[kind, places[src]], met[kind, places[dst]]
            if one != other:
                k = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
                yield (
                    f"messages arrive in the order they were sent, but {kind} number {k} is of microbatch {one[k]} on "
                    f"{_named(schedule, src)} and of {other[k]} on {_named(schedule, dst)}"
                )


def _named(schedule: Schedule, virtual_stage: int) -> str:
    stage, chunk = schedule.places()[virtual_stage]
    return f"stage {stage}" + (f" chunk {chunk}" if schedule.chunks > 1 else "")


def _deadlock(schedule: Schedule, edges: Sequence[Edge]) -> Iterator[str]:
    order, stuck = run_order(schedule, edges)
    if stuck:
        virtual = {place: q for q, place in enumerate(schedule.places())}
        sources = _sources(edges, schedule.num_virtual)
        done = set(order)
        maker = {_key(a, virtual): a for row in schedule.actions for a in row if a not in done}
        waits = [f"{a} waits for {next(maker[k] for k in _receives(a, virtual, sources) if k in maker)}" for a in stuck]
        yield "deadlock: " + ", ".join(waits)


def validate(schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
    """Raise ScheduleError with the ``problems`` of ``schedule`` over ``edges`` (default: the chain), if any."""
    if found := problems(schedule, edges):
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise ScheduleError(f"schedule {schedule.name!r} cannot run: " + "; ".join(found[:5]) + more)
