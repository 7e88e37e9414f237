"""From the caller's flat inputs to each slot's block of each microbatch; every check on them is made on every rank.

data="global": every rank passes the global batch; microbatch i is its i-th contiguous chunk. data="local": every rank
passes part ``data_index`` of ``data_count``; microbatch i is made of the i-th chunks of all parts, so the batch is the
same set of samples in another order. That needs one split of the batch for all inputs on all stages.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.plan.boundaries import InputUse
from ...compiler.plan.cross_mesh import MeshLayout, coordinates, cut
from ...compiler.plan.plan import Plan
from ..transport.error_propagation import raise_on_all_ranks
from ..transport.process_groups import DistributedComm

__all__ = ["InputSharder"]


class InputSharder:
    """Checks and slices inputs. ``uses``: those of all stages, equal on every rank; ``position`` of a use: the slot's
    index."""

    def __init__(
        self,
        plan: Plan,
        uses: Sequence[InputUse],
        comm: DistributedComm | None,
        device: torch.device,
        data: str = "global",
        microbatches: int | None = None,
    ) -> None:
        if data not in ("global", "local"):
            raise ValueError(f"data is 'global' or 'local', but got {data!r}")
        self.local, self.device, self.comm = data == "local", device, comm
        self.microbatches = plan.microbatches if microbatches is None else microbatches
        self.expected: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {}
        self.data_count, self.data_index = self._split(plan, uses) if self.local else (1, 0)
        for use in uses:
            shape = list(use.type.shape)
            if use.batch_dim is not None:
                shape[use.batch_dim] = shape[use.batch_dim] * self.microbatches // self.data_count
            entry = (tuple(shape), use.type.dtype, use.batch_dim)
            assert self.expected.setdefault(use.name, entry) == entry, f"stages disagree on input {use.name!r}"
        rank = dist.get_rank()
        stage = plan.stage_of(rank)
        # chunk → (slot, input, this rank's block of every microbatch)
        self.plans: defaultdict[int, list[tuple[int, str, list[tuple[tuple[int, int], ...]]]]] = defaultdict(list)
        for use in uses:
            if use.stage == stage:
                stage_plan = plan.stages[stage]
                box = MeshLayout(stage_plan.devices, stage_plan.mesh_shape, use.spec).box(use.type.shape, rank)
                boxes = [self._at(use, box, index) for index in range(self.microbatches)]
                self.plans[use.chunk].append((use.position, use.name, boxes))
        self._compared = False  # whether the ranks have compared what they pass

    def _at(self, use: InputUse, box: tuple[tuple[int, int], ...], microbatch: int) -> tuple[tuple[int, int], ...]:
        """This rank's block of microbatch ``microbatch`` inside the tensor that the caller passes."""
        if use.batch_dim is None:
            return box
        start, stop = box[use.batch_dim]
        extent = use.type.shape[use.batch_dim] // self.data_count
        offset = microbatch * extent + (0 if self.local else start)
        return (*box[: use.batch_dim], (offset, offset + stop - start), *box[use.batch_dim + 1 :])

    def _split(self, plan: Plan, uses: Sequence[InputUse]) -> tuple[int, int]:
        """(parts of the batch, this rank's part); ValueError if the inputs are not split alike."""
        axes_of_stage: dict[int, tuple[tuple[int, ...], str]] = {}
        counts: dict[int, str] = {}
        for use in uses:
            if use.batch_dim is None:
                continue
            shape = plan.stages[use.stage].mesh_shape
            axes = tuple(
                axis
                for axis, (p, size) in enumerate(zip(use.spec, shape, strict=True))
                if size > 1 and p.is_shard and p.dim == use.batch_dim
            )
            counts.setdefault(prod(shape[axis] for axis in axes), f"{use.name!r} on stage {use.stage}")
            if axes_of_stage.setdefault(use.stage, (axes, use.name))[0] != axes:
                raise ValueError(
                    f"data='local' needs one split of the batch, but got {use.name!r} and "
                    f"{axes_of_stage[use.stage][1]!r} cut along different axes on stage {use.stage}; use data='global'"
                )
        if len(counts) > 1:
            listing = ", ".join(f"{count} parts ({where})" for count, where in sorted(counts.items()))
            raise ValueError(
                f"data='local' needs one split of the batch on all stages, but got {listing}; use data='global'"
            )
        count = next(iter(counts), 1)
        stage = plan.stage_of(dist.get_rank())
        if stage not in axes_of_stage:
            return count, 0
        index, shape = 0, plan.stages[stage].mesh_shape
        place = coordinates(plan.stages[stage].devices.index(dist.get_rank()), shape)
        for axis in axes_of_stage[stage][0]:
            index = index * shape[axis] + place[axis]
        return count, index

    def check(self, inputs: Mapping[str, Any]) -> None:
        """ValueError if an input is missing, or has another shape or dtype than the plan's.

        Collective the first time: then the ranks also compare a hash of the data, and fail together.
        """
        if self._compared:
            self.check_types(inputs)
            return
        fault: ValueError | None = None
        try:
            self.check_types(inputs)
        except ValueError as error:
            fault = error
        raise_on_all_ranks(fault)
        self._check_same_data(inputs)
        self._compared = True

    def check_types(self, inputs: Mapping[str, Any]) -> None:
        """ValueError if an input has another shape or dtype than the plan's."""
        for name, (shape, dtype, batch_dim) in self.expected.items():
            x = inputs.get(name)
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"the plan needs a tensor for input {name!r}, but got {type(x).__name__}")
            if x.dtype != dtype:
                raise ValueError(f"input {name!r} was planned as {dtype}, but got {x.dtype}; convert it or plan again")
            if tuple(x.shape) != shape:
                if batch_dim is not None and x.ndim == len(shape):
                    rest = [d for d in range(x.ndim) if d != batch_dim]
                    if all(x.shape[d] == shape[d] for d in rest):
                        of = f" / {self.data_count} ranks' parts" if self.local else ""
                        raise ValueError(
                            f"the batch of input {name!r} must be {shape[batch_dim]} ({self.microbatches} "
                            f"microbatches{of}), but got "
                            f"{x.shape[batch_dim]}; pass that many samples or plan for another global_batch"
                        )
                raise ValueError(
                    f"input {name!r} was planned with shape {list(shape)}, but got {list(x.shape)}; plan again"
                )

    def _check_same_data(self, inputs: Mapping[str, Any]) -> None:
        digest = None
        if self.plans:
            hasher = hashlib.sha256()
            for name in self.expected:
                hasher.update(inputs[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            digest = (self.data_index, hasher.hexdigest())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest)
        first: dict[int, tuple[int, str]] = {}
        for rank, entry in enumerate(everyone):
            if entry is None:
                continue
            index, value = entry
            other, expected = first.setdefault(index, (rank, value))
            if expected != value and not self.local:
                raise ValueError(
                    f"every rank passes the whole batch, but got different data on ranks {other} and {rank}; "
                    "seed the loaders alike, or use data='local' for parts of the batch"
                )
            if expected != value:
                raise ValueError(
                    f"ranks that share a data_index must pass equal data, but got different data on ranks {other} "
                    f"and {rank} "
                    f"(data_index {index} of {self.data_count}); feed the sampler with data_index and data_count"
                )

    def fill(self, arguments: list[Any], inputs: Mapping[str, torch.Tensor], microbatch: int, chunk: int = 0) -> None:
        """Put this rank's block of every input of one microbatch into its slot of a chunk."""
        for position, name, boxes in self.plans.get(chunk, ()):
            x = cut(inputs[name], boxes[microbatch]).contiguous()
            arguments[position] = x if x.device == self.device else x.to(self.device, non_blocking=True)
