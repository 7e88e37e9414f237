"""Reading measured collectives: which wire answers for a group, and at which price.

    form     size, members (the most of a group on one host), groups at once
    exact    a wire of the same kind and form                                       source "measured"
    nearest  a wire of the same kind, within or across hosts as the form is, the least distant in the logarithms of
             the three numbers: each α × analytic α of the form / that of the wire's form, each β likewise
                                                                                    source "scaled"
    none     the analytic price                                                     source "analytic"

A wire of a group within a host says nothing about the network, nor the other way round, so these do not stand in for
each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log

from .measured import CollectiveMeasurement, Piece

__all__ = ["CollectiveForm", "Lines", "WirePrice", "cheapest", "matching"]

Lines = tuple[tuple[float, float], ...]  # (a, b) of seconds = a + b · bytes; the cheapest counts


@dataclass(frozen=True, slots=True)
class CollectiveForm:
    """The form of a group: with the kind and the bytes, all that a collective's measured price depends on."""

    size: int
    members: int
    groups: int

    @property
    def crosses_hosts(self) -> bool:
        """True if a group has members on several hosts."""
        return self.members < self.size

    def distance(self, other: CollectiveForm) -> float:
        """Sum of the absolute logarithms of the ratios of the three numbers."""
        pairs = ((self.size, other.size), (self.members, other.members), (self.groups, other.groups))
        return sum(abs(log(a / b)) for a, b in pairs)


def form_of(wire: CollectiveMeasurement) -> CollectiveForm:
    """The form that a wire was measured on."""
    return CollectiveForm(wire.size, wire.members, wire.groups)


def matching(
    wires: Iterable[CollectiveMeasurement], kind: str, form: CollectiveForm, algorithms: Collection[str] | None = None
) -> tuple[tuple[CollectiveMeasurement, ...], bool]:
    """(wires that answer for ``form``, whether exactly): all exact ones, else the nearest one, else none.
    ``algorithms``: only these; None: any."""
    own = [wire for wire in wires if wire.kind == kind and (algorithms is None or wire.algorithm in algorithms)]
    exact = tuple(wire for wire in own if form_of(wire) == form)
    if exact:
        return exact, True
    own = [wire for wire in own if form_of(wire).crosses_hosts == form.crosses_hosts]
    return tuple(sorted(own, key=lambda wire: form.distance(form_of(wire)))[:1]), False


def cheapest(lines: Sequence[tuple[float, float]], nbytes: float) -> float:
    """Seconds of the line that is cheapest at ``nbytes``."""
    return min(a + b * nbytes for a, b in lines)


@dataclass(frozen=True, slots=True)
class WirePrice:
    """A wire as the price of a form: its own pieces, or those ``scaled`` to the form. ``exact``: whether it was
    measured on this very form."""

    wire: CollectiveMeasurement
    exact: bool

    @staticmethod
    def scaled(wire: CollectiveMeasurement, here: Lines, there: Lines) -> WirePrice:
        """The price of the form whose analytic lines are ``here``, from a wire of a form whose lines are ``there``;
        latency by the ratio for small messages, rate by that for large ones. More bytes never take less time."""
        small, large = _ratio(min(here)[0], min(there)[0]), _ratio(here[-1][1], there[-1][1])
        latency, rate = small or large or 1.0, large or small or 1.0
        pieces: list[Piece] = []
        for piece in wire.pieces:
            alpha, beta = piece.alpha_s * latency, piece.beta_s_per_byte * rate
            if pieces:
                last = pieces[-1]
                end = last.alpha_s + last.beta_s_per_byte * piece.from_bytes
                alpha = max(alpha, end - beta * piece.from_bytes)
            pieces.append(Piece(piece.from_bytes, alpha, beta))
        return WirePrice(replace(wire, pieces=tuple(pieces), points=()), False)

    def seconds(self, nbytes: float) -> float:
        """Seconds for ``nbytes``."""
        return self.wire.seconds(nbytes)

    def coefficients(self, nbytes: float = inf) -> tuple[float, float]:
        """(a, b) of the line that holds at ``nbytes``; by default of that for the largest messages."""
        piece = self.wire.piece_at(nbytes)
        return piece.alpha_s, piece.beta_s_per_byte


def _ratio(here: float, there: float) -> float:
    """here / there, 0 where either says nothing."""
    return here / there if there > 0 else 0.0
