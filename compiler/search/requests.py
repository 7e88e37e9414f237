"""The fastest plans of several searches for one request, and Pareto fronts.

A request is searched once in each open precision and, if gradients may travel in other ways than the backend's own,
also without these. The second search is in the space of the first, but a search may miss what a narrower one finds: so
more freedom never makes a plan slower. The least bound of all searches holds for the result.
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
from .driver import best_plans, search_plans, start_search, with_provenance, without_gc
from .request import PlanRequest
from .state import INTERRUPTED, same_decisions

__all__ = ["fastest_plans", "make_pareto_front", "memory_share", "pareto_front", "search_all"]


Make = Callable[[Graph, PlanRequest], list[Plan]]


def search_all(make: Make, graph: Graph, request: PlanRequest) -> list[list[Plan]]:
    """The plans of ``make`` (``make_plans`` or ``make_pareto_front``, with the cluster bound) for each search of a
    request.

    Searches in which nothing fits are left out, and so are plans that the runtime cannot run if only others are asked
    for. A time limit is shared evenly. Raises InfeasibleError if nothing fits in any search, ValueError if nothing that
    fits can run.
    """
    graphs = list(
        {
            id(precise_graph): precise_graph
            for precise_graph in (in_precision(graph, name) for name in request.precisions())
        }.values()
    )
    space, limit = request.open_space, request.time_limit_s
    exactly = space.communication.exactly()
    spaces = [space] if exactly == space.communication else [replace(space, communication=exactly), space]
    share_s = limit / (len(graphs) * len(spaces)) if limit else limit
    searches, error = [], None
    refused: Plan | None = None
    for precise_graph in graphs:
        for narrow in spaces:
            try:
                plans = make(precise_graph, replace(request, space=narrow, time_limit_s=share_s))
            except InfeasibleError as missed:
                error = missed
                continue
            if runs := [plan for plan in plans if not (space.executable_only and plan.not_executable())]:
                searches.append(runs)
            else:
                refused = plans[0]
    if not searches:
        if error is not None:
            raise error
        assert refused is not None
        require_valid(refused, runnable=True)
    return searches


def fastest_plans(searches: Sequence[Sequence[Plan]], count: int) -> list[Plan]:
    """The ``count`` fastest distinct plans of several searches, fastest first, with the bound of all of them."""
    if len(searches) == 1:
        return list(searches[0])[:count]
    bound_s = min(plan.prediction.bound_s for plans in searches for plan in plans)
    passes = Counter[str]()
    for plans in searches:
        passes.update(plans[0].provenance["passes"])
    distinct: list[Plan] = []
    for plan in sorted((plan for plans in searches for plan in plans), key=lambda plan: plan.prediction.step_s):
        if not any(same_decisions(plan, other) for other in distinct):
            prediction = replace(plan.prediction, bound_s=min(bound_s, plan.prediction.step_s))
            provenance = {**plan.provenance, "passes": {name: round(s, 4) for name, s in passes.items()}}
            distinct.append(replace(plan, prediction=prediction, provenance=provenance))
    return distinct[:count]


# ---- The front of step time against peak memory: the same search again and again under a lower memory
# limit


MEMORY_STEP = 8 / 9  # a plan of the front fills at most this part of what the one before fills


def make_pareto_front(
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
    with without_gc():
        front += best_plans(search)
        while len(front) < request.count and not search.must_stop(builds=2):
            search.memory_share = memory_share(front[-1]) * MEMORY_STEP
            try:
                smaller, _ = search_plans(search)
            except KeyboardInterrupt:
                search.cut_short = INTERRUPTED
                break
            if not smaller:
                break
            front += smaller
    search.passes["total"] = time.perf_counter() - begin
    return [with_provenance(search, plan, []) for plan in pareto_front(front)]


def memory_share(plan: Plan) -> float:
    """The largest fraction of a device's memory, less the framework's, that a plan fills."""
    usable = usable_bytes(Cluster.from_json(json.dumps(plan.cluster)))
    return max(
        (predicted.peak_bytes - predicted.memory_bytes["framework"]) / min(usable[d] for d in stage.devices)
        for stage, predicted in zip(plan.stages, plan.prediction.stages)
    )


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of which none is both slower and larger than another, fastest first."""
    ordered = sorted(plans, key=lambda plan: (plan.prediction.step_s, memory_share(plan)))
    front: list[Plan] = []
    for plan in ordered:
        if not front or memory_share(plan) < memory_share(front[-1]):
            front.append(plan)
    return front
