"""The bytes that replicas which step by themselves keep besides, on each device of a stage.

With G bytes of gradients that a device has, D the delay in steps (``runtime/delayed.py``, ``runtime/averaging.py``)::

    delayed gradients     2 D G: of every step under way the gradients and their mean; 2 G more while one comes and
                          another leaves, when the backwards are over
    averages              G of anchors, and the outer optimizer's state; 2 G more from when one leaves until it comes

Gradients are in no buckets, of which a plan counts G.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ..costmodel.cluster import Cluster
from .graph import Graph
from .plan import Plan, Stage
from .pricing import gradient_type
from .space import usable_bytes
from .spec import local_shape
from .strategy import InfeasibleError
from .updates import update_bytes

__all__ = ["with_replicas"]

CAUSE = "replicas"
_PASSING = ("activations", "temporary")  # what is gone when the backwards are over


def with_replicas(plan: Plan, graph: Graph, delay: int, every: int, outer: str | None) -> Plan:
    """``plan`` with the memory of replicas that step by themselves. every: steps between averages (1: gradients are
    averaged); outer: the name of the optimizer that applies averages. Raises InfeasibleError where that does not
    fit."""
    without = [replace(one, memory_bytes=_without(one.memory_bytes)) for one in plan.prediction.stages]
    if not delay and every == 1:
        return replace(plan, prediction=replace(plan.prediction, stages=tuple(without)))
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    usable, stages = usable_bytes(cluster), []
    for index, (stage, found) in enumerate(zip(plan.stages, without)):
        device = cluster.device(stage.devices[0])
        gradients, states = _bytes(graph, plan, stage, outer, device.kind)
        passing = 2 * gradients - sum(found.memory_bytes.get(cause, 0.0) for cause in _PASSING)
        if every == 1:
            more = 2 * delay * gradients + max(0.0, passing)
        else:
            more = gradients + states + (2 * gradients if delay else max(0.0, passing))
        more -= gradients
        stages.append(replace(found, memory_bytes={**found.memory_bytes, CAUSE: more}))
        least = min(usable[device] for device in stage.devices)
        if stages[-1].peak_bytes - found.memory_bytes.get("framework", 0.0) > least:
            raise InfeasibleError(
                f"replicas that step by themselves keep {more / 2**30:.3g} GiB more on each device of stage {index} "
                f"(delay={delay}, local_steps={every}), where {(least - found.peak_bytes) / 2**30:.3g} GiB are free; "
                "use a smaller delay, or a strategy with more tensor or pipeline parallelism"
            )
    return replace(plan, prediction=replace(plan.prediction, stages=tuple(stages)))


def _without(memory: Mapping[str, float]) -> Mapping[str, float]:
    """Of a plan that may have been saved with it."""
    return {cause: size for cause, size in memory.items() if cause != CAUSE}


def _bytes(graph: Graph, plan: Plan, stage: Stage, outer: str | None, kind: str) -> tuple[int, int]:
    """(G, of the outer optimizer's state)."""
    gradients = states = 0
    homes = {name: home for chunk in stage.chunks for name, home in chunk.parameters.items()}
    nodes = {node.meta["source"].name: node for node in graph.placeholders("parameter")}
    for name, home in homes.items():
        node = nodes[name]
        if node.meta["source"].requires_grad:
            made = gradient_type(node.meta["type"], graph.mixed)
            shape = local_shape(made.shape, home.optimizer, stage.mesh_shape)
            gradients += prod(shape) * made.dtype.itemsize
            states += update_bytes(tuple(shape), made.dtype, outer, kind)[0] if outer else 0
    return gradients, states
