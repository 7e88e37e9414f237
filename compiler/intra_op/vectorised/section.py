"""The numeric problem of one layer in all cases at once: ``section.build_section`` with a leading axis over cases.

Operators, edges and their order are those of ``section``. A choice that a case does not offer costs inf there. An
offered choice costs what the scalar section says, but for rounding. Recompute modes share everything but ``again``,
``saved`` and ``transient`` of operators, and ``again``, ``bytes`` and ``transient`` of edges, which are given by mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.fx import Node

from ...cost.layer_gathers import LayerReads
from ...cost.saved_tensors import Saved, extra_saved_bytes, saved_tensors
from ...ir.graph import op_name, output_of, tensor_operands, types_of
from ...ir.ops.loss import DEFERRED_SUM_FACTOR, deferrable_losses, exit_pair
from ...ir.spec import P, Pair, R, S, parse_pair, replicated
from ...plan.independent_axes import lies_loosely
from ...plan.recompute import Recompute, recompute_of
from ...rules import rule_for
from ..section import NO_RESTRICTION, Restriction, Sharing, State, allowed_patterns, is_storable, normalize
from .cases import Cases
from .op_strategies import OpChoices, op_choices
from .parameters import ParameterPrices, parameter_prices
from .pricing import CasePricer
from .problem import ByMode, CaseEdge, CaseSection, Choice, Conversions

__all__ = ["build_case_section", "placeholder_pairs", "wanted_pairs"]


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
    weight: np.ndarray
    floor: np.ndarray
    resident: np.ndarray
    again: ByMode
    saved: ByMode
    transient: ByMode


class _Seconds(NamedTuple):
    """The seconds of an operator's choices, arrays [num, choices] as in ``CaseSection``; None is 0 everywhere."""

    total: np.ndarray | None = None
    step: np.ndarray | None = None
    gradient: np.ndarray | None = None
    backward: np.ndarray | None = None
    weight: np.ndarray | None = None
    #: None: all of ``total``.
    floor: np.ndarray | None = None
    again: ByMode | None = None


class _Memory(NamedTuple):
    """The bytes of an operator's choices, arrays [num, choices] as in ``CaseSection``; None is 0 everywhere."""

    resident: np.ndarray | None = None
    saved: ByMode | None = None
    transient: ByMode | None = None


_NO_SECONDS, _NO_MEMORY = _Seconds(), _Memory()


def build_case_section(
    cases: Cases,
    layer: int,
    into: Sequence[State],
    out: Sequence[State],
    restriction: Restriction = NO_RESTRICTION,
    modes: Sequence[str] = ("none",),
) -> CaseSection:
    """Build layer ``layer`` in all cases, with its borders in these states (of ``Cases.states``), under these recompute
    modes."""
    return _Builder(cases, layer, into, out, restriction, tuple(modes)).build()


def pricer_of(cases: Cases) -> CasePricer:
    """The pricer that all sections of ``cases`` share."""
    if "pricer" not in cases.cache:
        cases.cache["pricer"] = CasePricer(cases)
    pricer: CasePricer = cases.cache["pricer"]
    return pricer


