"""What the optimizer updates, apart from what the program reads.

Usually both are one leaf. Where a plan cuts the optimizer's state of a parameter over mesh axes on which the value is
whole (ZeRO-1 and 2: Rajbhandari et al. 2020), the program reads the whole leaf, the optimizer updates this rank's
block of it (``Owned.parameter``), and after the step the blocks are gathered into the leaf::

    reduction   leaf.grad of every rank → parameter.grad, sums of blocks     one reduce-scatter per ``Bundle``
    update      optimizer.step() on the parameters
    gather      the parameters of all ranks → leaf                           one all-gather per ``Bundle``

The block shares the leaf's storage where it is contiguous there; otherwise it has storage of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ..compiler.buckets import gradient_buckets
from ..compiler.cuts import Cut, place
from ..compiler.plan import Plan, Residency
from .groups import DistributedComm
from .optimizer import name_parameter

__all__ = ["Bundle", "Owned", "ValueGatherer", "own_parts"]


@dataclass(eq=False)
class Owned:
    """A parameter of which the optimizer has a block.

    leaf: as the program reads it; parameter: this rank's block, which the optimizer gets; cut: of the leaf; rest: axes
    over which the gradient is partial beside those of the cut; often: whether every microbatch reduces it.
    """

    leaf: nn.Parameter
    parameter: nn.Parameter
    cut: Cut
    rest: tuple[int, ...] = ()
    often: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What must agree within a bundle."""
        return self.cut.axes, self.cut.sizes, self.rest, self.often, self.leaf.dtype


def own_parts(
    plan: Plan, stage: int | None, leaves: Mapping[str, nn.Parameter], comm: DistributedComm | None
) -> dict[str, Owned]:
    """Of this rank's leaves, the trained ones that the optimizer has less of than ops read. ValueError for specs that
    do not nest."""
    if stage is None or comm is None:
        return {}
    homes = {name: home for chunk in plan.stages[stage].chunks for name, home in chunk.parameters.items()}
    cut = [name for name in leaves if homes[name].stored != homes[name].optimizer and leaves[name].requires_grad]
    return {name: _own(leaves[name], name, homes[name], comm) for name in cut}


def _own(leaf: nn.Parameter, name: str, residency: Residency, comm: DistributedComm) -> Owned:
    cut = Cut.between(name, residency.compute.value, residency.optimizer, comm.mesh_shape)
    block = cut.blocks(leaf.detach())[tuple(comm.index(axis) for axis in cut.axes)]
    parameter = nn.Parameter(block.contiguous(), requires_grad=leaf.requires_grad)
    shape = leaf.global_shape  # type: ignore[attr-defined]
    partial = (axis for axis, p in enumerate(residency.compute.cotangent) if p.is_partial and comm.size(axis) > 1)
    rest = tuple(axis for axis in partial if axis not in cut.axes)
    return Owned(leaf, name_parameter(parameter, name, shape), cut, rest, residency.reduce == "microbatch")


class Bundle:
    """Parameters whose blocks travel in one message (see ``compiler.cuts``)."""

    def __init__(self, members: Sequence[Owned]) -> None:
        self.members = list(members)
        self.axes, self.rest, self.rows = members[0].cut.axes, members[0].rest, members[0].cut.parts
        self.sizes = [owned.parameter.numel() for owned in members]
        self.starts = [0, *accumulate(self.sizes)]

    def wire(self) -> torch.Tensor:
        """An empty message to all ranks of the group, one row each."""
        return self.members[0].leaf.new_empty((self.rows, self.starts[-1]))

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
    one in front of it is waited for."""

    def __init__(self, comm: DistributedComm | None, owned: Sequence[Owned], bucket_bytes: int) -> None:
        self.comm = comm
        keys = [(o.cut.axes, o.cut.sizes, o.leaf.dtype) for o in owned]
        groups = gradient_buckets([(key, o.leaf.nbytes) for key, o in zip(keys, owned, strict=True)], bucket_bytes)
        self.bundles = [Bundle([owned[index] for index in group]) for group in groups]

    def run(self) -> None:
        """Every leaf becomes what the ranks of its axes own of it. Collective."""
        if self.comm is None:
            return
        phase, self.comm.phase = self.comm.phase, "step"
        started = [self._start(bundle) for bundle in self.bundles[:1]]
        for bundle, following in pairwise([*self.bundles, None]):
            if following is not None:
                started.append(self._start(following))
            assert bundle is not None
            _spread(bundle, started.pop(0).wait())
        self.comm.phase = phase

    def _start(self, bundle: Bundle) -> Any:
        assert self.comm is not None
        blocks = [owned.parameter.detach().reshape(-1) for owned in bundle.members]
        mine = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return self.comm.start_all_gather(mine.to(bundle.members[0].leaf.dtype), bundle.axes)

    def refresh(self) -> None:
        """The other way, without communication, after values were loaded: blocks become what the leaves hold."""
        for bundle in self.bundles:
            for owned in bundle.members:
                assert self.comm is not None
                index = tuple(self.comm.index(axis) for axis in owned.cut.axes)
                with torch.no_grad():
                    owned.parameter.copy_(owned.cut.blocks(owned.leaf)[index])


@torch.no_grad()
def _spread(bundle: Bundle, wire: torch.Tensor) -> None:
    for index, owned in enumerate(bundle.members):
        owned.cut.blocks(owned.leaf).copy_(bundle.place(wire, index))
