"""Cost tables of stages per (submesh, microbatch count, memory multiplier), and the best pipelines on them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf, isfinite

import numpy as np

from ..cost.gradient_reduction import max_overlap, raise_by_overlap
from ..pipeline.bounds import clock_seconds
from ..pipeline.stage_dp import RankingLimits, describe_pipeline, solve
from ..pipeline.table import InfeasiblePipeline, Pipeline, PipelineSolution, PipelineTable, StageChoice
from ..pipeline.virtual_stages import least_sums
from ..workers import run_all
from .lower_bounds import LARGEST_MULTIPLIER, NO_MULTIPLIER, SearchBounds
from .space import Submesh
from .state import Candidate, Miss, SearchState, StageRow

__all__ = ["ABOVE_LIMIT", "BOUND_TOLERANCE", "MIDDLE_MULTIPLIERS", "NO_LIMIT", "SearchTables", "tables_of"]

BOUND_TOLERANCE = 1e-3  # of the bound: candidates closer than that are as good as proven
#: (units, microbatches in flight), as ``lower_bounds.NO_MULTIPLIER``
MIDDLE_MULTIPLIERS = (NO_MULTIPLIER, (1.0, 2.0), (3.0, 4.0))
MULTIPLIER_LADDER = (*MIDDLE_MULTIPLIERS, (0.1, 6.0), (0.3, 1.0), (1.0, 8.0), (10.0, 1.0), (10.0, 6.0))
MAX_VISITS = 300  # partial pipelines looked at to rank candidates
CANDIDATE_SLACK = 0.05  # by which other pipelines of a table may be slower than its best
ABOVE_LIMIT = 1.15  # of the limit: the most for estimates of stages where none is within it
NO_LIMIT = 1e9  # of the limit: no estimate is as large
COUNTS_PER_ROUND = 3  # microbatch counts to solve together: the best of them makes the next rounds short
SINGLE_STAGE_FULLNESS = 0.5  # of the memory: below it one stage may well be the best pipeline
EXPOSED_MESSAGES = (0.8, 0.2)  # fractions of a stage's messages that delay the next microbatch; both are tried
DELAY_ALLOWANCE = 1.15  # by which the estimate of a pipeline delayed so may be above its makespan
MIN_FORK_ENTRIES = 200_000  # entries of a table: less takes no longer to solve than a worker's start


class SearchTables(SearchBounds):
    """Intervals by (submesh, microbatches, level), made for as many cases at once as are asked for."""

    def __init__(self, search: SearchState) -> None:
        super().__init__(search)
        self._lifted: dict[int, tuple[Sequence[int], float]] = {}  # microbatches → levels and best of the last lift

    # ---- looks

    def next_counts(self, looked: Collection[int], first: Mapping[int, float]) -> list[int]:
        """The microbatch counts to solve next, given the makespans of those that were: a spread of them, then, once
        some fit, the neighbours of the best until none is better."""
        left = self._unexplored(looked)
        if spread := self._competitive([m for m in self._spread if m in left]):
            return spread if self.search.small else spread[:COUNTS_PER_ROUND]
        left = self._unexplored(looked)
        if not first:
            return left[::-1][::2][:COUNTS_PER_ROUND]
        able = [m for m in self.counts if m in looked or m in left]
        at = able.index(min(first, key=lambda m: first[m]))
        return self._competitive([m for m in able[max(0, at - 1) : at + 2] if m in left])

    @cached_property
    def _spread(self) -> list[int]:
        """Every other count: those of the smallest microbatches, and all with which one stage of all devices may be the
        best. The middle comes first, as its makespan rules others out."""
        counts = [m for m in self.counts if isfinite(self.bound(m))][::-1][::2]
        spread = counts[:COUNTS_PER_ROUND] + [
            m for m in counts[COUNTS_PER_ROUND:] if self.min_memory_fraction(m) < SINGLE_STAGE_FULLNESS
        ]
        middle = (len(spread) - 1) / 2
        return sorted(spread, key=lambda m: abs(spread.index(m) - middle))

    def _unexplored(self, looked: Collection[int]) -> list[int]:
        """The unsolved counts that may be faster than the best, by their bounds so far."""
        return [m for m in self.counts if m not in looked and self.bound(m) < self.best * (1 - BOUND_TOLERANCE)]

    def _competitive(self, counts: Sequence[int]) -> list[int]:
        """The counts that may be faster than the best.

        Where memory is plenty, their bounds are lifted before tables are made. A small graph keeps all counts: its
        other schedules may need them.
        """
        if self.search.small:
            return list(counts)
        fresh = (
            [m for m in counts if m not in self._lifted and self.fits_unconstrained(m)] if isfinite(self.best) else []
        )
        levels = {m: self._level(m, *NO_MULTIPLIER) for m in fresh}
        self._bound([(sub, m, level) for m, level in levels.items() for sub in self.submeshes])

        def lifted(some: Sequence[int]) -> list[float]:
            for m in some:
                self._lift(m, [levels[m]])
            return [self.bound(m) for m in some]

        shares = [some for k in range(self.search.workers) if (some := fresh[k :: self.search.workers])]
        for some, bounds in zip(shares, run_all([partial(lifted, some) for some in shares]) if fresh else ()):
            self.search.bounds.update(
                {(m, self.search.space.base_schedule): bound_s for m, bound_s in zip(some, bounds)}
            )
        self._lifted.update({m: ([level], self.best) for m, level in levels.items()})
        return [m for m in counts if self.bound(m) < self.best * (1 - BOUND_TOLERANCE)]

    def prepare(self, counts: Sequence[int], prices: Sequence[tuple[float, float]]) -> None:
        """Make the rows of all submeshes at these prices, for several counts at once."""
        rows = [(sub, m, self._level(m, *one)) for m in counts for one in prices for sub in self._worthwhile(m)]
        with self.search.timed("compose"):
            self._compose(rows)

    def solve_counts(self, prices: Mapping[int, Sequence[tuple[float, float]]]) -> Iterator[list[Candidate]]:
        """Yield the best pipeline of each count at these multipliers, whose rows are prepared, if it is faster than the
        best so far.

        With workers each count has one, and the pass "stages" has the seconds until all are done. Without workers they
        follow one another, so that each makes the next search short.
        """
        if self.search.workers == 1 or len(prices) == 1:
            yield from (self._solve_count(m, some) for m, some in prices.items())
            return
        begin, before = time.perf_counter(), self.search.passes.get("stages", 0.0)
        answers = run_all([partial(self._solve_count_as_data, m, some) for m, some in prices.items()])
        self.search.passes["stages"] = before + time.perf_counter() - begin
        for m, (bound_s, known, candidates) in zip(prices, answers):
            self.search.bounds[m, self.search.space.base_schedule], self.rows_in_use[m] = bound_s, known
            yield [replace(candidate, rows=self._rows(m, candidate.pipeline, known)) for candidate in candidates]

    def _solve_count_as_data(
        self, m: int, prices: Sequence[tuple[float, float]]
    ) -> tuple[float, Sequence[tuple[Submesh, int]], list[Candidate]]:
        """A solved count as plain data: its bound, its rows and its candidates without their rows."""
        candidates = self._solve_count(m, prices)
        return self.bound(m), self.rows_in_use[m], [replace(candidate, rows=()) for candidate in candidates]

    def _solve_count(self, m: int, prices: Sequence[tuple[float, float]]) -> list[Candidate]:
        return self._solve(m, self.rows(m, prices), [self._level(m, *one) for one in prices], 1)[:1]

    def _worthwhile(self, m: int) -> list[Submesh]:
        """Submeshes that some stage faster than the best plan could have."""
        return [sub for sub in self.submeshes if m * self._least_pace(sub, m).min() < self.best]

    # ---- candidates

    def uniform_rows(self, m: int, most: float) -> Sequence[tuple[Submesh, int]]:
        """The rows, made if need be, of the submeshes of which equal groups may be faster than ``most``."""
        if m not in self.rows_in_use:
            self._use_rows(
                m,
                self._uniform_submeshes(m, most),
                (NO_MULTIPLIER,) if self.fits_unconstrained(m) else MIDDLE_MULTIPLIERS,
            )
        return self.rows_in_use[m]

    def prepare_uniform_ladder(self, m: int, most: float, also: Collection[Submesh]) -> None:
        """Make rows at all multipliers for such submeshes and for ``also`` the rows of m."""
        subs = [sub for sub in self._uniform_submeshes(m, most) if sub not in also]
        self._use_rows(m, [*also, *subs], MULTIPLIER_LADDER)

    def _uniform_submeshes(self, m: int, most: float) -> list[Submesh]:
        total = len(self.usable)
        able = [sub for sub in self.submeshes if sub.place is None and total // sub.num_devices >= 2]
        paces = [self._least_pace(sub, m) for sub in able]
        work = least_sums(np.stack(paces), self.cuts).tolist() if paces else list[float]()
        return [sub for sub, s in zip(able, work) if m * s / (total // sub.num_devices) < most]

    def _use_rows(self, m: int, subs: Sequence[Submesh], prices: Sequence[tuple[float, float]]) -> None:
        levels = dict.fromkeys(self._level(m, *one) for one in prices)
        self.rows_in_use[m] = [(sub, level) for level in levels for sub in subs]
        with self.search.timed("compose"):
            self._compose([(sub, m, level) for sub, level in self.rows_in_use[m]])

    def prepare_ladder(self, counts: Sequence[int]) -> None:
        """Make the rows at all multipliers, for counts where memory is tight."""
        self.prepare(counts, MULTIPLIER_LADDER)

    def rows(self, m: int, prices: Sequence[tuple[float, float]] = (NO_MULTIPLIER,)) -> list[tuple[Submesh, int]]:
        """The rows of m at these multipliers, by default those of least seconds, of submeshes that may matter."""
        levels = dict.fromkeys(self._level(m, *one) for one in prices)
        return [(sub, level) for level in levels for sub in self._worthwhile(m)]

    def faster_without_limit(self, m: int, limit_s: float) -> bool:
        """True if pipelines with m microbatches would be faster than ``limit_s`` without a memory limit."""
        known, best, self.best = self.rows_in_use[m], self.best, limit_s
        candidates = self._solve(m, self.rows(m), [], 1, NO_LIMIT)
        self.rows_in_use[m], self.best = known, best
        return any(candidate.clock_s < limit_s for candidate in candidates)

    def candidates(self, m: int, lean: bool) -> list[Candidate]:
        """The best pipelines with m microbatches. lean: at all multipliers, where leaner rows may help. Their bound
        goes to ``search.bounds``."""
        known = self.rows_in_use[m]
        prices = MULTIPLIER_LADDER if lean else (NO_MULTIPLIER,)
        priced = list(dict.fromkeys(self._level(m, *one) for one in prices))
        pipelines = self._solve(m, self.rows(m, prices), priced)
        if not lean:
            self.rows_in_use[m] = known
        return pipelines

    def resolve(self, m: int) -> list[Candidate]:
        """The best pipelines with m microbatches on the existing rows, after a correction of memory estimates."""
        return self._solve(m, self.rows_in_use[m], [])

    def min_memory_candidates(self) -> Iterator[Candidate]:
        """The best pipelines at the largest memory multiplier, slightly above the limit: estimates may be too high."""
        for m in self.counts:
            level = self._level(m, *LARGEST_MULTIPLIER)
            self._compose([(sub, m, level) for sub in self.submeshes])
            yield from self._solve(m, [(sub, level) for sub in self.submeshes], [], 1, ABOVE_LIMIT)

    def without_memory_limit(self, counts: Sequence[int], top_k: int) -> Iterator[Candidate]:
        """The best pipelines of these microbatch counts at each multiplier, without a memory limit."""
        every = (*MULTIPLIER_LADDER, LARGEST_MULTIPLIER)
        prices = {m: (NO_MULTIPLIER,) if self.fits_unconstrained(m) else every for m in counts}
        self.prepare(counts, (NO_MULTIPLIER,))
        self.prepare([m for m in counts if prices[m] is every], every)
        for m in counts:
            for level in dict.fromkeys(self._level(m, *one) for one in prices[m]):
                pairs = [(sub, level) for sub in self._worthwhile(m)]
                yield from self._solve(m, pairs, [], top_k, NO_LIMIT, NO_LIMIT) if pairs else ()

    def _solve(
        self,
        m: int,
        pairs: Sequence[tuple[Submesh, int]],
        priced: Sequence[int],
        top_k: int = 5,
        room: float = 1.0,
        slack: float = CANDIDATE_SLACK,
    ) -> list[Candidate]:
        """Pipelines of these (submesh, level) options, best first; priced: levels with lower bounds of all pipelines;
        room: as in ``table``; slack: as in ``stage_dp.solve``.

        Messages delay 1F1B even where they overlap with work: a round trip over n stages, each of which waits for the
        next, takes their paces and the messages between them, n times per n microbatches. So a stage's messages count
        in its pace while pipelines are looked for; what is found is timed on a clock without that.
        """
        search, schedule = self.search, self.search.space.base_schedule
        self.rows_in_use[m] = pairs
        with search.timed("stages"):
            lifted = self._lifted.get(m) == (priced, self.best)
            if priced and not lifted and self._lift(m, priced) >= self.best * (1 - BOUND_TOLERANCE):
                return []
            table = self.table(m, pairs, room)
            if table is None:
                return []
            messages = table.transfer_s + (0.0 if table.entry_s is None else table.entry_s)
            most = raise_by_overlap(self.best, m, search.cluster, self.hidden_s)
            if top_k == 1 and m in self._spread:  # what is found may be faster on the clock, and lead elsewhere
                most *= DELAY_ALLOWANCE

            def solved(exposed: float) -> list[tuple[StageChoice, ...]]:
                delayed = replace(table, pace_s=table.pace_s + exposed * messages)
                answer = solve(
                    delayed, m, schedule, self.cuts, RankingLimits(top_k, slack, MAX_VISITS, most), explain=False
                )
                return [one.stages for one in getattr(answer, "pipelines", ())]

            works = [partial(solved, exposed) for exposed in (EXPOSED_MESSAGES if top_k > 1 else EXPOSED_MESSAGES[:1])]
            apart = search.workers > 1 and table.pace_s.size > MIN_FORK_ENTRIES
            parts = run_all(works) if apart else [work() for work in works]
            stages = dict.fromkeys(one for part in parts for one in part)
            described = [describe_pipeline(table, m, schedule, one) for one in stages]
            found = [self.candidate(m, schedule, one, pairs, table) for one in described]
        return sorted(found, key=lambda candidate: candidate.clock_s)

    def candidate(
        self,
        m: int,
        schedule: str,
        pipeline: Pipeline,
        pairs: Sequence[tuple[Submesh, int]],
        table: PipelineTable,
    ) -> Candidate:
        """The candidate that this pipeline of a table is, with its rows."""
        at = max(
            ((one.option, one.first_layer, one.end_layer) for one in pipeline.stages), key=lambda i: table.pace_s[i]
        )
        clock_s = clock_seconds(table, m, schedule, pipeline)
        pace_s, once_s = float(table.pace_s[at]), float(table.step_s[at])
        hidden_s = min(max_overlap(self.search.cluster) * pace_s, once_s)
        return Candidate(m, schedule, pipeline, self._rows(m, pipeline, pairs), clock_s, pace_s, once_s, hidden_s)

    def _rows(self, m: int, pipeline: Pipeline, pairs: Sequence[tuple[Submesh, int]]) -> tuple[StageRow, ...]:
        """The rows of the pipeline's stages."""
        rows = []
        for sub, price in (pairs[stage.option] for stage in pipeline.stages):
            group = self._group(sub)
            rows.append(StageRow(group.composer, group.row(sub, m, price), sub))
        return tuple(rows)

    # ---- tables

    def table(self, m: int, pairs: Sequence[tuple[Submesh, int]], room: float = 1.0) -> PipelineTable | None:
        """The pipeline table of these options; None if no option can run anything. room: the fraction of the memory
        limit that estimates may fill."""
        arrays: dict[str, list[np.ndarray]] = {
            name: [] for name in ("pace_s", "transfer_s", "entry_s", "step_s", "resident", "saved", "transient")
        }
        numbers = {sub: number for number, sub in enumerate(self.submeshes)}
        for sub, price in pairs:
            group = self._group(sub)
            possible = np.isfinite(group.array("cost", sub, m, price))
            if sub.place is not None:
                only = np.zeros_like(possible)
                only[sub.place] = True
                possible &= only
            for name, values in arrays.items():
                array = group.array(name, sub, m, price)
                if name == "pace_s":
                    array = np.where(possible, array, inf)
                elif name == "step_s":
                    array = array * m
                elif name == "resident":  # every use of a weight counts a copy; at the least they are as fine as can be
                    array = np.maximum(array - self._copies / sub.num_devices, 0.0)
                elif name == "transfer_s":  # a message is before the stage that receives it
                    array = np.maximum(array - group.array("entry_s", sub, m, price), 0.0)
                values.append(array)
        stacked = {name: np.stack(values) for name, values in arrays.items()}
        if not np.isfinite(stacked["pace_s"]).any():
            return None
        beside = self.search.memory_corrections
        options = tuple(
            self._option(sub, numbers[sub], n, room, beside.get((sub.shape, m, n), 0.0)) for sub, n in pairs
        )
        return PipelineTable(self._shape[0], self.search.cluster.num_devices, options, **stacked)

    # ---- where nothing fits

    def misses(self) -> list[Miss]:
        """The misses at the largest memory multiplier, for every microbatch count."""
        answers = [self._leanest(m, True) for m in self.counts]
        return [answer for answer in answers if isinstance(answer, Miss)]

    def fits(self) -> bool:
        """True if something fits at the largest memory multiplier, the smallest microbatches first."""
        for m in self.counts[::-1]:
            self._bound([(sub, m, 0) for sub in self.submeshes])
            if isinstance(self._leanest(m, False), PipelineSolution):
                return True
        return False

    def _leanest(self, m: int, explain: bool) -> PipelineSolution | Miss | None:
        """The best pipelines at the largest memory multiplier; None if no option can run anything."""
        level = self._level(m, *LARGEST_MULTIPLIER)
        pairs = [(sub, level) for sub in self.submeshes]
        self._compose([(sub, m, level) for sub in self.submeshes])
        table = self.table(m, pairs)
        base_schedule = self.search.space.base_schedule
        answer = (
            solve(table, m, base_schedule, self.cuts, RankingLimits(top_k=1), explain=explain)
            if table is not None
            else None
        )
        if not isinstance(answer, InfeasiblePipeline):
            return answer
        if answer.choice is None:
            return Miss(answer, m)
        sub = pairs[answer.choice.option][0]
        group = self._group(sub)
        return Miss(answer, m, StageRow(group.composer, group.row(sub, m, level), sub))


def tables_of(search: SearchState) -> SearchTables:
    """The tables of a search, made at the first question and shared by all passes."""
    if search.tables is None:
        search.tables = SearchTables(search)
    assert isinstance(search.tables, SearchTables)
    return search.tables
