"""Captures and plans that many tests read, made once in a process. They are for tests that change neither a graph nor
anything under the search; what a capture or a search does, tests of its own say."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.costmodel.cluster import Cluster

from tests.support.planning import make_plan, request_of
from tests.support.zoo import ZOO

__all__ = ["graph_of", "shared_plan"]

_PLANS: dict[Hashable, Plan] = {}


@cache
def graph_of(name: str, batch: int = 8, **options: Any) -> Graph:
    """The capture of a model of the zoo, without weights."""
    model, args, kwargs = ZOO[name](batch, device="meta", **options)
    return capture(model, args, kwargs)


def shared_plan(graph: Graph, cluster: Cluster, global_batch: int, *shape: Any, **words: Any) -> Plan:
    """``planning.make_plan``, searched once for equal questions."""
    request = request_of(global_batch, *shape, **words)
    key = graph.fingerprint(), graph.batch, graph.precision, cluster, repr(request), repr(request.space)
    if key not in _PLANS:
        _PLANS[key] = make_plan(graph, cluster, global_batch, *shape, **words)
    return _PLANS[key]
