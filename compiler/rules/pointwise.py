"""Rules of elementwise ops with broadcasting: every output dim is free.

Labels ``d0``, ``d1``, … are the output's dims; an operand that is broadcast along one is used whole and gives an
addend of its gradient. ``partial`` passes addends of a value through an op that is linear in them; ``grad`` passes
addends of a gradient through any op (a backward is linear in its cotangent) while values are whole. Neither splits
work: they postpone a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import op_name, tensor_operands, types_of
from . import register, whole
from .base import FREE_GRAD, ROW, WHOLE, AxisChoice, AxisPair, Rule, shard
from .common import argument, cut, replace_arguments

__all__ = ["ChannelQuantizeRule", "DropoutRule", "FakeQuantizeRule", "PointwiseRule", "RandomRule", "grad_choice"]


def words(text: str) -> frozenset[str]:
    """The words of ``text``."""
    return frozenset(text.split())


# by base name: what autograd keeps. Everything else keeps nothing.
_SAVES_OUTPUT = words("relu relu6 tanh sigmoid exp sqrt rsqrt reciprocal expm1 tan polar")
_SAVES_INPUTS = words("""gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu selu celu softplus log_sigmoid
threshold pow log log2 log10 log1p
    sin cos abs erf square clamp clamp_min clamp_max maximum minimum where masked_fill addcmul addcdiv lerp atan2
    xlogy logit prelu fmod remainder nan_to_num""")
_PRODUCTS = words("mul multiply")
_BILINEAR = words("mul multiply div divide true_divide")
_ADDITIVE = words("add subtract sub")
_LINEAR = words("neg negative positive clone contiguous alias lift_fresh_copy lift_fresh detach conj _conj real imag")
_CASTS = words("to _to_copy type_as")
_DOMAIN_POSITIVE = words("log log2 log10 log1p sqrt rsqrt reciprocal pow div divide true_divide xlogy")
_DOMAIN_UNIT = words("logit atanh asin acos")
_CONSTANT = words("detach zeros_like ones_like full_like empty_like fill")  # no gradient flows
# operands after the first that give only a dtype or device
_BY_EXAMPLE = frozenset(("aten.type_as.default", "aten.to.other"))


def base_name(node: Node) -> str:
    """``"mul"`` of ``aten.mul.Tensor``."""
    return op_name(node).split(".")[1]


def grad_choice(node: Node) -> AxisChoice:
    """Whole values; addends of the outputs' gradients give addends of the operands'."""
    inputs, outputs = (FREE_GRAD,) * len(tensor_operands(node)), (FREE_GRAD,) * len(types_of(node))
    return AxisChoice("grad", inputs, outputs, extent=1, splits_work=False)


class PointwiseRule(Rule):
    """The rule of every elementwise op; the op's name decides what is linear and what autograd keeps."""

    cost_kind = "pointwise"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """One choice per output dim, "partial" where the op is linear, and "grad"."""
        operands = [operand.meta["type"] for operand in tensor_operands(node)]
        by_example = op_name(node) in _BY_EXAMPLE
        output = types_of(node)[0]
        rank = len(output.shape)
        choices = [whole(node)]
        for dim, extent in enumerate(output.shape):
            if extent == 1:
                continue
            inputs: list[AxisPair] = []
            for k, operand in enumerate(operands):
                own_dim = dim - (rank - len(operand.shape))  # broadcasting aligns dims at the right
                if by_example and k > 0:
                    inputs.append(WHOLE)
                elif own_dim >= 0 and operand.shape[own_dim] == extent:
                    inputs.append(shard(own_dim))
                else:
                    inputs.append(FREE_GRAD)
            choices.append(AxisChoice(f"d{dim}", tuple(inputs), (shard(dim),) * len(types_of(node)), extent))
        for number, partial in enumerate(self.partial_inputs(node)):
            label = f"partial{number or ''}"
            choices.append(AxisChoice(label, partial, (ROW,), extent=1, splits_work=False))
        if output.is_float and base_name(node) not in _CONSTANT and any(operand.is_float for operand in operands):
            choices.append(grad_choice(node))
        return tuple(choices)

    def partial_inputs(self, node: Node) -> list[tuple[AxisPair, ...]]:
        """The ways to feed addends to operands such that the outputs are addends of the output."""
        name = base_name(node)
        operands = [operand.meta["type"] for operand in tensor_operands(node)]
        output = types_of(node)[0]
        if output.dtype == torch.bool or any(kind.dtype == torch.bool for kind in operands[:1]):
            return self._partial_where(node) if name == "where" else []
        masks = any(kind.dtype == torch.bool for kind in operands)
        if masks and name not in ("masked_fill", "mul", "multiply"):
            return []
        rounding = node.kwargs.get("rounding_mode")
        if name in _ADDITIVE:
            return [(ROW,) * 2] if len(operands) == 2 else []
        if name in _BILINEAR and rounding is None:
            if len(operands) == 1:
                return [(ROW,)] if isinstance(node.args[0], Node) else []
            first: list[tuple[AxisPair, ...]] = [(ROW, FREE_GRAD)]
            return first if masks or name.startswith(("div", "true")) else [*first, (FREE_GRAD, ROW)]
        if name in _LINEAR:
            return [(ROW,)]
        if name in _CASTS and output.is_float:
            return [(ROW, *(WHOLE for _ in operands[1:]))]
        if name == "masked_fill" and len(operands) == 2 and node.args[2] == 0:
            return [(ROW, WHOLE)]
        return []

    def _partial_where(self, node: Node) -> list[tuple[AxisPair, ...]]:
        operands = [operand.meta["type"] for operand in tensor_operands(node)]
        if len(operands) == 3 and all(kind.dtype != torch.bool for kind in operands[1:]):
            return [(WHOLE, ROW, ROW)]
        zero = [arg for arg in node.args[1:] if not isinstance(arg, Node)] == [0]
        return [(WHOLE, ROW)] if len(operands) == 2 and zero else []

    def is_product(self, node: Node) -> bool:
        """True for products of two tensors."""
        return base_name(node) in _PRODUCTS

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The tensors that the op's derivative needs."""
        name = base_name(node)
        operands = [operand.meta["type"] for operand in tensor_operands(node)]
        if not types_of(node)[0].is_float:
            return ()
        if name in _SAVES_OUTPUT:
            return (("output", 0),)
        if name in _BILINEAR:  # each factor is needed for the gradient of the other; a divisor for its own too
            if len(operands) < 2:
                return ()
            keep = [k for k in (0, 1) if operands[1 - k].is_float or (k == 1 and not name.startswith("mul"))]
            return tuple(("input", k) for k in keep)
        if name == "where":
            return (("input", 0),)
        if name == "masked_fill":
            return (("input", 1),)
        if name in _SAVES_INPUTS:
            return tuple(("input", k) for k in range(len(operands)))
        return ()

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Floats within the op's domain and away from its poles; integers 1 to 4 (divisors too)."""
        name = base_name(node)
        made = []
        for operand in tensor_operands(node):
            kind = operand.meta["type"]
            wide = torch.complex128 if kind.dtype.is_complex else torch.float64
            x = torch.randn(kind.shape, generator=generator, dtype=wide)
            if name in _DOMAIN_POSITIVE:
                x = x.abs() + 0.5
            elif name in _DOMAIN_UNIT:
                x = 0.1 + 0.8 * torch.sigmoid(x)
            if kind.dtype == torch.bool:
                made.append(x > 0.5 if name in _DOMAIN_POSITIVE else x > 0)
            else:
                made.append(
                    x.to(kind.dtype)
                    if kind.is_float
                    else torch.randint(1, 5, kind.shape, generator=generator).to(kind.dtype)
                )
        return made


