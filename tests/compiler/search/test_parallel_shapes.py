"""Every factorisation of 16 devices under every schedule: a plan of that shape, or a reason that a person accepts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.pipeline.families import known_schedules
from meshwright.compiler.search.parallel_shape import Strategy
from meshwright.compiler.search.space import CHUNKED
from meshwright.costmodel.cluster import Cluster

from tests.support.planning import make_plan
from tests.support.zoo import ZOO

DEVICES, BATCH = 16, 16
CLUSTER = Cluster.parse("p3.16xlarge:2")
POWERS = [2**k for k in range(5)]
SHAPES = [(pp, dp, DEVICES // (pp * dp)) for pp in POWERS for dp in POWERS if pp * dp <= DEVICES]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*ZOO["gpt"](BATCH, device="meta", layers=8))


@pytest.fixture(scope="module")
def layers_of(graph: Graph) -> Callable[[Strategy], int]:
    """How many layers a plan of this shape has."""
    return lru_cache(lambda strategy: len(make_plan(graph, CLUSTER, BATCH, strategy=strategy).layers))


@pytest.mark.parametrize("schedule", known_schedules())
@pytest.mark.parametrize(("pp", "dp", "tp"), SHAPES)
def test_every_shape_is_planned_or_refused_for_a_reason(
    graph: Graph, layers_of: Callable[[Strategy], int], pp: int, dp: int, tp: int, schedule: str
) -> None:
    strategy = Strategy(pp=pp, dp=dp, tp=tp)
    asked = {"strategy": strategy}
    if schedule in CHUNKED and (pp == 1 or 2 * pp > layers_of(strategy)):
        # one group has nobody to take turns with, and 16 groups need 32 chunks of layers
        with pytest.raises(InfeasibleError, match=r"\b(stages?|layers?)\b"):
            make_plan(graph, CLUSTER, BATCH, schedule=schedule, **asked)
        return
    plan = make_plan(graph, CLUSTER, BATCH, schedule=schedule, **asked)
    assert plan.schedule == schedule
    assert [len(stage.devices) for stage in plan.stages] == [dp * tp] * pp
    assert {CLUSTER.host_of(stage.devices[0]) for stage in plan.stages} == ({0} if pp == 1 else {0, 1})
    if dp * tp <= 8:  # as Megatron lays them: no stage spans two hosts, and none leaves devices idle
        assert all(CLUSTER.host_of(stage.devices[0]) == CLUSTER.host_of(stage.devices[-1]) for stage in plan.stages)
    assert sorted(device for stage in plan.stages for device in stage.devices) == list(range(DEVICES))
    assert plan.check() == []
    assert 0 < plan.prediction.bound_s <= plan.prediction.step_s
