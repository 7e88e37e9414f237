"""Parameter sharding (ZeRO levels 0 to 3): the patterns that the search knows, with their seconds and bytes.

The ops of a parameter read it in a pair (value | cotangent). Let A be the mesh axes (of size > 1) on which the value is
whole and the gradient a sum of addends (for a frozen parameter: on which the value is whole), d the product of their
sizes, n the bytes of the value on one device, k the optimizer's bytes per byte. A pattern other than "replicated" cuts
one more tensor dim by all of A: the first that no axis cuts and that d divides.

    pattern      per microbatch                         per step                            bytes of value, grad, state
    replicated                                          all_reduce(n), update n             n    n    k n
    zero1                                               reduce_scatter(n), all_gather(n),   n    n    k n/d
                                                        update n/d
    zero2        reduce_scatter(n)                      all_gather(n), update n/d           n    n/d  k n/d
    zero3        2 all_gather(n), reduce_scatter(n)     update n/d                          n/d  n/d  k n/d, and n while
                                                                                            its ops run

A frozen parameter is replicated, or "zero3" without gradient, reduction and update. The specs of a
``ParameterSharding`` say what is cut. The frequency of the reduction tells zero1 from zero2 (Rajbhandari et al. 2020,
ZeRO).

Collectives run in the groups that A forms together and cost their share of a full bucket, as gradients do
(``MeshPricer.gradient_seconds``); those of "zero3" no more than their share of any message that may be sent, and the
second gather only where it is (``layer_gathers``). Gradients of later microbatches are added where the gradient is kept
(``accumulate_seconds``). Under mixed precision gradients are kept and summed in fp32, and so is the n/d of a value in
"zero3", which is the master.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from ..ir.graph import TensorType
from ..ir.spec import P, Pair, R, S, Spec, without_partials
from ..plan.plan import BUCKET_BYTES, ParameterSharding
from ..plan.tensor_codecs import coder_seconds, wire_share
from .gradient_reduction import Bucket, Gradient, make_buckets
from .layer_gathers import GatherUse
from .pricing import MeshPricer, gradient_type, partial_axes

__all__ = [
    "PATTERNS",
    "ShardingPrice",
    "UnfilledMessage",
    "accumulate_seconds",
    "gathered_bytes",
    "parameter_shardings",
    "sharding_bytes",
    "sharding_seconds",
    "sharding_text",
    "shardings_by_pattern",
    "unfilled_messages",
    "with_summed_gradient",
]

PATTERNS = ("replicated", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class ShardingPrice:
    """Seconds that a parameter costs beside its ops and the addition of gradients: reductions and gathers, per
    microbatch and per step, and the update (per step)."""

    reduce_microbatch_s: float = 0.0
    gather_forward_s: float = 0.0
    gather_backward_s: float = 0.0
    reduce_step_s: float = 0.0
    gather_step_s: float = 0.0
    update_s: float = 0.0

    @property
    def per_microbatch_s(self) -> float:
        """Seconds of every microbatch."""
        return self.gather_forward_s + self.gather_backward_s + self.reduce_microbatch_s

    @property
    def per_step_s(self) -> float:
        """Seconds once per step, the update included."""
        return self.reduce_step_s + self.gather_step_s + self.update_s


# ---- which there are


def shardings_by_pattern(
    kind: TensorType,
    pair: Pair,
    mesh_shape: Sequence[int],
    trainable: bool,
    allowed: Collection[str] = PATTERNS,
) -> tuple[tuple[str, ParameterSharding], ...]:
    """Return the shardings of a parameter that its ops read in ``pair``, by pattern: those of ``allowed`` that its
    shape permits, in the order of ``PATTERNS``; "replicated" if there is none."""
    reduced = without_partials(pair.cotangent)
    replicated = "replicated", ParameterSharding(pair, pair.value, reduced, pair.value)
    wanted = [name for name in PATTERNS[1:] if name in allowed and (trainable or name == "zero3")]
    cut = _cut_further(kind, pair, mesh_shape, trainable) if wanted else None
    if cut is None:
        return (replicated,)
    shardings = [replicated] if "replicated" in allowed else []
    for name in wanted:
        stored = cut if name == "zero3" else pair.value
        gather = "microbatch" if name == "zero3" else "step"
        reduce = "microbatch" if name in ("zero2", "zero3") and trainable else "step"
        shardings.append((name, ParameterSharding(pair, stored, cut, cut, gather, reduce)))
    return tuple(shardings)


def parameter_shardings(
    kind: TensorType, pairs: Sequence[Pair], mesh_shape: Sequence[int], trainable: bool, allowed: Collection[str]
) -> list[ParameterSharding]:
    """Return the shardings of a parameter that its ops may read in each of ``pairs``.

    Where "replicated" is not allowed, no pair serves to evade that: a pair that could only be replicated is left out if
    its ``with_summed_gradient`` pair has another pattern.
    """
    by_pair = {pair: shardings_by_pattern(kind, pair, mesh_shape, trainable, allowed) for pair in pairs}
    stays = {pair for pair, options in by_pair.items() if options[0][0] == "replicated"}
    if "replicated" not in allowed:
        stays = {
            pair for pair in stays if with_summed_gradient(pair) not in by_pair or with_summed_gradient(pair) in stays
        }
    return [
        r for pair, options in by_pair.items() if pair in stays or options[0][0] != "replicated" for _, r in options
    ]


def with_summed_gradient(pair: Pair) -> Pair:
    """The pair of the same value whose gradient is a sum wherever the value is whole."""
    return Pair(pair.value, tuple(P if v == R else c for v, c in zip(pair.value, pair.cotangent)))


def _cut_further(kind: TensorType, pair: Pair, mesh_shape: Sequence[int], trainable: bool) -> Spec | None:
    """The value's spec with its first free dim cut by all axes of A; None where there is no such axis or dim."""
    axes = _shared_axes(pair, mesh_shape, trainable)
    taken = {placement.dim for placement in pair.value if placement.is_shard}
    parts = prod(mesh_shape[axis] for axis in axes)
    for dim, extent in enumerate(kind.shape):
        if axes and dim not in taken and extent and extent % parts == 0:
            return tuple(S(dim) if axis in axes else placement for axis, placement in enumerate(pair.value))
    return None


