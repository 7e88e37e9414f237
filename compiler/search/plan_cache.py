"""An on-disk cache of plans, keyed by a hash of the request and everything else that the answer depends on.

The hash covers the graph (with the trained and the shared parameters), the cluster's prices, every argument of the
search, PyTorch's version, and the source of the packages that search. A changed input has another key, so no entry is
ever out of date; an entry that cannot be read is searched for anew. Each request has one file of plan documents under
``cache_directory()``. Beyond ``MAX_CACHED_PLANS`` files the oldest go. Graphs with ops whose rules the user registered
are not cached. ``row_cache`` shares what a search for another request may need.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ...costmodel.cluster import Cluster
from ...costmodel.files import parse_json, write_atomically
from ...costmodel.tables import cache_directory
from ..frontend.mixed_precision import in_precision
from ..intra_op.vectorised.row_cache import RowCache
from ..ir.graph import Graph
from ..plan.plan import Plan
from ..rules import is_built_in
from .request import PlanRequest

__all__ = ["cached_plans", "request_key"]

MAX_CACHED_PLANS = 500  # files


def cached_plans(
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest,
    find: Callable[[RowCache | None], list[Plan]],
    capture_s: float,
) -> list[Plan]:
    """The cached plans of a request, or those of ``find``, which are then cached unless the search ended early."""
    begin = time.perf_counter()
    if not all(is_built_in(node) for node in graph.ops()):
        return find(None)
    path = cache_directory() / "plans" / f"{request_key(graph, cluster, request)}.json"
    try:
        plans = [Plan.from_json(document) for document in parse_json(path.read_text(), "cache")]
    except (OSError, ValueError, TypeError):
        plans = []
    if not plans:
        with RowCache(cache_directory() / "rows", f"{_code()} {np.__version__}").keeping() as row_cache:
            plans = find(row_cache)
        if not any("ended early" in note for plan in plans for note in plan.prediction.notes):
            _keep(path, plans)
        return plans
    seconds = round(time.perf_counter() - begin, 4)
    passes = {"capture": round(capture_s, 4), "found before": seconds, "total": seconds}
    return [
        replace(plan, graph=in_precision(graph, plan.precision), provenance={**plan.provenance, "passes": passes})
        for plan in plans
    ]


def request_key(graph: Graph, cluster: Cluster, request: PlanRequest) -> str:
    """The key of a request, 32 hex digits. It does not depend on the number of processes, which changes no answer."""
    facts = [str([node.meta.get(k) for k in ("source", "module", "stage", "split")]) for node in graph]
    asked = [repr(replace(request, workers=1)), repr(request.space)]
    text = json.dumps([_code(), torch.__version__, graph.batch, graph.text(), facts, cluster.to_json(), asked])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _keep(path: Path, plans: Sequence[Plan]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps([plan.to_json() for plan in plans]))
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_CACHED_PLANS]:
            file.unlink(missing_ok=True)
    except OSError:
        pass  # a full disk or a read-only home costs the next search, not this one


@cache
def _code() -> str:
    """A digest of the source that finds and prices plans."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(__file__).parents[2] / "costmodel"):
        for file in sorted(package.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
