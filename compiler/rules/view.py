"""Rules of ops that move or repeat elements: views, concatenation, padding, repetition, creation.

Most rules follow from *tracks*: dims of operands and outputs that stay one and the same dim through the op, each of
which may be cut. For ops that are pure stride changes the tracks are read off the strides of a run on the meta device.
``reshape`` has a dim-factor map instead: dims fall into groups of equal product, and of each group only the major
factor may be cut, as only then are the blocks contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import op_name, tensor_operands, types_of
from ..ir.spec import R, local_shape
from . import pairs_choice, register, whole
from .base import FREE_GRAD, ROW, WHOLE, AxisChoice, Rule, shard
from .common import argument
from .fallback import WholeRule
from .pointwise import grad_choice

__all__ = ["DimsRule", "ReshapeRule", "StrideRule", "Track", "local_output_shape"]


@dataclass(frozen=True, slots=True)
class Track:
    """One dim through an op: its number in each operand (None: the operand is used whole) and in each output."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    extent: int


def operand_shapes(node: Node) -> list[tuple[int, ...]]:
    """The operands' shapes."""
    return [operand.meta["type"].shape for operand in tensor_operands(node)]


def local_output_shape(node: Node, labels: Sequence[str], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The first output's local shape under these labels."""
    pair = pairs_choice(node, labels, mesh_shape).outputs[0]
    return local_shape(types_of(node)[0].shape, pair.value, mesh_shape)


class DimsRule(Rule):
    """A rule that follows from the tracks of an op.

    tracks: the tracks of a node. linear: the operands through which addends pass ("partial"), None for all, () for
    no such choice. saves: the operands that autograd keeps. high: a node → exclusive upper bound of random integer
    operands (indices).
    """

    def __init__(
        self,
        tracks: Callable[[Node], list[Track]],
        cost_kind: str = "pointwise",
        linear: tuple[int, ...] | None = None,
        saves: tuple[int, ...] = (),
        high: Callable[[Node], int] | None = None,
    ) -> None:
        self.tracks = tracks
        self.cost_kind = cost_kind
        self.linear = linear
        self.saved = saves
        self.high = high

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """One choice per track, "partial" where linear, and "grad" where gradients flow."""
        operands = [operand.meta["type"] for operand in tensor_operands(node)]
        outputs = types_of(node)
        choices = [whole(node)]
        for number, track in enumerate(self.tracks(node)):
            inputs = tuple(FREE_GRAD if dim is None else shard(dim) for dim in track.inputs)
            results = tuple(shard(dim) for dim in track.outputs)
            choices.append(AxisChoice(f"d{number}", inputs, results, track.extent))
        linear = range(len(operands)) if self.linear is None else self.linear
        # partial bools and indices are not offered: a sum is not defined for them
        if operands and linear and all(operands[k].is_float for k in linear):
            inputs = tuple(ROW if k in linear else WHOLE for k in range(len(operands)))
            choices.append(AxisChoice("partial", inputs, (ROW,) * len(outputs), 1, splits_work=False))
        if any(kind.is_float for kind in operands) and any(kind.is_float for kind in outputs):
            choices.append(grad_choice(node))
        return tuple(choices)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The operands named at construction."""
        count = len(tensor_operands(node))
        return tuple(("input", k) for k in self.saved if k < count) if types_of(node)[0].is_float else ()

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Integers below ``high``, floats normal; nothing special without ``high``."""
        if self.high is None:
            return None
        values = []
        for operand in tensor_operands(node):
            kind = operand.meta["type"]
            if kind.is_float:
                values.append(torch.randn(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype))
            else:
                high = max(1, self.high(node))
                values.append(torch.randint(0, high, kind.shape, generator=generator).to(kind.dtype))
        return values


class StrideRule(DimsRule):
    """A pure view: output dims are found again among the input's by their strides; a stride of 0 is a broadcast."""

    def __init__(self) -> None:
        super().__init__(self.stride_tracks, cost_kind="view")

    def stride_tracks(self, node: Node) -> list[Track]:
        """Input dims that every output has in full, and output dims that repeat one element."""
        shape = operand_shapes(node)[0]
        # above any extent and below twice as much, so that neither a multiple nor a sum of strides is one of them
        base = max((*shape, len(shape))) + 1
        strides = [base + i for i in range(len(shape))]
        x = torch.empty_strided(shape, strides, device="meta")
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda _: x)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        tracks = []
        for dim, (extent, stride) in enumerate(zip(shape, strides)):
            same_stride = [
                [d for d in range(y.dim()) if y.stride(d) == stride and y.shape[d] == extent and extent > 1]
                for y in outputs
            ]
            if all(same_stride) and same_stride:
                tracks.append(Track((dim,), tuple(dims[0] for dims in same_stride), extent))
        if len(outputs) == 1:
            y = outputs[0]
            repeats = [d for d in range(y.dim()) if y.stride(d) == 0 and y.shape[d] > 1]
            tracks += [Track((None,), (d,), y.shape[d]) for d in repeats]
        return sorted(tracks, key=lambda track: track.outputs)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Expand to local sizes; a squeeze must not drop a dim whose local extent happens to be 1."""
        name = op_name(node).split(".")[1]
        if name in ("squeeze", "expand", "broadcast_to"):
            size = list(local_output_shape(node, labels, mesh_shape))
            target = torch.ops.aten.reshape.default if name == "squeeze" else torch.ops.aten.expand.default
            return target, (node.args[0], size), {}
        return super().localize(node, labels, mesh_shape)


class ReshapeRule(DimsRule):
    """The rule of view, reshape, flatten and unflatten, by the dim-factor map."""

    def __init__(self) -> None:
        super().__init__(self.factor_tracks, cost_kind="view")

    def factor_tracks(self, node: Node) -> list[Track]:
        """One track per group of dims of equal product: the major dim of each side, cut by what divides both."""
        source, target = operand_shapes(node)[0], types_of(node)[0].shape
        if prod(source) == 0:
            return []
        left = [(dim, extent) for dim, extent in enumerate(source) if extent > 1]
        right = [(dim, extent) for dim, extent in enumerate(target) if extent > 1]
        tracks = []
        i = j = 0
        while i < len(left) and j < len(right):
            (dim_in, a), (dim_out, b) = left[i], right[j]
            extent = gcd(a, b)  # the major dims of both sides are cut alike by a divisor of both alone
            i, j = i + 1, j + 1
            while a != b:
                if a < b:
                    a, i = a * left[i][1], i + 1
                else:
                    b, j = b * right[j][1], j + 1
            if extent > 1:
                tracks.append(Track((dim_in,), (dim_out,), extent))
        return tracks

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A reshape to the local size: unlike view it takes whatever strides a local producer leaves."""
        size = list(local_output_shape(node, labels, mesh_shape))
        return torch.ops.aten.reshape.default, (node.args[0], size), {}


