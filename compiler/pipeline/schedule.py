"""Pipeline schedules, checked without a device: their grammar is below, ``families`` makes them,
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

Pipeline schedules as values: what every stage does, in order, and the text of it.

Grammar::

    action   ::= <stage> kind <microbatch> ("c" <chunk>)?       "2F0"  "3B1"  "2I0c1"; chunk 0 is not written
    kind     ::= F   forward of one microbatch: receive from every virtual stage with an edge into it, compute, send
               | B   backward of one microbatch: receive the gradients of everything sent, compute, send back
               | I   the half of a backward that others wait for: like B, without the gradients of the weights
               | W   the other half: the gradients of the weights; no messages
    schedule ::= name "stages=" p "microbatches=" m ("chunks=" v "placement=" placement)? newline,
                 then one line of actions per stage

A *virtual stage* is one chunk of the model on one stage. They are numbered in the order in which data flow through the
model, q = 0 … p·v − 1; an *edge* joins two of them. With one chunk per stage q is the stage. Placements::

    loop   0 1 … p−1 0 1 … p−1 …      chunk c of stage s is q = c·p + s             (interleaved, Narayanan et al. 2021)
    vee    0 1 … p−1 p−1 … 1 0 …      odd chunks run back: q = c·p + (p − 1 − s)    (ZB-V, Qi et al. 2024)
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ScheduleError

__all__ = [
    "KINDS", "PLACEMENTS", "Action", "Edge", "Place", "Schedule", "chain", "checked_edges", "in_flight", "parse",
    "parse_action", "placement_order", "problems", "run_order", "validate",
]  # fmt: skip


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
"""The action that makes a message: (forward?, virtual stage, microbatch)"""


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
    """The keys of the messages that ``action`` waits for."""
    if action.kind != "W":
        forward = action.kind == "F"
        for other in sources[not forward][virtual[action.stage, action.chunk]]:
            yield forward, other, action.microbatch


def _key(action: Action, virtual: Mapping[Place, int]) -> _Key | None:
    """The key of the message that ``action`` sends."""
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
            key_made = _key(action, virtual)
            done.add(key_made)
            order.append(action)
            position[stage] += 1
            ready.extend(waiting.pop(key_made, ()))
    return order, [row[at] for at, row in zip(position, schedule.actions) if at < len(row)]


# --- validation -------------------------------------------------------------------------------------------------------


def problems(schedule: Schedule, edges: Iterable[Edge] | None = None) -> list[str]:
    """The problems of ``schedule`` over ``edges`` (virtual stages; default: the chain), a sentence each; none if it is
    sound."""
    p = schedule.num_stages
    edges = chain(schedule.num_virtual) if edges is None else checked_edges(edges, schedule.num_virtual)
    if len(schedule.actions) != p:
        return [f"the schedule has {p} stages, but got {len(schedule.actions)} rows of actions"]
    sentences = [sentence for stage in range(p) for sentence in _incomplete(schedule, stage)]
    return sentences or [*_disorder(schedule, edges), *_deadlock(schedule, edges)]


def _incomplete(schedule: Schedule, stage: int) -> Iterator[str]:
    """The problems of one stage by itself."""
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


KINDS = ("F", "B", "I", "W")
PLACEMENTS = ("loop", "vee")

Edge = tuple[int, int]
"""(source, destination) of an activation, as virtual stages; its gradient travels the other way."""

Place = tuple[int, int]
"""(stage, chunk)"""


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of one stage: ``kind`` ("F", "B", "I" or "W") of ``microbatch`` through ``chunk``."""

    stage: int
    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}" + (f"c{self.chunk}" if self.chunk else "")

    __repr__ = __str__


@dataclass(frozen=True)
class Schedule:
    """``actions[s]`` is what stage s does, in order. Any order can be written; ``validate`` says if it runs."""

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    chunks: int = 1
    placement: str = "loop"

    @property
    def num_virtual(self) -> int:
        """The number of virtual stages, p·v."""
        return self.num_stages * self.chunks

    def places(self) -> tuple[Place, ...]:
        """(stage, chunk) of every virtual stage, in the order in which data flow."""
        return placement_order(self.placement, self.num_stages, self.chunks)

    def text(self) -> str:
        """The schedule as lines of text; ``parse`` reverses it."""
        head = f"{self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        if self.chunks > 1:
            head += f" chunks={self.chunks} placement={self.placement}"
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.actions)])


def placement_order(placement: str, num_stages: int, chunks: int) -> tuple[Place, ...]:
    """(stage, chunk) of every virtual stage under a placement; ValueError for an unknown one."""
    if placement not in PLACEMENTS:
        raise ValueError(f"a placement is one of {', '.join(PLACEMENTS)}, but got {placement!r}; choose one of these")
    rows = (
        (c, reversed(range(num_stages)) if placement == "vee" and c % 2 else range(num_stages)) for c in range(chunks)
    )
    return tuple((s, c) for c, stages in rows for s in stages)


def parse_action(text: str) -> Action:
    """``"2F0"`` → ``Action(2, "F", 0)``, ``"2I0c1"`` → ``Action(2, "I", 0, 1)``; ValueError on anything else."""
    if not (match := re.fullmatch(r"(\d+)([FBIW])(\d+)(?:c([1-9]\d*))?", text)):
        raise ValueError(
            f"an action is <stage><kind><microbatch>, kind F, B, I or W, with c<chunk> at the end unless the chunk is "
            f"0, but got {text!r}"
        )
    return Action(int(match[1]), match[2], int(match[3]), int(match[4] or 0))


def parse(text: str) -> Schedule:
    """The reverse of ``Schedule.text``; ValueError names what it could not read."""
    head, *rows = text.split("\n")
    match = re.fullmatch(r"(\S+) stages=(\d+) microbatches=(\d+)(?: chunks=([1-9]\d*) placement=(\S+))?", head)
    if not match:
        raise ValueError(
            "a schedule starts with 'NAME stages=P microbatches=M' and, for several chunks per stage, "
            f"'chunks=V placement=loop', but got {head!r}"
        )
    p, m = int(match[2]), int(match[3])
    if len(rows) != p:
        raise ValueError(f"a schedule has one line of actions per stage, but got {len(rows)} lines for {p} stages")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    chunks, placement = int(match[4] or 1), match[5] or "loop"
    placement_order(placement, p, chunks)  # refuses an unknown placement
    return Schedule(match[1], p, m, actions, chunks, placement)
