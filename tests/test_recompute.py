"""Recomputation by layer: what it saves and costs in the tables, in plans and in the document; who refuses it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from meshwright.cli import main
from meshwright.compiler.capture import capture
from meshwright.compiler.compose import Composer
from meshwright.compiler.driver import make_plan
from meshwright.compiler.eliminate import eliminate
from meshwright.compiler.ilp import solve_ilp
from meshwright.compiler.layers import cluster_layers
from meshwright.compiler.plan import Plan
from meshwright.compiler.pricing import MeshPricer
from meshwright.compiler.problem import Restriction
from meshwright.compiler.recompute import recompute_of
from meshwright.compiler.strategy import parse_strategy
from meshwright.costmodel.cluster import Cluster
from meshwright.runtime.stage import Session
from zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")


@pytest.fixture(scope="module")
def graph():
    return capture(*ZOO["gpt"](64, device="meta", layers=4))


def composer_of(graph, batch, mesh, mode, schedule="1f1b"):
    small = graph.with_batch(batch)
    layering = cluster_layers(small)
    again = recompute_of(small, layering, mode, schedule)
    return Composer(small, layering, MeshPricer(V100, 0, mesh), 4, recompute=again)


def plans(graph, strategy, microbatches=4):
    return [
        make_plan(graph, V100, 64, microbatches, parse_strategy(strategy), alternatives=False, recompute=mode)
        for mode in ("none", "layer")
    ]


# ---- tables


def test_one_device_keeps_the_borders_and_holds_one_layer(graph):
    """Against sums over the graph's own tensors: no code of the composition."""
    plain, again = composer_of(graph, 8, (), "none"), composer_of(graph, 8, (), "layer")
    layering, nodes = plain.layering, plain.graph.by_name()
    layers = range(len(layering.layers))
    border = [sum(nodes[name].meta["type"].nbytes for name in names) for names in layering.crossing]
    held = [float(plain.table(k).saved[0, 0]) - sum_saved_entries(plain, k) for k in layers]
    ours, theirs = again.intervals(), plain.intervals()
    for first in layers:
        for end in range(first + 1, len(layers) + 1):
            assert ours.saved[first, end] == pytest.approx(sum(border[first:end]))
            extra = ours.transient[first, end] - theirs.transient[first, end]
            assert extra == pytest.approx(max(held[first:end]))
    assert ours.saved[0, -1] + ours.transient[0, -1] < theirs.saved[0, -1] + theirs.transient[0, -1]
    assert np.array_equal(ours.resident, theirs.resident)


def sum_saved_entries(composer, layer):
    section = composer.table(layer).section
    return sum(float(section.saved[i][0]) for i in section.index("entry").values())


def test_every_layer_but_the_one_with_the_loss_pays_its_forward_again(graph):
    plain, again = composer_of(graph, 8, (), "none"), composer_of(graph, 8, (), "layer")
    pricer, grad, nodes = plain.pricer, plain.layering.needs_grad, plain.graph.by_name()
    last = len(plain.layering.layers) - 1
    for k in range(last + 1):
        extra = float(again.table(k).cost[0, 0] - plain.table(k).cost[0, 0])
        section, members = plain.table(k).section, plain.layering.layers[plain.table(k).layer].ops
        rows = zip(section.names, section.kinds, section.choices)
        ops = {name: choices[0] for name, kind, choices in rows if kind == "op" and name in members}
        forward = sum(pricer.op(nodes[name], choice, grad).forward_s for name, choice in ops.items())
        assert forward > 0
        assert extra == pytest.approx(0.0 if k == last else forward, rel=1e-9)
    gpipe = composer_of(graph, 8, (), "layer", "gpipe")  # holds all microbatches, so the last layer counts as well
    assert gpipe.table(last).cost[0, 0] > plain.table(last).cost[0, 0]


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_recomputed_tables_equal_the_integer_program(graph, mesh):
    composer = composer_of(graph, 8, mesh, "layer")
    rng = np.random.default_rng(0)
    for layer in (0, 2, 3, len(composer.layering.layers) - 1):
        table = composer.table(layer)
        finite = np.argwhere(np.isfinite(table.cost))
        for a, b in finite[rng.permutation(len(finite))[:2]]:
            fixed = composer.section(layer, layer + 1, [composer.states(layer)[a]], [composer.states(layer + 1)[b]])
            assert solve_ilp(fixed.problem(0.0)).seconds == pytest.approx(table.cost[a, b], rel=1e-6)


def test_recomputed_composition_equals_the_whole_problem(graph):
    composer = composer_of(graph, 8, (2,), "layer")
    end = len(composer.layering.layers) - 1
    first = end - 3
    path = composer.path(first, end)
    product = sum(composer.table(first + k).cost[a, b] for k, (a, b) in enumerate(pairwise(path)))
    into, out = composer.states(first)[path[0]], composer.states(end)[path[-1]]
    best = float(eliminate(composer.section(first, end, [into], [out]).problem(0.0)).cost)
    labels, _ = composer.choices(first, end)
    pinned = composer.afresh(restriction=Restriction(pinned=labels)).section(first, end, [into], [out])
    chosen = float(eliminate(pinned.problem(0.0)).cost)
    assert best * (1 - 1e-9) <= chosen <= product * (1 + 1e-9)


