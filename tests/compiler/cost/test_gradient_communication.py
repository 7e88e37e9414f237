"""Ways to sum gradients: the choice equals brute force, documents cost what the search said, and bounds hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from meshwright import cli
from meshwright.api import plan
from meshwright.compiler.cost.gradient_communication import EXACT, Communication, cheapest_offers
from meshwright.compiler.cost.gradient_reduction import (
    Bucket,
    Gradient,
    choose_routes,
    fastest_route_index,
    hidden_seconds,
)
from meshwright.compiler.cost.pricing import MeshPricer, gradient_route, gradient_routes
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.validation import require_valid
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.codecs import CODECS, coded_messages, sent_bytes
from meshwright.costmodel.collectives import REDUCTIONS, mesh_prices
from meshwright.costmodel.measured import CollectiveMeasurement, Piece

from tests.support.graphs import graph_of, shared_plan
from tests.support.planning import make_plan
from tests.support.prices import coded_seconds
from tests.support.zoo import ZOO

WORLD = Cluster.parse("p3.16xlarge:2@world")
V100 = Cluster.preset("p3.16xlarge", 2)
LOSSY = Communication.asked("auto-lossy")
FREE = (*LOSSY.algorithms, *LOSSY.compressors[1:])  # the same, however little a code gains
WAYS = list(product(LOSSY.algorithms, LOSSY.compressors))


@pytest.fixture(scope="module")
def graph():
    return graph_of("gpt", 16)


def planned(graph, cluster, communication, strategy="dp4", microbatches=2):
    space = Space.asked(zero=0, recompute="none", communication=communication)
    wanted = parse_strategy(strategy)
    return shared_plan(graph, cluster, 16, microbatches, wanted, space=space)


def rewired(made: Plan, way) -> Plan:
    stages = tuple(
        replace(stage, wire=tuple(replace(wire, algorithm=way[0], compressor=way[1]) for wire in stage.wire))
        for stage in made.stages
    )
    return replace(made, stages=stages)


# ---- prices


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("cluster", [WORLD, V100, Cluster.local(4)], ids=lambda c: c.name)
def test_a_way_costs_what_the_code_does(cluster, itemsize):
    pricer = MeshPricer(cluster, 0, (cluster.num_devices,))
    for algorithm, compressor in WAYS:
        codec = CODECS[compressor]
        if algorithm == "hierarchical" and compressor != "none":
            continue  # see the next test
        (axis,) = mesh_prices(cluster, cluster.mesh(), algorithm)
        if algorithm != "backend" and (codec.pattern != "all_reduce" or "all_reduce" not in axis.pieces):
            with pytest.raises(ValueError, match="have no sum by"):
                gradient_route(pricer, (0,), itemsize, algorithm, compressor)
            continue
        way = gradient_route(pricer, (0,), itemsize, algorithm, compressor)
        for nbytes in (1e3, 1e6, 64e6):
            wanted = coded_seconds(axis, cluster.device(0), nbytes, itemsize, codec)
            assert way.seconds(nbytes) == pytest.approx(wanted, rel=1e-12)
            offers = [max(p for p in offer if p[0] <= nbytes) for offer in way.offers]
            assert min(a + b * nbytes for _, a, b in offers) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("mesh_shape", [(16,), (2, 8), (4, 4)])
def test_between_hosts_a_code_costs_what_it_does_on_a_part(mesh_shape):
    """Over all axes, which form the whole cluster of two hosts of eight."""
    axes, pricer = tuple(range(len(mesh_shape))), MeshPricer(WORLD, 0, mesh_shape)
    outer, inner = mesh_prices(WORLD, Mesh.of(WORLD, 0, (2, 8)))
    for name in ("bf16", "int8", "topk1%"):
        way = gradient_route(pricer, axes, 4, "hierarchical", name)
        for nbytes in (1e3, 64e6):
            wanted = sum(inner.seconds(kind, nbytes) for kind in ("all_to_all", "all_gather"))
            wanted += coded_seconds(outer, WORLD.device(0), nbytes / 8, 4, CODECS[name])
            assert way.seconds(nbytes) == pytest.approx(wanted, rel=1e-12)
    for axes, code, cluster in (((0,), "powersgd4", WORLD), ((0,), "int8", Cluster.local(16))):
        with pytest.raises(ValueError, match="have no sum by 'hierarchical'"):
            gradient_route(MeshPricer(cluster, 0, (16,)), axes, 4, "hierarchical", code)


def test_one_algorithm_is_never_cheaper_than_all_of_them():
    prices = {name: mesh_prices(V100, V100.mesh(), name)[0] for name in ("backend", "all", *REDUCTIONS)}
    assert set(prices["ring"].pieces) == {"all_reduce", "all_reduce_max", "all_reduce_in_place"}
    assert "all_reduce" not in mesh_prices(V100, V100.mesh(), "hierarchical")[0].wires
    for nbytes in (1e2, 1e8):  # where the envelope of two lines is exact
        least = min(price.seconds("all_reduce", nbytes) for name, price in prices.items() if name != "all")
        assert least == pytest.approx(prices["all"].seconds("all_reduce", nbytes), rel=1e-9)


def test_where_the_backend_was_measured_other_algorithms_must_be_too():
    def wire(algorithm, beta):
        return CollectiveMeasurement("all_reduce", algorithm, 16, 8, 1, (Piece(0.0, 1e-5, beta),), (), 0.0, 1)

    allowed = Communication.asked("auto")
    measured = replace(V100, wires=(wire("backend", 1e-9), wire("two_step", 5e-10)))
    ways = gradient_routes(MeshPricer(measured, 0, (16,), communication=allowed), (0,), 4)
    assert {way.algorithm for way in ways} == {"backend", "two_step"}
    assert {way.source for way in ways} == {"measured"}
    assert len(gradient_routes(MeshPricer(V100, 0, (16,), communication=allowed), (0,), 4)) == 1 + len(REDUCTIONS)


# ---- the choice


def _random_buckets(seed, groups):
    draw = np.random.default_rng(seed)
    buckets = []
    for number in range(int(draw.integers(1, 6))):
        dtype = (torch.float32, torch.bfloat16)[int(draw.integers(2))]
        size = float(2 ** draw.integers(8, 26))
        buckets.append(Bucket(groups[number % len(groups)], (Gradient(f"w{number}", groups[0], size, dtype),)))
    return buckets, {f"w{number}": 0.01 * (number + 1) for number in range(len(buckets))}


@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_best_of_all_combinations(seed, overlap):
    cluster = WORLD if seed % 2 else V100
    allowed = Communication.asked(("ring", "two_step", "recursive_doubling", "bf16", "int8", "powersgd4", "topk1%"))
    pricer = MeshPricer(cluster, 0, (2, 8), communication=allowed)
    groups = [(0,), (0, 1)] if seed % 3 else [(1,)]
    buckets, ready = _random_buckets(seed, groups)

    def exposed(seconds):
        total, hidden = hidden_seconds(buckets, seconds, ready, 0.05, overlap)
        return total - hidden

    def price(chosen):
        priced = [gradient_route(pricer, b.axes, b.gradients[0].key.itemsize, *chosen[b.axes]) for b in buckets]
        sending = {id(b): way.sending(b.nbytes) for b, way in zip(buckets, priced)}
        coding = sum(way.coding(b.nbytes) for b, way in zip(buckets, priced))
        return exposed(lambda bucket: sending[id(bucket)]) + coding

    used = sorted({bucket.axes for bucket in buckets})
    ways = [[(way.algorithm, way.compressor) for way in gradient_routes(pricer, axes, 4)] for axes in used]
    least = min(price(dict(zip(used, combination))) for combination in product(*ways))
    assert price(choose_routes(pricer, buckets, exposed)) == pytest.approx(least, rel=1e-12)


def test_searches_price_a_gradient_below_every_choice():
    pricer = MeshPricer(V100, 0, (2, 8), communication=LOSSY)
    ways = gradient_routes(pricer, (0, 1), 4)
    offers = cheapest_offers(ways)
    assert len(offers) < sum(len(way.offers) for way in ways)
    for nbytes in 2.0 ** np.arange(4, 34):
        least = min(way.seconds(nbytes) for way in ways)
        assert min(a + b * nbytes for ((_, a, b),) in offers) == pytest.approx(least, rel=1e-12)


# ---- plans


def test_a_plan_is_as_before_where_communication_is_exact(graph):
    plain, exact = (planned(graph, V100, how) for how in (None, "exact"))
    assert Space.asked().communication == EXACT
    assert replace(plain, provenance={}).to_json() == replace(exact, provenance={}).to_json()
    assert {(wire.algorithm, wire.compressor) for s in plain.stages for wire in s.wire} == {("backend", "none")}
    assert not any("compress" in line for line in plain.not_executable())


@pytest.mark.parametrize(("cluster", "strategy"), [(WORLD, "dp16"), (V100, "pp2,dp8"), (V100, "dp4,tp2")])
def test_a_document_costs_what_the_search_said_and_no_other_wire_less(graph, cluster, strategy):
    made = planned(graph, cluster, FREE, strategy, 1)
    again = reprice(Plan.from_json(made.to_json()), graph, cluster)
    assert again.prediction.step_s == pytest.approx(made.prediction.step_s, rel=1e-12)
    assert again.prediction.notes == made.prediction.notes
    steps = []
    for algorithm, compressor in product(("backend", "two_step"), LOSSY.compressors):
        if algorithm == "backend" or CODECS[compressor].pattern == "all_reduce":
            other = reprice(rewired(made, (algorithm, compressor)), graph, cluster)
            steps.append(other.prediction.step_s)
    assert made.prediction.step_s <= min(steps) * (1 + 1e-12)
    assert made.prediction.bound_s <= min(steps)
    assert len(set(steps)) > len(LOSSY.compressors)


@pytest.mark.parametrize("cluster", ["p3.16xlarge@world", "p3.16xlarge", "dgx-h100"])
def test_more_freedom_never_costs(cluster):
    model, args, kwargs = ZOO["mlp"](64, device="meta")
    wishes = {"example_inputs": args, "example_kwargs": kwargs, "recompute": "none", "zero": 0}
    found = [plan(model, cluster, communication=how, **wishes).prediction for how in ("exact", "auto", "auto-lossy")]
    assert found[0].step_s >= found[1].step_s >= found[2].step_s
    assert all(one.bound_s <= one.step_s for one in found)


def test_no_document_with_any_wire_is_below_the_bound():
    host = V100.hosts[0]
    device = replace(host.device, overlap=0.0)  # where nothing hides the bound is tight
    cluster = replace(V100, hosts=(replace(host, device=device),))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="meta") for _ in range(4)))
    x = torch.zeros(4096, 1024, device="meta")
    graph = capture(model, (x,), {}, (x,), torch.nn.functional.mse_loss)
    asked = {"constraints": ["stages = 1"]}
    space = Space.asked(zero=0, recompute="none", communication="auto-lossy")
    best = make_plan(graph, cluster, 4096, 1, None, space=space, **asked).prediction
    plain = replace(space, communication=EXACT)
    assert best.bound_gap < 0.5
    assert best.step_s < make_plan(graph, cluster, 4096, 1, None, space=plain, **asked).prediction.step_s
    for strategy in ("dp8", "dp4,tp2", "dp2", "tp8"):
        made = make_plan(graph, cluster, 4096, 1, parse_strategy(strategy), space=plain)
        for way in (("backend", "none"), ("backend", "int8"), ("two_step", "powersgd4"), ("ring", "bf16")):
            assert reprice(rewired(made, way), graph, cluster).prediction.step_s >= best.bound_s


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_chunks_of_a_stage_travel_alike(schedule):
    deep = graph_of("gpt", 16, layers=4)
    space = Space.asked(schedule, zero=0, recompute="none", communication=FREE)
    made = make_plan(deep, V100, 16, 4, parse_strategy("pp2,dp4"), space=space)
    assert made.num_chunks > 1
    assert any(wire.compressor != "none" for stage in made.stages for wire in stage.wire)
    again = reprice(made, deep, V100)
    assert again.prediction.step_s == pytest.approx(made.prediction.step_s, rel=1e-12)


def test_why_prices_a_weight_as_it_travels(graph):
    made = planned(graph, WORLD, "auto-lossy", "dp16", 1)
    weight = next(name for name in made.stages[0].chunks[0].parameters if name.endswith("weight"))
    lossy = [row.seconds for row in made.why(weight).rows]
    exact = [row.seconds for row in rewired(made, ("backend", "none")).why(weight, graph).rows]
    assert min(lossy) >= 0
    assert lossy != exact


def test_a_lossy_plan_says_so(graph):
    made = planned(graph, WORLD, "auto-lossy", "dp16", 1)
    codes = {wire.compressor for stage in made.stages for wire in stage.wire} - {"none"}
    assert codes
    assert any("lossy" in note for note in made.prediction.notes)
    text = made.explain(width=200)
    assert "which is lossy" in text
    assert all(f"compressed by {code} (" in text for code in codes)
    require_valid(made, runnable=True)


def test_a_code_that_gains_little_is_not_taken_by_itself(graph):
    freely, made = (planned(graph, V100, how, "dp4,tp2", 1) for how in (FREE, "auto-lossy"))
    assert any(wire.compressor != "none" for stage in freely.stages for wire in stage.wire)
    assert all(wire.compressor == "none" for stage in made.stages for wire in stage.wire)
    assert freely.prediction.step_s < made.prediction.step_s
    assert fastest_route_index([1.0, 0.8, 0.72], [False, True, True], 1.4) == 0
    assert fastest_route_index([1.0, 0.8, 0.72], [False, False, True], 1.4) == 1
    assert fastest_route_index([1.0, 0.8, 0.7], [False, False, True], 1.1) == 2
    assert fastest_route_index([1.0, 0.9], [True, True], 1.4) == 1


def test_auto_keeps_the_sum_exact(graph):
    made = planned(graph, V100, "auto", "dp16", 1)
    assert {wire.compressor for stage in made.stages for wire in stage.wire} == {"none"}
    assert not any("lossy" in note for note in made.prediction.notes)


# ---- what is asked


def test_a_search_chooses_no_code_by_itself_that_asks_for_another_optimizer():
    assert {"signsgd", "dgc1%"}.isdisjoint(LOSSY.compressors)
    assert Communication.asked("signsgd").compressors == ("none", "signsgd")


def test_names_open_what_they_name():
    assert Communication.asked("ring,bf16") == Communication(("backend", "ring"), ("none", "bf16"))
    assert Communication.asked(["bf16"]) == Communication(("backend",), ("none", "bf16"))
    assert Communication.asked("auto").compressors == ("none",)
    assert Communication.asked(None) == Communication.asked("exact") == EXACT


@pytest.mark.parametrize("asked", ["", "fast", "ring,fast", [], ["lossy"], "ring bf16"])
def test_unknown_names_are_refused_with_those_that_exist(asked):
    with pytest.raises(ValueError, match=r"communication is exact, auto, auto-lossy, or names.*ring.*topk1%.*but got"):
        Communication.asked(asked)


def test_a_document_with_an_unknown_wire_is_faulty(graph):
    made = planned(graph, V100, None)
    assert any("'fast'" in fault for fault in rewired(made, ("fast", "none")).check())
    with pytest.raises(ValueError, match="have no sum by 'backend' in code 'zip'"):
        reprice(rewired(made, ("backend", "zip")), graph, V100)


def test_the_command_takes_it(capsys):
    assert cli.main(["plan", "gpt-350m", "--cluster", "p3.16xlarge:2", "--communication", "fast"]) == cli.BAD_INPUT
    assert "communication is exact, auto, auto-lossy" in capsys.readouterr().err


def test_factors_are_priced_for_the_weights_that_a_model_trains() -> None:
    graph = graph_of("gpt", 16)
    allowed = Communication(("backend",), ("none", "powersgd2")).priced_for(graph)
    weights = [node.meta["type"] for node in graph.placeholders("parameter")]
    assert sorted(allowed.shapes) == sorted(weight.shape for weight in weights)
    elements = sum(weight.numel for weight in weights)
    shares = coded_messages(CODECS["powersgd2"], 4, 4, allowed.shapes)
    sent = sent_bytes(CODECS["powersgd2"], elements, 4, shapes=allowed.shapes)["all_reduce"]
    assert sum(share for _, share in shares) * 4 * elements == pytest.approx(sent)
    nominal, here = (MeshPricer(WORLD, 0, (16,), communication=one) for one in (replace(allowed, shapes=()), allowed))
    few, all_of_them = (gradient_routes(pricer, (0,), 4)[1].seconds(2**24) for pricer in (nominal, here))
    assert all_of_them > few  # small matrices have large factors
