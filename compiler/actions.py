"""Pipeline schedules as values: what every stage does, in order, and the text of it.

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
from dataclasses import dataclass

__all__ = [
    "KINDS",
    "PLACEMENTS",
    "Action",
    "Edge",
    "Place",
    "Schedule",
    "ScheduleError",
    "parse",
    "parse_action",
    "placed",
]

KINDS = ("F", "B", "I", "W")
PLACEMENTS = ("loop", "vee")

Edge = tuple[int, int]
"""(source, destination) of an activation, as virtual stages; its gradient travels the other way."""

Place = tuple[int, int]
"""(stage, chunk)"""


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message lists what is wrong with it."""


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
        return placed(self.placement, self.num_stages, self.chunks)

    def text(self) -> str:
        """The schedule as lines of text; ``parse`` reverses it."""
        head = f"{self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        if self.chunks > 1:
            head += f" chunks={self.chunks} placement={self.placement}"
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.actions)])


def placed(placement: str, num_stages: int, chunks: int) -> tuple[Place, ...]:
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
    placed(placement, p, chunks)  # refuses an unknown placement
    return Schedule(match[1], p, m, actions, chunks, placement)
