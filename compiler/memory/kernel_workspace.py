"""The workspace of kernels: a stand-in for attention on tensors without data, and the copies of CPU convolutions.

The stand-in for attention allocates what the real kernels do. It ignores dropout, because capture writes attention
with dropout as matmuls, a softmax and a dropout.

A CPU convolution holds workspace beside its results, and frees it before it returns:

    oneDNN    forward   x' w' y' (blocked by channels), then y' y
              backward  g' w' x', then x' and the input's gradient; then both gradients with x' g' w'
              strided   the larger side is put in order once more at the end
    columns   every k·k window of the input side by side, where torch takes its own kernels (fp64, one small image)

A blocked copy has its channels filled up to a multiple of the block; an input of few channels is read as it lies.
Observed with torch 2.13 and oneDNN on AVX-512, where a block has 16 channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

__all__ = ["attention_stand_in", "convolution_workspace"]


aten = torch.ops.aten


class _Attention(torch.autograd.Function):
    """The allocations of attention: the output in the query's layout, and gradients with heads and positions swapped.

    A fused kernel keeps the log-sum-exp of every row. Other kernels write the scores, keep the probabilities, and
    allocate the gradients of both in the backward.
    """

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
        query, key, value, mask, *_, beside = ctx.saved_tensors
        of_both = [torch.empty_like(beside) for _ in range(2)] if ctx.writes_scores else []
        gradients: list[torch.Tensor | None] = []
        for x in (query, key, value):
            batch, heads, length, width = x.shape
            gradients.append(x.new_empty(batch, length, heads, width).transpose(1, 2))
        del of_both
        gradients.append(None)
        if ctx.needs_input_grad[3]:  # of every score, summed where the mask is broadcast
            gradients[3] = query.new_empty([*query.shape[:-1], key.shape[-2]]).sum_to_size(mask.shape)
        return (*gradients, None)


def attention_stand_in(writes_scores: bool, on_cpu: bool = True) -> Callable[..., torch.Tensor]:
    """The stand-in for ``scaled_dot_product_attention``; ``writes_scores``: where no fused kernel is. The fused kernel
    of CPUs has no gradient of the mask."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, *rest: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if query.dim() != 4 or (on_cpu and attn_mask is not None and attn_mask.requires_grad):
            return aten.scaled_dot_product_attention.default(query, key, value, attn_mask, *rest, **kwargs)
        return _Attention.apply(query, key, value, attn_mask, writes_scores)

    return attention


_BLOCK = 16  # channels; on AVX2 it is 8, which differs only where channels are no multiple of 16
_HALF_BLOCK = 8  # to which the backward fills up an input of fewer channels than a block
_OTHERS = ("Slow", "Winograd", "Xnnpack", "Nnpack")  # kernels without blocked copies; oneDNN has names of its own
_COLOURS = 3  # an input of so few channels is read as it lies, in the backward too


def convolution_workspace(args: Sequence[Any], results: Sequence[torch.Tensor | None], backward: bool) -> int:
    """Bytes beyond the results at the worst moment of ``aten.convolution`` or, with ``backward``, of
    ``aten.convolution_backward`` with these arguments; ``results`` of the latter: gradients of input, weight, bias."""
    if backward:
        _, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, _ = args
        y = args[0]
    else:
        x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
        assert results[0] is not None
        y = results[0]
    x_cpu, weight_cpu = (torch.empty((), dtype=t.dtype).expand(t.shape) for t in (x, weight))  # shapes, no data
    backend: str = torch._C._select_conv_backend(
        x_cpu, weight_cpu, None, stride, padding, dilation, transposed, output_padding, groups, None
    ).name
    if backend == "Slow2d":
        pointwise = all(k == 1 for k in weight.shape[2:]) and all(s == 1 for s in stride) and not any(padding)
        return 0 if pointwise else int(y.shape[0] * prod(weight.shape[1:]) * prod(y.shape[2:]) * x.itemsize)
    if backend.startswith(_OTHERS) or not y.nbytes:
        return max(x.nbytes, weight.nbytes, y.nbytes)
    blocked = groups == 1 and not transposed
    few = blocked and x.shape[1] < _BLOCK
    spread = any(s > 1 for s in stride)  # what a strided kernel spreads its result over is put in order once more
    x2, y2 = (_filled(t, _BLOCK if blocked else 1) for t in (x, y))
    w2 = weight.nbytes * y2 // y.nbytes
    if not backward:
        return max((0 if few else x2) + w2 + y2 - y.nbytes, y2 + (y.nbytes if transposed and spread else 0))
    grad_x, grad_w = (0 if t is None else t.nbytes for t in results[:2])
    moments = [0]
    if grad_x:
        own = grad_x if few and spread else x2
        moments += [y2 + w2 * x2 // x.nbytes + own, own + grad_x * (2 if spread and not transposed else 1)]
    if grad_w:
        read = x2 if not few else 0 if x.shape[1] <= _COLOURS else _filled(x, _HALF_BLOCK)
        moments += [grad_x + read + y2 + w2, grad_x + w2 + grad_w]
    return max(0, max(moments) - grad_x - grad_w)


def _filled(x: torch.Tensor, block: int) -> int:
    """Bytes of ``x`` with its channels filled up to a multiple of ``block``."""
    return x.nbytes // x.shape[1] * (-(-x.shape[1] // block) * block)
