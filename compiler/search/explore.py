"""The search for candidates over microbatch counts, submeshes, shardings, parameter shardings and recompute.

The first part finds the best pipelines of the base schedule, a few microbatch counts at a time:

1. *Lower bounds* (``lower_bounds``). For every microbatch count and submesh: the least seconds per microbatch of every
   run of layers, whatever its bytes, and the least at the largest memory multiplier.
2. *First pipelines.* The counts in the middle of those that may win come first; they get tables at middling memory
   multipliers and their best pipeline. Then the neighbours of the best count follow, until none is better.

The second part adds candidates of all open schedules, fastest first:

3. The other schedules' pipelines on the same tables (``other_schedules``).
4. *Further multipliers* for the counts whose first pipelines are the fastest: their other good pipelines and, where
   memory is tight, tables at a ladder of multipliers, which offer leaner shardings and recompute modes of the same
   submeshes. That takes most of a search. So it is done only where the rows of least seconds, without a memory limit,
   would be faster than the best candidate of any schedule. Where that holds of other schedules alone, only the
   submeshes that they may take get the ladder.
5. The other schedules' pipelines on the new tables.

Small graphs always get the ladder, and the other schedules once, at the end.

With workers, a fork lifts bounds from 4 on, up to the best candidate of that time. ``bounds`` gets a bound of every
solved count on the way, by its Lagrangian values; ``optimality`` bounds the rest afterwards. The bound of the search is
the least of all counts' bounds.

Nothing is built here: candidates name runs of layers, rows of tables and devices, with their makespan on a clock.
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
    """Yield the best pipeline of every microbatch count that may win, as it is found; fills ``search.bounds``
    meanwhile."""
    tables = tables_of(search)
    tables.best = inf
    first: dict[int, float] = {}  # microbatches → the makespan of its first pipeline
    tables.compute_lower_bounds()
    looked: set[int] = set()

    def over() -> bool:
        """True if time is up and something fits."""
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
    """The candidates with m microbatches after a correction of their stages' memory.

    Stages of each (mesh shape, level) in ``beside`` hold so many bytes more than tables say. ``search`` remembers it
    for all levels of the shape, unless nothing is left then. most: seconds; slower candidates do not matter.
    """
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
    """The reason why nothing fits, for every microbatch count."""
    return tables_of(search).misses() if search.tables is not None else []


def anything_fits(search: SearchState) -> bool:
    """True if anything fits by the estimates at the largest memory multiplier. A fraction of the work of
    ``first_pipelines``."""
    return tables_of(search).fits()


#: microbatch counts that get further multipliers
MAX_LADDER_COUNTS = 3
#: by which their first pipeline may be slower than the best first pipeline
LADDER_TOLERANCE = 1.04


def find_candidates(search: SearchState) -> tuple[list[Candidate], list[Candidate]]:
    """(pipelines of the base schedule, pipelines of all open schedules), fastest first each."""
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
    """(``guided`` and more pipelines of the base schedule, the microbatch counts that have new rows)."""
    found, counts = list(guided), list[int]()
    try:
        _look(search, found, counts, min((one.clock_s for one in offered), default=inf))
    except KeyboardInterrupt:
        search.cut_short = INTERRUPTED
    return sorted(found, key=lambda candidate: candidate.clock_s), counts


def _look(search: SearchState, found: list[Candidate], counts: list[int], best_s: float) -> None:
    """Add pipelines to ``found``, and to ``counts`` the microbatch counts that get new rows. best_s: the least clock of
    the other schedules."""
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
