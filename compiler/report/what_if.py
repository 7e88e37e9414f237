"""What if: a plan's decisions kept, with other numbers of the step or another cluster, at the price of now.

A change is ``name=value``::

    microbatches, batch      a number, or a factor of what there is ("2x")
    schedule, optimizer, precision, recompute    a name; recompute is of all layers
    network                  a factor of the bandwidth between hosts ("4x")
    bandwidth.between_hosts, bandwidth.inside_hosts, latency.between_hosts, latency.inside_hosts,
    compute, memory_rate, memory                 factors of the devices' or links' rates, seconds or bytes
    hosts                    their number, or how many more or fewer ("-2")

Measured prices follow: a collective over a network k times as fast takes n bytes in the time of n / k, an op on a
device that computes k times as fast a k-th of its seconds.

With more devices, or too few, every stage's mesh grows or shrinks by the same factor, in an axis of data parallelism if
it has one; an axis of one device falls away. What no longer divides is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from math import prod
from typing import Any

from ...costmodel.cluster import Cluster
from ...costmodel.curves import Curve, Surface
from ...costmodel.hardware import Device, Host, Link
from ...costmodel.measured import CollectiveMeasurement, OpTime, Piece
from ..ir.graph import Graph
from ..ir.spec import Pair
from ..plan.plan import RECOMPUTE_MODES, Chunk, Plan, Stage
from ..plan.validation import require_valid, validate
from .describe import axis_roles
from .reprice import memory_faults, reprice

__all__ = ["CHANGES", "parse_changes", "simulate"]

MOST_FACTOR = 1e6


def simulate(
    plan: Plan,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    changes: Mapping[str, Any] | Sequence[str] | None = None,
) -> Plan:
    """The plan with these changes at the price of now, on ``cluster`` (default: its own); its notes say where it does
    not fit. graph: the captured model, by default that of the process that made the plan.

    Raises ValueError for a change that is not known, and where the decisions cannot be kept.
    """
    graph = graph or plan.graph
    if graph is None:
        raise ValueError(
            "a plan is priced by its model, but got a loaded plan without graph=; pass what "
            "compiler.frontend.capture.capture(model, inputs) gives"
        )
    asked = parse_changes(changes)
    require_valid(plan, graph)
    described = json.dumps(plan.cluster)
    hardware = Cluster.from_json(described) if cluster is None else cluster
    for name, value in asked.items():
        if name in _OF_CLUSTER:
            hardware = _OF_CLUSTER[name](hardware, value)
        else:
            plan = _OF_PLAN[name](plan, value)
    last = max(device for stage in plan.stages for device in stage.devices)
    if hardware.num_devices > plan.num_devices or last >= hardware.num_devices:  # else only idle devices went away
        plan = _resized(plan, hardware)
    if json.loads(hardware.to_json()) != plan.cluster:
        plan = replace(plan, cluster=json.loads(hardware.to_json()))
    if faults := validate(plan, graph):
        what = ", ".join(f"{name}={value}" for name, value in asked.items()) or hardware.name
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"the plan's decisions do not hold with {what}: {faults[0]}{more}; plan again for it")
    priced = reprice(plan, graph, hardware)
    old = [note for note in priced.prediction.notes if note.startswith("does not fit: ")]
    kept = tuple(note for note in priced.prediction.notes if note not in old)
    priced = replace(priced, prediction=replace(priced.prediction, notes=kept))
    return priced.noted(*(f"does not fit: {fault}" for fault in memory_faults(priced)))


def parse_changes(changes: Mapping[str, Any] | Sequence[str] | None) -> dict[str, str]:
    """Names and values of changes, given as a mapping or as texts ``name=value``; ValueError for an unknown name."""
    found: dict[str, str] = {}
    pairs = changes.items() if isinstance(changes, Mapping) else [_split(text) for text in changes or ()]
    for name, value in pairs:
        if name not in CHANGES:
            raise ValueError(f"a change is of {', '.join(CHANGES)}, but got {name!r}; use one of these")
        if name in found:
            raise ValueError(f"a change is made once, but got {name} twice; leave out one")
        found[name] = str(value)
    return found


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value.strip():
        raise ValueError(f"a change is written name=value, but got {text!r}; write microbatches=32 or network=4x")
    return name.strip(), value.strip()


# ---- values


def _factor(name: str, text: str) -> float:
    number = text.removesuffix("×").removesuffix("x")
    try:
        factor = float(number) if number != text else 0.0
    except ValueError:
        factor = 0.0
    if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        raise ValueError(f"{name} is changed by a factor such as 4x or 0.5x, but got {text!r}; write one")
    return factor


def _count(name: str, text: str, now: int) -> int:
    """A whole number, or a factor of ``now`` that gives one."""
    if text.isdecimal() and 0 < int(text) < 2**40:
        return int(text)
    if text[-1:] in ("x", "×"):
        made = now * Fraction(_factor(name, text)).limit_denominator(1000)
        if made.denominator == 1 and made > 0:
            return int(made)
    raise ValueError(f"{name} is a whole number of 1 or more, or a factor of {now}, but got {text!r}; write one")


# ---- changes of the plan


def _batch(plan: Plan, text: str) -> Plan:
    return replace(plan, global_batch=_count("batch", text, plan.global_batch))


def _microbatches(plan: Plan, text: str) -> Plan:
    return replace(plan, microbatches=_count("microbatches", text, plan.microbatches))


def _recompute(plan: Plan, mode: str) -> Plan:
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"recompute is one of {', '.join(RECOMPUTE_MODES)}, but got {mode!r}; use one of these")

    def chunk(one: Chunk) -> Chunk:
        return replace(one, recompute=() if mode == "none" else (mode,) * (one.layers[1] - one.layers[0]))

    return _with_chunks(plan, lambda stage, one: chunk(one))


def _with_chunks(plan: Plan, changed: Callable[[Stage, Chunk], Chunk]) -> Plan:
    stages = [replace(stage, chunks=tuple(changed(stage, one) for one in stage.chunks)) for stage in plan.stages]
    return replace(plan, stages=tuple(stages))


_OF_PLAN: dict[str, Callable[[Plan, str], Plan]] = {
    "microbatches": _microbatches,
    "batch": _batch,
    "schedule": lambda plan, name: replace(plan, schedule=name),
    "optimizer": lambda plan, name: replace(plan, optimizer=name),
    "precision": lambda plan, name: replace(plan, precision=name),
    "recompute": _recompute,
}


# ---- changes of the cluster


def _named(cluster: Cluster, name: str, text: str) -> Cluster:
    return replace(cluster, name=f"{cluster.name}, {name} {text}")


def _with_links(cluster: Cluster, name: str, text: str) -> Cluster:
    """Links of one level with another bandwidth or latency, and what was measured over them."""
    what, _, level = name.partition(".")
    factor, outer = _factor(name, text), level == "between_hosts"
    if outer and len(cluster.hosts) == 1:
        raise ValueError(
            f"{name} is of a network between hosts, but got a cluster of one host; use {what}.inside_hosts=…"
        )

    def link(one: Link) -> Link:
        if what == "bandwidth":
            pair = one.pair_bytes_per_s * factor
            return replace(one, bytes_per_s=one.bytes_per_s * factor, pair_bytes_per_s=pair)
        times = {field: getattr(one, field) * factor for field in ("alpha_s", "message_s", "call_s")}
        return replace(one, **times)

    def wire(one: CollectiveMeasurement) -> CollectiveMeasurement:
        if (one.members < one.size) != outer:
            return one
        if what == "bandwidth":
            pieces = [Piece(p.from_bytes * factor, p.alpha_s, p.beta_s_per_byte / factor) for p in one.pieces]
            points = tuple((size * factor, seconds) for size, seconds in one.points)
        else:
            more = (factor - 1) * one.pieces[0].alpha_s
            pieces = [replace(p, alpha_s=max(0.0, p.alpha_s + more)) for p in one.pieces]
            points = tuple((size, max(0.0, seconds + more)) for size, seconds in one.points)
        return replace(one, pieces=tuple(pieces), points=points)

    hosts = cluster.hosts if outer else _each(cluster.hosts, lambda host: replace(host, link=link(host.link)))
    network = link(cluster.link) if outer else cluster.link
    wires = tuple(map(wire, cluster.wires))
    return _named(replace(cluster, hosts=hosts, link=network, wires=wires), name, text)


def _each(hosts: Sequence[Host], changed: Callable[[Host], Host]) -> tuple[Host, ...]:
    """Every host changed; equal neighbours stay one object."""
    return tuple(one for host, run in groupby(hosts) for one in [changed(host)] * len(list(run)))


def _with_devices(cluster: Cluster, name: str, text: str) -> Cluster:
    factor = _factor(name, text)

    def device(one: Device) -> Device:
        if name == "memory":
            return replace(one, memory_bytes=int(one.memory_bytes * factor))
        if name == "memory_rate":
            return replace(
                one, memory_bytes_per_s=one.memory_bytes_per_s * factor, curves=_curves(one, "bytes", factor)
            )
        return replace(
            one,
            flops_per_s=tuple((dtype, rate * factor) for dtype, rate in one.flops_per_s),
            curves=_curves(one, "flops", factor),
            surfaces=tuple(_faster_surface(surface, factor) for surface in one.surfaces),
            op_times=tuple(_faster_op(time, factor) for time in one.op_times),
        )

    hosts = _each(cluster.hosts, lambda host: replace(host, device=device(host.device)))
    return _named(replace(cluster, hosts=hosts), name, text)


def _curves(device: Device, variable: str, factor: float) -> tuple[Curve, ...]:
    return tuple(
        replace(curve, points=tuple((work, seconds / factor) for work, seconds in curve.points))
        if curve.variable == variable
        else curve
        for curve in device.curves
    )


def _faster_surface(surface: Surface, factor: float) -> Surface:
    return replace(surface, seconds=tuple(seconds / factor for seconds in surface.seconds))


def _faster_op(time: OpTime, factor: float) -> OpTime:
    parts = ("forward_s", "backward_input_s", "backward_weight_s")
    return replace(time, **{part: getattr(time, part) / factor for part in parts})


def _hosts(cluster: Cluster, text: str) -> Cluster:
    count = len(cluster.hosts)
    signed = text[:1] in ("+", "-", "−") and text[1:].isdecimal()
    wanted = count + int(text.replace("−", "-")) if signed else int(text) if text.isdecimal() else 0
    if not 1 <= wanted <= 10**6:
        raise ValueError(f"hosts is a number of 1 or more, or -2 or +2 of {count}, but got {text!r}; write one")
    if wanted > count and len(set(cluster.hosts)) > 1:
        raise ValueError(f"hosts are added to a cluster of equal ones, but got {cluster.name}; pass cluster= instead")
    hosts = cluster.hosts[:wanted] if wanted <= count else cluster.hosts[:1] * wanted
    sizes = sum(host.num_devices for host in hosts), max(host.num_devices for host in hosts)
    wires = tuple(wire for wire in cluster.wires if wire.size <= sizes[0] and wire.members <= sizes[1])
    return _named(replace(cluster, hosts=hosts, wires=wires), "hosts", text)


_LINK_CHANGES = tuple(
    f"{what}.{level}" for what in ("bandwidth", "latency") for level in ("between_hosts", "inside_hosts")
)
_DEVICE_CHANGES = ("compute", "memory_rate", "memory")


def _of_cluster(name: str) -> Callable[[Cluster, str], Cluster]:
    change = _with_links if name in _LINK_CHANGES else _with_devices
    return lambda cluster, text: change(cluster, name, text)


_OF_CLUSTER: dict[str, Callable[[Cluster, str], Cluster]] = {
    "network": _of_cluster("bandwidth.between_hosts"),
    **{name: _of_cluster(name) for name in (*_LINK_CHANGES, *_DEVICE_CHANGES)},
    "hosts": _hosts,
}
CHANGES = (*_OF_PLAN, *_OF_CLUSTER)


# ---- another number of devices


def _resized(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with every stage's mesh larger or smaller by the same factor; ValueError where that is not whole."""
    ratio = Fraction(cluster.num_devices, plan.num_devices)
    rule = (
        f"decisions for {plan.num_devices} devices are kept on {cluster.num_devices} where every stage's mesh takes "
        f"the factor {ratio} in one axis"
    )
    stages = []
    for index, stage in enumerate(plan.stages):
        first, size = stage.devices[0] * ratio if stage.devices else Fraction(0), len(stage.devices) * ratio
        sizes = [extent * ratio for extent in stage.mesh_shape]
        able = [axis for axis, extent in enumerate(sizes) if extent.denominator == 1]
        if not able or first.denominator != 1 or size.denominator != 1:
            shape = "×".join(map(str, stage.mesh_shape)) or "1"
            raise ValueError(f"{rule}, but got stage {index} with a mesh of {shape}; plan again")
        roles = axis_roles(stage)
        axis = min(able, key=lambda k: ("data" not in roles[k], k))
        shape_now = tuple(int(sizes[k]) if k == axis else extent for k, extent in enumerate(stage.mesh_shape))
        moved = replace(stage, devices=tuple(range(int(first), int(first) + prod(shape_now))), mesh_shape=shape_now)
        stages.append(_without_axis(moved, axis) if shape_now[axis] == 1 else moved)
    return replace(plan, stages=tuple(stages), cluster=json.loads(cluster.to_json()))


def _without_axis(stage: Stage, axis: int) -> Stage:
    """The stage without a mesh axis of one device."""

    def cut(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:axis], *values[axis + 1 :])

    def pair(one: Pair) -> Pair:
        return Pair(cut(one.value), cut(one.cotangent))

    chunks = tuple(
        replace(
            chunk,
            ops={name: cut(labels) for name, labels in chunk.ops.items()},
            parameters={
                name: replace(
                    home,
                    compute=pair(home.compute),
                    stored=cut(home.stored),
                    gradient=cut(home.gradient),
                    optimizer=cut(home.optimizer),
                )
                for name, home in chunk.parameters.items()
            },
            sources={name: pair(one) for name, one in chunk.sources.items()},
            receives={name: pair(one) for name, one in chunk.receives.items()},
            sends={name: cut(spec) for name, spec in chunk.sends.items()},
        )
        for chunk in stage.chunks
    )
    wires = [
        replace(wire, axes=tuple(k - (k > axis) for k in wire.axes if k != axis))
        for wire in stage.wire
    ]  # fmt: skip
    return replace(stage, mesh_shape=cut(stage.mesh_shape), chunks=chunks, wire=tuple(w for w in wires if w.axes))
