"""One layer as a numeric problem in all variants at once: ``problem.build_section`` with a leading axis over the cases.

Operators, edges and their order are those of ``problem``. A choice that a case does not offer costs inf there; what is
offered costs what the scalar section says, to rounding. Recompute modes share everything but four parts (``again``,
``saved`` and ``transient`` of operators, ``again``, ``bytes`` and ``transient`` of edges), which are given by mode.

Arrays of edges are made when they are first asked for, and edges of equal tensors and states share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Node

from .batch_parameters import ParameterChoice, ParameterPrices, parameter_prices
from .batch_pricing import BatchPricer
from .graph import TensorType, op_name, output_of, tensor_operands, types_of
from .op_choices import OpChoices, op_choices
from .problem import Restriction, normalized, steady
from .recompute import Recompute, recompute_of
from .rules import MeshChoice, rule_for
from .saved import Saved, beside_outputs, saved_tensors
from .sharing import Sharing
from .spec import P, Pair, R, S, parse_pair
from .variants import State, Variants, cut_mask

__all__ = ["BatchEdge", "BatchSection", "Choice", "build_batch_section"]

Choice = MeshChoice | ParameterChoice | Pair
ByMode = dict[str, np.ndarray]


class _Conversions:
    """Seconds of all conversions of one tensor between its source and target pairs."""

    def __init__(
        self,
        pricer: BatchPricer,
        kind: TensorType,
        sources: tuple[Pair, ...],
        targets: tuple[Pair, ...],
        grad: bool,
        is_placeholder: bool,
    ) -> None:
        self.pricer, self.kind, self.sources, self.targets = pricer, kind, sources, targets
        self.grad, self.is_placeholder = grad, is_placeholder

    @cached_property
    def ahead(self) -> np.ndarray:
        """[num, sources, targets] seconds in the forward."""
        values = tuple(pair.value for pair in self.sources), tuple(pair.value for pair in self.targets)
        seconds = self.pricer.conversions(self.kind, *values)
        if self.is_placeholder:  # what every rank holds whole is cut for nothing
            free = [
                [all(v.kind == "R" or v == w for v, w in zip(source, target)) for target in values[1]]
                for source in values[0]
            ]
            seconds[:, np.array(free)] = 0.0
        return seconds

    @cached_property
    def back(self) -> np.ndarray:
        """[num, sources, targets] seconds in the backward."""
        if not (self.grad and self.kind.is_float):
            return np.broadcast_to(0.0, self.ahead.shape)
        cotangents = tuple(pair.cotangent for pair in self.targets), tuple(pair.cotangent for pair in self.sources)
        return self.pricer.conversions(self.kind, *cotangents).swapaxes(1, 2)

    @cached_property
    def seconds(self) -> np.ndarray:
        """[num, sources, targets] both ways."""
        return self.ahead + self.back if self.grad and self.kind.is_float else self.ahead

    @cached_property
    def copies(self) -> np.ndarray:
        """[num, sources, targets] bytes of the converted value, 0 where it stays as it is."""
        nbytes = self.pricer.local_bytes(self.kind, [pair.value for pair in self.targets])
        moved = np.array([[s.value != t.value for t in self.targets] for s in self.sources])
        found: np.ndarray = np.where(moved & np.isfinite(self.seconds), nbytes[:, None, :], 0.0)
        return found


@dataclass(frozen=True, eq=False)
class BatchEdge:
    """A tensor and its conversions. source: [producer's choices] → source state; consumers: (operator, [its choices] →
    target state); states: the pairs behind source and target states. All arrays are [num, sources, targets].

    ``floor``: the factor of the seconds that a stage of several layers is sure to pay (see ``BatchSection``).
    """

    name: str
    producer: int
    source: np.ndarray
    consumers: tuple[tuple[int, np.ndarray], ...]
    states: tuple[tuple[Pair, ...], tuple[Pair, ...]]
    conversions: _Conversions
    copied: bool  # whether some consumer keeps its copy for the backward
    kept_in: frozenset[str]  # modes in which copies stay until the backward
    again_in: frozenset[str]  # modes in which the backward converts again
    modes: tuple[str, ...]
    floor: float = 1.0

    @property
    def seconds(self) -> np.ndarray:
        """Forward and backward, once."""
        return self.conversions.seconds

    @property
    def backward(self) -> np.ndarray:
        """Of these seconds the backward's."""
        return self.conversions.back

    @property
    def again(self) -> Mapping[str, np.ndarray]:
        """Seconds that each mode adds."""
        return {mode: self.conversions.ahead if mode in self.again_in else self._nothing for mode in self.modes}

    @property
    def bytes(self) -> Mapping[str, np.ndarray]:
        """Bytes per microbatch in flight of the converted copy, by mode."""
        return {mode: self._copies if mode in self.kept_in else self._nothing for mode in self.modes}

    @property
    def transient(self) -> Mapping[str, np.ndarray]:
        """Bytes of the copy while its layer is recomputed, by mode."""
        return {mode: self._nothing if mode in self.kept_in else self._copies for mode in self.modes}

    @property
    def _copies(self) -> np.ndarray:
        return self.conversions.copies if self.copied else self._nothing

    @property
    def _nothing(self) -> np.ndarray:
        return np.broadcast_to(0.0, (len(self.seconds), len(self.states[0]), len(self.states[1])))


