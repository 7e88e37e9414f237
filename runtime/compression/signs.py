"""One bit per element: 1-bit SGD, error-feedback signSGD, and signSGD by majority vote.

    1bit         x̂ = mean of the block's elements of the same sign     Seide et al. 2014, section 3: with error feedback
    ef-signsgd   x̂ = sign(x) · mean |x| of the block                   Karimireddy et al. 2019, algorithm 1
    signsgd      x̂ = sign(x), and the sign of the sum of signs         Bernstein et al. 2018, algorithm 3

The first two are biased and keep what they did not send. The third keeps nothing and knows no magnitude: every
element of the result is +1 or −1, on every rank the same; a tie of votes, and an element that is zero, falls at
random. Its learning rate is that of signs.
"""

from __future__ import annotations

import torch

from .dither import uniforms
from .two_step import BlockCodec

__all__ = ["ErrorFeedbackSign", "MajoritySign", "OneBit"]


class OneBit(BlockCodec):
    """Two means per block: those of the negative and of the other elements."""

    feedback = True

    def encode(self, x: torch.Tensor, scales: torch.Tensor, digits: torch.Tensor, key: int) -> None:
        """scales: (mean of the negative ones, how much higher the mean of the others is)."""
        ups = torch.ge(x, 0, out=digits).sum(1)
        total, above = x.sum(1), torch.clamp_min(x, 0, out=self.workspace(x.shape)).sum(1)
        low = (total - above) / (x.shape[1] - ups).clamp_min_(1)
        scales[:, 0] = low
        scales[:, 1] = above / ups.clamp_min(1) - low
        x.sub_(scales[:, :1]).addcmul_(digits, scales[:, 1:], value=-1)

    def decode_add(self, scales: torch.Tensor, digits: torch.Tensor, out: torch.Tensor) -> None:
        """out += low + digit · rise."""
        out.add_(scales[:, :1]).addcmul_(digits, scales[:, 1:])


class ErrorFeedbackSign(BlockCodec):
    """The mean magnitude per block."""

    feedback = True

    def encode(self, x: torch.Tensor, scales: torch.Tensor, digits: torch.Tensor, key: int) -> None:
        """x becomes x − sign(x) mean |x|."""
        torch.ge(x, 0, out=digits)
        torch.mean(torch.abs(x, out=self.workspace(x.shape)), 1, keepdim=True, out=scales)
        x.add_(scales).addcmul_(digits, scales, value=-2)

    def decode_add(self, scales: torch.Tensor, digits: torch.Tensor, out: torch.Tensor) -> None:
        """out += (2 digit − 1) scale."""
        out.sub_(scales).addcmul_(digits, scales, value=2)


class MajoritySign(BlockCodec):
    """Signs alone. Encoding the sum of signs again is the vote."""

    def encode(self, x: torch.Tensor, scales: torch.Tensor, digits: torch.Tensor, key: int) -> None:
        """Zeros fall at random."""
        torch.ge(x, 0, out=digits)
        coins = uniforms(key, x.numel(), x.device).view(x.shape)
        above = torch.gt(x, 0, out=self.workspace(x.shape))  # digits and above differ where x is zero
        torch.lerp(above, digits, coins.round(), out=digits)

    def decode_add(self, scales: torch.Tensor, digits: torch.Tensor, out: torch.Tensor) -> None:
        """out += ±1."""
        out.add_(digits, alpha=2).sub_(1)
