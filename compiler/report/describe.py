"""The words for a plan's mesh axes, layers and weights, which ``explain.py`` lays out as text.

A plan names ops (``linear_3``) with one label per mesh axis, and parameters with their sharding; that is enough for
the role of every axis and for how every weight lies. With the graph each op is named by its module, so rows also say
how the activations of each module are cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..frontend.layers import cluster_layers
from ..ir.graph import Graph, tensor_operands
from ..ir.spec import Spec
from ..plan.plan import Chunk, ParameterSharding, Plan, Stage
from ..rules import rule_for
from ..text import bytes_text

__all__ = [
    "Group", "LayerRow", "axis_names", "axis_roles", "family_of", "gradient_reduction_words", "layer_rows",
    "layer_span", "merged", "op_summary", "recompute_words", "repeated_blocks", "sharding_words",
    "spell",
]  # fmt: skip


HEAVY = ("matmul", "attention", "convolution", "embedding", "experts")

_FAMILIES = {
    "linear": "matmul",
    "addmm": "matmul",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "matmul": "matmul",
    "einsum": "matmul",
    "scaled_dot_product_attention": "attention",
    "convolution": "convolution",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "conv3d": "convolution",
    "conv_transpose2d": "convolution",
    "embedding": "embedding",
    "experts": "experts",
}

#: label → words
_WORDS = {
    "b0": "batch",
    "b1": "sequence",
    "b": "batch entries",
    "batch": "batch",
    "m": "tokens",
    "token": "tokens",
    "o": "output features (columns)",
    "n": "output features (columns)",
    "i": "input features (rows)",
    "k": "input features (rows)",
    "heads": "heads",
    "query": "query positions",
    "vocab": "vocabulary",
    "hidden": "features",
    "out": "output channels",
    "in": "input channels",
    "channel": "channels",
    "group": "groups",
    "expert": "experts",
    "ffn": "inner features",
    "whole": "whole",
    "grad": "whole, partial gradients",
    "partial": "partial sums",
}

#: (op stem, dim of its weight) → the label that cuts it
_WEIGHT_DIMS = {
    ("linear", 0): "o",
    ("linear", 1): "i",
    ("addmm", 0): "k",
    ("addmm", 1): "n",
    ("mm", 0): "k",
    ("mm", 1): "n",
    ("embedding", 0): "vocab",
    ("embedding", 1): "hidden",
    ("conv1d", 0): "out",
    ("conv1d", 1): "in",
    ("conv2d", 0): "out",
    ("conv2d", 1): "in",
    ("conv3d", 0): "out",
    ("conv3d", 1): "in",
    ("experts", 0): "expert",
    ("experts", 1): "ffn",
    ("experts", 2): "ffn",
}

_ROLES = {
    "b0": "data",
    "batch": "data",
    "m": "data",
    "token": "data",
    "b1": "sequence",
    "query": "sequence",
    "expert": "expert",
    **dict.fromkeys(("o", "n", "i", "k", "heads", "vocab", "hidden", "out", "in", "channel", "group", "ffn"), "tensor"),
}


_PATTERNS = {
    "replicated": "replicated",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "custom": "as written",
}


def _stem(op: str) -> str:
    return re.sub(r"_\d+$", "", op)


def family_of(op: str) -> str:
    """The family of a node by its name (``linear_3`` → "matmul"); "" if its work is light."""
    return _FAMILIES.get(_stem(op), "")


def spell(label: str) -> str:
    """A label in words: ``"o"`` → "output features"; ``"d1"`` → "dim 1"."""
    if match := re.fullmatch(r"([dr])(\d+)", label):
        return f"dim {match[2]}"
    return _WORDS.get(label, label)


# ---- axes


def axis_roles(stage: Stage) -> tuple[str, ...]:
    """The role of each mesh axis, by the dims that it cuts in heavy ops: "data", "tensor", "sequence", "expert", a
    mixture like "data+tensor", or "replicas" where it cuts nothing."""
    roles = []
    for axis in range(len(stage.mesh_shape)):
        votes = Counter(
            _ROLES.get(labels[axis], "")
            for chunk in stage.chunks
            for op, labels in chunk.ops.items()
            if family_of(op) and axis < len(labels)
        )
        votes.pop("", None)
        total = sum(votes.values())
        frequent = [role for role, count in votes.most_common() if 4 * count > total]
        roles.append("+".join(frequent) or "replicas")
    return tuple(roles)


def axis_names(stage: Stage) -> tuple[str, ...]:
    """The roles, numbered where two axes share one: ("data 0", "data 1")."""
    roles = axis_roles(stage)
    return tuple(f"{role} {axis}" if roles.count(role) > 1 else role for axis, role in enumerate(roles))


# ---- the whole plan


def recompute_words(plan: Plan) -> str:
    """The recompute modes in the order of the layers, by runs: "full ×12, none"; "" where nothing is recomputed."""
    chunks = sorted((chunk for stage in plan.stages for chunk in stage.chunks), key=lambda chunk: chunk.layers)
    modes = [mode for chunk in chunks for mode in chunk.recompute or ("none",) * (chunk.layers[1] - chunk.layers[0])]
    if set(modes) <= {"none"}:
        return ""
    counted = [(mode, len(list(run))) for mode, run in groupby(modes)]
    return ", ".join(mode if count == 1 else f"{mode} ×{count}" for mode, count in counted)


def sharding_words(plan: Plan) -> str:
    """The number of parameters in each sharding pattern: "ZeRO-2 (28), replicated (4)"; "" if all are replicated."""
    homes = {name: home for stage in plan.stages for chunk in stage.chunks for name, home in chunk.parameters.items()}
    counts = Counter(_PATTERNS[home.pattern] for home in homes.values())
    if set(counts) <= {"replicated"}:
        return ""
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())


def gradient_reduction_words(stage: Stage) -> str:
    """The axes over which the gradients of a stage are summed, with algorithm, compressor and bytes where they are not
    the backend's own and exact: "data", "data by ring, compressed by bf16 (3 MiB each)"; "" if nothing is summed."""
    names, texts = axis_names(stage), []
    for wire in stage.wire:
        text = " and ".join(names[axis] for axis in wire.axes)
        text += f" by {wire.algorithm}" if wire.algorithm != "backend" else ""
        text += f", compressed by {wire.compressor}" if wire.compressor != "none" else ""
        texts.append(text if wire.is_plain else f"{text} ({bytes_text(wire.bytes)} each)")
    return "; ".join(texts)


