"""Predicted against measured: which term is named, and what a recalibration changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.plan.plan import Chunk, Plan, Prediction, Stage, StagePrediction, Transfer
from meshwright.compiler.report.calibration import Recalibration, refit
from meshwright.compiler.report.prediction_error import TERMS, compare, predicted_terms, without_skew
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.collectives import mesh_prices, p2p_seconds
from meshwright.costmodel.compute import op_price
from meshwright.costmodel.curves import Curve
from meshwright.costmodel.hardware import Device, Host, Link
from meshwright.costmodel.measured import OptimizerRate, RankTimes
from meshwright.costmodel.scaling import CalibrationFactors, scaled_cluster

MILLI = 1e-3
M = 4  # microbatches of every plan here


def a_cluster(hosts: int = 1, backward: bool = True) -> Cluster:
    """Two devices on one or two hosts, with measured curves."""
    points = ((1e6, 1e-4), (1e9, 1e-2), (1e11, 1.0))
    curves = [Curve("matmul", "float32", "flops", points)]
    if backward:
        curves.append(replace(curves[0], points=tuple((work, 2.1 * s) for work, s in points), direction="backward"))
    device = Device(
        "toy", 2**33, (("float32", 2e11),), 1e10, 1e-6, "a test", "cpu", curves=tuple(curves),
        optimizers=(OptimizerRate("AdamW", 1e-5, 1e-9, 0.0, 1),), action_s=1e-4,
    )  # fmt: skip
    link = Link("toy link", 2e-5, 1e9, "a test")
    return Cluster(f"toy:{hosts}", (Host(device, 2 // hosts, link),) * hosts, link, backend="gloo")


def priced(cluster: Cluster, stages: int, size: int = 1) -> Plan:
    """A plan of ``stages`` × ``size`` devices, priced on the cluster by hand: one matmul a stage, an all-reduce after
    it (where a stage has several devices), one boundary tensor, gradients and parameters."""
    parts, predicted = [], []
    edges: dict[tuple[int, int], float] = {}
    for stage in range(stages):
        devices = tuple(range(stage * size, (stage + 1) * size))
        device = cluster.device(devices[0])
        flops = (1 + stage) * 1e9
        forward = op_price("matmul", flops, 1e5, "float32", device).seconds
        backward = op_price("matmul", flops, 1e5, "float32", device, direction="backward").seconds
        reduce_s = gradient = transfer = 0.0
        if size > 1:
            (axis,) = mesh_prices(cluster, cluster.mesh()) if stages == 1 else (None,)
            assert axis is not None
            reduce_s, gradient = axis.seconds("all_reduce", 1e6), axis.seconds("all_reduce", 4e6)
        if stage:
            transfer = p2p_seconds(cluster, devices[0] - size, devices[0], 1e6)
            edges[stage - 1, stage] = transfer
        rate = device.optimizer_rate("AdamW")
        assert rate is not None
        optimizer = rate.alpha_s + rate.beta_s_per_byte * 4e6
        seconds = {
            "forward": forward, "backward_input": backward / 2, "backward_weight": backward / 2,
            "reshard": 2 * reduce_s, "internal": 0.0, "transfer": 2 * transfer, "gradient": gradient,
            "optimizer": optimizer, "host": 2 * device.action_s,
        }  # fmt: skip
        sends = {"x": ()} if stage < stages - 1 else {}
        chunk = Chunk((stage, stage + 1), {}, {}, {}, {}, sends)
        parts.append(Stage(devices, (size,) if size > 1 else (), (chunk,)))
        predicted.append(StagePrediction(
            forward + reduce_s + device.action_s, backward + reduce_s + device.action_s, gradient + optimizer, seconds,
            {"parameters": 4e6, "framework": 2e8}, {},
        ))  # fmt: skip
    clock = simulate(
        generate("1f1b", stages, M), [p.forward_s for p in predicted], [p.backward_s for p in predicted], edges,
        [p.step_s for p in predicted],
    )  # fmt: skip
    return Plan(
        "toy", {}, json.loads(cluster.to_json()), 8, M, "1f1b", "AdamW", ("a",) * stages, tuple(parts),
        tuple(Transfer("x", a, b, s, s) for (a, b), s in edges.items()),
        Prediction(clock.makespan_s, 0.0, tuple(predicted), 0.0, 0.0),
    )  # fmt: skip


def as_measured(plan: Plan, noise: float = 1.0) -> list[RankTimes]:
    """What ranks would measure if the plan's prediction were the truth."""
    out = []
    for index, (stage, terms) in enumerate(zip(plan.stages, predicted_terms(plan))):
        half = terms["collectives"] / 2
        for rank in stage.devices:
            out.append(RankTimes(
                rank, index, 20, plan.prediction.step_s * noise, terms["forward"], terms["backward"], half, half, 0.0,
                terms["waiting"], terms["gradient"], terms["optimizer"], terms["host"], 2**28,
            ))  # fmt: skip
    return out


