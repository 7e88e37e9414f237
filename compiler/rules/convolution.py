"""Convolutions, poolings and upsamplings.

A spatial dim of H rows may be cut where the blocks of input and output belong together, H = stride · rows of the
output. Block i then needs ``before`` = padding rows of block i - 1 and ``after`` = span - stride - padding rows of
block i + 1, with span = dilation · (kernel - 1) + 1 (Dryden et al., arXiv:1903.06681). These halos are sent before the
op, and their gradients back after its backward (``halo.run_with_halos``). No block may be shorter than its neighbours'
halos. Where a kernel is no wider than its stride and nothing is padded there is no halo, and the op itself is its local
program.

A transposed convolution with outputs of stride · H rows spreads a row over span rows, the first of them ``padding``
above its block: block i's outputs need (span - 1 - padding) // stride rows of block i - 1 and ceil(padding / stride)
of block i + 1. Run on these too and without padding, it gives more than the block, which is cut out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands, types_of
from ..ir.ops.halo import average_with_halos, run_with_halos
from ..ir.spec import P, R
from . import register, whole
from .base import ROW, AxisChoice, Internal, Rule
from .common import Part, argument, axes_of, cut, parts, replace_arguments

__all__ = ["SPATIAL", "ConvolutionRule", "PoolingRule"]

SPATIAL = ("depth", "height", "width")  # labels of the last dims


def _dim_entry(value: Any, k: int) -> int:
    """Entry ``k`` of an argument that gives one number for all spatial dims or one for each."""
    return int(value) if isinstance(value, int) else int(value[k if len(value) > 1 else 0])


def _padding_before(node: Node, k: int, span: int) -> int:
    """Rows of padding before spatial dim ``k``."""
    padding = argument(node, "padding")
    if isinstance(padding, str):
        return (span - 1) // 2 if padding == "same" else 0
    return _dim_entry(padding, k)


def _halo(node: Node, kernel: Sequence[int], k: int) -> tuple[int, int]:
    """Rows before and after its block that a window along spatial dim ``k`` reaches."""
    stride = argument(node, "stride") or kernel
    dilation = argument(node, "dilation") if "avg_pool" not in str(node.target) else 1
    span = _dim_entry(dilation, k) * (kernel[k] - 1) + 1
    before = _padding_before(node, k, span)
    return before, max(0, span - _dim_entry(stride, k) - before)


def _transposed_halo(node: Node, kernel: Sequence[int], k: int) -> tuple[int, int]:
    """Rows before and after its block that spread into its outputs, along spatial dim ``k``."""
    span = _dim_entry(argument(node, "dilation"), k) * (kernel[k] - 1) + 1
    stride, padding = _dim_entry(argument(node, "stride"), k), _dim_entry(argument(node, "padding"), k)
    return max(0, (span - 1 - padding) // stride), -(-padding // stride)


def _spatial_choice(
    node: Node, k: int, kernel: Sequence[int], blocks: int, halo: tuple[int, int], others: Sequence[Part]
) -> AxisChoice | None:
    """The choice that cuts spatial dim ``k`` of x into at most ``blocks`` blocks; None if no such cut is possible.

    others: the part of each operand after the first.
    """
    x = tensor_operands(node)[0].meta["type"]
    dim = len(x.shape) - len(kernel) + k
    rows = x.shape[dim]
    even = max(n for n in range(1, blocks + 1) if blocks % n == 0 and (n == 1 or rows // n >= max(halo)))
    if even == 1:
        return None
    messages = tuple(
        Internal(phase, "send", ("input", 0), x.dtype.itemsize, share / rows, "parts", gradient_of)
        for phase, gradient_of in (("forward", None), ("backward", 0))
        for share in halo
        if share
    )
    return cut(node, SPATIAL[len(SPATIAL) - len(kernel) + k], even, [dim, *others], [dim], messages)


def _sliding_choices(node: Node, kernel: Sequence[int], others: Sequence[Part]) -> list[AxisChoice]:
    """The cuts of an op that slides windows of ``kernel`` over the trailing dims; others as in ``_spatial_choice``."""
    x, out = tensor_operands(node)[0].meta["type"].shape, types_of(node)[0].shape
    stride = argument(node, "stride") or kernel
    choices = []
    for k in range(len(kernel)):
        rows, results = x[k - len(kernel)], out[k - len(kernel)]
        if results >= 2 and rows == _dim_entry(stride, k) * results:
            choices.append(_spatial_choice(node, k, kernel, results, _halo(node, kernel, k), others))
    return [choice for choice in choices if choice is not None]


def _transposed_choices(node: Node, kernel: Sequence[int], others: Sequence[Part]) -> list[AxisChoice]:
    """The cuts of a transposed convolution over the trailing dims; others as in ``_spatial_choice``."""
    x, out = tensor_operands(node)[0].meta["type"].shape, types_of(node)[0].shape
    choices = []
    for k in range(len(kernel)):
        rows, results = x[k - len(kernel)], out[k - len(kernel)]
        if rows >= 2 and results == _dim_entry(argument(node, "stride"), k) * rows:
            choices.append(_spatial_choice(node, k, kernel, rows, _transposed_halo(node, kernel, k), others))
    return [choice for choice in choices if choice is not None]


@dataclass(frozen=True)
class _Extension:
    """The change that the halos of one choice make to the call of an op."""

    #: the padding that stays with the op, per spatial dim: halos replace the rest
    padding: list[int]
    #: argument of ``halo.run_with_halos``
    halos: tuple[tuple[int, int, int], ...]
    #: arguments of ``halo.run_with_halos`` that name the mesh axes
    axes: dict[str, tuple[int, ...]]
    #: the spatial dims whose block gets its neighbours' rows
    extended: tuple[int, ...]


def _extension(
    node: Node, kernel: Sequence[int], halos: Sequence[tuple[int, int]], labels: Sequence[str], mesh: Sequence[int]
) -> _Extension | None:
    """The halos that a choice needs; None where it needs none, so that the op runs as it is."""
    reach, axes, padding, extended = [], {}, [], []
    for k, halo in enumerate(halos):
        label = SPATIAL[len(SPATIAL) - len(kernel) + k]
        across = tuple(axis for axis in axes_of(labels, label) if mesh[axis] > 1)
        span = (
            _dim_entry(argument(node, "dilation"), k) * (kernel[k] - 1) + 1
            if argument(node, "padding") == "same"
            else 1
        )
        before = _padding_before(node, k, span)
        if across and any(halo):
            axes[f"{label}_axes"] = across
            reach.append((k - len(kernel), *halo))
            extended.append(k)
            before = 0
        elif argument(node, "padding") == "same" and before != span - 1 - before:
            # "same" padding of an even window is uneven, for which the op has no argument: it is padded by hand
            reach.append((k - len(kernel), before, span - 1 - before))
            before = 0
        padding.append(before)
    return _Extension(padding, tuple(reach), axes, tuple(extended)) if axes else None


class ConvolutionRule(Rule):
    """input [batch?, in, …], weight [out, in / groups, …] ([in, out / groups, …] if transposed), bias [out].

    Without groups the output channels are free and the input channels contract (the bias is then an addend); else whole
    groups are cut, which keeps the blocks of both contiguous.
    """

    cost_kind = "convolution"

    def __init__(self, transposed: bool = False) -> None:
        self.transposed = transposed

    def _is_transposed(self, node: Node) -> bool:
        return bool(argument(node, "transposed")) if "aten.convolution." in str(node.target) else self.transposed

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch"; "out" and "in", or "group"; "depth", "height", "width"."""
        operands = tensor_operands(node)
        x, weight = (operand.meta["type"].shape for operand in operands[:2])
        has_bias, groups, channel = len(operands) > 2, argument(node, "groups"), len(x) - len(weight) + 1
        # dim 0 of the weight is the output's channels, or the input's if transposed
        outward, inward = (1, 0) if self._is_transposed(node) else (0, 1)
        choices = [whole(node)]
        if channel == 1 and x[0] > 1:
            choices.append(cut(node, "batch", x[0], [0, None] + [None] * has_bias, [0]))
        if groups > 1:
            choices.append(cut(node, "group", groups, [channel, 0] + [0] * has_bias, [channel]))
            return (*choices, *self._spatial(node))
        if weight[outward] > 1:
            choices.append(cut(node, "out", weight[outward], [None, outward] + [0] * has_bias, [channel]))
        if weight[inward] > 1:
            choices.append(cut(node, "in", weight[inward], [channel, inward] + [ROW] * has_bias, [None]))
        return (*choices, *self._spatial(node))

    def _spatial(self, node: Node) -> list[AxisChoice]:
        _, weight, *bias = (operand.meta["type"].shape for operand in tensor_operands(node))
        offer = _transposed_choices if self._is_transposed(node) else _sliding_choices
        return offer(node, weight[2:], [None] * (1 + len(bias)))

    def flops(self, node: Node) -> float:
        """2 per multiply-add: each output element (input element if transposed) meets one filter's worth of weights."""
        x, weight = (operand.meta["type"] for operand in tensor_operands(node)[:2])
        elements = x.numel if self._is_transposed(node) else types_of(node)[0].numel
        return 2.0 * elements * prod(weight.shape[1:])

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Fewer groups where these are cut, and halos where space is."""
        groups = argument(node, "groups") // parts(labels, mesh_shape, "group")
        changes = {"groups": groups} if groups != argument(node, "groups") else {}
        kernel = tensor_operands(node)[1].meta["type"].shape[2:]
        transposed = self._is_transposed(node)
        halo = _transposed_halo if transposed else _halo
        halos = [halo(node, kernel, k) for k in range(len(kernel))]
        more = _extension(node, kernel, halos, labels, mesh_shape)
        if more is None:
            return replace_arguments(node, **changes) if changes else super().localize(node, labels, mesh_shape)
        crops: tuple[tuple[int, int, int], ...] = ()
        if transposed:
            output_padding = [_dim_entry(argument(node, "output_padding"), k) for k in range(len(kernel))]
            changes["output_padding"] = [0 if k in more.extended else rows for k, rows in enumerate(output_padding)]
            crops = tuple(self._crop(node, k - len(kernel), halos[k][0], more, mesh_shape) for k in more.extended)
        target, args, kwargs = replace_arguments(node, padding=more.padding, **changes)
        if str(target).endswith(".padding"):
            target = getattr(torch.ops.aten, str(target).split(".")[1]).default
        return run_with_halos, (target, *args), {**kwargs, "halos": more.halos, "crops": crops, **more.axes}

    @staticmethod
    def _crop(node: Node, dim: int, before: int, more: _Extension, mesh_shape: Sequence[int]) -> tuple[int, int, int]:
        """(dim, first, rows) of this device's outputs among those of its block with its halos."""
        out = types_of(node)[0].shape
        k = dim + len(more.padding)
        blocks = prod(mesh_shape[axis] for axis in more.axes[f"{SPATIAL[dim + len(SPATIAL)]}_axes"])
        stride, padding = (_dim_entry(argument(node, name), k) for name in ("stride", "padding"))
        return dim, before * stride + padding, out[dim] // blocks

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """Input and weight."""
        return (("input", 0), ("input", 1))


