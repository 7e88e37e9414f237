"""The rules of a user's autograd Function, of a long loop and of an opaque module: trials tell which dims can be split.

The rule knows nothing of such an op but its code. So it runs the op whole and in parts on small random tensors, forward
and backward (``_Trial``). It offers a way to cut the operands if, on every trial, the outputs of the parts are blocks
or addends of the whole outputs, and their gradients are blocks or addends of the whole gradients. A trial replaces the
model's extents by small ones, equal extents by equal ones; where the code does not run on these, the trial uses the
model's own, if they are small enough. An op without a confirmed cut is replicated, and the plan notes it.

The ways to cut that are tried: those that follow the data (``_Trial.following_cuts``), where a half of an operand's dim
decides about the same half of an output's; where the code does not loop, up to ``MAX_CUTS`` others before them. Of an
opaque module only the batch is tried, once, during the capture (``batch_split``), on the module's own weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..ir.custom_function import CustomFunction
from ..ir.graph import PRIME, TensorType, tensor_operands, types_of
from ..ir.long_loop import LoopFunction
from ..ir.opaque_module import OpaqueModule
from ..ir.spec import P, Placement, R, S
from . import register, whole
from .base import FREE_GRAD, ROW, WHOLE, AxisChoice, AxisPair, Rule, shard

__all__ = ["CustomFunctionRule", "LongLoopRule", "OpaqueModuleRule", "batch_split"]

TRIAL_PARTS = (2, 4)  # numbers of devices of the trials
SEEDS = (0, 1)
MAX_CUTS = 64  # combinations of cut dims that are tried
MAX_TRIAL_ELEMENTS = 1 << 20  # of all operands of a trial together
UNSCALED_EXTENT = 16  # extents up to this one are not replaced by smaller ones


class CustomFunctionRule(Rule):
    """The rule of every ``CustomFunction``."""

    cost_kind = "pointwise"

    def axis_choices(self, node: Node) -> tuple[AxisChoice, ...]:
        """ "whole", then what trials confirm; a label names the operand and the dim that it cuts first."""
        kinds = tuple(operand.meta["type"] for operand in tensor_operands(node))
        choices = [whole(node)]
        for split in _splits(node.target, _Literals.of(node), kinds):
            k, placement = next((k, pair[0]) for k, pair in enumerate(split.inputs) if pair[0].is_shard)
            label = f"in{k}d{placement.dim}"
            taken = sum(choice.label.partition(".")[0] == label for choice in choices)
            name = f"{label}.{taken}" if taken else label
            extent = kinds[k].shape[placement.dim]
            choices.append(AxisChoice(name, split.inputs, split.outputs, extent))
        return tuple(choices)

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
    for wide in (True, False):
        try:
            trials = []
            for seed in seeds:
                operands = operands_of(seed, wide)
                places = [i for i, x in enumerate(args) if isinstance(x, TensorType)]
                given = tuple(None if isinstance(x, TensorType) else x for x in args)
                trials.append(_Trial(target, given, tuple(places), operands, seed))
        except Exception:  # the user's code, in a dtype that it was not written for
            continue
        if all(trial.is_finite() and trial.repeats() for trial in trials):
            split = _confirm(trials, cut)
            return None if split is None else (split.inputs, split.outputs)
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

    def __hash__(self) -> int:
        return hash((self.text, self.places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Literals) and (self.text, self.places) == (other.text, other.places)


@dataclass(frozen=True)
class _Split:
    """Placements of operands and outputs, values and cotangents, that a trial confirmed."""

    inputs: tuple[AxisPair, ...]
    outputs: tuple[AxisPair, ...]


@lru_cache(maxsize=4096)
def _splits(target: CustomFunction, literals: _Literals, kinds: tuple[TensorType, ...]) -> tuple[_Split, ...]:
    """The splits that all trials confirm, in the first precision and at the first sizes at which there are any."""
    for trials in _trials(target, literals, kinds):
        cuts = trials[0].following_cuts()
        if not isinstance(target, LoopFunction):
            options = [
                [R, *(S(d) for d, e in enumerate(x.shape) if e > 1 and e % max(TRIAL_PARTS) == 0)]
                for x in trials[0].operands
            ]
            cuts = [*itertools.islice(itertools.product(*options), 1, MAX_CUTS + 1), *cuts]
        confirmed = (_confirm(trials, cut) for cut in dict.fromkeys(cuts))
        if splits := tuple(split for split in confirmed if split is not None):
            return splits
    return ()


def _confirm(trials: Sequence[_Trial], cut: tuple[Placement, ...]) -> _Split | None:
    confirmed: _Split | None = None
    for trial in trials:
        for parts in TRIAL_PARTS:
            split = trial.split(cut, parts)
            if split is None or (confirmed is not None and split != confirmed):
                return None
            confirmed = split
    return confirmed


def _trials(target: CustomFunction, literals: _Literals, kinds: tuple[TensorType, ...]) -> Iterator[list[_Trial]]:
    """Runs of the whole op on random operands, one for each seed, at each size and precision at which the code runs
    and a second run gives the same values."""
    for sizes in _sizes(literals, kinds):
        shapes = [tuple(sizes.get(extent, extent) for extent in kind.shape) for kind in kinds]
        if sum(torch.Size(shape).numel() for shape in shapes) > MAX_TRIAL_ELEMENTS:
            continue
        args = _scale_sizes(literals.args, sizes)
        # float64 tells a wrong split from rounding best, but some code takes the model's own dtype only
        for wide in (True, False):
            try:
                trials = [
                    _Trial(target, args, literals.places, _random_operands(shapes, kinds, seed, wide), seed)
                    for seed in SEEDS
                ]
            except Exception:  # the user's code, on tensors that it was not written for
                continue
            if all(trial.repeats() for trial in trials):
                yield trials


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


class _Trial:
    """A run of the whole op, with which runs of its parts are compared."""

    def __init__(
        self, target: CustomFunction, args: tuple[Any, ...], places: tuple[int, ...], operands: Sequence[Tensor],
        seed: int,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.target, self.args, self.places, self.operands = target, args, places, list(operands)
        self.cotangents: list[Tensor | None] = []
        outputs = self._forward(self.operands)[1]
        for x in outputs:
            floating = x.is_floating_point() and x.requires_grad
            self.cotangents.append(torch.randn(x.shape, generator=generator).to(x) if floating else None)
        self.outputs, self.gradients = self.run(self.operands, self.cotangents)
        exact = all(x.dtype == torch.float64 for x in self.outputs if x.is_floating_point())
        # a loop's code often computes in float32, whatever it is given
        self.rtol = 1e-4 if not exact else 1e-5 if isinstance(target, LoopFunction) else 1e-8
        # of a whole module some gradients are rounding: a bias before a softmax, for example
        largest = max((float(g.abs().max()) for g in self.gradients if g is not None and g.numel()), default=0.0)
        self.noise = 1e-3 * self.rtol * largest if isinstance(target, OpaqueModule) else 0.0

    def _forward(self, operands: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in operands]
        args = list(self.args)
        for place, leaf in zip(self.places, leaves, strict=True):
            args[place] = leaf.view_as(leaf)
        with torch.enable_grad():
            return leaves, self.target(*args)

    def run(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs, and the gradient of each operand."""
        leaves, outputs = self._forward(operands)
        tracked = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None]
        wanted = [x for x in leaves if x.requires_grad]
        grads: Iterator[Tensor | None] = iter(())
        if tracked and wanted:
            ys, gs = [y for y, _ in tracked], [g for _, g in tracked]
            grads = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True))
        return [y.detach() for y in outputs], [next(grads, None) if x.requires_grad else None for x in leaves]

    def following_cuts(self) -> list[tuple[Placement, ...]]:
        """For each dim of an output, the cut of every operand along the dim that the output's follows, if any does."""
        follows: dict[tuple[int, int], dict[int, int]] = {}
        for k, x in enumerate(self.operands):
            for dim, extent in enumerate(x.shape if x.is_floating_point() else ()):
                if extent > 1 and extent % max(TRIAL_PARTS) == 0:
                    for place in self._followers(k, dim):
                        follows.setdefault(place, {}).setdefault(k, dim)
        count = len(self.operands)
        return [tuple(S(cut[k]) if k in cut else R for k in range(count)) for cut in follows.values()]

    def _followers(self, k: int, dim: int) -> set[tuple[int, int]]:
        """(output, dim) of the dims of which a half changes if and only if this half of the operand's dim does."""
        found: set[tuple[int, int]] | None = None
        for half in (0, 1):
            changed = self.operands[k].clone()
            part = changed.chunk(2, dim)[half]
            part.add_(torch.rand(part.shape, generator=torch.Generator().manual_seed(half)).to(part.dtype) + 0.5)
            try:
                outputs = self._forward([changed if i == k else x for i, x in enumerate(self.operands)])[1]
            except Exception:  # the user's code, on values that it was not written for
                return set()
            places = set()
            for number, (y, before) in enumerate(zip(outputs, self.outputs, strict=True)):
                moved = y.detach() != before
                for d in range(y.dim()):
                    halves = [bool(one.any()) for one in moved.chunk(2, d)] if y.shape[d] % 2 == 0 else [True, True]
                    if halves[half] and not halves[1 - half]:
                        places.add((number, d))
            found = places if found is None else found & places
        return found or set()

    def is_finite(self) -> bool:
        """True if most values are numbers, so that comparing them means something."""
        results = [x for x in (*self.outputs, *self.gradients) if x is not None and x.is_floating_point()]
        return all(2 * int(x.isfinite().sum()) >= x.numel() for x in results)

    def repeats(self) -> bool:
        """True if a second run gives the same values. An op that fails here draws random numbers or keeps state."""
        outputs, gradients = self.run(self.operands, self.cotangents)
        return all(
            (a is None) == (b is None) and (a is None or b is None or _is_close(a, b, self.rtol))
            for a, b in zip([*outputs, *gradients], [*self.outputs, *self.gradients], strict=True)
        )

    def split(self, cut: tuple[Placement, ...], parts: int) -> _Split | None:
        """The placements of outputs and gradients if the operands are cut so; None if the parts do not add up."""
        dealt = [_deal(x, placement, parts) for x, placement in zip(self.operands, cut, strict=True)]
        try:
            alone = [self._forward([x[i] for x in dealt])[1] for i in range(parts)]
            outputs = [
                _placement([part[k].detach() for part in alone], y, self.rtol) for k, y in enumerate(self.outputs)
            ]
            if not any(placement is not None and placement != R for placement in outputs) or None in outputs:
                return None
            if any(placement == R and _is_zero(y, 0.0) for placement, y in zip(outputs, self.outputs, strict=True)):
                return None  # zeros may be addends as well
            cotangents = [
                [None] * parts if g is None else _deal(g, placement if placement.is_shard else R, parts)
                for g, placement in zip(self.cotangents, outputs)
                if placement is not None
            ]
            runs = [self.run([x[i] for x in dealt], [g[i] for g in cotangents])[1] for i in range(parts)]
        except Exception:  # the user's code, on parts that it was not written for
            return None
        inputs: list[AxisPair] = []
        for k, (placement, gradient) in enumerate(zip(cut, self.gradients)):
            pieces = [run[k] for run in runs]
            if gradient is None:
                if any(piece is not None for piece in pieces):
                    return None
                inputs.append((placement, placement))
                continue
            if any(piece is None for piece in pieces):
                return None
            given = [piece for piece in pieces if piece is not None]
            of_gradient = _placement(given, gradient, self.rtol)
            if all(_is_zero(x, self.noise) for x in (gradient, *given)):
                if not placement.is_shard and R in outputs:
                    return None  # copies or addends: this trial cannot tell
                of_gradient = placement if placement.is_shard else P  # each part adds what its own outputs give
            if placement.is_shard:
                if of_gradient != placement:
                    return None
                inputs.append(shard(placement.dim))
            elif of_gradient in (P, R):
                inputs.append(FREE_GRAD if of_gradient == P else WHOLE)
            else:
                return None
        pairs = {P: ROW, R: WHOLE}
        output_pairs = [pairs[x] if x in pairs else shard(x.dim) for x in outputs if x is not None]
        return _Split(tuple(inputs), tuple(output_pairs))


