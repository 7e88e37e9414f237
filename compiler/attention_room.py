"""A stand-in for attention that allocates what the real kernels do, on tensors without data.

Dropout is no matter here: capture writes attention with dropout as matmuls, a softmax and a dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["attention_of"]

aten = torch.ops.aten


class _Attention(torch.autograd.Function):
    """What attention allocates: the output in the query's layout, and gradients with heads and positions swapped. A
    fused kernel keeps the log-sum-exp of every row. Others write the scores, keep the probabilities, and have the
    gradients of both in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        writes_scores: bool,
    ) -> torch.Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty(mask.shape, dtype=query.dtype, device="meta")
        out = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:
            out = query.new_empty([*query.shape[:-1], value.shape[-1]])
        if writes_scores:
            scores = query.new_empty([*query.shape[:-1], key.shape[-2]])
            beside = torch.empty_like(scores)
            del scores
        else:
            beside = torch.empty(query.shape[:-1], dtype=torch.float32, device="meta")
        ctx.writes_scores = writes_scores
        ctx.save_for_backward(query, key, value, mask, out, beside)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_, beside = ctx.saved_tensors
        of_both = [torch.empty_like(beside) for _ in range(2)] if ctx.writes_scores else []
        made = []
        for x in (query, key, value):
            batch, heads, length, width = x.shape
            made.append(x.new_empty(batch, length, heads, width).transpose(1, 2))
        del of_both
        return (*made, None, None)


def attention_of(writes_scores: bool) -> Callable[..., torch.Tensor]:
    """The stand-in for ``scaled_dot_product_attention``; ``writes_scores``: where no fused kernel is."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, *rest: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
            return aten.scaled_dot_product_attention.default(query, key, value, attn_mask, *rest, **kwargs)
        return _Attention.apply(query, key, value, attn_mask, writes_scores)

    return attention
