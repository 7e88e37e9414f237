"""Brute force: the optimum of small problems by trying everything, with no code of the solvers that it judges."""

from __future__ import annotations

import itertools
import math
import time

from meshwright.compiler.intra_op.solver.problem import InfeasibleAssignment, Problem, Solution, evaluate


def brute_force_assignment(problem: Problem, limit_bytes: float = math.inf) -> Solution | InfeasibleAssignment:
    """The intra-op optimum within the limit; of equally fast assignments the leanest."""
    start = time.perf_counter()
    best: tuple[float, float, tuple[int, ...]] | None = None
    leanest: tuple[float, float, tuple[int, ...]] | None = None
    for choice in itertools.product(*(range(len(op.labels)) for op in problem.operators)):
        seconds, num_bytes = evaluate(problem, choice)
        if not math.isfinite(seconds):
            continue
        if leanest is None or (num_bytes, seconds) < leanest[:2]:
            leanest = num_bytes, seconds, choice
        if num_bytes <= limit_bytes and (best is None or (seconds, num_bytes) < best[:2]):
            best = seconds, num_bytes, choice
    elapsed_s = time.perf_counter() - start
    if best is not None:
        return Solution(best[2], best[0], best[1], best[0], "optimal", elapsed_s)
    if leanest is None:
        return InfeasibleAssignment(limit_bytes, math.inf, None, math.inf, elapsed_s)
    return InfeasibleAssignment(limit_bytes, leanest[0], leanest[2], leanest[1], elapsed_s)
