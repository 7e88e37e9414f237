"""The sums by which gradients travel, but for those that the backend makes.

Where a plan's wires say nothing and ranks share memory, they sum there (``SharedSum``). A wire names mesh axes of a
stage, an algorithm and a code (``plan.Wire``). Every bucket over these axes gets a persistent ``Sum`` of its own, made
on all ranks of the stage in the order of the buckets. They send from a communication thread (``worker``), over process
groups that nothing else uses and each of these threads has of its own::

    code "none"               ``collectives.DenseSum`` by the algorithm
    others                    ``compression.make_sum``; where it sums on the way, by the algorithm
    others, "hierarchical"    ``OuterSum``: in the code between hosts only
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..compiler.plan import Plan, Wire
from .collectives.channel import Channel
from .collectives.dense import DenseSum
from .collectives.engine import Exchange as Rounds
from .collectives.protocol import Submit, Sum
from .collectives.rounds import schedule_of
from .collectives.worker import submit
from .compression.exchange import Done, GroupExchange, Work
from .compression.registry import make_sum
from .groups import DistributedComm
from .near import Near
from .outer_sum import OuterSum, part_of
from .shared_sum import SharedSum

__all__ = ["ByAlgorithm", "Sums"]

_PASSAGE = 1 << 18  # elements of shared memory through which larger tensors are summed


class Sums:
    """Makes the sums of one rank's buckets, and keeps what of them a checkpoint holds. seed: of codes that draw. comm:
    has groups for each lane on which sums shall go."""

    def __init__(self, plan: Plan, stage: int | None, comm: DistributedComm | None, seed: int = 0) -> None:
        self.seed = seed
        self.made: list[Sum] = []
        coded = [(s, wire) for s in plan.stages for wire in s.wire if wire.compressor != "none"]
        # whether a rank may not know what the code of another one found
        self.told_apart = any(
            wire.algorithm == "hierarchical" or prod(s.mesh_shape[a] for a in wire.axes) < plan.num_devices
            for s, wire in coded
        )
        self._hops: dict[tuple[tuple[int, ...], int], _Hop] = {}
        self._wires: dict[tuple[int, ...], Wire] = {}
        self._comm = comm
        self._near: dict[tuple[int, ...], Near] = {}
        self._passages: dict[tuple[tuple[int, ...], torch.dtype], SharedSum] = {}
        if stage is None or comm is None:
            return
        for wire in plan.stages[stage].wire:
            if not wire.is_plain:
                self._wires[wire.axes] = wire
                for lane, groups in enumerate(comm.own_groups[wire.axes]):
                    self._hops[wire.axes, lane] = _Hop(groups, plan, partial(submit, lane=lane))

    def make(
        self, axes: tuple[int, ...], n: int, dtype: torch.dtype, shapes: Sequence[torch.Size], device: torch.device,
        lane: int = 0,
    ) -> Sum | None:  # fmt: skip
        """The sum of a flat bucket [n] over these axes, in which tensors of ``shapes`` lie one after another; None:
        the backend's own."""
        wire = self._wires.get(axes)
        if wire is None:
            return None
        hop = self._hops[axes, lane]
        if wire.compressor == "none":
            made: Sum = DenseSum(hop.channel, n, dtype, wire.algorithm, members=hop.members, submit=hop.submit)
        else:
            inner, between = hop.levels
            exchange = (
                GroupExchange(between)
                if wire.algorithm in ("backend", "hierarchical")
                else ByAlgorithm(hop.channel, wire.algorithm, hop.members)
            )
            size, tensors = (n, shapes) if inner is None else (part_of(n, hop.members), ())
            coded = make_sum(
                wire.compressor, size, exchange, dtype=dtype, shapes=tensors, seed=self.seed + len(self.made),
                device=device, submit=hop.submit,
            )  # fmt: skip
            made = coded if inner is None else OuterSum(n, GroupExchange(inner), coded, hop.submit)
        self.made.append(made)
        return made

    def make_shared(
        self, axes: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device, lasting: bool
    ) -> SharedSum | None:
        """The sum of such a bucket in memory that all ranks of these axes share; None where they do not, or where the
        plan says how it travels. lasting: whether the bucket is to lie there, or only passes through it, as others."""
        if self._comm is None or axes in self._wires or device.type != "cpu":
            return None
        if axes not in self._near:
            self._near[axes] = Near.meet(self._comm.groups[axes])
        near = self._near[axes]
        if not near.is_all:
            return None
        if lasting:
            return SharedSum(near, n, dtype)
        if (axes, dtype) not in self._passages:
            self._passages[axes, dtype] = SharedSum(near, min(n, _PASSAGE), dtype)
        return self._passages[axes, dtype]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """ "<number of the sum>.<name>" → what this rank's sums carry from step to step."""
        return {f"{i}.{name}": x for i, made in enumerate(self.made) for name, x in made.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what ``state_dict`` gave to the same plan."""
        for index, made in enumerate(self.made):
            prefix = f"{index}."
            made.load_state_dict({k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)})


class _Hop:
    """The group that some axes form, used by sums alone and on one lane. groups: it, or where only the part between
    hosts is coded, the one inside the host and the one between; members: of its ranks on each host."""

    def __init__(self, groups: tuple[Any, ...], plan: Plan, submit: Submit) -> None:
        self.groups, self.submit = groups, submit
        hosts = Counter(plan.host_of(rank) for rank in dist.get_process_group_ranks(groups[0]))
        self.members = next(iter(hosts.values())) if len(set(hosts.values())) == 1 else 1

    @property
    def levels(self) -> tuple[Any, Any]:
        """The group inside the host, None if there is no such level, and the other one."""
        return (None, self.groups[0]) if len(self.groups) == 1 else (self.groups[0], self.groups[1])

    @cached_property
    def channel(self) -> Channel:
        """Messages of one's own over the group."""
        return Channel(self.groups[0])


class ByAlgorithm(GroupExchange):
    """All-reduces by an algorithm of our own, to their ends: the thread of the sum runs them as it comes to them.
    members: of a host, where the algorithm is hierarchical."""

    def __init__(self, channel: Channel, algorithm: str, members: int = 0) -> None:
        super().__init__(channel.group)
        self.channel = channel
        self.schedule = schedule_of("all_reduce", algorithm, self.size, members=members)
        self.rounds: dict[tuple[int, torch.dtype], Rounds] = {}

    def all_reduce(self, x: torch.Tensor) -> Work:
        """Sum x in place."""
        self.sent["all_reduce"] += x.nbytes
        flat = x.view(-1)
        key = (flat.numel(), flat.dtype)
        if key not in self.rounds:
            self.rounds[key] = Rounds(self.channel, self.schedule, *key)
        self.rounds[key].run(flat)
        return Done()
