"""What tests ask of the cases of a search: the graph of one case, and cases of any meshes."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.compiler.frontend.layers import Layering
from meshwright.compiler.intra_op.vectorised.cases import Case, Cases, Samples
from meshwright.compiler.ir.graph import Graph
from meshwright.costmodel.cluster import Cluster


def graph_of(cases: Cases, v: int) -> Graph:
    """The whole graph at the microbatch extent of case ``v``."""
    return cases.graph.with_batch(cases.extents[cases.extent_of[v]])


def split_by_axes(
    graph: Graph, layering: Layering, cluster: Cluster, optimizer: str, global_batch: int, cases: Iterable[Case],
    schedule: str = "1f1b",
) -> list[Cases]:  # fmt: skip
    """Cases of any meshes as ``Cases`` by number of axes, fewest first, that share their samples."""
    samples, by_axes = Samples(graph, layering), dict[int, list[Case]]()
    for case in cases:
        by_axes.setdefault(len(case.mesh_shape), []).append(case)
    return [
        Cases(graph, layering, cluster, optimizer, global_batch, tuple(by_axes[axes]), schedule, samples)
        for axes in sorted(by_axes)
    ]
