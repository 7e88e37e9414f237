"""Tables of one layer class for many rows at once: what the layer costs between two borders, per row.

A *row* is a case (mesh shape, offset, microbatches: ``variants``) under a *level* (weights of bytes, shares of what may
hide). Its objective is, for the recompute mode that is best in each cell,

    seconds + again[mode] + byte · resident + saved_byte · saved[mode]
        − (1 − gradient_share) · gradient_seconds − (1 − backward_share) · backward_seconds

Modes are rows of the elimination and minimised over afterwards. Only then, for the cells that are left, the choices are
walked back, and what they take is added up: seconds per microbatch and step, resident, saved and transient bytes, with
each resharded copy once per (tensor, target state). All arrays have the rows as their last axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from .batch_eliminate import MAX_CELLS, Chunk, chunk_rows, follow, in_chunks
from .batch_presolve import Link, simplify_links
from .elimination_recipe import Recipe, plan_elimination

__all__ = ["TIE", "Cells", "LayerTables", "Level", "Template", "Weights"]

TIE = 1e-22  # seconds per byte: of equally fast choices the leaner one; 0.1 ns for a terabyte

ByMode = Mapping[str, np.ndarray]


class SectionEdge(Protocol):
    """A tensor of a ``Section``: [variants, sources, targets] arrays, as ``intra_op.Edge`` otherwise."""

    name: str
    producer: int
    source: np.ndarray
    consumers: tuple[tuple[int, np.ndarray], ...]
    seconds: np.ndarray
    again: ByMode
    bytes: ByMode
    transient: ByMode


class Section(Protocol):
    """One layer, priced for all variants: ``batch_section.BatchSection``. Arrays [variants, choices] per operator."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    choices: tuple[tuple[Any, ...], ...]
    seconds: tuple[np.ndarray, ...]
    step_seconds: tuple[np.ndarray, ...]
    gradient_seconds: tuple[np.ndarray, ...]
    backward_seconds: tuple[np.ndarray, ...]
    again: tuple[ByMode, ...]
    resident: tuple[np.ndarray, ...]
    saved: tuple[ByMode, ...]
    transient: tuple[ByMode, ...]
    edges: tuple[SectionEdge, ...]


@dataclass(frozen=True)
class Level:
    """Weights of an objective: seconds per resident and per saved byte; which share of the gradients' reductions and of
    the backward counts."""

    byte: float = 0.0
    saved_byte: float = 0.0
    gradient_share: float = 1.0
    backward_share: float = 1.0


