"""``Outputs``: what a model that trains by a plan gives for inputs, captured and lowered for each kind of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

from .compiler.evaluation import plan_evaluation
from .compiler.example import batch_dims_of, flat_inputs
from .compiler.graph import Graph, Source
from .compiler.lower import lower
from .compiler.padding import Padding, capture_padded
from .compiler.plan import Plan
from .compiler.precision import in_precision
from .compiler.program import ChunkProgram
from .compiler.spec import Pair
from .costmodel.cluster import Cluster
from .runtime.agreement import alike
from .runtime.stage import Session

__all__ = ["Outputs"]

_Bound = dict[int, tuple[Plan, list[ChunkProgram]]]  # batch → plan, and this rank's programs


class Outputs:
    """Of ``model``, whose weights are those of ``session``. graph: of the training; batch_dims: of its inputs;
    pad_to_multiple_of: as in ``parallelize``. Called by all ranks alike."""

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        graph: Graph,
        batch_dims: Mapping[str, int | None],
        pad_to_multiple_of: int | None,
    ) -> None:
        self._model, self._session, self._graph = model, session, graph
        self._batch_dims, self._multiple = batch_dims, pad_to_multiple_of
        self._captured: dict[Any, tuple[Graph, Padding, _Bound]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        """The model's whole output on every rank, for a batch of any size; ``training``: in that mode."""
        flat = flat_inputs(args, kwargs, ())
        graph, padding, plan, programs = self._bound(args, kwargs, flat, training)
        outputs = self._session.forward(padding.fill(flat), plan, programs)
        nodes = graph.by_name()
        leaves: list[Any] = [None] * graph.output_spec.num_leaves
        for result in graph.results:
            if result.kind == "output":
                source = nodes[result.node].meta.get("source")
                found = outputs.get(result.name)
                if source is not None:
                    found = self._given(source, flat, graph)
                elif found is not None:
                    found = padding.cut(result.name, found)
                leaves[int(result.name)] = found
        return pytree.tree_unflatten(leaves, graph.output_spec)

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Mapping[str, Any], training: bool
    ) -> tuple[Graph, Padding, Plan, list[ChunkProgram]]:
        """The graph for inputs like these, with a plan at their batch; made once."""
        given = {name: dim for name, dim in self._batch_dims.items() if isinstance(flat.get(name), torch.Tensor)}
        dims, of = batch_dims_of(flat, given), self._session.plan
        key = (training, *((name, _kind(x, dims[name])) for name, x in flat.items()))
        if key not in self._captured:
            with alike():
                captured, padding = capture_padded(
                    self._model, args, kwargs, (), given, self._multiple, training=training, outputs=True
                )
                self._captured[key] = in_precision(captured, of.precision), padding, {}
        graph, padding, bound = self._captured[key]
        batch = next((int(flat[name].shape[dim]) for name, dim in dims.items() if dim is not None), 1)
        if batch not in bound:
            with alike():
                small, cluster = graph.with_batch(batch), Cluster.from_json(json.dumps(of.cluster))
                evaluated = plan_evaluation(small, of, cluster, self._buffers())
                stage = evaluated.stage_of(dist.get_rank())
                bound[batch] = (evaluated, [] if stage is None else [lower(small, evaluated, stage)])
        return (graph, padding, *bound[batch])

    def _given(self, source: Source, flat: Mapping[str, Any], graph: Graph) -> Any:
        """An output that the model only passes on."""
        if source.kind == "input":
            return flat[source.name]
        state = self._session.state
        return graph.constants[source.name].clone() if source.kind == "constant" else state.whole(source.name)

    def _buffers(self) -> dict[str, dict[int, Pair]]:
        """Buffer → stage → how it lies there."""
        out: dict[str, dict[int, Pair]] = {}
        for node in self._graph.placeholders("buffer"):
            for index, stage in enumerate(self._session.plan.stages):
                for chunk in stage.chunks:
                    if node.name in chunk.sources:
                        out.setdefault(node.meta["source"].name, {})[index] = chunk.sources[node.name]
        return out


def _kind(leaf: Any, batch_dim: int | None) -> tuple[Any, ...]:
    """What a capture depends on: a tensor's dtype and extents but for the batch, any other value itself."""
    if not isinstance(leaf, torch.Tensor):
        return (repr(leaf),)
    return leaf.dtype, *(None if dim == batch_dim else extent for dim, extent in enumerate(leaf.shape))
