"""What else there was: the best pure data, tensor and pipeline plans by the tables' seconds, and why they lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .explore import explore, nearest_misses
from .infeasible import nearest
from .plan import Plan
from .search_state import Candidate, Search
from .space import microbatch_counts
from .stage_price import STEP_CAUSES
from .strategy import Strategy

__all__ = ["find_alternatives"]


def find_alternatives(search: Search, plan: Plan) -> list[dict[str, Any]]:
    """The best plan of each pure kind, as tables price it: name, step_s (None if infeasible) and why it lost."""
    total = search.cluster.num_devices
    kinds = {"data": Strategy(dp=total), "tensor": Strategy(tp=total), "pipeline": Strategy(pp=total)}
    return [_alternative(search, plan, name, strategy) for name, strategy in kinds.items()]


def _alternative(search: Search, plan: Plan, name: str, strategy: Strategy) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "step_s": None, "why": ""}
    if strategy.pp > len(search.layering.layers):
        return row | {"why": f"the model has {len(search.layering.layers)} layers, fewer than {strategy.pp} stages"}
    if broken := search.constraints.excludes(strategy):
        return row | {"why": f"excluded by {' and '.join(map(repr, broken))}"}
    usable = [m for m in microbatch_counts(search.global_batch, strategy) if search.microbatches in (None, m)]
    if not usable or search.global_batch // usable[0] % strategy.dp:
        asked = f" in {search.microbatches} parts" if search.microbatches else ""
        return row | {
            "why": f"no microbatch of global batch {search.global_batch}{asked} falls into {strategy.dp} equal parts"
        }
    counts = {min(usable, key=lambda m: abs(m - plan.microbatches)), usable[-1]}
    if strategy.pp == 1:
        counts.add(usable[len(usable) // 2])
    inner = replace(
        search,
        strategy=strategy,
        counts=tuple(sorted(counts)),
        space=replace(search.space, schedules=search.space.schedules[:1]),
        passes={},
        bounds={},
        tables=None,
        thorough=False,
        workers=1,
        proof=None,
        beside={},
    )
    try:
        found = list(explore(inner))
    except ValueError as error:
        return row | {"why": str(error)}
    if not found:
        missing = nearest(nearest_misses(inner)).why.missing_bytes
        return row | {"why": f"does not fit: {missing / 2**30:.2f} GiB per device missing"}
    other = min(found, key=lambda candidate: candidate.clock_s)
    return row | {"step_s": other.clock_s, "microbatches": other.microbatches, "why": _why(plan, other)}


def _why(plan: Plan, other: Candidate) -> str:
    """The part of a step that grew most against the plan's."""
    mine, theirs = plan.prediction.step_s, other.clock_s
    if theirs <= mine * 1.02:
        return "as good, as far as tables tell" if theirs > mine * 0.98 else "better by the tables, which count less"
    slowest = max(plan.prediction.stages, key=lambda s: (s.forward_s + s.backward_s) * plan.microbatches + s.step_s)
    once = sum(slowest.seconds.get(cause, 0.0) for cause in STEP_CAUSES)
    each = plan.microbatches * (slowest.forward_s + slowest.backward_s)
    causes = {
        "the work on microbatches": (each, other.pace_s * other.microbatches),
        "reducing gradients and the update": (once, other.once_s),
        "the bubble, with messages,": (mine - each - once, theirs - other.pace_s * other.microbatches - other.once_s),
    }
    cause, (before, after) = max(causes.items(), key=lambda item: item[1][1] - item[1][0])
    return f"{cause} takes {_ms(after)} a step against {_ms(max(before, 0.0))}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
