"""The sharding strategies of one op over all cases: the union of what cases offer, and a mask of who offers which.

Choices are told apart by what they do, not by their labels, since a label's meaning may depend on the batch extent (a
view of one sample has no dim for the batch, so "d0" is the next one). A choice is one single-axis choice u per mesh
axis. It stands in case v iff its op's rule offers each u at v's extent and

    gcd(u) mod (product of the sizes of the axes with this u) = 0      gcd over u's extent and the dims that it cuts

and no two of them cut the same dim of a tensor, unless one joins the other (``rules.mesh_choices``; ``op_strategies``
has the conditions). Then come the same filters as in ``section``: what the pruner keeps, what a restriction's roles
allow, and no heavy work done whole where it could be split.

The single-axis choices of one op over all batch extents, and where several axes may have them.

A choice is told by what it does (placements, messages, whether it splits the work), not by its label: a label's meaning
may depend on the extent.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

import numpy as np
from torch.fx import Node

from ...ir.graph import tensor_operands, types_of
from ...ir.spec import Pair, Placement, R, S, Spec
from ...rules import MeshChoice, pairs_choice, rule_for
from ...rules.base import AxisChoice, Internal
from ...rules.prune import MAX_CHOICES, SMALL_NUMEL
from ..restriction import SPLITTABLE_KINDS, Restriction, cuts_weights
from .cases import Cases

__all__ = ["AxisUnion", "InternalCollective", "OpChoices", "op_choices"]


@dataclass(frozen=True, slots=True)
class InternalCollective:
    """A collective inside an op under the choices ``columns``, along ``axis``; ``grows``: the mask of the axes by whose
    sizes it is larger than its Internal says; ``majors``: that of the axes before this one that have its label."""

    axis: int
    internal: Internal
    grows: int
    majors: int
    columns: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class OpChoices:
    """The choices of one op, parallel tuples of C entries."""

    #: Choices with the labels of some case and a work_share of 1, which ``splits`` replaces.
    choices: tuple[MeshChoice, ...]
    #: Per group of extents the label of every choice.
    texts: tuple[tuple[str, ...], ...]
    #: [extents] the group of each.
    group_of: np.ndarray
    #: [C] the axes that share the work, as a mask.
    splits: np.ndarray
    #: Per operand and choice the value spec that the kernel reads.
    reads: tuple[tuple[Spec, ...], ...]
    messages: tuple[InternalCollective, ...]
    #: bool [num, C].
    offered: np.ndarray

    def keeps_to(self, restriction: Restriction, op: str, cases: Cases) -> np.ndarray:
        """bool [num, C]: the choices that have the labels that a restriction wants split."""
        fits = [[restriction.splits(op, text.split(",")) for text in group] for group in self.texts]
        allowed: np.ndarray = np.array(fits)[self.group_of][cases.extent_of]
        return allowed

    def sends_over(self, node: Node, axes: Sequence[int], needs_grad: Collection[str]) -> np.ndarray:
        """bool [C]: the choices with a collective over one of the axes."""
        sends = np.zeros(len(self.choices), dtype=bool)
        for message in self.messages:
            if message.axis in axes and message.internal.is_sent(node, needs_grad):
                sends[list(message.columns)] = True
        return sends


def op_choices(cases: Cases, nodes: Sequence[Node], restriction: Restriction) -> OpChoices:
    """The choices of an op over ``cases``. nodes: the op at every extent. ValueError for a pin that no case can
    follow."""
    node, cache = nodes[0], cases.samples.cache
    key = ("union", cases.extents, node)
    if key not in cache:
        cache[key] = AxisUnion(nodes)
    union: AxisUnion = cache[key]
    pinned = (restriction.pinned or {}).get(node.name)
    if pinned is not None:
        combos, stands = _pinned(cases, nodes, union, tuple(pinned.split(",")) if pinned else ())
    elif node.name in cases.layering.static:
        combos, stands = [(0,) * cases.axes], np.ones((cases.num, 1), dtype=bool)
    else:
        combos, stands = _combinations(cases, union)
    table = _Made(node, union, combos)
    if pinned is None and node.name not in cases.layering.static:
        stands = _filtered(cases, nodes, union, table, stands, restriction)
    columns = np.flatnonzero(stands.any(axis=0))
    columns = columns if len(columns) else np.zeros(1, dtype=np.intp)  # impossible everywhere, and so offered nowhere
    return table.chosen(columns, stands[:, columns])


# ---- which combinations stand


def _combinations(cases: Cases, union: AxisUnion) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(one u per axis each, bool [num, C]) of all combinations that stand in some case, "whole" on all axes first."""
    axes, size = cases.axes, len(union.singles)
    if axes == 0:
        return [()], np.ones((cases.num, 1), dtype=bool)
    first = union.stands(cases, 1, False)
    if axes == 1:
        return [(u,) for u in range(size)], first
    second, both = union.stands(cases, 2, False), union.stands(cases, 3, False)
    stands = first[:, :, None] & second[:, None, :]
    for a, b in itertools.combinations(range(size), 2):
        if (where := union.together(cases, a, b)) is not None:
            stands[:, a, b] &= where
            stands[:, b, a] &= where
    diagonal = np.arange(size)
    stands[:, diagonal, diagonal] = both
    possible = np.argwhere(stands.any(axis=0))
    return [tuple(map(int, pair)) for pair in possible], stands[:, possible[:, 0], possible[:, 1]]


