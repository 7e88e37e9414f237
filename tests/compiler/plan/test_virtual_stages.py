"""Plans with several chunks per stage: priced, simulated, written, read and shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.pipeline.families import generate, virtual_order
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.plan.plan import Plan, Stage
from meshwright.compiler.plan.validation import require_valid, validate
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.predict import simulate_plan
from meshwright.costmodel.cluster import Cluster

from tests.support.planning import make_plan
from tests.support.zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")


@pytest.fixture(scope="module")
def graph():
    return capture(*ZOO["gpt"](64, device="meta", layers=4, tied=False))


@pytest.fixture(scope="module")
def four(graph):
    return make_plan(graph, V100, 64, 8, parse_strategy("pp4,tp2"))


def chunked(plan, graph, schedule):
    """The four stages of ``plan`` as chunks of two."""
    parts: list[list] = [[None, None], [None, None]]
    for (stage, chunk), each in zip(virtual_order(schedule, 2, 2), plan.stages, strict=True):
        parts[stage][chunk] = each.chunks[0]
    stages = tuple(Stage(plan.stages[s].devices, plan.stages[s].mesh_shape, tuple(row)) for s, row in enumerate(parts))
    return reprice(replace(plan, schedule=schedule, stages=stages, transfers=()), graph, V100)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_chunks_are_priced_as_the_stages_that_they_were(graph, four, schedule):
    plan = chunked(four, graph, schedule)
    assert plan.check() == []
    assert validate(plan, graph) == []
    before, places = four.prediction.stages, virtual_order(schedule, 2, 2)
    seen = plan.prediction.stages
    for (stage, chunk), old in zip(places, before, strict=True):
        forward, backward, weight = seen[stage].chunk_s[chunk]
        assert weight == pytest.approx(old.seconds["backward_weight"])
        if schedule == "interleaved":  # every border is one between stages, as before
            assert (forward, backward) == pytest.approx((old.forward_s, old.backward_s))
    for one in seen:
        assert one.forward_s == pytest.approx(sum(forward for forward, _, _ in one.chunk_s))
        assert one.backward_s == pytest.approx(sum(backward for _, backward, _ in one.chunk_s))
    borders = [(four.stages[k].chunks[0].sends, places[k], places[k + 1]) for k in range(3)]
    wanted = {(name, here, there) for sends, here, there in borders for name in sends if here[0] != there[0]}
    found = {(t.node, (t.source, t.source_chunk), (t.target, t.target_chunk)) for t in plan.transfers}
    assert found == wanted
    assert len(wanted) == (3 if schedule == "interleaved" else 2)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_the_step_is_that_of_the_schedule(graph, four, schedule):
    plan = chunked(four, graph, schedule)
    places = virtual_order(schedule, 2, 2)
    each = [plan.prediction.stages[s].chunk_s[c] for s, c in places]
    messages = {(places.index((t.source, t.source_chunk)), places.index((t.target, t.target_chunk))): t
                for t in plan.transfers}  # fmt: skip
    edges = [(k, k + 1) for k in range(3)]
    by_hand = simulate(
        generate(schedule, 2, 8, 2),
        [forward for forward, _, _ in each],
        [backward for _, backward, _ in each],
        {edge: messages[edge].forward_s if edge in messages else 0.0 for edge in edges},
        [stage.step_s for stage in plan.prediction.stages],
        {edge: messages[edge].backward_s if edge in messages else 0.0 for edge in edges},
        [weight for *_, weight in each],
    )
    assert plan.prediction.step_s == pytest.approx(by_hand.makespan_s)
    assert simulate_plan(plan).makespan_s == pytest.approx(plan.prediction.step_s)


def test_one_chunk_with_halves_of_backwards(graph, four):
    plan = reprice(replace(four, schedule="zb-h1"), graph, V100)
    assert plan.prediction.step_s < reprice(four, graph, V100).prediction.step_s
    assert "zb-h1" in plan.explain()
    assert not any("memory of stage" in note for note in plan.prediction.notes)


def test_the_document_is_read_and_shown(graph, four, tmp_path):
    plan = chunked(four, graph, "interleaved")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = plan.explain(graph)
    assert "interleaved with 2 chunks per stage" in text
    assert "not executable yet" not in text
    require_valid(plan, runnable=True)
    document = json.loads(json.dumps(plan.to_json()))
    document["transfers"][0]["target_chunk"] = 5
    assert any("has no chunk 5" in fault for fault in Plan.from_json(document).check())
