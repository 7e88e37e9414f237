"""Mesh axes whose replicas may step by themselves."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import meshwright as mw
import pytest
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.independent_axes import loose_axes
from meshwright.compiler.plan.lower import lower
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space

from tests.support.clusters import fast_links
from tests.support.planning import make_plan
from tests.support.replicas import BATCH
from tests.support.zoo import ZOO


# ---- what is planned
@pytest.mark.parametrize("strategy", ["dp2", "pp2,dp2", "dp2,tp2", "2:dp2 + 2:dp2", None])
def test_plans_for_replicas_by_themselves_are_loose(strategy):
    """Where it is cheaper to cut a table by its width, and to gather what is read of it, such a plan is not offered."""
    graph = capture(*ZOO["gpt"](BATCH, device="meta"))
    found = {}
    for loose in (False, True):
        space = replace(Space.asked(zero=0, executable=True), loose=loose)
        shape = parse_strategy(strategy)
        plan = make_plan(
            graph,
            fast_links(shape.num_devices if shape else 2),
            BATCH,
            2,
            shape,
            "1f1b",
            space=space,
        )
        small = graph.with_batch(plan.microbatch_size)
        axes = [loose_axes(stage, [lower(small, plan, k)])[0] for k, stage in enumerate(plan.stages)]
        found[loose] = all(prod(stage.mesh_shape[a] for a in some) == 2 for stage, some in zip(plan.stages, axes))
    assert found[True]
    assert strategy != "dp2" or not found[False]


def test_no_plan_is_loose_whose_ops_need_the_whole_batch():
    graph, space = capture(*ZOO["convnet"](BATCH, device="meta")), Space.asked(zero=0, executable=True)
    with pytest.raises(mw.InfeasibleError):
        make_plan(graph, fast_links(2), BATCH, 1, parse_strategy("dp2"), space=replace(space, loose=True))
