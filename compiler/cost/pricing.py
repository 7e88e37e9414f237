"""Prices of op strategies, reshards and parameters on one logical mesh, in seconds and bytes.

This is the only place where graph nodes meet ``costmodel``; it turns them into signatures, FLOPs, bytes and messages
and asks for the price: of the exact op where the device was measured with it, else from curves, else the roofline. A
tensor with n consumers gets n cotangents, which are added: each consumer pays for (n − 1) / n of an addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from ...costmodel.algorithms import IN_PLACE
from ...costmodel.cluster import Cluster, Mesh
from ...costmodel.codecs import CODECS, Codec, LowRankFactors, coded_messages, coding_seconds
from ...costmodel.collectives import REDUCTIONS, AxisPrice, mesh_prices, p2p_seconds
from ...costmodel.compute import TWO_SIDED, Price, measured_backward, op_price
from ...costmodel.hardware import Device
from ...costmodel.measured import OptimizerRate
from ...costmodel.memory import parameter_bytes, updated_itemsize
from ..ir.graph import TensorType, tensor_operands, types_of
from ..ir.reshard import LOCAL_STEPS, step_bytes, steps_between
from ..ir.spec import P, Pair, Spec, local_shape
from ..plan.plan import BUCKET_BYTES
from ..rules import MeshChoice, rule_for
from .gradient_communication import EXACT, Communication, GradientRoute, Offer
from .signature import signature, sum_signature

__all__ = [
    "MeshPricer",
    "OpPrice",
    "PricingContext",
    "gradient_route",
    "gradient_routes",
    "gradient_type",
    "partial_axes",
    "pricing_context",
]


@dataclass(frozen=True)
class OpPrice:
    """Seconds of one op under one choice, per microbatch: compute and the collectives inside it, forward and backward
    apart, and the backward by whose gradient it makes: those of activations, those of parameters."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    internal_forward_s: float
    internal_backward_s: float
    flops: float  # of this device, forward and backward
    wasted_flops: float  # of those, what other devices do as well, summed over all devices
    source: str  # of the compute: "measured", "interpolated", "extrapolated", "roofline" or "free"

    @property
    def backward_s(self) -> float:
        """The whole backward, without the collectives inside."""
        return self.backward_input_s + self.backward_weight_s

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward with the collectives inside."""
        return self.forward_s + self.backward_s + self.internal_forward_s + self.internal_backward_s


@dataclass(frozen=True)
class PricingContext:
    """The facts about an op that its price depends on beside the choice."""

    flops: float
    dtype: torch.dtype
    #: Forwards that the backward costs: one per operand with a gradient, for attention two for all three.
    sides: float
    #: The share of the backward that makes the gradients of parameters.
    weight_share: float
    #: Forwards that a backward with all gradients would cost.
    possible: float
    #: (operand, (n − 1) / n, is a parameter) of every operand with n > 1 consumers, whose cotangents are added.
    shared: tuple[tuple[int, float, bool], ...]
    #: True if a view moves bytes, forward and backward.
    copies: tuple[bool, bool]


def nbytes(kind: TensorType, spec: Spec, mesh_shape: Sequence[int]) -> float:
    """Bytes that one device holds."""
    return prod(local_shape(kind.shape, spec, mesh_shape)) * kind.dtype.itemsize


@dataclass
class MeshPricer:
    """Prices on the submesh of ``cluster`` that starts at ``offset`` and has ``mesh_shape``. mixed: whether parameters
    of 16 bits have master weights, states and sums of gradients in fp32 (``mixed_precision``)."""

    cluster: Cluster
    offset: int
    mesh_shape: tuple[int, ...]
    optimizer: str = "AdamW"
    communication: Communication = EXACT  # how gradients may travel
    mixed: bool = False
    ways: dict[tuple[tuple[int, ...], int], tuple[GradientRoute, ...]] = field(default_factory=dict, repr=False)
    #: What others make of these prices and need again, by their own keys.
    remembered: dict[tuple, Any] = field(default_factory=dict, repr=False)
    _ops: dict[tuple[Node, tuple[str, ...]], OpPrice] = field(default_factory=dict)
    _reshards: dict[tuple, tuple[float, float]] = field(default_factory=dict)
    _tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _known: dict[Node, PricingContext] = field(default_factory=dict)
    _joint: dict[tuple[tuple[int, ...], str], AxisPrice | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = Mesh.of(self.cluster, self.offset, self.mesh_shape)
        self.axes = mesh_prices(self.cluster, self.mesh)
        self.num_devices = prod(self.mesh_shape)
        self.device: Device = _slowest_device(self.cluster, self.mesh)

    # ---- ops

    def op(self, node: Node, choice: MeshChoice, needs_grad: frozenset[str]) -> OpPrice:
        """The price of ``node`` under ``choice``."""
        key = node, choice.labels
        if key not in self._ops:
            self._ops[key] = self._op(node, choice, needs_grad)
        return self._ops[key]

    def _op(self, node: Node, choice: MeshChoice, needs_grad: frozenset[str]) -> OpPrice:
        rule = rule_for(node)
        operands, outputs = tensor_operands(node), types_of(node)
        context = self._known.get(node)
        if context is None:
            context = self._known[node] = pricing_context(node, operands, needs_grad)
        flops = context.flops * choice.work_share
        forward, ahead, back, source = self._compute(node, choice, needs_grad, context, flops)
        for k, share, weight in context.shared:
            added = share * self.add_seconds(types_of(operands[k])[0], choice.inputs[k].value)
            ahead, back = (ahead, back + added) if weight else (ahead + added, back)
        internal = {"forward": 0.0, "backward": 0.0}
        for axis, message in choice.internal:
            side, index = message.like
            kind = types_of(operands[index])[0] if side == "input" else outputs[index]
            spec = (choice.inputs if side == "input" else choice.outputs)[index].value
            elements = prod(local_shape(kind.shape, spec, self.mesh_shape))
            if message.is_sent(node, needs_grad):
                size = elements * message.itemsize * message.scale
                internal[message.phase] += message.count * self.axes[axis].seconds(message.kind, size)
        times = 1 + context.sides if rule.cost_kind in TWO_SIDED else 1
        wasted = max(0.0, (flops * self.num_devices - context.flops) * times)
        return OpPrice(forward, ahead, back, internal["forward"], internal["backward"], flops * times, wasted, source)

    def _compute(
        self, node: Node, choice: MeshChoice, needs_grad: frozenset[str], context: PricingContext, flops: float
    ) -> tuple[float, float, float, str]:
        """(forward, backward of activations, backward of parameters, source) of one device's share of the work."""
        if self.device.op_times:
            text = signature(node, choice, self.mesh_shape, needs_grad)
            if text and (exact := self.device.op_time(text)) is not None:
                return exact.forward_s, exact.backward_input_s, exact.backward_weight_s, "measured"
        rule = rule_for(node)
        kind, flows = rule.cost_kind, node.name in needs_grad
        outputs = types_of(node)
        traffic = sum(self.local_bytes(out, pair.value) for out, pair in zip(outputs, choice.outputs))
        # a table lookup reads as many rows as it writes; other ops read their operands whole
        if kind == "embedding":
            traffic *= 2
        else:
            traffic += sum(self.operand_bytes(o, seen) for o, seen in zip(tensor_operands(node), choice.reads))
        shapes: tuple[tuple[int, ...], ...] = ()
        if kind == "attention" or (self.device.surfaces and kind in TWO_SIDED):
            specs = (*choice.reads, choice.outputs[0].value)
            sizes = zip((*map(types_of, tensor_operands(node)), outputs), specs)
            shapes = tuple(tuple(local_shape(types[0].shape, spec, self.mesh_shape)) for types, spec in sizes)
        forward = self._price(
            "pointwise" if context.copies[0] else kind, flops, traffic, context.dtype, "forward", shapes
        )
        if not flows:
            return forward.seconds, 0.0, 0.0, forward.source
        if kind not in TWO_SIDED:
            back = self._price(
                "pointwise" if context.copies[1] else kind, flops, traffic, context.dtype, "backward", shapes
            )
            backward = back.seconds
        elif measured_backward(kind, context.dtype, self.device):
            back = self._price(kind, flops, traffic, context.dtype, "backward", shapes)
            backward = back.seconds * context.sides / context.possible
        else:
            backward = context.sides * forward.seconds
        weight = backward * context.weight_share
        return forward.seconds, backward - weight, weight, forward.source

    def _price(
        self,
        kind: str,
        flops: float,
        traffic: float,
        dtype: torch.dtype,
        direction: str,
        shapes: tuple[tuple[int, ...], ...],
    ) -> Price:
        return op_price(kind, flops, traffic, dtype, self.device, direction=direction, shapes=shapes)

    def add_source(self, kind: TensorType, spec: Spec) -> str:
        """The origin of ``add_seconds``: "measured", or as ``op_price`` says."""
        text = sum_signature(local_shape(kind.shape, spec, self.mesh_shape), kind.dtype)
        if self.device.op_time(text) is not None:
            return "measured"
        return self._price("pointwise", kind.numel, 3 * kind.nbytes, kind.dtype, "forward", ()).source

    def add_seconds(self, kind: TensorType, spec: Spec) -> float:
        """Seconds to add one device's part of a tensor into another of its size."""
        shape = local_shape(kind.shape, spec, self.mesh_shape)
        if self.device.op_times and (exact := self.device.op_time(sum_signature(shape, kind.dtype))) is not None:
            return exact.forward_s
        elements = prod(shape)
        return self._price("pointwise", elements, 3 * elements * kind.dtype.itemsize, kind.dtype, "forward", ()).seconds

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
        seconds = self._reshards.get(key)
        if seconds is None:
            forward = self.convert(source.value, target.value, kind)
            backward = self.convert(target.cotangent, source.cotangent, kind) if grad and kind.is_float else 0.0
            seconds = self._reshards[key] = (forward, backward)
        return seconds

    def reshards(
        self, sources: tuple[Pair, ...], targets: tuple[Pair, ...], kind: TensorType, grad: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """``reshard`` of each source to each target: two arrays [sources, targets], to be read only."""
        key = (sources, targets, kind, grad)
        tables = self._tables.get(key)
        if tables is None:
            rows = [[self.reshard(one, other, kind, grad) for other in targets] for one in sources]
            ahead, back = np.moveaxis(np.array(rows).reshape(len(sources), len(targets), 2), 2, 0)
            tables = self._tables[key] = (ahead, back)
        return tables

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
            if step.kind in LOCAL_STEPS:  # a slice or a pad is a copy
                copied = kind.nbytes / self.num_devices
                seconds += copied / self.device.memory_bytes_per_s
            else:
                seconds += self.axes[step.axis].seconds(step.kind.removesuffix("_max"), size)
        return seconds

    def transfer_seconds(self, size: float, before: bool = False) -> float:
        """Seconds to send ``size`` bytes to each device across the border behind this mesh (``before``: in front of
        it), to all devices at once; where no device lies there, across the other."""
        if not size or self.num_devices == self.cluster.num_devices:
            return 0.0
        first, last = self.offset, self.offset + self.num_devices - 1
        if (before and first > 0) or last + 1 == self.cluster.num_devices:
            return p2p_seconds(self.cluster, first - 1, first, size, self.num_devices)
        return p2p_seconds(self.cluster, last + 1, last, size, self.num_devices)

    # ---- parameters

    def parameter_memory(self, kind: TensorType, spec: Spec, trainable: bool) -> dict[str, float]:
        """Bytes on one device by cause: "parameters", "gradients", "optimizer"."""
        elements = prod(local_shape(kind.shape, spec, self.mesh_shape))
        if not trainable:
            return {"parameters": elements * kind.dtype.itemsize, "gradients": 0.0, "optimizer": 0.0}
        summed = gradient_type(kind, self.mixed).dtype
        bill = parameter_bytes(elements, kind.dtype, self.optimizer, self.mixed, summed)
        return {"parameters": bill.parameter, "gradients": bill.gradient, "optimizer": bill.optimizer_state}

    def joint(self, axes: Sequence[int], algorithm: str = "backend") -> AxisPrice | None:
        """Prices in the groups that several axes form together; None where these axes are not neighbours. algorithm:
        as ``mesh_prices`` has it."""
        first, last, key = axes[0], axes[-1], (tuple(axes), algorithm)
        if first == last and algorithm == "backend":
            return self.axes[first]
        if key not in self._joint:
            price = None
            if key[0] == tuple(range(first, last + 1)):
                size = prod(self.mesh_shape[axis] for axis in axes)
                shape = (*self.mesh_shape[:first], size, *self.mesh_shape[last + 1 :])
                price = mesh_prices(self.cluster, Mesh.of(self.cluster, self.offset, shape), algorithm)[first]
            self._joint[key] = price
        return self._joint[key]

    def levels(self, axes: Sequence[int]) -> tuple[AxisPrice, AxisPrice] | None:
        """Prices inside of hosts and between them, in the groups that several axes form together; None where these do
        not lie alike on several hosts."""
        if self.joint(axes) is None:
            return None
        first, last = axes[0], axes[-1]
        size = prod(self.mesh_shape[axis] for axis in axes)
        shape = (*self.mesh_shape[:first], size, *self.mesh_shape[last + 1 :])
        members = set[int]()
        for group in Mesh.of(self.cluster, self.offset, shape).groups(first):
            members |= set(Counter(self.cluster.host_of(device) for device in group).values())
        if len(members) > 1 or not 1 < (inside := members.pop()) < size:
            return None
        split = (*shape[:first], size // inside, inside, *shape[first + 1 :])
        prices = mesh_prices(self.cluster, Mesh.of(self.cluster, self.offset, split))
        return prices[first + 1], prices[first]

    def message_seconds(self, collective: str, axes: Sequence[int], size: float) -> float:
        """Seconds of one collective of ``size`` whole bytes; axes that are no neighbours act one by one."""
        if not axes or not size:
            return 0.0
        joint = self.joint(axes)
        if joint is not None:
            return joint.seconds(collective, size)
        seconds, left = 0.0, float(size)
        for axis in axes:
            seconds += self.axes[axis].seconds(collective, left)
            left /= self.mesh_shape[axis]
        return seconds

    def message_source(self, collective: str, axes: Sequence[int]) -> str:
        """The origin of ``message_seconds``: "measured", "scaled" or "analytic"."""
        return (self.joint(axes) or self.axes[axes[0]]).source(collective)

    def message_rate(
        self, collective: str, axes: Sequence[int], smallest: float, largest: float, counted: float, factor: float
    ) -> float:
        """``AxisPrice.least_rate`` of a part of ``message_seconds``."""
        joint = self.joint(axes)
        if joint is not None:
            return joint.least_rate(collective, smallest, largest, counted, factor)
        rate, share = 0.0, 1.0
        for axis in axes:
            sizes = smallest * share, largest * share, counted * share
            rate += share * self.axes[axis].least_rate(collective, *sizes, factor)
            share /= self.mesh_shape[axis]
        return rate

    def reduce_seconds(self, size: float, axes: Sequence[int]) -> float:
        """Seconds to sum ``size`` bytes over the groups that these axes form together."""
        joint = self.joint(axes)
        if joint is not None:
            return joint.seconds(IN_PLACE, size)
        return sum(self.axes[axis].seconds(IN_PLACE, size) for axis in axes)

    def reduce_source(self, axes: Sequence[int]) -> str:
        """The origin of ``reduce_seconds``: "measured", "scaled" or "analytic"."""
        return self.message_source(IN_PLACE, axes)

    def gradient_seconds(self, kind: TensorType, pair: Pair) -> float:
        """Seconds per step to reduce a parameter's gradient over the axes where it is partial: its share of a full
        bucket, as if nothing hid behind compute, by the cheapest route. Buckets that are not full cost more per byte,
        never less."""
        axes = partial_axes(pair, self.mesh_shape)
        if not axes:
            return 0.0
        kind = gradient_type(kind, self.mixed)
        size = self.local_bytes(kind, pair.value)
        full = max(size, BUCKET_BYTES)
        if not self.communication.sums_exactly and (ways := gradient_routes(self, axes, kind.dtype.itemsize)):
            return min(way.seconds(full) for way in ways) * size / full
        return self.reduce_seconds(full, axes) * size / full

    def accumulate_seconds(self, kind: TensorType, pair: Pair, microbatches: int) -> float:
        """Seconds per step to add the gradients of all microbatches but the first, which becomes the sum's first
        addend."""
        added = gradient_type(kind, self.mixed)
        return (microbatches - 1) * self.add_seconds(added, pair.value) if microbatches > 1 else 0.0

    def update_rate(self, kind: TensorType) -> tuple[OptimizerRate | None, int]:
        """The measured rate of the optimizer on a parameter of this type, if there is one, and the bytes per element of
        what it updates."""
        itemsize = updated_itemsize(kind.dtype, self.optimizer, self.mixed)
        return self.device.optimizer_rate(self.optimizer, itemsize), itemsize

    def optimizer_seconds(self, kind: TensorType, memory: dict[str, float]) -> float:
        """Seconds per step to update a parameter: the optimizer's measured rate, else memory traffic over parameter,
        gradient (read, zeroed) and state."""
        if not memory["gradients"]:
            return 0.0
        rate, itemsize = self.update_rate(kind)
        if rate is not None:
            return rate.alpha_s + rate.beta_s_per_byte * itemsize * (memory["parameters"] / kind.dtype.itemsize)
        traffic = 2 * memory["parameters"] + 2 * memory["gradients"] + 2 * memory["optimizer"]
        return traffic / self.device.memory_bytes_per_s


def _slowest_device(cluster: Cluster, mesh: Mesh) -> Device:
    """The device that the others of a mesh over unlike hosts wait for: parts are equal."""
    hosts = range(cluster.host_of(mesh.devices[0]), cluster.host_of(mesh.devices[-1]) + 1)
    devices = dict.fromkeys(cluster.hosts[host].device for host in hosts)
    return min(devices, key=lambda device: (device.peak("bfloat16"), device.memory_bytes_per_s))


def gradient_type(kind: TensorType, mixed: bool) -> TensorType:
    """The type in which gradients of a parameter are kept and summed: fp32 under mixed precision."""
    return TensorType(kind.shape, torch.float32) if mixed and kind.is_float and kind.dtype.itemsize == 2 else kind


def partial_axes(pair: Pair, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The axes over which a parameter's gradient is a sum of addends."""
    return tuple(axis for axis, p in enumerate(pair.cotangent) if p == P and mesh_shape[axis] > 1)


def pricing_context(node: Node, operands: Sequence[Node], needs_grad: frozenset[str]) -> PricingContext:
    """Return the facts about ``node`` that its price depends on. Only the FLOPs depend on the batch extent."""
    rule, outputs = rule_for(node), types_of(node)
    dtype = outputs[0].dtype if outputs[0].is_float else torch.float32
    layout = node.meta.get("layout")
    copies = (False, False)
    if layout is not None and rule.cost_kind in ("view", "free"):
        copies = (layout.copies_forward, layout.copies_backward)
    if node.name not in needs_grad:
        return PricingContext(rule.flops(node), dtype, 0, 0.0, 1, (), copies)
    moving = [o for o in operands if o.name in needs_grad and types_of(o)[0].is_float]
    wide = [o for o in moving if len(types_of(o)[0].shape) > 1] if rule.cost_kind in TWO_SIDED else moving
    weights = sum(o.op == "placeholder" for o in wide)
    if rule.cost_kind in TWO_SIDED:
        share = weights / len(wide) if wide else 0.0
    else:
        share = 1.0 if weights == len(wide) else 0.0
    possible = sum(1 for o in operands if types_of(o)[0].is_float and len(types_of(o)[0].shape) > 1)
    shared = []
    for k, operand in enumerate(operands):
        if operand.name in needs_grad and types_of(operand)[0].is_float:
            uses = _count_gradient_uses(operand, needs_grad)
            if uses > 1:
                shared.append((k, (uses - 1) / uses, operand.op == "placeholder"))
    each = 2 / 3 if rule.cost_kind == "attention" else 1.0  # four products in the backward against two in the forward
    sides, possible_sides = each * len(wide), each * max(possible, 1)
    if rule.joint_backward:  # one for the gradients of activations, one for those of weights
        sides, possible_sides = float((weights > 0) + (len(wide) > weights)), 2.0
        share = (weights > 0) / max(sides, 1.0)
    return PricingContext(rule.flops(node), dtype, sides, share, possible_sides, tuple(shared), copies)


def _count_gradient_uses(tensor: Node, needs_grad: frozenset[str]) -> int:
    """Count the reads of a tensor by ops through which gradients flow."""
    users = [user for user in tensor.users if user.name in needs_grad]
    return sum(sum(o is tensor for o in tensor_operands(user)) for user in users)


def _scale_offers(price: AxisPrice, kind: str, share: float) -> tuple[Offer, ...]:
    """The offers of a collective of ``share`` bytes per byte of the gradient."""
    return tuple(tuple((start / share, a, b * share) for start, a, b in offer) for offer in price.pieces_of(kind))


# ---- gradient routes


def gradient_route(
    pricer: MeshPricer, axes: Sequence[int], itemsize: int, algorithm: str, compressor: str
) -> GradientRoute:
    """Return the prices of one route over the groups that ``axes`` form together. Raises ValueError for an unknown
    algorithm or codec, and for a route that these groups cannot run."""
    way = _possible_offers(pricer, axes, itemsize, algorithm, compressor)
    if way is None:
        raise ValueError(
            f"gradients over mesh axes {list(axes)} of {list(pricer.mesh_shape)} have no sum by {algorithm!r} in code "
            f"{compressor!r}; algorithms are backend (with every code), {', '.join(REDUCTIONS)} (with codes that "
            f"all-reduce; hierarchical: over several hosts of equally many devices, with codes of elements); codes are "
            f"{', '.join(CODECS)}"
        )
    return way


def _possible_offers(
    pricer: MeshPricer, axes: Sequence[int], itemsize: int, algorithm: str, compressor: str
) -> GradientRoute | None:
    codec = CODECS.get(compressor)
    if codec is None or algorithm not in ("backend", *REDUCTIONS):
        return None
    if compressor != "none" and itemsize > 4:  # nobody sums fp64 to send a byte of it
        return None
    if algorithm == "hierarchical" and compressor != "none":
        return _hierarchical_route(pricer, axes, itemsize, codec)
    price = pricer.joint(axes, algorithm)
    if price is None or (algorithm != "backend" and codec.pattern != "all_reduce"):
        return None
    messages = coded_messages(codec, price.size, itemsize, pricer.communication.shapes)
    coding = coding_seconds(codec, pricer.device, price.size)
    if any(kind not in price.pieces for kind, _ in messages):
        return None
    return GradientRoute(
        algorithm,
        compressor,
        coding[0],
        coding[1] / itemsize,
        tuple(_scale_offers(price, kind, share) for kind, share in messages),
        price.source(messages[0][0]),
    )


def _hierarchical_route(pricer: MeshPricer, axes: Sequence[int], itemsize: int, codec: Codec) -> GradientRoute | None:
    """Exact inside of hosts, where a rank sums one part; that part in code between them."""
    levels = pricer.levels(axes)
    if levels is None or isinstance(codec.payload, LowRankFactors):  # parts cut through matrices
        return None
    inner, outer = levels
    share = 1 / inner.size
    messages = [_scale_offers(inner, kind, 1.0) for kind in ("all_to_all", "all_gather")]
    messages += [_scale_offers(outer, kind, b * share) for kind, b in coded_messages(codec, outer.size, itemsize)]
    once, each = coding_seconds(codec, pricer.device, outer.size)
    return GradientRoute(
        "hierarchical", codec.name, once, each / itemsize * share, tuple(messages), outer.source("all_gather")
    )


def gradient_routes(pricer: MeshPricer, axes: Sequence[int], itemsize: int) -> tuple[GradientRoute, ...]:
    """Return the routes that ``pricer.communication`` allows, the backend's plain sum first; empty where these axes
    form no groups together (then there is no choice)."""
    key = (tuple(axes), itemsize)
    if key not in pricer.ways:
        allowed, backend = pricer.communication, pricer.joint(axes)
        measured = backend is not None and backend.source(IN_PLACE) != "analytic"
        routes = []
        for algorithm, compressor in product(allowed.algorithms, allowed.compressors):
            way = _possible_offers(pricer, axes, itemsize, algorithm, compressor)
            if way is None or (measured and algorithm != "backend" and way.source == "analytic"):
                continue
            if compressor == "none" or not pricer.device.codings or pricer.device.coding_rate(compressor):
                routes.append(way)
        pricer.ways[key] = tuple(routes)
    return pricer.ways[key]
