"""What a stage's messages to others on its machine hold for good: the pages through which ranks on CPUs pass them
(``runtime/near_messages.py``).

A rank keeps as many rooms of a size for each peer as there ever were messages on their way to it at once: two where a
stage sends and then waits for an answer, more where it runs ahead, four at the most.
"""

from __future__ import annotations

from math import prod

from ..costmodel.codecs import carried_bytes
from .chunk_keys import ChunkKeys
from .spec import local_shape, without_partials

__all__ = ["message_room"]

_ROOMS, _MOST_ROOMS = 2, 4


def message_room(shared: ChunkKeys, stage: int) -> int:
    """Bytes on one device of the stage."""
    plan, here, nodes = shared.plan, shared.plan.stages[stage], shared.graph.by_name()
    if shared.cluster.device(here.devices[0]).kind != "cpu":
        return 0
    host = plan.host_of(here.devices[0])
    sizes: set[tuple[int, int]] = set()
    for one in plan.transfers:
        source, target = plan.stages[one.source], plan.stages[one.target]
        other = one.target if stage == one.source else one.source
        if stage not in (one.source, one.target) or plan.host_of(plan.stages[other].devices[0]) != host:
            continue
        if stage == one.source:
            spec = source.chunks[one.source_chunk].sends[one.node]
        elif one.node in shared.grad:
            spec = without_partials(target.chunks[one.target_chunk].receives[one.node].cotangent)
        else:
            continue
        kind = nodes[one.node].meta["type"]
        code = plan.code("activations") if kind.is_float else "none"
        elements = prod(local_shape(kind.shape, spec, here.mesh_shape))
        sizes.add((other, carried_bytes(code, elements, kind.dtype.itemsize)))
    ahead = plan.num_chunks > 1 or plan.schedule == "gpipe"
    return min(plan.microbatches, _MOST_ROOMS if ahead else _ROOMS) * sum(size for _, size in sizes)
