"""What the stages must know of each other, published once, so that both ends of a transfer derive the same tiles.

A rank lowers its own stage only. The plan says who sends what to whom; the pairs and types at both ends, which inputs
and buffers a program reads, and along which transfers a gradient can come back, are read off the programs and
exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.fx

from ..compiler.graph import TensorType
from ..compiler.plan import Plan
from ..compiler.program import ChunkProgram
from ..compiler.schedule import Action
from ..compiler.spec import Pair, Spec
from .feeding import InputUse

__all__ = ["Facts", "differentiable_transfers", "exchange", "facts_of", "settled"]


@dataclass(frozen=True)
class Facts:
    """What other stages must know of one.

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


def facts_of(program: ChunkProgram, stage: int) -> Facts:
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
            InputUse(stage, index, slot.name, slot.type, slot.batch_dim, slot.pair.value)
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


def exchange(plan: Plan, mine: Facts | None) -> list[Facts]:
    """Every stage's facts on every rank. Collective over the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    facts = [everyone[stage.devices[0]] for stage in plan.stages]
    assert all(fact is not None for fact in facts), "a rank with a stage gave no program"
    return facts


def differentiable_transfers(plan: Plan, facts: Sequence[Facts]) -> set[tuple[str, int]]:
    """(node, source stage) of the float tensors that a trainable parameter can reach: only those have a way back."""
    found: set[tuple[str, int]] = set()
    origin = {(transfer.node, transfer.target): transfer.source for transfer in plan.transfers}
    for stage, fact in enumerate(facts):  # in stage order: transfers go to later stages only
        for node, (trainable, through) in fact.flows.items():
            if trainable or any((name, origin[name, stage]) in found for name in through):
                found.add((node, stage))
    return found


def settled(
    actions: Sequence[Sequence[Action]],
    stage: int,
    edges: Sequence[tuple[int, int]],
    back_edges: Sequence[tuple[int, int]],
) -> list[tuple[int, ...]]:
    """For each action of ``stage``: its earlier actions whose sends are known to have arrived by then.

    A stage that has begun an action has taken every message that its actions so far needed. Who is known to have begun
    what travels with the messages (a vector clock), so a peer that never answers is heard of through the others.
    """
    senders = {"F": [(b, a) for a, b in edges], "B": list(back_edges)}  # (receiver, sender)
    where = [{(a.kind, a.microbatch): i for i, a in enumerate(row)} for row in actions]
    clocks: list[list[list[int]]] = [
        [] for _ in actions
    ]  # per stage and action: the last action known to have begun, per stage
    moved = True
    while moved:
        moved = False
        for here, row in enumerate(actions):
            while len(clocks[here]) < len(row):
                index = len(clocks[here])
                key = (row[index].kind, row[index].microbatch)
                sources = [(peer, where[peer][key]) for taker, peer in senders[key[0]] if taker == here]
                if any(len(clocks[peer]) <= at for peer, at in sources):
                    break
                heard = [clocks[peer][at] for peer, at in sources] + clocks[here][-1:]
                clock = [max(column) for column in zip(*heard, strict=True)] if heard else [-1] * len(actions)
                clock[here] = index
                clocks[here].append(clock)
                moved = True
    assert all(len(clock) == len(row) for clock, row in zip(clocks, actions, strict=True)), "the schedule deadlocks"
    waiting: dict[int, dict[int, int]] = {}  # my action → peer → the peer's action that takes my message
    out: list[tuple[int, ...]] = []
    for index, action in enumerate(actions[stage]):
        clock = clocks[stage][index]
        done = tuple(i for i, takers in waiting.items() if all(clock[peer] >= at for peer, at in takers.items()))
        for i in done:
            del waiting[i]
        out.append(done)
        key = (action.kind, action.microbatch)
        takers = {taker: where[taker][key] for taker, peer in senders[action.kind] if peer == stage}
        if takers:
            waiting[index] = takers
    return out
