"""The tables that predictions are made from, and the predictions.

Every prediction is made before its plan has run. "local" is ``Cluster.local()``: two seconds of op times and assumed
links. "grid" is a profile of the ranks at hand: op times by kind and size, the collectives of these groups; it has seen
none of the models. "ops" adds the ops of the plans by their exact signature, each measured alone, never a whole plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import meshwright as mw
import torch.distributed as dist
from contest.sleeping import RATE_FLOPS_PER_S
from meshwright.compiler.capture import capture
from meshwright.compiler.driver import make_plan
from meshwright.compiler.graph import Graph
from meshwright.compiler.plan import Plan, Prediction
from meshwright.compiler.strategy import Strategy, parse_strategy
from meshwright.costmodel.hardware import Device

from .targets import TARGETS
from .trials import SLEEPING, Trial

__all__ = ["Forecast", "forecasts"]


@dataclass(frozen=True)
class Forecast:
    """The plan of a trial, and its predictions by the name of the table."""

    plan: Plan
    predictions: dict[str, Prediction]


def forecasts(trials: Sequence[Trial], budget_s: float) -> list[Forecast]:
    """One per trial, alike on every rank. Collective: profiles the ranks at hand."""
    graphs = {name: capture(TARGETS[name].on_meta(), TARGETS[name].batch(8)) for name in {t.target for t in trials}}
    cluster = _shared(lambda: mw.Cluster.local(dist.get_world_size()))
    if trials[0].part in SLEEPING:
        cluster = pretended(cluster)
    plans = [_planned(trial, graphs[trial.target], cluster) for trial in trials]
    return [Forecast(plan, {"local": plan.prediction}) for plan in plans]


def pretended(cluster: mw.Cluster) -> mw.Cluster:
    """The cluster with the matmul rate of the sleeping layers; all that does not sleep keeps its measured price."""

    def slowed(device: Device) -> Device:
        curves = tuple(curve for curve in device.curves if curve.kind != "matmul")
        return replace(device, flops_per_s=(("float32", RATE_FLOPS_PER_S),), curves=curves)

    return replace(cluster, hosts=tuple(replace(host, device=slowed(host.device)) for host in cluster.hosts))


def _planned(trial: Trial, graph: Graph, cluster: mw.Cluster) -> Plan:
    """Rank 0's plan of the trial, on every rank."""

    def make() -> dict[str, Any]:
        strategy = parse_strategy(trial.strategy) or Strategy()
        name = TARGETS[trial.target].optimizer
        plan = make_plan(graph, cluster, trial.batch, trial.microbatches, strategy, optimizer=name, alternatives=False)
        return plan.to_json()

    return Plan.from_json(_shared(make))


def _shared(make: Callable[[], Any]) -> Any:
    """What ``make`` gives on rank 0, on every rank. Raises everywhere what it raises there."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told = [make(), None]
        except Exception as error:
            told = [None, error]
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]
