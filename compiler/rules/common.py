"""Helpers that the rules share: an axis choice from the dims that it cuts, and an op's arguments by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands, types_of
from .base import FREE_GRAD, ROW, WHOLE, AxisChoice, AxisPair, Internal, shard

__all__ = [
    "argument",
    "axes_of",
    "cut",
    "parameters",
    "parts",
    "random_float",
    "replace_arguments",
]

#: of one operand or output: the dim that is cut, a pair of placements, or None for the default of ``cut``
Part = int | AxisPair | None


def cut(
    node: Node,
    label: str,
    extent: int,
    inputs: Sequence[Part],
    outputs: Sequence[Part],
    internal: tuple[Internal, ...] = (),
    executable: bool = True,
) -> AxisChoice:
    """The choice that cuts these dims, one entry per operand and per output.

    An input of None is used whole and gives an addend of its gradient (if a float); an output of None is an addend.
    """
    operands = [operand.meta["type"] for operand in tensor_operands(node)]

    def side(part: Part, default: AxisPair) -> AxisPair:
        return default if part is None else shard(part) if isinstance(part, int) else part

    return AxisChoice(
        label,
        tuple(side(part, FREE_GRAD if kind.is_float else WHOLE) for part, kind in zip(inputs, operands, strict=True)),
        tuple(side(part, ROW) for part, _ in zip(outputs, types_of(node), strict=True)),
        extent,
        internal=internal,
        executable=executable,
    )


@cache
def _parameters(target: Any) -> dict[str, Any]:
    """The parameter names of an op in order, with their defaults (``inspect.Parameter.empty`` for none)."""
    if isinstance(target, torch._ops.OpOverload):
        empty = inspect.Parameter.empty
        return {a.name: a.default_value if a.has_default_value() else empty for a in target._schema.arguments}
    return {name: parameter.default for name, parameter in inspect.signature(target).parameters.items()}


def parameters(node: Node) -> tuple[str, ...]:
    """The names of the arguments of the node's op."""
    return tuple(_parameters(node.target))


def argument(node: Node, name: str) -> Any:
    """The argument of that name, wherever the call gives it; its default if it does not."""
    defaults = _parameters(node.target)
    position = list(defaults).index(name)
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, defaults[name])


def replace_arguments(node: Node, **changes: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(target, args, kwargs) of the node's call with these arguments changed."""
    names = list(_parameters(node.target))
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in changes.items():
        position = names.index(name)
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return node.target, tuple(args), kwargs


def axes_of(labels: Sequence[str], *wanted: str) -> tuple[int, ...]:
    """The mesh axes whose label is one of ``wanted``, major first."""
    return tuple(axis for axis, label in enumerate(labels) if label in wanted)


def parts(labels: Sequence[str], mesh_shape: Sequence[int], *wanted: str) -> int:
    """The number of blocks into which these labels cut their dim."""
    product = 1
    for axis in axes_of(labels, *wanted):
        product *= mesh_shape[axis]
    return product


def random_float(operand: Node, generator: torch.Generator) -> torch.Tensor:
    """Normal values of the operand's type."""
    kind = operand.meta["type"]
    return torch.randn(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype)
