"""The decisions that are open in a search, before any price is known: submeshes, microbatch counts, kinds of decision.

    space    ::= schedules, chunks, residencies, recompute modes, sequence splits, limits on tensor work
    submesh  ::= logical shape, number of devices, roles of its axes, where it may start

Submesh sizes: up to 8 devices every number; beyond, inside a host the powers of two, then whole hosts (up to 4 hosts
any number of them, beyond that the powers of two and all), and whatever an uneven host has. No submesh is smaller than
a 64th of the cluster, and on clusters of more than 64 devices submeshes start at multiples of the smallest. Logical
shapes: one axis, or two of which the minor one tiles the hosts (inside one host the major axis is the longer one: both
orders cost the same).

Devices at different offsets may have different prices: hosts may be unlike, and what lies in front of a submesh or
behind it may be in the same host or in another. Offsets that are alike in all of this form one submesh with one price;
``site`` is the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod

from ...costmodel.cluster import Cluster
from ..cost.gradient_communication import EXACT, AskedCommunication, Communication
from ..cost.parameter_sharding import PATTERNS
from ..pipeline.families import EAGER_1F1B, PIPEDREAM, known_schedules
from ..plan.plan import RECOMPUTE_MODES
from ..plan.recompute import ALIASES
from .parallel_shape import Strategy, divisors_of

__all__ = ["CHUNKED", "SCHEDULES", "Space", "Submesh", "forced_submeshes", "microbatch_counts", "submeshes"]


CHUNKED = ("interleaved", "zb-v")  # schedules of several chunks per stage
SCHEDULES = ("1f1b", "gpipe", EAGER_1F1B, "interleaved", "zb-h1", "zb-v")  # from simple to involved
MAX_POSITIONS = 64  # a submesh is at least this part of the cluster
MAX_DEVICES_ANY_SIZE = 8  # clusters of up to this many devices are divided in every way
MAX_HOSTS_ANY_NUMBER = 4  # clusters of up to this many hosts are divided into any number of them


@dataclass(frozen=True)
class Space:
    """The kinds of decision that are open."""

    #: names of ``families.generate``
    schedules: tuple[str, ...] = ("1f1b",)
    #: numbers of virtual stages per device group, for schedules that may have several
    chunks: tuple[int, ...] = (2, 3, 4)
    #: ``parameter_sharding.PATTERNS`` that a parameter may take; one that can take none of them is replicated
    residencies: tuple[str, ...] = ("replicated",)
    #: modes that a layer may take
    recompute: tuple[str, ...] = ("none",)
    #: True: matmuls and attentions may be cut along the sequence
    sequence: bool = False
    #: True: plans that the runtime cannot run are left out
    executable_only: bool = False
    #: the least and the largest number of devices of a stage that share the work of one sample's ops
    min_tensor: int = 1
    max_tensor: int | None = None
    #: True: these devices lie in one host
    tensor_inside_host: bool = False
    #: algorithms and codecs in which gradients may travel
    communication: Communication = EXACT
    #: True: independent replicas; those of a stage send each other nothing but gradients and the loss
    loose: bool = False

    @property
    def base_schedule(self) -> str:
        """The schedule under which it is asked what fits: 1F1B, or GPipe if that alone is open."""
        return "gpipe" if self.schedules == ("gpipe",) else "1f1b"

    @classmethod
    def whole(cls) -> Space:
        """The space of all decisions that the search opens by itself, whether the runtime can run them or not."""
        return cls(schedules=SCHEDULES, residencies=PATTERNS, recompute=RECOMPUTE_MODES, sequence=True)

    @classmethod
    def executable(cls) -> Space:
        """The part of ``whole`` that the runtime can run."""
        return replace(cls.whole(), executable_only=True)

    @classmethod
    def asked(
        cls,
        schedule: str = "auto",
        recompute: str | Mapping[str, str] = "auto",
        zero: str | int = "auto",
        sequence: bool = True,
        executable: bool = False,
        communication: AskedCommunication = None,
    ) -> Space:
        """The space in which these are given or, where "auto", open. recompute: a mode, or modes by patterns of layer
        names; zero: a level of parameter sharding, 0 to 3; communication: see ``Communication.asked``. Raises
        ValueError for what is unknown, and for what the runtime cannot run where only ``executable`` plans are asked
        for."""
        space = cls.executable() if executable else cls.whole()
        if schedule != "auto":
            space = replace(space, schedules=(_one_of("schedule", schedule, known_schedules(), executable),))
        modes = {recompute} if isinstance(recompute, str) else {"none", *recompute.values()}
        for mode in (modes := {ALIASES.get(mode, mode) for mode in modes}) - {"auto"}:
            _one_of("recompute", mode, space.recompute, executable)
        if "auto" not in modes:
            space = replace(space, recompute=tuple(mode for mode in space.recompute if mode in modes))
        if zero != "auto":
            levels = [str(level) for level in range(len(PATTERNS))]
            level = int(_one_of("zero", str(zero), levels, executable))
            space = replace(space, residencies=(PATTERNS[level],))
        found = Communication.asked(communication)
        if space.schedules == (PIPEDREAM,):  # it keeps versions of whole parameters
            if zero not in ("auto", 0, "0"):
                raise ValueError(
                    f"schedule {PIPEDREAM} keeps versions of whole parameters, but got zero={zero!r}; use zero=0, or "
                    "another schedule"
                )
            if found.names_codes(communication):
                raise ValueError(
                    f"schedule {PIPEDREAM} sums gradients exactly, but got communication={communication!r}; leave out "
                    f"{', '.join(found.compressors[1:])}, or use another schedule"
                )
            space, found = replace(space, residencies=PATTERNS[:1]), replace(found, compressors=EXACT.compressors)
        return replace(space, sequence=sequence, communication=found)


def _one_of(what: str, asked: str, known: Sequence[str], executable: bool) -> str:
    if asked not in known:
        where = " where plans are to be executable" if executable else ""
        raise ValueError(f"{what} is auto or one of {', '.join(known)}{where}, but got {asked!r}; use one of these")
    return asked


@dataclass(frozen=True)
class Submesh:
    """A way to use some devices for a stage."""

    #: the logical mesh
    shape: tuple[int, ...]
    #: the role of each axis (``Restriction.roles``); () if they are open
    roles: tuple[str | None, ...]
    #: devices from which it may start; all have equal prices
    offsets: tuple[int, ...]
    #: (first layer, end layer) of its stage in a forced division
    place: tuple[int, int] | None = None
    #: the site of a submesh of the same shape whose prices differ in messages to other stages alone; −1: its own
    alike: int = -1

    @property
    def num_devices(self) -> int:
        """Devices of the submesh."""
        return prod(self.shape)

    @property
    def site(self) -> int:
        """The offset whose prices stand for all."""
        return site_of(self.offsets)


def site_of(offsets: Sequence[int]) -> int:
    """The offset to price of several with equal prices: one with neighbours on both sides if there is one, since their
    messages are priced there."""
    return offsets[0 if offsets[0] > 0 else min(1, len(offsets) - 1)]


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
    subs = []
    for size in sizes if sizes is not None else _sizes(cluster):
        for offsets, alike in _sites(cluster, size, starts):
            for shape in _shapes(size, max(host.num_devices for host in cluster.hosts)):
                for roles in _roles(shape, space, _inside(cluster, offsets[0], shape)):
                    subs.append(Submesh(shape, roles, offsets, alike=alike))
    return subs


def forced_submeshes(cluster: Cluster, strategy: Strategy, bounds: Sequence[int] | None) -> list[Submesh]:
    """The submeshes of a strategy: one for all its stages, or one per stage at its place (``bounds``: where the layers
    of a division begin and end)."""
    starts = [0, *accumulate(host.num_devices for host in cluster.hosts)]
    if not strategy.stages:
        number = strategy.dp * strategy.tp
        groups = _sites(cluster, number, starts, coarse=False)
        return [Submesh(strategy.mesh_shape, strategy.roles, offsets, alike=alike) for offsets, alike in groups]
    assert bounds is not None
    out, offset = [], 0
    for stage, first, end in zip(strategy.stages, bounds, bounds[1:]):
        out.append(Submesh(stage.mesh_shape, stage.roles, (offset,), (first, end)))
        offset += stage.num_devices
    return out


def _sizes(cluster: Cluster) -> list[int]:
    total, counts = cluster.num_devices, sorted({host.num_devices for host in cluster.hosts})
    if total <= MAX_DEVICES_ANY_SIZE:
        return list(range(1, total + 1))
    widest, hosts = counts[-1], len(cluster.hosts)
    sizes = {1 << k for k in range(widest.bit_length()) if 1 << k <= widest} | set(counts) | {total}
    if len(counts) == 1:
        several = range(1, hosts + 1) if hosts <= MAX_HOSTS_ANY_NUMBER else [1 << k for k in range(hosts.bit_length())]
        sizes |= {widest * k for k in several if k <= hosts}
    else:  # runs of uneven hosts
        starts = [0, *accumulate(host.num_devices for host in cluster.hosts)]
        runs = range(1, hosts + 1) if hosts <= MAX_HOSTS_ANY_NUMBER else [1 << k for k in range(hosts.bit_length())]
        sizes |= {starts[i + k] - starts[i] for k in runs for i in range(hosts - k + 1)}
    return sorted(size for size in sizes if size * MAX_POSITIONS >= total)


def _shapes(size: int, per_host: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [()] if size == 1 else [(size,)]
    for minor in range(2, size):
        major = size // minor
        tiles = per_host % minor == 0 if size > per_host else major >= minor
        if major * minor == size and minor <= per_host and tiles:
            shapes.append((major, minor))
    return shapes


def _sites(
    cluster: Cluster, size: int, starts: Sequence[int], coarse: bool = True
) -> list[tuple[tuple[int, ...], int]]:
    """The offsets from which ``size`` devices may start (inside one host, or at a host's first device), those of equal
    prices together; and ``Submesh.alike`` of each."""
    total, hosts = cluster.num_devices, cluster.hosts
    step = -(-total // MAX_POSITIONS) if coarse else 1
    kinds = {host: index for index, host in reversed(list(enumerate(dict.fromkeys(hosts))))}
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}  # (kind, devices) by host, after (front, behind) inside
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
            # messages to what lies in front and behind stay inside the host or cross the network
            inner = len(hosts) == 1 or device != starts[number], len(hosts) == 1 or size < room
            groups.setdefault((inner, *key), []).append(device)
    first: dict[tuple[tuple[int, int], ...], int] = {}
    return [(tuple(at), first.setdefault(key[1:], site_of(at))) for key, at in groups.items()]


def stays_inside(cluster: Cluster, sub: Submesh) -> tuple[bool, bool]:
    """If messages to what lies right in front of a submesh, and right behind it, stay inside a host."""
    if len(cluster.hosts) == 1:
        return True, True
    starts = [0, *accumulate(host.num_devices for host in cluster.hosts)]
    offset = sub.offsets[0]
    host = cluster.host_of(offset)
    return offset != starts[host], offset + sub.num_devices < starts[host + 1]


def _inside(cluster: Cluster, offset: int, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Per axis, whether its groups lie inside one host."""
    room = cluster.hosts[cluster.host_of(offset)].num_devices
    return tuple(prod(shape[axis:]) <= room for axis in range(len(shape)))


def _roles(shape: tuple[int, ...], space: Space, inside: Sequence[bool]) -> list[tuple[str | None, ...]]:
    """The roles that the axes may have: () if there is no limit.

    Otherwise every assignment that keeps the limits on tensor parallelism: "data" where an axis may not be for tensors,
    "tensor" where it must be, None where it is open. For independent replicas some axis is "data".
    """
    size, low = prod(shape), space.min_tensor
    high = size if space.max_tensor is None else space.max_tensor
    mays = [not space.tensor_inside_host or near for near in inside]
    if low <= 1 and size <= high and all(mays) and not space.loose:
        return [()]
    assignments: list[tuple[str | None, ...]] = []
    for roles in product(("data", "tensor", None) if low > 1 else ("data", None), repeat=len(shape)):
        least = prod(extent for extent, role in zip(shape, roles) if role == "tensor")
        most = prod(extent for extent, role in zip(shape, roles) if role != "data")
        if space.loose and not any(role == "data" and extent > 1 for extent, role in zip(shape, roles)):
            continue
        if low <= least and most <= high and all(may or role == "data" for may, role in zip(mays, roles)):
            assignments.append(roles)
    return assignments
