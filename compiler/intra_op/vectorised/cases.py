"""The cases that one search prices at once, and the pieces of the graph that its templates read.

A *case* is a mesh shape, where it starts in the cluster, and a number of microbatches; ``Cases`` are cases with
equally many mesh axes. Everything that a price depends on is an array over them. A set of axes is a bit mask (bit ``a``
is axis ``a``), and

    divisor[v, mask] = product of the sizes in case v of the axes in mask                      [num, 2^axes]

so a tensor of n bytes that the axes of ``mask`` cut takes n / divisor[:, mask] bytes on each device.

Shapes depend on a case through its microbatch's extent alone, ``extents[extent_of[v]]``. What rules say of an op at an
extent is asked of a *sample*: the op's layer with its surroundings, instantiated without the rest of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch.fx
from torch.fx import Node

from ....costmodel.cluster import Cluster
from ...cost.gradient_communication import EXACT, Communication
from ...cost.pricing import MeshPricer
from ...frontend.layers import Layering
from ...ir.graph import Graph, TensorType, copy_at, output_of, rescale
from ...ir.spec import Pair, Placement, R, S, Spec
from ..section import State

#: Where an axis could cut the tensors of a border in more ways than this, beside along their batch, …
MANY_CUTS = 14
#: … these are left, of the largest tensors: states are pairs of them, and no stage should end in the middle of so much.
MOST_CUTS = 4

__all__ = ["Case", "Cases", "Samples", "cut_mask"]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the batch: a logical mesh of consecutive devices from ``offset`` on, and a number of microbatches."""

    mesh_shape: tuple[int, ...]
    offset: int
    microbatches: int


@dataclass(eq=False)
class Samples:
    """Layers of one graph at several batch extents, without the rest of the graph. Cached, as is what templates on
    meshes of any number of axes have in common."""

    graph: Graph
    layering: Layering
    #: Values that follow from the layers, by content.
    cache: dict[Any, Any] = field(default_factory=dict)
    _ops: dict[int, list[Node]] = field(default_factory=dict)
    _around: dict[int, list[Node]] = field(default_factory=dict)
    _at: dict[tuple[int, int], dict[str, Node]] = field(default_factory=dict)

    def at(self, layer: int, batch: int) -> dict[str, Node]:
        """The nodes of ``layer`` (floating ops included), their operands and their users' users by name, at this batch
        extent. Nodes further away are placeholders without a source. ValueError for an extent that does not suit."""
        key = layer, batch
        if key not in self._at:
            self._at[key] = self._instantiate(layer, batch)
        return self._at[key]

    def ops(self, layer: int) -> list[Node]:
        """The ops of a layer with the floating ops that it needs, in the graph at the capture extent. Cached."""
        if layer not in self._ops:
            self._ops[layer] = self.layering.ops_of(self.source, layer, layer + 1)
        return self._ops[layer]

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.source)}

    @property
    def source(self) -> Graph:
        """The graph at the capture extent."""
        return self.graph.origin or self.graph

    def _instantiate(self, layer: int, batch: int) -> dict[str, Node]:
        if layer not in self._around:
            self._around[layer] = sorted(_surroundings(self.ops(layer)), key=lambda node: self._order[node.name])
        copy, env = torch.fx.Graph(), dict[Node, Node]()
        old = self.source.batch
        for node in self._around[layer]:
            for operand in node.all_input_nodes:
                if operand not in env:
                    env[operand] = copy_at(copy, operand, None, old, batch)
            env[node] = copy_at(copy, node, env, old, batch)
        return {node.name: new for node, new in env.items()}


def _surroundings(ops: Sequence[Node]) -> set[Node]:
    """``ops`` with their operands (and what those are taken from), their users and their users' users."""
    nodes = set(ops)
    for node in ops:
        nodes.update(output_of(operand)[0] for operand in node.all_input_nodes)
        nodes.update(node.all_input_nodes)
    for node in list(nodes):  # an operand's users decide what partial gradients may pass through a view of it
        for user in node.users:
            if user.op != "output":
                nodes.add(user)
                nodes.update(after for after in user.users if after.op != "output")
    return nodes


