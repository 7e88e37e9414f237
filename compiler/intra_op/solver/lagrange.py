"""The intra-op problem under a memory limit: elimination with a price on bytes, and the integer program for the gap.

For every price λ ≥ 0 of a byte, min_x seconds(x) + λ · (bytes(x) - limit) is a lower bound of the optimum (Lagrange),
and an x that fits is an upper one. A search on λ (``_lagrange``) brings both together. Where they do not meet, choices
whose own bound exceeds the best x known go (``_may_be_optimal``), and ``ilp.solve_ilp`` decides among the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import TooWide
from .elimination import eliminate
from .presolve import simplify, without_fixed
from .problem import (
    TOLERANCE,
    InfeasibleAssignment,
    Problem,
    Solution,
    evaluate,
    improve,
    minimum_bytes_problem,
    restrict,
)

__all__ = ["solve"]

_ROUNDING = 1e-12  # relative error that sums of costs may carry; it must not lift a bound
_GROUP_CELLS = 1000  # cells of the joint tables by which choices are ruled out


def solve(
    problem: Problem,
    limit_bytes: float = math.inf,
    time_limit_s: float | None = None,
    max_table: int = 20_000_000,
    near: float = TOLERANCE,
    beat_s: float = math.inf,
) -> Solution | InfeasibleAssignment:
    """The optimum within ``limit_bytes``: by elimination if that fits, else by Lagrange and, for the gap left, the ILP.

    near: how far above Lagrange's bound, relatively, its choice may be to stand without the ILP. beat_s: where nothing
    is faster than this, any choice that fits will do. bound: the larger of both methods' bounds. The time limit is
    given to the ILP; eliminations before it are not cut short. TimeoutError as in ``solve_ilp``, which is also what
    graphs too wide for elimination fall back to.
    """
    start = time.perf_counter()
    problem.check()
    inner, left = without_fixed(problem)
    small, original = simplify(inner)

    def elapsed_s() -> float:
        return time.perf_counter() - start

    def whole(choice: Sequence[int]) -> tuple[int, ...]:
        chosen = [0] * len(problem.operators)
        for i, idx, c in zip(left, original, choice):
            chosen[i] = int(idx[c])
        return tuple(chosen)

    def optimal(choice: Sequence[int]) -> Solution:
        seconds, num_bytes = evaluate(problem, whole(choice))
        return Solution(whole(choice), seconds, num_bytes, seconds, "optimal", elapsed_s())

    try:
        free = eliminate(small, max_table=max_table)
        if not np.isfinite(free.cost):
            return InfeasibleAssignment(limit_bytes, math.inf, None, math.inf, elapsed_s())
        over = free.assignment()
        if evaluate(small, over)[1] <= limit_bytes:
            return optimal(over)
        lean = eliminate(minimum_bytes_problem(small), max_table=max_table).assignment()
        lean_seconds, lean_bytes = evaluate(problem, whole(lean))
        if lean_bytes > limit_bytes:
            return InfeasibleAssignment(limit_bytes, lean_bytes, whole(lean), lean_seconds, elapsed_s())
        bound, hint, byte_weight = _lagrange(small, limit_bytes, over, lean, max_table)
        best_s = evaluate(small, hint)[0]
        if best_s <= bound * (1 + near):
            solution = optimal(hint)
            return solution if best_s <= bound * (1 + TOLERANCE) else replace(solution, bound=bound, stop_reason="near")
        if bound >= beat_s:
            return replace(optimal(hint), bound=bound, stop_reason="beaten")
        stop = math.inf if time_limit_s is None else start + time_limit_s
        alive = _may_be_optimal(small, limit_bytes, byte_weight, best_s, stop, max_table)
    except TooWide:
        return _solve_ilp(problem, limit_bytes, time_limit_s)
    remaining_s = None if time_limit_s is None else max(time_limit_s - elapsed_s(), 0.0)
    inside = [int(np.searchsorted(idx, c)) for idx, c in zip(alive, hint)]
    rest = _solve_ilp(restrict(small, alive), limit_bytes, remaining_s, inside)
    assert isinstance(rest, Solution), "the hint fits"
    best = optimal([idx[c] for idx, c in zip(alive, rest.choice)])
    bound = max(bound, rest.bound)
    if rest.stop_reason == "optimal" or best.seconds <= bound * (1 + TOLERANCE):
        return best
    return replace(best, bound=bound, stop_reason=rest.stop_reason)


def _solve_ilp(*args: Any) -> Solution | InfeasibleAssignment:
    from .ilp import solve_ilp  # OR-tools take 0.3 s to import, and hardly any plan needs them

    return solve_ilp(*args)


def _lagrange(
    problem: Problem, limit_bytes: float, over: tuple[int, ...], lean: tuple[int, ...], max_table: int
) -> tuple[float, tuple[int, ...], float]:
    """(lower bound, best assignment that fits, price of a byte), from the unlimited optimum and the leanest assignment.

    The price is the slope between the best known points on either side of the limit; where no assignment lies below
    that line, the line is an edge of the convex hull and its height at the limit is the best Lagrangian bound
    (finitely many steps, no tolerance).
    """
    left, right = evaluate(problem, over), evaluate(problem, lean)
    bound, byte_weight, fitting = left[0], 0.0, [(right[0], lean)]

    def offer(choice: tuple[int, ...]) -> None:
        seconds, num_bytes = evaluate(problem, choice)
        if num_bytes <= limit_bytes:
            fitting.append((seconds, choice))

    offer(improve(problem, lean, limit_bytes))
    offer(improve(problem, over, limit_bytes))
    while right[0] > left[0]:
        weight = (right[0] - left[0]) / (left[1] - right[1])
        choice = eliminate(problem, byte_weight=weight, max_table=max_table).assignment()
        point = evaluate(problem, choice)
        cost = point[0] + weight * point[1]
        here = cost - weight * limit_bytes - _ROUNDING * (cost + weight * limit_bytes)
        if here > bound:
            bound, byte_weight = here, weight
        offer(choice)
        offer(improve(problem, choice, limit_bytes))
        if min(fitting)[0] <= bound * (1 + TOLERANCE) or cost >= (left[0] + weight * left[1]) * (1 - _ROUNDING):
            break
        left, right = (left, point) if point[1] <= limit_bytes else (point, right)
    return bound, min(fitting)[1], byte_weight


def _may_be_optimal(
    problem: Problem, limit_bytes: float, byte_weight: float, best_s: float, stop: float, max_table: int
) -> list[np.ndarray]:
    """Per operator the choices whose own Lagrangian bound does not exceed ``best_s``; the others cannot win."""
    alive = [np.arange(len(op.labels)) for op in problem.operators]
    paid = byte_weight * limit_bytes
    undecided = [i for i, op in enumerate(problem.operators) if len(op.labels) > 1]
    num_pairs = sum(len(e.consumers) for e in problem.edges)
    if num_pairs < len(problem.operators) and num_pairs == len(problem.edges):
        # On a forest of tensors with one consumer each, the program's own relaxation is as good as Lagrange's and the
        # whole solve is faster without this (200 operators × 16 choices: 2 s against 5–10 s).
        return alive
    while undecided and time.perf_counter() < stop:
        # Operators that follow each other are close in the graph as a rule: together they widen the tables but little.
        group = [undecided.pop(0)]
        while undecided and math.prod(len(alive[i]) for i in (*group, undecided[0])) <= _GROUP_CELLS:
            group.append(undecided.pop(0))
        try:
            cost = eliminate(restrict(problem, alive), group, byte_weight, max_table).cost
        except TooWide:
            continue
        wins = cost * (1 - _ROUNDING) - paid * (1 + _ROUNDING) <= best_s * (1 + TOLERANCE)
        for axis, i in enumerate(group):
            alive[i] = np.flatnonzero(wins.any(axis=tuple(a for a in range(len(group)) if a != axis)))
    return alive
