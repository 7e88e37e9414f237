"""What else there was: the best pure data, tensor and pipeline plans, and why they lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .explore import Search, nearest_misses
from .infeasible import nearest
from .plan import Plan
from .space import microbatch_counts
from .stage_price import STEP_CAUSES
from .strategy import InfeasibleError, Strategy

__all__ = ["find_alternatives"]

Plans = Callable[[Search], tuple[list[Plan], InfeasibleError | None]]
COUNTS = 4  # microbatch counts that are tried, beside the plan's


def find_alternatives(search: Search, plan: Plan, search_plans: Plans) -> list[dict[str, Any]]:
    """The best plan of each pure kind: name, step_s (None if infeasible) and why it lost."""
    total = search.cluster.num_devices
    kinds = {"data": Strategy(dp=total), "tensor": Strategy(tp=total), "pipeline": Strategy(pp=total)}
    return [_alternative(search, plan, name, strategy, search_plans) for name, strategy in kinds.items()]


def _alternative(
    search: Search,
    plan: Plan,
    name: str,
    strategy: Strategy,
    search_plans: Plans,
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "step_s": None, "why": ""}
    if strategy.pp > len(search.layering.layers):
        return row | {"why": f"the model has {len(search.layering.layers)} layers, fewer than {strategy.pp} stages"}
    if broken := search.constraints.excludes(strategy):
        return row | {"why": f"excluded by {' and '.join(map(repr, broken))}"}
    usable = microbatch_counts(search.global_batch, strategy)
    if not usable or search.global_batch // usable[0] % strategy.dp:
        return row | {
            "why": f"no microbatch of global batch {search.global_batch} falls into {strategy.dp} equal parts"
        }
    thinned = usable[:: max(1, len(usable) // COUNTS)]
    counts = {*thinned, *(m for m in usable if m == plan.microbatches)}
    inner = replace(
        search,
        strategy=strategy,
        counts=tuple(sorted(counts)),
        passes={},
        bounds={},
        tables=None,
        thorough=False,
        headroom=1.0,
    )
    try:
        plans, unfit = search_plans(inner)
    except ValueError as error:
        return row | {"why": str(error)}
    if unfit is not None:
        return row | {"why": str(unfit)}
    if not plans:
        missing = nearest(nearest_misses(inner)).why.missing_bytes
        return row | {"why": f"does not fit: {missing / 2**30:.2f} GiB per device missing"}
    other = plans[0]
    return row | {"step_s": other.prediction.step_s, "microbatches": other.microbatches, "why": _why(plan, other)}


_WORDS = {
    "backward_input": "backward",
    "backward_weight": "the gradient of weights",
    "tied": "the exchange of tied weights",
    "loss": "telling the loss",
}


def _why(plan: Plan, other: Plan) -> str:
    """The cause that grew most against the plan, in seconds per step."""
    if other.prediction.step_s <= plan.prediction.step_s * 1.001:
        return (
            "as good: it is what was chosen"
            if other.prediction.step_s > plan.prediction.step_s * 0.999
            else "better in simulation"
        )

    def causes(p: Plan) -> dict[str, float]:
        slowest = max(p.prediction.stages, key=lambda s: (s.forward_s + s.backward_s) * p.microbatches + s.step_s)
        found = {
            _WORDS.get(cause, cause): seconds * (1 if cause in STEP_CAUSES else p.microbatches)
            for cause, seconds in slowest.seconds.items()
            if cause != "overlapped"
        }
        found["pipeline bubble"] = max(0.0, p.prediction.step_s - sum(found.values()))
        return found

    mine, theirs = causes(plan), causes(other)
    grown = max(theirs, key=lambda k: theirs[k] - mine.get(k, 0.0))
    return f"{grown} takes {_ms(theirs[grown])} a step against {_ms(mine.get(grown, 0.0))}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
