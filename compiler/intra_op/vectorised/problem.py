"""The values that ``section`` builds: one layer as a numeric problem, with a leading axis over the cases.

Arrays of edges are made when they are first asked for, and edges of equal tensors and states share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from ...ir.graph import TensorType
from ...ir.ops.loss import leaving
from ...ir.spec import Pair
from ...plan.independent_axes import converts_over
from ...rules import MeshChoice
from .op_strategies import OpChoices
from .parameters import ParameterChoice
from .pricing import CasePricer

__all__ = ["ByMode", "CaseEdge", "CaseSection", "Choice", "Conversions"]

Choice = MeshChoice | ParameterChoice | Pair
ByMode = dict[str, np.ndarray]


class Conversions:
    """Seconds of all conversions of one tensor between its source and target pairs. late: of a lone loss, which leaves
    as it is made (``loss``). loose: axes over which nothing may be sent (``independent_axes``)."""

    def __init__(
        self,
        pricer: CasePricer,
        kind: TensorType,
        sources: tuple[Pair, ...],
        targets: tuple[Pair, ...],
        grad: bool,
        is_placeholder: bool,
        late: bool = False,
        loose: tuple[int, ...] = (),
    ) -> None:
        self.pricer, self.kind, self.sources, self.targets = pricer, kind, sources, targets
        self.grad, self.is_placeholder, self.late, self.loose = grad, is_placeholder, late, loose

    @cached_property
    def ahead(self) -> np.ndarray:
        """[num, sources, targets] seconds in the forward."""
        values = tuple(pair.value for pair in self.sources), tuple(pair.value for pair in self.targets)
        seconds = self.pricer.conversions(self.kind, *values)
        if self.is_placeholder:  # what every rank holds whole is cut for nothing
            free = [
                [all(v.kind == "R" or v == w for v, w in zip(source, target)) for target in values[1]]
                for source in values[0]
            ]
            seconds[:, np.array(free)] = 0.0
        if self.late:
            left = [[leaving(source).value != target for target in values[1]] for source in self.sources]
            seconds[:, np.array(left)] = np.inf
        for axis in self.loose:
            pairs = product(self.sources, self.targets)
            sends = np.array([converts_over(*pair, self.kind, self.grad, axis) for pair in pairs], dtype=bool)
            there = self.pricer.cases.sizes[:, axis, None, None] > 1
            seconds = np.where(there & sends.reshape(seconds.shape[1:]), np.inf, seconds)
        return seconds

    @cached_property
    def back(self) -> np.ndarray:
        """[num, sources, targets] seconds in the backward."""
        if not (self.grad and self.kind.is_float):
            return np.broadcast_to(0.0, self.ahead.shape)
        cotangents = tuple(pair.cotangent for pair in self.targets), tuple(pair.cotangent for pair in self.sources)
        return self.pricer.conversions(self.kind, *cotangents).swapaxes(1, 2)

    @cached_property
    def seconds(self) -> np.ndarray:
        """[num, sources, targets] both ways."""
        return self.ahead + self.back if self.grad and self.kind.is_float else self.ahead

    @cached_property
    def copies(self) -> np.ndarray:
        """[num, sources, targets] bytes of the converted value, 0 where it stays as it is."""
        nbytes = self.pricer.local_bytes(self.kind, [pair.value for pair in self.targets])
        moved = np.array([[s.value != t.value for t in self.targets] for s in self.sources], dtype=bool)
        moved = moved.reshape(len(self.sources), len(self.targets))
        found: np.ndarray = np.where(moved & np.isfinite(self.seconds), nbytes[:, None, :], 0.0)
        return found


@dataclass(frozen=True, eq=False)
class CaseEdge:
    """A tensor and its conversions. source: [producer's choices] → source state; consumers: (operator, [its choices] →
    target state); states: the pairs behind source and target states. All arrays are [num, sources, targets].

    ``floor``: the factor of the seconds that a stage of several layers is sure to pay (see ``CaseSection``).
    """

    name: str
    producer: int
    source: np.ndarray
    consumers: tuple[tuple[int, np.ndarray], ...]
    states: tuple[tuple[Pair, ...], tuple[Pair, ...]]
    conversions: Conversions
    copied: bool  # whether some consumer keeps its copy for the backward
    kept_in: frozenset[str]  # modes in which copies stay until the backward
    again_in: frozenset[str]  # modes in which the backward converts again
    modes: tuple[str, ...]
    floor: float = 1.0

    @property
    def seconds(self) -> np.ndarray:
        """Forward and backward, once."""
        return self.conversions.seconds

    @property
    def backward(self) -> np.ndarray:
        """Of these seconds the backward's."""
        return self.conversions.back

    @property
    def again(self) -> Mapping[str, np.ndarray]:
        """Seconds that each mode adds."""
        return {mode: self.conversions.ahead if mode in self.again_in else self._nothing for mode in self.modes}

    @property
    def bytes(self) -> Mapping[str, np.ndarray]:
        """Bytes per microbatch in flight of the converted copy, by mode."""
        return {mode: self._copies if mode in self.kept_in else self._nothing for mode in self.modes}

    @property
    def transient(self) -> Mapping[str, np.ndarray]:
        """Bytes of the copy while its layer is recomputed, by mode."""
        return {mode: self._nothing if mode in self.kept_in else self._copies for mode in self.modes}

    @property
    def _copies(self) -> np.ndarray:
        return self.conversions.copies if self.copied else self._nothing

    @property
    def _nothing(self) -> np.ndarray:
        return np.broadcast_to(0.0, (len(self.seconds), len(self.states[0]), len(self.states[1])))


