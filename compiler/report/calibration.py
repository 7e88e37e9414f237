"""Recalibration: a cluster refitted to the measurements of a run, so that the plan's prediction agrees with them.

Each kind of work has a factor, measured ÷ predicted seconds summed over the stages (on one host for what devices do)::

    forward, backward    op times of the host's devices; without measurements of the two apart, their peaks and rates
    optimizer            the rate of the plan's optimizer
    collectives          links and wires, by those inside actions and by what the gradients left exposed
    transfers            wires of kind "send": what makes the schedule's clock agree once all else is as measured
    host                 seconds of an action beyond its ops, a difference and no factor

Prices are not linear in these (launches, floors, overlap), so factors are applied, the plan is priced again, and what
is still off is applied once more. What no factor reaches is spread over all of them at the end: a refitted cluster
predicts this run's step. Sums of medians make one disturbed action or step of no weight; a kind of work that is under
a hundredth of the step keeps its price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ...costmodel.cluster import Cluster
from ...costmodel.collectives import p2p_seconds
from ...costmodel.measured import CollectiveMeasurement, OptimizerRate, Piece
from ...costmodel.scaling import LIMIT, CalibrationFactors, limited, scaled_cluster
from ..plan.plan import Plan
from ..text import count_text, seconds_text
from .prediction_error import Clock
from .step_report import Report

__all__ = ["Recalibration", "refit"]

_ROUNDS = 5
_TOLERANCE = 0.01  # relative: closer than this is agreement
_NEGLIGIBLE_SHARE = 0.01  # of the step: less is not worth a factor
_LEAST_GAIN = 0.03  # a plan must be faster by this fraction to be worth a change

Price = Callable[[Cluster], Plan]  # the plan's own decisions, priced on another cluster


@dataclass(frozen=True)
class Recalibration:
    """The result of ``recalibrate``: the refitted cluster with its factors, the running plan priced on it, and the best
    plan on it."""

    cluster: Cluster
    factors: CalibrationFactors
    measured_step_s: float
    #: of the running plan, before the refit
    predicted_step_s: float
    #: the running plan, priced again
    current: Plan
    #: the best plan on the refitted cluster
    best: Plan
    steps: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def gain(self) -> float:
        """The fraction of the running plan's time that the best plan saves; 0 if it is no faster."""
        now_s = self.current.prediction.step_s
        return max(0.0, 1 - self.best.prediction.step_s / now_s) if now_s else 0.0

    @property
    def wins(self) -> bool:
        """True if another plan is faster by enough to change."""
        same = (self.best.stages, self.best.microbatches) == (self.current.stages, self.current.microbatches)
        return not same and self.gain >= _LEAST_GAIN

    def text(self) -> str:
        """A few lines for people."""
        changed = [
            f"{name} {'+' + seconds_text(value) if name.startswith('action_s') else f'×{value:.3g}'}"
            for name, value in self.factors.to_json().items()
            if abs(value - (not name.startswith("action_s"))) > (1e-7 if name.startswith("action_s") else 0.005)
        ]
        verdict = "no other plan would win"
        if self.wins:
            verdict = f"would win, {100 * self.gain:.0f} % faster: parallelize(..., plan=found.best)"
        lines = [
            f"Recalibrated from {count_text(self.steps, 'step')}: {', '.join(changed) or 'nothing was off'}",
            f"  this plan  {_shape(self.current)}: {seconds_text(self.predicted_step_s)} predicted before, "
            f"{seconds_text(self.current.prediction.step_s)} now, {seconds_text(self.measured_step_s)} measured",
            f"  best plan  {_shape(self.best)}: {seconds_text(self.best.prediction.step_s)}; {verdict}",
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    __str__ = text


def _shape(plan: Plan) -> str:
    meshes = [
        (f"{len(list(run))} stages of " if count > 1 else "") + "×".join(map(str, shape or (1,)))
        for shape, run, count in (
            (shape, stages, len(stages))
            for shape, stages in ((key, list(group)) for key, group in groupby(s.mesh_shape for s in plan.stages))
        )
    ]
    return f"{', '.join(meshes)}, {count_text(plan.microbatches, 'microbatch')}"


# ---- refitting


def refit(plan: Plan, report: Report, cluster: Cluster, price: Price) -> tuple[Cluster, CalibrationFactors, Plan]:
    """(the refitted cluster, what was applied to ``cluster``, the plan priced on it).

    price: a cluster → the same plan with its prediction there. Raises ValueError for a report without steps.
    """
    if report.measured_step_s is None or report.measured_step_s <= 0:
        raise ValueError("a cluster is refitted to measured steps, but got a report of none; train a few first")
    measured: dict[tuple[int, str], float] = {(term.stage, term.name): term.measured_s for term in report.terms}
    hosts = [cluster.host_of(stage.devices[0]) for stage in plan.stages]
    factors = CalibrationFactors.none(len(cluster.hosts))
    current = price(cluster)
    cluster = refitted = _with_own_rates(cluster, current)
    forward = sum(stage.forward_s for stage in current.prediction.stages)
    both = forward + sum(stage.backward_s for stage in current.prediction.stages)
    share = forward / both if both else 1 / 3
    for _ in range(_ROUNDS):
        more = _still_off(current, measured, hosts, len(cluster.hosts), report.measured_step_s)
        if _is_nothing(more):
            break
        factors = factors.then(more)
        refitted = scaled_cluster(cluster, factors, share)
        current = price(refitted)
    for _ in range(_ROUNDS):  # what no term reaches
        ratio = report.measured_step_s / current.prediction.step_s
        if abs(ratio - 1) < _TOLERANCE:
            break
        factors = factors.all_by(ratio)
        refitted = scaled_cluster(cluster, factors, share)
        current = price(refitted)
    return refitted, factors, current


def _still_off(
    plan: Plan, measured: Mapping[tuple[int, str], float], hosts: Sequence[int], num_hosts: int, step_s: float
) -> CalibrationFactors:
    """The factors between a priced plan and the measurement."""
    clock = Clock(plan)
    stages = range(len(plan.stages))

    def ratio(names: Sequence[str], members: Sequence[int]) -> float:
        measured_s = sum(measured[stage, name] for stage in members for name in names)
        priced = sum(clock.expected[stage][name] for stage in members for name in names)
        if max(measured_s, priced) < _NEGLIGIBLE_SHARE * step_s * len(members) or measured_s <= 0 or priced <= 0:
            return 1.0
        return limited(measured_s / priced)

    of_host = [[stage for stage in stages if hosts[stage] == host] for host in range(num_hosts)]
    each = {
        names[0]: tuple(ratio(names, members) if members else 0.0 for members in of_host)
        for names in (["forward"], ["backward", "weights"], ["optimizer"])
    }
    # a host without a stage is as far off as the others
    filled = {
        name: tuple(value or sum(values) / max(sum(map(bool, values)), 1) for value in values)
        for name, values in each.items()
    }
    actions = 2 * plan.microbatches * plan.num_chunks
    action_s = tuple(
        sum(measured[stage, "host"] - clock.expected[stage]["host"] for stage in members) / actions / len(members)
        if members
        else 0.0
        for members in of_host
    )
    action_s = tuple(value if abs(value) * actions > _NEGLIGIBLE_SHARE * step_s else 0.0 for value in action_s)
    return CalibrationFactors(
        filled["forward"],
        filled["backward"],
        filled["optimizer"],
        action_s,
        ratio(["collectives", "gradient"], stages),
        _transfer_ratio(clock, measured, step_s),
    )


def _transfer_ratio(clock: Clock, measured: Mapping[tuple[int, str], float], step_s: float) -> float:
    """The factor on transfers that explains the rest of the step once all other terms are as measured."""
    if not clock.has_transfers:
        return 1.0
    terms = {stage: {name: s for (at, name), s in measured.items() if at == stage} for stage, _ in measured}
    replaced = {(stage, name): terms[stage] for stage, name in measured if name != "waiting"}
    low, high = 1 / LIMIT, LIMIT
    if abs(clock.run(replaced) - step_s) < _TOLERANCE * step_s:
        return 1.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        if clock.run(replaced, transfers=middle) < step_s:
            low = middle
        else:
            high = middle
    factor = (low * high) ** 0.5
    # where transfers hide behind ops, or the step lacks nothing, their factor means nothing
    return factor if 1 / 20 < factor < 20 else 1.0


def _is_nothing(factors: CalibrationFactors) -> bool:
    values = (*factors.forward, *factors.backward, *factors.optimizer, factors.collectives, factors.transfers)
    return all(abs(value - 1) < _TOLERANCE for value in values) and not any(factors.action_s)


# ---- entries of the cluster that factors can change


def _with_own_rates(cluster: Cluster, plan: Plan) -> Cluster:
    """The same prices, but with entries of their own for the plan's optimizer and its transfers, which else follow from
    rates that serve other work too."""
    update = _optimizer_rate_of(plan)
    hosts = tuple(
        host
        if update is None or host.device.optimizer_rate(plan.optimizer)
        else replace(host, device=replace(host.device, optimizers=(*host.device.optimizers, update)))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts, wires=(*cluster.wires, *_send_wires(cluster, plan)))


def _optimizer_rate_of(plan: Plan) -> OptimizerRate | None:
    """The rate that the plan's prediction amounts to, where nothing was measured."""
    seconds = sum(stage.seconds.get("optimizer", 0.0) for stage in plan.prediction.stages)
    size = sum(stage.memory_bytes.get("parameters", 0.0) for stage in plan.prediction.stages)
    if seconds <= 0 or size <= 0:
        return None
    return OptimizerRate(plan.optimizer, 0.0, seconds / size, 0.0, 0)


def _send_wires(cluster: Cluster, plan: Plan) -> list[CollectiveMeasurement]:
    """Wires for transfers where none was measured, at the analytic price: links serve collectives too, and the two have
    factors of their own."""
    if not plan.transfers or any(wire.kind == "send" for wire in cluster.wires):
        return []
    wires: dict[int, CollectiveMeasurement] = {}
    large = float(2**30)
    for transfer in plan.transfers:
        sender, receiver = plan.stages[transfer.source].devices[-1], plan.stages[transfer.target].devices[0]
        members = 2 if cluster.host_of(sender) == cluster.host_of(receiver) else 1
        alpha = p2p_seconds(cluster, sender, receiver, 1.0)
        piece = Piece(0.0, alpha, (p2p_seconds(cluster, sender, receiver, large) - alpha) / large)
        wires[members] = CollectiveMeasurement("send", "backend", 2, members, 1, (piece,), (), 0.0, 0)
    return list(wires.values())
