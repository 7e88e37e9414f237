"""Replicas of a plan's model that step by themselves, and what they have in common: groups, and flat sums over them.

A replica is the ranks of all stages with the same place along their stages' independent axes
(``compiler.plan.independent_axes``), in row-major order of these axes. Within it everything is as ever. Over replicas
travel flat buckets, each by a persistent sum over a group that nothing else uses, so that a sum on its way holds up no
other message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...compiler.ir.comm import Arrival, Comm, CompletedArrival
from ...compiler.ir.program import ChunkProgram
from ...compiler.plan.cross_mesh import coordinates
from ...compiler.plan.independent_axes import loose_axes
from ...compiler.plan.plan import Plan
from ..collectives.protocol import Pending, Sum
from ..collectives.worker import LANES
from ..parameters.tied import TiedParameters
from ..profiling.trace import TimedComm, Trace
from ..transport.cross_mesh import Port
from ..transport.process_groups import new_group
from .chunk import BoundChunk

__all__ = ["BackendAllReduce", "FlatBucket", "MakeSum", "ReplicaComm", "Replicas", "flat_buckets"]

_MAX_BUCKET_BYTES, _MIN_BUCKET_BYTES = 2**28, 2**20

MakeSum = Callable[[int, torch.dtype, Sequence[torch.Size], torch.device], Sum]
"""(length, dtype, shapes of the tensors in it, device) → a sum over this rank's replicas"""


class Replicas:
    """The assignment of ranks to a plan's replicas. Its construction is collective; ValueError on every rank if the
    plan has no replicas that could step by themselves.

    count: of replicas; index: this rank's; axes: the independent ones of this rank's stage; across: the group of the
    ranks that hold the same blocks; inside: of the ranks of this replica, None if it is one rank. Ranks that the plan
    leaves idle belong to replica 0.
    """

    def __init__(self, plan: Plan, programs: Sequence[ChunkProgram], stage: int | None) -> None:
        self.rank = dist.get_rank()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if stage is None else loose_axes(plan.stages[stage], programs))
        axes_of_stages = [everyone[one.devices[0]] for one in plan.stages]
        self.count = _count_replicas(plan, axes_of_stages)
        self.axes: tuple[int, ...] = () if stage is None else axes_of_stages[stage][0]
        self.of: dict[int, int] = dict.fromkeys(range(dist.get_world_size()), 0)
        self.first: dict[int, int] = {}  # rank → the one in its place in replica 0
        for one, (axes, _) in zip(plan.stages, axes_of_stages, strict=True):
            firsts: dict[tuple[int, ...], int] = {}
            for position, rank in enumerate(one.devices):
                place = coordinates(position, one.mesh_shape)
                index = 0
                for axis in axes:
                    index = index * one.mesh_shape[axis] + place[axis]
                self.of[rank] = index
                self.first[rank] = firsts.setdefault(tuple(c for a, c in enumerate(place) if a not in axes), rank)
        self.index = self.of[self.rank]
        self.across: Any = None
        for first in dict.fromkeys(self.first.values()):
            ranks = [rank for rank, at in self.first.items() if at == first]
            group = new_group(ranks)
            self.across = group if self.rank in ranks else self.across
        self.inside: Any = None
        for index in range(self.count):
            ranks = self.ranks(index)
            group = new_group(ranks) if len(ranks) > 1 else None
            self.inside = group if self.rank in ranks else self.inside

    def ranks(self, index: int) -> list[int]:
        """The ranks of a replica."""
        return [rank for rank, at in self.of.items() if at == index]

    def backend_sum(self, n: int, dtype: torch.dtype, shapes: Sequence[torch.Size], device: torch.device) -> Sum:
        """The backend's own all-reduce over the replicas."""
        return BackendAllReduce(self.across)

    def require_apart(self, parts: Sequence[BoundChunk], tied: TiedParameters) -> None:
        """ValueError if a message of this rank would go to another replica, or a reshard over an independent axis."""
        ways = [way for part in parts for way in (*part.incoming, *part.outgoing)]
        ports = [port for way in ways for port in (way.forward, way.backward) if port is not None]
        ports += [port for _, port, _ in (*tied.up, *tied.down)]
        steps = [step for way in ways for step in way.steps]
        for part in parts:
            steps += [step for one in part.local_outputs for step in (*one.forward_steps, *(one.backward_steps or ()))]
            steps += [step for _, _, there, back in part.derived for step in (*there, *back)]
        if any(axis in self.axes for _, axis, *_ in steps):
            raise ValueError(
                "replicas by themselves reshard nothing over their axis, but got chunks or stages that want a tensor "
                f"in different placements on axes {list(self.axes)}; use a strategy with the same dp everywhere"
            )
        for peer in {peer for port in ports for peer in _peers(port)}:
            if self.of[peer] != self.index:
                raise ValueError(
                    f"stages of a replica send to each other only, but got a message between rank {self.rank} of "
                    f"replica {self.index} and rank {peer} of replica {self.of[peer]}; use the same dp on all stages"
                )


