"""Prices of the compiler's own things (op choices, reshards, parameters) on one logical mesh, in seconds and bytes.

This is the only place where graph nodes meet ``costmodel``; it turns them into FLOPs, bytes and messages and asks for
the price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch.fx import Node

from ..costmodel.cluster import Cluster, Device, Mesh
from ..costmodel.collectives import mesh_prices, p2p_seconds
from ..costmodel.compute import op_seconds
from ..costmodel.memory import parameter_bytes
from .graph import TensorType, tensor_operands, types_of
from .plan import BUCKET_BYTES
from .reshard import FREE, step_bytes, steps_between
from .rules import MeshChoice, rule_for
from .spec import P, Pair, Spec, local_shape

__all__ = ["MeshPricer", "OpPrice"]

TWO_SIDED = frozenset(
    {"matmul", "attention", "convolution", "routing"}
)  # backward costs the forward once per differentiable operand


@dataclass(frozen=True)
class OpPrice:
    """Seconds of one op under one choice, per microbatch: compute and the collectives inside it, forward and backward
    apart."""

    forward_s: float
    backward_s: float
    internal_forward_s: float
    internal_backward_s: float
    flops: float  # of this device, forward and backward
    wasted_flops: float  # of those, what other devices do as well, summed over all devices

    @property
    def seconds(self) -> float:
        """Everything together."""
        return self.forward_s + self.backward_s + self.internal_forward_s + self.internal_backward_s


def nbytes(kind: TensorType, spec: Spec, mesh_shape: Sequence[int]) -> float:
    """Bytes that one device holds."""
    return prod(local_shape(kind.shape, spec, mesh_shape)) * kind.dtype.itemsize


@dataclass
class MeshPricer:
    """Prices on the submesh of ``cluster`` that starts at ``offset`` and has ``mesh_shape``."""

    cluster: Cluster
    offset: int
    mesh_shape: tuple[int, ...]
    optimizer: str = "AdamW"
    _reshards: dict[tuple, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = Mesh.of(self.cluster, self.offset, self.mesh_shape)
        self.axes = mesh_prices(self.cluster, self.mesh)
        self.num_devices = prod(self.mesh_shape)
        self.device: Device = self.cluster.device(self.offset)

    # ---- ops

    def op(self, node: Node, choice: MeshChoice, needs_grad: frozenset[str]) -> OpPrice:
        """The price of ``node`` under ``choice``."""
        rule = rule_for(node)
        operands, outputs = tensor_operands(node), types_of(node)
        flops = rule.flops(node) * choice.work_share
        traffic = sum(self.local_bytes(out, pair.value) for out, pair in zip(outputs, choice.outputs))
        # a table lookup reads as many rows as it writes; other ops read their operands whole
        if rule.cost_kind == "embedding":
            traffic *= 2
        else:
            traffic += sum(self.operand_bytes(o, pair.value) for o, pair in zip(operands, choice.inputs))
        dtype = outputs[0].dtype if outputs[0].is_float else torch.float32
        forward = self.compute(rule.cost_kind, flops, traffic, dtype)
        backward, sides = 0.0, 0
        if node.name in needs_grad:
            sides = 1
            if rule.cost_kind in TWO_SIDED:
                sides = sum(1 for o in operands if o.name in needs_grad and len(types_of(o)[0].shape) > 1)
                backward = sides * self.compute(rule.cost_kind, flops, traffic, dtype)
            else:
                backward = self.compute(rule.cost_kind, flops, 1.5 * traffic, dtype)
        internal = {"forward": 0.0, "backward": 0.0}
        for axis, message in choice.internal:
            side, index = message.like
            kind = types_of(operands[index])[0] if side == "input" else outputs[index]
            spec = (choice.inputs if side == "input" else choice.outputs)[index].value
            elements = prod(local_shape(kind.shape, spec, self.mesh_shape))
            if message.phase == "forward" or node.name in needs_grad:
                internal[message.phase] += self.axes[axis].seconds(
                    message.kind, elements * message.itemsize * message.scale
                )
        work = flops * (1 + sides) if rule.cost_kind in TWO_SIDED else flops
        total = rule.flops(node) * (1 + sides) if rule.cost_kind in TWO_SIDED else rule.flops(node)
        wasted = max(0.0, work * self.num_devices - total)
        return OpPrice(forward, backward, internal["forward"], internal["backward"], work, wasted)

    def compute(self, kind: str, flops: float, traffic: float, dtype: torch.dtype) -> float:
        """Seconds of one kernel of this kind on the stage's device."""
        if kind == "routing":
            kind = "matmul"
        return op_seconds(kind, flops, traffic, dtype, self.device)

    def local_bytes(self, kind: TensorType, spec: Spec) -> float:
        """Bytes of one tensor on one device."""
        return nbytes(kind, spec, self.mesh_shape)

    def operand_bytes(self, operand: Node, spec: Spec) -> float:
        """Bytes of an operand on one device (of its first output for a multi-output op)."""
        return self.local_bytes(types_of(operand)[0], spec)

    # ---- reshards

    def reshard(self, source: Pair, target: Pair, kind: TensorType, grad: bool) -> tuple[float, float]:
        """(forward, backward) seconds of the conversion between a producer's pair and a consumer's; inf where there is
        none."""
        key = (source, target, kind, grad)
        found = self._reshards.get(key)
        if found is None:
            forward = self.convert(source.value, target.value, kind)
            backward = self.convert(target.cotangent, source.cotangent, kind) if grad and kind.is_float else 0.0
            found = self._reshards[key] = (forward, backward)
        return found

    def convert(self, source: Spec, target: Spec, kind: TensorType) -> float:
        """Seconds of a conversion in one direction."""
        if source == target:
            return 0.0
        try:
            steps = steps_between(source, target)
        except ValueError:
            return float("inf")
        seconds = 0.0
        for step, size in step_bytes(source, steps, kind.shape, kind.dtype.itemsize, self.mesh_shape):
            if step.kind in FREE:  # a slice or a pad is a copy
                copied = kind.nbytes / self.num_devices
                seconds += copied / self.device.memory_bytes_per_s
            else:
                seconds += self.axes[step.axis].seconds(step.kind.removesuffix("_max"), size)
        return seconds

    def transfer_seconds(self, size: float) -> float:
        """Seconds to send ``size`` bytes to each device from the stage before, between this mesh's end and its
        neighbour."""
        if not size or self.cluster.num_devices == 1:
            return 0.0
        last = self.offset + self.num_devices - 1
        neighbour = last + 1 if last + 1 < self.cluster.num_devices else self.offset - 1
        if neighbour < 0:
            return 0.0
        here = last if neighbour == last + 1 else self.offset
        return p2p_seconds(self.cluster, neighbour, here, size)

    # ---- parameters

    def parameter_memory(self, kind: TensorType, spec: Spec, trainable: bool) -> dict[str, float]:
        """Bytes on one device by cause: "parameters", "gradients", "optimizer"."""
        elements = prod(local_shape(kind.shape, spec, self.mesh_shape))
        if not trainable:
            return {"parameters": elements * kind.dtype.itemsize, "gradients": 0.0, "optimizer": 0.0}
        half = kind.dtype.itemsize == 2
        bill = parameter_bytes(elements, kind.dtype, self.optimizer, mixed_precision=half)
        return {"parameters": bill.parameter, "gradients": bill.gradient, "optimizer": bill.optimizer_state}

    def gradient_seconds(self, kind: TensorType, pair: Pair) -> float:
        """Seconds per step to reduce a parameter's gradient over the axes where it is partial, its share of a bucket's
        latency included."""
        size, seconds = self.local_bytes(kind, pair.value), 0.0
        for axis, placement in enumerate(pair.cotangent):
            if placement == P:
                latency, per_byte = self.axes[axis].coefficients("all_reduce")
                seconds += (per_byte + latency / BUCKET_BYTES) * size
        return seconds

    def bucket_seconds(self, pairs: Iterable[Pair]) -> float:
        """The latency of the last, partly filled bucket of each set of axes that some gradient is reduced over."""
        sets = {tuple(axis for axis, p in enumerate(pair.cotangent) if p == P) for pair in pairs}
        return sum(self.axes[axis].coefficients("all_reduce")[0] for axes in sets for axis in axes)

    def optimizer_seconds(self, memory: dict[str, float]) -> float:
        """Seconds per step to update a parameter: memory traffic over parameter, gradient (read, zeroed) and state."""
        if not memory["gradients"]:
            return 0.0
        traffic = 2 * memory["parameters"] + 2 * memory["gradients"] + 2 * memory["optimizer"]
        return traffic / self.device.memory_bytes_per_s
