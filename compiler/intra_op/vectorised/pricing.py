"""The prices of ``pricing.MeshPricer`` for all cases at once: arrays with a leading axis [num] over the cases.

    op            the formulas of ``MeshPricer.op`` on arrays [num, choices]; exact measured ops one by one
    conversion    ``MeshPricer.convert`` as terms with prices (``pricing``)

Prices of one axis come from ``AxisPrice.pieces_of``, those of several together from ``MeshPricer.joint``.

Prices of messages in many cases side by side, and conversions as sums of them.

A step of a conversion costs what its collective takes for n / divisor[mask] bytes along its axis (``cases``), so a
conversion is a sum of *terms* (kind, axis, mask), at most 4·axes·2^axes and one for copies. The terms of a spec pair
depend on no tensor, their prices on no spec:

    seconds[v, s, t] = prices[v, terms] · counts[terms, s·t]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np
from torch.fx import Node

from ....costmodel.algorithms import IN_PLACE
from ....costmodel.compute import TWO_SIDED, measured_backward, op_price_many
from ....costmodel.hardware import Device
from ....costmodel.memory import parameter_bytes, updated_itemsize
from ...cost.gradient_communication import cheapest_offers
from ...cost.pricing import PricingContext, gradient_routes, gradient_type, pricing_context
from ...cost.signature import signature, sum_signature
from ...ir.graph import TensorType, tensor_operands, types_of
from ...ir.reshard import LOCAL_STEPS, steps_between
from ...ir.spec import Spec, local_shape
from ...plan.tensor_codecs import coder_seconds
from ...rules import MeshChoice, rule_for
from ...rules.base import times_sent
from .cases import Cases, cut_mask
from .op_strategies import OpChoices

__all__ = ["KINDS", "CasePricer", "Offers", "OpPrices", "Tariff", "conversion_counts", "num_terms"]


@dataclass(frozen=True, eq=False)
class OpPrices:
    """Seconds [num, choices] per microbatch, as ``OpPrice``."""

    forward: np.ndarray
    backward_input: np.ndarray
    backward_weight: np.ndarray
    internal_forward: np.ndarray
    internal_backward: np.ndarray
    wasted_flops: np.ndarray

    @property
    def ahead(self) -> np.ndarray:
        """The forward with the collectives inside: what running the op once more takes."""
        return self.forward + self.internal_forward

    @property
    def back(self) -> np.ndarray:
        """The backward with the collectives inside."""
        return self.backward_input + self.backward_weight + self.internal_backward


class CasePricer:
    """Prices in all cases of ``cases``."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.grad = cases, cases.layering.needs_grad
        groups: dict[int, tuple[Device, list[int]]] = {}
        for v in range(cases.num):
            device = cases.pricer(v).device
            groups.setdefault(id(device), (device, []))[1].append(v)
        self.devices = [
            (device, slice(None) if len(groups) == 1 else np.array(rows)) for device, rows in groups.values()
        ]
        self._tariffs: dict[tuple[int, str], Tariff] = {}

    # ---- messages

    def tariff(self, mask: int, kind: str) -> Tariff:
        """Prices of one collective in the groups that the axes of ``mask`` (those of more than one device) form."""
        key = mask, kind
        if key not in self._tariffs:
            cases, offers = self.cases, list[Offers | None]()
            known: dict[int, Offers | None] = {}
            for v in range(cases.num):
                pricer = cases.pricer(v)
                if id(pricer) not in known:
                    axes = [a for a in range(cases.axes) if mask >> a & 1 and cases.sizes[v, a] > 1]
                    joint = pricer.joint(axes) if axes else None
                    known[id(pricer)] = None if joint is None else joint.pieces_of(kind)
                offers.append(known[id(pricer)])
            self._tariffs[key] = Tariff(offers)
        return self._tariffs[key]

    def gradients(self, mask: int, itemsize: int) -> Tariff:
        """Prices of summing gradients of such elements in these groups, in the cheapest way."""
        if self.cases.communication.sums_exactly:
            return self.tariff(mask, IN_PLACE)
        key = mask, f"gradients of {itemsize} bytes"
        if key not in self._tariffs:
            cases, offers = self.cases, list[Offers | None]()
            for v in range(cases.num):
                axes = [a for a in range(cases.axes) if mask >> a & 1 and cases.sizes[v, a] > 1]
                offers.append(cheapest_offers(gradient_routes(cases.pricer(v), axes, itemsize)) if axes else None)
            self._tariffs[key] = Tariff(offers)
        return self._tariffs[key]

    # ---- tensors

    def whole_bytes(self, kind: TensorType) -> np.ndarray:
        """[num] bytes of a whole tensor; ``kind`` as at the capture extent."""
        return self.numel(kind) * kind.dtype.itemsize

    def numel(self, kind: TensorType) -> np.ndarray:
        """[num] elements of a whole tensor."""

        def make() -> np.ndarray:
            return self.cases.shapes(kind).prod(axis=1).astype(np.float64)[self.cases.extent_of]

        return self.cases.array(("numel", kind.shape), make)

    def local_bytes(self, kind: TensorType, specs: Sequence[Spec]) -> np.ndarray:
        """[num, specs] bytes of one tensor on one device."""
        return self.by_mask(kind)[:, np.array([cut_mask(spec) for spec in specs], dtype=np.intp)]

    def by_mask(self, kind: TensorType) -> np.ndarray:
        """[num, 2^axes] bytes on one device by the mask of the axes that cut the tensor."""
        cases = self.cases
        return cases.array(("bytes", kind), lambda: self.whole_bytes(kind)[:, None] / cases.divisor)

    # ---- ops

    def op(self, nodes: Sequence[Node], origin: Node, choices: OpChoices) -> OpPrices:
        """The prices of an op. nodes: the op at every extent; origin: in the graph at the capture extent."""
        cases, rule = self.cases, rule_for(origin)
        facts = pricing_context(origin, tensor_operands(origin), self.grad)
        whole = np.array([rule.flops(node) for node in nodes])[cases.extent_of]
        flops = whole[:, None] / cases.divisor[:, choices.splits]
        forward, ahead, back = self._compute(nodes, origin, choices, facts, flops)
        operands = tensor_operands(origin)
        for k, share, weight in facts.shared:
            specs = [choice.inputs[k].value for choice in choices.choices]
            added = share * self.add_seconds(types_of(operands[k])[0], specs)
            ahead, back = (ahead, back + added) if weight else (ahead + added, back)
        internal = self._internal(origin, choices)
        times = 1 + facts.sides if rule.cost_kind in TWO_SIDED else 1
        wasted = np.maximum(0.0, (flops * cases.num_devices[:, None] - whole[:, None]) * times)
        return OpPrices(forward, ahead, back, internal["forward"], internal["backward"], wasted)

    def _internal(self, origin: Node, choices: OpChoices) -> dict[str, np.ndarray]:
        cases = self.cases
        operands, outputs = tensor_operands(origin), types_of(origin)
        seconds = {phase: np.zeros(choices.offered.shape) for phase in ("forward", "backward")}
        for message in choices.messages:
            one, (side, index) = message.internal, message.internal.like
            if not one.is_sent(origin, self.grad):
                continue
            kind = types_of(operands[index])[0] if side == "input" else outputs[index]
            columns = list(message.columns)
            pairs = [getattr(choices.choices[c], "inputs" if side == "input" else "outputs")[index] for c in columns]
            size = self.local_bytes(kind, [pair.value for pair in pairs]) / kind.dtype.itemsize
            size = size * (one.itemsize * one.scale) * cases.divisor[:, [message.grows]]
            count = times_sent(one.times, cases.divisor[:, [message.majors]], cases.divisor[:, [1 << message.axis]])
            seconds[one.phase][:, columns] += count * self.tariff(1 << message.axis, one.kind).seconds(size)
        return seconds

    def _compute(
        self, nodes: Sequence[Node], origin: Node, choices: OpChoices, facts: PricingContext, flops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(forward, backward of activations, backward of parameters) of one device's share of the work."""
        kind, flows = rule_for(origin).cost_kind, origin.name in self.grad
        work = _Work(self, origin, choices, flops)
        parts = []
        for device, rows in self.devices:
            sizes = work.sizes(rows) if device.surfaces and kind in TWO_SIDED else None
            scores = work.scores(rows) if kind == "attention" else None
            price = partial(
                op_price_many,
                flops=flops[rows],
                nbytes=work.traffic[rows],
                dtype=facts.dtype,
                device=device,
                sizes=sizes,
                scores=scores,
            )
            forward = price("pointwise" if facts.copies[0] else kind)
            if not flows:
                backward = np.zeros_like(forward)
            elif kind not in TWO_SIDED:
                backward = price("pointwise" if facts.copies[1] else kind, direction="backward")
            elif measured_backward(kind, facts.dtype, device):
                backward = price(kind, direction="backward") * facts.sides / facts.possible
            else:
                backward = facts.sides * forward
            weight = backward * facts.weight_share
            parts.append((forward, backward - weight, weight))
        if len(parts) == 1:
            found = [np.array(part) for part in parts[0]]
        else:
            found = [np.zeros_like(flops) for _ in range(3)]
            for (_, rows), part in zip(self.devices, parts):
                for whole, own in zip(found, part):
                    whole[rows] = own
        self._measured(nodes, choices, found)
        return found[0], found[1], found[2]

    def _measured(self, nodes: Sequence[Node], choices: OpChoices, found: Sequence[np.ndarray]) -> None:
        """Replace what devices measured exactly."""
        cases = self.cases
        for device, rows in self.devices:
            if not device.op_times:
                continue
            for v in np.arange(cases.num)[rows]:
                for c in np.flatnonzero(choices.offered[v]):
                    text = self._signature(nodes, choices, int(v), int(c))
                    if text and (exact := device.op_time(text)) is not None:
                        times = exact.forward_s, exact.backward_input_s, exact.backward_weight_s
                        for part, seconds in zip(found, times):
                            part[v, c] = seconds

    def _signature(self, nodes: Sequence[Node], choices: OpChoices, v: int, c: int) -> str:
        """The signature of one choice in one case. Axes that leave the op whole do not change it."""
        cases, e = self.cases, self.cases.extent_of[v]
        shape, text = cases.cases[v].mesh_shape, choices.texts[choices.group_of[e]][c]
        labels = tuple(text.split(",")) if shape else ()
        cuts = tuple((label, size) for label, size in zip(labels, shape) if label != "whole")
        key = ("signature", nodes[e], cuts)
        cache = cases.samples.cache
        if key not in cache:
            one = choices.choices[c]
            cache[key] = signature(nodes[e], MeshChoice(labels, one.inputs, one.outputs, 1.0), shape, self.grad)
        found: str = cache[key]
        return found

    def add_seconds(self, kind: TensorType, specs: Sequence[Spec]) -> np.ndarray:
        """[num, specs] seconds to add one device's part of a tensor into another of its size."""

        def make() -> np.ndarray:
            elements = self.numel(kind)[:, None] / self.cases.divisor
            seconds = np.zeros_like(elements)
            for device, rows in self.devices:
                here = elements[rows]
                seconds[rows] = op_price_many("pointwise", here, 3 * here * kind.dtype.itemsize, kind.dtype, device)
            return seconds

        found = self.cases.array(("add", kind), make)[:, [cut_mask(spec) for spec in specs]]
        return self._measured_sums(kind, specs, found)

    def _measured_sums(self, kind: TensorType, specs: Sequence[Spec], seconds: np.ndarray) -> np.ndarray:
        cases, shapes = self.cases, self.cases.shapes(kind)
        for device, rows in self.devices:
            if not device.op_times:
                continue
            for v in np.arange(cases.num)[rows]:
                shape, mesh = tuple(map(int, shapes[cases.extent_of[v]])), cases.cases[v].mesh_shape
                for s, spec in enumerate(specs):
                    if self.divides(kind, spec)[v]:
                        exact = device.op_time(sum_signature(local_shape(shape, spec, mesh), kind.dtype))
                        seconds[v, s] = seconds[v, s] if exact is None else exact.forward_s
        return seconds

    def coder_seconds(self, code: str, kind: TensorType) -> np.ndarray:
        """[num] seconds per element of a tensor to encode it, and as many to decode it."""
        seconds = np.zeros(self.cases.num)
        for device, rows in self.devices:
            seconds[rows] = coder_seconds(code, kind, device)
        return seconds

    def sum_seconds(self, kind: TensorType, local: np.ndarray) -> np.ndarray:
        """[num] seconds to add a tensor of local shapes [num, dims] into another."""
        elements = local.prod(axis=1).astype(np.float64)
        seconds = np.zeros_like(elements)
        for device, rows in self.devices:
            here = elements[rows]
            seconds[rows] = op_price_many("pointwise", here, 3 * here * kind.dtype.itemsize, kind.dtype, device)
            for v in np.arange(len(local))[rows] if device.op_times else ():
                exact = device.op_time(sum_signature(tuple(map(int, local[v])), kind.dtype))
                seconds[v] = seconds[v] if exact is None else exact.forward_s
        return seconds

    def divides(self, kind: TensorType, spec: Spec) -> np.ndarray:
        """bool [num]: where ``spec`` cuts a tensor evenly. Cached."""
        cases = self.cases
        return cases.array(("divides", kind.shape, spec), lambda: cases.divides(cases.shapes(kind), spec))

    # ---- conversions

    def term_prices(self, kind: TensorType) -> np.ndarray:
        """[num, terms] seconds of every step that a conversion of a tensor may have."""
        cases = self.cases

        def make() -> np.ndarray:
            columns = [
                self.tariff(1 << axis, name).seconds(self.by_mask(kind)) for name in KINDS for axis in range(cases.axes)
            ]
            copied = np.zeros((cases.num, 1))
            for device, rows in self.devices:
                copied[rows, 0] = self.by_mask(kind)[rows, -1] / device.memory_bytes_per_s
            return np.concatenate([*columns, copied], axis=1)

        return cases.array(("terms", kind), make)

    def conversions(self, kind: TensorType, sources: tuple[Spec, ...], targets: tuple[Spec, ...]) -> np.ndarray:
        """[num, sources, targets] seconds of conversions in one direction, inf where there is none."""
        if not sources or not targets:  # a border that has no state in any case
            return np.zeros((self.cases.num, len(sources), len(targets)))
        counts, which, impossible = conversion_counts(sources, targets)
        seconds = np.zeros((counts.shape[1], self.cases.num))
        for price, count in zip(self.term_prices(kind).T, counts):  # a product would round by how many rows there are
            if count.any():
                seconds += count[:, None] * price
        if impossible is not None:
            seconds[impossible] = np.inf
        found = seconds.take(which, axis=0).reshape(len(sources), len(targets), -1)
        return np.moveaxis(found, -1, 0)  # rows lie side by side, as elimination wants them

    # ---- parameters

    def parameter_rates(self, kind: TensorType, trainable: bool) -> tuple[float, float, float]:
        """Bytes per element of a parameter, its gradient and its optimizer state."""
        if not trainable:
            return float(kind.dtype.itemsize), 0.0, 0.0
        mixed = self.cases.graph.mixed
        bill = parameter_bytes(1, kind.dtype, self.cases.optimizer, mixed, self.gradient_type(kind).dtype)
        return float(bill.parameter), float(bill.gradient), float(bill.optimizer_state)

    def gradient_type(self, kind: TensorType) -> TensorType:
        """The type in which gradients of a parameter are kept and summed."""
        return gradient_type(kind, self.cases.graph.mixed)

    def update_seconds(self, kind: TensorType, elements: np.ndarray) -> np.ndarray:
        """[num, …] seconds to update ``elements`` of a trained parameter on each device."""
        parameter, gradient, state = self.parameter_rates(kind, True)
        optimizer = self.cases.optimizer
        itemsize = updated_itemsize(kind.dtype, optimizer, self.cases.graph.mixed)
        seconds = np.zeros_like(elements)
        for device, rows in self.devices:
            rate = device.optimizer_rate(optimizer, itemsize)
            if rate is not None:
                own = rate.alpha_s + rate.beta_s_per_byte * itemsize * elements[rows]
            else:
                own = 2 * (parameter + gradient + state) * elements[rows] / device.memory_bytes_per_s
            seconds[rows] = np.where(elements[rows] > 0, own, 0.0)
        return seconds


class _Work:
    """Bytes and sizes of an op's local work [num, choices]."""

    def __init__(self, pricer: CasePricer, origin: Node, choices: OpChoices, flops: np.ndarray) -> None:
        self.pricer, self.choices, self.flops = pricer, choices, flops
        self.operands = [types_of(operand)[0] for operand in tensor_operands(origin)]
        self.output = types_of(origin)[0]
        traffic = np.zeros_like(flops)
        for k, kind in enumerate(types_of(origin)):
            traffic += pricer.local_bytes(kind, [choice.outputs[k].value for choice in choices.choices])
        if rule_for(origin).cost_kind == "embedding":
            traffic *= 2
        else:
            for kind, specs in zip(self.operands, choices.reads):
                traffic += pricer.local_bytes(kind, specs)
        self.traffic = traffic

    def _extent(self, kind: TensorType, specs: Sequence[Spec], dim: int) -> np.ndarray:
        """[num, choices] the local extent of one dim."""
        cases = self.pricer.cases
        masks = [sum(1 << a for a, p in enumerate(spec) if p.is_shard and p.dim == dim) for spec in specs]
        return cases.shapes(kind)[cases.extent_of, dim][:, None] / cases.divisor[:, masks]

    def sizes(self, rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``Surface.sizes`` of the local output."""
        specs = [choice.outputs[0].value for choice in self.choices.choices]
        kind = self.output
        total = self.pricer.local_bytes(kind, specs) / kind.dtype.itemsize
        cols = self._extent(kind, specs, len(kind.shape) - 1) if kind.shape else np.ones_like(total)
        count = np.where(cols > 0, total / np.maximum(cols, 1), 0.0)
        inner = np.where(total > 0, self.flops / (2 * np.maximum(total, 1)), 0.0)
        return count[rows], inner[rows], cols[rows]

    def scores(self, rows: slice | np.ndarray) -> np.ndarray:
        """Queries × keys over the batch entries and heads of one device."""
        queries, keys = self.operands[:2]
        specs, others = self.choices.reads[:2]
        count = self.pricer.local_bytes(queries, specs) / queries.dtype.itemsize
        count = count / self._extent(queries, specs, len(queries.shape) - 1)
        return (count * self._extent(keys, others, len(keys.shape) - 2))[rows]


KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
Offers = Sequence[Sequence[tuple[float, float, float]]]  # ``AxisPrice.pieces_of``


class Tariff:
    """Prices of one kind of message in every case: offers [num_offers, num_pieces, num] of (from_bytes, a, b)."""

    def __init__(self, offers: Sequence[Offers | None]) -> None:
        """offers: per case its offers, each its pieces; None where messages cost nothing."""
        most = max((len(one) for one in offers if one), default=1)
        pieces = max((len(piece) for one in offers if one for piece in one), default=1)
        self.parts = np.zeros((3, most, pieces, len(offers)))
        self.parts[0, :, 1:], self.parts[1] = np.inf, np.inf
        for v, one in enumerate(offers):
            if one is None:
                self.parts[1, :, :, v] = 0.0
            for w, price in enumerate(one or ()):
                for k, piece in enumerate(price):
                    self.parts[:, w, k, v] = piece

    def seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """Seconds for ``nbytes`` [num, …]; nothing for no bytes."""
        shape = (-1,) + (1,) * (nbytes.ndim - 1)
        best: np.ndarray | None = None
        for w in range(self.parts.shape[1]):
            start, a, b = self.parts[:, w].reshape(3, self.parts.shape[2], *shape)
            seconds = a[0] + b[0] * nbytes
            for k in range(1, len(start)):
                seconds = np.where(nbytes >= start[k], a[k] + b[k] * nbytes, seconds)
            best = seconds if best is None else np.minimum(best, seconds)
        assert best is not None
        found: np.ndarray = np.where(nbytes == 0, 0.0, best)
        return found

    def least_rate(
        self, smallest: np.ndarray, largest: float, counted: float = np.inf, factor: float = 1.0
    ) -> np.ndarray:
        """[num] ``AxisPrice.least_rate`` of parts of ``smallest`` bytes [num]."""
        start, a, b = self.parts
        end = np.concatenate([start[:, 1:], np.full_like(start[:, :1], np.inf)], axis=1)
        within = (start <= largest) & (smallest < end)
        most = min(largest, counted)
        spread = np.where(end < most, end, most * factor)
        found: np.ndarray = np.where(within, a / spread + b, np.inf).min(axis=(0, 1))
        return found


# ---- what conversions consist of


def num_terms(axes: int) -> int:
    """The number of terms on a mesh: steps that communicate by kind, axis and cuts, and copies last."""
    return len(KINDS) * axes * (1 << axes) + 1


@lru_cache(maxsize=4096)
def conversion_counts(
    sources: tuple[Spec, ...], targets: tuple[Spec, ...]
) -> tuple[np.ndarray, np.ndarray, int | None]:
    """(how often each term stands in each way to convert [terms, ways], which way each conversion goes [sources ·
    targets], the way of those that do not exist, None if all do)."""
    ways: dict[tuple[int, ...] | None, int] = {}
    which = np.array([ways.setdefault(_terms(s, t), len(ways)) for s in sources for t in targets], dtype=np.intp)
    counts = np.zeros((num_terms(len(sources[0])), len(ways)))
    for terms, way in ways.items():
        for term in terms or ():
            counts[term, way] += 1
    return counts, which, ways.get(None)


@cache
def _terms(source: Spec, target: Spec) -> tuple[int, ...] | None:
    """The terms of one conversion: for each step (kind, axis, mask of the axes that cut what it moves)."""
    if source == target:
        return ()
    try:
        steps = steps_between(source, target)
    except ValueError:
        return None
    axes, mask, out = len(source), cut_mask(source), []
    for step in steps:
        bit, before = 1 << step.axis, mask
        if step.kind in ("slice", "reduce_scatter"):
            mask |= bit
        elif step.kind in ("all_gather", "pad"):
            mask &= ~bit
        if step.kind in LOCAL_STEPS:
            out.append(num_terms(axes) - 1)
        else:
            kind = KINDS.index(step.kind.removesuffix("_max"))
            out.append(((kind * axes) + step.axis) * (1 << axes) + (before & mask))
    return tuple(out)
