"""A plan as large as any, made of two layers of a small one: nothing was searched for it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import meshwright as mw
import torch
from meshwright.compiler.plan.plan import Chunk, Plan, Stage, Transfer
from meshwright.costmodel.cluster import Cluster
from torch import nn

__all__ = ["large_plan", "small_plan"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def small_plan(cluster: str = "dgx-h100", devices: int = 4, **arguments: object) -> Plan:
    """A plan of four blocks, by default on two stages of two devices with four microbatches."""
    with torch.device("meta"):
        network, x = Network(), torch.zeros(32, 64)
    hosts = Cluster.preset(cluster)
    host = replace(hosts.hosts[0], num_devices=devices)
    asked = {"strategy": "pp2,dp2", "microbatches": 4, "cache": False, **arguments}
    return mw.plan(network, replace(hosts, hosts=(host,)), example_inputs=(x, x), **asked)  # type: ignore[call-overload]


def large_plan(layers: int = 96, stages: int = 64, devices: int = 1024, microbatches: int = 1024) -> Plan:
    """So many layers dealt over stages that are alike, under zb-h1."""
    small = small_plan(schedule="zb-h1")
    chunk, predicted = small.stages[1].chunks[0], small.prediction.stages[1]
    each = devices // stages
    cluster = Cluster.parse(f"dgx-h100:{devices // 8}")
    bounds = [round(k * layers / stages) for k in range(stages + 1)]
    made, names = [], [f"blocks.{k}.0" for k in range(layers)]
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        ops = {f"{name}_{k}": labels for k in range(first, end) for name, labels in chunk.ops.items()}
        weights = {
            f"blocks.{k}.{n.split('.', 2)[2]}": home for k in range(first, end) for n, home in chunk.parameters.items()
        }
        copied = Chunk((first, end), ops, weights, {}, {}, {}, ())
        made.append(Stage(tuple(range(s * each, (s + 1) * each)), (each,), (copied,)))
    each_s = predicted.forward_s / 10
    transfers = tuple(Transfer(f"x_{s}", s, s + 1, each_s, each_s) for s in range(stages - 1))
    like = tuple(replace(predicted, forward_s=predicted.forward_s * (1 + 0.01 * (s % 5))) for s in range(stages))
    return replace(
        small, cluster=json.loads(cluster.to_json()), layers=tuple(names), stages=tuple(made), transfers=transfers,
        microbatches=microbatches, global_batch=microbatches * 16, graph=None,
        prediction=replace(
            small.prediction, stages=like,
            step_s=1.1 * microbatches * (like[-1].forward_s + predicted.backward_s),
        ),
    )  # fmt: skip
