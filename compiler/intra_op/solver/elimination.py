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
states are still there is scattered: its choices are grouped by their states. The next variable is the one that
touches least cells per cell it removes; if that comes out too wide, the one that touches least. (Largest table of the
first order against the second, on 8 random layers of 40 operators × 25 choices: from 3 times larger to over 500
times smaller.) What is left is one table over the kept operators.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ...errors import TooWide
from .problem import Edge, Problem, simplify, weighted

__all__ = ["ReducedTable", "eliminate"]


_JOINT_CELLS = 4096  # up to this size the joint table of an edge is always built as it is
_PAID_SETS = 4096  # up to this many subsets of targets are listed


@dataclass(frozen=True, eq=False)
class _Factor:
    """A table with one axis per variable of ``scope``."""

    scope: tuple[int, ...]
    table: np.ndarray


@dataclass(frozen=True, eq=False)
class _Step:
    """The rule for ``variable``: index ``best`` with the values of the variables in ``scope``."""

    variable: int
    scope: tuple[int, ...]
    best: np.ndarray


@dataclass(frozen=True, eq=False)
class ReducedTable:
    """The minimum over all but the kept operators.

    cost: seconds + byte_weight · bytes, one axis per kept operator (all its choices) in the order of ``keep``; inf =
    impossible.
    """

    keep: tuple[int, ...]
    cost: np.ndarray
    byte_weight: float
    _steps: tuple[_Step, ...]
    _original: tuple[np.ndarray, ...]

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
        value = dict(zip(self.keep, kept_choices))
        for step in reversed(self._steps):
            value[step.variable] = step.best[tuple(value[v] for v in step.scope)]
        return [idx[value[i]] for i, idx in enumerate(self._original)]


def eliminate(
    problem: Problem, keep: Sequence[int] = (), byte_weight: float = 0.0, max_table: int = 20_000_000
) -> ReducedTable:
    """Minimise seconds + byte_weight · bytes over all operators but those of ``keep``.

    keep: distinct operator indices, one axis of ``ReducedTable.cost`` each; byte_weight: seconds per byte. An operator
    that is kept has its own cost in the table, once. TooWide where a table would exceed ``max_table`` cells.
    """
    assert len(set(keep)) == len(keep), keep
    if math.prod(len(problem.operators[i].labels) for i in keep) > max_table:
        raise TooWide(f"the table of the kept operators has more than {max_table} cells")
    small, original = simplify(weighted(problem, byte_weight), frozenset(keep))
    try:
        work = _Elimination(small, tuple(keep), max_table, by_growth=True)
        work.run()
    except TooWide:
        work = _Elimination(small, tuple(keep), max_table, by_growth=False)
        work.run()
    return ReducedTable(tuple(keep), work.result(), byte_weight, tuple(work.steps), tuple(original))


