"""The search over microbatch counts, submeshes, shardings, residencies and recompute, best first, under one family of
schedules (``Space.guide``).

1. *Floors* (``search_floors``). For every microbatch count and submesh: the least seconds per microbatch of every run
   of layers, whatever its bytes, and the least where a byte is as dear as can be.
2. *Looks.* A few counts at a time, the middle of those that may win first, get tables at middling prices of a byte and
   their first pipeline; then the neighbours of the best, until it has none better.
What comes after them is in ``candidates``. What was looked at is bounded on the way by its own Lagrangian values
(``pipeline_bound``), the rest afterwards (``proof``). The bound of the search is the least of all counts'.

Nothing is assembled here: candidates name runs of layers, rows of tables and devices, with their makespan on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf

from .search_floors import FREE
from .search_state import TIMED_OUT, Candidate, Miss, Search
from .search_tables import MIDDLE, tables_of

__all__ = ["corrected", "explore", "fits", "nearest_misses"]


def explore(search: Search) -> Iterator[Candidate]:
    """The first pipelines of the counts that are looked at, as they are found; ``search.bounds`` fills meanwhile."""
    tables = tables_of(search)
    tables.best = inf
    first: dict[int, float] = {}  # microbatches → the makespan of its first pipeline
    tables.floors()
    looked: set[int] = set()

    def over() -> bool:
        """Whether time is up and something fits."""
        return bool(first) and time.perf_counter() > search.stop

    while not over() and (counts := tables.worth_a_look(looked, first)):
        looked.update(counts)
        roomy = [m for m in counts if tables.roomy(m)]
        tables.prepare(roomy, (FREE,))
        tables.prepare([m for m in counts if m not in roomy], MIDDLE)
        for found in tables.looks({m: (FREE,) if m in roomy else MIDDLE for m in counts}):
            for candidate in found:
                tables.best = min(tables.best, candidate.clock_s)
                first[candidate.microbatches] = candidate.clock_s
                yield candidate
    if over():
        search.cut_short = TIMED_OUT
    elif not first:
        yield from tables.lean_candidates()


def corrected(
    search: Search, m: int, beside: Sequence[tuple[tuple[int, ...], int, float]], most: float
) -> list[Candidate]:
    """The candidates with m microbatches where stages of these (logical shape, level) hold so many bytes more than
    tables say; ``search`` remembers it: of all levels of the shape, unless nothing is left then. most: seconds; slower
    ones do not matter."""
    tables, before = tables_of(search), search.beside
    tables.best = most
    for every in (True, False):
        search.beside = dict(before)
        for shape, level, size in beside:
            for number in range(len(tables.levels)) if every else (level,):
                key = shape, m, number
                search.beside[key] = max(search.beside.get(key, 0.0), size)
        if found := tables.again(m):
            return found
    return []


def nearest_misses(search: Search) -> list[Miss]:
    """Why nothing fits, for every microbatch count."""
    return tables_of(search).misses() if search.tables is not None else []


def fits(search: Search) -> bool:
    """Whether anything fits, by the leanest estimates there are; a fraction of the work of ``explore``."""
    return tables_of(search).fits()
