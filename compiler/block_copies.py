"""The nodes of a traced block in an exported program, to be copied for the blocks that equal it (see ``blocks``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from .blocks import BLOCK, Record, UnsoundError

__all__ = ["Template", "live_nodes", "template_of"]


@dataclass
class Template:
    """One traced block. nodes: what its results need, in program order. tensors: its parameters and buffers, by
    placeholder, as paths below the block; updates: path of a buffer below the block → the node with its new value."""

    record: Record
    block: Node
    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    tensors: dict[Node, str]
    updates: dict[str, Node]
    _needed: dict[frozenset[int], list[Node]] = field(default_factory=dict)

    def needed(self, used: Collection[int]) -> list[Node]:
        """The nodes that these outputs and the new buffers need, in program order."""
        key = frozenset(used)
        if key not in self._needed:
            stop = {*self.inputs, *self.tensors}
            roots = [*(self.outputs[i] for i in key), *self.updates.values()]
            found = set(_slice(roots, stop))
            self._needed[key] = [node for node in self.nodes if node in found]
        return self._needed[key]


def template_of(
    block: Node, record: Record, names: Mapping[Node, Collection[str]], updates: Mapping[str, Node], order: list[Node]
) -> Template:
    """The block that ends at ``block``. names: all names of the tensor of each parameter and buffer placeholder;
    updates: buffer name → the node with its new value. UnsoundError if it is not a function of its inputs and its own
    parameters and buffers."""
    inputs: Any = block.args[0]
    outputs: Any = block.args[1]
    path, inside = record.path + ".", _stack(block)
    own = {name.removeprefix(path): node for name, node in updates.items() if name.startswith(path)}
    tensors: dict[Node, str] = {}
    if any(_stack(node)[: len(inside)] == inside for node in inputs if node.op != "placeholder"):
        raise UnsoundError(record.kind, "an input that the block changed")
    found = set(_slice([*outputs, *own.values()], set(inputs)))
    for node in found:
        if node.op == "placeholder":
            below = [name.removeprefix(path) for name in names.get(node, ()) if name.startswith(path)]
            if not below:
                raise UnsoundError(record.kind, f"{node.name} is not the block's own")
            tensors[node] = below[0]
        elif _stack(node)[: len(inside)] != inside or node.target is BLOCK:
            raise UnsoundError(record.kind, f"{node.name} is not made in the block")
    if any(name.startswith(path) for node in inputs for name in names.get(node, ())):
        raise UnsoundError(record.kind, "an input that is the block's own parameter")
    nodes = [node for node in order if node in found and node not in tensors]
    return Template(record, block, nodes, list(inputs), list(outputs), tensors, own)


def live_nodes(results: list[Node]) -> set[Node]:
    """The nodes that these results need; of a traced block's outputs only the used ones."""
    live: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        source: Any = node.args[0] if node.args else None
        if isinstance(source, Node) and source.target is BLOCK and source.args[1]:
            made: Any = source.args[1]
            stack.append(made[node.args[1]])
            live.add(source)
        else:
            stack += node.all_input_nodes
    return live


def _slice(roots: list[Node], stop: Collection[Node]) -> Iterator[Node]:
    """``roots`` and what they need, without the nodes of ``stop``."""
    seen: set[Node] = set(stop)
    stack = [node for node in roots if node not in seen]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += node.all_input_nodes


def _stack(node: Node) -> list[Any]:
    """The modules that the node was made in, outermost first."""
    return list((node.meta.get("nn_module_stack") or {}).items())
