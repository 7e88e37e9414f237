"""What is inconsistent in a plan's document by itself, a line each; ``validate`` holds it against the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..costmodel.codecs import CODECS
from ..costmodel.collectives import REDUCTIONS

if TYPE_CHECKING:
    from .plan import Stage, Transfer

__all__ = ["stage_faults", "transfer_faults"]


def stage_faults(stage: Stage, modes: Sequence[str]) -> Iterator[str]:
    """Of one stage. modes: of recomputation."""
    axes = len(stage.mesh_shape)
    if prod(stage.mesh_shape) != len(stage.devices):
        yield f"mesh shape {list(stage.mesh_shape)} is not {len(stage.devices)} devices"
    for chunk in stage.chunks:
        for name, labels in chunk.ops.items():
            if len(labels) != axes:
                yield f"op {name} has labels for {len(labels)} axes, the mesh has {axes}"
        first, end = chunk.layers
        if chunk.recompute and len(chunk.recompute) != end - first:
            yield f"recompute has {len(chunk.recompute)} modes for the {end - first} layers [{first}, {end})"
        for mode in dict.fromkeys(chunk.recompute):
            if mode not in modes:
                yield f"recompute {mode!r} is none of {', '.join(modes)}"
        for name, home in chunk.parameters.items():
            for use, spec in (("stored", home.stored), ("gradient", home.gradient), ("optimizer", home.optimizer)):
                if len(spec) != axes:
                    yield f"parameter {name} has a {use} spec of {len(spec)} axes, the mesh has {axes}"
    for wire in stage.wire:
        if not all(0 <= axis < axes for axis in wire.axes):
            yield f"a wire is on mesh axes {list(wire.axes)}, the mesh has {axes}"
        if wire.algorithm not in ("backend", *REDUCTIONS) or wire.compressor not in CODECS:
            known = f"{', '.join(REDUCTIONS)} or backend, and codes {', '.join(CODECS)}"
            yield f"a wire is summed by {wire.algorithm!r} in code {wire.compressor!r}; algorithms are {known}"


def transfer_faults(transfer: Transfer, stages: Sequence[Stage]) -> Iterator[str]:
    """Of one transfer."""
    source, target, several = transfer.source, transfer.target, any(len(stage.chunks) > 1 for stage in stages)
    known = 0 <= min(source, target) <= max(source, target) < len(stages)
    if not known or (source >= target if not several else source == target):
        yield f"transfer of {transfer.node} goes from stage {source} to {target}"
        return
    ends = ((source, transfer.source_chunk, "send"), (target, transfer.target_chunk, "receive"))
    for index, number, verb in ends:
        chunks = stages[index].chunks
        if not 0 <= number < len(chunks):
            yield f"transfer of {transfer.node}: stage {index} has no chunk {number}"
        elif transfer.node not in (chunks[number].sends if verb == "send" else chunks[number].receives):
            yield f"stage {index} does not {verb} {transfer.node}"
