"""``Parallel``: a model bound to its plan and to this job's ranks, as ``api.parallelize`` returns it.

It is long because it is one object that users hold: every method of it is theirs, and most of them hand on to the
runtime. Below it are ``Batches`` and ``Outputs``, which capture the model again for batches and evaluations of other
shapes, and so may not live in the runtime.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

from .compiler.frontend.batch_containers import call_arguments, register_containers
from .compiler.frontend.example_inputs import batch_dims_of, batch_extent, flat_inputs
from .compiler.frontend.mixed_precision import in_precision
from .compiler.frontend.padding import Padding, capture_padded
from .compiler.ir.graph import Graph, Result, Source
from .compiler.ir.program import ChunkProgram
from .compiler.ir.spec import Pair
from .compiler.pipeline.measured import MeasuredStep
from .compiler.plan.lower import lower
from .compiler.plan.plan import Plan
from .compiler.plan.recompute import PlanLayers
from .compiler.plan.validation import is_asynchronous, require_valid
from .compiler.report.calibration import Recalibration
from .compiler.report.explain import idle_text
from .compiler.report.reprice import reprice
from .compiler.report.step_report import THRESHOLD, Report
from .compiler.search.evaluation import plan_evaluation
from .compiler.verification.capture_check import check_capture, is_cheap
from .costmodel.cluster import Cluster
from .costmodel.files import write_atomically
from .costmodel.tables import cache_directory
from .run_report import foreign_bytes, gather_report, gather_trace, recalibration
from .runtime.checkpoint import CheckpointWriter, LiveState, load_checkpoint, load_state
from .runtime.execution.compilation import Compiler, backend_of
from .runtime.execution.independent_replicas import SYNCHRONOUS, LocalUpdates
from .runtime.execution.session import BatchPrograms, Session, SessionOptions
from .runtime.parameters.state import Init, ModelInfo, without_initial_values, without_values
from .runtime.profiling.cluster_profile import default_cluster
from .runtime.profiling.memory_meter import live_bytes
from .runtime.transport.error_propagation import broadcast_from_rank0, fail_together, share_from
from .runtime.transport.first_error import publishes_errors
from .runtime.transport.launch import await_all_ranks

__all__ = ["OptimizerFactory", "Outputs", "Parallel", "Planner", "TrainingOptions"]


OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Planner(Protocol):
    """Makes the plans of a ``Parallel``, which never searches. Called on rank 0 alone."""

    @property
    def needs_cluster(self) -> bool:
        """True if the ranks' own machine must be measured first."""
        ...

    @property
    def codes(self) -> tuple[str, ...]:
        """The codecs that messages may use; a measurement of the machine times them."""
        ...

    def decide(
        self, graph: Graph, cluster: Cluster | None, batch: Callable[[], int], capture_s: float
    ) -> tuple[Plan, int]:
        """The plan to train by, and for how many steps gradients may travel. batch: the samples of the example."""
        ...

    def plan_again(self, graph: Graph, cluster: Cluster, plan: Plan) -> Plan:
        """The best plan on another cluster for what ``plan`` was asked for."""
        ...


@dataclass(frozen=True)
class TrainingOptions:
    """The arguments of ``parallelize`` about the model and its training, beside the plan."""

    loss_fn: Callable[..., torch.Tensor] | None = None
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None
    optimizer: OptimizerFactory | None = None
    clip_grad_norm: float | None = None
    data: str = "global"
    init: Init | None = None
    state_dict: Mapping[str, torch.Tensor] | None = None
    seed: int = 0
    compile: bool | str = False
    local_updates: LocalUpdates = SYNCHRONOUS
    pad_to_multiple_of: int | None = None
    #: compare the capture with the model; None: where that is cheap
    check_capture: bool | None = None


def _programs(graph: Graph, plan: Plan, stage: int | None) -> list[ChunkProgram]:
    """The local programs of a stage's chunks; none on an idle rank."""
    if stage is None:
        return []
    return [lower(graph, plan, stage, chunk) for chunk in range(len(plan.stages[stage].chunks))]


