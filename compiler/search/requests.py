"""The fastest of several searches of one request: in each precision that is open, and, where gradients may travel in
other ways than the backend's own, also without these.

The second is in the space of the first, and a search may miss what a narrower one finds; so more freedom never makes a
plan slower. The least bound of all searches holds for what is taken.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...costmodel.cluster import Cluster
from ...costmodel.memory import usable_bytes
from ..errors import InfeasibleError
from ..frontend.mixed_precision import in_precision
from ..ir.graph import Graph
from ..plan.plan import Plan
from ..plan.validation import require_valid
from .driver import best_plans, recorded, search_plans, start_search, without_gc
from .optimality import bounded, proving
from .request import PlanRequest
from .state import INTERRUPTED, alike

__all__ = ["fastest", "filled", "make_front", "searched", "undominated"]


Make = Callable[[Graph, PlanRequest], list[Plan]]


def searched(make: Make, graph: Graph, request: PlanRequest) -> list[list[Plan]]:
    """What ``make`` (``make_plans`` or ``make_front``, with the cluster bound) finds, once for each search; those in
    which nothing fits are left out, and plans that the runtime cannot run where only others are asked for. A time limit
    is shared evenly. Raises InfeasibleError if nothing fits in any of them, ValueError if nothing that fits can run."""
    graphs = list({id(one): one for one in (in_precision(graph, name) for name in request.precisions())}.values())
    space, limit = request.open_space, request.time_limit_s
    exactly = space.communication.exactly()
    spaces = [space] if exactly == space.communication else [replace(space, communication=exactly), space]
    share_s = limit / (len(graphs) * len(spaces)) if limit else limit
    found, error = [], None
    refused: Plan | None = None
    for one in graphs:
        for narrow in spaces:
            try:
                plans = make(one, replace(request, space=narrow, time_limit_s=share_s))
            except InfeasibleError as missed:
                error = missed
                continue
            if runs := [plan for plan in plans if not (space.executable_only and plan.not_executable())]:
                found.append(runs)
            else:
                refused = plans[0]
    if not found:
        if error is not None:
            raise error
        assert refused is not None
        require_valid(refused, runnable=True)
    return found


def fastest(found: Sequence[Sequence[Plan]], count: int) -> list[Plan]:
    """The ``count`` fastest distinct plans of several searches, fastest first, with the bound of all of them."""
    if len(found) == 1:
        return list(found[0])[:count]
    bound_s = min(plan.prediction.bound_s for plans in found for plan in plans)
    passes = Counter[str]()
    for plans in found:
        passes.update(plans[0].provenance["passes"])
    kept: list[Plan] = []
    for plan in sorted((plan for plans in found for plan in plans), key=lambda plan: plan.prediction.step_s):
        if not any(alike(plan, other) for other in kept):
            prediction = replace(plan.prediction, bound_s=min(bound_s, plan.prediction.step_s))
            provenance = {**plan.provenance, "passes": {name: round(s, 4) for name, s in passes.items()}}
            kept.append(replace(plan, prediction=prediction, provenance=provenance))
    return kept[:count]


# ---- The front of step time against peak memory: the same search again and again under a lower memory
# limit


SMALLER = 8 / 9  # a plan of the front fills at most this part of what the one before fills


def make_front(
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest,
    *,
    capture_s: float = 0.0,
    progress: Callable[[str, float], None] = lambda name, fraction: None,
) -> list[Plan]:
    """Plans of which none is both faster and smaller than another, fastest first, at most ``request.count``; as
    in ``make_plan``.

    A plan's size is the largest share that it fills of the memory of any of its devices. After the fastest plan the
    search runs again where plans may fill a ninth less than that one did, and so on until nothing fits. The tables of
    the search stay: another limit changes only which of their rows are needed.
    """
    begin = time.perf_counter()
    search = start_search(graph, cluster, request, capture_s, progress)
    front: list[Plan] = []
    with without_gc(), proving(search):
        front += bounded(search, best_plans(search))
        while len(front) < request.count and not search.cut_short:
            search.share = filled(front[-1]) * SMALLER
            try:
                smaller, _ = search_plans(search)
            except KeyboardInterrupt:
                search.cut_short = INTERRUPTED
                break
            if not smaller:
                break
            front += bounded(search, smaller)
    search.passes["total"] = time.perf_counter() - begin
    return [recorded(search, plan, []) for plan in undominated(front)]


def filled(plan: Plan) -> float:
    """The largest share that a plan fills of the memory that any of its devices has beside the framework."""
    usable = usable_bytes(Cluster.from_json(json.dumps(plan.cluster)))
    return max(
        (predicted.peak_bytes - predicted.memory_bytes["framework"]) / min(usable[d] for d in stage.devices)
        for stage, predicted in zip(plan.stages, plan.prediction.stages)
    )


def undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other one is both faster and smaller than, fastest first."""
    ordered = sorted(plans, key=lambda plan: (plan.prediction.step_s, filled(plan)))
    found: list[Plan] = []
    for plan in ordered:
        if not found or filled(plan) < filled(found[-1]):
            found.append(plan)
    return found
