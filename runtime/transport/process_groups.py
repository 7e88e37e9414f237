"""Mesh axes bound to process groups: the ``Comm`` protocol of ``compiler.ir.comm`` over torch.distributed, counted.

Gloo's reduce_scatter sends as much as its all_reduce, so there it is an all_to_all and a local sum; NCCL uses its own.
Every process group is made collectively: each rank of the world walks all stages and axes in the same order, and equal
rank sets share one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.ir.comm import cut_blocks, merge_blocks
from ...compiler.plan.cross_mesh import Coordinates, coordinates
from ...compiler.plan.plan import GradientReduction, Plan, Stage
from ..compression.dither import random_key as key
from ..compression.exchange import all_gather_single, reduce_scatter_single
from ..compression.tensor_codec import tensor_codec
from .shared_memory import SharedMemoryAllReduce

__all__ = ["DistributedComm", "PendingCollective", "bind", "bind_all", "joint_axes", "new_group", "opened_groups"]


Group = Any  # torch.distributed.ProcessGroup; None for a single rank

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class DistributedComm:
    """One rank's collectives along the axes of its stage's mesh.

    ``counts[(phase, kind)]`` and ``bytes[(phase, kind)]`` grow with every collective; the bytes are those of the tensor
    that is whole along the axis (as in ``reshard.step_bytes``). Whoever runs the program sets ``phase``: "forward",
    "backward" or "step".
    """

    def __init__(
        self,
        mesh_shape: Sequence[int],
        devices: Sequence[int],
        rank: int,
        groups: dict[tuple[int, ...], Group],
        own_groups: dict[tuple[int, ...], list[tuple[Group, ...]]] | None = None,
    ) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.devices = tuple(devices)
        self.position = self.devices.index(rank)
        self.coordinates = coordinates(self.position, self.mesh_shape)
        self.groups = groups
        self.own_groups = own_groups or {}  # for sums that send from other threads, by lane
        self.native = dist.get_backend() == "nccl"
        self.phase = "forward"
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    # ---- the protocol

    def size(self, axis: int) -> int:
        """Number of devices along ``axis``."""
        return self.mesh_shape[axis]

    def index(self, axis: int) -> int:
        """This device's coordinate along ``axis``."""
        return self.coordinates[axis]

    def all_reduce(self, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        """The sum (or "max") over the axis, on every device of it."""
        self._count("all_reduce", x.nbytes)
        out = x.clone(memory_format=torch.contiguous_format)
        if self.mesh_shape[axis] > 1:
            wire = out.view(torch.uint8) if out.dtype == torch.bool and op == "max" else out
            dist.all_reduce(wire, op=_OPS[op], group=self.groups[axis,])
        return out

    def all_gather(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """The blocks of the axis concatenated along ``dim``."""
        size = self.mesh_shape[axis]
        self._count("all_gather", x.nbytes * size)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        x = x.contiguous()
        out = x.new_empty((size, *x.shape))
        all_gather_single(_bytes_of_bool(out).view(-1), _bytes_of_bool(x).view(-1), group=self.groups[axis,])
        return merge_blocks(out, dim)

    def reduce_scatter(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """This device's block along ``dim`` of the sum over the axis; the extent divides evenly."""
        size = self.mesh_shape[axis]
        self._count("reduce_scatter", x.nbytes)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        blocks = cut_blocks(x, size, dim)
        if self.native:
            out = torch.empty_like(blocks[0])
            reduce_scatter_single(out.view(-1), blocks.view(-1), group=self.groups[axis,])
            return out
        parts = torch.empty_like(blocks)
        dist.all_to_all_single(parts, blocks, group=self.groups[axis,])
        return _sum_rows(parts)

    def all_to_all(self, x: torch.Tensor, axis: int, split_dim: int, concat_dim: int) -> torch.Tensor:
        """From sharded along ``concat_dim`` to sharded along ``split_dim``."""
        size = self.mesh_shape[axis]
        self._count("all_to_all", x.nbytes)
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        blocks = cut_blocks(x, size, split_dim)
        parts = torch.empty_like(blocks)
        dist.all_to_all_single(_bytes_of_bool(parts), _bytes_of_bool(blocks), group=self.groups[axis,])
        return merge_blocks(parts, concat_dim)

    def all_to_all_uneven(
        self, x: torch.Tensor, axis: int, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Rows in pieces of these counts to and from the devices of the axis."""
        self._count("all_to_all", x.nbytes)
        x = x.contiguous()
        if self.mesh_shape[axis] == 1:
            return x.clone()
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(
            _bytes_of_bool(out), _bytes_of_bool(x), list(received), list(sent), group=self.groups[axis,]
        )
        return out

    def exchange(
        self, before: torch.Tensor | None, after: torch.Tensor | None, axis: int, cyclic: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Exchange tensors with the neighbours along the axis, all messages at once."""
        messages: list[dist.P2POp] = []
        from_before = self._post(after, axis, 1, cyclic, messages)
        from_after = self._post(before, axis, -1, cyclic, messages)
        # both ends meet the messages of a pair in this order
        messages.sort(key=lambda message: message.op is not dist.isend)
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return from_before, from_after

    def start_send(self, x: torch.Tensor, axis: int, to: int, source: int) -> Callable[[], torch.Tensor]:
        """A message to one device of the axis and one from another, on their way at once."""
        self._count("send", x.nbytes)
        x, here = x.contiguous(), self.coordinates[axis]
        received = x.clone() if to == here else torch.empty_like(x)
        works = []
        if to != here and x.numel():
            messages = [dist.P2POp(dist.isend, x, *self._peer(axis, to)),
                        dist.P2POp(dist.irecv, received, *self._peer(axis, source))]  # fmt: skip
            works = dist.batch_isend_irecv(messages)
        return partial(_wait_arrival, works, x, received)

    def _post(
        self, x: torch.Tensor | None, axis: int, step: int, cyclic: bool, messages: list[dist.P2POp]
    ) -> torch.Tensor | None:
        """Add to ``messages`` what sends ``x`` ``step`` places on, and what receives the like from as far behind."""
        if x is None:
            return None
        self._count("send", x.nbytes)
        size, here = self.mesh_shape[axis], self.coordinates[axis]
        if size == 1 and cyclic:
            return x.clone(memory_format=torch.contiguous_format)
        received = torch.zeros_like(x, memory_format=torch.contiguous_format)
        ways: tuple[tuple[Any, torch.Tensor, int], ...] = (
            (dist.isend, x.contiguous(), step),
            (dist.irecv, received, -step),
        )
        for op, buffer, away in ways:
            if x.numel() and (cyclic or 0 <= here + away < size):
                messages.append(dist.P2POp(op, buffer, *self._peer(axis, (here + away) % size)))
        return received

    def _peer(self, axis: int, index: int) -> tuple[int, Group]:
        """The rank with another coordinate along ``axis``, and the group to meet it in."""
        away = (index - self.coordinates[axis]) * prod(self.mesh_shape[axis + 1 :])
        return self.devices[self.position + away], self.groups[axis,]

    # ---- beyond the protocol

    def joint_index(self, axes: Sequence[int]) -> int:
        """This device's place among those of the joint ``axes``, the first the major one."""
        index = 0
        for axis in axes:
            index = index * self.mesh_shape[axis] + self.coordinates[axis]
        return index

    def start_all_reduce(
        self, x: torch.Tensor, axes: tuple[int, ...], shared: SharedMemoryAllReduce | None = None
    ) -> Any:
        """Sum ``x`` in place over the joint ``axes`` without waiting; returns the work to wait on (None on a single
        device). shared: what sums it, flat, in memory that these ranks share."""
        self._count("all_reduce", x.nbytes)
        if shared is not None:
            return shared.start(x)
        axes = tuple(axis for axis in axes if self.mesh_shape[axis] > 1)
        return dist.all_reduce(x, group=self.groups[axes], async_op=True) if axes else None

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> PendingCollective:
        """Sum ``x`` over axes one by one, which need no group together: the first without waiting, in place. ``wait``
        sums over the others and gives it."""
        first, *rest = axes

        def others(came: torch.Tensor) -> torch.Tensor:
            for axis in rest:
                came = self.all_reduce(came, axis)
            return came

        return PendingCollective(self.start_all_reduce(x, (first,)), x, x, others)

    def start_reduce_scatter(
        self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> PendingCollective:
        """Sum ``x`` [ranks of the joint ``axes``, n] over them without waiting; ``wait`` gives this device's row [n].
        ``x`` must stay as it is until then. In a code each row is encoded once, and decoded rows are summed."""
        group, coded = self.groups[axes], tensor_codec(code, x.shape[1], x.dtype, x.device)
        if coded is not None:
            place = key(*draw, self.position)
            rows = torch.stack([coded.encode(row, place + number) for number, row in enumerate(x)])
            self._count("reduce_scatter", rows.nbytes)
            parts = torch.empty_like(rows)
            work = dist.all_to_all_single(parts, rows, group=group, async_op=True)
            return PendingCollective(
                work, parts, rows, lambda came: _sum_rows(torch.stack(list(map(coded.decode, came))))
            )
        self._count("reduce_scatter", x.nbytes)
        if self.native:
            out = x.new_empty(x.shape[1])
            return PendingCollective(reduce_scatter_single(out, x.view(-1), group=group, async_op=True), out, x)
        parts = torch.empty_like(x)
        return PendingCollective(dist.all_to_all_single(parts, x, group=group, async_op=True), parts, x, _sum_rows)

    def start_all_gather(self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none") -> PendingCollective:
        """Gather the rows ``x`` [n] of the joint ``axes`` without waiting; ``wait`` gives [ranks of the axes, n]. In a
        code this rank's own row is decoded as well, so that all have the same."""
        coded = tensor_codec(code, x.numel(), x.dtype, x.device)
        x = x if coded is None else coded.encode(x)
        out = x.new_empty((prod(self.mesh_shape[axis] for axis in axes), x.numel()))
        self._count("all_gather", out.nbytes)
        work = all_gather_single(out.view(-1), x, group=self.groups[axes], async_op=True)
        decode = None if coded is None else lambda came: torch.stack(list(map(coded.decode, came)))
        return PendingCollective(work, out, x, decode)

    def _count(self, kind: str, nbytes: int) -> None:
        key = (self.phase, kind)
        self.counts[key] += 1
        self.bytes[key] += nbytes


class PendingCollective:
    """A collective on its way (work: None if there is nothing to wait for). out: what arrives; given: what leaves, kept
    alive until then."""

    def __init__(
        self,
        work: Any,
        out: torch.Tensor,
        given: torch.Tensor,
        last: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._work, self._out, self._given, self._last = work, out, given, last

    def wait(self) -> torch.Tensor:
        """Block until it is done; the result. Once only."""
        if self._work is not None:
            self._work.wait()
        out, last = self._out, self._last
        del self._work, self._out, self._given
        return out if last is None else last(out)


def _sum_rows(parts: torch.Tensor) -> torch.Tensor:
    return torch.add(parts[0], parts[1]) if len(parts) == 2 else parts.sum(0, dtype=parts.dtype)


def _wait_arrival(works: Sequence[Any], left: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    """Wait until ``came`` has arrived and ``left``, which is kept alive until then, is sent; return ``came``."""
    for work in works:
        work.wait()
    return came


def _bytes_of_bool(x: torch.Tensor) -> torch.Tensor:
    """Backends move no bools: their bytes instead."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


# ---- making the groups


def joint_axes(stage: Stage) -> list[tuple[int, ...]]:
    """Every set of axes (of extent > 1) that the stage communicates over: each axis, and those that gradients are
    summed or parameters scattered over jointly."""
    wide = [axis for axis, size in enumerate(stage.mesh_shape) if size > 1]
    sets: set[tuple[int, ...]] = {(axis,) for axis in wide}
    for chunk in stage.chunks:
        for residency in chunk.parameters.values():
            partial = {axis for axis in wide if residency.compute.cotangent[axis].is_partial}
            scattered = set(residency.scattered_axes).intersection(wide)
            sets |= {tuple(sorted(axes)) for axes in (partial, scattered, partial - scattered) if axes}
    return sorted(sets, key=lambda axes: (len(axes), axes))


def _rank_sets(mesh_shape: Sequence[int], devices: Sequence[int], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The devices partitioned into those that agree on every coordinate outside ``axes``, each in row-major order."""
    rank_sets: dict[Coordinates, list[int]] = {}
    for position, device in enumerate(devices):
        place = coordinates(position, mesh_shape)
        rank_sets.setdefault(tuple(c for axis, c in enumerate(place) if axis not in axes), []).append(device)
    return [tuple(ranks) for ranks in rank_sets.values()]


_opened: list[list[Group]] = []  # for each ``opened_groups`` that is running


def new_group(ranks: Sequence[int] | None = None) -> Group:
    """``torch.distributed.new_group``, of all ranks by default; known to ``opened_groups``. Collective over the
    world."""
    group = dist.new_group(None if ranks is None else list(ranks))
    for opened in _opened:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            opened.append(group)
    return group


@contextmanager
def opened_groups() -> Iterator[list[Group]]:
    """The list of this rank's groups that are made inside."""
    opened: list[Group] = []
    _opened.append(opened)
    try:
        yield opened
    finally:
        _opened.remove(opened)


class _GroupCache:
    """Makes each rank set's group once. All ranks of the world must ask for the same sets in the same order."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Group] = {}

    def __call__(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self.made:
            whole = ranks == tuple(range(dist.get_world_size()))
            self.made[ranks] = dist.group.WORLD if whole else new_group(ranks)
        return self.made[ranks]


@dataclass(frozen=True)
class _Mesh:
    """shape, devices; axes: sets of them that need a group; wires: those that need groups of their own besides, for
    each lane of sums, between hosts by ``host_of``."""

    shape: Sequence[int]
    devices: Sequence[int]
    axes: Sequence[tuple[int, ...]]
    wires: Sequence[GradientReduction] = ()
    host_of: Callable[[int], int] = lambda device: 0
    lanes: int = 1


def _dedicated_rank_sets(
    wire: GradientReduction, ranks: Sequence[int], host_of: Callable[[int], int]
) -> list[list[tuple[int, ...]]]:
    """The rank sets that sums of one group need: the group; or those inside of hosts, then those between."""
    if not wire.is_outer:
        return [[tuple(ranks)]]
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(host_of(rank), []).append(rank)
    if len({len(members) for members in hosts.values()}) > 1:
        raise ValueError(
            f"a sum that is coded between hosts needs as many ranks on each, but got {list(hosts.values())}; edit the "
            "plan's wire"
        )
    return [[tuple(members) for members in hosts.values()], list(zip(*hosts.values(), strict=True))]


def _bind(meshes: Iterable[_Mesh]) -> DistributedComm | None:
    rank, maker, own_comm = dist.get_rank(), _GroupCache(), None
    for mesh in meshes:
        mesh_shape, devices = mesh.shape, mesh.devices
        if prod(mesh_shape) != len(devices):
            raise ValueError(
                f"a mesh of shape {list(mesh_shape)} needs {prod(mesh_shape)} devices, but got {list(devices)}"
            )
        groups: dict[tuple[int, ...], Group] = {}
        for axes in mesh.axes:
            for ranks in _rank_sets(mesh_shape, devices, axes):
                group = maker(ranks)
                if rank in ranks:
                    groups[axes] = group
        own_groups: dict[tuple[int, ...], list[tuple[Group, ...]]] = {}
        for wire in mesh.wires:
            own_groups[wire.axes] = []
            for _ in range(mesh.lanes):
                levels: tuple[Group, ...] = ()
                for ranks in _rank_sets(mesh_shape, devices, wire.axes):
                    for level in _dedicated_rank_sets(wire, ranks, mesh.host_of):
                        groups_of_level = [(new_group(members), members) for members in level]
                        levels += tuple(group for group, members in groups_of_level if rank in members)
                own_groups[wire.axes].append(levels)
        if len(devices) == 1:  # state dicts need a DeviceMesh even where nothing communicates
            group = maker(tuple(devices))
            if rank in devices:
                groups[()] = group
        if rank in devices:
            own_comm = DistributedComm(mesh_shape, devices, rank, groups, own_groups)
    return own_comm


def bind(mesh_shape: Sequence[int], devices: Sequence[int]) -> DistributedComm | None:
    """This rank's comm on one mesh; None if it is not in ``devices``. Collective over the world, members or not."""
    axes: list[tuple[int, ...]] = [(axis,) for axis, size in enumerate(mesh_shape) if size > 1]
    return _bind([_Mesh(mesh_shape, devices, axes)])


def bind_all(plan: Plan, lanes: int = 1) -> DistributedComm | None:
    """This rank's comm on its stage's mesh, None for an idle rank. lanes: how many sums are to go at once over wires
    that have groups of their own. Collective over the world.

    Raises ValueError on every rank if the world has another size than the plan's cluster.
    """
    world = dist.get_world_size()
    if world != plan.num_devices:
        raise ValueError(
            f"the plan is for {plan.num_devices} devices, but got a world of {world} ranks; "
            f"start {plan.num_devices} ranks or plan again for {world}"
        )
    return _bind(
        _Mesh(s.mesh_shape, s.devices, joint_axes(s), [w for w in s.wire if not w.is_plain], plan.host_of, lanes)
        for s in plan.stages
    )
