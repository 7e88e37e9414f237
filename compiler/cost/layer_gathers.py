"""The messages of weights that are stored in blocks and gathered layer by layer (ZeRO-3), as programs send them.

Per microbatch and layer the weights of one kind (axes of the cut, type, whether trained) are one message
(``lower``, ``weight_gathers``)::

    forward     all-gather
    backward    all-gather again, if the backward runs the gathers of the layer again; reduce-scatter of the gradients

They run again (``segments``) if the backward reads what is made of gathered weights alone, as a product does and a
table lookup or an addition does not, or anything else of a layer that is recomputed. A weight of several layers is
gathered for each.

The search needs seconds that add up over weights and that no message undercuts: the bytes of a weight at the least
price per byte of any message that it may be in, from itself alone to all of its kind in the layer (``GatherUse``). The
part of a message's seconds that does not grow with its size is dealt to the weights by their elements, of which no
weight counts more than ``MOST_COUNTED``: else a small one beside experts would cost next to nothing, though experts
seldom travel with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch.fx import Node

from ..ir.graph import TensorType, op_name, output_of, tensor_operands
from ..plan.plan import ParameterSharding
from ..plan.recompute import NOTHING, Recompute
from ..plan.tensor_codecs import coder_seconds, wire_share
from ..rules import rule_for
from .pricing import MeshPricer, gradient_type
from .saved_tensors import saved_of

__all__ = ["GatherUse", "LayerGather", "LayerReads", "gather_seconds", "layer_gathers", "scatter_seconds"]


@dataclass(frozen=True)
class LayerGather:
    """One message: the weights of one kind in one layer."""

    axes: tuple[int, ...]
    values: tuple[tuple[TensorType, ParameterSharding], ...]
    #: The weights of the message whose gradients are sent back.
    sums: tuple[tuple[TensorType, ParameterSharding], ...]
    #: True if the backward gathers the weights once more.
    again: bool


#: Elements of a weight that count where the seconds of a message that do not grow with its size are dealt out.
MOST_COUNTED = 2**25


@dataclass(frozen=True)
class GatherUse:
    """A layer that reads a weight."""

    #: Elements of all weights of the layer that may share the message.
    largest: int
    #: Those of them that count where what does not grow with the size is dealt out.
    counted: int
    #: True if the backward is sure to gather the weight once more.
    again: bool

    def spread(self, kind: TensorType, element_bytes: float) -> tuple[float, float, float]:
        """(largest, counted, factor) of ``AxisPrice.least_rate`` for a weight of this type."""
        return self.largest * element_bytes, self.counted * element_bytes, max(1.0, kind.numel / MOST_COUNTED)


def layer_gathers(
    ops: Sequence[Node],
    layer_of: Mapping[str, int],
    shardings: Mapping[str, ParameterSharding],
    needs_grad: Collection[str],
    recompute: Recompute = NOTHING,
) -> list[LayerGather]:
    """The messages of a stage. ops: in program order, outputs of several taken apart; homes: by the names of their
    nodes, the weights that are gathered in every microbatch."""
    gathers = []
    for members in _by_layer(ops, layer_of).values():
        read = {o.name: o for node in members for o in node.all_input_nodes if o.name in shardings}
        if not read:
            continue
        again = _runs_again(members, read.values(), needs_grad, recompute)
        kinds: dict[tuple[object, ...], list[Node]] = {}
        for name, node in read.items():
            key = shardings[name].scattered_axes, node.meta["type"].dtype, node.meta["source"].requires_grad
            kinds.setdefault(key, []).append(node)
        for nodes in kinds.values():
            values = tuple((node.meta["type"], shardings[node.name]) for node in nodes)
            trained = [node.meta["source"].requires_grad and node.name in needs_grad for node in nodes]
            sums = tuple(one for one, sent in zip(values, trained) if sent)
            gathers.append(LayerGather(shardings[nodes[0].name].scattered_axes, values, sums, again))
    return gathers


def gather_seconds(pricer: MeshPricer, gather: LayerGather) -> float:
    """Seconds of one all-gather, coding included."""
    code, parts = pricer.communication.weights, prod(pricer.mesh_shape[axis] for axis in gather.axes)
    size = coding = 0.0
    for kind, sharding in gather.values:
        local = pricer.local_bytes(kind, sharding.compute.value)
        size += local * wire_share(code, kind)
        coding += local / kind.dtype.itemsize * (1 + 1 / parts) * coder_seconds(code, kind, pricer.device)
    return pricer.message_seconds("all_gather", gather.axes, size) + coding


def scatter_seconds(pricer: MeshPricer, gather: LayerGather) -> float:
    """Seconds of the reduce-scatter of the gradients, coding included."""
    code = pricer.communication.weights
    size = coding = 0.0
    for kind, sharding in gather.sums:
        sums = gradient_type(kind, pricer.mixed)
        local = pricer.local_bytes(sums, sharding.compute.value)
        size += local * wire_share(code, sums)
        coding += 2 * local / sums.dtype.itemsize * coder_seconds(code, sums, pricer.device)
    return pricer.message_seconds("reduce_scatter", gather.axes, size) + coding


class LayerReads:
    """The weights that the layers of a section may gather. ops: of the section, in program order."""

    def __init__(self, ops: Sequence[Node], layer_of: Mapping[str, int], needs_grad: Collection[str]) -> None:
        self._ops, self._layer_of, self._grad = ops, layer_of, needs_grad

    @cached_property
    def _layers(self) -> list[tuple[dict[Node, None], dict[str, Node]]]:
        """Per layer its ops, and the parameters that they read."""
        layers = _by_layer(self._ops, self._layer_of).values()
        return [(ops, {o.name: o for node in ops for o in node.all_input_nodes if _is_parameter(o)}) for ops in layers]

    def of(self, parameter: Node) -> tuple[GatherUse, ...]:
        """A use per layer that reads it."""
        uses = []
        for ops, read in self._layers:
            if parameter.name in read:
                sizes = [other.meta["type"].numel for other in read.values() if _alike(other, parameter)]
                counted = sum(min(size, MOST_COUNTED) for size in sizes)
                uses.append(GatherUse(sum(sizes), counted, _runs_again(ops, (parameter,), self._grad, NOTHING)))
        return tuple(uses)


def _is_parameter(node: Node) -> bool:
    return node.op == "placeholder" and node.meta["source"].kind == "parameter"


def _alike(one: Node, other: Node) -> bool:
    """True if two parameters may share a message."""
    same = one.meta["type"].dtype == other.meta["type"].dtype
    return same and bool(one.meta["source"].requires_grad == other.meta["source"].requires_grad)


def _by_layer(ops: Sequence[Node], layer_of: Mapping[str, int]) -> dict[int, dict[Node, None]]:
    by_layer: dict[int, dict[Node, None]] = {}
    for node in ops:
        if node.name in layer_of:
            by_layer.setdefault(layer_of[node.name], {})[node] = None
    return by_layer


def _runs_again(
    ops: Collection[Node], wholes: Iterable[Node], needs_grad: Collection[str], recompute: Recompute
) -> bool:
    """True if the backward of a layer repeats its gathers: it reads a tensor that follows from these weights alone, or
    the output of an op that is recomputed."""
    derived = dict.fromkeys(wholes)
    waiting, touched = list(derived), dict[Node, None]()
    while waiting:
        for user in waiting.pop().users:
            if user not in ops or user in derived:
                continue
            touched[user] = None
            if all(operand in derived for operand in user.all_input_nodes):
                derived[user] = None
                waiting.append(user)
    for node in ops if recompute.repeated else touched:
        if op_name(node) == "getitem" or node.name not in needs_grad:
            continue
        operands, saves = tensor_operands(node), saved_of(node, needs_grad)
        if node.name in recompute.repeated and (saves or rule_for(node).temporary_bytes(node)):
            return True
        for side, k in saves:
            maker = node if side == "output" else output_of(operands[k])[0]
            if maker.name in recompute.repeated or maker in derived:
                return True
    return False