def _pinned(
    cases: Cases, nodes: Sequence[Node], union: AxisUnion, labels: tuple[str, ...]
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """As ``_combinations``, of the choice with these labels alone."""
    combos: dict[tuple[int, ...], np.ndarray] = {}
    for group, known in enumerate(union.labels):
        if len(labels) != cases.axes or any(label not in known for label in labels):
            continue
        combo = tuple(known.index(label) for label in labels)
        ok = np.isin(cases.extent_of, np.flatnonzero(union.group_of == group))
        for u in set(combo):
            mask = sum(1 << axis for axis, other in enumerate(combo) if other == u)
            ok &= union.stands(cases, mask, True)[:, u]
        for a, b in itertools.combinations(range(cases.axes), 2):
            if combo[a] != combo[b] and (where := union.together(cases, combo[a], combo[b])) is not None:
                ok &= where | (cases.sizes[:, [a, b]] == 1).any(axis=1)
        combos[combo] = combos.get(combo, False) | ok
    if not any(ok.any() for ok in combos.values()):
        case = cases.cases[0]
        pairs_choice(nodes[cases.extent_of[0]], labels, case.mesh_shape)  # says what is wrong
    return list(combos), np.stack(list(combos.values()), axis=1)


def _filtered(
    cases: Cases,
    nodes: Sequence[Node],
    union: AxisUnion,
    made: _Made,
    stands: np.ndarray,
    restriction: Restriction,
) -> np.ndarray:
    """The mask of the choices that are offered: ``section._Builder._choices`` for all cases at once."""
    node = nodes[0]
    stands = made.once(stands)
    kept = np.zeros((len(union.labels), len(made.combos)), dtype=bool)
    for group in range(len(union.labels)):
        at = int(np.flatnonzero(union.group_of == group)[0])
        offered = [(c, choice) for c, choice in enumerate(made.of_group(group)) if choice is not None]
        keep = cases.layering.pruner.worthwhile(nodes[at], [choice for _, choice in offered])
        alive = set(map(id, keep))
        kept[group, [c for c, choice in offered if id(choice) in alive]] = True
    stands = _fewest(cases, made, stands & kept[union.group_of][cases.extent_of])
    if restriction.executable_only:
        runs = stands & np.array([choice.executable for choice in made.choices])
        whole = np.zeros(stands.shape[1], dtype=bool)
        whole[0] = True
        stands = np.where(runs.any(axis=1)[:, None], runs, whole)
    if node.name in restriction.split:
        groups = range(len(union.labels))
        fits = [[c is not None and restriction.splits(node.name, c.labels) for c in made.of_group(g)] for g in groups]
        asked = stands & np.array(fits)[union.group_of][cases.extent_of]
        stands = np.where(asked.any(axis=1)[:, None], asked, _first(stands))
    if any(restriction.roles):
        allowed = stands & np.array([_allowed(cases, restriction, node, choice) for choice in made.choices])
        fallback = _first(stands) if node.name not in restriction.split else np.zeros_like(stands)
        stands = np.where(allowed.any(axis=1)[:, None], allowed, fallback)
    if rule_for(node).cost_kind in SPLITTABLE_KINDS:
        combos = np.array(made.combos).reshape(len(made.combos), cases.axes)
        for axis in range(cases.axes):
            if restriction.roles[axis : axis + 1] != ("data",):
                split = stands & (combos[:, axis] != 0)
                stands = np.where(split.any(axis=1)[:, None], split, stands)
            if restriction.roles[axis : axis + 1] == ("tensor",):
                split = stands & np.array([cuts_weights(node, choice, axis) for choice in made.choices])
                stands = np.where(split.any(axis=1)[:, None], split, stands)
    return stands


def _fewest(cases: Cases, made: _Made, stands: np.ndarray) -> np.ndarray:
    """``stands`` with at most ``MAX_CHOICES`` choices per case: the first, then those that leave each device least
    work, of equal ones those of fewest labels (``Pruner.keep``)."""
    crowded = np.flatnonzero(stands.sum(axis=1) > MAX_CHOICES)
    if not len(crowded):
        return stands
    others = stands[crowded] & ~_first(stands[crowded])
    share = np.where(others, 1.0 / cases.divisor[crowded][:, made.splits], np.inf)
    labels = np.broadcast_to([len(set(choice.labels)) for choice in made.choices], share.shape)
    best = np.lexsort((labels, share), axis=1)[:, : MAX_CHOICES - 1]
    kept = _first(stands[crowded])
    np.put_along_axis(kept, best, True, axis=1)
    stands[crowded] = kept
    return stands


def _first(mask: np.ndarray) -> np.ndarray:
    """Of every row of a bool matrix the first True alone."""
    first: np.ndarray = mask & (np.cumsum(mask, axis=1) == 1)
    return first


def _allowed(cases: Cases, restriction: Restriction, node: Node, choice: MeshChoice) -> bool:
    """True if a choice keeps to the roles of the axes."""
    layering = cases.layering
    tensors = [(operand.name, 0, pair) for operand, pair in zip(tensor_operands(node), choice.inputs)]
    tensors += [(node.name, k, pair) for k, pair in enumerate(choice.outputs)]
    for name, k, pair in tensors:
        batch = layering.batch_dims[name][k]
        if batch is None or name in layering.static:
            continue
        for axis, role in enumerate(restriction.roles):
            if role is not None and (pair.value[axis] == S(batch)) != (role == "data"):
                return False
    return True


# ---- what they do


class _Made:
    """Combinations of single-axis choices as MeshChoices."""

    def __init__(self, node: Node, union: AxisUnion, combos: Sequence[tuple[int, ...]]) -> None:
        self.union, self.combos = union, combos
        operands = [types_of(operand)[0] for operand in tensor_operands(node)]
        outputs = types_of(node)
        flows = any(kind.is_float for kind in outputs)
        sides = []  # per u: (operand pairs, output pairs) with gradients only where they flow
        for single in union.singles:
            ins = [p if flows and k.is_float else _no_gradient(p) for p, k in zip(single.choice.inputs, operands)]
            outs = [p if k.is_float else _no_gradient(p) for p, k in zip(single.choice.outputs, outputs)]
            sides.append((tuple(ins), tuple(outs)))
        inputs = [_pairs([side[0][k] for side in sides], combos) for k in range(len(operands))]
        results = [_pairs([side[1][k] for side in sides], combos) for k in range(len(outputs))]
        self.inputs, self.outputs = list(zip(*inputs)) or [()] * len(combos), list(zip(*results))
        sharding = [next(text for group in union.labels if (text := group[u]) is not None) for u in range(len(sides))]
        self.choices = [
            MeshChoice(tuple(sharding[u] for u in combo), ins, outs, 1.0, (), self._gathers(combo), self._runs(combo))
            for combo, ins, outs in zip(combos, self.inputs, self.outputs)
        ]

        self.splits = [
            sum(1 << axis for axis, u in enumerate(combo) if union.singles[u].choice.splits_work) for combo in combos
        ]

    def _runs(self, combo: tuple[int, ...]) -> bool:
        return all(self.union.singles[u].choice.executable for u in combo)

    def _gathers(self, combo: tuple[int, ...]) -> tuple[Spec, ...] | None:
        choices = [self.union.singles[u].choice for u in combo]
        if all(choice.reads is None for choice in choices):
            return None
        seen = [choice.reads or tuple(value for value, _ in choice.inputs) for choice in choices]
        return tuple(zip(*seen))

    def of_group(self, group: int) -> list[MeshChoice | None]:
        """The choices with the labels of a group of extents, None where it lacks one."""
        labels, out = self.union.labels[group], list[MeshChoice | None]()
        for combo, choice in zip(self.combos, self.choices):
            own = tuple(label for u in combo if (label := labels[u]) is not None)
            if len(own) < len(combo):
                out.append(None)
            elif own == choice.labels:
                out.append(choice)
            else:
                out.append(MeshChoice(own, choice.inputs, choice.outputs, 1.0, (), choice.gathers, choice.executable))
        return out

    def once(self, stands: np.ndarray) -> np.ndarray:
        """``stands`` without choices that do the same as an earlier one that stands."""
        alike: dict[Hashable, list[int]] = {}
        for c, (combo, ins, outs) in enumerate(zip(self.combos, self.inputs, self.outputs)):
            choices = [self.union.singles[u].choice for u in combo]
            key = (tuple(map(id, ins)), tuple(map(id, outs)), tuple((x.splits_work, x.internal) for x in choices))
            alike.setdefault(key, []).append(c)
        for columns in alike.values():
            if len(columns) > 1:
                stands[:, columns] = _first(stands[:, columns])
        return stands

    def chosen(self, columns: np.ndarray, offered: np.ndarray) -> OpChoices:
        """These columns as OpChoices."""
        combos = [self.combos[c] for c in columns]
        choices = tuple(self.choices[c] for c in columns)
        texts = tuple(
            tuple(",".join(group[u] or self.union.singles[u].choice.label for u in combo) for combo in combos)
            for group in self.union.labels
        )
        reads = tuple(zip(*(choice.reads for choice in choices)))
        return OpChoices(
            choices,
            texts,
            self.union.group_of,
            np.array([self.splits[c] for c in columns], dtype=np.int64),
            reads,
            tuple(self._messages(combos)),
            offered,
        )

    def _messages(self, combos: Sequence[tuple[int, ...]]) -> list[InternalCollective]:
        found: dict[tuple[int, Internal, int, int, int], list[int]] = {}  # the last number tells equal messages apart
        for c, combo in enumerate(combos):
            for axis, u in enumerate(combo):
                messages = self.union.singles[u].choice.internal
                alike = [other for other, w in enumerate(combo) if w == u]
                for number, one in enumerate(messages):
                    reach = [other for other in alike if other >= axis] if one.growth == "gathered" else alike
                    grows = 0 if one.growth == "none" else sum(1 << other for other in reach)
                    majors = sum(1 << other for other in alike if other < axis) if one.times != "once" else 0
                    found.setdefault((axis, one, grows, majors, messages[:number].count(one)), []).append(c)
        return [InternalCollective(*key[:4], tuple(columns)) for key, columns in found.items()]


AxisPair = tuple[Placement, Placement]


def _no_gradient(pair: AxisPair) -> AxisPair:
    return (pair[0], pair[0] if pair[0].is_shard else R)


def _pairs(single: Sequence[AxisPair], combos: Sequence[tuple[int, ...]]) -> list[Pair]:
    """The pair of one tensor under every combination, given its placements under each u. Equal pairs are one object."""
    ids = [_number(pair) for pair in single]
    return [_pair(tuple(ids[u] for u in combo)) for combo in combos]


_NUMBERED: list[AxisPair] = []


@cache
def _number(pair: AxisPair) -> int:
    _NUMBERED.append(pair)
    return len(_NUMBERED) - 1


@cache
def _pair(numbers: tuple[int, ...]) -> Pair:
    return Pair(tuple(_NUMBERED[n][0] for n in numbers), tuple(_NUMBERED[n][1] for n in numbers))


@dataclass(frozen=True, slots=True)
class Single:
    """One choice on one axis, as the extents of a group have it. cuts: (tensor, dim) pairs, operands first."""

    choice: AxisChoice
    cuts: frozenset[tuple[int, int]]


class AxisUnion:
    """The single-axis choices u of an op over all extents. ``present``, ``divisible`` (gcd, see above): [extents, U];
    ``labels``: per group of extents and u, None where the group lacks it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.singles: list[Single] = []
        found: dict[Hashable, int] = {}
        self.shapes = [_shapes(node) for node in nodes]
        self.group_of = np.zeros(len(nodes), dtype=np.int64)
        rows: list[tuple[list[int], list[int]]] = []  # per extent: (u, gcd)
        groups: dict[tuple[tuple[int, ...], tuple[str, ...], bool], int] = {}
        rule = rule_for(nodes[0])
        for e, node in enumerate(nodes):
            offered = rule.axis_choices(node)
            shapes = self.shapes[e]
            counts: dict[Hashable, int] = {}
            ids, common = [], []
            for one in offered:
                key = (one.inputs, one.outputs, one.splits_work, one.internal, one.reads, one.executable, one.joins)
                counts[key] = counts.get(key, 0) + 1
                u = found.setdefault((key, counts[key]), len(self.singles))
                if u == len(self.singles):
                    values = [value for value, _ in (*one.inputs, *one.outputs)]
                    cuts = frozenset((k, value.dim) for k, value in enumerate(values) if value.is_shard)
                    self.singles.append(Single(one, cuts))
                cut = self.singles[u].cuts
                ids.append(u)
                common.append(gcd(one.extent, *(shapes[k][dim] for k, dim in cut)) if cut else 0)
            labels = tuple(one.label for one in offered)
            small = types_of(node)[0].numel <= SMALL_NUMEL
            self.group_of[e] = groups.setdefault((tuple(ids), labels, small), len(groups))
            rows.append((ids, common))
        size = len(self.singles)
        named = [dict(zip(ids, labels)) for ids, labels, _ in groups]
        self.labels = [[names.get(u) for u in range(size)] for names in named]
        self.present = np.zeros((len(nodes), size), dtype=bool)
        self.divisible = np.ones((len(nodes), size), dtype=np.int64)
        for e, (ids, common) in enumerate(rows):
            self.present[e, ids] = True
            self.divisible[e, ids] = common

    def together(self, cases: Cases, a: int, b: int) -> np.ndarray | None:
        """bool [num]: where two axes that have ``a`` and ``b`` may cut what both cut; None if that is nothing."""
        common = self.singles[a].cuts & self.singles[b].cuts
        if not common:
            return None
        one, other = self.singles[a].choice, self.singles[b].choice
        if one.label not in other.joins and other.label not in one.joins:
            return np.zeros(cases.num, dtype=bool)
        extents = np.array([gcd(*(shapes[k][dim] for k, dim in common)) for shapes in self.shapes])
        found: np.ndarray = extents[cases.extent_of] % cases.num_devices == 0
        return found

    def stands(self, cases: Cases, mask: int, thin: bool) -> np.ndarray:
        """bool [num, U]: whether all axes of ``mask`` may have this choice together. thin: axes of size 1 as well."""
        rows, divisor = cases.extent_of, cases.whole_divisor[:, mask]
        ok: np.ndarray = self.present[rows] & (self.divisible[rows] % divisor[:, None] == 0)
        if not thin:
            for axis in range(cases.axes):
                if mask >> axis & 1:
                    ok[:, 1:] &= (cases.sizes[:, axis] > 1)[:, None]
        return ok


def _shapes(node: Node) -> list[tuple[int, ...]]:
    """The shapes of operands and outputs, in the order of ``Single.cuts``."""
    kinds = [types_of(operand)[0] for operand in tensor_operands(node)]
    return [kind.shape for kind in (*kinds, *types_of(node))]
