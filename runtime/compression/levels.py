"""Few levels per element, chosen at random so that the expectation is exact: integers of 8, 4 and 2 bits, and TernGrad.

With L levels and a block's largest magnitude s: d = 2 s (1 + 2⁻¹⁸) / (L − 1), c = (L − 1) / 2,

    q = ⌊x / d + c + u⌋,    x̂ = (q − c) d,    u uniform in (0, 1)

so E x̂ = x (QSGD, Alistarh et al. 2017, section 3.1, with the largest magnitude of a block for the norm). L = 255,
15, 4: int8, int4, int2; odd L have zero as a level, so zeros stay. L = 3: s · sign(x) · Bernoulli(|x| / s), which is
TernGrad (Wen et al. 2017, equation 2) with a scale per block instead of per layer and without its clipping, which is
biased. Blocks whose largest magnitude is below 10⁻³⁰ are zero.
"""

from __future__ import annotations

import torch

from .dither import uniforms
from .two_step import BlockCodec

__all__ = ["NearestLevels", "StochasticLevels"]

_SLACK = 1 + 2.0**-18  # the largest magnitude stays below the highest level, whatever rounding does
_TINY = 1e-30


class StochasticLevels(BlockCodec):
    """``payload.levels`` levels."""

    scratch = False

    def encode(self, x: torch.Tensor, scales: torch.Tensor, digits: torch.Tensor, key: int) -> None:
        """Unbiased; x stays as it is."""
        levels = self.payload.levels
        largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
        there = largest > _TINY
        torch.mul(largest.mul_(there), 2 * _SLACK / (levels - 1), out=scales)
        inverse = torch.where(there, 1 / scales, 0)
        torch.addcmul(self.thresholds(key, x), x, inverse, out=digits).add_((levels - 1) / 2).floor_()

    def thresholds(self, key: int, like: torch.Tensor) -> torch.Tensor:
        """u."""
        return uniforms(key, like.numel(), like.device).view(like.shape)

    def decode_add(self, scales: torch.Tensor, digits: torch.Tensor, out: torch.Tensor) -> None:
        """out += (q − c) d."""
        out.addcmul_(digits.sub_((self.payload.levels - 1) / 2), scales)


class NearestLevels(StochasticLevels):
    """u = ½: the nearest level, biased, with half the largest error."""

    def thresholds(self, key: int, like: torch.Tensor) -> torch.Tensor:
        """½ for every element."""
        return like.new_full((1, 1), 0.5).expand(like.shape)
