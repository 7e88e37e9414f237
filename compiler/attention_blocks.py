"""Attention of some queries to a block of the keys, and its part in the gradients: what a ring adds up block by block.

With S = scale · Q Kᵀ + mask, and b for a block of the keys,

    L_b = log Σ_(j in b) exp S_j          O_b = Σ_(j in b) exp(S_j - L_b) V_j

and two blocks make one (online softmax, Milakov and Gimelshein, arXiv:1805.02867): w = 1 / (1 + exp(L_a - L_b)),

    L = log(exp L_a + exp L_b)            O = O_a + w (O_b - O_a)

The backward of a block needs of the others L and δ = Σ dO · O alone (FlashAttention, arXiv:2205.14135, algorithm 4):
P = exp(S - L), dS = P ∘ (dO Vᵀ - δ), and dQ, dK, dV by products; so it takes O and L of all blocks.

Fused kernels do so where there are any; ``WRITTEN`` is the formulas as they stand, in memory queries × keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Kernel", "Setting", "kernel_for", "merge", "rows_without_keys"]

aten = torch.ops.aten

_WIDTHS = 8  # what CUDA's flash kernels want the width of a head to be a multiple of


@dataclass(frozen=True)
class Setting:
    """What all blocks of one attention share. scale: of the products, None for 1 / √D; mask_grad: whether the mask
    gets a gradient."""

    scale: float | None
    mask_grad: bool = False


Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, Setting], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Kernel:
    """Both directions of a block.

    forward(q [..., heads, Sq, D], k [..., kv heads, Skv, D], v [..., kv heads, Skv, Dv], mask, causal, setting) ->
    (O [..., heads, Sq, Dv], L [..., heads, Sq]). mask: added to the scores, or None. causal: query i sees the keys
    up to i.
    backward(dO, q, k, v, mask, O, L, causal, setting) -> (dq, dk, dv, gradient of the mask or None), O and L being of
    all blocks.
    """

    forward: Forward
    backward: Backward


def merge(out: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> None:
    """Add a block to ``out`` [..., Sq, Dv] and ``lse`` [..., Sq], in place; -inf: no key so far."""
    weight = torch.sigmoid(lse_more - lse).masked_fill_(lse_more.isneginf(), 0.0)
    out.lerp_(more.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, lse_more))


def rows_without_keys(mask: Tensor) -> Tensor:
    """bool [..., Sq]: which rows of an added mask see no key."""
    return mask.isneginf().all(-1)


# ---- as the formulas stand


def _grouped(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each query head."""
    group = query.shape[-3] // x.shape[-3]
    return x if group == 1 else x.repeat_interleave(group, -3)


def _ungrouped(grad: Tensor, like: Tensor) -> Tensor:
    """The sum over the query heads that share keys, and over dims that were broadcast."""
    group = grad.shape[-3] // like.shape[-3]
    grad = grad if group == 1 else grad.unflatten(-3, (like.shape[-3], group)).sum(-3)
    return grad.sum_to_size(like.shape)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, setting: Setting) -> tuple[Tensor, float]:
    """(S [..., heads, Sq, Skv], in fp32 at least; the scale)."""
    scale = q.shape[-1] ** -0.5 if setting.scale is None else setting.scale
    scores = (q @ _grouped(k, q).mT).to(_wide(q.dtype)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(above, -torch.inf)
    return scores, scale


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _written_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, setting: Setting
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, mask, causal, setting)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    weights = scores.sub_(finite.unsqueeze(-1)).exp_()
    return weights.to(q.dtype) @ _grouped(v, q), lse


def _written_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, causal: bool,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    scores, scale = _scores(q, k, mask, causal, setting)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    delta = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    of_scores = weights * ((grad @ _grouped(v, q).mT).to(weights.dtype) - delta)
    dv = weights.to(q.dtype).mT @ grad
    masks = of_scores.sum_to_size(mask.shape).to(mask.dtype) if mask is not None and setting.mask_grad else None
    of_scores = (of_scores * scale).to(q.dtype)
    dq, dk = of_scores @ _grouped(k, q), of_scores.mT @ q
    return dq, _ungrouped(dk, k), _ungrouped(dv, v), masks


# ---- fused


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, setting: Setting
) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=setting.scale
    )
    if mask is not None:  # the kernel has 0 for a row without keys
        lse = lse.masked_fill(rows_without_keys(mask), -torch.inf)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, causal: bool,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=setting.scale
    )
    return dq, dk, dv, None


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, setting: Setting
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=setting.scale)
    return out, lse


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, causal: bool,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of a dropout
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal, unused, unused,
        scale=setting.scale,
    )  # fmt: skip
    return dq, dk, dv, None


WRITTEN = Kernel(_written_forward, _written_backward)
FUSED_CPU = Kernel(_cpu_forward, _cpu_backward)
FUSED_CUDA = Kernel(_cuda_forward, _cuda_backward)


def kernel_for(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, setting: Setting, writes_scores: bool | None = None
) -> Kernel:
    """The fused kernel that takes these, else ``WRITTEN``. writes_scores: what to suppose of tensors without data,
    which have the CPU's fused kernel."""
    alike = q.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[-1] == v.shape[-1]
    if not alike or setting.mask_grad or writes_scores:
        return WRITTEN
    if q.device.type != "cuda":
        return FUSED_CPU
    asked: Any = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    fits = mask is None and q.shape[-1] % _WIDTHS == 0 and torch.backends.cuda.can_use_flash_attention(asked)
    return FUSED_CUDA if fits else WRITTEN
