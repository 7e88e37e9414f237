"""The state of a search, its candidates, and the passes before it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod

from torch.fx import Node

from ...costmodel.cluster import Cluster
from ..cost.pricing import MeshPricer
from ..frontend.layers import Layering, cluster_layers
from ..frontend.strides import note_layouts
from ..intra_op.restriction import Restriction
from ..intra_op.section import State as BorderState
from ..intra_op.stage import SolvedStage
from ..intra_op.vectorised.cases import Samples
from ..intra_op.vectorised.interval_tables import IntervalComposer, Row
from ..intra_op.vectorised.row_cache import RowCache
from ..ir.graph import Graph, rescale
from ..pipeline.table import InfeasiblePipeline, Pipeline
from ..plan.plan import Plan
from ..workers import ForkedTask
from .constraints import Constraints, Resolved, annotations_of, distinguish_layers, parse_constraints, resolve
from .parallel_shape import Strategy
from .request import PlanRequest
from .space import Space, Submesh, microbatch_counts

__all__ = [
    "INTERRUPTED",
    "MIN_HIDDEN_FRACTION",
    "TIE_TOLERANCE",
    "TIMED_OUT",
    "Candidate",
    "Miss",
    "PurePlan",
    "SearchState",
    "StageRow",
    "batch_bytes",
    "prepare_search",
    "same_decisions",
]  # fmt: skip


INTERRUPTED = "it was interrupted"  # why a search ended early, as ``Search.cut_short`` says it
TIMED_OUT = "the time limit passed"
MANY_READERS = 3  # layers that read a tensor of another one, as decoders read what the encoder made …
SHARED_SUM_ERROR = 0.01  # … in whose models the clock is so much above the simulation, or more
SMALL_PARAMETERS = 1e-3  # of all elements of parameters: the smallest ones are not gathered with their layers
SMALL_OPS = 30  # ops of the largest graph that is small
MIN_HIDDEN_FRACTION = 0.01  # of a step: what may overlap is the same in every plan where it is less
TIE_TOLERANCE = 1e-3  # of a step: plans within this are as good, and the simpler one is taken


@dataclass(frozen=True, eq=False)
class StageRow:
    """A row (variant, level) of a composer's tables, which has the strategies of a stage. then: of a mix, the layer
    from which on another row has them."""

    composer: IntervalComposer
    row: Row
    submesh: Submesh
    then: tuple[int, Row] | None = None

    def choices(self, first: int, end: int) -> tuple[dict[str, str], tuple[str, ...], tuple[BorderState, ...]]:
        """``IntervalComposer.choices`` of layers [first, end)."""
        return self.composer.choices(self.row, first, end, self.then)

    def labels(self, layers: Container[int], first: int, end: int) -> dict[str, str]:
        """``IntervalComposer.labels`` of some layers in [first, end)."""
        return self.composer.labels(layers, self.row, first, end, self.then)

    @property
    def levels(self) -> list[int]:
        """The levels of its rows."""
        return [level for _, level in (self.row, *([self.then[1]] if self.then else []))]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A pipeline with the rows of its stages, in stage order."""

    microbatches: int
    schedule: str
    pipeline: Pipeline
    rows: tuple[StageRow, ...]
    #: the makespan on a clock, by the tables' seconds
    clock_s: float
    #: seconds per microbatch of the busiest stage
    pace_s: float = 0.0
    #: seconds per step of that stage, beside its microbatches
    once_s: float = 0.0
    #: seconds that a built plan may spare: the most of its reductions that may overlap with the last backward, and
    #: what shared weights take less if all stages lay them alike
    hidden_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Miss:
    """The reason why nothing fits with so many microbatches, and the table row of the stage that misses most."""

    why: InfeasiblePipeline
    microbatches: int
    row: StageRow | None = None


