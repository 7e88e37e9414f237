"""Prices of collectives on links and on the axes of a mesh: measured where the cluster has a wire, else α–β of
``algorithms``.

A round in which a device handles k messages costs α + (k−1)·message_s. A group that spans hosts is priced flat, every
round over the network with what a host's adapter leaves to each of the devices that use it at once, or hierarchical:
within hosts, between, within. Bytes are counted as in ``algorithms``; how a wire is chosen says
``gradient_communication``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from .algorithms import ALGORITHMS, ALIASES, BACKENDS, HIERARCHICAL, Steps, is_defined, levels_of, steps_of
from .cluster import Cluster, Mesh
from .hardware import Host, Link
from .measured import CollectiveMeasurement
from .measured_collectives import CollectiveForm, Lines, WirePrice, cheapest, form_of, matching

__all__ = [
    "ALGORITHMS",
    "REDUCTIONS",
    "AxisPrice",
    "Steps",
    "mesh_prices",
    "p2p_seconds",
    "steps_of",
]

REDUCTIONS = (*ALGORITHMS["all_reduce"], "hierarchical")  # algorithms of all-reduces, all of them exact


def _line(steps: Steps, alpha: float, message: float, call: float, rate: float) -> tuple[float, float]:
    """(a, b) of seconds = a + b·nbytes."""
    return call + steps.rounds * alpha + (steps.messages - steps.rounds) * message, steps.sent / rate


def group_rate(link: Link, link_kind: str, group: int, active: int) -> float:
    """Bytes per second that one device of a group of ``group`` gets, with ``active`` devices on the medium at once."""
    if link_kind == "shared":
        return min(link.pair, link.bytes_per_s / max(active, 1))
    if link_kind == "ring":
        return min(link.bytes_per_s, link.pair * (group - 1))
    return link.bytes_per_s


@dataclass(frozen=True, slots=True)
class AxisPrice:
    """Prices along one mesh axis: for each kind the wires that were measured (the cheapest counts), else at most two
    analytic lines (a, b), of which the cheaper counts: seconds = min(a + b·nbytes).

    ``crosses_hosts``: whether some group of the axis leaves its host; ``link``: the name of its slowest link.
    """

    size: int
    link: str
    crosses_hosts: bool
    pieces: Mapping[str, Lines] = field(hash=False)
    wires: Mapping[str, tuple[WirePrice, ...]] = field(default_factory=dict, hash=False)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Seconds of one collective along the axis while every group of the axis does the same; KeyError for an unknown
        kind."""
        if self.size == 1 or nbytes == 0:
            return 0.0
        measured = self.wires.get(kind)
        if measured:
            first, *others = measured
            return min(first.seconds(nbytes), *(o.seconds(nbytes) for o in others)) if others else first.seconds(nbytes)
        return cheapest(self.pieces[kind], nbytes)

    def pieces_of(self, kind: str) -> tuple[tuple[tuple[float, float, float], ...], ...]:
        """The prices of a kind as data: per offer (the cheapest counts) its pieces (from_bytes, a, b) in rising
        from_bytes, the first at 0; seconds = a + b·nbytes."""
        measured = self.wires.get(kind)
        if measured:
            return tuple(
                tuple((piece.from_bytes, piece.alpha_s, piece.beta_s_per_byte) for piece in price.wire.pieces)
                for price in measured
            )
        return tuple(((0.0, a, b),) for a, b in self.pieces[kind])

    def least_rate(
        self, kind: str, smallest: float, largest: float, counted: float = inf, factor: float = 1.0
    ) -> float:
        """The least seconds per byte of a part of any message of ``smallest`` to ``largest`` bytes.

        counted: bytes over which the message spreads its α at the most, as large parts count for less than they are;
        factor: for how much less this one does.
        """
        if self.size == 1:
            return 0.0
        found, most = inf, min(largest, counted)
        for pieces in self.pieces_of(kind):
            for (start, a, b), (end, *_) in pairwise((*pieces, (inf, 0.0, 0.0))):
                if start <= largest and smallest < end:  # α is spread widest at a piece's end
                    found = min(found, a / (end if end < most else most * factor) + b)
        return found

    def seconds_many(self, kind: str, nbytes: np.ndarray) -> np.ndarray:
        """``seconds`` of every element; same shape."""
        if self.size == 1:
            return np.zeros(np.shape(nbytes))
        offers = []
        for pieces in self.pieces_of(kind):
            seconds = pieces[0][1] + pieces[0][2] * nbytes
            for start, a, b in pieces[1:]:
                seconds = np.where(nbytes >= start, a + b * nbytes, seconds)
            offers.append(seconds)
        return np.where(nbytes == 0, 0.0, np.min(offers, axis=0))

    def coefficients(self, kind: str, nbytes: float = inf) -> tuple[float, float]:
        """(a, b) of the line that holds at ``nbytes``, by default of that for the largest messages. Analytic prices are
        never above it; measured ones may be, at other sizes. (0, 0) on an axis of one device."""
        measured = self.wires.get(kind)
        if measured:
            return min((price.coefficients(nbytes) for price in measured), key=lambda line: line[::-1])
        lines = self.pieces[kind]
        return lines[-1] if nbytes == inf else min(lines, key=lambda line: line[0] + line[1] * nbytes)

    def source(self, kind: str) -> str:
        """Where the prices of a kind come from: "measured" (a wire of this very form), "scaled" (a wire of another
        form, by the ratio of the analytic prices) or "analytic"."""
        measured = self.wires.get(kind)
        if not measured:
            return "analytic"
        return "measured" if all(price.exact for price in measured) else "scaled"


