"""The sharding rules by op name, and the sharding strategies on a whole mesh that follow from those on single axes.

Every module of this package holds the rules of one family of ops and registers them on import::

    register("aten.mm.default")(EinsumRule("m k, k n -> m n"))

``rule_for(node)`` finds the rule: by name, else by ``torch.Tag.pointwise``, else the fallback ("whole" alone).

A choice on a mesh is one label per axis (``mesh_choices``). It is valid if

* the product of the sizes of all axes with one label divides that label's extent (if the label cuts anything),
* every operand and output is cut evenly, cuts of one dim by several axes accumulating, and
* no dim of any tensor is cut by two different labels (its layout would not be nested blocks), unless one of them says
  that it joins the other (``AxisChoice.joins``).
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from ..ir.custom_function import CustomFunction
from ..ir.graph import op_name, tensor_operands, types_of
from ..ir.spec import Pair, R, Spec
from .base import AxisChoice, Internal, Rule, pairs_on_mesh

__all__ = ["MeshChoice", "is_built_in", "mesh_choices", "pairs_choice", "register", "registered", "rule_for"]

_RULES: dict[str, Rule] = {}
_DEFAULTS: dict[str, Rule] = {}  # "pointwise" and "fallback", set by their families


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """One sharding strategy of an op on a mesh."""

    #: one per mesh axis
    labels: tuple[str, ...]
    #: a Pair per operand, in the order of ``tensor_operands``
    inputs: tuple[Pair, ...]
    #: a Pair per output tensor
    outputs: tuple[Pair, ...]
    #: the fraction of the op's FLOPs that each device does
    work_share: float
    #: (axis, collective) of every message inside the local op
    internal: tuple[tuple[int, Internal], ...] = ()
    #: the operands' value specs during the computation, where the op communicates first; else None (see ``reads``)
    gathers: tuple[Spec, ...] | None = None
    #: True if the choice on every axis has a local program
    executable: bool = True

    @property
    def reads(self) -> tuple[Spec, ...]:
        """The value spec of every operand during the computation, after the op's own communication."""
        return self.gathers or tuple(pair.value for pair in self.inputs)

    def __str__(self) -> str:
        sides = (" ".join(map(str, pairs)) for pairs in (self.inputs, self.outputs))
        return f"{'×'.join(self.labels)}: {' -> '.join(sides)}"


def register(*names: str) -> Callable[[Rule], Rule]:
    """Bind a rule instance to op names, one or several per string (``graph.op_name``); "pointwise" and "fallback"
    are the defaults for the rest."""

    def bind(rule: Rule) -> Rule:
        for name in " ".join(names).split():
            table = _DEFAULTS if name in ("pointwise", "fallback") else _RULES
            assert name not in table, f"two rules for {name}: {type(table[name]).__name__} and {type(rule).__name__}"
            table[name] = rule
        return rule

    return bind


def registered() -> dict[str, Rule]:
    """Every rule that is bound to a name, sorted by name."""
    return dict(sorted(_RULES.items()))


def rule_for(node: Node) -> Rule:
    """The rule of a call_function node. A getitem has none: the rule of its producer describes every output."""
    name = op_name(node)
    assert name != "getitem", f"{node.name}: ask the rule of its producer"
    if name in _RULES:
        return _RULES[name]
    if isinstance(node.target, CustomFunction):
        return _RULES[f"meshwright.{node.target.__name__}"]
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return _DEFAULTS["pointwise"]
    return _DEFAULTS["fallback"]


def is_built_in(node: Node) -> bool:
    """True if the rule of a node came with this package."""
    name = op_name(node)
    return _RULES.get(name) is _BUILT_IN.get(name)


def mesh_choices(node: Node, mesh_shape: Sequence[int], max_choices: int = 512) -> list[MeshChoice]:
    """Every distinct sharding strategy of ``node`` on a mesh, "whole" on all axes first.

    Choices of identical pairs, share and collectives are offered once. Axes of size 1 are "whole". Where there are
    more than ``max_choices``, those that use the fewest different labels and leave each device the least work are kept.
    """
    offered = rule_for(node).axis_choices(node)
    assert offered, f"{node.name}: a rule offers at least 'whole'"
    assert offered[0].label == "whole", f"{node.name}: a rule offers 'whole' first"
    distinct: dict[tuple, MeshChoice] = {}
    for combination in itertools.product(*(offered if size > 1 else offered[:1] for size in mesh_shape)):
        if _refusal(node, combination, mesh_shape) is None:
            choice = _combine(node, combination, mesh_shape)
            distinct.setdefault((choice.inputs, choice.outputs, choice.work_share, choice.internal), choice)
    choices = list(distinct.values())
    if len(choices) > max_choices:
        ranked = sorted(choices[1:], key=lambda choice: (len(set(choice.labels)), choice.work_share))
        best = set(ranked[: max_choices - 1])
        choices = choices[:1] + [choice for choice in choices[1:] if choice in best]
    return choices


