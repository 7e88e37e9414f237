"""A plan of the search judged by every document."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import FRAMEWORK_BYTES, usable_bytes

from tests.oracles.exhaustive import EPS, Exhaustive, Found
from tests.oracles.plan_difference import difference, text
from tests.support.random_instances import RandomCase, with_memory

__all__ = ["Verdict", "judge"]


# ---- a plan of ours against the best document
@dataclass(frozen=True)
class Verdict:
    """What became of one case. problems: what must not be; notes: what is worth counting."""

    seed: int
    kind: str
    case: str
    ours_s: float | None
    bound_s: float | None
    best_s: float | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    documents: int
    plan_s: float  # seconds that planning took
    exhaustive_s: float

    @property
    def equal(self) -> bool:
        """Whether no document is faster than our plan. It may be faster than all: these must also fit by the estimate
        op by op, which plans of ours need not."""
        if self.problems:
            return False
        if self.ours_s is None or self.best_s is None:
            return self.best_s is None
        return self.ours_s <= self.best_s * (1 + EPS)


def judge(case: RandomCase, plan_of: Callable[[Graph, Cluster, int, Space], Plan]) -> Verdict:
    """Hold the plan that ``plan_of`` finds against all documents. Raises TooLarge.

    With a memory limit documents must fit by the estimate op by op and also by a run without data, as every plan of
    ours does."""
    graph = capture(case.model, case.inputs)
    cluster = case.cluster
    begin = time.perf_counter()
    exhaustive = Exhaustive(graph, cluster, case.global_batch, case.space)
    found = exhaustive.best()
    if case.memory is not None and found.plan is not None:
        framework = FRAMEWORK_BYTES[cluster.hosts[0].device.kind]
        needed = max(stage.peak_bytes for stage in found.plan.prediction.stages) - framework
        cluster = with_memory(cluster, int(framework + case.memory * needed))
        exhaustive = Exhaustive(graph, cluster, case.global_batch, case.space, limited=True)
        found = exhaustive.best(lambda plan: _fits(plan, cluster))
    exhaustive_s, begin = time.perf_counter() - begin, time.perf_counter()
    ours: Plan | None = None
    problems: list[str] = []
    try:
        ours = plan_of(graph, cluster, case.global_batch, case.space)
    except InfeasibleError:
        pass
    except Exception as error:
        problems.append(f"planning raised {type(error).__name__}: {error}")
    plan_s = time.perf_counter() - begin
    notes: list[str] = []
    if not problems:
        problems, notes = _faults(ours, found, graph, cluster)
    return Verdict(
        case.seed, case.kind, str(case), ours and ours.prediction.step_s, ours and ours.prediction.bound_s,
        None if found.plan is None else found.step_s, tuple(problems), tuple(notes), found.documents, plan_s,
        exhaustive_s,
    )  # fmt: skip


def _faults(ours: Plan | None, found: Found, graph: Graph, cluster: Cluster) -> tuple[list[str], list[str]]:
    theirs, problems, notes = found.plan, [], []
    if ours is None:
        return ([f"infeasible, but this fits:\n{text(theirs)}"] if theirs is not None else []), notes
    again = reprice(ours, graph, cluster)
    if abs(again.prediction.step_s - ours.prediction.step_s) > EPS * ours.prediction.step_s:
        problems.append(f"step_s is {ours.prediction.step_s!r}, but {again.prediction.step_s!r} by reprice")
    if theirs is None:
        return problems, [*notes, "ours fits by a run without data, no document by estimate"]
    step_s, bound_s = ours.prediction.step_s, ours.prediction.bound_s
    if bound_s > found.step_s * (1 + EPS):
        over = f"the bound {bound_s:.9g} s is {bound_s / found.step_s - 1:.3%} above a document"
        problems.append(f"{over}\n{difference(ours, theirs)}")
    if step_s * (1 - ours.prediction.bound_gap) > found.step_s * (1 + EPS) and not problems:
        problems.append(f"{step_s:.9g} s, with its gap above a document\n{difference(ours, theirs)}")
    if step_s < found.step_s * (1 - EPS):
        notes.append("faster than every document")
    return problems, notes


def _fits(plan: Plan, cluster: Cluster) -> bool:
    limits = usable_bytes(cluster)
    return all(
        price.peak_bytes - price.memory_bytes["framework"] <= min(limits[d] for d in stage.devices)
        for stage, price in zip(plan.stages, plan.prediction.stages)
    )
