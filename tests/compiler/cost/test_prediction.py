"""What a plan predicts: where its seconds come from, what hides, what several stages do together, and other prices."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from meshwright.compiler.cost.gradient_reduction import (
    Bucket,
    Gradient,
    hidden_seconds,
    lower_by_overlap,
    make_buckets,
    max_hidden_seconds,
)
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.cost.signature import plan_probes
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.intra_op.stage_cost import CAUSES, STEP_CAUSES
from meshwright.compiler.ir.graph import Graph, TensorType
from meshwright.compiler.ir.spec import parse_spec, without_partials
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.plan.cross_mesh import MeshLayout, tiles
from meshwright.compiler.plan.plan import Plan, Stage
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.parallel_shape import Strategy
from meshwright.compiler.search.predict import _post, simulate_plan
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.collectives import mesh_prices
from meshwright.costmodel.measured import CollectiveMeasurement, OpTime, OptimizerRate, Piece
from meshwright.models.architectures import Llama
from meshwright.runtime.parameters.gradients import _buckets
from torch import nn

from tests.support import zoo
from tests.support.graphs import graph_of, shared_plan
from tests.support.planning import make_plan

CLUSTER = Cluster.parse("p3.16xlarge:1")
SHAPES = [Strategy(1, 1, 1), Strategy(1, 4, 1), Strategy(1, 2, 2), Strategy(2, 1, 2), Strategy(2, 2, 1)]


def planned(graph: Graph, cluster: Cluster, strategy: Strategy, microbatches: int = 2, **kwargs: str) -> Plan:
    return shared_plan(graph, cluster, 8, microbatches, strategy, **kwargs)


def with_device(cluster: Cluster, **changes: object) -> Cluster:
    hosts = tuple(replace(h, device=replace(h.device, **changes)) for h in cluster.hosts)  # type: ignore[arg-type]
    return replace(cluster, hosts=hosts)


@pytest.mark.parametrize("strategy", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_causes_add_up_to_the_actions(name: str, strategy: Strategy) -> None:
    plan = planned(graph_of(name), CLUSTER, strategy)
    for stage in plan.prediction.stages:
        assert set(stage.seconds) == set(CAUSES)
        each = sum(s for cause, s in stage.seconds.items() if cause not in (*STEP_CAUSES, "transfer"))
        assert each == pytest.approx(stage.forward_s + stage.backward_s)
        once = sum(stage.seconds[cause] for cause in STEP_CAUSES if cause != "overlapped")
        assert once == pytest.approx(stage.step_s)
    busy = max(plan.microbatches * (s.forward_s + s.backward_s) + s.step_s for s in plan.prediction.stages)
    assert sum(plan.prediction.sources.values()) == pytest.approx(busy)
    assert simulate_plan(plan).makespan_s == pytest.approx(plan.prediction.step_s)
    assert plan.prediction.bound_s <= plan.prediction.step_s


@pytest.mark.parametrize("strategy", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["gpt", "convnet", "t5"])
def test_the_same_cluster_gives_the_same_prices(name: str, strategy: Strategy) -> None:
    graph = graph_of(name)
    plan = planned(graph, CLUSTER, strategy)
    again = reprice(plan, graph, CLUSTER)
    assert again.stages == plan.stages
    assert [(t.node, t.source, t.target) for t in again.transfers] == [
        (t.node, t.source, t.target) for t in plan.transfers
    ]
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
    for new, old in zip(again.prediction.stages, plan.prediction.stages):
        assert new.seconds == pytest.approx(old.seconds, rel=1e-9, abs=1e-15)
        assert new.memory_bytes == pytest.approx(old.memory_bytes)
        assert new.collectives == old.collectives


def test_recomputation_is_repriced_too() -> None:
    graph = graph_of("gpt")
    plan = planned(graph, CLUSTER, Strategy(1, 2, 1), recompute="layer")
    assert plan.prediction.stages[0].seconds["recompute"] > 0
    assert reprice(plan, graph, CLUSTER).prediction.step_s == pytest.approx(plan.prediction.step_s)


def test_slower_compute_takes_longer_and_nothing_else() -> None:
    graph = graph_of("gpt")
    device = replace(CLUSTER.device(0), launch_s=0.0)
    half = {
        "flops_per_s": tuple((dtype, rate / 2) for dtype, rate in device.flops_per_s),
        "memory_bytes_per_s": device.memory_bytes_per_s / 2,
    }
    fast = with_device(CLUSTER, launch_s=0.0)
    plan = planned(graph, fast, Strategy(2, 1, 2))
    slow = reprice(plan, graph, with_device(fast, **half))
    for new, old in zip(slow.prediction.stages, plan.prediction.stages):
        for cause in ("forward", "backward_input", "backward_weight", "optimizer"):
            assert new.seconds[cause] == pytest.approx(2 * old.seconds[cause])
        assert new.seconds["internal"] == pytest.approx(old.seconds["internal"])
        assert new.seconds["transfer"] == pytest.approx(old.seconds["transfer"])
    assert slow.cluster != plan.cluster


def test_repricing_refuses_another_size() -> None:
    graph = graph_of("mlp")
    plan = planned(graph, CLUSTER, Strategy(1, 2, 1))
    with pytest.raises(ValueError, match="as many devices as it is for, but got a cluster of 2"):
        reprice(plan, graph, replace(CLUSTER, hosts=(replace(CLUSTER.hosts[0], num_devices=2),)))


# ---- what was measured


def measured_everywhere(graph: Graph, plan: Plan, cluster: Cluster) -> Cluster:
    """The cluster with an exact time for every op of the plan: 1 s forward, 2 s and 4 s backward."""
    times = tuple(OpTime(text, 1.0, 2.0, 4.0, 3) for text in plan_probes(graph, plan))
    rates = (OptimizerRate("AdamW", 1e-5, 1e-9, 0.0, 3),)
    return with_device(cluster, op_times=times, optimizers=rates, action_s=0.5)


def test_exact_times_are_used_for_every_op_that_has_one() -> None:
    graph = graph_of("gpt")
    plan = planned(graph, CLUSTER, Strategy(1, 1, 1))
    exact = reprice(plan, graph, measured_everywhere(graph, plan, CLUSTER))
    stage = exact.prediction.stages[0]
    assert stage.seconds["host"] == 1.0
    named = stage.seconds["forward"]
    assert named == pytest.approx(round(named), abs=1e-4)  # a second each, and views beside
    assert exact.prediction.sources["measured"] / sum(exact.prediction.sources.values()) > 0.999
    assert "100 % measured as they are" in exact.explain()
    numbers = [node.meta["type"] for node in graph.placeholders("parameter")]
    assert stage.seconds["optimizer"] == pytest.approx(sum(1e-5 + 1e-9 * kind.nbytes for kind in numbers))


@pytest.mark.parametrize(("optimizer", "itemsize", "rate_s"), [("AdamW", 2, 3e-9), ("AdamW+masters", 4, 1e-9)])
def test_an_update_is_priced_by_the_dtype_of_what_it_updates(optimizer: str, itemsize: int, rate_s: float) -> None:
    with torch.device("meta"):
        net = Llama(64, 1, 16, 32, 2, 2).to(torch.bfloat16)
    graph = capture(net, tuple(torch.zeros(2, 8, 8, dtype=torch.int64, device="meta").unbind(0)))
    rates = (OptimizerRate("AdamW", 0.0, 1e-9, 0.0, 1), OptimizerRate("AdamW", 0.0, 3e-9, 0.0, 1, "bfloat16"))
    plan = planned(graph, with_device(CLUSTER, optimizers=rates), Strategy(1, 1, 1), optimizer=optimizer)
    weights = sum(node.meta["type"].numel for node in graph.placeholders("parameter"))
    assert plan.prediction.stages[0].seconds["optimizer"] == pytest.approx(itemsize * weights * rate_s)


def test_half_the_ops_measured() -> None:
    graph = graph_of("gpt")
    plan = planned(graph, CLUSTER, Strategy(1, 1, 1))
    cluster = measured_everywhere(graph, plan, CLUSTER)
    some = tuple(time for time in cluster.device(0).op_times if "linear" in time.signature)
    half = reprice(plan, graph, with_device(CLUSTER, op_times=some))
    assert set(half.prediction.sources) >= {"measured", "roofline", "analytic"}
    assert "analytic" in half.explain()


def test_gradients_of_later_microbatches_are_added() -> None:
    graph = graph_of("gpt")
    one, four = (planned(graph, CLUSTER, Strategy(1, 1, 1), m).prediction.stages[0] for m in (1, 4))
    nbytes = sum(node.meta["type"].nbytes for node in graph.placeholders("parameter"))
    rate = CLUSTER.device(0).memory_bytes_per_s
    assert 4 * four.seconds["backward_weight"] - one.seconds["backward_weight"] > 3 * 3 * nbytes / rate


def test_wires_price_transfers_of_all_receivers_at_once() -> None:
    graph = graph_of("gpt")
    plan = planned(graph, CLUSTER, Strategy(2, 2, 1))
    one = CollectiveMeasurement("send", "backend", 2, 2, 1, (Piece(0, 1.0, 0.0),), (), 0.0, 1)
    two = CollectiveMeasurement("send", "backend", 2, 2, 2, (Piece(0, 3.0, 0.0),), (), 0.0, 1)
    again = reprice(plan, graph, replace(CLUSTER, wires=(one, two)))
    assert again.transfers
    for transfer in again.transfers:
        assert transfer.forward_s == 3.0  # two devices receive a block each
    assert again.prediction.stages[1].seconds["transfer"] == sum(t.forward_s + t.backward_s for t in again.transfers)


@pytest.mark.parametrize("strategy", [Strategy(2, 1, 2), Strategy(2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_starting_the_messages_of_the_runtime_keeps_the_sender(name: str, strategy: Strategy) -> None:
    graph = graph_of(name)
    plan = planned(graph, CLUSTER, strategy)
    again = reprice(plan, graph, with_device(CLUSTER, post_s=1.0, post_s_per_byte=1e-3))
    nodes, wanted = graph.with_batch(plan.microbatch_size).by_name(), [[0.0, 0.0] for _ in plan.stages]
    for transfer in plan.transfers:
        source, target = plan.stages[transfer.source], plan.stages[transfer.target]
        kind, spec = nodes[transfer.node].meta["type"], source.chunks[0].sends[transfer.node]
        pair = target.chunks[0].receives[transfer.node]
        here, there = (MeshLayout(s.devices, s.mesh_shape, p) for s, p in ((source, spec), (target, pair.value)))
        back = MeshLayout(target.devices, target.mesh_shape, without_partials(pair.cotangent))
        ways = [(0, transfer.source, here, there), (1, transfer.target, back, here)]
        for direction, stage, left, right in ways if transfer.backward_s else ways[:1]:
            for tile in tiles(kind.shape, left, right):
                wanted[stage][direction] += (1 + 1e-3 * prod(tile.shape) * kind.dtype.itemsize) / len(left.devices)
    assert all(ahead > 0 for ahead, _ in wanted[:-1])
    assert all(back > 0 for _, back in wanted[1:])
    for new, old, (ahead, back) in zip(again.prediction.stages, plan.prediction.stages, wanted, strict=True):
        assert new.forward_s - old.forward_s == pytest.approx(ahead)
        assert new.backward_s - old.backward_s == pytest.approx(back)
        assert new.seconds["sends"] == pytest.approx(ahead + back)


@pytest.mark.parametrize("ends", ["S0 -> S1", "S0 -> R", "R -> S0", "S1 -> S0", "S0 -> S0"])
@pytest.mark.parametrize(("left", "right"), [(2, 2), (4, 2), (2, 4)])
def test_blocks_that_fit_no_other_travel_in_several_messages(ends: str, left: int, right: int) -> None:
    kind, (sent, wanted) = TensorType((8, 16), torch.float32), map(parse_spec, ends.split(" -> "))
    source, target = Stage(tuple(range(left)), (left,), ()), Stage(tuple(range(left, left + right)), (right,), ())
    cluster = with_device(CLUSTER, post_s=1.0, post_s_per_byte=1e-3)
    messages = tiles(
        kind.shape, *(MeshLayout(s.devices, s.mesh_shape, p) for s, p in ((source, sent), (target, wanted)))
    )
    seconds = sum(1 + 1e-3 * 4 * prod(tile.shape) for tile in messages)
    assert _post(cluster, kind, (source, sent), (target, wanted)) == pytest.approx(seconds / left)


def test_tied_weights_and_the_loss_travel_at_the_end() -> None:
    tied = planned(graph_of("gpt"), CLUSTER, Strategy(2, 1, 1)).prediction.stages
    assert all(stage.seconds["tied"] > 0 and stage.seconds["loss"] > 0 for stage in tied)
    alone = planned(graph_of("convnet"), CLUSTER, Strategy(1, 8, 1), 1).prediction.stages[0]
    axis = mesh_prices(CLUSTER, Mesh.of(CLUSTER, 0, (8,)))[0]
    assert alone.seconds["tied"] == 0
    assert alone.seconds["loss"] == pytest.approx(axis.seconds("all_reduce", 4))  # its sum; no other stage is told


# ---- what hides


def test_buckets_are_those_of_the_runtime() -> None:
    sizes = [3_000, 700_000, 20, 5_000_000, 100, 8_000_000, 50, 60_000, 10]
    axes = [(0,), (0,), (), (0,), (1,), (0,), (0,), (0, 1), (0,)]
    leaves = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    real = _buckets([(leaf, axis, 0) for leaf, axis in zip(leaves, axes)], {}, 25 * 2**20)
    index = {id(leaf): str(k) for k, leaf in enumerate(leaves)}
    gradients = [Gradient(str(k), axis, 4.0 * size) for k, (size, axis) in enumerate(zip(sizes, axes))]
    ours = make_buckets(gradients)
    assert [(b.axes, [index[id(p)] for p in b.parameters]) for b in real] == [
        (b.axes, [g.name for g in b.gradients]) for b in ours
    ]


def test_only_what_runs_beside_the_backward_hides() -> None:
    early, late = Gradient("early", (0,), 1.0), Gradient("late", (0,), 1.0)
    buckets = [Bucket((0,), (early,)), Bucket((0,), (late,))]
    ready = {"early": 2.0, "late": 10.0}
    assert hidden_seconds(buckets, lambda _: 3.0, ready, 10.0, 1.0) == (6.0, 3.0)
    assert hidden_seconds(buckets, lambda _: 3.0, ready, 10.0, 0.5) == (6.0, 1.5)
    assert hidden_seconds(buckets, lambda _: 9.0, ready, 10.0, 1.0) == (18.0, 8.0)
    assert hidden_seconds(buckets, lambda _: 3.0, ready, 10.0, 0.0) == (6.0, 0.0)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_bound_holds_where_gradients_hide(microbatches: int) -> None:
    x = torch.empty(8, 1024, device="meta")
    graph = capture(zoo.MLP(1024).to("meta"), (x, x), {})
    hiding = with_device(CLUSTER, overlap=1.0)
    best = make_plan(graph, hiding, 8, microbatches)
    data = planned(graph, hiding, Strategy(1, 2, 1), microbatches)
    if microbatches > 1:  # else gradients may as well be summed one by one, where they arise
        assert data.prediction.stages[0].seconds["overlapped"] > 0
    assert best.prediction.bound_s <= min(data.prediction.step_s, best.prediction.step_s)


@pytest.mark.parametrize(("overlap", "m", "seconds", "least"), [(0.0, 4, 1.0, 1.0), (0.8, 4, 1e-9, 0.8e-9)])
def test_what_hides_lowers_the_bound(overlap: float, m: int, seconds: float, least: float) -> None:
    cluster = with_device(CLUSTER, overlap=overlap)
    hidden_s = max_hidden_seconds(graph_of("gpt"), cluster, "AdamW", [(2,), (4,), (2, 2)])
    assert lower_by_overlap(seconds, m, cluster, hidden_s) == pytest.approx(least)
    # beside a million seconds all gradients are nothing
    assert lower_by_overlap(1e6, m, cluster, hidden_s) == pytest.approx(1e6, rel=1e-6)


def test_the_search_never_asks_more_for_gradients_than_the_buckets_take() -> None:
    x = torch.empty(8, 1024, device="meta")
    graph = capture(zoo.MLP(1024).to("meta"), (x, x), {})
    plan = planned(graph, with_device(CLUSTER, overlap=0.0), Strategy(1, 4, 1), 2)
    pricer = MeshPricer(CLUSTER, 0, (4,))
    asked = sum(
        pricer.gradient_seconds(
            node.meta["type"], plan.stages[0].chunks[0].parameters[node.meta["source"].name].compute
        )
        for node in graph.placeholders("parameter")
    )
    assert 0 < asked <= plan.prediction.stages[0].seconds["gradient"]


# ---- the clock


def test_a_message_waits_for_its_receiver() -> None:
    schedule = generate("gpipe", 2, 3)
    # the second stage posts its receive of F2 when it comes to F1, after F0: the message takes longer than F1
    fast = simulate(schedule, [1.0, 5.0], [0.0, 0.0], {(0, 1): 4.0}, None, {(0, 1): 0.0})
    starts = [start for start, _, action in fast.timeline[1] if action.kind == "F"]
    assert starts == [5.0, 10.0, 15.0]
    slow = simulate(schedule, [1.0, 2.0], [0.0, 0.0], {(0, 1): 4.0}, None, {(0, 1): 0.0})
    assert [start for start, _, action in slow.timeline[1] if action.kind == "F"] == [5.0, 9.0, 13.0]


# ---- documents


def test_a_document_of_before_still_reads() -> None:
    graph = graph_of("gpt")
    plan = planned(graph, CLUSTER, Strategy(2, 1, 1))
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan
    del data["prediction"]["sources"]
    for transfer in data["transfers"]:
        del transfer["forward_s"], transfer["backward_s"]
    for stage in data["prediction"]["stages"]:
        old = stage["seconds"]
        stage["seconds"] = {
            "compute": old["forward"] + old["backward_input"] + old["backward_weight"],
            **{cause: old[cause] for cause in ("reshard", "internal", "transfer", "gradient", "optimizer")},
        }
    del data["seal"]  # documents had none
    old_plan = Plan.from_json(data)
    assert "compute" in old_plan.explain()
    assert "measured as they are" not in old_plan.explain()
    assert reprice(old_plan, graph, CLUSTER).prediction.step_s == pytest.approx(plan.prediction.step_s)
