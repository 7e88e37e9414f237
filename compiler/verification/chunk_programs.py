"""The chunks of a plan as local programs in the order of the model, and the messages between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from ..ir.graph import Graph
from ..ir.program import ChunkProgram
from ..ir.spec import Spec
from ..pipeline.families import generate
from ..pipeline.schedule import Action, Place, run_order
from ..plan.boundaries import links_of, metadata_of, places_of
from ..plan.cross_mesh import MeshLayout
from ..plan.lower import lower
from ..plan.plan import Plan

__all__ = ["PlacedChunk", "actions_of", "parts_of", "shrunk"]

MICROBATCHES = 2  # enough to see that gradients add up


@dataclass(frozen=True, eq=False)
class PlacedChunk:
    """One chunk of a plan. ``index``: its place in the model; ``origins``: receive → index of the part that sends
    it."""

    index: int
    stage: int
    chunk: int
    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    program: ChunkProgram
    origins: Mapping[str, int]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the local program but for its end."""
        return [node for node in self.program.graph.nodes if node.op != "output"]

    @property
    def results(self) -> list[Node]:
        """The nodes that the program returns, one per exit."""
        end = next(node for node in self.program.graph.nodes if node.op == "output")
        return list(end.args[0])

    def layout(self, spec: Spec) -> MeshLayout:
        """The layout of a tensor of this spec on the part's devices."""
        return MeshLayout(self.devices, self.mesh_shape, spec)


def shrunk(plan: Plan, graph: Graph) -> tuple[Plan, Graph]:
    """The plan with few and small microbatches, such that all its cuts stay even, and the graph at their extent."""
    count = min(plan.microbatches, MICROBATCHES)
    devices = math.lcm(*(len(stage.devices) for stage in plan.stages))
    extent = plan.microbatch_size
    for size in range(max(devices, 2), extent):
        if extent % size == 0 and size % devices == 0:
            small = replace(plan, global_batch=count * size, microbatches=count)
            try:
                at = graph.with_batch(size)
                for stage, here in enumerate(plan.stages):
                    for chunk in range(len(here.chunks)):
                        lower(at, small, stage, chunk)
            except (ValueError, AssertionError):  # this extent is too small for some label: the next one
                continue
            return small, at
    return replace(plan, global_batch=count * extent, microbatches=count), graph.with_batch(extent)


def parts_of(plan: Plan, graph: Graph) -> list[PlacedChunk]:
    """Every chunk lowered, in the order of the model. Raises ValueError for labels without a program."""
    places = places_of(plan)
    programs = {place: lower(graph, plan, *place) for place in places}
    links = links_of(plan, {place: metadata_of(program, *place) for place, program in programs.items()})
    origins: dict[Place, dict[str, int]] = {place: {} for place in places}
    for link in links:
        origins[link.target][link.node] = places.index(link.source)
    return [
        PlacedChunk(index, place[0], place[1], plan.stages[place[0]].devices, plan.stages[place[0]].mesh_shape,
             programs[place], origins[place])
        for index, place in enumerate(places)
    ]  # fmt: skip


def actions_of(plan: Plan, parts: list[PlacedChunk]) -> list[Action]:
    """All actions of the plan's schedule in an order in which they can run. Raises ValueError if there is none."""
    schedule = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked)
    virtual = {place: q for q, place in enumerate(schedule.places())}
    at = [virtual[part.stage, part.chunk] for part in parts]
    edges = [(at[source], at[part.index]) for part in parts for source in part.origins.values()]
    order, stuck = run_order(schedule, list(dict.fromkeys(edges)))
    if stuck:
        raise ValueError(f"a schedule must come to its end, but got {plan.schedule} that waits in {stuck}; plan again")
    return order
