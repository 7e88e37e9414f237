"""The loss of a batch: the mean of its microbatches', summed once over the axes where each device has an addend.

The sum travels while the last gradients do. Over an axis on which replicas step by themselves it is p times a
replica's own share, as if all p had its samples (``replicas.Alone``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import torch

from .chunk import BoundChunk
from .groups import DistributedComm, Pending

__all__ = ["BatchLoss"]


class BatchLoss:
    """The losses of the microbatches that one rank's chunks have run. alone: axes over which nothing is sent."""

    def __init__(self, parts: Sequence[BoundChunk], comm: DistributedComm, alone: Collection[int] = ()) -> None:
        self.comm, self.losses = comm, list[torch.Tensor]()
        exits = [part.program.exits[part.loss_exit] for part in parts if part.loss_exit is not None]
        addends = [axis for exit in exits for axis, value in enumerate(exit.pair.value) if value.is_partial]
        self.axes = [axis for axis in addends if comm.size(axis) > 1 and axis not in alone]
        self.times = prod(comm.size(axis) for axis in addends if axis in alone)

    def begin(self) -> None:
        """Before the first microbatch of a batch: nothing is there, whatever became of the last one."""
        self.losses = []

    def add(self, loss: torch.Tensor) -> None:
        """What a microbatch left (0-d). Its storage may have room for all addends, so it is copied."""
        self.losses.append(loss.detach().clone())

    def start(self) -> Pending | None:
        """Start the sum of what is there; nothing is left. None where this rank has no loss."""
        losses, self.losses = self.losses, []
        if not losses:
            return None
        mine = losses[0] if len(losses) == 1 else torch.stack(losses).sum() / len(losses)
        if self.times > 1:
            mine *= self.times
        return self.comm.start_sum(mine, self.axes) if self.axes else Pending(None, mine, mine)
