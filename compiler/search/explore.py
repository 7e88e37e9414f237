"""The search over microbatch counts, submeshes, shardings, residencies and recompute, best first, under one family of
schedules (``Space.base_schedule``).

1. *Floors* (``lower_bounds``). For every microbatch count and submesh: the least seconds per microbatch of every run
   of layers, whatever its bytes, and the least where a byte is as dear as can be.
2. *Looks.* A few counts at a time, the middle of those that may win first, get tables at middling prices of a byte and
   their first pipeline; then the neighbours of the best, until it has none better.
What comes after them is in ``first_pipelines``. What was looked at is bounded on the way by its own Lagrangian values
(``bounds``), the rest afterwards (``optimality``). The bound of the search is the least of all counts'.

Nothing is assembled here: candidates name runs of layers, rows of tables and devices, with their makespan on a clock.

Candidates of all open families of schedules, fastest first: what is assembled of them is the driver's business.

1. The guide's first pipelines (``first_pipelines``).
2. What the other families make of their tables (``other_schedules``).
3. *Closer looks* at the counts whose first pipelines are the fastest: their other good pipelines and, where memory is
   tight, a ladder of prices of a byte, so that leaner shardings, residencies and recompute modes of the same submeshes
   stand for choice. That takes most of a search, so it is done only where it may help: where the rows of least seconds
   were faster than the best candidate of any family if memory had no limit. Where that holds of other families alone,
   only the submeshes that they may take get the ladder.
4. What the other families make of what is new.

Where there are workers, a fork proves bounds from 3 on: as far as what is known then, so that what is found later is
bounded, too.

Of small graphs the ladder is looked at in any case, and the other families once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf, isfinite

from .lower_bounds import NO_MULTIPLIER
from .optimality import start_proof
from .other_schedules import TIE_TOLERANCE, divisions_above_limit, faster_without_limit, with_other_schedules
from .state import INTERRUPTED, TIMED_OUT, Candidate, Miss, SearchState
from .tables import BOUND_TOLERANCE, MIDDLE_MULTIPLIERS, tables_of

__all__ = ["anything_fits", "corrected_candidates", "find_candidates", "first_pipelines", "nearest_misses"]


def first_pipelines(search: SearchState) -> Iterator[Candidate]:
    """The first pipelines of the counts that are looked at, as they are found; ``search.bounds`` fills meanwhile."""
    tables = tables_of(search)
    tables.best = inf
    first: dict[int, float] = {}  # microbatches → the makespan of its first pipeline
    tables.compute_lower_bounds()
    looked: set[int] = set()

    def over() -> bool:
        """Whether time is up and something fits."""
        return bool(first) and time.perf_counter() > search.deadline

    while not over() and (counts := tables.next_counts(looked, first)):
        looked.update(counts)
        fits_unconstrained = [m for m in counts if tables.fits_unconstrained(m)]
        tables.prepare(fits_unconstrained, (NO_MULTIPLIER,))
        tables.prepare([m for m in counts if m not in fits_unconstrained], MIDDLE_MULTIPLIERS)
        for found in tables.solve_counts(
            {m: (NO_MULTIPLIER,) if m in fits_unconstrained else MIDDLE_MULTIPLIERS for m in counts}
        ):
            for candidate in found:
                tables.best = min(tables.best, candidate.clock_s)
                first[candidate.microbatches] = candidate.clock_s
                yield candidate
    if over():
        search.cut_short = TIMED_OUT
    elif not first:
        yield from tables.min_memory_candidates()


def corrected_candidates(
    search: SearchState, m: int, beside: Sequence[tuple[tuple[int, ...], int, float]], most: float
) -> list[Candidate]:
    """The candidates with m microbatches where stages of these (logical shape, level) hold so many bytes more than
    tables say; ``search`` remembers it: of all levels of the shape, unless nothing is left then. most: seconds; slower
    ones do not matter."""
    tables, before = tables_of(search), search.memory_corrections
    tables.best = most
    for every in (True, False):
        search.memory_corrections = dict(before)
        for shape, level, size in beside:
            for number in range(len(tables.levels)) if every else (level,):
                key = shape, m, number
                search.memory_corrections[key] = max(search.memory_corrections.get(key, 0.0), size)
        if found := tables.resolve(m):
            return found
    return []


def nearest_misses(search: SearchState) -> list[Miss]:
    """Why nothing fits, for every microbatch count."""
    return tables_of(search).misses() if search.tables is not None else []


def anything_fits(search: SearchState) -> bool:
    """Whether anything fits, by the leanest estimates there are; a fraction of the work of ``first_pipelines``."""
    return tables_of(search).fits()


MAX_LADDER_COUNTS = 3  # microbatch counts that are looked at closely
LADDER_TOLERANCE = 1.04  # of the best first pipeline: how far theirs may be


def find_candidates(search: SearchState) -> tuple[list[Candidate], list[Candidate]]:
    """(pipelines of the guide, pipelines of all open families), fastest first each."""
    guided = _first(search)
    offered: list[Candidate] = []
    if not search.small:
        ranked = with_other_schedules(search, guided)
        offered = [one for one in ranked if one.schedule != search.space.base_schedule]
        if ranked and search.workers > 1:
            start_proof(search, ranked[0].clock_s)
    counts: list[int] = []
    if guided and search.thorough and not search.cut_short:
        guided, counts = _closely(search, guided, offered)
    found = with_other_schedules(search, guided, offered, None if search.small else counts)
    return guided, found or (divisions_above_limit(search) if guided else [])


def _first(search: SearchState) -> list[Candidate]:
    found: list[Candidate] = []
    try:
        for candidate in first_pipelines(search):
            found.append(candidate)
    except KeyboardInterrupt:
        if not found:
            raise
        search.cut_short = INTERRUPTED
    return sorted(found, key=lambda candidate: candidate.clock_s)


def _closely(
    search: SearchState, guided: Sequence[Candidate], offered: Sequence[Candidate]
) -> tuple[list[Candidate], list[int]]:
    """(``guided`` and more, the microbatch counts that have other rows now)."""
    found, counts = list(guided), list[int]()
    try:
        _look(search, found, counts, min((one.clock_s for one in offered), default=inf))
    except KeyboardInterrupt:
        search.cut_short = INTERRUPTED
    return sorted(found, key=lambda candidate: candidate.clock_s), counts


def _look(search: SearchState, found: list[Candidate], counts: list[int], best_s: float) -> None:
    """Add pipelines to ``found``, and to ``counts`` the microbatch counts that get other rows. best_s: the least clock
    of the other families."""
    tables, space = tables_of(search), search.space
    if not isfinite(tables.best):  # nothing fits but by generous estimates
        return
    by_count: dict[int, list[Candidate]] = {}
    for one in found:
        by_count.setdefault(one.microbatches, []).append(one)
    near = [m for m, some in by_count.items() if some[0].clock_s <= LADDER_TOLERANCE * tables.best][:MAX_LADDER_COUNTS]
    tight = [m for m in near if tables.gains_from_memory(m, by_count[m][0].clock_s)]
    lean = tight
    if not search.small and space.base_schedule in space.schedules:
        best_s = min(best_s, tables.best)
        lean = [m for m in tight if tables.faster_without_limit(m, best_s * (1 - BOUND_TOLERANCE))]
        for m in tight:
            if m not in lean and faster_without_limit(search, m, by_count[m], best_s * (1 - TIE_TOLERANCE)):
                used = dict.fromkeys(row.submesh for one in by_count[m] for row in one.rows)
                tables.prepare_uniform_ladder(m, best_s, used)
                counts.append(m)
        tables.best = best_s
    tables.prepare_ladder(lean)
    for place, m in enumerate(near):
        search.progress("search", place / len(near))
        if tables.bound(m) >= tables.best * (1 - BOUND_TOLERANCE):
            continue
        if time.perf_counter() > search.deadline:
            search.cut_short = TIMED_OUT
            return
        counts += [m] if m in lean else []
        for candidate in tables.candidates(m, m in lean):
            tables.best = min(tables.best, candidate.clock_s)
            found.append(candidate)
