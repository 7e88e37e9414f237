"""The best data-, tensor- and pipeline-parallel plans by the seconds of the cost tables, and the reason why each one
lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..intra_op.stage_cost import STEP_CAUSES
from ..plan.plan import Plan
from .explore import first_pipelines, nearest_misses
from .infeasible import nearest_miss
from .parallel_shape import Strategy
from .space import microbatch_counts
from .state import Candidate, PurePlan, SearchState

__all__ = ["find_alternatives", "pure_plans"]


def find_alternatives(plan: Plan, pure: Mapping[str, PurePlan]) -> list[dict[str, Any]]:
    """The best plan of each pure kind, as tables price it: name, step_s (None if infeasible) and why it lost."""
    return [
        {"name": name, "step_s": None, "why": alternative.why}
        if alternative.best is None
        else {
            "name": name,
            "step_s": alternative.best.clock_s,
            "why": _why(plan, alternative.best),
            "microbatches": alternative.best.microbatches,
        }
        for name, alternative in pure.items()
    ]


def pure_plans(search: SearchState) -> dict[str, PurePlan]:
    """The best plan of each pure kind."""
    total = search.cluster.num_devices
    kinds = {"data": Strategy(dp=total), "tensor": Strategy(tp=total), "pipeline": Strategy(pp=total)}
    return {name: _pure_plan(search, kind) for name, kind in kinds.items()}


def _pure_plan(search: SearchState, strategy: Strategy) -> PurePlan:
    if strategy.pp > len(search.layering.layers):
        return PurePlan(why=f"the model has {len(search.layering.layers)} layers, fewer than {strategy.pp} stages")
    if broken := search.constraints.excludes(strategy):
        return PurePlan(why=f"excluded by {' and '.join(map(repr, broken))}")
    usable = [m for m in microbatch_counts(search.global_batch, strategy) if search.microbatches in (None, m)]
    if not usable or search.global_batch // usable[0] % strategy.dp:
        asked = f" in {search.microbatches} parts" if search.microbatches else ""
        return PurePlan(
            why=f"no microbatch of global batch {search.global_batch}{asked} falls into {strategy.dp} equal parts"
        )
    inner = replace(
        search,
        strategy=strategy,
        counts=tuple(usable),
        space=replace(search.space, schedules=search.space.schedules[:1]),
        passes={},
        bounds={},
        tables=None,
        thorough=False,
        workers=1,
        proof_task=None,
        pure_task=None,
        memory_corrections={},
    )
    try:
        candidates = list(first_pipelines(inner))
    except ValueError as error:
        return PurePlan(why=str(error))
    if not candidates:
        missing = nearest_miss(nearest_misses(inner)).why.missing_bytes
        return PurePlan(why=f"does not fit: {missing / 2**30:.2f} GiB per device missing")
    return PurePlan(replace(min(candidates, key=lambda candidate: candidate.clock_s), rows=()))


def _why(plan: Plan, other: Candidate) -> str:
    """The part of a step that takes longest against the plan, in words."""
    plan_s, other_s = plan.prediction.step_s, other.clock_s
    if other_s <= plan_s * 1.02:
        return "as good, as far as tables tell" if other_s > plan_s * 0.98 else "better by the tables, which count less"
    slowest = max(plan.prediction.stages, key=lambda s: (s.forward_s + s.backward_s) * plan.microbatches + s.step_s)
    once = sum(slowest.seconds.get(cause, 0.0) for cause in STEP_CAUSES)
    each = plan.microbatches * (slowest.forward_s + slowest.backward_s)
    causes = {
        "the work on microbatches": (each, other.pace_s * other.microbatches),
        "reducing gradients and the update": (once, other.once_s),
        "the bubble, with messages,": (
            plan_s - each - once,
            other_s - other.pace_s * other.microbatches - other.once_s,
        ),
    }
    cause, (before, after) = max(causes.items(), key=lambda item: item[1][1] - item[1][0])
    return f"{cause} takes {_ms(after)} a step against {_ms(max(before, 0.0))}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
