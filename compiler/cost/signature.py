"""The name of an op's local work, and how to run exactly that work again so that it can be timed.

    signature ::= op "(" argument, … ")" [ " <- " cotangent, … ]
    argument  ::= dtype "[" local shape "]" [layout] [mark] | literal | name "=" literal
    mark      ::= "*"  an activation whose gradient is needed   |   "^"  a parameter whose gradient is needed
    layout    ::= "@0.2.1"  the dims in the order of memory where that is not the order of the shape (``strides``)
    cotangent ::= layout | "_" (contiguous) | "-" (none arrives); written only where one is not "_"

    aten.linear.default(f32[512,256]*, f32[1024,256]^, f32[1024]^)

Equal local work has equal text, whatever the mesh: cuts appear as local shapes, and for ops that mask what other
devices hold as the number of blocks. Numbers that cannot change the work are written "~". Ops that move nothing (views
that do not copy) have no signature: the empty text.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...costmodel.op_timing import normal_values
from ..frontend.layers import differentiable_nodes
from ..frontend.strides import DimOrder, NodeLayout, OneDevice, copy_with_layout, note_layouts
from ..ir.comm import Context, use_context
from ..ir.custom_function import CustomFunction
from ..ir.graph import Graph, TensorType, op_name, output_of, tensor_operands, types_of
from ..ir.probe import OpInstance, Probe
from ..ir.spec import local_shape
from ..plan.plan import Plan
from ..rules import MeshChoice, pairs_choice, rule_for

__all__ = ["plan_probes", "signature", "sum_signature"]


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b1",
}  # fmt: skip
_SILENT = ("device", "layout", "pin_memory", "op_index", "cuts")  # arguments that do not change the work


# ---- the text


def signature(node: Node, choice: MeshChoice, mesh_shape: Sequence[int], needs_grad: frozenset[str]) -> str:
    """Return the signature of ``node`` as one device of a mesh runs it under ``choice``; "" if it is free.

    needs_grad: names of the nodes through which gradients flow (``layers.differentiable``).
    """
    rule = rule_for(node)
    layout: NodeLayout | None = node.meta.get("layout")
    flows = node.name in needs_grad
    if rule.cost_kind in ("view", "free") and not (
        layout is not None and (layout.copies_forward or (flows and layout.copies_backward))
    ):
        return ""
    target, args, kwargs = rule.localize(node, choice.labels, mesh_shape)
    shapes = [
        local_shape(types_of(operand)[0].shape, pair.value, mesh_shape)
        for operand, pair in zip(tensor_operands(node), choice.inputs)
    ]
    queue = iter(shapes)
    name = _name(target)
    exact = ".pow." in name

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return _operand_text(value, next(queue), flows, needs_grad)
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(text, value)) + "]"
        if isinstance(value, float) and not exact and value not in (0.0, 1.0, -1.0):
            return "~"
        return _SHORT[value] if isinstance(value, torch.dtype) and value in _SHORT else _name(value)

    names = _silent_positions(target)
    parts = [text(value) for k, value in enumerate(args) if k not in names]
    for key, value in kwargs.items():
        if key.endswith("_axes"):
            parts.append(f"{key.removesuffix('axes')}blocks={prod(mesh_shape[axis] for axis in value)}")
        elif key not in _SILENT:
            parts.append(f"{key}={text(value)}")
    arriving = ""
    if flows and layout is not None and (any(layout.cotangents) or not all(layout.flows)):
        arriving = " <- " + ", ".join(
            ("_" if lies is None else str(lies)) if comes else "-"
            for lies, comes in zip(layout.cotangents, layout.flows)
        )
    return f"{name}({', '.join(parts)}){arriving}"


def _name(value: Any) -> str:
    if isinstance(value, CustomFunction):  # two of them may have equal operands
        return value.op_name
    if callable(value) and not isinstance(value, torch._ops.OpOverload):
        return f"meshwright.{value.__name__}"
    return str(value)


def _silent_positions(target: Any) -> tuple[int, ...]:
    """Positions of the arguments of our own functions that do not change the work."""
    positions = {"dropout": (1, 2, 3), "random_tensor": (2, 4), "scaled_mean": (1,)}
    return positions.get(getattr(target, "__name__", ""), ()) if not isinstance(target, torch._ops.OpOverload) else ()


def _operand_text(operand: Node, shape: Sequence[int], flows: bool, needs_grad: frozenset[str]) -> str:
    kind = types_of(operand)[0]
    text = f"{_SHORT.get(kind.dtype, str(kind.dtype))}[{','.join(map(str, shape))}]"
    if (layout := _operand_layout(operand)) is not None:
        text += str(layout)
    if flows and kind.is_float and operand.name in needs_grad:
        text += "^" if operand.op == "placeholder" else "*"
    return text


def _operand_layout(operand: Node) -> DimOrder | None:
    producer, k = output_of(operand)
    layout: NodeLayout | None = producer.meta.get("layout")
    return None if layout is None else layout.outputs[k]


def sum_signature(shape: Sequence[int], dtype: torch.dtype) -> str:
    """The signature of adding a tensor into one of its size: a second cotangent, a second microbatch's gradient."""
    return f"meshwright.sum({_SHORT.get(dtype, str(dtype))}[{','.join(map(str, shape))}])"


