"""Two steps: all-to-all, each rank sums one part, re-encodes it, all-gather. The wire ratio does not depend on the
ranks.

A chunk of c elements has p parts of m elements (m as ``codecs.QuantizationLevels.part`` says; the last
may have less, or nothing).
A message holds one part: int32 [1] whose gradient is not finite, or -1; fp32 [blocks, scales]; int8 [m / per_byte].
Blocks (``codecs.QuantizationLevels.tiles``) are encoded in tiles, so that scratch stays small.

A biased codec sends what it owes: e₁ += g, send Q(e₁), e₁ −= Q(e₁), and in the same way e₂ for the part that a rank
sums. Then Σ_t applied = Σ_t Σ_ranks g − Σ_ranks e₁ − e₂ (Karimireddy et al. 2019; Tang et al. 2019, DoubleSqueeze,
algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from ...costmodel.codecs import TILE, QuantizationLevels, Run
from ..collectives.protocol import Submit
from .dither import random_key
from .exchange import Exchange, Steps
from .packing import pack, unpack
from .summing import BucketSpec, ChunkCodec, ChunkedSum, first_culprit

__all__ = ["BlockCodec", "BucketTile", "Messages", "TwoStepSum"]


class BlockCodec:
    """Encodes rows, with scales for each. ``feedback``: whether it is biased, and what it does not send is kept."""

    feedback = False
    scratch = True  # whether it asks for ``workspace``

    def __init__(self, payload: QuantizationLevels, device: torch.device) -> None:
        self.payload = payload
        self._workspace = torch.empty(max(TILE, payload.block) if self.scratch else 0, device=device)

    def workspace(self, shape: torch.Size) -> torch.Tensor:
        """A scratch tensor, fp32: fresh memory for every tile costs more than the arithmetic."""
        return self._workspace[: shape.numel()].view(shape)

    def encode(self, x: torch.Tensor, scales: torch.Tensor, digits: torch.Tensor, key: int) -> None:
        """x: fp32 [rows, width]; scales: fp32 [rows, payload.scales]; digits: fp32 [rows, width], to be filled with
        0 … levels − 1; key: of the random numbers. With feedback, x becomes what was not sent; without, it stays as it
        is."""
        raise NotImplementedError

    def decode_add(self, scales: torch.Tensor, digits: torch.Tensor, out: torch.Tensor) -> None:
        """Add what was encoded to out [rows, width]; the digits are used up."""
        raise NotImplementedError


@dataclass(frozen=True)
class BucketTile:
    """Elements low..high of a bucket, as bytes first..last of a part's data; runs: of blocks of one width, each
    (from, to, rows, number of the first block), counted from ``low``."""

    low: int
    high: int
    first: int
    last: int
    runs: tuple[tuple[int, int, int, int], ...]

    @staticmethod
    def of_part(tiles: list[tuple[Run, ...]], start: int, per_byte: int) -> list[BucketTile]:
        """start: of the message in the bucket."""
        bucket_tiles, blocks = [], 0
        origin = tiles[0][0][0] if tiles else 0
        for tile in tiles:
            low, high = tile[0][0], tile[-1][1]
            runs = []
            for a, b, width in tile:
                runs.append((a - low, b - low, (b - a) // width, blocks))
                blocks += (b - a) // width
            first, last = (low - origin) // per_byte, -(-(high - origin) // per_byte)
            bucket_tiles.append(BucketTile(start + low, start + high, first, last, tuple(runs)))
        return bucket_tiles


class Messages:
    """``count`` encoded parts, one after another, and views of what is in them."""

    def __init__(self, payload: QuantizationLevels, part: int, blocks: int, count: int, device: torch.device) -> None:
        self._read(
            payload, torch.zeros(count, payload.part_bytes(part, blocks), dtype=torch.uint8, device=device), blocks
        )

    @classmethod
    def over(cls, payload: QuantizationLevels, received: torch.Tensor, blocks: int) -> Messages:
        """Of the bytes that came: uint8 [count, bytes of a part]."""
        messages = cls.__new__(cls)
        messages._read(payload, received, blocks)
        return messages

    def _read(self, payload: QuantizationLevels, received: torch.Tensor, blocks: int) -> None:
        self.bytes, end = received, 4 + 4 * payload.scales * blocks
        self.headers = received[:, :4].view(torch.int32)[:, 0]
        self.scales = received[:, 4:end].view(torch.float32).view(len(received), blocks, payload.scales)
        self.data = received[:, end:].view(torch.int8)


class _Chunk(ChunkCodec):
    """One message's worth of the bucket: its buffers, the tiles of its parts, its residuals."""

    def __init__(
        self, payload: QuantizationLevels, bucket: BucketSpec, exchange: Exchange, low: int, high: int, feedback: bool
    ) -> None:
        self.low, self.part = low, payload.part(high - low, exchange.size)
        tiles = payload.tiles(high - low, exchange.size, bucket.shapes, low)
        self.tiles = [BucketTile.of_part(part, low, payload.per_byte) for part in tiles]
        form = (payload, self.part, payload.blocks(tiles))
        self.sent, self.came, self.told = (Messages(*form, exchange.size, bucket.device) for _ in range(3))
        self.mine = Messages(*form, 1, bucket.device)
        self.total = bucket.zeros(self.part)
        self.owed = bucket.zeros(high - low) if feedback else None
        self.owed_total = bucket.zeros(self.part) if feedback else None

    def residuals(self) -> dict[str, torch.Tensor]:
        """Of both stages."""
        tensors = {"residual": self.owed, "residual_of_sum": self.owed_total}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class TwoStepSum(ChunkedSum[_Chunk]):
    """The pattern. ``codec``: one for all blocks, without a state."""

    def __init__(
        self,
        name: str,
        bucket: BucketSpec,
        exchange: Exchange,
        submit: Submit,
        codec: BlockCodec,
    ) -> None:
        def made(low: int, high: int, index: int) -> _Chunk:
            return _Chunk(codec.payload, bucket, exchange, low, high, codec.feedback)

        super().__init__(name, bucket, exchange, submit, made)
        self.codec = codec
        width = max((t.high - t.low for chunk in self.codecs for part in chunk.tiles for t in part), default=0)
        self.work, per_byte = bucket.zeros(width), codec.payload.per_byte
        self.digits, self.quotients = (bucket.zeros(-(-width // per_byte) * per_byte) for _ in range(2))

    def steps(self, x: torch.Tensor) -> Steps:
        """All chunks on their way, then each part summed, then all sums told."""
        travelling = []
        for i, chunk in enumerate(self.codecs):
            self._encode(i, chunk, x)
            travelling.append(self.exchange.all_to_all(chunk.came.bytes, chunk.sent.bytes))
        for i, chunk in enumerate(self.codecs):
            yield travelling[i]
            self._sum(i, chunk)
            travelling[i] = self.exchange.all_gather(chunk.told.bytes, chunk.mine.bytes[0])
        culprit = -1
        for i, chunk in enumerate(self.codecs):
            yield travelling[i]
            culprit = max(culprit, first_culprit(chunk.told.headers))
            self._decode(chunk, x)
        if culprit >= 0:
            self.fail(culprit)

    # ---- the parts

    def _encode(self, i: int, chunk: _Chunk, x: torch.Tensor) -> None:
        chunk.sent.headers.fill_(-1)
        for j, tiles in enumerate(chunk.tiles):
            for t, tile in enumerate(tiles):
                piece, work = x[tile.low : tile.high], self.work[: tile.high - tile.low]
                owed = None if chunk.owed is None else chunk.owed[tile.low - chunk.low : tile.high - chunk.low]
                if owed is not None:
                    torch.add(piece, owed, out=work)
                elif x.dtype is torch.float32:
                    work = piece  # it stays as it is
                else:
                    work.copy_(piece)
                self._encode_tile(chunk.sent, j, tile, work, owed, (i, j, t))

    def _encode_tile(
        self,
        to: Messages,
        j: int,
        tile: BucketTile,
        work: torch.Tensor,
        owed: torch.Tensor | None,
        where: tuple[int, ...],
    ) -> None:
        """Encode ``work`` into message j; ``owed`` becomes what was not sent."""
        if not isfinite(work.sum().item()):
            to.headers[j] = self.exchange.rank
            work, owed = torch.zeros_like(work), None
        digits = self._digits(tile)
        digits[len(work) :].zero_()
        for k, (low, high, rows, first) in enumerate(tile.runs):
            key = random_key(self.bucket.seed, self.step, self.exchange.rank, *where, k)
            scales = to.scales[j, first : first + rows]
            self.codec.encode(work[low:high].view(rows, -1), scales, digits[low:high].view(rows, -1), key)
        pack(digits, self.codec.payload.base, to.data[j, tile.first : tile.last])
        if owed is not None:
            owed.copy_(work)

    def _sum(self, i: int, chunk: _Chunk) -> None:
        """My part of all ranks, in their order, encoded again."""
        culprit = first_culprit(chunk.came.headers)
        chunk.mine.headers.fill_(-1)
        mine = chunk.tiles[self.exchange.rank]
        for t, tile in enumerate(mine):
            here = slice(tile.low - mine[0].low, tile.high - mine[0].low)
            total, owed = chunk.total[here], None if chunk.owed_total is None else chunk.owed_total[here]
            if owed is None:
                total.zero_()
            else:
                total.copy_(owed)
            for j in range(self.exchange.size):
                self._decode_add(chunk.came, j, tile, total)
            self._encode_tile(chunk.mine, 0, tile, total, owed, (i, self.exchange.size, t))
        if culprit >= 0:
            chunk.mine.headers.fill_(culprit)

    def _decode(self, chunk: _Chunk, x: torch.Tensor) -> None:
        for j, tiles in enumerate(chunk.tiles):
            for tile in tiles:
                piece = x[tile.low : tile.high]
                out = piece if x.dtype is torch.float32 else self.work[: len(piece)]
                self._decode_add(chunk.told, j, tile, out.zero_())
                if out is not piece:
                    piece.copy_(out)

    def _decode_add(self, messages: Messages, j: int, tile: BucketTile, out: torch.Tensor) -> None:
        digits = self._digits(tile)
        unpack(messages.data[j, tile.first : tile.last], self.codec.payload.base, digits, self.quotients[: len(digits)])
        for low, high, rows, first in tile.runs:
            scales = messages.scales[j, first : first + rows]
            self.codec.decode_add(scales, digits[low:high].view(rows, -1), out[low:high].view(rows, -1))

    def _digits(self, tile: BucketTile) -> torch.Tensor:
        """The workspace of a tile's digits, up to a whole byte."""
        return self.digits[: (tile.last - tile.first) * self.codec.payload.per_byte]
