"""Scaled dot-product attention: batch, heads and, where every query sees the same keys, query positions may be cut; a
"ring" cuts queries, keys and values along the sequence, and moves keys and values inside the op.

Sequence parallelism in these terms: DeepSpeed-Ulysses (arXiv:2309.14509) is "heads" between two all_to_alls from and to
a cut of the sequence; ring attention is "ring"; both at once (arXiv:2405.07719) are "ring" on one mesh axis and "heads"
on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd, prod
from typing import Any

from torch.fx import Node

from ..ir.graph import tensor_operands
from ..ir.ops.ring_attention import ring_attention
from ..ir.spec import R
from . import register, whole
from .base import AxisChoice, Internal, Rule
from .common import Part, argument, axes_of, cut

__all__ = ["AttentionRule"]


class AttentionRule(Rule):
    """q [batch…, heads, Sq, D], k [batch…, kv heads, Skv, D], v [batch…, kv heads, Skv, Dv], a mask that broadcasts to
    [batch…, heads, Sq, Skv]. With grouped queries the cut "heads" is one of the key-value heads and their groups;
    "groups" cuts the query heads alone, among more devices than there are key-value heads, and leaves these whole.

    An op that draws its own dropout is offered whole only: its mask would depend on the cut.
    """

    cost_kind = "attention"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "batch" (and "batch1", …), "heads", "groups", "query", "ring"."""
        q, k, v, *mask = (operand.meta["type"].shape for operand in tensor_operands(node))
        choices = [whole(node)]
        if argument(node, "dropout_p"):
            return tuple(choices)

        def of_mask(dim: int) -> list[Part]:
            """The mask's own dim behind dim ``dim`` of q, None where it broadcasts."""
            dims = [dim - len(q) + len(shape) for shape in mask]
            return [d if d >= 0 and shape[d] > 1 else None for d, shape in zip(dims, mask)]

        for dim in range(len(q) - 2):
            is_heads = dim == len(q) - 3 and len(q) > 3
            label = "heads" if is_heads else "batch" if dim == 0 else f"batch{dim}"
            if len(k) == len(v) == len(q) and k[dim] == v[dim] and (k[dim] == q[dim] or is_heads) and k[dim] > 1:
                choices.append(cut(node, label, k[dim], [dim, dim, dim, *of_mask(dim)], [dim]))
            grouped = is_heads and len(k) == len(v) == len(q) and argument(node, "enable_gqa") and q[dim] > k[dim]
            if grouped:
                choices.append(cut(node, "groups", q[dim], [dim, None, None, *of_mask(dim)], [dim]))
        dim = len(q) - 2
        if not argument(node, "is_causal") and q[dim] > 1:
            choices.append(cut(node, "query", q[dim], [dim, None, None, *of_mask(dim)], [dim]))
        extent = gcd(q[dim], k[dim])
        if extent > 1 and len(k) == len(v) == len(q) and (q[dim] == k[dim] or not argument(node, "is_causal")):
            choices.append(self._ring(node, extent, of_mask(dim)))
        return tuple(choices)

    @staticmethod
    def _ring(node: Node, extent: int, mask: list[Part]) -> AxisChoice:
        """The choice that cuts queries, keys and values along the sequence.

        Keys and values go round the ring; in the backward their gradients go with them. With a causal mask devices
        also swap halves of their queries, so that all have equal work (``ring_attention``).
        """
        q, k, v, *_ = (operand.meta["type"] for operand in tensor_operands(node))
        dim, size, width = len(q.shape) - 2, q.dtype.itemsize, v.numel / k.numel
        block = partial(Internal, kind="send", like=("input", 1), itemsize=size, scale=1.0 + width)
        messages = [block(phase, times="passes") for phase in ("forward", "backward", "backward")]
        messages.append(block("backward", times="home"))
        if argument(node, "is_causal"):
            half = partial(Internal, kind="send", itemsize=size)
            messages += [
                half("forward", like=("input", 0), scale=0.5),
                half("forward", like=("output", 0), scale=0.5),
                half("backward", like=("output", 0), scale=1.0),  # of the output and its gradient
                half("backward", like=("input", 0), scale=0.5),
            ]
        choice = cut(node, "ring", extent, [dim, dim, dim, *mask], [dim], tuple(messages))
        query, _, _, *rest = (value for value, _ in choice.inputs)
        return replace(choice, reads=(query, R, R, *rest))

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """``ring_attention`` where some axis is a ring, or cuts groups."""
        axes_by_name = {"ring_axes": axes_of(labels, "ring"), "group_axes": axes_of(labels, "groups")}
        axes = {key: wide for key, of in axes_by_name.items() if (wide := tuple(a for a in of if mesh_shape[a] > 1))}
        if not axes:
            return super().localize(node, labels, mesh_shape)
        return ring_attention, node.args, {**node.kwargs, **axes}

    def flops(self, node: Node) -> float:
        """2·Sq·Skv·(D + Dv) per batch entry and head; a causal mask deducts nothing, as in published figures."""
        q, k, v = (operand.meta["type"].shape for operand in tensor_operands(node)[:3])
        return 2.0 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """Operands and output, as fused kernels do (the probabilities are computed again)."""
        floats = [k for k, operand in enumerate(tensor_operands(node)) if operand.meta["type"].is_float]
        return (*(("input", k) for k in floats), ("output", 0))

    def temporary_bytes(self, node: Node) -> float:
        """One fp32 log-sum-exp per query and head."""
        return 4.0 * prod(tensor_operands(node)[0].meta["type"].shape[:-1])

    def kept_copies(self, node: Node) -> tuple[tuple[int, float], ...]:
        """A bool mask is kept as the floats that it was turned into."""
        q, _, _, *mask = (operand.meta["type"] for operand in tensor_operands(node))
        return tuple((k, q.dtype.itemsize / m.dtype.itemsize) for k, m in enumerate(mask, 3) if not m.is_float)


register("aten.scaled_dot_product_attention.default")(AttentionRule())