def plan_probes(graph: Graph, plan: Plan) -> dict[str, Probe]:
    """Every signature that the stages of ``plan`` run, once, with its probe. ``graph``: the captured model, at any
    batch extent."""
    small = graph.with_batch(plan.microbatch_size)
    note_layouts(small)
    grad = differentiable_nodes(small)
    nodes = small.by_name()
    probes: dict[str, Probe] = {}
    sums: set[tuple[tuple[int, ...], torch.dtype]] = set()
    for stage in plan.stages:
        for chunk in stage.chunks:
            for name, labels in chunk.ops.items():
                if op_name(nodes[name]) == "getitem":
                    continue
                choice = pairs_choice(nodes[name], labels, stage.mesh_shape)
                text = signature(nodes[name], choice, stage.mesh_shape, grad)
                if text and text not in probes:
                    probes[text] = _probe(text, nodes[name], choice, stage.mesh_shape, grad)
                for operand, pair in zip(tensor_operands(nodes[name]), choice.inputs):
                    kind = types_of(operand)[0]
                    again = operand.op == "placeholder" and plan.microbatches > 1
                    if name in grad and operand.name in grad and (again or len(operand.users) > 1):
                        sums.add((local_shape(kind.shape, pair.value, stage.mesh_shape), kind.dtype))
    return probes | {sum_signature(*one): _sum_probe(*one) for one in sorted(sums, key=str)}


def _sum_probe(shape: Sequence[int], dtype: torch.dtype) -> Probe:
    def make(device: Any, weights: bool = True) -> OpInstance:
        total, addend = torch.ones(2, *shape, dtype=dtype, device=device).unbind(0)
        return OpInstance(lambda: total.add_(addend), (total, addend), lambda _, __: None)

    return Probe(sum_signature(shape, dtype), make, 2 * prod(shape) * dtype.itemsize)


