"""Constraints on plans, as text, and their meaning for one model.

Grammar (case and spaces do not count; NAME may have the wildcards * and ?)::

    constraint ::= "stage boundary at" LAYER              a stage begins with this layer
                 | "no stage boundary at" LAYER           none does
                 | "stages" RANGE | "microbatches" RANGE
                 | "tensor parallel" RANGE | "tensor parallel inside a host" | "no tensor parallel"
                 | "no sequence parallel"
                 | "replicate" PARAMETER                  this weight is whole on every device of its stage
                 | "split" OP "by" LABEL                  some axis of its mesh cuts this op by this named dim
                 | "recompute" MODE+ | "no recompute"     modes that layers may take, joined by ","
                 | "zero" RANGE | "no zero"               levels of parameter sharding: 0, 1, 2, 3
                 | "schedule" NAME+                       joined by ","
    RANGE      ::= ("<=" | "=" | ">=") number

LAYER is a layer's name as a plan lists them, PARAMETER a qualified name, OP a node of the graph or the path of the
module that made it. Constraints that exclude each other are refused with both their texts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from ..cost.parameter_sharding import PATTERNS
from ..frontend.layers import Layering
from ..ir.graph import Graph, op_name, output_of, tensor_operands
from ..pipeline.families import known_schedules
from ..plan.recompute import ALIASES
from ..rules import rule_for
from .parallel_shape import Strategy, divisors_of
from .space import Space

__all__ = [
    "Constraints",
    "Resolved",
    "annotations_of",
    "distinguish_layers",
    "layer_modes_of",
    "parse_constraints",
    "resolve",
]

MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Range:
    """Whole numbers from low to high, both included; None: open."""

    low: int = 1
    high: int | None = None

    def __contains__(self, value: int) -> bool:
        return self.low <= value and (self.high is None or value <= self.high)

    def both(self, other: Range) -> Range:
        """The intersection; low > high where it is empty."""
        highs = [h for h in (self.high, other.high) if h is not None]
        return Range(max(self.low, other.low), min(highs) if highs else None)

    @property
    def empty(self) -> bool:
        """True if no number is inside."""
        return self.high is not None and self.low > self.high


@dataclass(frozen=True)
class Constraints:
    """Parsed constraints. said: (subject, text) of each, so that an error can name them."""

    boundaries: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    stages: Range = Range()
    microbatches: Range = Range()
    tensor: Range = Range()
    tensor_inside_host: bool = False
    sequence: bool = True
    replicated: tuple[str, ...] = ()
    split: tuple[tuple[str, str], ...] = ()
    recompute: tuple[str, ...] = MODES
    zero: Range = Range(0, 3)
    schedules: tuple[str, ...] | None = None
    layer_modes: tuple[tuple[str, tuple[str, ...]], ...] = ()  # by pattern of layer names; given by ``recompute=``
    said: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.said)

    def narrowed(self, space: Space) -> Space:
        """Return ``space`` without the kinds of decision that are forbidden. Raises ValueError where none is left."""
        schedules = tuple(s for s in space.schedules if self.schedules is None or s in self.schedules)
        recompute = tuple(mode for mode in space.recompute if mode in self.recompute)
        patterns = tuple(p for p in space.residencies if PATTERNS.index(p) in self.zero)
        for what, remaining, offered in (
            ("schedule", schedules, space.schedules),
            ("recompute", recompute, space.recompute),
            ("zero", patterns, space.residencies),
        ):
            if not remaining:
                texts = " and ".join(map(repr, self.texts(what)))
                raise ValueError(
                    f"constraints leave some {what} open, but got {texts} where the search has only "
                    f"{', '.join(offered)}; drop a constraint"
                )
        tensor = self.tensor.both(Range(space.min_tensor, space.max_tensor))
        if tensor.empty:
            raise ValueError(_conflict(self.texts("tensor"), "no number of devices satisfies them"))
        return replace(
            space,
            schedules=schedules,
            recompute=recompute,
            residencies=patterns,
            sequence=space.sequence and self.sequence,
            min_tensor=tensor.low,
            max_tensor=tensor.high,
            tensor_inside_host=space.tensor_inside_host or self.tensor_inside_host,
        )

    def texts(self, *subjects: str) -> list[str]:
        """The constraints on these subjects, as they were said; of all subjects where none is named."""
        return [text for about, text in self.said if about in subjects or not subjects]

    def excludes(self, strategy: Strategy) -> list[str]:
        """The constraints that a forced shape breaks."""
        sizes = [s.tp for s in strategy.stages] or [strategy.tp]
        broken = [] if strategy.num_stages in self.stages else self.texts("stages")
        if any(size not in self.tensor for size in sizes):
            broken += [text for text in self.texts("tensor") if "inside" not in text.lower()]
        return broken

    def check(self, global_batch: int, num_devices: int, microbatches: int | None, strategy: Strategy | None) -> None:
        """Raise ValueError for constraints that the batch, the cluster or what is forced beside them exclude."""
        if strategy is not None and (broken := self.excludes(strategy)):
            raise ValueError(_conflict([*broken, f"strategy {strategy}"], "the strategy breaks them"))
        if microbatches is not None and microbatches not in self.microbatches:
            texts = [*self.texts("microbatches"), f"microbatches={microbatches}"]
            raise ValueError(_conflict(texts, "the number is outside"))
        counts = divisors_of(global_batch)
        if not any(count in self.microbatches for count in counts):
            shown = ", ".join(map(str, counts[:12])) + (", …" if len(counts) > 12 else "")
            why = f"a global batch of {global_batch} falls into {shown} equal microbatches"
            raise ValueError(_conflict(self.texts("microbatches"), why))
        for what, range_ in (("stages", self.stages), ("tensor", self.tensor)):
            if range_.low > num_devices:
                raise ValueError(_conflict(self.texts(what), f"the cluster has {num_devices} devices"))


@dataclass(frozen=True)
class Resolved:
    """Constraints on one model."""

    #: layer indices where a stage must begin
    cuts: tuple[int, ...] = ()
    #: layer indices where no stage may begin
    no_cuts: tuple[int, ...] = ()
    #: nodes of parameters that stay whole
    replicated: frozenset[str] = frozenset()
    #: op node → labels that some mesh axis must carry
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: those of ``no_cuts`` that a buffer forbids (``Layering.updated_across``), and its name
    updated: Mapping[int, str] = field(default_factory=dict)
    #: class of a layer → recompute modes that it may take (``distinguish_layers``)
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# ---- text → values


def parse_constraints(texts: Sequence[str] | str | None) -> Constraints:
    """Constraints from their texts (one text, or several; ";" separates as well). Raises ValueError for a text that is
    no constraint, and for texts that exclude each other."""
    if texts is None:
        return Constraints()
    words = [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in text.split(";")]
    constraints = Constraints()
    for text in filter(None, words):
        constraints = _add(constraints, text)
    return constraints


_RANGE = r"\s?(?P<sign><=|>=|=)\s*(?P<number>\d+)"


def _add(constraints: Constraints, text: str) -> Constraints:
    spaced = " ".join(text.split())
    for pattern, apply in _FORMS:
        match = re.fullmatch(pattern, spaced, re.IGNORECASE)
        if match:
            return apply(constraints, match, text)
    raise ValueError(
        "a constraint reads like 'stage boundary at LAYER', 'no recompute', 'tensor parallel <= 8', "
        "'replicate WEIGHT', 'stages = 4', 'zero <= 2' or 'schedule 1f1b' (docs/search.md lists all), "
        f"but got {text!r}; reword it"
    )


def _with(found: Constraints, name: str, value: Any, said: tuple[tuple[str, str], ...]) -> Constraints:
    changed: dict[str, Any] = {name: value, "said": said}
    return replace(found, **changed)


def _range(match: re.Match[str], low: int) -> Range:
    number = int(match["number"])
    return {"<=": Range(low, number), ">=": Range(number), "=": Range(number, number)}[match["sign"]]


def _ranged(name: str, subject: str, low: int = 1) -> Callable[[Constraints, re.Match[str], str], Constraints]:
    def apply(found: Constraints, match: re.Match[str], text: str) -> Constraints:
        said = (*found.said, (subject, text))
        both = getattr(found, name).both(_range(match, low))
        if both.empty:
            raise ValueError(_conflict([t for about, t in said if about == subject], "no number satisfies them"))
        return _with(found, name, both, said)

    return apply


def _listed(name: str, subject: str, known: Callable[[], Sequence[str]], fixed: tuple[str, ...] = ()) -> Callable:
    def apply(found: Constraints, match: re.Match[str], text: str) -> Constraints:
        asked = fixed or tuple(word.strip().lower() for word in match["names"].split(","))
        if unknown := [word for word in asked if word not in known()]:
            raise ValueError(f"{subject} is one of {', '.join(known())}, but got {unknown[0]!r} in {text!r}; use these")
        before = getattr(found, name)
        left = asked if before is None else tuple(word for word in before if word in asked)
        said = (*found.said, (subject, text))
        if not left:
            raise ValueError(_conflict([t for about, t in said if about == subject], f"no {subject} is left"))
        return _with(found, name, left, said)

    return apply


def _named(name: str, subject: str) -> Callable[[Constraints, re.Match[str], str], Constraints]:
    def apply(found: Constraints, match: re.Match[str], text: str) -> Constraints:
        value = (match["name"], match["label"]) if "label" in match.groupdict() else match["name"]
        return _with(found, name, (*getattr(found, name), value), (*found.said, (subject, text)))

    return apply


def _flag(name: str, value: bool, subject: str) -> Callable[[Constraints, re.Match[str], str], Constraints]:
    return lambda found, _, text: _with(found, name, value, (*found.said, (subject, text)))


def _no_tensor(found: Constraints, match: re.Match[str], text: str) -> Constraints:
    return _ranged("tensor", "tensor")(found, _meant(_RANGE, "<= 1"), text)


def _no_zero(found: Constraints, match: re.Match[str], text: str) -> Constraints:
    return _ranged("zero", "zero", 0)(found, _meant(_RANGE, "= 0"), text)


def _meant(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    assert match is not None
    return match


_FORMS: tuple[tuple[str, Callable[[Constraints, re.Match[str], str], Constraints]], ...] = (
    (r"stage boundary at (?P<name>\S+)", _named("boundaries", "boundary")),
    (r"no stage boundary at (?P<name>\S+)", _named("joined", "boundary")),
    (rf"stages{_RANGE}", _ranged("stages", "stages")),
    (rf"microbatches{_RANGE}", _ranged("microbatches", "microbatches")),
    (rf"tensor parallel{_RANGE}", _ranged("tensor", "tensor")),
    (r"tensor parallel inside a host", _flag("tensor_inside_host", True, "tensor")),
    (r"no tensor parallel", _no_tensor),
    (r"no sequence parallel", _flag("sequence", False, "sequence")),
    (r"replicate (?P<name>\S+)", _named("replicated", "replicate")),
    (r"split (?P<name>\S+) by (?P<label>\S+)", _named("split", "split")),
    (r"recompute (?P<names>[\w\-, ]+)", _listed("recompute", "recompute", lambda: MODES)),
    (r"no recompute", _listed("recompute", "recompute", lambda: MODES, ("none",))),
    (rf"zero{_RANGE}", _ranged("zero", "zero", 0)),
    (r"no zero", _no_zero),
    (r"schedule (?P<names>[\w\-, ]+)", _listed("schedules", "schedule", known_schedules)),
)


def _conflict(texts: Sequence[str], why: str) -> str:
    named = " and ".join(map(repr, texts))
    return f"constraints must be possible together, but got {named}: {why}; drop one of them"


# ---- values → one model


def resolve(constraints: Constraints, graph: Graph, layering: Layering) -> Resolved:
    """The layers, weights and ops of this model that the constraints name, and the boundaries that its buffers forbid.
    Raises ValueError where a name matches nothing, and where forced and forbidden boundaries or the number of stages
    exclude each other."""
    names = [layer.name for layer in layering.layers]
    cuts = {names.index(name) for text in constraints.boundaries for name in _matches(text, names, "a layer")}
    no_cuts = {names.index(name) for text in constraints.joined for name in _matches(text, names, "a layer")}
    if 0 in cuts:  # the first stage begins there anyway
        cuts.discard(0)
    said = [text for about, text in constraints.said if about == "boundary"]
    updated = layering.updated_across(graph)
    if both := cuts & updated.keys():
        raise ValueError(_conflict(said, f"buffer {updated[min(both)]} is updated before and after {names[min(both)]}"))
    no_cuts |= updated.keys()
    if both := cuts & no_cuts:
        raise ValueError(_conflict(said, f"a stage would and would not begin at {names[min(both)]}"))
    stages = [text for about, text in constraints.said if about == "stages"]
    if constraints.stages.high is not None and len(cuts) + 1 > constraints.stages.high:
        raise ValueError(_conflict([*said, *stages], f"the boundaries alone make {len(cuts) + 1} stages"))
    max_stages = len(names) - len(no_cuts - {0})
    if constraints.stages.low > max_stages:
        why = f", as buffer {min(updated.values())} is updated in several" if updated else ""
        raise ValueError(
            _conflict([*said, *stages], f"these {len(names)} layers make at most {max_stages} stages{why}")
        )
    parameters = {node.meta["source"].name: node.name for node in graph.placeholders("parameter")}
    replicated = {
        parameters[name] for text in constraints.replicated for name in _matches(text, parameters, "a parameter")
    }
    split: dict[str, tuple[str, ...]] = {}
    for text, label in constraints.split:
        for name in _splittable(graph, layering, text, label):
            split[name] = (*split.get(name, ()), label)
    return Resolved(tuple(sorted(cuts)), tuple(sorted(no_cuts)), frozenset(replicated), split, updated)


def annotations_of(graph: Graph, layering: Layering) -> list[str]:
    """The wishes in the code of the model (``frontend.annotations``), as texts of constraints. Raises
    ValueError for what no plan can keep."""
    return [*_annotated_stages(graph, layering), *_annotated_dims(graph)]


def _annotated_stages(graph: Graph, layering: Layering) -> Iterator[str]:
    nodes, current, seen = graph.by_name(), 0, False
    for layer in layering.layers:
        marks = dict.fromkeys(nodes[name].meta["stage"] for name in layer.ops if "stage" in nodes[name].meta)
        if len(marks) > 1:
            raise ValueError(
                f"a plan cuts a model between its layers, but got mw.stage({max(marks)}) that begins inside of layer "
                f"{layer.name}; begin it where another layer does ({', '.join(x.name for x in layering.layers[:40])})"
            )
        for stage in marks:
            if not current <= stage <= current + 1:
                raise ValueError(
                    f"stages are numbered 0, 1, … in the order of forward, but got mw.stage({stage}) after "
                    f"mw.stage({current}) at layer {layer.name}; number them anew"
                )
            if stage > current:
                yield f"stage boundary at {layer.name}"
            current, seen = stage, True
    if seen:
        yield f"stages = {current + 1}"


def _annotated_dims(graph: Graph) -> Iterator[str]:
    for node in graph:
        for dim, line in node.meta.get("split", ()):
            op, index = output_of(node)
            choices = rule_for(op).axis_choices(op)
            fitting = [c.label for c in choices if c.splits_work and c.outputs[index][0].dim == dim]
            if not fitting:
                others = sorted({c.outputs[index][0].dim for c in choices} - {-1})
                raise ValueError(
                    f"{line}: no rule of {op_name(op)} ({op.name}) cuts dim {dim} of its result, but mw.shard asks for "
                    f"it; it may be cut in {' or '.join(f'dim {d}' for d in others if d >= 0) or 'none'}"
                )
            yield f"split {op.name} by {fitting[0]}"


def layer_modes_of(recompute: str | Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """``Constraints.layer_modes`` of a recompute argument: of the patterns that fit a layer the last one counts, "none"
    where none does; nothing if it is one mode for all."""
    if isinstance(recompute, str):
        return ()
    named = ((pattern, ALIASES.get(mode, mode)) for pattern, mode in recompute.items())
    return (("*", ("none",)), *((pattern, MODES if mode == "auto" else (mode,)) for pattern, mode in named))


def distinguish_layers(
    layering: Layering, graph: Graph, constraints: Constraints, resolved: Resolved
) -> tuple[Layering, Resolved]:
    """The layering with classes that also tell apart layers under different constraints, and the constraints with the
    recompute modes of each class.

    Two layers are alike if they are so without constraints, and these concern the same ones of their ops and weights
    and allow the same modes. Raises ValueError for a pattern that fits no layer and where no mode is left.
    """
    nodes, layers, modes = graph.by_name(), [], {}
    layer_modes = _modes_of([layer.name for layer in layering.layers], constraints)
    for index, layer in enumerate(layering.layers):
        marks: list[object] = []
        for place, name in enumerate(layer.ops):
            if name in resolved.split:
                marks.append((place, resolved.split[name]))
            for k, operand in enumerate(tensor_operands(nodes[name])):
                if operand.name in resolved.replicated:
                    marks.append((place, k))
        key = layer.class_key.partition(" ")[0]
        if marks or index in layer_modes:
            key += " " + hashlib.sha256(repr((marks, layer_modes.get(index))).encode()).hexdigest()[:12]
        if index in layer_modes:
            modes[key] = layer_modes[index]
        layers.append(replace(layer, class_key=key))
    return replace(layering, layers=tuple(layers)), replace(resolved, modes=modes)


def _modes_of(names: Sequence[str], constraints: Constraints) -> dict[int, tuple[str, ...]]:
    """A map from each layer whose modes are asked for by name to the modes that it may take."""
    out: dict[int, tuple[str, ...]] = {}
    for pattern, modes in constraints.layer_modes:
        fits = _matches(pattern, names, "a layer")
        allowed = tuple(mode for mode in modes if mode in constraints.recompute)
        if not allowed:
            texts = [*constraints.texts("recompute"), f"recompute {', '.join(modes)} of {pattern}"]
            raise ValueError(_conflict(texts, "no mode is left"))
        out |= dict.fromkeys((k for k, name in enumerate(names) if name in fits), allowed)
    return out


def _matches(pattern: str, names: Collection[str], what: str) -> list[str]:
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        close = get_close_matches(pattern, list(names), 3, 0.3) or list(names)[:3]
        raise ValueError(
            f"a constraint names {what} of the model, but got {pattern!r}; use one like {', '.join(close)}"
        )
    return matches


def _splittable(graph: Graph, layering: Layering, pattern: str, label: str) -> list[str]:
    """Ops of this node name or module path that can be cut by ``label``."""
    members = {name for layer in layering.layers for name in layer.ops}
    ops = [node for node in graph.ops() if op_name(node) != "getitem" and node.name in members]
    names = [*(node.name for node in ops), *dict.fromkeys(node.meta["module"] for node in ops)]
    matched = set(_matches(pattern, names, "an op or module"))
    meant = [node for node in ops if {node.name, node.meta["module"]} & matched]
    offered = {node.name: {c.label for c in rule_for(node).axis_choices(node)} - {"whole"} for node in meant}
    able = [name for name, labels in offered.items() if label in labels]
    if not able:
        every = ", ".join(sorted(set().union(*offered.values()))) or "nothing"
        raise ValueError(f"{pattern} may be split by {every}, but got {label!r}; choose one of these")
    return able
