"""What reductions of gradients into blocks, and the gathers of values after the update, hold on one device while they
run: the buckets of ``runtime/gradients.py`` and ``runtime/owned.py`` on tensors without data.

A message of n bytes to a group of d devices holds n while its gradients come in. On its way it holds n more, for what
arrives (NCCL adds up by itself: n/d more), until the next message starts, or the next backward; then n/d stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from .abstract import Tracker, labelled
from .buckets import gradient_buckets
from .cuts import Cut
from .plan import BUCKET_BYTES

__all__ = ["Block", "ReductionRoom", "gather_room"]


@dataclass(frozen=True)
class Block:
    """A parameter of which the optimizer has a block, or a master. shape: of what ops read; key: what must agree in a
    message; sums: the type of gradients in messages. Of masters every microbatch's gradients are added to messages, of
    others those of the last one go into them, or of each where it is reduced ``often``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: torch.dtype
    cut: Cut
    key: Hashable
    often: bool

    @property
    def mixed(self) -> bool:
        """Whether the block is a master."""
        return self.sums != self.dtype

    @property
    def nbytes(self) -> int:
        """Of what ops read."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def sum_bytes(self) -> int:
        """Of the whole gradient in a message."""
        return self.sums.itemsize * torch.Size(self.shape).numel()

    @property
    def copied_bytes(self) -> int:
        """Of the block, if it cannot share the storage of what ops read; else 0. Masters are counted elsewhere."""
        if self.mixed:
            return 0
        blocks = self.cut.blocks(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        inside = blocks[(0,) * len(self.cut.sizes)].is_contiguous()
        return 0 if inside else self.nbytes // self.cut.parts


@dataclass
class _Message:
    blocks: list[Block]
    left: set[str] = field(default_factory=set)
    wire: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(block.sum_bytes for block in self.blocks)

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.blocks[0].cut.parts


class ReductionRoom:
    """The messages of one chunk. ``blocks``: None for parameters that travel otherwise, in program order."""

    def __init__(self, blocks: Sequence[Block | None], tracker: Tracker, native: bool) -> None:
        self.tracker, self.native = tracker, native
        keys = [(None, 0) if block is None else (block.key, block.sum_bytes) for block in blocks]
        groups = gradient_buckets(keys, BUCKET_BYTES)
        self.messages = [_Message([block for i in group if (block := blocks[i]) is not None]) for group in groups]
        self.of: Mapping[str, _Message] = {block.name: m for m in self.messages for block in m.blocks}
        self.mixed = any(block.mixed for m in self.messages for block in m.blocks)
        self.often = {block.name for m in self.messages for block in m.blocks if block.often}
        self.flying: tuple[_Message, list[torch.Tensor]] | None = None
        self.rows: list[torch.Tensor] = []

    def takes(self, name: str, last: bool) -> bool:
        """Whether the parameter's gradient goes into a message in this backward."""
        return name in self.often or (name in self.of and (last or self.mixed))

    def arm(self) -> None:
        """Before a backward: what still travels is waited for."""
        self._land()

    def fill(self, name: str, last: bool) -> None:
        """A gradient goes into its message; whoever calls lets go of it afterwards."""
        message = self.of[name]
        if message.wire is None:
            message.wire = self._room(message.nbytes, "gradients" if self.mixed else "buffers")
            message.left = {block.name for block in message.blocks}
        if not last and name not in self.often:
            return
        message.left.discard(name)
        if not message.left:
            self._launch(message)

    def flush(self, last: bool) -> None:
        """After a backward: messages that lack gradients leave as they are."""
        for message in self.messages:
            if message.wire is not None and (last or message.blocks[0].often):
                self._launch(message)

    def finish(self) -> None:
        """After the last backward; the blocks are let go."""
        self._land()
        self.rows = []

    def _launch(self, message: _Message) -> None:
        assert message.wire is not None
        if not message.blocks[0].cut.axes:  # summed in place; what is left is the gradient
            self.rows.append(message.wire)
            message.wire = None
            return
        self._land()
        arrives = self._room(message.row_bytes if self.native else message.nbytes, "buffers")
        self.flying, message.wire = (message, [message.wire, arrives]), None

    def _land(self) -> None:
        if self.flying is None:
            return
        (message, held), self.flying = self.flying, None
        del held[0]
        row = self._room(message.row_bytes, "gradients")
        if not message.blocks[0].often:  # else it is added to what stays
            self.rows.append(row)

    def _room(self, nbytes: int, cause: str) -> torch.Tensor:
        with labelled(self.tracker, cause):
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def gather_room(blocks: Sequence[Block], native: bool) -> int:
    """Bytes of the two messages that are on their way together after the update, at the most. Gloo gathers into room of
    its own first."""
    blocks = [block for block in blocks if block.cut.axes]
    keys = [((block.cut.axes, block.cut.sizes, block.dtype), block.nbytes) for block in blocks]
    groups = gradient_buckets(keys, BUCKET_BYTES)
    copies = 1 if native else 2
    sizes = [sum(copies * blocks[i].nbytes + blocks[i].nbytes // blocks[i].cut.parts for i in g) for g in groups]
    return max((sum(pair) for pair in pairwise([*sizes, 0])), default=0)
