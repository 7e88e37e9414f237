"""Mixed precision: the graph of a model as it is computed in a 16-bit type.

    tensors    parameters, buffers, activations and inputs of float32 become of the 16-bit type, and casts to float32
               with them; integers, float64 and scalars (the loss, the rate of a decay) stay as they are
    gradients  are of their parameters' type, so they are summed in 16 bits
    optimizer  fp32 master weights and states: 2 + 2 + 4 + states bytes per element (``costmodel.memory``)

Everything else follows from the types of the graph: rates of matmuls and attention, bytes that ops and messages move,
bytes that are kept. A model that computes in 16 bits already (no parameter is of float32) is left as it is. The graph
keeps the fingerprint of the model that was captured, so a plan says which model it is for, and in ``Plan.precision``
how it is computed. Left out: ops that automatic mixed precision keeps in float32 (the inside of norms, softmax and
losses, which read and write 16 bits here), and the scaling of the loss for fp16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from .graph import Graph, TensorType
from .plan import Plan

__all__ = ["PRECISIONS", "check_precision", "in_precision", "precision_notes"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(asked: str, executable: bool = False) -> tuple[str, ...]:
    """The precisions to plan for: one, or "model" and "bf16" for "auto". Raises ValueError for what is unknown, and
    for all but "model" where plans are to be ``executable``."""
    known = ("model", *PRECISIONS, "auto")
    if asked not in known:
        raise ValueError(f"precision is one of {', '.join(known)}, but got {asked!r}; use one of these")
    if executable and asked != "model":
        raise ValueError(f"precision is model where plans are to be executable, but got {asked!r}; leave it out")
    return ("model", "bf16") if asked == "auto" else (asked,)


def in_precision(graph: Graph, precision: str) -> Graph:
    """The graph as it is computed in this precision, at the same batch extent; ``graph`` itself for "model" and for a
    model without parameters of float32. Raises ValueError for a precision that is unknown or that another one
    precedes."""
    if precision == graph.precision:
        return graph
    if precision not in PRECISIONS or graph.precision != "model":
        raise ValueError(
            f"a graph of the model's own precision is computed in model, {' or '.join(PRECISIONS)}, but got "
            f"{precision!r} for one in {graph.precision}; capture the model again"
        )
    if graph.origin is not None:
        return in_precision(graph.origin, precision).with_batch(graph.batch)
    if not any(node.meta["type"].dtype == torch.float32 for node in graph.placeholders("parameter")):
        return graph
    return _converted(graph, precision)


def _converted(graph: Graph, precision: str) -> Graph:
    dtype = PRECISIONS[precision]
    copy, env = torch.fx.Graph(), dict[Node, Node]()
    for node in graph.fx.nodes:
        made = env[node] = copy.node_copy(node, lambda operand: env[operand])
        if made.name != node.name:
            made.name = node.name
        if node.op == "output":
            continue
        kind = node.meta["type"]
        several = isinstance(kind, tuple)
        made.meta["type"] = tuple(_typed(one, dtype) for one in kind) if several else _typed(kind, dtype)
        if made.meta["type"] != kind:  # a cast says which type it makes
            made.args, made.kwargs = _cast(made.args, dtype), _cast(made.kwargs, dtype)
    constants = {name: _value(value, dtype) for name, value in graph.constants.items()}
    return Graph(
        copy, graph.results, graph.batch, constants, graph.output_spec, graph.training,
        precision=precision, captured=graph.fingerprint(),
    )  # fmt: skip


def _typed(kind: TensorType, dtype: torch.dtype) -> TensorType:
    return TensorType(kind.shape, dtype) if kind.dtype == torch.float32 and kind.shape else kind


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    return map_aggregate(arguments, lambda value: dtype if value is torch.float32 else value)


def _value(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.dtype == torch.float32 and value.dim() else value


def precision_notes(plan: Plan) -> list[str]:
    """A line for a plan that is not computed in the model's own types."""
    if plan.precision == "model":
        return []
    return [
        f"computed in {plan.precision} with fp32 master weights and optimizer states: numerics differ from the model's "
        "own types"
    ]
