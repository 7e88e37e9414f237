"""The least makespan of a schedule over all seconds that its actions may take, by cutting planes.

A *path* of a schedule is actions and messages each of which can only begin after the one before. With x the seconds of
the virtual stages' actions by kind, and n how often each of them is on a path, whose messages take c seconds, every
pipeline whose seconds keep to ``A x ≥ b`` takes at least ::

    min t    subject to    A x ≥ b        x ≥ 0        n · x + c ≤ t  for every path

A path ends with the work of a stage at the end of the step, whose seconds are in x, too. There are too many paths to
list. A round (Kelley, "The cutting-plane method for solving convex programs", 1960) plays
the schedule and adds its longest path to the linear program, whose optimum is a bound. It is played at a point between
the last optimum and the best x so far (Ben-Ameur and Neto, "Acceleration of cutting-plane and column generation
algorithms", 2007), since optima leap from corner to corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np
from ortools.math_opt.python import mathopt

from .schedule import Schedule
from .simulate import longest_path
from .table import Floats

__all__ = ["CLOSE", "least_makespan"]

CLOSE = 1e-3  # of the least makespan that was played: nearer to it no bound need be

_OUTWARD = 0.3  # how far from the best x to the optimum the schedule is played
_UNITS = 1e3  # the makespan in the solver's units, against its absolute tolerances
_SOLVER_ERROR = 1e-6  # of an optimum


def least_makespan(
    schedule: Schedule,
    kinds: str,
    likely: Floats,
    rows: Floats,
    least: Floats,
    ahead_s: Sequence[float],
    back_s: Sequence[float],
    rounds: int,
    enough_s: float = inf,
    close: float = CLOSE,
) -> float:
    """Seconds that no pipeline under a schedule undercuts.

    kinds: of its actions, "FB" or "FIW". likely: [kinds · virtual stages + stages] seconds of every virtual stage by
    kind, and of every stage at the end of the step, to begin with. rows, least: ``rows @ seconds ≥ least`` for all
    pipelines. ahead_s, back_s: of a message across each border between virtual stages. rounds: the most times that the
    schedule is played. enough_s: seconds that are as good as any more. close: rounds end so near the least makespan
    that was played.
    """
    edges = list(pairwise(range(schedule.num_virtual)))
    ahead, back = dict(zip(edges, ahead_s)), dict(zip(edges, back_s))
    names = [(kind, q) for kind in kinds for q in range(schedule.num_virtual)]
    names += [("end", stage) for stage in range(schedule.num_stages)]
    unit_s = schedule.num_microbatches * float(likely.sum()) / _UNITS
    program = mathopt.Model()
    seconds = [program.add_variable(lb=0.0) for _ in names]
    makespan = program.add_variable(lb=0.0)
    program.minimize(makespan)
    for row, low in zip(rows, least):
        program.add_linear_constraint(_sum(row, seconds) >= low / unit_s)
    solver = mathopt.IncrementalSolver(program, mathopt.SolverType.GLOP)
    played, best, best_s, bound_s = likely, likely, inf, 0.0
    for _ in range(rounds):
        by_kind = dict.fromkeys("FBIW", [0.0] * schedule.num_virtual)
        actions, ends = np.split(played, [-schedule.num_stages])
        by_kind |= zip(kinds, actions.reshape(len(kinds), -1).tolist())
        path = longest_path(schedule, by_kind, ahead, back, ends.tolist())
        times = np.array([path[name] for name in names], dtype=float)
        messages_s = sum(path["forward", e] * ahead[e] + path["backward", e] * back[e] for e in edges)
        if (played_s := float(times @ played) + messages_s) < best_s:
            best, best_s = played, played_s
        program.add_linear_constraint(makespan - _sum(times, seconds) >= messages_s / unit_s)
        try:
            result = solver.solve()
        except (AttributeError, RuntimeError):  # GLOP gave up; OR-tools 9.15 fails to make the error of that
            break
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            break
        values = result.variable_values()
        bound_s = result.objective_value() * unit_s * (1 - _SOLVER_ERROR)
        if bound_s >= min(best_s * (1 - close), enough_s):
            break
        played = best + _OUTWARD * (np.maximum([values[one] for one in seconds], 0.0) * unit_s - best)
    return bound_s


def _sum(factors: Floats, variables: Sequence[mathopt.Variable]) -> mathopt.LinearSum:
    return mathopt.LinearSum(float(factor) * one for factor, one in zip(factors, variables) if factor)
