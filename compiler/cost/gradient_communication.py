"""Gradient communication: the all-reduce algorithms and codecs that a search may use, and their prices.

A *route* is an all-reduce algorithm (``collectives.REDUCTIONS``, or "backend": the library's own choice) and a codec
(``codecs.CODECS``, or "none"). Codecs that cannot be all-reduced run by the backend's algorithms, or hierarchically:
exact inside hosts, compressed between them. To sum n bytes over a group of p devices takes

    start + coding · n + sending(n),    sending(n) = Σ over the codec's messages of min over offers of a + b · share · n

Encoding and decoding keep the device busy and hide behind nothing. Sending overlaps as any reduction does
(``gradient_reduction``). A step never becomes shorter when a bucket takes longer, so a route that is no faster than
another for every bucket is dropped. All combinations of the remaining routes (a few per group of axes) are tried.

The search prices a gradient by its cheapest route, as its share of a full bucket. No choice for a whole stage is
cheaper than that, so lower bounds hold. Routes are chosen per stage and group of mesh axes once the stage is solved.
Where the backend was measured, algorithms that were not measured are left out, and so are codecs where some codec was
measured: an assumed rate would win against a measured one.
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
#: A lossy codec changes the training, and predicted codec times are off by up to a third. A smaller speedup is no gain.
MIN_LOSSY_SPEEDUP = 1.4
Piece = tuple[float, float, float]  # (from_bytes, a, b): seconds = a + b · bytes from there on
Offer = tuple[Piece, ...]  # in rising from_bytes, the first at 0


@dataclass(frozen=True)
class Communication:
    """The algorithms and codecs that gradients may use, and the codecs that other tensors must use."""

    #: All-reduce algorithms, "backend" first.
    algorithms: tuple[str, ...] = ("backend",)
    #: Codecs of gradients, "none" first.
    compressors: tuple[str, ...] = ("none",)
    #: Codec of the tensors between stages. The search does not choose it.
    activations: str = "none"
    #: Codec of weights that are stored in blocks ("zero3") and of their gradients. The search does not choose it.
    weights: str = "none"
    #: A lossy sum is chosen only if it is at least this many times faster than the fastest exact one.
    gain: float = 1.0
    #: Shapes of the weights whose gradients travel, for codecs whose bytes depend on them.
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def sums_exactly(self) -> bool:
        """True if gradients are summed as the backend does it by itself."""
        return (self.algorithms, self.compressors) == (EXACT.algorithms, EXACT.compressors)

    @property
    def codes(self) -> dict[str, str]:
        """The codecs of other tensors than gradients, as ``Plan.codes`` has them."""
        codecs = {"activations": self.activations, "weights": self.weights}
        return {what: code for what, code in codecs.items() if code != "none"}

    @property
    def is_lossy(self) -> bool:
        """True if gradients may be summed in a code that changes their sum."""
        return any(CODECS[code].lossy for code in self.compressors)

    @property
    def every_code(self) -> tuple[str, ...]:
        """The codecs of gradients and of other tensors."""
        return (*self.compressors, *self.codes.values())

    def names_codes(self, asked: AskedCommunication) -> bool:
        """True if ``asked``, which this is, has codes of gradients by name."""
        gradients = asked.get("gradients") if isinstance(asked, Mapping) else asked
        return len(self.compressors) > 1 and gradients != "auto-lossy"

    def priced_for(self, graph: Graph) -> Communication:
        """Return the same communication with the shapes of the weights that this graph trains."""
        weights = [node for node in graph.placeholders("parameter") if node.meta["source"].requires_grad]
        return replace(self, shapes=tuple(node.meta["type"].shape for node in weights))

    def exactly(self) -> Communication:
        """Return the same communication with gradients summed by the backend alone, exactly."""
        return replace(self, algorithms=EXACT.algorithms, compressors=EXACT.compressors)

    @classmethod
    def asked(cls, asked: AskedCommunication) -> Communication:
        """Parse what a user asks for.

        None or "exact": as the backend does it; "auto": any exact algorithm; "auto-lossy": any algorithm and every
        codec that needs no other optimizer or learning rate, where it is ``MIN_LOSSY_SPEEDUP`` times faster; or the
        names of those that are allowed beside the backend's plain sum, as a sequence or with commas between them. A
        mapping says that of "gradients", and the codecs of "activations" and "weights". Raises ValueError for others.
        """
        if isinstance(asked, Mapping):
            if unknown := asked.keys() - {"gradients", "activations", "weights"}:
                raise ValueError(
                    f"communication is of gradients, activations and weights, but got {sorted(unknown)}; leave it out"
                )
            others = {what: str(code) for what, code in asked.items() if what != "gradients"}
            if wrong := next(carrier_faults(others), ""):
                raise ValueError(f"{wrong}; use one of these")
            communication = cls.asked(asked.get("gradients"))
            activations, weights = others.get("activations", "none"), others.get("weights", "none")
            return replace(communication, activations=activations, weights=weights)
        every, codes = ("backend", *REDUCTIONS), tuple(CODECS)
        drop_in = tuple(name for name, codec in CODECS.items() if codec.drop_in)
        modes = {"exact": cls(), "auto": cls(every), "auto-lossy": cls(every, drop_in, gain=MIN_LOSSY_SPEEDUP)}
        if asked is None:
            return modes["exact"]
        allowed = f"exact, auto, auto-lossy, or names of algorithms ({', '.join(every)}) and codes ({', '.join(codes)})"
        if isinstance(asked, str) and asked in modes:
            return modes[asked]
        names = [name.strip() for name in asked.split(",")] if isinstance(asked, str) else list(asked)
        if not names or any(name not in (*every, *codes) for name in names):
            raise ValueError(f"communication is {allowed}, but got {asked!r}; use one of these")
        return cls(
            tuple(name for name in every if name == "backend" or name in names),
            tuple(name for name in codes if name == "none" or name in names),
        )

    @classmethod
    def of(cls, stage: Stage) -> Communication:
        """Return the communication that offers the routes of a stage, and the default."""
        algorithms = dict.fromkeys(("backend", *(wire.algorithm for wire in stage.wire)))
        return cls(tuple(algorithms), tuple(dict.fromkeys(("none", *(wire.compressor for wire in stage.wire)))))


EXACT = Communication()


@dataclass(frozen=True)
class GradientRoute:
    """An algorithm and a codec with their prices in the groups of some axes, for elements of one size."""

    algorithm: str
    compressor: str
    coding_s: float
    coding_s_per_byte: float
    #: Per collective of the codec its offers by bytes of the gradient. The cheapest offer counts.
    messages: tuple[tuple[Offer, ...], ...]
    #: The origin of these prices: "measured", "scaled" or "analytic".
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
        """Seconds to code and send a gradient of so many bytes."""
        return self.coding(nbytes) + self.sending(nbytes)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """``seconds`` as ``AxisPrice.pieces_of`` has it: the cheapest offer counts."""
        coding: Offer = ((0.0, self.coding_s, self.coding_s_per_byte),)
        sums: list[Offer] = []
        for combination in product(*self.messages):
            total = coding
            for offer in combination:
                total = _sum_offers(total, offer)
            sums.append(total)
        return tuple(sums)


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