class PoolingRule(Rule):
    """An op on the trailing ``spatial`` dims of one tensor: all leading dims are free, and the spatial ones where it
    slides windows and gives no positions.

    linear: True if addends pool to addends. keeps: True if the backward needs the input. index_bytes: bytes per output
    element of the positions that the op keeps for its backward without returning them.
    """

    def __init__(self, spatial: int, linear: bool, keeps: bool = True, index_bytes: int = 0) -> None:
        self.spatial = spatial
        self.linear = linear
        self.keeps = keeps
        self.index_bytes = index_bytes

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch", "channel"; "depth", "height", "width"; "partial" if linear; "grad"."""
        x = tensor_operands(node)[0].meta["type"].shape
        outputs = types_of(node)
        choices = [whole(node)]
        leading = len(x) - self.spatial
        for dim in range(leading):
            label = "channel" if dim == leading - 1 else "batch"
            if x[dim] > 1:
                choices.append(cut(node, label, x[dim], [dim], [dim] * len(outputs)))
        if self._slides(node) and not argument(node, "ceil_mode"):
            choices += _sliding_choices(node, self._kernel(node), [])
        if self.linear:
            choices.append(AxisChoice("partial", (ROW,), (ROW,), 1 << 62, splits_work=False))
        grads = tuple((R, P if kind.is_float else R) for kind in outputs)
        choices.append(AxisChoice("grad", ((R, P),), grads, 1 << 62, splits_work=False))
        return tuple(choices)

    def _slides(self, node: Node) -> bool:
        return f"_pool{self.spatial}d.default" in str(node.target) and "adaptive" not in str(node.target)

    def _kernel(self, node: Node) -> list[int]:
        return [_dim_entry(argument(node, "kernel_size"), k) for k in range(self.spatial)]

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with the neighbours' rows where windows reach them."""
        kernel = self._kernel(node) if self._slides(node) else []
        halos = [_halo(node, kernel, k) for k in range(len(kernel))]
        more = _extension(node, kernel, halos, labels, mesh_shape)
        if more is None:
            return super().localize(node, labels, mesh_shape)
        target, args, kwargs = replace_arguments(node, padding=more.padding)
        kwargs = {**kwargs, "halos": more.halos, **more.axes}
        if "max_pool" in str(target):
            return run_with_halos, (target, *args), {**kwargs, "fill": -inf}
        padded = any(_dim_entry(argument(node, "padding"), k) for k in range(self.spatial))
        counted = argument(node, "count_include_pad") or (self.spatial > 1 and argument(node, "divisor_override"))
        if not padded or counted:
            return run_with_halos, (target, *args), kwargs
        target, args, inner = replace_arguments(node, padding=more.padding, count_include_pad=True)
        return average_with_halos, (target, *args), {**kwargs, **inner}

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The input, if the backward needs it, and positions that are an output."""
        return ((("input", 0),) if self.keeps else ()) + tuple(("output", k) for k in range(1, len(types_of(node))))

    def temporary_bytes(self, node: Node) -> float:
        """The positions that the op keeps without returning them."""
        return float(self.index_bytes * types_of(node)[0].numel)


_CONVOLUTION = ConvolutionRule()
register(*(f"aten.conv{n}d.{form}" for n in (1, 2, 3) for form in ("default", "padding")))(_CONVOLUTION)
register("aten.convolution.default")(_CONVOLUTION)
register("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")(
    ConvolutionRule(transposed=True)
)
for _n in (1, 2, 3):
    register(f"aten.max_pool{_n}d.default")(PoolingRule(_n, linear=False, index_bytes=8))
    register(f"aten.avg_pool{_n}d.default", f"aten.adaptive_avg_pool{_n}d.default")(PoolingRule(_n, linear=True))
register("aten.max_pool2d_with_indices.default", "aten.adaptive_max_pool2d.default")(PoolingRule(2, linear=False))
register("aten._adaptive_avg_pool2d.default")(PoolingRule(2, linear=True))
for _n, _kinds in ((1, ("nearest", "linear")), (2, ("nearest", "bilinear", "bicubic")), (3, ("nearest", "trilinear"))):
    register(*(f"aten.upsample_{kind}{_n}d.{form}" for kind in _kinds for form in ("default", "vec")))(
        PoolingRule(_n, linear=True, keeps=False)
    )