def mesh_prices(cluster: Cluster, mesh: Mesh, algorithms: str = "backend") -> tuple[AxisPrice, ...]:
    """One AxisPrice per mesh axis. ``algorithms``: "backend", what NCCL or Gloo runs by itself; "all", every row of
    the table and every wire, whichever algorithm it is of; or one of ``REDUCTIONS``, which prices all-reduces alone,
    and nothing on an axis whose groups it is not defined for.

    The price of an axis is that of its slowest group; groups of the axis run at once and share their hosts' network
    adapters."""
    if algorithms not in ("backend", "all", *REDUCTIONS):
        known = ", ".join(REDUCTIONS)
        raise ValueError(f"algorithms is backend, all, or one of {known}, but got {algorithms!r}; use one of them")
    return _mesh_prices(cluster, mesh, algorithms)


@lru_cache(maxsize=65536)
def _mesh_prices(cluster: Cluster, mesh: Mesh, algorithms: str) -> tuple[AxisPrice, ...]:
    kinds: dict[str, tuple[str, ...]] = {"all_reduce": (algorithms,)}
    if algorithms in ("backend", "all"):
        kinds = {
            kind: (*names, "hierarchical") if algorithms == "all" else BACKENDS[cluster.backend][kind]
            for kind, names in ALGORITHMS.items()
        }
    measured = None if algorithms == "all" else (algorithms,)
    return tuple(_axis_price(cluster, mesh, axis, kinds, measured) for axis in range(len(mesh.shape)))


@dataclass(frozen=True, slots=True)
class _Group:
    """The facts of a group that decide its price."""

    size: int
    hosts: int
    #: the most devices that it has on one host
    members: int
    #: whether it has as many devices on every host
    even: bool
    host_link: Link
    host_kind: str
    #: devices of the mesh on its slowest host
    active: int
    #: groups that share that host's adapter; 0 within a host
    crossing: int