register(
    "pointwise",
    """aten.rsub.Tensor aten.hardswish.default aten.log_sigmoid.default aten.where.ScalarOther aten.where.ScalarSelf
    aten.masked_fill.Tensor aten.__and__.Tensor aten.__and__.Scalar aten.__or__.Tensor aten.__or__.Scalar
    aten.floor_divide.default aten.floor_divide.Scalar aten.true_divide.Scalar
    aten.multiply.Tensor aten.multiply.Scalar aten.subtract.Tensor aten.subtract.Scalar aten.divide.Tensor
    aten.divide.Scalar aten.negative.default aten.absolute.default aten.conj.default aten.isin.Tensor_Scalar
    aten.to.device aten.to.dtype aten.to.dtype_layout aten.to.other aten._to_copy.default aten.type_as.default
    aten.contiguous.default aten.alias.default aten.detach.default aten.lift_fresh_copy.default aten.lift_fresh.default
    aten.fill.Scalar aten.fill.Tensor aten.copy.default aten.polar.default aten.complex.default aten.real.default
    aten.imag.default aten._conj.default aten.resolve_conj.default
    aten.zeros_like.default aten.ones_like.default aten.full_like.default aten.empty_like.default""",
)(PointwiseRule())


# ---- quantization-aware training


class FakeQuantizeRule(PointwiseRule):
    """The rule of rounding to a grid of one scale: the gradient passes where nothing was clipped."""

    def temporary_bytes(self, node: Node) -> float:
        """A mask of what was not clipped, one byte per element."""
        return float(types_of(node)[0].numel)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All operands, where the scale is trained; otherwise the mask is enough."""
        return tuple(("input", k) for k in range(3)) if "learnable" in op_name(node) else ()

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Normal values, scales that clip some of them, zero points of 0."""
        x, *rest = (operand.meta["type"] for operand in tensor_operands(node))
        values = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)]
        for kind, value in zip(rest, (0.02, 0)):
            values.append(torch.full(kind.shape, value, dtype=kind.dtype))
        return values