@dataclass
class SearchState:
    """The request as a search reads it, and the values that its passes share."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    optimizer: str
    space: Space
    layering: Layering
    strategy: Strategy | None = None
    #: the number that was asked for; None: open
    microbatches: int | None = None
    constraints: Constraints = field(default_factory=Constraints)
    #: the constraints on this model's layers, weights and ops
    resolved: Resolved = field(default_factory=Resolved)
    #: called with the name of a pass and the fraction of it that is done
    progress: Callable[[str, float], None] = lambda name, fraction: None
    #: time on ``time.perf_counter``'s clock after which the search ends with what it has
    deadline: float = inf
    #: pass → seconds
    passes: dict[str, float] = field(default_factory=dict)
    #: seconds of the slowest plan that was built, with its memory counted
    build_s: float = 0.0
    #: what became of the cases of the regular search (``RegularSearch.record``)
    cases: dict[str, float | None] = field(default_factory=dict)
    #: (seconds on the clock of candidates, simulated seconds) of the pipelines that were built
    clocks: list[tuple[float, float]] = field(default_factory=list)
    #: the step of the best regular plan, where others were looked for beside it
    regular_s: float = inf
    #: seconds that no plan undercuts, as far as is proven by now
    bound_s: float = 0.0
    #: strategies of ops that all cost tables share; made with the first tables
    samples: Samples | None = None
    #: the reason for an early end; empty if the search was not cut short
    cut_short: str = ""
    #: (mesh shape, microbatches, level) → bytes that stages turned out to hold above their tables' estimate
    memory_corrections: dict[tuple[tuple[int, ...], int, int], float] = field(default_factory=dict)
    #: what a stage was asked (all but its bytes) → (bytes that it may hold, the answer); see ``build_plan``
    solved_stages: dict[tuple[object, ...], list[tuple[float, SolvedStage]]] = field(default_factory=dict)
    #: microbatches → FLOPs of a step
    flops: dict[int, float] = field(default_factory=dict)
    #: (device offset, mesh shape) → the prices of a stage there
    pricers: dict[tuple[int, tuple[int, ...]], MeshPricer] = field(default_factory=dict)
    #: the space before the constraints narrowed it
    unconstrained_space: Space | None = None
    #: None in a search that a test put together
    request: PlanRequest | None = None
    #: the share of each device's memory that plans may fill
    memory_share: float = 1.0
    #: microbatch counts to search; empty: all
    counts: tuple[int, ...] = ()
    #: the ``SearchTables`` of the search, see ``tables.tables_of``
    tables: object | None = None
    #: processes; all but the first are forks
    workers: int = 1
    #: True: the best plans of the pure strategies are wanted, too
    alternatives: bool = False
    #: the fork that searches for these
    pure_task: ForkedTask[dict[str, PurePlan]] | None = None
    #: cost-table rows of other searches, read and added to
    row_cache: RowCache | None = None

    def must_stop(self, builds: int = 0) -> bool:
        """True if there is no time for anything more but to build so many plans, or the search was interrupted."""
        if time.perf_counter() + builds * self.build_s > self.deadline:
            self.cut_short = self.cut_short or TIMED_OUT
            return True
        return self.cut_short == INTERRUPTED

    @cached_property
    def num_ops(self) -> int:
        """Ops of the graph."""
        return sum(1 for _ in self.graph.ops())

    @property
    def small(self) -> bool:
        """True if the graph is so small that an exhaustive search takes little."""
        return self.num_ops <= SMALL_OPS

    @cached_property
    def clock_error(self) -> float:
        """The fraction of a step by which the clock may be too high where it decides what is built. Tables sum the
        gradient of a tensor in every layer that reads it, a built stage once."""
        layer_of, needs_grad = self.layering.layer_of, self.layering.needs_grad
        for node in self.graph.ops():
            readers = {layer_of[user.name] for user in node.users if user.name in layer_of} - {layer_of.get(node.name)}
            if len(readers) >= MANY_READERS and node.name in needs_grad and node.name in layer_of:
                return SHARED_SUM_ERROR
        return 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the pass of this name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.passes[name] = self.passes.get(name, 0.0) + time.perf_counter() - start

    def keeping(self) -> AbstractContextManager[object]:
        """A scope in which ``row_cache`` stores what is made: a fork stores its own rows."""
        return nullcontext() if self.row_cache is None else self.row_cache.keeping()

    def pricer(self, offset: int, shape: tuple[int, ...]) -> MeshPricer:
        """The prices of stages on a mesh of this shape from this device on."""
        if (offset, shape) not in self.pricers:
            self.pricers[offset, shape] = MeshPricer(
                self.cluster, offset, shape, self.optimizer, self.space.communication, mixed=self.graph.mixed
            )
        return self.pricers[offset, shape]

    @cached_property
    def _loss_modes(self) -> dict[str, tuple[str, ...]]:
        """The modes of the classes of layers that hold the loss: none but "none", unless another schedule than 1F1B is
        asked for. Under 1F1B its backward follows at once, so that nothing is gained by running it again."""
        losses = {result.node for result in self.graph.results if result.kind == "loss"}
        holding = [layer for layer in self.layering.layers if losses & set(layer.ops)]
        return {layer.class_key: ("none",) for layer in holding if self.space.schedules[0] == "1f1b"}

    @cached_property
    def _small_parameters(self) -> frozenset[str]:
        """The smallest parameters, which together have at most ``SMALL_PARAMETERS`` of all elements. Messages of their
        own cost more than their bytes are worth, and tables charge them a share of their layer's."""
        names: dict[int, list[str]] = defaultdict(list)
        for node in self.graph.placeholders("parameter"):
            names[prod(node.meta["type"].shape)].append(node.name)
        room = SMALL_PARAMETERS * sum(size * len(some) for size, some in names.items())
        small: list[str] = []
        for size in sorted(names):
            room -= size * len(names[size])
            if room < 0:
                break
            small += names[size]
        return frozenset(small)

    def restriction(self, roles: tuple[str | None, ...]) -> Restriction:
        """The restriction of stages with these roles of their axes."""
        return Restriction(
            roles=roles,
            executable_only=self.space.executable_only,
            residencies=self.space.residencies,
            replicated=self.resolved.replicated,
            small=self._small_parameters,
            split=self.resolved.split,
            modes={**self.resolved.modes, **self._loss_modes},
            loose=self.space.loose,
        )


