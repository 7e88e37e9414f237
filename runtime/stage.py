"""A session: one rank's stage of a plan, bound to real ranks, with everything that a training step needs.

    construct   groups → facts of all stages → weights → executor → optimizer        (collective, in this order on every
    rank) step        forward_backward (repeat to accumulate) → optimizer_step

Nothing is planned after construction. An idle rank takes part in the collectives and owns nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compiler.plan import BUCKET_BYTES, Plan
from ..compiler.program import ChunkProgram
from ..compiler.reshard import apply_steps, steps_between
from ..compiler.spec import R
from .agreement import alike
from .crossmesh import Layout, cut, wire
from .executor import Executor
from .facts import Facts, exchange, facts_of
from .feeding import Feeder
from .gradients import GradientReducer, TiedParameters
from .groups import bind_all
from .optimizer import OptimizerFactory, clip_gradients, gradient_norm, make_optimizer
from .state import Init, ModelInfo, State, Weights
from .trace import Trace, peak_bytes

__all__ = ["NonFiniteLoss", "Session"]


class NonFiniteLoss(ValueError):  # noqa: N818 - named for what it is, like StopIteration
    """The loss is NaN or infinite; ``rank`` and ``step`` say where and when."""

    def __init__(self, value: float, rank: int, stage: int, step: int) -> None:
        super().__init__(
            f"the loss must be finite, but got {value} on rank {rank} (stage {stage}) at step {step}; "
            "lower the learning rate, clip gradients, or look at this step's data"
        )
        self.value, self.rank, self.stage, self.step = value, rank, stage, step


class Session:
    """Binds a plan and this rank's programs to the running process group; every constructor call is collective.

    programs: of this rank's stage, one per chunk; empty on an idle rank. weights: a module or a state dict, rank 0's
    wins. init: for what ``weights`` lacks or has on the meta device (a function, or a state dict). optimizer: a
    function from local parameters to a torch optimizer. device: where this rank computes; by default its CUDA device
    under NCCL, else the CPU. Raises ValueError, alike on every rank, for a plan that does not fit the world, weights
    that are missing, and the like.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[ChunkProgram],
        model_info: ModelInfo,
        weights: Weights | None = None,
        *,
        init: Init | Mapping[str, torch.Tensor] | None = None,
        optimizer: OptimizerFactory | None = None,
        seed: int = 0,
        clip_grad_norm: float | None = None,
        data: str = "global",
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _check_plan(plan)
        self.plan, self.clip_grad_norm, self.seed, self.data = plan, clip_grad_norm, seed, data
        self.rank = dist.get_rank()
        cuda = dist.get_backend() == "nccl"
        self.device = device or (torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
        self.comm = bind_all(plan)
        self.stage = plan.stage_of(self.rank)
        self.program = _only(plan, programs, self.stage)
        # NCCL matches messages by order alone: a communicator per direction keeps one from waiting behind the other
        self.directions = (dist.new_group(), dist.new_group()) if cuda else (None, None)
        self.facts = exchange(plan, None if self.program is None else facts_of(self.program, self.stage or 0))
        buffers = [fact.buffers for fact in self.facts]
        writers = {name: index for index, fact in enumerate(self.facts) for name in fact.written}
        self.state = State(plan, model_info, self.comm, self.device, buffers, writers)
        if isinstance(init, Mapping):
            weights, init = _merge(weights, init), None
        self.state.initialize(weights, init, seed)
        types = {name: entry.type for name, entry in model_info.parameters.items()}
        # frozen parameters have no gradient: the program says which those are
        for slot in self.program.slots if self.program is not None else ():
            if slot.kind == "parameter":
                self.state.parameters[slot.name].requires_grad_(slot.requires_grad)
        self.tied = TiedParameters(plan, self.state.parameters, types, self.rank, self.device, None)
        self.owned = {name: leaf for name, leaf in self.state.parameters.items() if name not in self.tied.copies}
        self.layouts = {name: self.state.layout(name, self.stage) for name in self.owned if self.stage is not None}
        self.trace = Trace(self.device)
        with alike():  # one stage of an edited plan may be what cannot run
            self.reducer = GradientReducer(self.comm, self._partial_axes(), bucket_bytes)
            uses = [use for fact in self.facts for use in fact.inputs]
            self.feeder = Feeder(plan, uses, self.comm, self.device, data)
            self.executor = Executor(
                plan, self.program, self.comm, self.state, self.facts, self.feeder,
                reducer=self.reducer, groups=self.directions, seed=seed, trace=self.trace,
            )  # fmt: skip
        self.loss_stage = next((index for index, fact in enumerate(self.facts) if fact.loss is not None), None)
        self.step = 0
        self._batches = 0  # forward_backward calls since the last optimizer step
        self._stepped = True  # whether the gradients in the leaves are those of a finished step
        self._norm: torch.Tensor | None = None
        self._seconds: dict[str, float] = {}
        self._evaluators: list[tuple[Sequence[ChunkProgram], Executor, list[Facts]]] = []
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            trained = [leaf for leaf in self.owned.values() if leaf.requires_grad]
            with alike():  # a factory may fail on the parameters of one stage only
                self.optimizer = make_optimizer(optimizer, trained, plan)

    def _partial_axes(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        if self.program is None or self.stage is None:
            return []
        sizes = self.plan.stages[self.stage].mesh_shape
        out = []
        for slot in self.program.slots:
            if slot.kind != "parameter":
                continue
            for axis, (value, cotangent) in enumerate(zip(slot.pair.value, slot.pair.cotangent, strict=True)):
                if slot.requires_grad and not (cotangent.is_partial or cotangent == value or sizes[axis] == 1):
                    raise ValueError(
                        f"the gradient of {slot.name!r} must lie as its value or be partial, but got {slot.pair} on "
                        f"axis {axis}; plan again"
                    )
            axes = tuple(a for a, p in enumerate(slot.pair.cotangent) if p.is_partial and sizes[a] > 1)
            out.append((self.state.parameters[slot.name], axes))
        return out

    # ---- training

    def forward_backward(self, inputs: Mapping[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        """Accumulate the gradients of one global batch; the mean loss over its microbatches (0-d) on every rank.

        inputs: source name → tensor, the global batch or this rank's part (``data``). scale: multiplies the gradients,
        not the loss. Call it again before ``optimizer_step`` to accumulate. Raises NonFiniteLoss on every rank.
        """
        started = perf_counter()
        if self.loss_stage is None:
            raise ValueError(
                "training needs a scalar loss, but got programs without one; give loss_fn or a model that returns "
                "its loss"
            )
        self.feeder.check(inputs)
        if self._stepped:
            self.trace.begin()
        with self.trace.call(batches=1):
            if self._stepped:
                for leaf in self.state.parameters.values():
                    leaf.grad = None
                self._stepped, self._batches = False, 0
            self._norm = None
            loss, _ = self.executor.run(
                inputs, step=self.step, first_microbatch=self._batches * self.plan.microbatches, scale=scale
            )
            self._batches += 1
            with self.trace.span("tied"):
                self.tied.gather_gradients()
            with self.trace.span("loss"):
                loss = self._share_loss(loss)
            value = float(loss)
        if not math.isfinite(value):
            self._stepped = True
            raise NonFiniteLoss(value, self.plan.stages[self.loss_stage].devices[0], self.loss_stage, self.step)
        self._seconds = {"forward_backward_s": perf_counter() - started}
        return loss

    def _share_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        assert self.loss_stage is not None
        devices, kind = self.plan.stages[self.loss_stage].devices, self.facts[self.loss_stage].loss
        assert kind is not None
        if len(devices) == self.plan.num_devices:
            assert loss is not None
            return loss
        out = torch.zeros(1, dtype=kind.dtype, device=self.device) if loss is None else loss.reshape(1).clone()
        dist.broadcast(out, devices[0])
        return out.reshape(())

    def optimizer_step(self) -> None:
        """Clip if asked to, update the owned parameters, make tied copies equal again. Collective."""
        if self.optimizer is None:
            raise ValueError(
                "optimizer_step needs an optimizer, but got none; pass optimizer=lambda ps: torch.optim.AdamW(ps)"
            )
        started = perf_counter()
        with self.trace.call():
            with self.trace.span("optimizer"):
                if self.clip_grad_norm is not None:
                    clip_gradients(self.owned.values(), self.grad_norm, self.clip_grad_norm)
                self.optimizer.step()
            with self.trace.span("tied"):
                self.tied.publish_values()
        self.trace.close()
        self.step += 1
        self._stepped = True
        self._seconds["optimizer_s"] = perf_counter() - started

    @property
    def grad_norm(self) -> torch.Tensor:
        """The fp32 norm of the gradients of the last step, before clipping, each unique element once (0-d).

        Collective at its first reading after ``forward_backward`` unless ``clip_grad_norm`` is set: read it on every
        rank, before the next batch.
        """
        if self._norm is None:
            self._norm = gradient_norm(self.owned, self.layouts, self.rank, self.device)
        return self._norm

    # ---- evaluation

    def forward(
        self, inputs: Mapping[str, torch.Tensor], plan: Plan, programs: Sequence[ChunkProgram]
    ) -> dict[str, torch.Tensor]:
        """Run evaluation programs once, without autograd: exit name → whole output on every rank ("loss" too if they
        have one).

        plan: with this session's stages and meshes (ops and specs may differ); its microbatches are ignored, the
        programs' own batch counts. programs: of this rank's stage; the same object on later calls reuses what the first
        call bound. Collective.
        """
        executor, facts = self._evaluator(plan, programs)
        executor.feeder.check(inputs)
        self._lend(executor, facts)
        loss, mine = executor.run(inputs, step=self.step)
        out: dict[str, torch.Tensor] = {}
        for index, fact in enumerate(facts):
            here = self.plan.stages[index]
            kinds = dict(fact.outputs)
            if fact.loss is not None:
                kinds["loss"] = fact.loss
                mine = {**mine, "loss": loss} if loss is not None else mine
            for name, kind in kinds.items():
                whole = torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
                if index == self.stage and executor.program is not None and self.comm is not None:
                    pair = next(e.pair for e in executor.program.exits if e.name == name or (name == "loss" == e.kind))
                    steps = steps_between(pair.value, (R,) * len(pair.value))
                    whole = apply_steps(mine[name], steps, self.comm).contiguous()
                if len(here.devices) < self.plan.num_devices:
                    dist.broadcast(wire(whole), here.devices[0])
                out[name] = whole
        return out

    def _evaluator(self, plan: Plan, programs: Sequence[ChunkProgram]) -> tuple[Executor, list[Facts]]:
        for known, executor, facts in self._evaluators:
            if known is programs:
                return executor, facts
        if [(s.devices, s.mesh_shape) for s in plan.stages] != [(s.devices, s.mesh_shape) for s in self.plan.stages]:
            raise ValueError(
                "evaluation runs on the training plan's stages, but got a plan with other devices or meshes"
            )
        program = _only(plan, programs, self.stage)
        facts = exchange(plan, None if program is None else facts_of(program, self.stage or 0))
        uses = [use for fact in facts for use in fact.inputs]
        feeder = Feeder(plan, uses, self.comm, self.device, microbatches=1)
        executor = Executor(
            plan, program, self.comm, self.state, facts, feeder, groups=self.directions, seed=self.seed, training=False
        )
        self._evaluators.append((programs, executor, facts))
        return executor, facts

    def _lend(self, executor: Executor, facts: Sequence[Facts]) -> None:
        """Give stages what their evaluation programs read and only other stages hold. Collective; usually there is
        nothing to do."""
        for index, fact in enumerate(facts):
            here = self.plan.stages[index]
            for name, spec in {**fact.parameters, **fact.buffers}.items():
                if index not in self.state.homes.get(name, ()):
                    whole = self.state.whole(name)
                    if index == self.stage:
                        box = Layout(here.devices, here.mesh_shape, spec).box(whole.shape, self.rank)
                        executor.borrowed[name] = cut(whole, box).contiguous()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Original names → DTensors of this rank's stage; see ``State.state_dict``."""
        return self.state.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take values by original names; see ``State.load_state_dict``."""
        self.state.load_state_dict(values)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole CPU tensors on rank 0, empty elsewhere. Collective."""
        return self.state.full_state_dict()

    # ---- measurement

    @property
    def data_index(self) -> int:
        """Which part of the batch this rank wants under data="local"."""
        return self.feeder.data_index

    @property
    def data_count(self) -> int:
        """Number of parts of the batch under data="local"."""
        return self.feeder.data_count

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """(phase, kind) → collectives that this rank has run so far; phases "forward", "backward", "step"."""
        return self.comm.counts if self.comm is not None else Counter()

    @property
    def timings(self) -> dict[str, Any]:
        """Of the last step: "forward_backward_s", "optimizer_s", "actions" [(label, seconds)], "peak_bytes" of this
        process so far."""
        actions = [(action.label, action.seconds) for action in self.trace.actions()]
        return {**self._seconds, "actions": actions, "peak_bytes": peak_bytes(self.device)}


def _check_plan(plan: Plan) -> None:
    """ValueError for a plan that contradicts itself (a person may have edited it) or asks for what this runtime does
    not do."""
    if faults := plan.check():
        raise ValueError(f"a plan must be consistent, but got {'; '.join(faults[:3])}; plan again")
    plan.require_executable()


def _only(plan: Plan, programs: Sequence[ChunkProgram], stage: int | None) -> ChunkProgram | None:
    crowded = [index for index, here in enumerate(plan.stages) if len(here.chunks) != 1]
    if crowded:
        raise ValueError(
            f"this runtime runs one chunk per stage, but got another number on stages {crowded}; use 1F1B or GPipe"
        )
    if len(programs) != (stage is not None):
        raise ValueError(f"a rank needs one program per chunk of its stage, but got {len(programs)} on stage {stage}")
    return programs[0] if programs else None


def _merge(weights: Weights | None, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict over a module: the module gives what the state dict lacks (non-persistent buffers, say)."""
    given: dict[str, torch.Tensor] = {}
    if isinstance(weights, nn.Module):
        given = {
            **dict(weights.named_parameters(remove_duplicate=False)),
            **dict(weights.named_buffers(remove_duplicate=False)),
        }
    elif weights is not None:
        given = dict(weights)
    return {**given, **values}
