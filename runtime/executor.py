"""The action loop: runs one stage's forwards and backwards in the order of the schedule, over ports made once.

Per action: post the receives of the next action, wait for this one's, compute, send. A send is never waited for before
the receives it depends on are posted: buffers are held until a later message proves that the peer has taken them, or
the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler.context import Context, use
from ..compiler.plan import Plan
from ..compiler.program import ChunkProgram
from ..compiler.reshard import apply_steps, steps_between
from ..compiler.schedule import Action, generate
from ..compiler.spec import Spec, without_partials
from .crossmesh import Incoming, Layout, Port, tiles
from .facts import Facts, differentiable_transfers, settled
from .feeding import Feeder
from .gradients import GradientReducer
from .groups import DistributedComm
from .state import State
from .trace import TimedComm, Trace

__all__ = ["Executor"]


@dataclass
class _Way:
    """One transfer at one of its ends: slot or exit ``position``, the port forward, and the one back (None: no
    gradient)."""

    position: int
    forward: Port
    backward: Port | None
    steps: tuple[Any, ...] = ()  # at the target: from its cotangent's spec to one without P


@dataclass
class _Work:
    action: Action
    incoming: list[tuple[int, Port]]  # (slot or exit position, port)
    settled: tuple[int, ...] = ()  # actions of this rank whose sends have arrived once this one's messages are here


class Executor:
    """Runs one rank's programs by the plan's schedule. An idle rank has no program and does nothing in ``run``.

    training=False: forwards only, without autograd, one microbatch.
    """

    def __init__(
        self,
        plan: Plan,
        program: ChunkProgram | None,
        comm: DistributedComm | None,
        state: State,
        facts: Sequence[Facts],
        feeder: Feeder,
        *,
        reducer: GradientReducer | None = None,
        groups: tuple[Any, Any] = (None, None),
        seed: int = 0,
        training: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.plan, self.program, self.comm, self.state, self.feeder = plan, program, comm, state, feeder
        self.reducer, self.training, self.device = reducer, training, state.device
        self.microbatches = plan.microbatches if training else 1
        self.trace = trace or Trace(self.device)
        self.works: list[_Work] = []
        self.borrowed: dict[
            str, torch.Tensor
        ] = {}  # this rank's blocks of tensors that other stages own, for evaluation
        if program is None or comm is None:
            return
        assert state.stage is not None
        self.stage = state.stage
        self.context = Context(TimedComm(comm, self.trace), seed)
        self.forward = program.module.forward
        self.template: list[Any] = [None] * len(program.slots)
        self.buffer_slots: list[tuple[int, str, tuple[Any, ...]]] = []
        self._bind_slots(program)
        self.buffer_exits = [
            (i, exit.name) for i, exit in enumerate(program.exits) if exit.kind == "buffer" and training
        ]
        self.output_exits = [(i, exit.name) for i, exit in enumerate(program.exits) if exit.kind == "output"]
        self.loss_exit = next((i for i, exit in enumerate(program.exits) if exit.kind == "loss"), None)
        self.seeds: dict[float, torch.Tensor] = {}
        self.inward: list[_Way] = []
        self.outward: list[_Way] = []
        self._make_ways(facts, groups)
        self._make_works()

    # ---- construction

    def _bind_slots(self, program: ChunkProgram) -> None:
        rank, here = self.state.rank, self.plan.stages[self.stage]
        for position, slot in enumerate(program.slots):
            if slot.kind == "parameter":
                if slot.name not in self.state.parameters and self.training:
                    raise ValueError(
                        f"stage {self.stage} holds no parameter {slot.name!r}, but its program reads it; plan again"
                    )
                self._bind_value(position, slot.name, slot.pair.value, self.state.parameters.get(slot.name))
            elif slot.kind == "buffer":
                if slot.name not in self.state.buffers and self.training:
                    raise ValueError(
                        f"stage {self.stage} holds no buffer {slot.name!r}, but its program reads it; plan again"
                    )
                self._bind_value(position, slot.name, slot.pair.value, None)
            elif slot.kind == "constant":
                assert self.program is not None
                constants = self.program.constants
                whole = constants[slot.name] if slot.name in constants else constants[slot.node]
                box = Layout(here.devices, here.mesh_shape, slot.pair.value).box(whole.shape, rank)
                index = tuple(slice(start, stop) for start, stop in box)
                self.template[position] = whole[index].contiguous().to(self.device)

    def _bind_value(self, position: int, name: str, spec: Spec, leaf: torch.Tensor | None) -> None:
        """A parameter stays in its slot; a buffer is looked up for every run; both are resharded if this program reads
        another spec."""
        if name not in self.state.parameters and name not in self.state.buffers:
            self.buffer_slots.append((position, name, ()))  # borrowed
            return
        steps = steps_between(self.state.layout(name, self.stage).spec, spec)
        assert not (steps and self.training), (
            f"{name}: a training program reads {spec}, but the plan stores another placement"
        )
        if leaf is not None and not steps:
            self.template[position] = leaf
        else:
            self.buffer_slots.append((position, name, steps))

    def _make_ways(self, facts: Sequence[Facts], groups: tuple[Any, Any]) -> None:
        assert self.program is not None
        rank, back = self.state.rank, differentiable_transfers(self.plan, facts) if self.training else set()
        slots = {slot.name: i for i, slot in enumerate(self.program.slots) if slot.kind == "receive"}
        exits = {exit.name: i for i, exit in enumerate(self.program.exits) if exit.kind == "send"}
        self.back_edges = [(t.source, t.target) for t in self.plan.transfers if (t.node, t.source) in back]
        tag = 0
        for transfer in self.plan.transfers:
            if (
                transfer.node not in facts[transfer.target].receives
                or transfer.node not in facts[transfer.source].sends
            ):
                continue  # an evaluation program may not need it
            source, target = self.plan.stages[transfer.source], self.plan.stages[transfer.target]
            out, kind = facts[transfer.source].sends[transfer.node]
            into, _ = facts[transfer.target].receives[transfer.node]
            ends = [
                (
                    Layout(source.devices, source.mesh_shape, out.value),
                    Layout(target.devices, target.mesh_shape, into.value),
                ),
                (
                    Layout(target.devices, target.mesh_shape, without_partials(into.cotangent)),
                    Layout(source.devices, source.mesh_shape, without_partials(out.cotangent)),
                ),
            ]
            ports: list[Port | None] = []
            for (from_layout, to_layout), group in zip(ends, groups, strict=True):
                messages = tiles(kind.shape, from_layout, to_layout)
                shape = to_layout.local_shape(kind.shape)
                ports.append(Port.make(messages, rank, tag, shape, kind.dtype, device=self.device, group=group))
                tag += len(messages) * self.microbatches
            forward, backward = ports
            assert forward is not None
            if (transfer.node, transfer.source) not in back:
                backward = None
            if transfer.source == self.stage:
                self.outward.append(_Way(exits[transfer.node], forward, backward))
            elif transfer.target == self.stage:
                steps = steps_between(into.cotangent, without_partials(into.cotangent))
                self.inward.append(_Way(slots[transfer.node], forward, backward, steps))

    def _make_works(self) -> None:
        if not self.training:
            action = Action(self.stage, "F", 0)
            self.works = [_Work(action, [(way.position, way.forward) for way in self.inward])]
            return
        schedule = generate(self.plan.schedule, len(self.plan.stages), self.plan.microbatches)
        edges = [(transfer.source, transfer.target) for transfer in self.plan.transfers]
        arrived = settled(schedule.actions, self.stage, edges, self.back_edges)
        for index, action in enumerate(schedule.actions[self.stage]):
            ways = self.inward if action.kind == "F" else self.outward
            ports = [(way.position, way.forward if action.kind == "F" else way.backward) for way in ways]
            self.works.append(_Work(action, [(at, port) for at, port in ports if port is not None], arrived[index]))
        self.last_backward = max((i for i, work in enumerate(self.works) if work.action.kind == "B"), default=-1)

    # ---- running

    def run(
        self, inputs: Mapping[str, torch.Tensor], *, step: int = 0, first_microbatch: int = 0, scale: float = 1.0
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """One accumulation over all microbatches, gradients left in the leaves and summed over partial axes.

        Returns (the mean loss on ranks of the loss stage else None, the outputs of an evaluation on ranks of their
        stages).
        """
        if not self.works:
            return None, {}
        assert self.comm is not None
        self.context.step = step
        mark = self.trace.mark
        self._refresh_buffers()
        if self.reducer is not None and self.training:
            self.reducer.begin()
        losses: list[torch.Tensor] = []
        outputs: dict[str, torch.Tensor] = {}
        held: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        saved: dict[int, tuple[list[Any], tuple[Any, ...]]] = {}
        posted = self._post(self.works[0])
        with use(self.context), torch.set_grad_enabled(self.training):
            for index, work in enumerate(self.works):
                action = work.action
                arriving = posted
                posted = self._post(self.works[index + 1]) if index + 1 < len(self.works) else []
                started = mark()
                arrived = [(position, incoming.wait()) for position, incoming in arriving]
                for done in work.settled:
                    _drain(held.pop(done, []))
                ready = mark()
                self.context.microbatch = first_microbatch + action.microbatch
                if action.kind == "F":
                    self.comm.phase = "forward"
                    arguments, exits = self._forward(inputs, arrived, action.microbatch)
                    worked = mark()
                    if self.outward:
                        held[index] = self._send_forward(exits, action.microbatch)
                    for position, name in self.buffer_exits:
                        self.state.buffers[name] = exits[position].detach()
                    if self.buffer_exits:
                        self._refresh_buffers()
                    if self.loss_exit is not None:
                        losses.append(exits[self.loss_exit].detach())
                    if self.training:
                        saved[action.microbatch] = (arguments, exits)
                    else:
                        outputs = {name: exits[position] for position, name in self.output_exits}
                    del exits, arguments
                else:
                    self.comm.phase = "backward"
                    if index == self.last_backward and self.reducer is not None:
                        self.reducer.arm()
                    arguments, exits = saved.pop(action.microbatch)
                    self._backward(exits, arrived, scale)
                    del exits
                    worked = mark()
                    if self.inward:
                        held[index] = self._send_backward(arguments, action.microbatch)
                    del arguments
                self.trace.action(f"{action.kind}{action.microbatch}", started, ready, worked, mark())
            self.comm.phase = "step"
            if self.reducer is not None and self.training:
                with self.trace.span("gradient"):
                    self.reducer.finish()
        with self.trace.span("drain"):
            for sends in held.values():
                _drain(sends)
        if not losses:
            return None, outputs
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum() / self.microbatches
        return total, outputs

    def _post(self, work: _Work) -> list[tuple[int, Incoming]]:
        return [(position, port.receive(work.action.microbatch)) for position, port in work.incoming]

    def _refresh_buffers(self) -> None:
        for position, name, steps in self.buffer_slots:
            value = self.state.buffers.get(name)
            if value is None:
                leaf = self.state.parameters.get(name)
                value = self.borrowed[name] if leaf is None else leaf.detach()
            assert self.comm is not None
            self.template[position] = apply_steps(value, steps, self.comm) if steps else value

    def _forward(
        self, inputs: Mapping[str, torch.Tensor], arrived: list[tuple[int, torch.Tensor]], microbatch: int
    ) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
        arguments = self.template.copy()
        self.feeder.fill(arguments, inputs, microbatch)
        for position, value in arrived:
            arguments[position] = value
        for way in self.inward:
            if way.backward is not None:
                arguments[way.position].requires_grad_()
        return arguments, self.forward(*arguments)

    def _send_forward(self, exits: tuple[torch.Tensor, ...], microbatch: int) -> list[tuple[Any, torch.Tensor]]:
        started = []
        for way in self.outward:
            started += way.forward.send(exits[way.position].detach(), microbatch)
        return started

    def _backward(self, exits: tuple[torch.Tensor, ...], arrived: list[tuple[int, torch.Tensor]], scale: float) -> None:
        cotangents: dict[int, torch.Tensor] = {}
        for position, value in arrived:  # one tensor may have gone to several stages
            cotangents[position] = cotangents[position] + value if position in cotangents else value
        roots = [exits[position] for position in cotangents if exits[position].requires_grad]
        grads = [value for position, value in cotangents.items() if exits[position].requires_grad]
        if self.loss_exit is not None and exits[self.loss_exit].requires_grad:
            loss = exits[self.loss_exit]
            if scale not in self.seeds:
                self.seeds[scale] = torch.full_like(loss, scale / self.microbatches, requires_grad=False)
            roots.append(loss)
            grads.append(self.seeds[scale])
        if roots:
            torch.autograd.backward(roots, grads)

    def _send_backward(self, arguments: list[Any], microbatch: int) -> list[tuple[Any, torch.Tensor]]:
        assert self.comm is not None
        started = []
        for way in self.inward:
            if way.backward is not None:
                leaf = arguments[way.position]
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                started += way.backward.send(apply_steps(grad, way.steps, self.comm) if way.steps else grad, microbatch)
        return started


def _drain(sends: list[tuple[Any, torch.Tensor]]) -> None:
    for work, _ in sends:
        work.wait()
