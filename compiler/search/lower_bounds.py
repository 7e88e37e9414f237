"""Lower bounds of runs of layers per (submesh, microbatch count, memory multiplier), and of a step by its least work.

A memory multiplier is a price in seconds per byte. Its unit is the price at which a stage's whole memory costs as much
as its whole time. The multiplier of a byte saved for backward, which counts once per microbatch in flight, is the same
times the number of these microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import inf, log2

import numpy as np
from torch.fx import Node

from ...costmodel.memory import usable_bytes
from ..cost.gradient_reduction import max_hidden_seconds, max_overlap
from ..cost.pricing import MeshPricer
from ..intra_op.vectorised.cases import Case, Cases, Samples
from ..intra_op.vectorised.interval_tables import IntervalComposer, IntervalTables, Row
from ..intra_op.vectorised.layer_tables import Level
from ..intra_op.vectorised.section import build_case_section
from ..ir.graph import rescale, types_of
from ..pipeline.table import LagrangianBound, LowerBounds, StageOption
from ..pipeline.table import StageConstraints as Cuts
from .parallel_shape import divide
from .space import Submesh, forced_submeshes, microbatch_counts, submeshes
from .state import SearchState, batch_bytes

__all__ = ["LARGEST_MULTIPLIER", "NO_MULTIPLIER", "RowGroup", "SearchBounds", "row_groups"]


# Memory multipliers: (factor of the unit, microbatches in flight that a saved byte counts for). The unit is a stage's
# time per its memory.
NO_MULTIPLIER = (0.0, 0.0)
LARGEST_MULTIPLIER = (1e4, 2.0)
LEAN_MULTIPLIERS = ((0.12, 1.0), (0.3, 2.0), (0.12, 4.0), (0.12, 16.0), (0.5, 1.0))
MULTIPLIER_OCTAVES = 0.25  # multipliers are rounded to powers of 2 so far apart, so that similar requests share rows
LARGEST_OCTAVES = 8.0  # the same for the largest multiplier
SPARE_FULLNESS = 0.15  # of the memory: if the leanest strategies take less, no multiplier is needed
PACE_LEVEL = Level(step_share=0.0)
STEP_LEVEL = Level()


class SearchBounds:
    """Lower bounds and tables by (submesh, microbatches, level), and the least work per microbatch count."""

    def __init__(self, search: SearchState) -> None:
        self.search = search
        layering, cluster = search.layering, search.cluster
        bounds = None
        if search.strategy and search.strategy.stages:
            keys = [layer.class_key.partition(" ")[0] for layer in layering.layers]  # constraints or not
            bounds = divide(keys, [stage.share for stage in search.strategy.stages])
        self.submeshes = (
            forced_submeshes(cluster, search.strategy, bounds) if search.strategy else submeshes(cluster, search.space)
        )
        asked = (
            [search.microbatches]
            if search.microbatches
            else search.counts or microbatch_counts(search.global_batch, search.strategy)
        )
        self.counts = [m for m in asked if m in search.constraints.microbatches and _fits(search, m)]
        self.levels: list[Level] = [PACE_LEVEL, STEP_LEVEL]
        self.usable = np.array(usable_bytes(cluster)) - batch_bytes(search)
        self.hidden_s = max_hidden_seconds(
            search.graph, cluster, search.optimizer, (sub.shape for sub in self.submeshes)
        )
        self._starts = {0, *accumulate(host.num_devices for host in cluster.hosts)}  # devices that hosts begin with
        self._ends: dict[tuple[Submesh, int], np.ndarray] = {}  # least seconds of messages [2, borders]
        self._sent: dict[tuple[Submesh, int], np.ndarray] = {}  # see ``sent_bytes``
        self._units: dict[tuple[int, float], float] = {}
        self._share: dict[int, float] = {}  # microbatches → seconds of a step if all devices were equally busy
        self.groups = row_groups(search, self.submeshes, self.counts, self.levels)
        self.cuts = Cuts(
            frozenset(search.resolved.cuts),
            frozenset(search.resolved.no_cuts) - {0},
            _stage_counts(search),
        )

    @property
    def _shape(self) -> tuple[int, int]:
        num = len(self.search.layering.layers)
        return num, num + 1

    def level(
        self,
        m: int,
        factor: float,
        flight: float,
        step_share: float = 1.0,
        weight_share: float = 1.0,
        gradient_share: float = 1.0,
    ) -> int:
        """The number of the level with ``factor`` units as multiplier of a byte, and ``flight`` times that of a saved
        byte."""
        share = self.search.memory_share
        if (m, share) not in self._units:
            whole = [self.least_pace(sub, m)[0, -1] * sub.num_devices for sub in self.submeshes]
            room = max(share * float(self.usable.sum()), 1.0)  # a step's batch may be more than there is
            self._units[m, share] = min(whole) / room
        unit = self._units[m, share]  # a device's seconds per byte, at the work of the whole model
        octaves = LARGEST_OCTAVES if factor == LARGEST_MULTIPLIER[0] else MULTIPLIER_OCTAVES
        unit = factor * 2.0 ** (octaves * round(log2(unit) / octaves)) if 0 < unit < inf else 0.0
        level = Level(unit, unit * min(flight, m), step_share, weight_share, gradient_share)
        if level not in self.levels:
            self.levels.append(level)
        return self.levels.index(level)

    def lean_levels(self, m: int, split: bool, ends: bool) -> list[int]:
        """Levels that bound a microbatch closely, with their lower bounds made: without multipliers alone where they
        are not needed.

        split: also bound a microbatch's way there and back where the backward is split. ends: also take the smallest
        and the largest multiplier.
        """
        lean, wide = list(LEAN_MULTIPLIERS), [NO_MULTIPLIER, LARGEST_MULTIPLIER]
        if self.fits_unconstrained(m):
            lean, wide = [], [NO_MULTIPLIER]
        levels = [self.level(m, *one) for one in wide if ends]
        levels += [self.level(m, *one, step_share=0.0) for one in lean]
        if split:
            levels += [self.level(m, *one, step_share=0.0, weight_share=0.0) for one in (NO_MULTIPLIER, *lean)]
        self.bound([(sub, m, n) for n in levels for sub in self.submeshes])
        return list(dict.fromkeys(levels))

    def array(self, name: str, sub: Submesh, m: int, price: int) -> np.ndarray:
        """One array [L, L + 1] of a submesh's tables."""
        return self.group(sub).array(name, sub, m, price)

    def peak_bytes(self, sub: Submesh, m: int) -> np.ndarray:
        """[L, L + 1] the bytes that some op of a run of layers takes while it runs, at the least."""
        group = self.group(sub)
        variant = group.variant(sub, m)
        peaks = np.array([float(group.composer.peak_bytes(k)[variant]) for k in range(self._shape[0])])
        runs = np.where(np.arange(len(peaks)) >= np.arange(len(peaks))[:, None], peaks, 0.0)
        return np.concatenate([np.zeros((len(peaks), 1)), np.maximum.accumulate(runs, axis=1)], axis=1)

    def least_phases(self, sub: Submesh, m: int) -> np.ndarray:
        """[2, L, L + 1] the least seconds of a microbatch's forward and of its backward through a run of layers."""
        group = self.group(sub)
        variant = group.variant(group.alike[sub], m)
        seconds = np.stack([group.composer.phase_seconds(k)[:, variant] for k in range(self._shape[0])], axis=1)
        until = np.concatenate([np.zeros((2, 1)), np.cumsum(seconds, axis=1)], axis=1)
        return np.maximum(until[:, None] - until[:, :-1, None], 0.0)

    def group(self, sub: Submesh) -> RowGroup:
        """The group whose composer makes the rows of a submesh."""
        return next(group for group in self.groups if sub in group.places)

    def option(self, sub: Submesh, number: int, level: int, room: float, beside: float = 0.0) -> StageOption:
        """One option of a pipeline table. room: the fraction of the memory that plans may fill; beside: bytes of it
        that tables do not know of."""
        part = self.search.memory_share * room
        limits = tuple(part * float(self.usable[d : d + sub.num_devices].min()) - beside for d in sub.offsets)
        return StageOption(sub.num_devices, sub.offsets, limits, number, level, self._starts.isdisjoint(sub.offsets))

    def compose(self, cases: Sequence[tuple[Submesh, int, int]]) -> None:
        """Make the intervals of these (submesh, microbatches, level)."""
        for group in self.groups:
            if rows := group.uncomposed([case for case in cases if case[0] in group.places]):
                group.compose(group.composer.intervals(rows))

    def bound(self, cases: Sequence[tuple[Submesh, int, int]]) -> None:
        """Make the lower bounds of these (submesh, microbatches, level)."""
        with self.search.timed("floors"):
            for group in self.groups:
                if rows := group.unbounded([case for case in cases if case[0] in group.places]):
                    group.bound(rows, *group.composer.floors(rows))

    def lower_bound(self, sub: Submesh, m: int, level: int) -> np.ndarray | None:
        """[L, L + 1] the least objective of a run of layers; None if it was not made."""
        return self.group(sub).floor(sub, m, level)

    def lagrangian(self, sub: Submesh, m: int, level: int) -> np.ndarray | None:
        """``lower_bound`` of a run that is a stage: with what it sends on, and one copy of weights that several of its
        layers use, where every use counts one."""
        found, prices = self.lower_bound(sub, m, level), self.levels[level]
        if found is None:
            return None
        return np.maximum(found + prices.saved_byte * self.sent_bytes(sub, m) - prices.byte * self.copies, 0.0)

    def least_pace(self, sub: Submesh, m: int) -> np.ndarray:
        """[L, L + 1] the least seconds of a microbatch, whatever the bytes."""
        found = self.lower_bound(sub, m, 0)
        assert found is not None
        return found

    # ---- lower bounds

    def work_levels(self, m: int) -> dict[int, float]:
        """The levels of all work of a step, and β of ``pipeline/regular``: the share of a backward that each leaves
        out."""
        most, found = max_overlap(self.search.cluster), {}
        for part in (0.5 / m, 1.0):  # ω
            beside = most * (1.0 - part)
            shares = {"step_share": m / (m - beside), "gradient_share": 1.0 - most * part}
            found[self.level(m, *NO_MULTIPLIER, **shares)] = beside
        return found

    def least_work(self, sub: Submesh, m: int) -> np.ndarray:
        """[L, L + 1] the least seconds of a stage's work in a step, less what may run beside the last backward, by
        those of ``work_levels`` that were made."""
        least, forward = m * self.least_pace(sub, m), self.least_phases(sub, m)[0]
        for level, beside in self.work_levels(m).items():
            if (value := self.lower_bound(sub, m, level)) is not None:
                least = np.maximum(least, (m - beside) * value + beside * forward)
        return least

    def compute_pace_bounds(self) -> None:
        """Bound the seconds per microbatch of every run of layers, and the step of every microbatch count by its least
        work, evenly on all devices."""
        if self._share:
            return
        self.bound([(sub, m, 0) for m in self.counts for sub in self.submeshes])
        self.bound([(sub, m, self.level(m, *LARGEST_MULTIPLIER)) for m in self.counts for sub in self._widest])
        self._share = {m: m * self._least_work(m) / self.search.cluster.num_devices for m in self.counts}

    def _least_work(self, m: int) -> float:
        """The least device-seconds of a microbatch: the sum over layers, each on its best submesh."""
        work = []
        for sub in self.submeshes:
            pace = np.diagonal(self.least_pace(sub, m), 1) - self.group(sub).actions(sub, m)
            work.append(sub.num_devices * np.maximum(pace, 0.0))
        return float(np.min(work, axis=0).sum())

    def least_share(self, m: int) -> float:
        """Seconds of a step with m microbatches if all devices shared the least work of all layers evenly: a bound
        under every schedule."""
        return self._share[m]

    def fits_unconstrained(self, m: int) -> bool:
        """True if the leanest strategies leave most of the memory free, so that no memory multiplier is needed."""
        return self.min_memory_fraction(m) < SPARE_FULLNESS

    def min_memory_fraction(self, m: int) -> float:
        """The fraction of a device's memory that the leanest strategies take if all devices are one stage."""
        level = self.level(m, *LARGEST_MULTIPLIER)
        byte = self.levels[level].byte
        wide = [self.lower_bound(sub, m, level) for sub in self._widest]
        least = min((float(floor[0, -1]) / byte for floor in wide if floor is not None), default=inf) if byte else 0.0
        return least / max(self.search.memory_share * float(self.usable.min()), 1.0)

    @cached_property
    def _widest(self) -> list[Submesh]:
        """Submeshes of all devices."""
        return [sub for sub in self.submeshes if sub.num_devices == len(self.usable)]

    def lower_bounds_of(self, m: int, priced: Sequence[int], work: bool = False) -> LowerBounds:
        """Lower bounds of all submeshes: seconds per microbatch, messages and, at the levels ``priced``, Lagrangian
        values; all work of a step, less what may hide, if ``work``."""
        subs = self.submeshes
        shape = len(subs), *self._shape
        rows = []
        for number in priced:
            value, level = np.zeros(shape), self.levels[number]  # nothing is known of a submesh not looked at
            for o, sub in enumerate(subs):
                found = self.lagrangian(sub, m, number)
                if found is not None:
                    value[o] = found
            trip = level.weight_share < 1.0
            rows.append(LagrangianBound(level.byte, level.saved_byte, value, level.step_share > 0.0, trip))
        pace = np.stack([self.least_pace(sub, m) for sub in subs])
        options = tuple(self.option(sub, o, 0, 1.0) for o, sub in enumerate(subs))
        ends = np.stack([self.least_messages(sub, m) for sub in subs])
        enter, behind = np.broadcast_to(ends[:, 0, :-1, None], shape), np.broadcast_to(ends[:, 1, None, :], shape)
        whole = np.stack([self.least_work(sub, m) for sub in subs]) / m if work else None
        forward, backward = np.stack([self.least_phases(sub, m) for sub in subs], axis=1)
        return LowerBounds(
            options, pace, whole, transfer_s=behind, entry_s=enter, forward_s=forward, backward_s=backward,
            rows=tuple(rows),
        )  # fmt: skip

    def sent_bytes(self, sub: Submesh, m: int) -> np.ndarray:
        """As ``RowGroup.sent_bytes``."""
        if (sub, m) not in self._sent:
            self._sent[sub, m] = self.group(sub).sent_bytes(sub, m)
        return self._sent[sub, m]

    def least_messages(self, sub: Submesh, m: int) -> np.ndarray:
        """[2, borders] the least seconds to receive what crosses each border, and to get its gradients back."""
        if (sub, m) not in self._ends:
            self._ends[sub, m] = self.group(sub).least_messages(sub, m)
        return self._ends[sub, m]

    @cached_property
    def shared(self) -> list[tuple[Node, list[int]]]:
        """The parameters that several layers read, and these layers."""
        return self.search.layering.shared_weights(self.search.graph)

    @cached_property
    def tied(self) -> list[Node]:
        """The trained parameters that the first and the last layer read: of several stages the first and the last
        exchange them."""
        ends, trained = [0, len(self.search.layering.layers) - 1], self.search.layering.needs_grad
        nodes = [node for node, readers in self.shared if [readers[0], readers[-1]] == ends]
        return [node for node in nodes if node.meta["source"].requires_grad and node.name in trained]

    @cached_property
    def copies(self) -> np.ndarray:
        """[L, L + 1] bytes of the copies of shared weights that tables count too much: every use counts one, the stage
        holds one."""
        search, copies = self.search, np.zeros(self._shape)
        pricer = MeshPricer(search.cluster, 0, (), search.optimizer, mixed=search.graph.mixed)
        first, end = np.indices(self._shape)
        for node, layers in self.shared:
            trained = node.meta["source"].requires_grad
            whole = sum(pricer.parameter_memory(node.meta["type"], (), trained).values())
            uses = sum(((first <= k) & (k < end)).astype(int) for k in layers)
            copies += whole * np.maximum(uses - 1, 0)
        return copies