def batch_bytes(search: SearchState) -> float:
    """Bytes of a step's whole batch, which every device holds."""
    graph = search.graph
    return float(sum(_whole_bytes(node, graph, search.global_batch) for node in graph.placeholders("input")))


def _whole_bytes(node: Node, graph: Graph, batch: int) -> int:
    """Bytes of an input at this batch extent."""
    kind = node.meta["type"]
    try:
        return prod(rescale(extent, graph.batch, batch) for extent in kind.shape) * int(kind.dtype.itemsize)
    except ValueError:  # an extent that no microbatch count gives either
        return 0


# ---- The passes before the search, and everything that can be refused at once


def prepare_search(graph: Graph, cluster: Cluster, request: PlanRequest) -> SearchState:
    """The passes before the search, and everything that can be refused at once."""
    assert request.global_batch is not None, "a request has its batch when a search begins"
    global_batch, microbatches, strategy = request.global_batch, request.microbatches, request.forced_strategy
    constraints, space = request.parsed_constraints(), request.open_space
    if strategy and strategy.num_devices > cluster.num_devices:
        raise ValueError(
            f"strategy {strategy} needs {strategy.num_devices} devices, but the cluster has {cluster.num_devices}"
        )
    constraints.check(global_batch, cluster.num_devices, microbatches, strategy)
    asked, space = space, constraints.narrowed(space)
    space = replace(space, communication=space.communication.priced_for(graph))
    passes: dict[str, float] = {}
    start = time.perf_counter()
    if any(host.device.op_times for host in cluster.hosts):
        note_layouts(graph)
        passes["layouts"] = time.perf_counter() - start
    start = time.perf_counter()
    layering = cluster_layers(graph, sequence=space.sequence)
    passes["layers"] = time.perf_counter() - start
    if strategy and strategy.num_stages > len(layering.layers):
        raise ValueError(
            f"strategy asks for {strategy.num_stages} stages, but the model falls into {len(layering.layers)} layers"
        )
    counts = [microbatches] if microbatches else microbatch_counts(global_batch, strategy)
    if not counts or (strategy and (global_batch // counts[0]) % strategy.data_parts):
        size = global_batch // (microbatches or 1)
        raise ValueError(
            f"dp cuts every microbatch evenly, but got dp {strategy.data_parts if strategy else 1} "
            f"and a microbatch of {size} samples; "
            "use fewer microbatches or a larger global_batch"
        )
    if annotated := annotations_of(graph, layering):
        both = (*constraints.texts(), *annotated)
        constraints = replace(parse_constraints(both), layer_modes=constraints.layer_modes)
        constraints.check(global_batch, cluster.num_devices, microbatches, strategy)
    resolved = resolve(constraints, graph, layering)
    if strategy and strategy.num_stages > (most := len(layering.layers) - len(resolved.updated)):
        raise ValueError(
            f"strategy asks for {strategy.num_stages} stages, but the layers make at most {most}: stages do not "
            f"share a buffer that they update, but several layers update {next(iter(resolved.updated.values()))}"
        )
    layering, resolved = distinguish_layers(layering, graph, constraints, resolved)
    return SearchState(
        graph, cluster, global_batch, request.optimizer, space, layering, strategy, microbatches, constraints, resolved,
        passes=passes, unconstrained_space=asked, request=request,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PurePlan:
    """The best plan of a pure strategy, or the reason why there is none."""

    plan: Plan | None = None
    why: str = ""


def same_decisions(plan: Plan, other: Plan) -> bool:
    """True if two plans of a model make the same decisions."""
    names = ("stages", "microbatches", "schedule", "precision")
    return all(getattr(plan, name) == getattr(other, name) for name in names)
