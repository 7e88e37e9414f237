"""α–β prices of collectives as algorithms: rounds, bytes and messages, on one link and on the axes of a mesh.

With p devices, d the bytes that one device holds *whole along the axis* (all_gather: the gathered result; others: the
input):

    kind            algorithm                   rounds     bytes one device sends or takes, whichever is more
    all_reduce      ring                        2(p−1)     2 d (p−1)/p
    all_reduce      recursive_halving_doubling  2 log p    2 d (p−1)/p      p not a power of two: + 2 rounds, + 2 d
    all_reduce      recursive_doubling          log p      d log p          likewise
    all_reduce      all_to_all                  1          d (p−1)          p² messages, p−1 into each device
    all_reduce      two_step                    2          2 d (p−1)/p      all_to_all, local sum, direct all_gather
    all_reduce      parameter_server            2          2 d (p−1)        one of the p devices is the server
    all_reduce      tree                        2 ⌈log p⌉  2 d ⌈log p⌉      binomial reduce, then broadcast
    all_gather      ring                        p−1        d (p−1)/p
    all_gather      recursive_doubling          log p      d (p−1)/p        powers of two only
    all_gather      all_to_all                  1          d (p−1)/p        every block sent directly
    reduce_scatter  ring                        p−1        d (p−1)/p
    reduce_scatter  recursive_halving           log p      d (p−1)/p        powers of two only
    reduce_scatter  all_to_all                  1          d (p−1)/p        then a local sum
    all_to_all      all_to_all, pairwise        1, p−1     d (p−1)/p
    broadcast       tree                        ⌈log p⌉    d ⌈log p⌉
    broadcast       parameter_server            1          d (p−1)          the root sends to each
    send            direct                      1          d

With a server of its own beside the p devices the parameter server's bytes are the literature's 2 p d.

A round in which a device handles k messages costs α + (k−1)·message_s. A group that spans hosts is priced flat, every
round over the network with what a host's adapter leaves to each of the devices that use it at once, or *hierarchical*:
within hosts, between, within. ``tests/test_costmodel.py`` runs every row message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from .cluster import Cluster, Host, Link, Mesh

__all__ = [
    "ALGORITHMS",
    "AxisPrice",
    "Steps",
    "mesh_prices",
    "p2p_seconds",
    "steps_of",
]

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        "ring",
        "recursive_halving_doubling",
        "recursive_doubling",
        "all_to_all",
        "two_step",
        "parameter_server",
        "tree",
    ),
    "all_gather": ("ring", "recursive_doubling", "all_to_all"),
    "reduce_scatter": ("ring", "recursive_halving", "all_to_all"),
    "all_to_all": ("all_to_all", "pairwise"),
    "broadcast": ("tree", "parameter_server"),
    "send": ("direct",),
}
ALIASES = {"all_reduce_max": "all_reduce"}

#: what the backends run by themselves; instead of Gloo's reduce_scatter, all_to_all and a local sum
_BACKEND: dict[str, dict[str, tuple[str, ...]]] = {
    "nccl": {
        "all_reduce": ("ring", "hierarchical"),
        "all_gather": ("ring", "hierarchical"),
        "reduce_scatter": ("ring", "hierarchical"),
        "all_to_all": ("all_to_all",),
        "broadcast": ("tree",),
        "send": ("direct",),
    },
    "gloo": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("all_to_all",),
        "all_to_all": ("all_to_all",),
        "broadcast": ("tree",),
        "send": ("direct",),
    },
}


@dataclass(frozen=True, slots=True)
class Steps:
    """One collective on one group. ``sent``: what ``nbytes`` is multiplied by to get the bytes over one device's link
    (the busier direction, summed over rounds); ``messages``: messages that one device posts or takes, whichever is
    more, summed over rounds; ``incast``: the most it takes in one round."""

    rounds: int
    sent: float
    messages: int
    incast: int = 1


def steps_of(kind: str, algorithm: str, p: int) -> Steps:
    """The steps of one row of the table above for ``p`` devices; ValueError for an unknown row or a ``p`` it is not
    defined for."""
    kind = ALIASES.get(kind, kind)
    if kind not in ALGORITHMS:
        raise ValueError(f"a collective is one of {', '.join(ALGORITHMS)}, but got {kind!r}; use one of them")
    if algorithm not in ALGORITHMS[kind]:
        raise ValueError(
            f"{kind} has the algorithms {', '.join(ALGORITHMS[kind])}, but got {algorithm!r}; use one of them"
        )
    if p < 1:
        raise ValueError(f"a group has at least one device, but got {p}; pass its size")
    if p == 1:
        return Steps(0, 0.0, 0, 0)
    ceil_log, share = (p - 1).bit_length(), (p - 1) / p
    floor_log = p.bit_length() - 1
    power_of_two = p & (p - 1) == 0
    if algorithm in ("recursive_halving", "recursive_doubling") and kind != "all_reduce" and not power_of_two:
        raise ValueError(f"{kind} by {algorithm} is defined for powers of two, but got {p} devices; use ring")
    if algorithm == "ring":
        halves = 2 if kind == "all_reduce" else 1
        return Steps(halves * (p - 1), halves * share, halves * (p - 1))
    if algorithm in ("recursive_halving_doubling", "recursive_doubling", "recursive_halving"):
        if kind != "all_reduce":
            return Steps(floor_log, share, floor_log)
        q = 1 << floor_log  # the other p − q fold into a partner before, and get the result after
        fold = 0 if power_of_two else 2
        if algorithm == "recursive_doubling":
            return Steps(floor_log + fold, floor_log + fold, floor_log + fold)
        return Steps(2 * floor_log + fold, 2 * (q - 1) / q + fold, 2 * floor_log + fold)
    if algorithm == "all_to_all":
        return Steps(1, p - 1 if kind == "all_reduce" else share, p - 1, p - 1)
    if algorithm == "two_step":
        return Steps(2, 2 * share, 2 * (p - 1), p - 1)
    if algorithm == "pairwise":
        return Steps(p - 1, share, p - 1)
    if algorithm == "parameter_server":
        return Steps(1, p - 1, p - 1, 1) if kind == "broadcast" else Steps(2, 2 * (p - 1), 2 * (p - 1), p - 1)
    if algorithm == "tree":
        halves = 2 if kind == "all_reduce" else 1
        return Steps(halves * ceil_log, halves * ceil_log, halves * ceil_log)
    assert algorithm == "direct", algorithm
    return Steps(1, 1.0, 1)


def _line(steps: Steps, alpha: float, message: float, call: float, rate: float) -> tuple[float, float]:
    """(a, b) of seconds = a + b·nbytes."""
    return call + steps.rounds * alpha + (steps.messages - steps.rounds) * message, steps.sent / rate


def _defined(kind: str, algorithm: str, p: int) -> bool:
    return kind == "all_reduce" or p & (p - 1) == 0 or algorithm not in ("recursive_doubling", "recursive_halving")


def group_rate(link: Link, link_kind: str, group: int, active: int) -> float:
    """Bytes per second that one device of a group of ``group`` gets, with ``active`` devices on the medium at once."""
    if link_kind == "shared":
        return min(link.pair, link.bytes_per_s / max(active, 1))
    if link_kind == "ring":
        return min(link.bytes_per_s, link.pair * (group - 1))
    return link.bytes_per_s


@dataclass(frozen=True, slots=True)
class AxisPrice:
    """Prices along one mesh axis: for each kind at most two lines (a, b), of which the cheaper counts: seconds = min(a
    + b·nbytes).

    ``crosses_hosts``: whether some group of the axis leaves its host; ``link``: the name of its slowest link.
    """

    size: int
    link: str
    crosses_hosts: bool
    pieces: Mapping[str, tuple[tuple[float, float], ...]] = field(hash=False)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Seconds of one collective along the axis while every group of the axis does the same; KeyError for an unknown
        kind."""
        if self.size == 1 or nbytes == 0:
            return 0.0
        return min(a + b * nbytes for a, b in self.pieces[kind])

    def coefficients(self, kind: str) -> tuple[float, float]:
        """(a, b) of the line that is cheapest for large messages; its price is never below ``seconds``. (0, 0) on an
        axis of one device."""
        return self.pieces[kind][-1]

    def source(self, kind: str) -> str:
        """Where the prices of a kind come from: "measured" (a wire of this very form), "scaled" (a wire of another
        form, by the ratio of the analytic prices) or "analytic"."""
        return "analytic"


