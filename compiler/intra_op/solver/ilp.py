"""The intra-op problem as an integer program, solved by OR-tools.

**As an integer program.** Equation (1) and its indices are those of ``problem``. 0/1 variables x[i,c], y[t,g],
z[t,s,g]; one-hot choices and linearised products as in Alpa, OSDI'22, section 4.2, equation 1, and in
``optimize_sharding.py`` of Meta's autoparallel; but those two sum over pairs of producer and consumer, and here
consumers share:

    minimise  Σ_i seconds_i·x_i + Σ_t seconds_t·z_t       subject to  Σ_i bytes_i·x_i + Σ_t bytes_t·z_t ≤ limit     (2)
    Σ_c x[i,c] = 1                                                                                                 (3)
    z[t,s,g] ≤ u[t,s]      where u[t,s]   = Σ x[p,c] over the producer's choices c that produce s                  (4)
    Σ_s z[t,s,g] = y[t,g]                                                                                          (5)
    y[t,g] ≥ q[t,k,g]      where q[t,k,g] = Σ x[k,c] over consumer k's choices c that want g                       (6)

**The tight form that is solved.** (4)–(6) leave the relaxation loose: one row of z may add up to more than u. We
route each consumer through its own transport plan v[t,k,s,g] ≥ 0, and z is their pointwise maximum:

    Σ_g v[t,k,s,g] = u[t,s]        Σ_s v[t,k,s,g] = q[t,k,g]        v[t,k,s,g] = 0 where seconds_t[s,g] = inf       (7)
    z[t,s,g] ≥ v[t,k,s,g]     (z exists where it costs anything; with one consumer z is v)                          (8)

(7) and (8) imply (4)–(6) for y = Σ_s z, and without a memory limit make the relaxation of a chain integral (it is the
local marginal polytope of a pairwise model). Only x must be integer: whole x make u and q whole, and v = u·q is then
the only point of (7). ``_Program`` builds (2), (3), (7) and (8); ``solve_ilp`` solves the relaxation first, and by
branch and bound only if its x is not whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from .presolve import simplify
from .problem import (
    TOLERANCE,
    Edge,
    InfeasibleAssignment,
    Problem,
    Solution,
    evaluate,
    improve,
    minimum_bytes_problem,
    weighted,
)

__all__ = ["solve_ilp"]

_WHOLE = 1e-6  # how far an x of the relaxation may be from a whole number
_MEMORY_ROW = 1e4  # the limit in the solver's units: its absolute row tolerance of 1e-6 becomes 1e-10 of the limit
_OBJECTIVE = 1e3  # the expected optimum in the solver's units, against its absolute tolerances
_NUM_CUTS = 50  # solutions over the limit by a rounding error that are cut off one by one


class _Program:
    """(2), (3), (7), (8) of a simplified problem as a MathOpt model: columns first, then rows, then it is built."""

    def __init__(self, problem: Problem, limit_bytes: float, seconds_unit: float) -> None:
        self.num_columns = 0
        self.seconds_unit = seconds_unit
        self.cost: list[np.ndarray] = []
        self.weight: list[np.ndarray] = []
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self.bounds: list[tuple[float, float]] = []
        self.x = [self._columns(op.seconds, op.bytes) for op in problem.operators]
        self.num_whole = self.num_columns
        for ids in self.x:
            self._row(ids, np.ones(len(ids)), 1.0, 1.0)
        for edge in problem.edges:
            self._edge(edge)
        weight = np.concatenate(self.weight)
        if math.isfinite(limit_bytes):
            scale = _MEMORY_ROW / max(limit_bytes, 1.0)
            used = np.flatnonzero(weight)
            self._row(used, weight[used] * scale, -math.inf, limit_bytes * scale)
        self.seconds = np.concatenate(self.cost)
        self.model = self._build(self.seconds / seconds_unit)
        self.variables = list(self.model.variables())

    def _columns(self, seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        self.cost.append(seconds)
        self.weight.append(num_bytes)
        ids = np.arange(self.num_columns, self.num_columns + len(seconds))
        self.num_columns += len(seconds)
        return ids

    def _row(self, ids: np.ndarray, values: np.ndarray, low: float, high: float) -> None:
        order = np.argsort(ids, kind="stable")
        self.rows.append((ids[order], values[order]))
        self.bounds.append((low, high))

    def _edge(self, e: Edge) -> None:
        finite = np.isfinite(e.seconds)
        costly = finite & ((e.seconds > 0) | (e.bytes > 0))
        alone = len(e.consumers) == 1
        z = np.full(e.seconds.shape, -1)
        if not alone:
            z[costly] = self._columns(e.seconds[costly], e.bytes[costly])
        for k, target in e.consumers:
            own = np.zeros(e.seconds.shape[1], dtype=bool)
            own[target] = True
            here = finite & own
            zero = np.zeros(int(here.sum()))
            v = np.full(e.seconds.shape, -1)
            v[here] = self._columns(e.seconds[here], e.bytes[here]) if alone else self._columns(zero, zero)
            for s in range(len(v)):
                self._marginal(v[s], self.x[e.producer][e.source == s])
            for g in np.flatnonzero(own):
                self._marginal(v[:, g], self.x[k][target == g])
            if not alone:
                for pair in zip(z[here & costly].tolist(), v[here & costly].tolist()):
                    self._row(np.array(pair), np.array([1.0, -1.0]), 0.0, math.inf)

    def _marginal(self, parts: np.ndarray, whole: np.ndarray) -> None:
        parts = parts[parts >= 0]
        if len(parts) + len(whole):
            ids = np.concatenate([parts, whole])
            self._row(ids, np.repeat([1.0, -1.0], [len(parts), len(whole)]), 0.0, 0.0)

    def _build(self, cost: np.ndarray) -> mathopt.Model:
        proto = model_pb2.ModelProto()
        n = self.num_columns
        proto.variables.ids.extend(range(n))
        proto.variables.lower_bounds.extend([0.0] * n)
        proto.variables.upper_bounds.extend([1.0] * n)
        proto.variables.integers.extend([False] * n)
        used = np.flatnonzero(cost)
        proto.objective.linear_coefficients.ids.extend(used.tolist())
        proto.objective.linear_coefficients.values.extend(cost[used].tolist())
        proto.linear_constraints.ids.extend(range(len(self.rows)))
        proto.linear_constraints.lower_bounds.extend([low for low, _ in self.bounds])
        proto.linear_constraints.upper_bounds.extend([high for _, high in self.bounds])
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(np.repeat(np.arange(len(self.rows)), [len(ids) for ids, _ in self.rows]).tolist())
        matrix.column_ids.extend(np.concatenate([ids for ids, _ in self.rows]).tolist())
        matrix.coefficients.extend(np.concatenate([values for _, values in self.rows]).tolist())
        return mathopt.Model.from_model_proto(proto)

    def solve(
        self, solver: mathopt.SolverType, remaining_s: float, hint: Sequence[int] | None = None
    ) -> mathopt.SolveResult | None:
        """The result of a solver; None where it gave up."""
        parameters = mathopt.SolveParameters()
        if solver != mathopt.SolverType.GLOP:
            parameters.relative_gap_tolerance = parameters.absolute_gap_tolerance = TOLERANCE / 10
        if math.isfinite(remaining_s):
            parameters.time_limit = timedelta(seconds=max(remaining_s, 1e-3))
        model_parameters = mathopt.ModelSolveParameters()
        if hint is not None:
            values = {self.variables[c]: 0.0 for c in range(self.num_whole)}
            values |= {self.variables[ids[c]]: 1.0 for ids, c in zip(self.x, hint)}
            model_parameters.solution_hints.append(mathopt.SolutionHint(variable_values=values))
        try:
            return mathopt.solve(self.model, solver, params=parameters, model_params=model_parameters)
        except (AttributeError, RuntimeError):  # OR-tools 9.15 fails to make the error of that
            return None

    def demand_whole(self, expected_s: float) -> None:
        """Make x integer, and scale an optimum of about ``expected_s`` so that absolute tolerances do no harm."""
        if expected_s > 0:
            self.seconds_unit = expected_s / _OBJECTIVE
            for column in np.flatnonzero(self.seconds).tolist():
                self.model.objective.set_linear_coefficient(
                    self.variables[column], float(self.seconds[column]) / self.seconds_unit
                )
        for variable in self.variables[: self.num_whole]:
            variable.integer = True

    def cut_off(self, choice: Sequence[int]) -> None:
        """Forbid one assignment."""
        chosen = [self.variables[ids[c]] for ids, c in zip(self.x, choice)]
        self.model.add_linear_constraint(mathopt.fast_sum(chosen) <= len(chosen) - 1)

    def rounded(self, result: mathopt.SolveResult) -> tuple[tuple[int, ...], bool]:
        """(the choice with the largest x of each operator, whether x is whole)."""
        x = np.asarray(result.variable_values(self.variables[: self.num_whole]))
        choice = tuple(int(np.argmax(x[ids])) for ids in self.x)
        return choice, bool(np.abs(x - np.rint(x)).max(initial=0.0) <= _WHOLE)


def solve_ilp(
    problem: Problem,
    limit_bytes: float = math.inf,
    time_limit_s: float | None = None,
    hint: Sequence[int] | None = None,
) -> Solution | InfeasibleAssignment:
    """The optimum of (2) by OR-tools: the relaxation by GLOP, then branch and bound by HiGHS where it is not whole.

    hint: a choice per operator to start from; if it fits, the result is never worse. With a time limit (about kept:
    one relaxation may overrun it) the best assignment found comes back with stop_reason "time limit" and the bound
    proven so far. TimeoutError where the limit passed before any assignment was found that fits, or proof that there
    is none.
    """
    start = time.perf_counter()
    problem.check()
    stop = math.inf if time_limit_s is None else start + time_limit_s
    incumbents: list[tuple[float, float, tuple[int, ...]]] = []

    def offer(choice: Sequence[int]) -> bool:
        seconds, num_bytes = evaluate(problem, choice)
        fits = math.isfinite(seconds) and num_bytes <= limit_bytes
        if fits:
            incumbents.append((seconds, num_bytes, tuple(choice)))
        return fits

    def answer(bound: float, stop_reason: str) -> Solution:
        seconds, num_bytes, choice = min(incumbents)
        bound = seconds if stop_reason == "optimal" or bound >= seconds * (1 - TOLERANCE) else bound
        stop_reason = "optimal" if bound == seconds else stop_reason
        return Solution(choice, seconds, num_bytes, bound, stop_reason, time.perf_counter() - start)

    def infeasible() -> Solution | InfeasibleAssignment:
        remaining_s = None if math.isinf(stop) else max(stop - time.perf_counter(), 1.0)
        lean = solve_ilp(minimum_bytes_problem(problem), math.inf, remaining_s) if math.isfinite(limit_bytes) else None
        if lean is None or isinstance(lean, InfeasibleAssignment):
            return InfeasibleAssignment(limit_bytes, math.inf, None, math.inf, time.perf_counter() - start)
        seconds, num_bytes = evaluate(problem, lean.choice)
        if offer(lean.choice):  # the solver's tolerances against a limit that is met exactly
            return answer(lower, "numerical trouble")
        proven = lean.stop_reason == "optimal"
        return InfeasibleAssignment(limit_bytes, num_bytes, lean.choice, seconds, time.perf_counter() - start, proven)

    if hint is not None:
        offer(hint)
        offer(improve(problem, hint, limit_bytes))
    small, original = simplify(weighted(problem, 0.0) if math.isinf(limit_bytes) else problem)
    lower = sum(float(op.seconds.min()) for op in small.operators)
    if math.isinf(lower):
        return infeasible()

    def restore(choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(idx[c]) for idx, c in zip(original, choice))

    if all(len(idx) == 1 for idx in original):
        return answer(0.0, "optimal") if offer(restore([0] * len(original))) else infeasible()
    seconds_unit = max([lower, *(float(op.seconds.max()) for op in small.operators)]) or max(
        [float(e.seconds[np.isfinite(e.seconds)].max(initial=0.0)) for e in small.edges], default=0.0
    )
    program = _Program(small, limit_bytes, seconds_unit or 1.0)
    relaxed = program.solve(mathopt.SolverType.GLOP, stop - time.perf_counter())
    reason = None if relaxed is None else relaxed.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE and not incumbents:
        return infeasible()
    bound = lower
    if relaxed is not None and reason == mathopt.TerminationReason.OPTIMAL:
        bound = max(bound, relaxed.termination.objective_bounds.dual_bound * program.seconds_unit)
        choice, whole = program.rounded(relaxed)
        if offer(restore(choice)) and whole:
            return answer(bound, "optimal")
        offer(improve(problem, restore(choice), limit_bytes))
        if incumbents and bound >= min(incumbents)[0] * (1 - TOLERANCE):
            return answer(bound, "optimal")
    position = [{int(c): j for j, c in enumerate(idx)} for idx in original]
    program.demand_whole(bound)
    stopped_by = "time limit"
    for _ in range(_NUM_CUTS):
        if time.perf_counter() >= stop:
            break
        known = min(incumbents)[2] if incumbents else None
        inside = known is not None and all(c in at for c, at in zip(known, position))
        start_from = [at[c] for c, at in zip(known, position)] if known is not None and inside else None
        result = program.solve(mathopt.SolverType.HIGHS, stop - time.perf_counter(), start_from)
        if result is None:
            stopped_by = "numerical trouble"
            break
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return answer(bound, "optimal") if incumbents else infeasible()
        dual = result.termination.objective_bounds.dual_bound * program.seconds_unit
        if math.isfinite(dual):
            bound = max(bound, dual)
        if result.has_primal_feasible_solution():
            choice, _ = program.rounded(result)
            if offer(restore(choice)):
                if reason == mathopt.TerminationReason.OPTIMAL:
                    return answer(bound, "optimal")
            elif reason == mathopt.TerminationReason.OPTIMAL:
                program.cut_off(choice)
                continue
        break
    if not incumbents:
        offer(improve(problem, restore([int(np.argmin(op.bytes)) for op in small.operators]), limit_bytes))
    if not incumbents:
        raise TimeoutError(
            f"no assignment within {limit_bytes:.0f} bytes was found in {time_limit_s} s; allow more time or bytes"
        )
    return answer(bound, stopped_by)
