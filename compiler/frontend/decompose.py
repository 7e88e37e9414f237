"""Functionalization of an exported program: it removes in-place ops and ops that may return their argument.

``run_decompositions({})`` does so by tracing the whole program again, which takes as long as the export. If no op works
in place, only a few must be replaced (``reshape``, ``to``, ``chunk``: their result may be their argument), and each of
them can be traced by itself. The program is then the same as after tracing everything.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["decompose_program"]

DROPOUT = torch.ops.aten.dropout.default


def decompose_program(program: Any) -> Any:
    """The ``ExportedProgram`` that ``program.run_decompositions({})`` gives; where less is to be done, ``program``
    itself, changed in place."""
    graph = program.graph
    replaced = [node for node in _ops(graph) if not _is_final(node)]
    results = set(graph.output_node().all_input_nodes)  # the signature has their names
    if any(not _traces_alone(node) or node in results for node in replaced):
        return program.run_decompositions({})
    pieces = [_trace_pieces(node) for node in replaced]
    if not all(_is_final(inside) for traced in pieces for inside in _ops(traced)):
        return program.run_decompositions({})
    for node, traced in zip(replaced, pieces):
        _insert_pieces(graph, traced, node)
    return program


def _ops(graph: torch.fx.Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op not in ("placeholder", "output"))


def _is_final(node: Node) -> bool:
    """True if decomposition leaves the op as it is: composite ops stay whole unless they may return their argument or
    a view of it."""
    op = node.target
    if op is operator.getitem:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or op.name().startswith("aten::lift"):
        return False
    return torch.Tag.maybe_aliasing_or_mutating not in op.tags and not (_may_return_view(op) and _is_composite(op))


def _traces_alone(node: Node) -> bool:
    """True if tracing the op by itself gives the same nodes as tracing the whole program."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    return op is DROPOUT or (_may_return_view(op) and _is_composite(op))


def _may_return_view(op: torch._ops.OpOverload) -> bool:
    """True if the op may return a view of an argument."""
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def _is_composite(op: torch._ops.OpOverload) -> bool:
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _trace_pieces(node: Node) -> torch.fx.Graph:
    """The decomposition of the op, as a graph with a placeholder for each of its operands."""
    operands = node.all_input_nodes
    op: Any = _dropout if node.target is DROPOUT else node.target

    def run(*values: torch.Tensor) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), dict(zip(operands, values)).__getitem__)
        return op(*args, **kwargs)

    return make_fx(run)(*(operand.meta["val"] for operand in operands)).graph


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as one op: on CPUs it would be several, of which some work in place."""
    return torch.ops.aten.native_dropout.default(x, p, train)[0] if train and p else x


def _insert_pieces(graph: torch.fx.Graph, traced: torch.fx.Graph, node: Node) -> None:
    """Replace the node by the nodes of ``_trace_pieces``."""
    given = iter(node.all_input_nodes)
    env: dict[Node, Any] = {}
    with graph.inserting_before(node):
        for inside in traced.nodes:
            if inside.op == "placeholder":
                env[inside] = next(given)
            elif inside.op != "output":
                env[inside] = new = graph.node_copy(inside, env.__getitem__)
                new.meta = {**node.meta, "val": inside.meta["val"]}
    outputs: Any = traced.output_node().args[0]
    if isinstance(outputs, Node):
        node.replace_all_uses_with(env[outputs])
    else:
        items: list[tuple[Node, Any]] = [(user, user.args[1]) for user in node.users]
        for item, index in items:
            item.replace_all_uses_with(env[outputs[index]])
            graph.erase_node(item)
    graph.erase_node(node)
