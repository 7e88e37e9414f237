"""Independent axes: mesh axes over which replicas of the model may take local updates, without waiting for each other.

Over such an axis every parameter and buffer is whole and every gradient partial: it is plain data parallelism, and
only gradients have to travel. The loss is still summed over it, once per step (``loss``), and so are, in a program,
the numbers that only the loss reads (itself, or the count behind a mean). An independent replica takes p × its own
share in their place, where p is the number of replicas, as if all of them had its samples. Its loss is then the mean
over its own samples, and p × its share of a gradient is the gradient of that loss.

Where a search must keep axes independent (``independent_axes``), it offers only strategies that send nothing over them
but gradients of parameters and the numbers that a loss is made of.

    parameters      whole, with their gradients as addends; buffers whole
    ops             no messages of their own over these axes
    conversions     slices and pads, and all-reduces of single numbers
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch.fx
from torch.fx import Node

from ..ir.graph import TensorType
from ..ir.ops.loss import start_count
from ..ir.program import ChunkProgram
from ..ir.reshard import LOCAL_STEPS, run_steps, steps_between
from ..ir.spec import Pair
from ..rules import MeshChoice
from .plan import Stage

__all__ = ["LOSS_NUMBERS", "converts_over", "lies_loosely", "loose_axes", "sends_over"]


def loose_axes(stage: Stage, programs: Sequence[ChunkProgram]) -> tuple[tuple[int, ...], str]:
    """(the loose axes of a stage, why its other axes of more than one device are none: the first reason of each)."""
    axes: list[int] = []
    why: list[str] = []
    for axis, size in enumerate(stage.mesh_shape):
        if size > 1:
            fault = next(_faults(stage, programs, axis), "")
            if fault:
                why.append(f"axis {axis}: {fault}")
            else:
                axes.append(axis)
    return tuple(axes), "; ".join(why)


def _faults(stage: Stage, programs: Sequence[ChunkProgram], axis: int) -> Iterator[str]:
    for name, home in stage.homes.items():
        for what, spec in (("lies", home.compute.value), ("is stored", home.stored), ("is updated", home.optimizer)):
            if spec[axis].is_shard:
                yield f"parameter {name!r} {what} as {spec[axis]}"
    for program in programs:
        for slot in program.slots:
            value, back = slot.pair.value[axis], slot.pair.cotangent[axis]
            if slot.kind == "parameter" and slot.requires_grad and not back.is_partial:
                yield f"parameter {slot.name!r} has its gradient as {back}"
            if slot.kind == "buffer" and (value.is_shard or value.is_partial):
                yield f"buffer {slot.name!r} lies as {value}"
        yield from _spoken(program, axis)


def _spoken(program: ChunkProgram, axis: int) -> Iterator[str]:
    """The messages of the program over the axis, without the numbers of the loss."""
    reach = _reach(program)
    for node in program.graph.nodes:
        name = node.meta.get("tensor", node.name)
        if axis in node.meta.get("over", ()):
            yield f"op {name!r} needs the whole batch"
        for kind, at, *_ in _steps(node):
            # a mask would leave to the first replica what all add
            if at != axis or (kind in LOCAL_STEPS and kind != "mask"):
                continue
            if kind != "all_reduce" or reach[node] != {"loss"} or node.meta.get("numel", 1) > LOSS_NUMBERS:
                yield f"tensor {name!r} is resharded by {kind}"


def _steps(node: torch.fx.Node) -> Sequence[tuple[Any, ...]]:
    """The steps of a conversion, forth and back; what sums a count."""
    arguments: tuple[Any, ...] = node.args
    if node.target is start_count:
        return [("all_reduce", axis) for axis in arguments[-1]]
    return (*arguments[1], *arguments[2]) if node.target is run_steps else ()


def _reach(program: ChunkProgram) -> dict[torch.fx.Node, set[str]]:
    """Node → the kinds of exits that depend on it."""
    kinds_of: dict[torch.fx.Node, set[str]] = {}
    for node in reversed(program.graph.nodes):
        kinds = kinds_of.setdefault(node, set())
        if node.op == "output":
            for exit, value in zip(program.exits, node.args[0], strict=True):
                kinds_of.setdefault(value, set()).add(exit.kind)
            continue
        for operand in node.all_input_nodes:
            kinds_of.setdefault(operand, set()).update(kinds)
    return kinds_of


LOSS_NUMBERS = 1  # in a message: the loss itself, or the count behind a mean


def lies_loosely(pair: Pair, axes: Sequence[int], trained: bool) -> bool:
    """True if a parameter or buffer is whole on the axes, as independent replicas need it. trained: a gradient reaches
    it."""
    return all(
        not (pair.value[axis].is_shard or pair.value[axis].is_partial)
        and (pair.cotangent[axis].is_partial or not trained)
        for axis in axes
    )


def sends_over(node: Node, choice: MeshChoice, axes: Sequence[int], needs_grad: Collection[str]) -> bool:
    """True if an op itself communicates over one of the axes."""
    return any(axis in axes and message.is_sent(node, needs_grad) for axis, message in choice.internal)


def converts_over(source: Pair, target: Pair, kind: TensorType, grad: bool, axis: int) -> bool:
    """True if a conversion sends more over the axis, forth or back, than the numbers of a loss. False if there is no
    such conversion."""
    ways = [(source.value, target.value)]
    if grad and kind.is_float:
        ways.append((target.cotangent, source.cotangent))
    for start, end in ways:
        try:
            steps = steps_between(start, end)
        except ValueError:
            return False
        for step in steps:
            silent = step.kind in LOCAL_STEPS and step.kind != "mask"  # a mask leaves to the first replica what all add
            number = step.kind == "all_reduce" and kind.numel <= LOSS_NUMBERS
            if step.axis == axis and not silent and not number:
                return True
    return False
