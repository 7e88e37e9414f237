"""The rules of a user's autograd Function, of a long loop and of an opaque module: trials tell which dims can be split.

The rule knows nothing of such an op but its code. So it runs the op whole and in parts on small random tensors, forward
and backward (``trials``). It offers a way to cut the operands if, on every trial, the outputs of the parts are blocks
or addends of the whole outputs, and their gradients are blocks or addends of the whole gradients. A trial replaces the
model's extents by small ones, equal extents by equal ones; where the code does not run on these, the trial uses the
model's own, if they are small enough. An op without a confirmed cut is replicated, and the plan notes it.

The ways to cut that are tried: those that follow the data (``Trial.following_cuts``), where a half of an operand's dim
decides about the same half of an output's; where the code does not loop, up to ``MAX_CUTS`` others before them. Of an
opaque module only the batch is tried, once, during the capture (``batch_split``), on the module's own weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.fx import Node

from ..ir.custom_function import CustomFunction
from ..ir.graph import PRIME, TensorType, tensor_operands, types_of
from ..ir.long_loop import LoopFunction
from ..ir.spec import Placement, R, S
from . import register, whole
from .base import AxisChoice, AxisPair, Rule
from .trials import MAX_TRIAL_ELEMENTS, TRIAL_PARTS, Draw, Split, Trial, confirm, random_operands, split_choices

__all__ = ["CustomFunctionRule", "LongLoopRule", "OpaqueModuleRule", "batch_split"]

SEEDS = (0, 1)
#: relative differences of runs in float64; code often computes a part in float32, such as a norm
EXACT, PARTLY_EXACT = 1e-8, 1e-5
MAX_CUTS = 64  # combinations of cut dims that are tried
#: of a whole module some gradients are rounding: a bias before a softmax, for example (``Trial.noise``)
MODULE_NOISE = 1e-3
UNSCALED_EXTENT = 16  # extents up to this one are not replaced by smaller ones


class CustomFunctionRule(Rule):
    """The rule of every ``CustomFunction``."""

    cost_kind = "pointwise"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole", then what trials confirm; a label names the operand and the dim that it cuts first."""
        kinds = tuple(operand.meta["type"] for operand in tensor_operands(node))
        return whole(node), *split_choices(node, _splits(node.target, _Literals.of(node), kinds))

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """All float operands, as an upper bound: the tensors that the forward saves are not known."""
        return tuple(("input", k) for k, operand in enumerate(tensor_operands(node)) if operand.meta["type"].is_float)

    def is_unknown(self, node: Node) -> bool:
        """True where no trial confirmed a way to split it."""
        return len(self.axis_choices(node)) == 1 and any(
            operand.meta["type"].shape for operand in tensor_operands(node)
        )


register("meshwright.custom_function")(CustomFunctionRule())


class LongLoopRule(CustomFunctionRule):
    """The rule of every ``LoopFunction``, whose work a capture has counted."""

    def flops(self, node: Node) -> float:
        """The counted FLOPs, at this batch."""
        return float(node.target.work.flops * self._share(node))  # type: ignore[union-attr]

    def saves(self, node: Node) -> tuple[tuple[str, int], ...]:
        """The operands that the loop keeps as they are."""
        return tuple(("input", k) for k in node.target.work.saved_operands)  # type: ignore[union-attr]

    def temporary_bytes(self, node: Node) -> float:
        """The counted bytes, at this batch."""
        return float(node.target.work.saved_bytes * self._share(node))  # type: ignore[union-attr]

    @staticmethod
    def _share(node: Node) -> float:
        return node.target.work.share([kind.shape for kind in types_of(node)])  # type: ignore[union-attr]


register("meshwright.long_loop")(LongLoopRule())


class OpaqueModuleRule(LongLoopRule):
    """The rule of every ``OpaqueModule``: the batch may be cut where a trial of the capture confirmed it."""

    cost_kind = "matmul"
    joint_backward = True

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole", and "batch" if it was confirmed."""
        op: Any = node.target
        if op.split is None:
            return (whole(node),)
        inputs, outputs = op.split
        operands = zip(tensor_operands(node), inputs, strict=True)
        extents = [operand.meta["type"].shape[value.dim] for operand, (value, _) in operands if value.is_shard]
        return whole(node), AxisChoice("batch", inputs, outputs, min(extents))

    def is_unknown(self, node: Node) -> bool:
        """False: the plan has a note on each opaque module."""
        return False


register("meshwright.opaque_module")(OpaqueModuleRule())