class _Row(NamedTuple):
    """One operator: arrays [num, choices]."""

    name: str
    kind: str
    choices: tuple[Choice, ...]
    offered: np.ndarray
    seconds: np.ndarray
    step: np.ndarray
    gradient: np.ndarray
    backward: np.ndarray
    floor: np.ndarray
    resident: np.ndarray
    again: ByMode
    saved: ByMode
    transient: ByMode


@dataclass(frozen=True, eq=False)
class BatchSection:
    """One layer in all cases. Parallel tuples over operators, arrays [num, choices]; see ``problem.Section``.

    choices: MeshChoice for ops (with the labels of some case: ``label`` knows every case's), ParameterChoice for
    parameters, Pair for the rest; offered: bool, where a case has the choice. seconds: per microbatch, everything;
    step_seconds: of these what is done once per step, over the number of microbatches (gradients' reduction and the
    update; adding gradients up belongs to every microbatch); gradient_seconds: of these the reduction and gathers that
    could hide behind compute; backward_seconds: of the seconds those in the backward of a microbatch. floor_seconds:
    what a stage that holds several layers pays for this one at least: nothing for floating ops that more layers need,
    a parameter's seconds shared among the layers that use it.
    """

    layer: int
    modes: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    offered: tuple[np.ndarray, ...]
    seconds: tuple[np.ndarray, ...]
    step_seconds: tuple[np.ndarray, ...]
    gradient_seconds: tuple[np.ndarray, ...]
    backward_seconds: tuple[np.ndarray, ...]
    floor_seconds: tuple[np.ndarray, ...]
    resident: tuple[np.ndarray, ...]
    again: tuple[ByMode, ...]
    saved: tuple[ByMode, ...]
    transient: tuple[ByMode, ...]
    edges: tuple[BatchEdge, ...]
    ops: Mapping[str, OpChoices] = field(repr=False)
    extent_of: np.ndarray = field(repr=False)

    def index(self, kind: str) -> dict[str, int]:
        """Name → operator index of all operators of one kind."""
        return {name: i for i, (name, k) in enumerate(zip(self.names, self.kinds)) if k == kind}

    def label(self, operator: int, choice: int, v: int) -> str:
        """The text by which a plan names a choice in case ``v``."""
        if self.kinds[operator] == "op":
            own = self.ops[self.names[operator]]
            return own.texts[own.group_of[self.extent_of[v]]][choice]
        return str(self.choices[operator][choice])


def build_batch_section(
    variants: Variants,
    layer: int,
    into: Sequence[State],
    out: Sequence[State],
    restriction: Restriction = Restriction(),
    modes: Sequence[str] = ("none",),
) -> BatchSection:
    """Layer ``layer`` in all cases, its borders in these states (of ``Variants.states``), under these recompute
    modes."""
    return _Builder(variants, layer, into, out, restriction, tuple(modes)).build()


def pricer_of(variants: Variants) -> BatchPricer:
    """The pricer that all sections of ``variants`` share."""
    if "pricer" not in variants.cache:
        variants.cache["pricer"] = BatchPricer(variants)
    found: BatchPricer = variants.cache["pricer"]
    return found


