"""The search for regular plans: equal device groups under one mesh, best first by lower bounds.

A *case* is a microbatch count, a mesh, and a schedule on so many groups and virtual stages (``pipeline/regular``). All
cases of a request wait in one queue, by a lower bound on their steps. The bound of a mesh and count comes first, by the
work of all layers on as many groups as there is room for; then that of each of its cases, with the memory that they
need; with several virtual stages, one of the divisions that are looked at, and one of what follows on each other in the
schedule; then the case is solved, on cost tables at several memory multipliers, and timed on a clock. The queue ends
where its least bound is no less than the fastest case. So what was never solved is proven to be no faster, and the
bound of the search is the least of all cases' bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isfinite, prod
from operator import attrgetter

import numpy as np

from ..cost.gradient_reduction import lower_by_overlap, max_overlap
from ..errors import OverfullError
from ..pipeline.cutting_planes import CLOSE
from ..pipeline.families import PIPEDREAM
from ..pipeline.regular import MeshTable, PipelineCase, dual_levels, groups_that_fit, places
from ..pipeline.regular_bounds import case_bounds, mesh_bound
from ..pipeline.regular_solver import RegularAnswer, close_bound, divisions_of, played_bound, solve_case
from ..pipeline.table import Floats, PipelineTable
from .lower_bounds import LARGEST_MULTIPLIER, NO_MULTIPLIER
from .predict import least_tied_seconds
from .space import CHUNKED, Submesh, stays_inside
from .state import INTERRUPTED, MIN_HIDDEN_FRACTION, Candidate, SearchState
from .tables import tables_of

__all__ = ["RegularSearch", "is_regular_enough", "is_regular_only"]

#: memory multipliers for bounds, in units of a stage's time per its memory (``lower_bounds``)
FACTORS = tuple(2.0**power for power in range(-5, 4))
BETWEEN = (0.63, 0.79, 1.26, 1.59, 2.52, 3.17)  # of a factor: two before it, two behind it, two behind the next one
COARSE_FACTORS = (0.125, 1.0)
MESHES_AT_ONCE = 8  # whose tables and bounds are made together
LIFTED_AT_ONCE = 32  # whose first bounds are
MAX_IRREGULAR_LAYERS, MAX_IRREGULAR_DEVICES = 48, 16  # of a request whose irregular plans are always looked for
CLOCK_TOLERANCE = 1.05  # by which the clock may be wrong
MAX_CANDIDATES = 24  # that are offered
NEAR = 1e-2  # of a makespan: bounds by which cases are left out may be so far below it
DIVIDED_AGAIN = 0.02  # of a bound on divisions: what those may be below it that are found when a case is solved
MAX_LOWERED = 0.005  # of a bound: what may be taken off for work that overlaps


def is_regular_only(search: SearchState) -> bool:
    """True if only regular plans were asked for."""
    return search.request is not None and search.request.regular == "only"


def is_regular_enough(search: SearchState) -> bool:
    """True if only regular plans are looked for: as the request says, or if all hosts are alike, no stage was given by
    the caller, and the model or the cluster is so large that other plans would take long to search."""
    if search.request is not None and search.request.regular != "prefer":
        return is_regular_only(search)
    given = search.strategy is not None and search.strategy.stages
    few = len(search.layering.layers) <= MAX_IRREGULAR_LAYERS and search.cluster.num_devices <= MAX_IRREGULAR_DEVICES
    return len(set(search.cluster.hosts)) == 1 and not (given or few or search.resolved.cuts or search.small)


@dataclass(order=True)
class _Waiting:
    """A mesh with a microbatch count (``case`` None) or a case of it, at a lower bound on its step."""

    bound_s: float
    number: int
    m: int = field(compare=False)
    mesh: int = field(compare=False)
    case: PipelineCase | None = field(compare=False, default=None)
    #: how often its first bound, which is cheap, was lifted
    looks: int = field(compare=False, default=0)
    is_played: bool = field(compare=False, default=False)  # if ``_path_bound`` does not lift it any more


#: of two waiting, faster than to compare them
_order = attrgetter("bound_s", "number")


def _first(heap: Sequence[_Waiting], count: int) -> list[_Waiting]:
    """The first ``count`` of a heap, in order, without a look at the rest."""
    found: list[_Waiting] = []
    front = [(_order(one), 0) for one in heap[:1]]
    while front and len(found) < count:
        _, place = heappop(front)
        found.append(heap[place])
        for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heappush(front, (_order(heap[child]), child))
    return found


def _between(prices: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The multipliers around those of these that are of the ladder."""
    ladder = (one for one in prices if one[0] in FACTORS)
    return list(dict.fromkeys((factor * part, flight) for factor, flight in ladder for part in BETWEEN))