@dataclass(eq=False)
class Cases:
    """Cases of one model on one cluster, all with the same number of mesh axes (0, 1 or 2).

    sizes: int [num, axes] of the mesh; microbatches: int [num]; extents: the distinct batch extents of a microbatch;
    extent_of: int [num], the index of each case's extent. Raises ValueError for cases of unlike meshes, for a batch
    that the microbatches do not divide and for devices that the cluster does not have.
    """

    graph: Graph
    layering: Layering
    cluster: Cluster
    optimizer: str
    global_batch: int
    cases: tuple[Case, ...]
    #: Decides only whether the layer with the loss is recomputed.
    schedule: str = "1f1b"
    #: Samples of the same graph; by default its own.
    samples: Samples = field(default=None)  # type: ignore[assignment]
    #: Prices by content, shared by all templates.
    cache: dict[Any, Any] = field(default_factory=dict)
    communication: Communication = EXACT

    def __post_init__(self) -> None:
        counts = {len(case.mesh_shape) for case in self.cases}
        if len(counts) != 1 or max(counts) > 2:
            raise ValueError(f"cases have one number of mesh axes, 0, 1 or 2, but got {sorted(counts)}; split them")
        for case in self.cases:
            if self.global_batch % case.microbatches:
                raise ValueError(
                    f"microbatches divide the batch of {self.global_batch}, but got {case.microbatches}; use a divisor"
                )
        self.num, self.axes = len(self.cases), counts.pop()
        self.sizes = np.array([case.mesh_shape for case in self.cases], dtype=np.int64).reshape(self.num, self.axes)
        self.microbatches = np.array([case.microbatches for case in self.cases], dtype=np.int64)
        batches = self.global_batch // self.microbatches
        self.extents = tuple(sorted(map(int, set(batches)), reverse=True))
        place = {extent: index for index, extent in enumerate(self.extents)}
        self.extent_of = np.array([place[int(batch)] for batch in batches])
        masks = range(1 << self.axes)
        columns = [prod_of(self.sizes, mask) for mask in masks]
        self.whole_divisor = np.stack(columns, axis=1)  # int [num, 2^axes]
        self.divisor = self.whole_divisor.astype(np.float64)
        self.num_devices = self.whole_divisor[:, -1]
        self.samples = self.samples or Samples(self.graph, self.layering)
        self._pricers: dict[tuple[tuple[int, ...], int], MeshPricer] = {}

    def pricer(self, v: int) -> MeshPricer:
        """Return the scalar pricer of the mesh of case ``v``."""
        case = self.cases[v]
        key = case.mesh_shape, case.offset
        if key not in self._pricers:
            self._pricers[key] = MeshPricer(
                self.cluster, case.offset, case.mesh_shape, self.optimizer, self.communication, mixed=self.graph.mixed
            )
        return self._pricers[key]

    def samples_of(self, layer: int) -> list[dict[str, Node]]:
        """Per extent the nodes around a layer by name."""
        return [self.samples.at(layer, extent) for extent in self.extents]

    def ops(self, layer: int) -> list[Node]:
        """The ops of a layer with the floating ops that it needs, in the graph at the capture extent."""
        return self.samples.ops(layer)

    def array(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array of this key, computed once."""
        if key not in self.cache:
            self.cache[key] = make()
        array: np.ndarray = self.cache[key]
        return array

    @property
    def source(self) -> Graph:
        """The graph at the capture extent."""
        return self.graph.origin or self.graph

    # ---- tensors

    def shapes(self, kind: TensorType) -> np.ndarray:
        """int [extents, dims]: the global shape at every extent of a tensor that has ``kind`` at the capture extent."""

        def make() -> np.ndarray:
            old = self.source.batch
            rows = [[rescale(extent, old, new) for extent in kind.shape] for new in self.extents]
            return np.array(rows, dtype=np.int64).reshape(len(self.extents), len(kind.shape))

        return self.array(("shapes", kind), make)

    def divides(self, shapes: np.ndarray, spec: Spec) -> np.ndarray:
        """bool [num]: where ``spec`` cuts a tensor of ``shapes`` [extents, dims] evenly."""
        ok = np.ones(self.num, dtype=bool)
        for dim in {placement.dim for placement in spec if placement.is_shard}:
            mask = sum(1 << axis for axis, p in enumerate(spec) if p.is_shard and p.dim == dim)
            ok &= shapes[self.extent_of, dim] % self.whole_divisor[:, mask] == 0
        return ok

    # ---- borders

    def states(self, boundary: int, roles: Sequence[str | None] = ()) -> tuple[tuple[State, ...], np.ndarray]:
        """(the states of the tensors that cross before layer ``boundary`` in any case, bool [num, states] in which):
        per axis all of them whole, all that have a batch cut along it, or one of them (of many, the largest) cut along
        one other dim."""
        tensors = self.layering.crossing[boundary]
        if not tensors:
            return ((),), np.ones((self.num, 1), dtype=bool)
        key = ("states", self.border_key(boundary), tuple(roles))
        if key not in self.cache:
            nodes = self.source.by_name()
            kinds = [nodes[name].meta["type"] for name in tensors]
            batch = [self.layering.batch_dims[name][0] for name in tensors]
            self.cache[key] = self._states(kinds, batch, roles)
        states: tuple[tuple[State, ...], np.ndarray] = self.cache[key]
        return states

    def border_key(self, boundary: int) -> tuple[Any, ...]:
        """The key of a border: equal keys have equal states at equal prices."""
        nodes, grad = self.source.by_name(), self.layering.needs_grad
        tensors = self.layering.crossing[boundary]
        return tuple((nodes[t].meta["type"], self.layering.batch_dims[t][0], t in grad) for t in tensors)

    def _states(
        self,
        kinds: Sequence[TensorType],
        batch: Sequence[int | None],
        roles: Sequence[str | None],
    ) -> tuple[tuple[State, ...], np.ndarray]:
        by_axis = [_modes(kinds, batch, roles[axis] if axis < len(roles) else None) for axis in range(self.axes)]
        states: dict[State, np.ndarray] = {}
        for combination in itertools.product(*by_axis):
            specs = [tuple(mode[t] for mode in combination) for t in range(len(kinds))]
            possible = np.ones(self.num, dtype=bool)
            for kind, spec in zip(kinds, specs):
                possible &= self.divides(self.shapes(kind), spec)
            if possible.any():
                states[tuple(Pair(spec, spec) for spec in specs)] = possible
        mask = np.stack(list(states.values()), axis=1) if states else np.zeros((self.num, 0), dtype=bool)
        return tuple(states), mask


def cut_mask(spec: Spec) -> int:
    """The axes that cut a tensor, as a bit mask."""
    return sum(1 << axis for axis, placement in enumerate(spec) if placement.is_shard)


def prod_of(sizes: np.ndarray, mask: int) -> np.ndarray:
    """int [num]: the product of the columns of ``sizes`` that ``mask`` names."""
    chosen = [sizes[:, axis] for axis in range(sizes.shape[1]) if mask >> axis & 1]
    return prod(chosen, start=np.ones(len(sizes), dtype=np.int64))


def _modes(kinds: Sequence[TensorType], batch: Sequence[int | None], role: str | None) -> list[list[Placement]]:
    """The placements that one axis may give to the tensors of a border."""
    whole: list[Placement] = [R] * len(kinds)
    data = [R if b is None else S(b) for b in batch]
    if role == "data":
        return [data]
    modes = [whole, data]
    cuts = [(t, d) for t, kind in enumerate(kinds) for d in range(len(kind.shape)) if d != batch[t]]
    if len(cuts) > MANY_CUTS:
        cuts = sorted(sorted(cuts, key=lambda cut: -kinds[cut[0]].nbytes)[:MOST_CUTS])
    modes += [[*whole[:t], S(d), *whole[t + 1 :]] for t, d in cuts]
    if role == "tensor" and data != whole:
        modes.remove(data)
    return modes
