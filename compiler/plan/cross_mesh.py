"""Cross-mesh resharding as pure values: the block of every device, and the tiles that devices send to each other.

A transfer is the same pure function forward and backward: ``tiles(shape, source layout, target layout)``. Every target
device gets every one of its elements exactly once. Among sources that hold the same block the one that has sent least
so far is taken (the first on a tie), or the target itself if it is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..ir.spec import Spec, local_shape

__all__ = ["Box", "Coordinates", "MeshLayout", "Tile", "coordinates", "cut", "extents", "tiles"]


Box = tuple[tuple[int, int], ...]  # (start, stop) per tensor dim


@dataclass(frozen=True)
class MeshLayout:
    """The layout of a tensor on a mesh: row-major devices and a spec of S and R only."""

    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    spec: Spec

    def __post_init__(self) -> None:
        assert not any(placement.is_partial for placement in self.spec), f"a partial tensor has no blocks: {self.spec}"
        assert prod(self.mesh_shape) == len(self.devices), self
        assert len(self.spec) == len(self.mesh_shape), self

    def box(self, shape: Sequence[int], device: int) -> Box:
        """The block of a tensor of global ``shape`` that ``device`` holds."""
        out = [(0, extent) for extent in shape]
        place = coordinates(self.devices.index(device), self.mesh_shape)
        for placement, size, index in zip(self.spec, self.mesh_shape, place, strict=True):
            if placement.is_shard:
                start, stop = out[placement.dim]
                block, rest = divmod(stop - start, size)
                assert rest == 0, f"{tuple(shape)} is not cut evenly by {self.spec} on {self.mesh_shape}"
                out[placement.dim] = (start + index * block, start + (index + 1) * block)
        return tuple(out)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one device's block."""
        return local_shape(shape, self.spec, self.mesh_shape)

    def is_first_copy(self, device: int) -> bool:
        """True if the device has coordinate 0 on every axis that replicates. Each element is on exactly one such
        device."""
        place = coordinates(self.devices.index(device), self.mesh_shape)
        return all(index == 0 for placement, index in zip(self.spec, place, strict=True) if not placement.is_shard)


@dataclass(frozen=True)
class Tile:
    """One message: rank ``source`` takes ``source_box`` of its local block, rank ``target`` puts it at ``target_box``
    of its own."""

    source: int
    target: int
    source_box: Box
    target_box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the message."""
        return extents(self.source_box)


def tiles(shape: Sequence[int], source: MeshLayout, target: MeshLayout) -> tuple[Tile, ...]:
    """The messages that take a tensor of global ``shape`` from one layout to another, ordered by target device, then
    block."""
    holders: dict[Box, list[int]] = {}
    for device in source.devices:
        holders.setdefault(source.box(shape, device), []).append(device)
    sent = dict.fromkeys(source.devices, 0)
    out: list[Tile] = []
    for device in target.devices:
        want = target.box(shape, device)
        for have, replicas in holders.items():
            both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(want, have, strict=True))
            if any(start >= stop for start, stop in both):
                continue
            sender = device if device in replicas else min(replicas, key=lambda rank: sent[rank])
            if sender != device:
                sent[sender] += prod(stop - start for start, stop in both)
            out.append(Tile(sender, device, _relative(both, have), _relative(both, want)))
    return tuple(out)


def _relative(box: Box, to: Box) -> Box:
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, to, strict=True))


def extents(box: Box) -> tuple[int, ...]:
    """Lengths of a box, per tensor dim."""
    return tuple(stop - start for start, stop in box)


def cut(x: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``x`` inside ``box``; ``x`` itself if that is all of it."""
    for dim, (start, stop) in enumerate(box):
        if stop - start != x.shape[dim]:
            x = x.narrow(dim, start, stop - start)
    return x


Coordinates = tuple[int, ...]


def coordinates(position: int, mesh_shape: Sequence[int]) -> Coordinates:
    """Row-major coordinates of the device at ``position``: axis 0 is the major one."""
    out = []
    for size in reversed(mesh_shape):
        out.append(position % size)
        position //= size
    return tuple(reversed(out))
