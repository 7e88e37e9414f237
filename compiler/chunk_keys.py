"""What all stages of a plan look up while their bytes are counted, and which of their programs run alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.fx

from ..costmodel.cluster import Cluster
from ..costmodel.compute import writes_scores
from .abstract import Memo
from .coded_room import wiring
from .graph import Graph, op_name
from .layers import differentiable
from .plan import Chunk, Plan, parameter_stages
from .recompute import PlanLayers

__all__ = ["ChunkKeys"]


class ChunkKeys:
    """What all stages of a plan look up."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.layers = PlanLayers(graph, plan)
        self.cluster = Cluster.from_json(json.dumps(plan.cluster))
        self.grad = differentiable(graph)
        self.holders = parameter_stages(plan.stages)
        self.sent = Counter((one.source, one.source_chunk, one.node) for one in plan.transfers)
        for index, stage in enumerate(plan.stages if plan.num_chunks > 1 else ()):
            for (k, chunk), other in product(enumerate(stage.chunks), stage.chunks):
                self.sent.update((index, k, name) for name in chunk.sends if name in other.receives)
        self.memo: Memo = {}

    @cached_property
    def layer_of(self) -> Mapping[str, int]:
        """Op → its layer."""
        return self.layers.layering.layer_of

    def structure(self, stage: int, place: int = 0) -> Hashable:
        """Equal for chunks that run alike: what their programs are made from, with the nodes numbered."""
        here, nodes = self.plan.stages[stage], self.graph.by_name()
        chunk = here.chunks[place]
        number: dict[str, int] = {}
        rows: list[Hashable] = []
        results = {(r.node, r.kind) for r in self.graph.results}
        layered = any(chunk.recompute) or any(home.pattern == "zero3" for home in chunk.parameters.values())
        first = chunk.layers[0]

        def look(x: Any) -> Hashable:
            if isinstance(x, torch.fx.Node):
                if x.name not in number:
                    number[x.name] = len(number)
                    rows.append(self._outside(x, chunk, stage))
                return _Number(number[x.name])
            if isinstance(x, list | tuple):
                return tuple([look(item) for item in x])
            return x if isinstance(x, int | float | str | None) else repr(x)

        for name, labels in chunk.ops.items():
            node = nodes[name]
            args = look(node.args), look(tuple(node.kwargs.items()))
            number[name] = len(number)
            layer = self.layer_of.get(name, first) - first if layered else 0
            kinds = tuple(kind for where, kind in sorted(results) if where == name)
            rows.append((op_name(node), args, labels, str(node.meta["type"]), name in self.grad, layer, kinds))
            for user in node.users:
                if op_name(user) == "getitem":
                    number[user.name] = len(number)
                    rows.append((number[name], look(user.args[1]), user.name in self.grad))
        sends = [(number.get(name), spec, self.sent[stage, place, name]) for name, spec in chunk.sends.items()]
        device = self.cluster.device(here.devices[0])
        modes = self.layers.recompute.modes[slice(*chunk.layers)]
        machine = device.kind, writes_scores(device), here.mesh_shape, wiring(self.plan, here), str(self.plan.codes)
        return machine, tuple(rows), tuple(sends), modes

    def _outside(self, node: torch.fx.Node, chunk: Chunk, stage: int) -> Hashable:
        """What a tensor is that the chunk does not make."""
        if node.name in chunk.receives:
            return "receive", chunk.receives[node.name], str(node.meta["type"]), node.name in self.grad
        source, kind = node.meta["source"], str(node.meta["type"])
        if source.kind != "parameter":
            return source.kind, chunk.sources.get(node.name), kind, source.batch_dim
        holders = self.holders[source.name]
        home = chunk.parameters[source.name]
        return "parameter", home, kind, source.requires_grad, node.name in self.grad, holders[0] == stage, len(holders)


class _Number(int):
    """The number of a tensor, unlike an integer argument."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(("number", int(self)))
