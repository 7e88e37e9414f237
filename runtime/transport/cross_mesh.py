"""Tensors between two meshes: which rank sends which block to whom, as values; and the ports that move them.

A transfer is the same pure function forward and backward: ``tiles(shape, source layout, target layout)``. Every target
device gets every one of its elements exactly once. Among sources that hold the same block the one that has sent least
so far is taken (the first on a tie), or the target itself if it is among them.

Tags are unique per (transfer, direction, microbatch, tile), so Gloo matches messages in any order. NCCL has no tags:
both ends meet the messages of a direction, which has a group of its own, in the order of their actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.plan.cross_mesh import Box, MeshLayout, Tile, cut, extents, tiles
from ..compression.dither import random_key
from ..compression.tensor_codec import TensorCodec, tensor_codec
from .shared_memory import SharedMemoryMessages, SharedMessage

__all__ = ["Port", "transfer_now"]


@dataclass
class Incoming:
    """A block of this shape on its way: ``wait`` returns it whole. out: itself, where tiles arrive in it; None where
    each is a message in a code first, so that the block takes no memory until then."""

    shape: tuple[int, ...]
    out: torch.Tensor | None
    parts: list[tuple[Any, torch.Tensor | None, TensorCodec | None, Box]]

    def wait(self) -> torch.Tensor:
        """Block until every tile is here, decode it if it is coded, put it in its place, return the local block."""
        for work, buffer, coder, box in self.parts:
            work.wait()
            if buffer is None:
                continue
            tile = buffer if coder is None else coder.decode(buffer).view(extents(box))
            if self.out is None and tile.shape == self.shape:
                self.out = tile
                continue
            if self.out is None:
                self.out = tile.new_empty(self.shape)
            cut(self.out, box).copy_(tile)
        self.parts.clear()
        assert self.out is not None, "a transfer without messages"
        return self.out


Message = tuple[int, int, Box, TensorCodec | None]
"""(tile, peer, box of the local block, what encodes it)"""


@dataclass
class Port:
    """One direction of one transfer as this rank sees it; made once, used every microbatch.

    base_tag: the tag of tile 0 of microbatch 0; the tag of tile k of microbatch i is ``base_tag + i · num_tiles + k``.
    Peers are ranks of ``group``, whose own methods are called: what ``dist.isend`` checks of every message takes as
    long as the rest of an action. shared_memory: is of a group with the same ranks. code: of the messages
    (``codecs.CARRIERS``).
    """

    #: the tiles of this rank's block that it sends
    sends: list[Message] = field(default_factory=list)
    #: the tiles of its block that it receives
    receives: list[Message] = field(default_factory=list)
    num_tiles: int = 0
    base_tag: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    group: Any = None
    code: str = "none"
    #: the seed of the codec's random rounding; None: to the nearest level
    seed: int | None = None
    #: messages to the peers on this machine
    shared_memory: SharedMemoryMessages | None = None

    @classmethod
    def make(
        cls, messages: Sequence[Tile], rank: int, base_tag: int, shape: tuple[int, ...], dtype: torch.dtype, **rest: Any
    ) -> Port:
        """Pick this rank's part of ``messages``; ``shape`` is its own local shape as a target."""
        port = cls(num_tiles=len(messages), base_tag=base_tag, shape=shape, dtype=dtype, **rest)
        group = port._group()
        for index, tile in enumerate(messages):
            assert tile.source != tile.target, "stages do not share devices"
            coder = tensor_codec(port.code, prod(tile.shape), dtype, torch.device(port.device))
            if tile.source == rank:
                port.sends.append((index, dist.get_group_rank(group, tile.target), tile.source_box, coder))
            elif tile.target == rank:
                port.receives.append((index, dist.get_group_rank(group, tile.source), tile.target_box, coder))
        return port

    def _group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group

    def send(self, x: torch.Tensor, microbatch: int, step: int = 0) -> list[tuple[Any, torch.Tensor]]:
        """Start the sends of this rank's block; the pairs (work, buffer) must be kept until waited for. step: of the
        random numbers."""
        started = []
        copies: dict[Box, torch.Tensor] = {}
        base, group = self.base_tag + microbatch * self.num_tiles, self._group()
        for index, peer, box, coder in self.sends:
            if box not in copies:
                copies[box] = self._encoded(cut(x, box).contiguous(), coder, (step, microbatch, index))
            message = wire(copies[box])
            if not self._shares_memory(peer) or not self.shared_memory.send(message, peer, base + index):  # type: ignore[union-attr]
                started.append((group.send([message], peer, base + index), copies[box]))
        return started

    def _shares_memory(self, peer: int) -> bool:
        return self.shared_memory is not None and peer in self.shared_memory.peers

    def _encoded(self, x: torch.Tensor, coder: TensorCodec | None, at: tuple[int, ...]) -> torch.Tensor:
        if coder is None:
            return x
        return coder.encode(x.view(-1), None if self.seed is None else random_key(self.seed, self.base_tag, *at))

    def receive(self, microbatch: int) -> Incoming:
        """Post the receives of this rank's block."""
        coded = any(coder is not None for *_, coder in self.receives)
        out = None if coded else torch.empty(self.shape, dtype=self.dtype, device=self.device)
        base, group = self.base_tag + microbatch * self.num_tiles, self._group()
        parts: list[tuple[Any, torch.Tensor | None, TensorCodec | None, Box]] = []
        for index, peer, box, coder in self.receives:
            view = None if out is None else cut(out, box)
            buffer: torch.Tensor | None = None
            if coder is not None:
                buffer = torch.empty(coder.nbytes, dtype=torch.uint8, device=self.device)
            elif view is None or not view.is_contiguous():
                buffer = torch.empty(extents(box), dtype=self.dtype, device=self.device)
            target = view if buffer is None else buffer
            assert target is not None
            message = wire(target)
            if self._shares_memory(peer):
                assert self.shared_memory is not None
                work: Any = SharedMessage(self.shared_memory, message, peer, base + index, group)
            else:
                work = group.recv([message], peer, base + index)
            parts.append((work, buffer, coder, box))
        return Incoming(self.shape, out, parts)


