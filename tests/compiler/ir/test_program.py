"""A lowered program makes its constants on the device that it is bound to."""

from __future__ import annotations

import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.lower import lower
from meshwright.costmodel.cluster import Cluster

from tests.support.planning import make_plan
from tests.support.zoo import ZOO


def test_constants_are_made_on_the_device_of_the_program():
    graph = capture(*ZOO["gpt"](8, dropout=0.1, device="meta"))
    plan = make_plan(graph, Cluster.parse("local:1"), 8, microbatches=1)
    program = lower(graph.with_batch(8), plan, 0)
    program.move_to(torch.device("meta"))
    makers = [node for node in program.graph.nodes if "device" in node.kwargs]
    assert makers
    assert {node.kwargs["device"] for node in makers} == {torch.device("meta")}
    assert "device(type='cpu')" not in program.module.code