@dataclass(frozen=True, eq=False)
class CaseSection:
    """One layer in all cases. Parallel tuples over operators, arrays [num, choices]; see ``section.Section``.

    choices: MeshChoice for ops (with the labels of some case: ``label`` knows every case's), ParameterChoice for
    parameters, Pair for the rest; offered: bool, where a case has the choice. seconds: per microbatch, everything;
    step_seconds: of these what is done once per step, over the number of microbatches (gradients' reduction and the
    update; adding gradients up belongs to every microbatch); gradient_seconds: of these the reduction and gathers that
    could hide behind compute; backward_seconds: of the seconds those in the backward of a microbatch; weight_seconds:
    of these the gradients of weights, for which no other stage waits. floor_seconds:
    what a stage that holds several layers pays for this one at least: nothing for floating ops that more layers need,
    a parameter's seconds shared among the layers that use it.
    """

    layer: int
    modes: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    offered: tuple[np.ndarray, ...]
    seconds: tuple[np.ndarray, ...]
    step_seconds: tuple[np.ndarray, ...]
    gradient_seconds: tuple[np.ndarray, ...]
    backward_seconds: tuple[np.ndarray, ...]
    weight_seconds: tuple[np.ndarray, ...]
    floor_seconds: tuple[np.ndarray, ...]
    resident: tuple[np.ndarray, ...]
    again: tuple[ByMode, ...]
    saved: tuple[ByMode, ...]
    transient: tuple[ByMode, ...]
    edges: tuple[CaseEdge, ...]
    ops: Mapping[str, OpChoices] = field(repr=False)
    extent_of: np.ndarray = field(repr=False)

    def index(self, kind: str) -> dict[str, int]:
        """Name → operator index of all operators of one kind."""
        return {name: i for i, (name, k) in enumerate(zip(self.names, self.kinds)) if k == kind}

    def label(self, operator: int, choice: int, v: int) -> str:
        """The text by which a plan names a choice in case ``v``."""
        if self.kinds[operator] == "op":
            own = self.ops[self.names[operator]]
            return own.texts[int(own.group_of[self.extent_of[v]])][choice]
        return str(self.choices[operator][choice])