# ---- tracks of the rest


def nonnegative_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def same_dim_tracks(node: Node, fixed: Sequence[int]) -> list[Track]:
    """Tracks of an op whose first operand and outputs have equal dims, all of which may be cut but ``fixed``; other
    operands, if they have the first's rank and extent there, are cut alike."""
    first, *rest = operand_shapes(node)
    outs = [kind.shape for kind in types_of(node)]
    tracks = []
    for dim, extent in enumerate(first):
        if extent == 1 or dim in fixed or any(len(out) != len(first) or out[dim] != extent for out in outs):
            continue
        if all(len(shape) == len(first) and shape[dim] == extent for shape in rest):
            tracks.append(Track((dim,) * (1 + len(rest)), (dim,) * len(outs), extent))
    return tracks


def argument_dims(node: Node, name: str) -> list[int]:
    """The (non-negative) dims in an argument that holds one or several; all dims for None or an empty list."""
    rank = len(operand_shapes(node)[0])
    given = argument(node, name)
    if given is None or (isinstance(given, list | tuple) and not given):
        return list(range(rank))
    return [nonnegative_dim(dim, rank) for dim in (given if isinstance(given, list | tuple) else [given])]


def tracks_except(name: str) -> Callable[[Node], list[Track]]:
    """Tracks along every dim but those that an argument names."""
    return lambda node: same_dim_tracks(node, argument_dims(node, name))


def _complex_tracks(node: Node) -> list[Track]:
    """All dims of the complex tensor."""
    shape, out = operand_shapes(node)[0], types_of(node)[0].shape
    return [Track((d,), (d,), extent) for d, extent in enumerate(shape if len(shape) < len(out) else out) if extent > 1]


def _stack(node: Node) -> list[Track]:
    first = operand_shapes(node)[0]
    new = nonnegative_dim(argument(node, "dim"), len(first) + 1)
    count = len(operand_shapes(node))
    return [Track((d,) * count, (d + (d >= new),), extent) for d, extent in enumerate(first) if extent > 1]


def _cat(node: Node) -> list[Track]:
    # legacy: empty 1-d tensors join anything; whole then
    if len({len(shape) for shape in operand_shapes(node)}) > 1:
        return []
    return same_dim_tracks(node, argument_dims(node, "dim"))


