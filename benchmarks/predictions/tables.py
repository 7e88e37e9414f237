"""The tables that predictions are made from, and the predictions.

Every prediction is made before its plan has run. "local" is ``Cluster.local()``: two seconds of op times and assumed
links. "grid" is a profile of the ranks at hand: op times by kind and size, the collectives of these groups; it has seen
none of the models. "ops" adds the ops of the plans by their exact signature, each measured alone, never a whole plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import torch.distributed as dist
from baselines.sleeping_cluster import PACE, sleeping_cluster
from meshwright.compiler.cost.signature import plan_probes
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.ir.probe import Probe
from meshwright.compiler.plan.plan import Plan, Prediction
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.driver import make_plan
from meshwright.compiler.search.parallel_shape import Strategy, parse_strategy
from meshwright.compiler.search.request import PlanRequest
from meshwright.runtime.profiling.cluster_profile import profile
from meshwright.runtime.transport.error_propagation import broadcast_from_rank0

from .targets import TARGETS
from .trials import SLEEPING, Trial

__all__ = ["Forecast", "forecasts"]


@dataclass(frozen=True)
class Forecast:
    """The plan of a trial, and its predictions by the name of the table."""

    plan: Plan
    predictions: dict[str, Prediction]


def forecasts(trials: Sequence[Trial], budget_s: float) -> list[Forecast]:
    """One per trial, alike on every rank. Collective: profiles the ranks at hand, within about ``budget_s`` seconds.

    The plans are those of the grid.
    """
    graphs = {name: capture(TARGETS[name].on_meta(), TARGETS[name].batch(8)) for name in _targets(trials)}
    sleeping = trials[0].part in SLEEPING
    tables: dict[str, mw.Cluster] = {}
    if not sleeping:
        tables["local"] = broadcast_from_rank0(lambda: mw.Cluster.local(dist.get_world_size()))
    pace = PACE if sleeping else None
    tables["grid"] = profile(budget_s=budget_s / 2, resume=False, pace=pace)
    planned = sleeping_cluster(tables["grid"]) if sleeping else tables["grid"]
    plans = [_planned(trial, graphs[trial.target], planned) for trial in trials]
    probes: dict[str, Probe] = {}
    for trial, plan in zip(trials, plans, strict=True):
        probes |= plan_probes(graphs[trial.target], plan)
    tables["ops"] = profile(
        budget_s=budget_s / 2, resume=False, base=tables["grid"], probes=list(probes.values()), pace=pace
    )
    if sleeping:
        tables = {name: sleeping_cluster(cluster) for name, cluster in tables.items()}
    return [
        Forecast(plan, {name: _priced(plan, graphs[trial.target], cluster) for name, cluster in tables.items()})
        for trial, plan in zip(trials, plans, strict=True)
    ]


def _targets(trials: Sequence[Trial]) -> list[str]:
    """In the same order on every rank."""
    return list(dict.fromkeys(trial.target for trial in trials))


def _priced(plan: Plan, graph: Graph, cluster: mw.Cluster) -> Prediction:
    """The prediction of the same decisions on another table."""
    return reprice(plan, graph, cluster).prediction


def _planned(trial: Trial, graph: Graph, cluster: mw.Cluster) -> Plan:
    """Rank 0's plan of the trial, on every rank."""

    def make() -> dict[str, Any]:
        strategy = parse_strategy(trial.strategy) or Strategy()
        name = TARGETS[trial.target].optimizer
        request = PlanRequest(
            trial.batch, trial.microbatches, strategy, "1f1b", name, "none", 0, sequence=False, alternatives=False
        )
        plan = make_plan(graph, cluster, request)
        return plan.to_json()

    return Plan.from_json(broadcast_from_rank0(make))
