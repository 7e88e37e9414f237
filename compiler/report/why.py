"""``Plan.why``: the cost of every alternative to a choice of a plan.

The stage of the op is one problem again (``stage``). Everything in other layers stays as the plan has it; in the
op's own layer the rest may answer. For each choice c of the op

    cost(c) = min over the layer's other choices, given c and what is pinned outside       (a min-marginal)

by eliminating all operators but this one (``elimination``). A row is cost(c) − cost(chosen), times the microbatches:
what the stage's devices would work longer per step. On a stage that is not the slowest one a step need not take longer.
For a layer, the rows are its recompute modes and the residencies of its weights instead, everything else pinned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf, isfinite

import numpy as np

from ...costmodel.cluster import Cluster
from ...costmodel.memory import FRAMEWORK_BYTES
from ..cost.gradient_communication import Communication
from ..cost.parameter_sharding import PATTERNS, sharding_text
from ..cost.pricing import MeshPricer
from ..errors import TooWide
from ..frontend.layers import Layering, cluster_layers
from ..frontend.mixed_precision import in_precision
from ..intra_op.restriction import Restriction
from ..intra_op.section import Choice, Section, StageContext, State
from ..intra_op.solver.elimination import eliminate
from ..intra_op.solver.lagrange import solve
from ..intra_op.solver.problem import Problem, evaluate
from ..intra_op.stage import stage_section, transient_bytes
from ..ir.graph import Graph, op_name, tensor_operands
from ..ir.spec import Pair, R
from ..pipeline.families import in_flight_formula
from ..plan.plan import RECOMPUTE_MODES, ParameterSharding, Plan
from ..plan.recompute import HEAVY_KINDS, modes_in, recompute_of
from ..rules import MeshChoice, rule_for
from ..text import bytes_text, seconds_text, table
from .reprice import reprice

__all__ = ["ChoiceRow", "Why", "why"]


OPERATOR_KINDS = ("op", "parameter")
MAX_ROWS = 12  # rows of a table as text, per subject
MAX_OPS = 6  # ops of a module that are looked at, the heavy ones first


@dataclass(frozen=True)
class ChoiceRow:
    """One choice of one subject, compared with the choice that the plan has."""

    #: an op, "weights of LAYER" or "recompute of LAYER"
    subject: str
    label: str
    #: seconds per step more than the plan's choice takes; inf if impossible
    seconds: float
    #: bytes per device more than the plan's choice takes; inf if impossible
    bytes: float
    #: the reason why it was not chosen; "" for the plan's choice
    reason: str

    @property
    def chosen(self) -> bool:
        """True for the plan's own choice."""
        return not self.reason


@dataclass(frozen=True)
class Why:
    """The choices made for what ``name`` says, on stage ``stage``, with the runners-up, nearest first."""

    name: str
    stage: int
    rows: tuple[ChoiceRow, ...]
    #: True if the plan was edited since it was priced, and was priced again for this answer
    edited: bool = False

    def of(self, subject: str) -> tuple[ChoiceRow, ...]:
        """The rows of one subject."""
        return tuple(row for row in self.rows if row.subject == subject)

    def __str__(self) -> str:
        again = ["edited: prices are of another plan; priced again here"] if self.edited else []
        lines = [*again, f"{self.name} is on stage {self.stage}"]
        for subject in dict.fromkeys(row.subject for row in self.rows):
            rows = self.of(subject)
            cells = [
                (
                    ("→ " if row.chosen else "  ") + row.label,
                    "" if row.chosen else _more(row.seconds, seconds_text),
                    "" if row.chosen else _more(row.bytes, bytes_text),
                    "chosen" if row.chosen else row.reason,
                )
                for row in rows[:MAX_ROWS]
            ]
            lines += ["", *table((subject, "per step", "per device", ""), cells, "<>><")]
            if len(rows) > MAX_ROWS:
                lines.append(f"  and {len(rows) - MAX_ROWS} more")
        return "\n".join(lines)


def _more(value: float, text: Callable[[float], str]) -> str:
    if not isfinite(value):
        return "–"
    sign = "−" if value < 0 else "+"
    return sign + text(abs(value))