class ChannelQuantizeRule(FakeQuantizeRule):
    """The rule of rounding to a grid of one scale per channel: a cut of the channels cuts the scales."""

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "d0", "d1", …, and "grad"."""
        axis, shape = int(argument(node, "axis")), types_of(node)[0].shape
        parts = [[dim, *((0, 0) if dim == axis else (None, None))] for dim in range(len(shape))]
        choices = [cut(node, f"d{d}", extent, parts[d], [d]) for d, extent in enumerate(shape) if extent > 1]
        return (whole(node), *choices, grad_choice(node))


register(
    "aten.fake_quantize_per_tensor_affine.default aten.fake_quantize_per_tensor_affine.tensor_qparams",
    "aten._fake_quantize_learnable_per_tensor_affine.default",
)(FakeQuantizeRule())
register(
    "aten.fake_quantize_per_channel_affine.default aten._fake_quantize_learnable_per_channel_affine.default",
)(ChannelQuantizeRule())


# ---- random numbers that are a function of the element's global place: any cut draws the same


class DropoutRule(Rule):
    """The rule of dropout: every dim is free, and addends of the gradient pass, as all devices draw the same mask."""

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "d0", "d1", …, "grad"."""
        shape = types_of(node)[0].shape
        choices = [whole(node)]
        choices += [cut(node, f"d{dim}", extent, [dim], [dim]) for dim, extent in enumerate(shape) if extent > 1]
        choices.append(AxisChoice("grad", (FREE_GRAD,), (FREE_GRAD,), 1 << 62, splits_work=False))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with the mesh axis and the dim of every cut, from which it computes its part of the mask."""
        cuts = tuple((axis, int(label[1:])) for axis, label in enumerate(labels) if label[1:].isdigit())
        return replace_arguments(node, cuts=cuts) if cuts else super().localize(node, labels, mesh_shape)

    def temporary_bytes(self, node: Node) -> float:
        """The mask, one byte per element."""
        return float(types_of(node)[0].numel)


class RandomRule(Rule):
    """The rule of a tensor of random numbers: every dim is free."""

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "d0", "d1", …"""
        shape = types_of(node)[0].shape
        cuts = [cut(node, f"d{dim}", extent, [], [dim]) for dim, extent in enumerate(shape) if extent > 1]
        return (whole(node), *cuts)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with the shape of this device's block, and the mesh axis and the dim of every cut."""
        cuts = tuple((axis, int(label[1:])) for axis, label in enumerate(labels) if label != "whole")
        shape = list(types_of(node)[0].shape)
        for axis, dim in cuts:
            shape[dim] //= mesh_shape[axis]
        return replace_arguments(node, shape=shape, **({"cuts": cuts} if cuts else {}))


register("meshwright.dropout")(DropoutRule())
register("meshwright.random_tensor")(RandomRule())
