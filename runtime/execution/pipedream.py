"""Training that spans steps: PipeDream's 1F1B with weight stashing (``compiler.pipeline.families`` has the
mathematics).

    step    ::= (F B?)^m     the forwards of the batch that is given, each with the backward of the microbatch w before
    flush   ::= B*           what is left; the pipeline is empty then, and the next batch fills it anew
    update  after the B of a batch's last microbatch: reduce its gradients, stash, run the optimizer

*Stashing.* Graphs never hold a parameter, but an *alias* of it: a tensor on the same storage with a version counter of
its own, through which gradients go to the parameter. Before an update that finds microbatches in flight the parameter
moves to a copy of its storage, and new aliases are made of that; the old storage lives as long as graphs hold its
aliases. So a version costs memory only while a backward needs it, and nothing at all on the last stage.

*Sends* are held until a message proves that they have arrived: values of F(j) until the cotangents of B(j) are here,
cotangents of B(j) until the forward that the farthest sender starts only after its own B(j).

Steps that overlap: batches go in, losses come out some steps later, and ``flush`` finishes what is in flight.

The last stage knows a batch's loss long before others have its gradients; waiting for it at once would drain the
pipeline. It is sent on its way at the end of the step and taken ``lag_steps`` steps later, when every rank has had
gradients that were made after it: so nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ...compiler.ir.comm import use_context
from ...compiler.pipeline.families import PIPEDREAM, generate, lag_steps
from ...compiler.pipeline.schedule import validate
from ...compiler.plan.boundaries import BoundaryMetadata
from ...compiler.plan.plan import Plan
from ..profiling.trace import Mark, named
from ..transport.cross_mesh import Incoming, Port
from ..transport.process_groups import new_group
from ..transport.progress import PROGRESS
from .chunk import BoundChunk, RankResources, Sends
from .executor import Executor

__all__ = ["OverlappingSteps", "StashingExecutor", "without_profiler_records"]


_CHECKED_STEPS = 3  # of a schedule that repeats itself


@contextmanager
def without_profiler_records() -> Iterator[None]:
    """For messages that may outlive a profiler: torch ends a message's record when it arrives, and writes to the memory
    of a profiler that has stopped since."""
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


class _Alias(torch.autograd.Function):
    """The same values in a tensor whose version the optimizer does not touch. It saves nothing, so that one alias
    serves the graphs of many microbatches."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Stash:
    """The aliases of a chunk's trainable parameters, made anew for every version."""

    def __init__(self, part: BoundChunk, parameters: Mapping[str, nn.Parameter]) -> None:
        self.part = part
        self.leaves = [leaf for leaf in parameters.values() if leaf.requires_grad]
        places = {id(leaf) for leaf in self.leaves}
        self.direct = [(at, x) for at, x in enumerate(part.template) if id(x) in places]
        self.derived = list(part.derived)
        self.renew()

    def keep(self) -> None:
        """Let graphs in flight have the storages that there are, and the parameters copies of them."""
        for leaf in self.leaves:
            leaf.data = leaf.data.clone()

    def renew(self) -> None:
        """From now on forwards read the parameters as they are now."""
        aliases = {id(leaf): _Alias.apply(leaf) for leaf in self.leaves}
        for position, leaf in self.direct:
            self.part.template[position] = aliases[id(leaf)]
        self.part.derived = [(at, aliases.get(id(leaf), leaf), ahead, back) for at, leaf, ahead, back in self.derived]


