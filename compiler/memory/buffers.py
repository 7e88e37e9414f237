"""The buffers of one device: gradient messages, gradient codecs, optimizer state, and local updates of replicas.

**Reduce-scatter of gradients and all-gather of updated values.** ``ReductionBuffers`` fills the buckets of
``runtime/parameters/gradients.py`` and ``runtime/parameters/optimizer_shards.py`` with tensors without data. A message
of n bytes to a group of d devices holds n while its gradients come in. On its way it holds n more for the data that
arrive (n/d with NCCL, which sums by itself), until the next message starts, or the next backward; then n/d stays.

**Gradient codecs** hold residuals and buffers per bucket. A hierarchical sum compresses only one of ``members`` parts
of a bucket, the one that it sums between hosts.

**Optimizer.** One step of the real optimizer on a parameter without data tells its state and its temporary bytes.

**Independent replicas** with local updates (``runtime/execution/local_sgd.py``) keep more. With G bytes of gradients on
the device and a delay of D steps::

    delayed gradients     2 D G: the gradients and their mean of every step under way; 2 G more while one mean arrives
                          and another leaves, after the backwards
    averages              G of anchors, and the outer optimizer's state; 2 G more from when one leaves until it arrives

Gradients are then in no buckets, of which a plan counts G.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import Any

import torch
from torch import nn

from ...costmodel.cluster import Cluster
from ...costmodel.codecs import CODECS
from ...costmodel.measured import FUSED, MASTERS
from ...costmodel.memory import drawn_bytes, held_bytes, parameter_bytes, usable_bytes
from ..cost.pricing import gradient_type
from ..errors import InfeasibleError
from ..ir.graph import Graph
from ..ir.reshard import Cut
from ..ir.spec import local_shape
from ..plan.plan import BUCKET_BYTES, Plan, Stage, gradient_buckets
from .abstract_run import Tracker, allocation_cause

__all__ = [
    "ParameterBlock",
    "ReductionBuffers",
    "codec_bytes",
    "communication_key",
    "gather_bytes",
    "update_bytes",
    "with_replica_memory",
]


@dataclass(frozen=True)
class ParameterBlock:
    """A parameter of which the optimizer has a block, or a master weight.

    With a master, the gradients of every microbatch are added to messages. Otherwise those of the last microbatch are,
    or those of each one that is reduced ``often``.
    """

    name: str
    #: The shape and the type that ops read.
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: The type of gradients in messages.
    sums: torch.dtype
    cut: Cut
    #: Parameters share a message if their keys are equal.
    key: Hashable
    #: True if every microbatch reduces the gradient.
    often: bool

    @property
    def mixed(self) -> bool:
        """True if the block is a master."""
        return self.sums != self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the value that ops read."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def sum_bytes(self) -> int:
        """Bytes of the whole gradient in a message."""
        return self.sums.itemsize * torch.Size(self.shape).numel()

    @property
    def copied_bytes(self) -> int:
        """Bytes of the block if it cannot share the storage of the value that ops read, else 0. Masters are counted
        elsewhere."""
        if self.mixed:
            return 0
        blocks = self.cut.blocks(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        inside = blocks[(0,) * len(self.cut.sizes)].is_contiguous()
        return 0 if inside else self.nbytes // self.cut.parts


@dataclass
class _Message:
    blocks: list[ParameterBlock]
    missing: set[str] = field(default_factory=set)
    buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(block.sum_bytes for block in self.blocks)

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.blocks[0].cut.parts


class ReductionBuffers:
    """The reduction messages of one virtual stage. blocks: in program order, None for parameters of other messages."""

    def __init__(self, blocks: Sequence[ParameterBlock | None], tracker: Tracker, native: bool) -> None:
        self.tracker, self.native = tracker, native
        keys = [(None, 0) if block is None else (block.key, block.sum_bytes) for block in blocks]
        groups = gradient_buckets(keys, BUCKET_BYTES)
        self.messages = [_Message([block for i in group if (block := blocks[i]) is not None]) for group in groups]
        self.of: Mapping[str, _Message] = {block.name: m for m in self.messages for block in m.blocks}
        self.mixed = any(block.mixed for m in self.messages for block in m.blocks)
        self.often = {block.name for m in self.messages for block in m.blocks if block.often}
        self.flying: tuple[_Message, list[torch.Tensor]] | None = None
        self.rows: list[torch.Tensor] = []

    def takes(self, name: str, last: bool) -> bool:
        """True if the parameter's gradient goes into a message in this backward."""
        return name in self.often or (name in self.of and (last or self.mixed))

    def arm(self) -> None:
        """Before a backward, wait for the message that is under way."""
        self._land()

    def fill(self, name: str, last: bool) -> None:
        """Put a gradient into its message. The caller releases the gradient afterwards."""
        message = self.of[name]
        if message.buffer is None:
            message.buffer = self._allocate(message.nbytes, "gradients" if self.mixed else "buffers")
            message.missing = {block.name for block in message.blocks}
        if not last and name not in self.often:
            return
        message.missing.discard(name)
        if not message.missing:
            self._launch(message)

    def flush(self, last: bool) -> None:
        """After a backward, send messages that lack gradients as they are."""
        for message in self.messages:
            if message.buffer is not None and (last or message.blocks[0].often):
                self._launch(message)

    def finish(self) -> None:
        """After the last backward, wait for the message that is under way and release the blocks."""
        self._land()
        self.rows = []

    def _launch(self, message: _Message) -> None:
        assert message.buffer is not None
        if not message.blocks[0].cut.axes:  # summed in place: the buffer becomes the gradient
            self.rows.append(message.buffer)
            message.buffer = None
            return
        self._land()
        arrives = self._allocate(message.row_bytes if self.native else message.nbytes, "buffers")
        self.flying, message.buffer = (message, [message.buffer, arrives]), None

    def _land(self) -> None:
        if self.flying is None:
            return
        (message, held), self.flying = self.flying, None
        del held[0]
        row = self._allocate(message.row_bytes, "gradients")
        if not message.blocks[0].often:  # else it is added to what stays
            self.rows.append(row)

    def _allocate(self, nbytes: int, cause: str) -> torch.Tensor:
        with allocation_cause(self.tracker, cause):
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def gather_bytes(blocks: Sequence[ParameterBlock], native: bool) -> int:
    """Peak bytes of the two all-gathers that run together after the update. Gloo gathers into a buffer of its own
    first."""
    blocks = [block for block in blocks if block.cut.axes]
    keys = [((block.cut.axes, block.cut.sizes, block.dtype), block.nbytes) for block in blocks]
    groups = gradient_buckets(keys, BUCKET_BYTES)
    copies = 1 if native else 2
    sizes = [sum(copies * blocks[i].nbytes + blocks[i].nbytes // blocks[i].cut.parts for i in g) for g in groups]
    return max((sum(pair) for pair in pairwise([*sizes, 0])), default=0)


Shapes = Sequence[tuple[int, ...]]


def communication_key(plan: Plan, stage: Stage) -> Hashable:
    """A key that is equal for stages with equal gradient communication."""
    return tuple((w.axes, w.algorithm, w.compressor, _members(plan, stage, w.axes)) for w in stage.wire)


def codec_bytes(
    plan: Plan, stage: Stage, sums: Sequence[tuple[tuple[int, ...], Shapes]], drawing: Sequence[str] = ()
) -> int:
    """Bytes of the codecs that sum buckets, each over some axes and with tensors of these shapes one after another.

    drawing: other codecs that draw random numbers on this device.
    """
    ways = {wire.axes: wire for wire in stage.wire if wire.compressor != "none"}
    held, table = 0, max((drawn_bytes(CODECS[code]) for code in drawing), default=0)
    for axes, shapes in sums:
        if axes not in ways:
            continue
        codec, n, group = CODECS[ways[axes].compressor], sum(map(prod, shapes)), prod(stage.mesh_shape[a] for a in axes)
        members = _members(plan, stage, axes) if ways[axes].algorithm == "hierarchical" else 1
        held += held_bytes(codec, -(-n // members), group // members, shapes if members == 1 else ())
        table = max(table, drawn_bytes(codec))
    return held + table


def _members(plan: Plan, stage: Stage, axes: Sequence[int]) -> int:
    """Devices of one host in a group that these axes form."""
    ranges = [range(size if axis in axes else 1) for axis, size in enumerate(stage.mesh_shape)]
    strides = [prod(stage.mesh_shape[axis + 1 :]) for axis in range(len(stage.mesh_shape))]
    places = [sum(i * stride for i, stride in zip(place, strides)) for place in product(*ranges)]
    hosts = [plan.host_of(stage.devices[place]) for place in places]
    return hosts.count(hosts[0])


# ---- the optimizer's state and temporary bytes


@cache
def update_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, optimizer: str, device_kind: str, mixed: bool = False
) -> tuple[int, int]:
    """(bytes of state, bytes that a later step needs at its worst besides) of one parameter of this local shape.

    optimizer: a torch.optim class name with its default arguments, or "SGD+momentum". On CUDA devices torch updates
    parameters in lists, so there the second figures add up over parameters; on CPUs one parameter follows the other.
    With ``FUSED`` they are nothing.
    An optimizer that is unknown, or refuses such a parameter, is taken to keep what ``parameter_bytes`` says, and to
    need nothing. mixed: half-precision parameters have fp32 states and a master weight, as they have with ``MASTERS``.
    """
    masters = dtype.itemsize == 2 and (mixed or optimizer.endswith(MASTERS))
    rule = parameter_bytes(prod(shape), dtype, optimizer, masters).optimizer_state
    name = optimizer.removesuffix(MASTERS)
    try:
        state, temporary = _stepped(shape, torch.float32 if masters else dtype, name, device_kind == "cuda")
    except Exception:
        return rule, 0
    return (rule if masters else state), temporary


def _stepped(shape: tuple[int, ...], dtype: torch.dtype, optimizer: str, lists: bool) -> tuple[int, int]:
    fused = optimizer.endswith(FUSED)
    name, _, momentum = optimizer.removesuffix(FUSED).partition("+")
    classes = {cls.lower(): cls for cls in torch.optim.__all__} if hasattr(torch.optim, "__all__") else {}
    make: Any = getattr(torch.optim, classes.get(name.lower(), name))
    options: dict[str, Any] = {"momentum": 0.9} if momentum else {}
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty(shape, dtype=dtype, device="meta")
    tracker = Tracker(devices_as_given=True)
    tracker.ignore(parameter, parameter.grad)
    with tracker:
        made = make([parameter], **options)
        if lists and not fused and "foreach" in made.defaults:
            made = make([parameter], foreach=True, **options)
        made.step()
        state = tracker.total
        tracker.restart()
        made.step()
    return state, 0 if fused else tracker.peak_total - state


CAUSE = "replicas"
#: Causes whose bytes are free after the backwards.
_FREED_CAUSES = ("activations", "temporary")


def with_replica_memory(plan: Plan, graph: Graph, delay: int, every: int, outer: str | None) -> Plan:
    """Return ``plan`` with the memory that local updates of independent replicas need.

    every: steps between averages (1: gradients are averaged); outer: the name of the optimizer that applies averages.
    Raises InfeasibleError where that does not fit.
    """
    without = [replace(one, memory_bytes=_without_replicas(one.memory_bytes)) for one in plan.prediction.stages]
    if not delay and every == 1:
        return replace(plan, prediction=replace(plan.prediction, stages=tuple(without)))
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    usable, stages = usable_bytes(cluster), []
    for index, (stage, prediction) in enumerate(zip(plan.stages, without)):
        device = cluster.device(stage.devices[0])
        gradients, states = _bytes(graph, plan, stage, outer, device.kind)
        passing = 2 * gradients - sum(prediction.memory_bytes.get(cause, 0.0) for cause in _FREED_CAUSES)
        if every == 1:
            more = 2 * delay * gradients + max(0.0, passing)
        else:
            more = gradients + states + (2 * gradients if delay else max(0.0, passing))
        more -= gradients
        stages.append(replace(prediction, memory_bytes={**prediction.memory_bytes, CAUSE: more}))
        least = min(usable[device] for device in stage.devices)
        if stages[-1].peak_bytes - prediction.memory_bytes.get("framework", 0.0) > least:
            raise InfeasibleError(
                f"replicas that step by themselves keep {more / 2**30:.3g} GiB more on each device of stage {index} "
                f"(delay={delay}, local_steps={every}), where "
                f"{(least - prediction.peak_bytes) / 2**30:.3g} GiB are free; "
                "use a smaller delay, or a strategy with more tensor or pipeline parallelism"
            )
    return replace(plan, prediction=replace(plan.prediction, stages=tuple(stages)))


def _without_replicas(memory: Mapping[str, float]) -> Mapping[str, float]:
    """The memory of a stage without the bytes of replicas, which a saved plan may already count."""
    return {cause: size for cause, size in memory.items() if cause != CAUSE}


def _bytes(graph: Graph, plan: Plan, stage: Stage, outer: str | None, kind: str) -> tuple[int, int]:
    """Return (G, bytes of the outer optimizer's state)."""
    gradients = states = 0
    shardings = {name: sharding for chunk in stage.chunks for name, sharding in chunk.parameters.items()}
    nodes = {node.meta["source"].name: node for node in graph.placeholders("parameter")}
    for name, sharding in shardings.items():
        node = nodes[name]
        if node.meta["source"].requires_grad:
            made = gradient_type(node.meta["type"], graph.mixed)
            shape = local_shape(made.shape, sharding.optimizer, stage.mesh_shape)
            gradients += prod(shape) * made.dtype.itemsize
            states += update_bytes(tuple(shape), made.dtype, outer, kind)[0] if outer else 0
    return gradients, states
