"""The front of step time against peak memory: the same search again and again under a lower memory limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

from ..costmodel.cluster import Cluster
from .driver import best_plans, recorded, search_plans, start_search, without_gc
from .graph import Graph
from .plan import Plan
from .proof import bounded, proving
from .search_state import INTERRUPTED
from .space import Space, usable_bytes
from .strategy import Strategy

__all__ = ["filled", "make_front", "undominated"]

SMALLER = 8 / 9  # a plan of the front fills at most this part of what the one before fills


def make_front(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    microbatches: int | None = None,
    strategy: Strategy | None = None,
    schedule: str | None = None,
    optimizer: str = "AdamW",
    capture_s: float = 0.0,
    progress: Callable[[str, float], None] = lambda name, fraction: None,
    recompute: str | Mapping[str, str] | None = None,
    space: Space | None = None,
    constraints: Sequence[str] | str | None = None,
    time_limit_s: float | None = None,
    points: int = 8,
    workers: int = 1,
) -> list[Plan]:
    """Plans of which none is both faster and smaller than another, fastest first, at most ``points``; as in
    ``make_plan``.

    A plan's size is the largest share that it fills of the memory of any of its devices. After the fastest plan the
    search runs again where plans may fill a ninth less than that one did, and so on until nothing fits. The tables of
    the search stay: another limit changes only which of their rows are needed.
    """
    begin = time.perf_counter()
    if points < 1:
        raise ValueError(f"points is how many plans are wanted at most, 1 or more, but got {points}")
    search = start_search(
        graph, cluster, global_batch, microbatches, strategy, schedule, optimizer, capture_s, progress, recompute,
        space, constraints, time_limit_s, workers,
    )  # fmt: skip
    front: list[Plan] = []
    with without_gc(), proving(search):
        front += bounded(search, best_plans(search))
        while len(front) < points and not search.cut_short:
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
