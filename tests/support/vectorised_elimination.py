"""A driver of the vectorised elimination for tests: it presolves, plans and follows a recipe for rows of problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from meshwright.compiler.intra_op.solver.elimination_order import Limits, plan_elimination
from meshwright.compiler.intra_op.solver.vectorised_elimination import (
    EliminatedRows,
    chunk_rows,
    follow,
    in_chunks,
)
from meshwright.compiler.intra_op.solver.vectorised_presolve import Consumers, TensorEdges, simplify_links
from meshwright.compiler.intra_op.vectorised.layer_tables import EXACT


class EdgeCosts(NamedTuple):
    """A tensor in all rows. source: [choices of the producer] → source state; consumers: (operator, [its choices] →
    target state); cost: [rows, sources, targets] ≥ 0, inf = impossible."""

    producer: int
    source: np.ndarray
    consumers: Consumers
    cost: np.ndarray


@dataclass(frozen=True, eq=False)
class CaseTable:
    """The minimum over all but the kept operators, per row.

    cost: [rows, *(all choices of each kept operator)] in the order of ``keep``; inf = impossible.
    """

    keep: tuple[int, ...]
    cost: np.ndarray
    _chunks: tuple[EliminatedRows, ...] = field(repr=False)

    def assignments(self, cells: Sequence[np.ndarray]) -> list[np.ndarray]:
        """A choice per operator that attains the cost of each cell: one index array per kept operator, broadcastable
        to [rows, ...] (leading axis: the row). Where the cost is inf, the choices mean nothing."""
        num = len(self.cost)
        shape = np.broadcast_shapes((num,), *(np.shape(c)[:1] for c in cells))
        rest = np.broadcast_shapes((), *(np.shape(c)[1:] for c in cells))
        assert shape == (num,), (shape, num)
        full = [np.broadcast_to(c, (num, *rest)).reshape(num, -1) for c in cells]
        found: list[list[np.ndarray]] = []
        first = 0
        width = math.prod(rest)
        for chunk in self._chunks:
            rows = chunk.cost.shape[-1]
            at = np.repeat(np.arange(rows), width)
            found.append(chunk.walk([c[first : first + rows].reshape(-1) for c in full], at))
            first += rows
        return [np.concatenate(parts).reshape(num, *rest) for parts in zip(*found)]


def eliminate_rows(
    costs: Sequence[np.ndarray],
    edges: Sequence[tuple[int, np.ndarray, Consumers, np.ndarray]],
    keep: Sequence[int] = (),
    limits: Limits = EXACT,
) -> CaseTable:
    """Minimise Σ costs + Σ edges over all operators but those of ``keep``, in every row.

    costs: [rows, choices] ≥ 0 per operator, inf = impossible; edges: as ``EdgeCosts``. Raises TooWide where a table
    would be above the limits.
    """
    assert len(set(keep)) == len(keep), keep
    by_row = [np.ascontiguousarray(cost.T, dtype=float) for cost in costs]
    links = [
        TensorEdges.of(producer, source, consumers, [np.ascontiguousarray(np.moveaxis(cost, 0, -1), dtype=float)])
        for producer, source, consumers, cost in edges
        if consumers
    ]
    alive, reduced = simplify_links(by_row, links, frozenset(keep))
    recipe = plan_elimination(alive, reduced, keep, limits)
    tables = [link.tables[0] for link in reduced]

    def work(rows: slice) -> EliminatedRows:
        return follow(recipe, [cost[:, rows] for cost in by_row], [table[:, :, rows] for table in tables])

    num = by_row[0].shape[1]
    chunks = in_chunks(work, num, chunk_rows(recipe))
    cost = np.concatenate([np.moveaxis(chunk.cost, -1, 0) for chunk in chunks])
    return CaseTable(tuple(keep), cost, tuple(chunks))
