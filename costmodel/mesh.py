"""Mesh: a logical view of consecutive devices of a cluster, written ``2x4@8`` (shape @ first device; row-major, axis 0
major; ``@3``: one device)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["Mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Consecutive devices (numbers in a cluster) as an array: row-major, axis 0 is the major one. Shape ``()`` is one
    device."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axis_names), (self.shape, self.axis_names)
        assert prod(self.shape) == len(self.devices), (self.shape, self.devices)

    @staticmethod
    def of(cluster: Cluster, offset: int, shape: Sequence[int], axis_names: Sequence[str] | None = None) -> Mesh:
        """The ``prod(shape)`` devices from ``offset`` on; axis names default to x, y, z, …; ValueError if they are not
        all in the cluster."""
        sizes = tuple(int(size) for size in shape)
        if any(size < 1 for size in sizes):
            raise ValueError(f"a mesh shape has positive sizes, but got {sizes}; drop the empty axis")
        count = prod(sizes)
        if offset < 0 or offset + count > cluster.num_devices:
            raise ValueError(
                f"{cluster.name} has devices 0 to {cluster.num_devices - 1}, but a mesh {sizes} from device {offset}"
                f" needs {count}; shrink the mesh"
            )
        names = tuple(axis_names) if axis_names is not None else tuple("xyzwvutsrqp"[: len(sizes)])
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise ValueError(
                f"a mesh has one distinct name per axis, but got {names} for shape {sizes}; name each axis"
            )
        return Mesh(sizes, names, tuple(range(offset, offset + count)))

    @staticmethod
    def parse(cluster: Cluster, text: str) -> Mesh:
        """The inverse of ``str`` (default axis names)."""
        match = re.fullmatch(r"(\d+(?:x\d+)*)?@(\d+)", text)
        if not match:
            raise ValueError(f"a mesh is written SHAPE@FIRST like 2x4@8, but got {text!r}; write it so")
        return Mesh.of(cluster, int(match[2]), [int(size) for size in match[1].split("x")] if match[1] else ())

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}@{self.devices[0]}"

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """The place of cluster device ``device`` in this mesh, one index per axis."""
        position, out = self.devices.index(device), []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            out.append(index)
        return tuple(reversed(out))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The device groups that communicate along ``axis``, each in order of its coordinate."""
        stride, size = prod(self.shape[axis + 1 :]), self.shape[axis]
        starts = (block + i for block in range(0, len(self.devices), stride * size) for i in range(stride))
        return tuple(self.devices[start : start + stride * size : stride] for start in starts)
