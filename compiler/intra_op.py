"""The intra-op problem: one choice per operator, reshards paid once per tensor and target, bytes under a limit.

It is purely numeric; who builds it from a graph is none of its business. Indices: operators i with choices c, edges
(tensors) t with a producer p(t), consumers k of t, source states s that p's choices produce, target states g that
consumers' choices want.

**The problem.** Choose x so that seconds(x) is minimal and bytes(x) ≤ limit, where for w = seconds or bytes

    w(x) = Σ_i w_i[x_i] + Σ_t Σ_{g ∈ {target_k(x_k) : k consumes t}} w_t[source_t(x_p(t)), g]                   (1)

The inner sum runs over a *set*: two consumers that want one target share its copy. An entry seconds_t = inf forbids
the pair.

**As an integer program** (with 0/1 variables x[i,c], y[t,g], z[t,s,g]; one-hot choices and linearised products as in
Alpa, OSDI'22, section 4.2, equation 1, and in ``optimize_sharding.py`` of Meta's autoparallel; but those two sum over
pairs of producer and consumer, and here consumers share):

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
the only point of (7). The relaxation is solved first, branch and bound only if its x is not whole.

**Presolve** (``simplify``): choices that can reach no finite entry go; states that no entry tells apart merge; of the
choices that agree in all their states only those stay that are best in seconds and bytes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

__all__ = [
    "Edge",
    "Infeasible",
    "Operator",
    "Problem",
    "Solution",
    "brute_force",
    "evaluate",
    "improve",
    "minimum_bytes_problem",
    "restrict",
    "simplify",
    "solve_ilp",
    "weighted",
]

#: relative difference below which two costs count as equal: the accuracy of everything in this module
TOLERANCE = 1e-9
_WHOLE = 1e-6  # how far an x of the relaxation may be from a whole number
_MEMORY_ROW = 1e4  # the limit in the solver's units: its absolute row tolerance of 1e-6 becomes 1e-10 of the limit
_OBJECTIVE = 1e3  # the expected optimum in the solver's units, against its absolute tolerances
_NUM_CUTS = 50  # solutions over the limit by a rounding error that are cut off one by one


@dataclass(frozen=True, eq=False)
class Operator:
    """A decision. labels: one per choice; seconds, bytes: [num_choices] ≥ 0 (bytes: kept on each device)."""

    name: str
    labels: tuple[str, ...]
    seconds: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Edge:
    """One tensor from its producer to all its consumers.

    producer: operator index; source: [num_choices(producer)] int, the source state that each choice produces.
    consumers: (operator index, [num_choices(consumer)] int: the target state each choice wants); an operator may
    appear twice. seconds: [num_sources, num_targets], inf = impossible, 0 where nothing is to do; bytes: the same
    shape, the resharded copy.
    """

    name: str
    producer: int
    source: np.ndarray
    consumers: tuple[tuple[int, np.ndarray], ...]
    seconds: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Problem:
    """Operators and the edges between them."""

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]

    def check(self) -> None:
        """Assert shapes, index ranges and signs."""
        for op in self.operators:
            assert op.labels, f"{op.name} has no choice"
            assert op.seconds.shape == op.bytes.shape == (len(op.labels),), op.name
            assert min(op.seconds.min(), op.bytes.min()) >= 0, op.name
        for edge in self.edges:
            assert edge.seconds.shape == edge.bytes.shape, edge.name
            assert edge.seconds.ndim == 2, edge.name
            assert min(edge.seconds.min(), edge.bytes.min()) >= 0, edge.name
            assert all(k != edge.producer for k, _ in edge.consumers), f"{edge.name} is consumed by its producer"
            ends = [(edge.producer, edge.source, 0), *((k, target, 1) for k, target in edge.consumers)]
            for i, states, dim in ends:
                assert states.shape == (len(self.operators[i].labels),), (edge.name, self.operators[i].name)
                assert 0 <= states.min() <= states.max() < edge.seconds.shape[dim], (edge.name, self.operators[i].name)


@dataclass(frozen=True)
class Solution:
    """An assignment that fits. bound: a proven lower bound of the optimum's seconds;

    stop_reason: "optimal", "time limit", or "numerical trouble" where the solver's tolerances left the bound open.
    """

    choice: tuple[int, ...]
    seconds: float
    bytes: float
    bound: float
    stop_reason: str
    elapsed_s: float

    @property
    def gap(self) -> float:
        """How far the seconds may be from the optimum, as a fraction of them: 0 is proven optimal."""
        return 0.0 if self.seconds <= self.bound else (self.seconds - self.bound) / self.seconds


@dataclass(frozen=True)
class Infeasible:
    """No assignment fits.

    minimum_bytes: what the leanest one needs, inf where every assignment is impossible even without a limit.
    choice, seconds: that leanest assignment, if there is one. proven: False where the time limit cut the search for a
    leaner one short.
    """

    limit_bytes: float
    minimum_bytes: float
    choice: tuple[int, ...] | None
    seconds: float
    elapsed_s: float
    proven: bool = True

    @property
    def missing_bytes(self) -> float:
        """How much larger the limit must be."""
        return self.minimum_bytes - self.limit_bytes


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
    """(seconds, bytes) of an assignment by (1); (inf, inf) if it is impossible."""
    assert len(choice) == len(problem.operators), (len(choice), len(problem.operators))
    seconds = [float(op.seconds[c]) for op, c in zip(problem.operators, choice)]
    num_bytes = [float(op.bytes[c]) for op, c in zip(problem.operators, choice)]
    for edge in problem.edges:
        source = edge.source[choice[edge.producer]]
        for target in {int(wanted[choice[k]]) for k, wanted in edge.consumers}:
            seconds.append(float(edge.seconds[source, target]))
            num_bytes.append(float(edge.bytes[source, target]))
    total = math.fsum(seconds), math.fsum(num_bytes)
    return total if math.isfinite(total[0]) and math.isfinite(total[1]) else (math.inf, math.inf)


def brute_force(problem: Problem, limit_bytes: float = math.inf) -> Solution | Infeasible:
    """The optimum by trying every assignment: the oracle of the tests, for tiny problems."""
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
        return Infeasible(limit_bytes, math.inf, None, math.inf, elapsed_s)
    return Infeasible(limit_bytes, leanest[0], leanest[2], leanest[1], elapsed_s)


def minimum_bytes_problem(problem: Problem) -> Problem:
    """The same decisions with bytes in the place of seconds and no bytes: its optimum is the leanest assignment."""
    operators = tuple(
        replace(
            op, seconds=np.where(np.isfinite(op.seconds), op.bytes, np.inf), bytes=np.zeros_like(op.bytes, dtype=float)
        )
        for op in problem.operators
    )
    edges = tuple(
        replace(e, seconds=np.where(np.isfinite(e.seconds), e.bytes, np.inf), bytes=np.zeros_like(e.bytes, dtype=float))
        for e in problem.edges
    )
    return Problem(operators, edges)


def weighted(problem: Problem, byte_weight: float) -> Problem:
    """The problem with seconds + byte_weight · bytes in the place of seconds, and no bytes."""

    def mix(seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        possible = np.isfinite(seconds) & np.isfinite(num_bytes)
        return np.where(possible, seconds + byte_weight * np.where(possible, num_bytes, 0.0), np.inf)

    operators = tuple(
        Operator(op.name, op.labels, mix(op.seconds, op.bytes), np.zeros(len(op.labels))) for op in problem.operators
    )
    edges = tuple(replace(e, seconds=mix(e.seconds, e.bytes), bytes=np.zeros(e.seconds.shape)) for e in problem.edges)
    return Problem(operators, edges)


# ---- presolve


def simplify(problem: Problem, frozen: Collection[int] = ()) -> tuple[Problem, list[np.ndarray]]:
    """A smaller problem with the same optimum for every limit, and per operator the original indices of its choices.

    Choices of ``frozen`` operators all stay, in order. An operator none of whose choices is possible keeps one, at
    inf seconds.
    """
    seconds = [np.where(np.isfinite(op.bytes), op.seconds, np.inf).astype(float) for op in problem.operators]
    num_bytes = [np.where(np.isfinite(s), op.bytes, 0.0).astype(float) for op, s in zip(problem.operators, seconds)]
    alive = [np.arange(len(s)) for s in seconds]
    open_edges = [
        replace(e, seconds=s, bytes=np.where(np.isfinite(s), e.bytes, 0.0).astype(float))
        for e in problem.edges
        if e.consumers
        for s in (np.where(np.isfinite(e.bytes), e.seconds, np.inf).astype(float),)
    ]

    def keep(i: int, mask: np.ndarray) -> bool:
        """Restrict operator i to the choices of ``mask`` (over those alive); whether anything went."""
        if i in frozen or mask.all():
            return False
        if not mask.any():
            if len(alive[i]) == 1 and np.isinf(seconds[i][alive[i][0]]):
                return False
            seconds[i][alive[i][0]] = np.inf
            mask = np.arange(len(mask)) == 0
        alive[i] = alive[i][mask]
        return True

    for i, s in enumerate(seconds):
        keep(i, np.isfinite(s))
    changed = True
    while changed:
        changed = False
        for e in open_edges:
            changed |= _drop_impossible(e, alive, keep)
        open_edges = [_merge_states(e, alive) for e in open_edges]
        states: list[list[np.ndarray]] = [[] for _ in alive]
        for e in open_edges:
            states[e.producer].append(e.source)
            for k, target in e.consumers:
                states[k].append(target)
        for i, idx in enumerate(alive):
            if len(idx) > 1 and i not in frozen:
                mask = _undominated([state[idx] for state in states[i]], seconds[i][idx], num_bytes[i][idx])
                changed |= keep(i, mask)
    operators = tuple(replace(op, seconds=s, bytes=b) for op, s, b in zip(problem.operators, seconds, num_bytes))
    edges = tuple(e for e in open_edges if e.seconds.any() or e.bytes.any())
    return restrict(Problem(operators, edges), alive), alive


def restrict(problem: Problem, alive: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each operator: int indices or a mask."""
    operators = tuple(
        Operator(op.name, tuple(np.array(op.labels, dtype=object)[idx]), op.seconds[idx], op.bytes[idx])
        for op, idx in zip(problem.operators, alive)
    )
    edges = tuple(
        replace(e, source=e.source[alive[e.producer]], consumers=tuple((k, t[alive[k]]) for k, t in e.consumers))
        for e in problem.edges
    )
    return Problem(operators, edges)


