"""The interface of a sharding rule: the ways in which one op can use one mesh axis.

A rule describes an op by named dims. For a named dim it may offer to cut it along one mesh axis, and then gives the
placement of every operand and every output, value and cotangent (``AxisChoice``). All strategies on any mesh follow: a
choice on a mesh is one label per axis. "whole" (everything replicated) is always among them.
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
#: the tensor is used whole, and each device computes an addend of its gradient
FREE_GRAD: AxisPair = (R, P)
#: each device has an addend of the value and gets the whole gradient (as behind a row-parallel matmul)
ROW: AxisPair = (P, R)


def shard(dim: int) -> AxisPair:
    """``(S(dim), S(dim))``."""
    return (S(dim), S(dim))


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside an op's local implementation.

    A rule does not know the mesh, so it states how the size and the number of its messages depend on one (``growth``,
    ``times``). ``on_mesh`` resolves both: the messages of a ``MeshChoice`` have growth "none" and times "once".
    """

    #: "forward" or "backward"
    phase: str
    #: "all_reduce", "send", …
    kind: str
    #: ("input", k) or ("output", k): the message has as many elements as this device holds of that tensor, …
    like: tuple[str, int]
    #: … of this many bytes each, …
    itemsize: int = 4
    #: … times this
    scale: float = 1.0
    #: the factor that the mesh adds to the scale. "none"; "gathered": the size of this axis and of the minor ones with
    #: the same label (a message that is whole along the axis); "parts": the sizes of all axes with the label (a message
    #: that does not shrink when the dim is cut further, such as a halo)
    growth: str = "none"
    #: the operand whose gradient a message of the backward carries; None if it serves the gradients of all
    gradient_of: int | None = None
    #: the number of messages. "once"; "passes": as often as a ring over all axes with the label passes its blocks on
    #: along this axis; "home": once, if the blocks are not back at their owners along this axis after these passes
    times: str = "once"
    #: the number of messages on a given mesh
    count: int = 1

    def is_sent(self, node: Node, needs_grad: Collection[str]) -> bool:
        """True if the message is sent where gradients flow through the nodes ``needs_grad`` only."""
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
    """The number of messages that ``Internal.times`` means on an axis of ``size``, elementwise for arrays. majors: the
    number of devices along the axes before it that have the same label.

    A ring goes round an axis before each pass along a major one: majors · (size - 1) passes, which are -majors modulo
    size. So its blocks are at home again where size divides majors.
    """
    if times == "once":
        return majors // majors
    return majors * (size - 1) if times == "passes" else (majors % size != 0) * 1


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """One way to use one mesh axis for an op: a sharding strategy on a single axis."""

    #: the named dim that is cut ("batch", "out", …), "whole", or "grad" (values are whole, partial cotangents pass)
    label: str
    #: an AxisPair per operand, in the order of ``tensor_operands``
    inputs: tuple[AxisPair, ...]
    #: an AxisPair per output tensor
    outputs: tuple[AxisPair, ...]
    #: the product of all axes with this label must divide it: the dim's own size, or its major factor for merged dims
    extent: int
    #: True if each device does only its share of the FLOPs ("whole" and "grad" do not)
    splits_work: bool = True
    #: the collectives inside the local op
    internal: tuple[Internal, ...] = ()
    #: the operands' placements during the computation, where the op communicates first (None: those of ``inputs``)
    reads: tuple[Placement, ...] | None = None
    #: True if ``localize`` gives a program; a choice without one is priced and planned only
    executable: bool = True
    #: other labels that may cut a dim together with this one, as any even blocks will do (tokens)
    joins: tuple[str, ...] = ()


class Rule:
    """Base class of rules; one instance serves an op family. Subclasses override ``axis_choices`` and, where needed,
    the rest."""

    #: the kind by which ``costmodel.compute`` prices the op: "matmul", "attention", "convolution", "normalization",
    #: "pointwise", "embedding", "loss", "view", "free"
    cost_kind = "pointwise"

    #: True if this rule knows nothing of the op: it offers "whole" alone, and the plan notes it
    is_fallback = False

    #: True if the backward of a heavy op costs two forwards, however many operands there are
    joint_backward = False

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """Every way to use one mesh axis, "whole" first."""
        raise NotImplementedError

    def is_unknown(self, node: Node) -> bool:
        """True if no way to split this op is known, so that it is replicated and the plan notes it."""
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

    def is_product(self, node: Node) -> bool:
        """True if each operand that ``saves`` names is kept for the gradients of the others alone."""
        return False

    def temporary_bytes(self, node: Node) -> float:
        """Bytes beyond operands and outputs that the op keeps for its backward (masks, statistics, copies); global
        size."""
        return 0.0

    def kept_copies(self, node: Node) -> Sequence[tuple[int, float]]:
        """The operands of which the op keeps a copy in another type for its backward, each with the bytes of the copy
        per byte of the operand."""
        return ()

    def example_operands(self, node: Node, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Random operands (order of ``tensor_operands``) for the checker, where dtype and shape alone do not make valid
        ones: indices within range, positive values. None: the checker's own choice (normal floats, integers 0 and
        1)."""
        return None


def pairs_on_mesh(per_axis: Sequence[AxisPair]) -> Pair:
    """Zip one AxisPair per mesh axis into a Pair of specs."""
    return Pair(tuple(p[0] for p in per_axis), tuple(p[1] for p in per_axis))
