"""The recurrence of ``pipeline_arcs`` solved with the microbatches in flight that a schedule holds.

Where the in-flight counts depend on the stages left alone (1F1B, GPipe) one pass serves all numbers of stages (a
``Mode``); else there is a pass for each number. A pass drops the count of stages where no cost depends on it.

``minimise`` first looks at pipelines near the lower bound of ``Search.suffix``, where few arcs survive, and widens
until it has the optimum: ``Search.arcs(most)`` drops nothing that is worth at most ``most``, so an answer within is the
best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite

import numpy as np

from .pipeline_arcs import Arcs, Lines, Search
from .pipeline_table import Floats, Ints, StageChoice
from .schedule import in_flight_formula

__all__ = ["WIDER", "Found", "Mode", "Solved", "gather", "minimise", "modes", "solved"]

WIDER = (0.02, 0.15, 0.5, 2.0, 8.0, inf)  # how far above the lower bound pipelines are looked for, in turn


@dataclass(frozen=True)
class Mode:
    """Numbers of stages that share their in-flight counts: flights[k] with k + 1 stages left."""

    counts: tuple[int, ...]
    flights: tuple[int, ...]
    every: bool  # whether these, together with the other modes, are all the numbers of stages that there can be


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
class Solved:
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
class Found:
    """The optimum of a recurrence, per mode."""

    solved: tuple[Solved, ...]

    @property
    def best(self) -> float:
        """The optimum."""
        return min((one.best for one in self.solved), default=inf)

    def stages(self) -> tuple[StageChoice, ...]:
        """A pipeline that attains it."""
        return min(self.solved, key=lambda one: one.best).stages()


def gather(search: Search, of: Sequence[Mode], most: float) -> Found:
    """The arcs of all pipelines worth at most ``most`` with their costs, not solved."""
    arcs = search.arcs(most)
    alike = search.turns is None or (len(of) == 1 and of[0].flights[0] == of[0].flights[-1])  # lines, for any count
    if of[0].every and alike and not search.depends(arcs):
        head, fill = arcs.priced(search.costs, of[0].flights[:1])
        lines = arcs.lined(search.turns, of[0].flights[:1], of[0].counts[-1:])
        return Found((Solved(arcs, head, fill, np.empty((0, 0)), (0,), False, lines),))
    longest, out = arcs.longest(), []
    for mode in of if len(of) == 1 else _possible(search, arcs, of, most):
        if counts := tuple(count for count in mode.counts if count <= longest):
            head, fill = arcs.priced(search.costs, mode.flights[: counts[-1]])
            lines = arcs.lined(search.turns, mode.flights[: counts[-1]], range(1, counts[-1] + 1))
            out.append(Solved(arcs, head, fill, np.empty((0, 0)), counts, True, lines))
    return Found(tuple(out))


def _possible(search: Search, arcs: Arcs, of: Sequence[Mode], most: float) -> list[Mode]:
    """The modes that may have a pipeline worth at most ``most``: solved with any number of stages, each holding the
    fewest microbatches that a stage of the mode does."""
    head, fill = arcs.priced(search.costs, [min(mode.flights) for mode in of])
    if search.additive:
        worth = arcs.values(None, np.where(np.isfinite(head), fill, inf), False)[0] + search.least_head
    else:
        worth = arcs.values(head, fill, False)[0]
    return [mode for mode, least in zip(of, worth) if least <= most]


def solved(found: Found) -> Found:
    """The same with values."""
    return Found(tuple(map(_valued, found.solved)))


def _valued(one: Solved) -> Solved:
    sums = None
    if one.lines:
        sums = one.arcs.values(None, np.where(np.isfinite(one.head), one.fill, inf), one.counted)
    return replace(one, value=one.arcs.values(one.head, one.fill, one.counted, one.lines, sums), sums=sums)


def minimise(
    search: Search, of: Sequence[Mode], keep: float = 0.0, scale: float = 0.0, most: float = inf
) -> Found | None:
    """The optimum, with all pipelines within the fraction ``keep`` of it; None if there is none worth at most ``most``.

    scale: what the steps of widening are a part of where the lower bound may be 0.
    """
    low = search.low
    if not low <= most or not isfinite(low):
        return None
    for wider in (max(keep, WIDER[0]), *(one for one in WIDER if one > keep)):
        limit = min((low + wider * max(low, scale)) * (1 + 1e-12), most) if isfinite(wider) else most
        found = solved(gather(search, of, limit))
        if isfinite(best := found.best):
            needed = best * (1.0 + keep) if best else 0.0
            return found if needed <= limit or limit >= most else solved(gather(search, of, min(needed, most)))
        if limit >= most:
            return None
    return None