def why(plan: Plan, name: str, graph: Graph, cluster: Cluster | None = None) -> Why:
    """The choices that ``plan`` made for a layer, module, op or weight, and what others would cost. graph: the captured
    model; cluster: by default the plan's. Raises ValueError for a name that the model does not have, and for another
    model than the plan's."""
    if plan.model != graph.fingerprint():
        raise ValueError(
            f"why asks about the model that the plan is for, but got {graph.fingerprint()} and a plan for "
            f"{plan.model}; pass that model"
        )
    cluster = Cluster.from_json(json.dumps(plan.cluster)) if cluster is None else cluster
    edited = plan.price_state == "edited"
    plan = reprice(plan, graph, cluster) if edited else plan
    graph = in_precision(graph, plan.precision)
    answer = _Question(plan, graph.with_batch(plan.microbatch_size), cluster).answer(name)
    return replace(answer, edited=edited)


class _Question:
    def __init__(self, plan: Plan, graph: Graph, cluster: Cluster) -> None:
        self.plan, self.graph, self.cluster = plan, graph, cluster
        self.layering: Layering = cluster_layers(graph, sequence=True)
        self.nodes = graph.by_name()
        self.layer_of = self.layering.layer_of
        self.parameters = {n.meta["source"].name: n.name for n in graph.placeholders("parameter")}

    # ---- the subject

    def answer(self, name: str) -> Why:
        layers = [layer.name for layer in self.layering.layers]
        if name in self.parameters:
            stage, layer, node = self._home(name)
            return Why(name, stage, tuple(self._marginals(stage, layer, node, name)))
        if name in layers:
            layer = layers.index(name)
            stage = self._stage(layer)
            return Why(name, stage, (*self._modes(stage, layer), *self._residencies(stage, layer)))
        ops = [op for op in self.layer_of if op_name(self.nodes[op]) != "getitem"]
        ops_named = [op for op in ops if op == name or self._inside(op, name)]
        if not ops_named:
            modules = {self.nodes[op].meta["module"] for op in ops} - {""}
            names = [*layers, *sorted(modules), *self.parameters, *ops]
            near = get_close_matches(name, names, 3, 0.3) or names[:3]
            raise ValueError(
                f"why asks about a layer, module, op or weight of the model, but got {name!r}; "
                f"use one like {', '.join(near)}"
            )
        ops_named.sort(key=lambda op: rule_for(self.nodes[op]).cost_kind not in HEAVY_KINDS)
        rows: list[ChoiceRow] = []
        for op in ops_named[:MAX_OPS]:
            rows += self._marginals(self._stage(self.layer_of[op]), self.layer_of[op], op, op)
        return Why(name, self._stage(self.layer_of[ops_named[0]]), tuple(rows))

    def _inside(self, op: str, module: str) -> bool:
        path = self.nodes[op].meta["module"]
        return bool(path == module or path.startswith(f"{module}."))

    def _stage(self, layer: int) -> int:
        for index, stage in enumerate(self.plan.stages):
            if any(chunk.layers[0] <= layer < chunk.layers[1] for chunk in stage.chunks):
                return index
        raise ValueError(f"every layer is on a stage, but got none for layer {layer}; plan again")

    def _home(self, parameter: str) -> tuple[int, int, str]:
        node = self.parameters[parameter]
        layer = min(self.layer_of[user.name] for user in self.nodes[node].users if user.name in self.layer_of)
        return self._stage(layer), layer, node

    # ---- the stage as a problem

    def _pins(self, stage: int) -> dict[str, str]:
        pinned: dict[str, str] = {}
        for chunk in self.plan.stages[stage].chunks:
            pinned |= {name: ",".join(labels) for name, labels in chunk.ops.items()}
            pinned |= {self.parameters[name]: sharding_text(home) for name, home in chunk.parameters.items()}
            pinned |= {name: str(pair) for name, pair in chunk.sources.items()}
        return pinned

    def _weights(self, layer: int) -> list[str]:
        ops = self.layering.layers[layer].ops
        placeholders = [o.name for op in ops for o in tensor_operands(self.nodes[op]) if o.op == "placeholder"]
        return [name for name in dict.fromkeys(placeholders) if self.nodes[name].meta["source"].kind == "parameter"]

    def _section(self, stage: int, layer: int, pinned: Mapping[str, str], mode: str | None = None) -> Section:
        """The chunk of ``layer`` with these pins, and this layer in recompute ``mode`` (None: the plan's)."""
        where = self.plan.stages[stage]
        chunk = next(c for c in where.chunks if c.layers[0] <= layer < c.layers[1])
        modes = modes_in(self.plan.stages) | ({} if mode is None else {layer: mode})
        ways = Communication.of(where).priced_for(self.graph)
        pricer = MeshPricer(
            self.cluster, where.devices[0], where.mesh_shape, self.plan.optimizer, ways, mixed=self.graph.mixed
        )
        first, end = chunk.layers
        whole = Pair((R,) * len(where.mesh_shape), (R,) * len(where.mesh_shape))
        into: State = tuple(chunk.receives.get(name, whole) for name in self.layering.crossing[first])
        sends = {name: Pair(spec, spec) for name, spec in chunk.sends.items()}
        out: State = tuple(sends.get(name, whole) for name in self.layering.crossing[end])
        recompute = recompute_of(self.graph, self.layering, modes, self.plan.schedule)
        restriction = Restriction(pinned=pinned, residencies=PATTERNS)
        context = StageContext(self.graph, self.layering, pricer, self.plan.microbatches, restriction, recompute)
        return stage_section(context, chunk.layers, (into, out))

    def _flight(self, stage: int) -> int:
        plan = self.plan
        chunks = in_flight_formula(plan.schedule, stage, len(plan.stages), plan.microbatches, plan.chunks_asked)
        return -(-chunks // plan.num_chunks)

    def _free_bytes(self, stage: int) -> float:
        """The bytes that the plan's prediction leaves free on the fullest device of a stage."""
        devices = [self.cluster.device(d) for d in self.plan.stages[stage].devices]
        predicted = self.plan.prediction.stages[stage]
        used = predicted.peak_bytes - predicted.memory_bytes.get("framework", 0.0)
        return min(d.memory_bytes - FRAMEWORK_BYTES[d.kind] for d in devices) - used

    # ---- an op or a weight

    def _marginals(self, stage: int, layer: int, node: str, subject: str) -> list[ChoiceRow]:
        pinned = self._pins(stage)
        chosen = pinned[node]
        free = {*self.layering.layers[layer].ops, *self._weights(layer), node}
        section = self._section(stage, layer, {name: text for name, text in pinned.items() if name not in free})
        flight = self._flight(stage)
        problem = section.problem(flight)
        place = next(
            i for i, (n, k) in enumerate(zip(section.names, section.kinds)) if n == node and k in OPERATOR_KINDS
        )
        marginals = _min_marginals(problem, place)
        if chosen not in problem.operators[place].labels:  # what the plan has is left out of the search now
            return [ChoiceRow(subject, chosen, 0.0, 0.0, "")]
        labels = problem.operators[place].labels
        held = [self._bytes(section, problem, choice) for _, choice in marginals]
        base = labels.index(chosen)
        rows = [
            self._row(
                stage,
                subject,
                label,
                (seconds - marginals[base][0]) * self.plan.microbatches,
                size - held[base],
                label == chosen,
                _runs(choice),
            )
            for label, (seconds, _), size, choice in zip(labels, marginals, held, section.choices[place])
        ]
        return sorted(rows, key=lambda row: (not row.chosen, row.seconds))

    def _bytes(self, section: Section, problem: Problem, choice: tuple[int, ...] | None) -> float:
        if choice is None:
            return inf
        return evaluate(problem, choice)[1] + transient_bytes(section, choice, self.layering)

    def _row(
        self, stage: int, subject: str, label: str, seconds: float, size: float, chosen: bool, runs: bool
    ) -> ChoiceRow:
        """A row of the table. runs: the runtime can execute it."""
        if chosen:
            return ChoiceRow(subject, label, 0.0, 0.0, "")
        if not isfinite(seconds):
            return ChoiceRow(subject, label, inf, inf, "impossible here")
        free = self._free_bytes(stage)
        if size > free:
            missing = bytes_text(size - free)
            return ChoiceRow(subject, label, seconds, size, f"does not fit: {missing} missing")
        if seconds > 1e-12:
            return ChoiceRow(subject, label, seconds, size, "slower")
        if not runs and not self.plan.not_executable(self.graph):
            return ChoiceRow(subject, label, seconds, size, "cannot be run yet")
        return ChoiceRow(subject, label, seconds, size, _tie(seconds, size))

    # ---- a layer

    def _modes(self, stage: int, layer: int) -> list[ChoiceRow]:
        name = self.layering.layers[layer].name
        present = modes_in(self.plan.stages).get(layer, "none")
        pinned = self._pins(stage)
        sections = {mode: self._section(stage, layer, pinned, mode) for mode in RECOMPUTE_MODES}
        return self._compared(stage, f"recompute of {name}", present, sections)

    def _residencies(self, stage: int, layer: int) -> list[ChoiceRow]:
        """All weights of the layer in one pattern each time, as far as they can be."""
        weights, pinned = self._weights(layer), self._pins(stage)
        free = self._section(stage, layer, {name: text for name, text in pinned.items() if name not in weights})
        offered = dict(zip(free.names, free.problem(1).operators))
        sections = {}
        for pattern in PATTERNS:
            texts = {w: _in_pattern(pinned[w], pattern) for w in weights}
            texts = {w: text if text in offered[w].labels else pinned[w] for w, text in texts.items()}
            if any(text != pinned[w] for w, text in texts.items()) or all(
                _pattern(pinned[w]) == pattern for w in weights
            ):
                sections[pattern] = self._section(stage, layer, pinned | texts)
        kinds = {_pattern(pinned[w]) for w in weights}
        present = kinds.pop() if len(kinds) == 1 else "mixed"
        if present not in sections:
            sections[present] = self._section(stage, layer, pinned)
        subject = f"weights of {self.layering.layers[layer].name}"
        return self._compared(stage, subject, present, sections) if weights else []

    def _compared(self, stage: int, subject: str, present: str, sections: Mapping[str, Section]) -> list[ChoiceRow]:
        cost = {}
        for label, section in sections.items():
            problem = section.problem(self._flight(stage))
            choice = _best(problem)
            seconds = evaluate(problem, choice)[0] if choice is not None else inf
            cost[label] = seconds, self._bytes(section, problem, choice)
        base = cost[present]
        m = self.plan.microbatches
        rows = [
            self._row(
                stage,
                subject,
                label,
                (seconds - base[0]) * m,
                size - base[1],
                label == present,
                label in (*RECOMPUTE_MODES, *PATTERNS),
            )
            for label, (seconds, size) in cost.items()
        ]
        return sorted(rows, key=lambda row: (not row.chosen, row.seconds))


def _min_marginals(problem: Problem, place: int) -> list[tuple[float, tuple[int, ...] | None]]:
    """Per choice of one operator the least seconds with it, and the assignment."""
    try:
        marginals = eliminate(problem, keep=[place], byte_weight=1e-30)
        return [
            (float(cost), marginals.assignment([c]) if isfinite(cost) else None)
            for c, cost in enumerate(marginals.cost)
        ]
    except TooWide:
        return [_one(problem, place, c) for c in range(len(problem.operators[place].labels))]


def _one(problem: Problem, place: int, c: int) -> tuple[float, tuple[int, ...] | None]:
    """``_min_marginals`` of one choice, where the table of all is too wide."""
    op = problem.operators[place]
    seconds = np.where(np.arange(len(op.labels)) == c, op.seconds, inf)
    operators = tuple(replace(o, seconds=seconds) if i == place else o for i, o in enumerate(problem.operators))
    choice = _best(replace(problem, operators=operators))
    return (evaluate(problem, choice)[0], choice) if choice is not None else (inf, None)


def _best(problem: Problem) -> tuple[int, ...] | None:
    try:
        solution = eliminate(problem, byte_weight=1e-30)
        return solution.assignment() if np.isfinite(solution.cost) else None
    except TooWide:
        return getattr(solve(problem), "choice", None)


def _runs(choice: Choice) -> bool:
    """True if the runtime has a program for a choice of an op or a weight."""
    if isinstance(choice, MeshChoice):
        return choice.executable
    return not isinstance(choice, ParameterSharding) or choice.pattern in PATTERNS


def _pattern(text: str) -> str:
    return text.partition(" ")[2] or "replicated"


def _in_pattern(text: str, pattern: str) -> str:
    pair = text.partition(" ")[0]
    return pair if pattern == "replicated" else f"{pair} {pattern}"


def _tie(seconds: float, size: float) -> str:
    if seconds < -1e-12:
        return "faster by itself: the search compares whole layers between borders"
    return "as fast, with more bytes" if size > 0 else "as good"
