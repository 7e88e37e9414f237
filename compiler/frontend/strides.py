"""Strides of tensors on one device: the memory layout of every op's outputs and cotangents, and the views that copy.

A kernel's seconds depend on strides (attention on transposed heads, a product with slices of one wide projection), and
so does whether a reshape moves any bytes. ``note_layouts`` runs the graph once, forward and backward, on fake tensors,
and stores the result on every op node as ``meta["layout"]``. A node without it counts as contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..ir.comm import CompletedArrival, Context, use_context
from ..ir.graph import Graph, op_name, types_of
from ..ir.ops import local_ops
from ..rules import rule_for

__all__ = ["DimOrder", "NodeLayout", "OneDevice", "copy_with_layout", "layout_of", "note_layouts"]


@dataclass(frozen=True, slots=True)
class DimOrder:
    """The memory layout of a tensor by its strides."""

    #: the dims with a stride, the widest first; dims of one element are left out
    order: tuple[int, ...]
    #: for each of them its stride as a multiple of that of a packed tensor (1: packed)
    gaps: tuple[float, ...]
    #: the dims that repeat one element (stride 0)
    repeated: tuple[int, ...]

    def __str__(self) -> str:
        dims = ".".join(f"{dim}x{gap:g}" if gap != 1 else str(dim) for dim, gap in zip(self.order, self.gaps))
        return "@" + dims + "".join(f"~{dim}" for dim in self.repeated)


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The memory layouts of an op's outputs and of their cotangents."""

    #: per output; None: contiguous
    outputs: tuple[DimOrder | None, ...]
    #: per output; None: contiguous
    cotangents: tuple[DimOrder | None, ...]
    #: per output, True if it gets a cotangent
    flows: tuple[bool, ...]
    #: True if the forward of a view moves its bytes
    copies_forward: bool
    #: True if the backward of a view moves its bytes
    copies_backward: bool


