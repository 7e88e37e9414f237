"""The structure of a section: its operators, the tensors between them, and the order of both.

One builder prices a run of layers on one mesh (``section``), another a layer in many cases at once
(``vectorised.section``). Both take their structure from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from torch.fx import Node

from ..cost.saved_tensors import Saved, SavedByReaders, kept_operands, saved_by_readers
from ..frontend.layers import Layering
from ..ir.graph import Graph, op_name, output_of, tensor_operands
from ..ir.ops.loss import deferrable_losses, exit_pair
from ..ir.spec import P, Pair, R, S, Spec, parse_pair, replicated
from ..plan.independent_axes import lies_loosely
from ..plan.recompute import Recompute
from ..rules import MeshChoice
from .restriction import Restriction

__all__ = ["Given", "SectionBuilder", "Wanted", "Where", "keeps", "normalize"]

#: The operator that makes a tensor, and the pair in which each of its choices does.
Given = tuple[int, list[Pair]]
#: Per consumer of a tensor its operator, the pair that each of its choices wants, and whether it is saved for backward.
Wanted = list[tuple[int, list[Pair], bool]]
#: bool [cases] by pair
Where = dict[Pair, np.ndarray]


class SectionBuilder(ABC):
    """A builder of the section of some ops, in ``num`` cases on meshes of ``axes`` axes."""

    def __init__(
        self, graph: Graph, layering: Layering, ops: Sequence[Node], restriction: Restriction, num: int, axes: int
    ) -> None:
        self.graph, self.layering, self.ops, self.restriction = graph, layering, ops, restriction
        self.num, self.axes, self.grad = num, axes, layering.needs_grad
        self.nodes = graph.by_name()
        self.members, self.late = {node.name for node in ops}, deferrable_losses(graph)

    def connect(
        self, entries: Mapping[str, Sequence[Pair]], exits: Mapping[str, Sequence[Pair]]
    ) -> dict[str, tuple[Given, Wanted]]:
        """Add all operators and return what is between them, by tensor. entries, exits: the pairs of those that cross
        a border."""
        wants: dict[str, Wanted] = {}
        gives: dict[str, Given] = {}
        kept = kept_operands(self.ops, self.grad)
        for name, states in entries.items():
            gives[name] = self._add_entry(name), self._normalized(name, states)
        for node in self.ops:
            if op_name(node) == "getitem":
                continue
            i, choices = self._add_op(node)
            for k, operand in enumerate(tensor_operands(node)):
                pairs = self._normalized(operand.name, [choice.inputs[k] for choice in choices])
                wants.setdefault(operand.name, []).append((i, pairs, k in kept[node.name]))
            for name, k in self._outputs(node):
                gives[name] = i, self._normalized(name, [choice.outputs[k] for choice in choices])
        for name, states in exits.items():
            wants.setdefault(name, []).append((self._add_exit(name), self._normalized(name, states), False))
        for result in self.graph.results:
            if result.node in gives and result.node not in entries:
                i, pairs = self._add_result(result.node, gives[result.node])
                wants.setdefault(result.node, []).append((i, pairs, False))
        # placeholders come last, because their pairs follow from those that their consumers want
        for name, wanted in list(wants.items()):
            if name not in gives and self.nodes[name].op == "placeholder":
                i, pairs = self._add_placeholder(self.nodes[name], wanted)
                gives[name] = i, self._normalized(name, pairs)
            assert name in gives, f"{name} is used by this section but neither made in it nor an entry"
        return {name: (gives[name], wanted) for name, wanted in wants.items()}

    @abstractmethod
    def _add_entry(self, name: str) -> int: ...

    @abstractmethod
    def _add_exit(self, name: str) -> int: ...

    @abstractmethod
    def _add_op(self, node: Node) -> tuple[int, Sequence[MeshChoice]]: ...

    @abstractmethod
    def _add_result(self, name: str, given: Given) -> Given:
        """Add a tensor that leaves the graph. given: its producer."""

    @abstractmethod
    def _add_placeholder(self, node: Node, wanted: Wanted) -> Given: ...

    @abstractmethod
    def _divides(self, node: Node, value: Spec) -> np.ndarray:
        """[num] mask of the cases in which every dim of a tensor that ``value`` cuts comes out even."""

    def _outputs(self, node: Node) -> list[tuple[str, int]]:
        """The tensors that an op gives: (name, which output)."""
        if not isinstance(node.meta["type"], tuple):
            return [(node.name, 0)]
        return [(user.name, output_of(user)[1]) for user in node.users if user.name in self.members]

    def _normalized(self, name: str, pairs: Sequence[Pair]) -> list[Pair]:
        return [normalize(pair, name in self.grad) for pair in pairs]

    def _leaving(self, name: str, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs in which a tensor that is made in these leaves the graph."""
        return [exit_pair(pair) if name in self.late else replicated(self.axes) for pair in pairs]

    # ---- what stays until the backward

    def _saved_by_readers(self, recompute: Recompute) -> SavedByReaders:
        """``saved_by_readers``, but for static ops, whose copies do not count."""
        return saved_by_readers([op for op in self.ops if op.name not in self.layering.static], self.grad, recompute)

    def _entry_stays(self, name: str, plain: Saved, recompute: Recompute) -> bool:
        """True if an op saves an entry whose layer is not run again (``plain``), or a layer that is run again begins
        with it."""
        users = [user.name for user in self.nodes[name].users if user.name in self.members]
        return name in plain or (name in recompute.kept and not all(keeps(user, recompute) for user in users))

    @staticmethod
    def _copies_stay(name: str, readers: Sequence[str], recompute: Recompute) -> bool:
        """True if the conversions of a tensor that these ops read are kept: no layer repeats them, or the layer of some
        reader is not run again."""
        return not recompute.converts_again(name) or any(keeps(reader, recompute) for reader in readers)

    # ---- placeholders

    def _trainable(self, node: Node) -> bool:
        source = node.meta["source"]
        return source.kind == "parameter" and source.requires_grad and node.name in self.grad

    def _placeholder_pairs(self, node: Node, wanted: Where) -> tuple[Where, tuple[str, ...]]:
        """(the pairs in which a placeholder may lie, given those that its consumers want; the sharding patterns that it
        may take)."""
        kind, everywhere = node.meta["source"].kind, np.ones(self.num, dtype=bool)
        pinned, _, pattern = (self.restriction.pinned or {}).get(node.name, "").partition(" ")
        options = {parse_pair(pinned): everywhere} if pinned else self._useful_pairs(node, wanted)
        if offered := self.restriction.offered.get(node.name):
            options.setdefault(parse_pair(offered.partition(" ")[0]), everywhere)
        if not pinned and node.name in self.restriction.replicated:
            options = {p: where for p, where in options.items() if not any(value.is_shard for value in p.value)}
        if not pinned and kind in ("parameter", "buffer"):
            independent, trained = self.restriction.independent_axes, self._trainable(node)
            options = {p: where for p, where in options.items() if lies_loosely(p, independent, trained)}
        options = {pair: options[pair] & self._divides(node, pair.value) for pair in sorted(options, key=str)}
        options = {pair: where for pair, where in options.items() if where.any()}
        if not options:
            raise ValueError(f"{node.name} is pinned to {pinned!r}, which cuts it evenly on no mesh; pin another pair")
        return options, (pattern,) if pattern else self.restriction.patterns(node.name)

    def _useful_pairs(self, node: Node, wanted: Where) -> Where:
        source, whole, everywhere = node.meta["source"], (R,) * self.axes, np.ones(self.num, dtype=bool)
        if self._trainable(node):
            # any mixture of consumers can be served by the whole value with a partial gradient; a gradient that lies
            # like the value needs no reduction, one that is whole on an axis where nobody has an addend neither
            pairs = {p: w for p, w in wanted.items() if all(is_storable(v, c) for v, c in zip(p.value, p.cotangent))}
            return pairs | {Pair(whole, whole): everywhere, Pair(whole, (P,) * self.axes): everywhere}
        pairs = {Pair(whole, whole): everywhere}
        if any(r.kind == "buffer" and r.name == source.name for r in self.graph.results):
            return pairs
        frozen = source.kind == "parameter"  # it lies as a trained one may, so that a plan outlives its thawing
        for pair, where in wanted.items():
            if not any(v.is_partial for v in pair.value):
                own = Pair(pair.value, pair.value if frozen else whole)
                pairs[own] = pairs[own] | where if own in pairs else where
        if source.kind == "input" and source.batch_dim is not None:
            return _by_role(pairs, source.batch_dim, self.restriction.roles)
        return pairs


def normalize(pair: Pair, grad: bool) -> Pair:
    """The pair with a cotangent of R for a tensor that gets none, so that equal states are one."""
    return pair if grad else Pair(pair.value, (R,) * len(pair.value))


def keeps(op: str, recompute: Recompute) -> bool:
    """True if what this op saves is kept until the backward, because its layer is not run again."""
    return not recompute or op in recompute.plain


def is_storable(value: object, cotangent: object) -> bool:
    """True if a stored parameter may have this pair on one axis: S|S, R|R or R|P."""
    return (value == cotangent) or (value == R and cotangent == P)


def _by_role(pairs: Where, batch_dim: int, roles: Sequence[str | None]) -> Where:
    """Those that the roles allow where there are any, else all."""
    allowed = [
        all(role is None or (placement == S(batch_dim)) == (role == "data") for role, placement in zip(roles, p.value))
        for p in pairs
    ]
    some = np.zeros(len(next(iter(pairs.values()))), dtype=bool)
    for where, ok in zip(pairs.values(), allowed):
        if ok:
            some = some | where
    return {p: where if ok else where & ~some for (p, where), ok in zip(pairs.items(), allowed)}
