"""Running one op whole and in parts: random operands, dealing out by placement, lockstep execution, putting together.

``check_rules`` compares; this module only runs. Ops run in float64 where they can, so that equal means equal to 1e-8.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import TensorType, tensor_operands
from ..ir.spec import P, R, Spec
from ..rules import rule_for
from .lockstep import LockstepComm, LockstepGroup

__all__ = [
    "DeviceRun",
    "WholeOp",
    "assemble",
    "call_op",
    "close",
    "distribute",
    "doubled",
    "example_node",
    "run_op",
    "run_whole",
    "sample_operands",
]


# ---- nodes and operands


def example_node(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A graph node that calls ``target`` with tensors in ``args`` and ``kwargs`` as placeholders, typed by running
    it on them."""
    graph = torch.fx.Graph()
    nodes_by_id: dict[int, Node] = {}

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in nodes_by_id:
                nodes_by_id[id(value)] = graph.placeholder(f"x{len(nodes_by_id)}")
                nodes_by_id[id(value)].meta["type"] = TensorType(tuple(value.shape), value.dtype)
            return nodes_by_id[id(value)]
        if isinstance(value, list | tuple):
            return type(value)(place(item) for item in value)
        return value

    placed = place(args), {key: place(value) for key, value in kwargs.items()}
    node = graph.call_function(target, *placed)
    with torch.no_grad():
        outputs = LockstepGroup((1,)).run(lambda _: target(*args, **kwargs))[0]
    kinds = tuple(TensorType(tuple(x.shape), x.dtype) for x in flat(outputs))
    node.meta.update(type=kinds[0] if isinstance(outputs, torch.Tensor) else kinds, module="", line="")
    return node


def sample_operands(node: Node, generator: torch.Generator) -> list[torch.Tensor]:
    """Operands that the rule makes itself (``example_operands``), or normal floats and integers 0 and 1, by dtype
    and shape."""
    examples = rule_for(node).example_operands(node, generator)
    if examples is not None:
        return examples
    return [random_tensor(operand.meta["type"], generator) for operand in tensor_operands(node)]


def random_tensor(kind: TensorType, generator: torch.Generator, high: int = 2) -> torch.Tensor:
    """Normal values for floats, integers below ``high``, fair coins for bools."""
    if kind.is_float:
        wide = torch.complex128 if kind.dtype.is_complex else torch.float64
        return torch.randn(kind.shape, generator=generator, dtype=wide).to(kind.dtype)
    return torch.randint(0, high, kind.shape, generator=generator).to(kind.dtype)


def carries_gradient(x: torch.Tensor) -> bool:
    """True if gradients can flow through a tensor of this dtype."""
    return x.is_floating_point() or x.is_complex()


def _widest(dtype: torch.dtype) -> torch.dtype:
    """float64 or complex128 for floats and complex numbers."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


# ---- placements


def distribute(
    x: torch.Tensor, spec: Spec, mesh_shape: Sequence[int], generator: torch.Generator
) -> list[torch.Tensor]:
    """Each device's part of ``x``, by rank. Addends (P) are random and sum to ``x``; one of the terms of Pmax is
    ``x`` at each place."""
    if not spec:
        return [x]
    placement, size = spec[0], mesh_shape[0]
    inner = functools.partial(distribute, spec=spec[1:], mesh_shape=mesh_shape[1:], generator=generator)
    if placement.is_shard:
        assert x.shape[placement.dim] % size == 0, (tuple(x.shape), spec, mesh_shape)
        return [part for block in x.chunk(size, placement.dim) for part in inner(block.contiguous())]
    if placement == R:
        return inner(x) * size
    if x.dtype == torch.bool:
        raise ValueError("a bool tensor cannot be a sum, but got placement P; use R or S")
    noise = [random_tensor(TensorType(tuple(x.shape), x.dtype), generator) for _ in range(size - 1)]
    parts = [x - sum(noise), *noise] if placement == P else [x, *(x - part.abs() for part in noise)]
    return [part for addend in parts for part in inner(addend)]


def assemble(parts: Sequence[torch.Tensor], spec: Spec, mesh_shape: Sequence[int], rtol: float) -> torch.Tensor:
    """The whole tensor of the devices' parts; ValueError if replicas differ or parts do not fit together."""
    if not spec:
        return parts[0]
    placement, size = spec[0], mesh_shape[0]
    stride = len(parts) // size
    blocks = [assemble(parts[i * stride : (i + 1) * stride], spec[1:], mesh_shape[1:], rtol) for i in range(size)]
    if len({tuple(block.shape) for block in blocks}) > 1:
        raise ValueError(f"devices hold equal shapes, but got {[tuple(block.shape) for block in blocks]}")
    if placement.is_shard:
        return torch.cat(blocks, placement.dim)
    if placement == R:
        if not all(close(block, blocks[0], rtol) for block in blocks[1:]):
            raise ValueError("replicas differ")
        return blocks[0]
    stacked = torch.stack(blocks)
    return stacked.sum(0, dtype=stacked.dtype) if placement == P else stacked.amax(0)


