"""Optimizer shards and master weights: leaves that the optimizer updates in place of those that the program reads.

Usually both are one leaf. They differ where a plan computes in 16 bits: there the program reads a 16-bit leaf, and
the optimizer updates an fp32 master (Micikevicius et al. 2018). Where a plan cuts the optimizer's state of a
parameter over mesh axes on which the value is whole (ZeRO-1 and 2: Rajbhandari et al. 2020), the program reads the
whole leaf, the optimizer updates this rank's block of it (``OptimizerShards.parameter``), and after the step the
blocks are gathered into the leaf::

    reduction   leaf.grad of every rank → parameter.grad, sums of blocks     one reduce-scatter per ``ShardBucket``
    update      optimizer.step() on the parameters
    gather      the parameters of all ranks → leaf                           one all-gather per ``ShardBucket``

The block shares the leaf's storage where it is contiguous there; otherwise, and as a master, it has storage of its own.
Sums of a master's gradients are fp32, over microbatches and over ranks; values are gathered in the leaf's type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ...compiler.ir.precision import PRECISIONS
from ...compiler.ir.reshard import Cut, place
from ...compiler.plan.plan import ParameterSharding, Plan, gradient_buckets
from ..transport.process_groups import DistributedComm
from .optimizer import name_parameter

__all__ = ["OptimizerShards", "ShardBucket", "ValueGatherer", "make_optimizer_shards"]


@dataclass(eq=False)
class OptimizerShards:
    """A parameter of which the optimizer has a block, or a master; or, of one that another stage owns, no more than the
    fp32 gradient.

    """

    #: the leaf that the program reads
    leaf: nn.Parameter
    #: this rank's block, which the optimizer updates
    parameter: nn.Parameter
    #: the division of the leaf into blocks; by no axes if the block is all of it
    cut: Cut
    #: further axes over which the gradient is partial
    rest: tuple[int, ...] = ()
    #: True if every microbatch reduces the gradient
    often: bool = False
    #: True if the block is a master weight
    mixed: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that all members of a bucket share."""
        return self.cut.axes, self.cut.sizes, self.rest, self.often, self.leaf.dtype, self.parameter.dtype


def make_optimizer_shards(
    plan: Plan,
    stage: int | None,
    leaves: Mapping[str, nn.Parameter],
    masters: Mapping[str, nn.Parameter],
    comm: DistributedComm | None,
    independent_axes: Sequence[int] = (),
) -> dict[str, OptimizerShards]:
    """Make the shards of this rank's trained leaves of which the optimizer has another tensor. independent_axes: those
    over which no gradients are summed here. ValueError for specs that do not nest."""
    if stage is None or comm is None:
        return {}
    homes, mixed = plan.stages[stage].homes, plan.precision in PRECISIONS
    shards = {}
    for name, leaf in leaves.items():
        home = homes[name]
        has_master = mixed and home.stored == home.compute.value  # else programs gather masters themselves
        if leaf.requires_grad and (has_master or home.stored != home.optimizer):
            shards[name] = _make_shard(leaf, name, home, comm, masters.get(name), mixed)
            shards[name].rest = tuple(axis for axis in shards[name].rest if axis not in independent_axes)
    return shards


def _make_shard(
    leaf: nn.Parameter,
    name: str,
    residency: ParameterSharding,
    comm: DistributedComm,
    master: nn.Parameter | None,
    mixed: bool,
) -> OptimizerShards:
    cut = Cut.between(name, residency.compute.value, residency.optimizer, comm.mesh_shape)
    block = cut.blocks(leaf.detach())[tuple(comm.index(axis) for axis in cut.axes)]
    shape = leaf.global_shape  # type: ignore[attr-defined]
    if mixed and master is None:  # of a copy: one element that stands for all, so that it may have an fp32 gradient
        block = block.new_zeros((), dtype=torch.promote_types(leaf.dtype, torch.float32)).expand(block.shape)
    parameter = master if master is not None else nn.Parameter(block if mixed else block.contiguous())
    partial = (axis for axis, p in enumerate(residency.compute.cotangent) if p.is_partial and comm.size(axis) > 1)
    rest = tuple(axis for axis in partial if axis not in cut.axes)
    return OptimizerShards(
        leaf, name_parameter(parameter, name, shape), cut, rest, residency.reduce == "microbatch", mixed
    )


