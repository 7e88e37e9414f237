"""Evaluation: forward programs on the ranks, parameters and buffers of a training session.

The programs may want other placements than training has, and tensors that only other stages hold; these are lent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ...compiler.ir.program import ChunkProgram
from ...compiler.ir.reshard import apply_steps, steps_between
from ...compiler.ir.spec import R
from ...compiler.pipeline.schedule import Place
from ...compiler.plan.boundaries import BoundaryMetadata
from ...compiler.plan.cross_mesh import MeshLayout, cut
from ...compiler.plan.plan import Plan
from ..parameters.state import ParameterState
from ..transport.cross_mesh import wire
from ..transport.process_groups import DistributedComm
from .boundary_metadata import boundaries_of, exchange_boundaries, programs_of
from .chunk import Groups, RankResources, StageTransport
from .executor import Executor
from .input_sharding import InputSharder

__all__ = ["Evaluation", "whole_output"]


class Evaluation:
    """The forwards of evaluation on the ranks of a session of ``plan``; ``comm`` is None on an idle rank."""

    def __init__(
        self, plan: Plan, comm: DistributedComm | None, state: ParameterState, groups: Groups, seed: int
    ) -> None:
        self.plan, self.comm, self.state, self.groups, self.seed = plan, comm, state, groups, seed
        self._bound: list[tuple[Sequence[ChunkProgram], Executor, dict[Place, BoundaryMetadata]]] = []

    def run(
        self, inputs: Mapping[str, torch.Tensor], plan: Plan, programs: Sequence[ChunkProgram], step: int
    ) -> dict[str, torch.Tensor]:
        """Run the programs once, without autograd: exit name → whole output on every rank ("loss" too if they have
        one).

        plan: with the session's stages and meshes (ops and specs may differ); its microbatches are ignored, the
        programs' own batch counts. programs: of this rank's stage; the same object on later calls reuses what the first
        call bound. Collective.
        """
        executor, boundaries = self._executor(plan, programs)
        executor.input_sharder.check(inputs)
        self._lend(executor, boundaries)
        loss, local_outputs = executor.run(inputs, step=step)
        outputs: dict[str, torch.Tensor] = {}
        for (index, chunk), boundary in boundaries.items():
            stage_plan = self.plan.stages[index]
            kinds = dict(boundary.outputs)
            if boundary.loss is not None:
                kinds["loss"] = boundary.loss
                local_outputs = {**local_outputs, "loss": loss} if loss is not None else local_outputs
            for name, kind in kinds.items():
                whole = torch.empty(kind.shape, dtype=kind.dtype, device=self.state.device)
                if index == self.state.stage and self.comm is not None:
                    whole = whole_output(local_outputs[name], executor, chunk, name)
                if len(stage_plan.devices) < self.plan.num_devices:
                    dist.broadcast(wire(whole), stage_plan.devices[0])
                outputs[name] = whole
        return outputs

    def _executor(self, plan: Plan, programs: Sequence[ChunkProgram]) -> tuple[Executor, dict[Place, BoundaryMetadata]]:
        for bound_programs, executor, boundaries in self._bound:
            if bound_programs is programs:
                return executor, boundaries
        if [(s.devices, s.mesh_shape) for s in plan.stages] != [(s.devices, s.mesh_shape) for s in self.plan.stages]:
            raise ValueError(
                "evaluation runs on the training plan's stages, but got a plan with other devices or meshes"
            )
        own_programs = programs_of(plan, programs, self.state.stage)
        boundaries = exchange_boundaries(plan, boundaries_of(own_programs, self.state.stage))
        uses = [use for boundary in boundaries.values() for use in boundary.inputs]
        input_sharder = InputSharder(plan, uses, self.comm, self.state.device, microbatches=1)
        rank = RankResources(plan, self.comm, self.state, input_sharder, training=False)
        executor = Executor(rank, own_programs, boundaries, StageTransport(self.groups, seed=self.seed))
        self._bound.append((programs, executor, boundaries))
        return executor, boundaries

    def _lend(self, executor: Executor, boundaries: Mapping[Place, BoundaryMetadata]) -> None:
        """Give stages what their evaluation programs read and only other stages hold. Collective; usually there is
        nothing to do."""
        for (index, _), boundary in boundaries.items():
            stage_plan = self.plan.stages[index]
            for name, spec in {**boundary.parameters, **boundary.buffers}.items():
                if index not in self.state.homes.get(name, ()):
                    whole = self.state.whole(name)
                    if index == self.state.stage:
                        box = MeshLayout(stage_plan.devices, stage_plan.mesh_shape, spec).box(
                            whole.shape, self.state.rank
                        )
                        executor.borrowed[name] = cut(whole, box).contiguous()


def whole_output(local: torch.Tensor, executor: Executor, chunk: int, name: str) -> torch.Tensor:
    """An output of a chunk from this rank's part of it, on the devices of its stage. Collective among them."""
    assert executor.comm is not None
    exits = executor.programs[chunk].exits
    spec = next((e.pair.value for e in exits if e.kind == "output" and e.name == name), ())
    steps = steps_between(spec, (R,) * len(spec))  # the loss is whole already
    return apply_steps(local, steps, executor.comm).contiguous()
