"""A session: one rank's stage of a plan, bound to real ranks, with everything that a training step needs.

    construct   groups → facts of all stages → weights → executor → optimizer     (collective, in this order everywhere)
    step        forward_backward (repeat to accumulate) → optimizer_step

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

from ...compiler.ir.program import ChunkProgram
from ...compiler.ir.spec import Spec
from ...compiler.pipeline.schedule import Place
from ...compiler.plan.boundaries import BoundaryMetadata, links_of
from ...compiler.plan.plan import BUCKET_BYTES, Plan
from ...compiler.plan.validation import is_asynchronous, require_valid
from ..collectives.worker import LANES
from ..errors import NonFiniteGradient, NonFiniteLoss
from ..parameters.gradient_all_reduce import GradientAllReduce
from ..parameters.gradients import GradientReducer
from ..parameters.optimizer import LossScale, OptimizerFactory, clip_gradients, gradient_norm, make_optimizer
from ..parameters.optimizer_shards import ValueGatherer, own_parts
from ..parameters.state import Init, ModelInfo, ParameterState, Weights
from ..parameters.tied import TiedParameters, parameter_layout
from ..profiling.trace import Trace, peak_bytes
from ..transport.error_propagation import alike
from ..transport.process_groups import bind_all
from ..transport.shared_memory import SharedMemory, SharedMemoryMessages
from .boundary_metadata import exchange, own_facts, programs_of
from .chunk import Groups
from .compilation import Compiler
from .evaluation import Evaluation
from .executor import Executor
from .independent_replicas import SYNCHRONOUS, IndependentReplicas, LocalUpdates
from .input_sharding import InputSharder
from .pipedream import Overlapping, StashingExecutor

__all__ = ["Session"]


class Session:
    """Binds a plan and this rank's programs to the running process group; every constructor call is collective.

    programs: of this rank's stage, one per chunk; empty on an idle rank. weights: a module or a state dict, rank 0's
    wins. init: for what ``weights`` lacks or has on the meta device (a function, or a state dict). optimizer: a
    function from local parameters to a torch optimizer. device: where this rank computes; by default its CUDA device
    under NCCL, else the CPU. compiler: of what trains; evaluation runs as it is. looseness: how far replicas go by
    themselves. Raises ValueError, alike on every rank, for a plan that does not fit the world, weights that are
    missing, and the like.
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
        compiler: Compiler | None = None,
        looseness: LocalUpdates = SYNCHRONOUS,
    ) -> None:
        require_valid(plan, runnable=True)  # the document alone: whoever has the graph has compared them before
        self.plan, self.clip_grad_norm, self.seed, self.data = plan, clip_grad_norm, seed, data
        self.compiler = compiler
        self.rank = dist.get_rank()
        cuda = dist.get_backend() == "nccl"
        self.device = device or (torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
        self.comm = bind_all(plan, 1 if looseness.is_synchronous else LANES)
        self.stage = plan.stage_of(self.rank)
        self.programs = programs_of(plan, programs, self.stage)
        self.facts = exchange(plan, own_facts(self.programs, self.stage))
        self.loosely = (
            None if looseness.is_synchronous else IndependentReplicas(looseness, plan, self.programs, self.stage)
        )
        self.loose_axes = self.loosely.replicas.axes if self.loosely else ()
        self.groups = _groups(plan, self.facts, cuda)
        cpu = self.device.type == "cpu" and not cuda
        near = SharedMemoryMessages(SharedMemory.meet()) if cpu and len(plan.stages) > 1 else None
        writers = {name: place[0] for place, fact in self.facts.items() for name in fact.written}
        self.state = ParameterState(plan, model_info, self.comm, self.device, _buffers(plan, self.facts), writers)
        if isinstance(init, Mapping):
            weights, init = _merge(weights, init), None
        self.state.initialize(weights, init, seed)
        types = {name: entry.type for name, entry in model_info.parameters.items()}
        # frozen parameters have no gradient: the program says which those are
        for slot in (slot for program in self.programs for slot in program.slots):
            if slot.kind == "parameter":
                self.state.parameters[slot.name].requires_grad_(slot.requires_grad)
        self.trace = Trace(self.device)
        with alike():  # one stage of an edited plan may be what cannot run
            parts = own_parts(plan, self.stage, self.state.parameters, self.state.masters, self.comm, self.loose_axes)
            blocks = list(parts.values())
            self.sums = GradientAllReduce(plan, self.stage, self.comm, seed)
            self.reducer = GradientReducer(self.comm, self._partial_axes(), bucket_bytes, blocks, self.trace, self.sums)
        # what the optimizer updates, and where gradients are after the reduction
        self.held = self.state.parameters | {name: part.parameter for name, part in parts.items()}
        self.tied = TiedParameters(plan, self.state.parameters, self.held, types, self.rank, self.device, None)
        self.owned = {name: leaf for name, leaf in self.held.items() if name not in self.tied.copies}
        self.layouts = {
            name: parameter_layout(plan, self.stage, name, "optimizer") for name in self.owned if self.stage is not None
        }
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self.values = ValueGatherer(self.comm, [parts[name] for name in self.owned if name in parts], bucket_bytes)
        with alike():
            uses = [use for fact in self.facts.values() for use in fact.inputs]
            self.feeder = InputSharder(plan, uses, self.comm, self.device, data)
            self.executor = (StashingExecutor if is_asynchronous(plan) else Executor)(
                plan, self.programs, self.comm, self.state, self.facts, self.feeder,
                reducer=self.reducer, groups=self.groups, near=near, seed=seed, trace=self.trace,
                compiler=compiler, alone=self.loose_axes,
            )  # fmt: skip
        self.loss_place = next((place for place, fact in self.facts.items() if fact.loss is not None), None)
        self.step = 0
        self.loss_step: int | None = None  # of the loss that ``train_step`` returned last
        self._batches = 0  # forward_backward calls since the last optimizer step
        self._stepped = True  # whether the gradients in the leaves are those of a finished step
        self._norm: torch.Tensor | None = None
        doubles = any(kind.dtype is torch.float64 for kind in types.values())
        self._norm_dtype = torch.float64 if doubles else torch.float32  # the same on every rank
        self._seconds: dict[str, float] = {}
        self.evaluation = Evaluation(plan, self.comm, self.state, self.groups, seed)
        self.optimizer: torch.optim.Optimizer | None = None
        trained = [leaf for leaf in self.owned.values() if leaf.requires_grad]
        if optimizer is not None:
            with alike():  # a factory may fail on the parameters of one stage only
                self.optimizer = make_optimizer(optimizer, trained, plan)
        if self.loosely is not None:
            with alike():
                self.loosely.bind(self.executor, self.tied, trained, self.sums)
        self.overlapping: Overlapping | None = None
        if isinstance(self.executor, StashingExecutor):
            loss = None if self.loss_place is None else (self.loss_place[0], self.facts[self.loss_place])
            with alike():
                self.overlapping = Overlapping(plan, self.executor, loss, self.optimizer, clip_grad_norm, self.device)

    def _partial_axes(self) -> list[tuple[nn.Parameter, tuple[int, ...], int]]:
        """(leaf, axes over which its gradient is partial, the chunk that keeps it) of every parameter, by chunk and
        program order."""
        if self.stage is None:
            return []
        sizes = self.plan.stages[self.stage].mesh_shape
        out: dict[str, tuple[nn.Parameter, tuple[int, ...], int]] = {}
        for chunk, slot in ((c, slot) for c, program in enumerate(self.programs) for slot in program.slots):
            if slot.kind != "parameter" or slot.name in out:  # one leaf, as the first chunk that reads it keeps it
                continue
            for axis, (value, cotangent) in enumerate(zip(slot.pair.value, slot.pair.cotangent, strict=True)):
                if slot.requires_grad and not (cotangent.is_partial or cotangent == value or sizes[axis] == 1):
                    raise ValueError(
                        f"the gradient of {slot.name!r} must lie as its value or be partial, but got {slot.pair} on "
                        f"axis {axis}; plan again"
                    )
            axes = (a for a, p in enumerate(slot.pair.cotangent) if p.is_partial and sizes[a] > 1)
            tight = tuple(axis for axis in axes if axis not in self.loose_axes)
            out[slot.name] = (self.state.parameters[slot.name], tight, chunk)
        return list(out.values())

    # ---- training

    def train_step(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Train on one global batch and return its loss (0-d), on every rank.

        Of an asynchronous pipeline: put the batch in and return the newest loss that is known without waiting, that of
        step ``loss_step``; NaN while the pipeline fills. Raises NonFiniteLoss on every rank when a loss like that
        arrives.
        """
        if self.overlapping is None:
            loss = self.forward_backward(inputs)
            self.loss_step = self.step
            self.optimizer_step()
            return loss
        started = perf_counter()
        self._require_loss()
        self.feeder.check(inputs)
        self.trace.begin()
        with self.trace.call(batches=1):
            taken = self.overlapping.step(inputs, self.step)
        self.trace.close()
        self.step += 1
        self._seconds = {"forward_backward_s": perf_counter() - started, "optimizer_s": 0.0}
        self._require_finite(taken)
        self.loss_step, loss = taken[-1] if taken else (None, torch.full((), math.nan, device=self.device))
        return loss

    def flush(self) -> dict[int, torch.Tensor]:
        """Finish the backwards and updates of everything in flight: step → loss of the batches whose loss no
        ``train_step`` has returned. Nothing is in flight but in an asynchronous pipeline, and between replicas that
        step by themselves, which are alike afterwards. Collective."""
        if self.loosely is not None and self.optimizer is not None:
            self.loosely.flush(self.optimizer)
            self.values.run()
            self.tied.publish_values()
        taken = [] if self.overlapping is None else self.overlapping.flush()
        self._require_finite(taken)
        return dict(taken)

    def require_drained(self, what: str) -> None:
        """ValueError while batches are in flight, or replicas differ."""
        if self.loosely is not None:
            self.loosely.require_drained(what)
        if self.overlapping is not None:
            self.overlapping.require_drained(what)

    def _require_loss(self) -> tuple[int, int]:
        """Where the loss is; ValueError if nowhere."""
        if self.loss_place is None:
            raise ValueError(
                "training needs a scalar loss, but got programs without one; give loss_fn or a model that returns "
                "its loss"
            )
        return self.loss_place

    def _require_finite(self, losses: Sequence[tuple[int, torch.Tensor]]) -> None:
        stage = self._require_loss()[0] if losses else 0
        for step, loss in losses:
            if not math.isfinite(value := float(loss)):
                raise NonFiniteLoss(value, self.plan.stages[stage].devices[0], stage, step)

    def forward_backward(self, inputs: Mapping[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        """Accumulate the gradients of one global batch; the mean loss over its microbatches (0-d) on every rank.

        inputs: source name → tensor, the global batch or this rank's part (``data``). scale: multiplies the gradients,
        not the loss. Call it again before ``optimizer_step`` to accumulate. Raises NonFiniteLoss on every rank, and
        NonFiniteGradient where gradients travel in a code.
        """
        started = perf_counter()
        self._require_loss()
        if self.overlapping is not None:
            self.overlapping.refuse_halves()
        self.feeder.check(inputs)
        if self._stepped:
            self.trace.begin()
        with self.trace.call(batches=1):
            if self._stepped:
                for leaf in (*self.state.parameters.values(), *self.held.values()):
                    leaf.grad = None
                self._stepped, self._batches = False, 0
            self._norm = None
            loss, _ = self.executor.run(
                inputs, step=self.step, first_microbatch=self._batches * self.plan.microbatches,
                scale=scale * (self.loosely.replicas.count if self.loosely else 1),
                loss_scale=1.0 if self.loss_scale is None else self.loss_scale.scale,
            )  # fmt: skip
            self._batches += 1
            with self.trace.span("tied"):
                self.tied.gather_gradients()
            with self.trace.span("loss"):
                loss = self._share_loss(loss)
            value = float(loss)
        if not math.isfinite(value):
            self._stepped = True
            self._require_finite([(self.step, loss)])
        if self.loosely is None:
            self._check_gradients()
        self._seconds = {"forward_backward_s": perf_counter() - started}
        return loss

    def _check_gradients(self) -> None:
        """Raise on every rank if a code found gradients of this batch that are not finite on any; under a scaled loss
        the step will be left out instead."""
        fault = self.reducer.fault
        if self.sums.told_apart:
            told = torch.tensor(float(fault is not None), device=self.device)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            if told and fault is None:
                fault = NonFiniteGradient("of another group", None, self.step)
        if fault is None:
            return
        if self.loss_scale is not None:
            self._norm = torch.tensor(math.inf)
            return
        self._stepped = True
        raise fault

    def _share_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        assert self.loss_place is not None
        devices, kind = self.plan.stages[self.loss_place[0]].devices, self.facts[self.loss_place].loss
        assert kind is not None
        if self.loosely is not None:
            return self.loosely.share_loss(loss, self.loss_place[0], kind.dtype, self.device)
        if len(devices) == self.plan.num_devices:
            assert loss is not None
            return loss
        out = torch.zeros(1, dtype=kind.dtype, device=self.device) if loss is None else loss.reshape(1).clone()
        dist.broadcast(out, devices[0])
        return out.reshape(())

    def optimizer_step(self) -> None:
        """Clip if asked to, update what is owned, bring it to the leaves that ops read, make tied copies equal again.
        With a scaled loss nothing is done where a gradient is not finite on any rank. Collective."""
        if self.optimizer is None:
            raise ValueError(
                "optimizer_step needs an optimizer, but got none; pass optimizer=lambda ps: torch.optim.AdamW(ps)"
            )
        if self.overlapping is not None:
            self.overlapping.refuse_halves()
        started = perf_counter()
        with self.trace.call():
            if self.loosely is not None:
                with self.trace.span("gradient"):
                    self.loosely.before_update()
                self._norm = None
            with self.trace.span("optimizer"):
                finite = self.loss_scale is None or bool(self.grad_norm.isfinite())  # the same on every rank
                if finite and self.clip_grad_norm is not None:
                    clip_gradients(self.owned.values(), self.grad_norm, self.clip_grad_norm)
                if finite:
                    self.optimizer.step()
                if self.loosely is not None:
                    self.loosely.after_update()
            with self.trace.span("gather"):
                if finite:
                    self.values.run()
            with self.trace.span("tied"):
                if finite:
                    self.tied.publish_values()
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self.trace.close()
        self.step += 1
        self._stepped = True
        self._seconds["optimizer_s"] = perf_counter() - started

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of the gradients of the last step, before clipping and not scaled, each unique element once (0-d;
        fp32, of models with fp64 weights fp64).

        Collective at its first reading after ``forward_backward`` unless ``clip_grad_norm`` is set: read it on every
        rank, before the next batch.
        """
        if self.overlapping is not None:
            self.overlapping.refuse_norm()
        if self._norm is None:
            norm = gradient_norm if self.loosely is None else self.loosely.gradient_norm
            self._norm = norm(self.owned, self.layouts, self.rank, self.device, self._norm_dtype)
        return self._norm

    def forward(
        self, inputs: Mapping[str, torch.Tensor], plan: Plan, programs: Sequence[ChunkProgram]
    ) -> dict[str, torch.Tensor]:
        """Run evaluation programs once; see ``Evaluation.run``. Collective."""
        self.require_drained("an evaluation")
        return self.evaluation.run(inputs, plan, programs, self.step)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Original names → DTensors of this rank's stage; see ``ParameterState.state_dict``."""
        self.require_drained("a state dict")
        return self.state.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take values by original names; see ``ParameterState.load_state_dict``."""
        self.require_drained("loading a state dict")
        self.state.load_state_dict(values)
        self.values.refresh()
        if self.loosely is not None:
            self.loosely.renew()

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the replicas' losses where each has its own; else the loss. Collective."""
        return loss if self.loosely is None else self.loosely.mean(loss)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole CPU tensors on rank 0, empty elsewhere. Collective."""
        self.require_drained("a state dict")
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


def _buffers(plan: Plan, facts: Mapping[Place, BoundaryMetadata]) -> list[dict[str, Spec]]:
    """Stage → buffer → where it is kept: as the chunk that writes it has it, else the first that reads it."""
    out: list[dict[str, Spec]] = [{} for _ in plan.stages]
    for (stage, _), fact in facts.items():
        written = {name: fact.buffers[name] for name in fact.written}
        out[stage] = {**fact.buffers, **out[stage], **written}
    return out


def _groups(plan: Plan, facts: Mapping[Place, BoundaryMetadata], cuda: bool) -> Groups:
    """The groups in which messages between stages go: to later stages in another than to earlier ones. Collective.

    Gloo holds a pair of ranks locked while it writes to or reads from it, and its thread, woken by a message, spins
    until a send of the other direction is written: two directions in one group cost a ZB-V step of two ranks 5 %.
    NCCL matches messages by order alone: a communicator per direction of an edge keeps one from waiting behind the
    other, and one per edge where stages have several chunks, whose messages pass each other.
    """
    links = [link for link in links_of(plan, facts) if not link.is_local]
    if not links:
        return lambda source, target: (None, None)
    if not cuda:
        up = dist.new_group()
        return lambda source, target: (None, up) if source[0] < target[0] else (up, None)
    shared = (dist.new_group(), dist.new_group())
    own: dict[tuple[Place, Place], tuple[Any, Any]] = {}
    if plan.num_chunks > 1:
        own = {
            ends: (dist.new_group(), dist.new_group()) for ends in dict.fromkeys((k.source, k.target) for k in links)
        }
    return lambda source, target: own.get((source, target), shared)


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
