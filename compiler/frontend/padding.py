"""Sequence padding: it makes sequences longer so that devices can share them evenly, where that changes no result.

``capture_padded`` captures the model twice, on inputs of the given length and on longer ones, and compares both graphs
op by op (``_Walk``). A dim that is longer in the second graph has a *tail*. The walk proves for every tensor that its
entries before the tail do not depend on the tail. An op passes if

* it follows from sizes alone (positions, masks): then it is computed, and its first entries are compared;
* no operand has a tail, and the tail of its output comes from ``expand``;
* its rule may cut the operands, along their tails, into independent blocks (no message, no addend): then each entry of
  the output follows from one position of the operands;
* it is attention whose queries see no keys of the tail: causal, or with such a mask, if that follows from sizes;
* it is a slice, a single entry or a margin, at the same place of both;
* it is a class loss whose targets in the tail are its ``ignore_index``: its sum and its count do not change.

Tails of targets are filled with that index. All other tails repeat the last entry of the input, so that they hold only
values that the model could meet. Gradients of ignored rows are zero, so the tail affects no weight either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Node

from ..ir.graph import Graph, TensorType, op_name, output_of, tensor_operands, types_of
from ..rules import rule_for
from ..rules.common import argument, parameters
from .capture import capture
from .example_inputs import batch_dims_of, flat_inputs

__all__ = ["Padding", "capture_padded", "check_multiple"]

_SIZE_OPS = frozenset(f"aten.{name}.default" for name in ("expand", "broadcast_to", "view", "_unsafe_view", "reshape"))
#: the arguments of these ops that may differ between the two graphs, as they only state the size of the output
_SIZE_ARGUMENTS = frozenset(("size", "shape"))
_VALUE_PRESERVING_OPS = frozenset(
    (
        *(f"aten.{name}.default" for name in ("alias", "clone", "constant_pad_nd", "contiguous", "detach", "pad")),
        *("aten._to_copy.default", "aten.reshape.default", "aten.slice.Tensor", "aten.squeeze.dim"),
        *("aten.to.dtype", "aten.unsqueeze.default", "aten.view.default"),
    )
)
_BATCH = 2  # extent at which the graphs are compared: more than 1, so that a batch dim is told from a broadcast one
Tails = tuple[frozenset[int], ...]  # the dims that are longer, for every output of an op


@dataclass(frozen=True)
class Padding:
    """The padding of a model's inputs, and the cuts that undo it in its outputs."""

    #: the length of sequences without padding; None: nothing is padded
    length: int | None = None
    #: the length with padding
    padded: int = 0
    #: input name → (the dim of the sequence, the value that fills the tail; None: the input's last entry)
    inputs: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    #: result name → (dim, extent without the tail)
    outputs: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def fill(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs (source name → leaf) with tails. ValueError for another length."""
        return {name: self._filled(name, x) if name in self.inputs else x for name, x in inputs.items()}

    def _filled(self, name: str, x: Any) -> Any:
        dim, value = self.inputs[name]
        if not isinstance(x, torch.Tensor) or x.ndim <= dim:
            return x  # the check of the inputs' types reports it
        if x.shape[dim] != self.length:
            raise ValueError(
                f"input {name!r} was planned with sequences of {self.length}, but got {x.shape[dim]}; "
                "pass that many positions, or plan again"
            )
        return _lengthen(x, dim, self.padded, value)

    def cut(self, output: str, x: torch.Tensor) -> torch.Tensor:
        """A result without its tail."""
        for dim, extent in self.outputs.get(output, ()):
            x = x.narrow(dim, 0, extent)
        return x

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for the notes of a plan, if anything is padded."""
        return () if self.length is None else (f"sequences of {self.length} are padded to {self.padded}",)


def check_multiple(multiple: int | None) -> None:
    """Raise ValueError unless ``multiple`` is a positive number or None."""
    if multiple is not None and (isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1):
        raise ValueError(f"pad_to_multiple_of is a positive number of positions, but got {multiple!r}")


def capture_padded(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None,
    multiple: int | None,
    **options: Any,
) -> tuple[Graph, Padding]:
    """The graph of ``model``, with sequences padded to the next ``multiple`` (None: as they are), and the padding.

    The sequence is dim 1 (dim 0 where dim 1 is the batch) of the first input that has one, and of all others of that
    length. ``options``: more arguments of ``capture``. Raises ValueError for a model that notices: it names the op.
    """

    def captured(given: tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]) -> Graph:
        inputs, named, also = given
        return capture(model, inputs, named, also, batch_dims=batch_dims, **options)

    given = (args, kwargs, targets)
    if multiple is None:
        return captured(given), Padding()
    flat = flat_inputs(*given)
    dims, length = _sequences(flat, batch_dims)
    if length is None or length % multiple == 0:
        return captured(given), Padding()
    padded = -(-length // multiple) * multiple
    longer = [_lengthen(x, dims[name], padded) if name in dims else x for name, x in flat.items()]
    try:
        graph = captured(pytree.tree_unflatten(longer, pytree.tree_structure(given)))
    except ValueError as error:
        raise ValueError(
            f"pad_to_multiple_of={multiple} makes sequences of {length} {padded} long, which the model does not take: "
            f"{error}"
        ) from error
    walk = _Walk(captured(given).with_batch(_BATCH), graph.with_batch(_BATCH))
    walk.run()
    inputs = {name: (dim, walk.values.get(name)) for name, dim in dims.items()}
    return graph, Padding(length, padded, inputs, walk.outputs())


def _sequences(
    inputs: Mapping[str, Any], batch_dims: Mapping[str, int | None] | Sequence[int | None] | None
) -> tuple[dict[str, int], int | None]:
    """(input → dim of the sequence, its length)."""
    dims = {name: 0 if batch == 1 else 1 for name, batch in batch_dims_of(inputs, batch_dims).items()}
    lengths = {
        name: inputs[name].shape[dim]
        for name, dim in dims.items()
        if isinstance(inputs[name], torch.Tensor) and inputs[name].ndim > 1
    }
    length = next(iter(lengths.values()), None)
    return {name: dims[name] for name, extent in lengths.items() if extent == length}, length


def _lengthen(x: torch.Tensor, dim: int, padded: int, value: int | None = None) -> torch.Tensor:
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    tail = last.repeat_interleave(padded - x.shape[dim], dim)
    return torch.cat([x, tail if value is None else torch.full_like(tail, value)], dim)


class _Constants:
    """The nodes of a graph that follow from sizes alone, and their values."""

    def __init__(self, graph: Graph) -> None:
        self.names: set[str] = set()
        for node in graph.ops():
            if all(operand.name in self.names for operand in node.all_input_nodes) and _is_deterministic(node):
                self.names.add(node.name)
        self._graph = graph
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The value of one of ``names``."""
        if name not in self._values:
            node = self._graph.node(name)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: self[operand.name])
            self._values[name] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[name]


def _is_deterministic(node: Node) -> bool:
    """True if an op is PyTorch's own and gives the same result each time."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return op_name(node) == "getitem"


class _Walk:
    """The comparison of both graphs, op by op. values: the values that the tails of inputs must have."""

    def __init__(self, short: Graph, graph: Graph) -> None:
        self.short, self.graph = short, graph
        self.constants, self.short_constants = _Constants(graph), _Constants(short)
        self.tails: dict[str, Tails] = {}
        self.values: dict[str, int] = {}

    def run(self) -> None:
        """Compare all ops; ValueError for the first one that does not pass."""
        ours, others = list(self.graph), list(self.short)
        for node, other in zip(ours, others):
            if (node.op, node.name, node.target) != (other.op, other.name, other.target):
                raise self._refused(node, "is not what the model computes on shorter sequences")
            self.tails[node.name] = self._tails_of(node, other)
            computed = node.name in self.constants.names
            if computed != (other.name in self.short_constants.names):
                raise self._refused(node, "follows from other tensors than on shorter sequences")
            if node.op == "call_function" and op_name(node) != "getitem" and not computed:
                self._op(node, other)
        if len(ours) != len(others):
            raise self._refused(ours[-1], "comes after another number of ops than on shorter sequences")
        for name, value in self.values.items():
            self._only_targets(name, value)

    def outputs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Result name → (dim, extent) of the cuts that remove its tail."""
        cuts = {}
        for result in self.graph.results:
            if result.kind == "output":
                (kind,) = types_of(self.short.node(result.node))
                cuts[result.name] = tuple((dim, kind.shape[dim]) for dim in sorted(self.tails[result.node][0]))
        return cuts

    def _tails_of(self, node: Node, other: Node) -> Tails:
        pairs = list(zip(types_of(node), types_of(other), strict=True))
        if any(len(a.shape) != len(b.shape) or a.dtype != b.dtype for a, b in pairs):
            raise self._refused(node, "has another form than on shorter sequences")
        tails = tuple(_longer_dims(a, b) for a, b in pairs)
        if node.op == "placeholder" and any(tails) and node.meta["source"].kind != "input":
            raise self._refused(node, "is as long as the sequence")
        return tails

    def _op(self, node: Node, other: Node) -> None:
        self._constant_operands(node)
        operands = [self._tail(operand) for operand in tensor_operands(node)]
        outputs, name = self.tails[node.name], op_name(node)
        if name in ("aten.slice.Tensor", "aten.select.int"):
            passes = self._slice_passes(node, other, operands[0])
        elif name in ("aten.constant_pad_nd.default", "aten.pad.default"):
            passes = self._pad_passes(node, other, operands[0])
        elif not _same_arguments(node, other):
            passes = False
        elif not any(operands):
            passes = not any(outputs) or name in _SIZE_OPS
        elif name == "aten.scaled_dot_product_attention.default" and operands[1]:
            passes = self._attention_passes(node, operands)
        elif "cross_entropy" in name and not any(outputs):
            passes = self._loss_passes(node, operands)
        else:
            passes = _rule_cuts_tails(node, operands, outputs)
        if not passes:
            raise self._refused(node, "does not leave what comes before the end of a sequence as it is")

    def _constant_operands(self, node: Node) -> None:
        """Raise ValueError for a constant whose first entries differ, and for positions beyond the end of a table."""
        for operand in tensor_operands(node):
            if operand.name not in self.constants.names:
                continue
            if not self._head_agrees(operand):
                raise self._refused(operand, "is something else on shorter sequences")
            if op_name(node) == "aten.embedding.default":
                rows, last = types_of(tensor_operands(node)[0])[0].shape[0], int(self.constants[operand.name].max())
                if last >= rows:
                    raise self._refused(node, f"would look up {last} in a table of {rows}")

    def _tail(self, operand: Node) -> frozenset[int]:
        producer, index = output_of(operand)
        return self.tails[producer.name][index]

    def _head_agrees(self, constant: Node) -> bool:
        """True if a tensor that follows from sizes has the same entries before the tail as without one."""
        value, other = self.constants[constant.name], self.short_constants[constant.name]
        return torch.equal(value[tuple(slice(0, extent) for extent in other.shape)], other)

    def _slice_passes(self, node: Node, other: Node, tail: frozenset[int]) -> bool:
        """True if a slice or a selection is at the same place of both, counted from the beginning."""
        dim = argument(node, "dim") % len(tensor_operands(node)[0].meta["type"].shape)
        where = ("index",) if op_name(node) == "aten.select.int" else ("start", "step")
        alike = all(argument(node, name) == argument(other, name) for name in where)
        place = argument(node, where[0])
        shifted = frozenset(d - (d > dim) for d in tail - {dim}) if where == ("index",) else tail
        result = self.tails[node.name][0]
        if dim in tail:
            return alike and (place is None or place >= 0) and result <= shifted
        return alike and (result == shifted or result == shifted | {dim})

    def _pad_passes(self, node: Node, other: Node, tail: frozenset[int]) -> bool:
        """True if a pad adds nothing behind a tail, or the tail is an input's and has the value of the pad."""
        pad, value = list(argument(node, "pad")), argument(node, "value") or 0
        after = dict(enumerate(pad[1::2]))  # from the last dim on
        rank = len(types_of(node)[0].shape)
        if "mode" in parameters(node) and argument(node, "mode") != "constant":
            return False
        if not _same_arguments(node, other) or min(pad) < 0 or self.tails[node.name][0] != tail:
            return False
        lengthened = any(after.get(rank - 1 - dim) for dim in tail)
        return not lengthened or self._accepts_fill(tensor_operands(node)[0], value)

    def _attention_passes(self, node: Node, operands: list[frozenset[int]]) -> bool:
        """True if queries before the tail see no keys of it: the op is causal and of one length, or has such a mask."""
        q, k, _, *masks = tensor_operands(node)
        rank, length = len(types_of(q)[0].shape), types_of(k)[0].shape[-2]
        positions = frozenset({rank - 2})
        if argument(node, "dropout_p") or not {*operands[:3], *self.tails[node.name]} <= {positions, frozenset()}:
            return False
        if operands[0] != self.tails[node.name][0] or operands[1] != operands[2]:
            return False
        if not masks:
            return bool(argument(node, "is_causal")) and types_of(q)[0].shape[-2] == length
        (mask,) = masks
        if mask.name not in self.constants.names:
            return False
        value = self.constants[mask.name]
        seen = value if value.dtype is torch.bool else value > torch.finfo(value.dtype).min / 2
        lengths = [types_of(self.short.node(x.name))[0].shape[-2] for x in (q, k)]
        return not seen[..., : lengths[0], lengths[1] :].any() and bool(seen.any(-1).all())

    def _loss_passes(self, node: Node, operands: list[frozenset[int]]) -> bool:
        """True if the loss ignores the rows of the tail."""
        _, target, *weight = tensor_operands(node)
        rows = len(target.meta["type"].shape)
        last = op_name(node) == "meshwright.cross_entropy"  # where the classes are: else in dim 1
        moved = frozenset(d if last or d == 0 else d + 1 for d in operands[1])
        if weight or target.meta["type"].is_float or operands[0] != moved or any(d >= rows for d in operands[1]):
            return False
        return self._accepts_fill(target, argument(node, "ignore_index"))

    def _accepts_fill(self, node: Node, value: float) -> bool:
        """True if the tail of a tensor may have this value: it is an input, perhaps reshaped, without another value."""
        while node.op == "call_function" and op_name(node) in _VALUE_PRESERVING_OPS:
            node = tensor_operands(node)[0]
        if node.op != "placeholder" or int(value) != value:
            return False
        return self.values.setdefault(node.meta["source"].name, int(value)) == value

    def _only_targets(self, name: str, value: int) -> None:
        """Raise ValueError if an input whose padding is no valid index goes elsewhere than into losses."""
        (start,) = (node for node in self.graph.placeholders("input") if node.meta["source"].name == name)
        waiting = [start]
        while waiting:
            for user in waiting.pop().users:
                if op_name(user) in _VALUE_PRESERVING_OPS:
                    waiting.append(user)
                elif "cross_entropy" not in op_name(user) and user.op != "output":
                    raise self._refused(user, f"uses {name!r}, whose padding is {value} since it is a target elsewhere")

    def _refused(self, node: Node, why: str) -> ValueError:
        where = ", ".join(part for part in (node.meta.get("module"), node.meta.get("line")) if part)
        what = op_name(node) if node.op == "call_function" else node.meta["source"].name
        return ValueError(
            "pad_to_multiple_of is for models in which no position sees a later one and losses ignore the padding, but "
            f"{node.name} ({what}{f', {where}' if where else ''}) {why}; pad and mask inside of the model, or choose a "
            "length that the devices divide"
        )


def _longer_dims(kind: TensorType, other: TensorType) -> frozenset[int]:
    return frozenset(dim for dim, (a, b) in enumerate(zip(kind.shape, other.shape)) if a != b)


def _same_arguments(node: Node, other: Node) -> bool:
    """True if all arguments but sizes are equal. They are compared as text: both graphs have the same node names."""
    sized = op_name(node) in _SIZE_OPS
    given = [
        {name: str(argument(x, name)) for name in parameters(x) if not (sized and name in _SIZE_ARGUMENTS)}
        for x in (node, other)
    ]
    return given[0] == given[1]


def _rule_cuts_tails(node: Node, operands: list[frozenset[int]], outputs: Tails) -> bool:
    """True if the op's rule cuts all tails, and nothing else, into independent blocks."""
    cut: list[set[int]] = [set() for _ in (*operands, *outputs)]
    for choice in rule_for(node).axis_choices(node):
        values = [value for value, _ in (*choice.inputs, *choice.outputs)]
        dims = [value.dim if value.is_shard else None for value in values]
        apart = not choice.internal and choice.reads is None and not any(value.is_partial for value in values)
        if apart and all(dim is None or dim in tail for dim, tail in zip(dims, (*operands, *outputs))):
            for cut_dims, dim in zip(cut, dims):
                cut_dims |= set() if dim is None else {dim}
    return cut == [set(tail) for tail in (*operands, *outputs)]
