"""Collective algorithms as data: who sends which part of the vector to whom, round by round.

The vector of each of p devices is cut into S segments of (nearly) equal length. A *message* carries segments
[first, last) of its source as they stood when the round began, and is added to, or replaces, the same segments of its
target (all_to_all: those from ``into`` on; its sources are the inputs, its targets the outputs)::

    schedule ::= round*            round ::= message*
    message  ::= source, target, first, last, into, add

Where several messages of a round add to the same segments of a device, they and its own are added in the order of
their devices, so all devices that sum the same segments get the same bits.

    ring                        every device passes one segment on to the next; after p−1 rounds of adding, device i has
                                the sum of segment i; p−1 rounds of replacing tell all         (Patarasu, Yuan 2009)
    recursive halving, doubling exchange half of what is left with the device at distance q/2, q/4, …; the other way
                                round to gather                                      (Thakur, Rabenseifner, Gropp 2005)
    recursive doubling          exchange all with the device at distance 1, 2, 4, …: fewest rounds
    all_to_all                  everyone sends to everyone, in one round
    two_step                    all_to_all of segments, a local sum, and all_to_all of the sums
    tree                        binomial: the devices that have it double in each round
    parameter_server, direct    all to the root, or the root to all, at once; sequential: one by one
    hierarchical                ring within hosts, another algorithm between hosts on each part at once, ring within

For p not a power of two the recursive all-reduces *fold*: device q + i (q the largest power of two ≤ p) first hands
its vector to device i, and gets the sum at the end. ``place`` says which segment a device starts from (all_gather) or
ends with (reduce_scatter): in hierarchical ones that is not its own number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

__all__ = ["ALGORITHMS", "HIERARCHICAL", "CollectiveSchedule", "Round", "SegmentMessage", "schedule_of", "spans_of"]


@dataclass(frozen=True, slots=True)
class SegmentMessage:
    """Segments [first, last) of ``source``, added to those of ``target`` or put in their place, from ``into`` on."""

    source: int
    target: int
    first: int
    last: int
    into: int
    add: bool


Round = tuple[SegmentMessage, ...]


@dataclass(frozen=True, slots=True)
class CollectiveSchedule:
    """A collective of ``size`` devices on vectors of ``segments`` segments. place[device]: its segment, if it has
    one."""

    kind: str
    algorithm: str
    size: int
    segments: int
    rounds: tuple[Round, ...]
    place: tuple[int, ...]


def spans_of(length: int, segments: int) -> list[tuple[int, int]]:
    """[start, end) of each segment of a vector of ``length`` elements."""
    return [(length * k // segments, length * (k + 1) // segments) for k in range(segments)]


# ---- the parts: rounds of p devices


def _message(source: int, target: int, first: int, last: int | None = None, add: bool = False) -> SegmentMessage:
    return SegmentMessage(source, target, first, first + 1 if last is None else last, first, add)


def _ring_reduce_scatter(p: int) -> list[Round]:
    return [tuple(_message(i, (i + 1) % p, (i - 1 - t) % p, add=True) for i in range(p)) for t in range(p - 1)]


def _ring_all_gather(p: int) -> list[Round]:
    return [tuple(_message(i, (i + 1) % p, (i - t) % p) for i in range(p)) for t in range(p - 1)]


def _halving(q: int) -> list[Round]:
    """Of q segments device i < q ends with the sum of segment i."""
    rounds, width = [], q
    while width > 1:
        half = width // 2
        sends = []
        for i in range(q):
            other = i ^ half
            first = other // half * half  # what the other one keeps
            sends.append(_message(i, other, first, first + half, add=True))
        rounds.append(tuple(sends))
        width = half
    return rounds


def _doubling(q: int) -> list[Round]:
    """Device i < q has segment i, in the end all."""
    rounds, width = [], 1
    while width < q:
        rounds.append(tuple(_message(i, i ^ width, i // width * width, i // width * width + width) for i in range(q)))
        width *= 2
    return rounds


def _exchanging(q: int, segments: int = 1) -> list[Round]:
    """Whole vectors between devices at distance 1, 2, 4, …"""
    distances = [1 << k for k in range(q.bit_length() - 1)]
    return [tuple(_message(i, i ^ distance, 0, segments, add=True) for i in range(q)) for distance in distances]


def _direct(p: int, add: bool) -> list[Round]:
    """Segment j from everyone to device j, or segment i from device i to everyone."""
    return [tuple(_message(i, j, j if add else i, add=add) for i in range(p) for j in range(p) if i != j)]


def _tree_broadcast(p: int) -> list[Round]:
    distances = [1 << k for k in range((p - 1).bit_length())]
    return [tuple(_message(i, i + d, 0) for i in range(d) if i + d < p) for d in distances]


def _chain(p: int) -> list[Round]:
    """p segments one after the other from device 0 to the last."""
    return [
        tuple(_message(hop, hop + 1, t - hop) for hop in range(p - 1) if 0 <= t - hop < p) for t in range(2 * (p - 1))
    ]


def _star(p: int) -> list[Round]:
    return [tuple(_message(0, i, 0) for i in range(1, p))]


def _one_by_one(p: int) -> list[Round]:
    return [(_message(0, i, 0),) for i in range(1, p)]


def _scatter_tree(p: int) -> list[Round]:
    """Half of what is left of a device's segments leaves it in each round."""
    distances = [1 << k for k in reversed(range((p - 1).bit_length()))]
    return [
        tuple(_message(i, i + d, i + d, min(i + 2 * d, p)) for i in range(0, p, 2 * d) if i + d < p) for d in distances
    ]


