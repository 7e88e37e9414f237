"""Descriptions of hardware: Device, Link, Host, Cluster, and Mesh, a logical view of consecutive devices. No process
group anywhere.

Grammar::

    cluster ::= host+  joined by one link level        devices are numbered host by host
    host    ::= device × n  joined by one link level   devices of one host are alike, hosts may differ
    mesh    ::= "2x4@8"                                shape @ first device; row-major, axis 0 major; "@3": one device

A link's rates are per direction. Kinds: "switch" — every end has its own path; "ring" — direct links between pairs, so
a small group reaches only some of a device's links; "shared" — one medium that all ends divide among them.

A cluster as a JSON document: versioned, readable, no pickle; and back, with one clear error for what is wrong.

Schema 2 adds what was measured: a device's surfaces, exact op times, optimizer rates, overlap and action, and the
cluster's wires and provenance. Documents of schema 1 still load; they have none of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from .cluster_form import cluster_faults
from .curves import Curve, curve_from, surface_from
from .files import parse_document, read_document, write_atomically
from .forms import shown
from .hardware import LINK_KINDS, Device, HashedOnce, Host, Link, device_of, link_behind, link_of, positive
from .measured import CodingRate, CollectiveMeasurement, OpTime, OptimizerRate, Piece
from .presets import DEFAULT_HOSTS, LOOPBACK, NETWORKS, PRESETS
from .tables import MachineTable, local_table, machine, machine_memory_bytes, usable_cores

__all__ = ["Cluster", "Mesh"]

FORMAT, SCHEMA, READABLE = "meshwright-cluster", 2, (1, 2)
_NOISE, _MISFIT = 0.5, 0.5  # shares of a time that are worth a warning

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cluster(HashedOnce):
    """Hosts joined by one network. ``oversubscription``: ranks per core where ranks share cores (already in all rates);
    ``backend``: "nccl" or "gloo", whose algorithms the default prices assume. ``wires``: measured collectives;
    ``provenance``: what was measured where, when and with which software, as (name, text) pairs."""

    name: str
    hosts: tuple[Host, ...]
    link: Link
    link_kind: str = "switch"
    backend: str = "nccl"
    oversubscription: float = 1.0
    wires: tuple[CollectiveMeasurement, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a cluster has at least one host, but got none; give hosts")
        if self.link_kind not in LINK_KINDS:
            raise ValueError(
                f"a link kind is one of {', '.join(LINK_KINDS)}, but got {self.link_kind!r}; correct the cluster"
            )
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(f"a backend is nccl or gloo, but got {self.backend!r}; change the cluster's backend")
        positive(f"cluster {self.name}", self, "oversubscription")

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        starts, total = [], 0
        for host in self.hosts:
            starts.append(total)
            total += host.num_devices
        return (*starts, total)

    @property
    def num_devices(self) -> int:
        """Devices of all hosts together."""
        return self._starts[-1]

    def host_of(self, index: int) -> int:
        """The number of the host that holds device ``index``; ValueError outside the cluster."""
        if not 0 <= index < self.num_devices:
            raise ValueError(
                f"{self.name} has devices 0 to {self.num_devices - 1}, but got {index}; use a larger cluster"
            )
        return bisect_right(self._starts, index) - 1

    def device(self, index: int) -> Device:
        """Device number ``index``."""
        return self.hosts[self.host_of(index)].device

    def mesh(self) -> Mesh:
        """All devices on one axis."""
        return Mesh.of(self, 0, (self.num_devices,))

    # ---- making

    @staticmethod
    def preset(name: str, hosts: int | None = None) -> Cluster:
        """Known hardware with data-sheet constants (``presets.PRESETS``), ``hosts`` of it (default 1; ``"name:2"`` says
        it too); ValueError lists the known names."""
        if hosts is None and ":" in name:
            name, _, count_text = name.partition(":")
            hosts = _count(name, count_text)
        sheet = PRESETS.get(name)
        if sheet is None:
            raise ValueError(
                f"a preset is one of {', '.join(PRESETS)}, but got {name!r}; use one of them or a cluster file"
            )
        count = DEFAULT_HOSTS.get(name, 1) if hosts is None else hosts
        if count < 1:
            raise ValueError(f"a cluster has at least one host, but got {name}:{count}; ask for 1 or more")
        host = Host(device_of(sheet.device), sheet.num_devices, link_of(sheet.link), sheet.link_kind)
        return Cluster(f"{name}:{count}", (host,) * count, link_of(sheet.network), sheet.network_kind, sheet.backend)

    @staticmethod
    def parse(text: str) -> Cluster:
        """``"p3.16xlarge:8"`` (preset:hosts), ``"local"`` or ``"local:4"`` (this machine, ranks), several of them
        joined (``"p3.16xlarge:2+8x4090"``), any of these over a network (``"p3.16xlarge:4@world"``, one of
        ``presets.NETWORKS``), else the path of a cluster file."""
        parts, _, network = text.partition("@")
        names = [part.partition(":")[0] for part in parts.split("+")]
        if all(name in PRESETS or name == "local" for name in names):
            cluster = Cluster.join(*(Cluster._parse_one(part) for part in parts.split("+")))
            return cluster.over(network) if "@" in text else cluster
        if Path(text).is_file():
            return Cluster.load(text)
        raise ValueError(
            f"unknown cluster {text!r}: not a preset ({', '.join(PRESETS)}, each with :hosts), not 'local:N', no such "
            "file"
        )

    @staticmethod
    def _parse_one(text: str) -> Cluster:
        name, colon, count = text.partition(":")
        number = _count(name, count) if colon else None
        return Cluster.local(number) if name == "local" else Cluster.preset(name, number)

    def over(self, network: str) -> Cluster:
        """The same hosts joined by one of ``presets.NETWORKS`` behind their own adapters: "rack", "zone", "region",
        "continent" or "world"; ValueError for another."""
        sheet = NETWORKS.get(network)
        if sheet is None:
            raise ValueError(f"a network is one of {', '.join(NETWORKS)}, but got {network!r}; use one of them")
        name = f"{self.name}@{network}"
        return replace(self, name=name, link=link_behind(self.link, sheet), wires=())

    @staticmethod
    def join(
        *clusters: Cluster, link: Link | None = None, link_kind: str = "switch", name: str | None = None
    ) -> Cluster:
        """One cluster of the hosts of several, in order, all joined by ``link`` (default: the longest latency and the
        lowest rate of theirs). What was measured on devices stays; wires do not: they are of the parts' own networks.

        Raises ValueError for no cluster or for different backends.
        """
        if len({cluster.backend for cluster in clusters}) != 1:
            known = ", ".join(f"{cluster.name}: {cluster.backend}" for cluster in clusters) or "none"
            raise ValueError(f"joined clusters have one backend, but got {known}; replace the backend of one first")
        if len(clusters) == 1 and link is None:
            return clusters[0]
        if link is None:
            slow = max((cluster.link for cluster in clusters), key=lambda link: (1 / link.bytes_per_s, link.alpha_s))
            link = replace(slow, alpha_s=max(cluster.link.alpha_s for cluster in clusters))
        return Cluster(
            name or "+".join(cluster.name for cluster in clusters),
            tuple(host for cluster in clusters for host in cluster.hosts),
            link,
            link_kind,
            clusters[0].backend,
            max(cluster.oversubscription for cluster in clusters),
            provenance=tuple({key: value for cluster in clusters for key, value in cluster.provenance}.items()),
        )

    @staticmethod
    def local(ranks: int | None = None) -> Cluster:
        """This machine as ``ranks`` CPU ranks of one thread (default: ``$WORLD_SIZE``, else one per core), from a
        measurement of at most two seconds, cached. Ranks beyond the cores share them: every rate is divided by
        ranks/cores, which is ``oversubscription``.

        Every process that calls this may measure for itself: where ranks must agree, call it on one and hand the result
        on."""
        cores = usable_cores()
        count = int(os.environ.get("WORLD_SIZE", cores)) if ranks is None else ranks
        if count < 1:
            raise ValueError(f"a cluster has at least one rank, but got {count}; ask for 1 or more")
        return _local(local_table(), count, max(1.0, count / cores))

    # ---- measurements

    def merge(self, other: Cluster) -> Cluster:
        """This cluster with the measurements of ``other`` beside its own. Where both have one, the other's counts, and
        so do its rates where it was measured at all; ValueError unless both are the same hardware."""
        if difference := self.difference(other):
            raise ValueError(
                f"measurements are merged for the same hardware, but got {self.name} and {other.name}:"
                f" {'; '.join(difference)}; merge tables of one cluster"
            )
        pairs = {(id(a), id(b)): (a, b) for a, b in zip(self.hosts, other.hosts)}
        both = {key: replace(a, device=_both(a.device, b.device), link=b.link) for key, (a, b) in pairs.items()}
        return replace(
            self,
            hosts=tuple(both[id(a), id(b)] for a, b in zip(self.hosts, other.hosts)),
            link=other.link,
            oversubscription=other.oversubscription,
            wires=_union(self.wires, other.wires, lambda wire: wire.label),
            provenance=tuple((dict(self.provenance) | dict(other.provenance)).items()),
        )

    def validate(self) -> list[str]:
        """Warnings, one line each, where the measurements are of other software or hardware than this process has, or
        doubtful. Raises ValueError for a wire that no group of the cluster can have; what cannot be by itself is
        refused already when it is made or read."""
        widest = max(host.num_devices for host in self.hosts)
        for wire in self.wires:
            if wire.size > self.num_devices or wire.members > widest:
                raise ValueError(
                    f"{self.name} has {self.num_devices} devices, {widest} on a host, but got {wire.label}; is it of"
                    " another cluster?"
                )
        return [*_stale(self), *_doubtful(self)]

    # ---- identity and JSON

    def fingerprint(self) -> str:
        """16 hex digits over what the hardware *is* (devices, memory, links and their order), not over measured rates:
        a plan stays valid when the cluster is profiled again."""
        parts: list[object] = [
            [h.device.name, h.device.memory_bytes, h.num_devices, h.link.name, h.link_kind] for h in self.hosts
        ]
        text = json.dumps([parts, self.link.name, self.link_kind, self.backend])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def difference(self, other: Cluster) -> list[str]:
        """One line per way in which ``other`` is not this hardware; empty if the fingerprints agree."""
        lines = []
        if self.num_devices != other.num_devices:
            lines.append(f"{self.num_devices} devices against {other.num_devices}")
        mine, theirs = self.text().splitlines()[1:], other.text().splitlines()[1:]
        if self.fingerprint() != other.fingerprint():
            mine, theirs = ([line for line in text if not line.startswith("  measured")] for text in (mine, theirs))
            lines += [f"- {line.strip()}" for line in mine if line not in theirs]
            lines += [f"+ {line.strip()}" for line in theirs if line not in mine]
        return lines

    def text(self) -> str:
        """A few lines for people: hosts, devices, links."""
        note = f", oversubscribed {self.oversubscription:g}× (ranks share cores)" if self.oversubscription > 1 else ""
        lines = [f"{self.name}: {self.num_devices} devices on {len(self.hosts)} hosts, {self.backend}{note}"]
        for host, run in groupby(self.hosts):
            device, best = host.device, max(rate for _, rate in host.device.flops_per_s)
            lines.append(
                f"  {len(list(run))} × {host.num_devices} {device.name}: {device.memory_bytes / 2**30:.2f} GiB at"
                f" {device.memory_bytes_per_s / 1e9:.4g} GB/s, {best / 1e12:.4g} TFLOP/s;"
                f" {_link_text(host.link, host.link_kind)}"
            )
        if len(self.hosts) > 1:
            lines.append(f"  between hosts: {_link_text(self.link, self.link_kind)}")
        if measured := self._measured():
            lines.append(f"  measured: {measured}")
        return "\n".join(lines)

    __str__ = text

    def _measured(self) -> str:
        devices = {id(host.device): host.device for host in self.hosts}.values()
        counts = {
            "collectives": len(self.wires),
            "op curves": sum(len(device.curves) + len(device.surfaces) for device in devices),
            "exact ops": sum(len(device.op_times) for device in devices),
            "optimizers": sum(len(device.optimizers) for device in devices),
            "codes": sum(len(device.codings) for device in devices),
        }
        found = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        where = dict(self.provenance)
        software = f"torch {where['torch']}" if "torch" in where else None
        parts = (where.get("gpu") or where.get("processor"), software, where.get("date"))
        return f"{found} ({', '.join(part for part in parts if part)})" if found else ""

    def to_json(self) -> str:
        """Versioned, human-readable JSON; equal neighbouring hosts are written once with a count."""
        body = {
            "format": FORMAT,
            "schema": SCHEMA,
            "name": self.name,
            "backend": self.backend,
            "oversubscription": self.oversubscription,
            "link_kind": self.link_kind,
            "link": asdict(self.link),
            "hosts": [{"count": len(list(run))} | asdict(host) for host, run in groupby(self.hosts)],
            "wires": [asdict(wire) for wire in self.wires],
            "provenance": dict(self.provenance),
        }
        return json.dumps(body, indent=1)

    @staticmethod
    def from_json(text: str) -> Cluster:
        """The inverse of ``to_json``; ValueError on a corrupt, foreign or outdated document and on impossible values,
        naming the entry."""
        data = parse_document(text, "cluster", FORMAT, READABLE, "save it again")
        if faults := shown(cluster_faults(data)):
            raise ValueError(f"a cluster document has the form that Cluster.to_json writes, but {faults}; correct it")
        try:
            hosts: list[Host] = []
            for entry in data["hosts"]:
                link = Link(**entry["link"])
                host = Host(_device(entry["device"]), int(entry["num_devices"]), link, str(entry["link_kind"]))
                hosts += [host] * int(entry["count"])
            fields: dict[str, Any] = {
                "name": str(data["name"]),
                "hosts": tuple(hosts),
                "link": Link(**data["link"]),
                "link_kind": str(data["link_kind"]),
                "backend": str(data["backend"]),
                "oversubscription": float(data["oversubscription"]),
                "wires": tuple(_wire(entry) for entry in data.get("wires", ())),
                "provenance": tuple((str(key), str(value)) for key, value in data.get("provenance", {}).items()),
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"a cluster document lacks or misnames a field ({error!r}); see Cluster.to_json for the form"
            ) from None
        return Cluster(**fields)

    def save(self, path: str | Path) -> None:
        """Write to ``path``: complete or not at all."""
        write_atomically(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster file; ValueError names the file and what is wrong with it. What only deserves a warning says
        ``validate``."""

        def sound(text: str) -> Cluster:
            cluster = Cluster.from_json(text)
            cluster.validate()
            return cluster

        return read_document(path, sound)


