"""The k best pipelines of a recurrence.

The recurrence (``recurrence``) is solved with the microbatches in flight that a schedule holds.

Where the in-flight counts depend on the stages left alone (1F1B, GPipe) one pass serves all numbers of stages (a
``Mode``); else there is a pass for each number. A pass drops the count of stages where no cost depends on it.

``minimise`` first searches pipelines near the lower bound of ``StageRecurrence.suffix``, where few arcs survive, and
widens the limit until it has the optimum: ``StageRecurrence.arcs(most)`` drops nothing that is worth at most ``most``,
so an answer within the limit is the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from math import inf, isfinite
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from .families import in_flight_formula
from .recurrence import Arcs, Lines, StageRecurrence
from .table import Floats, Ints, StageChoice, StageOption

__all__ = [
    "LIMIT_STEPS",
    "Mode",
    "ModeSolution",
    "Ranking",
    "RecurrenceSolution",
    "evaluate",
    "gather_arcs",
    "minimise",
    "modes",
]


_Stages = tuple[StageChoice, ...]
_Whole = TypeVar("_Whole")


class _Part(NamedTuple):
    """A partial pipeline, in the order of the heap. ``value`` bounds every pipeline that begins so from below."""

    value: float
    #: layers that are left; −1: a whole pipeline whose value is final
    left: int
    #: a number that orders equal values
    tick: int
    #: the largest head so far, with the fills before it
    top: float
    #: the sum of all fills so far
    fill: float
    state: int
    column: int
    mode: int
    #: (arc, path) or None
    path: object
    #: (offset, slope) each: the pipeline is worth at least offset + slope · the fills still to come
    lines: tuple[Floats, Floats]


class Ranking(Generic[_Whole]):
    """Pipelines by ascending value, at most ``most``, each with cuts or meshes that none before it had.

    Best first over partial pipelines: what the stages so far make certain and the recurrence's value of what is left.
    ``judge`` makes a whole pipeline what it stands for and its value, no less than the recurrence's. ``complete``:
    whether the search came to an end within ``visits`` states; after those the best partial pipelines are ended by the
    stages that look best one by one.
    """

    def __init__(
        self,
        found: RecurrenceSolution,
        options: Sequence[StageOption],
        most: float,
        visits: int,
        judge: Callable[[_Stages], tuple[float, _Whole]],
    ) -> None:
        self.found, self.options, self.most, self.visits, self.judge = found, options, most, visits, judge
        self.complete, self._tick, self._heap, none = True, count(), list[_Part](), np.empty(0)
        self._whole: dict[int, tuple[_Whole, _Stages]] = {}
        for mode, one in enumerate(found.by_mode):
            layers = one.arcs.rows.num_layers
            for column in one.columns:
                if (value := float(one.value[0, column])) <= most and isfinite(value):
                    part = _Part(value, layers, next(self._tick), 0.0, 0.0, 0, column, mode, None, (none, none))
                    self._heap.append(part)
        heapq.heapify(self._heap)

    def best(self, top_k: int) -> list[_Whole]:
        """The first ``top_k``."""
        out: list[_Whole] = []
        seen: set[tuple[tuple[int, int, int, int], ...]] = set()
        while self._heap and len(out) < top_k:
            part = heapq.heappop(self._heap)
            if part.left < 0:
                whole, stages = self._whole.pop(part.tick)
                key = tuple((s[0], s[1], self.options[s[2]].num_devices, self.options[s[2]].shape) for s in stages)
                if key not in seen:
                    seen.add(key)
                    out.append(whole)
            elif not part.left:
                self._judge(part)
            elif self.visits > 0:
                self.visits -= 1
                for child in self._children(part):
                    heapq.heappush(self._heap, child)
            else:
                self.complete = False
                self._dive(part)
                self._heap = [one for one in self._heap if one.left <= 0] + self._heap_of_parts(top_k - len(out))
                heapq.heapify(self._heap)
        return out

    def _heap_of_parts(self, count: int) -> list[_Part]:
        return heapq.nsmallest(count, (one for one in self._heap if one.left > 0))

    def _judge(self, part: _Part) -> None:
        stages = _stages(self.found.by_mode[part.mode], part.path)
        value, whole = self.judge(stages)
        if value <= self.most:
            self._whole[part.tick] = whole, stages
            heapq.heappush(self._heap, part._replace(value=value, left=-1))

    def _dive(self, part: _Part) -> None:
        while part.left:
            children = self._children(part)
            if not children:
                return
            part = min(children)
        self._judge(part)

    def _children(self, part: _Part) -> list[_Part]:
        one = self.found.by_mode[part.mode]
        k = part.column - int(one.counted)
        arcs, heads, fills, behind = one.children(part.state, part.column)
        tops = np.maximum(part.top, part.fill + heads)
        worth = np.maximum(tops, part.fill + fills + behind)
        target = one.arcs.target[arcs]
        offset, slope = part.lines
        if one.sums is not None:
            entry, left = one.arcs.entry[arcs], one.sums[target, k]
            fresh = np.array([part.fill + constant[entry, k] for _, constant in one.lines])
            new = np.array([line[0][k] for line in one.lines])
            offset = np.concatenate([offset[:, None] + slope[:, None] * fills, fresh])
            slope = np.concatenate([slope, new])
            worth = np.maximum(worth, (offset + slope[:, None] * left).max(axis=0))
        width, layers = len(one.arcs.rows.positions), one.arcs.rows.num_layers
        out = []
        for c in np.flatnonzero((worth <= self.most) & np.isfinite(worth)):
            state = int(target[c])
            lines = (offset[:, c], slope) if one.sums is not None else part.lines
            out.append(
                _Part(
                    float(worth[c]), layers - state // width, next(self._tick), float(tops[c]),
                    part.fill + float(fills[c]), state, k, part.mode, (int(arcs[c]), part.path), lines,
                )
            )  # fmt: skip
        return out


def _stages(one: ModeSolution, path: object) -> _Stages:
    out = []
    while isinstance(path, tuple):
        arc, path = path
        out.append(one.arcs.choice(arc))
    return tuple(reversed(out))


LIMIT_STEPS = (0.02, 0.15, 0.5, 2.0, 8.0, inf)  # how far above the lower bound pipelines are looked for, in turn


@dataclass(frozen=True)
class Mode:
    """Numbers of stages that share their in-flight counts."""

    #: the numbers of stages
    counts: tuple[int, ...]
    #: flights[k]: microbatches in flight of a stage with k stages behind it
    flights: tuple[int, ...]
    #: True if all modes together have every possible number of stages
    every: bool


@lru_cache(maxsize=256)
def modes(schedule: str, m: int, least: int, most: int, every: bool) -> tuple[Mode, ...]:
    """One mode where the family's in-flight counts depend on the stages left alone (they do if they do so for the first
    stage, the last and one between), else one for each range of counts in which they do."""

    def flight(left: int, p: int) -> int:
        return in_flight_formula(schedule, p - left, p, m)

    counts = range(least, most + 1)
    longest = tuple(flight(left, most) for left in range(1, most + 1))
    if all(flight(left, p) == longest[left - 1] for p in counts for left in (1, (p + 1) // 2, p)):
        return (Mode(tuple(counts), longest, every),)
    out: list[Mode] = []
    for p in counts:
        flights = tuple(flight(left, p) for left in range(1, p + 1))
        if out and flights[: len(out[-1].flights)] == out[-1].flights:
            out[-1] = Mode((*out[-1].counts, p), flights, every)
        else:
            out.append(Mode((p,), flights, every))
    return tuple(out)


@dataclass(frozen=True, eq=False)
class ModeSolution:
    """A mode's arcs with their costs and values; ``columns`` are those of whole pipelines."""

    arcs: Arcs
    head: Floats  # [entries, S]
    fill: Floats
    value: Floats  # [states, S + counted]
    columns: tuple[int, ...]
    counted: bool
    lines: Lines = ()
    sums: Floats | None = None  # as values: the least sums of fills, where there are lines

    @property
    def best(self) -> float:
        """The least value of a whole pipeline."""
        return float(self.value[0, list(self.columns)].min())

    def children(self, state: int, column: int) -> tuple[Ints, Floats, Floats, Floats]:
        """(arcs, heads, fills, values of what is left behind them) out of a state."""
        out = self.arcs.out(state)
        entry, k = self.arcs.entry[out], column - int(self.counted)
        left = self.value[self.arcs.target[out], k]
        return np.arange(out.start, out.stop), self.head[entry, k], self.fill[entry, k], left

    def path(self) -> list[tuple[int, int]]:
        """(arc, column of its costs) of a pipeline that attains the best value."""
        column = min(self.columns, key=lambda c: float(self.value[0, c]))
        state, path, end = 0, [], self.arcs.rows.num_layers * len(self.arcs.rows.positions)
        while state < end:
            arcs, head, fill, left = self.children(state, column)
            arc = int(arcs[np.maximum(head, fill + left).argmin()])
            column -= int(self.counted)
            path.append((arc, column))
            state = int(self.arcs.target[arc])
        return path

    def stages(self) -> tuple[StageChoice, ...]:
        """The stages of ``path``."""
        return tuple(self.arcs.choice(arc) for arc, _ in self.path())


