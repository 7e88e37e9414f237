"""The numeric problem of one layer in all cases at once: ``section.build_section`` with a leading axis over cases.

Operators, edges and their order are those of ``section_builder``. A choice that a case does not offer costs inf there.
An offered choice costs what the scalar section says, but for rounding. Recompute modes share everything but ``again``,
``saved`` and ``transient`` of operators, and ``again``, ``bytes`` and ``transient`` of edges, which are given by mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.fx import Node

from ...cost.layer_gathers import LayerReads
from ...cost.saved_tensors import copied_operands, extra_saved_bytes, is_saved, saved_tensors
from ...ir.graph import tensor_operands, types_of
from ...ir.ops.loss import DEFERRED_SUM_FACTOR
from ...ir.spec import Pair, Spec, replicated
from ...plan.recompute import Recompute, recompute_of
from ...rules import MeshChoice, rule_for
from ..restriction import NO_RESTRICTION, Restriction
from ..section import Sharing, State
from ..section_builder import Given, SectionBuilder, Wanted, Where, keeps
from .cases import Cases
from .op_strategies import OpChoices, op_choices
from .parameters import ParameterPrices, parameter_prices
from .pricing import CasePricer
from .problem import ByMode, CaseEdge, CaseSection, Choice, Conversions

__all__ = ["build_case_section", "pricer_of"]


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


class _Builder(SectionBuilder):
    def __init__(
        self,
        cases: Cases,
        layer: int,
        into: Sequence[State],
        out: Sequence[State],
        restriction: Restriction,
        modes: tuple[str, ...],
    ) -> None:
        super().__init__(cases.source, cases.layering, cases.ops(layer), restriction, cases.num, cases.axes)
        self.cases, self.layer, self.modes, self.pricer = cases, layer, modes, pricer_of(cases)
        self.samples = cases.samples_of(layer)
        self.saved = saved_tensors(self.ops, self.grad)
        self.recompute = {mode: _recompute(cases, mode) for mode in modes}
        self.plain = {  # by mode, what of ``saved`` is kept because ops save it whose layer is not run again
            mode: saved_tensors([op for op in self.ops if keeps(op.name, re)], self.grad)
            for mode, re in self.recompute.items()
        }
        self.on_edges = {mode: self._saved_by_readers(re) for mode, re in self.recompute.items()}
        self.sharing = _sharing(cases)
        self.reads = LayerReads(self.ops, self.layering.layer_of, self.grad)
        self.rows: list[_Row] = []
        self.op_choices: dict[str, OpChoices] = {}
        self.entries, self.exits = self._borders(into, out)

    def _borders(self, into: Sequence[State], out: Sequence[State]) -> tuple[dict[str, _States], dict[str, _States]]:
        used = {operand.name for node in self.ops for operand in node.all_input_nodes}
        entering, leaving = self.layering.crossing[self.layer], self.layering.crossing[self.layer + 1]
        results = {r.node for r in self.graph.results if r.kind in ("loss", "output")}
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
        entries, exits = ({name: one.pairs for name, one in some.items()} for some in (self.entries, self.exits))
        tensors = self.connect(entries, exits)
        edges = tuple(self._edge(name, given, wanted) for name, (given, wanted) in tensors.items())
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

    def _divides(self, node: Node, value: Spec) -> np.ndarray:
        return self.pricer.divides(node.meta["type"], value)

    def _add_exit(self, name: str) -> int:
        return self._add(name, "exit", *self.exits[name])

    def _add_entry(self, name: str) -> int:
        states = self.entries[name]
        nbytes = self.pricer.local_bytes(self.nodes[name].meta["type"], [pair.value for pair in states.pairs])
        saved = {mode: nbytes for mode, re in self.recompute.items() if self._entry_stays(name, self.plain[mode], re)}
        return self._add(name, "entry", states.pairs, states.offered, memory=_Memory(saved=saved))

    def _add_op(self, node: Node) -> tuple[int, Sequence[MeshChoice]]:
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
        price = _Seconds(seconds, backward=backward, weight=weight, floor=floor, again=again)
        memory = _Memory(saved=saved, transient=transient)
        return self._add(node.name, "op", choices.choices, choices.offered, price, memory), choices.choices

    def _add_result(self, name: str, given: Given) -> Given:
        whole, leaving_pairs = replicated(self.axes), self._leaving(name, given[1])
        pairs = list(dict.fromkeys(leaving_pairs))
        values = tuple(pair.value for pair in pairs)
        once = self.pricer.conversions(self.nodes[name].meta["type"], values, (whole.value,))[:, :, 0]
        once = once / self.cases.microbatches[:, None] * DEFERRED_SUM_FACTOR
        producible = self.rows[given[0]].offered
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
                stays = node.name in re.heavy or is_saved(self.plain[mode], node, k)
                if (stays or is_saved(self.saved, node, k)) and not is_saved(self.on_edges[mode].results, node, k):
                    note(mode, stays, local)
        copied = [copied_operands(node, choice) for choice in choices.choices]
        if any(copied):
            for k, operand in enumerate(tensor_operands(node)):
                specs = [choice.inputs[k].value for choice in choices.choices]
                local = self.pricer.local_bytes(types_of(operand)[0], specs) * [k in own for own in copied]
                for mode in (mode for mode, re in self.recompute.items() if node.name in re.heavy):
                    note(mode, True, local)
        beside = np.zeros(choices.offered.shape)
        divisor = self.cases.divisor[:, choices.splits]
        for _, rows in self.pricer.devices:
            pricer = self.cases.pricer(int(np.arange(self.cases.num)[rows][0]))
            extra = np.array([extra_saved_bytes(one, pricer, self.grad) for one in nodes])
            beside[rows] = extra[self.cases.extent_of][rows, None] / divisor[rows]
        for k, factor in rule_for(node).kept_copies(node):
            specs = [choice.inputs[k].value for choice in choices.choices]
            beside += factor * self.pricer.local_bytes(types_of(tensor_operands(node)[k])[0], specs)
        if beside.any():
            for mode, re in self.recompute.items():
                note(mode, node.name in re.heavy or keeps(node.name, re), beside)
        return parts

    # ---- placeholders

    def _add_placeholder(self, node: Node, wanted: Wanted) -> Given:
        source, kind = node.meta["source"], node.meta["type"]
        asked = _wanted_pairs([(self.rows[i].offered, pairs) for i, pairs, _ in wanted])
        options, patterns = self._placeholder_pairs(node, asked)
        pairs, offered = tuple(options), np.stack(list(options.values()), axis=1)
        if source.kind == "parameter":
            trainable, reads = self._trainable(node), self.reads.of(node)
            prices = parameter_prices(
                self.pricer, kind, pairs, offered, trainable, source.requires_grad, patterns, reads
            )  # fmt: skip
            return self._add_parameter(node.name, prices), [choice.pair for choice in prices.choices]
        resident = None
        if source.kind == "buffer":
            resident = self.pricer.local_bytes(kind, [pair.value for pair in pairs])
        return self._add(node.name, "source", pairs, offered, memory=_Memory(resident)), list(pairs)

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

    def _edge(self, name: str, given: Given, wanted: Wanted) -> CaseEdge:
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
        readers = [self.rows[i].name for i, *_ in wanted if self.rows[i].kind == "op"]
        kept = frozenset(mode for mode, re in self.recompute.items() if self._copies_stay(name, readers, re))
        return CaseEdge(
            name,
            producer,
            np.array([sources[p] for p in offered], dtype=np.intp),
            tuple((i, np.array([targets[p] for p in pairs], dtype=np.intp)) for i, pairs, _ in wanted),
            (tuple(sources), tuple(targets)),
            self.cases.cache[key],
            name not in self.layering.static and any(saved for *_, saved in wanted),
            {mode: factor for mode in self.modes if (factor := self.on_edges[mode].read.get(name))},
            kept,
            again,
            self.modes,
            self.sharing.floor_of(node),
        )


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


def _wanted_pairs(consumers: Sequence[tuple[np.ndarray, Sequence[Pair]]]) -> Where:
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
