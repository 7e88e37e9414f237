"""Trials of an op of which nothing is known: run whole and in parts, forward and backward, on small random tensors.

A cut of the operands is confirmed (``confirm``) if, on every trial, the outputs of the parts are blocks or addends of
the whole outputs, and the gradients of the parts are blocks or addends of the whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from ..ir.graph import TensorType, tensor_operands
from ..ir.spec import P, Placement, R, S
from .base import FREE_GRAD, ROW, WHOLE, AxisChoice, AxisPair, shard

__all__ = [
    "MAX_TRIAL_ELEMENTS", "TRIAL_PARTS", "Draw", "Split", "Trial", "confirm", "random_operands", "split_choices",
]  # fmt: skip

TRIAL_PARTS = (2, 4)  # numbers of devices of the trials
MAX_TRIAL_ELEMENTS = 1 << 20  # of all operands of a trial together


@dataclass(frozen=True)
class Split:
    """Placements of operands and outputs, values and cotangents, that a trial confirmed."""

    inputs: tuple[AxisPair, ...]
    outputs: tuple[AxisPair, ...]


def split_choices(node: Node, splits: Sequence[Split]) -> list[AxisChoice]:
    """A choice for each split; its label names the operand and the dim that it cuts first."""
    kinds = [operand.meta["type"] for operand in tensor_operands(node)]
    choices: list[AxisChoice] = []
    for split in splits:
        k, placement = next((k, pair[0]) for k, pair in enumerate(split.inputs) if pair[0].is_shard)
        label = f"in{k}d{placement.dim}"
        taken = sum(choice.label.partition(".")[0] == label for choice in choices)
        name = f"{label}.{taken}" if taken else label
        choices.append(AxisChoice(name, split.inputs, split.outputs, kinds[k].shape[placement.dim]))
    return choices


def confirm(trials: Sequence[Trial], cut: tuple[Placement, ...]) -> Split | None:
    """The split that this cut of the operands makes on every trial; None if any fails."""
    confirmed: Split | None = None
    for trial in trials:
        for parts in TRIAL_PARTS:
            split = trial.split(cut, parts)
            if split is None or (confirmed is not None and split != confirmed):
                return None
            confirmed = split
    return confirmed


@dataclass(frozen=True)
class Draw:
    """How a trial draws its operands."""

    seed: int
    #: in float64, which tells a wrong split from rounding best; some code takes the model's own dtype only
    wide: bool = True
    #: the standard deviation of floats
    scale: float = 1.0
    #: integers are below it
    high: int = 2


class Trial:
    """A run of the whole op, with which runs of its parts are compared."""

    def __init__(
        self, call: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor], seed: int, rtol: float = 1e-8,
        noise: float = 0.0,
    ) -> None:  # fmt: skip
        """rtol: between exact runs; outputs of fewer than 64 bits are compared at 1e-4. noise: gradients that are
        smaller than this share of the largest, times rtol, are rounding."""
        generator = torch.Generator().manual_seed(seed)
        self.call, self.operands = call, list(operands)
        self.cotangents: list[Tensor | None] = []
        leaves, outputs = self._forward(self.operands)
        for x in outputs:
            floating = _is_float(x) and x.requires_grad
            self.cotangents.append(torch.randn(x.shape, generator=generator).to(x) if floating else None)
        self.outputs, self.gradients = _results(leaves, outputs, self.cotangents)
        exact = all(x.dtype in (torch.float64, torch.complex128) for x in self.outputs if _is_float(x))
        self.rtol = rtol if exact else 1e-4
        largest = max((float(g.abs().max()) for g in self.gradients if g is not None and g.numel()), default=0.0)
        self.noise = noise * self.rtol * largest

    def _forward(self, operands: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [x.detach().clone().requires_grad_(_is_float(x)) for x in operands]
        with torch.enable_grad():
            return leaves, self.call(*(leaf.view_as(leaf) for leaf in leaves))

    def run(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs, and the gradient of each operand."""
        return _results(*self._forward(operands), cotangents)

    def following_cuts(self) -> list[tuple[Placement, ...]]:
        """For each dim of an output, the cut of every operand along the dim that the output's follows, if any does."""
        follows: dict[tuple[int, int], dict[int, int]] = {}
        for k, x in enumerate(self.operands):
            for dim, extent in enumerate(x.shape):
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
            if _is_float(part):
                part.add_(torch.rand(part.shape, generator=torch.Generator().manual_seed(half)).to(part.dtype) + 0.5)
            else:  # integers of the first draw are 0 or 1
                part.copy_(part == 0)
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
        results = [x for x in (*self.outputs, *self.gradients) if x is not None and _is_float(x)]
        return all(2 * int(x.isfinite().sum()) >= x.numel() for x in results)

    def repeats(self) -> bool:
        """True if a second run gives the same values. An op that fails here draws random numbers or keeps state."""
        outputs, gradients = self.run(self.operands, self.cotangents)
        return all(
            (a is None) == (b is None) and (a is None or b is None or _is_close(a, b, self.rtol))
            for a, b in zip([*outputs, *gradients], [*self.outputs, *self.gradients], strict=True)
        )

    def gives(self, split: Split) -> bool:
        """True if the outputs, not looking at gradients, are placed as the split says."""
        cut, values = tuple(value for value, _ in split.inputs), [value for value, _ in split.outputs]
        return all(self._outputs_of(self._dealt(cut, parts)) == values for parts in TRIAL_PARTS)

    def _dealt(self, cut: tuple[Placement, ...], parts: int) -> list[list[Tensor]]:
        """The operands of each part."""
        dealt = [_deal(x, placement, parts) for x, placement in zip(self.operands, cut, strict=True)]
        return [[x[i] for x in dealt] for i in range(parts)]

    def _outputs_of(self, dealt: Sequence[Sequence[Tensor]]) -> list[Placement | None]:
        """The placements of the outputs that the parts give; None for one that they do not make up."""
        pieces = [self._forward(operands)[1] for operands in dealt]
        return [_placement([part[k].detach() for part in pieces], y, self.rtol) for k, y in enumerate(self.outputs)]

    def split(self, cut: tuple[Placement, ...], parts: int) -> Split | None:
        """The placements of outputs and gradients if the operands are cut so; None if the parts do not add up."""
        dealt = self._dealt(cut, parts)
        try:
            outputs = self._outputs_of(dealt)
            if not any(placement is not None and placement != R for placement in outputs) or None in outputs:
                return None
            if any(placement == R and _is_zero(y, 0.0) for placement, y in zip(outputs, self.outputs, strict=True)):
                return None  # zeros may be addends as well
            cotangents = [
                [None] * parts if g is None else _deal(g, placement if placement.is_shard else R, parts)
                for g, placement in zip(self.cotangents, outputs)
                if placement is not None
            ]
            runs = [self.run(dealt[i], [g[i] for g in cotangents])[1] for i in range(parts)]
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
        return Split(tuple(inputs), tuple(output_pairs))


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_zero(x: Tensor, noise: float) -> bool:
    """True if nothing in the tensor is larger than this."""
    return _is_float(x) and (not x.numel() or float(x.abs().max()) <= noise)


