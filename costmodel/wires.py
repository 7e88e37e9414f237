"""Reading measured collectives: which wire answers for a group, and at which price.

    form     size, members (the most of a group on one host), groups at once
    exact    a wire of the same kind and form                                       source "measured"
    nearest  a wire of the same kind, within or across hosts as the form is, the least distant in the logarithms of
             the three numbers: its seconds × analytic seconds of the form / those of the wire's form, at the same
             bytes                                                                  source "scaled"
    none     the analytic price                                                     source "analytic"

A wire of a group within a host says nothing about the network, nor the other way round, so these do not stand in for
each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf, log

from .measured import Wire

__all__ = ["Form", "Lines", "WirePrice", "cheapest", "matching"]

Lines = tuple[tuple[float, float], ...]  # (a, b) of seconds = a + b · bytes; the cheapest counts
_LARGE = 2.0**40  # bytes; where latency no longer shows


@dataclass(frozen=True, slots=True)
class Form:
    """What a collective's measured price depends on beside its kind and bytes."""

    size: int
    members: int
    groups: int

    @property
    def crosses_hosts(self) -> bool:
        """Whether a group leaves its host."""
        return self.members < self.size

    def distance(self, other: Form) -> float:
        """Sum of the absolute logarithms of the ratios of the three numbers."""
        pairs = ((self.size, other.size), (self.members, other.members), (self.groups, other.groups))
        return sum(abs(log(a / b)) for a, b in pairs)


def form_of(wire: Wire) -> Form:
    """The form that a wire was measured on."""
    return Form(wire.size, wire.members, wire.groups)


def matching(
    wires: Iterable[Wire], kind: str, form: Form, algorithms: Collection[str] | None = None
) -> tuple[tuple[Wire, ...], bool]:
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
    """A wire as the price of a form. ``here``: analytic lines of that form, ``there``: of the wire's own; both empty
    where the forms are the same."""

    wire: Wire
    here: Lines = ()
    there: Lines = ()

    @property
    def exact(self) -> bool:
        """Whether the wire was measured on this very form."""
        return not self.here

    def ratio(self, nbytes: float) -> float:
        """Analytic seconds of the form over those of the wire's."""
        if not self.here:
            return 1.0
        below = cheapest(self.there, nbytes)
        return cheapest(self.here, nbytes) / below if below > 0 else 1.0

    def seconds(self, nbytes: float) -> float:
        """Seconds for ``nbytes``."""
        return self.wire.seconds(nbytes) * self.ratio(nbytes) if self.here else self.wire.seconds(nbytes)

    def coefficients(self, nbytes: float = inf) -> tuple[float, float]:
        """(a, b) of the line that holds at ``nbytes``; by default of that for the largest messages."""
        piece = self.wire.piece_at(nbytes)
        ratio = self.ratio(min(nbytes, _LARGE))
        return piece.alpha_s * ratio, piece.beta_s_per_byte * ratio
