"""The action loop: runs the forwards and backwards of one stage's chunks in the order of the schedule, over ports made
once.

Per action: post the receives of the next action, wait for this one's, compute, send. A send is never waited for before
the receives it depends on are posted: buffers are held until a later message proves that the peer has taken them, or
the step ends. The schedule is checked over the edges that the programs really have before anything runs.

The loss of a batch: the mean of its microbatches', summed once over the axes where each device has an addend.

The sum travels while the last gradients do. Over an axis on which replicas step by themselves it is p times a
replica's own share, as if all p had its samples (``replicas.ReplicaComm``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...compiler.ir.comm import Context, use_context
from ...compiler.ir.program import ChunkProgram
from ...compiler.pipeline.families import generate
from ...compiler.pipeline.schedule import Action, Place, validate
from ...compiler.plan.boundaries import BoundaryMetadata, differentiable_links, links_of, places_of
from ..parameters.gradients import GradientReducer
from ..profiling.trace import TimedComm, Trace, named
from ..transport.cross_mesh import Incoming, Port
from ..transport.process_groups import DistributedComm, PendingCollective
from ..transport.progress import PROGRESS
from .boundary_metadata import find_settled_sends
from .chunk import BoundChunk, RankResources, Sends, StageTransport, bind_links
from .replicas import ReplicaComm

__all__ = ["BatchLoss", "Executor"]


@dataclass
class _Work:
    action: Action
    label: str
    part: BoundChunk
    #: (slot or exit position, port) of the messages that it waits for
    incoming: list[tuple[int, Port]]
    #: actions of this rank whose sends have arrived once the messages of this one are here
    settled: tuple[int, ...] = ()
    #: ids of the parameters whose gradients are whole after it
    final: frozenset[int] = frozenset()


class Executor:
    """Runs one rank's programs, one per chunk of its stage, by the plan's schedule. An idle rank has none and does
    nothing in ``run``.

    independent_axes: the mesh axes over which replicas step by themselves. Raises ScheduleError for a schedule that
    cannot run over the plan's edges.
    """

    def __init__(
        self,
        rank: RankResources,
        programs: Sequence[ChunkProgram],
        boundaries: Mapping[Place, BoundaryMetadata],
        transport: StageTransport,
        *,
        reducer: GradientReducer | None = None,
        trace: Trace | None = None,
        independent_axes: Sequence[int] = (),
    ) -> None:
        plan, comm, state, training = rank.plan, rank.comm, rank.state, rank.training
        self.plan, self.programs, self.comm, self.state = plan, programs, comm, state
        self.input_sharder, self.reducer, self.training = rank.input_sharder, reducer, training
        self.microbatches = plan.microbatches if training else 1
        self.trace = trace or Trace(state.device)
        self.works: list[_Work] = []
        # this rank's blocks of tensors that other stages own, for evaluation
        self.borrowed: dict[str, torch.Tensor] = {}
        # output → its local values in the last batch of training, by microbatch
        self.training_outputs: dict[str, list[torch.Tensor]] = {}
        links, places = links_of(plan, boundaries), places_of(plan)
        back = differentiable_links(links, boundaries) if training else set()
        schedule = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked) if training else None
        number = {place: index for index, place in enumerate(places)}
        self.links, self.back = links, back
        self.edges = sorted({(number[link.source], number[link.target]) for link in links})
        if schedule is not None:
            validate(schedule, self.edges)
        if not programs or comm is None:
            return
        assert state.stage is not None
        self.stage = state.stage
        timed = ReplicaComm(comm, self.trace, independent_axes) if independent_axes else TimedComm(comm, self.trace)
        self.context = Context(timed, transport.seed, repeating=self.trace.repeating, code=plan.code("weights"))
        halved = {a.chunk for a in schedule.actions[self.stage] if a.kind == "W"} if schedule is not None else set()
        self.parts = [
            BoundChunk(rank, (self.stage, chunk), program, chunk in halved) for chunk, program in enumerate(programs)
        ]
        self.loss = BatchLoss(self.parts, comm, independent_axes)
        bind_links(self.parts, plan, boundaries, links, back, transport, self.window)
        if schedule is None:
            self.works = [_work(Action(self.stage, "F", 0, chunk), part) for chunk, part in enumerate(self.parts)]
            return
        edges = [(link.source, link.target) for link in links if not link.is_local]
        back_edges = [ends for link, ends in zip([k for k in links if not k.is_local], edges)
                      if (link.node, link.source) in back]  # fmt: skip
        arrived = find_settled_sends(schedule.actions, self.stage, edges, back_edges)
        row = schedule.actions[self.stage]
        final = self._final(row)
        self.works = [
            _work(action, self.parts[action.chunk], arrived[index], final.get(index, frozenset()))
            for index, action in enumerate(row)
        ]

    def _final(self, row: Sequence[Action]) -> dict[int, frozenset[int]]:
        """Action → ids of the parameters to whose gradients no later action adds."""
        last = {(action.chunk, action.kind): index for index, action in enumerate(row) if action.kind != "F"}
        whole: dict[str, int] = {}
        for (chunk, kind), index in last.items():
            for name in self.parts[chunk].touches(kind):
                whole[name] = max(index, whole.get(name, -1))
        return {
            index: frozenset(id(self.state.parameters[name]) for name, at in whole.items() if at == index)
            for index in set(whole.values())
        }

    @property
    def window(self) -> int:
        """Microbatches whose messages have tags of their own."""
        return self.microbatches

    # ---- running

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        step: int = 0,
        first_microbatch: int = 0,
        scale: float = 1.0,
        loss_scale: float = 1.0,
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """One accumulation over all microbatches, gradients left in the leaves, and with the loss summed over partial
        axes. scale: multiplies gradients; loss_scale: too, but only until they are fp32.

        Returns (the mean loss on ranks of the loss stage else None, the outputs of an evaluation on ranks of their
        stages).
        """
        if not self.works:
            return None, {}
        assert self.comm is not None
        PROGRESS.step = self.context.step = step
        self.context.unscale = 1 / loss_scale
        mark, comm, reducer = self.trace.mark, self.comm, self.reducer if self.training else None
        self._refresh()
        self.loss.begin()
        if reducer is not None:
            reducer.begin(1 / loss_scale)
        outputs: dict[str, torch.Tensor] = {}
        self.training_outputs = {}
        total: PendingCollective | None = None
        held: dict[int, Sends] = {}
        saved: dict[tuple[int, int], tuple[list[Any], tuple[Any, ...]]] = {}
        # receives are always posted one action ahead, so that no peer waits for a buffer while this rank computes
        posted = _post(self.works[0])
        with use_context(self.context), torch.set_grad_enabled(self.training):
            for index, work in enumerate(self.works):
                with named(str(work.action)):
                    action, part = work.action, work.part
                    kind, microbatch = action.kind, action.microbatch
                    arriving = posted
                    started = mark()  # posting waits, too, where a message is being read
                    posted = _post(self.works[index + 1]) if index + 1 < len(self.works) else []
                    arrived = [(position, incoming.wait()) for position, incoming in arriving]
                    for done in work.settled:
                        _drain(held.pop(done, []))
                    ready = mark()
                    self.context.microbatch = first_microbatch + microbatch
                    sends: Sends = []
                    if kind == "F":
                        comm.phase = "forward"
                        arguments, exits = part.run(inputs, arrived, microbatch)
                        worked = mark()
                        sends = part.send_values(exits, microbatch, step)
                        self._keep(part, exits)
                        if part.loss_exit is not None and microbatch == self.microbatches - 1:
                            # the sum travels, and is read, beside the last backwards
                            comm.phase = "step"
                            total = self.loss.start()
                        if self.training:
                            saved[action.chunk, microbatch] = (arguments, exits)
                            for position, name in part.output_exits:
                                self.training_outputs.setdefault(name, []).append(exits[position].detach())
                        else:
                            outputs.update({name: exits[position] for position, name in part.output_exits})
                        # activations must live in ``saved`` only, or the backward could not free them
                        del exits, arguments
                    else:
                        comm.phase = "backward"
                        if reducer is not None:
                            reducer.arm(work.final)
                        if kind == "W":
                            assert part.halves is not None
                            part.halves.settle(microbatch)
                            worked = mark()
                        else:
                            arguments, exits = saved.pop((action.chunk, microbatch))
                            part.backward(exits, arrived, microbatch, scale * loss_scale / self.microbatches)
                            del exits
                            worked = mark()
                            sends = part.send_cotangents(arguments, microbatch, step)
                            del arguments
                    if sends:
                        held[index] = sends
                    self.trace.action(work.label, started, ready, worked, mark())
            comm.phase = "step"
            if reducer is not None:
                with self.trace.span("gradient"):
                    reducer.finish()
        with self.trace.span("loss"):
            loss = None if total is None else total.wait()
        with self.trace.span("drain"):
            for sends in held.values():
                _drain(sends)
        return loss, outputs

    def _keep(self, part: BoundChunk, exits: Sequence[torch.Tensor]) -> None:
        """Keep the buffers and the loss that a forward made."""
        for position, name in part.buffer_exits:
            self.state.buffers[name] = exits[position].detach()
        if part.buffer_exits:
            self._refresh()
        if part.loss_exit is not None:
            self.loss.add(exits[part.loss_exit])

    def _refresh(self) -> None:
        for part in self.parts:
            part.refresh(self.borrowed)


def _work(
    action: Action, part: BoundChunk, arrived: tuple[int, ...] = (), final: frozenset[int] = frozenset()
) -> _Work:
    ways = {"F": part.incoming, "W": []}.get(action.kind, part.outgoing)
    ports = [(way.position, way.forward if action.kind == "F" else way.backward) for way in ways]
    label = f"{action.kind}{action.microbatch}" + (f"c{action.chunk}" if action.chunk else "")
    return _Work(action, label, part, [(at, port) for at, port in ports if port is not None], arrived, final)


def _post(work: _Work) -> list[tuple[int, Incoming]]:
    return [(position, port.receive(work.action.microbatch)) for position, port in work.incoming]


def _drain(sends: Sends) -> None:
    for work, _ in sends:
        work.wait()


class BatchLoss:
    """The losses of the microbatches that one rank's chunks have run. independent_axes: those over which nothing is
    sent."""

    def __init__(
        self, parts: Sequence[BoundChunk], comm: DistributedComm, independent_axes: Collection[int] = ()
    ) -> None:
        self.comm, self.losses = comm, list[torch.Tensor]()
        exits = [part.program.exits[part.loss_exit] for part in parts if part.loss_exit is not None]
        addends = [axis for exit in exits for axis, value in enumerate(exit.pair.value) if value.is_partial]
        self.axes = [axis for axis in addends if comm.size(axis) > 1 and axis not in independent_axes]
        self.times = prod(comm.size(axis) for axis in addends if axis in independent_axes)
        self.on_host: _HostCopy | None = None  # of a loss on a CUDA device

    def begin(self) -> None:
        """Forget the losses of a batch that was not finished. Called before the first microbatch of the next one."""
        self.losses = []

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a microbatch (0-d). It is copied, because its storage may be that of all addends."""
        self.losses.append(loss.detach().clone())

    def start(self) -> PendingCollective | None:
        """Start the sum of the losses so far, and forget them. None where this rank has no loss."""
        losses, self.losses = self.losses, []
        if not losses:
            return None
        mine = losses[0] if len(losses) == 1 else torch.stack(losses).sum() / len(losses)
        if self.times > 1:
            mine *= self.times
        started = self.comm.start_sum(mine, self.axes) if self.axes else PendingCollective(None, mine, mine)
        return self._copied(started, mine) if mine.is_cuda else started

    def _copied(self, started: PendingCollective, mine: torch.Tensor) -> PendingCollective:
        if self.on_host is None:
            self.on_host = _HostCopy(mine)
        return PendingCollective(self.on_host.copied, self.on_host.start(started.wait), mine)

    def read(self, total: torch.Tensor) -> float:
        """The value of the sum that was started last and has become ``total``."""
        return float(total) if self.on_host is None else self.on_host.read()


class _HostCopy:
    """A number that is brought to the host beside what its CUDA device computes next: reading it does not wait for
    that."""

    def __init__(self, like: torch.Tensor) -> None:
        self.stream, self.copied = torch.cuda.Stream(like.device), torch.cuda.Event()
        self.value = torch.empty((), dtype=like.dtype, pin_memory=True)

    def start(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``make`` returns, which is to be used after ``copied``."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            number = make()
            self.value.copy_(number.view(()), non_blocking=True)
            self.copied.record()
        return number

    def read(self) -> float:
        """The number, once it is here."""
        self.copied.synchronize()
        return float(self.value)
