"""What a rule says of one op, and how the choices on single mesh axes combine into choices on a mesh.

A rule describes an op by named dims. For each named dim it may state that cutting it along one mesh axis gives
placements for every operand and every output, value and cotangent (``AxisChoice``). From that follow all strategies on
any mesh: a choice on a mesh is one label per axis. "whole" (everything replicated) is always among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.graph import tensor_operands
from ..ir.spec import P, Pair, Placement, R, S

__all__ = ["FREE_GRAD", "ROW", "WHOLE", "AxisChoice", "AxisPair", "Internal", "Rule", "shard", "times_sent"]

AxisPair = tuple[Placement, Placement]  # (value, cotangent) along one mesh axis

WHOLE: AxisPair = (R, R)
FREE_GRAD: AxisPair = (R, P)  # used whole, gives an addend of its gradient
ROW: AxisPair = (P, R)  # an addend of the value, gets the whole gradient


def shard(dim: int) -> AxisPair:
    """``(S(dim), S(dim))``."""
    return (S(dim), S(dim))


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside an op's local implementation: its kind and phase, and the bytes it moves as those of a local
    operand.

    phase: "forward" or "backward"; kind: "all_reduce", …; like: ("input", k) or ("output", k): the message has as many
    elements as this device holds of that tensor, ``itemsize`` bytes each, times ``scale``.

    growth says what else the scale is multiplied by, which only the mesh tells: "none"; "gathered": by the size of this
    axis and of the minor ones with the same label (a message that is whole along the axis); "parts": by the sizes of
    all axes with the label (a message that does not shrink when the dim is cut further, such as a halo). A
    ``MeshChoice`` holds messages with growth "none" (``on_mesh``).

    times says how many there are of it, which the mesh tells as well: "once"; "passes": as often as a ring over all
    axes with the label passes its blocks on along this one; "home": once if they are not back at their owners' along
    this axis then. A ``MeshChoice`` holds messages with times "once" and a ``count``.

    gradient_of: the operand whose gradient a message of the backward carries; None if it serves those of all.
    """

    phase: str
    kind: str
    like: tuple[str, int]
    itemsize: int = 4
    scale: float = 1.0
    growth: str = "none"
    gradient_of: int | None = None
    times: str = "once"
    count: int = 1

    def is_sent(self, node: Node, needs_grad: Collection[str]) -> bool:
        """Whether it is needed where gradients flow through the nodes ``needs_grad`` only."""
        if self.phase == "forward":
            return True
        of = self.gradient_of
        return node.name in needs_grad and (of is None or tensor_operands(node)[of].name in needs_grad)

    def on_mesh(self, sizes: Sequence[int], which: int) -> Internal:
        """This message on axis ``which`` of those with its label, which have these sizes (major first)."""
        if (self.growth, self.times) == ("none", "once"):
            return self
        larger = {"none": 1, "gathered": prod(sizes[which:]), "parts": prod(sizes)}[self.growth]
        count = int(times_sent(self.times, prod(sizes[:which]), sizes[which]))
        return replace(self, scale=self.scale * larger, growth="none", times="once", count=count)


def times_sent(times: str, majors: Any, size: Any) -> Any:
    """How many messages ``Internal.times`` means on an axis of ``size`` with ``majors`` devices along the axes before
    it that have the same label; elementwise for arrays. A ring goes round an axis before each pass along a major one:
    majors · (size - 1) passes, which are -majors modulo size."""
    if times == "once":
        return majors // majors
    return majors * (size - 1) if times == "passes" else (majors % size != 0) * 1


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """One way to use one mesh axis for an op.

    label: the named dim that is cut ("batch", "out", …), "whole", or "grad" (whole values, partial cotangents passed
    through). inputs, outputs: an AxisPair per operand (order of ``tensor_operands``) and per output tensor. extent:
    what the product of all axes with this label must divide (the dim's own size, or its major factor for merged dims).
    splits_work: whether each device does only its share of the FLOPs ("whole" and "grad" do not). reads: the operands'
    placements as the work sees them, where the op communicates before it computes (None: as ``inputs`` lie).
    executable: whether ``localize`` gives a program; a choice without one is priced and planned only. joins: other
    labels that may cut a dim together with this one, for which any even blocks do (tokens).
    """

    label: str
    inputs: tuple[AxisPair, ...]
    outputs: tuple[AxisPair, ...]
    extent: int
    splits_work: bool = True
    internal: tuple[Internal, ...] = ()
    reads: tuple[Placement, ...] | None = None
    executable: bool = True
    joins: tuple[str, ...] = ()


class Rule:
    """Base class of rules; one instance serves an op family. Subclasses override ``axis_choices`` and, where needed,
    the rest."""

    #: how ``costmodel.compute`` prices the op: "matmul", "attention", "convolution", "normalization", "pointwise",
    #: "embedding", "loss", "view", "free"
    cost_kind = "pointwise"

    #: whether this rule knows nothing of the op: it offers "whole" alone, and the plan says so aloud
    is_fallback = False

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """Every way to use one mesh axis, "whole" first."""
        raise NotImplementedError

    def is_unknown(self, node: Node) -> bool:
        """True where nothing is known of this op, so that it is replicated and the plan says so."""
        return self.is_fallback

    def flops(self, node: Node) -> float:
        """Forward FLOPs of the whole op (a multiply-add is 2). The backward counts this once per differentiable
        matmul-like operand."""
        return 0.0

    def localize(
        self, node: Node, labels: Sequence[str], mesh_shape: Sequence[int]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(target, args, kwargs) of the local op, with the node's own operand Nodes in place: sizes in args become
        local ones, the target may become a function of ``local_ops`` that communicates. ``labels``: one per axis of
        ``mesh_shape``."""
        return node.target, node.args, dict(node.kwargs)

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The tensors that autograd keeps from the forward for the backward: ("input", k) and ("output", k). The
        default: nothing."""
        return ()

    def temporary_bytes(self, node: Node) -> float:
        """Bytes beyond operands and outputs that the op keeps for its backward (masks, statistics, copies); global
        size."""
        return 0.0

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Random operands (order of ``tensor_operands``) for the checker, where dtype and shape alone do not make valid
        ones: indices within range, positive values. None: the checker's own choice (normal floats, integers 0 and
        1)."""
        return None


def pairs_on_mesh(per_axis: Sequence[AxisPair]) -> Pair:
    """Zip one AxisPair per mesh axis into a Pair of specs."""
    return Pair(tuple(p[0] for p in per_axis), tuple(p[1] for p in per_axis))