class Parallel:
    """A model bound to its plan and to this job's ranks. Made by ``parallelize``; every method is called by all ranks
    alike."""

    def __init__(self, model: nn.Module, cluster: Cluster | None, planner: Planner, options: TrainingOptions) -> None:
        self._model, self._cluster, self._planner, self._options = model, cluster, planner, options
        self._backend = backend_of(options.compile)
        self._padding = Padding()
        self._session: Session | None = None
        self._plan: Plan | None = None
        self._graph: Graph | None = None
        self._training = True
        self._first = False  # whether the first batch stands for the example inputs
        self._dims: dict[str, int | None] = {}  # of the training inputs
        self._fixed: dict[str, Any] = {}  # inputs that are no tensors: captured by value
        self._outputs: Outputs | None = None
        self._checkpoints = CheckpointWriter()
        self._batches: Batches | None = None
        self._foreign: list[weakref.ref[torch.Tensor]] = []  # tensors of the model that was given
        self._live_bytes: int | None = None  # of this rank, in the last metered step

    # ---- binding

    @publishes_errors
    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> None:
        """Capture, ask for a plan, lower, and place the weights, for inputs like these."""
        options, started = self._options, time.perf_counter()
        register_containers(targets)
        args, kwargs = call_arguments(self._model, args, kwargs)
        inputs = flat_inputs(args, kwargs, targets)
        with fail_together():
            graph, self._padding = capture_padded(
                self._model, args, kwargs, targets, options.batch_dims, options.pad_to_multiple_of,
                loss_fn=options.loss_fn,
            )  # fmt: skip
        capture_s = time.perf_counter() - started
        decided, delay = self._agreed(graph, capture_s, inputs, lambda: self._compare(graph, args, kwargs, targets))
        with fail_together():
            if decided.model != graph.fingerprint():
                raise ValueError(
                    f"every rank passes the same model, but got {graph.fingerprint()} on this rank and {decided.model} "
                    "on rank 0; build it alike on all ranks"
                )
            weights = self._weights(graph)
        self._session = self._session_of(graph, decided, weights, options.init, delay)
        self._foreign = [weakref.ref(x) for x in (*self._model.parameters(), *self._model.buffers())]
        self._model = without_values(self._model)  # what ranks hold is in the session; evaluation needs the code
        self._batches = Batches(self._model, self._session, graph, batch_dims_of(inputs, options.batch_dims), options)
        self._batches.planned = {n: x.shape for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        self._graph, self._plan, self._dims = graph, decided, batch_dims_of(inputs, options.batch_dims)
        self._fixed = {name: x for name, x in inputs.items() if not isinstance(x, torch.Tensor)}

    def _session_of(self, graph: Graph, plan: Plan, weights: Any, init: Init | None, delay: int) -> Session:
        """A session of this model under a plan. Collective."""
        options = self._options
        with fail_together():
            small = in_precision(graph, plan.precision).with_batch(plan.microbatch_size)
            programs = _programs(small, plan, plan.stage_of(dist.get_rank()))
            compiler = self._compiler(small, plan)
        return Session(
            plan,
            programs,
            ModelInfo.of(graph, self._model),
            weights,
            SessionOptions(
                init=init,
                optimizer=options.optimizer,
                seed=options.seed,
                clip_grad_norm=options.clip_grad_norm,
                data=options.data,
                compiler=compiler,
                local_updates=replace(options.local_updates, delay=delay),
            ),
        )

    def _compiler(self, graph: Graph, plan: Plan) -> Compiler | None:
        """The compiler of this rank's programs. ValueError where the machine has none."""
        if self._backend is None:
            return None
        layering = PlanLayers(graph, plan).layering
        classes = [layer.class_key for layer in layering.layers]
        return Compiler(self._backend, layering.layer_of, classes, cache_directory() / "inductor")

    def _compare(self, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> None:
        """Compare the capture with the model, at the first bind, if asked for or cheap. A padded capture has other
        inputs, and checks of its own."""
        options = self._options
        compare = is_cheap(graph) if options.check_capture is None else options.check_capture
        has_loss = any(result.kind == "loss" for result in graph.results)
        if compare and has_loss and self._session is None and not options.pad_to_multiple_of:
            check_capture(self._model, graph, args, kwargs, targets, options.loss_fn)

    def _agreed(
        self, graph: Graph, capture_s: float, inputs: Mapping[str, Any], compare: Callable[[], None]
    ) -> tuple[Plan, int]:
        """Rank 0's plan and its delay, on every rank; ``compare`` is called on rank 0 before."""
        planner, cluster = self._planner, self._cluster
        if cluster is None and planner.needs_cluster:
            cluster = default_cluster(planner.codes)

        def batch() -> int:
            if self._options.data == "local" and self._first:
                raise ValueError(
                    "under data='local' a rank's first batch is not the global one, but got neither global_batch nor "
                    "example_inputs; pass one of them to parallelize"
                )
            return batch_extent(graph, inputs)

        def decide() -> tuple[dict[str, Any], int]:
            compare()
            plan, delay = planner.decide(graph, cluster, batch, capture_s)
            return plan.noted(*self._padding.notes).to_json(), delay

        document, delay = broadcast_from_rank0(decide)
        decided = Plan.from_json(document)
        if dist.get_rank() == 0:
            for said in filter(None, (decided.price_note, idle_text(decided))):
                print(f"meshwright: {said}", file=sys.stderr, flush=True)
        if decided.num_devices != dist.get_world_size():
            raise ValueError(
                f"a plan runs on as many ranks as its cluster has devices, but got a plan for {decided.num_devices} "
                f"and {dist.get_world_size()} ranks; start {decided.num_devices} ranks or plan again"
            )
        return decided, delay

    def _weights(self, graph: Graph) -> nn.Module | dict[str, torch.Tensor]:
        """The model, or the given state dict with the model's buffers that state dicts leave out. ValueError for a name
        that is not the model's."""
        given = self._options.state_dict
        if given is None:
            return self._model
        nodes = graph.placeholders("buffer")
        hidden = {node.meta["source"].name for node in nodes if not node.meta["source"].persistent}
        buffers = {name: x for name, x in self._model.named_buffers() if name in hidden}
        names = set(self._model.state_dict())
        if unknown := [name for name in given if name not in names]:
            raise ValueError(
                f"state_dict= has the names of the model, but got {', '.join(map(repr, unknown[:5]))} besides; "
                "is it of another model?"
            )
        return {**buffers, **given}

    @property
    def session(self) -> Session:
        """The runtime behind this object; ValueError before the first step where no example inputs were given."""
        if self._session is None:
            raise ValueError("there is no plan yet: pass example_inputs to parallelize, or call train_step first")
        return self._session

    # ---- training

    @publishes_errors
    def train_step(
        self,
        *inputs: Any,
        targets: Any = (),
        outputs: Sequence[str] = (),
        metrics: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """``forward_backward`` and ``optimizer_step``: the global loss (0-d), on every rank; with ``delay`` or
        ``local_steps`` that of this rank's replica.

        inputs: as the model takes them; a mapping alone is its keyword arguments. A batch of another size, or with
        sequences of another length, trains by the same plan; its programs are kept by shape. outputs: names of the
        model's outputs ("logits", "1", "output" for one that is all); then (loss, {name: whole tensor}) is returned,
        on every rank. metrics: a function of these outputs, in their order, and then of the targets; it is called once
        a step, on the whole batch, by a rank that has the outputs, and (loss, its result) is returned on every rank.

        Under schedule "pipedream" the batch is only put in, and the loss is that of step ``loss_step``: the newest that
        is known without waiting, NaN while the pipeline fills. ``flush`` finishes what is in flight.
        """
        if metrics is not None and not outputs:
            raise ValueError("metrics= is a function of outputs, but got none; name them, as in outputs=('logits',)")
        flat, batch = self._flat(inputs, kwargs, targets, outputs)
        loss = self.session.train_step(flat, None if batch is None else batch.programs)
        if not outputs:
            return loss
        assert batch is not None
        if metrics is None:
            return loss, batch.outputs(outputs)
        return loss, batch.measured(metrics, outputs, targets if isinstance(targets, tuple) else (targets,))

    @publishes_errors
    def flush(self) -> dict[int, torch.Tensor]:
        """Finish what schedule "pipedream" has in flight: step → loss of the batches whose loss was not returned yet.
        With ``delay`` or ``local_steps``: wait for what is on its way between replicas, and make them equal.

        Evaluation, state dicts and checkpoints need it before them. Otherwise there is nothing to do. Collective.
        """
        return self.session.flush()

    @publishes_errors
    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the replicas of the losses that ``train_step`` returned, where each has its own (``delay``,
        ``local_steps``); else the loss. Collective."""
        return self.session.mean_loss(loss)

    @property
    def loss_step(self) -> int | None:
        """The step, counted from 0, whose loss ``train_step`` returned last; None where it returned none."""
        return self.session.loss_step

    @publishes_errors
    def forward_backward(self, *inputs: Any, targets: Any = (), **kwargs: Any) -> torch.Tensor:
        """Accumulate the gradients of one global batch, in the plan's microbatches; the mean of their losses on every
        rank."""
        flat, batch = self._flat(inputs, kwargs, targets)
        return self.session.forward_backward(flat, batch=None if batch is None else batch.programs)

    def _flat(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, outputs: Sequence[str] = ()
    ) -> tuple[dict[str, Any], BoundBatch | None]:
        """Source name → input, and the programs for their shapes if those are not the plan's. Where there were no
        examples, these are what is captured, before there is a session."""
        inputs, kwargs = call_arguments(self._model, inputs, kwargs)
        targets = targets if isinstance(targets, tuple) else (targets,)
        register_containers(*targets)
        if self._session is None:
            self._first = True
            self.bind(inputs, kwargs, targets)
        flat = flat_inputs(inputs, kwargs, targets)
        self._check_names(flat)
        batch = self._batches(inputs, kwargs, targets, flat, tuple(outputs)) if self._batches is not None else None
        return (self._padding if batch is None else batch.padding).fill(flat), batch

    def _check_names(self, flat: Mapping[str, Any]) -> None:
        """ValueError unless these are the inputs that were captured."""
        if flat.keys() != self._dims.keys():
            raise ValueError(
                f"the model was captured with inputs {', '.join(self._dims)}, but got {', '.join(flat) or 'none'}; "
                "pass the same"
            )
        for name, value in self._fixed.items():
            if isinstance(flat[name], torch.Tensor) or flat[name] != value:
                raise ValueError(
                    f"an input that is no tensor keeps the value that it was captured with, but got {flat[name]!r} "
                    f"for {name!r}, which was {value!r}; pass it as a tensor, or parallelize again"
                )

    @publishes_errors
    def optimizer_step(self) -> None:
        """Clip (if asked to) and update; clears the gradients at the next ``forward_backward``."""
        self.session.optimizer_step()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer of this rank's parameters."""
        if self.session.optimizer is None:
            raise ValueError("no optimizer was given to parallelize, so there is none; pass optimizer=")
        return self.session.optimizer

    @property
    @publishes_errors
    def grad_norm(self) -> torch.Tensor:
        """The norm of the whole model's gradient before clipping, every unique element once (0-d; fp32, of models with
        fp64 weights fp64). Collective."""
        return self.session.grad_norm

    @property
    def loss_scale(self) -> float | None:
        """The factor on the loss in the next backward, under fp16; None if the loss is not scaled."""
        scale = self.session.loss_scale
        return None if scale is None else scale.scale

    @property
    def skipped_steps(self) -> int:
        """The optimizer steps that were left out so far because a gradient was not finite under fp16."""
        scale = self.session.loss_scale
        return 0 if scale is None else scale.skipped

    @property
    def plan(self) -> Plan:
        """The plan that this model trains by."""
        assert self._plan is not None or self.session is not None
        assert self._plan is not None
        return self._plan

    @property
    def data_index(self) -> int:
        """The index of the part of the batch that this rank passes under data="local"."""
        return self.session.data_index

    @property
    def data_count(self) -> int:
        """The number of parts of the batch under data="local"."""
        return self.session.data_count

    @publishes_errors
    def report(self, threshold: float = THRESHOLD) -> Report:
        """Predicted against measured: step, terms of every stage, memory of every rank. Collective: the same on every
        rank.

        Times are medians over the last steps, without the first. Where the step is off by more than ``threshold`` (a
        fraction), the report says which terms explain it.
        """
        return gather_report(self.plan, self.session, threshold, self._live_bytes)

    @publishes_errors
    def trace(self, path: str | os.PathLike[str] | None = None) -> MeasuredStep:
        """The last measured step of all ranks, on one clock, for ``Plan.to_html`` and ``Plan.to_chrome_trace``.
        Collective: the same on every rank. path: where rank 0 writes it as well. ValueError before a step was
        measured."""
        step = gather_trace(self.plan, self.session)
        if path is not None and self.session.rank == 0:
            write_atomically(path, json.dumps(step.to_json()))
        return step

    @publishes_errors
    def metered_step(self, *inputs: Any, targets: Any = (), **kwargs: Any) -> torch.Tensor:
        """A ``train_step`` that counts the bytes of live tensors for ``report``. Slower, so its times are left out.

        Under schedule "pipedream" it is flushed within, and returns its own loss; nothing may be in flight before.
        """
        if self._session is None:
            self._first = True
            self.bind(inputs, kwargs, targets if isinstance(targets, tuple) else (targets,))
        self.session.require_drained("metered_step")
        trace = self.session.trace
        trace.enabled = False
        try:
            with live_bytes(self.session.device) as reading:
                loss = self.train_step(*inputs, targets=targets, **kwargs)
                loss = {self.session.step - 1: loss, **self.flush()}[self.session.step - 1]
        finally:
            trace.enabled = True
        if reading.peak_bytes is not None:
            self._live_bytes = reading.peak_bytes - foreign_bytes(self._foreign, self.session)
        return loss

    @publishes_errors
    def recalibrate(self, path: str | os.PathLike[str] | None = None) -> Recalibration:
        """Refit the cluster to what the last steps took, price this plan on it, and plan again. Collective: the same on
        every rank; the running plan stays.

        path: where rank 0 saves the refitted cluster. Raises ValueError before a step was measured.
        """
        report, graph, plan = self.report(), self._graph, self.plan
        assert graph is not None

        def search(cluster: Cluster) -> Plan:
            return self._planner.plan_again(graph, cluster, plan)

        def find() -> Recalibration:
            result = recalibration(plan, report, lambda cluster: reprice(plan, graph, cluster), search)
            if path is not None:
                result.cluster.save(os.fspath(path))
            return result

        return broadcast_from_rank0(find)

    @publishes_errors
    def replan(
        self, cluster: Cluster | None = None, *, plan: Plan | None = None, global_batch: int | None = None
    ) -> Plan:
        """Go on under another plan, without a restart: weights, buffers and optimizer state move over the wire. Returns
        the plan. Collective: the same on every rank.

        cluster: plan again for it, such as ``recalibrate().cluster``; by default for the plan's own. It has one device
        for each rank. plan: take this one instead, such as ``recalibrate().best``. global_batch: the samples of a step
        from now on. The training goes on where it was: step, loss scale, and ``optimizer`` stay the same objects and
        numbers, as far as sums in another order allow. What sums of compressed gradients still owe is lost, with a
        warning. Under data="local", ``data_index`` and ``data_count`` may change.

        While state moves, a rank holds that of both plans. ValueError, and nothing is changed, if no such plan exists;
        after ``forward_backward`` without ``optimizer_step``; and where replicas step by themselves or steps overlap.
        """
        session, graph, planner = self.session, self._graph, self._planner
        assert graph is not None
        session.require_replaceable()
        self._checkpoints.wait()

        def decide() -> dict[str, Any]:
            if plan is not None:
                require_valid(plan, graph, runnable=True)
                return plan.to_json()
            hardware = Cluster.from_json(json.dumps(self.plan.cluster)) if cluster is None else cluster
            asked = self.plan if global_batch is None else replace(self.plan, global_batch=global_batch)
            return planner.plan_again(graph, hardware, asked).noted(*self._padding.notes).to_json()

        decided = Plan.from_json(broadcast_from_rank0(decide))
        if decided.num_devices != dist.get_world_size():
            raise ValueError(
                f"a plan runs on as many ranks as its cluster has devices, but got a plan for {decided.num_devices} "
                f"and {dist.get_world_size()} ranks; start {decided.num_devices} ranks, and load a checkpoint there"
            )
        if is_asynchronous(decided):
            raise ValueError(
                f"another plan takes over with synchronous steps, but got one of schedule {decided.schedule!r}; take "
                "another schedule, or save a checkpoint and start under that plan"
            )
        live = LiveState(session)
        following = self._session_of(graph, decided, None, without_initial_values, 0)
        load_state(following, live)
        following.keep_optimizer(session.optimizer)
        self._session, self._plan, self._outputs = following, decided, None
        batches = Batches(self._model, following, graph, self._dims, self._options)
        assert self._batches is not None
        batches.planned, self._batches = self._batches.planned, batches
        session.close()
        return decided

    # ---- outputs

    def train(self, mode: bool = True) -> Parallel:
        """Select the training capture for ``parallel(x)`` (``mode=False``: evaluation)."""
        self._training = mode
        return self

    def eval(self) -> Parallel:
        """Select the evaluation capture for ``parallel(x)``."""
        return self.train(False)

    @publishes_errors
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's whole output on every rank, without gradients; any batch size, the whole batch on every rank.

        In training mode dropout draws as in the first microbatch of the next step and batch norm uses the batch's
        statistics; running statistics stay as they are. Weights and buffers are those of training so far.
        """
        session = self.session
        inputs, kwargs = call_arguments(self._model, inputs, kwargs)
        if self._outputs is None:
            assert self._graph is not None
            self._outputs = Outputs(self._model, session, self._graph, self._dims, self._options.pad_to_multiple_of)
        return self._outputs(inputs, kwargs, self._training)

    # ---- state

    @publishes_errors
    def state_dict(self) -> dict[str, Any]:
        """Original names → DTensors: what this rank's stage holds."""
        return self.session.state_dict()

    @publishes_errors
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take values by original names, whole tensors or DTensors."""
        self.session.load_state_dict(values)

    @publishes_errors
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Original names → whole CPU tensors on rank 0, empty elsewhere; loads into the original model."""
        return self.session.full_state_dict()

    @publishes_errors
    def save_checkpoint(
        self,
        run: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Write all that continues the training into the folder ``run/step-<steps so far>``, and return that folder.

        In it are weights (fp32 masters under mixed precision), buffers, optimizer state, step, loss scale, residuals of
        codecs, the states of torch's, Python's and numpy's random generators, and the plan, as ``plan.json``. The
        folder appears when everything is on disk, so whatever is killed meanwhile, the checkpoint before stays whole.

        extra: what else to keep, by name: objects with ``state_dict`` (a learning rate scheduler, the loader), or
        numbers, texts, tensors, and lists, tuples and mappings of them; those of rank 0 count. keep: the number of
        checkpoints that stay in ``run``; None: all. asynchronous: return when the state is copied to the CPU, and write
        while training goes on; the next call, or ``wait_for_checkpoint``, waits until it is complete, and raises what
        went wrong. Collective; all ranks need the same folder. ValueError, on every rank, if it cannot be written.
        """
        return self._checkpoints.save(self.session, run, extra, keep, asynchronous)

    @publishes_errors
    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint that is being written is complete. Collective. ValueError, on every rank, if it
        could not be written."""
        self._checkpoints.wait()

    @publishes_errors
    def load_checkpoint(
        self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Continue from what ``save_checkpoint`` wrote, under this or another plan and number of ranks, and return what
        was saved as ``extra``, states for objects.

        path: a checkpoint's folder, or that of a run, whose newest complete checkpoint is taken. extra: objects whose
        ``load_state_dict`` takes up the state that was saved under their name. Random generators go on where they were
        if the number of ranks is as before; residuals of codecs if the plan is. Collective. ValueError, on every rank,
        if nothing complete is there, if it is of another model, or if bytes have changed since (each block has a
        checksum); after the last one, load another checkpoint before you train.
        """
        self._checkpoints.wait()
        return load_checkpoint(self.session, path, extra)


# ---- outputs of a model in training: captured and lowered once for each kind of inputs


_Bound = dict[int, tuple[Plan, list[ChunkProgram]]]  # batch → plan, and this rank's programs


class Outputs:
    """Computes the outputs of ``model`` with the weights of ``session``. graph: of the training; batch_dims: of its
    inputs; pad_to_multiple_of: as in ``parallelize``. Every rank calls it alike."""

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        graph: Graph,
        batch_dims: Mapping[str, int | None],
        pad_to_multiple_of: int | None,
    ) -> None:
        self._model, self._session, self._graph = model, session, graph
        self._batch_dims, self._multiple = batch_dims, pad_to_multiple_of
        self._captured: dict[Any, tuple[Graph, Padding, _Bound]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        """The model's whole output on every rank, for a batch of any size; ``training``: in that mode."""
        flat = flat_inputs(args, kwargs, ())
        graph, padding, plan, programs = self._bound(args, kwargs, flat, training)
        outputs = self._session.forward(padding.fill(flat), plan, programs)
        nodes = graph.by_name()
        leaves: list[Any] = [None] * graph.output_spec.num_leaves
        for result in graph.results:
            if result.kind == "output":
                source = nodes[result.node].meta.get("source")
                value = outputs.get(result.name)
                if source is not None:
                    value = self._given(source, flat, graph)
                elif value is not None:
                    value = padding.cut(result.name, value)
                leaves[int(result.name)] = value
        return pytree.tree_unflatten(leaves, graph.output_spec)

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Mapping[str, Any], training: bool
    ) -> tuple[Graph, Padding, Plan, list[ChunkProgram]]:
        """The graph for inputs like these, with a plan at their batch; made once."""
        given = {name: dim for name, dim in self._batch_dims.items() if isinstance(flat.get(name), torch.Tensor)}
        dims, of = batch_dims_of(flat, given), self._session.plan
        key = (training, *((name, _kind(x, dims[name])) for name, x in flat.items()))
        if key not in self._captured:
            with fail_together():
                captured, padding = capture_padded(
                    self._model, args, kwargs, (), given, self._multiple, training=training, outputs=True
                )
                self._captured[key] = in_precision(captured, of.precision), padding, {}
        graph, padding, bound = self._captured[key]
        batch = next((int(flat[name].shape[dim]) for name, dim in dims.items() if dim is not None), 1)
        if batch not in bound:
            with fail_together():
                small, cluster = graph.with_batch(batch), Cluster.from_json(json.dumps(of.cluster))
                evaluated = plan_evaluation(small, of, cluster, self._buffers())
                stage = evaluated.stage_of(dist.get_rank())
                bound[batch] = (evaluated, [] if stage is None else [lower(small, evaluated, stage)])
        return (graph, padding, *bound[batch])

    def _given(self, source: Source, flat: Mapping[str, Any], graph: Graph) -> Any:
        """An output that the model only passes on."""
        if source.kind == "input":
            return flat[source.name]
        state = self._session.state
        return graph.constants[source.name].clone() if source.kind == "constant" else state.whole(source.name)

    def _buffers(self) -> dict[str, dict[int, Pair]]:
        """Buffer → stage → its pair there."""
        out: dict[str, dict[int, Pair]] = {}
        for node in self._graph.placeholders("buffer"):
            for index, stage in enumerate(self._session.plan.stages):
                for chunk in stage.chunks:
                    if node.name in chunk.sources:
                        out.setdefault(node.meta["source"].name, {})[index] = chunk.sources[node.name]
        return out


def _kind(leaf: Any, batch_dim: int | None) -> tuple[Any, ...]:
    """The key of an input for a capture: a tensor's dtype and extents without the batch, any other value itself."""
    if not isinstance(leaf, torch.Tensor):
        return (repr(leaf),)
    return leaf.dtype, *(None if dim == batch_dim else extent for dim, extent in enumerate(leaf.shape))


# ---- batches of other shapes than the plan's, and outputs of training


@dataclass(frozen=True)
class BoundBatch:
    """The programs for batches of one shape. output_dims: of the outputs that they give, name → (result, the dim of
    the batch)."""

    programs: BatchPrograms
    padding: Padding
    #: of the outputs
    cuts: Padding
    output_dims: Mapping[str, tuple[str, int]]

    def outputs(self, names: Sequence[str], shared: bool = True) -> dict[str, torch.Tensor]:
        """Name → whole tensor of the last batch, on every rank; not ``shared``: those of its own stage. Collective."""
        values, dims = self.programs.outputs(shared), self.output_dims
        whole = {name: torch.cat(values[dims[name][0]], dims[name][1]) for name in names if dims[name][0] in values}
        return {name: self.cuts.cut(dims[name][0], x) for name, x in whole.items()}

    def measured(self, metrics: Callable[..., Any], names: Sequence[str], targets: tuple[Any, ...]) -> Any:
        """The result of ``metrics`` for the outputs of the last batch, on every rank, its tensors on the CPU. Only the
        result leaves the stage, unless the outputs are of several. Collective."""
        home = self.programs.home
        outputs = self.outputs(names, shared=home is None)

        def measure() -> Any:
            with torch.no_grad():
                found = metrics(*(outputs[name] for name in names), *targets)
            return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), found)

        return share_from(home or 0, measure)


class Batches:
    """The training programs of ``session`` by the shapes of batches, and by the outputs that are asked of them. Every
    rank calls it alike. Batches of the planned shapes without outputs are the session's own."""

    planned: Mapping[str, torch.Size]

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        graph: Graph,
        batch_dims: Mapping[str, int | None],
        options: TrainingOptions,
    ) -> None:
        self._model, self._session, self._graph = model, session, graph
        self._dims, self._options = batch_dims, options
        self._bound: dict[Any, BoundBatch | ValueError] = {}
        batch = next((dim for dim in batch_dims.values() if dim is not None), None)
        self._has_batch = batch is not None

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...],
        flat: Mapping[str, Any],
        outputs: tuple[str, ...],
    ) -> BoundBatch | None:
        """The programs for this batch; None: the session's own, or it has other dtypes or dims, which they refuse.
        ValueError for a batch that the plan cannot cut."""
        tensors = {name: x for name, x in flat.items() if isinstance(x, torch.Tensor)}
        expected = self._session.input_sharder.expected
        whole, dims = self._session.plan.global_batch // self._session.data_count, self._dims
        planned = {
            name: tuple(whole if dim == dims[name] else extent for dim, extent in enumerate(shape))
            for name, shape in self.planned.items()
        }
        same = all(tuple(x.shape) == planned[name] for name, x in tensors.items())
        if same and not outputs:
            return None
        if any(x.ndim != len(planned[name]) or x.dtype != expected.get(name, (0, x.dtype))[1] or (
            self._dims[name] is None and not outputs and x.ndim == 0) for name, x in tensors.items()):  # fmt: skip
            return None
        key = (outputs, *((name, *x.shape) for name, x in tensors.items()))
        if key not in self._bound:
            await_all_ranks("training on a batch of another shape", 60.0)
            self._bound[key] = self._bind(args, kwargs, targets, tensors, outputs)
        found = self._bound[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def _bind(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...],
        tensors: Mapping[str, torch.Tensor],
        outputs: tuple[str, ...],
    ) -> BoundBatch | ValueError:
        session, options = self._session, self._options
        dims = {name: self._dims[name] for name in tensors}
        try:
            with fail_together():
                graph, padding = capture_padded(
                    self._model, args, kwargs, targets, dims, options.pad_to_multiple_of, loss_fn=options.loss_fn
                )
                self._require_alike(graph)
                results: dict[str, tuple[Result, int]] = {}
                cuts = padding
                if outputs:
                    results, cuts = self._output_results(graph, args, kwargs, dims, outputs)
                batch = batch_extent(graph, tensors) * session.data_count
                if batch % session.plan.microbatches:
                    raise ValueError(f"{batch} samples do not divide into {session.plan.microbatches} microbatches")
                plan = replace(session.plan, model=graph.fingerprint(), global_batch=batch)
                require_valid(plan, graph, runnable=True)
                whole = replace(graph, results=(*graph.results, *(result for result, _ in results.values())))
                small = in_precision(whole, plan.precision).with_batch(plan.microbatch_size)
                programs = _programs(small, plan, plan.stage_of(dist.get_rank()))
        except ValueError as why:
            return self._refused(tensors, why) if not outputs else why
        found = session.bind_batch(plan, programs)
        return BoundBatch(found, padding, cuts, {name: (result.name, dim) for name, (result, dim) in results.items()})

    def _refused(self, tensors: Mapping[str, torch.Tensor], why: ValueError) -> ValueError:
        """The error of a batch that has not the plan's shapes and cannot have its own."""
        try:
            self._session.input_sharder.check_types(tensors)
        except ValueError as error:
            return ValueError(f"{error} (the plan does not hold for that shape: {why})")
        return why

    def _require_alike(self, graph: Graph) -> None:
        """ValueError unless the graph has the ops of the one that was planned."""
        ours, theirs = ([(n.name, str(n.target)) for n in g.ops()] for g in (self._graph, graph))
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            got = f"{len(ours)} and {len(theirs)} of them" if at is None else f"{theirs[at][0]} for {ours[at][0]}"
            raise ValueError(
                f"a plan holds for batches of other shapes if the model runs the same ops on them, but got {got}; "
                "pad the batch, or parallelize again for it"
            )

    def _output_results(
        self,
        graph: Graph,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Mapping[str, int | None],
        names: Sequence[str],
    ) -> tuple[dict[str, tuple[Result, int]], Padding]:
        """Name → (the result of the training graph that it is, its batch dim); and the padding of the outputs."""
        if self._session.data_count > 1:
            raise ValueError("outputs= of a training step need data='global', but got data='local'; call parallel(x)")
        given = {name: dim for name, dim in dims.items() if not name.startswith("targets.")}
        model_graph, padding = capture_padded(
            self._model, args, kwargs, (), given, self._options.pad_to_multiple_of, training=True, outputs=True
        )
        spec = model_graph.output_spec
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
        index = {
            ".".join(str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path) or "output": str(i)
            for path, i in paths
        }
        by_name = {result.name: result.node for result in model_graph.results if result.kind == "output"}
        found = {}
        one, two = graph.with_batch(2), graph.with_batch(4)
        for name in names:
            node = by_name.get(index.get(name, ""))
            if node is None:
                raise ValueError(f"outputs= names tensors that the model gives ({', '.join(index)}), but got {name!r}")
            if node not in graph.by_name() or _past(graph, node) != _past(model_graph, node):
                raise ValueError(f"output {name!r} is not made by the training graph; call parallel(x) for it")
            shapes = [g.node(node).meta["type"].shape for g in (one, two)]
            moving = [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
            if len(moving) != 1 or graph.node(node).op == "placeholder":
                raise ValueError(
                    f"an output of a training step has a dim that is the batch, but got {name!r} of shape "
                    f"{list(shapes[0])} for 2 samples; call parallel(x) for it"
                )
            found[name] = Result("output", index[name], node), moving[0]
        return found, padding


def _past(graph: Graph, name: str) -> list[str]:
    """The ops that a tensor depends on, as text."""
    members, todo = set[str](), [graph.node(name)]
    while todo:
        node = todo.pop()
        if node.name not in members:
            members.add(node.name)
            todo += node.all_input_nodes
    return [f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph if n.name in members and n.op != "placeholder"]
