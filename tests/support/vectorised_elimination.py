"""A driver of the vectorised elimination for tests: it presolves, plans and follows a recipe for rows of problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from meshwright.compiler.intra_op.solver.elimination_order import Limits, Recipe, plan_elimination
from meshwright.compiler.intra_op.solver.presolve import Consumers, TensorEdges, simplify_links
from meshwright.compiler.intra_op.solver.problem import Edge, Operator, Problem, evaluate
from meshwright.compiler.intra_op.solver.vectorised_elimination import (
    EliminatedRows,
    chunk_rows,
    follow,
    in_chunks,
)
from meshwright.compiler.intra_op.vectorised.layer_tables import EXACT

Plan = Callable[[Sequence[np.ndarray], Sequence[TensorEdges], Sequence[int], Limits], Recipe]


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
    plan: Plan = plan_elimination,
) -> CaseTable:
    """Minimise Σ costs + Σ edges over all operators but those of ``keep``, in every row.

    costs: [rows, choices] ≥ 0 per operator, inf = impossible; edges: as ``EdgeCosts``. Raises TooWide where a table
    would be above the limits. plan: makes the recipe.
    """
    assert len(set(keep)) == len(keep), keep
    by_row = [np.ascontiguousarray(cost.T, dtype=float) for cost in costs]
    links = [
        TensorEdges.of(producer, source, consumers, [np.ascontiguousarray(np.moveaxis(cost, 0, -1), dtype=float)])
        for producer, source, consumers, cost in edges
        if consumers
    ]
    alive, reduced = simplify_links(by_row, links, frozenset(keep))
    recipe = plan(alive, reduced, keep, limits)
    tables = [link.tables[0] for link in reduced]

    def work(rows: slice) -> EliminatedRows:
        return follow(recipe, [cost[:, rows] for cost in by_row], [table[:, :, rows] for table in tables])

    num = by_row[0].shape[1]
    chunks = in_chunks(work, num, chunk_rows(recipe))
    cost = np.concatenate([np.moveaxis(chunk.cost, -1, 0) for chunk in chunks])
    return CaseTable(tuple(keep), cost, tuple(chunks))


def random_batch(seed, rows):
    """2–6 operators of 1–4 choices; tensors with 0–3 consumers (repeats too), impossible entries, zeros and ties."""
    rng = np.random.default_rng(seed)
    whole = rng.random() < 0.3  # whole seconds make ties
    num_operators = int(rng.integers(2, 7))

    def seconds(*shape):
        values = rng.integers(0, 4, shape).astype(float) if whole else rng.random(shape)
        return values * (rng.random(shape[1:]) > 0.2)

    costs = []
    for _ in range(num_operators):
        cost = seconds(rows, int(rng.integers(1, 5)))
        cost[rng.random(cost.shape) < 0.05] = np.inf
        cost[:, rng.random(cost.shape[1]) < 0.05] = np.inf
        costs.append(cost)
    edges = []
    for i in range(num_operators - 1):
        sources, targets = map(int, rng.integers(1, 5, 2))
        cost = seconds(rows, sources, targets)
        cost[rng.random(cost.shape) < 0.05] = np.inf
        cost[:, rng.random(cost.shape[1:]) < 0.1] = np.inf
        if rng.random() < 0.3:
            cost[:, :, -1] = cost[:, :, 0]
        consumers = rng.integers(i + 1, num_operators, rng.integers(0, 4)).tolist()
        wants = tuple((k, rng.integers(0, targets, costs[k].shape[1])) for k in consumers)
        edges.append(EdgeCosts(i, rng.integers(0, sources, costs[i].shape[1]), wants, cost))
    return costs, edges


def row_of(costs, edges, row):
    """One row as a problem of its own."""
    operators = tuple(
        Operator(f"o{i}", tuple(map(str, range(cost.shape[1]))), cost[row], np.zeros(cost.shape[1]))
        for i, cost in enumerate(costs)
    )
    return Problem(
        operators,
        tuple(
            Edge(f"e{t}", e.producer, e.source, e.consumers, e.cost[row], np.zeros(e.cost.shape[1:]))
            for t, e in enumerate(edges)
        ),
    )


def brute_force(problem, keep):
    expected = np.full([len(problem.operators[i].labels) for i in keep], np.inf)
    for choice in itertools.product(*(range(len(op.labels)) for op in problem.operators)):
        cell = tuple(choice[i] for i in keep)
        expected[cell] = min(expected[cell], evaluate(problem, choice)[0])
    return expected


def assert_attained(problem, table, row):
    """Each finite cell's assignment keeps what the cell says and costs what it says."""
    shape = table.cost.shape[1:]
    cells = [np.broadcast_to(index.reshape(1, -1), (len(table.cost), index.size)) for index in np.indices(shape)]
    if not cells:
        chosen = [c[row : row + 1] for c in table.assignments([])]
    else:
        chosen = [c[row] for c in table.assignments(cells)]
    for number, cell in enumerate(itertools.product(*map(range, shape))):
        cost = table.cost[(row, *cell)]
        if math.isfinite(cost):
            choice = [int(c[number]) for c in chosen]
            assert tuple(choice[i] for i in table.keep) == cell
            assert evaluate(problem, choice)[0] == pytest.approx(cost, rel=1e-12)