@dataclass(frozen=True, eq=False)
class RecurrenceSolution:
    """The optimum of a recurrence, per mode."""

    by_mode: tuple[ModeSolution, ...]

    @property
    def best(self) -> float:
        """The optimum."""
        return min((one.best for one in self.by_mode), default=inf)

    def stages(self) -> tuple[StageChoice, ...]:
        """A pipeline that attains it."""
        return min(self.by_mode, key=lambda one: one.best).stages()


def gather_arcs(search: StageRecurrence, of: Sequence[Mode], most: float) -> RecurrenceSolution:
    """The arcs of all pipelines worth at most ``most`` with their costs, not solved."""
    arcs = search.arcs(most)
    alike = search.turns is None or (len(of) == 1 and of[0].flights[0] == of[0].flights[-1])  # lines, for any count
    if of[0].every and alike and not search.depends(arcs):
        head, fill = arcs.priced(search.costs, of[0].flights[:1])
        lines = arcs.lined(search.turns, of[0].flights[:1], of[0].counts[-1:])
        return RecurrenceSolution((ModeSolution(arcs, head, fill, np.empty((0, 0)), (0,), False, lines),))
    longest, out = arcs.longest(), []
    for mode in of if len(of) == 1 else _possible(search, arcs, of, most):
        if counts := tuple(count for count in mode.counts if count <= longest):
            head, fill = arcs.priced(search.costs, mode.flights[: counts[-1]])
            lines = arcs.lined(search.turns, mode.flights[: counts[-1]], range(1, counts[-1] + 1))
            out.append(ModeSolution(arcs, head, fill, np.empty((0, 0)), counts, True, lines))
    return RecurrenceSolution(tuple(out))


