"""Tools for passes over a captured graph: find ops, read their arguments, and put others in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from ..ir.graph import Graph, TensorType, types_of

__all__ = ["Insertion", "arguments_of", "find_nodes", "outputs_of", "replace_node"]


class Insertion:
    """A factory of ops in front of ``node``, which get its module and line; a call returns the new node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.fx, self.node = graph.fx, node

    def __call__(self, target: Callable[..., Any], /, *args: Any, type: Any = None, **kwargs: Any) -> Node:
        """Insert a call; its type is inferred, if none is given."""
        with self.fx.inserting_before(self.node):
            new = self.fx.call_function(target, args, kwargs)
        new.meta = {
            "type": type or _infer_type(target, args, kwargs),
            "module": self.node.meta["module"],
            "line": self.node.meta["line"],
            **({"stage": self.node.meta["stage"]} if "stage" in self.node.meta else {}),
        }
        return new

    def items(self, producer: Node) -> list[Node]:
        """One getitem per output of ``producer``."""
        return [self(operator.getitem, producer, i, type=t) for i, t in enumerate(types_of(producer))]


def _infer_type(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorType:
    def meta(node: Node) -> torch.Tensor:
        kind = node.meta["type"]
        return torch.empty(kind.shape, dtype=kind.dtype, device="meta")

    args, kwargs = torch.fx.map_arg((args, kwargs), meta)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    out = target(*args, **kwargs)
    return TensorType(tuple(out.shape), out.dtype)


def replace_node(graph: Graph, old: Node, new: Node) -> None:
    """Let the users of ``old`` read ``new``, which is cut as ``old`` was to be, and erase it."""
    if "split" in old.meta:
        new.meta["split"] = (*new.meta.get("split", ()), *old.meta["split"])
    old.replace_all_uses_with(new)
    graph.fx.erase_node(old)


def find_nodes(graph: Graph, *targets: Any) -> list[Node]:
    """The calls of these targets, in order."""
    return [node for node in graph.fx.nodes if node.op == "call_function" and node.target in targets]


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an aten op by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(schema, node.args)} | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def outputs_of(node: Node) -> dict[int, Node]:
    """The getitems of a multi-output op by index."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]
