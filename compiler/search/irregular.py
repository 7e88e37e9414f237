"""The search for irregular plans: any cuts, a mesh of its own for each stage, one chunk per stage.

They are looked for where regular plans may be far from the best: on hosts that differ, where the caller gave stages or
cuts, for small graphs, for models of few layers on few devices, and where no regular plan fits. Every microbatch count
and schedule is bounded first, by the recurrence over layers and devices (``pipeline/stage_dp``) on lower bounds of
stages; where something faster than the incumbent may be, cost tables of the submeshes that may matter are made at a
ladder of memory multipliers, and the same recurrence cuts the best pipelines on them. A pipeline counts only if it is
faster than the incumbent by more than ``LEAST_GAIN`` (unless any plan was asked for): people must trust what they are
asked to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf, isfinite

from ..cost.gradient_reduction import lower_by_overlap, raise_by_overlap
from ..errors import OverfullError
from ..pipeline.families import EAGER_1F1B, PIPEDREAM, is_split
from ..pipeline.stage_dp import bound_of
from .lower_bounds import NO_MULTIPLIER
from .predict import least_tied_seconds
from .space import CHUNKED, Submesh
from .state import Candidate, SearchState
from .tables import BOUND_TOLERANCE, tables_of

__all__ = ["IrregularSearch"]

LADDER = (NO_MULTIPLIER, (1.0, 2.0), (3.0, 4.0), (0.1, 6.0), (0.3, 1.0), (1.0, 8.0), (10.0, 1.0), (10.0, 6.0))
LEAST_GAIN = 5e-3  # of a step
MAX_LOWERED = 0.02  # of a bound: what may be taken off for work that overlaps
ABOVE_LIMIT = 1.15  # of the limit: the most for estimates of stages where none is within it


class IrregularSearch:
    """The irregular plans of one search."""

    def __init__(self, search: SearchState) -> None:
        self.search, self.tables = search, tables_of(search)
        single = [name for name in search.space.schedules if name not in CHUNKED]
        #: eager 1F1B is a way to lay out regular plans, unless it is all that was asked for
        self.schedules = [name for name in single if name != EAGER_1F1B] or single
        #: (microbatches, schedule) → seconds that no irregular plan undercuts
        self.bounds: dict[tuple[int, str], float] = {}
        self._rows: dict[int, list[tuple[Submesh, int]]] = {}

    @property
    def bound_s(self) -> float:
        """Seconds that no irregular plan undercuts."""
        return min(self.bounds.values(), default=inf)

    def candidates(self, limit_s: float) -> list[Candidate]:
        """The best pipelines that may be faster than ``limit_s``, fastest first."""
        tables, search, found = self.tables, self.search, list[Candidate]()
        tables.compute_pace_bounds()
        counts = sorted(tables.counts, key=tables.least_share)
        self.bounds = {(m, schedule): tables.least_share(m) for m in counts for schedule in self.schedules}
        for m in counts:
            for schedule in self.schedules:
                if (found or isfinite(limit_s)) and search.must_stop(builds=2):
                    return self._ranked(found)
                best_s = min([limit_s, *(one.clock_s for one in found)])
                self.bounds[m, schedule] = self._bound(m, schedule, best_s)
                if self.bounds[m, schedule] < best_s * (1 - BOUND_TOLERANCE):
                    found += self._solved(m, schedule, best_s)
                    stages = {len(one.rows) for one in found if one.microbatches == m}
                    for p in sorted(stages) if is_split(schedule) else ():  # T does not rank it well
                        found += self._solved(m, schedule, best_s, (p, p))
        return self._ranked(found)

    def _ranked(self, found: Sequence[Candidate]) -> list[Candidate]:
        """These, fastest first; of one stage all schedules are the same."""
        several = [one for one in found if len(one.rows) > 1 or one.schedule == self.schedules[0]]
        return sorted(several, key=lambda one: one.clock_s)

    def solved_again(self, candidate: Candidate, missed: OverfullError, limit_s: float) -> list[Candidate]:
        """The best pipelines with as many microbatches as ``candidate``, which holds too much, after the correction of
        memory estimates that follows; of its level alone if the correction of all leaves nothing."""
        m, schedule = candidate.microbatches, candidate.schedule
        before = self.search.memory_corrections
        for every in (True, False):
            self.search.memory_corrections = dict(before)
            for shape, level, size in missed.beside:
                for number in range(len(self.tables.levels)) if every else (level,):
                    key = shape, m, number
                    held = self.search.memory_corrections.get(key, 0.0)
                    self.search.memory_corrections[key] = max(held, size)
            if m in self._rows and (found := self._solved(m, schedule, limit_s)):
                return found
        return []

    def above_limit(self) -> Iterator[Candidate]:
        """The leanest pipelines slightly above the memory limit: estimates may be too high."""
        for m in self.tables.counts:
            for schedule in self.schedules[:1]:
                yield from self.tables.leanest(m, schedule, ABOVE_LIMIT)

    def _bound(self, m: int, schedule: str, most_s: float) -> float:
        """The bound of a count and schedule, lifted up to ``most_s``."""
        tables, cluster = self.tables, self.search.cluster
        least_s = self.bounds[m, schedule]
        if least_s >= most_s or not isfinite(most_s) or schedule == PIPEDREAM:  # whose steps run into each other
            return least_s
        paced = lower_by_overlap(1.0, m, cluster, tables.hidden_s / most_s) < 1 - MAX_LOWERED  # then by paces alone
        most = most_s if paced else raise_by_overlap(most_s, m, cluster, tables.hidden_s)
        levels = tables.lean_levels(m, split=is_split(schedule), ends=not paced)
        if paced:
            tables.bound([(sub, m, level) for level in tables.work_levels(m) for sub in tables.submeshes])
        floors = tables.lower_bounds_of(m, levels, work=paced)

        def bound(tied_s: float) -> float:
            found = bound_of(replace(floors, tied_s=tied_s), cluster.num_devices, m, schedule, tables.cuts, most, 2)
            return found if paced else lower_by_overlap(found, m, cluster, tables.hidden_s)

        apart_s = bound(self._tied_s)
        # stages of one host exchange shared weights faster, but share all work
        inside_s = least_s * cluster.num_devices / max(host.num_devices for host in cluster.hosts)
        if not self._tied_s or len(cluster.hosts) == 1 or apart_s <= inside_s:
            return max(least_s, apart_s)
        return max(inside_s, bound(0.0))

    @cached_property
    def _tied_s(self) -> float:
        """The least seconds to exchange the weights that the first and the last stage hold, in two hosts if there are
        several."""
        search, cluster = self.search, self.search.cluster
        home = cluster.hosts[0].num_devices if len(cluster.hosts) > 1 else cluster.num_devices - 1
        sizes = {sub.num_devices for sub in self.tables.submeshes}
        return sum(
            min(least_tied_seconds(search.graph, cluster, node, size, [0] * size, [home]) for size in sizes)
            for node in self.tables.tied
        )

    def _solved(
        self, m: int, schedule: str, limit_s: float, stages: tuple[int, int | None] | None = None
    ) -> list[Candidate]:
        """The best pipelines under one schedule. stages: the least and the largest number of them."""
        tables = self.tables
        if m not in self._rows:
            prices = (NO_MULTIPLIER,) if tables.fits_unconstrained(m) and not self.search.small else LADDER
            self._rows[m] = tables.rows(m, prices, limit_s)
        return tables.solve(m, schedule, self._rows[m], limit_s, stages=stages or tables.cuts.stages)
