"""Convolutions, poolings and upsamplings.

A spatial dim of H rows may be cut where the blocks of input and output belong together, H = stride · rows of the
output. Block i then needs ``before`` = padding rows of block i - 1 and ``after`` = span - stride - padding rows of
block i + 1, with span = dilation · (kernel - 1) + 1 (Dryden et al., arXiv:1903.06681). These halos are sent before the
op, and their gradients back after its backward; no block may be shorter than its neighbours' halos. Where a kernel is
no wider than its stride and nothing is padded there is no halo, and the op itself is its local program; a halo exchange
is planned and priced, but has no program yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.fx import Node

from ..graph import tensor_operands, types_of
from ..spec import P, R
from . import register, whole
from .base import ROW, AxisChoice, Internal, Rule
from .named import Part, argument, cut, parts, replace_arguments

__all__ = ["SPATIAL", "ConvolutionRule", "PoolingRule"]

SPATIAL = ("depth", "height", "width")  # labels of the last dims


def _entry(value: Any, k: int) -> int:
    """Entry ``k`` of an argument that gives one number for all spatial dims or one for each."""
    return int(value) if isinstance(value, int) else int(value[k if len(value) > 1 else 0])


def _before(node: Node, k: int, span: int) -> int:
    """Rows of padding before spatial dim ``k``."""
    padding = argument(node, "padding")
    if isinstance(padding, str):
        return (span - 1) // 2 if padding == "same" else 0
    return _entry(padding, k)


def _windows(node: Node, kernel: Sequence[int], first: int, others: Sequence[Part]) -> list[AxisChoice]:
    """The cuts of an op that slides windows of ``kernel`` over the trailing dims, from dim ``first``.

    others: how the operands after the first take part.
    """
    x, out = tensor_operands(node)[0].meta["type"], types_of(node)[0]
    stride = argument(node, "stride") or kernel
    dilation = argument(node, "dilation") if "avg_pool" not in str(node.target) else 1
    choices = []
    for k, extent in enumerate(kernel):
        dim, step, span = first + k, _entry(stride, k), _entry(dilation, k) * (extent - 1) + 1
        rows, results = x.shape[dim], out.shape[dim]
        if results < 2 or rows != step * results:
            continue
        before = _before(node, k, span)
        after = max(0, span - step - before)
        even = max(n for n in range(1, results + 1) if results % n == 0 and (n == 1 or rows // n >= max(before, after)))
        if even == 1:
            continue
        messages = tuple(
            Internal(phase, "send", ("input", 0), x.dtype.itemsize, halo / rows, growth="parts")
            for phase in ("forward", "backward")
            for halo in (before, after)
            if halo
        )
        label = SPATIAL[len(SPATIAL) - len(kernel) + k]
        choices.append(cut(node, label, even, [dim, *others], [dim], messages, executable=not messages))
    return choices


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
            return (*choices, *self._spatial(node, channel + 1))
        if weight[outward] > 1:
            choices.append(cut(node, "out", weight[outward], [None, outward] + [0] * has_bias, [channel]))
        if weight[inward] > 1:
            choices.append(cut(node, "in", weight[inward], [channel, inward] + [ROW] * has_bias, [None]))
        return (*choices, *self._spatial(node, channel + 1))

    def _spatial(self, node: Node, first: int) -> list[AxisChoice]:
        if self._is_transposed(node):
            return []
        _, weight, *bias = (operand.meta["type"].shape for operand in tensor_operands(node))
        return _windows(node, weight[2:], first, [None] * (1 + len(bias)))

    def flops(self, node: Node) -> float:
        """2 per multiply-add: each output element (input element if transposed) meets one filter's worth of weights."""
        x, weight = (operand.meta["type"] for operand in tensor_operands(node)[:2])
        elements = x.numel if self._is_transposed(node) else types_of(node)[0].numel
        return 2.0 * elements * prod(weight.shape[1:])

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Fewer groups where these are cut."""
        divisor = parts(labels, mesh_shape, "group")
        if divisor == 1:
            return super().localize(node, labels, mesh_shape)
        return replace_arguments(node, groups=argument(node, "groups") // divisor)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """Input and weight."""
        return (("input", 0), ("input", 1))


class PoolingRule(Rule):
    """An op on the trailing ``spatial`` dims of one tensor: all leading dims are free, and the spatial ones where it
    slides windows and gives no positions.

    linear: whether addends pool to addends. keeps: whether the backward needs the input. index_bytes: those of the
    positions that the op keeps without giving them out, per output element.
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
        if f"_pool{self.spatial}d.default" in str(node.target) and "adaptive" not in str(node.target):
            kernel = [_entry(argument(node, "kernel_size"), k) for k in range(self.spatial)]
            choices += [] if argument(node, "ceil_mode") else _windows(node, kernel, leading, [])
        if self.linear:
            choices.append(AxisChoice("partial", (ROW,), (ROW,), 1 << 62, splits_work=False))
        grads = tuple((R, P if kind.is_float else R) for kind in outputs)
        choices.append(AxisChoice("grad", ((R, P),), grads, 1 << 62, splits_work=False))
        return tuple(choices)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The input, if the backward needs it, and positions that are an output."""
        return ((("input", 0),) if self.keeps else ()) + tuple(("output", k) for k in range(1, len(types_of(node))))

    def temporary_bytes(self, node: Node) -> float:
        """Hidden positions."""
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