def _count(name: str, text: str) -> int:
    """The number behind the colon of ``name:text``."""
    if not text.isdecimal():
        written = f"{name}:{text}"
        raise ValueError(f"a preset is followed by ':' and a whole number, but got {written!r}; write {name}:2, say")
    return int(text)


def _local(table: MachineTable, ranks: int, slowdown: float) -> Cluster:
    where = dict(table.provenance)
    device = Device(
        name=f"{where.get('processor', 'cpu')} core",
        memory_bytes=machine_memory_bytes() // ranks,
        flops_per_s=(("float32", table.peak_flops_per_s() / slowdown),),
        memory_bytes_per_s=table.memory_bytes_per_s / slowdown,
        launch_s=table.launch.alpha_s * slowdown,
        source="measured: " + ", ".join(f"{key} {value}" for key, value in table.provenance),
        kind="cpu",
        curves=tuple(
            Curve(c.kind, c.dtype, c.variable, tuple((work, t * slowdown) for work, t in c.points))
            for c in table.curves
        ),
        view_s=table.view_s * slowdown,
    )
    loopback = link_of(LOOPBACK, slowdown)
    return Cluster(
        f"local:{ranks}", (Host(device, ranks, loopback),), loopback, "switch", "gloo", slowdown, (), table.provenance
    )


