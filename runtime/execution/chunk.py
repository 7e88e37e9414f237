"""One chunk of the model on this rank: its program, bound to parameters, buffers and the ports of its messages.

A boundary tensor travels by a port between stages. Between two chunks of one stage it stays on the rank, resharded if
the two programs want it in different specs, and its cotangent comes back the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...compiler.ir.ops.weight_gathers import Gathers
from ...compiler.ir.program import ChunkProgram, Slot
from ...compiler.ir.reshard import Steps, apply_steps, run_steps, steps_between
from ...compiler.ir.spec import Spec, without_partials
from ...compiler.pipeline.schedule import Place
from ...compiler.plan.boundaries import BoundaryMetadata, BoundaryTransfer
from ...compiler.plan.cross_mesh import MeshLayout, tiles
from ...compiler.plan.plan import Plan
from ...compiler.plan.segments import repeating
from ..parameters.state import ParameterState
from ..transport.cross_mesh import Port
from ..transport.process_groups import DistributedComm
from ..transport.shared_memory import SharedMemoryMessages
from .compilation import Compiler
from .input_sharding import InputSharder
from .split_backward import SplitProgram, split_program

__all__ = ["BoundChunk", "Groups", "LocalTransfer", "RankResources", "StageTransport", "bind_links"]

Sends = list[tuple[Any, torch.Tensor]]
"""(work, buffer) of messages that are being sent"""

Groups = Callable[[Place, Place], tuple[Any, Any]]
"""(source, target) → the process groups of values and of cotangents between these places"""


@dataclass
class TransferEnd:
    """One transfer between stages, as the chunk at one of its ends sees it."""

    #: the slot (at the target) or exit (at the source) of the chunk's program
    position: int
    #: the port of the values
    forward: Port
    #: the port of the cotangents; None: no gradient comes back
    backward: Port | None
    #: at the target: the reshard of its cotangent that sums partial values before they are sent
    steps: Steps = ()


@dataclass
class LocalTransfer:
    """A tensor that goes from one chunk to another of the same stage, and so stays on its rank."""

    #: the exit of the sending program
    exit: int
    #: the slot of the receiving program
    slot: int
    #: the reshard of the value on its way
    forward_steps: Steps
    #: the reshard of the cotangent on its way back; None: no gradient
    backward_steps: Steps | None
    #: values and cotangents that are sent and not yet read, by microbatch
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    cotangents: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RankResources:
    """The part of a session that all chunks of one rank share, in training or in an evaluation."""

    plan: Plan
    #: None on an idle rank
    comm: DistributedComm | None
    state: ParameterState
    input_sharder: InputSharder
    #: False: forwards only, without autograd, one microbatch
    training: bool = True
    #: the compiler of training programs; None: they run op by op
    compiler: Compiler | None = None


@dataclass(frozen=True)
class StageTransport:
    """The channels by which boundary tensors go from stage to stage."""

    groups: Groups = lambda source, target: (None, None)
    #: messages to ranks of the same host; None: all go by the groups
    shared_memory: SharedMemoryMessages | None = None
    #: the seed of the tensor codecs that round gradients at random
    seed: int = 0


class BoundChunk:
    """The program of one chunk with everything that a microbatch needs from this rank.

    splits_backward: backwards come in two halves, I and W; see the module ``split_backward``.
    """

    def __init__(self, rank: RankResources, place: Place, program: ChunkProgram, splits_backward: bool) -> None:
        assert rank.comm is not None, "an idle rank has no chunks"
        self.plan, self.place, self.program, self.comm = rank.plan, place, program, rank.comm
        self.state, self.input_sharder, self.training = rank.state, rank.input_sharder, rank.training
        compiler = rank.compiler
        program.move_to(self.state.device)
        self.halves: SplitProgram | None = split_program(program) if splits_backward else None
        module = program.module if self.halves is None else self.halves.module
        self.gathers = Gathers(module.graph)
        segments = program.segments
        if compiler is not None:
            module, segments = compiler.compiled(program, module, () if self.halves is None else self.halves.late)
        self.forward: Callable[..., tuple[torch.Tensor, ...]] = repeating(module, segments).forward
        self.template: list[Any] = [None] * len(program.slots)
        self.buffer_slots: list[tuple[int, str, Steps]] = []
        self.derived: list[tuple[int, torch.Tensor, Steps, Steps]] = []  # parameters that it reads in another placement
        for position, slot in enumerate(program.slots):
            self._bind(position, slot)
        exits = list(enumerate(program.exits))
        self.buffer_exits = [(i, exit.name) for i, exit in exits if exit.kind == "buffer" and rank.training]
        self.output_exits = [(i, exit.name) for i, exit in exits if exit.kind == "output"]
        self.loss_exit = next((i for i, exit in exits if exit.kind == "loss"), None)
        self.incoming: list[TransferEnd] = []
        self.outgoing: list[TransferEnd] = []
        self.local_inputs: list[LocalTransfer] = []  # from other chunks of this stage
        self.local_outputs: list[LocalTransfer] = []
        self.seeds: dict[float, torch.Tensor] = {}

    # ---- construction

    def _bind(self, position: int, slot: Slot) -> None:
        stage, rank = self.place[0], self.state.rank
        tensors_of_kind: dict[str, Mapping[str, torch.Tensor]] = {
            "parameter": self.state.parameters, "buffer": self.state.buffers,
        }  # fmt: skip
        if slot.kind in tensors_of_kind:
            if self.training and slot.name not in tensors_of_kind[slot.kind]:
                raise ValueError(
                    f"stage {stage} holds no {slot.kind} {slot.name!r}, but its program reads it; plan again"
                )
            self._bind_value(position, slot)
        elif slot.kind == "constant":
            stage_plan, constants = self.plan.stages[stage], self.program.constants
            whole = constants[slot.name] if slot.name in constants else constants[slot.node]
            box = MeshLayout(stage_plan.devices, stage_plan.mesh_shape, slot.pair.value).box(whole.shape, rank)
            index = tuple(slice(start, stop) for start, stop in box)
            self.template[position] = whole[index].contiguous().to(self.state.device)

    def _bind_value(self, position: int, slot: Slot) -> None:
        """A parameter stays in its slot; a buffer is looked up for every run; both are resharded if this program reads
        another spec than its stage keeps (for another of its chunks, or for training)."""
        name, leaf = slot.name, self.state.parameters.get(slot.name)
        if leaf is None and name not in self.state.buffers:
            self.buffer_slots.append((position, name, ()))  # borrowed
            return
        steps = steps_between(self.state.layout(name, self.place[0]).spec, slot.pair.value)
        if leaf is None or (not self.training and (steps or leaf.dtype != slot.type.dtype)):
            self.buffer_slots.append((position, name, steps))
            return
        leaf_spec = self.plan.stages[self.place[0]].homes[name].leaf
        back = steps_between(slot.pair.cotangent, leaf_spec.cotangent) if slot.requires_grad and self.training else ()
        if steps or back:
            self.derived.append((position, leaf, steps, back))
        else:
            self.template[position] = leaf

    # ---- running

    def refresh(self, borrowed: Mapping[str, torch.Tensor]) -> None:
        """Look up buffers, and parameters that an evaluation reads in another placement."""
        for position, name, steps in self.buffer_slots:
            value = self.state.buffers.get(name)
            if value is None:
                leaf = self.state.parameters.get(name)
                value = borrowed[name] if leaf is None else leaf.detach()
                value = value.to(self.program.slots[position].type.dtype)
            self.template[position] = apply_steps(value, steps, self.comm) if steps else value

    def run(
        self, inputs: Mapping[str, torch.Tensor], arrived: Iterable[tuple[int, torch.Tensor]], microbatch: int
    ) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
        """Run the forward of one microbatch; return its (arguments, exits)."""
        arguments = self.template.copy()
        self.input_sharder.fill(arguments, inputs, microbatch, self.place[1])
        for position, value in arrived:
            arguments[position] = value
        for transfer in self.local_inputs:
            arguments[transfer.slot] = transfer.values.pop(microbatch)
            if transfer.backward_steps is not None:
                arguments[transfer.slot].requires_grad_()
        for end in self.incoming:
            if end.backward is not None:
                arguments[end.position].requires_grad_()
        for position, leaf, ahead, back in self.derived:
            arguments[position] = run_steps(leaf, ahead, back)
        if self.halves is not None:
            self.halves.begin(microbatch)
        with self.gathers.forward(arguments):
            return arguments, self.forward(*arguments)

    def send_values(self, exits: tuple[torch.Tensor, ...], microbatch: int, step: int = 0) -> Sends:
        """Start the messages of a forward, and lay down what other chunks of this rank read."""
        started: Sends = []
        for transfer in self.local_outputs:
            value = exits[transfer.exit].detach()
            # another tensor than what this chunk keeps: it becomes a leaf of the other chunk's graph
            transfer.values[microbatch] = apply_steps(value, transfer.forward_steps, self.comm).detach()
        for end in self.outgoing:
            started += end.forward.send(exits[end.position].detach(), microbatch, step)
        return started

    def backward(
        self, exits: tuple[torch.Tensor, ...], arrived: Iterable[tuple[int, torch.Tensor]], microbatch: int,
        scale: float,
    ) -> None:  # fmt: skip
        """Compute the cotangents of all arguments that have one. A split program puts off those of its weights."""
        cotangents: dict[int, torch.Tensor] = {}
        for position, value in arrived:  # one tensor may have gone to several chunks
            cotangents[position] = cotangents[position] + value if position in cotangents else value
        for transfer in self.local_outputs:
            if transfer.backward_steps is not None:
                value = transfer.cotangents.pop(microbatch)
                cotangents[transfer.exit] = cotangents[transfer.exit] + value if transfer.exit in cotangents else value
        roots = [exits[position] for position in cotangents if exits[position].requires_grad]
        grads = [value for position, value in cotangents.items() if exits[position].requires_grad]
        if self.loss_exit is not None and exits[self.loss_exit].requires_grad:
            loss = exits[self.loss_exit]
            if scale not in self.seeds:
                self.seeds[scale] = torch.full_like(loss, scale, requires_grad=False)
            roots.append(loss)
            grads.append(self.seeds[scale])
        if roots:
            torch.autograd.backward(roots, grads)

    def send_cotangents(self, arguments: list[Any], microbatch: int, step: int = 0) -> Sends:
        """Start the messages of a backward, and lay down what other chunks of this rank wait for."""
        started: Sends = []
        for transfer in self.local_inputs:
            if transfer.backward_steps is not None:
                transfer.cotangents[microbatch] = apply_steps(
                    _gradient(arguments[transfer.slot]), transfer.backward_steps, self.comm
                )
        for end in self.incoming:
            if end.backward is not None:
                grad = _gradient(arguments[end.position])
                grad = apply_steps(grad, end.steps, self.comm) if end.steps else grad
                started += end.backward.send(grad, microbatch, step)
        return started

    def touches(self, kind: str) -> list[str]:
        """The trainable parameters to whose gradients an action of this kind ("B", "I" or "W") adds."""
        slots = self.program.slots
        if self.halves is None or kind == "B":
            return [slot.name for slot in slots if slot.kind == "parameter" and slot.requires_grad]
        return [slots[position].name for position in (self.halves.early if kind == "I" else self.halves.late)]


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# ---- messages


def bind_links(
    chunks: Sequence[BoundChunk],
    plan: Plan,
    boundaries: Mapping[Place, BoundaryMetadata],
    links: Sequence[BoundaryTransfer],
    differentiable: set[tuple[str, Place]],
    transport: StageTransport,
    microbatches: int,
) -> None:
    """Give the chunks of this rank the ports of their boundary tensors.

    differentiable: (node, source place) of the links along which a gradient comes back. microbatches: how many have
    tags of their own. Every rank walks all links in the same order, also those that are not its own, so that tags are
    counted alike.
    """
    local_chunks = {part.place: part for part in chunks}
    tag = 0
    for link in links:
        (out, kind), (into, _) = boundaries[link.source].sends[link.node], boundaries[link.target].receives[link.node]
        returns = (link.node, link.source) in differentiable
        if link.is_local:
            if link.source in local_chunks:
                source, target = local_chunks[link.source], local_chunks[link.target]
                ahead = steps_between(out.value, into.value)
                behind = steps_between(into.cotangent, out.cotangent) if returns else None
                inside = LocalTransfer(_exit(source, link.node), _slot(target, link.node), ahead, behind)
                source.local_outputs.append(inside)
                target.local_inputs.append(inside)
            continue
        state = chunks[0].state
        shape, (forward_group, backward_group) = kind.shape, transport.groups(link.source, link.target)
        source_spec, target_spec = _layout(plan, link.source, out.value), _layout(plan, link.target, into.value)
        ports: list[Port] = []
        for source_layout, target_layout, group in (
            (source_spec, target_spec, forward_group),
            (
                _layout(plan, link.target, without_partials(into.cotangent)),
                _layout(plan, link.source, without_partials(out.cotangent)),
                backward_group,
            ),
        ):
            messages = tiles(shape, source_layout, target_layout)
            local = target_layout.local_shape(shape)
            ports.append(
                Port.make(
                    messages, state.rank, tag, local, kind.dtype, device=state.device, group=group,
                    code=plan.code("activations"), seed=transport.seed if ports else None,
                    shared_memory=transport.shared_memory,
                )
            )  # fmt: skip
            tag += len(messages) * microbatches
        forward, backward = ports[0], ports[1] if returns else None
        if link.source in local_chunks:
            source = local_chunks[link.source]
            source.outgoing.append(TransferEnd(_exit(source, link.node), forward, backward))
        elif link.target in local_chunks:
            target = local_chunks[link.target]
            steps = steps_between(into.cotangent, without_partials(into.cotangent))
            target.incoming.append(TransferEnd(_slot(target, link.node), forward, backward, steps))


def _layout(plan: Plan, place: Place, spec: Spec) -> MeshLayout:
    stage = plan.stages[place[0]]
    return MeshLayout(stage.devices, stage.mesh_shape, spec)


def _exit(part: BoundChunk, node: str) -> int:
    return next(i for i, exit in enumerate(part.program.exits) if exit.kind == "send" and exit.name == node)


def _slot(part: BoundChunk, node: str) -> int:
    return next(i for i, slot in enumerate(part.program.slots) if slot.kind == "receive" and slot.name == node)