@dataclass(frozen=True, eq=False)
class Weights:
    """The levels of some rows, as arrays [rows]; variant: which case each is of."""

    variant: np.ndarray
    byte: np.ndarray
    saved_byte: np.ndarray
    gradient_off: np.ndarray
    backward_off: np.ndarray

    @staticmethod
    def of(rows: Sequence[tuple[int, Level]]) -> Weights:
        """(case, level) per row."""
        levels = [level for _, level in rows]
        return Weights(
            np.array([variant for variant, _ in rows], dtype=np.intp),
            np.array([level.byte for level in levels]) + TIE,
            np.array([level.saved_byte for level in levels]) + TIE,
            1.0 - np.array([level.gradient_share for level in levels]),
            1.0 - np.array([level.backward_share for level in levels]),
        )

    def part(self, rows: slice) -> Weights:
        """These rows alone."""
        return Weights(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass(frozen=True, eq=False)
class Terms:
    """What an operator or a tensor adds, [*choice axes, modes, variants]; None where that is nothing at all."""

    seconds: np.ndarray  # inf where impossible
    step_s: np.ndarray | None
    gradient_s: np.ndarray | None
    backward_s: np.ndarray | None
    resident: np.ndarray | None
    saved: np.ndarray | None
    transient: np.ndarray | None

    def objective(self, weights: Weights, cases: slice | np.ndarray) -> np.ndarray:
        """[*choice axes, modes · rows] of rows of these cases."""
        cost = np.array(self.seconds[..., cases])
        for quantity, weight, sign in (
            (self.resident, weights.byte, 1.0),
            (self.saved, weights.saved_byte, 1.0),
            (self.gradient_s, weights.gradient_off, -1.0),
            (self.backward_s, weights.backward_off, -1.0),
        ):
            if quantity is not None and weight.any():
                cost += quantity[..., cases] * (sign * weight)
        return cost.reshape(*cost.shape[:-2], -1)


@dataclass(frozen=True, eq=False)
class Cells:
    """Sums over the choices behind cells: flat arrays."""

    pace_s: np.ndarray
    step_s: np.ndarray
    resident: np.ndarray
    saved: np.ndarray
    transient: np.ndarray


@dataclass(frozen=True, eq=False)
class Template:
    """One layer class, ready for any rows: its terms, and the recipe of its elimination.

    layer: whose names the section uses; kept: the operator of each axis of the eliminated table; into, out: per such
    axis its choice by border state [in states, 1] or [1, out states]; possible: [in states, out states, variants].
    """

    section: Section
    layer: int
    modes: tuple[str, ...]
    operators: tuple[Terms, ...]
    tensors: tuple[Terms, ...]
    links: tuple[int, ...]  # which edges the recipe's links are
    recipe: Recipe
    positions: tuple[np.ndarray, ...]
    possible: np.ndarray

    @staticmethod
    def of(
        section: Section,
        layer: int,
        modes: Sequence[str],
        keep: Sequence[int],
        positions: Sequence[np.ndarray],
        possible: np.ndarray,
    ) -> Template:
        """Presolve the section and plan its elimination. Raises TooWide."""
        operators = tuple(_operator_terms(section, i, modes) for i in range(len(section.names)))
        tensors = tuple(_tensor_terms(edge, modes) for edge in section.edges)
        links = [
            Link.of(
                e.producer, e.source, e.consumers, [_flat(t.seconds), *(_flat(q) for q in (t.saved,) if q is not None)]
            )
            for e, t in zip(section.edges, tensors)
            if e.consumers
        ]
        numbers = tuple(i for i, e in enumerate(section.edges) if e.consumers)
        alive, reduced = simplify_links([_corners(terms) for terms in operators], links, frozenset(keep))
        recipe = plan_elimination(alive, reduced, keep, MAX_CELLS)
        return Template(section, layer, tuple(modes), operators, tensors, numbers, recipe, tuple(positions), possible)

    def tables(self, weights: Weights) -> LayerTables:
        """The class's tables for these rows."""
        most = max(1, chunk_rows(self.recipe) // len(self.modes))
        parts = in_chunks(lambda rows: self._chunk(weights.part(rows)), len(weights.variant), most)
        joined = [np.concatenate(arrays, axis=-1) for arrays in zip(*(arrays for arrays, _ in parts))]
        cost, mode, pace_s, step_s, resident, saved, transient = joined
        chunks = tuple(chunk for _, chunk in parts)
        return LayerTables(self, cost, mode, pace_s, step_s, resident, saved, transient, weights.variant, chunks)

    def _chunk(self, weights: Weights) -> tuple[tuple[np.ndarray, ...], Chunk]:
        variant = weights.variant
        cases = _as_slice(variant)
        costs = [terms.objective(weights, cases) for terms in self.operators]
        links = [self.tensors[i].objective(weights, cases) for i in self.links]
        chunk = follow(self.recipe, costs, links)
        shape = self.possible.shape[:2]
        by_mode = chunk.cost[tuple(np.broadcast_to(p, shape) for p in self.positions)]
        if not self.positions:
            by_mode = np.broadcast_to(by_mode, (*shape, by_mode.shape[-1]))
        by_mode = by_mode.reshape(*shape, len(self.modes), len(variant))
        mode, cost = np.zeros(shape + variant.shape, dtype=np.uint8), np.array(by_mode[:, :, 0])
        for other in range(1, len(self.modes)):
            better = by_mode[:, :, other] < cost
            np.copyto(cost, by_mode[:, :, other], where=better)
            mode[better] = other
        cost[~self.possible[..., cases]] = np.inf
        found = np.isfinite(cost)
        sums = self._sums(chunk, variant, mode, found)
        arrays = [np.zeros(cost.shape) for _ in sums]
        for array, values in zip(arrays, sums):
            array[found] = values
        return (cost, mode, *arrays), chunk

    def _sums(self, chunk: Chunk, variant: np.ndarray, mode: np.ndarray, found: np.ndarray) -> list[np.ndarray]:
        """Per field of ``Cells`` the sums over the choices behind the cells that are found."""
        into, out, row = np.nonzero(found)
        modes = mode[found].astype(np.intp)
        kept = [np.broadcast_to(p, found.shape[:2])[into, out] for p in self.positions]
        chosen = chunk.walk(kept, modes * len(variant) + row)
        return self.add_up(chosen, modes, variant.take(row))

    def add_up(self, chosen: Sequence[np.ndarray], modes: np.ndarray, variant: np.ndarray) -> list[np.ndarray]:
        """pace_s, step_s, resident, saved, transient of assignments: choices per operator, modes and cases, all flat.

        A tensor's copy counts once per target state that someone wants."""
        num_modes, num_cases = len(self.modes), self.possible.shape[2]
        total = [np.zeros(len(modes)) for _ in range(5)]
        here = modes * num_cases + variant
        stride = num_modes * num_cases
        for terms, choice in zip(self.operators, chosen):
            _gather(terms, np.multiply(choice, stride, dtype=np.intp) + here, total, None)
        for edge, terms in zip(self.section.edges, self.tensors):
            if not terms.seconds.any() and terms.saved is None and terms.transient is None:
                continue
            lines = (edge.source * (terms.seconds.shape[1] * stride)).take(chosen[edge.producer]) + here
            wanted: list[np.ndarray] = []
            for k, target in edge.consumers:
                state = target.take(chosen[k])
                fresh = np.all([state != other for other in wanted], axis=0) if wanted else None
                _gather(terms, lines + state * stride, total, fresh)
                wanted.append(state)
        return total


@dataclass(frozen=True, eq=False)
class LayerTables:
    """One layer class for some rows: arrays [in states, out states, rows]; the bytes and seconds are those of the
    choices behind ``cost``, and 0 where that is inf.

    cost: the objective; mode: index of the best recompute mode; pace_s: seconds per microbatch; step_s: what a step
    costs once, divided by the microbatches; resident: bytes; saved: bytes per microbatch in flight; transient: bytes
    that live only while this layer runs (or runs again).
    """

    template: Template
    cost: np.ndarray
    mode: np.ndarray
    pace_s: np.ndarray
    step_s: np.ndarray
    resident: np.ndarray
    saved: np.ndarray
    transient: np.ndarray
    variant: np.ndarray
    chunks: tuple[Chunk, ...]

    def choices(self, row: int, into: int, out: int) -> tuple[list[int], int]:
        """(choice per operator, mode) behind one cell; ValueError where it is impossible."""
        if not np.isfinite(self.cost[into, out, row]):
            raise ValueError(
                f"border states must be possible together, but got {(into, out)} in row {row}; see where cost is finite"
            )
        mode = int(self.mode[into, out, row])
        num_modes = len(self.template.modes)
        for chunk in self.chunks:
            rows = chunk.cost.shape[-1] // num_modes
            if row < rows:
                break
            row -= rows
        shape = self.cost.shape[:2]
        kept = [np.broadcast_to(p, shape)[into, out].reshape(1) for p in self.template.positions]
        return [int(c[0]) for c in chunk.walk(kept, np.array([mode * rows + row]))], mode


# ---- terms of a section


def _operator_terms(section: Section, i: int, modes: Sequence[str]) -> Terms:
    seconds = np.asarray(section.seconds[i], dtype=float)
    possible = np.isfinite(seconds)

    def spread(array: np.ndarray) -> np.ndarray | None:
        return _rows_last([np.where(possible, array, 0.0)] * len(modes))

    again = [seconds + section.again[i][mode] if mode in section.again[i] else seconds for mode in modes]
    total = _rows_last([np.where(possible, a, np.inf) for a in again])
    assert total is not None or not seconds.any()
    shape = (seconds.shape[1], len(modes), seconds.shape[0])
    return Terms(
        np.zeros(shape) if total is None else total,
        spread(section.step_seconds[i]),
        spread(section.gradient_seconds[i]),
        spread(section.backward_seconds[i]),
        spread(section.resident[i]),
        _rows_last([np.where(possible, section.saved[i].get(m, 0.0), 0.0) for m in modes]),
        _rows_last([np.where(possible, section.transient[i].get(m, 0.0), 0.0) for m in modes]),
    )


def _tensor_terms(edge: SectionEdge, modes: Sequence[str]) -> Terms:
    seconds = np.asarray(edge.seconds, dtype=float)
    possible = np.isfinite(seconds)
    total = _rows_last([seconds + edge.again[m] if m in edge.again else seconds for m in modes])
    return Terms(
        np.zeros((*seconds.shape[1:], len(modes), len(seconds))) if total is None else total,
        None,
        None,
        None,
        None,
        _rows_last([np.where(possible, edge.bytes.get(m, 0.0), 0.0) for m in modes]),
        _rows_last([np.where(possible, edge.transient.get(m, 0.0), 0.0) for m in modes]),
    )


def _rows_last(by_mode: Sequence[np.ndarray]) -> np.ndarray | None:
    """[variants, ...] per mode as one [..., modes, variants]; None where all of it is 0."""
    if not any(array.any() for array in by_mode):
        return None
    return np.ascontiguousarray(np.moveaxis(np.stack(by_mode), (0, 1), (-2, -1)))


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:-2], -1)


