"""Odd models, clusters and wishes: a plan that is right, or one clear error. And searches that end early."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.requests import memory_share
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import FRAMEWORK_BYTES
from torch import Tensor, nn

from tests.support import zoo
from tests.support.planning import make_plan, make_plans

CPU = Cluster.preset("cpu")


def with_devices(number: int, mib: float | None = None) -> Cluster:
    """One host of ``number`` devices, each with ``mib`` MiB beside the framework."""
    host = replace(CPU.hosts[0], num_devices=number)
    if mib is not None:
        memory = int(mib * 2**20) + FRAMEWORK_BYTES[host.device.kind]
        host = replace(host, device=replace(host.device, memory_bytes=memory))
    return replace(CPU, hosts=(host,))


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, args, kwargs = zoo.gpt(layers=2)
    return capture(model, args, kwargs)


def holds(plan: Plan, devices: int) -> None:
    """The plan is consistent, and every layer is in one chunk, in the order in which data flow through them."""
    assert plan.check() == []
    assert plan.num_devices == devices
    places = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked).places()
    covered = [k for stage, chunk in places for k in range(*plan.stages[stage].chunks[chunk].layers)]
    assert covered == list(range(len(plan.layers)))
    assert plan.prediction.step_s >= plan.prediction.bound_s > 0


# ---- odd sizes


@pytest.mark.parametrize("devices", [1, 7, 13])
def test_one_device_and_prime_numbers_of_devices(graph: Graph, devices: int) -> None:
    holds(make_plan(graph, with_devices(devices), 8, 2, space=Space.executable()), devices)


def test_a_batch_of_one_sample(graph: Graph) -> None:
    plan = make_plan(graph, with_devices(2), 1, space=Space.whole())
    holds(plan, 2)
    assert plan.microbatches == 1


class OneOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dot(x, self.weight)


class NoWeights(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_a_model_of_one_op_and_one_without_weights() -> None:
    x = torch.ones(8)
    made = mw.plan(OneOp(), with_devices(2), example_inputs=(x,), batch_dims={"args.0": None}, global_batch=1)
    holds(made, 2)
    with pytest.raises(ValueError, match="computes something from its parameters, but this one's graph uses none"):
        mw.plan(NoWeights(), with_devices(2), example_inputs=(torch.ones(8, 4),))


# ---- nothing fits


def test_a_weight_that_no_device_holds_is_named() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1021, 1021 * 3, bias=False)), torch.zeros(8, 1021)
    with pytest.raises(InfeasibleError) as caught:
        mw.plan(model, with_devices(2, 16), example_inputs=(x,), loss_fn=lambda out: out.mean())
    assert re.search(r"the weight 0\.weight alone takes 47\.7 MiB .* below 47\.7 MiB per device", str(caught.value))


def memory_of(plan: Plan) -> float:
    """MiB of the fullest device beside the framework."""
    return max(s.peak_bytes - s.memory_bytes["framework"] for s in plan.prediction.stages) / 2**20


def test_what_is_missing_where_and_what_would_fit_is_said(graph: Graph) -> None:
    strategy, plain = parse_strategy("dp2"), Space()
    needs = memory_of(make_plan(graph, with_devices(2), 64, 1, strategy, space=plain))
    tight = with_devices(2, 0.5 * needs)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(graph, tight, 64, 1, strategy, space=plain)
    text = str(caught.value)
    assert "stage 0 of 1 (token_embedding … head on 2 devices)" in text
    assert "most of it is activations" in text
    assert "a plan fits with more microbatches" in text
    assert make_plan(graph, tight, 64, None, strategy, space=plain)  # it was no empty promise


def test_recompute_and_sharding_are_offered_where_they_would_fit(graph: Graph) -> None:
    strategy = parse_strategy("dp4")
    whole = make_plan(graph, with_devices(4), 4, 1, strategy)
    bill = whole.prediction.stages[0].memory_bytes
    states = (bill["parameters"] + bill["gradients"] + bill["optimizer"]) / 2**20
    with pytest.raises(InfeasibleError) as caught:
        make_plan(graph, with_devices(4, 0.8 * states), 4, 1, strategy)
    assert re.search(r"most of it is optimizer state .* with zero=[123]", str(caught.value))


# ---- searches that end early


def at(number: int) -> Callable[[str, float], None]:
    """Progress that is interrupted at its ``number``-th report, as by Ctrl-C."""
    calls: list[Any] = []

    def report(name: str, fraction: float) -> None:
        calls.append(name)
        if len(calls) == number:
            raise KeyboardInterrupt

    return report


def test_a_time_limit_gives_the_best_so_far_with_its_gap(graph: Graph) -> None:
    plan = make_plan(graph, with_devices(4), 16, space=Space.whole(), alternatives=True, time_limit_s=1e-3)
    holds(plan, 4)
    assert any("the time limit passed" in note for note in plan.prediction.notes)
    assert plan.prediction.alternatives == ()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_interrupt_gives_the_best_so_far(graph: Graph, number: int) -> None:
    plan = make_plan(graph, with_devices(4), 16, space=Space.executable(), progress=at(number))
    holds(plan, 4)
    assert any("interrupted" in note for note in plan.prediction.notes) or number > 2


def interrupt_after_a_plan(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The method ``name`` of ``tables.SearchTables`` is interrupted once, the first time after a plan was built."""
    from meshwright.compiler.search import driver, tables

    original, build, built, done = getattr(tables.SearchTables, name), driver.build_plan, list[Any](), list[Any]()

    def building(*arguments: Any, **rest: Any) -> Any:
        built.append(build(*arguments, **rest))
        return built[-1]

    def interrupted(*arguments: Any, **rest: Any) -> Any:
        if built and not done:
            done.append(True)
            raise KeyboardInterrupt
        return original(*arguments, **rest)

    monkeypatch.setattr(driver, "build_plan", building)
    monkeypatch.setattr(tables.SearchTables, name, interrupted)


@pytest.mark.parametrize("name", ["rows", "compose", "lower_bound"])
def test_an_interrupt_keeps_the_plans_that_there_are(graph: Graph, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    interrupt_after_a_plan(monkeypatch, name)
    plan = make_plan(graph, with_devices(4), 16, space=Space.whole())
    holds(plan, 4)
    assert any("interrupted" in note for note in plan.prediction.notes)


def test_an_interrupt_before_anything_is_known_ends_it(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.compiler.search.tables.SearchTables.compute_pace_bounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_plan(graph, with_devices(2), 16)


# ---- several plans


def test_the_best_plans_are_distinct_and_in_order(graph: Graph) -> None:
    plans = make_plans(graph, with_devices(4), 16, space=Space.executable(), top_k=3)
    assert [p.prediction.step_s for p in plans] == sorted(p.prediction.step_s for p in plans)
    assert len({str(p.to_json()["stages"]) + str(p.microbatches) for p in plans}) == 3


def test_the_front_trades_time_for_memory() -> None:
    model, args, _ = zoo.gpt(layers=2)
    front = mw.pareto(model, with_devices(2), example_inputs=args, global_batch=64, points=4, recompute="none", zero=0)
    assert 2 <= len(front) <= 4
    assert [p.prediction.step_s for p in front] == sorted(p.prediction.step_s for p in front)
    shares = [memory_share(p) for p in front]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares)
    for plan in front:
        holds(plan, 2)