def _drop_impossible(e: Edge, alive: list[np.ndarray], keep) -> bool:  # type: ignore[no-untyped-def]
    finite = np.isfinite(e.seconds)
    if finite.all():
        return False
    changed = False
    sources = np.zeros(len(finite), dtype=bool)
    sources[e.source[alive[e.producer]]] = True
    for k, target in e.consumers:
        wanted = target[alive[k]]
        changed |= keep(k, finite[sources].any(axis=0)[wanted])
        reachable = finite[:, target[alive[k]]].any(axis=1)
        changed |= keep(e.producer, reachable[e.source[alive[e.producer]]])
    return changed


def _merge_states(e: Edge, alive: list[np.ndarray]) -> Edge:
    """Only states in use, equal rows merged; equal columns too where nobody shares, else just those that are free."""
    used_source = np.unique(e.source[alive[e.producer]])
    used_target = np.unique(np.concatenate([target[alive[k]] for k, target in e.consumers]))
    both = np.stack([e.seconds, e.bytes])[:, used_source][:, :, used_target]
    columns: dict[bytes, int] = {}
    target_of = np.zeros(e.seconds.shape[1], dtype=np.int64)
    first_columns = []
    for j, g in enumerate(used_target):
        column = both[:, :, j]
        shared = len(e.consumers) > 1 and column.any()
        key = column.tobytes() + (int(g).to_bytes(8, "little") if shared else b"")
        if key not in columns:
            columns[key] = len(columns)
            first_columns.append(j)
        target_of[g] = columns[key]
    both = both[:, :, first_columns]
    rows: dict[bytes, int] = {}
    source_of = np.zeros(e.seconds.shape[0], dtype=np.int64)
    first_rows = []
    for j, s in enumerate(used_source):
        key = both[:, j].tobytes()
        if key not in rows:
            rows[key] = len(rows)
            first_rows.append(j)
        source_of[s] = rows[key]
    both = both[:, first_rows]
    consumers = tuple((k, target_of[target]) for k, target in e.consumers)
    return replace(e, source=source_of[e.source], consumers=consumers, seconds=both[0], bytes=both[1])


