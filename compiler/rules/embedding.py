"""Table look-ups: the index's dims are free, the hidden dim is free, and the rows contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..graph import tensor_operands
from ..local_ops import embedding_shard
from . import register, whole
from .base import FREE_GRAD, WHOLE, AxisChoice, Rule
from .named import argument, axes_of, cut, random_float, replace_arguments

__all__ = ["EmbeddingRule"]


class EmbeddingRule(Rule):
    """weight [rows, hidden], index [b0, b1, …]. A cut of the rows finds each row on one device, zeros on the others.

    ``scale_grad_by_freq`` counts over the whole index and table: only the hidden dim may then be cut.
    """

    cost_kind = "embedding"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "b0", "b1", …, "vocab", "hidden", and "grad": all look up whole, each has a share of the gradient."""
        weight, index = (operand.meta["type"].shape for operand in tensor_operands(node))
        choices = [whole(node)]
        if not argument(node, "scale_grad_by_freq"):
            choices += [cut(node, f"b{d}", extent, [None, d], [d]) for d, extent in enumerate(index) if extent > 1]
            choices.append(cut(node, "vocab", weight[0], [0, None], [None]))
        choices.append(cut(node, "hidden", weight[1], [1, None], [len(index)]))
        choices.append(AxisChoice("grad", (FREE_GRAD, WHOLE), (FREE_GRAD,), extent=1, splits_work=False))
        return tuple(choices)

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """``embedding_shard`` where rows are cut. Distributed gradients are dense."""
        axes = axes_of(labels, "vocab")
        if not axes:
            changes = {"sparse": False} if argument(node, "sparse") and set(labels) != {"whole"} else {}
            return replace_arguments(node, **changes)
        weight, index = tensor_operands(node)
        return embedding_shard, (weight, index, argument(node, "padding_idx"), False, False), {"vocab_axes": axes}

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The index."""
        return (("input", 1),)

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
        """An index within the table."""
        weight, index = tensor_operands(node)
        kind = index.meta["type"]
        rows = weight.meta["type"].shape[0]
        return [random_float(weight, generator), torch.randint(0, rows, kind.shape, generator=generator).to(kind.dtype)]


register("aten.embedding.default")(EmbeddingRule())