def _peers(port: Port) -> list[int]:
    """The ranks at the other ends."""
    group = dist.group.WORLD if port.group is None else port.group
    assert group is not None
    ends = [end[1] for end in port.sends] + [end[1] for end in port.receives]
    return [dist.get_global_rank(group, end) for end in ends]


def _count_replicas(plan: Plan, axes_of_stages: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """The number of replicas."""
    for index, (stage, (axes, why)) in enumerate(zip(plan.stages, axes_of_stages, strict=True)):
        if not axes:
            raise ValueError(
                "delay= and local_steps= need replicas that send each other nothing but gradients and the loss, but "
                f"stage {index} of mesh {list(stage.mesh_shape)} has none ({why or 'it is one device'}); use a "
                "strategy with dp and zero=0, or leave them out"
            )
    counts = [
        prod(stage.mesh_shape[a] for a in axes) for stage, (axes, _) in zip(plan.stages, axes_of_stages, strict=True)
    ]
    if len(set(counts)) > 1:
        raise ValueError(
            f"delay= and local_steps= need as many replicas of every stage, but got {counts}; use a strategy with the "
            "same dp on all stages"
        )
    return counts[0]


class ReplicaComm(TimedComm):
    """Collectives of a program whose replica steps by itself: over the independent ``axes`` it is told what it would be
    if all replicas had its own samples, and nothing is sent."""

    def __init__(self, inner: Comm, trace: Trace, axes: Sequence[int]) -> None:
        super().__init__(inner, trace)
        self.axes = frozenset(axes)

    def all_reduce(self, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        """p times ``x`` over an independent axis of p devices."""
        if axis not in self.axes:
            return super().all_reduce(x, axis, op)
        return x * self.size(axis) if op == "sum" else x.clone()

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> Arrival:
        """Start the sum over the other axes, of p times ``x``."""
        x = x * prod(self.size(axis) for axis in axes if axis in self.axes)
        rest = [axis for axis in axes if axis not in self.axes]
        return super().start_sum(x, rest) if rest else CompletedArrival(x)


# ---- flat sums


class BackendAllReduce:
    """A persistent ``Sum`` by the backend's all-reduce."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x`` in place."""
        work: Pending = dist.all_reduce(x, group=self.group, async_op=True)
        return work

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to load."""
        assert not state, state

    def close(self) -> None:
        """Do nothing: no receive is posted."""


class FlatBucket:
    """Parameters of one dtype that travel together, as a vector [n], and the sum by which they do."""

    def __init__(self, leaves: Sequence[nn.Parameter], make: MakeSum) -> None:
        self.leaves = list(leaves)
        self.sizes = [leaf.numel() for leaf in leaves]
        self.dtype, self.device = leaves[0].dtype, leaves[0].device
        self.sum = make(sum(self.sizes), self.dtype, [leaf.shape for leaf in leaves], self.device)

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """These tensors, one of each leaf's shape, one after another; zeros for None."""
        out = torch.empty(sum(self.sizes), dtype=self.dtype, device=self.device)
        for view, tensor in zip(self.views(out), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)
        return out

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a vector in the shapes of the leaves."""
        pieces = flat.split(self.sizes)
        return [piece.view(leaf.shape) for piece, leaf in zip(pieces, self.leaves, strict=True)]


def flat_buckets(leaves: Sequence[nn.Parameter], make: MakeSum) -> list[FlatBucket]:
    """Buckets of about ``_MAX_BUCKET_BYTES`` at the most, or one leaf; made on all ranks of a group alike. Sums start
    when all gradients are there, so few large ones are best, as each costs round trips; but one for each lane, since
    one may travel while another is coded."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.dtype, []).append(leaf)
    return [FlatBucket(row, make) for alike in groups.values() for row in _split_leaves(alike)]


def _split_leaves(leaves: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """In about equal parts: a leaf belongs where its middle is."""
    total = max(sum(leaf.nbytes for leaf in leaves), 1)
    count = max(min(LANES, total // _MIN_BUCKET_BYTES), -(-total // _MAX_BUCKET_BYTES), 1)
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = 0
    for leaf in leaves:
        parts[min((2 * before + leaf.nbytes) * count // (2 * total), count - 1)].append(leaf)
        before += leaf.nbytes
    return [part for part in parts if part]