def _random_operands(
    shapes: Sequence[tuple[int, ...]], kinds: Sequence[TensorType], seed: int, wide: bool
) -> list[Tensor]:
    generator, operands = torch.Generator().manual_seed(seed), []
    for shape, kind in zip(shapes, kinds):
        if kind.dtype.is_floating_point:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.float64 if wide else kind.dtype)
        else:
            x = torch.randint(0, 2, shape, generator=generator).to(kind.dtype)
        operands.append(x)
    return operands


def _deal(x: Tensor, placement: Placement, parts: int) -> list[Tensor]:
    return [y.contiguous() for y in x.chunk(parts, placement.dim)] if placement.is_shard else [x] * parts


def _placement(pieces: Sequence[Tensor], expected: Tensor, rtol: float) -> Placement | None:
    """The placement in which the pieces make up the whole: copies (R), addends (P) or blocks (S); None if in none."""
    if all(piece.shape == expected.shape for piece in pieces):
        if all(_is_close(piece, expected, rtol) for piece in pieces):
            return R
        if expected.is_floating_point() and _is_close(torch.stack(list(pieces)).sum(0), expected, rtol):
            return P
        return None
    for dim, extent in enumerate(expected.shape):
        if all(piece.ndim == expected.ndim for piece in pieces) and sum(p.shape[dim] for p in pieces) == extent:
            try:
                joined = torch.cat(list(pieces), dim)
            except RuntimeError:
                continue
            if joined.shape == expected.shape and _is_close(joined, expected, rtol):
                return S(dim)
    return None


def _is_zero(x: Tensor, noise: float) -> bool:
    """True if nothing in the tensor is larger than this."""
    return x.is_floating_point() and (not x.numel() or float(x.abs().max()) <= noise)


def _is_close(a: Tensor, b: Tensor, rtol: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=rtol, atol=rtol * max(scale, 1e-30), equal_nan=True)
