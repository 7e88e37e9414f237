"""Rules of normalizations: the averaged dims stay whole, all others are free; a batch norm may average over devices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import TensorType, tensor_operands, types_of
from . import register, whole
from .base import WHOLE, AxisChoice, Internal, Rule
from .common import Part, argument, axes_of, cut, parts, random_float, replace_arguments
from .convolution import SPATIAL

__all__ = ["BatchNormRule", "ChannelNormRule", "GroupNormRule", "LayerNormRule"]


def _type(node: Node) -> TensorType:
    """The type of the tensor that is normalized."""
    kind = tensor_operands(node)[0].meta["type"]
    assert isinstance(kind, TensorType)
    return kind


class NormRule(Rule):
    """Base of the rules here: autograd keeps the input, the weight and two fp32 statistics per normalized group."""

    cost_kind = "normalization"

    def groups(self, node: Node) -> int:
        """The number of means that the op takes."""
        raise NotImplementedError

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The input and the weight."""
        return (("input", 0), ("input", 1)) if isinstance(argument(node, "weight"), Node) else (("input", 0),)

    def temporary_bytes(self, node: Node) -> float:
        """Means and inverse deviations."""
        return 8.0 * self.groups(node)


class LayerNormRule(NormRule):
    """Layer norm and RMS norm over the trailing dims: the leading ones are free; weight and bias are used whole."""

    def _leading(self, node: Node) -> int:
        return len(_type(node).shape) - len(argument(node, "normalized_shape"))

    def groups(self, node: Node) -> int:
        """One per row."""
        return prod(_type(node).shape[: self._leading(node)])

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "b0", "b1", …"""
        shape, affine = _type(node).shape, len(tensor_operands(node)) - 1
        outputs = len(types_of(node))
        free = [(d, shape[d]) for d in range(self._leading(node)) if shape[d] > 1]
        return (whole(node), *(cut(node, f"b{d}", n, [d] + [None] * affine, [d] * outputs) for d, n in free))


class GroupNormRule(NormRule):
    """[N, C, …] normalized per sample and group of channels: samples are free, and channels by whole groups."""

    def _groups_argument(self, node: Node) -> str:
        return "group" if "native" in str(node.target) else "num_groups"

    def groups(self, node: Node) -> int:
        """One per sample and group."""
        return _type(node).shape[0] * int(argument(node, self._groups_argument(node)))

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch", "channel"."""
        shape, affine = _type(node).shape, len(tensor_operands(node)) - 1
        outputs = len(types_of(node))  # the native form also gives the statistics [N, groups]
        choices = [whole(node)]
        if shape[0] > 1:
            choices.append(cut(node, "batch", shape[0], [0] + [None] * affine, [0] * outputs))
        groups = argument(node, self._groups_argument(node))
        if groups > 1:
            choices.append(cut(node, "channel", groups, [1] + [0] * affine, [1] * outputs))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Fewer groups where channels are cut; the native form also names N and C."""
        name, by_channel = self._groups_argument(node), parts(labels, mesh_shape, "channel")
        changes = {name: argument(node, name) // by_channel}
        if name == "group":
            changes["N"] = argument(node, "N") // parts(labels, mesh_shape, "batch")
            changes["C"] = argument(node, "C") // by_channel
        return replace_arguments(node, **changes)


class ChannelNormRule(NormRule):
    """PyTorch's batch and instance norms over [N, C, …]: channels are always free.

    With running statistics (evaluation) every other dim is free too; an instance norm's samples are. A batch norm that
    takes its statistics from the batch arrives as ``local_ops.batch_norm``; where not, only its channels may be cut.
    """

    def groups(self, node: Node) -> int:
        """One per channel, and per sample in an instance norm."""
        shape = _type(node).shape
        return shape[1] * (shape[0] if "instance_norm" in str(node.target) else 1)

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "channel"; "batch", "d2", … where they are free."""
        shape = _type(node).shape
        names = ("weight", "bias", "running_mean", "running_var")
        present = [name for name in names if isinstance(argument(node, name), Node)]
        statistics = [WHOLE if kind.numel == 0 else 0 for kind in types_of(node)[1:]]
        choices = [whole(node)]
        if "instance_norm" in str(node.target):
            free = [0] if argument(node, "use_input_stats") and "running_mean" not in present else []
            free = free if argument(node, "use_input_stats") else [d for d in range(len(shape)) if d != 1]
        else:
            training = "no_training" not in str(node.target) and argument(node, "training")
            free = [] if training else [d for d in range(len(shape)) if d != 1]
        if shape[1] > 1:
            choices.append(cut(node, "channel", shape[1], [1, *(0 for _ in present)], [1, *statistics]))
        if any(statistic != WHOLE for statistic in statistics):
            free = []
        for d in free:
            # running statistics have no gradient, so there are no addends of it
            affine: list[Part] = [WHOLE if name.startswith("running") else None for name in present]
            label = f"d{d}" if d else "batch"
            if shape[d] > 1:
                choices.append(cut(node, label, shape[d], [d, *affine], [d, *statistics]))
        return tuple(choices)

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Variances are positive."""
        variance = argument(node, "running_var")
        values = [(operand, random_float(operand, generator)) for operand in tensor_operands(node)]
        return [x.abs() + 0.5 if operand is variance else x for operand, x in values]


class BatchNormRule(NormRule):
    """``local_ops.batch_norm``: a cut of the samples, or of space, averages over the devices inside the op."""

    def groups(self, node: Node) -> int:
        """One per channel."""
        return _type(node).shape[1]

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch", "channel", and "depth", "height", "width"."""
        shape, affine = _type(node).shape, len(tensor_operands(node)) - 1
        statistics = types_of(node)[1]
        internal = (
            Internal("forward", "all_reduce", ("output", 1), 8, 2.0),
            Internal("backward", "all_reduce", ("output", 1), statistics.dtype.itemsize, 2.0),
        )
        choices = [whole(node)]
        if shape[0] > 1:
            inputs: list[Part] = [0] + [None] * affine
            choices.append(cut(node, "batch", shape[0], inputs, [0, WHOLE, WHOLE], internal))
        if shape[1] > 1:
            choices.append(cut(node, "channel", shape[1], [1] + [0] * affine, [1, 0, 0]))
        for label, dim in self._space(node).items():
            if shape[dim] > 1:
                choices.append(cut(node, label, shape[dim], [dim] + [None] * affine, [dim, WHOLE, WHOLE], internal))
        return tuple(choices)

    @staticmethod
    def _space(node: Node) -> dict[str, int]:
        """The dims of space by label."""
        rank = len(_type(node).shape)
        return {label: rank - len(SPATIAL) + k for k, label in enumerate(SPATIAL) if rank - len(SPATIAL) + k >= 2}

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with the names of the axes that cut the dims it averages over."""
        axes = axes_of(labels, "batch", *SPATIAL)
        return replace_arguments(node, batch_axes=axes) if axes else super().localize(node, labels, mesh_shape)


register(
    "aten.layer_norm.default", "aten.native_layer_norm.default", "aten.rms_norm.default", "aten._fused_rms_norm.default"
)(LayerNormRule())
register("aten.group_norm.default", "aten.native_group_norm.default")(GroupNormRule())
register("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default", "aten.instance_norm.default")(
    ChannelNormRule()
)
register("meshwright.batch_norm")(BatchNormRule())