def mesh_prices(cluster: Cluster, mesh: Mesh, algorithms: str = "backend") -> tuple[AxisPrice, ...]:
    """One AxisPrice per mesh axis. ``algorithms``: "backend", what NCCL or Gloo runs by itself, or "all", every row of
    the table.

    The price of an axis is that of its slowest group; groups of the axis run at once and share their hosts' network
    adapters."""
    if algorithms not in ("backend", "all"):
        raise ValueError(f"algorithms is 'backend' or 'all', but got {algorithms!r}; use one of them")
    return _mesh_prices(cluster, mesh, algorithms == "all")


@lru_cache(maxsize=65536)
def _mesh_prices(cluster: Cluster, mesh: Mesh, every: bool) -> tuple[AxisPrice, ...]:
    kinds = {
        kind: (*names, "hierarchical") if every else _BACKEND[cluster.backend][kind]
        for kind, names in ALGORITHMS.items()
    }
    return tuple(_axis_price(cluster, mesh, axis, kinds) for axis in range(len(mesh.shape)))


@dataclass(frozen=True, slots=True)
class _Group:
    """What a group's price depends on. members: the most devices it has on one host; even: as many on every host;
    active: devices of the mesh on its slowest host; crossing: groups that share that host's adapter, 0 within a
    host."""

    size: int
    hosts: int
    members: int
    even: bool
    host_link: Link
    host_kind: str
    active: int
    crossing: int