@dataclass(order=True, frozen=True)
class _SolvedBound:
    """The bound on a case that was solved. divisions: those into several chunks per group that were looked at;
    is_close: if ``_closest_bound`` lifted it."""

    bound_s: float
    number: int
    waiting: _Waiting = field(compare=False)
    divisions: Sequence[tuple[int, ...]] = field(compare=False)
    is_close: bool = field(compare=False, default=False)


class RegularSearch:
    """The regular plans of one search."""

    def __init__(self, search: SearchState, room: float = 1.0) -> None:
        """room: the fraction of the memory limit that estimates may fill."""
        self.search, self.tables, self.room = search, tables_of(search), room
        by_mesh: dict[object, list[Submesh]] = {}
        for sub in self.tables.submeshes:
            if sub.place is None:
                by_mesh.setdefault((sub.shape, sub.roles), []).append(sub)
        self.meshes = list(by_mesh.values())
        #: by mesh, (device offset, site) of as many groups as there is room for
        self._places = [places([sub.offsets for sub in sites], sites[0].num_devices) for sites in self.meshes]
        self._queue: list[_Waiting] | None = None
        self._number = 0
        self._solved: list[_Waiting] = []
        self._solved_bounds: list[_SolvedBound] = []
        self._bounds: dict[tuple[int, int], MeshTable] = {}
        #: by count and mesh the cases with so many groups that anything fits, with their bounds at all levels
        self._close: dict[tuple[int, int], dict[PipelineCase, float]] = {}
        self._able: dict[tuple[int, int], list[int]] = {}  # numbers of groups with which anything fits
        #: (count, mesh) whose fastest choices do not always fit, though the leanest leave most of the memory free
        self._tight: set[tuple[int, int]] = set()
        self._priced: dict[tuple[int, int], list[int]] = {}  # see ``_with_priced_work``
        self._finer: dict[tuple[int, int], list[tuple[float, float]]] = {}  # see ``_closest_bound``
        #: by case, prices, closeness and division (bound of its schedule, seconds from which on that was high enough)
        self._played: dict[tuple[int, int, float, tuple[int, ...]], tuple[float, float]] = {}
        self._overlapping: dict[int, bool] = {}  # by microbatch count, see ``_overlaps``
        self._least_tied: dict[int, Floats] = {}  # by mesh, see ``_tied``
        self._least: dict[int, int] = {}  # by mesh a microbatch count below which nothing fits

    def bound_s(self, enough_s: float = inf) -> float:
        """Seconds that no regular plan undercuts. Of the cases that were solved only those are bounded closely whose
        cheap bounds are below all others. enough_s: a bound that is as good as any higher one."""
        left_s = min((one.bound_s for one in (self._queue or ())[:1]), default=inf)
        while self._solved_bounds and (least := self._solved_bounds[0]).bound_s < min(left_s, enough_s):
            if least.is_close or self.search.cut_short:
                return least.bound_s
            bound_s = max(least.bound_s, self._closest_bound(least, enough_s))
            heapreplace(self._solved_bounds, replace(least, bound_s=bound_s, is_close=True))
        return min([left_s, *(one.bound_s for one in self._solved_bounds[:1])])

    @property
    def record(self) -> dict[str, float | None]:
        """Counts of the cases: how many meshes (with a microbatch count each) and cases got bounds, how many cases
        were solved, how many are left, and seconds that none of these undercuts."""
        left = self._queue or []
        return {
            "meshes": len(self._bounds),
            "bounded": self._number,
            "solved": len({one.number for one in self._solved}),
            "left": len(left),
            "left_bound_s": left[0].bound_s if left else None,
        }

    def explore(self, limit_s: float, count: int = 1, hurried: bool = False) -> list[Candidate]:
        """The pipelines of cases that may be faster than ``limit_s`` and were not solved yet, fastest first, until the
        ``count`` fastest of them are proven to be no slower than the rest; those of the first case that has any if
        ``hurried``."""
        found: list[Candidate] = []
        with self.search.timed("regular"):
            try:
                for candidates in self._explored(limit_s, count):
                    found += candidates
                    if hurried and found:
                        break
            except KeyboardInterrupt:
                if not found:
                    raise
                self.search.cut_short = INTERRUPTED
        found.sort(key=lambda one: one.clock_s)
        least_s = found[min(count, len(found)) - 1].clock_s if found else inf
        return [one for one in found if one.clock_s - one.hidden_s <= least_s * CLOCK_TOLERANCE][:MAX_CANDIDATES]

    def _explored(self, limit_s: float, count: int) -> Iterator[list[Candidate]]:
        search, queue, clocks = self.search, self._start(), list[float]()
        while queue:
            best_s = min(limit_s, sorted(clocks)[count - 1] if len(clocks) >= count else inf)
            if queue[0].bound_s >= best_s:
                return
            if isfinite(best_s) and search.must_stop(builds=2):
                return
            first = heappop(queue)
            if first.m < self._least.get(first.mesh, 0):
                continue
            if first.case is not None and first.looks < 2:
                bound_s = self._closer_bound(first, queue)
                first.looks, first.bound_s = first.looks + 1, max(first.bound_s, bound_s)
                if isfinite(first.bound_s):
                    heappush(queue, first)
            elif first.case is not None and first.case.chunks > 1 and not first.is_played and isfinite(best_s):
                cuts = divisions_of(self._bounds[first.m, first.mesh], first.m, first.case)
                bound_s = (1 - DIVIDED_AGAIN) * self._path_bound(first, cuts, best_s / (1 - DIVIDED_AGAIN), NEAR)
                first.bound_s, first.is_played = max(first.bound_s, bound_s), bound_s < best_s
                heappush(queue, first)
            elif first.case is None and not first.looks:
                self._lift([first, *_first(queue, LIFTED_AT_ONCE)])
                queue.append(first)
                heapify(queue)
            elif first.case is None:
                if (first.m, first.mesh) not in self._bounds:
                    self._look_ahead([first, *_first(queue, 4 * MESHES_AT_ONCE)])
                for case, bound_s in self._case_bounds(first.m, first.mesh, self._cases(first.m, first.mesh)):
                    self._number += 1
                    heappush(queue, _Waiting(max(bound_s, first.bound_s), self._number, first.m, first.mesh, case))
            else:
                candidates = self._solve(first, best_s)
                clocks += [one.clock_s for one in candidates]
                if not candidates and self._tighten(first.m, first.mesh):
                    self._solved.remove(first)
                    first.looks, first.is_played = 0, False
                    heappush(queue, first)
                yield candidates

    def _start(self) -> list[_Waiting]:
        """The queue, made at the first question."""
        if self._queue is None:
            self.tables.compute_pace_bounds()
            meshes = [(m, g) for m in self.tables.counts for g in range(len(self.meshes))]
            self._queue = [_Waiting(self._mesh_bound(m, g, []), 0, m, g) for m, g in meshes]
            heapify(self._queue)
        return self._queue

    def _lift(self, waiting: Sequence[_Waiting]) -> None:
        """Lift the bounds of those of these meshes whose bounds count no more than their least pace."""
        rough = [one for one in waiting if one.case is None and not one.looks]
        levels = [self._coarse(one.m, one.mesh) for one in rough]
        self.tables.bound([(self.meshes[one.mesh][0], one.m, n) for one, some in zip(rough, levels) for n in some])
        for one, some in zip(rough, levels):
            one.bound_s = max(one.bound_s, self._mesh_bound(one.m, one.mesh, some))
            one.looks = 1

    def _least_count(self, g: int) -> int:
        """A microbatch count below which nothing fits on a mesh, as microbatches are too large: by bisection over the
        counts whose microbatches all devices of the mesh can share, where more microbatches never take more memory."""
        number, batch = self.meshes[g][0].num_devices, self.search.global_batch
        shared = [m for m in self.tables.counts if batch // m % number == 0]
        low, high = 0, len(shared)  # so many are known not to fit; the first that is known to fit
        while low < high:
            middle = (low + high) // 2
            self._find_groups([(shared[middle], g)])
            if self._able[shared[middle], g]:
                high = middle
            else:
                low = middle + 1
        return shared[low - 1] + 1 if low else 0

    def _solve(self, waiting: _Waiting, best_s: float = inf, between: bool = False) -> list[Candidate]:
        """The pipelines of a case. best_s: seconds of the best one before; between: as in ``solved_again``."""
        assert waiting.case is not None
        self._solved.append(waiting)
        kinds = (False, True) if between else (False,)
        answers = [self._answer(waiting, self._levels_for(waiting, kind), best_s) for kind in kinds]
        found = [candidate for _, some in answers for candidate in some]
        if self._may_hide(waiting, found):
            _, others = self._answer(waiting, self._hiding_levels(waiting.m, waiting.mesh))
            found += [replace(one, hidden_s=0.0) for one in others]
        if found:
            bound_s = self._true_bound(waiting.m, min(answer.bound_s for answer, _ in answers))
            if waiting.case.chunks == 1:
                bound_s = max(waiting.bound_s, bound_s)
            divisions = tuple(dict.fromkeys(cuts for answer, _ in answers for cuts in answer.divisions))
            heappush(self._solved_bounds, _SolvedBound(bound_s, len(self._solved_bounds), waiting, divisions))
        return found

    def _answer(
        self, waiting: _Waiting, levels: Sequence[int], best_s: float = inf
    ) -> tuple[RegularAnswer, list[Candidate]]:
        """The best pipelines of a case by its tables at these levels."""
        assert waiting.case is not None
        mesh, pairs = self._table(waiting, levels)
        answer = solve_case(mesh, waiting.m, waiting.case, best_s * CLOCK_TOLERANCE)
        table = mesh.table.with_mixes(answer.mixes, mesh.actions_s or 0.0)
        found = [
            self.tables.candidate(waiting.m, waiting.case.schedule, one, pairs, table, answer.mixes)
            for one in answer.pipelines
        ]
        return answer, found

    def _may_hide(self, waiting: _Waiting, found: Sequence[Candidate]) -> bool:
        """True if sums of whole gradients may hide so much that it matters whether gradients are whole. With several
        groups it was seen to matter in no question (design 033)."""
        assert waiting.case is not None
        if waiting.case.groups > 1:
            return False
        last_s = max_overlap(self.search.cluster) * self.tables.max_bucket_seconds(self.meshes[waiting.mesh][0])
        return any(one.hidden_s - last_s > MIN_HIDDEN_FRACTION * one.clock_s for one in found)

    def _closest_bound(self, solved: _SolvedBound, enough_s: float) -> float:
        """The bound on a case that was solved, with more prices of bytes where its bound is the highest."""
        m, g, case = solved.waiting.m, solved.waiting.mesh, solved.waiting.case
        assert case is not None
        mesh, grid = self._bounds[m, g], self._bound_grid(m, g)
        if fresh := [one for one in _between([grid[n] for n in dual_levels(mesh, m, case)]) if one not in grid]:
            self._finer.setdefault((m, g), []).extend(fresh)
            self._bound({(m, g): self._bound_grid(m, g)})
            mesh = self._bounds[m, g] = replace(self._bounds[m, g], work_levels=mesh.work_levels)
        if case.chunks > 1:
            return self._path_bound(solved.waiting, solved.divisions, enough_s)
        ((_, bound_s),) = self._case_bounds(m, g, [case])
        return bound_s if case.groups == 1 else max(bound_s, self._true_bound(m, close_bound(mesh, m, case)))

    def _path_bound(
        self, waiting: _Waiting, divisions: Sequence[tuple[int, ...]], enough_s: float, close: float = CLOSE
    ) -> float:
        """The bound on a case by all that follows on each other in its schedule, with these divisions into several
        chunks per group. enough_s: a bound that is as good as any higher one; close: as in ``least_makespan``."""
        assert waiting.case is not None
        mesh, least_s = self._bounds[waiting.m, waiting.mesh], inf
        enough_s /= 1 - MAX_LOWERED
        for cuts in divisions:
            key = waiting.number, len(mesh.value), close, cuts
            bound_s, asked_s = self._played.get(key, (0.0, 0.0))
            if asked_s <= bound_s < min(enough_s, least_s):
                asked_s = min(enough_s, least_s)
                bound_s = played_bound(mesh, waiting.m, waiting.case, cuts, asked_s, close)
                self._played[key] = bound_s, asked_s
            least_s = min(least_s, bound_s)
        return self._true_bound(waiting.m, least_s)

    def solved_again(self, candidate: Candidate, missed: OverfullError, between: bool = True) -> list[Candidate]:
        """The pipelines of the cases that were solved with as many microbatches as ``candidate``, which holds too much,
        on its mesh, after the correction of memory estimates that follows. between: also by tables at prices between.
        """
        corrections, m = self.search.memory_corrections, candidate.microbatches
        for shape, level, size in missed.beside:
            corrections[shape, m, level] = max(corrections.get((shape, m, level), 0.0), size)
        shapes = {shape for shape, _, _ in missed.beside}
        again = [one for one in self._solved if one.m == m and self.meshes[one.mesh][0].shape in shapes]
        self._solved = [one for one in self._solved if one not in again]
        found = [candidate for one in again for candidate in self._solve(one, between=between)]
        return sorted(found, key=lambda one: one.clock_s)

    # ---- bounds

    def _mesh_bound(self, m: int, g: int, levels: Sequence[int]) -> float:
        """The bound of a mesh and count: the work of all layers on as many groups as there is room for, by their least
        pace and at these levels."""
        bound_s = mesh_bound(self._lower_bounds(m, g, levels), m, len(self._places[g]))
        return self._true_bound(m, bound_s)

    def _case_bounds(self, m: int, g: int, cases: Sequence[PipelineCase]) -> list[tuple[PipelineCase, float]]:
        """Cases of a mesh and count with their bounds, at the multipliers of its lower bounds."""
        bounds = case_bounds(self._bounds[m, g], m, cases) if cases else []
        return list(zip(cases, [self._true_bound(m, one) for one in bounds]))

    def _look_ahead(self, waiting: Sequence[_Waiting]) -> None:
        """Make the bounds of the first of these and of the next few meshes among them, at a few levels."""
        fresh = [(one.m, one.mesh) for one in waiting if one.case is None and (one.m, one.mesh) not in self._bounds]
        self._bound({(m, g): self._few(self._grid(m, g)) for m, g in fresh[:MESHES_AT_ONCE]})

    def _closer_bound(self, waiting: _Waiting, queue: Sequence[_Waiting]) -> float:
        """The next bound of a case: that at all multipliers, inf if nothing fits on so many groups; then that by where
        its groups lie, or, with several virtual stages, that of the divisions that are looked at."""
        m, g, case = waiting.m, waiting.mesh, waiting.case
        assert case is not None
        if waiting.looks == 0:
            if (m, g) not in self._close:
                next_ones = _first(queue, 4 * MESHES_AT_ONCE)
                near = dict.fromkeys((one.m, one.mesh) for one in [waiting, *next_ones])
                self._find_groups([at for at in near if at in self._bounds and at not in self._able][:MESHES_AT_ONCE])
                self._close[m, g] = self._close_bounds(m, g)
            if case not in self._close[m, g] and self._tighten(m, g):
                return self._closer_bound(waiting, queue)
            return self._close[m, g].get(case, inf)
        if case.groups == 1:
            return 0
        bound_s = self._true_bound(m, close_bound(self._with_priced_work(m, g, case), m, case))
        return bound_s if case.chunks == 1 else (1 - DIVIDED_AGAIN) * bound_s

    def _with_priced_work(self, m: int, g: int, case: PipelineCase) -> MeshTable:
        """The lower bounds of a mesh and count, with the bytes priced that a case holds where all work of a step is
        counted."""
        mesh, grid = self._bounds[m, g], self._bound_grid(m, g)
        if mesh.work is None or mesh.whole or len(grid) == 1:
            return mesh
        levels = self._priced.setdefault((m, g), [])
        if fresh := [n for n in (0, *dual_levels(mesh, m, case)) if n not in levels]:
            levels += fresh
            share, sub = 1.0 - max_overlap(self.search.cluster), self.meshes[g][0]
            numbers = [self.tables.level(m, *grid[n], gradient_share=share) for n in levels]
            self.tables.bound([(sub, m, number) for number in numbers])
            work = self._lower_bounds(m, g, numbers)
            mesh = self._bounds[m, g] = replace(mesh, work_levels=(work.value, work.byte, work.saved_byte))
        return mesh

    def _tighten(self, m: int, g: int) -> bool:
        """Have prices of memory in the grid of a mesh and count that did without. False if it has them."""
        if len(self._grid(m, g)) > 1:
            return False
        self._tight.add((m, g))
        self._able.pop((m, g))
        self._close.pop((m, g), None)
        self._priced.pop((m, g), None)
        return True

    def _close_bounds(self, m: int, g: int) -> dict[PipelineCase, float]:
        """The cases of a mesh with so many groups that anything fits, and their bounds at all multipliers; 0 where
        these are no more than before."""
        if not self._able[m, g]:
            self._least[g] = self._least[g] if g in self._least else self._least_count(g)
            return {}
        cases = [case for case in self._cases(m, g) if case.groups in self._able[m, g]]
        if len(self._grid(m, g)) == 1:  # they have that bound already
            return dict.fromkeys(cases, 0.0)
        self._bound({(m, g): self._bound_grid(m, g)})
        return dict(self._case_bounds(m, g, cases))

    def _bound(self, multipliers: Mapping[tuple[int, int], Sequence[tuple[float, float]]]) -> None:
        """Make the lower bounds of these (count, mesh) at these multipliers."""
        levels = {(m, g): self._bound_levels(m, g, some) for (m, g), some in multipliers.items()}
        rows = [(m, g, level) for (m, g), some in levels.items() for level in (*some, *self._more_levels(m))]
        self.tables.bound([(self.meshes[g][0], m, level) for m, g, level in rows])
        for m, g in levels:
            self._bounds[m, g] = self._lower_bounds(m, g, levels[m, g])

    def _find_groups(self, meshes: Sequence[tuple[int, int]]) -> None:
        """Find the numbers of groups with which anything fits by the leanest rows of these (count, mesh)."""
        tables = self.tables
        fresh = [one for one in meshes if one not in self._able]
        pairs = {(m, g): [(sub, tables.level(m, *self._grid(m, g)[-1])) for sub in self.meshes[g]] for m, g in fresh}
        with self.search.timed("compose"):
            tables.compose([(sub, m, level) for (m, _), some in pairs.items() for sub, level in some])
        for m, g in fresh:
            table = tables.table(m, pairs[m, g], self.room)
            most = max((case.groups for case in self._cases(m, g)), default=0)
            self._able[m, g] = []
            if table is not None and most:
                mesh = replace(self._lower_bounds(m, g, []), table=table)
                self._able[m, g] = groups_that_fit(mesh, m, most)
        if none := [at for at in fresh if not self._able[at] and self._tighten(*at)]:
            self._find_groups(none)

    def _cases(self, m: int, g: int) -> list[PipelineCase]:
        search, space = self.search, self.search.space
        layers = len(search.layering.layers)
        least, most = self.tables.cuts.stages
        room = min(len(self._places[g]), layers, inf if most is None else most)
        cases = []
        for p in range(least, int(room) + 1):
            for schedule in space.schedules:
                if schedule in CHUNKED:
                    numbers = space.chunks if schedule == "interleaved" else (2,)
                    cases += [PipelineCase(p, schedule, v) for v in numbers if 2 <= p <= m and p * v <= layers]
                elif p > 1 or schedule == space.schedules[0] or schedule == space.base_schedule:
                    cases.append(PipelineCase(p, schedule))
        return cases

    # ---- tables

    def _grid(self, m: int, g: int) -> list[tuple[float, float]]:
        """The multipliers of a mesh's tables: many prices of a byte, where a saved byte counts once or for as many
        microbatches as there are groups."""
        if self.tables.fits_unconstrained(m) and (m, g) not in self._tight:
            return [NO_MULTIPLIER]
        return self._full_grid(m, g)

    def _full_grid(self, m: int, g: int) -> list[tuple[float, float]]:
        """``_grid`` where memory is scarce."""
        flights = dict.fromkeys((1.0, float(min(m, len(self._places[g])))))
        grid = [NO_MULTIPLIER, *((factor, flight) for flight in flights for factor in FACTORS)]
        return [*grid, (LARGEST_MULTIPLIER[0], max(flights))]

    def _bound_grid(self, m: int, g: int) -> list[tuple[float, float]]:
        """``_grid`` and, where that has prices, more of them for bounds alone: eager 1F1B and zb-v have about twice as
        many microbatches in flight as there are groups."""
        grid, most = self._grid(m, g), float(min(m, 2 * len(self._places[g]) - 1))
        if len(grid) == 1:
            return grid
        return list(dict.fromkeys([*grid, *((factor, most) for factor in FACTORS), *self._finer.get((m, g), ())]))

    @staticmethod
    def _few(grid: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The multipliers of a grid at which a mesh's bounds are made before any of its cases is to be solved."""
        return [one for one in grid if one[0] in (*COARSE_FACTORS, NO_MULTIPLIER[0], LARGEST_MULTIPLIER[0])]

    def _bound_levels(self, m: int, g: int, multipliers: Sequence[tuple[float, float]]) -> list[int]:
        """The levels of bounds at these multipliers. Where much of a step's other work may run beside the microbatches,
        they count these alone, and of one group also the work that never does."""
        shares = {}
        if self._overlaps(m):
            never = {"gradient_share": 1.0 - max_overlap(self.search.cluster)}
            shares = never if self._is_alone(g) else {"step_share": 0.0}
        return [self.tables.level(m, *one, **shares) for one in multipliers]

    def _is_alone(self, g: int) -> bool:
        """True if there is room for one group of a mesh."""
        return len(self._places[g]) == 1

    def _overlaps(self, m: int) -> bool:
        if m not in self._overlapping:
            self._overlapping[m] = lower_by_overlap(1.0, m, self.search.cluster, inf) < 1 - MAX_LOWERED
        return self._overlapping[m]

    def _true_bound(self, m: int, bound_s: float) -> float:
        """The bound on a step, from one that counts what may run beside the microbatches."""
        return bound_s if self._overlaps(m) else lower_by_overlap(bound_s, m, self.search.cluster, self.tables.hidden_s)

    def _coarse(self, m: int, g: int) -> list[int]:
        """The few levels of a mesh's first bounds."""
        if self.tables.fits_unconstrained(m):
            return self._bound_levels(m, g, [NO_MULTIPLIER])
        return self._bound_levels(m, g, [(factor, 1.0) for factor in COARSE_FACTORS])

    def _more_levels(self, m: int) -> list[int]:
        """The level of a microbatch's way there and back, and those of all work of a step where others lack it."""
        return [self._trip_level(m), *(self.tables.work_levels(m) if self._overlaps(m) else ())]

    def _trip_level(self, m: int) -> int:
        return self.tables.level(m, *NO_MULTIPLIER, step_share=0.0, weight_share=0.0)

    def _lower_bounds(self, m: int, g: int, levels: Sequence[int]) -> MeshTable:
        """A mesh's lower bounds at these levels, with no costs."""
        tables, sites = self.tables, self.meshes[g]
        sub = sites[0]
        values = []
        for level in levels:
            found = tables.lagrangian(sub, m, level)
            assert found is not None
            values.append(found)
        pace = tables.least_pace(sub, m)
        zero = np.zeros((len(sites), *pace.shape))
        options = tuple(tables.option(sub, 0, 0, self.room) for sub in sites)
        table = PipelineTable(len(pace), self.search.cluster.num_devices, options, zero, zero, zero, zero, zero, zero)
        byte = np.array([tables.levels[level].byte for level in levels])
        saved = np.array([tables.levels[level].saved_byte for level in levels])
        trip = tables.lower_bound(sub, m, self._trip_level(m))
        trip = np.zeros_like(pace) if trip is None else trip
        cluster = self.search.cluster
        hosts = [cluster.host_of(offset) for offset, _ in self._places[g]]
        near = [stays_inside(cluster, one) for one in sites]
        peak, shape = tables.peak_bytes(sub, m), (-1, *pace.shape)
        value, overlaps = np.array(values).reshape(shape), self._overlaps(m)
        actions_s = tables.group(sub).actions(sub, m)
        forward, backward = tables.least_phases(sub, m)
        entry, behind = np.stack([tables.least_messages(one, m) for one in sites], axis=1)
        work = None
        if overlaps and PIPEDREAM not in self.search.space.schedules:  # whose steps run into each other
            work = tables.least_work(sub, m)
        return MeshTable(
            table, len(sites), pace, value, byte, saved, trip, forward, backward, peak, near, hosts,
            not overlaps or self._is_alone(g), actions_s, work, self._tied(g), tables.cuts, entry, behind,
        )  # fmt: skip

    def _tied(self, g: int) -> Floats:
        """[groups + 1] the least seconds to exchange the weights that the first and the last of so many groups of a
        mesh hold."""
        if g not in self._least_tied:
            search, sub, layers = self.search, self.meshes[g][0], len(self.search.layering.layers)
            held = [range(offset, offset + sub.num_devices) for offset, _ in self._places[g][:layers]]
            roles = sub.roles or (None,) * len(sub.shape)
            pieces = prod(extent for extent, role in zip(sub.shape, roles) if role != "data")
            found = np.zeros(len(held) + 1)
            for node in self.tables.tied:
                for groups in range(2, len(found)):
                    first, last = held[0], held[groups - 1]
                    found[groups] += least_tied_seconds(search.graph, search.cluster, node, pieces, first, last)
            self._least_tied[g] = found
        return self._least_tied[g]

    def _levels_for(self, waiting: _Waiting, between: bool = False) -> list[int]:
        """The levels of a case's tables: those whose bounds are the highest for some of its groups, and those next to
        them. between: also levels between these."""
        m, g, case = waiting.m, waiting.mesh, waiting.case
        assert case is not None
        grid, mesh = self._grid(m, g), self._bounds[m, g]
        tabled = slice(len(grid))  # the prices behind are for bounds alone
        mesh = replace(mesh, value=mesh.value[tabled], byte=mesh.byte[tabled], saved_byte=mesh.saved_byte[tabled])
        highest = dual_levels(mesh, m, case)
        near = {k for one in highest for k in (one - 1, one, one + 1) if 0 < k < len(grid)}
        near |= set(range(len(grid) - 1, 0, -2))  # bounds do not know the bytes of a layer while it runs
        chosen = [grid[k] for k in (0, *sorted(near), len(grid) - 1) if k < len(grid)]
        chosen += _between([grid[k] for k in highest]) if between else []
        return [self.tables.level(m, *one) for one in chosen]

    def _hiding_levels(self, m: int, g: int) -> list[int]:
        """The levels at which sums of whole gradients cost what of them cannot hide, and at which they cost nothing."""
        shares = 1.0 - max_overlap(self.search.cluster), 0.0
        return [self.tables.level(m, *one, gradient_share=share) for one in self._full_grid(m, g) for share in shares]

    def _table(self, waiting: _Waiting, levels: Sequence[int]) -> tuple[MeshTable, list[tuple[Submesh, int]]]:
        """The costs and bounds of a case at these levels, and the rows of its options."""
        tables, m, sites = self.tables, waiting.m, self.meshes[waiting.mesh]
        pairs = [(sub, level) for level in dict.fromkeys(levels) for sub in sites]
        with self.search.timed("compose"):
            tables.compose([(sub, m, level) for sub, level in pairs])
        table = tables.table(m, pairs, self.room)
        assert table is not None
        return replace(self._bounds[m, waiting.mesh], table=table), pairs
