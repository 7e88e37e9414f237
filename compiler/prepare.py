"""The passes before the search, and everything that can be refused at once."""

from __future__ import annotations

import time
from dataclasses import replace

from ..costmodel.cluster import Cluster
from .constraints import Constraints, distinguished, resolve
from .graph import Graph
from .layers import cluster_layers
from .layouts import note_layouts
from .search_state import Search
from .space import Space, microbatch_counts
from .strategy import Strategy

__all__ = ["prepare"]


def prepare(
    graph: Graph,
    cluster: Cluster,
    global_batch: int,
    microbatches: int | None,
    strategy: Strategy | None,
    optimizer: str,
    space: Space,
    constraints: Constraints,
) -> Search:
    """The passes before the search, and everything that can be refused at once."""
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
    resolved = resolve(constraints, graph, layering)
    layering, resolved = distinguished(layering, graph, constraints, resolved)
    return Search(
        graph, cluster, global_batch, optimizer, space, layering, strategy, microbatches, constraints, resolved,
        passes=passes, asked=asked,
    )  # fmt: skip
