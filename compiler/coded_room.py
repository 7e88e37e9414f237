"""What the codes of a stage's gradients hold on one device: residuals and buffers of a sum per bucket.

Over axes whose wire is hierarchical only one of ``members`` parts of a bucket is summed in code, between hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product
from math import prod

from ..costmodel.codecs import CODECS
from ..costmodel.coded_memory import drawn_bytes, held_bytes
from .plan import Plan, Stage

__all__ = ["coded_bytes", "wiring"]

Shapes = Sequence[tuple[int, ...]]


def wiring(plan: Plan, stage: Stage) -> Hashable:
    """Equal for stages whose gradients travel alike."""
    return tuple((w.axes, w.algorithm, w.compressor, _members(plan, stage, w.axes)) for w in stage.wire)


def coded_bytes(
    plan: Plan, stage: Stage, sums: Sequence[tuple[tuple[int, ...], Shapes]], drawing: Sequence[str] = ()
) -> int:
    """Bytes of the codes that sum buckets, each over some axes and with tensors of these shapes one after another.
    drawing: other codes that draw random numbers here."""
    ways = {wire.axes: wire for wire in stage.wire if wire.compressor != "none"}
    held, table = 0, max((drawn_bytes(CODECS[code]) for code in drawing), default=0)
    for axes, shapes in sums:
        if axes not in ways:
            continue
        codec, n, group = CODECS[ways[axes].compressor], sum(map(prod, shapes)), prod(stage.mesh_shape[a] for a in axes)
        members = _members(plan, stage, axes) if ways[axes].algorithm == "hierarchical" else 1
        held += held_bytes(codec, -(-n // members), group // members, shapes if members == 1 else ())
        table = max(table, drawn_bytes(codec))
    return held + table


def _members(plan: Plan, stage: Stage, axes: Sequence[int]) -> int:
    """Devices of one host in a group that these axes form."""
    ranges = [range(size if axis in axes else 1) for axis, size in enumerate(stage.mesh_shape)]
    strides = [prod(stage.mesh_shape[axis + 1 :]) for axis in range(len(stage.mesh_shape))]
    places = [sum(i * stride for i, stride in zip(place, strides)) for place in product(*ranges)]
    hosts = [plan.host_of(stage.devices[place]) for place in places]
    return hosts.count(hosts[0])
