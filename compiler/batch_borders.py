"""What begins and ends a stage costs in all variants at once: ``Composer.entry_seconds``, ``exit_seconds`` and
``transient_bytes`` with a leading axis over the cases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .batch_pricing import BatchPricer
from .graph import op_name, types_of
from .variants import State

__all__ = ["entry_seconds", "exit_seconds", "largest_op_bytes"]


def entry_seconds(pricer: BatchPricer, boundary: int, states: Sequence[State]) -> np.ndarray:
    """[num, states] seconds of a stage that begins at ``boundary`` beside its ops: its two actions, and receiving the
    crossing tensors in each state."""
    variants = pricer.variants
    seconds = np.zeros((variants.num, len(states)))
    for device, rows in pricer.devices:
        seconds[rows] = 2 * device.action_s
    nodes = variants.source.by_name()
    for t, name in enumerate(variants.layering.crossing[boundary]):
        nbytes = pricer.local_bytes(nodes[name].meta["type"], [state[t].value for state in states])
        seconds += pricer.transfer().seconds(nbytes)
    return seconds


def exit_seconds(pricer: BatchPricer, boundary: int, states: Sequence[State]) -> np.ndarray:
    """[num, states] seconds until the cotangents of the crossing tensors have come back in each state."""
    variants = pricer.variants
    seconds = np.zeros((variants.num, len(states)))
    nodes = variants.source.by_name()
    for t, name in enumerate(variants.layering.crossing[boundary]):
        if name in variants.layering.needs_grad:
            nbytes = pricer.local_bytes(nodes[name].meta["type"], [state[t].cotangent for state in states])
            seconds += pricer.transfer().seconds(nbytes)
    return seconds


def largest_op_bytes(pricer: BatchPricer) -> np.ndarray:
    """[num, layers] the largest op's operands and outputs, twice (value and cotangent), cut evenly over the mesh: a
    floor of the peak beside what is kept."""
    variants, found = pricer.variants, {}
    nodes = variants.source.by_name()
    for layer in variants.layering.layers:
        if layer.class_key not in found:
            most = np.zeros(variants.num)
            for node in map(nodes.__getitem__, layer.ops):
                if op_name(node) != "getitem":
                    kinds = [*types_of(node)]
                    kinds += [types_of(o)[0] for o in node.all_input_nodes if o.op != "placeholder"]
                    most = np.maximum(most, np.sum([pricer.whole_bytes(kind) for kind in kinds], axis=0))
            found[layer.class_key] = 2.0 * most / variants.num_devices
    return np.stack([found[layer.class_key] for layer in variants.layering.layers], axis=1)
