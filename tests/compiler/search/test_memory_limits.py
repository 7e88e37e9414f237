"""Plans that fill the memory: what tables and rules believe of a stage, what it holds, and what is done about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search import build_plan, driver
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.models import GPT

from tests.support.clusters import FRAMEWORK, limited
from tests.support.planning import make_plan

WHOLE = 972  # MiB that the model takes with everything replicated


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, tokens = GPT(vocab=512, layers=4, hidden=1024, heads=8, sequence=64), torch.zeros(16, 64).long()
    return capture(model, (tokens, tokens))


def fitting(graph: Graph, mib: float, **asked: object) -> Plan:
    plan = make_plan(graph, limited(mib), 64, **{"space": Space.whole()} | asked)
    assert all(stage.peak_bytes - FRAMEWORK <= mib * 2**20 for stage in plan.prediction.stages)
    return plan


def test_what_tables_think_too_little_of_is_solved_again_within_less(graph, monkeypatch):
    """The stage fills what its tables left free, and then holds more than there is; what the tables chose fits."""
    tried = []

    def noted(search, candidate, limits_bytes=(), built=None):
        tried.append(tuple(limits_bytes))
        return build_plan.build_plan(search, candidate, limits_bytes, built)

    monkeypatch.setattr(driver, "build_plan", noted)
    steps = [
        fitting(graph, share * WHOLE, strategy=parse_strategy("dp8")).prediction.step_s for share in (0.3, 0.25, 0.22)
    ]
    assert any(tried)
    assert steps[0] < 0.95 * steps[1]
    assert steps[1] < 1.02 * steps[2]


def test_nothing_is_assembled_twice(graph, monkeypatch):
    """Where nothing fits, each candidate is put together once, and once within each limit."""
    tried = Counter()

    def noted(search, candidate, limits_bytes=(), built=None):
        held = [round(size) for size in candidate.pipeline.peak_bytes]
        tried[candidate.microbatches, candidate.schedule, f"{candidate.clock_s:.6g}", *held, *limits_bytes] += 1
        return build_plan.build_plan(search, candidate, limits_bytes, built)

    monkeypatch.setattr(driver, "build_plan", noted)
    with pytest.raises(InfeasibleError, match="missing"):
        make_plan(graph, limited(0.17 * WHOLE), 64, strategy=parse_strategy("dp8"), space=Space.whole())
    assert tried
    assert max(tried.values()) == 1


@pytest.mark.parametrize("asked", [{"strategy": "dp8"}, {"constraints": "stages = 1"}])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_rules_count_what_gathered_weights_hold(graph, monkeypatch, mode, asked):
    """Weights in blocks: under ZeRO-3 whole values have their gradients beside them in the backward; where ops convert
    weights for themselves nobody repeats that, so that the copies stay."""
    held = []

    def noted(search, plan):
        real = build_plan.with_stage_memories(search.graph.with_batch(search.global_batch // plan.microbatches), plan)
        stages = plan.prediction.stages[0], real.prediction.stages[0]
        held.append([one.memory_bytes["activations"] + one.memory_bytes["temporary"] for one in stages])
        return real

    monkeypatch.setattr(build_plan, "with_measured_memory", noted)
    space = replace(Space.whole(), residencies=("zero3" if "strategy" in asked else "replicated",), recompute=(mode,))
    asked = {key: parse_strategy(value) if key == "strategy" else value for key, value in asked.items()}
    fitting(graph, 0.6 * WHOLE, space=space, microbatches=4 if "strategy" in asked else 1, **asked)
    assert held
    for rules, real in held:
        assert real <= 1.2 * rules


@pytest.mark.parametrize("mib", [380, 230])
def test_small_weights_are_gathered_with_their_layers_only_if_nothing_else_is_allowed(graph, mib):
    def patterns(**asked):
        plan = fitting(graph, mib, constraints="no tensor parallel; stages = 1; microbatches = 1", **asked)
        (stage,) = plan.stages
        (chunk,) = stage.chunks
        return {
            is_norm: {sharding.pattern for name, sharding in chunk.parameters.items() if ("norm" in name) is is_norm}
            for is_norm in (True, False)
        }

    assert patterns() == {True: {"zero2"}, False: {"zero2", "zero3"}}
    assert patterns(space=Space.asked(zero=3))[True] == {"zero3"}
