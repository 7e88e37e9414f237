"""Completion: a search that keeps decisions of an earlier plan and finds the rest.

What is kept is said in the words of a request (``constraints``, ``strategy``, ``schedule``, …), so there is no second
mechanism. Grammar of ``keep``::

    keep ::= part ("," part)*                     without it: every part but "stages" and "layers"
    part ::= "stages" FIRST ["-" LAST]            these stages begin and end where they do, and all of "layers"
           | "layers" PATTERN                     how the ops of these layers are split, and their recompute modes
           | "strategy"                           the mesh of every stage, where there are as many devices
           | "boundaries" | "splits" | "recompute" | "zero" | "schedule" | "microbatches"

What is asked for beside ``like`` goes before what the plan decided. A mesh is kept by "strategy" alone: single stages
get the devices that the search finds best for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ..cost.parameter_sharding import PATTERNS
from ..frontend.layers import cluster_layers
from ..ir.graph import Graph
from ..plan.plan import Plan
from ..rules import rule_for
from ..search.parallel_shape import StageShape, Strategy
from ..search.request import PlanRequest
from .describe import axis_roles, family_of

__all__ = ["completed"]

PARTS = ("strategy", "boundaries", "splits", "recompute", "zero", "schedule", "microbatches")


def completed(request: PlanRequest, like: Plan, keep: str | None, graph: Graph, num_devices: int) -> PlanRequest:
    """The request that also keeps ``keep`` of ``like``. graph: the captured model. Raises ValueError for a plan of
    another model, and for a part that is not known or that the plan does not have."""
    if like.model != graph.fingerprint():
        raise ValueError(
            f"like= is a plan of this model, {graph.fingerprint()}, but got a plan of {like.model}; plan without it"
        )
    parts, layers, stages = _parsed(keep, like)
    every = set(range(len(like.layers)))
    texts = [*_boundaries(like, stages, "boundaries" in parts)]
    texts += _splits(like, graph, every if "splits" in parts else layers)
    modes = _modes(like, every if "recompute" in parts else layers)
    kept: dict[str, Any] = {}
    if modes:
        kept["recompute"] = modes
    if "strategy" in parts and like.num_devices == num_devices and (strategy := _strategy(like)):
        kept["strategy"] = strategy
    if "schedule" in parts:
        kept["schedule"] = like.schedule
    levels = {home.pattern for stage in like.stages for home in stage.homes.values()} & set(PATTERNS[1:])
    if "zero" in parts and len(levels) <= 1:
        kept["zero"] = PATTERNS.index(levels.pop()) if levels else 0
    if "microbatches" in parts and (request.global_batch or like.global_batch) % like.microbatches == 0:
        kept["microbatches"] = like.microbatches
    defaults = {one.name: one.default for one in fields(request)}
    words = {name: getattr(request, name) for name in defaults if name != "space"}
    asked = [request.constraints] if isinstance(request.constraints, str) else list(request.constraints or ())
    words |= {name: value for name, value in kept.items() if words[name] == defaults[name]}
    return PlanRequest(**{**words, "constraints": [*asked, *texts]})


def _parsed(keep: str | None, like: Plan) -> tuple[set[str], set[int], set[int]]:
    """(parts of the whole plan, layers and stages that are kept)."""
    parts, layers, stages = set[str](), set[int](), set[int]()
    for word in [*PARTS] if keep is None else [" ".join(text.split()) for text in keep.split(",")]:
        if word in PARTS:
            parts.add(word)
        elif match := re.fullmatch(r"stages? (\d+)(?:[-–](\d+))?", word):
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < len(like.stages):
                raise ValueError(f"keep= names stages 0 to {len(like.stages) - 1} of the plan, but got {word!r}")
            if like.num_chunks > 1:
                raise ValueError(
                    f"stages are kept where each is one run of layers, but got {word!r} of one with {like.num_chunks} "
                    "chunks in each; keep 'layers PATTERN', or all"
                )
            stages |= set(range(first, last + 1))
            layers |= {layer for k in range(first, last + 1) for layer in range(*like.stages[k].chunks[0].layers)}
        elif match := re.fullmatch(r"layers? (\S+)", word):
            named = {k for k, name in enumerate(like.layers) if fnmatchcase(name, match[1])}
            if not named:
                raise ValueError(f"keep= names layers like {', '.join(like.layers[:3])}, but got {word!r}")
            layers |= named
        else:
            raise ValueError(
                f"keep= is of 'stages 0-3', 'layers PATTERN', {', '.join(PARTS)}, joined by commas, but got {word!r}"
            )
    return parts, layers, stages


def _boundaries(plan: Plan, stages: Collection[int], whole: bool) -> Iterator[str]:
    """Where these stages begin and end, or all stages; under virtual stages the schedule deals the layers out."""
    if whole:
        yield f"stages = {len(plan.stages)}"
        stages = range(len(plan.stages)) if plan.num_chunks == 1 and not _is_regular(plan) else ()
    cuts = {edge for stage in stages for edge in plan.stages[stage].chunks[0].layers} - {0, len(plan.layers)}
    yield from (f"stage boundary at {plan.layers[layer]}" for layer in sorted(cuts))
    if not whole:
        inside = {layer for stage in stages for layer in range(*plan.stages[stage].chunks[0].layers)}
        firsts = {plan.stages[stage].chunks[0].layers[0] for stage in stages}
        yield from (f"no stage boundary at {plan.layers[layer]}" for layer in sorted(inside - firsts))


def _is_regular(plan: Plan) -> bool:
    """True if all stages have the same mesh, so that the schedule and the number of stages say how layers are dealt."""
    return len({stage.mesh_shape for stage in plan.stages}) == 1


def _splits(plan: Plan, graph: Graph, layers: Collection[int]) -> list[str]:
    """How the heavy ops of these layers are split, a constraint for each label that some axis carries."""
    nodes, layer_of = graph.by_name(), cluster_layers(graph, sequence=True).layer_of
    texts = []
    for stage in plan.stages:
        for chunk in stage.chunks:
            for op, labels in chunk.ops.items():
                if layer_of.get(op) not in layers or not family_of(op):
                    continue
                offered = {choice.label for choice in rule_for(nodes[op]).axis_choices(nodes[op])} - {"whole"}
                texts += [f"split {op} by {label}" for label in dict.fromkeys(labels) if label in offered]
    return texts


def _modes(plan: Plan, layers: Collection[int]) -> dict[str, str]:
    """The recompute modes of these layers, "auto" for the others; nothing where no layer of the plan is named."""
    found = {"*": "auto"} if len(layers) < len(plan.layers) else {}
    for stage in plan.stages:
        for chunk in stage.chunks:
            modes = chunk.recompute or ("none",) * (chunk.layers[1] - chunk.layers[0])
            found |= {plan.layers[k]: mode for k, mode in zip(range(*chunk.layers), modes) if k in layers}
    return found if layers else {}


def _strategy(plan: Plan) -> Strategy | None:
    """The shape of every stage as data × tensor parallelism; None where an axis is neither."""
    shapes = []
    for stage in plan.stages:
        roles = axis_roles(stage)
        if any(role not in ("data", "tensor") for role in roles):
            return None
        sizes = {role: prod(_sizes(stage.mesh_shape, roles, role)) for role in ("data", "tensor")}
        share = sum(chunk.layers[1] - chunk.layers[0] for chunk in stage.chunks)
        shapes.append(StageShape(share, sizes["data"], sizes["tensor"]))
    kinds = Counter((shape.dp, shape.tp) for shape in shapes)
    if len(kinds) == 1:
        return Strategy(len(shapes), shapes[0].dp, shapes[0].tp)
    return Strategy(stages=tuple(shapes))


def _sizes(shape: Sequence[int], roles: Sequence[str], role: str) -> list[int]:
    return [size for size, of in zip(shape, roles) if of == role]
