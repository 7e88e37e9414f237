"""The numeric problem of one layer with a leading axis over the cases, as ``section`` builds it.

Arrays of edges are computed when they are first read, and edges of equal tensors and states share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from ...ir.graph import TensorType
from ...ir.ops.loss import exit_pair
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
    """Seconds of all conversions of one tensor between its source and target pairs.

    late: True for a lone loss, which leaves as it is computed (``loss``); independent: axes along which replicas are
    independent, so that no conversion may communicate over them (``independent_axes``).
    """

    def __init__(
        self,
        pricer: CasePricer,
        kind: TensorType,
        sources: tuple[Pair, ...],
        targets: tuple[Pair, ...],
        grad: bool,
        is_placeholder: bool,
        late: bool = False,
        independent: tuple[int, ...] = (),
    ) -> None:
        self.pricer, self.kind, self.sources, self.targets = pricer, kind, sources, targets
        self.grad, self.is_placeholder, self.late, self.independent = grad, is_placeholder, late, independent
        self.known: dict[float, np.ndarray] = {}  # what ``kept`` has made

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
            mismatch = [[exit_pair(source).value != target for target in values[1]] for source in self.sources]
            seconds[:, np.array(mismatch)] = np.inf
        for axis in self.independent:
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
        moved = np.array([[s.value != t.value for t in self.targets] for s in self.sources], dtype=bool)
        copies: np.ndarray = np.where(moved.reshape(len(self.sources), len(self.targets)), self.values, 0.0)
        return copies

    def kept(self, whole: float) -> np.ndarray:
        """[num, sources, targets] bytes of the converted value, and ``whole`` times those of one that stays as it is.
        Equal questions get the same array."""
        if whole not in self.known:
            self.known[whole] = self.copies + whole * (self.values - self.copies) if whole else self.copies
        return self.known[whole]

    @cached_property
    def values(self) -> np.ndarray:
        """[num, sources, targets] bytes of the value as it is wanted, converted or not."""
        nbytes = self.pricer.local_bytes(self.kind, [pair.value for pair in self.targets])
        values: np.ndarray = np.where(np.isfinite(self.seconds), nbytes[:, None, :], 0.0)
        return values


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
    #: True if some consumer keeps its copy for the backward.
    copied: bool
    #: Recompute modes in which what is wanted unconverted counts here, not at its producer: how many bytes per byte.
    whole_in: Mapping[str, float]
    #: Recompute modes in which copies stay until the backward.
    kept_in: frozenset[str]
    #: Recompute modes in which the backward converts again.
    again_in: frozenset[str]
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
        return {mode: self._copies(mode) if mode in self.kept_in else self._nothing for mode in self.modes}

    @property
    def transient(self) -> Mapping[str, np.ndarray]:
        """Bytes of the copy while its layer is recomputed, by mode."""
        return {mode: self._nothing if mode in self.kept_in else self._copies(mode) for mode in self.modes}

    def _copies(self, mode: str) -> np.ndarray:
        if not self.copied:
            return self._nothing
        return self.conversions.kept(self.whole_in.get(mode, 0.0))

    @property
    def _nothing(self) -> np.ndarray:
        return np.broadcast_to(0.0, (len(self.seconds), len(self.states[0]), len(self.states[1])))


@dataclass(frozen=True, eq=False)
class CaseSection:
    """One layer in all cases. Parallel tuples over operators, arrays [num, choices]; see ``section.Section``."""

    layer: int
    modes: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    #: ``MeshChoice`` for ops (with the labels of some case; ``label`` has those of every case), ``ParameterChoice`` for
    #: parameters, ``Pair`` for the rest.
    choices: tuple[tuple[Choice, ...], ...]
    #: bool, True where the case has the choice.
    offered: tuple[np.ndarray, ...]
    #: Seconds per microbatch, all included.
    seconds: tuple[np.ndarray, ...]
    #: The part of ``seconds`` that is spent once per step (gradient reduction and update), divided by the microbatches.
    step_seconds: tuple[np.ndarray, ...]
    #: The part of ``step_seconds`` that sums whole gradients, which may run beside the backward.
    gradient_seconds: tuple[np.ndarray, ...]
    #: The part of ``seconds`` in the backward of a microbatch.
    backward_seconds: tuple[np.ndarray, ...]
    #: The part of ``backward_seconds`` that makes gradients of weights, for which no other stage waits.
    weight_seconds: tuple[np.ndarray, ...]
    #: Lower bound on the share of this layer in a stage of several layers: nothing for floating ops that more layers
    #: need, and the seconds of a parameter divided by the layers that use it.
    floor_seconds: tuple[np.ndarray, ...]
    resident: tuple[np.ndarray, ...]
    #: Seconds that recomputation adds, by mode.
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