def _pad(node: Node) -> list[Track]:
    pad = list(node.args[1])  # type: ignore[arg-type]
    rank = len(operand_shapes(node)[0])
    return same_dim_tracks(node, [rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]])


def _pad_is_linear(node: Node) -> bool:
    return argument(node, "value") in (0, None)


def _repeat(node: Node) -> list[Track]:
    shape, out = operand_shapes(node)[0], types_of(node)[0].shape
    lead = len(out) - len(shape)
    tracks = []
    for dim, extent in enumerate(out):
        source = shape[dim - lead] if dim >= lead else 1
        if extent > 1 and source in (1, extent):
            tracks.append(Track((dim - lead if source == extent else None,), (dim,), extent))
    return tracks


def _repeat_interleave(node: Node) -> list[Track]:
    shape = operand_shapes(node)[0]
    if argument(node, "dim") is None:  # flattens first: blocks of the major dim stay contiguous
        return [Track((0,), (0,), shape[0])] if shape and shape[0] > 1 else []
    return [Track((d,), (d,), extent) for d, extent in enumerate(shape) if extent > 1]


class _PadRule(DimsRule):
    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        choices = super().axis_choices(node)
        return choices if _pad_is_linear(node) else tuple(c for c in choices if c.label != "partial")


class _RepeatRule(DimsRule):
    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A dim that is repeated from 1 is repeated as often as the local output is long."""
        out, whole_out = local_output_shape(node, labels, mesh_shape), types_of(node)[0].shape
        shape = operand_shapes(node)[0]
        padded = (1,) * (len(out) - len(shape)) + tuple(shape)
        repeats = [local if source == 1 else extent // source for local, source, extent in zip(out, padded, whole_out)]
        return node.target, (node.args[0], repeats), {}


class _RepeatInterleaveRule(DimsRule):
    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Without ``output_size``, which is a global number."""
        return node.target, node.args, {key: value for key, value in node.kwargs.items() if key != "output_size"}


class _NewTensorRule(Rule):
    """The rule of new_ones and others that read only dtype and device of their operand, whose placement is free."""

    cost_kind = "free"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """The result is whole; the operand whole, or cut along any dim."""
        cuts = [(dim, extent) for dim, extent in enumerate(operand_shapes(node)[0]) if extent > 1]
        out = ((R, R),)
        return (
            whole(node),
            *(AxisChoice(f"d{d}", (shard(d),), out, extent, splits_work=False) for d, extent in cuts),
        )


register(
    """aten.permute.default aten.transpose.int aten.t.default aten.numpy_T.default aten.movedim.int
    aten.swapaxes.default aten.mT.default aten.unsqueeze.default aten.squeeze.default aten.squeeze.dim
    aten.squeeze.dims aten.expand.default aten.broadcast_to.default aten.slice.Tensor aten.select.int
    aten.split.Tensor aten.split_with_sizes.default aten.chunk.default aten.split.sizes aten.unsafe_split.Tensor
    aten.unsafe_chunk.default aten.unbind.int aten.diagonal.default aten.unfold.default"""
)(StrideRule())
register(
    """aten.view.default aten._unsafe_view.default aten.reshape.default aten.flatten.using_ints aten.unflatten.int
    aten._reshape_alias.default aten.view_copy.default"""
)(ReshapeRule())
register("aten.view_as_real.default", "aten.view_as_complex.default")(DimsRule(_complex_tracks, cost_kind="view"))
register("aten.cat.default", "aten.concat.default")(DimsRule(_cat))
register("aten.stack.default")(DimsRule(_stack))
register("aten.constant_pad_nd.default", "aten.pad.default")(_PadRule(_pad))
register("aten.flip.default")(DimsRule(tracks_except("dims")))
register("aten.roll.default")(DimsRule(tracks_except("dims")))
register("aten.repeat.default")(_RepeatRule(_repeat))
register("aten.repeat_interleave.self_int")(_RepeatInterleaveRule(_repeat_interleave))
register("aten.tril.default", "aten.triu.default")(
    DimsRule(lambda node: same_dim_tracks(node, [len(operand_shapes(node)[0]) - 1, len(operand_shapes(node)[0]) - 2]))
)
register("aten.new_ones.default", "aten.new_zeros.default", "aten.new_full.default", "aten.new_empty.default")(
    _NewTensorRule()
)
register(
    """aten.arange.default aten.arange.start aten.arange.start_step aten.full.default aten.zeros.default
    aten.ones.default aten.empty.memory_format aten.scalar_tensor.default aten.eye.default aten.eye.m
    aten.linspace.default"""
)(WholeRule("free"))
