"""Which decisions of a plan the runtime cannot carry out yet; such a plan is a prediction only.

residency       parameters in specs of no pattern
ops             labels whose choice has no program (``AxisChoice.executable``); only the graph tells
schedule        an asynchronous one with what it cannot version (``asynchronous.faults``)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .asynchronous import faults
from .graph import Graph
from .rules import pairs_choice

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["not_executable", "require_executable"]


def not_executable(plan: Plan, graph: Graph | None = None) -> list[str]:
    """A line for each kind of decision that the runtime cannot run yet; empty if it can run the plan. graph: the
    captured model, for ops."""
    lines = list(_residency(plan))
    if graph is not None:
        lines += _labels(plan, graph)
    return [*lines, *faults(plan)]


def require_executable(plan: Plan, graph: Graph | None = None) -> None:
    """Raise ValueError with all of ``not_executable``, if there is any."""
    if lines := not_executable(plan, graph):
        raise ValueError(
            f"this runtime runs what it has a program for, but got a plan with {'; '.join(lines)}; plan again without"
        )


def _residency(plan: Plan) -> Iterator[str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for stage in plan.stages:
        for chunk in stage.chunks:
            for name, home in chunk.parameters.items():
                found[home.pattern].append(name)
    for pattern, names in sorted(found.items()):
        if pattern == "custom":
            yield f"parameters in {pattern} ({len(names)}: {names[0]}{', …' if len(names) > 1 else ''})"


def _labels(plan: Plan, graph: Graph) -> Iterator[str]:
    small, counts = graph.with_batch(plan.microbatch_size), Counter[str]()
    nodes = small.by_name()
    for stage in plan.stages:
        for chunk in stage.chunks:
            for op, labels in chunk.ops.items():
                if op in nodes and not pairs_choice(nodes[op], labels, stage.mesh_shape).executable:
                    counts[f"{op} cut by {','.join(labels)}"] += 1
    shown = list(counts)[:4]
    if counts:
        yield f"ops without a program: {', '.join(shown)}" + (f" and {len(counts) - 4} more" if len(counts) > 4 else "")
