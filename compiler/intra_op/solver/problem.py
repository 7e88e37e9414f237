"""The intra-op problem: one choice per operator, reshards paid once per tensor and target, bytes under a limit.

It is purely numeric; who builds it from a graph is none of its business. Indices: operators i with choices c, edges
(tensors) t with a producer p(t), consumers k of t, source states s that p's choices produce, target states g that
consumers' choices want.

**The problem.** Choose x so that seconds(x) is minimal and bytes(x) ≤ limit, where for w = seconds or bytes

    w(x) = Σ_i w_i[x_i] + Σ_t Σ_{g ∈ {target_k(x_k) : k consumes t}} w_t[source_t(x_p(t)), g]                   (1)

The inner sum runs over a *set*: two consumers that want one target share its copy. An entry seconds_t = inf forbids
the pair.

**Who solves it.** ``presolve`` makes it smaller and keeps the optimum. ``elimination`` solves it by tables where the
graph is narrow and there is no limit, ``lagrange`` puts a limit on top of that, ``ilp`` solves any of them as an
integer program. All three agree with the tests' brute force.

Problems made from an intra-op problem: ``restrict`` keeps given choices, ``weighted`` puts a price on bytes, and
``minimum_bytes_problem`` asks for the leanest assignment.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = [
    "TOLERANCE", "Edge", "InfeasibleAssignment", "Operator", "Problem", "Solution", "evaluate", "improve",
    "minimum_bytes_problem", "restrict", "weighted",
]  # fmt: skip


#: relative difference below which two costs count as equal: the accuracy of every solver of this problem
TOLERANCE = 1e-9


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

    def restricted(self, alive: Sequence[np.ndarray]) -> Edge:
        """The tensor with only these choices of each operator: int indices or a mask."""
        consumers = tuple((k, target[alive[k]]) for k, target in self.consumers)
        return replace(self, source=self.source[alive[self.producer]], consumers=consumers)


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

    stop_reason: "optimal", "near" (as near to the bound as was asked for), "beaten" (nothing is as fast as was asked
    for), "time limit", or "numerical trouble" where the solver's tolerances left the bound open.
    """

    choice: tuple[int, ...]
    seconds: float
    bytes: float
    bound: float
    stop_reason: str
    elapsed_s: float

    @property
    def gap(self) -> float:
        """Upper bound on the distance of the seconds from the optimum, as a fraction of them: 0 is proven optimal."""
        return 0.0 if self.seconds <= self.bound else (self.seconds - self.bound) / self.seconds


@dataclass(frozen=True)
class InfeasibleAssignment:
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
        """Bytes by which the limit must grow."""
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


def restrict(problem: Problem, alive: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each operator: int indices or a mask."""
    operators = tuple(
        Operator(op.name, tuple(np.array(op.labels, dtype=object)[idx]), op.seconds[idx], op.bytes[idx])
        for op, idx in zip(problem.operators, alive)
    )
    return Problem(operators, tuple(edge.restricted(alive) for edge in problem.edges))
