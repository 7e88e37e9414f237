"""Ops that PyTorch lacks or that change when their data is cut: plain differentiable functions on one device's tensors.

Each is the whole op for one device when its trailing keyword arguments have their defaults, and that is how captured
graphs call it (``meshwright.<name>``). The keyword arguments name the mesh axes (positions) along which the data is
cut; they are filled in by the rules' ``localize``, and the function then talks over ``comm.current_context().comm``.

    dropout          counter-based: the mask is a hash of (seed, step, microbatch, op, global element)
    cross_entropy    sum and count instead of a mean, so that parts add up; vocabulary-parallel as in arXiv:1909.08053
    batch_norm       batch statistics over all devices that share a batch
    embedding_shard  the rows of a table that this device holds
    embedding_bag    sums of bags of rows, of equal lengths
    embedding_bag_shard  the same of any lengths, of the rows that this device holds
    experts          dropless routed feed-forward experts

Two of them have a second form for ``torch.compile``, as pure functions of tensors:

    ticketed_dropout     the counters come in as a small tensor, the *ticket*, and the mask is one opaque op of it, with
                         the same bits as ``dropout`` draws; the rest fuses with the ops around it
    plain_cross_entropy  without the hand-written gradient, which would end a compiler's fusion

``dispatch`` and ``return_rows`` send rows to the devices of their experts and back: expert parallelism by all_to_all
(GShard, arXiv:2006.16668). Every device has rows in the order of their experts, 0 … E-1, of which block i lies on
device i. How many rows each
expert gets is exchanged first, so no row is dropped or padded:

    there    counts [E] → [p, E/p], what every device sends to each expert here; rows in pieces of these sums;
             what has arrived is in the order (device, expert) and is put in the order (expert, device)
    back     the same steps the other way round

Several axes that cut the experts are taken one after the other, major first: after each, the rows are in the order of
the experts of the block that is left. A gradient goes the way of its row, backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import Comm, current_context

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "as_complex",
    "batch_norm",
    "cross_entropy",
    "dispatch",
    "dropout",
    "dropout_ticket",
    "embedding_bag",
    "embedding_bag_shard",
    "embedding_shard",
    "experts",
    "of_any_strides",
    "plain_cross_entropy",
    "return_rows",
    "ticketed_dropout",
]  # fmt: skip


Cuts = tuple[tuple[int, int], ...]  # (mesh axis, tensor dim) of every cut, major axis first

# splitmix64 (Steele, Lea and Flood, OOPSLA 2014): the increment, then (shift, multiplier) of each mixing round
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_PER_HASH = 4  # elements that share one 64-bit hash, 16 bits each

_CPU_LOGITS, _GPU_LOGITS = 2**18, 2**23  # whose probabilities are made at once: they fit a cache


def block_index(axes: Sequence[int], comm: Comm) -> int:
    """The index of this device's block of a dim cut by ``axes`` (major first)."""
    index = 0
    for axis in axes:
        index = index * comm.size(axis) + comm.index(axis)
    return index


def _reduce(x: Tensor, axes: Sequence[int], comm: Comm | None, op: str = "sum") -> Tensor:
    for axis in axes:
        assert comm is not None
        x = comm.all_reduce(x, axis, op)
    return x


# ---- strides


def as_complex(x: Tensor) -> Tensor:
    """``torch.view_as_complex`` of a tensor of any strides: of a copy where these do not allow a view."""
    *others, last = x.stride()
    pairs = last == 1 and all(number % 2 == 0 for number in (*others, x.storage_offset()))
    return torch.view_as_complex(x if pairs else x.contiguous())


def of_any_strides(target: Any) -> Any:
    """What computes the same as this op of operands of any strides: graphs have no copies such as ``contiguous()``."""
    return _OF_ANY_STRIDES.get(target, target)


_OF_ANY_STRIDES = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.view_as_complex.default: as_complex,
}