def transfer_now(
    x: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    source: MeshLayout,
    target: MeshLayout,
    device: torch.device,
) -> torch.Tensor | None:
    """Move one tensor at once, outside of any schedule; the layouts may share ranks.

    x: this rank's block where it is a source. Returns the block where this rank is a target, else None. Every rank of
    both layouts must call it, in the same order of tensors.
    """
    rank = dist.get_rank()
    messages = tiles(shape, source, target)
    out = torch.empty(target.local_shape(shape), dtype=dtype, device=device) if rank in target.devices else None
    pending: list[tuple[Any, torch.Tensor]] = []
    arriving: list[tuple[Tile, torch.Tensor]] = []
    operations = []
    for tile in messages:
        if tile.source == tile.target == rank:
            assert x is not None
            assert out is not None
            cut(out, tile.target_box).copy_(cut(x, tile.source_box))
        elif tile.target == rank:
            buffer = torch.empty(tile.shape, dtype=dtype, device=device)
            arriving.append((tile, buffer))
            operations.append(dist.P2POp(dist.irecv, wire(buffer), tile.source))
        elif tile.source == rank:
            assert x is not None, f"rank {rank} is a source of {tile} but gave nothing"
            buffer = cut(x, tile.source_box).contiguous()
            pending.append((tile, buffer))
            operations.append(dist.P2POp(dist.isend, wire(buffer), tile.target))
    _run(operations)
    for tile, buffer in arriving:
        assert out is not None
        cut(out, tile.target_box).copy_(buffer)
    return out


def wire(x: torch.Tensor) -> torch.Tensor:
    """Backends move no bools and no complex numbers: their bytes instead. 0-d tensors travel as one element."""
    x = x.reshape(1) if x.ndim == 0 else x
    return x.view(torch.uint8) if x.dtype == torch.bool else torch.view_as_real(x) if x.is_complex() else x


def _run(operations: Iterable[dist.P2POp]) -> None:
    batch = list(operations)
    if batch:
        for work in dist.batch_isend_irecv(batch):
            work.wait()