def _link_text(link: Link, kind: str) -> str:
    return f"{link.name} ({kind}), {link.bytes_per_s / 1e9:.4g} GB/s, {link.alpha_s * 1e6:.4g} µs"


# ---- Mesh: a logical view of consecutive devices of a cluster, written ``2x4@8`` (shape @ first device;
# row-major, axis 0 major; ``@3``: one device)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Consecutive devices (numbers in a cluster) as an array: row-major, axis 0 is the major one. Shape ``()`` is one
    device."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axis_names), (self.shape, self.axis_names)
        assert prod(self.shape) == len(self.devices), (self.shape, self.devices)

    @staticmethod
    def of(cluster: Cluster, offset: int, shape: Sequence[int], axis_names: Sequence[str] | None = None) -> Mesh:
        """The ``prod(shape)`` devices from ``offset`` on; axis names default to x, y, z, …; ValueError if they are not
        all in the cluster."""
        sizes = tuple(int(size) for size in shape)
        if any(size < 1 for size in sizes):
            raise ValueError(f"a mesh shape has positive sizes, but got {sizes}; drop the empty axis")
        count = prod(sizes)
        if offset < 0 or offset + count > cluster.num_devices:
            raise ValueError(
                f"{cluster.name} has devices 0 to {cluster.num_devices - 1}, but a mesh {sizes} from device {offset}"
                f" needs {count}; shrink the mesh"
            )
        names = tuple(axis_names) if axis_names is not None else tuple("xyzwvutsrqp"[: len(sizes)])
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise ValueError(
                f"a mesh has one distinct name per axis, but got {names} for shape {sizes}; name each axis"
            )
        return Mesh(sizes, names, tuple(range(offset, offset + count)))

    @staticmethod
    def parse(cluster: Cluster, text: str) -> Mesh:
        """The inverse of ``str`` (default axis names)."""
        match = re.fullmatch(r"(\d+(?:x\d+)*)?@(\d+)", text)
        if not match:
            raise ValueError(f"a mesh is written SHAPE@FIRST like 2x4@8, but got {text!r}; write it so")
        return Mesh.of(cluster, int(match[2]), [int(size) for size in match[1].split("x")] if match[1] else ())

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}@{self.devices[0]}"

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """The place of cluster device ``device`` in this mesh, one index per axis."""
        position, out = self.devices.index(device), []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            out.append(index)
        return tuple(reversed(out))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The device groups that communicate along ``axis``, each in order of its coordinate."""
        stride, size = prod(self.shape[axis + 1 :]), self.shape[axis]
        starts = (block + i for block in range(0, len(self.devices), stride * size) for i in range(stride))
        return tuple(self.devices[start : start + stride * size : stride] for start in starts)


def _device(entry: Mapping[str, Any]) -> Device:
    fields = dict(entry)
    fields["curves"] = tuple(curve_from(curve) for curve in fields.get("curves", ()))
    fields["surfaces"] = tuple(surface_from(surface) for surface in fields.get("surfaces", ()))
    fields["op_times"] = tuple(OpTime(**time) for time in fields.get("op_times", ()))
    fields["optimizers"] = tuple(OptimizerRate(**rate) for rate in fields.get("optimizers", ()))
    fields["codings"] = tuple(CodingRate(**rate) for rate in fields.get("codings", ()))
    for key in ("flops_per_s", "efficiency"):
        fields[key] = tuple((str(name), float(value)) for name, value in fields.get(key, ()))
    return Device(**fields)


def _wire(entry: Mapping[str, Any]) -> CollectiveMeasurement:
    try:
        pieces = tuple(Piece(**piece) for piece in entry["pieces"])
    except ValueError as error:
        raise ValueError(f"wire {entry['kind']} of {entry['size']}: {error}") from None
    points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in entry["points"])
    return CollectiveMeasurement(**(dict(entry) | {"pieces": pieces, "points": points}))


# ---- the measurements of two in one


def _both(a: Device, b: Device) -> Device:
    base = b if b.curves or b.surfaces or b.op_times or b.optimizers or b.codings else a
    return replace(
        base,
        curves=_union(a.curves, b.curves, lambda curve: (curve.kind, curve.dtype, curve.direction)),
        surfaces=_union(a.surfaces, b.surfaces, lambda surface: (surface.kind, surface.dtype, surface.direction)),
        op_times=_union(a.op_times, b.op_times, lambda time: time.signature),
        optimizers=_union(a.optimizers, b.optimizers, lambda rate: rate.label),
        codings=_union(a.codings, b.codings, lambda rate: rate.name),
    )


def _union(first: Iterable[T], second: Iterable[T], key: Callable[[T], object]) -> tuple[T, ...]:
    """Those of ``first``, replaced by those of ``second`` with the same key, then the others of ``second``."""
    return tuple(({key(item): item for item in first} | {key(item): item for item in second}).values())


# ---- what is wrong


def _stale(cluster: Cluster) -> Iterable[str]:
    where = dict(cluster.provenance)
    here = machine()
    if where.get("torch", torch.__version__) != torch.__version__:
        yield (
            f"{cluster.name} was measured with torch {where['torch']}, this is {torch.__version__};"
            " its times may no longer hold, profile again"
        )
    for key, what in (("processor", "processor"), ("gpu", "GPU"), ("driver", "driver")):
        # a GPU cluster is often planned for where there is none
        if key in where and key in here and where[key] != here[key] and ("gpu" in here or "gpu" not in where):
            yield (
                f"{cluster.name} was measured on another {what}, {where[key]}, this is {here[key]};"
                " its prices are of that machine"
            )


def _doubtful(cluster: Cluster) -> Iterable[str]:
    if busy := dict(cluster.provenance).get("busy"):
        yield (
            f"{cluster.name} was measured while other processes had the cores for {busy} of the time; its collectives"
            " may be faster than that, profile again on an idle machine"
        )
    for wire in cluster.wires:
        for (small, before), (large, after) in pairwise(wire.points):
            if after < _NOISE * before:
                yield (
                    f"{wire.label} took {before:.3g} s for {small:g} bytes and {after:.3g} s for {large:g}:"
                    " something disturbed it, profile again on an idle machine"
                )
                break
        if wire.residual > _MISFIT:
            yield f"{wire.label} is fitted with a median error of {wire.residual * 100:.0f} %; profile again"
