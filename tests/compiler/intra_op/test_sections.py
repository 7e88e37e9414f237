"""Slices of batched sections against scalar sections: the same choices, the same numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import isclose, prod

import numpy as np
import pytest
import torch
from meshwright.compiler.cost.parameter_sharding import PATTERNS
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.cost.signature import signature
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import Layering, cluster_layers
from meshwright.compiler.frontend.strides import note_layouts
from meshwright.compiler.intra_op.restriction import NO_RESTRICTION, Restriction
from meshwright.compiler.intra_op.section import Section, label
from meshwright.compiler.intra_op.vectorised.cases import Case, Cases
from meshwright.compiler.intra_op.vectorised.problem import CaseSection
from meshwright.compiler.intra_op.vectorised.section import build_case_section
from meshwright.compiler.ir.graph import Graph, op_name, types_of
from meshwright.compiler.plan.recompute import recompute_of
from meshwright.compiler.rules import mesh_choices
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.curves import Curve, Surface
from meshwright.costmodel.measured import CollectiveMeasurement, OpTime, OptimizerRate, Piece
from meshwright.models.architectures import Llama

from tests.oracles.scalar_composer import Composer
from tests.support.cases import graph_of, split_by_axes
from tests.support.zoo import SEQUENCE, VOCAB, ZOO, tokens_and_labels

BATCH = 64


@cache
def captured(name: str) -> Graph:
    if name.startswith("rope"):
        with torch.device("meta"):
            net = Llama(VOCAB, 2, 64, 128, 8, 4)
        graph = capture(net.to(torch.bfloat16) if "bfloat16" in name else net, tokens_and_labels(BATCH, SEQUENCE))
    else:
        graph = capture(*ZOO[name](BATCH, device="meta"))
    note_layouts(graph)
    return graph


@cache
def model(name: str, sequence: bool = False) -> tuple[Graph, Layering]:
    return captured(name), cluster_layers(captured(name), sequence=sequence)


# ---- clusters


def profiled(rng: random.Random) -> Cluster:
    """Two hosts with curves, a surface, wires of several pieces and a measured optimizer."""
    base = Cluster.parse("p3.16xlarge:2")

    def curve(kind: str, variable: str, direction: str) -> Curve:
        work = sorted(10 ** rng.uniform(3, 9) for _ in range(4))
        seconds = sorted(10 ** rng.uniform(-6, -3) for _ in range(4))
        return Curve(kind, "float32", variable, tuple(zip(work, seconds)), direction)

    curves = [curve(kind, "flops", "forward") for kind in ("matmul", "attention", "convolution")]
    curves += [curve(kind, "bytes", way) for kind in ("pointwise", "normalization") for way in ("forward", "backward")]
    lines = tuple(tuple(sorted(10 ** rng.uniform(0, 4) for _ in range(3))) for _ in range(3))
    grid = tuple(10 ** rng.uniform(-6, -4) for _ in range(27))
    surfaces = tuple(Surface("matmul", "float32", *lines, grid, way) for way in ("forward", "backward"))
    device = replace(
        base.hosts[0].device,
        curves=tuple(curves),
        surfaces=surfaces,
        optimizers=(
            OptimizerRate("AdamW", 3e-6, 1e-11, 0.0, 1),
            OptimizerRate("AdamW", 5e-6, 4e-11, 0.0, 1, "bfloat16"),
        ),
        action_s=1e-5,
    )
    pieces = (Piece(0, 2e-5, 1e-10), Piece(1e5, 1e-5, 3e-10))
    wires = tuple(
        CollectiveMeasurement(kind, "backend", size, size, 16 // size, pieces, (), 0.0, 1)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (2, 4)
    )
    return replace(base, hosts=tuple(replace(host, device=device) for host in base.hosts), wires=wires)


def uneven() -> Cluster:
    """V100 hosts of unlike sizes, and H100s."""
    v100, h100 = Cluster.parse("p3.16xlarge:1"), Cluster.parse("dgx-h100:1")
    small = replace(v100.hosts[0], num_devices=3)
    return replace(Cluster.join(v100, h100), hosts=(small, v100.hosts[0], h100.hosts[0]))


def cases_of(cluster: Cluster, rng: random.Random, axes: int, count: int) -> list[Case]:
    found: set[Case] = set()
    while len(found) < count:
        shape = tuple(rng.choice((2, 2, 3, 4, 8)) for _ in range(axes))
        if prod(shape) <= cluster.num_devices:
            offset = rng.randrange(cluster.num_devices - prod(shape) + 1)
            found.add(Case(shape, offset, rng.choice([1, 2, 4, 8, 16, 32, 64])))
    return sorted(found, key=lambda case: (case.microbatches, case.mesh_shape, case.offset))


# ---- comparison


def scalar_section(variants: Cases, layer: int, v: int, restriction: Restriction, mode: str) -> Section:
    case = variants.cases[v]
    recompute = recompute_of(variants.graph, variants.layering, mode, "1f1b")
    pricer = MeshPricer(variants.cluster, case.offset, case.mesh_shape, variants.optimizer)
    graph = graph_of(variants, v)
    composer = Composer(graph, variants.layering, pricer, case.microbatches, restriction, recompute=recompute)
    return composer.section(layer, layer + 1, composer.states(layer), composer.states(layer + 1))


def close(ours: float, theirs: float, what: object) -> None:
    assert ours == theirs or isclose(ours, theirs, rel_tol=1e-9), (what, ours, theirs)


def compare(batch: CaseSection, scalar: Section, v: int, mode: str) -> None:
    assert batch.names == scalar.names
    assert batch.kinds == scalar.kinds
    for i, name in enumerate(batch.names):
        ours = {batch.label(i, c, v): c for c in np.flatnonzero(batch.offered[i][v])}
        theirs = {label(choice): c for c, choice in enumerate(scalar.choices[i])}
        assert set(ours) == set(theirs), (name, batch.kinds[i])
        assert len(ours) == batch.offered[i][v].sum()
        assert np.isinf(batch.seconds[i][v][~batch.offered[i][v]]).all()
        transient = scalar.transient[i] if scalar.transient else np.zeros(len(theirs))
        for text, c in ours.items():
            k, what = theirs[text], (name, text, mode)
            close(batch.seconds[i][v, c] + batch.again[i][mode][v, c], scalar.seconds[i][k], what)
            close(batch.resident[i][v, c], scalar.resident[i][k], what)
            close(batch.saved[i][mode][v, c], scalar.saved[i][k], what)
            close(batch.transient[i][mode][v, c], transient[k], what)
    for e, (edge, other) in enumerate(zip(batch.edges, scalar.edges, strict=True)):
        assert (edge.name, edge.producer) == (other.name, other.producer)
        assert [k for k, _ in edge.consumers] == [k for k, _ in other.consumers]
        sources, targets = ({pair: at for at, pair in enumerate(side)} for side in edge.states)
        place = np.ix_([sources[p] for p in scalar.edge_states[e][0]], [targets[p] for p in scalar.edge_states[e][1]])
        transient = scalar.edge_transient[e] if scalar.edge_transient else np.zeros_like(other.bytes)
        for mine, their in (
            (edge.seconds[v][place] + edge.again[mode][v][place], other.seconds),
            (edge.bytes[mode][v][place], other.bytes),
            (edge.transient[mode][v][place], transient),
        ):
            np.testing.assert_allclose(mine, their, rtol=1e-9, err_msg=f"{edge.name} {mode}")


def check(
    name: str,
    cluster: Cluster,
    rng: random.Random,
    restriction: Restriction = NO_RESTRICTION,
    modes: Sequence[str] = ("none",),
    cases: Sequence[Case] | None = None,
    probes: int = 1,
    layers: int = 3,
    sequence: bool = False,
) -> None:
    graph, layering = model(name, sequence)
    if cases is None:
        cases = [case for axes in range(3) for case in cases_of(cluster, rng, axes, 1 if axes == 0 else 6)]
    for variants in split_by_axes(graph, layering, cluster, "AdamW", BATCH, cases):
        classes = list({one.class_key: layer for layer, one in enumerate(layering.layers)}.values())
        for layer in rng.sample(classes, min(layers, len(classes))):
            into, out = (variants.states(b, restriction.roles)[0] for b in (layer, layer + 1))
            batch = build_case_section(variants, layer, into, out, restriction, modes)
            for v in rng.sample(range(variants.num), min(probes, variants.num)):
                mode = rng.choice(modes)
                compare(batch, scalar_section(variants, layer, v, restriction, mode), v, mode)


# ---- tests


@pytest.mark.parametrize("name", [*ZOO, "rope"])
def test_slices_equal_scalar_sections(name):
    rng = random.Random(name)
    cluster = Cluster.parse(rng.choice(["p3.16xlarge:2", "dgx-h100:2"]))
    check(name, cluster, rng, modes=("none", "full", "selective"))


@pytest.mark.parametrize("name", ["gpt", "llama", "convnet", "moe", "rope in bfloat16"])
def test_measured_and_uneven_clusters(name):
    rng = random.Random(name)
    check(name, profiled(rng), rng, modes=("full",))
    check(name, uneven(), rng, modes=("selective",))


def test_exact_op_times_are_found():
    rng = random.Random(0)
    graph, layering = model("gpt")
    small = graph.with_batch(8)
    found = {}
    for node in small.ops():
        if op_name(node) != "getitem":
            for choice in mesh_choices(node, (2,)):
                text = signature(node, choice, (2,), layering.needs_grad)
                if text and rng.random() < 0.5:
                    found[text] = OpTime(text, *(10 ** rng.uniform(-6, -3) for _ in range(3)), 1)
    for kind in {types_of(node)[0] for node in small}:
        if kind.is_float and kind.dtype.itemsize == 4:
            text = f"meshwright.sum(f32[{','.join(map(str, kind.shape))}])"
            found[text] = OpTime(text, 10 ** rng.uniform(-6, -3), 0.0, 0.0, 1)
    base = Cluster.parse("p3.16xlarge:1")
    device = replace(base.hosts[0].device, op_times=tuple(found.values()))
    cluster = replace(base, hosts=(replace(base.hosts[0], device=device),))
    cases = [Case((2,), 0, 8), Case((4,), 0, 4), Case((2, 2), 0, 4), Case((), 1, 8)]
    check("gpt", cluster, rng, Restriction(residencies=PATTERNS), cases=cases)


@pytest.mark.parametrize("roles", [("data",), ("tensor",), ("data", "tensor"), (None, "data")])
def test_roles(roles):
    rng = random.Random(str(roles))
    cluster = Cluster.parse("p3.16xlarge:2")
    for name in ("gpt", "llama", "convnet"):
        check(name, cluster, rng, Restriction(roles), cases=cases_of(cluster, rng, len(roles), 6))


@pytest.mark.parametrize("roles", [("data",), ("tensor", "data")])
def test_loose_replicas(roles):
    rng = random.Random(str(roles))
    cluster = Cluster.parse("p3.16xlarge:2")
    for name in ("gpt", "convnet"):
        check(name, cluster, rng, Restriction(roles, loose=True), cases=cases_of(cluster, rng, len(roles), 3), layers=3)


@pytest.mark.parametrize("name", ["rope", "convnet", "moe"])
def test_sequence_splits(name):
    rng = random.Random(name)
    check(name, Cluster.parse("dgx-h100:2"), rng, modes=("none", "selective"), probes=2, sequence=True)
    check(name, Cluster.parse("dgx-h100:2"), rng, Restriction(executable_only=True), sequence=True)


@pytest.mark.parametrize("name", ["gpt", "t5", "convnet"])
def test_residencies(name):
    rng = random.Random(name)
    check(name, Cluster.parse("p3.16xlarge:2"), rng, Restriction(residencies=PATTERNS), modes=("none", "full"))


def test_axes_of_one_device():
    rng = random.Random(0)
    cases = [Case((1,), 3, 8), Case((1, 4), 0, 4), Case((2, 1), 4, 64), Case((1, 1), 4, 1), Case((2, 4), 8, 2)]
    check("gpt", Cluster.parse("p3.16xlarge:2"), rng, Restriction(residencies=PATTERNS), cases=cases, probes=3)


def test_splits_and_whole_parameters():
    rng = random.Random(0)
    graph, _ = model("gpt")
    linears = [node for node in graph.ops() if op_name(node) == "aten.linear.default"]
    split = {linears[0].name: ("o",), linears[1].name: ("b0", "i"), linears[2].name: ("nothing",)}
    whole = frozenset(node.args[1].name for node in linears[1:4])
    restriction = Restriction(residencies=PATTERNS, replicated=whole, split=split)
    check("gpt", Cluster.parse("p3.16xlarge:2"), rng, restriction, probes=3, layers=99)


def test_a_border_without_states():
    rng = random.Random(0)
    cases = [Case((2,), 0, 64), Case((4,), 0, 32)]  # fewer samples than parts
    check("gpt", Cluster.parse("p3.16xlarge:1"), rng, Restriction(("data",)), cases=cases, layers=99)


def test_pins():
    rng = random.Random(0)
    graph, layering = model("gpt")
    linear = next(node.name for node in graph.ops() if op_name(node) == "aten.linear.default")
    weight = graph.node(linear).args[1].name
    cases = [Case((2, 2), 0, 8), Case((4, 2), 8, 2), Case((2, 8), 0, 1)]
    pins = Restriction(pinned={linear: "b0,o", weight: "R,S0|P,S0"})
    check("gpt", Cluster.parse("p3.16xlarge:2"), rng, pins, cases=cases, probes=3)
    variants = split_by_axes(graph, layering, Cluster.parse("p3.16xlarge:2"), "AdamW", BATCH, cases)[0]
    layer = next(k for k, one in enumerate(layering.layers) if linear in one.ops)
    into, out = variants.states(layer)[0], variants.states(layer + 1)[0]
    with pytest.raises(ValueError, match="may be split by"):
        build_case_section(variants, layer, into, out, Restriction(pinned={linear: "nonsense,o"}))


def test_parts_of_the_seconds_add_up():
    graph, layering = model("gpt")
    cluster = Cluster.parse("p3.16xlarge:2")
    rng = random.Random(0)
    for variants in split_by_axes(graph, layering, cluster, "AdamW", BATCH, cases_of(cluster, rng, 2, 8)):
        pricer = variants.pricer(0)
        for layer in range(len(layering.layers)):
            into, out = variants.states(layer)[0], variants.states(layer + 1)[0]
            section = build_case_section(variants, layer, into, out, Restriction(residencies=PATTERNS))
            for i, name in enumerate(section.names):
                for c in np.flatnonzero(section.offered[i][0]):
                    total = section.seconds[i][0, c]
                    assert section.floor_seconds[i][0, c] <= total
                    parts = section.step_seconds[i][0, c] + section.backward_seconds[i][0, c]
                    assert parts <= total * (1 + 1e-12)
                    assert section.weight_seconds[i][0, c] <= section.backward_seconds[i][0, c] * (1 + 1e-12)
                    if section.kinds[i] == "op":
                        node, choice = graph_of(variants, 0).node(name), section.choices[i][c]
                        choice = replace(choice, work_share=1 / variants.divisor[0, section.ops[name].splits[c]])
                        price = pricer.op(node, choice, layering.needs_grad)
                        close(section.weight_seconds[i][0, c], price.backward_weight_s, name)
                    assert section.gradient_seconds[i][0, c] <= section.step_seconds[i][0, c] * (1 + 1e-12)
                    if section.kinds[i] == "parameter" and section.choices[i][c].pattern == "replicated":
                        kind, pair = graph.node(name).meta["type"], section.choices[i][c].pair
                        gradient = pricer.gradient_seconds(kind, pair) / variants.microbatches[0]
                        close(section.gradient_seconds[i][0, c], gradient, name)
                        added = pricer.accumulate_seconds(kind, pair, variants.microbatches[0])
                        close(section.weight_seconds[i][0, c], added / variants.microbatches[0], name)


def test_a_tied_weight_is_shared():
    graph, layering = model("gpt")
    cluster = Cluster.parse("p3.16xlarge:1")
    (variants,) = split_by_axes(graph, layering, cluster, "AdamW", BATCH, [Case((2,), 0, 8)])
    last = len(layering.layers) - 1
    for layer in (0, last):
        into, out = variants.states(layer)[0], variants.states(layer + 1)[0]
        section = build_case_section(variants, layer, into, out)
        shares = {
            name: section.floor_seconds[i] / section.seconds[i]
            for i, name in enumerate(section.names)
            if section.kinds[i] == "parameter"
        }
        tied = [name for name, share in shares.items() if np.allclose(share, 0.5)]
        assert len(tied) == 1


def test_states_are_those_of_the_composer():
    graph, layering = model("llama")
    cluster = Cluster.parse("p3.16xlarge:2")
    rng = random.Random(1)
    for roles in ((), ("data", "tensor")):
        (variants,) = split_by_axes(graph, layering, cluster, "AdamW", BATCH, cases_of(cluster, rng, 2, 5))
        for boundary in range(len(layering.layers) + 1):
            states, mask = variants.states(boundary, roles)
            for v in range(variants.num):
                composer = Composer(graph_of(variants, v), layering, variants.pricer(v), 1, Restriction(roles))
                assert [s for s, ok in zip(states, mask[v]) if ok] == composer.states(boundary)
