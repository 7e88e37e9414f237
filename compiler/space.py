"""What a search may choose from, before any price is known: submeshes, microbatch counts, and the kinds of decision.

    space    ::= schedules, chunks, residencies, recompute modes, sequence splits, precision, limits on tensor work
    submesh  ::= logical shape, number of devices, roles of its axes, where it may start

Submesh sizes: up to 8 devices every number; beyond, inside a host the powers of two, then whole hosts (up to 8 hosts
any number of them, beyond that the powers of two and all), and whatever an uneven host has. No submesh is smaller than
a 128th of the cluster, and on clusters of more than 128 devices submeshes start at multiples of the smallest. Logical
shapes: one axis, or two of which the minor one tiles the hosts (inside one host the major axis is the longer one: both
orders cost the same).

Devices at different offsets may have different prices (mixed hosts). Offsets whose hosts are alike, in the same order,
form one submesh with one price; ``site`` is the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..costmodel.cluster import Cluster
from ..costmodel.memory import FRAMEWORK_BYTES
from .strategy import Strategy, divisors_of

__all__ = ["Space", "Submesh", "forced_submeshes", "microbatch_counts", "submeshes", "usable_bytes"]

POSITIONS = 128  # a submesh is at least this part of the cluster
EVERY_SIZE = 8  # clusters and numbers of hosts up to this many are divided in every way


@dataclass(frozen=True)
class Space:
    """The kinds of decision that are open.

    schedules: families of ``schedule.generate``; chunks: how many a stage may hold where the family has several;
    residencies: patterns of ``residency.PATTERNS`` that a parameter may take (a parameter that can take none of them is
    replicated); recompute: modes that a layer may take; sequence: whether matmuls and attentions may be cut along the
    sequence; executable_only: leave out what the runtime cannot run; max_tensor: at most this many devices share the
    work of one sample's ops; tensor_inside_host: and they lie in one host.
    """

    schedules: tuple[str, ...] = ("1f1b",)
    chunks: tuple[int, ...] = (2, 3, 4)
    residencies: tuple[str, ...] = ("replicated",)
    recompute: tuple[str, ...] = ("none",)
    sequence: bool = False
    executable_only: bool = False
    precision: str = "model"
    max_tensor: int | None = None
    tensor_inside_host: bool = False


@dataclass(frozen=True)
class Submesh:
    """A way to use some devices for a stage: logical shape, what each axis is for (``Restriction.roles``; () where that
    is open), and the devices where it may start; ``site`` is the one whose prices stand for all. place: where a forced
    division wants it, as (first layer, end layer)."""

    shape: tuple[int, ...]
    roles: tuple[str | None, ...]
    offsets: tuple[int, ...]
    place: tuple[int, int] | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the submesh."""
        return prod(self.shape)

    @property
    def site(self) -> int:
        """The offset whose prices stand for all."""
        return self.offsets[0]


def usable_bytes(cluster: Cluster) -> list[float]:
    """Usable bytes per device: its memory less what the framework itself takes."""
    return [
        host.device.memory_bytes - FRAMEWORK_BYTES[host.device.kind]
        for host in cluster.hosts
        for _ in range(host.num_devices)
    ]