def slower(cluster: Cluster, **changes: float) -> Cluster:
    """The cluster with some kinds of work longer by a factor, on every host."""
    hosts = len(cluster.hosts)
    by_host = ("forward", "backward", "optimizer")
    given = {name: (value,) * hosts if name in by_host else value for name, value in changes.items()}
    return scaled_cluster(cluster, replace(CalibrationFactors.none(hosts), **given))  # type: ignore[arg-type]


# ---- comparing


@pytest.mark.parametrize("stages", [1, 2])
def test_what_was_predicted_is_no_drift(stages: int) -> None:
    plan = priced(a_cluster(), stages)
    report = compare(plan, as_measured(plan))
    assert report.error == pytest.approx(0.0, abs=1e-9)
    assert not report.drifted
    assert report.findings() == []
    assert all(term.measured_s == pytest.approx(term.predicted_s, abs=1e-9) for term in report.terms)
    sums = [sum(terms.values()) for terms in predicted_terms(plan)]
    assert sums == pytest.approx([plan.prediction.step_s] * stages)  # every second of a stage is in one term


@pytest.mark.parametrize("name", ["forward", "backward", "collectives", "optimizer"])
def test_the_slow_term_is_named(name: str) -> None:
    size = 2 if name == "collectives" else 1
    cluster = a_cluster()
    plan = priced(cluster, 1, size)
    report = compare(plan, as_measured(priced(slower(cluster, **{name: 3.0}), 1, size)), threshold=0.01)
    (term, share), *rest = report.blamed()
    assert (term.stage, term.name) == (0, name)
    assert share > 0.9 if name != "collectives" else share > 0.4  # the gradients' collective is slow, too
    assert all(other.name in ("gradient", "collectives") for other, _ in rest)
    assert report.findings()[0].startswith(f"{name} of stage 0: predicted ")
    assert "+200 %" in report.findings()[0]
    assert "recalibrate()" in report.findings()[-1]


def test_the_slow_stage_is_blamed_and_not_those_that_wait_for_it() -> None:
    plan = priced(a_cluster(), 2)
    slow = plan.prediction.stages[0]
    extra = 3 * (slow.seconds["backward_input"] + slow.seconds["backward_weight"])
    stages = [replace(slow, backward_s=slow.backward_s + extra), plan.prediction.stages[1]]
    step_s = simulate(
        generate("1f1b", 2, M), [s.forward_s for s in stages], [s.backward_s for s in stages],
        {(0, 1): slow.seconds["transfer"]}, [s.step_s for s in stages],
    ).makespan_s  # fmt: skip
    ranks = as_measured(plan)
    first = replace(ranks[0], step_s=step_s, backward_s=ranks[0].backward_s + M * extra)
    second = replace(ranks[1], step_s=step_s, waiting_s=ranks[1].waiting_s + step_s - plan.prediction.step_s)
    report = compare(plan, [first, second])
    term, share = report.blamed()[0]
    assert (term.stage, term.name) == (0, "backward")
    assert share == pytest.approx(1.0, abs=0.15)
    assert not any(other.stage == 1 for other, _ in report.blamed())
    assert "backward of stage 0" in report.text()
    waited = next(t for t in report.terms if (t.stage, t.name) == (1, "waiting"))
    assert waited.measured_s > 2 * waited.predicted_s


def test_waiting_that_nothing_else_explains_is_blamed_itself() -> None:
    plan = priced(a_cluster(), 2)
    ranks = [
        replace(rank, step_s=2 * rank.step_s, waiting_s=rank.waiting_s + rank.step_s) for rank in as_measured(plan)
    ]
    term, share = compare(plan, ranks).blamed()[0]
    assert term.name == "waiting"
    assert share == pytest.approx(1.0, abs=0.05)


def test_who_comes_last_to_a_collective_does_not_wait() -> None:
    ranks = as_measured(priced(a_cluster(), 1, 2))
    own = [(3.0, 1.0), (1.0, 4.0)]  # seconds of the two meetings of each of two steps, rank by rank
    ranks = [
        replace(rank, steps=2, forward_exchange_s=f, backward_exchange_s=0.0, gradient_s=g)
        for rank, (f, g) in zip(ranks, own)
    ]
    apart = without_skew(ranks, [[[("F", f), ("G", g)]] * 2 for f, g in own])
    assert [(rank.forward_exchange_s, rank.gradient_s) for rank in apart] == [(1.0, 1.0)] * 2
    assert [rank.skew_s for rank in apart] == [2.0, 3.0]
    assert [rank.backward_s for rank in apart] == [rank.backward_s for rank in ranks]


def test_within_the_threshold_nothing_is_blamed() -> None:
    cluster = a_cluster()
    plan, ranks = priced(cluster, 1), as_measured(priced(slower(cluster, forward=1.3), 1))
    assert compare(plan, ranks, threshold=0.2).findings() == []
    assert compare(plan, ranks, threshold=0.02).findings() != []
    with pytest.raises(ValueError, match=r"positive fraction like 0\.2, but got 0"):
        compare(plan, ranks, threshold=0)


