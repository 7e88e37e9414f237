"""Modules that cannot be traced become one op, by mark or by themselves: training equals the user's model, and what an
op cannot keep is refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.ir.opaque_module import OpaqueModule
from meshwright.compiler.rules import rule_for
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

from tests.support.untraceable import Keeping, Model, batch

STEPS = 3


def opaque_ops(graph: Graph) -> list[Any]:
    return [node for node in graph.ops() if isinstance(node.target, OpaqueModule)]


def single_device(middle: str) -> tuple[list[float], dict[str, Tensor]]:
    model, inputs = Model(middle), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def trained(middle: str, strategy: str | None, options: dict[str, Any]) -> Any:
    """On one rank of the job."""
    from meshwright.costmodel.cluster import Cluster

    parallel = mw.parallelize(
        Model(middle), Cluster.parse(f"local:{torch.distributed.get_world_size()}"), example_inputs=batch(),
        optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.1), strategy=strategy, check_capture=True, **options,
    )  # fmt: skip
    losses = [float(parallel.train_step(*batch())) for _ in range(STEPS)]
    return losses, parallel.full_state_dict(), parallel.plan.prediction.notes


@pytest.mark.parametrize(
    ("middle", "strategy", "options"),
    [
        ("NaiveMixture", "dp2", {}),
        ("NaiveMixture", "pp2", {"recompute": "full", "microbatches": 2}),
        ("NaiveMixture", "tp2", {}),
        ("NaiveMixture", "dp2", {"zero": 3}),
        ("NaiveMixture", None, {}),
        ("Branch", "dp2", {"microbatches": 1}),
        ("Branch", "pp2", {"microbatches": 1}),
        ("Branch", "tp2", {"microbatches": 1}),
        ("Branch", None, {"microbatches": 1}),
    ],
)
def test_training_equals_the_users_model(ranks, middle: str, strategy: str | None, options: dict[str, Any]) -> None:
    losses, state = single_device(middle)
    (found, weights, notes), _ = ranks.run(2, trained, middle, strategy, options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=0)
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)
    assert any("blocks.0.middle" in note and middle in note for note in notes)