def _corners(terms: Terms) -> np.ndarray:
    """[choices, N]: columns of which every objective is a sum with weights ≥ 0, so that less in all of them is less."""
    columns = [terms.seconds]
    shaved = [q for q in (terms.gradient_s, terms.backward_s) if q is not None]
    for off in shaved:
        columns.append(terms.seconds - off)
    if len(shaved) == 2:
        columns.append(terms.seconds - shaved[0] - shaved[1])
    columns += [q for q in (terms.resident, terms.saved) if q is not None]
    return np.concatenate([_flat(column) for column in columns], axis=1)


def _gather(terms: Terms, at: np.ndarray, total: Sequence[np.ndarray], where: np.ndarray | None) -> None:
    """Add what ``terms`` has at flat indices to (pace_s, step_s, resident, saved, transient)."""
    pace, step, resident, saved, transient = total
    seconds = terms.seconds.reshape(-1).take(at, mode="clip")
    if terms.step_s is not None:
        once = terms.step_s.reshape(-1).take(at, mode="clip")
        step += once
        seconds -= once
    _add(pace, seconds, where)
    for quantity, sums in ((terms.resident, resident), (terms.saved, saved), (terms.transient, transient)):
        if quantity is not None:
            _add(sums, quantity.reshape(-1).take(at, mode="clip"), where)


def _add(sums: np.ndarray, values: np.ndarray, where: np.ndarray | None) -> None:
    if where is not None:
        values *= where
    sums += values


def _as_slice(variant: np.ndarray) -> slice | np.ndarray:
    """The cases as a slice where they are consecutive: slices of arrays are views."""
    first, num = int(variant[0]), len(variant)
    return slice(first, first + num) if np.array_equal(variant, np.arange(first, first + num)) else variant