def _possible(search: StageRecurrence, arcs: Arcs, of: Sequence[Mode], most: float) -> list[Mode]:
    """The modes that may have a pipeline worth at most ``most``: solved with any number of stages, each holding the
    fewest microbatches that a stage of the mode does."""
    head, fill = arcs.priced(search.costs, [min(mode.flights) for mode in of])
    return [mode for mode, least in zip(of, arcs.values(head, fill, False)[0]) if least <= most]


def evaluate(found: RecurrenceSolution) -> RecurrenceSolution:
    """The same with values."""
    return RecurrenceSolution(tuple(map(_valued, found.by_mode)))


def _valued(one: ModeSolution) -> ModeSolution:
    sums = None
    if one.lines:
        sums = one.arcs.values(None, np.where(np.isfinite(one.head), one.fill, inf), one.counted)
    return replace(one, value=one.arcs.values(one.head, one.fill, one.counted, one.lines, sums), sums=sums)


def minimise(
    search: StageRecurrence, of: Sequence[Mode], keep: float = 0.0, scale: float = 0.0, most: float = inf
) -> RecurrenceSolution | None:
    """The optimum, with all pipelines within the fraction ``keep`` of it; None if there is none worth at most ``most``.

    scale: what the steps of widening are a part of where the lower bound may be 0.
    """
    low = search.low
    if not low <= most or not isfinite(low):
        return None
    for wider in (max(keep, LIMIT_STEPS[0]), *(one for one in LIMIT_STEPS if one > keep)):
        limit = min((low + wider * max(low, scale)) * (1 + 1e-12), most) if isfinite(wider) else most
        solution = evaluate(gather_arcs(search, of, limit))
        if isfinite(best := solution.best):
            needed = best * (1.0 + keep) if best else 0.0
            return (
                solution if needed <= limit or limit >= most else evaluate(gather_arcs(search, of, min(needed, most)))
            )
        if limit >= most:
            return None
    return None
