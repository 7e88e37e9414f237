"""Forced divisions into stages, and the arithmetic of ``benchmarks/published.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from meshwright.compiler.capture import capture
from meshwright.compiler.driver import make_plan
from meshwright.compiler.graph import op_name
from meshwright.compiler.layers import cluster_layers
from meshwright.compiler.pricing import MeshPricer
from meshwright.compiler.rules import mesh_choices, rule_for
from meshwright.compiler.strategy import StageShape, Strategy, divide, parse_strategy
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.compute import SCORE_BYTES, op_price
from meshwright.models import gpt_flops
from scalar_composer import Composer
from zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    sys.path.insert(0, str(BENCHMARK.parent))  # as python does for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARK.parent))
    return module


@pytest.fixture(scope="module")
def graph():
    return capture(*ZOO["gpt"](64, device="meta", layers=8))


# ---- divisions


def test_a_division_reads_as_it_is_written():
    strategy = parse_strategy(" 2:dp2+2:dp2 + 4:dp2,tp2")
    assert strategy == Strategy(stages=(StageShape(2, 2), StageShape(2, 2), StageShape(4, 2, 2)))
    assert str(strategy) == "2:dp2 + 2:dp2 + 4:dp2,tp2"
    assert parse_strategy(str(strategy)) == parse_strategy(strategy.to_json()) == strategy
    assert (strategy.num_stages, strategy.num_devices, strategy.data_parts) == (3, 8, 2)
    uniform = parse_strategy("pp2,tp2")
    assert parse_strategy(uniform.to_json()) == parse_strategy(str(uniform)) == uniform
    assert parse_strategy("1:dp3 + 1:dp2").data_parts == 6


@pytest.mark.parametrize("text", ["2:dp2 + x:dp1", "0:dp1 + 1:dp1", "1:pp2", "1:dp0", "1:dp2 +", "1:dp2 2:dp1"])
def test_what_is_no_division_is_refused(text):
    with pytest.raises(ValueError, match="a division gives each stage a share"):
        parse_strategy(text)


def test_a_division_and_a_uniform_shape_exclude_each_other():
    with pytest.raises(ValueError, match="leave out one of them"):
        Strategy(pp=2, stages=(StageShape(1),))


def test_blocks_stay_whole_and_the_ends_go_to_the_ends():
    layers = ["embed", "position", *["attention", "feed"] * 8, "head"]
    assert divide(layers, [4, 4]) == [0, 10, 19]
    assert divide(layers, [2, 2, 4]) == [0, 6, 10, 19]
    assert divide(layers, [1, 2]) == [0, 8, 19]  # a third of 8 blocks: 3 is nearest, and no block is cut
    assert divide(layers, [1]) == [0, 19]
    assert divide(["a", "b", "c", "d"], [1, 1]) == [0, 2, 4]
    with pytest.raises(ValueError, match="every stage of a division needs a layer"):
        divide(["a", "b"], [1, 1, 1])


def test_a_division_gives_exactly_these_stages(graph):
    plan = make_plan(graph, V100, 64, 8, parse_strategy("2:dp1 + 2:dp2 + 4:dp2,tp2"), alternatives=False)
    names = [[plan.layers[k] for k in range(*stage.chunks[0].layers)] for stage in plan.stages]
    blocks = [sorted({name.split(".")[1] for name in stage if name.startswith("blocks.")}) for stage in names]
    assert blocks == [["0", "1"], ["2", "3"], ["4", "5", "6", "7"]]
    assert [name for stage in names for name in stage] == list(plan.layers)
    assert [stage.devices for stage in plan.stages] == [(0,), (1, 2), (3, 4, 5, 6)]
    assert [stage.mesh_shape for stage in plan.stages] == [(), (2,), (2, 2)]
    assert plan.provenance["strategy"] == "2:dp1 + 2:dp2 + 4:dp2,tp2"
    assert "asked for: 2:dp1 + 2:dp2 + 4:dp2,tp2" in plan.explain()
    assert plan.check() == []


def test_a_division_like_the_uniform_shape_costs_the_same(graph):
    """Where the free search cuts at the same layer, both are one plan."""
    forced = make_plan(graph, V100, 64, 8, parse_strategy("pp2,dp2"), alternatives=False)
    layers = [len(range(*stage.chunks[0].layers)) for stage in forced.stages]
    divided = make_plan(graph, V100, 64, 8, parse_strategy("4:dp2 + 4:dp2"), alternatives=False)
    assert divided.prediction.step_s >= forced.prediction.step_s * (1 - 1e-9)
    if layers == [len(range(*stage.chunks[0].layers)) for stage in divided.stages]:
        assert divided.stages == forced.stages


def test_a_division_that_does_not_suit_is_refused(graph):
    with pytest.raises(ValueError, match="needs 12 devices"):
        make_plan(graph, V100, 64, 8, parse_strategy("1:dp4 + 1:dp8"))
    with pytest.raises(ValueError, match="dp cuts every microbatch evenly"):
        make_plan(graph, V100, 64, 8, parse_strategy("1:dp1 + 1:dp3"))
    with pytest.raises(ValueError, match="asks for 40 stages"):
        make_plan(graph, Cluster.preset("p3.16xlarge", 8), 64, 8, parse_strategy(" + ".join(["1:dp1"] * 40)))


# ---- the benchmark


def test_the_published_count_of_flops(published):
    """MODELS: the model's own FLOPs are 0.775 and 0.759 of what the published figures count; the regression row's
    seconds and TFLOPS agree with each other."""
    by_name = {row.target: row for row in published.ROWS}
    for target, share in (("gpt-350m", 0.775), ("gpt-2.6b", 0.759)):
        row = by_name[target]
        ours = gpt_flops(row.batch, 1024, row.layers, row.hidden, 51200)
        assert ours / row.counted_flops == pytest.approx(share, abs=5e-4)
    regression = published.REGRESSION
    assert regression.counted_tflops(regression.step_s) == pytest.approx(regression.tflops, rel=1e-3)


def test_the_published_plans_use_all_gpus_and_divide_their_microbatches(published):
    for row in (*published.ROWS, published.REGRESSION):
        strategy = parse_strategy(row.division)
        assert strategy.num_devices == row.gpus == published.cluster_of(row.gpus).num_devices
        assert (row.batch // row.microbatches) % strategy.data_parts == 0


def test_a_row_is_predicted(published):
    row = published.Row("tiny", 4, 64, 4, 2, 32, 4, "1:dp1 + 1:dp1", tflops=1.0, step_s=1.0, peak_gib=1.0)
    graph = published.captured(row)
    plan = published.published_plan(row, graph)
    assert not plan["lifted"]
    assert plan["recompute"] == "full"
    assert plan["ratio_step"] == plan["step_s"]
    assert plan["ratio_tflops"] == pytest.approx(row.counted_tflops(plan["step_s"]))
    assert len(plan["stages"]) == 2
    own = published.own_plan(row, graph)
    assert own["step_s"] <= plan["step_s"] * (1 + 1e-9)


# ---- what the rows taught the model


def test_attention_without_a_fused_kernel_pays_for_its_scores():
    """Twice the head size is twice the FLOPs: of a fused kernel twice the time, of the V100's less, as the scores are
    the same; half the heads of twice the size are half the scores."""
    v100, a100 = V100.device(0), Cluster.preset("dgx-a100-40").device(0)

    def seconds(device, heads, size):
        shape = (4, heads, 1024, size)
        flops = 4.0 * 4 * heads * 1024**2 * size
        price = op_price("attention", flops, 8.0 * 4 * heads * 1024 * size, torch.float16, device, shapes=(shape,) * 4)
        return price.seconds - device.launch_s

    scores = SCORE_BYTES * 4 * 16 * 1024**2 / (v100.memory_bytes_per_s * 0.8)
    assert seconds(v100, 16, 64) == pytest.approx(scores + 4.0 * 4 * 16 * 1024**2 * 64 / (0.65 * 125e12))
    assert 1.1 < seconds(v100, 16, 128) / seconds(v100, 16, 64) < 1.5
    assert seconds(v100, 8, 128) < 0.7 * seconds(v100, 16, 64)
    assert seconds(a100, 16, 128) == pytest.approx(2 * seconds(a100, 16, 64))
    assert seconds(a100, 8, 128) == pytest.approx(seconds(a100, 16, 64))


def test_attention_costs_two_forwards_backward(graph):
    small = graph.with_batch(8)
    pricer = MeshPricer(V100, 0, ())
    grad = cluster_layers(small).needs_grad
    attention = [n for n in small.ops() if op_name(n) == "aten.scaled_dot_product_attention.default"]
    price = pricer.op(attention[0], mesh_choices(attention[0], ())[0], grad)
    added = price.forward_s * 0.1  # sums of cotangents, where an operand has several consumers
    assert 2 * price.forward_s <= price.backward_s <= 2 * price.forward_s + added
    assert price.flops == pytest.approx(3 * rule_for(attention[0]).flops(attention[0]))


def test_the_state_of_an_exit_counts_the_way_back(graph):
    """Between hosts a stage of four devices wants its cotangents cut, not four times whole."""
    small = graph.with_batch(16)
    two = Cluster.preset("p3.16xlarge", 2)
    composer = Composer(small, cluster_layers(small), MeshPricer(two, 4, (4,)), 4)
    boundary = len(composer.layering.layers) // 2
    states, seconds = composer.states(boundary), composer.exit_seconds(boundary)
    sizes = [composer.pricer.local_bytes(small.by_name()[name].meta["type"], state[t].cotangent)
             for state in states for t, name in enumerate(composer.layering.crossing[boundary])]  # fmt: skip
    assert len(set(sizes)) > 1
    order = [seconds[i] for i in sorted(range(len(sizes)), key=sizes.__getitem__)]
    assert order == sorted(order)
    assert order[0] < order[-1]
    assert not composer.exit_seconds(len(composer.layering.layers)).any()