def test_a_report_is_readable_and_plain_data() -> None:
    plan = priced(a_cluster(), 2)
    report = compare(plan, [replace(rank, live_bytes=5 * 2**20) for rank in as_measured(plan)], notes=["a note"])
    assert report["measured_step_s"] == report.measured_step_s
    assert dict(report)["steps"] == 20
    assert json.loads(json.dumps(report.to_json()))["ranks"][1]["rank"] == 1
    text = report.text()
    assert all(word in text for word in ("step", "waiting share", "forward, each of 4", "5 MiB", "3.81 MiB", "a note"))
    assert all(len(line) <= 100 for line in text.splitlines())
    empty = compare(plan, [replace(rank, steps=0) for rank in as_measured(plan)])
    assert empty.measured_step_s is None
    assert empty["measured_step_s"] is None
    assert "no step has been measured yet" in empty.text()


# ---- refitting


@pytest.mark.parametrize("own_backward", [True, False])
@pytest.mark.parametrize(
    ("stages", "size", "changes"),
    [
        (1, 1, {"backward": 2.0}),
        (1, 1, {"forward": 0.5, "backward": 1.5, "optimizer": 6.0}),
        (1, 2, {"collectives": 5.0}),
        (2, 1, {"forward": 1.5, "backward": 2.0}),
        (2, 1, {"transfers": 8.0}),
    ],
)
def test_a_refit_finds_what_was_changed(stages: int, size: int, changes: dict[str, float], own_backward: bool) -> None:
    cluster = a_cluster(backward=own_backward)
    plan = priced(cluster, stages, size)
    hidden = cluster
    if "transfers" in changes:  # links carry them: here they serve nothing else
        hidden = slower(cluster, collectives=changes["transfers"])
    elif own_backward or "backward" not in changes:
        hidden = slower(cluster, **changes)
    else:
        hidden = slower(a_cluster(), **changes)
    truth = priced(hidden, stages, size)
    refitted, factors, current = refit(
        plan, compare(plan, as_measured(truth)), cluster, lambda other: priced(other, stages, size)
    )
    assert current.prediction.step_s == pytest.approx(truth.prediction.step_s, rel=0.02)
    assert refitted.fingerprint() == cluster.fingerprint()
    for terms, wanted in zip(predicted_terms(current), predicted_terms(truth)):
        for name in TERMS:
            assert terms[name] == pytest.approx(wanted[name], rel=0.05, abs=0.02 * truth.prediction.step_s), name
    if own_backward:
        found = factors.to_json()
        for name in ("forward", "backward", "optimizer", "collectives", "transfers"):
            assert found[name] == pytest.approx(changes.get(name, 1.0), rel=0.15), name
    assert Cluster.from_json(refitted.to_json()) == refitted


def test_hosts_are_refitted_apart() -> None:
    cluster = a_cluster(hosts=2)
    none = CalibrationFactors.none(2)
    hidden = scaled_cluster(cluster, replace(none, forward=(1.0, 3.0), backward=(1.0, 3.0)))
    plan, truth = priced(cluster, 2), priced(hidden, 2)
    _, factors, current = refit(plan, compare(plan, as_measured(truth)), cluster, lambda other: priced(other, 2))
    assert factors.forward == pytest.approx((1.0, 3.0), rel=0.05)
    assert factors.backward == pytest.approx((1.0, 3.0), rel=0.05)
    assert current.prediction.step_s == pytest.approx(truth.prediction.step_s, rel=0.02)


def test_host_time_is_added_to_every_action() -> None:
    cluster = a_cluster()
    plan = priced(cluster, 1)
    (rank,) = as_measured(plan)
    extra = 0.3 * plan.prediction.step_s
    late = replace(rank, step_s=rank.step_s + extra, host_s=rank.host_s + extra)
    refitted, factors, current = refit(plan, compare(plan, [late]), cluster, lambda other: priced(other, 1))
    assert factors.action_s[0] == pytest.approx(extra / (2 * M), rel=0.02)
    assert refitted.device(0).action_s == pytest.approx(1e-4 + extra / (2 * M), rel=0.02)
    assert (factors.forward[0], factors.backward[0]) == pytest.approx((1.0, 1.0), rel=0.02)
    assert current.prediction.step_s == pytest.approx(late.step_s, rel=0.02)


def test_whether_another_plan_wins() -> None:
    slow, fast = priced(slower(a_cluster(), forward=2.0), 1), priced(a_cluster(), 2)
    found = Recalibration(
        a_cluster(), replace(CalibrationFactors.none(1), forward=(2.0,)), slow.prediction.step_s, 0.1, slow,
        replace(fast, prediction=replace(fast.prediction, step_s=slow.prediction.step_s / 2)), 9,
    )  # fmt: skip
    assert found.wins
    assert found.gain == pytest.approx(0.5)
    assert "forward ×2" in found.text()
    assert "50 % faster" in found.text()
    assert not replace(found, best=slow).wins
    assert "no other plan would win" in replace(found, best=slow).text()


def test_no_steps_no_refit() -> None:
    plan = priced(a_cluster(), 1)
    report = compare(plan, [replace(rank, steps=0) for rank in as_measured(plan)])
    with pytest.raises(ValueError, match="a cluster is refitted to measured steps, but got a report of none"):
        refit(plan, report, a_cluster(), lambda other: plan)