class _Builder:
    def __init__(
        self,
        cases: Cases,
        layer: int,
        into: Sequence[State],
        out: Sequence[State],
        restriction: Restriction,
        modes: tuple[str, ...],
    ) -> None:
        self.cases, self.layer, self.restriction, self.modes = cases, layer, restriction, modes
        self.layering, self.grad, self.pricer = cases.layering, cases.layering.needs_grad, pricer_of(cases)
        self.nodes, self.samples = cases.source.by_name(), cases.samples_of(layer)
        self.ops = cases.ops(layer)
        self.members, self.late = {node.name for node in self.ops}, deferrable_losses(cases.source)
        self.saved = saved_tensors(self.ops, self.grad)
        self.recompute = {mode: _recompute(cases, mode) for mode in modes}
        self.plain = {  # by mode, what of ``saved`` is kept because ops save it whose layer is not run again
            mode: saved_tensors([op for op in self.ops if _keeps(op.name, re)], self.grad)
            for mode, re in self.recompute.items()
        }
        self.sharing = _sharing(cases)
        self.reads = LayerReads(self.ops, self.layering.layer_of, self.grad)
        self.rows: list[_Row] = []
        self.op_choices: dict[str, OpChoices] = {}
        self.entries, self.exits = self._borders(into, out)

    def _borders(self, into: Sequence[State], out: Sequence[State]) -> tuple[dict[str, _States], dict[str, _States]]:
        used = {operand.name for node in self.ops for operand in node.all_input_nodes}
        entering, leaving = self.layering.crossing[self.layer], self.layering.crossing[self.layer + 1]
        results = {r.node for r in self.cases.source.results if r.kind in ("loss", "output")}
        entries = {
            name: self._states(entering, t, into)
            for t, name in enumerate(entering)
            if name in used or (name in results and name not in leaving)
        }
        exits = {name: self._states(leaving, t, out) for t, name in enumerate(leaving) if name not in entering}
        return entries, exits

    def _states(self, tensors: Sequence[str], t: int, states: Sequence[State]) -> _States:
        """The pairs of one crossing tensor, and in which cases some state has them."""
        pairs: dict[Pair, np.ndarray] = {}
        for state in states:
            possible = np.ones(self.cases.num, dtype=bool)
            for name, pair in zip(tensors, state):
                possible &= self.pricer.divides(self.nodes[name].meta["type"], pair.value)
            pairs[state[t]] = pairs[state[t]] | possible if state[t] in pairs else possible
        offered = np.array(list(pairs.values()), dtype=bool).reshape(len(pairs), self.cases.num)
        return _States(tuple(pairs), offered.T)

    def build(self) -> CaseSection:
        index: dict[str, int] = {}
        wants: dict[str, list[tuple[int, list[Pair], bool]]] = {}
        gives: dict[str, tuple[int, list[Pair]]] = {}
        for name, states in self.entries.items():
            index[name] = self._add_entry(name, states)
            gives[name] = index[name], [normalize(pair, name in self.grad) for pair in states.pairs]
        for node in self.ops:
            if op_name(node) == "getitem":
                continue
            i = index[node.name] = self._add_op(node)
            choices = self.op_choices[node.name].choices
            saves = (
                {k for side, k in rule_for(node).saves(node) if side == "input"} if node.name in self.grad else set()
            )
            for k, operand in enumerate(tensor_operands(node)):
                pairs = [normalize(c.inputs[k], operand.name in self.grad) for c in choices]
                wants.setdefault(operand.name, []).append((i, pairs, k in saves))
            for name, k in self._outputs(node):
                gives[name] = i, [normalize(c.outputs[k], name in self.grad) for c in choices]
        for name, states in self.exits.items():
            i = self._add(name, "exit", states.pairs, states.offered)
            wants.setdefault(name, []).append((i, [normalize(p, name in self.grad) for p in states.pairs], False))
        for result in self.cases.source.results:
            if result.node in gives and result.node not in self.entries:
                i, pairs = self._add_result(result.node, *gives[result.node])
                wants.setdefault(result.node, []).append((i, pairs, False))
        for name, wanted in list(wants.items()):
            if name not in gives and self.nodes[name].op == "placeholder":
                gives[name] = self._add_placeholder(self.nodes[name], wanted)
            assert name in gives, f"{name} is used by this section but neither made in it nor an entry"
        edges = tuple(self._edge(name, gives[name], wanted) for name, wanted in wants.items())
        rows = self.rows
        return CaseSection(
            layer=self.layer,
            modes=self.modes,
            names=tuple(row.name for row in rows),
            kinds=tuple(row.kind for row in rows),
            choices=tuple(row.choices for row in rows),
            offered=tuple(row.offered for row in rows),
            seconds=tuple(row.seconds for row in rows),
            step_seconds=tuple(row.step for row in rows),
            gradient_seconds=tuple(row.gradient for row in rows),
            backward_seconds=tuple(row.backward for row in rows),
            weight_seconds=tuple(row.weight for row in rows),
            floor_seconds=tuple(row.floor for row in rows),
            resident=tuple(row.resident for row in rows),
            again=tuple(row.again for row in rows),
            saved=tuple(row.saved for row in rows),
            transient=tuple(row.transient for row in rows),
            edges=edges,
            ops=self.op_choices,
            extent_of=self.cases.extent_of,
        )

    def _outputs(self, node: Node) -> list[tuple[str, int]]:
        """The tensors that an op gives: (name, which output)."""
        if not isinstance(node.meta["type"], tuple):
            return [(node.name, 0)]
        return [(user.name, output_of(user)[1]) for user in node.users if user.name in self.members]

    # ---- operators

    def _add(
        self,
        name: str,
        kind: str,
        choices: tuple[Choice, ...],
        offered: np.ndarray,
        seconds: _Seconds = _NO_SECONDS,
        memory: _Memory = _NO_MEMORY,
    ) -> int:
        """Add an operator and return its index."""
        zeros = np.broadcast_to(0.0, offered.shape)

        def filled(part: np.ndarray | None) -> np.ndarray:
            return zeros if part is None else part

        def by_mode(part: ByMode | None) -> ByMode:
            return {mode: (part or {}).get(mode, zeros) for mode in self.modes}

        total = np.where(offered, filled(seconds.total), np.inf)
        self.rows.append(
            _Row(
                name=name,
                kind=kind,
                choices=choices,
                offered=offered,
                seconds=total,
                step=filled(seconds.step),
                gradient=filled(seconds.gradient),
                backward=filled(seconds.backward),
                weight=filled(seconds.weight),
                floor=total if seconds.floor is None else np.where(offered, seconds.floor, np.inf),
                resident=filled(memory.resident),
                again=by_mode(seconds.again),
                saved=by_mode(memory.saved),
                transient=by_mode(memory.transient),
            )
        )
        return len(self.rows) - 1

    def _add_entry(self, name: str, states: _States) -> int:
        nbytes = self.pricer.local_bytes(self.nodes[name].meta["type"], [pair.value for pair in states.pairs])
        users = [user.name for user in self.nodes[name].users if user.name in self.members]
        saved = {
            mode: nbytes
            for mode, re in self.recompute.items()
            if name in self.plain[mode] or (name in re.kept and not all(_keeps(user, re) for user in users))
        }
        return self._add(name, "entry", states.pairs, states.offered, memory=_Memory(saved=saved))

    def _add_op(self, node: Node) -> int:
        nodes = [sample[node.name] for sample in self.samples]
        choices = self.op_choices[node.name] = op_choices(self.cases, nodes, self.restriction)
        prices = self.pricer.op(nodes, node, choices)
        again = {mode: prices.ahead for mode, re in self.recompute.items() if node.name in re.repeated}
        seconds, backward, weight = prices.ahead + prices.back, prices.back, prices.backward_weight
        if node.name in self.layering.static:  # once per stage however many layers use it: ``stage`` prices it
            seconds = backward = weight = np.zeros_like(seconds)
        if not self.restriction.roles and self.restriction.pinned is None:
            extents = np.array(self.cases.extents)[self.cases.extent_of]
            allowed = 0.01 * self.layering.total_flops * extents / self.layering.batch
            seconds = np.where(prices.wasted_flops > allowed[:, None], np.inf, seconds)
        if node.name in self.restriction.split:
            fits = choices.keeps_to(self.restriction, node.name, self.cases)
            seconds = np.where(fits, seconds, np.inf)
        if independent := self.restriction.independent_axes:
            seconds = np.where(choices.sends_over(node, independent, self.grad), np.inf, seconds)
        floor = seconds
        if self.sharing.floats(node.name):
            floor = np.where(np.isinf(seconds), seconds, 0.0)
        saved, transient = self._saved_bytes(nodes, node, choices)
        return self._add(
            node.name,
            "op",
            choices.choices,
            choices.offered,
            _Seconds(seconds, backward=backward, weight=weight, floor=floor, again=again),
            _Memory(saved=saved, transient=transient),
        )

    def _add_result(self, name: str, producer: int, given: Sequence[Pair]) -> tuple[int, list[Pair]]:
        """Add a tensor that leaves the graph. given: the pairs in which its producer makes it, by choice."""
        whole = replicated(self.cases.axes)
        leaving_pairs = [exit_pair(pair) if name in self.late else whole for pair in given]
        pairs = list(dict.fromkeys(leaving_pairs))
        values = tuple(pair.value for pair in pairs)
        once = self.pricer.conversions(self.nodes[name].meta["type"], values, (whole.value,))[:, :, 0]
        once = once / self.cases.microbatches[:, None] * DEFERRED_SUM_FACTOR
        producible = self.rows[producer].offered
        offered = np.stack(
            [producible[:, [one == pair for one in leaving_pairs]].any(axis=1) for pair in pairs], axis=1
        )
        return self._add(name, "result", tuple(pairs), offered, _Seconds(once, step=once)), pairs

    def _saved_bytes(self, nodes: Sequence[Node], node: Node, choices: OpChoices) -> tuple[ByMode, ByMode]:
        """[num, choices] bytes of the op by mode: (kept per microbatch in flight, held while its layer is run again);
        ``saved_tensors.saved_bytes`` for all cases."""
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
        divisor = self.cases.divisor[:, choices.splits]
        for _, rows in self.pricer.devices:
            pricer = self.cases.pricer(int(np.arange(self.cases.num)[rows][0]))
            extra = np.array([extra_saved_bytes(one, pricer, self.grad) for one in nodes])
            beside[rows] = extra[self.cases.extent_of][rows, None] / divisor[rows]
        if beside.any():
            for mode, re in self.recompute.items():
                note(mode, node.name in re.heavy or _keeps(node.name, re), beside)
        return parts

    # ---- placeholders

    def _add_placeholder(self, node: Node, wanted: list[tuple[int, list[Pair], bool]]) -> tuple[int, list[Pair]]:
        source, kind = node.meta["source"], node.meta["type"]
        pinned, _, pattern = (self.restriction.pinned or {}).get(node.name, "").partition(" ")
        if pinned:
            options = {parse_pair(pinned): np.ones(self.cases.num, dtype=bool)}
        else:
            asked = wanted_pairs([(self.rows[i].offered, pairs) for i, pairs, _ in wanted])
            options = placeholder_pairs(self.cases, node, asked, self.restriction.roles)
            if node.name in self.restriction.replicated:
                options = {p: where for p, where in options.items() if not any(value.is_shard for value in p.value)}
            if source.kind in ("parameter", "buffer"):
                trained, independent = (
                    source.requires_grad and node.name in self.grad,
                    self.restriction.independent_axes,
                )
                options = {p: where for p, where in options.items() if lies_loosely(p, independent, trained)}
        options = {pair: options[pair] & self.pricer.divides(kind, pair.value) for pair in sorted(options, key=str)}
        options = {pair: where for pair, where in options.items() if where.any()}
        if not options:
            raise ValueError(f"{node.name} is pinned to {pinned!r}, which cuts it evenly on no mesh; pin another pair")
        offered = np.stack(list(options.values()), axis=1)
        if source.kind == "parameter":
            trainable = source.requires_grad and node.name in self.grad
            allowed = (pattern,) if pattern else allowed_patterns(node.name, self.restriction)
            prices = parameter_prices(
                self.pricer,
                kind,
                tuple(options),
                offered,
                trainable,
                source.requires_grad,
                allowed,
                self.reads.of(node),
            )
            i = self._add_parameter(node.name, prices)
            return i, [normalize(choice.pair, node.name in self.grad) for choice in prices.choices]
        resident = None
        if source.kind == "buffer":
            resident = self.pricer.local_bytes(kind, [pair.value for pair in options])
        i = self._add(node.name, "source", tuple(options), offered, memory=_Memory(resident))
        return i, [normalize(pair, node.name in self.grad) for pair in options]

    def _add_parameter(self, name: str, prices: ParameterPrices) -> int:
        return self._add(
            name,
            "parameter",
            prices.choices,
            prices.offered,
            _Seconds(
                prices.seconds,
                prices.step,
                prices.gradient,
                prices.backward,
                prices.weight,
                floor=prices.seconds / self.sharing.uses(name),
            ),
            _Memory(prices.resident, transient=dict.fromkeys(self.modes, prices.gathered)),
        )

    # ---- edges

    def _edge(self, name: str, given: tuple[int, list[Pair]], wanted: list[tuple[int, list[Pair], bool]]) -> CaseEdge:
        producer, offered = given
        node, grad = self.nodes[name], name in self.grad
        sources = {pair: i for i, pair in enumerate(dict.fromkeys(offered))}
        targets = {pair: i for i, pair in enumerate(dict.fromkeys(p for _, pairs, _ in wanted for p in pairs))}
        is_placeholder = node.op == "placeholder" and not grad
        asked = (
            node.meta["type"], tuple(sources), tuple(targets), grad, is_placeholder, name in self.late,
            self.restriction.independent_axes,
        )  # fmt: skip
        key = ("edge", *asked)
        if key not in self.cases.cache:
            self.cases.cache[key] = Conversions(self.pricer, *asked)
        again = frozenset(mode for mode, re in self.recompute.items() if re.converts_again(name))
        kept = frozenset(self.modes) - again
        kept |= {mode for mode, re in self.recompute.items() if self._some_keep(wanted, re)}
        return CaseEdge(
            name,
            producer,
            np.array([sources[p] for p in offered], dtype=np.intp),
            tuple((i, np.array([targets[p] for p in pairs], dtype=np.intp)) for i, pairs, _ in wanted),
            (tuple(sources), tuple(targets)),
            self.cases.cache[key],
            name not in self.layering.static and any(saved for *_, saved in wanted),
            kept,
            again,
            self.modes,
            self.sharing.floor_of(node),
        )

    def _some_keep(self, wanted: list[tuple[int, list[Pair], bool]], recompute: Recompute) -> bool:
        """True if a consumer is in a layer that is not run again: then the copies that it reads stay."""
        return any(self.rows[i].kind == "op" and _keeps(self.rows[i].name, recompute) for i, *_ in wanted)