def _shared_axes(pair: Pair, mesh_shape: Sequence[int], trainable: bool) -> tuple[int, ...]:
    whole = {axis for axis, placement in enumerate(pair.value) if placement == R and mesh_shape[axis] > 1}
    if not trainable:
        return tuple(sorted(whole))
    return tuple(axis for axis in partial_axes(pair, mesh_shape) if axis in whole)


def sharding_text(sharding: ParameterSharding) -> str:
    """The text by which a plan pins a sharding: its pair, and the pattern unless that is "replicated": "R|P zero2"."""
    name = sharding.pattern
    return str(sharding.compute) if name == "replicated" else f"{sharding.compute} {name}"


# ---- seconds


def sharding_seconds(
    pricer: MeshPricer,
    kind: TensorType,
    sharding: ParameterSharding,
    microbatches: int = 1,
    trainable: bool = True,
    uses: Sequence[GatherUse] = (),
) -> ShardingPrice:
    """Seconds of the reductions, gathers and the update of one parameter, all of them exposed.

    ``accumulate_seconds`` has the addition of gradients. ``microbatches`` changes nothing per microbatch or per step.
    uses: the layers that gather it in every microbatch; without them those messages are priced elsewhere
    (``layer_gathers``).
    """
    assert microbatches >= 1, microbatches
    axes = sharding.scattered_axes
    update = 0.0
    if trainable:
        update = pricer.optimizer_seconds(kind, pricer.parameter_memory(kind, sharding.optimizer, True))
    if axes and sharding.gather == "microbatch":
        forward, backward, reduce = _shares(pricer, kind, sharding, uses)
        return ShardingPrice(reduce if trainable else 0.0, forward, backward, update_s=update)
    if not trainable:
        return ShardingPrice()
    if not axes:
        return ShardingPrice(reduce_step_s=pricer.gradient_seconds(kind, sharding.compute), update_s=update)
    sums, value = gradient_type(kind, pricer.mixed), sharding.compute.value
    reduce = _full_bucket(pricer, "reduce_scatter", axes, pricer.local_bytes(sums, value))
    gather = _full_bucket(pricer, "all_gather", axes, pricer.local_bytes(kind, value))
    often = sharding.reduce == "microbatch"
    return ShardingPrice(
        reduce_microbatch_s=reduce if often else 0.0,
        reduce_step_s=0.0 if often else reduce,
        gather_step_s=gather,
        update_s=update,
    )