class ShardBucket:
    """Parameters whose blocks travel in one message (see ``compiler.ir.reshard``)."""

    def __init__(self, members: Sequence[OptimizerShards]) -> None:
        self.members = list(members)
        self.axes, self.rest, self.rows = members[0].cut.axes, members[0].rest, members[0].cut.parts
        self.sizes = [owned.parameter.numel() for owned in members]
        self.starts = [0, *accumulate(self.sizes)]

    def wire(self) -> torch.Tensor:
        """An empty message of gradients to all ranks of the group, one row each."""
        return self.members[0].parameter.new_empty((self.rows, self.starts[-1]))

    def place(self, wire: torch.Tensor, index: int) -> torch.Tensor:
        """The view of member ``index`` in a message, laid out like ``cut.blocks(leaf)``."""
        owned = self.members[index]
        return place(wire, self.starts[index], owned.cut, owned.parameter.shape)

    def split(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The members' blocks in one row, as views."""
        pieces = zip(row.split(self.sizes), self.members, strict=True)
        return [piece.view(owned.parameter.shape) for piece, owned in pieces]


class ValueGatherer:
    """Brings what the optimizer made into the leaves that programs read: a gather per bundle, each started before the
    one in front of it is waited for. Whole masters are only cast."""

    def __init__(self, comm: DistributedComm | None, owned: Sequence[OptimizerShards], bucket_bytes: int) -> None:
        self.comm = comm
        self.owned = owned
        keys = [(o.cut.axes, o.cut.sizes, o.leaf.dtype) if o.cut.axes else None for o in owned]
        groups = gradient_buckets([(key, o.leaf.nbytes) for key, o in zip(keys, owned, strict=True)], bucket_bytes)
        self.bundles = [ShardBucket([owned[index] for index in group]) for group in groups]

    def run(self) -> None:
        """Every leaf becomes what the ranks of its axes own of it. Collective."""
        if self.comm is None:
            return
        ungathered = [owned for owned in self.owned if not owned.cut.axes]
        if ungathered:
            torch._foreach_copy_([o.leaf.detach() for o in ungathered], [o.parameter.detach() for o in ungathered])
        phase, self.comm.phase = self.comm.phase, "step"
        started = [self._start(bundle) for bundle in self.bundles[:1]]
        for bundle, following in pairwise([*self.bundles, None]):
            # one gather ahead: more would hold several buckets at once
            if following is not None:
                started.append(self._start(following))
            assert bundle is not None
            _scatter_values(bundle, started.pop(0).wait())
        self.comm.phase = phase

    def _start(self, bundle: ShardBucket) -> Any:
        assert self.comm is not None
        blocks = [owned.parameter.detach().reshape(-1).to(owned.leaf.dtype) for owned in bundle.members]
        mine = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        del blocks
        return self.comm.start_all_gather(mine, bundle.axes)

    def refresh(self) -> None:
        """After values were loaded: leaves become what was loaded into masters (collective); without masters the other
        way, blocks become what the leaves hold."""
        if any(owned.mixed for owned in self.owned):
            self.run()
            return
        for bundle in self.bundles:
            for owned in bundle.members:
                assert self.comm is not None
                index = tuple(self.comm.index(axis) for axis in owned.cut.axes)
                with torch.no_grad():
                    owned.parameter.copy_(owned.cut.blocks(owned.leaf)[index])


@torch.no_grad()
def _scatter_values(bundle: ShardBucket, wire: torch.Tensor) -> None:
    for index, owned in enumerate(bundle.members):
        owned.cut.blocks(owned.leaf).copy_(bundle.place(wire, index))