# ---- weights


def _over(items: Sequence[tuple[str, str]]) -> str:
    """``[("heads", "tensor")]`` → "heads over tensor"."""
    return ", ".join(f"{what} over {axis}" for what, axis in items)


def _weight_words(sharding: ParameterSharding, axes: Sequence[str], meanings: Sequence[Mapping[int, str]]) -> str:
    """The dims of a parameter that are cut with their axes, and the axes over which its gradient is summed."""

    def cuts(spec: Spec) -> list[tuple[str, str]]:
        return [(meanings[axis].get(p.dim, f"dim {p.dim}"), axes[axis]) for axis, p in enumerate(spec) if p.is_shard]

    value = sharding.compute.value
    parts = [_over(cuts(value)) or "whole on every device"]
    if sharding.pattern == "custom":
        for name, spec in (
            ("stored", sharding.stored),
            ("gradient", sharding.gradient),
            ("optimizer", sharding.optimizer),
        ):
            if spec != value:
                parts.append(f"{name}: {_over(cuts(spec)) or 'whole'}")
    elif sharding.pattern != "replicated":
        further = [axes[axis] for axis, (one, other) in enumerate(zip(value, sharding.optimizer)) if one != other]
        parts.append(f"{_PATTERNS[sharding.pattern]} over {' and '.join(further)}")
    summed = [axes[axis] for axis, p in enumerate(sharding.compute.cotangent) if p.is_partial]
    if summed:
        parts.append("gradient summed over " + " and ".join(summed))
    return "; ".join(parts)