def _fits(search: SearchState, m: int) -> bool:
    """True if the graph can be instantiated for m microbatches: every extent that scales with the batch stays whole."""
    graph = search.graph.origin or search.graph
    extents = {extent for node in graph for kind in types_of(node) for extent in kind.shape}
    try:
        for extent in extents:
            rescale(extent, graph.batch, search.global_batch // m)
    except ValueError:
        return False
    return True


def _stage_counts(search: SearchState) -> tuple[int, int | None]:
    if search.strategy is not None:
        return search.strategy.num_stages, search.strategy.num_stages
    return search.constraints.stages.low, search.constraints.stages.high


# ---- Submeshes of equally many axes, whose rows (case, memory multiplier) one composer makes: lower bounds and
# intervals by (submesh, microbatches, level)


class RowGroup:
    """Submeshes with equally many axes of equal roles: one composer for all their cases."""

    def __init__(
        self, search: SearchState, subs: Sequence[Submesh], counts: Sequence[int], levels: Sequence[Level]
    ) -> None:
        self.submeshes = list(subs)
        self.places = {sub: index for index, sub in enumerate(subs)}
        kin = {(sub.shape, sub.roles, sub.site): sub for sub in reversed(self.submeshes)}
        self.alike = {sub: kin.get((sub.shape, sub.roles, sub.alike), sub) for sub in subs}
        self.counts = {m: index for index, m in enumerate(counts)}
        cases = tuple(Case(sub.shape, sub.site, m) for m in counts for sub in subs)
        space = search.space
        assert search.samples is not None
        variants = Cases(
            search.graph, search.layering, search.cluster, search.optimizer, search.global_batch, cases,
            space.schedules[0], search.samples, communication=space.communication,
        )  # fmt: skip
        restriction = search.restriction(subs[0].roles)
        self.composer = IntervalComposer(variants, restriction, levels, space.recompute, build_case_section)
        self.composer.alike = [self.variant(self.alike[sub], m) for m in self.counts for sub in self.submeshes]
        self.composer.kept, self.composer.workers = search.row_cache, search.workers
        self._at: dict[Row, tuple[IntervalTables, int]] = {}
        self._floors: dict[Row, np.ndarray] = {}

    def variant(self, sub: Submesh, m: int) -> int:
        """The case's number."""
        return self.counts[m] * len(self.submeshes) + self.places[sub]

    def row(self, sub: Submesh, m: int, price: int) -> Row:
        """The row of the composer."""
        return self.variant(sub, m), price

    def uncomposed(self, cases: Sequence[tuple[Submesh, int, int]]) -> list[Row]:
        """The rows of these (submesh, microbatches, level) that have no tables yet."""
        return [row for row in (self.row(*case) for case in cases) if row not in self._at]

    def compose(self, made: IntervalTables) -> None:
        """Store tables of the composer."""
        self._at |= {row: (made, place) for place, row in enumerate(made.rows)}

    def unbounded(self, cases: Sequence[tuple[Submesh, int, int]]) -> list[Row]:
        """The rows of these (submesh, microbatches, level) that have no lower bound yet."""
        rows = dict.fromkeys((self.variant(self.alike[sub], m), level) for sub, m, level in cases)
        return [row for row in rows if row not in self._floors]

    def bound(self, rows: Sequence[Row], values: np.ndarray, run: np.ndarray) -> None:
        """Store lower bounds of the composer."""
        padded = np.concatenate([values, np.full((1, len(rows)), inf)])
        self._floors |= {row: padded[:, place].take(run, mode="wrap") for place, row in enumerate(rows)}

    def floor(self, sub: Submesh, m: int, level: int) -> np.ndarray | None:
        """[L, L + 1] the least objective at a level without messages; None if it was not made."""
        bound = self._floors.get((self.variant(self.alike[sub], m), level))
        return self.array("floor_s", sub, m, level) if bound is None and self.knows(sub, m, level) else bound

    def actions(self, sub: Submesh, m: int) -> float:
        """Seconds of a stage's two actions."""
        return float(self.composer.actions[self.variant(sub, m)])

    def least_messages(self, sub: Submesh, m: int) -> np.ndarray:
        """[2, borders] the least seconds to receive what crosses each border, and to get its gradients back."""
        v, num = self.variant(sub, m), len(self.composer.cases.layering.crossing)
        both, known = np.zeros((2, num)), dict[int, list[float]]()
        for border in range(1, num - 1):
            seconds = self.composer.border_seconds(border, near=True)
            key = id(seconds[0])  # borders that are alike share it
            if key not in known:
                possible = self.composer.states(border)[1][v]
                known[key] = [one[possible, v].min() for one in seconds] if possible.any() else [0.0, 0.0]
            both[:, border] = known[key]
        return both

    def sent_bytes(self, sub: Submesh, m: int) -> np.ndarray:
        """[borders] the least bytes, per microbatch in flight, of what a stage that ends at each border sends on."""
        v, num = self.variant(sub, m), len(self.composer.cases.layering.crossing)
        return np.array([self.composer.sent_bytes(b)[v] if 0 < b < num - 1 else 0.0 for b in range(num)])

    def knows(self, sub: Submesh, m: int, price: int) -> bool:
        """True if these tables were made."""
        return self.row(sub, m, price) in self._at

    def array(self, name: str, sub: Submesh, m: int, price: int) -> np.ndarray:
        """One array [L, L + 1] of the intervals."""
        made, place = self._at[self.row(sub, m, price)]
        found: np.ndarray = made.of(name, [place])[0]
        return found


def row_groups(
    search: SearchState, subs: Sequence[Submesh], counts: Sequence[int], levels: Sequence[Level]
) -> list[RowGroup]:
    """The groups of these submeshes, for all microbatch counts."""
    by_kind: dict[tuple[int, tuple[str | None, ...]], list[Submesh]] = {}
    for sub in subs:
        by_kind.setdefault((len(sub.shape), sub.roles), []).append(sub)
    if search.samples is None:
        search.samples = Samples(search.graph, search.layering)
    return [RowGroup(search, members, counts, levels) for members in by_kind.values()] if counts else []
