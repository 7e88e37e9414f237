"""Rules of reductions, scans and elementwise losses.

A dim that is kept is free. A dim that is reduced by a sum contracts: each device's sum over its block is an addend
(P, R) of the whole; a mean is such a sum divided by how many blocks there are (``scaled_mean``; torch's own sharded
losses forget that division in the backward). Other reductions (max, variance, softmax, scans, sorting) need the dim
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import op_name, tensor_operands, types_of
from . import register, whole
from .base import FREE_GRAD, ROW, AxisChoice, Rule, shard
from .common import argument
from .pointwise import PointwiseRule, grad_choice
from .view import DimsRule, Track, nonnegative_dim, operand_shapes, same_dim_tracks

__all__ = ["LossRule", "ReduceRule", "scaled_mean"]

MEAN, SUM = 1, 2  # aten's enumeration of loss reductions; 0 is none


def scaled_mean(op: Any, scale: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``op(…) * scale``: a mean over one block of ``1 / scale`` equal ones, as an addend of the mean over all."""
    return op(*args, **kwargs) * scale


def _with_scale(node: Node, labels: Sequence[str], mesh_shape: Sequence[int]) -> tuple[Any, tuple, dict[str, Any]]:
    """The call of ``node``, scaled down by the number of blocks that "r…" labels cut."""
    blocks = prod(size for label, size in zip(labels, mesh_shape) if label.startswith("r"))
    if blocks == 1:
        return node.target, node.args, dict(node.kwargs)
    return scaled_mean, (node.target, 1.0 / blocks, *node.args), dict(node.kwargs)


def reduced_dims(node: Node) -> list[int]:
    """The dims that an op with an optional ``dim`` argument reduces; all, if it names none."""
    rank = len(operand_shapes(node)[0])
    try:
        given = argument(node, "dim")
    except ValueError:
        given = None
    if given is None or (isinstance(given, list | tuple) and not given):
        return list(range(rank))
    return [nonnegative_dim(dim, rank) for dim in (given if isinstance(given, list | tuple) else [given])]


def _kept_tracks(node: Node) -> list[Track]:
    """The dims that a reduction leaves."""
    shape, reduced = operand_shapes(node)[0], reduced_dims(node)
    keepdim = len(types_of(node)[0].shape) == len(shape)
    count = len(types_of(node))
    return [
        Track((d,), (d if keepdim else d - sum(other < d for other in reduced),) * count, extent)
        for d, extent in enumerate(shape)
        if d not in reduced and extent > 1
    ]


def _scanned_tracks(node: Node) -> list[Track]:
    """The dims of an op that keeps its operand's shape but for the dims it works along."""
    return same_dim_tracks(node, reduced_dims(node))