def _scatter_ring(p: int) -> list[Round]:
    """The segment with the farthest way first; all of them move on together."""
    return [tuple(_message(i, i + 1, p - 1 - t + i) for i in range(p - 1) if i <= t) for t in range(p - 1)]


def _scatter_direct(p: int) -> list[Round]:
    return [tuple(_message(0, i, i) for i in range(1, p))]


def _reverse(rounds: Iterable[Round], add: bool) -> list[Round]:
    """The same messages the other way, the last round first: broadcasts become reductions, scatters gathers."""
    turned = [tuple(replace(m, source=m.target, target=m.source, add=add) for m in sends) for sends in rounds]
    return turned[::-1]


def _folded(p: int, inner: Callable[[int], list[Round]], segments: int) -> list[Round]:
    """``inner`` on the largest power of two; the others hand over their vectors first and get the sum at the end."""
    q = 1 << (p.bit_length() - 1)
    others = range(q, p)
    if not others:
        return inner(q)
    before = tuple(_message(i, i - q, 0, segments, add=True) for i in others)
    return [before, *inner(q), tuple(_message(i - q, i, 0, segments) for i in others)]


def _shifts(p: int, rounds: Iterable[Iterable[int]]) -> list[Round]:
    """Segment j of device i to device j, as its segment i, for j − i in the shifts of each round."""
    return [
        tuple(SegmentMessage(i, (i + s) % p, (i + s) % p, (i + s) % p + 1, i, False) for s in shifts for i in range(p))
        for shifts in rounds
    ]


# ---- the table: (kind, algorithm) → segments of p devices, rounds

_Row = tuple[Callable[[int], int], Callable[[int], list[Round]]]


def _one_segment(_: int) -> int:
    return 1


def _segment_per_device(p: int) -> int:
    return p


def _largest_power_of_two(p: int) -> int:
    return 1 << (p.bit_length() - 1)


_ROWS: dict[str, dict[str, _Row]] = {
    "all_reduce": {
        "ring": (_segment_per_device, lambda p: _ring_reduce_scatter(p) + _ring_all_gather(p)),
        "recursive_halving_doubling": (
            _largest_power_of_two,
            lambda p: _folded(p, lambda q: _halving(q) + _doubling(q), _largest_power_of_two(p)),
        ),
        "recursive_doubling": (_one_segment, lambda p: _folded(p, _exchanging, 1)),
        "all_to_all": (
            _one_segment,
            lambda p: [tuple(_message(i, j, 0, add=True) for i in range(p) for j in range(p) if i != j)],
        ),
        "two_step": (_segment_per_device, lambda p: _direct(p, True) + _direct(p, False)),
        "parameter_server": (_one_segment, lambda p: _reverse(_star(p), True) + _star(p)),
        "tree": (_one_segment, lambda p: _reverse(_tree_broadcast(p), True) + _tree_broadcast(p)),
        "sequential": (_one_segment, lambda p: _reverse(_one_by_one(p), True)[::-1] + _one_by_one(p)),
    },
    "all_gather": {
        "ring": (_segment_per_device, _ring_all_gather),
        "recursive_doubling": (_segment_per_device, _doubling),
        "all_to_all": (_segment_per_device, lambda p: _direct(p, False)),
    },
    "reduce_scatter": {
        "ring": (_segment_per_device, _ring_reduce_scatter),
        "recursive_halving": (_segment_per_device, _halving),
        "all_to_all": (_segment_per_device, lambda p: _direct(p, True)),
    },
    "all_to_all": {
        "all_to_all": (_segment_per_device, lambda p: _shifts(p, [range(1, p)])),
        "pairwise": (_segment_per_device, lambda p: _shifts(p, [[s] for s in range(1, p)])),
    },
    "broadcast": {
        "tree": (_one_segment, _tree_broadcast),
        "parameter_server": (_one_segment, _star),
        "ring": (_segment_per_device, _chain),
    },
    "reduce": {
        "tree": (_one_segment, lambda p: _reverse(_tree_broadcast(p), True)),
        "direct": (_one_segment, lambda p: _reverse(_star(p), True)),
        "ring": (_segment_per_device, lambda p: _reverse(_chain(p), True)),
    },
    "scatter": {
        "tree": (_segment_per_device, _scatter_tree),
        "direct": (_segment_per_device, _scatter_direct),
        "ring": (_segment_per_device, _scatter_ring),
    },
    "gather": {
        "tree": (_segment_per_device, lambda p: _reverse(_scatter_tree(p), False)),
        "direct": (_segment_per_device, lambda p: _reverse(_scatter_direct(p), False)),
        "ring": (_segment_per_device, lambda p: _reverse(_scatter_ring(p), False)),
    },
    "send": {"direct": (_one_segment, lambda p: [(_message(0, 1, 0),)])},
}