class StashingExecutor(Executor):
    """The executor of a stage whose microbatches stay in flight between calls. Microbatches are numbered on and on.

    ``update`` runs the optimizer; set it before the first step.
    """

    update: Callable[[], None]

    def __init__(self, rank: RankResources, *arguments: Any, **options: Any) -> None:
        p, m = len(rank.plan.stages), rank.plan.microbatches
        super().__init__(rank, *arguments, **options)
        validate(generate(PIPEDREAM, p, m * _CHECKED_STEPS + p), self.edges)
        self.forwards = self.backwards = 0
        self.batch_loss: torch.Tensor | None = None  # of the batch that this stage has just finished
        self._flying: dict[int, tuple[list[Any], tuple[Any, ...], int]] = {}  # arguments, exits, step
        self._values: deque[tuple[int, Sends]] = deque()
        self._cotangents: deque[tuple[int, Sends]] = deque()
        if not self.programs:
            return
        self.part = self.parts[0]
        self.warm = p - 1 - self.stage
        mine = [k.source[0] for k in self.links if k.target[0] == self.stage and (k.node, k.source) in self.back]
        self.apart = p - min(mine, default=0)  # from a B to the F that proves that its cotangents have arrived
        self.reads = [name for _, name, _ in self.input_sharder.plans.get(0, ())]
        leaves = self.state.parameters
        self.final = frozenset(id(leaves[name]) for name in self.part.touches("B"))
        self.trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
        self.stash = _Stash(self.part, leaves) if self.warm else None
        if self.reducer is not None:
            self.reducer.begin()

    @property
    def window(self) -> int:
        """Microbatches whose messages have tags of their own: more than are ever on their way."""
        return self.microbatches + len(self.plan.stages)

    def advance(self, inputs: Mapping[str, torch.Tensor], step: int) -> None:
        """Put one batch in, and do the backwards that are due."""
        if not self.programs:
            return
        if self.warm:  # graphs outlive the step, and the caller may write to the batch then
            inputs = {name: inputs[name].clone() for name in self.reads}
        actions = []
        forwards, backwards = self.forwards, self.backwards
        for _ in range(self.microbatches):
            actions.append(("F", forwards))
            forwards += 1
            if forwards - backwards > self.warm:
                actions.append(("B", backwards))
                backwards += 1
        self._play(actions, inputs, step)

    def flush(self) -> None:
        """Do the backwards and updates of everything in flight."""
        self._play([("B", j) for j in range(self.backwards, self.forwards)], {}, 0)
        with self.trace.span("drain"):
            self._settle(self._values, self.forwards)
            self._settle(self._cotangents, self.forwards)

    # ---- one action after the other

    def _play(self, actions: Sequence[tuple[str, int]], inputs: Mapping[str, torch.Tensor], step: int) -> None:
        self.batch_loss = None
        if not actions:
            return
        assert self.comm is not None
        mark, PROGRESS.step = self.trace.mark, step
        self._refresh()
        posted = self._posted(*actions[0])
        with use_context(self.context), torch.enable_grad():
            for index, (kind, number) in enumerate(actions):
                with named(f"{self.state.stage}{kind}{number % self.microbatches}"):
                    arriving = posted
                    posted = self._posted(*actions[index + 1]) if index + 1 < len(actions) else []
                    started = mark()
                    arrived = [(position, incoming.wait()) for position, incoming in arriving]
                    self._settle(self._values if kind == "B" else self._cotangents,
                                 number if kind == "B" else number - self.apart)  # fmt: skip
                    ready = mark()
                    if kind == "F":
                        worked = self._forward(number, inputs, step, arrived)
                    else:
                        worked = self._backward(number, arrived)
                    self.trace.action(f"{kind}{number % self.microbatches}", started, ready, worked, mark())
                if len(self.loss.losses) == self.microbatches:
                    self._told()
                if kind == "B" and self.backwards % self.microbatches == 0:
                    self._updated()

    def _forward(
        self, number: int, inputs: Mapping[str, torch.Tensor], step: int, arrived: Iterable[tuple[int, torch.Tensor]]
    ) -> Mark:
        part, microbatch = self.part, number % self.microbatches
        assert self.comm is not None
        self.comm.phase, self.context.step, self.context.microbatch = "forward", step, microbatch
        arguments, exits = part.run(inputs, arrived, microbatch)
        worked = self.trace.mark()
        with without_profiler_records():
            self._hold(self._values, number, part.send_values(exits, number % self.window, number))
        self._keep(part, exits)
        self._flying[number] = arguments, exits, step
        self.forwards += 1
        return worked

    def _backward(self, number: int, arrived: Iterable[tuple[int, torch.Tensor]]) -> Mark:
        part = self.part
        assert self.comm is not None
        arguments, exits, step = self._flying.pop(number)
        self.comm.phase, self.context.step = "backward", step
        self.context.microbatch = number % self.microbatches
        if self.reducer is not None:
            last = self.context.microbatch == self.microbatches - 1
            self.reducer.arm(self.final if last else frozenset())
        part.backward(exits, arrived, number % self.window, 1 / self.microbatches)
        worked = self.trace.mark()
        with without_profiler_records():
            self._hold(self._cotangents, number, part.send_cotangents(arguments, number % self.window, number))
        self.backwards += 1
        return worked

    def _told(self) -> None:
        """A batch has all its losses here."""
        assert self.comm is not None
        self.comm.phase = "step"
        with self.trace.span("loss"):
            started = self.loss.start()
            self.batch_loss = None if started is None else started.wait()

    def _updated(self) -> None:
        """A batch has all its gradients here."""
        assert self.comm is not None
        self.comm.phase = "step"
        if self.reducer is not None:
            with self.trace.span("gradient"):
                self.reducer.finish()
        with self.trace.span("optimizer"):
            if self.stash is not None and self._flying:
                self.stash.keep()
            self.update()
        for leaf in self.trained:
            leaf.grad = None
        if self.stash is not None:
            self.stash.renew()
        if self.reducer is not None:
            self.reducer.begin()

    # ---- messages

    def _posted(self, kind: str, number: int) -> list[tuple[int, Incoming]]:
        ways = self.part.incoming if kind == "F" else self.part.outgoing
        ports: list[tuple[int, Port | None]] = [(w.position, w.forward if kind == "F" else w.backward) for w in ways]
        return [(at, port.receive(number % self.window)) for at, port in ports if port is not None]

    @staticmethod
    def _hold(held: deque[tuple[int, Sends]], number: int, sends: Sends) -> None:
        if sends:
            held.append((number, sends))

    @staticmethod
    def _settle(held: deque[tuple[int, Sends]], number: int) -> None:
        """Let go of what microbatches up to ``number`` have sent."""
        while held and held[0][0] <= number:
            for work, _ in held.popleft()[1]:
                work.wait()


