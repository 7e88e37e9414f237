"""Parameters in all cases at once: every pair under every allowed sharding pattern, with the prices of
``parameter_sharding``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...cost.layer_gathers import GatherUse
from ...cost.parameter_sharding import PATTERNS, with_summed_gradient
from ...ir.graph import TensorType
from ...ir.spec import P, Pair, R
from ...plan.plan import BUCKET_BYTES
from ...plan.tensor_codecs import wire_share
from .pricing import CasePricer

__all__ = ["ParameterChoice", "ParameterPrices", "parameter_prices"]


class ParameterChoice(NamedTuple):
    """A pair that ops compute with, and a pattern of ``parameter_sharding.PATTERNS``; as text what pins it in a
    plan."""

    pair: Pair
    pattern: str

    def __str__(self) -> str:
        return str(self.pair) if self.pattern == "replicated" else f"{self.pair} {self.pattern}"


@dataclass(frozen=True, eq=False)
class ParameterPrices:
    """The prices of a parameter, arrays [num, choices]."""

    choices: tuple[ParameterChoice, ...]
    offered: np.ndarray
    #: Seconds per microbatch, all included.
    seconds: np.ndarray
    #: The part of ``seconds`` that is spent once per step, divided by the microbatches.
    step: np.ndarray
    #: The part of ``step`` that sums whole gradients, which may run beside the backward.
    gradient: np.ndarray
    #: The part of ``seconds`` in the backward of every microbatch.
    backward: np.ndarray
    #: The part of ``backward`` that adds gradients up.
    weight: np.ndarray
    resident: np.ndarray
    #: ``parameter_sharding.gathered_bytes``.
    gathered: np.ndarray


def parameter_prices(
    pricer: CasePricer,
    kind: TensorType,
    pairs: Sequence[Pair],
    offered: np.ndarray,
    trainable: bool,
    requires_grad: bool,
    allowed: Collection[str] = ("replicated",),
    uses: tuple[GatherUse, ...] = (),
) -> ParameterPrices:
    """Prices of a parameter of ``kind`` (at the capture extent). offered: bool [num, pairs]; trainable: whether a
    gradient reaches it; requires_grad: whether one could; uses: the layers that read it. Choices of one pair stand
    together, "replicated" first."""
    key = ("parameter", kind, tuple(pairs), offered.tobytes(), trainable, requires_grad, tuple(allowed), uses)
    if key not in pricer.cases.cache:
        table = _Table(pricer, kind, trainable, requires_grad, uses)
        table.add_all(pairs, offered, allowed)
        pricer.cases.cache[key] = table.prices()
    prices: ParameterPrices = pricer.cases.cache[key]
    return prices


class _Table:
    def __init__(
        self,
        pricer: CasePricer,
        kind: TensorType,
        trainable: bool,
        requires_grad: bool,
        uses: tuple[GatherUse, ...],
    ) -> None:
        self.uses = uses
        self.pricer, self.kind, self.trainable, self.requires_grad = pricer, kind, trainable, requires_grad
        self.cases, self.sums = pricer.cases, pricer.gradient_type(kind)
        self.shapes = self.cases.shapes(kind)[self.cases.extent_of]
        self.elements = pricer.numel(kind)[:, None] / self.cases.divisor  # by mask
        self.columns: list[tuple[np.ndarray, ...]] = []
        self.choices: list[ParameterChoice] = []

    def prices(self) -> ParameterPrices:
        """Return the prices of all columns so far."""
        offered, *rest = (np.stack(column, axis=1) for column in zip(*self.columns))
        return ParameterPrices(tuple(self.choices), offered, *rest)

    def add_all(self, pairs: Sequence[Pair], offered: np.ndarray, allowed: Collection[str]) -> None:
        """Add the shardings of all pairs as ``parameter_shardings`` has them. offered: bool [num, pairs]."""
        wanted = [name for name in PATTERNS[1:] if name in allowed and (self.trainable or name == "zero3")]
        nowhere = np.zeros(self.cases.num, dtype=np.int64)
        fits = {pair: self._fit(pair, offered[:, k]) for k, pair in enumerate(pairs)} if wanted else {}
        for k, pair in enumerate(pairs):
            mask = offered[:, k]
            if wanted and "replicated" not in allowed:
                mask = mask & ~fits[pair][1]
                if with_summed_gradient(pair) in fits:
                    mask &= ~fits[with_summed_gradient(pair)][1]
            if mask.any() or not wanted:
                self._one(pair, "replicated", mask, 0, nowhere)
            shared, where, first = fits.get(pair, (0, nowhere, nowhere))
            for name in wanted if where.any() else ():
                self._one(pair, name, where, shared, first)

    def _fit(self, pair: Pair, offered: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """The axes that cut a state further, where they can, and the dim that they cut there."""
        shared = sum(
            1 << axis
            for axis, (value, cotangent) in enumerate(zip(pair.value, pair.cotangent))
            if value == R and (cotangent == P or not self.trainable)
        )
        divisor = self.cases.whole_divisor[:, shared]
        taken = {placement.dim for placement in pair.value if placement.is_shard}
        fits, first = np.zeros(self.cases.num, dtype=bool), np.zeros(self.cases.num, dtype=np.int64)
        for dim in range(self.shapes.shape[1]):
            if dim not in taken:
                mask = ~fits & (self.shapes[:, dim] > 0) & (self.shapes[:, dim] % divisor == 0)
                first[mask] = dim
                fits |= mask
        return shared, fits & offered & (divisor > 1), first

    def _one(self, pair: Pair, pattern: str, offered: np.ndarray, shared: int, dim: np.ndarray) -> None:
        """Add one sharding. shared: the axes that cut the state further; dim: [num] the dim that they cut."""
        cut = sum(1 << axis for axis, placement in enumerate(pair.value) if placement.is_shard)
        whole, part = self.elements[:, cut], self.elements[:, cut | shared]
        stored = part if pattern == "zero3" else whole
        kept = part if pattern in ("zero2", "zero3") else whole
        rates = self.pricer.parameter_rates(self.kind, self.requires_grad)
        if pattern == "zero3" and self.requires_grad and self.sums != self.kind:  # programs gather the master
            stored = np.zeros(self.cases.num)
        resident = rates[0] * stored + rates[1] * kept + rates[2] * part
        beside = 1 + (self.trainable and any(use.again for use in self.uses))  # the value, and its gradient
        gathered = beside * whole * self.kind.dtype.itemsize if pattern == "zero3" else np.zeros(self.cases.num)
        ahead, back, added, gradient, update = self._seconds(pair, pattern, whole, part, shared, dim)
        m = self.cases.microbatches
        step = (gradient + update) / m
        beside_s = gradient / m if pattern == "replicated" else np.zeros(self.cases.num)
        self.choices.append(ParameterChoice(pair, pattern))
        self.columns.append((offered, ahead + back + step, step, beside_s, back, added, resident, gathered))

    def _seconds(
        self, pair: Pair, pattern: str, whole: np.ndarray, part: np.ndarray, shared: int, dim: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """[num] each: (per microbatch in the forward, in the backward, of this to add gradients up; reduction and
        gathers per step, update)."""
        nothing = np.zeros(self.cases.num)
        size, sums = whole * self.kind.dtype.itemsize, whole * self.sums.dtype.itemsize
        if pattern == "zero3":
            gathers = [self._share("all_gather", shared, self.kind, use, whole, whole + part) for use in self.uses]
            ahead = sum(gathers, nothing)
            again = sum((seconds for seconds, use in zip(gathers, self.uses) if use.again), nothing)
            if not self.trainable:
                return ahead, again, nothing, nothing, nothing
        elif not self.trainable:
            return (nothing,) * 5
        update = self.pricer.update_seconds(self.kind, part)
        # gradients add up where they are kept: whole unless every microbatch reduces them
        added = self._added(pair, shared if pattern in ("zero2", "zero3") else 0, dim)
        if pattern == "replicated":
            partial = sum(1 << axis for axis, placement in enumerate(pair.cotangent) if placement == P)
            return nothing, added, added, self._bucket("all_reduce", partial, sums), update
        if pattern == "zero3":
            sent = (self._share("reduce_scatter", shared, self.sums, use, whole, 2 * whole) for use in self.uses)
            return ahead, added + again + sum(sent, nothing), added, nothing, update
        reduce, gather = self._bucket("reduce_scatter", shared, sums), self._bucket("all_gather", shared, size)
        if pattern == "zero1":
            return nothing, added, added, reduce + gather, update
        return nothing, added + reduce, added, gather, update

    def _share(
        self, collective: str, mask: int, sent: TensorType, use: GatherUse, whole: np.ndarray, coded: np.ndarray
    ) -> np.ndarray:
        """Seconds of its elements in a layer's message, no more than in any that may be sent. coded: elements to encode
        and decode."""
        if not mask:
            return np.zeros_like(whole)
        code = self.cases.communication.weights
        each = sent.dtype.itemsize * wire_share(code, sent)
        rate = self.pricer.tariff(mask, collective).least_rate(whole * each, *use.spread(self.kind, each))
        return whole * each * rate + coded * self.pricer.coder_seconds(code, sent)

    def _added(self, pair: Pair, shared: int, dim: np.ndarray) -> np.ndarray:
        """[num] seconds per microbatch to add its gradient up."""
        local = self.shapes.copy()
        for axis, placement in enumerate(pair.value):
            if placement.is_shard:
                local[:, placement.dim] //= self.cases.sizes[:, axis]
        if shared:
            rows = np.arange(len(local))
            local[rows, dim] //= self.cases.whole_divisor[:, shared]
        m = self.cases.microbatches
        return (m - 1) / m * self.pricer.sum_seconds(self.sums, local)

    def _bucket(self, collective: str, mask: int, size: np.ndarray) -> np.ndarray:
        """Seconds of ``size`` whole bytes as a share of a full bucket."""
        if not mask:
            return np.zeros_like(size)
        full = np.maximum(size, BUCKET_BYTES)
        if collective == "all_reduce":  # of gradients
            tariff = self.pricer.gradients(mask, self.sums.dtype.itemsize)
        else:
            tariff = self.pricer.tariff(mask, collective)
        return tariff.seconds(full) * size / full