class _States(NamedTuple):
    """The pairs of a crossing tensor, and bool [num, pairs] where they are possible."""

    pairs: tuple[Pair, ...]
    offered: np.ndarray


def _recompute(cases: Cases, mode: str) -> Recompute:
    key, cache = ("recompute", mode, cases.schedule), cases.samples.cache
    if key not in cache:
        cache[key] = recompute_of(cases.source, cases.layering, mode, cases.schedule)
    recompute: Recompute = cache[key]
    return recompute


def _sharing(cases: Cases) -> Sharing:
    cache = cases.samples.cache
    if "sharing" not in cache:
        cache["sharing"] = Sharing(cases.source, cases.layering)
    sharing: Sharing = cache["sharing"]
    return sharing


def _keeps(op: str, recompute: Recompute) -> bool:
    """True if what this op saves is kept because its layer is not run again."""
    return not recompute or op in recompute.plain


def _is_in(saved: Saved, node: Node, k: int) -> bool:
    """True if output ``k`` of an op is among saved tensors."""
    return (node.name, k) in saved or (k == 0 and node.name in saved)


# ---- pairs of parameters, inputs, buffers and constants: ``section._Builder._pairs`` for all cases at once


Where = dict[Pair, np.ndarray]  # bool [num] by pair


def wanted_pairs(consumers: Sequence[tuple[np.ndarray, Sequence[Pair]]]) -> Where:
    """The cases in which some offered choice wants each pair.

    consumers: (bool [num, choices], the pair that each choice wants).
    """
    wanted: Where = {}
    for offered, pairs in consumers:
        columns: dict[Pair, list[int]] = {}
        for c, pair in enumerate(pairs):
            columns.setdefault(pair, []).append(c)
        for pair, at in columns.items():
            where = np.asarray(offered[:, at].any(axis=1))
            wanted[pair] = wanted[pair] | where if pair in wanted else where
    return wanted


def placeholder_pairs(cases: Cases, node: Node, wanted: Where, roles: Sequence[str | None]) -> Where:
    """The pairs in which a placeholder may lie, given those that its consumers want."""
    source, axes = node.meta["source"], cases.axes
    everywhere, whole = np.ones(cases.num, dtype=bool), (R,) * axes
    if source.kind == "parameter" and source.requires_grad and node.name in cases.layering.needs_grad:
        pairs = {p: w for p, w in wanted.items() if all(is_storable(v, c) for v, c in zip(p.value, p.cotangent))}
        return pairs | {Pair(whole, whole): everywhere, Pair(whole, (P,) * axes): everywhere}
    if any(r.kind == "buffer" and r.name == source.name for r in cases.source.results):
        return {Pair(whole, whole): everywhere}
    frozen, pairs = source.kind == "parameter", {Pair(whole, whole): everywhere}
    for pair, where in wanted.items():
        if not any(v.is_partial for v in pair.value):
            own = Pair(pair.value, pair.value if frozen else whole)
            pairs[own] = pairs[own] | where if own in pairs else where
    if source.kind == "input" and source.batch_dim is not None:
        return _by_role(pairs, source.batch_dim, roles)
    return pairs


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
