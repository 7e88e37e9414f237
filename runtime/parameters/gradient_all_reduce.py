"""The all-reduces of gradients that the backend does not make.

Where the plan chooses nothing for some mesh axes and their ranks share memory, gradients are summed there
(``SharedMemoryAllReduce``). Otherwise the plan's ``GradientReduction`` names the axes, an algorithm and a codec. Every
bucket over these axes gets a persistent ``Sum`` of its own, made on all ranks of the stage in the order of the buckets.
They send from a communication thread (``worker``), over process groups that nothing else uses and each of these threads
has of its own::

    code "none"               ``dense.DenseSum`` by the algorithm
    others                    ``compression.make_sum``; where it sums on the way, by the algorithm
    others, "hierarchical"    ``HierarchicalAllReduce``: in the code between hosts only

A compressed sum between hosts with exact ones inside: only what crosses the network is coded.

With m ranks per host, a flat bucket x [n] padded to m parts of k elements::

    inside   all-to-all of parts, each rank adds up one          exact, (m − 1)/m · n elements
    between  sum of that part over the hosts                     in the code, k elements
    inside   all-gather of the parts                             exact, (m − 1)/m · n elements
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.plan.plan import GradientReduction, Plan
from ..collectives.channel import Channel
from ..collectives.dense import DenseSum
from ..collectives.engine import CollectiveRun as Rounds
from ..collectives.protocol import Pending, Submit, Sum
from ..collectives.rounds import schedule_of
from ..collectives.worker import submit
from ..compression.exchange import CompletedWork, Exchange, GroupExchange, Work, wait_all
from ..compression.registry import make_sum
from ..compression.summing import BucketSpec, CompressedSum
from ..transport.process_groups import DistributedComm
from ..transport.shared_memory import SharedMemory, SharedMemoryAllReduce

__all__ = ["AlgorithmExchange", "GradientAllReduce", "HierarchicalAllReduce", "part_length"]


_STAGING_ELEMENTS = 1 << 18  # elements of shared memory through which larger tensors are summed


class GradientAllReduce:
    """Makes the sums of one rank's buckets, and keeps what of them a checkpoint holds. seed: of codes that draw. comm:
    has groups for each lane on which sums shall go."""

    def __init__(self, plan: Plan, stage: int | None, comm: DistributedComm | None, seed: int = 0) -> None:
        self.seed = seed
        self.made: list[Sum] = []
        coded = [(s, wire) for s in plan.stages for wire in s.wire if wire.compressor != "none"]
        # whether a rank may not know what the code of another one found
        self.faults_differ = any(
            wire.algorithm == "hierarchical" or prod(s.mesh_shape[a] for a in wire.axes) < plan.num_devices
            for s, wire in coded
        )
        self._hops: dict[tuple[tuple[int, ...], int], _SumGroup] = {}
        self._wires: dict[tuple[int, ...], GradientReduction] = {}
        self._comm = comm
        self._shared_memory: dict[tuple[int, ...], SharedMemory] = {}
        self._staging: dict[tuple[tuple[int, ...], torch.dtype], SharedMemoryAllReduce] = {}
        if stage is None or comm is None:
            return
        for wire in plan.stages[stage].wire:
            if not wire.is_plain:
                self._wires[wire.axes] = wire
                for lane, groups in enumerate(comm.own_groups[wire.axes]):
                    self._hops[wire.axes, lane] = _SumGroup(groups, plan, partial(submit, lane=lane))

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
            total: Sum = DenseSum(hop.channel, n, dtype, wire.algorithm, members=hop.members, submit=hop.submit)
        else:
            inner, between = hop.levels
            exchange = (
                GroupExchange(between)
                if wire.algorithm in ("backend", "hierarchical")
                else AlgorithmExchange(hop.channel, wire.algorithm, hop.members)
            )
            size, tensors = (n, shapes) if inner is None else (part_length(n, hop.members), ())
            shapes_in_part = tuple(tuple(shape) for shape in tensors)
            bucket = BucketSpec(size, dtype, shapes_in_part, self.seed + len(self.made), device=device)
            coded = make_sum(wire.compressor, bucket, exchange, submit=hop.submit)
            total = coded if inner is None else HierarchicalAllReduce(n, GroupExchange(inner), coded, hop.submit)
        self.made.append(total)
        return total

    def make_shared(
        self, axes: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device, lasting: bool
    ) -> SharedMemoryAllReduce | None:
        """The sum of such a bucket in memory that all ranks of these axes share; None where they do not, or where the
        plan says how it travels. lasting: whether the bucket is to lie there, or only passes through it, as others."""
        if self._comm is None or axes in self._wires or device.type != "cpu":
            return None
        if axes not in self._shared_memory:
            self._shared_memory[axes] = SharedMemory.connect(self._comm.groups[axes])
        shared_memory = self._shared_memory[axes]
        if not shared_memory.spans_group:
            return None
        if lasting:
            return SharedMemoryAllReduce(shared_memory, n, dtype)
        if (axes, dtype) not in self._staging:
            self._staging[axes, dtype] = SharedMemoryAllReduce(shared_memory, min(n, _STAGING_ELEMENTS), dtype)
        return self._staging[axes, dtype]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """ "<number of the sum>.<name>" → what this rank's sums carry from step to step."""
        return {f"{i}.{name}": x for i, made in enumerate(self.made) for name, x in made.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what ``state_dict`` gave to the same plan."""
        for index, made in enumerate(self.made):
            prefix = f"{index}."
            made.load_state_dict({k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)})


class _SumGroup:
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


class AlgorithmExchange(GroupExchange):
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
        return CompletedWork()


class HierarchicalAllReduce:
    """Sums flat tensors [n] over the ranks of a host exactly (``inner``), and between hosts by ``coded``: the sum of
    one of ``inner.size`` parts over the ranks that have this part in their hosts."""

    def __init__(self, n: int, inner: Exchange, coded: CompressedSum, submit: Submit) -> None:
        self.n, self.inner, self.coded, self._submit = n, inner, coded, submit
        assert coded.bucket.n == part_length(n, inner.size), (coded.bucket.n, n, inner.size)

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x`` in place; ``wait`` raises NonFiniteGradient on the ranks whose part has one."""
        return self._submit(lambda: self._run(x))

    @torch.no_grad()
    def _run(self, x: torch.Tensor) -> None:
        members, part = self.inner.size, self.coded.bucket.n
        rows = x.new_zeros(members, part)
        rows.view(-1)[: self.n].copy_(x)
        arrived = torch.empty_like(rows)
        self.inner.all_to_all(arrived, rows).wait()
        mine = arrived.sum(0)
        try:
            wait_all(self.coded.run(mine))
        finally:  # the others in this host wait for it, whatever it is
            self.inner.all_gather(rows, mine).wait()
            x.copy_(rows.view(-1)[: self.n])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the compressed sum."""
        return self.coded.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what ``state_dict`` gave."""
        self.coded.load_state_dict(state)

    def close(self) -> None:
        """Close the compressed sum."""
        self.coded.close()


def part_length(n: int, members: int) -> int:
    """Elements of one of ``members`` parts of n."""
    return -(-n // members)