def microbatch_counts(global_batch: int, strategy: Strategy | None) -> list[int]:
    """Divisors of the batch whose microbatches the strategy can cut; a pipeline with fewer microbatches than stages
    only idles."""
    divisors = divisors_of(global_batch)
    if strategy is not None:
        divisors = [m for m in divisors if (global_batch // m) % strategy.data_parts == 0]
        divisors = [m for m in divisors if m >= strategy.num_stages] or divisors[-1:]
    return divisors


# ---- submeshes


def submeshes(cluster: Cluster, space: Space, sizes: Sequence[int] | None = None) -> list[Submesh]:
    """Every submesh that a stage may have; sizes: only these numbers of devices."""
    starts = [0, *accumulate(host.num_devices for host in cluster.hosts)]
    found = []
    for size in sizes if sizes is not None else _sizes(cluster):
        for offsets in _sites(cluster, size, starts):
            for shape in _shapes(size, max(host.num_devices for host in cluster.hosts)):
                for roles in _roles(shape, space, _inside(cluster, offsets[0], shape)):
                    found.append(Submesh(shape, roles, offsets))
    return found


def forced_submeshes(cluster: Cluster, strategy: Strategy, bounds: Sequence[int] | None) -> list[Submesh]:
    """The submeshes of a strategy: one for all its stages, or one per stage at its place (``bounds``: where the layers
    of a division begin and end)."""
    starts = [0, *accumulate(host.num_devices for host in cluster.hosts)]
    if not strategy.stages:
        number = strategy.dp * strategy.tp
        groups = _sites(cluster, number, starts, coarse=False)
        return [Submesh(strategy.mesh_shape, strategy.roles, offsets) for offsets in groups]
    assert bounds is not None
    out, offset = [], 0
    for stage, first, end in zip(strategy.stages, bounds, bounds[1:]):
        out.append(Submesh(stage.mesh_shape, stage.roles, (offset,), (first, end)))
        offset += stage.num_devices
    return out


def _sizes(cluster: Cluster) -> list[int]:
    total, counts = cluster.num_devices, sorted({host.num_devices for host in cluster.hosts})
    if total <= EVERY_SIZE:
        return list(range(1, total + 1))
    widest, hosts = counts[-1], len(cluster.hosts)
    sizes = {1 << k for k in range(widest.bit_length()) if 1 << k <= widest} | set(counts) | {total}
    if len(counts) == 1:
        several = range(1, hosts + 1) if hosts <= EVERY_SIZE else [1 << k for k in range(hosts.bit_length())]
        sizes |= {widest * k for k in several if k <= hosts}
    else:  # runs of uneven hosts
        starts = [0, *accumulate(host.num_devices for host in cluster.hosts)]
        runs = range(1, hosts + 1) if hosts <= EVERY_SIZE else [1 << k for k in range(hosts.bit_length())]
        sizes |= {starts[i + k] - starts[i] for k in runs for i in range(hosts - k + 1)}
    return sorted(size for size in sizes if size * POSITIONS >= total)


def _shapes(size: int, per_host: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [()] if size == 1 else [(size,)]
    for minor in range(2, size):
        major = size // minor
        tiles = per_host % minor == 0 if size > per_host else major >= minor
        if major * minor == size and minor <= per_host and tiles:
            shapes.append((major, minor))
    return shapes


def _sites(cluster: Cluster, size: int, starts: Sequence[int], coarse: bool = True) -> list[tuple[int, ...]]:
    """Where ``size`` devices may start (inside one host, or at a host's first device), offsets of equal prices
    together."""
    total, hosts = cluster.num_devices, cluster.hosts
    step = -(-total // POSITIONS) if coarse else 1
    kinds = {host: index for index, host in reversed(list(enumerate(dict.fromkeys(hosts))))}
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for number in range(len(hosts)):
        for device in range(starts[number], starts[number + 1]):
            room = starts[number + 1] - device
            if device + size > total or (size > room and device != starts[number]) or device % step:
                continue
            key: list[tuple[int, int]] = []
            at, left = number, size
            while left > 0:  # runs of (kind of host, devices taken)
                taken = min(left, starts[at + 1] - max(device, starts[at]))
                key.append((kinds[hosts[at]], taken))
                at, left = at + 1, left - taken
                if len(kinds) == 1:  # all alike: what is left is known by its size
                    break
            groups.setdefault(tuple(key), []).append(device)
    return [tuple(found) for found in groups.values()]


def _inside(cluster: Cluster, offset: int, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Per axis, whether its groups lie inside one host."""
    room = cluster.hosts[cluster.host_of(offset)].num_devices
    return tuple(prod(shape[axis:]) <= room for axis in range(len(shape)))


def _roles(shape: tuple[int, ...], space: Space, inside: Sequence[bool]) -> list[tuple[str | None, ...]]:
    """What the axes may be for: () where anything goes, else every assignment in which those that are not for data
    keep the limits on tensor parallelism."""
    most = space.max_tensor if space.max_tensor is not None else prod(shape)
    if not shape or (prod(shape) <= most and (all(inside) or not space.tensor_inside_host)):
        return [()]
    free = [
        axis for axis in range(len(shape)) if shape[axis] <= most and (inside[axis] or not space.tensor_inside_host)
    ]
    out: list[tuple[str | None, ...]] = [("data",) * len(shape)]
    out += [tuple(None if axis == one else "data" for axis in range(len(shape))) for one in free]
    return out
