"""The public functions ``plan``, ``pareto``, ``simulate`` and ``parallelize``.

This is the only place that joins capture, search and runtime. The public functions come first; below them, capturing
and searching for a request, and the planners from which a ``Parallel`` gets its plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import nn

from .compiler.cost.gradient_communication import AskedCommunication
from .compiler.errors import InfeasibleError
from .compiler.frontend.batch_containers import call_arguments, register_containers
from .compiler.frontend.capture import capture
from .compiler.frontend.example_inputs import batch_extent, flat_inputs
from .compiler.frontend.mixed_precision import in_precision
from .compiler.frontend.padding import check_multiple
from .compiler.intra_op.vectorised.row_cache import RowCache
from .compiler.ir.graph import Graph
from .compiler.memory.buffers import with_replica_memory
from .compiler.plan.plan import Plan
from .compiler.plan.validation import require_valid
from .compiler.report import what_if
from .compiler.report.completion import completed
from .compiler.search.driver import make_plans
from .compiler.search.local_sgd import LEAST_GAIN, chosen_delay, delay_taken, worthwhile_delay
from .compiler.search.parallel_shape import Strategy
from .compiler.search.plan_cache import cached_plans
from .compiler.search.request import PlanRequest
from .compiler.search.requests import fastest_plans, make_pareto_front, pareto_front, search_all
from .costmodel.cluster import Cluster, Mesh

if TYPE_CHECKING:  # planning starts a second sooner without the runtime and torch.distributed.tensor
    from torch.distributed.device_mesh import DeviceMesh

    from .parallel import OptimizerFactory, Parallel
    from .runtime.parameters.state import Init

__all__ = ["parallelize", "pareto", "plan", "simulate"]

Progress = Callable[[str, float], None]


@overload
def plan(model: nn.Module, cluster: Cluster | str, *, top_k: None = None, **arguments: Any) -> Plan: ...


@overload
def plan(model: nn.Module, cluster: Cluster | str, *, top_k: int, **arguments: Any) -> list[Plan]: ...


def plan(  # type: ignore[misc]  # the overloads do not repeat all arguments
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None,
    global_batch: int | None = None,
    microbatches: int | None = None,
    strategy: Strategy | Mapping[str, int] | str | None = None,
    schedule: str = "auto",
    optimizer: str = "AdamW",
    recompute: str | Mapping[str, str] = "auto",
    zero: str | int = "auto",
    sequence: bool = True,
    regular: str = "prefer",
    executable: bool = False,
    communication: AskedCommunication = None,
    precision: str = "model",
    constraints: Sequence[str] | str | None = None,
    like: Plan | None = None,
    keep: str | None = None,
    time_limit_s: float | None = None,
    top_k: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
    workers: int = 1,
) -> Plan | list[Plan]:
    """The best plan to train ``model`` on ``cluster``. Needs no ranks, no devices and no weights (meta is fine).

    cluster: a Cluster, or what ``Cluster.parse`` reads (``"p3.16xlarge:8"``, ``"local:4"``, a file). The example
    tensors give shapes and dtypes; their dim 0 is the batch where its extents agree (``batch_dims`` overrides).
    global_batch: samples per step, by default that of the example. optimizer: the name of a torch.optim class, which
    prices the update and sizes its state; "AdamW+fused" is made with ``fused=True``, "AdamW+masters" keeps fp32 masters
    of weights of 16 bits.

    The search decides everything else, unless it is given:

    microbatches    their number
    strategy        ``{"pp": 2, "dp": 1, "tp": 2}`` or ``"pp2,tp2"``, or stages one by one, each with its share of the
                    layers: ``"2:dp2 + 2:dp2 + 4:dp2,tp2"``
    schedule        "gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1" or "zb-v"; "pipedream" only if it is asked
                    for, since it changes the optimisation (docs/runtime.md)
    recompute       "none"; "full": save only what crosses a border between layers, and run each layer's forward again
                    for its backward; "selective": save the outputs of heavy ops as well; or a mode by pattern of layer
                    names, of which the last match counts ("none" for layers without a match)
    zero            0 to 3: the ZeRO level of parameters, where it is possible (0: nothing is sharded)
    sequence        False: do not shard sequence or spatial dimensions
    regular         "prefer": plans of equal device groups under one mesh, and others where these may gain 0.5 % or
                    more; "only" the former; "any": whatever is fastest (docs/search.md)
    executable      True: only plans that ``parallelize`` can execute (see ``Plan.not_executable``)
    communication   how gradients are summed. None or "exact": as the backend does it; "auto": by any exact algorithm of
                    ``costmodel.collectives``; "auto-lossy": also compressed by codecs of ``costmodel.codecs``; or names
                    of those that are allowed. A mapping has that for "gradients", and codecs (``codecs.CARRIERS``:
                    "bf16", "int8", …) for "activations" between stages and for "weights" under ZeRO-3. Both are lossy,
                    and used only if they are asked for
    precision       "model" (its own dtypes); "bf16" or "fp16" (activations, weights and gradients of two bytes, with
                    fp32 master weights and optimizer states); "auto": the faster of "model" and "bf16"
    constraints     what is pinned or forbidden, in the words of docs/search.md: "stage boundary at blocks.4", "no
                    tensor parallel"

    like, keep: a plan of this model whose decisions are kept, where nothing else is asked for: all of them, or what
    ``keep`` says ("stages 0-3", "layers blocks.*", "splits, recompute": see ``compiler.report.completion``).

    time_limit_s: after so many seconds, or Ctrl-C, take the best plan so far, with its gap and a note. top_k: return
    that many plans with different cuts, meshes or microbatch counts as a list, fastest first. cache: an earlier answer
    to the same question may be taken, and this one is saved ($MESHWRIGHT_CACHE_DIR, as data). workers: processes that
    search, for the same plan. More than one are forks of this process, so leave it at 1 where other threads run or an
    accelerator is in use.

    Raises ValueError for bad input, InfeasibleError if nothing fits: it names the constraints to blame, or the
    missing memory and what would fit.
    """
    request = PlanRequest.of(locals(), count=1 if top_k is None else top_k)
    example = _Example(example_inputs, example_kwargs, targets, loss_fn, batch_dims)
    question = _captured(example, model, cluster, request)
    if like is not None:
        devices = question.cluster.num_devices
        question = replace(question, request=completed(question.request, like, keep, question.graph, devices))
    elif keep is not None:
        raise ValueError(f"keep= is of a plan that like= gives, but got keep={keep!r} alone; pass like= too")

    def search(rows: RowCache | None = None) -> list[Plan]:
        return _fastest_plans(question, progress or _no_progress, rows)

    if cache:
        plans = cached_plans(question.graph, question.cluster, question.request, search, question.capture_s)
    else:
        plans = search()
    plans = [plan.sealed() for plan in plans]
    return plans[0] if top_k is None else plans


def pareto(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None,
    global_batch: int | None = None,
    microbatches: int | None = None,
    strategy: Strategy | Mapping[str, int] | str | None = None,
    schedule: str = "auto",
    optimizer: str = "AdamW",
    recompute: str | Mapping[str, str] = "auto",
    zero: str | int = "auto",
    sequence: bool = True,
    regular: str = "prefer",
    executable: bool = False,
    communication: AskedCommunication = None,
    precision: str = "model",
    constraints: Sequence[str] | str | None = None,
    time_limit_s: float | None = None,
    points: int = 8,
    progress: Progress | None = None,
    workers: int = 1,
) -> list[Plan]:
    """The Pareto front of step time and peak memory: at most ``points`` plans, fastest first. Each plan needs less
    memory than the one before it.

    The other arguments as in ``plan``. Each plan's gap is against the bound under its own memory limit.
    """
    request = PlanRequest.of(locals(), count=points)
    example = _Example(example_inputs, example_kwargs, targets, loss_fn, batch_dims)
    question = _captured(example, model, cluster, request)

    def front_of(graph: Graph, request: PlanRequest) -> list[Plan]:
        return make_pareto_front(
            graph, question.cluster, request, capture_s=question.capture_s, progress=progress or _no_progress
        )

    fronts = search_all(front_of, question.graph, question.request)
    return [plan.sealed() for plan in pareto_front([plan for front in fronts for plan in front])[:points]]


def simulate(
    plan: Plan,
    model: nn.Module | None = None,
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
    cluster: Cluster | str | None = None,
    changes: Mapping[str, Any] | Sequence[str] | None = None,
) -> Plan:
    """The plan's decisions with other numbers, or on another cluster, at the price of now. Nothing is searched.

    model, with the inputs of ``plan``: what the plan is for; not needed in the process that made the plan. changes:
    ``{"microbatches": 32, "network": "4x"}`` or ``["hosts=-2"]``, in the words of docs/how-to.md. The plan that comes
    back has a bound only if nothing changed, and a note for every stage that does not fit.

    Raises ValueError for an unknown change, for another model, and where the decisions cannot be kept.
    """
    graph = None
    if model is not None:
        args, kwargs = call_arguments(model, tuple(example_inputs), example_kwargs or {})
        graph = capture(model, args, kwargs, tuple(targets), loss_fn)
    return what_if.simulate(plan, graph, Cluster.parse(cluster) if isinstance(cluster, str) else cluster, changes)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | Cluster | None = None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None,
    global_batch: int | None = None,
    microbatches: int | None = None,
    strategy: Strategy | Mapping[str, int] | str | None = None,
    schedule: str = "auto",
    recompute: str | Mapping[str, str] = "auto",
    zero: str | int = "auto",
    sequence: bool = True,
    regular: str = "prefer",
    precision: str = "model",
    communication: AskedCommunication = None,
    constraints: Sequence[str] | str | None = None,
    time_limit_s: float | None = None,
    plan: Plan | None = None,
    optimizer: OptimizerFactory | None = None,
    clip_grad_norm: float | None = None,
    data: str = "global",
    init: Init | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    compile: bool | str = False,
    delay: int | str = 0,
    local_steps: int = 1,
    outer_optimizer: OptimizerFactory | None = None,
    pad_to_multiple_of: int | None = None,
    check_capture: bool | None = None,
    timeout_s: float | None = None,
) -> Parallel:
    """Train ``model`` in parallel on the ranks of this job (torchrun). Every rank calls this with the same arguments.

    mesh: what the ranks run on. A torch DeviceMesh or a Mesh supplies the devices (its shape constrains nothing), a
    Cluster prices them too; by default the machine that the ranks are on. Without example inputs the plan is made at
    the first ``train_step``. ``plan`` takes a saved plan and solves nothing. optimizer: local parameters → a torch
    optimizer. data: "global" (every rank passes the whole batch) or "local" (its part: see ``Parallel.data_index``).
    precision: "bf16" or "fp16" computes in 16 bits, with fp32 master weights, sums of gradients and optimizer states;
    fp16 scales the loss (``Parallel.loss_scale``).
    Weights are rank 0's; for a meta-device model ``init`` (name, tensor) fills one whole tensor at a time, or
    ``state_dict`` gives them (and ``init`` what it lacks). compile: whether stages train through torch.compile (True:
    inductor; or the name of another backend); what that makes is kept under $MESHWRIGHT_CACHE_DIR for later runs.

    delay, local_steps: replicas that take local updates, which **changes the optimisation** (docs/runtime.md). delay:
    the mean of a step's gradients is put in that many steps later, in place of the replica's own; "auto": as many as
    the prediction calls for, none where that does not pay (the plan's notes say which). local_steps > 1:
    parameters are averaged every so many steps, by ``outer_optimizer`` (a function as ``optimizer``; by default they
    become their mean); with delay, that average is waited for so many steps later. Plans with zero > 0 are refused,
    and not searched.

    pad_to_multiple_of: sequences are made that much longer inside, so that devices can share them evenly; losses,
    gradients and outputs are as without, and a model for which they would not be is refused
    (``compiler.frontend.padding``). check_capture: whether the model itself, run eagerly at a tiny batch, is compared
    with what was captured of it (loss and every gradient) before it is planned; None: where that takes less than a
    second. timeout_s: how long a rank may give no sign of life, or stand still inside a step (thrice as long before the
    first one is through), until it is named and all ranks end; None: $MESHWRIGHT_TIMEOUT_S, else 300. Other arguments
    as in ``plan(..., executable=True)``.

    Raises ValueError for bad input (also if the number of ranks is not the plan's) and InfeasibleError if nothing fits.
    """
    from .parallel import Parallel, TrainingOptions
    from .runtime.execution.independent_replicas import LocalUpdates
    from .runtime.parameters.optimizer import optimizer_name
    from .runtime.transport.error_propagation import fail_together
    from .runtime.transport.launch import ensure_initialized
    from .runtime.transport.progress import PROGRESS

    automatic_delay = delay == "auto"
    if isinstance(delay, str) and (not automatic_delay or local_steps > 1):
        raise ValueError(
            f"delay is a number of steps, or 'auto' without local_steps, but got delay={delay!r} and "
            f"local_steps={local_steps}"
        )
    updates = LocalUpdates(0 if isinstance(delay, str) else delay, local_steps, outer_optimizer)
    if plan is None and zero == "auto" and (automatic_delay or not updates.is_synchronous):
        zero = 0  # every replica updates all of its parameters, so it needs their whole optimizer state
    if plan is not None and microbatches == plan.microbatches:
        microbatches = None  # it repeats what the plan has decided
    check_multiple(pad_to_multiple_of)
    request = PlanRequest.of({**locals(), "optimizer": "AdamW"}, executable=True, alternatives=False)
    if plan is not None:
        _check_beside_plan(plan, request)
    if data not in ("global", "local"):
        raise ValueError(f"data is 'global' or 'local', but got {data!r}")
    ensure_initialized(timeout_s)
    cluster = _cluster_of(mesh)
    with PROGRESS.call("parallelize"), fail_together():  # a user's function may raise on one rank alone
        outer = None if outer_optimizer is None else optimizer_name(outer_optimizer)
        if optimizer is not None:
            request = replace(request, optimizer=optimizer_name(optimizer))
    replicas = _ReplicaRequest(updates.delay, local_steps, outer, automatic_delay)
    planner = _RequestedPlan(request, replicas) if plan is None else _GivenPlan(request, replicas, plan, cluster)
    options = TrainingOptions(
        loss_fn, batch_dims, optimizer, clip_grad_norm, data, init, state_dict, seed, compile, updates,
        pad_to_multiple_of, check_capture,
    )  # fmt: skip
    parallel = Parallel(model, cluster, planner, options)
    if example_inputs is not None or example_kwargs is not None:
        args, kwargs = call_arguments(model, () if example_inputs is None else example_inputs, example_kwargs or {})
        parallel.bind(args, kwargs, tuple(targets))
    return parallel


# ---- capture and search


@dataclass(frozen=True)
class _Example:
    """The inputs that a model is captured with, and its loss."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    targets: tuple[Any, ...] = ()
    loss_fn: Callable[..., torch.Tensor] | None = None
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None


@dataclass(frozen=True)
class _Question:
    """Everything that a search needs: a captured model, a cluster and a request."""

    graph: Graph
    cluster: Cluster
    request: PlanRequest
    #: seconds that the capture took, for the plan's provenance
    capture_s: float = 0.0


def _no_progress(name: str, fraction: float) -> None:
    """Report nothing."""


def _captured(example: _Example, model: nn.Module, cluster: Cluster | str, request: PlanRequest) -> _Question:
    """Capture the model. The batch is that of the example, unless the request has one."""
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    started = time.perf_counter()
    args, kwargs = call_arguments(model, example.args, example.kwargs or {})
    targets = tuple(example.targets)
    register_containers(targets)
    graph = capture(model, args, kwargs, targets, example.loss_fn, example.batch_dims)
    if request.global_batch is None:
        request = replace(request, global_batch=batch_extent(graph, flat_inputs(args, kwargs, targets)))
    return _Question(graph, cluster, request, time.perf_counter() - started)


def _fastest_plans(question: _Question, progress: Progress = _no_progress, rows: RowCache | None = None) -> list[Plan]:
    """The fastest plans over all searches that the request calls for."""

    def plans_of(graph: Graph, request: PlanRequest) -> list[Plan]:
        return make_plans(
            graph, question.cluster, request, capture_s=question.capture_s, progress=progress, row_cache=rows
        )

    return fastest_plans(search_all(plans_of, question.graph, question.request), question.request.count)


# ---- the planners of ``Parallel``


@dataclass(frozen=True)
class _ReplicaRequest:
    """The local updates that are asked for."""

    #: steps for which the mean of gradients is on its way
    delay: int = 0
    #: steps between averages of parameters
    period: int = 1
    #: the name of the optimizer that applies the averages
    outer: str | None = None
    #: choose the delay by the prediction
    automatic_delay: bool = False

    @property
    def is_synchronous(self) -> bool:
        """True if every step waits for its own gradients."""
        return self.delay == 0 and self.period == 1

    def applied_to(self, plan: Plan, graph: Graph) -> tuple[Plan, int]:
        """The plan with the memory that such replicas take, and their delay. Raises InfeasibleError if a delay or
        period that was asked for does not fit."""
        graph = in_precision(graph, plan.precision)
        edited = plan.price_state == "edited"
        priced, steps = self._with_memory(plan, graph)
        return (priced if edited else priced.sealed()), steps

    def _with_memory(self, plan: Plan, graph: Graph) -> tuple[Plan, int]:
        if not self.automatic_delay:
            return with_replica_memory(plan, graph, self.delay, self.period, self.outer), self.delay
        delay = chosen_delay(plan, graph)
        if delay is not None:
            with suppress(InfeasibleError):
                return with_replica_memory(delay_taken(plan, delay), graph, delay.steps, 1, None), delay.steps
        return plan, 0


@dataclass(frozen=True)
class _RequestedPlan:
    """The ``parallel.Planner`` that searches, with the code of ``plan``."""

    request: PlanRequest
    replicas: _ReplicaRequest
    needs_cluster: ClassVar[bool] = True

    @property
    def codes(self) -> tuple[str, ...]:
        """The codecs that messages may use."""
        return self.request.open_space.communication.every_code

    def decide(
        self, graph: Graph, cluster: Cluster | None, batch: Callable[[], int], capture_s: float
    ) -> tuple[Plan, int]:
        """The fastest plan. If the delay is open, a plan that is faster only with a delay may win."""
        assert cluster is not None
        request = replace(self.request, global_batch=self.request.global_batch or batch())
        question = _Question(graph, cluster, request, capture_s)
        plan = self._search(question)
        # a delay would pay, but this plan's replicas are not independent: look for one whose replicas are
        if self.replicas.automatic_delay and worthwhile_delay(plan) is not None and chosen_delay(plan, graph) is None:
            with suppress(InfeasibleError):
                independent = self._search(question, independent=True)
                delay = chosen_delay(independent, graph)
                if delay is not None and LEAST_GAIN * delay.step_s <= plan.prediction.step_s:
                    plan = independent
        return self.replicas.applied_to(plan, graph)

    def plan_again(self, graph: Graph, cluster: Cluster, plan: Plan) -> Plan:
        """The fastest plan on another cluster, of any strategy."""
        request = replace(self.request, global_batch=plan.global_batch, optimizer=plan.optimizer, strategy=None)
        return self._search(_Question(graph, cluster, request))

    def _search(self, question: _Question, independent: bool = False) -> Plan:
        """The fastest plan. With local updates it is the fastest one with independent replicas, if there is any;
        ``independent`` requires such a plan. Raises InfeasibleError if nothing fits."""
        if independent or not self.replicas.is_synchronous:
            space = replace(question.request.open_space, loose=True)
            try:
                return _fastest_plans(replace(question, request=replace(question.request, space=space)))[0]
            except InfeasibleError:
                if independent:
                    raise
        return _fastest_plans(question)[0]


@dataclass(frozen=True)
class _GivenPlan(_RequestedPlan):
    """The ``parallel.Planner`` that takes a plan as it is, if it is valid for the model and the cluster."""

    given: Plan
    cluster: Cluster | None
    needs_cluster: ClassVar[bool] = False

    def decide(
        self, graph: Graph, cluster: Cluster | None, batch: Callable[[], int], capture_s: float
    ) -> tuple[Plan, int]:
        """The given plan."""
        require_valid(self.given, graph, self.cluster, runnable=True)
        noted = self.given.noted(*filter(None, (self.given.price_note,)))
        return self.replicas.applied_to(noted, graph)


def _check_beside_plan(plan: Plan, request: PlanRequest) -> None:
    """Raise ValueError if ``parallelize`` got a plan and, beside it, arguments that the plan has decided."""
    if names := request.decisions():
        values = ", ".join(f"{name}={getattr(request, name)!r}" for name in names)
        raise ValueError(
            f"a given plan has decided everything (it has {plan.microbatches} microbatches), but got {values} beside "
            "it; leave that out, or plan="
        )
    if request.global_batch not in (None, plan.global_batch):
        raise ValueError(
            f"the given plan is for a global batch of {plan.global_batch}, but got "
            f"global_batch={request.global_batch}; leave it out"
        )


def _cluster_of(mesh: DeviceMesh | Mesh | Cluster | None) -> Cluster | None:
    """The cluster that ``mesh`` describes; None if the ranks' own machine must be measured. ValueError if its size is
    not the world's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    world = dist.get_world_size()
    size = world if mesh is None else mesh.size() if isinstance(mesh, DeviceMesh) else mesh.num_devices
    if size != world:
        raise ValueError(
            f"the mesh has one device per rank, but got {size} devices and {world} ranks; start {size} ranks"
        )
    return mesh if isinstance(mesh, Cluster) else None
