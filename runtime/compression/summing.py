"""The compressed sum of one flat bucket: the part that all communication patterns share.

A pattern (``linear``, ``two_step``, ``gathered``) is a ``CompressedSum`` whose ``steps`` encode, send and decode;
codecs plug into it. Large buckets go in chunks of ``CHUNK`` elements, each a message of its own: while one is on its
way the next is encoded. Every rank decodes the same bytes in the same order, so all end with the same bits.

A gradient that is not finite reaches no residual. Its rank encodes zeros in its place, leaves its residual there as
it was, and names itself in the message's first four bytes, so that every rank raises ``NonFiniteGradient`` in the
same step, and none hangs (in a plain sum the NaN itself tells). What other parts of that step had sent is then lost
to their residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ...costmodel.codecs import CHUNK
from ..collectives.protocol import Pending, Submit
from ..errors import NonFiniteGradient
from .exchange import Exchange, Steps, wait_all

__all__ = ["BucketSpec", "ChunkCodec", "ChunkedSum", "CompressedSum", "chunk_spans", "first_culprit"]


_NOBODY = -1
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BucketSpec:
    """The flat vector of gradients that a sum is made for."""

    #: elements
    n: int
    dtype: torch.dtype = torch.float32
    #: the shapes of the tensors that lie in it one after another; empty: one vector
    shapes: tuple[tuple[int, ...], ...] = ()
    #: the seed of the random numbers
    seed: int = 0
    #: elements per message
    chunk: int = CHUNK
    device: torch.device = _CPU

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"gradients are compressed from float32 or bfloat16, but got {self.dtype}")
        held = sum(torch.Size(shape).numel() for shape in self.shapes)
        if self.shapes and held != self.n:
            raise ValueError(f"the shapes of a bucket must hold its {self.n} elements, but got {held} in {self.shapes}")

    def zeros(self, n: int | None = None) -> torch.Tensor:
        """Residuals: fp32, [n]."""
        return torch.zeros(self.n if n is None else n, device=self.device)


def chunk_spans(n: int, size: int) -> list[tuple[int, int]]:
    """0..n in pieces of at most ``size``, as (from, to); none of nothing."""
    return [(low, min(low + size, n)) for low in range(0, n, size)]


def first_culprit(headers: torch.Tensor) -> int:
    """The first rank that a message's int32 header names, or -1."""
    named = headers[headers != _NOBODY]
    return int(named[0]) if len(named) else _NOBODY


class CompressedSum:
    """The part of the ``Sum`` protocol that does not depend on the pattern. submit: runs a function after those that
    were submitted before it, in the communication thread, and gives what is to be waited for."""

    def __init__(self, name: str, bucket: BucketSpec, exchange: Exchange, submit: Submit) -> None:
        self.name, self.bucket, self.exchange, self._submit = name, bucket, exchange, submit
        self.step = 0

    def steps(self, x: torch.Tensor) -> Steps:
        """The work of one sum of x [n] in place, as ``exchange.wait_all`` has it."""
        raise NotImplementedError

    def residuals(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint holds, by name, as they are."""
        return {}

    def run(self, x: torch.Tensor) -> Steps:
        """``steps``, checked and counted."""
        if x.shape != (self.bucket.n,) or x.dtype != self.bucket.dtype or not x.is_contiguous():
            raise ValueError(
                f"this sum is of contiguous {self.bucket.dtype} [{self.bucket.n}], but got {x.dtype} {list(x.shape)}; "
                "make another for another bucket"
            )
        steps = self.steps(x)
        while True:
            with torch.no_grad():  # not around the yield, where it would hold for whoever waits
                work = next(steps, None)
            if work is None:
                break
            yield work
        self.step += 1

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing x in place; errors are raised by ``wait``."""
        return self._submit(lambda: wait_all(self.run(x)))

    def fail(self, rank: int | None = None) -> None:
        """Raise that ``rank`` has no finite gradient, and count the step."""
        self.step += 1
        raise NonFiniteGradient(self.name, rank, self.step - 1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Residuals, and the number of sums so far."""
        tensors = {name: tensor.clone() for name, tensor in self.residuals().items()}
        return {**tensors, "step": torch.tensor(self.step)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from ``state_dict``. Raises ValueError for the state of another codec or length."""
        mine = self.residuals()
        wanted = {name: tuple(tensor.shape) for name, tensor in mine.items()} | {"step": ()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if wanted != given:
            raise ValueError(
                f"the state of this {self.name} has {wanted}, but got {given}; load what it was saved from"
            )
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        self.step = int(state["step"])

    def close(self) -> None:
        """Nothing stands."""


class ChunkCodec:
    """The codec of one chunk, with its state from step to step."""

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint holds."""
        return {}


C = TypeVar("C", bound=ChunkCodec)


class ChunkedSum(CompressedSum, Generic[C]):
    """A pattern with a codec of its own for each chunk: ``make(low, high, index)``."""

    def __init__(
        self,
        name: str,
        bucket: BucketSpec,
        exchange: Exchange,
        submit: Submit,
        make: Callable[[int, int, int], C],
        chunk: int | None = None,
    ) -> None:
        super().__init__(name, bucket, exchange, submit)
        self.chunks = chunk_spans(bucket.n, bucket.chunk if chunk is None else chunk)
        self.codecs = [make(low, high, i) for i, (low, high) in enumerate(self.chunks)]

    def residuals(self) -> dict[str, torch.Tensor]:
        """Of all chunks."""
        return {f"{name}.{i}": t for i, codec in enumerate(self.codecs) for name, t in codec.residuals().items()}
