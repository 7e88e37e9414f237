"""Mixed precision: a pass that turns the graph of a model into that of its computation in a 16-bit type.

    parameters  of float32 become of the 16-bit type, and with them what ops make of them; casts to float32 there too
    the rest    stays as it is: scalars (the rate of a decay), integers, float64, and what inputs, buffers and constants
                alone make (positions, angles, masks, targets); it is cast where an op reads it beside 16 bits
    losses      are float32: ops of losses, and ops that make a scalar, get their operands in float32 (our own cross
                entropy reads 16 bits and computes in float32)
    statistics  of batch norm are float32, running ones too
    fills       (of masks, bounds of clamps) beyond what the 16-bit type has become the largest finite that it has
    gradients   are of 16 bits within a backward, and float32 from then on: summed over microbatches and over devices
    optimizer   float32 master weights and states: 2 + 4 + 4 + states bytes per element (``costmodel.memory``)

Everything else follows from the types of the graph: rates of matmuls and attention, bytes that ops and messages move,
bytes saved for backward. A model that computes in 16 bits already (no parameter is of float32) is left as it is. The
graph keeps the fingerprint of the model that was captured, so a plan says which model it is for, and in
``Plan.precision`` how it is computed. Norms, softmax and other reductions read and write 16 bits, with PyTorch's
float32 sums inside. Sums of activations over devices (tensor parallelism) are of 16 bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from ..ir.graph import Graph, Result, TensorType, op_name, tensor_operands, types_of
from ..ir.long_loop import LoopFunction
from ..ir.precision import PRECISIONS, computed_type
from ..rules import rule_for

__all__ = ["check_precision", "in_precision"]


_CAST = torch.ops.aten._to_copy.default
_WIDE_INSIDE = ("meshwright.cross_entropy", "meshwright.batch_norm")  # these take 16 bits and compute in float32
_FILLS = ("masked_fill", "where", "clamp", "clamp_min", "clamp_max", "fill", "full_like", "new_full")  # write a number
_STATISTICS = ("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default")


def check_precision(asked: str) -> tuple[str, ...]:
    """The precisions to plan for: one, or "model" and "bf16" for "auto". Raises ValueError for an unknown one."""
    choices = ("model", *PRECISIONS, "auto")
    if asked not in choices:
        raise ValueError(f"precision is one of {', '.join(choices)}, but got {asked!r}; use one of these")
    return ("model", "bf16") if asked == "auto" else (asked,)


def in_precision(graph: Graph, precision: str) -> Graph:
    """The graph of the computation in this precision, at the same batch extent; ``graph`` itself for "model" and for a
    model without parameters of float32. Raises ValueError for an unknown precision, and for a graph that is already in
    another one."""
    if precision == graph.precision:
        return graph
    if precision not in PRECISIONS or graph.precision != "model":
        raise ValueError(
            f"a graph of the model's own precision is computed in model, {' or '.join(PRECISIONS)}, but got "
            f"{precision!r} for one in {graph.precision}; capture the model again"
        )
    if graph.origin is not None:
        return in_precision(graph.origin, precision).with_batch(graph.batch)
    if not any(node.meta["type"].dtype == torch.float32 for node in graph.placeholders("parameter")):
        return graph
    return _convert(graph, precision)


def _convert(graph: Graph, precision: str) -> Graph:
    conversion = _Conversion(precision)
    for node in graph:
        conversion.add(node)
    results = [conversion.result(result, graph.by_name()[result.node]) for result in graph.results]
    conversion.fx.output(tuple(node for _, node in results))
    return Graph(
        conversion.fx, tuple(result for result, _ in results), graph.batch, graph.constants, graph.output_spec,
        graph.training, precision=precision, captured=graph.fingerprint(), notes=graph.notes,
    )  # fmt: skip


class _Conversion:
    """The conversion of a graph: it copies nodes, in order, into a graph of this precision."""

    def __init__(self, precision: str) -> None:
        self.precision, self.dtype, self.fx = precision, PRECISIONS[precision], torch.fx.Graph()
        self.env: dict[Node, Node] = {}
        self.casts: dict[tuple[Node, torch.dtype], Node] = {}

    def add(self, node: Node) -> None:
        """Copy the node, with casts of its operands before it."""
        if node.op == "placeholder":
            copy = self.fx.node_copy(node)
            if node.meta["source"].kind == "parameter":
                copy.meta["type"] = computed_type(node.meta["type"], self.precision)
        elif op_name(node) == "getitem":
            copy = self.fx.node_copy(node, self.env.__getitem__)
            copy.meta["type"] = types_of(copy.args[0])[copy.args[1]]  # type: ignore[arg-type, index]
        else:
            copy = self._op(node)
        if copy.name != node.name:
            copy.name = node.name
        self.env[node] = copy

    def _op(self, node: Node) -> Node:
        operands, kinds = [self.env[operand] for operand in tensor_operands(node)], types_of(node)
        half = any(self._is_half(operand) for operand in operands)
        # a loop adds up many small terms, and its code decides on the types inside
        looped = isinstance(node.target, LoopFunction)
        numbers = [*kinds, *(operand.meta["type"] for operand in operands)]
        looped |= any(kind.dtype.is_complex for kind in numbers)  # there are no complex numbers of 16 bits
        wide = looped or rule_for(node).cost_kind == "loss" or _is_wide(kinds[0], scalar=True)
        takes: dict[Node, Node] = {}
        for place, operand in enumerate(dict.fromkeys(operands) if half else ()):
            statistic = op_name(node) in _STATISTICS and place > 0
            if op_name(node) in _WIDE_INSIDE:
                continue
            if wide or statistic:
                takes[operand] = self._as(operand, torch.float32, node) if self._is_half(operand) else operand
            elif _is_wide(operand.meta["type"]):
                takes[operand] = self._as(operand, self.dtype, node)
        made = self.fx.node_copy(node, lambda operand: takes.get(self.env[operand], self.env[operand]))
        if half and not wide:
            first, *rest = kinds
            rest = rest if op_name(node) in _WIDE_INSIDE else [self._typed(kind) for kind in rest]
            several = isinstance(node.meta["type"], tuple)
            made.meta["type"] = (self._typed(first), *rest) if several else self._typed(first)
            if made.meta["type"] != node.meta["type"]:  # a cast says which type it makes
                made.args, made.kwargs = _replace_dtype(made.args, self.dtype), _replace_dtype(made.kwargs, self.dtype)
            if op_name(node).split(".")[1] in _FILLS:
                made.args, made.kwargs = _clamp_fills(made.args, self.dtype), _clamp_fills(made.kwargs, self.dtype)
        return made

    def result(self, result: Result, node: Node) -> tuple[Result, Node]:
        """A result of the model in the converted graph; buffers keep their type."""
        made, kind = self.env[node], node.meta["type"]
        if result.kind == "buffer" and self._is_half(made) and kind.dtype == torch.float32:
            made = self._as(made, torch.float32, node)
        return Result(result.kind, result.name, made.name), made

    def _as(self, operand: Node, dtype: torch.dtype, reader: Node) -> Node:
        if (operand, dtype) not in self.casts:
            name = f"{operand.name}_{'wide' if dtype == torch.float32 else self.precision}"
            made = self.fx.create_node("call_function", _CAST, (operand,), {"dtype": dtype}, name)
            place = operand if "module" in operand.meta else reader
            made.meta = {key: place.meta[key] for key in ("module", "line")}
            made.meta["type"] = TensorType(operand.meta["type"].shape, dtype)
            self.casts[operand, dtype] = made
        return self.casts[operand, dtype]

    def _typed(self, kind: TensorType) -> TensorType:
        return TensorType(kind.shape, self.dtype) if _is_wide(kind) else kind

    def _is_half(self, operand: Node) -> bool:
        return types_of(operand)[0].dtype == self.dtype


def _is_wide(kind: TensorType, scalar: bool = False) -> bool:
    return kind.dtype == torch.float32 and bool(kind.shape) != scalar


def _replace_dtype(arguments: Any, dtype: torch.dtype) -> Any:
    return map_aggregate(arguments, lambda value: dtype if value is torch.float32 else value)


def _clamp_fills(arguments: Any, dtype: torch.dtype) -> Any:
    """Replace finite numbers beyond the range of ``dtype`` by its largest one: PyTorch refuses to write others."""
    largest = torch.finfo(dtype).max

    def bounded(value: Any) -> Any:
        too_large = isinstance(value, float | int) and not isinstance(value, bool) and largest < abs(value) < math.inf
        return math.copysign(largest, value) if too_large else value

    return map_aggregate(arguments, bounded)
