"""What the chunks must know of each other, published once, so that both ends of a transfer derive the same tiles.

A rank lowers the chunks of its own stage only. The plan says who sends what to whom; the pairs and types at both ends,
which inputs and buffers a program reads, and along which links a gradient can come back, are read off the programs and
exchanged. A *place* is (stage, chunk), a *link* a tensor from one place to another: a transfer if their stages differ,
else it stays on its rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.fx

from ..compiler.graph import TensorType
from ..compiler.plan import Plan
from ..compiler.program import ChunkProgram
from ..compiler.schedule import Action, Place, virtual_order
from ..compiler.spec import Pair, Spec
from .feeding import InputUse

__all__ = [
    "Facts", "Link", "differentiable_links", "exchange", "facts_of", "links_of", "own_facts", "places_of",
    "programs_of", "settled",
]  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What other chunks must know of one.

    flows: send → (does it depend on a trainable parameter, the receives on which it depends). buffers: those read or
    written, with their specs; written: those that get a new value.
    """

    receives: Mapping[str, tuple[Pair, TensorType]] = field(default_factory=dict)
    sends: Mapping[str, tuple[Pair, TensorType]] = field(default_factory=dict)
    flows: Mapping[str, tuple[bool, frozenset[str]]] = field(default_factory=dict)
    inputs: tuple[InputUse, ...] = ()
    parameters: Mapping[str, Spec] = field(default_factory=dict)
    buffers: Mapping[str, Spec] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    outputs: Mapping[str, TensorType] = field(default_factory=dict)
    loss: TensorType | None = None


@dataclass(frozen=True)
class Link:
    """A tensor that the chunk at ``source`` makes and the one at ``target`` reads."""

    node: str
    source: Place
    target: Place

    @property
    def is_local(self) -> bool:
        """Whether both chunks lie on one stage: no message then."""
        return self.source[0] == self.target[0]


def facts_of(program: ChunkProgram, stage: int, chunk: int = 0) -> Facts:
    """Read one chunk's facts off its program."""
    reach: dict[torch.fx.Node, frozenset[int]] = {}
    flows: dict[str, tuple[bool, frozenset[str]]] = {}
    slots = program.slots
    position = 0
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            reach[node] = frozenset([position])
            position += 1
        elif node.op != "output":
            reach[node] = frozenset().union(*(reach[n] for n in node.all_input_nodes))
        else:
            for exit, value in zip(program.exits, node.args[0], strict=True):
                if exit.kind == "send":
                    touched = [slots[index] for index in reach[value]]
                    trainable = exit.type.is_float and any(s.kind == "parameter" and s.requires_grad for s in touched)
                    through = frozenset(s.name for s in touched if s.kind == "receive" and exit.type.is_float)
                    flows[exit.name] = (trainable, through)
    return Facts(
        receives={slot.name: (slot.pair, slot.type) for slot in slots if slot.kind == "receive"},
        sends={exit.name: (exit.pair, exit.type) for exit in program.exits if exit.kind == "send"},
        flows=flows,
        inputs=tuple(
            InputUse(stage, index, slot.name, slot.type, slot.batch_dim, slot.pair.value, chunk)
            for index, slot in enumerate(slots)
            if slot.kind == "input"
        ),
        parameters={slot.name: slot.pair.value for slot in slots if slot.kind == "parameter"},
        buffers={
            **{exit.name: exit.pair.value for exit in program.exits if exit.kind == "buffer"},
            **{slot.name: slot.pair.value for slot in slots if slot.kind == "buffer"},
        },
        written=tuple(exit.name for exit in program.exits if exit.kind == "buffer"),
        outputs={exit.name: exit.type for exit in program.exits if exit.kind == "output"},
        loss=next((exit.type for exit in program.exits if exit.kind == "loss"), None),
    )


def places_of(plan: Plan) -> tuple[Place, ...]:
    """Every (stage, chunk) of the plan, in the order in which data flow."""
    if plan.num_chunks == 1:
        return tuple((stage, 0) for stage in range(len(plan.stages)))
    return virtual_order(plan.schedule, len(plan.stages), plan.num_chunks)