def _shares(
    pricer: MeshPricer, kind: TensorType, sharding: ParameterSharding, uses: Sequence[GatherUse]
) -> tuple[float, float, float]:
    """Seconds of the messages of these layers that no message undercuts: (gathers in the forward, in the backward,
    reductions)."""
    axes, value, code = sharding.scattered_axes, sharding.compute.value, pricer.communication.weights
    sums, elements = gradient_type(kind, pricer.mixed), pricer.local_bytes(kind, value) / kind.dtype.itemsize
    parts = prod(pricer.mesh_shape[axis] for axis in axes)

    def share(collective: str, sent: TensorType, use: GatherUse, codings: float) -> float:
        each = sent.dtype.itemsize * wire_share(code, sent)
        seconds = elements * each * pricer.message_rate(collective, axes, elements * each, *use.spread(kind, each))
        return seconds + elements * codings * coder_seconds(code, sent, pricer.device)

    gathers = [share("all_gather", kind, use, 1 + 1 / parts) for use in uses]
    again = sum(seconds for seconds, use in zip(gathers, uses) if use.again)
    return sum(gathers), again, sum(share("reduce_scatter", sums, use, 2) for use in uses)


def _full_bucket(pricer: MeshPricer, collective: str, axes: Sequence[int], size: float) -> float:
    """Seconds of ``size`` whole bytes as a share of a full bucket."""
    full = max(size, BUCKET_BYTES)
    return pricer.message_seconds(collective, axes, full) * size / full


@dataclass(frozen=True)
class UnfilledMessage:
    """The seconds that a message which does not fill its bucket takes beyond its share of a full one."""

    collective: str
    axes: tuple[int, ...]
    #: True if it is sent in every microbatch, False if once per step.
    often: bool
    seconds: float


def unfilled_messages(
    pricer: MeshPricer, blocks: Sequence[tuple[TensorType, ParameterSharding]]
) -> list[UnfilledMessage]:
    """Seconds that messages add to ``sharding_seconds`` of ZeRO-1 and ZeRO-2 parameters, given in program order:
    reductions, and gathers per step."""

    def buckets(kinds: Sequence[TensorType], often: bool | None = None) -> list[Bucket]:
        """Of these types, of all parameters or of those that are reduced in every microbatch or not."""
        return make_buckets([
            Gradient(str(k), one.scattered_axes, pricer.local_bytes(kind, one.compute.value), kind.dtype)
            for k, (kind, (_, one)) in enumerate(zip(kinds, blocks))
            if often in (None, one.reduce == "microbatch")
        ])  # fmt: skip

    values = [kind for kind, _ in blocks]
    sums = [gradient_type(kind, pricer.mixed) for kind in values]
    sent = [("reduce_scatter", often, bucket) for often in (True, False) for bucket in buckets(sums, often)]
    sent += [("all_gather", False, bucket) for bucket in buckets(values)]
    return [
        UnfilledMessage(
            collective, bucket.axes, often, max(0.0, pricer.message_seconds(*one) - _full_bucket(pricer, *one))
        )
        for collective, often, bucket in sent
        for one in [(collective, bucket.axes, bucket.nbytes)]
    ]


def accumulate_seconds(pricer: MeshPricer, kind: TensorType, sharding: ParameterSharding, microbatches: int) -> float:
    """Seconds per step to add the gradients of all microbatches but the first, as they lie while they add up."""
    spec = _gradient_spec(sharding)
    return pricer.accumulate_seconds(kind, Pair(spec, spec), microbatches)


def _gradient_spec(sharding: ParameterSharding) -> Spec:
    """The gradient's placement between microbatches: as the value's unless every microbatch reduces it."""
    return sharding.gradient if sharding.reduce == "microbatch" else sharding.compute.value


# ---- bytes


def sharding_bytes(
    pricer: MeshPricer, kind: TensorType, sharding: ParameterSharding, trainable: bool
) -> dict[str, float]:
    """Bytes on one device by cause ("parameters", "gradients", "optimizer"), all through the step."""
    bill = pricer.parameter_memory(kind, sharding.stored, trainable)
    if not trainable or sharding.optimizer == sharding.compute.value:
        return bill
    state = pricer.parameter_memory(kind, sharding.optimizer, True)
    gradient = pricer.parameter_memory(kind, _gradient_spec(sharding), True)
    bill = {**bill, "gradients": gradient["gradients"], "optimizer": state["optimizer"]}
    if sharding.stored != sharding.compute.value and gradient_type(kind, pricer.mixed) != kind:
        # programs gather the master: there is no other value
        master = pricer.local_bytes(gradient_type(kind, True), sharding.stored)
        bill |= {"parameters": master, "optimizer": bill["optimizer"] - master}
    return bill


def gathered_bytes(pricer: MeshPricer, kind: TensorType, sharding: ParameterSharding, again: bool) -> float:
    """Bytes of the gathered value that lives while the parameter's ops run; 0 where it is stored as they read it.
    again: whether a backward gathers it, which then has its gradient beside it until the layer's are sent."""
    stays = sharding.stored == sharding.compute.value
    return 0.0 if stays else (1 + again) * pricer.local_bytes(kind, sharding.compute.value)
