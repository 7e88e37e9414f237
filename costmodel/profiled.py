"""From a profile's state to a cluster: devices, wires and links with what was measured of them.

Keys of the state::

    fact/… , op/… , probe/<signature>                   what one rank does alone      (``op_grid``, ``fact/overlap``)
    optimizer/<name>:<dtype>/<tensors>x<elements>       also alone; no dtype: float32
    coding/<code>/<elements>                            also alone: to encode and decode
    wire/<kind>/<size>/<members>/<groups>/<bytes>       what groups do together  (``measured.CollectiveMeasurement``)
         a kind may be "all_reduce:<algorithm>", where it is not the backend's

Times of ops are those of at most one rank per core; where more ranks share the cores, every rate is divided by their
ratio (``slowdown``), as ``Cluster.local`` does. Collectives are measured with all ranks, so theirs stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .fitting import fit_coding, fit_optimizer, fit_wire, two_rates
from .hardware import Device, Link, link_of
from .measured import CodingRate, CollectiveMeasurement, OpTime, OptimizerRate
from .op_grid import GridOp, curves_of, surfaces_of
from .op_timing import ENTRY, stream_bytes_per_s
from .presets import LOOPBACK, OVERLAP
from .profiler import ProfileState

__all__ = [
    "RankFacts", "extended_device", "inner_link", "measured_device", "network_link", "op_times_of", "view", "wires_of",
    "with_overlap",
]  # fmt: skip

NETWORK = "network"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The place of a rank. host: what counts as one host; machine: the real one, whose cores ranks share; kind: "cpu"
    or "cuda"."""

    host: str
    machine: str
    cores: int
    kind: str
    device: str
    memory_bytes: int
    software: tuple[tuple[str, str], ...]


def view(state: ProfileState, suffix: str) -> ProfileState:
    """The records whose keys end in ``suffix``, without it."""
    cut = {key.removesuffix(suffix): record for key, record in state.records.items() if key.endswith(suffix)}
    return ProfileState(state.about, cut)


def measured_device(
    facts: RankFacts, ops: Sequence[GridOp], state: ProfileState, every: ProfileState, slowdown: float, source: str
) -> Device:
    """The Device of one rank from its ops (``state``) and what all ranks measured together (``every``); ValueError
    where too little was measured to price anything."""
    peaks: dict[str, float] = {}
    for op in ops:
        seconds = state.seconds(op.key)
        if op.kind == "matmul" and seconds is not None:
            name = str(op.dtype).removeprefix("torch.")
            peaks[name] = max(peaks.get(name, 0.0), op.work / seconds[0] / slowdown)
    launch, look, stream = (state.seconds(f"fact/{name}") for name in ("launch", "view", "stream"))
    if launch is None or look is None or stream is None or "float32" not in peaks:
        raise ValueError(
            "a profile measures at least one matmul, a launch and the memory rate; give it a larger budget"
        )
    entry = state.seconds(ENTRY)
    post_s, post_s_per_byte = _post_rates(every)
    return Device(
        name=facts.device,
        memory_bytes=facts.memory_bytes,
        flops_per_s=tuple(peaks.items()),
        memory_bytes_per_s=stream_bytes_per_s(stream[0]) / slowdown,
        launch_s=launch[0] * slowdown,
        source=source,
        kind=facts.kind,
        curves=tuple(curves_of(ops, state, slowdown)),
        view_s=look[0] * slowdown,
        op_times=op_times_of(state, slowdown),
        optimizers=_optimizers(state, slowdown),
        overlap=OVERLAP[facts.kind].value,
        action_s=entry[0] * slowdown if entry else 0.0,
        post_s=post_s,
        post_s_per_byte=post_s_per_byte,
        surfaces=tuple(surfaces_of(ops, state, slowdown)),
        codings=_codings(state, slowdown),
    )


def _post_rates(state: ProfileState) -> tuple[float, float]:
    """The cost of starting a message between stages, at its ends: seconds, and seconds per byte."""
    rows = [
        (1.0, float(key.rsplit("/", 1)[1]), record.medians()[1])
        for key, record in state.records.items()
        if key.startswith("wire/send/") and record.visits and len(record.visits[0]) > 1
    ]
    rows = [row for row in rows if row[2] > 0]
    return two_rates(rows) if len(rows) > 1 else (0.0, 0.0)


def with_overlap(device: Device, state: ProfileState) -> Device:
    """The device with its measured overlap, if it was measured."""
    seconds = state.seconds("fact/overlap")
    if seconds is None:
        return device
    compute, wire, both = seconds
    hidden = (compute + wire - both) / max(min(compute, wire), 1e-9)
    return replace(device, overlap=min(max(hidden, 0.0), 1.0))


