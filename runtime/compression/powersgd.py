"""PowerSGD: every matrix by one step of power iteration, warm-started (Vogels, Karimireddy, Jaggi 2019, algorithms 1,
2).

Per matrix M of the bucket, with p ranks, Δ = M + e on each::

    P = Σ_ranks Δ orth(Q)        first all-reduce, together with everything that is sent dense
    P = orth(P)
    Q = Σ_ranks Δᵀ P             second all-reduce
    M = P Qᵀ,  e = Δ − P Qᵀ / p

orth: by QR. Q is kept for the next step; making it orthonormal there keeps it from dying out where a gradient is zero
for a while. Tensors with more than two dims are matrices of their first dim by all others; vectors, and matrices
whose factors are no smaller than they are, are sent dense. ``ranks`` gives every tensor a rank of its own, 0 for
dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from ...costmodel.codecs import LowRankFactors
from .dither import random_key, uniforms
from .linear import LinearCodec
from .summing import BucketSpec

__all__ = ["PowerSGD"]

_STRIP_ELEMENTS = 2**18  # elements
_MAX_OUTER_COLUMNS = 4  # columns up to which a sum of outer products is faster than a matrix product, in the cache


@dataclass(frozen=True)
class _Matrix:
    """rows × columns elements from ``offset`` on, by factors of ``rank`` that start at ``left`` and ``right``."""

    offset: int
    rows: int
    columns: int
    rank: int
    left: int
    right: int

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns] of a bucket."""
        return x[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)

    def strips(self) -> list[slice]:
        """Rows that stay in the cache from one pass over them to the next."""
        height = max(1, _STRIP_ELEMENTS // self.columns)
        return [slice(low, min(low + height, self.rows)) for low in range(0, self.rows, height)]

    def p(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, rank] of all left factors."""
        return x[self.left : self.left + self.rows * self.rank].view(self.rows, self.rank)

    def q(self, x: torch.Tensor) -> torch.Tensor:
        """[rank, columns] of all right factors: Qᵀ, since products of thin matrices are fastest along rows."""
        return x[self.right : self.right + self.columns * self.rank].view(self.rank, self.columns)


class PowerSGD(LinearCodec):
    """The matrices of one bucket."""

    def __init__(self, bucket: BucketSpec, payload: LowRankFactors, ranks: Sequence[int] | None = None) -> None:
        shapes = bucket.shapes or ((bucket.n,),)
        ranks = [payload.rank] * len(shapes) if ranks is None else list(ranks)
        if len(ranks) != len(shapes) or any(rank < 0 for rank in ranks):
            raise ValueError(f"ranks has one of 0 or more for each of {len(shapes)} tensors, but got {ranks}")
        self.matrices: list[_Matrix] = []
        self.dense: list[tuple[int, int]] = []
        offset = left = right = 0
        for (rows, columns), rank in zip(payload.sizes(shapes), ranks):
            if rank and payload.pays(rows, columns, rank):
                self.matrices.append(_Matrix(offset, rows, columns, rank, left, right))
                left, right = left + rows * rank, right + columns * rank
            elif rows * columns:
                self.dense.append((offset, offset + rows * columns))
            offset += rows * columns
        self.factors = left
        self.first = bucket.zeros(left + sum(high - low for low, high in self.dense))
        self.owed = bucket.zeros()
        self.right = self._start(right, bucket)

    @staticmethod
    def _start(n: int, bucket: BucketSpec) -> torch.Tensor:
        """The same on every rank: orthonormal columns are made of it before it is used."""
        q = bucket.zeros(n)
        for i, piece in enumerate(q.split(2**15)):
            piece.copy_(uniforms(random_key(bucket.seed, i), len(piece), bucket.device)).sub_(0.5)
        return q

    def rounds(self, x: torch.Tensor, ranks: int, step: int) -> Iterator[torch.Tensor]:
        """Left factors and dense elements; then right factors."""
        finite = isfinite(x.sum(dtype=torch.float32).item())
        self._lefts(x, finite)
        yield self.first
        right = torch.empty_like(self.right)
        for matrix in self.matrices:
            left = matrix.p(self.first)
            if finite and isfinite(left.sum().item()):
                left.copy_(torch.linalg.qr(left).Q)
            else:
                finite = False
            torch.mm(left.T, matrix.whole(self.owed), out=matrix.q(right))
        yield right
        self._decode(x, right, finite, ranks)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the error feedback and the warm start."""
        return {"residual": self.owed, "right": self.right}

    def _lefts(self, x: torch.Tensor, finite: bool) -> None:
        if not finite:
            self.first.fill_(torch.nan)
            return
        at = self.factors
        for low, high in self.dense:
            self.first[at : at + high - low].copy_(x[low:high])
            at += high - low
        for matrix in self.matrices:
            right = matrix.q(self.right)
            right.copy_(torch.linalg.qr(right.T).Q.T)
            matrix.whole(self.owed).add_(matrix.whole(x))
            torch.mm(matrix.whole(self.owed), right.T, out=matrix.p(self.first))

    def _decode(self, x: torch.Tensor, right: torch.Tensor, finite: bool, ranks: int) -> None:
        for matrix in self.matrices:
            left, q, whole, owed = matrix.p(self.first), matrix.q(right), matrix.whole(x), matrix.whole(self.owed)
            for rows in matrix.strips():
                if x.dtype is torch.float32:
                    _outer(left[rows], q, whole[rows])
                else:
                    whole[rows].copy_(left[rows] @ q)
                if finite:
                    owed[rows].sub_(whole[rows], alpha=1 / ranks)
        if finite:
            self.right.copy_(right)
        at = self.factors
        for low, high in self.dense:
            x[low:high].copy_(self.first[at : at + high - low])
            at += high - low


def _outer(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """out = left [rows, rank] @ right [rank, columns]."""
    if len(right) > _MAX_OUTER_COLUMNS:
        torch.mm(left, right, out=out)
        return
    torch.mul(left[:, :1], right[:1], out=out)
    for k in range(1, len(right)):
        out.addcmul_(left[:, k : k + 1], right[k : k + 1])
