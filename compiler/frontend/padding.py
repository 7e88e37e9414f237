"""Sequences that are longer than the caller's, so that devices can share them evenly, where the model does not notice.

``capture_padded`` captures the model twice, on inputs as they come and on longer ones, and walks both graphs in step
(``_Walk``). A dim that is longer in the second graph has a *tail*. What holds for every tensor that passes: its first
entries along a tail are what they are without one, whatever the tail has. An op passes if

* it follows from sizes alone (positions, masks): then it is computed, and its first entries compared;
* no operand has a tail, and its own comes from ``expand``;
* its rule may cut the operands, along their tails, into blocks that need nothing of each other (no message, no addend):
  then each entry of the output follows from one place of the operands;
* it is attention whose queries see no keys of the tail: causal, or with such a mask, if that follows from sizes;
* it is a slice, a single entry or a margin, at the same place of both;
* it is a class loss whose targets in the tail are its ``ignore_index``: its sum and its count do not change.

Tails of targets are filled with that index, all others with the last entry of the input once more, so that no value is
in them that the model could not meet. Gradients of ignored rows are zero, so no weight sees the tail either.
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

_SIZE_OPS = frozenset(
    f"aten.{name}.default" for name in ("expand", "broadcast_to", "view", "_unsafe_view", "reshape")
)  # ops of which this argument may differ, which only says how large the output is:
_SIZE_ARGUMENTS = frozenset(("size", "shape"))
_VALUE_PRESERVING_OPS = frozenset(
    (
        *(f"aten.{name}.default" for name in ("alias", "clone", "constant_pad_nd", "contiguous", "detach", "pad")),
        *("aten._to_copy.default", "aten.reshape.default", "aten.slice.Tensor", "aten.squeeze.dim"),
        *("aten.to.dtype", "aten.unsqueeze.default", "aten.view.default"),
    )
)  # what leaves values as they are
_BATCH = 2  # that are walked: more than one, so that the batch is told from what is broadcast
Tails = tuple[frozenset[int], ...]  # of every tensor of an op: the dims that are longer


@dataclass(frozen=True)
class Padding:
    """length: of sequences as they come (None: nothing is padded); padded: with tails; inputs: name → (its dim with
    the sequence, what fills the tail; None: its last entry); outputs: result name → (dim, extent without a tail)."""

    length: int | None = None
    padded: int = 0
    inputs: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def fill(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs (source name → leaf) with tails. ValueError for another length."""
        return {name: self._filled(name, x) if name in self.inputs else x for name, x in inputs.items()}

    def _filled(self, name: str, x: Any) -> Any:
        dim, value = self.inputs[name]
        if not isinstance(x, torch.Tensor) or x.ndim <= dim:
            return x  # whoever checks types says so
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
    """ValueError unless it is a positive number, or None."""
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
    """The graph of ``model``, with sequences padded to the next ``multiple`` (None: as they are), and what fills them.

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
    found = {name: 0 if batch == 1 else 1 for name, batch in batch_dims_of(inputs, batch_dims).items()}
    lengths = {
        name: inputs[name].shape[dim]
        for name, dim in found.items()
        if isinstance(inputs[name], torch.Tensor) and inputs[name].ndim > 1
    }
    length = next(iter(lengths.values()), None)
    return {name: found[name] for name, extent in lengths.items() if extent == length}, length


def _lengthen(x: torch.Tensor, dim: int, padded: int, value: int | None = None) -> torch.Tensor:
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    tail = last.repeat_interleave(padded - x.shape[dim], dim)
    return torch.cat([x, tail if value is None else torch.full_like(tail, value)], dim)


class _Constants:
    """The nodes of a graph that follow from sizes alone."""

    def __init__(self, graph: Graph) -> None:
        self.names: set[str] = set()
        for node in graph.ops():
            if all(operand.name in self.names for operand in node.all_input_nodes) and _is_deterministic(node):
                self.names.add(node.name)
        self._graph = graph
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The value of one of ``names``."""
        if name not in self._found:
            node = self._graph.node(name)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: self[operand.name])
            self._found[name] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._found[name]


