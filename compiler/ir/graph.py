"""The graph IR: a functional ATen graph on torch.fx, with light types instead of tensors.

Grammar::

    graph  ::= node* results
    node   ::= placeholder[meta.source]            an input, a parameter, a buffer or a constant
             | call_function(target, args)         a functional op: an ``aten`` overload or a function of ``local_ops``
             | call_function(getitem, (node, i))   one of several outputs
    result ::= (kind, name, node)                  kind: "loss" | "output" | "buffer" (its value after the microbatch)

Every node has ``meta["type"]``: a TensorType, or a tuple of them for a multi-output op. Op nodes have
``meta["module"]`` (the dotted path of the module that made them, "" if none) and ``meta["line"]`` ("file.py:12", "" if
unknown). Placeholders have ``meta["source"]``. Nothing is mutated by any op, and no node holds a real tensor: constants
live in ``Graph.constants``.

The batch extent is a symbol in disguise: the graph is captured at an improbable extent (``CAPTURE_BATCH``), so every
int that is a multiple of it scales with the batch; ``with_batch`` instantiates any other extent.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from .custom_function import CustomFunction

__all__ = [
    "CAPTURE_BATCH",
    "Graph",
    "Result",
    "Source",
    "TensorType",
    "copy_at",
    "op_name",
    "output_of",
    "tensor_operands",
    "types_of",
]

PRIME = 1009
CAPTURE_BATCH = PRIME * 8  # the factor 8 lets extents such as batch/2 and batch*tokens/1024 stay whole


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def is_float(self) -> bool:
        """True if gradients can flow through a tensor of this type, complex numbers included."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a placeholder's tensor.

    kind: "input" (name: "args.0", "kwargs.labels", "targets.0", with keys appended for nested containers), "parameter"
    or "buffer" (name: the first qualified name in the model, aliases: the other names of the same tensor), or
    "constant" (a tensor that the model's code made; its value is in ``Graph.constants``). batch_dim: the batch dim
    of an input, None if it has none.
    """

    kind: str
    name: str
    aliases: tuple[str, ...] = ()
    batch_dim: int | None = None
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the graph: kind "loss", "output" (name: its index among the flat outputs) or "buffer" (name: the
    buffer's)."""

    kind: str
    name: str
    node: str


_KEPT = 4  # batch extents at which a graph is kept


@dataclass
class Graph:
    """A captured model at one batch extent."""

    fx: torch.fx.Graph
    results: tuple[Result, ...]
    #: the batch extent in types and arguments
    batch: int
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    #: ``torch.utils._pytree.TreeSpec`` of the model's outputs, if there are "output" results
    output_spec: Any = None
    training: bool = True
    #: the graph at the capture extent, for one made by ``with_batch``
    origin: Graph | None = None
    #: the precision of the computation; "model": the dtypes that the model itself has
    precision: str = "model"
    #: the fingerprint of the captured graph, if this one is in another precision
    captured: str = ""
    #: what the capture left out of the model's code, in words
    notes: tuple[str, ...] = ()
    _names: dict[str, Node] | None = field(default=None, init=False, repr=False)
    _ops: list[Node] | None = field(default=None, init=False, repr=False)
    _placeholders: dict[tuple[str, ...], list[Node]] = field(default_factory=dict, init=False, repr=False)
    _at_batches: dict[int, Graph] = field(default_factory=dict, init=False, repr=False)
    _layerings: dict[tuple[int, bool], Any] = field(default_factory=dict, init=False, repr=False)  # see ``layers``
    _differentiable: frozenset[str] | None = field(
        default=None, init=False, repr=False
    )  # see ``layers.differentiable``

    # ---- reading

    def __iter__(self) -> Iterator[Node]:
        """Placeholders and ops in topological order (without the output node)."""
        return (node for node in self.fx.nodes if node.op != "output")

    def node(self, name: str) -> Node:
        """The node of that name; KeyError if there is none."""
        return self.by_name()[name]

    def by_name(self) -> dict[str, Node]:
        """All nodes by name. Found once: a graph does not change after capture."""
        if self._names is None:
            self._names = {node.name: node for node in self}
        return self._names

    def placeholders(self, *kinds: str) -> list[Node]:
        """Placeholders of these source kinds (all, without arguments), in order. Found once."""
        if kinds not in self._placeholders:
            found = self.fx.find_nodes(op="placeholder")
            self._placeholders[kinds] = [n for n in found if not kinds or n.meta["source"].kind in kinds]
        return list(self._placeholders[kinds])

    def ops(self) -> list[Node]:
        """Every call_function node, in order. Found once."""
        if self._ops is None:
            self._ops = [node for node in self if node.op == "call_function"]
        return list(self._ops)

    @property
    def mixed(self) -> bool:
        """True if it is computed in 16 bits with fp32 master weights and sums of gradients (``mixed_precision``)."""
        return self.precision != "model"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # ---- the batch extent

    def with_batch(self, batch: int) -> Graph:
        """The same graph at another batch extent: every int that scales with the batch, in types and arguments, is
        rescaled. The last few are kept."""
        if batch == self.batch:
            return self
        if self.origin is not None:
            return self.origin.with_batch(batch)
        made = self._at_batches.pop(batch, None) or self._at_batch(batch)
        self._at_batches[batch] = made
        if len(self._at_batches) > _KEPT:
            del self._at_batches[next(iter(self._at_batches))]
        return made

    def _at_batch(self, batch: int) -> Graph:
        copy = torch.fx.Graph()
        env: dict[Node, Node] = {}
        for node in self.fx.nodes:
            if node.op == "output":
                copy.output(torch.fx.map_arg(node.args[0], lambda n: env[n]))
            else:
                env[node] = copy_at(copy, node, env, self.batch, batch)
        return Graph(
            copy, self.results, batch, self.constants, self.output_spec, self.training,
            origin=self, precision=self.precision, captured=self.captured, notes=self.notes,
        )  # fmt: skip

    # ---- identity

    def text(self) -> str:
        """One line per node: ``name: type = op(args)``; equal graphs have equal text."""
        lines = []
        for node in self:
            kind = " ".join(map(str, types_of(node)))
            if node.op == "placeholder":
                source = node.meta["source"]
                lines.append(f"{node.name}: {kind} = {source.kind} {source.name!r}")
            else:
                kwargs = "".join(f", {k}={v}" for k, v in node.kwargs.items())
                lines.append(f"{node.name}: {kind} = {op_name(node)}({', '.join(map(str, node.args))}{kwargs})")
        lines += [f"{r.kind} {r.name} <- {r.node}" for r in self.results]
        return "\n".join(lines)

    __str__ = text

    def fingerprint(self) -> str:
        """16 hex digits over the text at the capture extent: equal for equal models, whatever the batch, the weights
        and the precision."""
        return self.captured or hashlib.sha256((self.origin or self).text().encode()).hexdigest()[:16]

    # ---- invariants

    def check(self) -> None:
        """Assert the invariants on which every pass relies."""
        seen: set[str] = set()
        for node in self:
            assert node.op in ("placeholder", "call_function"), f"{node.name}: {node.op}"
            assert node.name not in seen, f"two nodes are named {node.name}"
            for arg in node.all_input_nodes:
                assert arg.name in seen, f"{node.name} uses {arg.name} before it is made"
            assert all(isinstance(t, TensorType) for t in types_of(node)), f"{node.name} has no type"
            if node.op == "placeholder":
                assert isinstance(node.meta.get("source"), Source), f"{node.name} has no source"
            if node.target is operator.getitem:
                producer, index = node.args
                assert isinstance(producer, Node), node.name
                assert isinstance(index, int), node.name
                assert types_of(producer)[index] == node.meta["type"], f"{node.name} disagrees with {producer.name}"
            seen.add(node.name)
        for result in self.results:
            assert result.node in seen, f"result {result.name} has no node {result.node}"


def copy_at(copy: torch.fx.Graph, node: Node, env: Mapping[Node, Node] | None, old: int, new: int) -> Node:
    """``node``, of a graph at batch ``old``, in ``copy`` at batch ``new``. env: where its operands are there; None
    makes a placeholder of its name and type instead."""

    def scaled(value: Any) -> Any:
        kind = type(value)
        if kind is Node:
            return operands[value]
        if kind is int:
            return rescale(value, old, new) if value % PRIME == 0 else value
        if isinstance(value, list | tuple):
            return [scaled(item) for item in value]
        return rescale(value, old, new) if kind is float else value

    if env is None:
        new_node = copy.placeholder(node.name)
    else:
        operands = env
        # fx walks through arguments that are passed here, so they are set afterwards
        new_node = copy.create_node(node.op, node.target, name=node.name)
        new_node.args = tuple([scaled(value) for value in node.args])
        if node.kwargs:
            new_node.kwargs = {key: scaled(value) for key, value in node.kwargs.items()}
    if new_node.name != node.name:
        new_node.name = node.name
    new_node.meta = dict(node.meta)
    kind = node.meta["type"]
    several = isinstance(kind, tuple)
    new_node.meta["type"] = (
        tuple([_rescale_type(t, old, new) for t in kind]) if several else _rescale_type(kind, old, new)
    )
    return new_node


@lru_cache(maxsize=1 << 16)
def _rescale_type(kind: TensorType, old: int, new: int) -> TensorType:
    shape = tuple([rescale(extent, old, new) for extent in kind.shape])
    return kind if shape == kind.shape else TensorType(shape, kind.dtype)


def rescale(value: Any, old: int, new: int) -> Any:
    """An int (or float, or its reciprocal) that is a multiple of the capture prime, taken from batch ``old`` to
    ``new``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, int):
        if value == 0 or value % PRIME or abs(value) >= 1 << 62:
            return value
        scaled, rest = divmod(value * new, old)
        if rest:
            raise ValueError(
                f"the model needs a batch that makes {value}/{old} of it whole, but got batch {new}; use a multiple"
            )
        return scaled
    for number, invert in ((value, False), (1 / value if value else 0.0, True)):
        nearest = round(number) if abs(number) < 1 << 62 else 0
        if nearest and nearest % PRIME == 0 and abs(number - nearest) <= 1e-9 * abs(nearest):
            return 1 / (nearest * new / old) if invert else nearest * new / old
    return value


def types_of(node: Node) -> tuple[TensorType, ...]:
    """The node's output types, always as a tuple."""
    kind = node.meta["type"]
    return kind if isinstance(kind, tuple) else (kind,)


def op_name(node: Node) -> str:
    """``"aten.linear.default"``, ``"meshwright.cross_entropy"`` or ``"getitem"``: the key under which rules are
    found."""
    return _target_name(node.target)


@cache
def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, CustomFunction):
        return target.op_name
    return f"meshwright.{target.__name__}" if callable(target) else str(target)


def output_of(node: Node) -> tuple[Node, int]:
    """(the op that makes this tensor, the index among its outputs); a node that is no getitem is its own first."""
    if node.op == "call_function" and node.target is operator.getitem:
        producer, index = node.args
        assert isinstance(producer, Node)
        assert isinstance(index, int)
        return producer, index
    return node, 0


def tensor_operands(node: Node) -> list[Node]:
    """The nodes among args and kwargs in order of appearance, repeats kept (``mul(x, x)`` has two operands)."""
    operands: list[Node] = []
    _gather_operands((*node.args, *node.kwargs.values()), operands)
    return operands


def _gather_operands(values: Iterable[Any], operands: list[Node]) -> None:
    for value in values:
        if isinstance(value, Node):
            operands.append(value)
        elif isinstance(value, list | tuple):
            _gather_operands(value, operands)