def _axis_price(cluster: Cluster, mesh: Mesh, axis: int, kinds: dict[str, tuple[str, ...]]) -> AxisPrice:
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
    pieces: dict[str, tuple[tuple[float, float], ...]] = {}
    for kind, names in kinds.items():
        envelopes = [_envelope(_lines(cluster, shape, kind, names)) for shape in shapes]
        # the slowest group: upper bound by the larger of each coefficient, exact where groups are alike
        if len(envelopes) == 1:
            pieces[kind] = envelopes[0]
        else:
            pieces[kind] = ((max(e[-1][0] for e in envelopes), max(e[-1][1] for e in envelopes)),)
    for alias, kind in ALIASES.items():
        pieces[alias] = pieces[kind]
    crosses = any(len(counts) > 1 for counts in per_host)
    name = cluster.link.name if crosses else next(iter(shapes)).host_link.name
    return AxisPrice(size, name, crosses, pieces)


def _lines(cluster: Cluster, group: _Group, kind: str, algorithms: Sequence[str]) -> list[tuple[float, float]]:
    """(a, b) of each algorithm on one group."""
    inner, outer, p = group.host_link, cluster.link, group.size
    flat = [
        (name, steps_of(kind, name, p)) for name in algorithms if name != "hierarchical" and _defined(kind, name, p)
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
    """Within hosts, between hosts with one m-th of the bytes on each of the m local devices, within hosts."""
    names = {"all_reduce": ("ring", "recursive_halving_doubling"), "all_gather": ("ring",), "reduce_scatter": ("ring",)}
    m, out = group.members, []
    for name in names.get(kind, ()):
        between = _line(steps_of(kind, name, group.hosts), outer.alpha_s, outer.message_s, call, share / m)
        within = (0.0, 0.0)
        if m > 1:
            rate = group_rate(inner, group.host_kind, m, group.active)
            within = _line(steps_of(kind, "ring", m), inner.alpha_s, inner.message_s, 0.0, rate)
        out.append((within[0] + between[0], within[1] + between[1] / m))
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
    here, there = cluster.host_of(src_device), cluster.host_of(dst_device)
    link, kind = (
        (cluster.hosts[here].link, cluster.hosts[here].link_kind)
        if here == there
        else (cluster.link, cluster.link_kind)
    )
    shared = (
        here != there or kind == "shared"
    )  # inside a host with a switch or direct links every device has its own path
    rate = min(link.pair, link.bytes_per_s / concurrent) if shared else link.pair
    return link.call_s + link.alpha_s + nbytes / rate
