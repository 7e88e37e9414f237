"""Rules of losses over classes. Sums over cut rows are addends; a mean over a count that differs stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands
from . import register, whole
from .base import WHOLE, AxisChoice, Internal, Rule
from .common import argument, axes_of, cut, random_float, replace_arguments

__all__ = ["ClassLossRule", "CrossEntropyRule"]

_NONE, _SUM = 0, 2  # at::Reduction


def _example_target(target: Node, classes: int, ignore_index: int, generator: torch.Generator) -> torch.Tensor:
    """Classes within range, about one in five ignored (class probabilities if the target is a float)."""
    kind = target.meta["type"]
    if kind.is_float:
        return torch.rand(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype)
    chosen = torch.randint(0, classes, kind.shape, generator=generator)
    ignored = torch.rand(kind.shape, generator=generator) < 0.2
    return chosen.masked_fill(ignored, ignore_index).to(kind.dtype)


class CrossEntropyRule(Rule):
    """The rule of ``local_ops.cross_entropy``: logits [b0, …, C], target [b0, …] -> sum and count, which add up.

    A cut of the vocabulary exchanges the maxima, then, in one message, sums, picked logits and (for smoothing) sums of
    logits.
    """

    cost_kind = "loss"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "b0", "b1", …, "vocab"."""
        logits = tensor_operands(node)[0].meta["type"].shape
        last = len(logits) - 1
        choices = [whole(node)]
        choices += [cut(node, f"b{d}", logits[d], [d, d], [None, None]) for d in range(last) if logits[d] > 1]
        sums = 3.0 if argument(node, "label_smoothing") else 2.0
        internal = tuple(Internal("forward", "all_reduce", ("input", 1), 4, scale) for scale in (1.0, sums))
        choices.append(cut(node, "vocab", logits[last], [last, None], [WHOLE, WHOLE], internal))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with the names of the axes that cut the vocabulary."""
        axes = axes_of(labels, "vocab")
        return replace_arguments(node, vocab_axes=axes) if axes else super().localize(node, labels, mesh_shape)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The logits, of which the backward makes probabilities again."""
        return (("input", 0),)

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Targets within the classes."""
        logits, target = tensor_operands(node)
        classes = logits.meta["type"].shape[-1]
        return [
            random_float(logits, generator),
            _example_target(target, classes, argument(node, "ignore_index"), generator),
        ]


class ClassLossRule(Rule):
    """The rule of PyTorch's losses over dim 1 of [N, C, d2, …] with a target [N, d2, …] (or probabilities
    of the input's shape).

    Without reduction the rows are free, with "sum" they contract; "mean" divides by a count that differs from block to
    block, so it stays whole (capture turns the common case into ``local_ops.cross_entropy``). Weights of classes have
    no gradient.
    """

    cost_kind = "loss"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch", "d2", …"""
        x, target, *weight = (operand.meta["type"] for operand in tensor_operands(node))
        reduction = argument(node, "reduction")
        choices = [whole(node)]
        if reduction not in (_NONE, _SUM) or len(x.shape) == 1:
            return tuple(choices)
        for dim in (0, *range(2, len(x.shape))):
            of_target = dim if target.is_float or dim == 0 else dim - 1
            of_output = None if reduction == _SUM else dim if dim == 0 else dim - 1
            if x.shape[dim] > 1:
                label = f"d{dim}" if dim else "batch"
                inputs = [dim, of_target, *(WHOLE for _ in weight)]
                choices.append(cut(node, label, x.shape[dim], inputs, [of_output]))
        return tuple(choices)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The target, and the input too where it already holds log-probabilities."""
        return (("input", 1),) if "cross_entropy" in str(node.target) else (("input", 0), ("input", 1))

    def temporary_bytes(self, node: Node) -> float:
        """Log-probabilities, where the op makes them."""
        return float(tensor_operands(node)[0].meta["type"].nbytes) if "cross_entropy" in str(node.target) else 0.0

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Targets within the classes, positive weights."""
        x, target, *weight = tensor_operands(node)
        shape = x.meta["type"].shape
        classes = shape[1] if len(shape) > 1 else shape[0]
        return [
            random_float(x, generator),
            _example_target(target, classes, argument(node, "ignore_index"), generator),
            *(random_float(w, generator).abs() for w in weight),
        ]


register("meshwright.cross_entropy")(CrossEntropyRule())
_CLASS_LOSS = ClassLossRule()
register("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")(_CLASS_LOSS)
register("aten.cross_entropy_loss.default")(_CLASS_LOSS)