def _undominated(states: list[np.ndarray], seconds: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Among choices of equal states, those that no other one equals or beats in seconds and in bytes: a mask."""
    profiles = [*zip(*(s.tolist() for s in states))] if states else [()] * len(seconds)
    leanest: dict[tuple[int, ...], float] = {}
    mask = np.zeros(len(seconds), dtype=bool)
    for c in np.lexsort((num_bytes, seconds)).tolist():
        if num_bytes[c] < leanest.get(profiles[c], math.inf):
            leanest[profiles[c]] = num_bytes[c]
            mask[c] = True
    return mask


# ---- the integer program


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
    ) -> mathopt.SolveResult:
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
        return mathopt.solve(self.model, solver, params=parameters, model_params=model_parameters)

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


def improve(problem: Problem, choice: Sequence[int], limit_bytes: float = math.inf) -> tuple[int, ...]:
    """A local optimum under single changes: never worse in (impossible entries, bytes over the limit, seconds)."""
    at: list[list[Edge]] = [[] for _ in problem.operators]
    for edge in problem.edges:
        for i in {edge.producer, *(k for k, _ in edge.consumers)}:
            at[i].append(edge)
    current = list(choice)

    def cost(indices: Collection[int], edges: Sequence[Edge]) -> tuple[int, float, float]:
        """(impossible entries, bytes, seconds) of these operators and edges."""
        ops = [(problem.operators[i], current[i]) for i in indices]
        parts = [(float(op.seconds[c]), float(op.bytes[c])) for op, c in ops]
        for e in edges:
            source = e.source[current[e.producer]]
            for target in {int(wanted[current[k]]) for k, wanted in e.consumers}:
                parts.append((float(e.seconds[source, target]), float(e.bytes[source, target])))
        possible = [part for part in parts if math.isfinite(part[0] + part[1])]
        return len(parts) - len(possible), sum(b for _, b in possible), sum(s for s, _ in possible)

    used = cost(range(len(current)), problem.edges)[1]
    for _ in range(20):
        moved = False
        for i, op in enumerate(problem.operators):
            here, before = current[i], cost([i], at[i])
            best = (before[0], max(used - limit_bytes, 0.0), before[2]), here, before[1]
            for c in range(len(op.labels)):
                if c != here:
                    current[i] = c
                    bad, num_bytes, seconds = cost([i], at[i])
                    best = min(
                        best, ((bad, max(used - before[1] + num_bytes - limit_bytes, 0.0), seconds), c, num_bytes)
                    )
            current[i] = best[1]
            used += best[2] - before[1]
            moved |= best[1] != here
        if not moved:
            break
    return tuple(current)


def solve_ilp(
    problem: Problem,
    limit_bytes: float = math.inf,
    time_limit_s: float | None = None,
    hint: Sequence[int] | None = None,
) -> Solution | Infeasible:
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

    def infeasible() -> Solution | Infeasible:
        remaining_s = None if math.isinf(stop) else max(stop - time.perf_counter(), 1.0)
        lean = solve_ilp(minimum_bytes_problem(problem), math.inf, remaining_s) if math.isfinite(limit_bytes) else None
        if lean is None or isinstance(lean, Infeasible):
            return Infeasible(limit_bytes, math.inf, None, math.inf, time.perf_counter() - start)
        seconds, num_bytes = evaluate(problem, lean.choice)
        if offer(lean.choice):  # the solver's tolerances against a limit that is met exactly
            return answer(lower, "numerical trouble")
        proven = lean.stop_reason == "optimal"
        return Infeasible(limit_bytes, num_bytes, lean.choice, seconds, time.perf_counter() - start, proven)

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
    reason = relaxed.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE and not incumbents:
        return infeasible()
    bound = lower
    if reason == mathopt.TerminationReason.OPTIMAL:
        bound = max(bound, relaxed.termination.objective_bounds.dual_bound * program.seconds_unit)
        choice, whole = program.rounded(relaxed)
        if offer(restore(choice)) and whole:
            return answer(bound, "optimal")
        offer(improve(problem, restore(choice), limit_bytes))
        if incumbents and bound >= min(incumbents)[0] * (1 - TOLERANCE):
            return answer(bound, "optimal")
    position = [{int(c): j for j, c in enumerate(idx)} for idx in original]
    program.demand_whole(bound)
    for _ in range(_NUM_CUTS):
        if time.perf_counter() >= stop:
            break
        known = min(incumbents)[2] if incumbents else None
        inside = known is not None and all(c in at for c, at in zip(known, position))
        start_from = [at[c] for c, at in zip(known, position)] if known is not None and inside else None
        result = program.solve(mathopt.SolverType.HIGHS, stop - time.perf_counter(), start_from)
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
    return answer(bound, "time limit")
