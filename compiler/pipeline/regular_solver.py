"""The best regular pipeline of a case by the costs of its mesh (``regular``), and a bound on the cuts that are tried.

Cuts. With one chunk per group the level of every run of layers as a stage is that of least W (``stage_dp``), by a
dynamic program over stages and layers that knows the memory of each stage exactly::

    W(k, i) = min over j, levels that fit of  max(m t + σ, φ t + x + W(k + 1, j))         φ: ``fill_share``

W knows no waits. So from its cuts and from the most even ones on better ones are sought, by the paths through the
schedule (``path_cuts``).

A stage whose faster level does not fit would leave the bytes empty that the next level spares. So it may be a *mix*:
its first layers at the faster level, as many as there is room for, the others at the level that fits.

With several chunks, one program finds the least largest chunk, another the division that is most even under it (least
Σ t²). Then every group takes the levels of its chunks with which it is fastest within its memory (every combination of
levels is compared). The slowest group is made faster by mixes, as long as there is one, and the division is made again
for these levels, while that gets faster.

Memory of group k: Σ resident + the most that is saved at any time + the largest transient; what is in flight of each
chunk is read off the schedule (``in_flight_by_chunk``), because a loss's large saved bytes are held only briefly.

``close_bound`` and ``RegularAnswer.bound_s`` are bounds as in ``regular``, but of the space in which layers are dealt
to chunks evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from .cutting_planes import CLOSE, least_makespan
from .families import PIPEDREAM, generate, in_flight_formula, is_split, virtual_order
from .path_cuts import CutCosts, cuts_by_paths
from .recurrence import fill_share
from .regular import MeshTable, Parts, PipelineCase, dual_levels, in_flight_by_chunk
from .regular_bounds import placed_bound
from .table import PHASE_SHARE, Floats, Mix, Pipeline, StageChoice

__all__ = ["RegularAnswer", "close_bound", "divisions_of", "played_bound", "solve_case"]

_ROUNDS = 3  # times that the layers are divided again for other levels
_MOST_PLAYED = 200_000  # actions that are played for a bound
_MOST_ROUNDS = 50  # times that a schedule is played
_TIE = 1e-9  # of a case's seconds: what an uneven division is worth where W is the same


@dataclass(frozen=True)
class RegularAnswer:
    """The best pipelines of a case (none if nothing fits by the table), a bound on those with the cuts that were looked
    at, and the mixes in them, which are numbered as options behind those of the table. divisions: these cuts, into
    several chunks per group."""

    pipelines: tuple[Pipeline, ...]
    bound_s: float
    mixes: tuple[Mix, ...] = ()
    divisions: tuple[tuple[int, ...], ...] = ()


def close_bound(mesh: MeshTable, m: int, case: PipelineCase) -> float:
    """A closer bound on a case: with several chunks per group, on the divisions that are looked at."""
    if case.chunks == 1:
        return placed_bound(mesh, m, case)
    solver = _Solver(mesh, m, case)
    return min((solver.bound(cuts) for cuts in solver.divisions), default=inf)


def divisions_of(mesh: MeshTable, m: int, case: PipelineCase) -> list[tuple[int, ...]]:
    """The divisions of layers into several chunks per group that a case is solved for, before any by its costs."""
    return _Solver(mesh, m, case).divisions


def played_bound(
    mesh: MeshTable, m: int, case: PipelineCase, cuts: Sequence[int], enough_s: float = inf, close: float = CLOSE
) -> float:
    """A bound on the pipelines of a case with one division into several chunks per group, by the work of its groups
    and by the paths through its schedule. enough_s, close: as in ``least_makespan``."""
    solver = _Solver(mesh, m, case)
    bound_s = solver.bound(cuts)
    return bound_s if bound_s >= enough_s else max(bound_s, solver.played(cuts, enough_s, close))


def solve_case(mesh: MeshTable, m: int, case: PipelineCase, most_s: float = inf) -> RegularAnswer:
    """The best pipeline of a case by the estimates of its table, and a bound on the cuts that were looked at. most_s:
    seconds from which on it does not matter which one."""
    solver = _Solver(mesh, m, case)
    return solver.single(most_s) if case.chunks == 1 else solver.chunked()


@dataclass(eq=False)
class _Runs:
    """Arrays [L, L + 1] of the runs of layers as one stage: the level, m · pace + step, W from there on, the pace;
    and of a mix the level of the first layers and where they end (0: no mix)."""

    level: NDArray[np.intp]
    head: Floats
    path: Floats
    pace: Floats
    first: NDArray[np.intp] = field(init=False)
    cut: NDArray[np.intp] = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.cut = np.zeros_like(self.level), np.zeros_like(self.level)

    def parts(self, first: int, end: int, options: NDArray[np.intp]) -> Parts:
        """The parts of a run. options: by level."""
        option, cut = int(options[self.level[first, end]]), int(self.cut[first, end])
        if not cut:
            return [(option, first, end)]
        return [(int(options[self.first[first, end]]), first, cut), (option, cut, end)]


@dataclass(frozen=True, eq=False)
class _Solver:
    mesh: MeshTable
    m: int
    case: PipelineCase
    mixes: list[Mix] = field(default_factory=list)

    @cached_property
    def _fill(self) -> float:
        """The share of a stage's seconds that its messages wait for, a third of them forward."""
        return float(fill_share(self.case.schedule, PHASE_SHARE, PHASE_SHARE))

    # -- one chunk per group

    def single(self, most_s: float) -> RegularAnswer:
        """The pipeline of the cuts that were found, from those of least W on, and a bound on all cuts."""
        p, m, mesh, table = self.case.groups, self.m, self.mesh, self.mesh.table
        layers = table.num_layers
        low_s = placed_bound(mesh, m, self.case)
        rest = np.where(np.arange(layers + 1) == layers, 0.0, inf)
        ends, chosen = [], list[_Runs]()
        for k in reversed(range(p)):
            options = self._options_of(k)
            q = in_flight_formula(self.case.schedule, k, p, m)
            held = table.resident[options] + table.transient[options] + q * table.saved[options]
            within = held <= mesh.limits[k, 0]
            fits = within & mesh.allowed & np.isfinite(table.pace_s[options])
            t, once = table.pace_s[options], table.step_s[options]
            x = table.transfer_s[options] + (0.0 if table.entry_s is None else table.entry_s[options])
            head = np.where(fits, m * t + once, inf)
            seconds = np.where(fits, t, 0.0)
            path = np.maximum(head, self._fill * seconds + x + rest)
            path = path + _TIE * seconds**2 / max(float(seconds.max()), 1e-30)
            level = path.argmin(axis=0)
            at = level[None]
            runs = _Runs(level, *(np.take_along_axis(one, at, axis=0)[0] for one in (head, path, seconds)))
            self._mix(runs, k, q, fits, rest)
            end = runs.path.argmin(axis=1)
            ends.append(end)
            chosen.append(runs)
            rest = np.append(np.take_along_axis(runs.path, end[:, None], axis=1)[:, 0], inf)
        if not np.isfinite(rest[0]):
            return RegularAnswer((), low_s)
        cuts = [0]
        for end in reversed(ends):
            cuts.append(int(end[cuts[-1]]))
        chosen.reverse()
        if p > 1 and self.case.schedule != PIPEDREAM:  # where stages may wait
            starts = [one for one in (cuts, _even([runs.head for runs in chosen])) if one]
            cuts = cuts_by_paths(self.case.schedule, m, self._cut_costs(chosen), starts, most_s)
        parts = [runs.parts(*both, self._options_of(k)) for k, (runs, both) in enumerate(zip(chosen, pairwise(cuts)))]
        return RegularAnswer((self._pipeline(parts),), low_s, tuple(self.mixes))

    def _cut_costs(self, chosen: Sequence[_Runs]) -> CutCosts:
        """The seconds of the runs that each group has."""
        p, mesh = self.case.groups, self.mesh
        possible = np.isfinite([runs.head for runs in chosen])
        pace = np.where(possible, [runs.pace for runs in chosen], inf)
        step = np.where(possible, [runs.head - self.m * runs.pace for runs in chosen], inf)
        hops = np.reshape([mesh.hop(k, k + 1) for k in range(p - 1)], (p - 1, 2, -1))
        end = np.where((np.arange(p) == 0) | (np.arange(p) == p - 1), float(mesh.tied(p)[p]), 0.0)
        return CutCosts(pace, step, hops[:, 0], hops[:, 1], end)

    @cached_property
    def _levels(self) -> list[int]:
        """The levels whose costs differ."""
        table, sites = self.mesh.table, self.mesh.sites
        costs = [table.pace_s, table.step_s, table.resident, table.saved, table.transient, table.transfer_s]
        costs += [] if table.entry_s is None else [table.entry_s]
        first: dict[tuple[bytes, ...], int] = {}
        for level in range(self.mesh.levels):
            first.setdefault(tuple(one[level * sites : (level + 1) * sites].tobytes() for one in costs), level)
        return list(first.values())

    def _options_of(self, k: int) -> NDArray[np.intp]:
        """[levels] the options of a group."""
        return np.array(self._levels) * self.mesh.sites + self.mesh.places[k][1]

    @cached_property
    def _distinct(self) -> list[int]:
        """A number of a level of each kind: those of one kind have equal seconds."""
        pace = self.mesh.table.pace_s[:: self.mesh.sites][self._levels]
        return sorted({pace[n].tobytes(): n for n in reversed(range(len(pace)))}.values())

    def _mix(self, runs: _Runs, k: int, q: int, fits: NDArray[np.bool_], rest: Floats) -> None:
        """Make runs faster whose first layers have room for a faster level."""
        mesh, table, options = self.mesh, self.mesh.table, self._options_of(k)
        limit = mesh.limits[k, 0]
        for level in self._distinct if mesh.actions_s is not None else ():
            one = options[level]
            whole = self.m * table.pace_s[one] + table.step_s[one]
            i, j = np.nonzero(np.isfinite(runs.head) & ~fits[level] & (whole < runs.head))
            i, j = i[j - i > 1], j[j - i > 1]
            other = options[runs.level[i, j]]
            low, high = i.copy(), j.copy()  # so far the first layers fit; so far they do not
            while len(i) and (high - low > 1).any():
                cut = (low + high) // 2
                held = table.resident[one, i, cut] + table.resident[other, cut, j]
                held += q * (table.saved[one, i, cut] + table.saved[other, cut, j])
                held += np.maximum(table.transient[one, i, cut], table.transient[other, cut, j])
                possible = np.isfinite(table.pace_s[one, i, cut]) & np.isfinite(table.pace_s[other, cut, j])
                room = (held <= limit) & possible
                low, high = np.where(room, cut, low), np.where(room, high, cut)
            some = low > i
            i, j, cut, other = i[some], j[some], low[some], other[some]
            t = table.pace_s[one, i, cut] + table.pace_s[other, cut, j] - (mesh.actions_s or 0.0)
            head = self.m * t + table.step_s[one, i, cut] + table.step_s[other, cut, j]
            x = table.transfer_s[other, cut, j] + (0.0 if table.entry_s is None else table.entry_s[one, i, cut])
            path = np.maximum(head, self._fill * t + x + rest[j])
            better = path < runs.path[i, j]
            at = i[better], j[better]
            runs.head[at], runs.path[at], runs.cut[at], runs.first[at] = head[better], path[better], cut[better], level
            runs.pace[at] = t[better]

    # -- several chunks per group

    def chunked(self) -> RegularAnswer:
        """The fastest pipeline of the divisions."""
        best: Pipeline | None = None
        looked_at: dict[tuple[int, ...], float] = {}
        for division in self.divisions:
            cuts, before_s = division, inf
            for _ in range(_ROUNDS):
                looked_at[cuts] = self.bound(cuts)
                levels, fits = self._fastest(cuts)
                chunks = self._mixed(cuts, levels) if fits else self._whole(cuts, levels)
                found = self._pipeline(chunks) if fits else None
                if found is not None and (best is None or found.estimate_s < best.estimate_s):
                    best = found
                again = self._divided_again(chunks)
                if again is None or again == cuts or (found is not None and found.estimate_s > before_s):
                    break
                cuts, before_s = again, found.estimate_s if found is not None else before_s
        bound_s = min(looked_at.values(), default=inf)
        return RegularAnswer((best,) if best is not None else (), bound_s, tuple(self.mixes), tuple(looked_at))

    def _divided_again(self, chunks: Sequence[Parts]) -> tuple[int, ...] | None:
        """An even division by the seconds of the table at the levels of each chunk; of a mix, in their proportion."""
        pace, arrays = self.mesh.table.pace_s, dict[tuple[tuple[int, float], ...], Floats]()
        order = []
        for parts in chunks:
            length = parts[-1][2] - parts[0][1]
            key = tuple((option, (j - i) / length) for option, i, j in parts)
            if key not in arrays:
                arrays[key] = np.where(self.mesh.allowed, sum(share * pace[option] for option, share in key), inf)
            order.append(arrays[key])
        return _even(order)

    def _whole(self, cuts: Sequence[int], levels: NDArray[np.intp]) -> list[Parts]:
        """The chunks at these levels, in the order of the layers."""
        at = zip(self._places, pairwise(cuts))
        return [[(int(self._options_of(k)[levels[k, c]]), i, j)] for (k, c), (i, j) in at]

    def _mixed(self, cuts: Sequence[int], levels: NDArray[np.intp]) -> list[Parts]:
        """The chunks at these levels, with mixes in the slowest group until that cannot be made faster."""
        chunks, table = self._whole(cuts, levels), self.mesh.table
        of_group: dict[int, list[int]] = {}
        for n, (k, _) in sorted(enumerate(self._places), key=lambda entry: entry[1]):
            of_group.setdefault(k, []).append(n)

        def seconds(parts: Parts) -> float:
            return self.m * self.mesh.pace_of(parts) + float(sum(table.step_s[one] for one in parts))

        loads = {k: sum(seconds(chunks[n]) for n in numbers) for k, numbers in of_group.items()}
        while self.mesh.actions_s is not None:
            slowest = max(loads, key=loads.__getitem__)
            found = self._faster(slowest, [chunks[n] for n in of_group[slowest]], seconds)
            if found is None:
                break
            place, parts, gain = found
            chunks[of_group[slowest][place]] = parts
            loads[slowest] -= gain
        return chunks

    def _faster(
        self, k: int, chunks: Sequence[Parts], seconds: Callable[[Parts], float]
    ) -> tuple[int, Parts, float] | None:
        """(the place of a chunk of a group, its parts as a mix, the seconds that this gains): the mix that gains
        most."""
        table, options = self.mesh.table, self._options_of(k)
        limit = self.mesh.limits[k, 0]

        def fits(parts: Sequence[Parts]) -> bool:
            every = [one for some in parts for one in some]
            if not all(np.isfinite(table.pace_s[one]) for one in every):
                return False
            saved = np.array([sum(table.saved[one] for one in some) for some in parts])
            held = sum(table.resident[one] for one in every) + max(table.transient[one] for one in every)
            return bool(held + (self._flights[k] @ saved).max() <= limit)

        best: tuple[int, Parts, float] | None = None
        for place, parts in enumerate(chunks):
            ((option, i, j), *rest), now_s = parts, seconds(parts)
            for level in self._distinct if not rest else ():
                if seconds([(int(options[level]), i, j)]) >= now_s:
                    continue
                low, high = i, j
                while high - low > 1:
                    cut = (low + high) // 2
                    mixed = [(int(options[level]), i, cut), (option, cut, j)]
                    if fits([*chunks[:place], mixed, *chunks[place + 1 :]]):
                        low = cut
                    else:
                        high = cut
                mixed = [(int(options[level]), i, low), (option, low, j)]
                gain = now_s - seconds(mixed) if low > i else 0.0
                if gain > (0.0 if best is None else best[2]):
                    best = place, mixed, gain
        return best

    @cached_property
    def divisions(self) -> list[tuple[int, ...]]:
        """Where chunks begin and end: even by the least seconds of chunks, and by these with the bytes that they hold
        at the price at which the groups' memory is worth most."""
        mesh, found = self.mesh, list[tuple[int, ...]]()
        pace = np.where(mesh.allowed, mesh.pace, inf)
        for level in [-1, *self._duals]:
            if level < 0:
                arrays = dict.fromkeys(self._places, pace)
            else:
                value, least = (np.where(mesh.allowed, one, 0.0) for one in (mesh.value[level], mesh.pace))
                gain = np.maximum(value - least, 0.0)
                ratio = mesh.byte[level] / mesh.saved_byte[level]
                shares = {(k, c): min(1.0, ratio * self._most_held[k][c]) for k, c in self._places}
                by_share = {share: pace + share * gain for share in shares.values()}
                arrays = {place: by_share[share] for place, share in shares.items()}
            cuts = _even([arrays[place] for place in self._places])
            if cuts is not None and cuts not in found:
                found.append(cuts)
        return found

    @cached_property
    def _duals(self) -> list[int]:
        return dual_levels(self.mesh, self.m, self.case)

    @cached_property
    def _most_held(self) -> list[NDArray[np.intp]]:
        """By group, the microbatches in flight of each chunk when most of them are."""
        return [times[times.sum(axis=1).argmax()] for times in self._flights]

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        return virtual_order(self.case.schedule, self.case.groups, self.case.chunks)

    @cached_property
    def _flights(self) -> tuple[NDArray[np.intp], ...]:
        return in_flight_by_chunk(self.case.schedule, self.case.groups, self.m, self.case.chunks)

    def _fastest(self, cuts: Sequence[int]) -> tuple[NDArray[np.intp], bool]:
        """(the numbers of the levels [groups, chunks] with which every group is fastest within its memory, True if all
        fit). A group that never fits takes what holds least."""
        case, mesh, table = self.case, self.mesh, self.mesh.table
        combos = np.array(list(product(range(len(self._levels)), repeat=case.chunks)))
        at = self._ranges(cuts)
        chosen, all_fit = np.zeros((case.groups, case.chunks), dtype=np.intp), True
        chunks = np.arange(case.chunks)
        for k in range(case.groups):
            rows = self._options_of(k)[:, None], *at[k].T
            load = (self.m * table.pace_s[rows] + table.step_s[rows])[combos, chunks].sum(axis=1)
            held = table.resident[rows][combos, chunks].sum(axis=1) + table.transient[rows][combos, chunks].max(axis=1)
            held = held + (table.saved[rows][combos, chunks] @ self._flights[k].T).max(axis=1)
            held = np.where(np.isfinite(load), held, inf)
            fits = held <= mesh.limits[k, 0]
            all_fit &= bool(fits.any())
            chosen[k] = combos[np.where(fits, load, inf).argmin() if fits.any() else held.argmin()]
        return chosen, all_fit

    def _ranges(self, cuts: Sequence[int]) -> NDArray[np.intp]:
        """[groups, chunks, 2] the layers of every chunk."""
        ranges = np.zeros((self.case.groups, self.case.chunks, 2), dtype=np.intp)
        for (k, c), both in zip(self._places, pairwise(cuts)):
            ranges[k, c] = both
        return ranges

    def bound(self, cuts: Sequence[int]) -> float:
        """A lower bound on the makespan of every pipeline with these cuts."""
        mesh, m, p, schedule = self.mesh, self.m, self.case.groups, self.case.schedule
        groups, (first, end) = [group for group, _ in self._places], np.array(list(pairwise(cuts))).T
        pace = mesh.pace[first, end]  # of the virtual stages, as all up to ``stays``
        way = mesh.trip[first, end] if is_split(schedule) else pace
        ahead, back = (np.append(some, 0.0) for some in mesh.least_messages(cuts, groups))
        ways = way + ahead + back
        stays = np.cumsum(ways[::-1])[::-1]  # from a forward to the end of its backward

        held = [in_flight_formula(schedule, k, p, m, self.case.chunks) for k in range(p)]
        turns = np.maximum(m * self._of_groups(stays) / held, stays[:p])
        loads = m * self._least_loads(cuts)
        own = np.maximum.reduce([loads, turns, self._least_work(cuts)]) + self._tied
        returns = np.maximum(m * self._of_groups(way) if is_split(schedule) or mesh.whole else loads, turns)
        begins, ways = _sums_before((mesh.forward[first, end] + ahead)[:p]), _sums_before(ways[:p])
        return float(max((begins + own).max(), (ways + returns).max()))

    def _of_groups(self, values: Floats) -> Floats:
        """[groups] the sums of values of the virtual stages."""
        return np.asarray(np.bincount([group for group, _ in self._places], values), dtype=np.float64)

    @cached_property
    def _tied(self) -> Floats:
        """[groups] the least seconds to exchange weights of both ends; zb-v's first group has both."""
        p, found = self.case.groups, np.zeros(self.case.groups)
        if self.case.schedule == "interleaved":
            found[[0, -1]] = self.mesh.tied(p)[p]
        return found

    def _least_loads(self, cuts: Sequence[int]) -> Floats:
        """[groups] the least seconds per microbatch of its chunks within its memory; inf if they never fit."""
        mesh, (first, end) = self.mesh, np.moveaxis(self._ranges(cuts), 2, 0)  # [groups, chunks]
        pace = mesh.pace[first, end]
        gain = np.maximum(mesh.value[:, first, end] - pace, 0.0)[self._alike, :, None]
        room = mesh.limits[: self.case.groups, 1] - mesh.peak[first, end].max(axis=1)
        price = mesh.byte[self._alike[:, 0], None]
        loads = (self._shares * gain).max(axis=1).sum(axis=3).max(axis=2) - price * room
        return np.where(room >= 0, pace.sum(axis=1) + loads.max(axis=0, initial=0.0), inf)

    def _least_work(self, cuts: Sequence[int]) -> Floats:
        """[groups] the least seconds of all work of a step, less what may run beside the last backward."""
        first, end = np.array(list(pairwise(cuts))).T
        work = self._of_groups(self.mesh.least_work(self.m)[first, end])
        priced = self._priced_work
        return work if priced is None else np.maximum(work, self.m * priced._least_loads(cuts))

    @cached_property
    def _priced_work(self) -> _Solver | None:
        priced = self.mesh.priced_work
        return None if priced is None else _Solver(priced, self.m, self.case)

    @cached_property
    def _alike(self) -> NDArray[np.intp]:
        """[prices, flights] the levels of each price of a byte; of prices with fewer, the first ones again."""
        byte = self.mesh.byte
        of_price = [np.flatnonzero(byte == price) for price in dict.fromkeys(byte.tolist())]
        flights = max(map(len, of_price), default=1)
        return np.array([np.resize(some, flights) for some in of_price], dtype=np.intp).reshape(-1, flights)

    @cached_property
    def _shares(self) -> Floats:
        """[prices, flights, groups, times, chunks] θ of ``regular_bounds``: of groups with fewer times, the first ones
        again."""
        times = max(map(len, self._flights))
        held = np.stack([np.resize(one, (times, self.case.chunks)) for one in self._flights])
        ratio = self.mesh.byte / np.where(self.mesh.saved_byte > 0, self.mesh.saved_byte, 1.0)
        return np.minimum(1.0, ratio[self._alike, None, None, None] * held)

    def played(self, cuts: Sequence[int], enough_s: float = inf, close: float = CLOSE) -> float:
        """A lower bound on the makespan of every pipeline with these cuts by the paths through its schedule; 0 if the
        schedule is too long to be played. enough_s, close: as in ``least_makespan``."""
        case, mesh, m, loads = self.case, self.mesh, self.m, self._least_loads(cuts)
        rounds = min(_MOST_ROUNDS, _MOST_PLAYED // (2 * m * case.groups * case.chunks))
        if not rounds or not np.isfinite(loads).all():
            return 0.0
        first, last = np.array(list(pairwise(cuts))).T
        pace, trip, forward, backward = (
            one[first, last] for one in (mesh.pace, mesh.trip, mesh.forward, mesh.backward)
        )
        if is_split(case.schedule):
            kinds, known = "FIW", {"F": forward, "FI": trip, "IW": backward, "FIW": pace}
        else:
            kinds, known = "FB", {"F": forward, "B": backward, "FB": pace}
        groups, each, tied = [group for group, _ in self._places], np.eye(case.groups), self._tied
        of_group = np.tile(each[:, groups], len(kinds))
        rows = [np.kron([[kind in some for kind in kinds]], np.eye(len(pace))) for some in known]
        least, work = list(known.values()), self._least_work(cuts)
        if mesh.whole:
            work = np.maximum(work, m * loads)
        else:
            rows.append(of_group)
            least.append(loads)
        likely = [np.maximum(pace / len(kinds), known.get(kind, 0.0 * pace)) for kind in kinds]
        done = m * self._of_groups(np.sum(likely, axis=0))
        acting = np.concatenate(rows)
        none = np.zeros((len(acting), case.groups))
        return least_makespan(
            generate(case.schedule, case.groups, m, case.chunks),
            kinds,
            np.concatenate([*likely, np.maximum(tied, work + tied - done)]),
            np.block([[acting, none], [m * of_group, each], [np.zeros_like(of_group), each]]),
            np.concatenate([*least, work + tied, tied]),
            *mesh.least_messages(cuts, groups),
            rounds,
            enough_s,
            close,
        )

    # -- the figures of a pipeline

    def _pipeline(self, chunks: Sequence[Parts]) -> Pipeline:
        """The pipeline of these chunks, in the order of the layers."""
        case, table, m = self.case, self.mesh.table, self.m
        p, v = case.groups, case.chunks
        places = self._places if v > 1 else tuple((k, 0) for k in range(p))
        both_ways = self.mesh.messages(chunks, [group for group, _ in places])
        messages = [ahead + back for ahead, back in both_ways]
        pace, saved, chunk_bytes = [], np.zeros((p, v)), []
        load, step, resident, transient = ([0.0] * p for _ in range(4))
        for (group, chunk), parts in zip(places, chunks):
            pace.append(self.mesh.pace_of(parts))
            held = sum(float(table.resident[one]) for one in parts)
            running = max(float(table.transient[one]) for one in parts)
            load[group] += pace[-1]
            step[group] += sum(float(table.step_s[one]) for one in parts)
            resident[group] += held
            transient[group] = max(transient[group], running)
            saved[group, chunk] = sum(float(table.saved[one]) for one in parts)
            chunk_bytes.append(held + running)
        estimate = before = 0.0
        for k in range(p):
            estimate = max(estimate, before + m * load[k] + step[k])
            if k < p - 1:
                before += self._fill * pace[k] + messages[k]
        worst = [times[(times @ s).argmax()] for s, times in zip(saved, self._flights)]
        peaks = [r + t + float(times @ s) for r, t, s, times in zip(resident, transient, saved, worst)]
        offsets = [self.mesh.places[group][0] for group in range(p)]
        at = [(self._number(parts), parts[0][1], parts[-1][2]) for parts in chunks]
        return Pipeline(
            stages=tuple(StageChoice(i, j, option, offsets[g]) for (g, _), (option, i, j) in zip(places, at)),
            path_s=estimate,
            latency_s=estimate,
            estimate_s=estimate,
            in_flight=tuple(in_flight_formula(case.schedule, k, p, m, v if v > 1 else None) for k in range(p)),
            peak_bytes=tuple(peaks),
            limit_bytes=tuple(self.mesh.limits[:p, 0].tolist()),
            idle_devices=table.num_devices - p * table.options[0].num_devices,
            chunks=v,
            messages_s=tuple(both_ways),
            chunk_bytes=tuple(
                held + float(worst[group][chunk] * saved[group, chunk])
                for (group, chunk), held in zip(places, chunk_bytes)
            )
            if v > 1
            else (),
            chunk_in_flight=tuple(int(worst[group][chunk]) for group, chunk in places) if v > 1 else (),
        )

    def _number(self, parts: Parts) -> int:
        """The option of a chunk; of a mix, the number that it has behind the options of the table."""
        (one, first, end), *rest = parts
        if not rest:
            return one
        mix = Mix(one, rest[0][0], first, end, rest[0][2])
        if mix not in self.mixes:
            self.mixes.append(mix)
        return len(self.mesh.table.options) + self.mixes.index(mix)


def _sums_before(values: Floats) -> Floats:
    return np.cumsum(values) - values


def _even(arrays: Sequence[Floats]) -> tuple[int, ...] | None:
    """The cuts of the most even division (least Σ t²) with the least largest chunk, by [L, L + 1] seconds of each chunk
    in order; None if there is none.

    Only chunks that are no longer than any within the largest of some division are looked at: [lengths, L + 1], the
    longest first, by where a chunk ends.
    """
    layers, distinct = len(arrays[0]), {id(pace): pace for pace in arrays}
    evenly = [round(layers * k / len(arrays)) for k in range(len(arrays) + 1)]
    most = max(float(pace[i, j]) if i < j else inf for pace, (i, j) in zip(arrays, pairwise(evenly)))
    lengths = np.arange(layers + 1) - np.arange(layers)[:, None]
    longest = max(int(lengths[pace <= most].max(initial=1)) for pace in distinct.values())
    first = np.arange(layers + 1) - np.arange(longest, 0, -1)[:, None]  # where a chunk of each length begins
    start, end = np.maximum(first, 0), np.arange(layers + 1)
    by_end = {key: np.where(first >= 0, pace[start, end], inf) for key, pace in distinct.items()}
    value = np.where(end == 0, 0.0, inf)
    for pace in arrays:
        value = np.maximum(value[start], by_end[id(pace)]).min(axis=0)
    largest = float(value[-1])
    if not largest < inf:
        return None
    squares = {key: np.where(pace <= largest, pace, inf) ** 2 for key, pace in by_end.items()}
    value = np.where(end == 0, 0.0, inf)
    came = []
    for pace in arrays:
        total = value[start] + squares[id(pace)]
        came.append(start[total.argmin(axis=0), end])
        value = total.min(axis=0)
    cuts = [layers]
    for before in reversed(came):
        cuts.append(int(before[cuts[-1]]))
    return tuple(cuts[::-1])
