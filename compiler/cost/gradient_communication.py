"""By which algorithm and in which code gradients are summed: what is offered, what it costs, and what is chosen.

A *way* is an all-reduce's algorithm (``collectives.REDUCTIONS``, or "backend": what the library runs by itself) and a
compressor (``codecs.CODECS``, or "none"). Codes that do not all-reduce run by the backend's own algorithms, or
hierarchically: exact inside of hosts, in code between them. To sum n
bytes over a group of p devices takes

    start + coding · n + sending(n),    sending(n) = Σ over the code's messages of min over offers of a + b · share · n

Coding keeps the device busy and hides behind nothing; sending overlaps as any reduction does (``gradient_reduction``).
Both parts of a step that grow with a bucket's seconds never shrink with them, so of two ways of which one takes no
longer for any bucket the other need not be looked at; of what is left (a few per group of axes) all combinations are
tried.

Searches price a gradient by its cheapest way as its share of a full bucket, which no choice for whole stages undercuts,
so bounds hold as they are. Ways are chosen per stage and group of mesh axes once a stage is assembled. Where the
backend was measured, algorithms that were not are left out, and where codes were, those that were not: an assumed rate
would win against a measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ...costmodel.codecs import CODECS
from ...costmodel.collectives import REDUCTIONS
from ..ir.graph import Graph
from ..plan.plan import Stage
from ..plan.tensor_codecs import carrier_faults

__all__ = ["EXACT", "AskedCommunication", "Communication", "GradientRoute", "cheapest_offers"]


AskedCommunication = str | Sequence[str] | Mapping[str, Any] | None  # see ``Communication.asked``
#: training differs by it, and prices of codes are off by up to a third: where memory is the wire, to code pays nothing
MIN_LOSSY_SPEEDUP = 1.4
Piece = tuple[float, float, float]  # (from_bytes, a, b): seconds = a + b · bytes from there on
Offer = tuple[Piece, ...]  # in rising from_bytes, the first at 0


@dataclass(frozen=True)
class Communication:
    """How gradients may travel: algorithms, "backend" first, and compressors, "none" first. activations, weights: the
    codes in which tensors travel between stages, and weights that are stored in blocks ("zero3") with their gradients:
    no choice, but what was asked for. gain: how many times faster than an exact sum a lossy one must be to be
    chosen. shapes: of the weights whose gradients travel, for codes whose bytes depend on them."""

    algorithms: tuple[str, ...] = ("backend",)
    compressors: tuple[str, ...] = ("none",)
    activations: str = "none"
    weights: str = "none"
    gain: float = 1.0
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def sums_exactly(self) -> bool:
        """Whether gradients are summed as the backend does it by itself."""
        return (self.algorithms, self.compressors) == (EXACT.algorithms, EXACT.compressors)

    @property
    def codes(self) -> dict[str, str]:
        """``Plan.codes``."""
        found = {"activations": self.activations, "weights": self.weights}
        return {what: code for what, code in found.items() if code != "none"}

    @property
    def is_lossy(self) -> bool:
        """Whether gradients may be summed in a code that changes their sum."""
        return any(CODECS[code].lossy for code in self.compressors)

    @property
    def every_code(self) -> tuple[str, ...]:
        """Those of gradients, and those of other tensors."""
        return (*self.compressors, *self.codes.values())

    def names_codes(self, asked: AskedCommunication) -> bool:
        """Whether ``asked``, which this is, has codes of gradients by name."""
        gradients = asked.get("gradients") if isinstance(asked, Mapping) else asked
        return len(self.compressors) > 1 and gradients != "auto-lossy"

    def priced_for(self, graph: Graph) -> Communication:
        """The same, for the weights that this graph trains."""
        weights = [node for node in graph.placeholders("parameter") if node.meta["source"].requires_grad]
        return replace(self, shapes=tuple(node.meta["type"].shape for node in weights))

    def exactly(self) -> Communication:
        """The same, with gradients summed as the backend does it."""
        return replace(self, algorithms=EXACT.algorithms, compressors=EXACT.compressors)

    @classmethod
    def asked(cls, asked: AskedCommunication) -> Communication:
        """None or "exact": as the backend does it; "auto": any exact algorithm; "auto-lossy": any algorithm and every
        code that needs no other optimizer or learning rate, where it is ``MIN_LOSSY_SPEEDUP`` times faster; or the names of
        those that are allowed beside the backend's plain sum, as a sequence or with commas between them. A mapping says
        that of "gradients", and codes of "activations" and "weights". Raises ValueError for others."""
        if isinstance(asked, Mapping):
            if unknown := asked.keys() - {"gradients", "activations", "weights"}:
                raise ValueError(
                    f"communication is of gradients, activations and weights, but got {sorted(unknown)}; leave it out"
                )
            others = {what: str(code) for what, code in asked.items() if what != "gradients"}
            if wrong := next(carrier_faults(others), ""):
                raise ValueError(f"{wrong}; use one of these")
            found = cls.asked(asked.get("gradients"))
            activations, weights = others.get("activations", "none"), others.get("weights", "none")
            return replace(found, activations=activations, weights=weights)
        every, codes = ("backend", *REDUCTIONS), tuple(CODECS)
        drop_in = tuple(name for name, codec in CODECS.items() if codec.drop_in)
        modes = {"exact": cls(), "auto": cls(every), "auto-lossy": cls(every, drop_in, gain=MIN_LOSSY_SPEEDUP)}
        if asked is None:
            return modes["exact"]
        known = f"exact, auto, auto-lossy, or names of algorithms ({', '.join(every)}) and codes ({', '.join(codes)})"
        if isinstance(asked, str) and asked in modes:
            return modes[asked]
        names = [name.strip() for name in asked.split(",")] if isinstance(asked, str) else list(asked)
        if not names or any(name not in (*every, *codes) for name in names):
            raise ValueError(f"communication is {known}, but got {asked!r}; use one of these")
        return cls(
            tuple(name for name in every if name == "backend" or name in names),
            tuple(name for name in codes if name == "none" or name in names),
        )

    @classmethod
    def of(cls, stage: Stage) -> Communication:
        """What a stage's gradients do, and the default."""
        algorithms = dict.fromkeys(("backend", *(wire.algorithm for wire in stage.wire)))
        return cls(tuple(algorithms), tuple(dict.fromkeys(("none", *(wire.compressor for wire in stage.wire)))))


