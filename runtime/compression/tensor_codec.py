"""Codecs of single tensors: activations and their gradients between stages, weights that are gathered, and their
gradients that are scattered.

Nothing is kept between messages, so only codes of elements serve (``codecs.CARRIERS``). Values are rounded to the
nearest level, so that who encodes them twice sends the same; gradients at random, without bias. Where an element is not
finite, its whole block arrives as NaN or infinite, and the loss tells.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ...costmodel.codecs import CODECS, TILE, QuantizationLevels, carried_bytes
from .dither import random_key
from .levels import NearestLevels, StochasticLevels
from .packing import pack, unpack
from .two_step import BucketTile, Messages

__all__ = ["TensorCodec", "tensor_codec"]


@lru_cache(maxsize=1024)
def tensor_codec(code: str, n: int, dtype: torch.dtype, device: torch.device) -> TensorCodec | None:
    """The codec of tensors of n elements; None where they travel as they are: code "none", or one that saves no byte of
    such elements."""
    if not dtype.is_floating_point or carried_bytes(code, n, dtype.itemsize) == n * dtype.itemsize:
        return None
    return TensorCodec(code, n, dtype, device)


@lru_cache(maxsize=64)
def _levels_codec(kind: type[StochasticLevels], payload: QuantizationLevels, device: torch.device) -> StochasticLevels:
    return kind(payload, device)


class TensorCodec:
    """Turns n elements into a message, uint8 [nbytes], and back."""

    def __init__(self, code: str, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.dtype, self.device = n, dtype, device
        payload = CODECS[code].payload
        self.levels = payload if isinstance(payload, QuantizationLevels) else None
        if self.levels is None:
            self.half = torch.bfloat16 if code == "bf16" else torch.float16
            self.nbytes = n * self.half.itemsize
            return
        tiles = self.levels.tiles(n, 1)
        self.part, self.blocks = self.levels.part(n, 1), self.levels.blocks(tiles)
        self.tiles = BucketTile.of_part(tiles[0], 0, self.levels.per_byte)
        self.nbytes = self.levels.part_bytes(self.part, self.blocks)

    def encode(self, x: torch.Tensor, key: int | None = None) -> torch.Tensor:
        """The message of x [n]. key: of the random numbers; None: to the nearest level."""
        if self.levels is None:
            return x.to(self.half).view(torch.uint8)
        codec, kind = self.levels, NearestLevels if key is None else StochasticLevels
        levels, message = (
            _levels_codec(kind, codec, self.device),
            Messages(codec, self.part, self.blocks, 1, self.device),
        )
        workspace = torch.empty(min(TILE, self.part), device=self.device)
        for number, tile in enumerate(self.tiles):
            digits = workspace[: (tile.last - tile.first) * codec.per_byte]
            digits[tile.high - tile.low :].zero_()
            for low, high, rows, first in tile.runs:
                piece = x[tile.low + low : tile.low + high].float().view(rows, -1)
                scales, drawn = message.scales[0, first : first + rows], random_key(key or 0, number, first)
                levels.encode(piece, scales, digits[low:high].view(rows, -1), drawn)
            pack(digits.nan_to_num_(), codec.base, message.data[0, tile.first : tile.last])
        return message.bytes[0]

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """The tensor [n] that ``message`` carries."""
        if self.levels is None:
            return message.view(self.half).to(self.dtype)
        codec, made = self.levels, _levels_codec(StochasticLevels, self.levels, self.device)
        read = Messages.over(codec, message[None], self.blocks)
        out = torch.zeros(self.n, device=self.device)
        workspace, scratch = (torch.empty(min(TILE, self.part), device=self.device) for _ in range(2))
        for tile in self.tiles:
            digits = workspace[: (tile.last - tile.first) * codec.per_byte]
            unpack(read.data[0, tile.first : tile.last], codec.base, digits, scratch[: len(digits)])
            for low, high, rows, first in tile.runs:
                piece = out[tile.low + low : tile.low + high].view(rows, -1)
                made.decode_add(read.scales[0, first : first + rows], digits[low:high].view(rows, -1), piece)
        return out if self.dtype is torch.float32 else out.to(self.dtype)
