"""Rules of recurrent nets as one op, and of weight normalization and bags of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands, types_of
from ..ir.ops.local_ops import embedding_bag_shard
from . import register, whole
from .base import WHOLE, AxisChoice, Rule
from .common import Part, argument, axes_of, cut, parameters, replace_arguments
from .view import DimsRule, Track, operand_shapes

__all__ = ["BagRule", "EvenBagRule", "RecurrentRule"]


class RecurrentRule(Rule):
    """The rule of lstm and gru on a whole sequence: the batch is free, and parameters get addends of their gradients.

    Cutting the hidden dim would exchange states at every step, and is not offered.
    """

    cost_kind = "matmul"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch"."""
        batch_dim = 0 if argument(node, "batch_first") else 1
        states = self._states(node)
        operands = tensor_operands(node)
        batch = operands[0].meta["type"].shape[batch_dim]
        if batch == 1 or (argument(node, "dropout") and argument(node, "train")):
            return (whole(node),)
        weights: list[Part] = [None] * (len(operands) - 1 - states)
        outputs: list[Part] = [batch_dim, *[1] * (len(types_of(node)) - 1)]
        return whole(node), cut(node, "batch", batch, [batch_dim, *[1] * states, *weights], outputs)

    @staticmethod
    def _states(node: Node) -> int:
        """The number of initial states: hidden, and cell for an lstm."""
        given: Any = argument(node, "hx")
        return len(given) if isinstance(given, list | tuple) else 1

    def flops(self, node: Node) -> float:
        """2 per weight of a matrix and per element of the sequence."""
        first, *rest = (operand.meta["type"] for operand in tensor_operands(node))
        matrices = [kind.numel for kind in rest[self._states(node) :] if len(kind.shape) == 2]
        return 2.0 * first.shape[0] * first.shape[1] * sum(matrices)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The sequence, the result, and the weights."""
        count = len(tensor_operands(node))
        return (("output", 0), *(("input", k) for k in range(count)))

    def temporary_bytes(self, node: Node) -> float:
        """The gates of every step: per layer four or three times the result, and the cell."""
        gates = 5 if len(types_of(node)) == 3 else 4
        return float(gates * argument(node, "num_layers") * types_of(node)[0].nbytes)


register("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")(RecurrentRule())


def _weight_norm(node: Node) -> list[Track]:
    direction, _ = operand_shapes(node)
    dim = argument(node, "dim") % len(direction)
    return [Track((dim, dim), (dim,), direction[dim])] if direction[dim] > 1 else []


register("aten._weight_norm.default")(DimsRule(_weight_norm, linear=(), saves=(0, 1)))


MAX = 2  # a mode of bags


class BagRule(Rule):
    """The rule of a bag of embeddings: the hidden dim is free; where rows are cut, each device adds its own. Bags stay
    whole."""

    cost_kind = "embedding"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "vocab" of sums, and of means without padding, and "hidden"."""
        rows, hidden = tensor_operands(node)[0].meta["type"].shape
        others: list[Part] = [None] * (len(tensor_operands(node)) - 1)
        rest: list[Part] = [_along_hidden(kind.shape, hidden) for kind in types_of(node)[1:]]
        choices = [whole(node), cut(node, "hidden", hidden, [1, *others], [1, *rest])]
        padded = (argument(node, "padding_idx") if "padding_idx" in parameters(node) else None) not in (None, -1)
        if argument(node, "mode") != MAX and not padded and not argument(node, "scale_grad_by_freq"):
            choices.insert(1, cut(node, "vocab", rows, [0, *others], [None, *(WHOLE for _ in rest)]))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """``embedding_bag_shard`` where rows are cut."""
        axes = axes_of(labels, "vocab")
        if not axes:
            return super().localize(node, labels, mesh_shape)
        names = ("weight", "indices", "offsets", "mode", "per_sample_weights", "include_last_offset")
        return embedding_bag_shard, tuple(argument(node, name) for name in names), {"vocab_axes": axes}

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """Indices and offsets."""
        return (("input", 1), ("input", 2))

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Rows of the table, in ascending bags."""
        weight, index, offsets, *rest = (operand.meta["type"] for operand in tensor_operands(node))
        bags = max(1, offsets.numel - bool(argument(node, "include_last_offset")))
        starts = torch.arange(offsets.numel) * (index.numel // bags)
        return [
            torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype),
            torch.randint(0, weight.shape[0], index.shape, generator=generator).to(index.dtype),
            starts.to(offsets.dtype),
            *(torch.rand(kind.shape, generator=generator).to(kind.dtype) for kind in rest),
        ]


class EvenBagRule(Rule):
    """The rule of bags of equal lengths: weight [rows, hidden], index [bag, rows of a bag]. Bags and the hidden dim are
    free; where rows are cut, each device adds its own."""

    cost_kind = "embedding"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "bag", "vocab" of sums, and of means without padding, and "hidden"."""
        (rows, hidden), (bags, _) = (operand.meta["type"].shape for operand in tensor_operands(node))
        choices = [whole(node), cut(node, "bag", bags, [None, 0], [0]), cut(node, "hidden", hidden, [1, None], [1])]
        mode = argument(node, "mode")
        if mode == 0 or (mode == 1 and argument(node, "padding_idx") < 0):
            choices.insert(2, cut(node, "vocab", rows, [0, None], [None]))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """With the axes that cut the rows."""
        axes = axes_of(labels, "vocab")
        return replace_arguments(node, vocab_axes=axes) if axes else (node.target, node.args, dict(node.kwargs))

    def flops(self, node: Node) -> float:
        """An addition per element of a row."""
        weight, index = (operand.meta["type"] for operand in tensor_operands(node))
        return float(index.numel * weight.shape[1])

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The index."""
        return (("input", 1),)

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """Rows of the table."""
        weight, index = (operand.meta["type"] for operand in tensor_operands(node))
        table = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
        return [table, torch.randint(0, weight.shape[0], index.shape, generator=generator).to(index.dtype)]


register("meshwright.embedding_bag")(EvenBagRule())


def _along_hidden(shape: tuple[int, ...], hidden: int) -> Part:
    """The places of maxima have the hidden dim; the rest of the op's notes on its bags are whole."""
    return 1 if len(shape) == 2 and shape[1] == hidden else WHOLE


register("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")(BagRule())