# ---- dropout


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _stream(*counters: int) -> int:
    """One 64-bit key for a tuple of counters: the splitmix64 finaliser after each."""
    key = 0
    for counter in counters:
        key = (key + (counter + 1) * _GOLDEN) & ((1 << 64) - 1)
        for shift, multiplier in _MIX:
            key = ((key ^ (key >> shift)) * multiplier) & ((1 << 64) - 1)
    return key


def mask_key(op_index: int) -> int:
    """The int64 that all random numbers of an op hash, in the bound microbatch."""
    context = current_context()
    return _signed(_stream(context.seed, context.step, context.microbatch, op_index))


def mask_place(cuts: Cuts, comm: Comm) -> dict[int, tuple[int, int]]:
    """Cut dim → (the block that this device holds, number of blocks)."""
    place = {}
    for dim in dict.fromkeys(dim for _, dim in cuts):
        axes = [axis for axis, d in cuts if d == dim]
        place[dim] = block_index(axes, comm), prod(comm.size(axis) for axis in axes)
    return place


def keep_mask(shape: Sequence[int], p: float, op_index: int, cuts: Cuts, device: torch.device) -> Tensor:
    """bool[shape], true with probability 1 - p (to within 2^-17): this device's part of the mask of the uncut tensor.

    Four neighbours along the last dim share a hash, 16 bits each. Blocks of the last dim may begin anywhere: the groups
    that they touch are hashed whole.
    """
    return keep_mask_at(shape, p, mask_key(op_index), mask_place(cuts, current_context().comm), device)


