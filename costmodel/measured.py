"""Values that a measurement leaves behind: op times by signature, collectives by group, rates of the optimizer and of
codes.

Grammar of a cluster's measurements::

    device    ::= curves, op times, optimizer and coding rates, overlap, action   (what one rank does alone)
    cluster   ::= wires                                                       (what ranks do together)
    wire      ::= kind, algorithm, size, members, groups, pieces, points      (one collective on one kind of group)
    piece     ::= seconds = alpha_s + beta_s_per_byte · bytes, from ``from_bytes`` bytes on

All frozen, hashable, and written to JSON as they stand. Bytes of a collective are counted as in ``collectives``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

__all__ = ["FUSED", "MASTERS", "CodingRate", "CollectiveMeasurement", "OpTime", "OptimizerRate", "Piece", "RankTimes"]

#: ends the name of an optimizer that keeps an fp32 master of every weight of 16 bits, and fp32 states
MASTERS = "+masters"
#: ends the name of an optimizer, before ``MASTERS``, that updates a parameter in one kernel (torch's ``fused=True``)
FUSED = "+fused"


def _not_negative(where: str, **values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{where} needs a finite {name} >= 0, but got {value}; measure it again")


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op on one device, as it runs inside a training step (operands out of cache, outputs on fresh pages).

    signature: the op with the dtypes and local shapes of its operands (``compiler.cost.signature``). Seconds of the
    forward, of the gradients of activations, and of the gradients of parameters; the backward is the sum of the last
    two.
    """

    signature: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    samples: int

    def __post_init__(self) -> None:
        _not_negative(
            f"op time {self.signature}",
            forward_s=self.forward_s,
            backward_input_s=self.backward_input_s,
            backward_weight_s=self.backward_weight_s,
        )

    @property
    def backward_s(self) -> float:
        """The whole backward."""
        return self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True)
class OptimizerRate:
    """One step of a torch optimizer over parameters of ``dtype``: ``alpha_s`` per tensor and ``beta_s_per_byte`` per
    byte of them."""

    name: str
    alpha_s: float
    beta_s_per_byte: float
    residual: float
    samples: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _not_negative(f"optimizer {self.label}", alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte)

    @property
    def label(self) -> str:
        """Name and dtype, as tables name it."""
        return self.name if self.dtype == "float32" else f"{self.name}, {self.dtype}"


@dataclass(frozen=True, slots=True)
class CodingRate:
    """One sum over a group of one rank in a code, which encodes, decodes, and sends nothing: ``alpha_s``, and
    ``beta_s_per_element`` of the gradient. name: of the code (``codecs.CODECS``)."""

    name: str
    alpha_s: float
    beta_s_per_element: float
    residual: float
    samples: int

    def __post_init__(self) -> None:
        _not_negative(f"code {self.name}", alpha_s=self.alpha_s, beta_s_per_element=self.beta_s_per_element)


@dataclass(frozen=True, slots=True)
class Piece:
    """``seconds = alpha_s + beta_s_per_byte · bytes`` for messages of ``from_bytes`` bytes or more."""

    from_bytes: float
    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        where = f"piece from {self.from_bytes:g} bytes on"
        _not_negative(where, from_bytes=self.from_bytes, alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte)


@dataclass(frozen=True, slots=True)
class CollectiveMeasurement:
    """One collective (or "send") on groups of one form.

    algorithm: "backend" (what the runtime calls by default) or a name of ``collectives.ALGORITHMS``. size: devices of a
    group; members: the most of them on one host, so that ``members == size`` is a group within a host; groups: how many
    such groups do the same at once. pieces: in rising ``from_bytes``, the first at 0; points: (bytes, seconds), the
    minimum or low quantile of each size; residual: median relative error of the pieces at the points.
    """

    kind: str
    algorithm: str
    size: int
    members: int
    groups: int
    pieces: tuple[Piece, ...]
    points: tuple[tuple[float, float], ...]
    residual: float
    samples: int

    def __post_init__(self) -> None:
        where = self.label
        if not 1 <= self.members <= self.size or self.groups < 1:
            raise ValueError(f"{where} needs 1 <= members <= size and groups >= 1, but got other numbers; correct it")
        starts = [piece.from_bytes for piece in self.pieces]
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError(
                f"{where} needs pieces in rising from_bytes, the first at 0, but got {starts}; fit it again"
            )
        for nbytes, seconds in self.points:
            _not_negative(where, bytes=nbytes, seconds=seconds)
        sizes = [nbytes for nbytes, _ in self.points]
        if any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"{where} needs points in rising bytes, but got {sizes}; sort them")
        for before, after in pairwise(self.pieces):
            here = before.alpha_s + before.beta_s_per_byte * after.from_bytes
            there = after.alpha_s + after.beta_s_per_byte * after.from_bytes
            if there < 0.99 * here:
                raise ValueError(
                    f"{where} needs seconds that do not fall as bytes grow, but got {here:.4g} then {there:.4g} at"
                    f" {after.from_bytes:g} bytes; fit it again"
                )

    @property
    def label(self) -> str:
        """The wire in words, as errors and differences name it."""
        own = "" if self.algorithm == "backend" else f" by {self.algorithm}"
        return f"wire {self.kind}{own} of {self.size} ({self.members} on a host, {self.groups} at once)"

    def seconds(self, nbytes: float) -> float:
        """Seconds for ``nbytes``; 0 for none."""
        if nbytes <= 0:
            return 0.0
        piece = self.piece_at(nbytes)
        return piece.alpha_s + piece.beta_s_per_byte * nbytes

    def piece_at(self, nbytes: float) -> Piece:
        """The piece that holds at ``nbytes``."""
        for piece in reversed(self.pieces):  # few, and most messages are large
            if piece.from_bytes <= nbytes:
                return piece
        return self.pieces[0]


@dataclass(frozen=True)
class RankTimes:
    """The measurements of one rank: means over the same steps on every rank, in seconds per step, and peaks in bytes.

    stage: None on an idle rank. weights_s: the half of backwards that makes weight gradients, where the schedule has it
    apart; then backward_s is the other. skew_s: of the collectives, what was waiting for a slower rank of the stage.
    live_bytes: of tensor storages, where a metered step counted them.
    """

    rank: int
    stage: int | None
    steps: int
    step_s: float
    forward_s: float
    backward_s: float
    forward_exchange_s: float
    backward_exchange_s: float
    sends_s: float
    waiting_s: float
    gradient_s: float
    optimizer_s: float
    host_s: float
    resident_bytes: int
    live_bytes: int | None = None
    skew_s: float = 0.0
    weights_s: float = 0.0
    recompute_s: float = 0.0