def _meanings(chunk: Chunk, num_axes: int) -> list[dict[int, str]]:
    """Per axis, what a cut of weight dim d can be, from the labels that stand on this axis."""
    words_of: list[dict[int, list[str]]] = [{} for _ in range(num_axes)]
    for op, labels in chunk.ops.items():
        for (stem, dim), label in _WEIGHT_DIMS.items():
            if stem != _stem(op):
                continue
            for axis, chosen in enumerate(labels[:num_axes]):
                words = words_of[axis].setdefault(dim, [])
                if chosen == label and spell(label) not in words:
                    words.append(spell(label))
    return [{dim: " or ".join(words) for dim, words in axis.items() if words} for axis in words_of]


# ---- rows


@dataclass(frozen=True)
class LayerRow:
    """Weights or ops of one layer that are split alike."""

    names: tuple[str, ...]
    #: the split of their work; "" without the graph, which alone knows it
    work: str
    #: the split of their weights
    weights: str


@dataclass(frozen=True)
class Group:
    """Neighbouring layers in the same arrangement: for a block of ``len(titles)`` layers, repeated ``count`` times."""

    titles: tuple[str, ...]
    rows: tuple[tuple[LayerRow, ...], ...]
    count: int


def layer_rows(plan: Plan, stage_index: int, graph: Graph | None = None) -> list[Group]:
    """The layers of a stage with their rows, equal neighbours (also in alternation) collapsed."""
    stage = plan.stages[stage_index]
    layers: list[tuple[str, tuple[LayerRow, ...]]] = []
    for chunk in stage.chunks:
        source = _rows_of_graph(stage, chunk, graph) if graph is not None else _rows_of_parameters(plan, stage, chunk)
        layers.extend(source)
    return list(_collapse(layers))


def _rows_of_parameters(plan: Plan, stage: Stage, chunk: Chunk) -> Iterator[tuple[str, tuple[LayerRow, ...]]]:
    axes, meanings = axis_names(stage), _meanings(chunk, len(stage.mesh_shape))
    names = list(plan.layers[slice(*chunk.layers)])
    held: list[list[tuple[str, str]]] = [[] for _ in names]
    for parameter, layer in _assign(list(chunk.parameters), names):
        if parameter.rpartition(".")[2] != "bias":
            held[layer].append((parameter, _weight_words(chunk.parameters[parameter], axes, meanings)))
    for name, weights in zip(names, held):
        grouped: dict[str, list[str]] = {}
        for parameter, words in weights:
            grouped.setdefault(words, []).append(_short(parameter.removesuffix(".weight"), name))
        yield name, tuple(LayerRow(tuple(members), "", words) for words, members in grouped.items())


def _rows_of_graph(stage: Stage, chunk: Chunk, graph: Graph) -> Iterator[tuple[str, tuple[LayerRow, ...]]]:
    axes, meanings = axis_names(stage), _meanings(chunk, len(stage.mesh_shape))
    nodes = graph.by_name()
    layering = cluster_layers(graph)
    for layer in layering.layers[slice(*chunk.layers)]:
        grouped: dict[tuple[str, str], list[str]] = {}
        for op in layer.ops:
            if op not in chunk.ops or op not in nodes:
                continue
            node, labels = nodes[op], chunk.ops[op]
            if rule_for(node).cost_kind not in ("matmul", "attention", "convolution", "embedding", "routing"):
                continue
            cut = [(spell(label), axis) for label, axis in zip(labels, axes) if label != "whole"]
            work = _over(cut) or "whole on every device"
            weights = [
                chunk.parameters[source.name]
                for operand in tensor_operands(node)
                if (source := operand.meta.get("source")) is not None
                and source.name in chunk.parameters
                and not source.name.endswith("bias")
            ]
            words = _weight_words(weights[0], axes, meanings) if weights else ""
            title = _short(node.meta.get("module", "") or op, layer.name)
            if family_of(op) == "attention":
                title = "attention" if title == layer.name.rpartition(".")[2] else f"{title} (attention)"
            members = grouped.setdefault((work, words), [])
            if title not in members:
                members.append(title)
        yield layer.name, tuple(LayerRow(tuple(members), *key) for key, members in grouped.items())


