"""The exchange of boundary metadata, by which both ends of a transfer derive the same tiles.

A rank lowers the chunks of its own stage only. The plan says who sends what to whom; the pairs and types at both ends,
which inputs and buffers a program reads, and along which links a gradient can come back, are read off the programs and
exchanged. A *place* is (stage, chunk), a *link* a tensor from one place to another: a transfer if their stages differ,
else it stays on its rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ...compiler.ir.program import ChunkProgram
from ...compiler.pipeline.schedule import Action, Place
from ...compiler.plan.boundaries import BoundaryMetadata, metadata_of, places_of
from ...compiler.plan.plan import Plan

__all__ = ["boundaries_of", "exchange_boundaries", "find_settled_sends", "programs_of"]


def exchange_boundaries(plan: Plan, mine: Sequence[BoundaryMetadata]) -> dict[Place, BoundaryMetadata]:
    """Return the boundary metadata of every place, in the order in which data flow, on every rank. mine: those of this
    rank's chunks. Collective over the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    rows = [everyone[stage.devices[0]] for stage in plan.stages]
    assert all(len(row) == len(stage.chunks) for row, stage in zip(rows, plan.stages)), "a rank gave too few programs"
    return {(stage, chunk): rows[stage][chunk] for stage, chunk in places_of(plan)}


_DIRECTION = {"F": "F", "B": "B", "I": "B"}  # of the messages that an action takes and gives; W has none

_Ends = tuple[Place, Place]


def find_settled_sends(
    actions: Sequence[Sequence[Action]], stage: int, edges: Sequence[_Ends], back_edges: Sequence[_Ends]
) -> list[tuple[int, ...]]:
    """For each action of ``stage``: its earlier actions whose sends are known to have arrived by then.

    edges: (source, target) of the messages between stages; back_edges: those along which a gradient comes back. A stage
    that has begun an action has taken every message that its actions so far needed. Who is known to have begun what
    travels with the messages (a vector clock), so a peer that never answers is heard of through the others.
    """
    senders: defaultdict[tuple[str, Place], list[Place]] = defaultdict(list)  # (direction, taker) → who sends to it
    takers: defaultdict[tuple[str, Place], list[Place]] = defaultdict(list)
    for direction, ends in (("F", edges), ("B", [(b, a) for a, b in back_edges])):
        for source, target in ends:
            senders[direction, target].append(source)
            takers[direction, source].append(target)
    where = {(_DIRECTION[a.kind], a.microbatch, (a.stage, a.chunk)): index
             for row in actions for index, a in enumerate(row) if a.kind in _DIRECTION}  # fmt: skip

    def others(action: Action, who: Mapping[tuple[str, Place], Sequence[Place]]) -> list[tuple[int, int]]:
        """(stage, action there) at the other ends of an action's messages."""
        direction = _DIRECTION.get(action.kind, "")
        places = who.get((direction, (action.stage, action.chunk)), ())
        return [(place[0], where[direction, action.microbatch, place]) for place in places]

    clocks: list[list[list[int]]] = [[] for _ in actions]  # stage, action → the last action known of, per stage
    progressed = True
    while progressed:
        progressed = False
        for stage_index, row in enumerate(actions):
            while len(clocks[stage_index]) < len(row):
                index = len(clocks[stage_index])
                sources = others(row[index], senders)
                if any(len(clocks[peer]) <= at for peer, at in sources):
                    break
                known_clocks = [clocks[peer][at] for peer, at in sources] + clocks[stage_index][-1:]
                clock = (
                    [max(column) for column in zip(*known_clocks, strict=True)] if known_clocks else [-1] * len(actions)
                )
                clock[stage_index] = index
                clocks[stage_index].append(clock)
                progressed = True
    assert all(len(clock) == len(row) for clock, row in zip(clocks, actions, strict=True)), "the schedule deadlocks"
    waiting: dict[int, list[tuple[int, int]]] = {}  # my action → (peer, the peer's action that takes my message)
    settled: list[tuple[int, ...]] = []
    for index, action in enumerate(actions[stage]):
        clock = clocks[stage][index]
        done = tuple(i for i, taken in waiting.items() if all(clock[peer] >= at for peer, at in taken))
        for i in done:
            del waiting[i]
        settled.append(done)
        if taken := others(action, takers):
            waiting[index] = taken
    return settled


def programs_of(plan: Plan, programs: Sequence[ChunkProgram], stage: int | None) -> tuple[ChunkProgram, ...]:
    """A rank's programs; ValueError unless there is one for each chunk of its stage (None: an idle rank)."""
    wanted = 0 if stage is None else len(plan.stages[stage].chunks)
    if len(programs) != wanted:
        raise ValueError(
            f"a rank needs one program per chunk of its stage, but got {len(programs)} for {wanted} chunks of stage "
            f"{stage}; lower every chunk"
        )
    return tuple(programs)


def boundaries_of(programs: Sequence[ChunkProgram], stage: int | None) -> list[BoundaryMetadata]:
    """Return the boundary metadata of a rank's programs."""
    return [metadata_of(program, stage or 0, chunk) for chunk, program in enumerate(programs)]