class _Builder:
    def __init__(
        self,
        variants: Variants,
        layer: int,
        into: Sequence[State],
        out: Sequence[State],
        restriction: Restriction,
        modes: tuple[str, ...],
    ) -> None:
        self.variants, self.layer, self.restriction, self.modes = variants, layer, restriction, modes
        self.layering, self.grad, self.pricer = variants.layering, variants.layering.needs_grad, pricer_of(variants)
        self.nodes, self.samples = variants.source.by_name(), variants.samples_of(layer)
        self.ops = variants.ops(layer)
        self.members = {node.name for node in self.ops}
        self.saved = saved_tensors(self.ops, self.grad)
        self.recompute = {mode: _recompute(variants, mode) for mode in modes}
        self.plain = {  # by mode, what of ``saved`` is kept because ops save it whose layer is not run again
            mode: saved_tensors([op for op in self.ops if _keeps(op.name, re)], self.grad)
            for mode, re in self.recompute.items()
        }
        self.sharing = _sharing(variants)
        self.rows: list[_Row] = []
        self.op_choices: dict[str, OpChoices] = {}
        self.entries, self.exits = self._borders(into, out)

    def _borders(self, into: Sequence[State], out: Sequence[State]) -> tuple[dict[str, _States], dict[str, _States]]:
        used = {operand.name for node in self.ops for operand in node.all_input_nodes}
        entering, leaving = self.layering.crossing[self.layer], self.layering.crossing[self.layer + 1]
        results = {r.node for r in self.variants.source.results if r.kind in ("loss", "output")}
        entries = {
            name: self._states(entering, t, into)
            for t, name in enumerate(entering)
            if name in used or (name in results and name not in leaving)
        }
        exits = {name: self._states(leaving, t, out) for t, name in enumerate(leaving) if name not in entering}
        return entries, exits

    def _states(self, tensors: Sequence[str], t: int, states: Sequence[State]) -> _States:
        """The pairs of one crossing tensor, and in which cases some state has them."""
        found: dict[Pair, np.ndarray] = {}
        for state in states:
            possible = np.ones(self.variants.num, dtype=bool)
            for name, pair in zip(tensors, state):
                possible &= self.pricer.divides(self.nodes[name].meta["type"], pair.value)
            found[state[t]] = found.get(state[t], False) | possible
        return _States(tuple(found), np.stack(list(found.values()), axis=1))

    def build(self) -> BatchSection:
        index: dict[str, int] = {}
        wants: dict[str, list[tuple[int, list[Pair], bool]]] = {}
        gives: dict[str, tuple[int, list[Pair]]] = {}
        for name, states in self.entries.items():
            index[name] = self._add_entry(name, states)
            gives[name] = index[name], [normalized(pair, name in self.grad) for pair in states.pairs]
        for node in self.ops:
            if op_name(node) == "getitem":
                continue
            i = index[node.name] = self._add_op(node)
            choices = self.op_choices[node.name].choices
            saves = (
                {k for side, k in rule_for(node).saves(node) if side == "input"} if node.name in self.grad else set()
            )
            for k, operand in enumerate(tensor_operands(node)):
                pairs = [normalized(c.inputs[k], operand.name in self.grad) for c in choices]
                wants.setdefault(operand.name, []).append((i, pairs, k in saves))
            for name, k in self._outputs(node):
                gives[name] = i, [normalized(c.outputs[k], name in self.grad) for c in choices]
        for name, states in self.exits.items():
            i = self._add(name, "exit", states.pairs, states.offered)
            wants.setdefault(name, []).append((i, [normalized(p, name in self.grad) for p in states.pairs], False))
        whole = Pair((R,) * self.variants.axes, (R,) * self.variants.axes)
        for result in self.variants.source.results:
            if result.node in gives and result.node not in self.entries:
                i = self._add(result.node, "result", (whole,), np.ones((self.variants.num, 1), dtype=bool))
                wants.setdefault(result.node, []).append((i, [whole], False))
        for name, wanted in list(wants.items()):
            if name not in gives and self.nodes[name].op == "placeholder":
                gives[name] = self._add_placeholder(self.nodes[name], wanted)
            assert name in gives, f"{name} is used by this section but neither made in it nor an entry"
        edges = tuple(self._edge(name, gives[name], wanted) for name, wanted in wants.items())
        columns = list(zip(*self.rows))
        return BatchSection(
            self.layer, self.modes, *columns, edges, self.op_choices, self.variants.extent_of  # type: ignore[arg-type]
        )  # fmt: skip

    def _outputs(self, node: Node) -> list[tuple[str, int]]:
        """The tensors that an op gives: (name, which output)."""
        if not isinstance(node.meta["type"], tuple):
            return [(node.name, 0)]
        return [(user.name, output_of(user)[1]) for user in node.users if user.name in self.members]

    # ---- operators

    def _add(
        self, name: str, kind: str, choices: tuple[Choice, ...], offered: np.ndarray, **arrays: np.ndarray | ByMode
    ) -> int:
        shape = offered.shape
        nothing: Any = np.broadcast_to(0.0, shape)
        seconds: Any = np.where(offered, arrays.pop("seconds", nothing), np.inf)
        by_mode = [
            {mode: arrays.get(part, {}).get(mode, nothing) for mode in self.modes}  # type: ignore[union-attr]
            for part in ("again", "saved", "transient")
        ]
        floor: Any = np.where(offered, arrays.pop("floor", seconds), np.inf)
        plain: list[Any] = [arrays.get(part, nothing) for part in ("step", "gradient", "backward")]
        row = _Row(
            name, kind, choices, offered, seconds, *plain, floor, arrays.get("resident", nothing), *by_mode
        )  # type: ignore[arg-type]  # fmt: skip
        self.rows.append(row)
        return len(self.rows) - 1

    def _add_entry(self, name: str, states: _States) -> int:
        nbytes = self.pricer.local_bytes(self.nodes[name].meta["type"], [pair.value for pair in states.pairs])
        users = [user.name for user in self.nodes[name].users if user.name in self.members]
        saved = {
            mode: nbytes
            for mode, re in self.recompute.items()
            if name in self.plain[mode] or (name in re.kept and not all(_keeps(user, re) for user in users))
        }
        return self._add(name, "entry", states.pairs, states.offered, saved=saved)

    def _add_op(self, node: Node) -> int:
        nodes = [sample[node.name] for sample in self.samples]
        choices = self.op_choices[node.name] = op_choices(self.variants, nodes, self.restriction)
        prices = self.pricer.op(nodes, node, choices)
        again = {mode: prices.ahead for mode, re in self.recompute.items() if node.name in re.repeated}
        seconds, backward = prices.ahead + prices.back, prices.back
        if node.name in self.layering.static:  # once per stage however many layers use it: ``assemble`` prices it
            seconds = backward = np.zeros_like(seconds)
        if not self.restriction.roles and self.restriction.pinned is None:
            extents = np.array(self.variants.extents)[self.variants.extent_of]
            allowed = 0.01 * self.layering.total_flops * extents / self.layering.batch
            seconds = np.where(prices.wasted_flops > allowed[:, None], np.inf, seconds)
        floor = seconds
        if self.sharing.floats(node.name):
            floor = np.where(np.isinf(seconds), seconds, 0.0)
        saved, transient = self._saved_bytes(nodes, node, choices)
        return self._add(
            node.name,
            "op",
            choices.choices,
            choices.offered,
            seconds=seconds,
            backward=backward,
            floor=floor,
            again=again,
            saved=saved,
            transient=transient,
        )

    def _saved_bytes(self, nodes: Sequence[Node], node: Node, choices: OpChoices) -> tuple[ByMode, ByMode]:
        """[num, choices] bytes of the op by mode: (kept per microbatch in flight, held while its layer is run again);
        ``saved.saved_bytes`` for all cases."""
        parts: tuple[ByMode, ByMode] = ({}, {})
        if node.name not in self.grad:
            return parts

        def note(mode: str, stays: bool, nbytes: np.ndarray) -> None:
            part = parts[0] if stays else parts[1]
            part[mode] = part[mode] + nbytes if mode in part else nbytes

        for k, kind in enumerate(types_of(node)):
            local = self.pricer.local_bytes(kind, [c.outputs[k].value for c in choices.choices])
            for mode, re in self.recompute.items():
                stays = node.name in re.heavy or _is_in(self.plain[mode], node, k)
                if stays or _is_in(self.saved, node, k):
                    note(mode, stays, local)
        beside = np.zeros(choices.offered.shape)
        divisor = self.variants.divisor[:, [cut_mask(c.outputs[0].value) for c in choices.choices]]
        for _, rows in self.pricer.devices:
            pricer = self.variants.pricer(int(np.arange(self.variants.num)[rows][0]))
            extra = np.array([beside_outputs(one, pricer) for one in nodes])
            beside[rows] = extra[self.variants.extent_of][rows, None] / divisor[rows]
        if beside.any():
            for mode, re in self.recompute.items():
                note(mode, node.name in re.heavy or _keeps(node.name, re), beside)
        return parts

    # ---- placeholders

    def _add_placeholder(self, node: Node, wanted: list[tuple[int, list[Pair], bool]]) -> tuple[int, list[Pair]]:
        source, kind = node.meta["source"], node.meta["type"]
        pinned, _, pattern = (self.restriction.pinned or {}).get(node.name, "").partition(" ")
        everywhere = np.ones(self.variants.num, dtype=bool)
        found = {parse_pair(pinned): everywhere} if pinned else self._pairs(node, self._wanted(wanted))
        found = {pair: found[pair] & self.pricer.divides(kind, pair.value) for pair in sorted(found, key=str)}
        found = {pair: where for pair, where in found.items() if where.any()}
        if not found:
            raise ValueError(f"{node.name} is pinned to {pinned!r}, which cuts it evenly on no mesh; pin another pair")
        offered = np.stack(list(found.values()), axis=1)
        if source.kind == "parameter":
            trainable = source.requires_grad and node.name in self.grad
            allowed = (pattern,) if pattern else self.restriction.residencies
            prices = parameter_prices(
                self.pricer, kind, tuple(found), offered, trainable, source.requires_grad, allowed
            )
            i = self._add_parameter(node.name, prices)
            return i, [normalized(choice.pair, node.name in self.grad) for choice in prices.choices]
        arrays = {}
        if source.kind == "buffer":
            arrays["resident"] = self.pricer.local_bytes(kind, [pair.value for pair in found])
        i = self._add(node.name, "source", tuple(found), offered, **arrays)
        return i, [normalized(pair, node.name in self.grad) for pair in found]

    def _add_parameter(self, name: str, prices: ParameterPrices) -> int:
        return self._add(
            name,
            "parameter",
            prices.choices,
            prices.offered,
            seconds=prices.seconds,
            step=prices.step,
            gradient=prices.gradient,
            backward=prices.backward,
            floor=prices.seconds / self.sharing.uses(name),
            resident=prices.resident,
            transient=dict.fromkeys(self.modes, prices.gathered),
        )

    def _wanted(self, wanted: list[tuple[int, list[Pair], bool]]) -> dict[Pair, np.ndarray]:
        """bool [num] by pair: where a consumer's offered choice wants it."""
        found: dict[Pair, np.ndarray] = {}
        for i, pairs, _ in wanted:
            offered = self.rows[i].offered
            for pair, columns in _by_value(pairs).items():
                where = offered[:, columns].any(axis=1)
                found[pair] = found[pair] | where if pair in found else where
        return found

    def _pairs(self, node: Node, wanted: dict[Pair, np.ndarray]) -> dict[Pair, np.ndarray]:
        """The pairs in which a placeholder may lie, and where: ``problem._Builder._pairs`` for all cases."""
        source, axes = node.meta["source"], self.variants.axes
        everywhere, whole = np.ones(self.variants.num, dtype=bool), (R,) * axes
        if source.kind == "parameter" and source.requires_grad and node.name in self.grad:
            pairs = {p: w for p, w in wanted.items() if all(steady(v, c) for v, c in zip(p.value, p.cotangent))}
            return pairs | {Pair(whole, whole): everywhere, Pair(whole, (P,) * axes): everywhere}
        if any(r.kind == "buffer" and r.name == source.name for r in self.variants.source.results):
            return {Pair(whole, whole): everywhere}
        frozen, pairs = source.kind == "parameter", {Pair(whole, whole): everywhere}
        for pair, where in wanted.items():
            if not any(v.is_partial for v in pair.value):
                own = Pair(pair.value, pair.value if frozen else whole)
                pairs[own] = pairs[own] | where if own in pairs else where
        if source.kind == "input" and source.batch_dim is not None:
            return self._by_role(pairs, source.batch_dim)
        return pairs

    def _by_role(self, pairs: dict[Pair, np.ndarray], batch_dim: int) -> dict[Pair, np.ndarray]:
        """Those that the roles allow where there are any, else all."""
        allowed = [
            all(
                role is None or (v == S(batch_dim)) == (role == "data")
                for role, v in zip(self.restriction.roles, p.value)
            )
            for p in pairs
        ]
        some = np.any([where for where, ok in zip(pairs.values(), allowed) if ok] or [False], axis=0)
        return {p: where if ok else where & ~some for (p, where), ok in zip(pairs.items(), allowed)}

    # ---- edges

    def _edge(self, name: str, given: tuple[int, list[Pair]], wanted: list[tuple[int, list[Pair], bool]]) -> BatchEdge:
        producer, offered = given
        node, grad = self.nodes[name], name in self.grad
        sources = {pair: i for i, pair in enumerate(dict.fromkeys(offered))}
        targets = {pair: i for i, pair in enumerate(dict.fromkeys(p for _, pairs, _ in wanted for p in pairs))}
        is_placeholder = node.op == "placeholder" and not grad
        key = ("edge", node.meta["type"], tuple(sources), tuple(targets), grad, is_placeholder)
        if key not in self.variants.cache:
            self.variants.cache[key] = _Conversions(
                self.pricer, node.meta["type"], tuple(sources), tuple(targets), grad, is_placeholder
            )
        return BatchEdge(
            name,
            producer,
            np.array([sources[p] for p in offered]),
            tuple((i, np.array([targets[p] for p in pairs])) for i, pairs, _ in wanted),
            (tuple(sources), tuple(targets)),
            self.variants.cache[key],
            any(saved for *_, saved in wanted),
            frozenset(mode for mode, re in self.recompute.items() if name in re.kept or self._some_keep(wanted, re)),
            frozenset(mode for mode, re in self.recompute.items() if _converts_again(name, re)),
            self.modes,
            self.sharing.floor_of(node),
        )

    def _some_keep(self, wanted: list[tuple[int, list[Pair], bool]], recompute: Recompute) -> bool:
        """Whether a consumer is in a layer that is not run again: then the copies that it reads stay."""
        return any(self.rows[i].kind == "op" and _keeps(self.rows[i].name, recompute) for i, *_ in wanted)


