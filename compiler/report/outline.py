"""The outline of a plan: for every layer its ops with their modules, shapes, seconds and messages, as the plan shards
them.

A plan names ops and weights; only the captured model knows the modules that they are in and their shapes, and only
prices say what a message takes. ``Plan.save`` keeps the outline, so that the picture of a plan needs no model. Layers
whose records are equal but for numbers in names share one::

    outline ::= {"layers": [kind of each layer], "kinds": [kind]}
    kind    ::= {"layer": the first of its layers, "stage", "ops": [op], "weights": [weight], "gathers": [message]}
    op      ::= {"name", "module", "op", "type", "labels", "spec", "forward_s", "backward_s", "again", "messages"}
    weight  ::= {"name", "type", "messages"}
    message ::= [phase, collective, mesh axes, bytes, seconds, tensor]    phase: "forward", "backward", "step"

Empty lists of messages and gathers are left out, and so is an "again" that is false. Bytes are what one device holds of
the tensor whole along the axes, the size that prices of collectives take. Seconds of gradients are their share of a
full bucket, before anything hides; "gathers" are the messages of ZeRO-3, one per layer.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch.fx import Node

from ...costmodel.cluster import Cluster
from ..cost.gradient_communication import Communication
from ..cost.layer_gathers import gather_seconds, layer_gathers, scatter_seconds
from ..cost.parameter_sharding import sharding_seconds
from ..cost.pricing import MeshPricer, gradient_type, partial_axes
from ..frontend.layers import Layering, cluster_layers
from ..frontend.mixed_precision import in_precision
from ..intra_op.section import Section, StageContext
from ..ir.graph import Graph, TensorType, op_name, output_of, tensor_operands, types_of
from ..ir.reshard import LOCAL_STEPS, step_bytes, steps_between
from ..ir.spec import Spec, local_shape, spec_text
from ..plan.plan import Chunk, ParameterSharding, Plan
from ..plan.recompute import Recompute, modes_in, recompute_of
from ..rules import MeshChoice
from .reprice import pinned_section

__all__ = ["outline"]

Message = list[Any]


def outline(plan: Plan, graph: Graph) -> dict[str, Any]:
    """The outline of a plan for the captured model, as plain JSON values. Raises ValueError for another model."""
    if plan.model != graph.fingerprint():
        raise ValueError(
            f"an outline is of the model that the plan is for, but got {graph.fingerprint()} and a plan for "
            f"{plan.model}; pass that model"
        )
    graph = in_precision(graph, plan.precision).with_batch(plan.microbatch_size)
    layering, cluster = cluster_layers(graph), Cluster.from_json(json.dumps(plan.cluster))
    recompute = recompute_of(graph, layering, modes_in(plan.stages), plan.schedule)
    kind_of: dict[int, int] = {}
    kinds: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    chunks: dict[Hashable, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for chunk in stage.chunks:
            layers, key = range(*chunk.layers), _key(plan, index, chunk, layering, cluster)
            if key in chunks:
                kind_of |= dict(zip(layers, chunks[key]))
                continue
            for layer, record in _Outliner(plan, index, chunk, graph, layering, recompute, cluster).records():
                text = re.sub(r"\d+", "#", json.dumps([r["name"] for r in _named(record)])) + _without_names(record)
                if text not in known:
                    known[text] = len(kinds)
                    kinds.append({"layer": layer, "stage": index, **record})
                kind_of[layer] = known[text]
            chunks[key] = [kind_of[layer] for layer in layers]
    return {"layers": [kind_of[layer] for layer in range(len(plan.layers))], "kinds": _compact(kinds)}


def _compact(value: Any) -> Any:
    """The value with numbers of five digits, without empty lists and what is false in rows."""
    if isinstance(value, dict):
        small = {name: _compact(item) for name, item in value.items()}
        return {
            name: item
            for name, item in small.items()
            if item is not False and (item != [] or name in ("ops", "weights"))
        }
    if isinstance(value, list):
        return [_compact(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _named(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*record["ops"], *record["weights"]]


def _without_names(record: Mapping[str, Any]) -> str:
    """The record as text without the names of tensors, ops and modules."""
    plain: dict[str, Any] = {"gathers": [message[:5] for message in record["gathers"]]}
    for part in ("ops", "weights"):
        plain[part] = [
            {
                **{k: v for k, v in row.items() if k not in ("name", "module")},
                "messages": [m[:5] for m in row["messages"]],
            }
            for row in record[part]
        ]
    return json.dumps(plain)


def _key(plan: Plan, index: int, chunk: Chunk, layering: Layering, cluster: Cluster) -> Hashable:
    """Equal for chunks that have equal records: equal layers, decisions and devices."""
    stage = plan.stages[index]
    hosts = tuple(cluster.host_of(device) - cluster.host_of(stage.devices[0]) for device in stage.devices)
    return (
        stage.mesh_shape,
        hosts,
        cluster.device(stage.devices[0]),
        tuple(layering.layers[layer].class_key for layer in range(*chunk.layers)),
        tuple(chunk.ops.values()),
        tuple(chunk.parameters.values()),
        tuple(chunk.receives.values()),
        tuple(chunk.sends.values()),
        chunk.recompute,
    )


class _Outliner:
    def __init__(
        self,
        plan: Plan,
        index: int,
        chunk: Chunk,
        graph: Graph,
        layering: Layering,
        recompute: Recompute,
        cluster: Cluster,
    ) -> None:
        stage = plan.stages[index]
        codes = Communication(weights=plan.code("weights")).priced_for(graph)
        self.pricer = MeshPricer(cluster, stage.devices[0], stage.mesh_shape, plan.optimizer, codes, mixed=graph.mixed)
        self.context = StageContext(graph, layering, self.pricer, plan.microbatches, recompute=recompute)
        self.plan, self.chunk, self.layering, self.recompute = plan, chunk, layering, recompute
        self.grad, self.nodes = layering.needs_grad, graph.by_name()

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(layer, its record without "layer" and "stage") of every layer of the chunk."""
        section = pinned_section(self.chunk, self.context)
        reshards = self._reshards(section)
        choices = dict(zip(zip(section.names, section.kinds), (some[0] for some in section.choices)))
        for layer in range(*self.chunk.layers):
            members = [self.nodes[name] for name in self.layering.layers[layer].ops]
            ops, read = [], dict[str, Node]()
            for node in members:
                read |= {o.name: o for o in tensor_operands(node) if (o.name, "parameter") in choices}
                choice = choices.get((node.name, "op"))
                if isinstance(choice, MeshChoice):
                    ops.append(self._op(node, choice, reshards[node.name]))
            pinned = {name: choices[name, "parameter"] for name in read}
            shardings = {name: choice for name, choice in pinned.items() if isinstance(choice, ParameterSharding)}
            weights = [self._weight(node, shardings[name]) for name, node in read.items()]
            yield layer, {"ops": ops, "weights": weights, "gathers": self._gathers(members, shardings)}

    def _op(self, node: Node, choice: MeshChoice, reshards: list[Message]) -> dict[str, Any]:
        price = self.pricer.op(node, choice, self.grad)
        return {
            "name": node.name,
            "module": str(node.meta.get("module", "")),
            "op": op_name(node).removeprefix("aten.").removesuffix(".default"),
            "type": str(types_of(node)[0]),
            "labels": ",".join(choice.labels),
            "spec": spec_text(choice.outputs[0].value),
            "forward_s": price.forward_s,
            "backward_s": price.backward_s,
            "again": node.name in self.recompute.repeated,
            "messages": [*reshards, *self._internal(node, choice)],
        }

    def _internal(self, node: Node, choice: MeshChoice) -> Iterator[Message]:
        """The messages inside an op."""
        operands, outputs = tensor_operands(node), types_of(node)
        for axis, message in choice.internal:
            if not message.is_sent(node, self.grad):
                continue
            side, index = message.like
            kind = types_of(operands[index])[0] if side == "input" else outputs[index]
            spec = (choice.inputs if side == "input" else choice.outputs)[index].value
            elements = prod(local_shape(kind.shape, spec, self.pricer.mesh_shape))
            size = message.count * elements * message.itemsize * message.scale
            seconds = message.count * self.pricer.axes[axis].seconds(message.kind, size / message.count)
            yield [message.phase, message.kind, [axis], size, seconds, node.name]

    def _reshards(self, section: Section) -> defaultdict[str, list[Message]]:
        """Op → the messages of the conversions of what it reads; of several consumers that share one, at the first;
        of what leaves the chunk, at the op that makes it."""
        out = defaultdict[str, list[Message]](list)
        for edge, (sources, targets) in zip(section.edges, section.edge_states):
            given, kind = sources[edge.source[0]], self.nodes[edge.name].meta["type"]
            seen = set[int]()
            for consumer, wanted in edge.consumers:
                target = int(wanted[0])
                if target in seen:
                    continue
                seen.add(target)
                want, name = targets[target], section.names[consumer]
                at = name if section.kinds[consumer] == "op" else output_of(self.nodes[edge.name])[0].name
                out[at] += self._steps("forward", edge.name, given.value, want.value, kind)
                if self.recompute.converts_again(edge.name):
                    out[at] += self._steps("backward", edge.name, given.value, want.value, kind)
                if edge.name in self.grad:
                    out[at] += self._steps("backward", edge.name, want.cotangent, given.cotangent, kind)
        return out

    def _steps(self, phase: str, name: str, source: Spec, target: Spec, kind: TensorType) -> Iterator[Message]:
        steps = steps_between(source, target)
        for step, size in step_bytes(source, steps, kind.shape, kind.dtype.itemsize, self.pricer.mesh_shape):
            if step.kind not in LOCAL_STEPS:
                collective = step.kind.removesuffix("_max")
                yield [
                    phase,
                    collective,
                    [step.axis],
                    size,
                    self.pricer.axes[step.axis].seconds(collective, size),
                    name,
                ]

    def _weight(self, node: Node, sharding: ParameterSharding) -> dict[str, Any]:
        source, kind, pricer = node.meta["source"], node.meta["type"], self.pricer
        messages: list[Message] = []
        if source.requires_grad and node.name in self.grad and sharding.gather != "microbatch":
            price = sharding_seconds(pricer, kind, sharding, self.plan.microbatches)
            often = sharding.reduce == "microbatch"
            size = pricer.local_bytes(gradient_type(kind, pricer.mixed), sharding.compute.value)
            seconds = price.reduce_microbatch_s + price.reduce_step_s
            axes = list(sharding.scattered_axes or partial_axes(sharding.compute, pricer.mesh_shape))
            if axes:
                collective = "reduce_scatter" if sharding.scattered_axes else "all_reduce"
                messages.append(["backward" if often else "step", collective, axes, size, seconds, source.name])
            if price.gather_step_s:
                held = pricer.local_bytes(kind, sharding.compute.value)
                messages.append(["step", "all_gather", axes, held, price.gather_step_s, source.name])
        return {"name": source.name, "type": str(kind), "messages": messages}

    def _gathers(self, members: Sequence[Node], shardings: Mapping[str, ParameterSharding]) -> list[Message]:
        often = {name: s for name, s in shardings.items() if s.gather == "microbatch" and s.scattered_axes}
        if not often:
            return []
        out: list[Message] = []
        for one in layer_gathers(members, self.layering.layer_of, often, self.grad, self.recompute):
            size = sum(self.pricer.local_bytes(kind, s.compute.value) for kind, s in one.values)
            ahead, axes, count = gather_seconds(self.pricer, one), list(one.axes), f"{len(one.values)} weights"
            out.append(["forward", "all_gather", axes, size, ahead, count])
            if one.again:
                out.append(["backward", "all_gather", axes, size, ahead, count])
            if one.sums:
                back = scatter_seconds(self.pricer, one)
                out.append(["backward", "reduce_scatter", axes, size, back, f"gradients of {len(one.sums)} weights"])
        return out
