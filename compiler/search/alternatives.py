"""A fast data-, tensor- and pipeline-parallel plan each, at its simulated seconds, and the reason why it lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import OverfullError
from ..intra_op.stage_cost import STEP_CAUSES
from ..plan.plan import Plan
from .infeasible import nearest_miss
from .parallel_shape import Strategy
from .space import microbatch_counts
from .state import PurePlan, SearchState
from .tables import tables_of

__all__ = ["find_alternatives", "pure_strategies", "why_excluded", "why_far", "why_infeasible", "why_overfull"]

#: of a tensor-parallel alternative: counting the memory of a ring of attention takes a while for each of its rounds
MOST_TENSOR_DEVICES = 128


def pure_strategies(search: SearchState) -> dict[str, Strategy]:
    """The strategy of each pure kind on all devices."""
    total = search.cluster.num_devices
    return {"data": Strategy(dp=total), "tensor": Strategy(tp=total), "pipeline": Strategy(pp=total)}


def find_alternatives(plan: Plan, pure: Mapping[str, PurePlan]) -> list[dict[str, Any]]:
    """The plan of each pure kind: name, step_s (None if it is infeasible or was not built) and why it lost."""
    return [
        {"name": name, "step_s": None, "why": alternative.why}
        if alternative.plan is None
        else {
            "name": name,
            "step_s": alternative.plan.prediction.step_s,
            "why": _why(plan, alternative.plan),
            "microbatches": alternative.plan.microbatches,
        }
        for name, alternative in pure.items()
    ]


def why_excluded(search: SearchState, strategy: Strategy) -> str:
    """The reason why a strategy cannot be searched, or is not; empty if it is."""
    if strategy.tp > MOST_TENSOR_DEVICES:
        return f"not looked for: {strategy.tp:,} devices would share every op"
    if strategy.pp > len(search.layering.layers):
        return f"the model has {len(search.layering.layers)} layers, fewer than {strategy.pp} stages"
    if broken := search.constraints.excludes(strategy):
        return f"excluded by {' and '.join(map(repr, broken))}"
    usable = [m for m in microbatch_counts(search.global_batch, strategy) if search.microbatches in (None, m)]
    if not usable or search.global_batch // usable[0] % strategy.dp:
        asked = f" in {search.microbatches} parts" if search.microbatches else ""
        return f"no microbatch of global batch {search.global_batch}{asked} falls into {strategy.dp} equal parts"
    return ""


def why_far(clock_s: float) -> str:
    """The reason why the plan of a candidate with this clock is not built."""
    return f"about {_ms(clock_s)} by its cost tables, too slow to be built"


def why_infeasible(search: SearchState) -> str:
    """The reason why nothing fits under a strategy, by the cost tables."""
    misses = tables_of(search).misses()
    if misses:
        return f"does not fit: {nearest_miss(misses).why.missing_bytes / 2**30:.2f} GiB per device missing"
    return "does not fit"


def why_overfull(plan: Plan, missed: OverfullError) -> str:
    """The reason why a plan that tables believed to fit does not."""
    return f"at {_ms(plan.prediction.step_s)} {str(missed).partition(';')[0]}"


def _why(plan: Plan, other: Plan) -> str:
    """The part of a step that takes longest against the plan, in words."""
    plan_s, other_s = plan.prediction.step_s, other.prediction.step_s
    if other_s <= plan_s * 1.02:
        return "as good" if other_s > plan_s * 0.98 else "better, but excluded by what was asked for"
    causes = {name: (before, after) for (name, before), (_, after) in zip(_parts(plan), _parts(other))}
    cause, (before, after) = max(causes.items(), key=lambda item: item[1][1] - item[1][0])
    return f"{cause} takes {_ms(after)} a step against {_ms(max(before, 0.0))}"


def _parts(plan: Plan) -> list[tuple[str, float]]:
    """Seconds of a step by cause, of the stage with the most work."""
    slowest = max(plan.prediction.stages, key=lambda stage: stage.busy_s(plan.microbatches))
    once = sum(slowest.seconds.get(cause, 0.0) for cause in STEP_CAUSES)
    each = plan.microbatches * (slowest.forward_s + slowest.backward_s)
    return [
        ("the work on microbatches", each),
        ("reducing gradients and the update", once),
        ("the bubble, with messages,", plan.prediction.step_s - each - once),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
