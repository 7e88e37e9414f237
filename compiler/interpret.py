"""A local program run node by node, with what the code of its module would do: a tensor is let go after its last use.

A *segment* is a set of nodes (a layer) that the backward runs again: between forward and backward only what enters the
segment is kept, and under "selective" what its heavy nodes make. Nodes between those of a segment that do not depend on
it, such as conversions of tensors from earlier layers, run before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

__all__ = ["Segment", "runner"]

Swaps = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Segment:
    """Names of nodes that the backward repeats, but for the ``heavy`` of them, whose results are kept."""

    nodes: frozenset[str]
    heavy: frozenset[str] = frozenset()


@dataclass
class _Unit:
    """Nodes that run together, in order; what they read from outside and what others read of them."""

    nodes: list[Node]
    segment: Segment | None
    inputs: list[Node]
    outputs: list[Node]
    done: list[Node]  # read by nobody after this unit


def runner(
    graph: torch.fx.Graph, swaps: Swaps, segments: Sequence[Segment] = ()
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``graph`` as a function of its placeholders; ``swaps``: targets to call in place of others."""
    units, slots = _units(graph, segments), [node for node in graph.nodes if node.op == "placeholder"]
    result = next(node for node in graph.nodes if node.op == "output")

    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        held = dict(zip(slots, arguments, strict=True))
        for unit in units:
            given = [held[node] for node in unit.inputs]
            made = _run(unit, swaps, None, given) if unit.segment is None else _repeated(unit, swaps, given)
            del given
            held.update(zip(unit.outputs, made, strict=True))
            del made
            for node in unit.done:
                del held[node]
        return tuple(torch.fx.map_arg(result.args[0], held.__getitem__))

    return forward


def _repeated(unit: _Unit, swaps: Swaps, given: list[Any]) -> tuple[Any, ...]:
    segment, heavy = unit.segment, [False]
    assert segment is not None

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        view = any(result.alias_info for result in op._schema.returns)  # would keep what it is a view of
        return CheckpointPolicy.MUST_SAVE if heavy[0] and not view else CheckpointPolicy.PREFER_RECOMPUTE

    def body(*inputs: Any) -> tuple[Any, ...]:
        return _run(unit, swaps, heavy, list(inputs))

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy) if segment.heavy else noop_context_fn()

    made: tuple[Any, ...] = checkpoint(
        body, *given, use_reentrant=False, preserve_rng_state=False, determinism_check="none", context_fn=contexts
    )
    return made


def _run(unit: _Unit, swaps: Swaps, heavy: list[bool] | None, given: list[Any]) -> tuple[Any, ...]:
    held = dict(zip(unit.inputs, given, strict=True))
    given.clear()
    stays = set(unit.outputs)
    last = {operand: node for node in unit.nodes for operand in node.all_input_nodes}
    for node in unit.nodes:
        if heavy is not None:
            assert unit.segment is not None
            heavy[0] = node.name in unit.segment.heavy
        args = torch.fx.map_arg(node.args, held.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, held.__getitem__)
        assert callable(node.target)
        held[node] = swaps.get(node.target, node.target)(*args, **kwargs)
        del args, kwargs
        for operand in node.all_input_nodes:
            if last[operand] is node and operand not in stays:
                del held[operand]
        if node not in last and node not in stays:
            del held[node]
    return tuple(held[node] for node in unit.outputs)


# ---- what runs together


def _units(graph: torch.fx.Graph, segments: Sequence[Segment]) -> list[_Unit]:
    """Every node once, alone or in its segment, after all that it reads."""
    home = {name: segment for segment in segments for name in segment.nodes}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    members: dict[int, list[Node]] = {}
    for node in calls:
        if node.name in home:
            members.setdefault(id(home[node.name]), []).append(node)
    units: list[_Unit] = []
    placed: set[Node] = set()

    def place(nodes: list[Node], segment: Segment | None) -> None:
        mine = set(nodes)
        inputs = list(dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in mine))
        placed.update(mine)
        for operand in inputs:
            visit(operand)
        outputs = [node for node in nodes if any(user not in mine for user in node.users)]
        units.append(_Unit(nodes, segment, inputs, outputs, []))

    def visit(node: Node) -> None:
        if node not in placed and node.op == "call_function":
            segment = home.get(node.name)
            place([node] if segment is None else members[id(segment)], segment)

    for node in calls:
        visit(node)
    _release(units, graph)
    return units


def _release(units: Sequence[_Unit], graph: torch.fx.Graph) -> None:
    """Say after which unit a tensor that passes between units is read by nobody."""
    kept: Collection[Node] = set(next(node for node in graph.nodes if node.op == "output").all_input_nodes)
    last: dict[Node, _Unit] = {}
    for unit in units:
        for node in (*unit.inputs, *unit.outputs):
            last[node] = unit
    for node, unit in last.items():
        if node not in kept:
            unit.done.append(node)