def batch_split(
    target: CustomFunction, args: tuple[Any, ...], cut: tuple[Placement, ...],
    operands_of: Callable[[int, bool], list[Tensor]], seeds: Sequence[int],
) -> tuple[tuple[AxisPair, ...], tuple[AxisPair, ...]] | None:  # fmt: skip
    """The placements of operands and outputs if the operands are cut so, where trials with these seeds confirm it.

    args: of a call, with its type for every tensor. operands_of: tensors of a trial by seed and whether they are in
    float64.
    """
    places = tuple(i for i, x in enumerate(args) if isinstance(x, TensorType))
    given = tuple(None if isinstance(x, TensorType) else x for x in args)
    call = functools.partial(_call, target, given, places)
    for wide, rtol in ((True, EXACT), (True, PARTLY_EXACT), (False, PARTLY_EXACT)):
        try:
            trials = [Trial(call, operands_of(seed, wide), seed, rtol, MODULE_NOISE) for seed in seeds]
        except Exception:  # the user's code, in a dtype that it was not written for
            continue
        if not all(trial.is_finite() and trial.repeats() for trial in trials):
            continue
        if (split := confirm(trials, cut)) is not None:
            return split.inputs, split.outputs
        if rtol == PARTLY_EXACT:
            return None
    return None


@dataclass(frozen=True)
class _Literals:
    """The arguments of a call other than tensors, comparable and hashable."""

    #: the arguments as text, by which calls are compared
    text: str
    #: the arguments as they are, with None for every tensor
    args: tuple[Any, ...]
    #: positions of the tensors
    places: tuple[int, ...]

    @classmethod
    def of(cls, node: Node) -> _Literals:
        args = tuple(None if isinstance(x, Node) else x for x in node.args)
        places = tuple(i for i, x in enumerate(node.args) if isinstance(x, Node))
        return cls(repr(args), args, places)

    def scaled(self, sizes: Mapping[int, int]) -> _Literals:
        """These with other sizes in the place of the model's."""
        args = tuple(_scale_sizes(value, sizes) for value in self.args)
        return _Literals(repr(args), args, self.places)

    def __hash__(self) -> int:
        return hash((self.text, self.places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Literals) and (self.text, self.places) == (other.text, other.places)


@lru_cache(maxsize=4096)
def _splits(target: CustomFunction, literals: _Literals, kinds: tuple[TensorType, ...]) -> tuple[Split, ...]:
    """The splits that all trials confirm, at the first sizes at which there are any."""
    for sizes in _sizes(literals, kinds):
        small = tuple(replace(kind, shape=tuple(sizes.get(extent, extent) for extent in kind.shape)) for kind in kinds)
        if sum(kind.numel for kind in small) <= MAX_TRIAL_ELEMENTS and (
            splits := _confirmed(target, literals.scaled(sizes), small)
        ):
            return splits
    return ()


@lru_cache(maxsize=4096)
def _confirmed(target: CustomFunction, literals: _Literals, kinds: tuple[TensorType, ...]) -> tuple[Split, ...]:
    """The splits that all trials on operands of just these shapes confirm, in the first precision in which there are
    any. Most batch extents of a model share them."""
    for trials in _trials(target, literals, kinds):
        cuts = trials[0].following_cuts()
        if not isinstance(target, LoopFunction):
            options = [
                [R, *(S(d) for d, e in enumerate(x.shape) if e > 1 and e % max(TRIAL_PARTS) == 0)]
                for x in trials[0].operands
            ]
            cuts = [*itertools.islice(itertools.product(*options), 1, MAX_CUTS + 1), *cuts]
        confirmed = (confirm(trials, cut) for cut in dict.fromkeys(cuts))
        if splits := tuple(split for split in confirmed if split is not None):
            return splits
    return ()


def _trials(target: CustomFunction, literals: _Literals, kinds: tuple[TensorType, ...]) -> Iterator[list[Trial]]:
    """Runs of the whole op on random operands, one for each seed, in each precision in which the code runs and a second
    run gives the same values."""
    call = functools.partial(_call, target, literals.args, literals.places)
    rtol = PARTLY_EXACT if isinstance(target, LoopFunction) else EXACT
    for wide in (True, False):
        draws = [Draw(seed, wide) for seed in SEEDS]
        try:
            trials = [Trial(call, random_operands(kinds, draw), draw.seed, rtol) for draw in draws]
        except Exception:  # the user's code, on tensors that it was not written for
            continue
        if all(trial.repeats() for trial in trials):
            yield trials


def _call(target: CustomFunction, args: tuple[Any, ...], places: tuple[int, ...], *operands: Tensor) -> Any:
    given = list(args)
    for place, operand in zip(places, operands, strict=True):
        given[place] = operand
    return target(*given)


def _sizes(literals: _Literals, kinds: tuple[TensorType, ...]) -> Iterator[Mapping[int, int]]:
    """Yield maps from the model's extents to a trial's: small ones, each twice the one before; small ones; and the
    model's at a batch of 8."""
    extents = {extent for kind in kinds for extent in kind.shape}
    batch = {extent: extent // PRIME for extent in extents if extent and extent % PRIME == 0}
    yield {
        extent: 4 << number for number, extent in enumerate(sorted(e for e in extents - set(batch) if e > 4))
    } | batch
    scaled = sorted(extent for extent in extents if extent > UNSCALED_EXTENT)
    yield {extent: 8 * (number + 1) for number, extent in enumerate(scaled)}
    yield {extent: batch.get(extent, extent) for extent in scaled}


def _scale_sizes(value: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_scale_sizes(item, sizes) for item in value)
    return sizes.get(value, value) if type(value) is int else value