def pairs_choice(node: Node, labels: Sequence[str], mesh_shape: Sequence[int]) -> MeshChoice:
    """The choice of these labels, one per mesh axis; ValueError if the op's rule does not offer it on such a mesh."""
    by_label = {choice.label: choice for choice in rule_for(node).axis_choices(node)}
    where = f"{node.name} ({op_name(node)})"
    if len(labels) != len(mesh_shape):
        raise ValueError(f"{where} needs one label per axis of mesh {tuple(mesh_shape)}, but got {list(labels)}")
    if unknown := [label for label in labels if label not in by_label]:
        raise ValueError(f"{where} may be split by {', '.join(by_label)}, but got {unknown[0]!r}; choose one of these")
    combination = tuple(by_label[label] for label in labels)
    if refusal := _refusal(node, combination, mesh_shape):
        raise ValueError(
            f"{where} cannot be split by {list(labels)} on mesh {tuple(mesh_shape)}: {refusal}; choose other labels"
        )
    return _combine(node, combination, mesh_shape)


def _refusal(node: Node, combination: Sequence[AxisChoice], mesh_shape: Sequence[int]) -> str | None:
    """The reason why these choices on single axes do not make one on the mesh; None if they do."""
    for choice in combination:
        # every axis with one label cuts the same dim, so their sizes multiply
        together = prod(size for other, size in zip(combination, mesh_shape) if other.label == choice.label)
        cuts_any = any(value.is_shard for value, _ in (*choice.inputs, *choice.outputs))
        if cuts_any and choice.extent % together:
            return f"{choice.label!r} comes in {choice.extent}, which {together} does not divide"
    sides = (
        ("operand", "inputs", [operand.meta["type"] for operand in tensor_operands(node)]),
        ("output", "outputs", types_of(node)),
    )
    for side, column, tensors in sides:
        for k, tensor in enumerate(tensors):
            cuts: dict[int, tuple[AxisChoice, int]] = {}
            for choice, size in zip(combination, mesh_shape):
                placement = getattr(choice, column)[k][0]
                if not placement.is_shard or size == 1:
                    continue
                dim, extent = placement.dim, tensor.shape[placement.dim]
                other, parts = cuts.get(dim, (choice, 1))
                if other.label not in (choice.label, *choice.joins) and choice.label not in other.joins:
                    return f"{other.label!r} and {choice.label!r} both cut dim {dim} of {side} {k}"
                cuts[dim] = (choice, parts * size)
                if extent % (parts * size):
                    return f"dim {dim} of {side} {k} is {extent} long, which {parts * size} does not divide"
    return None


def _combine(node: Node, combination: Sequence[AxisChoice], mesh_shape: Sequence[int]) -> MeshChoice:
    operands = [operand.meta["type"] for operand in tensor_operands(node)]
    outputs = types_of(node)
    differentiable = any(output.is_float for output in outputs)

    def pair(column: str, k: int, flows: bool) -> Pair:
        whole_pair = pairs_on_mesh([getattr(choice, column)[k] for choice in combination])
        return whole_pair if flows else _without_gradient(whole_pair)

    gathers = None
    if any(choice.reads is not None for choice in combination):
        reads = [choice.reads or tuple(value for value, _ in choice.inputs) for choice in combination]
        gathers = tuple(tuple(on_axis[k] for on_axis in reads) for k in range(len(operands)))
    return MeshChoice(
        labels=tuple(choice.label for choice in combination),
        inputs=tuple(pair("inputs", k, differentiable and kind.is_float) for k, kind in enumerate(operands)),
        outputs=tuple(pair("outputs", k, kind.is_float) for k, kind in enumerate(outputs)),
        work_share=1.0 / prod(size for choice, size in zip(combination, mesh_shape) if choice.splits_work),
        internal=tuple(_messages(combination, mesh_shape)),
        gathers=gathers,
        executable=all(choice.executable for choice, size in zip(combination, mesh_shape) if size > 1),
    )


def _messages(combination: Sequence[AxisChoice], mesh_shape: Sequence[int]) -> Iterator[tuple[int, Internal]]:
    """(axis, message) of every collective inside the op, with its size on this mesh."""
    for axis, choice in enumerate(combination):
        if not choice.internal or mesh_shape[axis] == 1:
            continue
        same_label = [other for other, c in enumerate(combination) if c.label == choice.label]
        for message in choice.internal:
            sized = message.on_mesh([mesh_shape[other] for other in same_label], same_label.index(axis))
            if sized.count:
                yield axis, sized


def _without_gradient(pair: Pair) -> Pair:
    """The pair of a tensor without a gradient: its cotangent is placed like its value and never needs a reduction."""
    return Pair(pair.value, tuple(p if p.is_shard else R for p in pair.value))


def whole(node: Node) -> AxisChoice:
    """The choice that replicates everything."""
    outputs = tuple((R, R) for _ in types_of(node))
    return AxisChoice("whole", tuple((R, R) for _ in tensor_operands(node)), outputs, extent=1, splits_work=False)


# Families register on import; they import ``register`` from here, so they come last.
for _module in pkgutil.iter_modules(__path__):
    if _module.name not in ("base", "prune"):
        importlib.import_module(f"{__name__}.{_module.name}")
_BUILT_IN = dict(_RULES)
