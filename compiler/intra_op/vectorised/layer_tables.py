"""Tables of one layer class for many rows at once: what the layer costs between two borders, per row.

A *row* is a case (mesh shape, offset, microbatches: ``cases``) under a *level* (memory multipliers, and the share of
per-step seconds that counts). Its objective is, for the recompute mode that is best in each cell,

    seconds + again[mode]
        − ((1 − step_share) · step_seconds + (1 − weight_share) · weight_seconds + step_share · (1 − gradient_share) ·
        gradient_seconds) · floor_seconds / seconds
        + byte · resident + saved_byte · saved[mode] − (seconds − floor_seconds)

where floor_seconds are a lower bound on the share of this layer in a stage of several layers (all of its seconds but
for floating ops and weights that layers share). So no stage costs less than the sum of its layers' lower bounds.

Recompute modes are rows of the elimination, and the best one is taken afterwards. Then the choices behind every
possible cell are walked back and their seconds and bytes are added up, each resharded copy once per (tensor, target
state). Rows are the last axis of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ...errors import TooWide
from ..solver.choice_reduction import proposals, reduced_elimination
from ..solver.elimination_order import Limits, Recipe, plan_elimination, plan_relaxation
from ..solver.presolve import TensorEdges, simplify_links
from ..solver.vectorised_elimination import EliminatedRows, Running, chunk_rows, follow, in_chunks
from .problem import CaseEdge, CaseSection
from .repeats import merged, merged_below, moved_places, repeats_of

__all__ = ["TIE", "LayerTables", "LayerTemplate", "Level", "Weights"]

#: What is above these limits is solved on fewer choices.
EXACT = Limits(20_000_000, 2.0**24)
REDUCED = Limits(2**20, 2.0**22)
#: Its bounds come from tables of so many cells, and what proposes choices from larger ones.
RELAXED_CELLS, PROPOSED_CELLS = 2**14, 2**19
#: So many sets of choices serve the cases of a layer …
MOST_GROUPS = 4
#: … where the ones before lie further above the bounds than this.
GROUP_GAP = 0.05
GROUP_GAIN = 0.01
_NO_RECIPE = Recipe((), (), (), (), (), (), (), 0, 0)
#: Seconds per byte that let the leaner of equally fast choices win; 0.1 ns for a terabyte.
TIE = 1e-22


@dataclass(frozen=True)
class Level:
    """The memory multipliers of an objective, and the shares of the seconds that count."""

    #: Seconds per resident byte.
    byte: float = 0.0
    #: Seconds per byte that is saved for backward.
    saved_byte: float = 0.0
    #: The share of per-step seconds that counts; more than 1 where those of a microbatch count less.
    step_share: float = 1.0
    #: The share of the gradients of weights that counts: all of it, unless ``step_share`` is 0 (``_corners``).
    weight_share: float = 1.0
    #: The share of the sums of whole gradients, of what ``step_share`` says of them, that counts.
    gradient_share: float = 1.0

    @property
    def unpriced(self) -> bool:
        """True if bytes count nothing but for ties."""
        return not self.byte and not self.saved_byte


@dataclass(frozen=True, eq=False)
class Weights:
    """The levels of some rows, as arrays [rows]; case: the case of each."""

    case: np.ndarray
    byte: np.ndarray
    saved_byte: np.ndarray
    step_off: np.ndarray
    weight_off: np.ndarray
    gradient_off: np.ndarray

    @staticmethod
    def of(rows: Sequence[tuple[int, Level]]) -> Weights:
        """(case, level) per row."""
        levels = [level for _, level in rows]
        assert all(level.weight_share == 1.0 or level.step_share == 0.0 for level in levels), levels
        return Weights(
            np.array([case for case, _ in rows], dtype=np.intp),
            np.array([level.byte for level in levels]) + TIE,
            np.array([level.saved_byte for level in levels]) + TIE,
            1.0 - np.array([level.step_share for level in levels]),
            1.0 - np.array([level.weight_share for level in levels]),
            np.array([level.step_share * (1.0 - level.gradient_share) for level in levels]),
        )

    def part(self, rows: slice | np.ndarray) -> Weights:
        """These rows alone."""
        return Weights(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass(frozen=True, eq=False)
class Terms:
    """The seconds and bytes of an operator or a tensor: [*choice axes, cases], in the last three by mode; None is 0
    everywhere."""

    seconds: np.ndarray  # inf where impossible
    sure: np.ndarray | None  # the part of the seconds that counts in the objective; None: all
    step_s: np.ndarray | None
    weight_s: np.ndarray | None
    gradient_s: np.ndarray | None
    resident: np.ndarray | None
    again: tuple[np.ndarray | None, ...]
    saved: tuple[np.ndarray | None, ...]
    transient: tuple[np.ndarray | None, ...]

    @property
    def idle(self) -> bool:
        """True if all of it is 0."""
        return not (self.seconds.any() or _any(self.again) or _any(self.saved) or _any(self.transient))

    def counted(self, seconds: np.ndarray) -> np.ndarray:
        """The part of some seconds that counts in the objective."""
        return seconds if self.sure is None else self.sure * seconds

    def objective(self, weights: Weights, case_indices: slice | np.ndarray, modes: Sequence[int] | None) -> np.ndarray:
        """[*choice axes, modes · rows] of rows of these cases; modes: None for one in which everything has the mode
        that is best for it alone: no mode of a whole layer is less."""
        base = self.seconds[..., case_indices]
        if self.step_s is not None and weights.step_off.any():
            base = base - self.step_s[..., case_indices] * weights.step_off
        if self.weight_s is not None and weights.weight_off.any():
            base = base - self.weight_s[..., case_indices] * weights.weight_off
        if self.gradient_s is not None and weights.gradient_off.any():
            base = base - self.gradient_s[..., case_indices] * weights.gradient_off
        sure = None if self.sure is None else self.sure[..., case_indices]
        base = base if sure is None else base * sure
        if self.resident is not None:
            base = base + self.resident[..., case_indices] * weights.byte
        if modes is None:
            return self._with_own_modes(base, sure, weights, case_indices)
        cost = np.empty((*base.shape[:-1], len(modes), base.shape[-1]))
        for place, mode in enumerate(modes):
            again, saved, part = self.again[mode], self.saved[mode], cost[..., place, :]
            part[...] = base
            if again is not None:
                part += again[..., case_indices] if sure is None else again[..., case_indices] * sure
            if saved is not None:
                part += saved[..., case_indices] * weights.saved_byte
        return cost.reshape(*cost.shape[:-2], -1)

    def _with_own_modes(
        self, base: np.ndarray, sure: np.ndarray | None, weights: Weights, case_indices: slice | np.ndarray
    ) -> np.ndarray:
        """``base`` with the least that any mode adds to it."""
        modes = {(id(again), id(saved)): (again, saved) for again, saved in zip(self.again, self.saved)}
        if (id(None), id(None)) in modes:
            return base
        least: np.ndarray | None = None
        for again, saved in modes.values():
            added: np.ndarray | float = 0.0
            if again is not None:
                added = again[..., case_indices] if sure is None else again[..., case_indices] * sure
            if saved is not None:
                added = added + saved[..., case_indices] * weights.saved_byte
            least = np.asarray(added) if least is None else np.minimum(least, added)
        return base if least is None else base + least


@dataclass(frozen=True, eq=False)
class Border:
    """The operators of one border (entries, or exits) as one: a choice for every combination of theirs that some border
    state has.

    operators: which these are; choices: [combinations, operators]; of_state: [border states] which combination.
    """

    operators: tuple[int, ...]
    choices: np.ndarray
    of_state: np.ndarray

    @staticmethod
    def of(positions: Mapping[int, np.ndarray], num_states: int) -> Border:
        """positions: operator → [border states], its choice in each."""
        if not positions:
            return Border((), np.zeros((1, 0), dtype=np.intp), np.zeros(num_states, dtype=np.intp))
        choices, of_state = np.unique(np.stack([*positions.values()], axis=1), axis=0, return_inverse=True)
        return Border(tuple(positions), choices, of_state.reshape(-1))

    def joined(self, costs: Sequence[np.ndarray]) -> np.ndarray:
        """[combinations, N] from [choices, N] per operator of the section: their sum, and 0 in the place of theirs."""
        return np.asarray(sum((costs[i][c] for i, c in zip(self.operators, self.choices.T)), np.zeros(1)))


@dataclass(frozen=True, eq=False)
class LayerTemplate:
    """One layer class, ready for any rows: its terms, and the recipe of its elimination.

    layer: whose names the section uses. The recipe has two operators after those of the section, one per border, which
    it keeps; those of the section that they stand for are left with one choice and no cost. possible: [in states, out
    states, cases].
    """

    section: CaseSection
    layer: int
    modes: tuple[str, ...]
    operators: tuple[Terms, ...]
    tensors: tuple[Terms, ...]
    links: tuple[int, ...]  # which edges the recipe's links are
    recipe: Recipe
    borders: tuple[Border, Border]
    possible: np.ndarray
    #: The template of lower bounds, where this one has less choices than the layer.
    lower: LayerTemplate | None = None
    #: Templates of fewer choices, and bool [cases] which of the cases each is for.
    groups: tuple[tuple[np.ndarray, LayerTemplate], ...] = ()
    #: The layer before its repeats were merged, and the place of each of its operators in ``section``.
    whole: tuple[CaseSection, np.ndarray] | None = None

    @staticmethod
    def of(
        section: CaseSection,
        layer: int,
        modes: Sequence[str],
        into: Mapping[int, np.ndarray],
        out: Mapping[int, np.ndarray],
        possible: np.ndarray,
    ) -> LayerTemplate:
        """Presolve the section and plan its elimination. into, out: operator → its choice by state of that border.

        Repeated ops are merged. What is then still too wide keeps the choices that good decisions use, and has bounds
        of its own."""

        def presolved(section: CaseSection, place: np.ndarray | None = None) -> _Presolved:
            ends = (into, out) if place is None else (moved_places(into, place), moved_places(out, place))
            return _Presolved.of(section, layer, tuple(modes), *ends, possible)

        classes = repeats_of(section)
        if classes is None:
            return presolved(section).template()
        above = merged(section, classes)
        lower = presolved(*merged_below(section, repeats_of(section, equal=True) or [])).template_below()
        return replace(presolved(*above).template(), lower=lower, whole=(section, above[1]))

    @property
    def family(self) -> list[LayerTemplate]:
        """This template, that of its bounds and those of its groups."""
        return [self, *([] if self.lower is None else [self.lower]), *(one for _, one in self.groups)]

    @property
    def work(self) -> int:
        """About the cells that a row takes."""
        return len(self.modes) * max(one.recipe.work for one in self.family)

    def decision(self, chosen: list[int]) -> tuple[CaseSection, list[int]]:
        """The section of the layer, and a choice for each of its operators."""
        return (self.section, chosen) if self.whole is None else (self.whole[0], [chosen[i] for i in self.whole[1]])

    def proposals(self, cases: np.ndarray) -> list[np.ndarray]:
        """The scores of the choices that might stay (``choice_reduction``), from these cases without a price on bytes
        and at one that makes all bytes cost as much as all seconds."""
        seconds = sum(float(_typical(terms.seconds)) for terms in self.operators)
        held = sum(float(_typical(terms.resident)) for terms in self.operators if terms.resident is not None)
        held += sum(float(_typical(a)) for terms in self.operators for a in _different(terms.saved))
        levels = [Level(), Level(byte=seconds / held, saved_byte=seconds / held)] if held else [Level()]
        weights = Weights.of([(case, level) for level in levels for case in cases.tolist()])

        def scores(rows: slice) -> list[np.ndarray]:
            return proposals(self._eliminated(weights.part(rows), None, walkable=True))

        parts = in_chunks(scores, len(weights.case), chunk_rows(self.recipe))
        return [np.max(some, axis=0) for some in zip(*parts)]

    def tables(self, weights: Weights) -> LayerTables:
        """The class's tables for these rows."""
        if self.groups:
            some = [np.flatnonzero(mask[weights.case]) for mask, _ in self.groups]
            parts = [(rows, one.tables(weights.part(rows))) for rows, (_, one) in zip(some, self.groups) if len(rows)]
            return LayerTables.joined(self, weights.case, parts)
        shape = (*self.possible.shape[:2], len(weights.case))
        values, mode = np.zeros((6, *shape)), np.zeros(shape, np.uint8)
        values[0] = np.inf
        modes = tuple(range(len(self.modes)))
        if "none" in self.modes and weights.byte.max() <= TIE and weights.saved_byte.max() <= TIE:
            modes = (self.modes.index("none"),)  # to run something again takes longer
        tables = LayerTables(self, values, mode, weights.case, modes, ())
        most = max(1, chunk_rows(self.recipe) // len(modes))
        cells = np.nonzero(self.possible.any(axis=2))
        chunks = in_chunks(lambda rows: self._chunk(weights.part(rows), rows, cells, tables), shape[2], most)
        return replace(tables, chunks=tuple(chunks))

    def floors(self, weights: Weights) -> np.ndarray:
        """[in states, out states, rows] the least objective of all recompute modes, rounded down."""
        if self.lower is not None:
            return self.lower.floors(weights)
        cost = np.full((*self.possible.shape[:2], len(weights.case)), np.inf)
        into, out = np.nonzero(self.possible.any(axis=2))
        terms = len(self.operators) + len(self.tensors) + 8
        lower = 1.0 - terms * float(np.finfo(np.float32).eps)  # which their sum does not lose, as none is negative
        modes = range(len(self.modes)) if weights.byte.max() > TIE or weights.saved_byte.max() > TIE else None

        def fill(rows: slice) -> None:
            part = weights.part(rows)
            values = self._values(self._eliminated(part, modes, walkable=False), (into, out), len(part.case))
            allowed = self.possible[into, out][:, _as_slice(part.case)]
            cost[into, out, rows] = np.where(allowed, values.min(axis=1) * lower, np.inf)

        in_chunks(fill, len(weights.case), max(1, chunk_rows(self.recipe) // (len(self.modes) if modes else 1)))
        return cost

    def _eliminated(self, weights: Weights, modes: Sequence[int] | None, walkable: bool) -> EliminatedRows:
        """The elimination of these rows, mode by mode (None: as if each op had the one that is best for it), in single
        precision if it need not be walked."""
        case_indices, kind = _as_slice(weights.case), np.float64 if walkable else np.float32
        costs = [terms.objective(weights, case_indices, modes) for terms in self.operators]
        costs += [np.broadcast_to(b.joined(costs), (len(b.choices), costs[0].shape[1])) for b in self.borders]
        for operator in (i for border in self.borders for i in border.operators):
            costs[operator] = np.zeros((1, costs[0].shape[1]))
        costs = [cost.astype(kind, copy=False) for cost in costs]
        links = [self.tensors[i].objective(weights, case_indices, modes).astype(kind, copy=False) for i in self.links]
        return follow(self.recipe, costs, links, walkable)

    def _values(self, chunk: EliminatedRows, cells: tuple[np.ndarray, ...], num_rows: int) -> np.ndarray:
        """[cells, modes, rows] the costs at these (in, out) states."""
        by_mode = chunk.cost[self.borders[0].of_state[cells[0]], self.borders[1].of_state[cells[1]]]
        return by_mode.reshape(len(cells[0]), -1, num_rows)

    def _chunk(
        self, weights: Weights, rows: slice, cells: tuple[np.ndarray, ...], tables: LayerTables
    ) -> EliminatedRows:
        """Fill these rows of ``tables``. cells: the (in, out) states that are possible together in some case."""
        case, (into, out) = weights.case, cells
        case_indices = _as_slice(case)
        chunk = self._eliminated(weights, tables.modes, walkable=True)
        by_mode = self._values(chunk, cells, len(case))
        running = Running(np.array(by_mode[:, 0]), len(tables.modes))
        better = np.empty(running.cost.shape, dtype=bool)
        for k in range(1, len(tables.modes)):
            running.offer(by_mode[:, k], k, None, better)
        cost = np.where(self.possible[into, out][:, case_indices], running.cost, np.inf)
        tables.cost[into, out, rows] = cost
        numbers = np.array(tables.modes)
        tables.mode[into, out, rows] = numbers[running.best]
        cell, row = np.nonzero(np.isfinite(cost))
        place = running.best[cell, row].astype(np.intp)
        modes = numbers[place]
        chosen = self.walk(chunk, into.take(cell), out.take(cell), place * len(case) + row)
        sums = self.add_up(chosen, modes, case.take(row))
        for array, quantity in zip(tables.values[1:], sums):
            part = np.zeros(cost.shape)
            part[cell, row] = quantity
            array[into, out, rows] = part
        return chunk

    def walk(self, chunk: EliminatedRows, into: np.ndarray, out: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Choices per operator of the section behind cells, given by border states and rows of the chunk."""
        kept = [border.of_state.take(states) for border, states in zip(self.borders, (into, out))]
        chosen = chunk.walk(kept, rows)[: len(self.operators)]
        for border, combination in zip(self.borders, kept):
            for operator, choices in zip(border.operators, border.choices.T):
                chosen[operator] = choices.take(combination)
        return chosen

    def add_up(self, chosen: Sequence[np.ndarray], modes: np.ndarray, case: np.ndarray) -> list[np.ndarray]:
        """pace_s, step_s, resident, saved, transient of assignments: choices per operator, modes and cases, all flat.

        A tensor's copy counts once per target state that someone wants."""
        num_cases = self.possible.shape[2]
        sums = _Sums(modes, len(self.modes))
        for terms, choice in zip(self.operators, chosen):
            sums.add(terms, np.multiply(choice, num_cases, dtype=np.intp) + case, None)
        for edge, terms in zip(self.section.edges, self.tensors):
            if terms.idle:
                continue
            lines = (edge.source * (terms.seconds.shape[1] * num_cases)).take(chosen[edge.producer]) + case
            wanted: list[np.ndarray] = []
            for k, target in edge.consumers:
                state = target.take(chosen[k])
                fresh = np.all([state != other for other in wanted], axis=0) if wanted else None
                sums.add(terms, lines + state * num_cases, fresh)
                wanted.append(state)
        return sums.total


@dataclass(frozen=True, eq=False)
class _Presolved:
    """A template without its recipe, and the choices and links of its elimination."""

    first: LayerTemplate
    alive: list[np.ndarray]
    links: list[TensorEdges]
    keep: tuple[int, int]

    @staticmethod
    def of(
        section: CaseSection,
        layer: int,
        modes: tuple[str, ...],
        into: Mapping[int, np.ndarray],
        out: Mapping[int, np.ndarray],
        possible: np.ndarray,
    ) -> _Presolved:
        operators = tuple(_operator_terms(section, i, modes) for i in range(len(section.names)))
        known: dict[tuple[int, ...], np.ndarray] = {}
        tensors = tuple(_tensor_terms(edge, modes, known) for edge in section.edges)
        borders = Border.of(into, possible.shape[0]), Border.of(out, possible.shape[1])
        numbers = tuple(i for i, e in enumerate(section.edges) if e.consumers)
        links = [_link(section.edges[i], tensors[i], borders, len(operators)) for i in numbers]
        keep = len(operators), len(operators) + 1
        corners = [np.zeros((1, 1)) if i in into or i in out else _corners(terms) for i, terms in enumerate(operators)]
        corners += [np.zeros((len(border.choices), 1)) for border in borders]  # never compared
        alive, reduced = simplify_links(corners, links, frozenset(keep))
        first = LayerTemplate(section, layer, modes, operators, tensors, numbers, _NO_RECIPE, borders, possible)
        return _Presolved(first, alive, reduced, keep)

    def template(self) -> LayerTemplate:
        """The template whose tables are the costs of decisions, exact where that is not too wide."""
        try:
            return replace(self.first, recipe=plan_elimination(self.alive, self.links, self.keep, EXACT))
        except TooWide:
            lower, wide = self._relaxed(RELAXED_CELLS), self._relaxed(PROPOSED_CELLS)
            return replace(self.first, lower=lower, groups=self._groups(wide))

    def _relaxed(self, cells: float) -> LayerTemplate:
        return replace(self.first, recipe=plan_relaxation(self.alive, self.links, self.keep, cells))

    def _groups(self, wide: LayerTemplate) -> tuple[tuple[np.ndarray, LayerTemplate], ...]:
        """``LayerTemplate.groups``: the choices that are good in all cases, those that are good in the cases where the
        first ones lie above the bounds of ``wide``, which proposes them, and so on."""
        num = self.first.possible.shape[2]
        offered = [np.isfinite(terms.seconds) for terms in self.first.operators]
        offered += [np.ones((len(border.choices), num), dtype=bool) for border in self.first.borders]

        def least(template: LayerTemplate, cases: np.ndarray) -> np.ndarray:
            return template.floors(Weights.of([(case, Level()) for case in cases.tolist()])).min(axis=(0, 1))

        bound_s = least(wide, np.arange(num))
        left, best_s, group = np.flatnonzero(np.isfinite(bound_s)), np.full(num, np.inf), np.zeros(num, dtype=np.intp)
        found: list[LayerTemplate] = []
        some = left if len(left) else np.arange(num)
        while len(some) and len(found) < MOST_GROUPS:
            possible = [mask[alive][:, some] for mask, alive in zip(offered, self.alive)]
            recipe = reduced_elimination(self.alive, self.links, self.keep, wide.proposals(some), possible, REDUCED)
            found.append(replace(self.first, recipe=recipe))
            now_s = least(found[-1], some)
            better = now_s < best_s[some] * (1 - GROUP_GAIN)
            group[some[better]] = len(found) - 1
            best_s[some[better]] = now_s[better]
            left = left[best_s[left] > bound_s[left] * (1 + GROUP_GAP)]
            if not better.any():  # fewer cases, if that gives these any decision at all
                left = left[np.isinf(best_s[left])]
            some = left[: max(1, len(some) // 4)] if len(left) == len(some) else left
        return tuple((group == k, one) for k, one in enumerate(found) if (group == k).any())

    def template_below(self) -> LayerTemplate:
        """The template of lower bounds."""
        try:
            return replace(self.first, recipe=plan_elimination(self.alive, self.links, self.keep, REDUCED))
        except TooWide:
            return self._relaxed(RELAXED_CELLS)


@dataclass(frozen=True, eq=False)
class LayerTables:
    """One layer class for some rows: arrays [in states, out states, rows]; the bytes and seconds are those of the
    choices behind ``cost``, and 0 where that is inf. modes: indices of the recompute modes that were looked at.

    cost: the objective; mode: index of the best recompute mode; pace_s: seconds per microbatch; step_s: what a step
    costs once, divided by the microbatches; resident: bytes; saved: bytes per microbatch in flight; transient: bytes
    that live only while this layer runs (or runs again).
    """

    template: LayerTemplate
    values: np.ndarray  # [6, in states, out states, rows]: cost, pace_s, step_s, resident, saved, transient
    mode: np.ndarray
    case: np.ndarray
    modes: tuple[int, ...]
    chunks: tuple[EliminatedRows, ...]
    #: The tables of the template's groups, and the rows of each.
    parts: Sequence[tuple[np.ndarray, LayerTables]] = ()

    cost = property(lambda self: self.values[0])
    pace_s = property(lambda self: self.values[1])
    step_s = property(lambda self: self.values[2])
    resident = property(lambda self: self.values[3])
    saved = property(lambda self: self.values[4])
    transient = property(lambda self: self.values[5])

    @staticmethod
    def joined(
        template: LayerTemplate, case: np.ndarray, parts: Sequence[tuple[np.ndarray, LayerTables]]
    ) -> LayerTables:
        """The tables of some rows each, as one."""
        first = parts[0][1]
        values = np.empty((*first.values.shape[:-1], len(case)))
        mode = np.empty((*first.mode.shape[:-1], len(case)), first.mode.dtype)
        for rows, part in parts:
            values[..., rows], mode[..., rows] = part.values, part.mode
        return LayerTables(template, values, mode, case, first.modes, (), parts)

    def choices(self, row: int, into: int, out: int) -> tuple[list[int], int]:
        """(choice per operator of the section, mode) behind one cell; ValueError where it is impossible."""
        if not np.isfinite(self.cost[into, out, row]):
            raise ValueError(
                f"border states must be possible together, but got {(into, out)} in row {row}; see where cost is finite"
            )
        for rows, part in self.parts:
            if row in rows:
                return part.choices(int(np.searchsorted(rows, row)), into, out)
        mode = int(self.mode[into, out, row])
        num_modes = len(self.modes)
        for chunk in self.chunks:
            rows = chunk.cost.shape[-1] // num_modes
            if row < rows:
                break
            row -= rows
        cell = (np.array([index]) for index in (into, out, self.modes.index(mode) * rows + row))
        return [int(c[0]) for c in self.template.walk(chunk, *cell)], mode


# ---- terms of a section


def _operator_terms(section: CaseSection, i: int, modes: Sequence[str]) -> Terms:
    seconds = section.seconds[i]
    possible = np.isfinite(seconds)

    def only(array: np.ndarray | None) -> np.ndarray | None:
        if array is None or _is_nothing(array):
            return None
        return np.ascontiguousarray(np.where(possible, array, 0.0).T)

    def by_mode(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray | None, ...]:
        made = {id(array): only(array) for array in arrays.values()}
        return tuple(made[id(arrays[mode])] if mode in arrays else None for mode in modes)

    floor = section.floor_seconds[i]
    sure = None
    if not np.array_equal(floor, seconds):
        spends = possible & (seconds > 0)
        sure = np.ascontiguousarray(np.where(spends, floor, 1.0).T) / np.where(spends, seconds, 1.0).T
    return Terms(
        np.ascontiguousarray(seconds.T, dtype=float),
        sure,
        only(section.step_seconds[i]),
        only(section.weight_seconds[i]),
        only(section.gradient_seconds[i]),
        only(section.resident[i]),
        by_mode(section.again[i]),
        by_mode(section.saved[i]),
        by_mode(section.transient[i]),
    )


def _tensor_terms(edge: CaseEdge, modes: Sequence[str], known: dict[tuple[int, ...], np.ndarray]) -> Terms:
    """known: arrays that tensors share, by identity, with the rows last."""
    seconds = edge.seconds
    possible: list[np.ndarray] = []  # made when first needed

    def turned(array: np.ndarray) -> np.ndarray | None:
        if _is_nothing(array):
            return None
        key = id(array), id(seconds)
        if key not in known:
            if array is not seconds:
                possible[:] = possible or [np.isfinite(seconds)]
                array = np.where(possible[0], array, 0.0)
            known[key] = np.ascontiguousarray(np.moveaxis(array, 0, -1), dtype=float)
        return known[key]

    def by_mode(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray | None, ...]:
        return tuple(turned(arrays[mode]) if mode in arrays else None for mode in modes)

    total = turned(seconds)
    if total is None:
        total = np.zeros((*seconds.shape[1:], len(seconds)))
    sure = None if edge.floor == 1.0 else np.where(np.isfinite(total), edge.floor, 1.0)
    return Terms(total, sure, None, None, None, None, by_mode(edge.again), by_mode(edge.bytes), by_mode(edge.transient))


def _link(edge: CaseEdge, terms: Terms, borders: Sequence[Border], number: int) -> TensorEdges:
    """The edge between operators of the recipe: those of the borders are ``number`` and the one after."""
    place = {i: (number + k, c) for k, border in enumerate(borders) for i, c in zip(border.operators, border.choices.T)}

    def at(operator: int, states: np.ndarray) -> tuple[int, np.ndarray]:
        if operator not in place:
            return operator, states
        new, choices = place[operator]
        return new, states[choices]

    source = at(edge.producer, edge.source)
    consumers = tuple(at(k, target) for k, target in edge.consumers)
    return TensorEdges.of(*source, consumers, _different([terms.seconds, *terms.again, *terms.saved]))


def _is_nothing(array: np.ndarray) -> bool:
    """True if all of it is 0: by one cell where that stands for all of them."""
    return not (array.any() if any(array.strides) else array.size and array.flat[0])


def _typical(array: np.ndarray) -> float:
    """The least of the choices in the average case, of those that are possible."""
    least = np.where(np.isfinite(array), array, np.inf).min(axis=0)
    return float(np.mean(least[np.isfinite(least)])) if np.isfinite(least).any() else 0.0


def _any(arrays: Sequence[np.ndarray | None]) -> bool:
    return any(array is not None for array in arrays)


def _different(arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Each array once."""
    return list({id(array): array for array in arrays if array is not None}.values())


def _corners(terms: Terms) -> np.ndarray:
    """[choices, N]: columns of which every objective is a sum with weights ≥ 0, so that less in all of them is less."""
    whole = _different([terms.seconds, terms.step_s])
    columns = [terms.counted(one) for one in whole]
    if terms.step_s is not None:
        columns.append(terms.counted(terms.seconds - terms.step_s))
    if terms.weight_s is not None:
        step_s = 0.0 if terms.step_s is None else terms.step_s
        columns.append(terms.counted(terms.seconds - step_s - terms.weight_s))
    if terms.gradient_s is not None:
        columns += [terms.counted(one - terms.gradient_s) for one in whole]
    columns += [terms.counted(again) for again in _different(terms.again)]
    columns += _different([terms.resident, *terms.saved])
    return np.concatenate(columns, axis=1)


class _Sums:
    """Sums of (pace_s, step_s, resident, saved, transient) over flat cells whose modes are known."""

    def __init__(self, modes: np.ndarray, num_modes: int) -> None:
        self.total = [np.zeros(len(modes)) for _ in range(5)]
        # the cells of each mode; all of them without a list
        self.cells: list[np.ndarray | None] = [np.flatnonzero(modes == m) for m in range(num_modes)]
        self.cells = [None if cells is not None and len(cells) == len(modes) else cells for cells in self.cells]

    def add(self, terms: Terms, at: np.ndarray, where: np.ndarray | None) -> None:
        """Add what ``terms`` has at flat indices; where: bool, which of the cells."""
        pace, step, resident, saved, transient = self.total
        seconds = terms.seconds.reshape(-1).take(at, mode="clip")
        if terms.step_s is not None:
            once = terms.step_s.reshape(-1).take(at, mode="clip")
            step += once
            seconds -= once
        pace += seconds if where is None else seconds * where
        if terms.resident is not None:
            resident += terms.resident.reshape(-1).take(at, mode="clip")
        for by_mode, sums in ((terms.again, pace), (terms.saved, saved), (terms.transient, transient)):
            if len(_different(by_mode)) == 1 and all(quantity is not None for quantity in by_mode):
                assert by_mode[0] is not None
                values = by_mode[0].reshape(-1).take(at, mode="clip")
                sums += values if where is None else values * where
                continue
            for quantity, cells in zip(by_mode, self.cells):
                if quantity is not None and (cells is None or len(cells)):
                    _add_cells(quantity.reshape(-1), at, where, cells, sums)


def _add_cells(
    quantity: np.ndarray, at: np.ndarray, where: np.ndarray | None, cells: np.ndarray | None, sums: np.ndarray
) -> None:
    """Add ``quantity`` of some cells (None: all) to their sums."""
    values = quantity.take(at if cells is None else at[cells], mode="clip")
    if where is not None:
        values *= where if cells is None else where[cells]
    if cells is None:
        sums += values
    else:
        sums[cells] += values


def _as_slice(case: np.ndarray) -> slice | np.ndarray:
    """The cases as a slice where they are consecutive: slices of arrays are views."""
    first, num = int(case[0]), len(case)
    return slice(first, first + num) if np.array_equal(case, np.arange(first, first + num)) else case