def _is_deterministic(node: Node) -> bool:
    """Whether an op is PyTorch's own and gives the same each time."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return op_name(node) == "getitem"


class _Walk:
    """Both graphs, op by op; ``values``: what tails of inputs have to be."""

    def __init__(self, short: Graph, graph: Graph) -> None:
        self.short, self.graph = short, graph
        self.constants, self.short_constants = _Constants(graph), _Constants(short)
        self.tails: dict[str, Tails] = {}
        self.values: dict[str, int] = {}

    def run(self) -> None:
        """ValueError for the first op that does not pass."""
        ours, others = list(self.graph), list(self.short)
        for node, other in zip(ours, others):
            if (node.op, node.name, node.target) != (other.op, other.name, other.target):
                raise self._refused(node, "is not what the model computes on shorter sequences")
            self.tails[node.name] = self._found(node, other)
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
        """Result name → (dim, extent) of what is to be cut."""
        found = {}
        for result in self.graph.results:
            if result.kind == "output":
                (kind,) = types_of(self.short.node(result.node))
                found[result.name] = tuple((dim, kind.shape[dim]) for dim in sorted(self.tails[result.node][0]))
        return found

    def _found(self, node: Node, other: Node) -> Tails:
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
            passes = self._picked(node, other, operands[0])
        elif name in ("aten.constant_pad_nd.default", "aten.pad.default"):
            passes = self._margin(node, other, operands[0])
        elif not _same_arguments(node, other):
            passes = False
        elif not any(operands):
            passes = not any(outputs) or name in _SIZE_OPS
        elif name == "aten.scaled_dot_product_attention.default" and operands[1]:
            passes = self._attention(node, operands)
        elif "cross_entropy" in name and not any(outputs):
            passes = self._loss(node, operands)
        else:
            passes = _rule_cuts_tails(node, operands, outputs)
        if not passes:
            raise self._refused(node, "does not leave what comes before the end of a sequence as it is")

    def _constant_operands(self, node: Node) -> None:
        """ValueError for one that begins otherwise than on shorter sequences, and for positions that no table has."""
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
        """Whether a tensor that follows from sizes begins as it is without a tail."""
        value, other = self.constants[constant.name], self.short_constants[constant.name]
        return torch.equal(value[tuple(slice(0, extent) for extent in other.shape)], other)

    def _picked(self, node: Node, other: Node, tail: frozenset[int]) -> bool:
        """From the same place on, or the same place, counted from the beginning."""
        dim = argument(node, "dim") % len(tensor_operands(node)[0].meta["type"].shape)
        where = ("index",) if op_name(node) == "aten.select.int" else ("start", "step")
        alike = all(argument(node, one) == argument(other, one) for one in where)
        place = argument(node, where[0])
        shifted = frozenset(d - (d > dim) for d in tail - {dim}) if where == ("index",) else tail
        kept = self.tails[node.name][0]
        if dim in tail:
            return alike and (place is None or place >= 0) and kept <= shifted
        return alike and (kept == shifted or kept == shifted | {dim})

    def _margin(self, node: Node, other: Node, tail: frozenset[int]) -> bool:
        """At the end only of an input whose tail has the margin's value."""
        pad, value = list(argument(node, "pad")), argument(node, "value") or 0
        after = dict(enumerate(pad[1::2]))  # from the last dim on
        rank = len(types_of(node)[0].shape)
        if "mode" in parameters(node) and argument(node, "mode") != "constant":
            return False
        if not _same_arguments(node, other) or min(pad) < 0 or self.tails[node.name][0] != tail:
            return False
        lengthened = any(after.get(rank - 1 - dim) for dim in tail)
        return not lengthened or self._ask(tensor_operands(node)[0], value)

    def _attention(self, node: Node, operands: list[frozenset[int]]) -> bool:
        """Queries before the end see no keys of the tail: of one length and causal, or by the mask."""
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
        heads = [types_of(self.short.node(one.name))[0].shape[-2] for one in (q, k)]
        return not seen[..., : heads[0], heads[1] :].any() and bool(seen.any(-1).all())

    def _loss(self, node: Node, operands: list[frozenset[int]]) -> bool:
        """Rows of the tail are ignored."""
        _, target, *weight = tensor_operands(node)
        rows = len(target.meta["type"].shape)
        last = op_name(node) == "meshwright.cross_entropy"  # where the classes are: else in dim 1
        moved = frozenset(d if last or d == 0 else d + 1 for d in operands[1])
        if weight or target.meta["type"].is_float or operands[0] != moved or any(d >= rows for d in operands[1]):
            return False
        return self._ask(target, argument(node, "ignore_index"))

    def _ask(self, node: Node, value: float) -> bool:
        """Whether the tail of a tensor may have this value: if it is an input, whatever it was reshaped to since."""
        while node.op == "call_function" and op_name(node) in _VALUE_PRESERVING_OPS:
            node = tensor_operands(node)[0]
        if node.op != "placeholder" or int(value) != value:
            return False
        return self.values.setdefault(node.meta["source"].name, int(value)) == value

    def _only_targets(self, name: str, value: int) -> None:
        """An input that is filled with what no index may be goes into losses alone."""
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
    """Whether all arguments are equal but for sizes. As text: nodes have the same names in both graphs."""
    sized = op_name(node) in _SIZE_OPS
    given = [
        {name: str(argument(one, name)) for name in parameters(one) if not (sized and name in _SIZE_ARGUMENTS)}
        for one in (node, other)
    ]
    return given[0] == given[1]


def _rule_cuts_tails(node: Node, operands: list[frozenset[int]], outputs: Tails) -> bool:
    """Whether the op's rule cuts all tails, and nothing else, into blocks that need nothing of each other."""
    cut: list[set[int]] = [set() for _ in (*operands, *outputs)]
    for choice in rule_for(node).axis_choices(node):
        values = [value for value, _ in (*choice.inputs, *choice.outputs)]
        dims = [value.dim if value.is_shard else None for value in values]
        apart = not choice.internal and choice.reads is None and not any(value.is_partial for value in values)
        if apart and all(dim is None or dim in tail for dim, tail in zip(dims, (*operands, *outputs))):
            for found, dim in zip(cut, dims):
                found |= set() if dim is None else {dim}
    return cut == [set(tail) for tail in (*operands, *outputs)]