class _States(NamedTuple):
    """The pairs of a crossing tensor, and bool [num, pairs] where they are possible."""

    pairs: tuple[Pair, ...]
    offered: np.ndarray


def _by_value(pairs: Sequence[Pair]) -> dict[Pair, list[int]]:
    found: dict[Pair, list[int]] = {}
    for c, pair in enumerate(pairs):
        found.setdefault(pair, []).append(c)
    return found


def _cached(variants: Variants, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
    if key not in variants.cache:
        variants.cache[key] = make()
    return variants.cache[key]


def _recompute(variants: Variants, mode: str) -> Recompute:
    def make() -> Recompute:
        return recompute_of(variants.source, variants.layering, mode, variants.schedule)

    found: Recompute = _cached(variants, ("recompute", mode), make)
    return found


def _sharing(variants: Variants) -> Sharing:
    cache = variants.samples.cache
    if "sharing" not in cache:
        cache["sharing"] = Sharing(variants.source, variants.layering)
    found: Sharing = cache["sharing"]
    return found


def _keeps(op: str, recompute: Recompute) -> bool:
    """Whether what this op saves is kept because its layer is not run again."""
    return not recompute or op in recompute.plain


def _is_in(saved: Saved, node: Node, k: int) -> bool:
    """Whether output ``k`` of an op is among saved tensors."""
    return (node.name, k) in saved or (k == 0 and node.name in saved)


def _converts_again(name: str, recompute: Recompute) -> bool:
    return bool(recompute) and recompute.converts_again(name)
