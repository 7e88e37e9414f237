"""Divisions of the model into stages of unlike shapes, as a strategy asks for them."""

from __future__ import annotations

import pytest
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.search.parallel_shape import StageShape, Strategy, divide, parse_strategy
from meshwright.costmodel.cluster import Cluster

from tests.support.planning import make_plan
from tests.support.zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")


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
    plan = make_plan(graph, V100, 64, 8, parse_strategy("2:dp1 + 2:dp2 + 4:dp2,tp2"))
    names = [[plan.layers[k] for k in range(*stage.chunks[0].layers)] for stage in plan.stages]
    blocks = [sorted({name.split(".")[1] for name in stage if name.startswith("blocks.")}) for stage in names]
    assert blocks == [["0", "1"], ["2", "3"], ["4", "5", "6", "7"]]
    assert [name for stage in names for name in stage] == list(plan.layers)
    assert [stage.devices for stage in plan.stages] == [(0,), (1, 2), (3, 4, 5, 6)]
    assert [stage.mesh_shape for stage in plan.stages] == [(), (2,), (2, 2)]
    assert plan.provenance["strategy"] == "2:dp1 + 2:dp2 + 4:dp2,tp2"
    assert "shape was given: 2:dp1 + 2:dp2 + 4:dp2,tp2" in plan.explain()
    assert plan.check() == []


def test_a_division_like_the_uniform_shape_costs_the_same(graph):
    """Where the free search cuts at the same layer, both are one plan."""
    forced = make_plan(graph, V100, 64, 8, parse_strategy("pp2,dp2"))
    layers = [len(range(*stage.chunks[0].layers)) for stage in forced.stages]
    divided = make_plan(graph, V100, 64, 8, parse_strategy("4:dp2 + 4:dp2"))
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
