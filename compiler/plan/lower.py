"""Lowering of a plan to local programs: each op on local shapes, with a reshard wherever the producer's pair is not the
consumer's.

One reshard per (tensor, target pair), shared by its consumers: autograd then sums their cotangents before the
conjugate, which is what the search priced. The program names mesh axes, not ranks: every device of a stage runs the
same module. Its nodes say in ``meta`` which "tensor" of the graph they hold and in which "pair"; an op, its "operands"
and the mesh axes that it sends "over" by itself.
Layers that the plan recomputes are named beside it (``ChunkProgram.segments``).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from ..frontend.layers import differentiable_nodes
from ..ir.graph import Graph, TensorType, op_name, output_of, tensor_operands
from ..ir.ops.local_ops import of_any_strides
from ..ir.ops.loss import counting_loss, deferrable_losses, early_count, exit_pair
from ..ir.ops.weight_gathers import gather_blocks
from ..ir.program import ChunkProgram, Exit, Slot
from ..ir.reshard import LOCAL_STEPS, Cut, ReshardStep, run_steps, steps_between
from ..ir.spec import Pair, R
from ..rules import pairs_choice, rule_for
from .plan import Chunk, Plan
from .recompute import PlanLayers
from .segments import segments_of

__all__ = ["lower"]


def lower(graph: Graph, plan: Plan, stage: int, chunk: int = 0, layers: PlanLayers | None = None) -> ChunkProgram:
    """The local program of one chunk. ``graph`` is at the plan's microbatch extent; layers: of this plan, if they are
    known. Raises ValueError for labels that no rule offers."""
    assert graph.batch == plan.microbatch_size, (graph.batch, plan.microbatch_size)
    part = plan.stages[stage].chunks[chunk]
    last = {name: s for s, st in enumerate(plan.stages) for c in st.chunks for name in c.ops}
    nodes = graph.by_name()  # one of several outputs is where its producer is
    made = {r.node: output_of(nodes[r.node])[0].name for r in graph.results}
    results = [r for r in graph.results if last.get(made[r.node]) == stage and made[r.node] in part.ops]
    exits = [(r.kind, r.name, r.node) for r in results]
    gathers = any(home.leaf != home.compute for home in part.parameters.values())
    if not gathers and not any(mode != "none" for mode in part.recompute):
        return lower_chunk(graph, part, plan.stages[stage].mesh_shape, exits)
    layers = layers or PlanLayers(graph, plan)
    program = lower_chunk(graph, part, plan.stages[stage].mesh_shape, exits, layers.layering.layer_of)
    segments = segments_of(program.graph, part, layers.layering, layers.recompute)
    return replace(program, segments=tuple(segments))


def lower_chunk(
    graph: Graph,
    part: Chunk,
    mesh_shape: Sequence[int],
    results: Sequence[tuple[str, str, str]],
    layer_of: Mapping[str, int] = MappingProxyType({}),
) -> ChunkProgram:
    """The local program of ``part`` on a mesh, with these (kind, name, node) results beside its sends. layer_of: of its
    ops, where weights are gathered layer by layer; without, all at once."""
    return _Lowering(graph, part, tuple(mesh_shape), layer_of).run(results)


class _Lowering:
    def __init__(self, graph: Graph, part: Chunk, mesh_shape: tuple[int, ...], layer_of: Mapping[str, int]) -> None:
        self.layer_of, self.gathered = layer_of, set[int]()  # layers whose weights are there
        self.gathers = 0  # so far
        self.blocks: dict[str, tuple[Node, Slot]] = {}  # parameters of which slots have blocks
        self.graph, self.part, self.mesh = graph, part, mesh_shape
        self.nodes = graph.by_name()
        self.grad = differentiable_nodes(graph)
        self.out = torch.fx.Graph()
        self.here: dict[str, Node] = {}  # tensor → its node in the local program
        self.pair: dict[str, Pair] = {}  # tensor → the pair it is made in
        self.converted: dict[tuple[str, Pair], Node] = {}
        self.collectives: Counter[str] = Counter()
        self.whole = Pair((R,) * len(mesh_shape), (R,) * len(mesh_shape))

    def run(self, results: Sequence[tuple[str, str, str]]) -> ChunkProgram:
        ops = [self.nodes[name] for name in self.part.ops if name in self.nodes]
        if len(ops) != len(self.part.ops):
            unknown = sorted(set(self.part.ops) - set(self.nodes))
            raise ValueError(f"the plan names ops that the model's graph does not have: {', '.join(unknown[:5])}")
        order = {node.name: i for i, node in enumerate(self.graph)}
        ops.sort(key=lambda node: order[node.name])
        slots = self._slots(ops)
        for node in ops:
            self._op(node)
        exits = [self._exit("send", name, name, Pair(spec, spec)) for name, spec in self.part.sends.items()]
        late = deferrable_losses(self.graph)
        for kind, name, result in results:
            target = exit_pair(self.pair[result]) if kind == "loss" and result in late else self.whole
            if kind == "buffer":
                slot = next((s for s in slots if s.kind == "buffer" and s.name == name), None)
                target = slot.pair if slot else self.whole
            exits.append(self._exit(kind, name, result, target))
        self.out.output(tuple(self._as(e.node, e.pair) for e in exits))
        constants = {s.name: self.graph.constants[s.name] for s in slots if s.kind == "constant"}
        return ChunkProgram(self.out, tuple(slots), tuple(exits), self.mesh, dict(self.collectives), constants)

    def _slots(self, ops: Sequence[Node]) -> list[Slot]:
        op_names = {node.name for node in ops}
        used = [operand for node in ops for operand in node.all_input_nodes]
        used += [self.nodes[name] for name in self.part.sends]
        slots: dict[str, Slot] = {}
        for operand in used:
            producer, _ = output_of(operand)
            if operand.name in self.part.receives:
                pair = self.part.receives[operand.name]
                slots[operand.name] = Slot("receive", operand.name, operand.name, pair, operand.meta["type"])
            elif operand.op == "placeholder" and operand.name not in slots:
                slots[operand.name] = self._placeholder(operand)
            else:
                assert operand.op == "placeholder" or producer.name in op_names, (
                    f"{operand.name} is neither made nor received here"
                )
        for name, slot in slots.items():
            self._made(name, self.out.placeholder(name), slot.pair)
            if slot.kind == "parameter" and slot.pair != self.part.parameters[slot.name].compute:
                self.blocks[name] = self.here[name], slot
        return list(slots.values())

    def _placeholder(self, node: Node) -> Slot:
        source = node.meta["source"]
        table: Mapping[str, Pair] = self.part.sources
        if source.kind == "parameter":
            if source.name not in self.part.parameters:
                raise ValueError(
                    f"the plan's layers {self.part.layers} use parameter {source.name!r}, but do not say where it lives"
                )
            pair = self.part.parameters[source.name].leaf
        else:
            pair = table.get(node.name, self.whole)
        kind, grad = source.kind, source.requires_grad
        return Slot(kind, source.name, node.name, pair, node.meta["type"], source.batch_dim, source.aliases, grad)

    def _gather(self, layer: int) -> None:
        """Before the first op of a layer: what it reads of parameters that are stored in blocks, whole; in one message
        per kind. A parameter of several layers is gathered for each."""
        if not self.blocks or layer in self.gathered:
            return
        self.gathered.add(layer)
        ops = [self.nodes[name] for name in self.part.ops if self.layer_of.get(name, 0) == layer]
        groups: dict[Any, list[str]] = {}
        cuts: dict[str, Cut] = {}
        for name in dict.fromkeys(o.name for op in ops for o in op.all_input_nodes if o.name in self.blocks):
            _, slot = self.blocks[name]
            cuts[name] = Cut.between(name, self.part.parameters[slot.name].compute.value, slot.pair.value, self.mesh)
            groups.setdefault((cuts[name].axes, slot.type.dtype, slot.requires_grad), []).append(name)
        for (_, dtype, trained), names in groups.items():
            literal = tuple((cuts[name].axes, cuts[name].dims, cuts[name].sizes) for name in names)
            blocks = [self.blocks[name][0] for name in names]
            gathered = self.out.call_function(gather_blocks, (blocks, literal, self.gathers, dtype))
            self.gathers += 1
            gathered.meta.update(tensor=names[0], layer=layer)
            for index, name in enumerate(names):
                # ops of the model have names of their own, by which layers know them
                whole = self.out.create_node("call_function", operator.getitem, (gathered, index), name=f"whole_{name}")
                self._made(name, whole, self.part.parameters[self.blocks[name][1].name].compute)
                whole.meta.update(layer=layer)
                self.converted = {key: value for key, value in self.converted.items() if key[0] != name}
            self.collectives["forward all_gather"] += 1
            self.collectives["backward all_gather"] += 1
            if trained:
                self.collectives["backward reduce_scatter"] += 1

    def _op(self, node: Node) -> None:
        self._gather(self.layer_of.get(node.name, 0))
        labels = self.part.ops[node.name]
        choice = pairs_choice(node, labels, self.mesh)
        if not choice.executable:
            raise ValueError(
                f"{node.name} has a program for every label but those that are planned only, but got {list(labels)}; "
                "plan with executable choices"
            )
        operands = [self._as(o.name, pair) for o, pair in zip(tensor_operands(node), choice.inputs, strict=True)]
        given = iter(operands)
        target, args, kwargs = rule_for(node).localize(node, labels, self.mesh)
        target = of_any_strides(target)
        args = torch.fx.map_arg(args, lambda _: next(given))
        kwargs = torch.fx.map_arg(kwargs, lambda _: next(given))
        new = self.out.create_node("call_function", target, args, kwargs, name=node.name)
        new.meta.update(tensor=node.name, operands=operands, over=set())
        for axis, message in choice.internal:
            if message.is_sent(node, self.grad):
                self.collectives[f"{message.phase} {message.kind}"] += message.count
                new.meta["over"].add(axis)
            assert self.mesh[axis] > 1
        if not isinstance(node.meta["type"], tuple):
            self._made(node.name, new, choice.outputs[0])
            return
        self.here[node.name] = new
        for user in node.users:
            if op_name(user) == "getitem":
                _, index = output_of(user)
                taken = self.out.create_node("call_function", operator.getitem, (new, index), name=user.name)
                self._made(user.name, taken, choice.outputs[index])

    def _made(self, name: str, node: Node, pair: Pair) -> None:
        self.here[name], self.pair[name] = node, pair
        node.meta.update(tensor=name, pair=pair)

    def _as(self, name: str, target: Pair) -> Node:
        """The local node that holds tensor ``name`` in ``target``; the reshard is made once."""
        source, grad = self.pair[name], name in self.grad
        forward = steps_between(source.value, target.value)
        backward = steps_between(target.cotangent, source.cotangent) if grad else ()
        if not forward and not backward:
            return self.here[name]
        key = (name, target if grad else Pair(target.value, target.value))
        if key not in self.converted:
            self.converted[key] = self._conversion(self.nodes[name], forward, backward)
            self.converted[key].meta.update(tensor=name, pair=target, numel=self.nodes[name].meta["type"].numel)
            for phase, steps in (("forward", forward), ("backward", backward)):
                for step in steps:
                    if step.kind not in LOCAL_STEPS:
                        self.collectives[f"{phase} {step.kind.removesuffix('_max')}"] += 1
        return self.converted[key]

    def _conversion(self, node: Node, forward: Sequence[ReshardStep], backward: Sequence[ReshardStep]) -> Node:
        """``run_steps`` on the local node of a tensor; the sum of a count of targets starts before there are logits."""
        loss = counting_loss(node)
        if loss is not None and all(step.kind == "all_reduce" for step in forward):
            return early_count(self.out, self.here[loss.name], forward)
        literal: list[Any] = [tuple(tuple(step) for step in steps) for steps in (forward, backward)]
        return self.out.call_function(run_steps, (self.here[node.name], *literal))

    def _exit(self, kind: str, name: str, node: str, pair: Pair) -> Exit:
        out_type: TensorType = self.nodes[node].meta["type"]
        return Exit(kind, name, node, pair, out_type)
