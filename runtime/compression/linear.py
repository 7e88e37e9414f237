"""Linear codes: what is sent is summed on the way by an all-reduce, and decoded once.

    bf16, fp16    elements rounded to half the bits; the sum is rounded at every hop
    randomk       the elements of a random set that all ranks share, with error feedback
    powersgd      see ``powersgd``

Random-k (Stich, Cordonnier, Jaggi 2018, definition 2.1, with its memory): v += g; send v at the set; v = 0 there. The
set has one element of each of k equal runs of the chunk, at a place that (seed, step) decides: an element is in it
with probability k/n up to rounding of run lengths. Values are not scaled up by n/k, since what is not sent now is
sent later.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch

from ...costmodel.codecs import Codec, Picked
from .dither import random_key
from .exchange import Steps, Work
from .summing import BucketSpec, ChunkCodec, ChunkedSum

__all__ = ["Half", "LinearCodec", "LinearSum", "Plain", "RandomK", "shared_positions"]


class LinearCodec(ChunkCodec):
    """The code of one chunk."""

    def rounds(self, x: torch.Tensor, ranks: int, step: int) -> Iterator[torch.Tensor]:
        """Yields what is to be summed over ``ranks`` ranks in place, goes on when that has happened, and puts the
        decoded sum into x at its end."""
        raise NotImplementedError


class LinearSum(ChunkedSum[LinearCodec]):
    """The pattern: round by round over all chunks, so that one is on its way while the next is made ready."""

    def steps(self, x: torch.Tensor) -> Steps:
        """A NaN travels in the sum, so every rank finds it in the result; residuals are left alone where it is."""
        parts = [x[low:high] for low, high in self.chunks]
        running = [codec.rounds(part, self.exchange.size, self.step) for codec, part in zip(self.codecs, parts)]
        travelling: list[tuple[Iterator[torch.Tensor], Work]] = []
        for rounds in running:
            travelling += self._next(rounds)
        while travelling:
            arrived, travelling = travelling, []
            for rounds, work in arrived:
                yield work
                travelling += self._next(rounds)
        if not all(isfinite(part.sum(dtype=torch.float32).item()) for part in parts):
            self.fail()

    def _next(self, rounds: Iterator[torch.Tensor]) -> list[tuple[Iterator[torch.Tensor], Work]]:
        buffer = next(rounds, None)
        return [] if buffer is None else [(rounds, self.exchange.all_reduce(buffer))]


class Plain(LinearCodec):
    """The gradient itself."""

    def rounds(self, x: torch.Tensor, ranks: int, step: int) -> Iterator[torch.Tensor]:
        """Sum ``x`` in place."""
        yield x


class Half(LinearCodec):
    """16 bits per element."""

    def __init__(self, n: int, bucket: BucketSpec, dtype: torch.dtype) -> None:
        self.buffer = torch.empty(n, dtype=dtype, device=bucket.device)

    def rounds(self, x: torch.Tensor, ranks: int, step: int) -> Iterator[torch.Tensor]:
        """Rounded, summed, widened. Beyond 65,504 fp16 is infinite, which is reported as a NaN is."""
        self.buffer.copy_(x)
        yield self.buffer
        x.copy_(self.buffer)


class RandomK(LinearCodec):
    """The same random elements on every rank."""

    def __init__(self, n: int, bucket: BucketSpec, codec: Codec, index: int) -> None:
        assert isinstance(codec.payload, Picked)
        self.bucket, self.index = bucket, index
        self.count = codec.payload.count(n)
        self.owed = bucket.zeros(n)

    def rounds(self, x: torch.Tensor, ranks: int, step: int) -> Iterator[torch.Tensor]:
        """Everything else waits in the residual."""
        finite = isfinite(x.sum(dtype=torch.float32).item())
        picked = shared_positions(len(x), self.count, random_key(self.bucket.seed, step, self.index), x.device)
        if finite:
            self.owed.add_(x)
            values = self.owed[picked]
            self.owed[picked] = 0.0
        else:
            values = torch.full((self.count,), torch.nan, device=x.device)
        yield values
        x.zero_()
        x[picked] = values.to(x.dtype)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the part of earlier gradients that was never picked."""
        return {"residual": self.owed}


def shared_positions(n: int, count: int, key: int, device: torch.device) -> torch.Tensor:
    """One of each of ``count`` equal runs of 0..n-1, int64, rising."""
    edges = torch.arange(count + 1, device=device) * n // max(count, 1)
    places = (edges[:-1] * 0x9E3779B1 + key % 2**31) & 0x7FFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        places = (places ^ (places >> 15)) * factor & 0x7FFFFFFF
    places ^= places >> 16
    return edges[:-1] + places % (edges[1:] - edges[:-1])
