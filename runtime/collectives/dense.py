"""The sum of dense tensors as a persistent ``Sum`` by any all-reduce algorithm, on a communication thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .channel import Channel
from .engine import CHUNK_BYTES, CollectiveRun
from .protocol import Pending, Submit
from .rounds import schedule_of
from .worker import submit

__all__ = ["DenseSum"]


class DenseSum:
    """Sums (or maxima) of flat tensors of ``length`` elements over the ranks of a channel, which nobody but such sums
    uses. Made on all ranks alike.

    algorithm: an all-reduce of ``rounds.ALGORITHMS`` or "hierarchical", with ``members`` ranks per host. Raises
    ValueError for an algorithm that does not exist.
    """

    def __init__(
        self, channel: Channel, length: int, dtype: torch.dtype, algorithm: str = "ring", op: str = "sum", *,
        members: int = 0, chunk_bytes: int = CHUNK_BYTES, submit: Submit = submit,
    ) -> None:  # fmt: skip
        schedule = schedule_of("all_reduce", algorithm, channel.size, members=members)
        self.length, self.dtype, self._submit = length, dtype, submit
        self._exchange = CollectiveRun(channel, schedule, length, dtype, op, standing=True, chunk_bytes=chunk_bytes)

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x`` in place."""
        if x.shape != (self.length,) or x.dtype != self.dtype or not x.is_contiguous():
            raise ValueError(
                f"this sum is of contiguous [{self.length}] {self.dtype}, but got {list(x.shape)} {x.dtype}; make one "
                "per length and dtype"
            )
        return self._submit(lambda: self._exchange.run(x))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to load; ValueError for a state of another kind of sum."""
        if state:
            raise ValueError(f"a dense sum has no state, but got {sorted(state)}; load it into the sum that gave it")

    def close(self) -> None:
        """Let go of the standing receives. Nothing may be on its way."""
        self._exchange.close()