def _probe(text: str, node: Node, choice: MeshChoice, mesh_shape: Sequence[int], needs_grad: frozenset[str]) -> Probe:
    target, args, kwargs = rule_for(node).localize(node, choice.labels, mesh_shape)
    if target is torch.ops.aten.view.default:  # as in ``lower``
        target = torch.ops.aten.reshape.default
    blocks = {key: prod(mesh_shape[axis] for axis in axes) for key, axes in kwargs.items() if key.endswith("_axes")}
    operands = tensor_operands(node)
    kinds = [
        TensorType(local_shape(types_of(operand)[0].shape, pair.value, mesh_shape), types_of(operand)[0].dtype)
        for operand, pair in zip(operands, choice.inputs)
    ]
    outputs = [
        TensorType(local_shape(kind.shape, pair.value, mesh_shape), kind.dtype)
        for kind, pair in zip(types_of(node), choice.outputs)
    ]
    lies = [_operand_layout(operand) for operand in operands]
    layout: NodeLayout | None = node.meta.get("layout")
    flows = node.name in needs_grad
    wanted = [flows and kind.is_float and o.name in needs_grad for o, kind in zip(operands, kinds)]
    is_weight = [operand.op == "placeholder" for operand in operands]
    source = _Operands(node, kinds, blocks)

    def make(device: Any, weights: bool = True) -> OpInstance:
        tensors = source(torch.device(device), lies)
        for k, x in enumerate(tensors):
            x.requires_grad_(wanted[k] and (weights or not is_weight[k]))
        queue = iter(tensors)
        placed, named = torch.fx.map_arg((args, dict(kwargs)), lambda _: next(queue))
        named = dict(named)
        if "device" in named:
            named["device"] = torch.device(device)
        context = Context(OneDevice(mesh_shape))

        def bound() -> Any:
            with use_context(context):
                return target(*placed, **named)

        plain = isinstance(target, torch._ops.OpOverload)
        call = (lambda: target(*placed, **named)) if plain else bound

        def cotangent(k: int, y: Tensor) -> Tensor | None:
            if layout is not None and not layout.flows[k]:
                return None
            whole = normal_values(y.shape, y.dtype, y.device, torch.Generator().manual_seed(k))
            return whole if layout is None else copy_with_layout(whole, layout.cotangents[k])

        return OpInstance(call, tensors, cotangent)

    moved = [*kinds, *outputs] + (outputs if flows else [])
    return Probe(text, make, sum(kind.nbytes for kind in moved))


class _Operands:
    """Random operands of one op on local shapes, as the op's rule makes valid ones."""

    def __init__(self, node: Node, kinds: Sequence[TensorType], blocks: Mapping[str, int]) -> None:
        stand_in = torch.fx.Graph()
        places = []
        for k, kind in enumerate(kinds):
            places.append(stand_in.placeholder(f"x{k}"))
            places[-1].meta["type"] = kind
        queue = iter(places)
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda _: next(queue))
        self.node = stand_in.create_node("call_function", node.target, args, kwargs)
        self.node.meta.update(type=node.meta["type"], module="", line="")
        self.kinds, self.blocks = kinds, blocks
        self.alive: list[weakref.ref[Tensor]] = []

    def __call__(self, device: torch.device, lies: Sequence[DimOrder | None]) -> list[Tensor]:
        """Operands in new memory, without gradient; copies of an earlier call's while those are in use."""
        earlier = [x.detach() for reference in self.alive if (x := reference()) is not None]
        if len(earlier) == len(self.kinds):
            return [copy_with_layout(x.to(device), lie) for x, lie in zip(earlier, lies)]
        generator = torch.Generator().manual_seed(0)
        tensors = rule_for(self.node).example_operands(self.node, generator)
        if tensors is None:
            tensors = [_filled(kind, generator, device) for kind in self.kinds]
        tensors = [self._spread(x, generator).to(device) for x in tensors]
        tensors = [copy_with_layout(x, lie) if lie else x.contiguous() for x, lie in zip(tensors, lies)]
        self.alive = [weakref.ref(x) for x in tensors]
        return tensors

    def _spread(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Indices over all blocks where this device holds one of several."""
        count = max(self.blocks.get(key, 1) for key in ("vocab_axes", "expert_axes", "dispatch_axes"))
        if count == 1 or x.is_floating_point():
            return x
        of_experts = "expert_axes" in self.blocks or "dispatch_axes" in self.blocks
        rows = self.kinds[-1].shape[0] if of_experts else max(1, int(x.max()) + 1)
        if "vocab_axes" in self.blocks:
            float_kind = next(kind for kind in self.kinds if kind.is_float)
            rows = float_kind.shape[0] if ".embedding" in op_name(self.node) else float_kind.shape[-1]
        return x.clamp(min=0) + rows * torch.randint(0, count, x.shape, generator=generator).to(x.device, x.dtype)


def _filled(kind: TensorType, generator: torch.Generator, device: torch.device) -> Tensor:
    """Normal values; zeros and ones for integers."""
    values = normal_values(kind.shape, kind.dtype if kind.is_float else torch.float32, device, generator)
    return values if kind.is_float else (values > 0).to(kind.dtype)