EXACT = Communication()


@dataclass(frozen=True)
class GradientRoute:
    """A way with its prices in the groups of some axes, for elements of one size. messages: per collective of the code
    its offers, of which the cheapest counts, by bytes of the gradient; source: where these prices come from."""

    algorithm: str
    compressor: str
    coding_s: float
    coding_s_per_byte: float
    messages: tuple[tuple[Offer, ...], ...]
    source: str

    def sending(self, nbytes: float) -> float:
        """Seconds that a gradient of so many bytes travels."""
        return (
            sum(min(_offer_seconds(offer, nbytes) for offer in offers) for offers in self.messages) if nbytes else 0.0
        )

    def coding(self, nbytes: float) -> float:
        """Seconds to encode and decode it."""
        return self.coding_s + self.coding_s_per_byte * nbytes if nbytes else 0.0

    def seconds(self, nbytes: float) -> float:
        """Both."""
        return self.coding(nbytes) + self.sending(nbytes)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """``seconds`` as ``AxisPrice.pieces_of`` has it: the cheapest offer counts."""
        coding: Offer = ((0.0, self.coding_s, self.coding_s_per_byte),)
        found: list[Offer] = []
        for combination in product(*self.messages):
            total = coding
            for offer in combination:
                total = _sum_offers(total, offer)
            found.append(total)
        return tuple(found)


def _offer_seconds(offer: Offer, nbytes: float) -> float:
    _, a, b = _piece_at(offer, nbytes)
    return a + b * nbytes


def _piece_at(offer: Offer, nbytes: float) -> Piece:
    return next(piece for piece in reversed(offer) if piece[0] <= nbytes)


def _sum_offers(one: Offer, other: Offer) -> Offer:
    """The sum of two prices of the same bytes."""
    starts = sorted({piece[0] for piece in (*one, *other)})
    pairs = [(start, _piece_at(one, start), _piece_at(other, start)) for start in starts]
    return tuple((start, first[1] + second[1], first[2] + second[2]) for start, first, second in pairs)


def cheapest_offers(ways: Sequence[GradientRoute]) -> tuple[Offer, ...]:
    """Offers of which the cheapest is what the cheapest way takes, without those that never are."""
    return _cheapest_lines(tuple(dict.fromkeys(offer for way in ways for offer in way.offers)))


@lru_cache(maxsize=4096)
def _cheapest_lines(offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    lines = sorted((offer for offer in offers if len(offer) == 1), key=lambda offer: offer[0][1:])
    kept: list[Offer] = []
    for line in lines:
        if not kept or line[0][2] < kept[-1][0][2]:
            kept.append(line)
    return (*kept, *(offer for offer in offers if len(offer) > 1))
