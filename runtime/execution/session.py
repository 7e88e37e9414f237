"""A session: one rank's stage of a plan, bound to real ranks, with everything that a training step needs.

    construct   groups → weights → gradient reduction → executor → optimizer     (collective, in this order everywhere)
    step        forward_backward (repeat to accumulate) → optimizer_step

Nothing is planned after construction. An idle rank takes part in the collectives and owns nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...compiler.ir.graph import TensorType
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
from ..parameters.optimizer_shards import ValueGatherer, make_optimizer_shards
from ..parameters.state import Init, ModelInfo, ParameterState, Weights
from ..parameters.tied import TiedParameters, parameter_layout
from ..profiling.trace import Trace, peak_bytes
from ..transport.cross_mesh import wire
from ..transport.error_propagation import fail_together
from ..transport.process_groups import bind_all, new_group, opened_groups
from ..transport.shared_memory import SharedMemory, SharedMemoryMessages
from .boundary_metadata import boundaries_of, exchange_boundaries, programs_of
from .chunk import Groups, RankResources, StageTransport
from .compilation import Compiler
from .evaluation import Evaluation, whole_output
from .executor import Executor
from .independent_replicas import SYNCHRONOUS, IndependentReplicas, LocalUpdates
from .input_sharding import InputSharder
from .pipedream import OverlappingSteps, StashingExecutor

__all__ = ["BatchPrograms", "Session", "SessionOptions"]


@dataclass(frozen=True)
class BatchPrograms:
    """The training programs for batches of one shape, bound to a session's weights, gradients and optimizer."""

    executor: Executor
    boundaries: Mapping[Place, BoundaryMetadata]

    @property
    def home(self) -> int | None:
        """The first rank of the stage that makes all outputs; None if they are of several stages."""
        stages = {index for (index, _), boundary in self.boundaries.items() if boundary.outputs}
        return self.executor.plan.stages[stages.pop()].devices[0] if len(stages) == 1 else None

    def outputs(self, shared: bool = True) -> dict[str, list[torch.Tensor]]:
        """Output → its whole values of the last batch, by microbatch, on every rank; not ``shared``: of other stages
        than the rank's own, nothing. Collective."""
        return {
            name: self._whole(index, chunk, name, kind, shared)
            for (index, chunk), boundary in self.boundaries.items()
            for name, kind in boundary.outputs.items()
            if shared or name in self.executor.training_outputs
        }

    def _whole(self, index: int, chunk: int, name: str, kind: TensorType, shared: bool) -> list[torch.Tensor]:
        """One output of a chunk. All stages take part in one sum, to which one rank adds: a broadcast would let its
        receivers go on to the next step's messages while it is under way."""
        executor, plan = self.executor, self.executor.plan
        shape = (plan.microbatches, *kind.shape)
        values = torch.zeros(shape, dtype=kind.dtype, device=executor.state.device)
        devices, local = plan.stages[index].devices, executor.training_outputs.get(name)
        if local is not None:
            mine = torch.stack([whole_output(x, executor, chunk, name) for x in local])
            if not shared or executor.state.rank == devices[0] or len(devices) == plan.num_devices:
                values = mine
        if shared and len(devices) < plan.num_devices:
            dist.all_reduce(wire(values))
        return list(values)


@dataclass(frozen=True)
class SessionOptions:
    """The choices of a training run that a plan leaves open."""

    #: a function, or a state dict, for the tensors that the weights lack or have on the meta device
    init: Init | Mapping[str, torch.Tensor] | None = None
    #: a function from local parameters to a torch optimizer; None: gradients only
    optimizer: OptimizerFactory | None = None
    seed: int = 0
    clip_grad_norm: float | None = None
    #: "global": every rank passes the whole batch; "local": its own part
    data: str = "global"
    #: the device that this rank computes on; by default its CUDA device under NCCL, else the CPU
    device: torch.device | None = None
    bucket_bytes: int = BUCKET_BYTES
    #: the compiler of training programs; evaluation runs op by op
    compiler: Compiler | None = None
    local_updates: LocalUpdates = SYNCHRONOUS