def keep_mask_at(
    shape: Sequence[int], p: float, key: int, place: Mapping[int, tuple[int, int]], device: torch.device
) -> Tensor:
    """``keep_mask`` by its key (``mask_key``) and place (``mask_place``)."""
    starts, whole = [0] * len(shape), list(shape)
    for dim, (index, count) in place.items():
        starts[dim], whole[dim] = index * shape[dim], shape[dim] * count
    if not shape:
        return keep_mask_at((1,), p, key, {}, device)[0]
    first, skipped = divmod(starts[-1], _PER_HASH)
    groups = -(-(starts[-1] + shape[-1]) // _PER_HASH) - first
    starts[-1], whole[-1] = first, -(-whole[-1] // _PER_HASH)
    x = hashes([*shape[:-1], groups], starts, whole, key, device)
    keep = x.view(torch.int16) >= round(p * 65536) - 32768
    return keep.narrow(-1, skipped, shape[-1]).contiguous()


def hashes(
    counts: Sequence[int], starts: Sequence[int], whole: Sequence[int], key: int, device: torch.device
) -> Tensor:
    """int64[counts]: the splitmix64 hash of each element of a block. The block begins at ``starts`` of a tensor of the
    shape ``whole``, and an element's counter is its index there. There is at least one dim."""
    # the counter, in units of the golden ratio, is a sum of one term per dim: only the last covers all
    x = torch.full((), key, dtype=torch.int64, device=device)
    for dim, (start, count) in enumerate(zip(starts, counts)):
        stride = prod(whole[dim + 1 :])
        term = torch.arange(start, start + count, dtype=torch.int64, device=device).mul_(_signed(stride * _GOLDEN))
        x = x.unsqueeze(-1) + term
    for shift, multiplier in _MIX:
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # int64 shifts its sign in; splitmix64 shifts zeros in
        if multiplier != 1:
            x *= _signed(multiplier)
    return x


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, op_index: int, cuts: Cuts) -> Tensor:
        keep = keep_mask(x.shape, p, op_index, cuts, x.device) if p < 1 else torch.zeros_like(x, dtype=torch.bool)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        return keep.to(x.dtype).mul_(ctx.scale).mul_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return keep.to(grads[0].dtype).mul_(ctx.scale).mul_(grads[0]), None, None, None


def dropout(x: Tensor, p: float, op_index: int, cuts: Cuts = ()) -> Tensor:
    """``x`` with each element zeroed with probability ``p`` and the rest scaled by 1 / (1 - p); same shape and dtype.

    ``op_index`` tells the dropouts of one graph apart; seed, step and microbatch come from the bound context. ``cuts``:
    a (mesh axis, dim) for every cut of x, major axis first; the mask is the slice of the one that an uncut x would get.
    Keeps the mask (1 byte per element) for the backward. Equality with PyTorch's own generator is not claimed.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"a dropout probability lies between 0 and 1, but got {p}; change it in the model")
    return x if p == 0 else _Dropout.apply(x, p, op_index, tuple(cuts))


# ---- cross entropy


class _CrossEntropy(torch.autograd.Function):
    """Per row, with s the smoothing: lse - (1-s) z_target - (s/C) sum z; its gradient: softmax - (1-s) onehot - s/C.

    Probabilities are made in blocks of rows, once in the forward and once more in the backward, so that there are never
    as many of them as logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, vocab_axes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        z, t = logits.detach().reshape(-1, logits.shape[-1]), target.reshape(-1)
        classes, wide = z.shape[1], torch.promote_types(z.dtype, torch.float32)
        in_block = valid = t != ignore_index
        comm = current_context().comm if vocab_axes else None
        if comm is not None:
            t = t - block_index(vocab_axes, comm) * classes
            in_block = (t >= 0) & (t < classes) & valid
            classes *= prod(comm.size(axis) for axis in vocab_axes)
        local = t.masked_fill(~in_block, 0)
        top = _reduce(z.amax(1).to(wide), vocab_axes, comm, "max")
        total = torch.empty_like(top)
        for rows in _row_blocks(z):
            torch.sum(torch.sub(z[rows], top[rows, None]).exp_(), 1, out=total[rows])
        sums = [total, z.gather(1, local[:, None])[:, 0].to(wide).sub_(top).masked_fill_(~in_block, 0)]
        if smoothing:
            sums.append(z.sum(1, dtype=wide))
        total, picked, *mass = _reduce(torch.stack(sums), vocab_axes, comm).unbind(0)
        losses = total.log().sub_(picked, alpha=1 - smoothing)
        if smoothing:  # picked is relative to top
            losses.add_(top, alpha=smoothing).sub_(mass[0], alpha=smoothing / classes)
        ctx.save_for_backward(logits, local, in_block, valid, top, total)
        ctx.smoothing, ctx.classes = smoothing, classes
        count = valid.sum()
        ctx.mark_non_differentiable(count)
        return losses.masked_fill_(~valid, 0).sum(), count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, in_block, valid, top, total = ctx.saved_tensors
        z, top = logits.reshape(-1, logits.shape[-1]), top[:, None]
        row = (valid * grads[0].to(top.dtype))[:, None]
        share, smoothed = row / total[:, None], row * (-ctx.smoothing / ctx.classes)
        out = z.new_empty(z.shape)
        for rows in _row_blocks(z):  # rounded once, on its way to memory
            part = torch.sub(z[rows], top[rows]).exp_()
            torch.addcmul(smoothed[rows], part, share[rows], out=out[rows])
        picked = torch.sub(z.gather(1, local[:, None]), top).exp_()
        picked = torch.addcmul(smoothed, picked, share).sub_(in_block[:, None] * row * (1 - ctx.smoothing))
        out.scatter_(1, local[:, None], picked.to(out.dtype))
        return out.view(logits.shape), None, None, None, None


def _row_blocks(z: Tensor) -> list[slice]:
    """The rows of a matrix in blocks; where it has no data, the first one stands for all."""
    step = max(1, (_CPU_LOGITS if z.is_cpu else _GPU_LOGITS) // z.shape[1])
    blocks = [slice(first, first + step) for first in range(0, len(z), step)]
    return blocks[:1] if z.is_meta else blocks


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, vocab_axes: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """0-d: the sum of ``-log softmax(logits)[target]`` over the rows whose target is not ``ignore_index``, fp32 or
    float64 as the logits, and how many those are, int64. The mean is their quotient. The count can be had before there
    are logits (``target_count``).

    logits: [..., C] in any float dtype (computed in at least fp32), target: [...] of class indices. With ``vocab_axes``
    each device holds a block of C: one max all-reduce of 1 value per row and one sum all-reduce of 2 (3 with smoothing)
    in the forward, none in the backward. Keeps the logits for the backward.
    """
    return _CrossEntropy.apply(logits, target, ignore_index, label_smoothing, tuple(vocab_axes))


def target_count(target: Tensor, ignore_index: int) -> Tensor:
    """0-d: how many targets are not ``ignore_index``, as ``cross_entropy`` counts them."""
    return (target != ignore_index).sum()


# ---- batch norm


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        comm = current_context().comm
        dims = [d for d in range(x.dim()) if d != 1]
        local = x.numel() // x.shape[1]
        n = local * prod(comm.size(axis) for axis in axes)
        wide = x if x.dtype.itemsize >= 4 else x.float()
        var, mean = (s.double() for s in torch.var_mean(wide, dims, correction=0))
        # sums in fp64: the difference below would cancel in fp32
        total, squares = _reduce(torch.stack([mean, var + mean * mean]) * local, axes, comm).unbind(0)
        mean = total / n
        var = squares / n - mean * mean
        kind = torch.promote_types(x.dtype, torch.float32)
        mean, biased, unbiased = mean.to(kind), var.to(kind), (var * (n / max(n - 1, 1))).to(kind)
        ctx.save_for_backward(x, weight, mean, biased)
        ctx.comm, ctx.axes, ctx.eps, ctx.n = comm, axes, eps, n
        ctx.mark_non_differentiable(mean, unbiased)
        scale, shift = (one if one is None else one.to(kind) for one in (weight, bias))
        return F.batch_norm(x, mean, biased, scale, shift, False, 0.0, eps), mean, unbiased

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        dy = grads[0].contiguous()
        # in evaluation mode the fused backward returns this device's sums of dy * xhat and dy
        _, by_xhat, by_one = torch.ops.aten.native_batch_norm_backward(
            dy, x, torch.ones_like(mean), mean, var, None, None, False, ctx.eps, [False, True, True]
        )
        all_xhat, all_one = _reduce(torch.stack([by_xhat, by_one]), ctx.axes, ctx.comm).div_(ctx.n).unbind(0)
        inverse = (var + ctx.eps).rsqrt()
        gain = inverse if weight is None else inverse * weight.to(inverse.dtype)
        # dx = gain * (dy - mean(dy) - xhat * mean(dy * xhat)); x is centred first, for its mean may dwarf its deviation
        shape = [1, -1] + [1] * (x.dim() - 2)
        slope = -gain * all_xhat * inverse
        dx = torch.addcmul((-gain * all_one).view(shape), dy, gain.view(shape))
        dx.addcmul_(x - mean.view(shape), slope.view(shape))
        need = ctx.needs_input_grad
        return dx.to(x.dtype), by_xhat if need[1] else None, by_one if need[2] else None, None, None


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch_axes: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, var): ``x`` [N, C, ...] normalized per channel over all other dims, and the statistics [C] that running
    averages take (var unbiased; neither has a gradient; of at least fp32).

    With ``batch_axes`` the dims other than C are cut into equal blocks along these axes, and the statistics are those
    of the whole: one all-reduce of 2C doubles in the forward, one of 2C values in the backward.
    """
    if batch_axes:
        return _SyncBatchNorm.apply(x, weight, bias, eps, tuple(batch_axes))
    kind = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (one if one is None else one.to(kind) for one in (weight, bias))
    mean, var = torch.zeros(2, x.shape[1], dtype=kind, device=x.device).unbind(0)
    mean, var = mean.clone(), var.clone()
    # momentum 1 makes the fused op write the statistics of this batch, the variance unbiased, into the "running" ones
    y = torch.native_batch_norm(x, weight, bias, mean, var, True, 1.0, eps)[0]
    return y, mean, var


# ---- embedding


def embedding_shard(
    weight: Tensor,
    index: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    vocab_axes: tuple[int, ...] = (),
) -> Tensor:
    """``aten.embedding`` on this device's block of rows: an addend [*index.shape, hidden], zero for others' rows.

    weight: [rows here, hidden]; index: global row numbers; padding_idx: the global row without gradient, -1 for none.
    The weight's gradient is dense whatever ``sparse`` says. Raises ValueError with ``scale_grad_by_freq``, which needs
    the whole table.
    """
    if not vocab_axes:
        return torch.embedding(weight, index, padding_idx, scale_grad_by_freq, sparse)
    if scale_grad_by_freq:
        raise ValueError("with scale_grad_by_freq no rows can be cut, but got vocab_axes; cut the hidden dim")
    rows = weight.shape[0]
    start = block_index(vocab_axes, current_context().comm) * rows
    local = index - start
    outside = (local < 0) | (local >= rows)
    local_padding = padding_idx - start if padding_idx >= start and padding_idx - start < rows else -1
    out = torch.embedding(weight, local.masked_fill_(outside, 0), local_padding)
    return out.masked_fill(outside.unsqueeze(-1), 0)


def embedding_bag(
    weight: Tensor, index: Tensor, mode: int = 0, padding_idx: int = -1, vocab_axes: tuple[int, ...] = ()
) -> Tensor:
    """The sum (mode 0), mean (1) or maximum (2) [bag, hidden] of each bag's rows; index: [bag, rows of a bag].

    With ``vocab_axes`` the weight is this device's block of rows, and the result an addend of sums, or of means without
    a padding_idx.
    """
    if not vocab_axes:
        padding = None if padding_idx < 0 else padding_idx
        return F.embedding_bag(index, weight, mode=("sum", "mean", "max")[mode], padding_idx=padding)
    rows = weight.shape[0]
    local = index - block_index(vocab_axes, current_context().comm) * rows
    outside = (local < 0) | (local >= rows) | (index == padding_idx)
    factors = weight.new_full(index.shape, 1.0 if mode == 0 else 1 / index.shape[1]).masked_fill(outside, 0)
    return F.embedding_bag(local.masked_fill_(outside, 0), weight, mode="sum", per_sample_weights=factors)


def embedding_bag_shard(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    vocab_axes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten.embedding_bag`` on this device's block of rows: addends [bag, hidden] of the sums (mode 0) or means (1) of
    rows by global number, and what the op notes of its bags, whole."""
    rows = weight.shape[0]
    local = indices - block_index(vocab_axes, current_context().comm) * rows
    outside = (local < 0) | (local >= rows)
    factors = weight.new_ones(indices.shape) if per_sample_weights is None else per_sample_weights
    out, *notes = torch.ops.aten.embedding_bag.default(
        weight, local.masked_fill_(outside, 0), offsets, False, 0, False, factors.masked_fill(outside, 0),
        include_last_offset,
    )  # fmt: skip
    if mode == 1:
        starts = offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([indices.shape[0]])])
        sizes = starts.diff()
        out, notes[1:] = out / sizes.clamp(min=1).unsqueeze(-1), [sizes, sizes.clone()]
    return out, *notes


