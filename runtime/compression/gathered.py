"""All-gather: every rank sends its message to all, and every rank adds all messages up, in the order of ranks.

A message is int32 [1], the rank itself if its gradient is not finite and -1 else, and the body that the codec writes.
Small ones of neighbouring chunks travel as one: over a distant link each all-gather waits for every rank in turn.
"""

from __future__ import annotations

from math import isfinite

import torch

from .dither import random_key
from .exchange import Steps
from .summing import ChunkCodec, ChunkedSum, first_culprit

__all__ = ["MIN_GATHER_BYTES", "GatheredCodec", "GatheredSum"]

MIN_GATHER_BYTES = 2**17  # that an all-gather has of each rank, as long as there are chunks


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
        """All chunks on their way, some at a time, then each decoded."""
        travelling = []
        for run in self._runs():
            messages = [self._encode(i, self.codecs[i], x[slice(*self.chunks[i])]) for i in run]
            mine = messages[0] if len(messages) == 1 else torch.cat(messages)
            came = mine.new_empty(self.exchange.size, len(mine))
            lengths = [len(message) for message in messages]
            travelling.append((run, lengths, came, mine, self.exchange.all_gather(came, mine)))
        culprit = -1
        for run, lengths, came, _, work in travelling:
            yield work
            for i, messages in zip(run, came.split(lengths, dim=1)):
                culprit = max(culprit, first_culprit(messages[:, :4].view(torch.int32)[:, 0]))
                self._decode(self.codecs[i], messages, x[slice(*self.chunks[i])])
        if culprit >= 0:
            self.fail(culprit)

    def _runs(self) -> list[list[int]]:
        """Chunks whose messages travel together."""
        runs: list[list[int]] = []
        nbytes = MIN_GATHER_BYTES
        for i, codec in enumerate(self.codecs):
            if nbytes >= MIN_GATHER_BYTES:
                runs.append([])
                nbytes = 0
            runs[-1].append(i)
            nbytes += 4 + codec.body_bytes(self.step)
        return runs

    def _decode(self, codec: GatheredCodec, messages: torch.Tensor, part: torch.Tensor) -> None:
        """Write the sum of what the messages [ranks, bytes] of a chunk say."""
        total = part if part.dtype is torch.float32 else self.bucket.zeros(len(part))
        total.zero_()
        for message in messages:
            codec.decode_add(message[4:], total, self.step)
        if total is not part:
            part.copy_(total)

    def _encode(self, i: int, codec: GatheredCodec, x: torch.Tensor) -> torch.Tensor:
        message = torch.zeros(4 + codec.body_bytes(self.step), dtype=torch.uint8, device=x.device)
        finite = isfinite(x.sum(dtype=torch.float32).item())
        message[:4].view(torch.int32).fill_(-1 if finite else self.exchange.rank)
        if finite:
            key = random_key(self.bucket.seed, self.step, self.exchange.rank, i)
            codec.encode(x, message[4:], key, self.step)
        return message