class _Elimination:
    """The tables that are left, and the steps done. Variables: the n operators first, then state and set variables."""

    def __init__(self, problem: Problem, keep: tuple[int, ...], max_table: int, by_growth: bool) -> None:
        self.keep = keep
        self.by_growth = by_growth
        self.max_table = max_table
        self.size = [len(op.labels) for op in problem.operators]
        self.factors: dict[int, _Factor] = {}
        self.at: list[set[int]] = [set() for _ in self.size]  # variable → factors that mention it
        self.owner: dict[int, tuple[int, np.ndarray]] = {}  # state variable → (operator, its map)
        self.states: list[set[int]] = [set() for _ in self.size]  # variable → state variables it still owns
        self.steps: list[_Step] = []
        self.constant = 0.0
        self.next_factor = 0
        for i, op in enumerate(problem.operators):
            self._add((i,), op.seconds)
        for edge in problem.edges:
            self._add_edge(edge)

    # ---- building

    def _variable(self, size: int) -> int:
        self.size.append(size)
        self.at.append(set())
        self.states.append(set())
        return len(self.size) - 1

    def _state(self, operator: int, values: np.ndarray) -> tuple[int, np.ndarray]:
        """A variable for the states in ``values``, and these states; the operator itself where that is as small."""
        used, index = np.unique(values, return_inverse=True)
        if len(used) == len(values):
            return operator, values
        variable = self._variable(len(used))
        self.owner[variable] = operator, index.reshape(-1)
        self.states[operator].add(variable)
        return variable, used

    def _add(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        if not scope:
            self.constant += float(table)
            return
        self.factors[self.next_factor] = _Factor(scope, table)
        for v in scope:
            self.at[v].add(self.next_factor)
        self.next_factor += 1

    def _add_edge(self, edge: Edge) -> None:
        source, rows = self._state(edge.producer, edge.source)
        cost = edge.seconds[rows]
        wants: dict[int, list[np.ndarray]] = {}
        for k, target in edge.consumers:
            wants.setdefault(k, []).append(target)
        # Per consuming operator its variable and, for each value of that, the set of targets it wants.
        ends: list[tuple[int, list[tuple[int, ...]]]] = []
        for k, targets in wants.items():
            sets = [tuple(sorted(set(column))) for column in zip(*(t.tolist() for t in targets))]
            kinds = {s: j for j, s in enumerate(dict.fromkeys(sets))}
            variable, values = self._state(k, np.array([kinds[s] for s in sets]))
            by_kind = list(kinds)
            ends.append((variable, [by_kind[j] for j in values.tolist()]))
        # An operator does not consume its own output and is one end per edge, so a scope has no repeats.
        cells = len(cost) * math.prod(len(sets) for _, sets in ends)
        num_targets = cost.shape[1]
        free = [g for g in range(num_targets) if not cost[:, g].any()]
        paid = [g for g in range(num_targets) if g not in free]
        most = min(len(paid), sum(max(len(set(s) - set(free)) for s in sets) for _, sets in ends))
        num_sets = sum(math.comb(len(paid), r) for r in range(most + 1))
        widest = max(len(cost), *(len(sets) for _, sets in ends))
        if cells > _JOINT_CELLS and num_sets <= _PAID_SETS and num_sets * widest < cells:
            self._add_paid_set(source, cost, ends, paid, most)
            return
        if cells > self.max_table:
            raise TooWide(f"the table of edge {edge.name!r} would have {cells} cells, more than {self.max_table}")
        sure = {g for _, sets in ends if len(sets) == 1 for g in sets[0]}  # ends without a choice need no axis
        ends = [end for end in ends if len(end[1]) > 1]
        table = np.zeros([len(cost), *(len(sets) for _, sets in ends)])
        for g in paid:
            wanted = np.full([1] * (len(ends) + 1), g in sure)
            for j, (_, sets) in enumerate(ends):
                shape = [1] * (len(ends) + 1)
                shape[j + 1] = len(sets)
                wanted = wanted | np.array([g in s for s in sets]).reshape(shape)
            table += np.where(wanted, cost[:, g].reshape([-1] + [1] * len(ends)), 0.0)
        self._add((source, *(v for v, _ in ends)), table)

    def _add_paid_set(
        self, source: int, cost: np.ndarray, ends: list[tuple[int, list[tuple[int, ...]]]], paid: list[int], most: int
    ) -> None:
        num_targets = cost.shape[1]
        sets = [list(c) for r in range(most + 1) for c in combinations(paid, r)]
        bought = self._variable(len(sets))
        member = np.zeros((len(sets), num_targets), dtype=bool)
        for row, chosen in zip(member, sets):
            row[chosen] = True
        self._add((source, bought), np.where(member, cost[:, None, :], 0.0).sum(axis=2))
        missing = ~member
        missing[:, [g for g in range(num_targets) if g not in paid]] = False
        for variable, wanted in ends:
            needs = np.array([[g in w for g in range(num_targets)] for w in wanted])
            lacking = (missing.astype(np.float32) @ needs.T.astype(np.float32)) > 0
            self._add((bought, variable), np.where(lacking, np.inf, 0.0))

    # ---- order

    def _scope_after(self, v: int) -> set[int]:
        """The variables of the table that v's elimination leaves (a substitution leaves several: all of them)."""
        scope = {u for f in self.at[v] for u in self.factors[f].scope} | self.states[v]
        scope.discard(v)
        return scope

    def _cells(self, v: int) -> int:
        """The largest table that v's elimination touches."""
        if v in self.owner:
            x = self.owner[v][0]
            worst = 0
            for f in self.at[v]:
                scope = {u for u in self.factors[f].scope if u != v} | {x}
                worst = max(worst, math.prod(self.size[u] for u in scope))
            return worst
        others = {u for f in self.at[v] for u in self.factors[f].scope} - {v}
        cells = math.prod(self.size[u] for u in others)
        return cells * max(
            self.size[v], math.prod(self.size[u] for u in self.states[v] - others) if self.states[v] else 1
        )

    def _rank(self, v: int) -> float:
        """The order of elimination, least first: by the cells touched per cell that goes, or by the cells touched."""
        gone = sum(self.factors[f].table.size for f in self.at[v]) if self.by_growth else 1
        return self._cells(v) / max(gone, 1)

    def run(self) -> None:
        """Eliminate every variable that is not kept, in greedy order."""
        kept = set(self.keep)
        todo = {v for v in range(len(self.size)) if v not in kept}
        last = {v for v in todo if v in self.owner and self.owner[v][0] in kept}
        for group in (todo - last, last):
            self._run(group)

    def _run(self, todo: set[int]) -> None:
        ranks = {v: self._rank(v) for v in todo}
        heap = [(rank, v) for v, rank in ranks.items()]
        heapq.heapify(heap)
        while heap:
            rank, v = heapq.heappop(heap)
            if v not in todo or ranks[v] != rank:
                continue
            if (cells := self._cells(v)) > self.max_table:
                raise TooWide(f"eliminating the next variable takes a table of {cells} cells, over {self.max_table}")
            todo.discard(v)
            touched = self._scope_after(v)
            if v in self.owner:
                touched.add(self.owner[v][0])
            self._eliminate(v)
            touched |= {s for u in touched for s in self.states[u]} | {
                self.owner[u][0] for u in touched if u in self.owner
            }
            for u in touched & todo:
                new = self._rank(u)
                if new != ranks[u]:
                    ranks[u] = new
                    heapq.heappush(heap, (new, u))

    # ---- one elimination

    def _eliminate(self, v: int) -> None:
        ids = sorted(self.at[v])
        factors = [self.factors.pop(f) for f in ids]
        for f, factor in zip(ids, factors):
            for u in factor.scope:
                self.at[u].discard(f)
        if v in self.owner:
            x, values = self.owner.pop(v)
            self.states[x].discard(v)
            self.steps.append(_Step(v, (x,), values))
            for factor in factors:
                self._add(*_substitute(factor, v, x, values))
            return
        # what has one choice needs no axis
        others = tuple(sorted({u for factor in factors for u in factor.scope if self.size[u] > 1} - {v}))
        joint = self._sum(factors, (v, *others))
        owned = sorted(self.states[v])
        if owned:
            self._scatter(v, owned, others, joint)
            return
        best, cost = _minimum(joint)
        self.steps.append(_Step(v, others, best))
        self._add(others, cost)

    def _scatter(self, v: int, owned: list[int], others: tuple[int, ...], joint: np.ndarray) -> None:
        values = {s: self.owner.pop(s)[1] for s in owned}
        self.states[v].clear()
        fresh = [s for s in owned if s not in others]
        scope = (*fresh, *others)
        cost = np.full([self.size[u] for u in scope], np.inf)
        best = np.zeros(cost.shape, dtype=np.int32)
        for c in range(self.size[v]):
            cell = tuple([int(values[u][c]) if u in values else slice(None) for u in scope])
            row = joint[(c, *(int(values[u][c]) if u in values else slice(None) for u in others))]
            better = row < cost[cell]
            cost[cell] = np.where(better, row, cost[cell])
            best[cell] = np.where(better, c, best[cell])
        self.steps.append(_Step(v, scope, best))
        self._add(scope, cost)

    def _sum(self, factors: Sequence[_Factor], scope: tuple[int, ...]) -> np.ndarray:
        """The sum of tables, with one axis per variable of ``scope``."""
        total: np.ndarray | None = None
        for factor in sorted(factors, key=lambda f: f.table.size):
            present = [u for u in factor.scope if u in scope]  # the others have one choice
            order = sorted(range(len(present)), key=lambda a: scope.index(present[a]))
            shape = [self.size[u] if u in present else 1 for u in scope]
            table = factor.table.reshape([self.size[u] for u in present]).transpose(order).reshape(shape)
            total = table if total is None else total + table
        full = tuple(self.size[u] for u in scope)
        if total is None:
            return np.zeros(full)
        return total if total.shape == full else np.broadcast_to(total, full)

    def result(self) -> np.ndarray:
        """The table over the kept operators."""
        assert all(set(f.scope) <= set(self.keep) for f in self.factors.values())
        return np.array(self._sum(list(self.factors.values()), self.keep) + self.constant)


def _minimum(joint: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(argmin, minimum) over axis 0, in passes over contiguous slices (numpy's argmin over a leading axis copies)."""
    cost = np.array(joint[0])
    best = np.zeros(cost.shape, dtype=np.int32)
    for value in range(1, len(joint)):
        better = joint[value] < cost
        np.copyto(cost, joint[value], where=better)
        best[better] = value
    return best, cost


def _substitute(factor: _Factor, v: int, x: int, values: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """The factor with variable v replaced by values[x]."""
    axis = factor.scope.index(v)
    if x not in factor.scope:
        return tuple(x if u == v else u for u in factor.scope), np.take(factor.table, values, axis=axis)
    table = np.moveaxis(factor.table, (axis, factor.scope.index(x)), (0, 1))
    rest = tuple(u for u in factor.scope if u not in (v, x))
    return (x, *rest), table[values, np.arange(len(values))]
