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
    first_s: dict[int, float] = {}  # microbatches → the makespan of its first pipeline
    tables.compute_lower_bounds()
    solved_counts: set[int] = set()

    def out_of_time() -> bool:
        """True if time is up and something fits."""
        return bool(first_s) and time.perf_counter() > search.deadline

    while not out_of_time() and (counts := tables.next_counts(solved_counts, first_s)):
        solved_counts.update(counts)
        fits_unconstrained = [m for m in counts if tables.fits_unconstrained(m)]
        tables.prepare(fits_unconstrained, (NO_MULTIPLIER,))
        tables.prepare([m for m in counts if m not in fits_unconstrained], MIDDLE_MULTIPLIERS)
        for candidates in tables.solve_counts(
            {m: (NO_MULTIPLIER,) if m in fits_unconstrained else MIDDLE_MULTIPLIERS for m in counts}
        ):
            for candidate in candidates:
                tables.best = min(tables.best, candidate.clock_s)
                first_s[candidate.microbatches] = candidate.clock_s
                yield candidate
    if out_of_time():
        search.cut_short = TIMED_OUT
    elif not first_s:
        yield from tables.min_memory_candidates()


def corrected_candidates(
    search: SearchState, m: int, beside: Sequence[tuple[tuple[int, ...], int, float]], limit_s: float
) -> list[Candidate]:
    """The candidates with m microbatches after a correction of their stages' memory.

    Stages of each (mesh shape, level) in ``beside`` hold so many bytes more than tables say. ``search`` remembers it
    for all levels of the shape, unless nothing is left then. limit_s: seconds; slower candidates do not matter.
    """
    tables, before = tables_of(search), search.memory_corrections
    tables.best = limit_s
    for every in (True, False):
        search.memory_corrections = dict(before)
        for shape, level, size in beside:
            for number in range(len(tables.levels)) if every else (level,):
                key = shape, m, number
                search.memory_corrections[key] = max(search.memory_corrections.get(key, 0.0), size)
        if candidates := tables.resolve(m):
            return candidates
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
    base = _first(search)
    offered: list[Candidate] = []
    if not search.small:
        ranked = with_other_schedules(search, base)
        offered = [candidate for candidate in ranked if candidate.schedule != search.space.base_schedule]
        if ranked and search.workers > 1:
            start_proof(search, ranked[0].clock_s)
    counts: list[int] = []
    if base and search.thorough and not search.cut_short:
        base, counts = _closely(search, base, offered)
    candidates = with_other_schedules(search, base, offered, None if search.small else counts)
    return base, candidates or (divisions_above_limit(search) if base else [])


def _first(search: SearchState) -> list[Candidate]:
    candidates: list[Candidate] = []
    try:
        for candidate in first_pipelines(search):
            candidates.append(candidate)
    except KeyboardInterrupt:
        if not candidates:
            raise
        search.cut_short = INTERRUPTED
    return sorted(candidates, key=lambda candidate: candidate.clock_s)


def _closely(
    search: SearchState, base: Sequence[Candidate], offered: Sequence[Candidate]
) -> tuple[list[Candidate], list[int]]:
    """(``base`` and more pipelines of the base schedule, the microbatch counts that have new rows)."""
    candidates, counts = list(base), list[int]()
    try:
        _look(search, candidates, counts, min((other.clock_s for other in offered), default=inf))
    except KeyboardInterrupt:
        search.cut_short = INTERRUPTED
    return sorted(candidates, key=lambda candidate: candidate.clock_s), counts


def _look(search: SearchState, candidates: list[Candidate], counts: list[int], best_s: float) -> None:
    """Add pipelines to ``candidates``, and to ``counts`` the microbatch counts that get new rows.

    best_s: the least clock of the other schedules.
    """
    tables, space = tables_of(search), search.space
    if not isfinite(tables.best):  # nothing fits but by generous estimates
        return
    by_count: dict[int, list[Candidate]] = {}
    for one in candidates:
        by_count.setdefault(one.microbatches, []).append(one)
    close_counts = [m for m, group in by_count.items() if group[0].clock_s <= LADDER_TOLERANCE * tables.best][
        :MAX_LADDER_COUNTS
    ]
    tight_counts = [m for m in close_counts if tables.gains_from_memory(m, by_count[m][0].clock_s)]
    ladder_counts = tight_counts
    if not search.small and space.base_schedule in space.schedules:
        best_s = min(best_s, tables.best)
        ladder_counts = [m for m in tight_counts if tables.faster_without_limit(m, best_s * (1 - BOUND_TOLERANCE))]
        for m in tight_counts:
            if m not in ladder_counts and faster_without_limit(search, m, by_count[m], best_s * (1 - TIE_TOLERANCE)):
                used = dict.fromkeys(row.submesh for one in by_count[m] for row in one.rows)
                tables.prepare_uniform_ladder(m, best_s, used)
                counts.append(m)
        tables.best = best_s
    tables.prepare_ladder(ladder_counts)
    for place, m in enumerate(close_counts):
        search.progress("search", place / len(close_counts))
        if tables.bound(m) >= tables.best * (1 - BOUND_TOLERANCE):
            continue
        if time.perf_counter() > search.deadline:
            search.cut_short = TIMED_OUT
            return
        counts += [m] if m in ladder_counts else []
        for candidate in tables.candidates(m, m in ladder_counts):
            tables.best = min(tables.best, candidate.clock_s)
            candidates.append(candidate)