def extended_device(device: Device, state: ProfileState, slowdown: float) -> Device:
    """The device with the exact ops, optimizers and codes that the state has besides; a new op time replaces an old."""
    ops, rates, codings = op_times_of(state, slowdown), _optimizers(state, slowdown), _codings(state, slowdown)
    fresh = {time.signature for time in ops}
    known = {rate.label for rate in device.optimizers} | {coding.name for coding in device.codings}
    return replace(
        device,
        op_times=tuple(time for time in device.op_times if time.signature not in fresh) + ops,
        optimizers=device.optimizers + tuple(rate for rate in rates if rate.label not in known),
        codings=device.codings + tuple(rate for rate in codings if rate.name not in known),
    )


def op_times_of(state: ProfileState, slowdown: float) -> tuple[OpTime, ...]:
    """The exact ops, by signature ("*" marks an activation whose gradient is wanted, "^" a parameter)."""
    out = []
    for key, record in state.records.items():
        if not key.startswith("probe/") or not record.visits:
            continue
        signature = key.removeprefix("probe/")
        forward, backward, to_inputs = record.medians()
        total = backward if "*" in signature or "^" in signature else 0.0
        if "^" not in signature:
            inputs = total
        elif "*" not in signature:
            inputs = 0.0
        else:
            inputs = min(to_inputs, total)
        times = (forward * slowdown, inputs * slowdown, (total - inputs) * slowdown)
        out.append(OpTime(signature, *times, record.samples))
    return tuple(out)


_ITEMSIZES = {"float32": 4, "bfloat16": 2}


def _optimizers(state: ProfileState, slowdown: float) -> tuple[OptimizerRate, ...]:
    """The rate of each optimizer and dtype that was measured at two sizes or more."""
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    samples: Counter[tuple[str, str]] = Counter()
    for key, record in state.records.items():
        if key.startswith("optimizer/") and record.visits:
            _, text, size = key.split("/")
            name, _, dtype = text.partition(":")
            tensors, elements = (float(text) for text in size.split("x"))
            which = name, dtype or "float32"
            nbytes = _ITEMSIZES[which[1]] * tensors * elements
            rows.setdefault(which, []).append((tensors, nbytes, record.medians()[0] * slowdown))
            samples[which] += record.samples
    return tuple(
        replace(fit_optimizer(name, found, samples[name, dtype]), dtype=dtype)
        for (name, dtype), found in rows.items()
        if len(found) > 1
    )


def _codings(state: ProfileState, slowdown: float) -> tuple[CodingRate, ...]:
    """coding/<code>/<elements>."""
    rows: dict[str, list[tuple[float, float]]] = {}
    samples: dict[str, int] = {}
    for key, record in state.records.items():
        if key.startswith("coding/") and record.visits:
            _, name, elements = key.split("/")
            rows.setdefault(name, []).append((float(elements), record.medians()[0] * slowdown))
            samples[name] = samples.get(name, 0) + record.samples
    return tuple(fit_coding(name, found, samples[name]) for name, found in rows.items() if len(found) > 1)


def wires_of(state: ProfileState) -> tuple[CollectiveMeasurement, ...]:
    """One Wire for each kind, algorithm and form that was measured at two sizes or more."""
    points: dict[tuple[str, int, int, int], dict[float, float]] = {}
    samples: dict[tuple[str, int, int, int], int] = {}
    for key, record in state.records.items():
        if key.startswith("wire/") and record.visits:
            _, kind, size, members, groups, nbytes = key.split("/")
            form = (kind, int(size), int(members), int(groups))
            points.setdefault(form, {})[float(nbytes)] = record.medians()[0]
            samples[form] = samples.get(form, 0) + record.samples
    wires = []
    for form, found in points.items():
        if len(found) > 1:
            kind, _, algorithm = form[0].partition(":")
            wires.append(fit_wire(kind, *form[1:], found, samples[form], algorithm or "backend"))
    return tuple(wires)


def inner_link(kind: str, wires: Sequence[CollectiveMeasurement], slowdown: float) -> Link:
    """The link within hosts, which prices what no wire tells: between CPU ranks the loopback, else as sends take."""
    if kind == "cpu":
        return link_of(LOOPBACK, slowdown)
    return _sent("in a host", [wire for wire in wires if wire.kind == "send" and wire.members > 1])


def network_link(wires: Sequence[CollectiveMeasurement]) -> Link:
    """The link between hosts, as sends take."""
    return _sent(NETWORK, [wire for wire in wires if wire.kind == "send" and wire.members == 1])


def _sent(name: str, wires: Sequence[CollectiveMeasurement]) -> Link:
    if not wires:
        loopback = link_of(LOOPBACK)
        return replace(
            loopback, name=name, source=f"assumed like the loopback, no send was measured: {loopback.source}"
        )
    wire = min(wires, key=lambda wire: wire.groups)
    slope = wire.pieces[-1].beta_s_per_byte or wire.points[-1][1] / wire.points[-1][0]
    source = f"measured: send, {wire.groups} at once, {wire.samples} samples, residual {wire.residual:.1%}"
    return Link(name, wire.pieces[0].alpha_s, 1.0 / slope, source)
