"""Scaled dot-product attention: batch, heads and, where every query sees the same keys, query positions may be cut."""

from __future__ import annotations

from math import prod

from torch.fx import Node

from ..graph import tensor_operands
from . import register, whole
from .base import AxisChoice, Rule
from .named import Part, argument, cut

__all__ = ["AttentionRule"]


class AttentionRule(Rule):
    """q [batch…, heads, Sq, D], k [batch…, kv heads, Skv, D], v [batch…, kv heads, Skv, Dv], a mask that broadcasts to
    [batch…, heads, Sq, Skv]. With grouped queries the cut of heads is a cut of the key-value heads and their groups.

    An op that draws its own dropout is offered whole only: its mask would depend on the cut.
    """

    cost_kind = "attention"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch" (and "batch1", …), "heads", "query"."""
        q, k, v, *mask = (operand.meta["type"].shape for operand in tensor_operands(node))
        choices = [whole(node)]
        if argument(node, "dropout_p"):
            return tuple(choices)

        def of_mask(dim: int) -> list[Part]:
            """The mask's own dim behind dim ``dim`` of q, None where it broadcasts."""
            here = [dim - len(q) + len(shape) for shape in mask]
            return [d if d >= 0 and shape[d] > 1 else None for d, shape in zip(here, mask)]

        for dim in range(len(q) - 2):
            is_heads = dim == len(q) - 3 and len(q) > 3
            label = "heads" if is_heads else "batch" if dim == 0 else f"batch{dim}"
            if len(k) == len(v) == len(q) and k[dim] == v[dim] and (k[dim] == q[dim] or is_heads) and k[dim] > 1:
                choices.append(cut(node, label, k[dim], [dim, dim, dim, *of_mask(dim)], [dim]))
        dim = len(q) - 2
        if not argument(node, "is_causal") and q[dim] > 1:
            choices.append(cut(node, "query", q[dim], [dim, None, None, *of_mask(dim)], [dim]))
        return tuple(choices)

    def flops(self, node: Node) -> float:
        """2·Sq·Skv·(D + Dv) per batch entry and head; a causal mask deducts nothing, as in published figures."""
        q, k, v = (operand.meta["type"].shape for operand in tensor_operands(node)[:3])
        return 2.0 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """Operands and output, as fused kernels do (the probabilities are computed again)."""
        floats = [k for k, operand in enumerate(tensor_operands(node)) if operand.meta["type"].is_float]
        return (*(("input", k) for k in floats), ("output", 0))

    def temporary_bytes(self, node: Node) -> float:
        """One fp32 log-sum-exp per query and head; a bool mask is kept as the floats that it was turned into."""
        q, _, _, *mask = (operand.meta["type"] for operand in tensor_operands(node))
        return 4.0 * prod(q.shape[:-1]) + sum(m.numel * q.dtype.itemsize for m in mask if not m.is_float)


register("aten.scaled_dot_product_attention.default")(AttentionRule())
