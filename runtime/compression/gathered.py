"""All-gather: every rank sends its message to all, and every rank adds all messages up, in the order of ranks.

A message is int32 [1], the rank itself if its gradient is not finite and -1 else, and the body that the codec writes.
"""

from __future__ import annotations

from math import isfinite

import torch

from .dither import draw
from .exchange import Steps
from .summing import ChunkCodec, ChunkedSum, first_culprit

__all__ = ["GatheredCodec", "GatheredSum"]


class GatheredCodec(ChunkCodec):
    """The code of one chunk, with its state. Sizes of messages depend on the step alone."""

    def body_bytes(self, step: int) -> int:
        """Bytes of a message of this step, without the first four."""
        raise NotImplementedError

    def encode(self, x: torch.Tensor, body: torch.Tensor, key: int, step: int) -> None:
        """x: the chunk's gradient, finite, to be left as it is; body: uint8, zeros; key: of this rank's draws."""
        raise NotImplementedError

    def decode_add(self, body: torch.Tensor, out: torch.Tensor, step: int) -> None:
        """Add what a message says to ``out``, fp32. Zeros say nothing."""
        raise NotImplementedError


class GatheredSum(ChunkedSum[GatheredCodec]):
    """The pattern."""

    def steps(self, x: torch.Tensor) -> Steps:
        """All chunks on their way, one after another, then each decoded."""
        travelling = []
        for i, ((low, high), codec) in enumerate(zip(self.chunks, self.codecs)):
            mine = self._encode(i, codec, x[low:high])
            came = mine.new_empty(self.exchange.size, len(mine))
            travelling.append((came, mine, self.exchange.all_gather(came, mine)))
        culprit = -1
        for (low, high), codec, (came, _, work) in zip(self.chunks, self.codecs, travelling):
            yield work
            culprit = max(culprit, first_culprit(came[:, :4].view(torch.int32)[:, 0]))
            part = x[low:high]
            total = part if x.dtype is torch.float32 else self.place.zeros(high - low)
            total.zero_()
            for message in came:
                codec.decode_add(message[4:], total, self.step)
            if total is not part:
                part.copy_(total)
        if culprit >= 0:
            self.fail(culprit)

    def _encode(self, i: int, codec: GatheredCodec, x: torch.Tensor) -> torch.Tensor:
        message = torch.zeros(4 + codec.body_bytes(self.step), dtype=torch.uint8, device=x.device)
        finite = isfinite(x.sum(dtype=torch.float32).item())
        message[:4].view(torch.int32).fill_(-1 if finite else self.exchange.rank)
        if finite:
            key = draw(self.place.seed, self.step, self.exchange.rank, i)
            codec.encode(x, message[4:], key, self.step)
        return message
