"""Random tensors that are a function of counters: (seed, step, microbatch, op, index of the element in the whole).

    law           parameters     element, with k the upper 24 bits of its hash (53 in float64) over 2^24 (2^53)
    uniform       low, high      low + k (high - low)
    normal        mean, std      Box and Muller (1958): mean + std √(-2 ln u) cos 2πv, of both halves of the hash
    exponential   rate           -ln(1 - k) / rate, and never 0
    integer       low, high      low + the hash, without its sign, modulo high - low
    bernoulli     probability    1 where k is less than the probability

So a device that holds a block draws its block of the whole, whatever the mesh, and what the backward repeats draws the
same again. PyTorch's own generators give other numbers. Everything else that is random is made of these five
(``frontend.random_ops``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import current_context
from .local_ops import Cuts, hashes, mask_key, mask_place

__all__ = ["LAWS", "random_tensor"]

LAWS = ("uniform", "normal", "exponential", "integer", "bernoulli")
_STREAM = 1 << 32  # op numbers of random tensors begin here, those of dropouts at 0


def random_tensor(
    law: str,
    shape: Sequence[int],
    parameters: Sequence[float],
    dtype: torch.dtype,
    op_index: int,
    device: torch.device | None = None,
    cuts: Cuts = (),
) -> Tensor:
    """A tensor of independent draws of one of ``LAWS``. ``shape`` is that of this device's block.

    ``op_index`` tells the draws of one graph apart; seed, step and microbatch come from the bound context. ``cuts``:
    a (mesh axis, dim) for every cut, major axis first.
    """
    device = device or torch.device("cpu")
    block = list(shape) or [1]
    starts, whole = [0] * len(block), list(block)
    for dim, (index, count) in mask_place(cuts, current_context().comm).items():
        starts[dim], whole[dim] = index * block[dim], block[dim] * count
    bits = hashes(block, starts, whole, mask_key(_STREAM + op_index), device)
    return _values(law, bits, parameters, dtype).view(tuple(shape))


def _values(law: str, bits: Tensor, parameters: Sequence[float], dtype: torch.dtype) -> Tensor:
    """The draws of a law, of uniform 64 bits each."""
    first, second = (*parameters, 0)[:2]
    if law == "integer":
        return bits.bitwise_and_((1 << 63) - 1).remainder_(int(second) - int(first)).add_(int(first)).to(dtype)
    wide = dtype if dtype == torch.float64 else torch.float32
    if law == "bernoulli":
        return (_unit(bits, wide) < first).to(dtype)
    if law == "normal":
        radius = (_unit(bits, wide, 32).neg_().add_(1)).log_().mul_(-2).sqrt_()
        angle = _unit(bits << 32, wide, 32).mul_(2 * math.pi).cos_()
        return radius.mul_(angle).mul_(second).add_(first).to(dtype)
    unit = _unit(bits, wide)
    if law == "exponential":
        smallest = torch.finfo(wide).eps / 4  # half of the distance between two units
        return unit.neg_().add_(1).log_().neg_().clamp_min_(smallest).div_(first).to(dtype)
    assert law == "uniform", law
    drawn = unit.mul_(second - first).add_(first).to(dtype)
    # of 16 bits, or behind a large ``low``, a number below ``high`` may round to it
    return drawn.clamp_max_(_below(second, dtype)) if second > first else drawn


def _unit(bits: Tensor, wide: torch.dtype, most: int = 64) -> Tensor:
    """The upper bits of each hash as a number in [0, 1): 24 of them, or in float64 as many as it has, ``most`` at
    most."""
    count = min(most, 53 if wide == torch.float64 else 24)
    upper = (bits >> (64 - count)).bitwise_and_((1 << count) - 1)
    return upper.to(wide).mul_(2.0**-count)


def _below(value: float, dtype: torch.dtype) -> float:
    """A number of this type that is less than ``value``, and next to it or the one before."""
    return value - max(abs(value) * torch.finfo(dtype).eps, torch.finfo(dtype).tiny)