Losses = list[tuple[int, torch.Tensor]]
"""(step, 0-d loss), oldest first"""


class OverlappingSteps:
    """The steps of an asynchronous pipeline. Its construction is collective.

    loss: (stage, boundaries) of the loss, if there is one. Raises ValueError for clipping, which needs all gradients.
    """

    def __init__(
        self,
        plan: Plan,
        executor: StashingExecutor,
        loss: tuple[int, BoundaryMetadata] | None,
        optimizer: torch.optim.Optimizer | None,
        clip_grad_norm: float | None,
        device: torch.device,
    ) -> None:
        if clip_grad_norm is not None:
            raise ValueError(
                f"under schedule {plan.schedule} no two stages have the gradients of a step at the same time, but got "
                f"clip_grad_norm={clip_grad_norm}, which is of all of them; leave it out or use another schedule"
            )
        self.schedule, self.executor, self.device = plan.schedule, executor, device
        self.lag = lag_steps(len(plan.stages), plan.microbatches)
        self.optimizer = optimizer
        if optimizer is not None:
            executor.update = optimizer.step
        self.root, self.dtype = 0, torch.float32
        if loss is not None and loss[1].loss is not None:
            self.root, self.dtype = plan.stages[loss[0]].devices[0], loss[1].loss.dtype
        self.group = new_group()
        self.pending: deque[tuple[int, torch.Tensor, Any]] = deque()
        self.drained = True  # no batch was put in since the last flush

    def step(self, inputs: Mapping[str, torch.Tensor], step: int) -> Losses:
        """Put a batch in; the losses that are known by now."""
        if self.optimizer is None:
            raise ValueError(
                f"schedule {self.schedule} updates while it runs, but got no optimizer; "
                "pass optimizer=lambda ps: torch.optim.AdamW(ps)"
            )
        self.drained = False
        self.executor.advance(inputs, step)
        with self.executor.trace.span("loss"):
            self._send(step)
            return self._take(self.lag)

    def flush(self) -> Losses:
        """Finish everything in flight; the losses that were not known yet."""
        self.executor.flush()
        self.drained = True
        return self._take(0)

    def _send(self, step: int) -> None:
        """Start to tell everybody the loss of the batch; only the root's counts."""
        loss = self.executor.batch_loss
        mine = loss if dist.get_rank() == self.root else None
        out = torch.zeros(1, dtype=self.dtype, device=self.device) if mine is None else mine.reshape(1).clone()
        with without_profiler_records():
            self.pending.append((step, out, dist.broadcast(out, self.root, group=self.group, async_op=True)))

    def _take(self, least: int) -> Losses:
        """All but the ``least`` last losses, waited for."""
        taken = []
        while len(self.pending) > least:
            step, out, work = self.pending.popleft()
            work.wait()
            taken.append((step, out.reshape(())))
        return taken

    # ---- what cannot be done

    def require_drained(self, what: str) -> None:
        """ValueError while batches are in flight: stages then have weights of different steps."""
        if not self.drained:
            raise ValueError(
                f"{what} needs every stage at the same step, but got batches in flight under schedule "
                f"{self.schedule}; call flush() before"
            )

    def refuse_halves(self) -> NoReturn:
        """ValueError for a half of a step."""
        raise ValueError(
            f"under schedule {self.schedule} every stage updates when its own backwards are done, but got "
            "forward_backward or optimizer_step by themselves; call train_step, and flush at the end"
        )

    def refuse_norm(self) -> NoReturn:
        """ValueError for a norm of all gradients."""
        raise ValueError(
            f"under schedule {self.schedule} no two stages have the gradients of a step at the same time, so there is "
            "no grad_norm of all; use another schedule"
        )
