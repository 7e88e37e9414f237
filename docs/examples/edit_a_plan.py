"""Change a plan by hand and see what still holds.

Takes the plan of a small network on two devices, turns one matmul from a split of its outputs to a split of its batch,
and lowers both: the collectives that each program runs show what the edit costs. The edited plan still computes what
one device computes.

    python edit_a_plan.py
"""

from __future__ import annotations

import json

import meshwright as mw
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.plan.lower import lower
from torch import nn


class Network(nn.Module):
    """Two matmuls and a mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss: a scalar."""
        return self.down(torch.relu(self.up(x))).square().mean()


def main() -> None:
    """Plan, edit, compare."""
    with torch.device("meta"):
        network, x = Network(), torch.zeros(64, 256)
    cluster = mw.Cluster.preset("cpu")
    plan = mw.plan(network, cluster, example_inputs=(x,), strategy="tp2", microbatches=1, executable=True)
    graph = capture(network, (x,)).with_batch(plan.microbatch_size)
    ops = plan.stages[0].chunks[0].ops
    print("as planned:", {name: ",".join(labels) for name, labels in ops.items()})
    print("  per microbatch:", dict(lower(graph, plan, 0).collectives))

    document = json.loads(json.dumps(plan.to_json()))
    first = next(name for name in ops if name.startswith("linear"))
    document["stages"][0]["chunks"][0]["ops"][first] = "b0"  # the first dim of the batch, instead of an output's
    edited = mw.Plan.from_json(document)
    print("edited, check:", edited.check() or "nothing wrong")
    print("  per microbatch:", dict(lower(graph, edited, 0).collectives))
    print(" ", mw.verify(edited, network, example_inputs=(x,)))

    document["stages"][0]["chunks"][0]["ops"][first] = "diagonal"
    try:
        lower(graph, mw.Plan.from_json(document), 0)
    except ValueError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