def _axis_price(
    cluster: Cluster, mesh: Mesh, axis: int, kinds: dict[str, tuple[str, ...]], measured: tuple[str, ...] | None
) -> AxisPrice:
    """``measured``: wires of these algorithms count; None: of any."""
    size = mesh.shape[axis]
    if size == 1:
        return AxisPrice(1, "none", False, dict.fromkeys((*kinds, *ALIASES), ((0.0, 0.0),)))
    groups = mesh.groups(axis)
    per_host = [Counter(cluster.host_of(device) for device in group) for group in groups]
    active = Counter(cluster.host_of(device) for device in mesh.devices)
    crossing = Counter(host for counts in per_host if len(counts) > 1 for host in counts)
    shapes = set()
    for counts in per_host:
        worst = min(counts, key=lambda h: _host_rate(cluster.hosts[h], counts[h], active[h]))
        host = cluster.hosts[worst]
        shapes.add(
            _Group(
                size,
                len(counts),
                max(counts.values()),
                len(set(counts.values())) == 1,
                host.link,
                host.link_kind,
                active[worst],
                max(crossing[h] for h in counts),
            )
        )
    pieces: dict[str, Lines] = {}
    wires: dict[str, tuple[WirePrice, ...]] = {}
    form = CollectiveForm(size, max(shape.members for shape in shapes), len(groups))
    slowest = max(shapes, key=_slowness)
    for kind, names in kinds.items():
        lines = [_lines(cluster, shape, kind, names) for shape in shapes]
        if not all(lines):
            continue
        envelopes = [_envelope(one) for one in lines]
        # the slowest group: upper bound by the larger of each coefficient, exact where groups are alike
        if len(envelopes) == 1:
            pieces[kind] = envelopes[0]
        else:
            pieces[kind] = ((max(e[-1][0] for e in envelopes), max(e[-1][1] for e in envelopes)),)
        for own in (kind, *(alias for alias, of in ALIASES.items() if of == kind)):
            pieces[own] = pieces[kind]
            found, exact = matching(cluster.wires, own, form, measured)
            if exact:
                wires[own] = tuple(WirePrice(wire, True) for wire in found)
            elif kind in wires and ((own != kind and wires[kind][0].exact) or not found):
                wires[own] = wires[kind]  # rather of this form than of this kind
            elif found and (there := _lines(cluster, _measured_on(cluster, found[0], slowest), kind, names)):
                wires[own] = (WirePrice.scaled(found[0], pieces[kind], _envelope(there)),)
    crosses = any(len(counts) > 1 for counts in per_host)
    name = cluster.link.name if crosses else slowest.host_link.name
    return AxisPrice(size, name, crosses, pieces, wires)


def _slowness(group: _Group) -> tuple[float | str, ...]:
    """Orders groups of one axis by how much they are in each other's way, then by their hosts' links."""
    return group.hosts, group.crossing, group.active, -group.host_link.bytes_per_s, group.host_link.name