class ReduceRule(DimsRule):
    """The rule of a reduction over ``dim``. sums: True for a sum or a mean, whose reduced dims contract. saved_outputs:
    the outputs that autograd keeps."""

    def __init__(
        self,
        tracks: Callable[[Node], list[Track]] = _kept_tracks,
        sums: bool = False,
        saves: tuple[int, ...] = (),
        saved_outputs: tuple[int, ...] = (),
    ) -> None:
        super().__init__(tracks, linear=None if sums else (), saves=saves)
        self.sums = sums
        self.saved_outputs = saved_outputs

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "d…" for kept dims, "r…" for summed ones, and what passes addends through."""
        choices = super().axis_choices(node)
        if not self.sums:
            return choices
        shape = operand_shapes(node)[0]
        summed = tuple(
            AxisChoice(f"r{dim}", (shard(dim),), (ROW,), shape[dim]) for dim in reduced_dims(node) if shape[dim] > 1
        )
        return (choices[0], *summed, *choices[1:])

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A mean over a block becomes an addend of the mean over all."""
        if ".mean." in op_name(node):
            return _with_scale(node, labels, mesh_shape)
        return super().localize(node, labels, mesh_shape)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The operands and outputs named at construction."""
        outputs = tuple(("output", k) for k in self.saved_outputs) if types_of(node)[0].is_float else ()
        return (*super().saves(node), *outputs)

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """For any and all: about one element that decides, so that the result is not a foregone conclusion."""
        name = op_name(node).split(".")[1]
        kind = tensor_operands(node)[0].meta["type"]
        if name not in ("any", "all") or kind.dtype != torch.bool:
            return None
        rare = torch.rand(kind.shape, generator=generator) < 1 / max(1, kind.numel)
        return [rare if name == "any" else ~rare]


class LossRule(Rule):
    """The rule of a loss that is elementwise but for its ``reduction`` (none, mean or sum) over all elements."""

    cost_kind = "loss"

    def __init__(self) -> None:
        self.elementwise = PointwiseRule()

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """The choices of an elementwise op without reduction; with one, every dim contracts."""
        if argument(node, "reduction") not in (MEAN, SUM):
            return self.elementwise.axis_choices(node)
        operands = operand_shapes(node)
        space = torch.broadcast_shapes(*operands)
        choices = [whole(node)]
        for dim, extent in enumerate(space):
            # where input and target broadcast against each other aten's own gradients are wrong: that dim stays as
            # it is
            if extent == 1 or any(tuple(shape[-len(space) :]) != tuple(space) for shape in operands[:2]):
                continue
            dims = [dim - (len(space) - len(shape)) for shape in operands]
            inputs = tuple(shard(d) if d >= 0 and shape[d] == extent else FREE_GRAD for d, shape in zip(dims, operands))
            choices.append(AxisChoice(f"r{dim}", inputs, (ROW,), extent))
        return (*choices, grad_choice(node))

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A mean over a block becomes an addend of the mean over all."""
        if argument(node, "reduction") == MEAN:
            return _with_scale(node, labels, mesh_shape)
        return super().localize(node, labels, mesh_shape)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All operands."""
        return tuple(("input", k) for k in range(len(tensor_operands(node))))

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Probabilities where the loss wants them."""
        if not any(name in op_name(node) for name in ("binary_cross_entropy.", "kl_div")):
            return None
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in operand_shapes(node)]
        kinds = [operand.meta["type"].dtype for operand in tensor_operands(node)]
        return [(0.1 + 0.8 * torch.sigmoid(x)).to(dtype) for x, dtype in zip(values, kinds)]


register("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default")(ReduceRule(sums=True))
register(
    "aten.amax.default aten.amin.default aten.logsumexp.default aten.prod.dim_int aten.prod.default",
    "aten.linalg_vector_norm.default aten.norm.ScalarOpt_dim aten.max.default aten.min.default",
)(ReduceRule(saves=(0,), saved_outputs=(0,)))
register("aten.max.dim", "aten.min.dim", "aten.mode.default", "aten.median.dim")(ReduceRule(saved_outputs=(1,)))
register(
    "aten.var.correction aten.std.correction aten.var_mean.correction aten.std_mean.correction",
    "aten.var.dim aten.std.dim aten.var.default aten.std.default",
)(ReduceRule(saves=(0,)))
register(
    "aten.argmax.default aten.argmin.default aten.any.default aten.any.dim aten.any.dims",
    "aten.all.default aten.all.dim aten.all.dims aten.count_nonzero.dim_IntList",
)(ReduceRule())
register(
    "aten.softmax.int aten._softmax.default aten._safe_softmax.default",
    "aten.log_softmax.int aten._log_softmax.default",
)(ReduceRule(_scanned_tracks, saved_outputs=(0,)))
register("aten.cumsum.default", "aten.diff.default", "aten.argsort.default", "aten.argsort.stable")(
    ReduceRule(_scanned_tracks)
)
register("aten.cumprod.default", "aten.logcumsumexp.default")(
    ReduceRule(_scanned_tracks, saves=(0,), saved_outputs=(0,))
)
register("aten.topk.default", "aten.sort.default", "aten.sort.stable", "aten.cummax.default", "aten.kthvalue.default")(
    ReduceRule(_scanned_tracks, saved_outputs=(1,))
)
register(
    "aten.mse_loss.default aten.l1_loss.default aten.smooth_l1_loss.default aten.huber_loss.default",
    "aten.binary_cross_entropy.default aten.binary_cross_entropy_with_logits.default",
    "aten.kl_div.default",
)(LossRule())