def _short(name: str, layer: str) -> str:
    """``name`` without the path that it shares with ``layer``: the end of the name stays."""
    mine, theirs = name.split("."), layer.split(".")
    shared = _shared(mine, theirs)
    return ".".join(mine[shared:]) or mine[-1]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of leading words that two paths share."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _assign(parameters: Sequence[str], layers: Sequence[str]) -> list[tuple[str, int]]:
    """Each parameter with the number of the layer whose name shares most of its path, else with its successor's."""
    paths = [layer.split(".") for layer in layers]
    pairs: list[tuple[str, int]] = []
    following = len(layers) - 1
    for parameter in reversed(parameters):
        path = parameter.split(".")
        shared = [_shared(path, other) for other in paths]
        best = max(shared, default=0)
        # a shared first word alone ("model") says nothing, unless it is the whole name of the layer
        if best and any(n == best and (best > 1 or len(other) == 1) for n, other in zip(shared, paths)):
            candidates = [k for k, n in enumerate(shared) if n == best]
            following = following if following in candidates and path[best:-1] == [] else candidates[0]
        pairs.append((parameter, following))
    return pairs[::-1]


# ---- equal neighbours


_SPAN = re.compile(r"(\d+)(?:–(\d+))?")


def _pattern(name: str) -> str:
    """The name with its numbers and spans of numbers as ``*``."""
    return ".".join("*" if _SPAN.fullmatch(word) else word for word in name.split("."))


def _collapse(layers: Sequence[tuple[str, tuple[LayerRow, ...]]]) -> Iterator[Group]:
    """Runs of equal blocks of 1 to 8 layers, the choice that leaves out most first."""
    for at, period, count in repeated_blocks([(_pattern(name), rows) for name, rows in layers]):
        block = layers[at : at + period]
        last = layers[at + (count - 1) * period : at + count * period]
        titles = tuple(layer_span(first[0], end[0]) for first, end in zip(block, last))
        yield Group(titles, tuple(rows for _, rows in block), count)


def repeated_blocks(keys: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """(position, length, count) of runs of equal blocks of 1 to 8 keys, the choice that leaves out most first."""
    at = 0
    while at < len(keys):
        period, count = 1, 1
        for length in range(1, min(8, (len(keys) - at) // 2) + 1):
            repeats = 1
            while keys[at + repeats * length : at + (repeats + 1) * length] == keys[at : at + length]:
                repeats += 1
            if length * (repeats - 1) > period * (count - 1):
                period, count = length, repeats
        yield at, period, count
        at += period * count


def layer_span(first: str, last: str) -> str:
    """``("blocks.0.attention", "blocks.11.attention")`` → "blocks.0–11.attention"; spans join ("blocks.0–3" and
    "blocks.4–7" → "blocks.0–7"); names of other shapes → "first … last"."""
    if first == last:
        return first
    one, other = first.split("."), last.split(".")
    different = [k for k, (a, b) in enumerate(zip(one, other)) if a != b]
    if len(one) == len(other) and len(different) == 1:
        begin, end = (_SPAN.fullmatch(path[different[0]]) for path in (one, other))
        if begin and end:
            one[different[0]] = f"{begin[1]}–{end[2] or end[1]}"
            return ".".join(one)
    return f"{first} … {last}"


def merged(first: Sequence[Group], last: Sequence[Group]) -> list[Group] | None:
    """The groups of two runs of stages that read alike but for the numbers in their titles, as one; None if they
    differ."""
    if len(first) != len(last):
        return None
    out = []
    for one, other in zip(first, last):
        if (one.rows, one.count) != (other.rows, other.count):
            return None
        if [_pattern(title) for title in one.titles] != [_pattern(title) for title in other.titles]:
            return None
        out.append(Group(tuple(map(layer_span, one.titles, other.titles)), one.rows, one.count))
    return out


def op_summary(stage: Stage) -> list[tuple[str, list[tuple[str, int]]]]:
    """The splits of the work of each family of heavy ops, counted: ``[("matmul", [("batch over data", 12)])]``."""
    axes = axis_names(stage)
    counts: dict[str, Counter[str]] = {}
    for chunk in stage.chunks:
        for op, labels in chunk.ops.items():
            if family := family_of(op):
                cut = [(spell(label), axis) for label, axis in zip(labels, axes) if label != "whole"]
                counts.setdefault(family, Counter())[_over(cut) or "whole on every device"] += 1
    return [(family, counts[family].most_common()) for family in HEAVY if family in counts]
