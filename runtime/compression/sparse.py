"""A few elements and where they are: top-k, threshold, Deep Gradient Compression.

    topk        v += g; send the k largest |v|; v −= what was sent                    Aji, Heafield 2017; Stich 2018
    dgc         u = m u + g; v += u; send the k largest |v|; there v −= what was sent, u = 0        Lin et al. 2018
    threshold   v += g; send ±τ where |v| ≥ τ; v −= what was sent                     Strom 2015, with τ = 10 rms(g)

Values travel as bf16 and their rounding errors stay in v. Positions take 16 bits, counted from the start of a span of
2¹⁶ elements; where only a sign is sent, spans have 2¹⁵ and the sign is the highest bit. k is a share
of every tensor (Lin et al., algorithm 1: per layer), of its part in a chunk where it has several: tensors of small
gradients are not left waiting for those of large ones. Without shapes it is a share of the chunk.

The k largest are found by a sample (Lin et al., section 5): a threshold that leaves a few more than k, k of those
exactly; where it leaves fewer (ties, zeros) all are looked at. So it is always the exact set, up to ties.

Deep Gradient Compression replaces the optimizer's momentum: give m here, and none to the optimizer. Its clipping is
local (section 3.2): with N ranks, ‖g‖ of the bucket on each is held to N^(−1/2) of the bound for the sum. Its warm-up
sends 25 %, 6.25 %, 1.56 %, … of the elements in equal shares of ``warmup_steps`` (section 3.3). The warm-up of the
learning rate is the user's scheduler's.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import torch

from ...costmodel.codecs import Entries, Run
from .exchange import Steps
from .gathered import GatheredCodec, GatheredSum
from .summing import BucketSpec

__all__ = ["DeepGradient", "DeepGradientSum", "SparseCodec", "Threshold", "TopK", "largest_positions"]

_SAMPLE = 2**14


def largest_positions(magnitudes: torch.Tensor, count: int, key: int) -> torch.Tensor:
    """Positions of the ``count`` largest of [n], rising; ``key`` places the sample."""
    n = len(magnitudes)
    count = min(count, n)
    if n > 4 * _SAMPLE and count < n // 8:
        stride = n // _SAMPLE
        sample = magnitudes[key % stride :: stride]
        hits = count * len(sample) / n
        above = int(hits + 4 * sqrt(hits)) + 4  # four deviations more
        if above < len(sample):
            threshold = sample.kthvalue(len(sample) - above).values
            candidates = magnitudes.gt(threshold).nonzero().view(-1)
            if len(candidates) >= count:
                chosen = magnitudes[candidates].topk(count, sorted=False).indices
                return candidates[chosen.sort().values]
    return magnitudes.topk(count, sorted=False).indices.sort().values


class SparseCodec(GatheredCodec):
    """Writes and reads entries. Subclasses say which and what becomes of the rest."""

    def __init__(self, n: int, bucket: BucketSpec, payload: Entries, start: int) -> None:
        self.n, self.payload = n, payload
        self.shapes, self.start = bucket.shapes, start
        spans = -(-n // payload.span)
        self.starts = torch.arange(spans, device=bucket.device) * payload.span

    def entries(self, step: int) -> Entries:
        """Return the description of the entries that this step sends."""
        return self.payload

    def body_bytes(self, step: int) -> int:
        """Return the bytes that the description gives."""
        return self.entries(step).message_bytes(self.n, self.pieces(step)) - 4

    def pieces(self, step: int) -> list[Run]:
        """Return the runs of the chunk with the number of entries that each sends."""
        return self.entries(step).pieces(self.n, self.shapes, self.start)

    def pick(self, x: torch.Tensor, pieces: list[Run], key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions, rising; values) of at most so many entries."""
        raise NotImplementedError

    def sent(self, positions: torch.Tensor, rest: torch.Tensor) -> None:
        """They are on their way; ``rest``: their values without what was sent of them."""

    def encode(self, x: torch.Tensor, body: torch.Tensor, key: int, step: int) -> None:
        """Counts per span, values, positions."""
        positions, values = self.pick(x, self.pieces(step), key)
        counts, places, numbers = self._views(body, step)
        counts.copy_(torch.bincount(positions // self.payload.span, minlength=len(counts)))
        numbers[: len(values)].copy_(values)
        places[: len(positions)].copy_(positions % self.payload.span)
        self.sent(positions, values - numbers[: len(values)])

    def decode_add(self, body: torch.Tensor, out: torch.Tensor, step: int) -> None:
        """No position comes twice in a message."""
        counts, places, values = self._views(body, step)
        starts = torch.repeat_interleave(self.starts, counts.long())
        positions = starts + (places[: len(starts)].long() & 0xFFFF)
        out.index_add_(0, positions, values[: len(starts)].to(out.dtype))

    def _views(self, body: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(counts int32, positions int16, values) in a body."""
        payload = self.entries(step)
        first = 4 * len(self.starts)
        second = first + payload.value_bytes * payload.room(self.pieces(step))
        dtype = torch.bfloat16 if payload.value_bytes == 2 else torch.float32
        return body[:first].view(torch.int32), body[second:].view(torch.int16), body[first:second].view(dtype)


class TopK(SparseCodec):
    """The largest of what has accumulated."""

    def __init__(self, n: int, bucket: BucketSpec, payload: Entries, start: int) -> None:
        super().__init__(n, bucket, payload, start)
        self.owed, self.scratch = bucket.zeros(n), bucket.zeros(n)

    def pick(self, x: torch.Tensor, pieces: list[Run], key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """After adding x to what is owed."""
        self.accumulate(x)
        magnitudes = torch.abs(self.owed, out=self.scratch)
        positions = torch.cat(
            [largest_positions(magnitudes[low:high], count, key).add_(low) for low, high, count in pieces]
        )
        return positions, self.owed[positions]

    def accumulate(self, x: torch.Tensor) -> None:
        """v += g."""
        self.owed.add_(x)

    def sent(self, positions: torch.Tensor, rest: torch.Tensor) -> None:
        """Only rounding errors are left there."""
        self.owed[positions] = rest

    def residuals(self) -> dict[str, torch.Tensor]:
        """v."""
        return {"residual": self.owed}


class DeepGradient(TopK):
    """Momentum before accumulation. ``scale``: what clipping leaves of this step's gradient."""

    scale = 1.0

    def __init__(
        self, n: int, bucket: BucketSpec, payload: Entries, start: int, momentum: float, warmup_steps: int
    ) -> None:
        super().__init__(n, bucket, payload, start)
        self.momentum, self.warmup_steps = momentum, warmup_steps
        self.velocity = bucket.zeros(n)

    def entries(self, step: int) -> Entries:
        """4^-1, 4^-2, … of the elements during the warm-up, as long as that is more than afterwards."""
        stages = 0
        while 4.0 ** -(stages + 1) > self.payload.fraction:
            stages += 1
        stage = step * stages // self.warmup_steps if self.warmup_steps else stages
        fraction = 4.0 ** -(stage + 1) if stage < stages else self.payload.fraction
        return replace(self.payload, fraction=fraction)

    def accumulate(self, x: torch.Tensor) -> None:
        """u = m u + g; v += u."""
        self.velocity.mul_(self.momentum).add_(x, alpha=self.scale)
        self.owed.add_(self.velocity)

    def sent(self, positions: torch.Tensor, rest: torch.Tensor) -> None:
        """Momentum factor masking."""
        super().sent(positions, rest)
        self.velocity[positions] = 0.0

    def residuals(self) -> dict[str, torch.Tensor]:
        """u and v."""
        return {"residual": self.owed, "velocity": self.velocity}


class DeepGradientSum(GatheredSum):
    """Clips the bucket before its chunks are encoded. clip_norm: bound for the norm of the bucket's sum, if any."""

    clip_norm: float | None = None

    def steps(self, x: torch.Tensor) -> Steps:
        """‖g‖ is held to N^(−1/2) clip_norm."""
        if self.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(x, dtype=torch.float32))
            bound = self.clip_norm / sqrt(self.exchange.size)
            for codec in self.codecs:
                assert isinstance(codec, DeepGradient)
                codec.scale = bound / norm if norm > bound else 1.0
        yield from super().steps(x)


class Threshold(TopK):
    """±τ for what has grown to τ; where that is more than the message can hold, the largest."""

    def __init__(self, n: int, bucket: BucketSpec, payload: Entries, start: int, factor: float) -> None:
        super().__init__(n, bucket, payload, start)
        self.factor = factor

    def encode(self, x: torch.Tensor, body: torch.Tensor, key: int, step: int) -> None:
        """τ, counts per span, positions with signs."""
        tau = self.factor * float(torch.linalg.vector_norm(x, dtype=torch.float32)) / sqrt(len(x))
        self.owed.add_(x)
        magnitudes = torch.abs(self.owed, out=self.scratch)
        ((_, _, count),) = self.pieces(step)
        positions = magnitudes.ge(tau).nonzero().view(-1) if tau > 0 else magnitudes.new_empty(0, dtype=torch.int64)
        if len(positions) > count:
            positions = largest_positions(magnitudes, count, key)
        header, counts, places = self._parts(body)
        header.fill_(tau)
        tau = float(header)  # as fp32 has it
        counts.copy_(torch.bincount(positions // self.payload.span, minlength=len(counts)))
        down = self.owed[positions] < 0
        places[: len(positions)].copy_(positions % self.payload.span + down * self.payload.span)
        self.owed[positions] += torch.where(down, tau, -tau)

    def decode_add(self, body: torch.Tensor, out: torch.Tensor, step: int) -> None:
        """±τ where it says."""
        header, counts, places = self._parts(body)
        starts = torch.repeat_interleave(self.starts, counts.long())
        words = places[: len(starts)].long()
        positions = starts + (words & (self.payload.span - 1))
        out.index_add_(0, positions, torch.where(words < 0, -header, header))

    def _parts(self, body: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        end = 4 + 4 * len(self.starts)
        return body[:4].view(torch.float32), body[4:end].view(torch.int32), body[end:].view(torch.int16)
