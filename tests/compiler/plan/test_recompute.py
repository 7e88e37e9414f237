"""Recomputation by layer: what it saves and costs in the tables, in plans and in the document."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from meshwright.cli import main
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.intra_op.restriction import Restriction
from meshwright.compiler.intra_op.solver.elimination import eliminate
from meshwright.compiler.intra_op.solver.ilp import solve_ilp
from meshwright.compiler.intra_op.solver.problem import evaluate
from meshwright.compiler.intra_op.stage import solve_section, transient_bytes
from meshwright.compiler.ir.graph import op_name, types_of
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.recompute import HEAVY_KINDS, layer_modes, recompute_of
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.rules import mesh_choices, rule_for
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.compute import writes_scores

from tests.oracles.scalar_composer import Composer
from tests.support.planning import make_plan
from tests.support.zoo import ZOO

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
        make_plan(graph, V100, 64, microbatches, parse_strategy(strategy), recompute=mode) for mode in ("none", "layer")
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


@pytest.mark.parametrize(("mesh", "mode"), [((2,), "full"), ((2, 2), "full"), ((2, 2), "selective")])
def test_recomputed_tables_equal_the_integer_program(graph, mesh, mode):
    composer = composer_of(graph, 8, mesh, mode)
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


# ---- modes per layer


def totals(graph, modes, mesh=(), first=0, end=None, schedule="1f1b"):
    """(seconds, saved, transient of each layer) of layers [first, end) on one device, where nothing is chosen."""
    composer = composer_of(graph, 8, mesh, modes, schedule)
    end = len(composer.layering.layers) if end is None else end
    section = composer.section(first, end, [composer.states(first)[0]], [composer.states(end)[0]])
    chosen = solve_section(section, 1.0)
    seconds = sum(float(s[c]) for s, c in zip(section.seconds, chosen))
    resident = sum(float(r[c]) for r, c in zip(section.resident, chosen))
    saved = evaluate(section.problem(1.0), chosen)[1] - resident
    return seconds, saved, transient_bytes(section, chosen, composer.layering)


def test_selective_keeps_what_heavy_ops_make_and_repeats_the_rest(graph):
    composer = composer_of(graph, 8, (), "selective")
    layering, grad, nodes = composer.layering, composer.layering.needs_grad, composer.graph.by_name()
    pricer = composer.pricer
    for k in (1, 2, 3):
        plain, full, some = (totals(graph, mode, first=k, end=k + 1) for mode in ("none", "full", "selective"))
        ops = [nodes[name] for name in layering.layers[k].ops if op_name(nodes[name]) != "getitem"]
        heavy = [op for op in ops if rule_for(op).cost_kind in HEAVY_KINDS]
        light = [op for op in ops if op not in heavy]
        assert heavy
        assert light
        forward = sum(pricer.op(op, mesh_choices(op, ())[0], grad).forward_s for op in light)
        assert some[0] - plain[0] == pytest.approx(forward, rel=1e-9)
        made = sum(kind.nbytes for op in heavy for kind in types_of(op))
        made += sum(rule_for(op).temporary_bytes(op) for op in heavy)
        for op in heavy:
            if rule_for(op).cost_kind == "attention" and writes_scores(pricer.device):
                made += prod(op.args[0].meta["type"].shape[:-1]) * op.args[1].meta["type"].shape[-2] * 4
        assert some[1] == pytest.approx(full[1] + made)
        assert some[2] <= full[2]
        assert some[0] < full[0]


def test_layers_in_different_modes(graph):
    num = len(cluster_layers(graph).layers)
    none, full = totals(graph, "none"), totals(graph, "full")
    assert totals(graph, dict.fromkeys(range(num), "full")) == full
    assert totals(graph, {}) == none
    half = totals(graph, dict.fromkeys(range(num // 2), "full"))
    assert full[1] < half[1] < none[1]
    assert none[0] < half[0] < full[0]
    one, other = ({k: "full" for k in range(num) if k % 2 == odd} for odd in (0, 1))
    seconds = [totals(graph, modes, schedule="gpipe")[0] for modes in (one, other, "none", "full")]
    assert seconds[0] + seconds[1] == pytest.approx(seconds[2] + seconds[3])
    for modes in (one, other):
        assert full[1] < totals(graph, modes)[1] < none[1]


def test_a_recomputed_layer_is_run_again_from_what_a_plain_one_makes(graph):
    """The border is kept for the layer behind it, though the layer before keeps all that autograd saves already."""
    modes = {3: "full"}
    composer = composer_of(graph, 8, (), modes)
    section = composer.section(2, 4, [composer.states(2)[0]], [composer.states(4)[0]])
    rows = dict(zip(section.names, section.saved))
    for name in composer.layering.crossing[3]:
        assert float(rows[name][0]) == composer.graph.by_name()[name].meta["type"].nbytes
    assert composer.recompute.modes_of((2, 4)) == ("none", "full")
    assert composer.recompute.modes_of((4, 6)) == ()


def test_layers_are_asked_for_by_their_names():
    names = ["embed", "blocks.0", "blocks.1", "head"]
    assert layer_modes(names, "layer") == dict.fromkeys(range(4), "full")
    asked = {"blocks.*": "selective", "blocks.1": "full"}
    assert layer_modes(names, asked) == {0: "none", 1: "selective", 2: "full", 3: "none"}
    with pytest.raises(ValueError, match=r"fit some, but got 'block\.\*'; the layers are embed"):
        layer_modes(names, {"block.*": "full"})
    with pytest.raises(ValueError, match="but got 'auto'"):
        layer_modes(names, "auto")


def test_a_plan_in_several_modes_is_priced_again_alike(graph):
    plan = plans(graph, "pp2,tp2")[1]
    stages = []
    for stage in plan.stages:
        (chunk,) = stage.chunks
        modes = tuple(("none", "selective", "full")[k % 3] for k in range(*chunk.layers))
        modes = (*modes[:-1], "none") if chunk.layers[1] == len(plan.layers) else modes
        stages.append(replace(stage, chunks=(replace(chunk, recompute=modes),)))
    mixed = reprice(replace(plan, stages=tuple(stages)), graph, V100)
    assert mixed.recompute == "mixed"
    assert [stage.chunks for stage in mixed.stages] == [stage.chunks for stage in stages]
    for one, other in zip(mixed.prediction.stages, plan.prediction.stages):
        assert 0 < one.seconds["recompute"] < other.seconds["recompute"]
    assert "selective, full, none" in mixed.explain()
    assert Plan.from_json(json.loads(json.dumps(mixed.to_json()))) == mixed


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
        make_plan(graph, tight, 64, 4, parse_strategy("pp2"))
    plan = make_plan(graph, tight, 64, 4, parse_strategy("pp2"), recompute="layer")
    assert max(stage.peak_bytes for stage in plan.prediction.stages) <= limit


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
    with pytest.raises(ValueError, match="none, selective, full, but got 'block'"):
        make_plan(graph, V100, 64, recompute="block")


def test_the_command_line_asks_for_it(tmp_path, capsys):
    file = tmp_path / "plan.json"
    words = ["gpt-demo", "--cluster", "p3.16xlarge:1", "--strategy", "pp2", "--microbatches", "4"]
    assert main(["plan", *words, "--recompute", "layer", "--json", "-o", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["recompute"] == "full"
    assert Plan.load(file).recompute == "full"
