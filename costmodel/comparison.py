"""Two descriptions of hardware held against each other.

changes      every measured price that both have, before and after
compare      the same as text, with what only one of them has
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import log

from .cluster import Cluster
from .hardware import Device
from .measured import CollectiveMeasurement

__all__ = ["Change", "changes", "compare"]


_SIZES = ((2**10, "1 KiB"), (2**20, "1 MiB"), (2**24, "16 MiB"))  # where wires are compared
_MANY = 20  # lines of one section that compare prints
_EFFORT = ("skipped", "samples", "seconds")  # of the profile, not of what it found


@dataclass(frozen=True, slots=True)
class Change:
    """One price before and after; ``section``: "device", "wires", "curves", "ops", "optimizers" or
    "codes"."""

    section: str
    name: str
    before: float
    after: float
    unit: str = "s"

    @property
    def ratio(self) -> float:
        """After over before; infinite or 0 where one of them is 0, 1 where both are."""
        if self.before == self.after:
            return 1.0
        return self.after / self.before if self.before else float("inf")

    def __str__(self) -> str:
        percent = f"{(self.ratio - 1) * 100:+.1f} %" if self.before else "from nothing"
        scale, unit = _readable(max(self.before, self.after), self.unit)
        return f"{self.name}: {self.before * scale:.4g} → {self.after * scale:.4g} {unit} ({percent})"


def _readable(value: float, unit: str) -> tuple[float, str]:
    """(factor, unit) that bring ``value`` near 1 to 1000: µs and ms, giga and tera."""
    if unit == "s":
        return (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1.0, "s")
    if unit in ("B/s", "FLOP/s"):
        return (1e-12, f"T{unit}") if value >= 1e12 else (1e-9, f"G{unit}")
    return 1.0, unit


# ---- what there is, by name


def _wires(cluster: Cluster) -> dict[str, CollectiveMeasurement]:
    return {wire.label: wire for wire in cluster.wires}


def _devices(cluster: Cluster) -> dict[str, Device]:
    """The first device of each name, in order."""
    found: dict[str, Device] = {}
    for host in cluster.hosts:
        found.setdefault(host.device.name, host.device)
    return found


def _alone(before: Cluster, after: Cluster) -> bool:
    """True if each has devices of one kind: those are compared, whatever their names."""
    return len(_devices(before)) == len(_devices(after)) == 1


def _curve_prices(device: Device) -> dict[str, tuple[tuple[tuple[float, ...], float], ...]]:
    """Points (work, seconds) of each curve and surface by its name."""
    found: dict[str, tuple[tuple[tuple[float, ...], float], ...]] = {}
    for curve in device.curves:
        name = f"curve {curve.kind} {curve.dtype} {curve.direction}"
        found[name] = tuple(((work,), seconds) for work, seconds in curve.points)
    for surface in device.surfaces:
        grid = [(r, i, c) for r in surface.rows for i in surface.inner for c in surface.cols]
        name = f"surface {surface.kind} {surface.dtype} {surface.direction}"
        found[name] = tuple(zip(grid, surface.seconds))
    return found


def changes(before: Cluster, after: Cluster) -> list[Change]:
    """Every measured price that both clusters have: wires at three sizes, curves and surfaces at the points they
    share, op times, optimizers and codes (a million elements of fp32), rates of the devices of the same name, or of the
    only device of each."""
    found: list[Change] = []
    for a, b in product(_devices(before).values(), _devices(after).values()):
        if a.name == b.name or _alone(before, after):
            found += _device_changes(a, b)
    new = _wires(after)
    for label, wire in _wires(before).items():
        if label in new:
            for nbytes, text in _SIZES:
                price = Change("wires", f"{label}, {text}", wire.seconds(nbytes), new[label].seconds(nbytes))
                found.append(price)
    return found


def _device_changes(a: Device, b: Device) -> Iterable[Change]:
    rates, name = dict(b.flops_per_s), a.name if a.name == b.name else f"{a.name} → {b.name}"
    for dtype, rate in a.flops_per_s:
        if dtype in rates:
            yield Change("device", f"{name}, {dtype} peak", rate, rates[dtype], "FLOP/s")
    yield Change("device", f"{name}, memory rate", a.memory_bytes_per_s, b.memory_bytes_per_s, "B/s")
    yield Change("device", f"{name}, launch", a.launch_s, b.launch_s)
    yield Change("device", f"{name}, view", a.view_s, b.view_s)
    yield Change("device", f"{name}, pipeline action", a.action_s, b.action_s)
    yield Change("device", f"{name}, start of a 1 MiB message", a.post_seconds(1 << 20), b.post_seconds(1 << 20))
    yield Change("device", f"{name}, overlap", a.overlap, b.overlap, "of the shorter")
    new = _curve_prices(b)
    for curve, points in _curve_prices(a).items():
        there = dict(new.get(curve, ()))
        shared = [(seconds, there[work]) for work, seconds in points if work in there]
        if shared:  # a curve is one price here: the sum over its points
            yield Change(
                "curves", f"{curve}, {len(shared)} points", sum(s for s, _ in shared), sum(t for _, t in shared)
            )
    for time in a.op_times:
        if other := b.op_time(time.signature):
            yield Change("ops", f"{time.signature} forward", time.forward_s, other.forward_s)
            yield Change("ops", f"{time.signature} backward", time.backward_s, other.backward_s)
    updates = {rate.label: rate for rate in b.optimizers}
    for optimizer in a.optimizers:
        if later := updates.get(optimizer.label):
            old_s, new_s = (rate.alpha_s + 4e6 * rate.beta_s_per_byte for rate in (optimizer, later))
            yield Change("optimizers", f"{optimizer.label}, a tensor of 4 MB", old_s, new_s)
    for coding in a.codings:
        if recent := b.coding_rate(coding.name):
            old_s, new_s = (rate.alpha_s + 1e6 * rate.beta_s_per_element for rate in (coding, recent))
            yield Change("codes", f"code {coding.name}, a bucket of 4 MB", old_s, new_s)


def compare(before: Cluster, after: Cluster, at_least: float = 0.02) -> str:
    """For people: differences of the hardware, prices that changed by more than the share ``at_least`` (largest change
    first), and what only one of the two has measured."""
    difference = before.difference(after)
    lines = ["hardware: " + ("the same" if not difference else f"{before.name} against {after.name}")]
    lines += [f"  {line}" for line in difference]
    old, new = dict(before.provenance), dict(after.provenance)
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key) and not key.startswith(_EFFORT):
            lines.append(f"  {key}: {old.get(key, 'not stated')} → {new.get(key, 'not stated')}")
    every = changes(before, after)
    titles = {"device": "devices", "wires": "wires", "curves": "curves", "ops": "op times", "optimizers": "optimizers"}
    titles["codes"] = "codes"
    for section, title in titles.items():
        own = [change for change in every if change.section == section]
        moved = sorted((c for c in own if abs(c.ratio - 1) > at_least), key=_size, reverse=True)
        if own:
            lines.append(f"{title}: {len(moved)} of {len(own)} prices changed by more than {at_least * 100:g} %")
        lines += [f"  {change}" for change in moved[:_MANY]]
        if len(moved) > _MANY:
            lines.append(f"  and {len(moved) - _MANY} more")
    alone = _alone(before, after)
    ours, theirs = _names(before, alone), _names(after, alone)
    for title, missing in (("only before", ours - theirs), ("only after", theirs - ours)):
        lines += [f"{title}: {name}" for name in sorted(missing)[:_MANY]]
        if len(missing) > _MANY:
            lines.append(f"{title}: {len(missing) - _MANY} more")
    return "\n".join(lines)


def _size(change: Change) -> float:
    return abs(log(change.ratio)) if 0 < change.ratio < float("inf") else float("inf")


def _names(cluster: Cluster, alone: bool) -> set[str]:
    """What a cluster has measured; with the device before it, unless ``alone``."""
    names = set(_wires(cluster))
    for name, device in _devices(cluster).items():
        of = "" if alone else f"{name}: "
        names |= {of + curve for curve in _curve_prices(device)}
        names |= {of + time.signature for time in device.op_times}
        names |= {of + rate.label for rate in device.optimizers}
        names |= {f"{of}code {rate.name}" for rate in device.codings}
    return names