def _measured_on(cluster: Cluster, wire: CollectiveMeasurement, like: _Group) -> _Group:
    """The group that a wire was measured on, taken to be on hosts like those of ``like``."""
    form, widest = form_of(wire), max(host.num_devices for host in cluster.hosts)
    beside = min(form.groups, max(widest // form.members, 1))  # such groups on one host
    hosts = -(-form.size // form.members)
    crossing = beside if hosts > 1 else 0
    even = form.size % form.members == 0
    return _Group(form.size, hosts, form.members, even, like.host_link, like.host_kind, beside * form.members, crossing)


def _lines(cluster: Cluster, group: _Group, kind: str, algorithms: Sequence[str]) -> list[tuple[float, float]]:
    """(a, b) of each algorithm on one group."""
    inner, outer, p = group.host_link, cluster.link, group.size
    flat = [
        (name, steps_of(kind, name, p)) for name in algorithms if name != "hierarchical" and is_defined(kind, name, p)
    ]
    if group.hosts == 1:
        rate = group_rate(inner, group.host_kind, 2 if kind == "send" else p, group.active)
        rate = min(inner.pair, rate) if kind == "send" else rate
        return [_line(steps, inner.alpha_s, inner.message_s, inner.call_s, rate) for _, steps in flat]
    alpha, message = max(inner.alpha_s, outer.alpha_s), max(inner.message_s, outer.message_s)
    call = max(inner.call_s, outer.call_s)
    share = _network_share(cluster, group)  # what one group gets of a host's adapter
    each = share / group.members  # where all devices of the group on one host cross at once
    inside = group_rate(inner, group.host_kind, group.members, group.active) if group.members > 1 else inf
    lines = []
    for name, steps in flat:
        if kind == "send":
            rate = min(outer.pair, share)
        elif name == "ring":  # a ring enters and leaves each host once per channel
            rate = share
        elif name in ("all_to_all", "two_step", "pairwise") and group.even:  # only what is for other hosts crosses
            rate = each * (p - 1) / (p - group.members)
        else:
            rate = each
        lines.append(_line(steps, alpha, message, call, min(rate, inside)))
    if "hierarchical" in algorithms and group.even:
        lines += _hierarchical(kind, group, inner, outer, call, share)
    return lines


def _hierarchical(
    kind: str, group: _Group, inner: Link, outer: Link, call: float, share: float
) -> list[tuple[float, float]]:
    """Within hosts, between hosts, within hosts (``levels_of``)."""
    out = []
    for name in HIERARCHICAL.get(kind, ()):
        levels = levels_of(kind, name, group.hosts, group.members)
        each = min(share / levels.flows, outer.pair)
        between = _line(levels.between, outer.alpha_s, outer.message_s, call, each)
        within = (0.0, 0.0)
        if group.members > 1:
            rate = group_rate(inner, group.host_kind, group.members, group.active)
            within = _line(levels.within, inner.alpha_s, inner.message_s, 0.0, rate)
        out.append((within[0] + between[0], within[1] + between[1]))
    return out


def _network_share(cluster: Cluster, group: _Group) -> float:
    """Bytes per second that one group gets of each host's adapter, no more than its devices there can use."""
    link = cluster.link
    total = link.bytes_per_s / len(cluster.hosts) if cluster.link_kind == "shared" else link.bytes_per_s
    return min(total / max(group.crossing, 1), link.pair * group.members)


def _host_rate(host: Host, members: int, active: int) -> float:
    return group_rate(host.link, host.link_kind, max(members, 2), active)


def _envelope(lines: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The line cheapest for small messages and the one cheapest for large, in that order (one, if it is the same)."""
    small, large = min(lines), min(lines, key=lambda line: (line[1], line[0]))
    return (small,) if small == large else (small, large)


def p2p_seconds(cluster: Cluster, src_device: int, dst_device: int, nbytes: float, concurrent: int = 1) -> float:
    """Seconds to send ``nbytes`` from one device to another while ``concurrent`` such transfers share the adapter; 0 to
    itself."""
    if src_device == dst_device or nbytes == 0:
        return 0.0
    line, measured = _p2p(cluster, cluster.host_of(src_device), cluster.host_of(dst_device), concurrent)
    return measured.seconds(nbytes) if measured else line[0] + line[1] * nbytes


@lru_cache(maxsize=65536)
def _p2p(cluster: Cluster, here: int, there: int, concurrent: int) -> tuple[tuple[float, float], WirePrice | None]:
    line = _p2p_line(cluster, here, there, concurrent)
    found, exact = matching(
        cluster.wires, "send", CollectiveForm(2, 2 if here == there else 1, concurrent), ("backend",)
    )
    if not found:
        return line, None
    if exact:
        return line, WirePrice(found[0], True)
    return line, WirePrice.scaled(found[0], (line,), (_p2p_line(cluster, here, there, found[0].groups),))


def _p2p_line(cluster: Cluster, here: int, there: int, concurrent: int) -> tuple[float, float]:
    host = cluster.hosts[here]
    link, kind = (host.link, host.link_kind) if here == there else (cluster.link, cluster.link_kind)
    # inside a host with a switch or direct links every device has its own path
    shared = here != there or kind == "shared"
    rate = min(link.pair, link.bytes_per_s / concurrent) if shared else link.pair
    return link.call_s + link.alpha_s, 1 / rate