# ---- experts

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


#: functions of (gate, up) by name; ``ops.experts`` adds those that models bring
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}


def _gate_function(activation: str, gated: bool) -> Callable[..., Tensor]:
    """The function of (gate, up), or of (up) without a gate, by this name."""
    if gated and activation in GATES:
        return GATES[activation]
    if activation not in ACTIVATIONS:
        raise ValueError(f"an expert's activation is one of {', '.join(ACTIVATIONS)}, but got {activation!r}; use one")
    act = ACTIVATIONS[activation]
    return (lambda gate, up: act(gate) * up) if gated else act


class _Combine(torch.autograd.Function):
    """``zeros.index_add(0, token, rows * factor)``, which would keep the product for its backward too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: Tensor, token: Tensor, like: Tensor) -> Tensor:
        ctx.save_for_backward(rows, factor, token)
        return torch.zeros_like(like).index_add_(0, token, (rows * factor[:, None]).to(like.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, factor, token = ctx.saved_tensors
        grad = grads[0].index_select(0, token)
        by_factor = torch.linalg.vecdot(grad.to(factor.dtype), rows.to(factor.dtype))
        return (grad * factor[:, None]).to(rows.dtype), by_factor, None, None


def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gated: bool = True,
    expert_axes: tuple[int, ...] = (),
    dispatch_axes: tuple[int, ...] = (),
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Each token's K experts, weighted and summed: [T, H]. No token is dropped.

    x: [T, H]; index, weight: [T, K] expert numbers (one outside 0..E-1 contributes nothing) and their factors; down:
    [E, H, F]; gate_up: [E, 2F, H] (rows gate, then up) or [E, 2, F, H] if ``gated``, when an expert is
    ``down(act(gate(x)) * up(x))``; else [E, F, H] for ``down(act(up(x)))``. gate_up_bias, down_bias: of gate_up's shape
    without H, and [E, H]. activation: a key of ``ACTIVATIONS``, or of ``GATES`` for ``down(gate_fn(gate(x), up(x)))``.
    With ``expert_axes`` all of them are a block of the experts, and the output is an addend without the others'; it is
    an addend too where F is cut (all but the [E, 2F, H] form; down_bias is then an addend). With ``dispatch_axes`` they
    are a block of the experts too, and x, index and weight one of the tokens: a row for each token and expert travels
    to the expert and back (``local_ops``), and the output is this device's tokens'.
    """
    gate_fn = _gate_function(activation, gated)
    count, per_token = gate_up.shape[0], index.shape[1]
    start = block_index(expert_axes, current_context().comm) * count if expert_axes else 0
    count *= prod(current_context().comm.size(axis) for axis in dispatch_axes)
    local = index.reshape(-1) - start
    local = local.masked_fill((local < 0) | (local >= count), count)
    sizes = torch.bincount(local, minlength=count + 1)[:count]
    counts = sizes.tolist()
    order = torch.argsort(local, stable=True)[: sum(counts)]
    token = order // per_token
    rows, counts, moves = dispatch(x.index_select(0, token), sizes, counts, dispatch_axes)
    # unbind: one gradient buffer for all experts; interleaved rows of gate and up stay apart, as joining copies them
    apart = gate_up.dim() == 4 and not gate_up.is_contiguous()
    ups, downs = (gate_up if apart else gate_up.flatten(1, -2)).unbind(0), down.unbind(0)
    nothing: tuple[Any, ...] = (None,) * len(downs)
    up_biases = nothing if gate_up_bias is None else (gate_up_bias if apart else gate_up_bias.flatten(1)).unbind(0)
    down_biases = nothing if down_bias is None else down_bias.unbind(0)
    outs = []
    for e, mine in enumerate(rows.split(counts)):
        # without any token one empty expert runs, so that gradients are zeros and not missing
        if not mine.shape[0] and (e or any(counts)):
            continue
        if apart:
            biases = (None, None) if gate_up_bias is None else up_biases[e].unbind(0)
            halves = [F.linear(mine, half, bias) for half, bias in zip(ups[e].unbind(0), biases)]
        else:
            hidden = F.linear(mine, ups[e], up_biases[e])
            halves = list(hidden.chunk(2, -1)) if gated else [hidden]
        outs.append(F.linear(gate_fn(*halves), downs[e], down_biases[e]))
    return _Combine.apply(
        return_rows(torch.cat(outs), moves), weight.reshape(-1).index_select(0, order), token, x.detach()
    )


