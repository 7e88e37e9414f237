"""ATOMO: an unbiased sample of a gradient's atoms, of its entries or of its singular triplets (Wang et al. 2018).

For coefficients λ_i and a budget k the probabilities of least variance are p_i = min(1, λ_i / c) with Σ p_i = k
(theorem 3.1; algorithm 1 finds c). Atom i is sent with weight λ_i / p_i if it is drawn, so the expectation is exact.
Instead of independent coins one uniform number u draws all: atom i is drawn where ⌊Σ_{j ≤ i} p_j + u⌋ exceeds that of
i − 1 (systematic sampling, Madow 1949). Each is drawn with probability p_i as before, and always exactly k are, so
that messages have one size.
"""

from __future__ import annotations

import torch

from ...costmodel.codecs import LowRankFactors, Run
from .dither import random_key
from .gathered import GatheredCodec
from .sparse import SparseCodec
from .summing import BucketSpec

__all__ = ["SampledEntries", "SampledTriplets", "draw_systematically", "probabilities"]


def probabilities(weights: torch.Tensor, budget: int) -> torch.Tensor:
    """p [n] for λ = ``weights`` ≥ 0, fp64: Σ p = min(budget, how many are not zero)."""
    weights = weights.double()
    certain = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        left = budget - int(certain.sum())
        rest = float(weights.masked_fill(certain, 0).sum())
        p = (weights * (left / rest)) if rest > 0 and left > 0 else torch.zeros_like(weights)
        more = (p >= 1) & ~certain
        if not bool(more.any()):
            return p.masked_fill_(certain, 1)
        certain |= more


def draw_systematically(p: torch.Tensor, u: float) -> torch.Tensor:
    """Positions that are drawn, rising; as many as Σ p, which is an integer up to rounding."""
    total = p.cumsum(0)
    if len(total):
        total *= max(round(float(total[-1])), 0) / max(float(total[-1]), 1e-300)
    drawn = (total + u).floor_()
    return drawn.diff(prepend=drawn.new_zeros(1)).nonzero().view(-1)


class SampledEntries(SparseCodec):
    """Entry-wise: λ_i = |g_i|."""

    def pick(self, x: torch.Tensor, pieces: list[Run], key: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Unbiased, without a memory."""
        ((_, _, count),) = pieces
        p = probabilities(x.abs(), count)
        positions = draw_systematically(p, _unit_uniform(key))[:count]
        return positions, (x[positions].double() / p[positions]).float()


class SampledTriplets(GatheredCodec):
    """Spectral: λ_i are the singular values of each matrix; ``payload.rank`` of its triplets are sent. What is not
    worth factoring is sent as it is."""

    def __init__(self, bucket: BucketSpec, payload: LowRankFactors) -> None:
        self.payload = payload
        self.pieces: list[tuple[int, int, int, bool]] = []  # (offset, rows, columns, whether factored)
        offset = 0
        for rows, columns in payload.sizes(bucket.shapes or ((bucket.n,),)):
            self.pieces.append((offset, rows, columns, payload.pays(rows, columns)))
            offset += rows * columns
        self.bytes = 4 * sum(
            payload.rank * (rows + columns) if factored else rows * columns
            for _, rows, columns, factored in self.pieces
        )

    def body_bytes(self, step: int) -> int:
        """Of factors and dense elements."""
        return self.bytes

    def encode(self, x: torch.Tensor, body: torch.Tensor, key: int, step: int) -> None:
        """Per matrix: rank columns of U with their weights, then those of V."""
        for i, ((offset, rows, columns, factored), piece) in enumerate(zip(self.pieces, self._parts(body))):
            values = x[offset : offset + rows * columns].float()
            if not factored:
                piece.copy_(values)
                continue
            left, sizes, right = torch.linalg.svd(values.view(rows, columns), full_matrices=False)
            p = probabilities(sizes, self.payload.rank)
            drawn = draw_systematically(p, _unit_uniform(random_key(key, i)))[: self.payload.rank]
            half = self.payload.rank * rows
            weights = (sizes[drawn].double() / p[drawn]).float()
            piece[:half].view(-1, rows)[: len(drawn)] = (left[:, drawn] * weights).T
            piece[half:].view(-1, columns)[: len(drawn)] = right[drawn]

    def decode_add(self, body: torch.Tensor, out: torch.Tensor, step: int) -> None:
        """U diag(weights) Vᵀ of each matrix."""
        for (offset, rows, columns, factored), piece in zip(self.pieces, self._parts(body)):
            here = out[offset : offset + rows * columns]
            if factored:
                half = self.payload.rank * rows
                here.view(rows, columns).addmm_(piece[:half].view(-1, rows).T, piece[half:].view(-1, columns))
            else:
                here.add_(piece)

    def _parts(self, body: torch.Tensor) -> list[torch.Tensor]:
        sizes = [
            self.payload.rank * (rows + columns) if factored else rows * columns
            for _, rows, columns, factored in self.pieces
        ]
        return list(body.view(torch.float32).split(sizes))


def _unit_uniform(key: int) -> float:
    """A number in [0, 1) from 53 bits."""
    return (random_key(key, 1) >> 11) * 2.0**-53
