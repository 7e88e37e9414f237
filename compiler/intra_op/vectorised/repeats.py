"""Repeated ops of one layer, such as the steps of a loop over time that Python unrolled, as one op each.

Ops are *alike* if they have the same choices, and neighbours that have the same; *equal* if that costs them the same,
too. Where a layer has many, all that are alike take the same choice, so that a scan of 256 steps is a problem of one:

``merged``        one operator stands for all that are alike; what it costs is the sum. What this problem finds is a
                  decision of the layer, at its true cost. Ops that read the op before them of their own kind (sums of
                  sums) are told apart by turns.
``merged_below``  a problem whose optimum is not above that of the layer. Ops that are equal are first joined to
                  *steps*, of which none has two that are equal, and tensors between steps cost nothing. Equal steps
                  are then independent of each other but for what they all read, of which copies are shared: if one
                  takes the best choice of any of them, so may all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from ...rules import MeshChoice
from .problem import ByMode, CaseEdge, CaseSection, Conversions

__all__ = ["merged", "merged_below", "moved_places", "repeats_of"]

_LEAST = 8  # ops that are alike
_ROUNDS = 1
_WORTH = 64  # operators that go


def repeats_of(section: CaseSection, equal: bool = False) -> list[int] | None:
    """The class of every operator, if enough of them are alike: numbers ≥ 0 of ops that are, else −1. equal: of those
    that are equal, however many."""
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def own(i: int) -> Hashable:
        if section.kinds[i] != "op":
            return i
        pairs = tuple(id(p) for c in section.choices[i] if isinstance(c, MeshChoice) for p in (*c.inputs, *c.outputs))
        return pairs, section.seconds[i].tobytes() if equal else b""

    if len(section.names) <= _WORTH:
        return None
    kinds = [number(own(i)) for i in range(len(section.names))]
    if _fewer(kinds) < _WORTH and not equal:
        return None
    for _ in range(_ROUNDS):
        reads: list[list[Hashable]] = [[] for _ in kinds]
        gives: list[list[Hashable]] = [[] for _ in kinds]
        for edge in section.edges:
            key = _edge_key(edge), id(edge.conversions) if equal else 0, kinds[edge.producer]
            users = frozenset((kinds[k], target.tobytes()) for k, target in edge.consumers)
            gives[edge.producer].append((key, users))
            for k, target in edge.consumers:
                reads[k].append((key, target.tobytes()))
        kinds = [number((kind, tuple(r), tuple(g))) for kind, r, g in zip(kinds, reads, gives)]
    counts = Counter(kinds)
    if _fewer(kinds) < _WORTH and not equal:
        return None
    return [kind if counts[kind] >= _LEAST else -1 for kind in kinds]


def _fewer(kinds: Sequence[int]) -> int:
    """The number of operators that go if those of one kind are merged."""
    return sum(count - 1 for count in Counter(kinds).values() if count >= _LEAST)


def merged(section: CaseSection, classes: Sequence[int]) -> tuple[CaseSection, np.ndarray]:
    """(the section with one operator per class, the place of every operator in it)."""
    groups: list[Hashable] = [kind if kind >= 0 else (i,) for i, kind in enumerate(classes)]
    for turns in (2, 3):
        own = {groups[e.producer] for e in section.edges for k, _ in e.consumers if groups[k] == groups[e.producer]}
        seen: dict[Hashable, int] = {}
        for i, group in enumerate(groups):
            if group in own:
                seen[group] = seen.get(group, -1) + 1
                groups[i] = (group, turns, seen[group] % turns)
    own = {groups[e.producer] for e in section.edges for k, _ in e.consumers if groups[k] == groups[e.producer]}
    return _merged(section, [(i,) if group in own else group for i, group in enumerate(groups)], section.edges)


def merged_below(section: CaseSection, classes: Sequence[int]) -> tuple[CaseSection, np.ndarray]:
    """(the section of lower bounds, the place of every operator in it)."""
    step = list(range(len(classes)))  # a forest: operator → one nearer to the root of its step
    kinds = [{kind} for kind in classes]  # of the step whose root this is

    def root(i: int) -> int:
        while step[i] != i:
            step[i] = i = step[step[i]]
        return i

    for edge in section.edges:
        for k, _ in edge.consumers:
            a, b = root(edge.producer), root(k)
            if a != b and classes[edge.producer] >= 0 <= classes[k] and not kinds[a] & kinds[b]:
                step[b] = a
                kinds[a] |= kinds[b]
    alone = [kind < 0 for kind in classes]
    edges: list[CaseEdge] = []
    looks: dict[int, list[Hashable]] = {}  # root → what its step has to do with tensors
    for number, edge in enumerate(section.edges):
        at = root(edge.producer)
        within = [(k, t) for k, t in edge.consumers if alone[edge.producer] or alone[k] or root(k) == at]
        edges.append(replace(edge, consumers=tuple(within)))
        if alone[edge.producer]:
            by_step: dict[int, set[Hashable]] = {}
            for k, target in within:
                by_step.setdefault(root(k), set()).add((classes[k], target.tobytes()))
            for one, ends in by_step.items():
                looks.setdefault(one, []).append((number, frozenset(ends)))
        else:
            users = frozenset((k if alone[k] else -1, classes[k], target.tobytes()) for k, target in within)
            looks.setdefault(at, []).append((classes[edge.producer], _edge_key(edge), id(edge.conversions), users))
    look = {one: (frozenset(kinds[one]), frozenset(some)) for one, some in looks.items()}
    groups = [(i,) if alone[i] else (kind, look.get(root(i))) for i, kind in enumerate(classes)]
    return _merged(section, groups, edges)


def _edge_key(edge: CaseEdge) -> Hashable:
    """The key that tells tensors apart, but for the seconds and bytes of their conversions."""
    pairs = tuple(id(pair) for pairs in edge.states for pair in pairs), len(edge.states[0])
    whole = tuple(edge.whole_in.items())
    return pairs, edge.source.tobytes(), edge.copied, whole, edge.kept_in, edge.again_in, edge.floor


def _merged(
    section: CaseSection, groups: Sequence[Hashable], edges: Sequence[CaseEdge]
) -> tuple[CaseSection, np.ndarray]:
    """(the section with one operator per group and one edge for all that are equal then, the operators' places)."""
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    place = np.array([places[group] for group in groups])
    first = np.unique(place, return_index=True)[1].tolist()

    members = [np.flatnonzero(place == k).tolist() for k in range(len(places))]

    def every(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(_sum([arrays[i] for i in some]) for some in members)

    def by_mode(arrays: Sequence[ByMode]) -> tuple[ByMode, ...]:
        return tuple({mode: _sum([arrays[i][mode] for i in some]) for mode in section.modes} for some in members)

    equal: dict[Hashable, list[CaseEdge]] = {}
    for edge in edges:
        ends = {(int(place[k]), target.tobytes()): target for k, target in edge.consumers}
        consumers = tuple((k, target) for (k, _), target in sorted(ends.items(), key=lambda item: item[0]))
        new = replace(edge, producer=int(place[edge.producer]), consumers=consumers)
        if consumers:
            equal.setdefault((new.producer, _edge_key(new), tuple(sorted(ends))), []).append(new)
    known: dict[tuple[tuple[int, int], ...], Conversions] = {}
    new_edges = []
    for same in equal.values():
        each = {id(edge.conversions): edge.conversions for edge in same}
        counts_of = Counter(id(edge.conversions) for edge in same)
        key = tuple(sorted(counts_of.items()))
        if key not in known:
            known[key] = _summed([(each[number], count) for number, count in counts_of.items()])
        new_edges.append(replace(same[0], conversions=known[key]))
    made = replace(
        section,
        names=tuple(section.names[i] for i in first),
        kinds=tuple(section.kinds[i] for i in first),
        choices=tuple(section.choices[i] for i in first),
        offered=tuple(section.offered[i] for i in first),
        seconds=every(section.seconds),
        step_seconds=every(section.step_seconds),
        gradient_seconds=every(section.gradient_seconds),
        backward_seconds=every(section.backward_seconds),
        weight_seconds=every(section.weight_seconds),
        floor_seconds=every(section.floor_seconds),
        resident=every(section.resident),
        again=by_mode(section.again),
        saved=by_mode(section.saved),
        transient=by_mode(section.transient),
        edges=tuple(new_edges),
    )
    return made, place


def _sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    counts = Counter(map(id, arrays))
    each = [one for one in {id(array): array for array in arrays}.values() if any(one.strides) or one.flat[0]]
    if len(arrays) == 1 or not each:
        return arrays[0]
    return np.asarray(sum(one * counts[id(one)] for one in each))


def _summed(several: Sequence[tuple[Conversions, int]]) -> Conversions:
    """The conversions of tensors of the same states, so many of each."""
    if len(several) == 1 and several[0][1] == 1:
        return several[0][0]
    made = copy(several[0][0])
    names = "ahead", "back", "seconds", "copies", "values"
    made.__dict__.update({name: sum(getattr(one, name) * number for one, number in several) for name in names})
    made.known = {}
    return made


def moved_places(positions: Mapping[int, np.ndarray], place: np.ndarray) -> dict[int, np.ndarray]:
    """Border positions by operator, with the operators' places."""
    return {int(place[i]): states for i, states in positions.items()}