# ---- plans


@pytest.mark.parametrize("strategy", ["pp2", "pp2,dp2", "pp2,tp2", "tp2"])
def test_a_plan_needs_less_memory_and_takes_its_forward_longer(graph, strategy):
    plain, again = plans(graph, strategy)
    assert (plain.recompute, again.recompute) == ("none", "full")
    modes = [mode for stage in again.stages for chunk in stage.chunks for mode in chunk.recompute]
    assert modes == ["full"] * (len(again.layers) - 1) + ["none"]
    assert [c.layers for s in plain.stages for c in s.chunks] == [c.layers for s in again.stages for c in s.chunks]
    for before, after in zip(plain.prediction.stages, again.prediction.stages):
        assert before.seconds.get("recompute", 0.0) == 0.0
        assert 0 < after.seconds["recompute"] <= after.forward_s * (1 + 1e-9)
        assert after.peak_bytes < before.peak_bytes
    assert again.prediction.step_s > plain.prediction.step_s
    assert again.prediction.flops == plain.prediction.flops  # TFLOPS count the model's alone


def test_the_backward_grows_by_what_is_recomputed(graph):
    """On one device each there is nothing to choose, so the plans differ by the recomputation alone."""
    plain, again = plans(graph, "pp2")
    for before, after in zip(plain.prediction.stages, again.prediction.stages):
        assert after.forward_s == pytest.approx(before.forward_s)
        assert after.backward_s - before.backward_s == pytest.approx(after.seconds["recompute"])


def test_recomputation_makes_room(graph):
    """A device that holds no plan without recomputation holds one with it."""
    import dataclasses

    peaks = [p.prediction.stages[0].peak_bytes for p in plans(graph, "pp2")]
    assert peaks[1] < peaks[0]
    limit = int(sum(peaks) / 2)
    device = dataclasses.replace(V100.hosts[0].device, memory_bytes=limit)
    tight = dataclasses.replace(V100, hosts=(dataclasses.replace(V100.hosts[0], device=device, num_devices=2),))
    with pytest.raises(ValueError, match="missing"):
        make_plan(graph, tight, 64, 4, parse_strategy("pp2"), alternatives=False)
    plan = make_plan(graph, tight, 64, 4, parse_strategy("pp2"), alternatives=False, recompute="layer")
    assert max(stage.peak_bytes for stage in plan.prediction.stages) <= limit * 1.02


# ---- the document, the command line, the runtime


def test_the_document_keeps_it_and_old_documents_have_none(graph, tmp_path):
    plain, again = plans(graph, "pp2")
    again.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == again
    count = len(again.layers) - 1
    assert f"recompute full ×{count}, none" in again.explain()
    assert "recompute" not in plain.explain().split("Stages")[0]
    document = again.to_json()
    document["stages"][0]["chunks"][0]["recompute"][0] = "some"
    assert any("recompute 'some' is none of" in fault for fault in Plan.from_json(document).check())
    document["stages"][0]["chunks"][0]["recompute"] = ["full"]
    assert any("recompute has 1 modes for the" in fault for fault in Plan.from_json(document).check())


@pytest.mark.parametrize("mode", ["none", "layer"])
def test_documents_of_version_1_are_read(graph, mode):
    plan = plans(graph, "pp2")[mode == "layer"]
    document = plan.to_json()
    for stage in document["stages"]:
        del stage["wire"]
        for chunk in stage["chunks"]:
            del chunk["recompute"]
    for transfer in document["transfers"]:
        del transfer["source_chunk"], transfer["target_chunk"]
    del document["precision"]
    document |= {"version": 1, "recompute": mode}
    read = Plan.from_json(document)
    assert read.version == 2
    assert [chunk.recompute for stage in read.stages for chunk in stage.chunks] == [
        chunk.recompute for stage in plan.stages for chunk in stage.chunks
    ]
    assert replace(read, stages=plan.stages) == plan
    if mode == "none":
        del document["recompute"]
        assert Plan.from_json(document) == read


def test_an_unknown_mode_is_refused(graph):
    with pytest.raises(ValueError, match="'none', 'selective', 'full', but got 'block'"):
        make_plan(graph, V100, 64, recompute="block")


def test_the_runtime_refuses_such_a_plan(graph):
    with pytest.raises(ValueError, match=r"recompute 'full' \(\d+ layers\); plan again"):
        Session(plans(graph, "pp2")[1], (), None)


def test_the_command_line_asks_for_it(tmp_path, capsys):
    file = tmp_path / "plan.json"
    words = ["gpt-demo", "--cluster", "p3.16xlarge:1", "--strategy", "pp2", "--microbatches", "4"]
    assert main(["plan", *words, "--recompute", "layer", "--json", "-o", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["recompute"] == "full"
    assert Plan.load(file).recompute == "full"