#: the algorithms of each kind
ALGORITHMS: dict[str, tuple[str, ...]] = {kind: tuple(rows) for kind, rows in _ROWS.items()}

#: what goes between hosts in a hierarchical collective, the first by default
HIERARCHICAL: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "recursive_halving_doubling"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("tree",),
    "reduce": ("tree",),
}
_POWERS_ONLY = {("all_gather", "recursive_doubling"), ("reduce_scatter", "recursive_halving")}


@lru_cache(maxsize=512)
def schedule_of(
    kind: str, algorithm: str, size: int, *, root: int = 0, members: int = 0, between: str = ""
) -> CollectiveSchedule:
    """The rounds of one collective on ``size`` devices.

    root: where rooted ones start or end. members: for "hierarchical", devices per host, which are neighbours (0: all
    on one); between: what goes between the hosts, one of ``HIERARCHICAL[kind]``. Raises ValueError for what there is
    not.
    """
    names = (*ALGORITHMS.get(kind, ()), *(("hierarchical",) if kind in HIERARCHICAL else ()))
    if algorithm not in names:
        known = f"{kind} has {', '.join(names)}" if names else f"a collective is one of {', '.join(ALGORITHMS)}"
        raise ValueError(f"{known}, but got {algorithm!r} for {kind!r}; use one of them")
    if not 0 <= root < size:
        raise ValueError(f"the root is one of {size} devices, but got {root}; number them from 0")
    if algorithm == "hierarchical":
        schedule = _hierarchical(kind, size, members or size, between or HIERARCHICAL[kind][0])
    elif (kind, algorithm) in _POWERS_ONLY and size & (size - 1):
        raise ValueError(f"{kind} by {algorithm} is defined for powers of two, but got {size} devices; use ring")
    else:
        segments, rounds = _ROWS[kind][algorithm]
        rounds_of_size = tuple(rounds(size)) if size > 1 else ()
        schedule = CollectiveSchedule(kind, algorithm, size, segments(size), rounds_of_size, tuple(range(size)))
    return _rooted(schedule, root) if root else schedule


def _rooted(schedule: CollectiveSchedule, root: int) -> CollectiveSchedule:
    """Device ``root`` in the part of device 0, the others in turn."""
    p = schedule.size
    moved = _mapped(schedule.rounds, [(i + root) % p for i in range(p)])
    return replace(schedule, rounds=tuple(moved), place=tuple(schedule.place[(i - root) % p] for i in range(p)))


def _mapped(rounds: Iterable[Round], devices: Sequence[int], offset: int = 0, width: int = 1) -> list[Round]:
    """The same rounds among ``devices``, each segment being ``width`` ones from ``offset`` on."""
    return [
        tuple(
            SegmentMessage(
                devices[m.source], devices[m.target],
                offset + m.first * width, offset + m.last * width, offset + m.into * width, m.add,
            )
            for m in sends
        )
        for sends in rounds
    ]  # fmt: skip


def _merge_rounds(groups: Iterable[list[Round]]) -> list[Round]:
    """Groups that do the same at the same time."""
    return [tuple(m for sends in together for m in sends) for together in zip(*groups, strict=True)]


def _hierarchical(kind: str, size: int, members: int, between: str) -> CollectiveSchedule:
    if size % members or between not in HIERARCHICAL[kind]:
        raise ValueError(
            f"a hierarchical {kind} needs hosts of equally many devices and {' or '.join(HIERARCHICAL[kind])} between "
            f"them, but got {size} devices, {members} per host, and {between!r}; choose another algorithm"
        )
    hosts = size // members
    local = [[h * members + i for i in range(members)] for h in range(hosts)]
    if kind in ("broadcast", "reduce"):
        outer, inner = schedule_of(kind, between, hosts).rounds, schedule_of(kind, "tree", members).rounds
        parts = [_mapped(outer, [row[0] for row in local]), _merge_rounds(_mapped(inner, row) for row in local)]
        rounds = [sends for part in (parts if kind == "broadcast" else parts[::-1]) for sends in part]
        return CollectiveSchedule(kind, "hierarchical", size, 1, tuple(rounds), tuple(range(size)))
    across = schedule_of(kind, between, hosts)
    width = across.segments  # of the part that a device has once its host is through

    def within(inner: str) -> list[Round]:
        rounds = schedule_of(inner, "ring", members).rounds
        return _merge_rounds(_mapped(rounds, row, 0, width) for row in local)

    middle = _merge_rounds(
        _mapped(across.rounds, [row[i] for row in local], i * width) for i in range(members)
    )  # fmt: skip
    before = within("reduce_scatter") if kind != "all_gather" else []
    after = within("all_gather") if kind != "reduce_scatter" else []
    place = tuple(device % members * width + across.place[device // members] for device in range(size))
    return CollectiveSchedule(kind, "hierarchical", size, members * width, (*before, *middle, *after), place)
