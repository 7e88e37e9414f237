"""Plans of small questions, as tests ask them: by keywords, and in the plain space (1F1B, no recompute, no parameter
sharding) unless a space is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.driver import make_plans as search_plans
from meshwright.compiler.search.parallel_shape import Strategy
from meshwright.compiler.search.request import PlanRequest
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster

__all__ = ["make_plan", "make_plans", "request_of"]


def request_of(
    global_batch: int,
    microbatches: int | None = None,
    strategy: Strategy | None = None,
    schedule: str | None = None,
    recompute: str | Mapping[str, str] | None = None,
    space: Space | None = None,
    top_k: int = 1,
    alternatives: bool = False,
    **words: Any,
) -> PlanRequest:
    """schedule, recompute: open these alone."""
    space = space or Space()
    if schedule is not None:
        space = replace(space, schedules=Space.asked(schedule).schedules)
    if recompute is not None:
        space = replace(space, recompute=Space.asked(recompute=recompute).recompute)
    return PlanRequest(
        global_batch, microbatches, strategy, recompute=recompute or "auto", space=space, count=top_k,
        alternatives=alternatives, **words,
    )  # fmt: skip


def make_plan(graph: Graph, cluster: Cluster, global_batch: int, *shape: Any, **words: Any) -> Plan:
    """The best plan; arguments as of ``request_of``."""
    return make_plans(graph, cluster, global_batch, *shape, **words)[0]


def make_plans(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    *shape: Any,
    progress: Callable[[str, float], None] = lambda name, fraction: None,
    **words: Any,
) -> list[Plan]:
    """The ``top_k`` best plans."""
    return search_plans(graph, cluster, request_of(global_batch, *shape, **words), progress=progress)
