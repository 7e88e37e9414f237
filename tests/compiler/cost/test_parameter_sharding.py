"""Where parameters live: the patterns that a shape permits, their seconds and bytes by hand, and how sections, stages
and documents carry them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from meshwright.compiler.cost.layer_gathers import GatherUse, LayerReads
from meshwright.compiler.cost.parameter_sharding import (
    PATTERNS,
    accumulate_seconds,
    gathered_bytes,
    parameter_shardings,
    sharding_bytes,
    sharding_seconds,
    sharding_text,
    shardings_by_pattern,
    unfilled_messages,
)
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers, differentiable_nodes
from meshwright.compiler.intra_op.restriction import Restriction
from meshwright.compiler.intra_op.section import StageContext, label
from meshwright.compiler.intra_op.stage import describe_stage, solve_section
from meshwright.compiler.ir.graph import TensorType
from meshwright.compiler.ir.spec import local_shape, parse_pair, parse_spec
from meshwright.compiler.plan.plan import BUCKET_BYTES, ParameterSharding
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.measured import CollectiveMeasurement, Piece
from meshwright.models.architectures import Experts
from torch import nn

from tests.oracles.scalar_composer import Composer
from tests.support.graphs import graph_of

V100 = Cluster.preset("p3.16xlarge")
WEIGHT = TensorType((64, 48), torch.float32)


@pytest.fixture(scope="module")
def graph():
    return graph_of("mlp")


# ---- which there are


@pytest.mark.parametrize(
    ("shape", "mesh", "pair", "cut"),
    [
        ((64, 48), (4,), "R|P", "S0"),
        ((6, 48), (4,), "R|P", "S1"),  # the first dim that divides
        ((6, 10), (4,), "R|P", None),
        ((64, 48), (4, 2), "R,R|P,P", "S0,S0"),  # every axis of the sum cuts one dim
        ((64, 48), (4, 2), "R,S0|P,S0", "S1,S0"),  # not a dim that another axis cuts
        ((64,), (4, 2), "R,S0|P,S0", None),
        ((64, 48), (4, 2), "R,R|P,R", "S0,R"),  # the second axis holds copies: it sums nothing
        ((64, 48), (4,), "S0|S0", None),
        ((64, 48), (1,), "R|P", None),
    ],
)
def test_the_patterns_cut_one_more_dim(shape, mesh, pair, cut):
    kind = TensorType(shape, torch.float32)
    found = dict(shardings_by_pattern(kind, parse_pair(pair), mesh, True))
    assert list(found) == list(PATTERNS if cut else PATTERNS[:1])
    for name, residency in found.items():
        assert residency.pattern == name
        assert sharding_text(residency) == (pair if name == "replicated" else f"{pair} {name}")
        assert ParameterSharding.from_json(residency.to_json()) == residency
        for spec in (residency.stored, residency.gradient, residency.optimizer):
            assert spec in (residency.compute.value, parse_spec(cut or ""))
            local_shape(shape, spec, mesh)  # even
    if cut:
        assert found["zero1"].reduce == "step" != found["zero2"].reduce
        assert found["zero3"].stored == found["zero3"].optimizer == parse_spec(cut)


def test_only_what_is_allowed_and_frozen_parameters_have_no_gradient_to_cut():
    pair = parse_pair("R|P")
    assert [n for n, _ in shardings_by_pattern(WEIGHT, pair, (4,), True, ("zero2",))] == ["zero2"]
    pairs = [pair, parse_pair("R|R"), parse_pair("S0|S0")]  # a whole gradient has no axis to be cut by, and need not be
    found = parameter_shardings(WEIGHT, pairs, (4,), True, ("zero3",))
    assert [sharding_text(r) for r in found] == ["R|P zero3", "S0|S0"]
    assert len(parameter_shardings(WEIGHT, pairs, (4,), True, PATTERNS)) == 6
    assert [n for n, _ in shardings_by_pattern(TensorType((3,), torch.float32), pair, (4,), True, ("zero3",))] == [
        "replicated"
    ]
    frozen = dict(shardings_by_pattern(WEIGHT, parse_pair("R,S0|R,S0"), (4, 2), False))
    assert list(frozen) == ["replicated", "zero3"]
    assert frozen["zero3"].pattern == "zero3"
    assert frozen["zero3"].scattered_axes == (0,)


def test_what_follows_no_pattern_is_custom():
    (_, plain), *_ = shardings_by_pattern(WEIGHT, parse_pair("R|P"), (4,), True)
    assert replace(plain, stored=parse_spec("S0")).pattern == "custom"
    assert replace(plain, gather="microbatch").pattern == "custom"


# ---- prices


def use_of(largest, again):
    return GatherUse(largest, largest, again)


@pytest.mark.parametrize(("mesh", "pair"), [((4,), "R|P"), ((2, 2), "R,S0|P,S0"), ((2, 4), "R,R|P,P")])
def test_seconds_and_bytes_by_hand(mesh, pair):
    pricer = MeshPricer(V100, 0, mesh)
    found = dict(shardings_by_pattern(WEIGHT, parse_pair(pair), mesh, True))
    axes = found["zero1"].scattered_axes
    d = int(np.prod([mesh[a] for a in axes]))
    n = pricer.local_bytes(WEIGHT, found["zero1"].compute.value)
    group = pricer.joint(axes)
    share = n / BUCKET_BYTES  # a weight smaller than a bucket costs its share of one
    gather, reduce, whole = (
        group.seconds(kind, BUCKET_BYTES) * share for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    uses = (use_of(2 * WEIGHT.numel, True), use_of(WEIGHT.numel, False))  # of two layers, the first with another
    shares = [n / size * np.array([group.seconds(k, size) for k in ("all_gather", "reduce_scatter")])
              for size in (4 * use.largest for use in uses)]  # fmt: skip
    update = (2 * n + 2 * n + 4 * n) / pricer.device.memory_bytes_per_s
    expected = {
        "replicated": (0, whole + update, (n, n, 2 * n), 0),
        "zero1": (0, reduce + gather + update / d, (n, n, 2 * n / d), 0),
        "zero2": (reduce, gather + update / d, (n, n / d, 2 * n / d), 0),
        "zero3": (2 * sum(shares[0]) - shares[0][1] + sum(shares[1]), update / d, (n / d, n / d, 2 * n / d), n),
    }
    for name, (often, once, sizes, gathered) in expected.items():
        price = sharding_seconds(pricer, WEIGHT, found[name], 4, uses=uses)
        assert price.per_microbatch_s == pytest.approx(often, rel=1e-12)
        assert price.per_step_s == pytest.approx(once, rel=1e-12)
        bill = sharding_bytes(pricer, WEIGHT, found[name], True)
        assert [bill[c] for c in ("parameters", "gradients", "optimizer")] == pytest.approx(list(sizes))
        assert gathered_bytes(pricer, WEIGHT, found[name], False) == gathered
        assert gathered_bytes(pricer, WEIGHT, found[name], True) == 2 * gathered  # and its gradient
    once = accumulate_seconds(pricer, WEIGHT, found["zero1"], 5)
    assert once == accumulate_seconds(pricer, WEIGHT, found["replicated"], 5) > 0
    assert accumulate_seconds(pricer, WEIGHT, found["zero2"], 5) < once


def test_a_frozen_parameter_costs_gathers_alone():
    pricer = MeshPricer(V100, 0, (4,))
    (_, whole), (_, cut) = shardings_by_pattern(WEIGHT, parse_pair("R|R"), (4,), False)
    assert sharding_seconds(pricer, WEIGHT, whole, 4, False).per_step_s == 0
    for again in (False, True):
        price = sharding_seconds(pricer, WEIGHT, cut, 4, False, (use_of(WEIGHT.numel, again),))
        assert (price.per_microbatch_s, price.per_step_s) == (price.gather_forward_s * (1 + again), 0)
        assert price.gather_forward_s == pytest.approx(pricer.axes[0].seconds("all_gather", WEIGHT.nbytes))
    assert sharding_seconds(pricer, WEIGHT, cut, 4, False).per_microbatch_s == 0  # messages are priced elsewhere
    assert sharding_bytes(pricer, WEIGHT, cut, False) == {
        "parameters": WEIGHT.nbytes / 4, "gradients": 0.0, "optimizer": 0.0,
    }  # fmt: skip


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.experts = nn.Linear(2048, 2048), Experts(2048, 8192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.small(x)).mean()


def test_a_small_weight_beside_experts_pays_for_its_message():
    """Gathered over many devices it takes what it takes, and experts, which could travel with it, seldom do. All shares
    together are no more than one message of all."""
    with torch.device("meta"):
        model, x = Routed(), torch.rand(64, 16, 2048)
    graph = capture(model, (x,))
    ops, weights = graph.ops(), list(graph.placeholders("parameter"))
    reads = LayerReads(ops, {node.name: 0 for node in ops}, differentiable_nodes(graph))
    pricer, shares = MeshPricer(Cluster.preset("dgx-h100:256"), 0, (2048,)), {}
    for node in weights:
        kind = node.meta["type"]
        found = dict(shardings_by_pattern(kind, parse_pair("R|P"), (2048,), True))
        if "zero3" in found:
            price = sharding_seconds(pricer, kind, found["zero3"], uses=reads.of(node))
            shares[kind.numel] = price.gather_forward_s, pricer.message_seconds("all_gather", (0,), kind.nbytes)
    together = pricer.message_seconds("all_gather", (0,), sum(node.meta["type"].nbytes for node in weights))
    assert sum(share for share, _ in shares.values()) <= together * (1 + 1e-9)
    share, alone = shares[2048 * 2048]
    assert 0.1 * alone <= share <= alone


# ---- sections and stages


def section_of(graph, mesh, microbatches=4, **restriction):
    layering = cluster_layers(graph)
    composer = Composer(graph, layering, MeshPricer(V100, 0, mesh), microbatches, Restriction(**restriction))
    return composer, composer.section(0, len(layering.layers), [()], [()])


def test_a_section_offers_what_is_allowed(graph):
    _, plain = section_of(graph, (4,))
    _, wide = section_of(graph, (4,), residencies=PATTERNS)
    names = {c.pattern for i in plain.index("parameter").values() for c in plain.choices[i]}
    assert names == {"replicated"}
    for name, i in wide.index("parameter").items():
        labels = [label(choice) for choice in wide.choices[i]]
        j = plain.index("parameter")[name]
        assert {text for text in labels if " " not in text} == {label(c) for c in plain.choices[j]}
        assert "R|P zero3" in labels
        assert not {"S0|S0 zero1", "R|R zero1"} & set(labels)
    small = solve_section(wide, 1.0)
    assert sum(wide.seconds[i][c] for i, c in enumerate(small)) <= sum(
        plain.seconds[i][c] for i, c in enumerate(solve_section(plain, 1.0))
    ) * (1 + 1e-9)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("pair", ["R|P", "R,R|P,P"])
def test_a_pinned_stage_costs_what_its_section_says(graph, pattern, pair):
    mesh = (4,) if pair == "R|P" else (2, 2)
    weights = {node.name for node in graph.placeholders("parameter")}
    text = pair if pattern == "replicated" else f"{pair} {pattern}"
    ops = {node.name: ",".join(["b0" if "linear" in node.name else "d0"] * len(mesh)) for node in graph.ops()}
    pinned = dict.fromkeys(weights, text) | {n: t for n, t in ops.items() if "loss" not in n}
    composer, section = section_of(graph, mesh, pinned=pinned)
    chosen = [0] * len(section.names)
    at = section.index("parameter")
    assert {section.choices[at[name]][chosen[at[name]]].pattern for name in weights} == {pattern}
    chosen = solve_section(section, 1.0)
    context = StageContext(graph, composer.layering, composer.pricer, 4)
    made = describe_stage(context, (0, len(composer.layering.layers)), section, chosen, 1, 0.0)
    seen = made.prediction
    took = sum(float(section.seconds[at[name]][chosen[at[name]]]) for name in weights)
    gradient, gather = seen.seconds["gradient"], seen.seconds["gather"]
    assert (gather > 0) == (pattern != "replicated")
    added = sum(accumulate_seconds(composer.pricer, graph.by_name()[n].meta["type"], section.choices[at[n]][0], 4)
                for n in weights)  # fmt: skip
    blocks = [(graph.by_name()[name].meta["type"], section.choices[at[name]][0]) for name in weights]
    more = unfilled_messages(composer.pricer, blocks) if pattern in ("zero1", "zero2") else []
    kinds = ("reduce_scatter", True), ("reduce_scatter", False), ("all_gather", False)
    often, once, gathers = (sum(one.seconds for one in more if (one.collective, one.often) == kind) for kind in kinds)
    if pattern == "zero3":  # a share of its layer's message for each; biases come along where weights are read again
        spent = gradient + gather + seen.seconds["optimizer"] + added
        assert 4 * took < spent == pytest.approx(4 * took, rel=2e-3)
    elif pattern != "replicated":  # whose reduction is in real buckets and hides in part
        spent = gradient + gather + seen.seconds["optimizer"] + added - 4 * often - once - gathers
        assert spent == pytest.approx(4 * took, rel=1e-9)
        assert (often > 0, once > 0, gathers > 0) == (pattern == "zero2", pattern == "zero1", True)
    assert {home.pattern for home in made.stage.chunks[0].parameters.values()} == {pattern}
    whole = sum(composer.pricer.local_bytes(graph.by_name()[n].meta["type"], parse_pair(pair).value) for n in weights)
    cut = {"replicated": (1, 1, 1), "zero1": (1, 1, 4), "zero2": (1, 4, 4), "zero3": (4, 4, 4)}[pattern]
    sizes = [whole / cut[0], whole / cut[1], 2 * whole / cut[2]]
    assert [seen.memory_bytes[c] for c in ("parameters", "gradients", "optimizer")] == pytest.approx(sizes)
    busy = 4 * (seen.forward_s + seen.backward_s) + seen.step_s
    causes = ("forward", "backward_input", "backward_weight", "reshard", "internal", "host", "recompute")
    once = sum(seen.seconds[cause] for cause in ("gradient", "gather", "optimizer", "loss"))
    assert seen.seconds["loss"] > 0
    assert busy == pytest.approx(4 * sum(seen.seconds[c] for c in causes) + once)


def test_sources_are_those_of_the_messages_that_are_sent(graph):
    """A wire of other messages makes no price measured; one of the very messages does, full buckets and others."""
    weights = {node.name: "R|P zero1" for node in graph.placeholders("parameter")}
    found = []
    for kinds in ((), ("all_reduce",), ("reduce_scatter",), ("reduce_scatter", "all_gather")):
        wires = tuple(
            CollectiveMeasurement(kind, "backend", 4, 4, 1, (Piece(0, 1e-4, 1e-9),), (), 0.0, 1) for kind in kinds
        )
        cluster, layering = replace(V100, wires=wires), cluster_layers(graph)
        composer = Composer(graph, layering, MeshPricer(cluster, 0, (4,)), 4, Restriction(pinned=weights))
        section = composer.section(0, len(layering.layers), [()], [()])
        chosen = solve_section(section, 1.0)
        context = StageContext(graph, layering, composer.pricer, 4)
        made = describe_stage(context, (0, len(layering.layers)), section, chosen, 1, 0.0)
        found.append((made.sources.get("measured", 0.0), made.prediction.seconds))
    (none, _), (other, summed), (half, seconds), (both, every) = found
    assert none == 0
    assert other == pytest.approx(summed["loss"])  # whose sum is an all-reduce
    assert half == pytest.approx(seconds["gradient"])
    assert both == pytest.approx(every["gradient"] + every["gather"])


def test_a_pattern_that_the_shape_does_not_permit_is_refused(graph):
    name = next(node.name for node in graph.placeholders("parameter"))
    with pytest.raises(ValueError, match=r"pinned to 'S0\|S0 zero2'"):
        section_of(graph, (4,), pinned={name: "S0|S0 zero2"})
