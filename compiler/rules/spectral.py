"""Rules of Fourier transforms: the dims that are not transformed are free, and addends pass."""

from __future__ import annotations

from math import log2, prod

from torch.fx import Node

from ..ir.graph import tensor_operands, types_of
from . import register
from .view import DimsRule, Track, argument_dims, same_dim_tracks

__all__ = ["FourierRule"]


class FourierRule(DimsRule):
    """The rule of ``fft_*``: real, complex, inverse, of one or several dims."""

    def __init__(self) -> None:
        super().__init__(self.free_tracks)

    def free_tracks(self, node: Node) -> list[Track]:
        """The dims that are not transformed."""
        return same_dim_tracks(node, argument_dims(node, "dim"))

    def flops(self, node: Node) -> float:
        """5 N log2 N of every transform of N points, half of it where one side is real."""
        operand, output = tensor_operands(node)[0].meta["type"], types_of(node)[0]
        points = prod(max(operand.shape[dim], output.shape[dim]) for dim in argument_dims(node, "dim"))
        real = operand.dtype.is_floating_point or output.dtype.is_floating_point
        return 5.0 * max(operand.numel, output.numel) * log2(max(2, points)) * (0.5 if real else 1.0)


register(
    """aten.fft_fft.default aten.fft_ifft.default aten.fft_rfft.default aten.fft_irfft.default aten.fft_hfft.default
    aten.fft_ihfft.default aten.fft_fft2.default aten.fft_ifft2.default aten.fft_rfft2.default aten.fft_irfft2.default
    aten.fft_fftn.default aten.fft_ifftn.default aten.fft_rfftn.default aten.fft_irfftn.default"""
)(FourierRule())
