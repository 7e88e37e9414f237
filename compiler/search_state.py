"""What a search is asked, what it has found, and what all its passes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import TYPE_CHECKING

from torch.fx import Node

from ..costmodel.cluster import Cluster
from .batch_compose import BatchComposer, Row
from .constraints import Constraints, Resolved
from .forked import Forked
from .graph import Graph, rescale
from .kept_rows import KeptRows
from .layers import Layering
from .pipeline_table import Infeasible, Pipeline
from .restriction import Restriction
from .space import Space, Submesh
from .strategy import Strategy
from .variants import Samples

if TYPE_CHECKING:
    from .alternatives import PurePlan

__all__ = ["INTERRUPTED", "SLACK", "TIMED_OUT", "Candidate", "Miss", "Search", "StageRow", "batch_bytes"]

INTERRUPTED = "it was interrupted"  # why a search ended early, as ``Search.cut_short`` says it
TIMED_OUT = "the time limit passed"
SMALL_OPS = 60  # of the largest graph that is small
SLACK = 1.02  # of the limit: how far above it what a stage really holds may be


@dataclass(frozen=True, eq=False)
class StageRow:
    """Where a stage's choices are found: the composer, and the row (variant, level) of its tables."""

    composer: BatchComposer
    row: Row
    submesh: Submesh


@dataclass(frozen=True, eq=False)
class Candidate:
    """A pipeline with the rows of its stages, in stage order."""

    microbatches: int
    schedule: str
    pipeline: Pipeline
    rows: tuple[StageRow, ...]
    clock_s: float  # the makespan on a clock, by the tables' seconds
    pace_s: float = 0.0  # of the stage that is the busiest: per microbatch,
    once_s: float = 0.0  # and at the end of the step
    hidden_s: float = 0.0  # what of that may run beside the last backward, at the most


@dataclass(frozen=True, eq=False)
class Miss:
    """Why nothing fits with so many microbatches, and where the choices of the stage that misses most are found."""

    why: Infeasible
    microbatches: int
    row: StageRow | None = None


@dataclass
class Search:
    """What is asked, and what all passes share."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    optimizer: str
    space: Space
    layering: Layering
    strategy: Strategy | None = None
    microbatches: int | None = None
    constraints: Constraints = field(default_factory=Constraints)
    resolved: Resolved = field(default_factory=Resolved)
    progress: Callable[[str, float], None] = lambda name, fraction: None
    stop: float = inf  # on time.perf_counter's clock
    passes: dict[str, float] = field(default_factory=dict)
    bounds: dict[tuple[int, str], float] = field(default_factory=dict)  # (microbatches, schedule) → seconds
    samples: Samples | None = None
    cut_short: str = ""  # why the search ended before it was done
    beside: dict[tuple[tuple[int, ...], int, int], float] = field(default_factory=dict)  # (shape, microbatches, level)
    # → bytes that stages turned out to hold beside what tables say
    asked: Space | None = None  # the space before the constraints narrowed it
    share: float = 1.0  # of the memory of each device, what plans may fill
    counts: tuple[int, ...] = ()  # microbatch counts to look at; empty: all that there are
    thorough: bool = True  # whether to look further than at the first pipelines of all counts
    tables: object | None = None  # the SearchTables that passes share, see ``search_tables.tables_of``
    workers: int = 1  # processes: of more than one, the others are forks
    proof: Forked[dict[tuple[int, str], float]] | None = None  # of what will be known of ``bounds``,
    proven_s: float = 0.0  # as far as that is less
    alternatives: bool = False  # whether to say what the best plans of the pure kinds would cost
    aside: Forked[dict[str, PurePlan]] | None = None  # these
    kept: KeptRows | None = None  # rows of other searches

    @cached_property
    def num_ops(self) -> int:
        """Ops of the graph."""
        return sum(1 for _ in self.graph.ops())

    @property
    def small(self) -> bool:
        """Whether the graph is so small that looking at everything takes little."""
        return self.num_ops <= SMALL_OPS

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the pass of this name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.passes[name] = self.passes.get(name, 0.0) + time.perf_counter() - start

    def keeping(self) -> AbstractContextManager[object]:
        """Within it, ``kept`` takes what is made: a fork keeps its own rows."""
        return nullcontext() if self.kept is None else self.kept.keeping()

    def restriction(self, roles: tuple[str | None, ...]) -> Restriction:
        """What a stage may not do whose axes have these roles."""
        return Restriction(
            roles=roles,
            executable_only=self.space.executable_only,
            residencies=self.space.residencies,
            replicated=self.resolved.replicated,
            split=self.resolved.split,
            modes=self.resolved.modes,
            loose=self.space.loose,
        )

    @property
    def bound_s(self) -> float:
        """What no plan of the space undercuts; 0 before the floors are known."""
        open_ = self.space.schedules
        return min((bound for (_, schedule), bound in self.bounds.items() if schedule in open_), default=0.0)


def batch_bytes(search: Search) -> float:
    """Of a step's whole batch, which every device holds."""
    graph = search.graph
    return float(sum(_whole_bytes(node, graph, search.global_batch) for node in graph.placeholders("input")))


def _whole_bytes(node: Node, graph: Graph, batch: int) -> int:
    """Bytes of an input at this batch extent."""
    kind = node.meta["type"]
    try:
        return prod(rescale(extent, graph.batch, batch) for extent in kind.shape) * int(kind.dtype.itemsize)
    except ValueError:  # an extent that no microbatch count gives either
        return 0