def _results(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """These outputs, and the gradient of each leaf."""
    tracked = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None]
    wanted = [x for x in leaves if x.requires_grad]
    grads: Iterator[Tensor | None] = iter(())
    if tracked and wanted:
        ys, gs = [y for y, _ in tracked], [g for _, g in tracked]
        grads = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True))
    return [y.detach() for y in outputs], [next(grads, None) if x.requires_grad else None for x in leaves]


def random_operands(kinds: Sequence[TensorType], draw: Draw) -> list[Tensor]:
    """Operands of these types."""
    generator = torch.Generator().manual_seed(draw.seed)
    return [_random_operand(kind, generator, draw) for kind in kinds]


def _random_operand(kind: TensorType, generator: torch.Generator, draw: Draw) -> Tensor:
    shape = kind.shape
    if not kind.is_float:
        high = 2 if kind.dtype == torch.bool else draw.high
        return torch.randint(0, high, shape, generator=generator).to(kind.dtype)
    wide = torch.complex128 if kind.dtype.is_complex else torch.float64
    x = torch.randn(shape, generator=generator, dtype=wide) * draw.scale
    return x if draw.wide else x.to(kind.dtype)


def _deal(x: Tensor, placement: Placement, parts: int) -> list[Tensor]:
    return [y.contiguous() for y in x.chunk(parts, placement.dim)] if placement.is_shard else [x] * parts


def _placement(pieces: Sequence[Tensor], expected: Tensor, rtol: float) -> Placement | None:
    """The placement in which the pieces make up the whole: copies (R), addends (P) or blocks (S); None if in none."""
    if all(piece.shape == expected.shape for piece in pieces):
        if all(_is_close(piece, expected, rtol) for piece in pieces):
            return R
        if _is_float(expected) and _is_close(torch.stack(list(pieces)).sum(0), expected, rtol):
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


def _is_close(a: Tensor, b: Tensor, rtol: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not _is_float(a):
        return torch.equal(a, b)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=rtol, atol=rtol * max(scale, 1e-30), equal_nan=True)