def close(a: torch.Tensor, b: torch.Tensor, rtol: float) -> bool:
    """Equal shape and dtype, and values equal to ``rtol`` of the largest; integers exactly."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not carries_gradient(a):
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True)


# ---- running


@dataclass
class DeviceRun:
    """The results of one device: outputs, and one gradient per operand (None: no gradient reaches it)."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def flat(outputs: Any) -> list[torch.Tensor]:
    """An op's result as a list."""
    return [outputs] if isinstance(outputs, torch.Tensor) else [x for x in outputs if x is not None]


def _bind(args: Any, kwargs: Any, node: Node, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Args with operand nodes replaced by tensors: by position (``mul(x, x)`` has two), or by node where localize
    dropped some."""
    operands = tensor_operands(node)
    present: list[Node] = []

    def note(operand: Node) -> Node:
        present.append(operand)
        return operand

    torch.fx.map_arg((args, kwargs), note)
    if present == operands:
        queue = iter(tensors)
        return torch.fx.map_arg((args, kwargs), lambda _: next(queue))
    by_node = dict(zip(operands, tensors))
    assert len(by_node) == len(operands), f"{node.name}: localize must keep repeated operands in order"
    return torch.fx.map_arg((args, kwargs), lambda n: by_node[n])


def call_op(
    call: tuple[Any, Any, Any], node: Node, tensors: Sequence[torch.Tensor], comm: LockstepComm, double: bool
) -> list[torch.Tensor]:
    """The outputs of ``call`` (target, args, kwargs as ``Rule.localize`` gives them) with tensors for the node's
    operands."""
    target, args, kwargs = call
    args, kwargs = _bind(args, kwargs, node, tensors)
    if double:
        args, kwargs = doubled(args), doubled(kwargs)
    comm.phase = "forward"
    return flat(target(*args, **kwargs))


def run_op(
    call: tuple[Any, Any, Any],
    node: Node,
    operands: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    comm: LockstepComm,
    double: bool,
    frozen: frozenset[int],
) -> DeviceRun:
    """One device's forward, and its backward against ``cotangents``; operands in ``frozen`` take no gradient."""
    trained = [k for k, x in enumerate(operands) if carries_gradient(x) and k not in frozen]
    leaves = [x.detach().clone().requires_grad_(k in trained) for k, x in enumerate(operands)]
    # an op may refuse leaves; a view of them makes ordinary intermediate tensors
    outputs = call_op(call, node, [x.view_as(x) for x in leaves], comm, double)
    comm.phase = "backward"
    tracked = [(y, g) for y, g in zip(outputs, cotangents) if y.requires_grad and g is not None]
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    if tracked and trained:
        ys, gs = [y for y, _ in tracked], [g for _, g in tracked]
        for k, gradient in zip(trained, torch.autograd.grad(ys, [leaves[k] for k in trained], gs, allow_unused=True)):
            gradients[k] = gradient
    return DeviceRun([y.detach() for y in outputs], gradients)


def doubled(value: Any, wide: torch.dtype = torch.float64) -> Any:
    """Literals of floating dtypes become ``wide``, so that casts do not lose the precision of the check."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return wide
    if isinstance(value, torch.dtype) and value.is_complex:
        return wide.to_complex()
    if isinstance(value, list | tuple):
        return type(value)(doubled(item, wide) for item in value)
    return {key: doubled(item, wide) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass
class WholeOp:
    """The op on one device: operands and cotangents that it ran on, whether in float64, operands that take no
    gradient."""

    inputs: list[torch.Tensor]
    cotangents: list[torch.Tensor | None]
    run: DeviceRun
    double: bool
    frozen: frozenset[int]

    @property
    def rtol(self) -> float:
        """1e-8 if all of it is in float64, else 1e-4."""
        low = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
        return 1e-8 if self.double and all(y.dtype not in low for y in self.run.outputs) else 1e-4


def run_whole(node: Node, operands: list[torch.Tensor], generator: torch.Generator) -> WholeOp:
    """Run the node itself on one device, in float64 if the op can; raises what the op raises."""
    group = LockstepGroup((1,))
    call = (node.target, node.args, dict(node.kwargs))

    def attempt(double: bool, frozen: frozenset[int]) -> WholeOp:
        inputs = [x.to(_widest(x.dtype)) if double else x for x in operands]
        outputs = group.run(lambda comm: call_op(call, node, inputs, comm, double))[0]
        kinds = [TensorType(tuple(y.shape), y.dtype) for y in outputs]
        cotangents = [random_tensor(kind, generator) if kind.is_float else None for kind in kinds]
        try:
            run = group.run(lambda comm: run_op(call, node, inputs, cotangents, comm, double, frozen))[0]
        except RuntimeError as error:
            also = _undifferentiable(node, str(error)) - frozen
            if not also:
                raise
            return attempt(double, frozen | also)
        return WholeOp(inputs, cotangents, run, double, frozen)

    try:
        return attempt(True, frozenset())
    except (RuntimeError, NotImplementedError, TypeError):
        return attempt(False, frozenset())


def _undifferentiable(node: Node, message: str) -> frozenset[int]:
    """The operands whose argument an autograd error names as not differentiable."""
    match = re.search(r"not differentiable with respect to argument '(\w+)'", message)
    if match is None or not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    names = [argument.name for argument in node.target._schema.arguments]
    value = node.kwargs.get(match[1]) or dict(zip(names, node.args)).get(match[1])
    return frozenset(k for k, operand in enumerate(tensor_operands(node)) if operand is value)
