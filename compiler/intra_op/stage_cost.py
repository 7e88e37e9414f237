"""The price of the choices of one stage, by cause and by the origin of the price.

    per microbatch   forward, backward_input, backward_weight   the ops, with the additions of cotangents and gradients
                     recompute                                  what the backward runs once more
                     reshard, internal                          collectives between ops and inside them
                     host                                       the library around the two actions
    per step         gradient, overlapped                       the reduction that is exposed, and what hides
                     gather                                     of values that are cut further than ops read them
                     optimizer
                     loss                                       its sum over devices (``loss``)
    added later      transfer, sends; loss, tied (per step)     what several stages do together (``predict``)

``forward_s`` and ``backward_s`` are how long the two actions keep the stage busy. "overlapped" is in no sum. "gradient"
and "gather" are of the whole step, also where each microbatch reduces or gathers (``parameter_sharding``): these parts
are in ``forward_s`` and ``backward_s``, the rest is in ``step_s``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Node

from ..cost.gradient_reduction import (
    Bucket,
    Gradient,
    bucket_seconds,
    choose_routes,
    coding_source,
    hidden_seconds,
    make_buckets,
    route_source,
)
from ..cost.layer_gathers import LayerGather, gather_seconds, layer_gathers, scatter_seconds
from ..cost.parameter_sharding import ShardingPrice, accumulate_seconds, sharding_seconds, unfilled_messages
from ..cost.pricing import gradient_type, partial_axes
from ..ir.graph import TensorType, output_of, tensor_operands
from ..ir.reshard import LOCAL_STEPS, steps_between
from ..ir.spec import Pair, without_partials
from ..plan.plan import GradientReduction, ParameterSharding
from ..rules import MeshChoice
from .section import Section, StageContext

__all__ = ["CAUSES", "STEP_CAUSES", "StagePrice", "price_stage"]

#: Causes whose seconds are per step; those of the others are per microbatch.
STEP_CAUSES = ("gradient", "overlapped", "gather", "optimizer", "loss", "tied")
CAUSES = (
    "forward", "backward_input", "backward_weight", "recompute", "reshard", "internal", "transfer", "sends", "host",
    *STEP_CAUSES,
)  # fmt: skip


@dataclass(frozen=True)
class StagePrice:
    """Seconds per microbatch but for ``step_s``; ``sources``: seconds per step by the origin of the price."""

    forward_s: float
    backward_s: float
    step_s: float
    seconds: Mapping[str, float]
    sources: Mapping[str, float]
    wasted_flops: float
    #: (algorithm, codec) of the gradient reduction per group of axes.
    ways: Mapping[tuple[int, ...], tuple[str, str]] = field(default_factory=dict)
    #: Messages of the weights that are gathered in every microbatch.
    gathers: Sequence[LayerGather] = ()


def price_stage(
    context: StageContext, section: Section, chosen: Sequence[int], reductions: Sequence[GradientReduction] = ()
) -> StagePrice:
    """Return the price of ``chosen`` (an index per operator of ``section``) on one stage.

    Gradients travel as ``reductions`` say. Those that it does not name take the fastest algorithm and codec that
    ``pricer.communication`` allows.
    """
    return _Pricing(context, section, chosen, reductions).run()


class _Pricing:
    def __init__(
        self,
        context: StageContext,
        section: Section,
        chosen: Sequence[int],
        reductions: Sequence[GradientReduction],
    ) -> None:
        self.layer_of, self.gathers = context.layering.layer_of, list[LayerGather]()
        self.reductions, self.ways = reductions, dict[tuple[int, ...], tuple[str, str]]()
        self.graph, self.pricer, self.grad = context.graph, context.pricer, context.layering.needs_grad
        self.section, self.chosen, self.m, self.recompute = section, chosen, context.microbatches, context.recompute
        self.nodes = self.graph.by_name()
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.sources: defaultdict[str, float] = defaultdict(float)
        self.forward = self.backward = self.wasted = 0.0
        self.once = 0.0  # per step, beside the optimizer
        self.spans: dict[str, float] = {}  # op → seconds of its backward

    def run(self) -> StagePrice:
        # parameters whose whole gradients are reduced in buckets
        trained: dict[str, tuple[Node, Pair]] = {}
        # parameters whose blocks are reduced in buckets and gathered once per step (ZeRO-1 and ZeRO-2)
        blocks: dict[str, tuple[TensorType, ParameterSharding]] = {}
        # parameters that are gathered in every microbatch (ZeRO-3)
        layerwise: dict[str, ParameterSharding] = {}
        section = self.section
        for name, role, choices, pick in zip(section.names, section.kinds, section.choices, self.chosen):
            choice, node = choices[pick], self.nodes[name]
            if isinstance(choice, MeshChoice):
                self._op(node, choice)
            elif isinstance(choice, ParameterSharding):
                trainable = node.meta["source"].requires_grad and name in self.grad
                self._parameter(node, choice, trainable)
                if trainable and not choice.scattered_axes:
                    trained[name] = (node, choice.compute)
                elif trainable and choice.gather != "microbatch":
                    blocks[name] = (node.meta["type"], choice)
                if choice.scattered_axes and choice.gather == "microbatch":
                    layerwise[name] = choice
            elif role == "result":
                self._loss(node.meta["type"], choice)
        self._reshards()
        self._host()
        self._blocks(blocks)
        self._layerwise(layerwise)
        self._gradients(trained)
        step_s = self.once + self.seconds["optimizer"]
        return StagePrice(
            self.forward, self.backward, step_s, self.seconds, dict(self.sources), self.wasted, self.ways, self.gathers
        )

    def _op(self, node: Node, choice: MeshChoice) -> None:
        price, seconds = self.pricer.op(node, choice, self.grad), self.seconds
        again = 1.0 if node.name in self.recompute.repeated else 0.0
        seconds["forward"] += price.forward_s
        seconds["backward_input"] += price.backward_input_s
        seconds["backward_weight"] += price.backward_weight_s
        seconds["internal"] += price.internal_forward_s + price.internal_backward_s
        seconds["recompute"] += again * (price.forward_s + price.internal_forward_s)
        span = price.backward_s + price.internal_backward_s + again * (price.forward_s + price.internal_forward_s)
        self.forward += price.forward_s + price.internal_forward_s
        self.backward += span
        self.spans[node.name] = span
        self.wasted += price.wasted_flops
        self.sources[price.source] += self.m * ((1 + again) * price.forward_s + price.backward_s)
        for direction, inside in (
            ("forward", (1 + again) * price.internal_forward_s),
            ("backward", price.internal_backward_s),
        ):
            kinds = [self.pricer.axes[axis].source(one.kind) for axis, one in choice.internal if one.phase == direction]
            for kind in kinds:
                self.sources[kind] += self.m * inside / len(kinds)

    def _parameter(self, node: Node, sharding: ParameterSharding, trainable: bool) -> None:
        kind, pricer = node.meta["type"], self.pricer
        price = sharding_seconds(pricer, kind, sharding, self.m, trainable)
        axes = sharding.scattered_axes
        if axes:
            self._scattered(price, axes)
        if not trainable:
            return
        self.seconds["optimizer"] += price.update_s
        self.sources["measured" if pricer.update_rate(kind)[0] else "analytic"] += price.update_s
        added_s = accumulate_seconds(pricer, kind, sharding, self.m)
        self.seconds["backward_weight"] += added_s / self.m
        self.backward += added_s / self.m
        self.sources[pricer.add_source(gradient_type(kind, pricer.mixed), sharding.compute.value)] += added_s

    def _loss(self, kind: TensorType, pair: Pair) -> None:
        """The sum of the addends that the microbatches have left."""
        seconds = self.pricer.convert(pair.value, without_partials(pair.value), kind)
        self.seconds["loss"] += seconds
        self.once += seconds
        axes = [axis for axis, placement in enumerate(pair.value) if placement.is_partial]
        for axis in axes:
            self.sources[self.pricer.axes[axis].source("all_reduce")] += seconds / len(axes)

    def _scattered(self, price: ShardingPrice, axes: tuple[int, ...]) -> None:
        """Gathers and reductions of a parameter that is cut further than ops read it; nothing of them hides."""
        self.backward += price.reduce_microbatch_s
        self.once += price.gather_step_s + price.reduce_step_s
        self._sent("gather", "all_gather", axes, price.gather_step_s)
        self._sent("gradient", "reduce_scatter", axes, self.m * price.reduce_microbatch_s + price.reduce_step_s)

    def _sent(self, cause: str, collective: str, axes: tuple[int, ...], seconds: float) -> None:
        """Seconds per step of messages over these axes, by cause and source."""
        self.seconds[cause] += seconds
        self.sources[self.pricer.message_source(collective, axes)] += seconds

    def _layerwise(self, shardings: Mapping[str, ParameterSharding]) -> None:
        """Weights that are gathered in every microbatch, in a message per layer and kind."""
        if not shardings:
            return
        members = [node for node in self.graph if output_of(node)[0].name in self.spans]
        self.gathers = layer_gathers(members, self.layer_of, shardings, self.grad, self.recompute)
        for gather in self.gathers:
            ahead = gather_seconds(self.pricer, gather)
            back, reduce = ahead if gather.again else 0.0, scatter_seconds(self.pricer, gather)
            self.forward += ahead
            self.backward += back + reduce
            self._sent("gather", "all_gather", gather.axes, self.m * (ahead + back))
            self._sent("gradient", "reduce_scatter", gather.axes, self.m * reduce)

    def _reshards(self) -> None:
        section, chosen = self.section, self.chosen
        for edge, (source_pairs, target_pairs) in zip(section.edges, section.edge_states):
            given = edge.source[chosen[edge.producer]]
            kind, needs = self.nodes[edge.name].meta["type"], edge.name in self.grad
            for target in {int(wanted[chosen[consumer]]) for consumer, wanted in edge.consumers}:
                pair, want = source_pairs[given], target_pairs[target]
                if pair == want or not float(edge.seconds[given, target]) > 0:
                    continue
                ahead, back = self.pricer.reshard(pair, want, kind, needs)
                again = ahead if self.recompute.converts_again(edge.name) else 0.0
                self.seconds["reshard"] += ahead + back
                self.seconds["recompute"] += again
                self.forward += ahead
                self.backward += back + again
                steps = [*steps_between(pair.value, want.value)]
                steps += steps_between(want.cotangent, pair.cotangent) if needs else ()
                sources = {
                    self.pricer.axes[s.axis].source(s.kind.removesuffix("_max"))
                    for s in steps
                    if s.kind not in LOCAL_STEPS
                }
                for source in sources or {"analytic"}:
                    self.sources[source] += self.m * (ahead + again + back) / max(1, len(sources))

    def _host(self) -> None:
        each = self.pricer.device.action_s
        self.seconds["host"] = 2 * each
        self.forward += each
        self.backward += each
        self.sources["measured"] += 2 * each * self.m

    # ---- the end of the step

    @cached_property
    def _order(self) -> tuple[list[Node], dict[str, int]]:
        """The ops, and parameters in program order, each with its first op."""
        order: dict[str, int] = {}
        ops = [node for node in self.graph if node.name in self.spans]
        for index, node in enumerate(ops):
            for operand in tensor_operands(node):
                order.setdefault(operand.name, index)
        return ops, order

    def _blocks(self, blocks: Mapping[str, tuple[TensorType, ParameterSharding]]) -> None:
        """Add the seconds that messages of blocks take beyond their share of full ones."""
        if not blocks:
            return
        _, order = self._order
        inside = [blocks[name] for name in sorted((name for name in blocks if name in order), key=order.__getitem__)]
        for more in unfilled_messages(self.pricer, inside):
            if more.often:
                self.backward += more.seconds
            else:
                self.once += more.seconds
            cause = "gather" if more.collective == "all_gather" else "gradient"
            self._sent(cause, more.collective, more.axes, (self.m if more.often else 1) * more.seconds)

    def _gradients(self, trained: Mapping[str, tuple[Node, Pair]]) -> None:
        """The reduction in buckets, what hides of it, and the copies into buckets of several gradients."""
        pricer = self.pricer
        ops, order = self._order
        done, total = [0.0] * len(ops), 0.0
        for index in range(len(ops) - 1, -1, -1):
            total += self.spans[ops[index].name]
            done[index] = total
        gradients, ready = [], {}
        stretch = self.backward / total if total else 1.0  # reshards and the like, evenly
        for name in sorted((name for name in trained if name in order), key=order.__getitem__):
            node, pair = trained[name]
            kind = gradient_type(node.meta["type"], pricer.mixed)
            nbytes = pricer.local_bytes(kind, pair.value)
            gradients.append(Gradient(name, partial_axes(pair, pricer.mesh_shape), nbytes, kind.dtype))
            ready[name] = done[order[name]] * stretch
        buckets = make_buckets(gradients)
        if not buckets:
            return

        def reduced(seconds: Callable[[Bucket], float]) -> tuple[float, float]:
            return hidden_seconds(buckets, seconds, ready, self.backward, pricer.device.overlap)

        def exposed(seconds: Callable[[Bucket], float]) -> float:
            total, hidden = reduced(seconds)
            return total - hidden

        self.ways = choose_routes(pricer, buckets, exposed, self.reductions)
        prices = {id(bucket): bucket_seconds(pricer, bucket, self.ways[bucket.axes]) for bucket in buckets}
        total_s, hidden = reduced(lambda bucket: prices[id(bucket)][1])
        copied = sum(2 * bucket.nbytes for bucket in buckets if len(bucket.gradients) > 1)
        copied_s = copied / pricer.device.memory_bytes_per_s
        beside_s = copied_s + sum(coding for coding, _ in prices.values())
        self.once += total_s - hidden + beside_s
        self.seconds["gradient"] += total_s - hidden + beside_s
        self.seconds["overlapped"] = hidden
        self.sources["analytic"] += copied_s
        for bucket in buckets:
            share = prices[id(bucket)][1] / total_s if total_s else 0.0
            self.sources[route_source(pricer, bucket, self.ways[bucket.axes])] += share * (total_s - hidden)
            self.sources[coding_source(pricer, self.ways[bucket.axes])] += prices[id(bucket)][0]