class Session:
    """A plan and this rank's programs, bound to the running process group; every constructor call is collective.

    programs: of this rank's stage, one per chunk; empty on an idle rank. weights: a module or a state dict, rank 0's
    wins. Raises ValueError, alike on every rank, for a plan that does not fit the world, weights that are missing, and
    the like.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[ChunkProgram],
        model_info: ModelInfo,
        weights: Weights | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        options = options or SessionOptions()
        require_valid(plan, runnable=True)  # the document alone: whoever has the graph has compared them before
        self.plan, self.clip_grad_norm, self.seed, self.data = plan, options.clip_grad_norm, options.seed, options.data
        self.compiler = options.compiler
        # every phase communicates: all ranks go through them in this order
        with opened_groups() as self._process_groups:
            self.transport = transport = self._bind_groups(programs, options)
            self._place_weights(model_info, weights, options)
            self._build_gradient_reduction(model_info, options)
            self._build_executor(transport)
            self._build_optimizer(options)
            self.evaluation = Evaluation(plan, self.comm, self.state, transport.groups, self.seed)
        self.step = 0
        self.loss_step: int | None = None  # of the loss that ``train_step`` returned last
        self._batches = 0  # forward_backward calls since the last optimizer step
        self._stepped = True  # whether the gradients in the leaves are those of a finished step
        self._norm: torch.Tensor | None = None
        self._seconds: dict[str, float] = {}

    # ---- construction

    def _bind_groups(self, programs: Sequence[ChunkProgram], options: SessionOptions) -> StageTransport:
        """Make the process groups and exchange the boundaries of all stages."""
        plan, local_updates = self.plan, options.local_updates
        self.rank = dist.get_rank()
        cuda = dist.get_backend() == "nccl"
        default = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.device = options.device or default
        # independent replicas let one sum travel while another is encoded, each in groups of its own
        self.comm = bind_all(plan, 1 if local_updates.is_synchronous else LANES)
        self.stage = plan.stage_of(self.rank)
        self.programs = programs_of(plan, programs, self.stage)
        self.boundaries = exchange_boundaries(plan, boundaries_of(self.programs, self.stage))
        self.independent_replicas: IndependentReplicas | None = None
        if not local_updates.is_synchronous:
            self.independent_replicas = IndependentReplicas(local_updates, plan, self.programs, self.stage)
        self.independent_axes = self.independent_replicas.replicas.axes if self.independent_replicas else ()
        groups = _groups(plan, self.boundaries, cuda)
        on_host = self.device.type == "cpu" and not cuda and len(plan.stages) > 1
        shared_memory = SharedMemoryMessages(SharedMemory.connect()) if on_host else None
        self.loss_place = next(
            (place for place, boundary in self.boundaries.items() if boundary.loss is not None), None
        )
        return StageTransport(groups, shared_memory, options.seed)

    def _place_weights(self, model_info: ModelInfo, weights: Weights | None, options: SessionOptions) -> None:
        """Fill this rank's shards of parameters and buffers."""
        plan, init = self.plan, options.init
        writers = {name: place[0] for place, boundary in self.boundaries.items() for name in boundary.written}
        buffers = _buffers(plan, self.boundaries)
        self.state = ParameterState(plan, model_info, self.comm, self.device, buffers, writers)
        if isinstance(init, Mapping):
            weights, init = _merge(weights, init), None
        self.state.initialize(weights, init, options.seed)
        # frozen parameters have no gradient: the program says which those are
        for slot in (slot for program in self.programs for slot in program.slots):
            if slot.kind == "parameter":
                self.state.parameters[slot.name].requires_grad_(slot.requires_grad)

    def _build_gradient_reduction(self, model_info: ModelInfo, options: SessionOptions) -> None:
        """Cut the optimizer's shards out of the weights, and bind the sums by which their gradients travel."""
        plan, state = self.plan, self.state
        types = {name: entry.type for name, entry in model_info.parameters.items()}
        self.trace = Trace(self.device)
        with fail_together():  # one stage of an edited plan may be what cannot run
            shards = make_optimizer_shards(
                plan, self.stage, state.parameters, state.masters, self.comm, self.independent_axes
            )
            self.gradient_all_reduce = GradientAllReduce(plan, self.stage, self.comm, self.seed)
            self.reducer = GradientReducer(
                self.comm, self._partial_axes(), options.bucket_bytes, list(shards.values()), self.trace,
                self.gradient_all_reduce,
            )  # fmt: skip
        # the leaves that the optimizer updates, in which gradients are after the reduction
        self.updated_leaves = state.parameters | {name: shard.parameter for name, shard in shards.items()}
        self.tied = TiedParameters(plan, state.parameters, self.updated_leaves, types, self.rank, self.device, None)
        self.owned_parameters = {
            name: leaf for name, leaf in self.updated_leaves.items() if name not in self.tied.copies
        }
        self.layouts = {
            name: parameter_layout(plan, self.stage, name, "optimizer")
            for name in self.owned_parameters if self.stage is not None
        }  # fmt: skip
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        owned_shards = [shards[name] for name in self.owned_parameters if name in shards]
        self.value_gatherer = ValueGatherer(self.comm, owned_shards, options.bucket_bytes)
        doubles = any(kind.dtype is torch.float64 for kind in types.values())
        self._norm_dtype = torch.float64 if doubles else torch.float32  # the same on every rank

    def _build_executor(self, transport: StageTransport) -> None:
        """Bind the programs to their inputs, weights and ports."""
        plan = self.plan
        with fail_together():
            uses = [use for boundary in self.boundaries.values() for use in boundary.inputs]
            self.input_sharder = InputSharder(plan, uses, self.comm, self.device, self.data)
            resources = RankResources(plan, self.comm, self.state, self.input_sharder, compiler=self.compiler)
            self.executor = (StashingExecutor if is_asynchronous(plan) else Executor)(
                resources, self.programs, self.boundaries, transport,
                reducer=self.reducer, trace=self.trace, independent_axes=self.independent_axes,
            )  # fmt: skip

    def _build_optimizer(self, options: SessionOptions) -> None:
        """Make the optimizer over the parameters that this rank owns, and bind the steps of replicas that are
        independent and of pipelines that overlap."""
        self.optimizer: torch.optim.Optimizer | None = None
        trained = [leaf for leaf in self.owned_parameters.values() if leaf.requires_grad]
        if options.optimizer is not None:
            with fail_together():  # a factory may fail on the parameters of one stage only
                self.optimizer = make_optimizer(options.optimizer, trained, self.plan)
        if self.independent_replicas is not None:
            with fail_together():
                self.independent_replicas.bind(self.executor, self.tied, trained, self.gradient_all_reduce)
        self.overlapping: OverlappingSteps | None = None
        if isinstance(self.executor, StashingExecutor):
            loss = None if self.loss_place is None else (self.loss_place[0], self.boundaries[self.loss_place])
            with fail_together():
                self.overlapping = OverlappingSteps(
                    self.plan, self.executor, loss, self.optimizer, self.clip_grad_norm, self.device
                )

    def keep_optimizer(self, before: torch.optim.Optimizer | None) -> None:
        """Let the optimizer of an earlier session update this one's parameters, with the state that this one's has:
        what refers to it, such as a schedule of its rate, goes on."""
        made = self.optimizer
        if before is None or made is None:
            return
        for group, new in zip(before.param_groups, made.param_groups, strict=True):
            group["params"] = new["params"]
        before.state.clear()
        before.state.update(made.state)
        self.optimizer = before

    def close(self) -> None:
        """Give back the process groups of a session that another one follows. Collective."""
        dist.barrier()
        for group in self._process_groups:
            dist.destroy_process_group(group)

    def _partial_axes(self) -> list[tuple[nn.Parameter, tuple[int, ...], int]]:
        """(leaf, axes over which its gradient is partial, the chunk that keeps it) of every parameter, by chunk and
        program order."""
        if self.stage is None:
            return []
        sizes = self.plan.stages[self.stage].mesh_shape
        axes_of: dict[str, tuple[nn.Parameter, tuple[int, ...], int]] = {}
        for chunk, slot in ((c, slot) for c, program in enumerate(self.programs) for slot in program.slots):
            if slot.kind != "parameter" or slot.name in axes_of:  # one leaf, as the first chunk that reads it keeps it
                continue
            for axis, (value, cotangent) in enumerate(zip(slot.pair.value, slot.pair.cotangent, strict=True)):
                if slot.requires_grad and not (cotangent.is_partial or cotangent == value or sizes[axis] == 1):
                    raise ValueError(
                        f"the gradient of {slot.name!r} must lie as its value or be partial, but got {slot.pair} on "
                        f"axis {axis}; plan again"
                    )
            axes = (a for a, p in enumerate(slot.pair.cotangent) if p.is_partial and sizes[a] > 1)
            tight = tuple(axis for axis in axes if axis not in self.independent_axes)
            axes_of[slot.name] = (self.state.parameters[slot.name], tight, chunk)
        return list(axes_of.values())

    # ---- training

    def bind_batch(self, plan: Plan, programs: Sequence[ChunkProgram]) -> BatchPrograms:
        """Bind training programs for batches of another shape, or with outputs. plan: the session's, at their batch.
        Collective; ValueError where steps overlap or replicas step by themselves."""
        if self.overlapping is not None or self.independent_replicas is not None:
            raise ValueError(
                "batches of several shapes, and outputs of training, need synchronous steps, but got schedule "
                f"{plan.schedule!r}, delay or local_steps; use another schedule, or batches of one shape"
            )
        own = programs_of(plan, programs, self.stage)
        boundaries = exchange_boundaries(plan, boundaries_of(own, self.stage))
        with fail_together():
            uses = [use for boundary in boundaries.values() for use in boundary.inputs]
            sharder = InputSharder(plan, uses, self.comm, self.device, self.data)
            resources = RankResources(plan, self.comm, self.state, sharder, compiler=self.compiler)
            executor = Executor(resources, own, boundaries, self.transport, reducer=self.reducer, trace=self.trace)
        return BatchPrograms(executor, boundaries)

    def train_step(self, inputs: Mapping[str, torch.Tensor], batch: BatchPrograms | None = None) -> torch.Tensor:
        """Train on one global batch and return its loss (0-d), on every rank. batch: the programs for its shape, if it
        has another than the plan's.

        Of an asynchronous pipeline: put the batch in and return the newest loss that is known without waiting, that of
        step ``loss_step``; NaN while the pipeline fills. Raises NonFiniteLoss on every rank when a loss like that
        arrives.
        """
        if self.overlapping is None:
            loss = self.forward_backward(inputs, batch=batch)
            self.loss_step = self.step
            self.optimizer_step()
            return loss
        started = perf_counter()
        self._require_loss()
        self.input_sharder.check(inputs)
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
        if self.independent_replicas is not None and self.optimizer is not None:
            self.independent_replicas.flush(self.optimizer)
            self.value_gatherer.run()
            self.tied.publish_values()
        taken = [] if self.overlapping is None else self.overlapping.flush()
        self._require_finite(taken)
        return dict(taken)

    def require_drained(self, what: str) -> None:
        """ValueError while batches are in flight, or replicas differ."""
        if self.independent_replicas is not None:
            self.independent_replicas.require_drained(what)
        if self.overlapping is not None:
            self.overlapping.require_drained(what)

    def require_replaceable(self) -> None:
        """ValueError unless another session can take this one's place: between two synchronous steps."""
        if self.overlapping is not None or self.independent_replicas is not None:
            raise ValueError(
                f"another plan takes over between synchronous steps, but got schedule {self.plan.schedule!r}, delay or "
                "local_steps; save a checkpoint and load it under the other plan"
            )
        if not self._stepped:
            raise ValueError(
                "another plan takes over after optimizer_step, but got gradients of a step that is not finished"
            )

    def _require_loss(self) -> tuple[int, int]:
        """The (stage, chunk) of the loss; ValueError if there is none."""
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

    def forward_backward(
        self, inputs: Mapping[str, torch.Tensor], scale: float = 1.0, batch: BatchPrograms | None = None
    ) -> torch.Tensor:
        """Accumulate the gradients of one global batch; the mean loss over its microbatches (0-d) on every rank.

        inputs: source name → tensor, the global batch or this rank's part (``data``). scale: multiplies the gradients,
        not the loss. Call it again before ``optimizer_step`` to accumulate. Raises NonFiniteLoss on every rank, and
        NonFiniteGradient where gradients travel in a code.
        """
        started = perf_counter()
        self._require_loss()
        if self.overlapping is not None:
            self.overlapping.refuse_halves()
        executor = self.executor if batch is None else batch.executor
        executor.input_sharder.check(inputs)
        if self._stepped:
            self.trace.begin()
        with self.trace.call(batches=1):
            if self._stepped:
                for leaf in (*self.state.parameters.values(), *self.updated_leaves.values()):
                    leaf.grad = None
                self._stepped, self._batches = False, 0
            self._norm = None
            own, _ = executor.run(
                inputs, step=self.step, first_microbatch=self._batches * self.plan.microbatches,
                scale=scale * (self.independent_replicas.replicas.count if self.independent_replicas else 1),
                loss_scale=1.0 if self.loss_scale is None else self.loss_scale.scale,
            )  # fmt: skip
            self._batches += 1
            with self.trace.span("tied"):
                self.tied.gather_gradients()
            with self.trace.span("loss"):
                loss = self._share_loss(own)
            value = executor.loss.read(loss) if loss is own else float(loss)
        if not math.isfinite(value):
            self._stepped = True
            self._require_finite([(self.step, loss)])
        if self.independent_replicas is None:
            self._check_gradients()
        self._seconds = {"forward_backward_s": perf_counter() - started}
        return loss

    def _check_gradients(self) -> None:
        """Raise on every rank if a code found gradients of this batch that are not finite on any; under a scaled loss
        the step will be left out instead."""
        fault = self.reducer.fault
        if self.gradient_all_reduce.faults_differ:
            any_fault = torch.tensor(float(fault is not None), device=self.device)
            dist.all_reduce(any_fault, dist.ReduceOp.MAX)
            if any_fault and fault is None:
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
        devices, kind = self.plan.stages[self.loss_place[0]].devices, self.boundaries[self.loss_place].loss
        assert kind is not None
        if self.independent_replicas is not None:
            return self.independent_replicas.share_loss(loss, self.loss_place[0], kind.dtype, self.device)
        if len(devices) == self.plan.num_devices:
            assert loss is not None
            return loss
        shared_loss = torch.zeros(1, dtype=kind.dtype, device=self.device) if loss is None else loss.reshape(1).clone()
        dist.broadcast(shared_loss, devices[0])
        return shared_loss.reshape(())

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
            if self.independent_replicas is not None:
                with self.trace.span("gradient"):
                    self.independent_replicas.before_update()
                self._norm = None
            with self.trace.span("optimizer"):
                finite = self.loss_scale is None or bool(self.grad_norm.isfinite())  # the same on every rank
                if finite and self.clip_grad_norm is not None:
                    clip_gradients(self.owned_parameters.values(), self.grad_norm, self.clip_grad_norm)
                if finite:
                    self.optimizer.step()
                if self.independent_replicas is not None:
                    self.independent_replicas.after_update()
            with self.trace.span("gather"):
                if finite:
                    self.value_gatherer.run()
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
            norm = gradient_norm if self.independent_replicas is None else self.independent_replicas.gradient_norm
            self._norm = norm(self.owned_parameters, self.layouts, self.rank, self.device, self._norm_dtype)
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
        self.value_gatherer.refresh()
        if self.independent_replicas is not None:
            self.independent_replicas.renew()

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the replicas' losses where each has its own; else the loss. Collective."""
        return loss if self.independent_replicas is None else self.independent_replicas.mean(loss)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole CPU tensors on rank 0, empty elsewhere. Collective."""
        self.require_drained("a state dict")
        return self.state.full_state_dict()

    # ---- measurement

    @property
    def data_index(self) -> int:
        """The index of the part of the batch that this rank passes under data="local"."""
        return self.input_sharder.data_index

    @property
    def data_count(self) -> int:
        """Number of parts of the batch under data="local"."""
        return self.input_sharder.data_count

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


def _buffers(plan: Plan, boundaries: Mapping[Place, BoundaryMetadata]) -> list[dict[str, Spec]]:
    """Stage → buffer → where it is kept: as the chunk that writes it has it, else the first that reads it."""
    specs_of: list[dict[str, Spec]] = [{} for _ in plan.stages]
    for (stage, _), boundary in boundaries.items():
        written = {name: boundary.buffers[name] for name in boundary.written}
        specs_of[stage] = {**boundary.buffers, **specs_of[stage], **written}
    return specs_of


def _groups(plan: Plan, boundaries: Mapping[Place, BoundaryMetadata], cuda: bool) -> Groups:
    """The groups in which messages between stages go: to later stages in another than to earlier ones. Collective.

    Gloo holds a pair of ranks locked while it writes to or reads from it, and its thread, woken by a message, spins
    until a send of the other direction is written: two directions in one group cost a ZB-V step of two ranks 5 %.
    NCCL matches messages by order alone: a communicator per direction of an edge keeps one from waiting behind the
    other, and one per edge where stages have several chunks, whose messages pass each other.
    """
    links = [link for link in links_of(plan, boundaries) if not link.is_local]
    if not links:
        return lambda source, target: (None, None)
    if not cuda:
        up = new_group()
        return lambda source, target: (None, up) if source[0] < target[0] else (up, None)
    shared = (new_group(), new_group())
    edge_groups: dict[tuple[Place, Place], tuple[Any, Any]] = {}
    if plan.num_chunks > 1:
        edge_groups = {ends: (new_group(), new_group()) for ends in dict.fromkeys((k.source, k.target) for k in links)}
    return lambda source, target: edge_groups.get((source, target), shared)


def _merge(weights: Weights | None, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict over a module: the module gives what the state dict lacks (non-persistent buffers, say)."""
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(weights, nn.Module):
        tensors = {
            **dict(weights.named_parameters(remove_duplicate=False)),
            **dict(weights.named_buffers(remove_duplicate=False)),
        }
    elif weights is not None:
        tensors = dict(weights)
    return {**tensors, **values}