class OneDevice:
    """A mesh of the given shape seen from its first device, with collectives that return results of the right shape
    without any communication."""

    def __init__(self, mesh_shape: Sequence[int] = ()) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.phase = "forward"

    def size(self, axis: int) -> int:
        """Number of devices along ``axis``."""
        return self.mesh_shape[axis]

    def index(self, axis: int) -> int:
        """0: the first."""
        return 0

    def all_reduce(self, x: Tensor, axis: int, op: str = "sum") -> Tensor:
        """``x`` itself, in new memory only if it was not contiguous."""
        return x.contiguous()

    def all_gather(self, x: Tensor, axis: int, dim: int) -> Tensor:
        """``x`` repeated."""
        return torch.cat([x] * self.size(axis), dim)

    def reduce_scatter(self, x: Tensor, axis: int, dim: int) -> Tensor:
        """The first block of ``x``."""
        return x.chunk(self.size(axis), dim)[0].contiguous()

    def all_to_all(self, x: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        """The first block along ``split_dim``, repeated along ``concat_dim``."""
        return torch.cat([x.chunk(self.size(axis), split_dim)[0]] * self.size(axis), concat_dim)

    def all_to_all_uneven(self, x: Tensor, axis: int, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Ones, as many rows as arrive."""
        return x.new_ones((sum(received), *x.shape[1:]))

    def exchange(
        self, before: Tensor | None, after: Tensor | None, axis: int, cyclic: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """A copy of each argument, as if the neighbour on the other side had sent it."""
        return (None if after is None else after.clone()), (None if before is None else before.clone())

    def start_send(self, x: Tensor, axis: int, to: int, source: int) -> Callable[[], Tensor]:
        """A copy of ``x``, as if the other device had sent it."""
        return x.contiguous().clone

    def start_sum(self, x: Tensor, axes: Sequence[int]) -> CompletedArrival:
        """``x`` itself."""
        return CompletedArrival(x)

    def start_all_gather(self, x: Tensor, axes: tuple[int, ...], code: str = "none") -> CompletedArrival:
        """``x`` repeated."""
        return CompletedArrival(x.expand(prod(map(self.size, axes)), -1).contiguous())

    def start_reduce_scatter(
        self, x: Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> CompletedArrival:
        """This device's row."""
        return CompletedArrival(x[0])


# ---- layouts as values


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> DimOrder | None:
    """The layout of a tensor with these strides; None if it is contiguous."""
    dims = [dim for dim, extent in enumerate(shape) if extent != 1]
    repeated = tuple(dim for dim in dims if strides[dim] == 0)
    order = sorted((dim for dim in dims if strides[dim]), key=lambda dim: -strides[dim])
    gaps, packed = [], 1
    for dim in reversed(order):
        gaps.append(strides[dim] / packed)
        packed = strides[dim] * shape[dim]
    if not repeated and order == sorted(order) and all(gap == 1 for gap in gaps):
        return None
    return DimOrder(tuple(order), tuple(round(gap, 4) for gap in reversed(gaps)), repeated)


def copy_with_layout(values: Tensor, layout: DimOrder | None) -> Tensor:
    """A copy of ``values`` in new memory with this layout."""
    if layout is None:
        return values.clone(memory_format=torch.contiguous_format)
    shape, strides, packed = list(values.shape), [0] * values.dim(), 1.0
    for dim, gap in reversed(list(zip(layout.order, layout.gaps))):
        strides[dim] = max(1, round(gap * packed))
        packed = strides[dim] * shape[dim]
    core = [1 if dim in layout.repeated else extent for dim, extent in enumerate(shape)]
    base = torch.empty_strided(core, strides, dtype=values.dtype, device=values.device)
    base.copy_(values[tuple(slice(extent) for extent in core)])
    return base.expand(shape)


# ---- finding them


def note_layouts(graph: Graph) -> None:
    """Put ``meta["layout"]`` on every op node of ``graph``; a graph that has them is left as it is.

    Batch extents share them. Ops that cannot run on fake tensors leave those after them contiguous.
    """
    ops = [node for node in graph.ops() if op_name(node) != "getitem"]
    if not ops or "layout" in ops[0].meta:
        return
    if graph.origin is not None:
        note_layouts(graph.origin)
        known = graph.origin.by_name()
        for node in ops:
            node.meta["layout"] = known[node.name].meta["layout"]
        return
    for node, layout in zip(ops, _run(graph, ops)):
        node.meta["layout"] = layout


def _run(graph: Graph, ops: Sequence[Node]) -> list[NodeLayout]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[Node, Any] = {}
    cotangents: dict[tuple[str, int], Tensor] = {}
    strides: dict[tuple[str, int], tuple[int, ...]] = {}
    storages: dict[Node, tuple[Any, ...]] = {}
    copied_back: set[str] = set()
    with mode, use_context(Context(OneDevice())), torch.enable_grad():
        try:
            for node in graph:
                if node.op == "placeholder":
                    kind, source = node.meta["type"], node.meta["source"]
                    value = torch.empty(kind.shape, dtype=kind.dtype)
                    values[node] = value.requires_grad_(kind.is_float and source.requires_grad)
                    _record_cotangent(node, 0, values[node], cotangents)
                    storages[node] = (value.untyped_storage()._cdata,)
                    continue
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = result = _target(node)(*args, **kwargs)
                if op_name(node) == "getitem":
                    storages[node] = (result.untyped_storage()._cdata,)
                    continue
                outputs = [result] if isinstance(result, Tensor) else list(result)
                storages[node] = tuple(x.untyped_storage()._cdata for x in outputs if x is not None)
                for k, x in enumerate(outputs):
                    if x is not None:
                        strides[node.name, k] = x.stride()
                        _record_cotangent(node, k, x, cotangents)
            roots = [values[graph.node(r.node)] for r in graph.results]
            roots = [x for x in roots if isinstance(x, Tensor) and x.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.empty_like(x, requires_grad=False) for x in roots])
            for node in ops:
                if rule_for(node).cost_kind in ("view", "free") and _copies_back(node, values, cotangents):
                    copied_back.add(node.name)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            pass  # the layouts found so far are used; later nodes count as contiguous
    return [_layout(node, strides, cotangents, storages, node.name in copied_back) for node in ops]


def _copies_back(node: Node, values: Mapping[Node, Any], cotangents: Mapping[tuple[str, int], Tensor]) -> bool:
    """True if the backward of a view makes a new tensor. This op runs alone, as its operand may have other users."""
    arriving = {k: g for (name, k), g in cotangents.items() if name == node.name}
    if not arriving:
        return False
    leaves: list[Tensor] = []

    def leaf(operand: Node) -> Any:
        x = values[operand].detach()
        if x.is_floating_point() or x.is_complex():
            leaves.append(x.requires_grad_())
        return x

    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), leaf)
    outputs = _target(node)(*args, **kwargs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    roots = [outputs[k] for k in arriving]
    grads = torch.autograd.grad(roots, leaves, list(arriving.values()), allow_unused=True)
    passed = {g.untyped_storage()._cdata for g in arriving.values()}
    return any(g is not None and g.untyped_storage()._cdata not in passed for g in grads)


def _record_cotangent(node: Node, k: int, x: Tensor, cotangents: dict[tuple[str, int], Tensor]) -> None:
    if x.requires_grad:

        def hook(grad: Tensor) -> None:
            cotangents[node.name, k] = grad

        x.register_hook(hook)


def _target(node: Node) -> Callable[..., Any]:
    if node.target is torch.ops.aten.view.default:  # as in ``lower``
        return torch.ops.aten.reshape.default
    return _experts_stand_in if node.target is local_ops.experts else node.target  # type: ignore[return-value]


def _experts_stand_in(
    x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, *_: Any, **biases: Any
) -> Tensor:
    """Stand in for experts, whose row counts depend on data: the same type, and a gradient for every operand."""
    added = [bias.sum() for bias in biases.values() if isinstance(bias, Tensor)]
    return x.clone() + (weight.sum() + gate_up.sum() + down.sum() + sum(added))


def _layout(
    node: Node,
    strides: dict[tuple[str, int], tuple[int, ...]],
    cotangents: dict[tuple[str, int], Tensor],
    storages: dict[Node, tuple[Any, ...]],
    copies_backward: bool,
) -> NodeLayout:
    kinds = types_of(node)
    outputs = tuple(
        layout_of(kind.shape, strides[node.name, k]) if (node.name, k) in strides else None
        for k, kind in enumerate(kinds)
    )
    grads = [cotangents.get((node.name, k)) for k in range(len(kinds))]
    before = {address for operand in node.all_input_nodes for address in storages.get(operand, ())}
    copies_forward = bool(storages.get(node)) and not before.issuperset(storages[node])
    grad_layouts = tuple(None if g is None else layout_of(g.shape, g.stride()) for g in grads)
    flows = tuple(g is not None for g in grads) if any(g is not None for g in grads) else (True,) * len(kinds)
    return NodeLayout(outputs, grad_layouts, flows, copies_forward, copies_backward)
