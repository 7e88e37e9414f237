"""Connectionist temporal classification as one op of a graph, the loss of each sample.

PyTorch's own op reads lengths that are tensors into Python, which no capture can follow. This one does so when it runs.
Its splits are found by trial, as those of any op without a rule: samples are free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ctc_loss", "reduced_ctc_loss"]

_ctc_loss = functional.ctc_loss


@torch.library.custom_op("meshwright::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The loss of every sample: log_probs [time, sample, class], targets [sample, label] -> [sample]."""
    loss, _ = _forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return torch.where(loss.isinf(), 0.0, loss) if zero_infinity else loss


def _forward(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """The losses, and what PyTorch's backward needs beside them."""
    return torch.ops.aten._ctc_loss(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), *options)


@torch.library.custom_op("meshwright::ctc_loss_backward", mutates_args=())
def _gradient(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    lengths = input_lengths, target_lengths
    found = _forward(log_probs, targets, *lengths, blank, zero_infinity)
    read = (x.tolist() for x in lengths)
    return torch.ops.aten._ctc_loss_backward(grad, log_probs, targets, *read, *found, blank, zero_infinity)


@ctc_loss.register_fake
def _(log_probs: Tensor, *_rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@_gradient.register_fake
def _(grad: Tensor, log_probs: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradient(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_save)


def reduced_ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.ctc_loss`` by the op above, where lengths are tensors and samples are a dim."""
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(isinstance(x, Tensor) for x in lengths):
        return _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    loss = ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if reduction == "mean":
        return (loss / target_lengths.clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction == "sum" else loss
