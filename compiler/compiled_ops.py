"""Our ops in the form in which a compiler can take them: pure functions of tensors.

dropout         what depends on the microbatch comes in as a small tensor, the *ticket*; the mask is one opaque op
                of that, the same bits as ``local_ops.dropout`` draws; the rest fuses with what is around
cross_entropy   without the hand-written gradient, which would end a compiler's fusion
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .context import current
from .local_ops import Cuts, keep_mask_at, mask_key, mask_place

__all__ = ["dropout_ticket", "plain_cross_entropy", "ticketed_dropout"]


def dropout_ticket(op_index: int, cuts: Cuts) -> Tensor:
    """int64 [1 + 2 * dims cut] on the CPU: the key of the bound microbatch, then for each cut dim which block of how
    many this device holds."""
    places = mask_place(cuts, current().comm)
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
