"""Attention over a sequence that is cut: every device has its block of queries, keys and values, and needs all keys.

A ring passes the blocks of keys and values on p - 1 times (Ring Attention, arXiv:2310.01889). Here the ring is that of
an all-gather, which moves the same bytes, (p-1)/p of all keys and values into every device, and the fused kernel then
runs once over what has arrived:

    forward    K, V gathered; the local queries against the keys up to the last they may see; K, V dropped again
    backward   K, V gathered again; the kernel's own backward; dK, dV summed and scattered

Between them only the local blocks, the output and the kernel's statistics are kept. With a causal mask device r of p
uses (r+1)/p of the keys, so the last device sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from .context import Comm, current
from .local_ops import block_index

__all__ = ["ring_attention"]

_SEQUENCE = -2  # of queries, keys and values


@dataclass
class _Ring:
    """The axes that cut the sequence, major first, and the gathered keys and values while a kernel runs."""

    comm: Comm
    axes: tuple[int, ...]
    gathered: list[Tensor] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Fill ``gathered`` with the whole of ``parts``."""
        self.gathered = []
        for x in parts:
            for axis in reversed(self.axes):
                x = self.comm.all_gather(x, axis, x.dim() + _SEQUENCE)
            self.gathered.append(x)

    def scatter(self, grad: Tensor) -> Tensor:
        """This device's block of the sum of a gathered tensor's gradients."""
        for axis in self.axes:
            grad = self.comm.reduce_scatter(grad, axis, grad.dim() + _SEQUENCE)
        return grad

    def end(self, block: int) -> int:
        """How many keys come before the end of this device's block of ``block``."""
        index = 0
        for axis in self.axes:
            index = index * self.comm.size(axis) + self.comm.index(axis)
        return (index + 1) * block

    def pack(self, x: Tensor) -> Any:
        """What the kernel saves: of a view of something gathered only where it lies."""
        storage = x.untyped_storage()._cdata
        if storage not in self.storages:
            return x
        return self.storages.index(storage), x.size(), x.stride(), x.storage_offset()

    def unpack(self, saved: Any) -> Tensor:
        """The view again, of what has been gathered again."""
        if isinstance(saved, Tensor):
            return saved
        which, size, stride, offset = saved
        view: Tensor = self.gathered[which].as_strided(size, stride, offset)
        return view


class _Inner(torch.autograd.Function):
    """The beginning of the graph inside the op: gives ``x`` a node of its own that keeps nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients are taken at this node")


def _inner(anchor: Tensor, x: Tensor) -> Tensor:
    """``x`` where the graph inside the op begins."""
    made: Tensor = _Inner.apply(anchor, x)
    return made


def _last_rows(queries: int, keys: int, like: Tensor) -> Tensor:
    """The causal mask of the last ``queries`` of ``keys`` positions: as a name for kernels that know it, else written
    out."""
    if like.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # brings all of dynamo, a second that plans do not need

        named: Tensor = causal_lower_right(queries, keys)
        return named
    return torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril_(keys - queries)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        ring: _Ring,
        causal: bool,
        kernel: Callable[..., Tensor],
    ) -> Tensor:
        ring.gather((key, value))
        ctx.ring = ring
        ctx.save_for_backward(key, value)
        with torch.enable_grad(), saved_tensors_hooks(ring.pack, ring.unpack):
            anchor = query.new_empty(0, requires_grad=True)
            inner = [_inner(anchor, x) for x in (query, *ring.gathered)]
            inner += [] if mask is None else [_inner(anchor, mask) if mask.is_floating_point() else mask]
            ring.storages = [x.untyped_storage()._cdata for x in ring.gathered]
            q, k, v = inner[:3]
            seen = None if mask is None else inner[3]
            if causal:
                end = ring.end(q.shape[_SEQUENCE])
                k, v = k.narrow(_SEQUENCE, 0, end), v.narrow(_SEQUENCE, 0, end)
                seen = _last_rows(q.shape[_SEQUENCE], end, q)
            out = kernel(q, k, v, seen)
        wanted = [k for k in range(4) if ctx.needs_input_grad[k]]
        ctx.inner = get_gradient_edge(out), {k: get_gradient_edge(inner[k]) for k in wanted}
        ring.gathered = []
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ring, (out, edges) = ctx.ring, ctx.inner
        del ctx.inner
        ring.gather(ctx.saved_tensors)
        found = dict(zip(edges, torch.autograd.grad([out], list(edges.values()), list(grads))))
        ring.gathered = []
        for k in (1, 2):
            if k in found:
                found[k] = ring.scatter(found[k])
        return (*(found.get(k) for k in range(4)), None, None, None)


def _of_block(x: Tensor, heads: int, axes: Sequence[int], comm: Comm) -> Tensor:
    """The key-value heads of ``x`` [..., kv heads, S, D] that this device's block of ``heads`` query heads reads: a
    slice where a block is a part of a group or whole groups, else one for each query head."""
    group = heads * prod(comm.size(axis) for axis in axes) // x.shape[-3]
    first = block_index(axes, comm) * heads
    if heads % group == 0 or group % heads == 0:
        return x.narrow(-3, first // group, max(1, heads // group))
    return x.index_select(-3, torch.arange(first, first + heads, device=x.device) // group)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    ring_axes: tuple[int, ...] = (),
    group_axes: tuple[int, ...] = (),
    kernel: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """``scaled_dot_product_attention`` of this device's queries over the keys of all devices along ``ring_axes``.

    query: [..., heads, Sq here, D], key, value: [..., kv heads, Skv here, D], attn_mask: broadcasts to [..., heads, Sq
    here, Skv of all] -> [..., heads, Sq here, Dv]. Per axis two all-gathers in the forward, and two more and two
    reduce-scatters in the backward. With ``group_axes`` the query heads are a block, along these axes, of those that
    the key-value heads here serve; only the latter that the block needs are read. kernel: what attends to the keys
    that have arrived. ValueError with dropout, whose mask would depend on the cut.
    """
    if dropout_p:
        raise ValueError(f"a cut attention draws no dropout of its own, but got dropout_p={dropout_p}; pass 0")
    if group_axes:
        key, value = (_of_block(x, query.shape[-3], group_axes, current().comm) for x in (key, value))
    attend = partial(kernel, scale=scale, enable_gqa=enable_gqa)
    if not ring_axes:
        return attend(query, key, value, attn_mask, is_causal=is_causal)
    ring = _Ring(current().comm, tuple(ring_axes))
    out: Tensor = _RingAttention.apply(query, key, value, attn_mask, ring, is_causal, attend)
    return out
