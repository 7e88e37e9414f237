"""Ring attention over a cut sequence: every device has its block of queries, keys and values, and needs all keys.

The blocks of keys and values go round (Ring Attention, arXiv:2310.01889): in each of p steps a device attends to the
block that it holds, while it passes it on to the next device and the one before sends the next. The result of a step
is merged with that of the steps before, and no device holds more than the blocks in transit:

    forward    p - 1 passes of K, V
    backward   p - 1 passes of K, V again; dK, dV follow their blocks, p - 1 passes, and then go home to the owner

Between them only the blocks here, the output and its log-sum-exp are kept. A ring over several mesh axes goes round the
minor one before every pass along a major one, so the slower links carry the fewest passes.

With a causal mask device r of p would use r + 1 of the p blocks. So it changes the second half of its queries for that
of device p - 1 - r, and has the half-blocks 2r and 2p - 1 - 2r of 2p (zig-zag order, as in Llama 3's context
parallelism, arXiv:2407.21783), which see the same number of keys together whatever r is. What they give changes back:

    forward    swap half of Q; half of O
    backward   swap half of O and dO; half of dQ

Keys behind the queries are left out, those before them are used without a mask.

The attention to one block of keys, and its part in the gradients, add up block by block. With S = scale · Q Kᵀ + mask,
and b for a block of the keys,

    L_b = log Σ_(j in b) exp S_j          O_b = Σ_(j in b) exp(S_j - L_b) V_j

and two blocks make one (online softmax, Milakov and Gimelshein, arXiv:1805.02867): w = 1 / (1 + exp(L_a - L_b)),

    L = log(exp L_a + exp L_b)            O = O_a + w (O_b - O_a)

The backward of a block needs of the others L and δ = Σ dO · O alone (FlashAttention, arXiv:2205.14135, algorithm 4):
P = exp(S - L), dS = P ∘ (dO Vᵀ - δ), and dQ, dK, dV by products; so it takes O and L of all blocks.

Fused kernels do so where there are any; ``WRITTEN`` is the formulas as they stand, in memory queries × keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import Comm, current_context
from .local_ops import block_index

__all__ = ["AttentionSetting", "BlockKernel", "kernel_for", "merge_block", "ring_attention", "rows_without_keys"]


_SEQUENCE = -2  # of queries, keys and values


@dataclass(frozen=True)
class _Part:
    """The unit of one kernel call: ``rows`` queries from ``row`` on with ``keys`` keys from ``key`` on, under a causal
    mask or without one."""

    row: int
    rows: int
    key: int
    keys: int
    causal: bool


@dataclass(frozen=True)
class _Ring:
    """The devices along the axes that cut the sequence, major first, seen from one of them."""

    comm: Comm
    axes: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        """The number of blocks."""
        return prod(self.comm.size(axis) for axis in self.axes)

    @cached_property
    def index(self) -> int:
        """The index of this device's block."""
        return block_index(self.axes, self.comm)

    def majors(self, axis: int) -> int:
        """The number of devices along the axes before ``axis``."""
        return prod(self.comm.size(a) for a in self.axes[: self.axes.index(axis)])

    def send(self, x: Tensor, axis: int, distance: int = 1) -> Callable[[], Tensor]:
        """Begin to send ``x`` to the device ``distance`` further along the axis, cyclically. The returned function
        waits for the tensor from the device as far behind."""
        index, size = self.comm.index(axis), self.comm.size(axis)
        return self.comm.start_send(x, axis, (index + distance) % size, (index - distance) % size)

    def route(self) -> list[int]:
        """The axis of each pass."""
        sizes = [prod(self.comm.size(a) for a in self.axes[k + 1 :]) for k in range(len(self.axes))]
        return [next(a for a, minor in zip(self.axes, sizes) if step % minor == 0) for step in range(1, self.count)]

    def round(self, block: Tensor) -> Iterator[tuple[int, Tensor, int | None]]:
        """Yield (index, block, axis of its next pass) of every block, this device's first; meanwhile the next
        arrives."""
        there = {axis: self.comm.index(axis) for axis in self.axes}
        for axis in (*self.route(), None):
            coming = None if axis is None else self.send(block, axis)
            index = 0
            for a in self.axes:
                index = index * self.comm.size(a) + there[a]
            yield index, block, axis
            if axis is not None and coming is not None:
                block = coming()
                there[axis] = (there[axis] - 1) % self.comm.size(axis)

    def home(self, block: Tensor) -> Tensor:
        """Send ``block`` home after a ``round``; returns the tensor that went round with this device's block."""
        for axis in self.axes:
            if distance := self.majors(axis) % self.comm.size(axis):
                block = self.send(block, axis, distance)()
        return block

    def mirror(self, x: Tensor) -> Tensor:
        """Exchange ``x`` with device p - 1 - r; returns its tensor."""
        for axis in self.axes:
            opposite = self.comm.size(axis) - 1 - self.comm.index(axis)
            x = self.comm.start_send(x, axis, opposite, opposite)()
        return x

    def swap_halves(self, *tensors: Tensor) -> None:
        """Change, in place, the second half of the rows of each for that of device p - 1 - r."""
        rows = tensors[0].shape[_SEQUENCE]
        halves = [x.narrow(_SEQUENCE, rows - rows // 2, rows // 2) for x in tensors]
        came = self.mirror(halves[0] if len(halves) == 1 else torch.cat(halves, -1))
        for half, x in zip(halves, came.split([half.shape[-1] for half in halves], -1)):
            half.copy_(x)

    def pieces(self, rows: int) -> list[tuple[int, int, int]]:
        """(first row here, rows, first position in the whole sequence) of the queries after ``swap_halves``."""
        opposite, half = self.count - 1 - self.index, rows // 2
        if opposite == self.index or not half:
            return [(0, rows, self.index * rows)]
        return [(0, rows - half, self.index * rows), (rows - half, half, opposite * rows + rows - half)]

    def parts(self, index: int, queries: int, keys: int, causal: bool) -> list[_Part]:
        """The parts to compute with block ``index`` of ``keys`` keys; none where a causal mask hides them all."""
        everything = _Part(0, queries, 0, keys, False)
        if not causal:
            return [everything]
        parts = []
        for row, rows, position in self.pieces(queries):
            before = min(position - index * keys, keys)
            if before > 0:
                parts.append(_Part(row, rows, 0, before, False))
            if 0 <= before < keys:
                parts.append(_Part(row, rows, before, rows, True))
        whole = sum(part.rows * part.keys for part in parts if not part.causal) == queries * keys
        return [everything] if whole else parts


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Both in one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(block: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, Tensor]:
    """The keys and the values, as views."""
    key, value = block.split([shape.numel() for shape in shapes])
    return key.view(shapes[0]), value.view(shapes[1])


def _rows(x: Tensor, part: _Part, dim: int = _SEQUENCE) -> Tensor:
    return x.narrow(dim, part.row, part.rows)


def _keys(x: Tensor, part: _Part) -> Tensor:
    return x.narrow(_SEQUENCE, part.key, part.keys)


def _columns(mask: Tensor, index: int, keys: int) -> Tensor:
    """The columns of a mask that are of block ``index``; all of one that is the same for all keys."""
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, index * keys, keys)


def _additive_mask(mask: Tensor, index: int, query: Tensor, keys: int) -> Tensor:
    """Block ``index`` of a mask as what is added to the scores, of as many dims as the query has."""
    block = _columns(mask, index, keys)
    if block.dtype == torch.bool:
        block = query.new_zeros(block.shape).masked_fill_(~block, -torch.inf)
    block = block[(None,) * (query.dim() - block.dim())]
    return block.expand(*block.shape[:-1], keys)


def _zeros(query: Tensor, width: int) -> Tensor:
    """Zeros to add to, in fp32 at least, as wide and otherwise like ``query``, if possible in memory too."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if width == query.shape[-1]:
        return torch.zeros_like(query, dtype=wide)
    return query.new_zeros((*query.shape[:-1], width), dtype=wide)


@dataclass(frozen=True)
class _Queries:
    """The tensors of a backward that belong to this device's queries."""

    query: Tensor
    #: the gradient of the output
    grad: Tensor
    out: Tensor
    #: the log-sum-exp of the output
    lse: Tensor
    #: the sum of the queries' gradients so far
    summed: Tensor

    def gradients(
        self, part: _Part, block: tuple[Tensor, Tensor], mask: Tensor | None, dmask: Tensor | None,
        attend: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Those of the keys and values of a part; those of its queries and mask are added to what there is."""
        q, grad, out = (_rows(x, part) for x in (self.query, self.grad, self.out))
        k, v = (_keys(x, part) for x in block)
        dq, dk, dv, of_mask = attend(grad, q, k, v, mask, (out, _rows(self.lse, part, -1)), part.causal)
        _rows(self.summed, part).add_(dq)
        if dmask is not None and of_mask is not None:
            dmask.add_(of_mask.sum_to_size(dmask.shape))
        return dk, dv


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        of: tuple[_Ring, bool, AttentionSetting, BlockKernel],
    ) -> Tensor:
        q, (ring, causal, setting, kernel) = query, of
        if causal:
            q = query.clone()
            ring.swap_halves(q)
        shapes, rows, keys = (key.shape, value.shape), query.shape[_SEQUENCE], key.shape[_SEQUENCE]
        out = _zeros(query, value.shape[-1])
        lse = torch.full_like(out[..., 0], -torch.inf)
        own = _pack(key, value)
        for index, block, _ in ring.round(own):
            k, v = _unpack(block, shapes)
            added = None if mask is None else _additive_mask(mask, index, query, keys)
            for part in ring.parts(index, rows, keys, causal):
                more = kernel.forward(_rows(q, part), _keys(k, part), _keys(v, part), added, part.causal, setting)
                merge_block(_rows(out, part), _rows(lse, part, -1), *more)
        if mask is not None:
            lse.masked_fill_(lse.isneginf(), 0.0)
        out = out.to(query.dtype)
        if causal:
            ring.swap_halves(out)
        ctx.of, ctx.shapes = of, shapes
        ctx.save_for_backward(q, own, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ring, causal, setting, kernel), shapes = ctx.of, ctx.shapes
        q, own, mask, out, lse = ctx.saved_tensors
        grad = grads[0]
        if causal:
            grad, out = grad.clone(), out.clone()
            ring.swap_halves(grad, out)
        rows, keys = q.shape[_SEQUENCE], shapes[0][_SEQUENCE]
        own_side = _Queries(q, grad, out, lse, _zeros(q, q.shape[-1]))
        dmask = torch.zeros_like(mask) if setting.mask_grad else None
        following: Callable[[], Tensor] | None = None  # the gradients of the block that is here
        for index, block, axis in ring.round(own):
            added = None if mask is None else _additive_mask(mask, index, q, keys)
            columns = None if dmask is None else _columns(dmask, index, keys)
            attend = partial(kernel.backward, setting=setting)
            found = [
                (part, own_side.gradients(part, _unpack(block, shapes), added, columns, attend))
                for part in ring.parts(index, rows, keys, causal)
            ]
            del block
            summed = torch.zeros_like(own) if following is None else following()
            while found:
                part, of_keys = found.pop()
                for whole, addend in zip(_unpack(summed, shapes), of_keys):
                    _keys(whole, part).add_(addend)
                del of_keys, addend
            following = None if axis is None else ring.send(summed, axis)
        dq = own_side.summed.to(q.dtype)
        if causal:
            ring.swap_halves(dq)
        return (dq, *_unpack(ring.home(summed), shapes), dmask, None)


def _heads_of_block(x: Tensor, heads: int, axes: Sequence[int], comm: Comm) -> Tensor:
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
    writes_scores: bool | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` of this device's queries over the keys of all devices along ``ring_axes``.

    query: [..., heads, Sq here, D], key, value: [..., kv heads, Skv here, D], attn_mask: broadcasts to [..., heads, Sq
    here, Skv of all] -> [..., heads, Sq here, Dv]. The module's docstring says what is sent when. With ``group_axes``
    the query heads are a block, along these axes, of those that the key-value heads here serve; only the latter that
    the block needs are read. kernel: what attends where nothing goes round; writes_scores: see ``kernel_for``.
    ValueError with dropout, whose mask would depend on the cut.
    """
    if dropout_p:
        raise ValueError(f"a cut attention draws no dropout of its own, but got dropout_p={dropout_p}; pass 0")
    if group_axes:
        key, value = (_heads_of_block(x, query.shape[-3], group_axes, current_context().comm) for x in (key, value))
    if not ring_axes:
        return kernel(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    setting = AttentionSetting(scale, attn_mask is not None and attn_mask.requires_grad)
    blocks = kernel_for(query, key, value, attn_mask, setting, writes_scores)
    ring = _Ring(current_context().comm, tuple(ring_axes))
    out: Tensor = _RingAttention.apply(query, key, value, attn_mask, (ring, is_causal, setting, blocks))
    return out


aten = torch.ops.aten

_HEAD_WIDTH_MULTIPLE = 8  # what CUDA's flash kernels want the width of a head to be a multiple of


@dataclass(frozen=True)
class AttentionSetting:
    """The settings that all blocks of one attention share."""

    #: of the products; None: 1 / √D
    scale: float | None
    #: True if the mask gets a gradient
    mask_grad: bool = False


Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, AttentionSetting], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class BlockKernel:
    """The forward and the backward of attention to one block.

    forward(q [..., heads, Sq, D], k [..., kv heads, Skv, D], v [..., kv heads, Skv, Dv], mask, causal, setting) ->
    (O [..., heads, Sq, Dv], L [..., heads, Sq]). mask: added to the scores, or None. causal: query i sees the keys
    up to i.
    backward(dO, q, k, v, mask, (O, L), causal, setting) -> (dq, dk, dv, gradient of the mask or None), O and L being
    of all blocks.
    """

    forward: Forward
    backward: Backward


def merge_block(out: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> None:
    """Add a block to ``out`` [..., Sq, Dv] and ``lse`` [..., Sq], in place; -inf: no key so far."""
    weight = torch.sigmoid(lse_more - lse).masked_fill_(lse_more.isneginf(), 0.0)
    out.lerp_(more.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, lse_more))


def rows_without_keys(mask: Tensor) -> Tensor:
    """bool [..., Sq]: which rows of an added mask see no key."""
    return mask.isneginf().all(-1)


# ---- as the formulas stand


def _repeat_groups(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each query head."""
    group = query.shape[-3] // x.shape[-3]
    return x if group == 1 else x.repeat_interleave(group, -3)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """The sum over the query heads that share keys, and over dims that were broadcast."""
    group = grad.shape[-3] // like.shape[-3]
    grad = grad if group == 1 else grad.unflatten(-3, (like.shape[-3], group)).sum(-3)
    return grad.sum_to_size(like.shape)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, setting: AttentionSetting) -> tuple[Tensor, float]:
    """(S [..., heads, Sq, Skv], in fp32 at least; the scale)."""
    scale = q.shape[-1] ** -0.5 if setting.scale is None else setting.scale
    scores = (q @ _repeat_groups(k, q).mT).to(_accumulation_dtype(q.dtype)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(above, -torch.inf)
    return scores, scale


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _written_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, setting: AttentionSetting
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, mask, causal, setting)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    weights = scores.sub_(finite.unsqueeze(-1)).exp_()
    return weights.to(q.dtype) @ _repeat_groups(v, q), lse


def _written_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, whole: tuple[Tensor, Tensor], causal: bool,
    setting: AttentionSetting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    (out, lse), (scores, scale) = whole, _scores(q, k, mask, causal, setting)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    delta = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    of_scores = weights * ((grad @ _repeat_groups(v, q).mT).to(weights.dtype) - delta)
    dv = weights.to(q.dtype).mT @ grad
    masks = of_scores.sum_to_size(mask.shape).to(mask.dtype) if mask is not None and setting.mask_grad else None
    of_scores = (of_scores * scale).to(q.dtype)
    dq, dk = of_scores @ _repeat_groups(k, q), of_scores.mT @ q
    return dq, _sum_groups(dk, k), _sum_groups(dv, v), masks


# ---- fused


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, setting: AttentionSetting
) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=setting.scale
    )
    if mask is not None:  # the kernel has 0 for a row without keys
        lse = lse.masked_fill(rows_without_keys(mask), -torch.inf)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, whole: tuple[Tensor, Tensor], causal: bool,
    setting: AttentionSetting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, *whole, 0.0, causal, attn_mask=mask, scale=setting.scale
    )
    return dq, dk, dv, None


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, setting: AttentionSetting
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=setting.scale)
    return out, lse


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, whole: tuple[Tensor, Tensor], causal: bool,
    setting: AttentionSetting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    out, lse = whole
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of a dropout
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal, unused, unused,
        scale=setting.scale,
    )  # fmt: skip
    return dq, dk, dv, None


WRITTEN = BlockKernel(_written_forward, _written_backward)
FUSED_CPU = BlockKernel(_cpu_forward, _cpu_backward)
FUSED_CUDA = BlockKernel(_cuda_forward, _cuda_backward)


def kernel_for(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, setting: AttentionSetting, writes_scores: bool | None = None
) -> BlockKernel:
    """The fused kernel that takes these, else ``WRITTEN``. writes_scores: what to suppose of tensors without data,
    which have the CPU's fused kernel."""
    alike = q.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[-1] == v.shape[-1]
    if not alike or setting.mask_grad or writes_scores:
        return WRITTEN
    if q.device.type != "cuda":
        return FUSED_CPU
    asked: Any = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    fits = (
        mask is None and q.shape[-1] % _HEAD_WIDTH_MULTIPLE == 0 and torch.backends.cuda.can_use_flash_attention(asked)
    )
    return FUSED_CUDA if fits else WRITTEN