def dropout_ticket(op_index: int, cuts: Cuts) -> Tensor:
    """int64 [1 + 2 * dims cut] on the CPU: the key of the bound microbatch, then for each cut dim which block of how
    many this device holds."""
    places = mask_place(cuts, current_context().comm)
    return torch.tensor([mask_key(op_index), *(number for place in places.values() for number in place)])


@torch.library.custom_op("meshwright::keep_mask", mutates_args=())
def _keep_mask(ticket: Tensor, shape: Sequence[int], p: float, dims: Sequence[int], device: torch.device) -> Tensor:
    key, *places = ticket.tolist()
    return keep_mask_at(shape, p, key, dict(zip(dims, zip(places[::2], places[1::2]))), device)


@_keep_mask.register_fake
def _(ticket: Tensor, shape: Sequence[int], p: float, dims: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def ticketed_dropout(x: Tensor, ticket: Tensor, p: float, dims: tuple[int, ...]) -> Tensor:
    """``local_ops.dropout`` of x, whose ``dims`` are cut as ``ticket`` says."""
    if p == 0:
        return x
    if p == 1:
        return x * 0.0
    keep = torch.ops.meshwright.keep_mask(ticket, list(x.shape), p, list(dims), x.device)
    return keep.to(x.dtype) * (1 / (1 - p)) * x


def plain_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, vocab_axes: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """``local_ops.cross_entropy`` where no axis cuts the vocabulary."""
    assert not vocab_axes
    wide = torch.promote_types(logits.dtype, torch.float32)
    t = target.reshape(-1)
    valid = t != ignore_index
    log_p = torch.log_softmax(logits.reshape(-1, logits.shape[-1]), 1, dtype=wide)
    rows = log_p.gather(1, t.masked_fill(~valid, 0)[:, None])[:, 0] * (label_smoothing - 1)
    if label_smoothing:
        rows = rows - log_p.sum(1) * (label_smoothing / log_p.shape[1])
    return rows.masked_fill(~valid, 0).sum(), valid.sum()


@dataclass(frozen=True)
class Move:
    """The exchange of rows along one mesh axis."""

    comm: Comm
    axis: int
    #: rows to each device of the axis
    sent: list[int]
    #: rows from each device of the axis
    received: list[int]
    #: the rows that arrive, in the order of their experts: the k-th one is number order[k] of the arrivals
    order: Tensor
    #: the inverse permutation of ``order``
    inverse: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """[sum of sent, ...] → [sum of received, ...]."""
        return self.comm.all_to_all_uneven(rows, self.axis, self.sent, self.received).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """[sum of received, ...] → [sum of sent, ...]."""
        rows = rows.index_select(0, self.inverse)
        return self.comm.all_to_all_uneven(rows, self.axis, self.received, self.sent)


class _MoveRows(torch.autograd.Function):
    """The differentiable exchange of rows: gradients travel the other way. way: "there" or "back"."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move, way: str) -> Tensor:
        ctx.home = move.there if way == "back" else move.back
        return (move.there if way == "there" else move.back)(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.home(grads[0]), None, None


def dispatch(
    rows: Tensor, sizes: Tensor, counts: list[int], axes: Sequence[int]
) -> tuple[Tensor, list[int], list[Move]]:
    """``rows`` [sum of sizes, H] in the order of experts, of which ``sizes`` [E] says how many each gets (``counts``:
    the same as numbers) → the rows of all devices for the experts here, in the order of these and, for each, of the
    devices; how many each has; and the moves made."""
    moves = []
    for axis in axes:
        move, sizes, counts = _move(current_context().comm, axis, sizes, counts)
        rows = _MoveRows.apply(rows, move, "there")
        moves.append(move)
    return rows, counts, moves


def return_rows(rows: Tensor, moves: Sequence[Move]) -> Tensor:
    """Send rows back through ``moves``: they are again on the devices, and in the order, from which they came."""
    for move in reversed(moves):
        rows = _MoveRows.apply(rows, move, "back")
    return rows


def _move(comm: Comm, axis: int, sizes: Tensor, counts: list[int]) -> tuple[Move, Tensor, list[int]]:
    """One axis' move of the rows of experts with these counts, and the counts [E / p] of those here."""
    size = comm.size(axis)
    block = len(counts) // size
    arriving = comm.all_to_all(sizes, axis, 0, 0)  # [p · E / p]: of each device for each expert here
    came = [counts_of.tolist() for counts_of in arriving.cpu().split(block)]
    sent = [sum(counts[d * block : (d + 1) * block]) for d in range(size)]
    received = [sum(each) for each in came]
    expert = torch.arange(block, device=sizes.device).repeat(size)
    order = torch.argsort(expert.repeat_interleave(arriving, output_size=sum(received)), stable=True)
    move = Move(comm, axis, sent, received, order, torch.argsort(order))
    return move, arriving.view(size, block).sum(0), [sum(each) for each in zip(*came, strict=True)]