def exchange(plan: Plan, mine: Sequence[Facts]) -> dict[Place, Facts]:
    """Every place's facts, in the order in which data flow, on every rank. mine: of this rank's chunks. Collective over
    the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    rows = [everyone[stage.devices[0]] for stage in plan.stages]
    assert all(len(row) == len(stage.chunks) for row, stage in zip(rows, plan.stages)), "a rank gave too few programs"
    return {(stage, chunk): rows[stage][chunk] for stage, chunk in places_of(plan)}


def links_of(plan: Plan, facts: Mapping[Place, Facts]) -> list[Link]:
    """Every tensor that goes from one chunk to another, the plan's transfers in their order first; those of transfers
    that neither program needs (of an evaluation) are left out. ValueError if a chunk would wait for what nobody
    sends."""
    links = [
        Link(t.node, (t.source, t.source_chunk), (t.target, t.target_chunk))
        for t in plan.transfers
        if t.node in facts[t.source, t.source_chunk].sends and t.node in facts[t.target, t.target_chunk].receives
    ]
    makers = {(place[0], node): place for place, fact in facts.items() for node in fact.sends}
    told = {(link.node, link.target) for link in links}
    for target, fact in facts.items():
        for node in fact.receives:
            if (node, target) not in told:
                if (target[0], node) not in makers:
                    raise ValueError(
                        f"every tensor that a chunk reads comes from another, but got no transfer of {node!r} to chunk "
                        f"{target[1]} of stage {target[0]}; plan again"
                    )
                links.append(Link(node, makers[target[0], node], target))
    return links


def differentiable_links(links: Sequence[Link], facts: Mapping[Place, Facts]) -> set[tuple[str, Place]]:
    """(node, source) of the float tensors that a trainable parameter can reach: only those have a way back."""
    found: set[tuple[str, Place]] = set()
    origin = {(link.node, link.target): link.source for link in links}
    for place, fact in facts.items():  # as data flow: links go to later places only
        for node, (trainable, through) in fact.flows.items():
            if trainable or any((name, origin[name, place]) in found for name in through):
                found.add((node, place))
    return found


_DIRECTION = {"F": "F", "B": "B", "I": "B"}  # of the messages that an action takes and gives; W has none

_Ends = tuple[Place, Place]


def settled(
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
        found = who.get((direction, (action.stage, action.chunk)), ())
        return [(place[0], where[direction, action.microbatch, place]) for place in found]

    clocks: list[list[list[int]]] = [[] for _ in actions]  # stage, action → the last action known of, per stage
    moved = True
    while moved:
        moved = False
        for here, row in enumerate(actions):
            while len(clocks[here]) < len(row):
                index = len(clocks[here])
                sources = others(row[index], senders)
                if any(len(clocks[peer]) <= at for peer, at in sources):
                    break
                heard = [clocks[peer][at] for peer, at in sources] + clocks[here][-1:]
                clock = [max(column) for column in zip(*heard, strict=True)] if heard else [-1] * len(actions)
                clock[here] = index
                clocks[here].append(clock)
                moved = True
    assert all(len(clock) == len(row) for clock, row in zip(clocks, actions, strict=True)), "the schedule deadlocks"
    waiting: dict[int, list[tuple[int, int]]] = {}  # my action → (peer, the peer's action that takes my message)
    out: list[tuple[int, ...]] = []
    for index, action in enumerate(actions[stage]):
        clock = clocks[stage][index]
        done = tuple(i for i, taken in waiting.items() if all(clock[peer] >= at for peer, at in taken))
        for i in done:
            del waiting[i]
        out.append(done)
        if taken := others(action, takers):
            waiting[index] = taken
    return out


def programs_of(plan: Plan, programs: Sequence[ChunkProgram], stage: int | None) -> tuple[ChunkProgram, ...]:
    """A rank's programs; ValueError unless there is one for each chunk of its stage (None: an idle rank)."""
    wanted = 0 if stage is None else len(plan.stages[stage].chunks)
    if len(programs) != wanted:
        raise ValueError(
            f"a rank needs one program per chunk of its stage, but got {len(programs)} for {wanted} chunks of stage "
            f"{stage}; lower every chunk"
        )
    return tuple(programs)


def own_facts(programs: Sequence[ChunkProgram], stage: int | None) -> list[Facts]:
    """Of a rank's programs."""
    return [facts_of(program, stage or 0, chunk) for chunk, program in enumerate(programs)]
