"""Exact elimination: the intra-op problem solved by min-plus algebra over tables, for graphs of small treewidth.

**Factors.** With a price λ (``byte_weight``, seconds per byte) the cost of an assignment is a sum of tables over few
variables:

    cost(x) = Σ_i f_i(x_i) + Σ_t f_t(s_t, a_t1, …, a_tk),     f = seconds + λ · bytes
    s_t = source_t(x_p(t)),   a_tk = target_tk(x_k)           state variables: functions of one operator's choice
    f_t(s, a_1, …, a_k) = Σ_{g ∈ {a_1, …, a_k}} w_t[s, g]     one tensor, all its consumers; shared targets paid once

State variables keep f_t small: it ranges over the few states of its tensor and not over the choices of its
neighbours. Where many consumers would still make it large, a variable Y_t ⊆ targets (the set that is paid) takes its
place: Σ_{g∈Y} w[s, g] over (s, Y) and, per consumer, 0 or inf over (Y, a_k) for a_k ∈ Y; minimising over Y gives f_t,
as w ≥ 0.

**Elimination.** A variable v leaves by adding all tables that mention it and taking the minimum over its axis (bucket
elimination, Dechter 1999); the argmin is kept for the way back. Two cases are cheaper than that. A state variable
whose operator is still there is substituted: its axis is gathered along the operator's. An operator all of whose
states are still there is scattered: its choices are grouped by their states. What is left is one table over the kept
operators. ``elimination_order`` finds the order, ``vectorised_elimination`` follows it for many problems at once; one
problem is a batch of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from .elimination_order import Limits, Recipe, plan_elimination
from .presolve import TensorEdges, simplify, without_fixed
from .problem import Problem, weighted
from .vectorised_elimination import EliminatedRows, follow

__all__ = ["ReducedTable", "eliminate"]


@dataclass(frozen=True, eq=False)
class ReducedTable:
    """The minimum over all but the kept operators.

    cost: seconds + byte_weight · bytes, one axis per kept operator (all its choices) in the order of ``keep``; inf =
    impossible.
    """

    keep: tuple[int, ...]
    cost: np.ndarray
    byte_weight: float
    _row: EliminatedRows
    #: Operator → its choices that are left, of those with a choice; and the number of all operators.
    _original: Mapping[int, np.ndarray]
    _number: int

    def assignment(self, kept_choices: Sequence[int] = ()) -> tuple[int, ...]:
        """A choice per operator that attains ``cost[kept_choices]``; ValueError where that is inf."""
        assert len(kept_choices) == len(self.keep), (kept_choices, self.keep)
        if not np.isfinite(self.cost[tuple(kept_choices)]):
            raise ValueError(
                f"kept choices must be possible together, but got {tuple(kept_choices)}; see where cost is finite"
            )
        return tuple(int(found) for found in self.assignments([np.asarray(choice) for choice in kept_choices]))

    def assignments(self, kept_choices: Sequence[np.ndarray]) -> list[np.ndarray]:
        """``assignment`` for many cells at once: index arrays of one shape in, one array of choices per operator out.

        Where the cost is inf, the choices mean nothing."""
        shape = np.shape(kept_choices[0]) if kept_choices else ()
        cells = [np.reshape(choices, -1) for choices in kept_choices]
        found = self._row.walk(cells, np.zeros(int(np.prod(shape)), dtype=np.intp))
        chosen = [np.zeros(shape, dtype=np.intp)] * self._number
        for (i, idx), choices in zip(self._original.items(), found):
            chosen[i] = idx.take(choices).reshape(shape)
        return chosen


def eliminate(
    problem: Problem, keep: Sequence[int] = (), byte_weight: float = 0.0, max_table: int = 20_000_000
) -> ReducedTable:
    """Minimise seconds + byte_weight · bytes over all operators but those of ``keep``.

    keep: distinct operator indices, one axis of ``ReducedTable.cost`` each; byte_weight: seconds per byte. An operator
    that is kept has its own cost in the table, once. TooWide where a table would exceed ``max_table`` cells.
    """
    assert len(set(keep)) == len(keep), keep
    inner, left = without_fixed(problem, frozenset(keep))
    kept = tuple(left.index(i) for i in keep)
    small, original = simplify(weighted(inner, byte_weight), frozenset(kept))
    tables = [edge.seconds[..., None] for edge in small.edges]
    links = [TensorEdges.of(e.producer, e.source, e.consumers, [t]) for e, t in zip(small.edges, tables)]
    sizes = tuple(len(op.labels) for op in small.operators)
    recipe = _recipe(_Structure.of(sizes, links, kept, max_table))
    row = follow(recipe, [op.seconds[:, None] for op in small.operators], tables)
    choices = dict(zip(left, original))
    return ReducedTable(tuple(keep), row.cost[..., 0], byte_weight, row, choices, len(problem.operators))


@dataclass(frozen=True)
class _Structure:
    """All that the order of an elimination follows from: problems that differ in prices only have equal ones."""

    sizes: tuple[int, ...]
    ends: tuple[Any, ...]
    keep: tuple[int, ...]
    max_table: int
    links: Sequence[TensorEdges] = field(compare=False)

    @staticmethod
    def of(sizes: tuple[int, ...], links: Sequence[TensorEdges], keep: Sequence[int], max_table: int) -> _Structure:
        """That of a simplified problem."""
        ends = tuple(
            (e.producer, e.source.tobytes(), tuple((k, to.tobytes()) for k, to in e.consumers), e.free().tobytes())
            for e in links
        )
        return _Structure(sizes, ends, tuple(keep), max_table, links)


@lru_cache(maxsize=256)
def _recipe(structure: _Structure) -> Recipe:
    alive = [np.arange(size) for size in structure.sizes]
    return plan_elimination(alive, structure.links, structure.keep, Limits(structure.max_table))
