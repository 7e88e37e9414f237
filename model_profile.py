"""Profile the exact ops of a model: plan with the known prices, measure the ops of the plans, and plan again.

Better prices can make another plan the best, whose ops are not measured yet. So this is repeated, at most ``ROUNDS``
times, until the best plan and the pure ones use measured ops alone. Every signature is measured once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch.distributed as dist

from .compiler.cost.signature import plan_probes
from .compiler.errors import InfeasibleError
from .compiler.ir.graph import Graph
from .compiler.ir.probe import Probe
from .compiler.plan.plan import Plan
from .compiler.search.driver import make_plan
from .compiler.search.parallel_shape import Strategy
from .compiler.search.request import PlanRequest
from .costmodel.cluster import Cluster
from .costmodel.profiler import Progress
from .runtime.profiling.cluster_profile import profile
from .runtime.transport.error_propagation import broadcast_from_rank0, fail_together

__all__ = ["ROUNDS", "candidates", "profile_model"]

ROUNDS = 3
#: the fraction of the remaining budget that each round may use; the first measures nearly everything
_BUDGET_SHARES = (0.7, 0.7, 1.0)
#: the least budget of a round: a shorter one measures nothing that a plan could rest on
_MIN_ROUND_S = 2.0


def profile_model(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    *,
    optimizer: str = "AdamW",
    budget_s: float = 30.0,
    path: str | None = None,
    progress: Progress | None = None,
    timeout_s: float = 60.0,
) -> tuple[Cluster, int]:
    """(``cluster`` with the times of the model's ops, signatures still unknown). Collective, with the same graph and
    cluster on every rank; the plans are rank 0's.

    Raises what planning raises: InfeasibleError if nothing fits, ValueError for a batch that cannot be cut.
    """
    started = perf_counter()
    unknown: dict[str, Probe] = {}
    for number in range(ROUNDS + 1):
        if progress is not None:
            progress("planning", min((perf_counter() - started) / budget_s, 1.0))
        plans = _from_rank_0(lambda cluster=cluster: candidates(graph, cluster, global_batch, optimizer))  # type: ignore[misc]
        unknown = {}
        with fail_together():
            for plan in plans:
                for text, probe in plan_probes(graph, plan).items():
                    if any(host.device.op_time(text) is None for host in cluster.hosts):
                        unknown[text] = probe
        remaining_s = budget_s - (perf_counter() - started)
        if not unknown or number == ROUNDS:
            break
        cluster = profile(
            budget_s=max(remaining_s * _BUDGET_SHARES[number], _MIN_ROUND_S),
            probes=list(unknown.values()),
            base=cluster,
            path=path,
            progress=progress,
            timeout_s=timeout_s,
        )
    return cluster, len(unknown)


def candidates(graph: Graph, cluster: Cluster, global_batch: int, optimizer: str) -> list[Plan]:
    """The best plan, and those of the pure strategies that fit."""
    request = PlanRequest(global_batch, optimizer=optimizer, executable=True, alternatives=False)
    plans = [make_plan(graph, cluster, request)]
    count = cluster.num_devices
    pure = [Strategy(dp=count), Strategy(tp=count), Strategy(pp=count)] if count > 1 else []
    for strategy in pure:
        try:
            plans.append(make_plan(graph, cluster, replace(request, strategy=strategy)))
        except (InfeasibleError, ValueError):
            continue  # more devices than layers or samples: no candidate
    return plans


def _from_rank_0(make: Callable[[], list[Plan]]) -> list[Plan]:
    """Rank 0's plans on every rank, or its error on every rank."""
    documents: list[dict[str, Any]] = []
    with fail_together():
        if dist.get_rank() == 0:
            documents = [plan.to_json() for plan in make()]
    return [Plan.from_json(document) for document in broadcast_from_rank0(lambda: documents)]
