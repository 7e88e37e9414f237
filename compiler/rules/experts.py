"""The rule of a mixture's experts: tokens are free, experts and the experts' inner dim contract.

Experts may be parallel in two ways. "expert": every device has all tokens and the rows of its own experts, and the
results add up (around a cut of the tokens that is an all-gather and a reduce-scatter). "dispatch": tokens and experts
are cut alike, each token goes to the devices of its experts and comes back, by all_to_all (GShard, arXiv:2006.16668);
with K experts per token and p devices that moves K/p of the bytes. It is priced for an even router; how many rows go
where is exchanged first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands
from . import register, whole
from .base import ROW, AxisChoice, Internal, Rule
from .common import Part, argument, axes_of, cut, random_float, replace_arguments

__all__ = ["ExpertsRule"]


class ExpertsRule(Rule):
    """``local_ops.experts``: x [T, H], index and weight [T, K], gate_up [E, 2F, H] or [E, 2, F, H] ([E, F, H] without a
    gate), down [E, H, F], and biases of both ([E, 2F] or [E, 2, F], [E, H]) if any.

    The inner dim may be cut unless gate and up are stacked in one dim, whose blocks would mix them. A cut of the
    experts shares the work evenly only as far as the router does.
    """

    cost_kind = "matmul"

    def _sizes(self, node: Node) -> tuple[int, int, int, int]:
        """(tokens × experts per token, E, H, F)."""
        _, index, _, _, down, *_ = (operand.meta["type"].shape for operand in tensor_operands(node))
        return index[0] * index[1], *down

    @staticmethod
    def _biases(node: Node, gate_up: Part, down: Part) -> list[Part]:
        """These parts for the biases that the node has."""
        given = {"gate_up_bias": gate_up, "down_bias": down}
        return [part for name, part in given.items() if argument(node, name) is not None]

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "token", "expert", "ffn", "dispatch"."""
        _, experts, _, inner = self._sizes(node)
        tokens, gate_up = (tensor_operands(node)[i].meta["type"].shape for i in (0, 3))
        choices = [
            whole(node),
            cut(node, "token", tokens[0], [0, 0, 0, None, None, *self._biases(node, None, None)], [0]),
            cut(node, "expert", experts, [None, None, None, 0, 0, *self._biases(node, 0, 0)], [None]),
        ]
        if len(gate_up) == 4 or not argument(node, "gated"):
            place = len(gate_up) - 2
            biases = self._biases(node, place, ROW)
            choices.append(cut(node, "ffn", inner, [None, None, None, place, 2, *biases], [None]))
        choices.append(self._dispatch(node))
        return tuple(choice for choice in choices if choice.label == "whole" or choice.extent > 1)

    def _dispatch(self, node: Node) -> AxisChoice:
        """The choice that sends tokens to their experts and back, and in the backward their gradients."""
        x, index, _, gate_up, down, *_ = (operand.meta["type"] for operand in tensor_operands(node))
        rows = tuple(
            Internal(phase, "all_to_all", ("input", 0), x.dtype.itemsize, float(index.shape[1]), gradient_of=of)
            for phase, of in (("forward", None), ("forward", None), ("backward", None), ("backward", 0))
        )
        # a number for each expert of the axis and the minor ones
        counts = Internal("forward", "all_to_all", ("input", 3), 8, down.shape[0] / gate_up.numel, growth="gathered")
        extent = gcd(x.shape[0], down.shape[0])
        inputs = [0] * len(tensor_operands(node))
        return replace(cut(node, "dispatch", extent, inputs, [0], (counts, *rows)), joins=("token",))

    def flops(self, node: Node) -> float:
        """2 per multiply-add of the two (three, if gated) matrices that each token meets in each of its experts."""
        rows, _, hidden, inner = self._sizes(node)
        return 2.0 * rows * hidden * inner * (3 if argument(node, "gated") else 2)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with the names of the axes that cut the experts, and of those along which rows travel to them."""
        axes_by_name = {"expert_axes": axes_of(labels, "expert"), "dispatch_axes": axes_of(labels, "dispatch")}
        changes = {key: axes for key, axes in axes_by_name.items() if axes}
        return replace_arguments(node, **changes) if changes else super().localize(node, labels, mesh_shape)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The matrices. Autograd keeps sorted copies of the other operands, which ``temporary_bytes`` counts."""
        return (("input", 3), ("input", 4))

    def temporary_bytes(self, node: Node) -> float:
        """Per token and expert: positions and factor; sorted input, gate and up, activation, product and output."""
        rows, _, hidden, inner = self._sizes(node)
        widths = 1 + 2 * hidden + (4 if argument(node, "gated") else 2) * inner
        return float(rows * (16 + widths * tensor_operands(node)[0].meta["type"].dtype.itemsize))

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Expert numbers within range."""
        operands = tensor_operands(node)
        kind = operands[1].meta["type"]
        index = torch.randint(0, self._sizes(node)[1], kind.shape, generator=generator).to(kind.dtype)
        return [index if k == 1 else random_float(operand, generator) for k, operand in enumerate(operands)]


register("meshwright.experts")(ExpertsRule())
