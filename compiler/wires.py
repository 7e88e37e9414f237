"""By which algorithm and in which code gradients are summed: what is offered, what it costs, and what is chosen.

A *way* is an all-reduce's algorithm (``collectives.REDUCTIONS``, or "backend": what the library runs by itself) and a
compressor (``codecs.CODECS``, or "none"). Codes that do not all-reduce run by the backend's own algorithms, or
hierarchically: exact inside of hosts, in code between them. To sum n
bytes over a group of p devices takes

    start + coding · n + sending(n),    sending(n) = Σ over the code's messages of min over offers of a + b · share · n

Coding keeps the device busy and hides behind nothing; sending overlaps as any reduction does (``overlap``). Both parts
of a step that grow with a bucket's seconds never shrink with them, so of two ways of which one takes no longer for any
bucket the other need not be looked at; of what is left (a few per group of axes) all combinations are tried.

Searches price a gradient by its cheapest way as its share of a full bucket, which no choice for whole stages undercuts,
so bounds hold as they are. Ways are chosen per stage and group of mesh axes once a stage is assembled. Where the
backend was measured, algorithms that were not are left out, and where codes were, those that were not: an assumed rate
would win against a measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ..costmodel.algorithms import IN_PLACE
from ..costmodel.codecs import CODECS, Codec, Factors, coded_messages, coding_seconds
from ..costmodel.collectives import REDUCTIONS, AxisPrice
from .carried import carrier_faults
from .graph import Graph
from .overlap import Bucket
from .plan import Stage, Wire

if TYPE_CHECKING:
    from .pricing import MeshPricer

__all__ = [
    "EXACT",
    "AskedCommunication",
    "Communication",
    "Way",
    "bucket_seconds",
    "cheapest_offers",
    "choose_ways",
    "coding_source",
    "lossy_notes",
    "offered_ways",
    "way_of",
    "way_source",
    "worthwhile",
]

AskedCommunication = str | Sequence[str] | Mapping[str, Any] | None  # see ``Communication.asked``
#: training differs by it, and prices of codes are off by up to a third: where memory is the wire, to code pays nothing
LEAST_GAIN = 1.4
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
        code that needs no other optimizer or learning rate, where it is ``LEAST_GAIN`` times faster; or the names of
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
        modes = {"exact": cls(), "auto": cls(every), "auto-lossy": cls(every, drop_in, gain=LEAST_GAIN)}
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
class Way:
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
        return sum(min(_at(offer, nbytes) for offer in offers) for offers in self.messages) if nbytes else 0.0

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
                total = _added(total, offer)
            found.append(total)
        return tuple(found)


def _at(offer: Offer, nbytes: float) -> float:
    _, a, b = _piece(offer, nbytes)
    return a + b * nbytes


def _piece(offer: Offer, nbytes: float) -> Piece:
    return next(piece for piece in reversed(offer) if piece[0] <= nbytes)


def _added(one: Offer, other: Offer) -> Offer:
    """The sum of two prices of the same bytes."""
    starts = sorted({piece[0] for piece in (*one, *other)})
    pairs = [(start, _piece(one, start), _piece(other, start)) for start in starts]
    return tuple((start, first[1] + second[1], first[2] + second[2]) for start, first, second in pairs)


def _scaled(price: AxisPrice, kind: str, share: float) -> tuple[Offer, ...]:
    """The offers of a collective of ``share`` bytes per byte of the gradient."""
    return tuple(tuple((start / share, a, b * share) for start, a, b in offer) for offer in price.pieces_of(kind))


# ---- what there is


def way_of(pricer: MeshPricer, axes: Sequence[int], itemsize: int, algorithm: str, compressor: str) -> Way:
    """The prices of one way over the groups that ``axes`` form together. Raises ValueError for what is unknown, and for
    what these groups cannot do."""
    way = _possible(pricer, axes, itemsize, algorithm, compressor)
    if way is None:
        raise ValueError(
            f"gradients over mesh axes {list(axes)} of {list(pricer.mesh_shape)} have no sum by {algorithm!r} in code "
            f"{compressor!r}; algorithms are backend (with every code), {', '.join(REDUCTIONS)} (with codes that "
            f"all-reduce; hierarchical: over several hosts of equally many devices, with codes of elements); codes are "
            f"{', '.join(CODECS)}"
        )
    return way


def _possible(pricer: MeshPricer, axes: Sequence[int], itemsize: int, algorithm: str, compressor: str) -> Way | None:
    codec = CODECS.get(compressor)
    if codec is None or algorithm not in ("backend", *REDUCTIONS):
        return None
    if compressor != "none" and itemsize > 4:  # nobody sums fp64 to send a byte of it
        return None
    if algorithm == "hierarchical" and compressor != "none":
        return _outer(pricer, axes, itemsize, codec)
    price = pricer.joint(axes, algorithm)
    if price is None or (algorithm != "backend" and codec.pattern != "all_reduce"):
        return None
    messages = coded_messages(codec, price.size, itemsize, pricer.communication.shapes)
    coding = coding_seconds(codec, pricer.device, price.size)
    if any(kind not in price.pieces for kind, _ in messages):
        return None
    return Way(
        algorithm,
        compressor,
        coding[0],
        coding[1] / itemsize,
        tuple(_scaled(price, kind, share) for kind, share in messages),
        price.source(messages[0][0]),
    )


def _outer(pricer: MeshPricer, axes: Sequence[int], itemsize: int, codec: Codec) -> Way | None:
    """Exact inside of hosts, where a rank sums one part; that part in code between them."""
    levels = pricer.levels(axes)
    if levels is None or isinstance(codec.payload, Factors):  # parts cut through matrices
        return None
    inner, outer = levels
    share = 1 / inner.size
    messages = [_scaled(inner, kind, 1.0) for kind in ("all_to_all", "all_gather")]
    messages += [_scaled(outer, kind, b * share) for kind, b in coded_messages(codec, outer.size, itemsize)]
    once, each = coding_seconds(codec, pricer.device, outer.size)
    return Way("hierarchical", codec.name, once, each / itemsize * share, tuple(messages), outer.source("all_gather"))


def offered_ways(pricer: MeshPricer, axes: Sequence[int], itemsize: int) -> tuple[Way, ...]:
    """The ways that ``pricer.communication`` allows, the backend's plain sum first; empty where these axes form no
    groups together (then there is no choice)."""
    key = (tuple(axes), itemsize)
    if key not in pricer.ways:
        allowed, backend = pricer.communication, pricer.joint(axes)
        measured = backend is not None and backend.source(IN_PLACE) != "analytic"
        found = []
        for algorithm, compressor in product(allowed.algorithms, allowed.compressors):
            way = _possible(pricer, axes, itemsize, algorithm, compressor)
            if way is None or (measured and algorithm != "backend" and way.source == "analytic"):
                continue
            if compressor == "none" or not pricer.device.codings or pricer.device.coding_rate(compressor):
                found.append(way)
        pricer.ways[key] = tuple(found)
    return pricer.ways[key]


def cheapest_offers(ways: Sequence[Way]) -> tuple[Offer, ...]:
    """Offers of which the cheapest is what the cheapest way takes, without those that never are."""
    return _undercut(tuple(dict.fromkeys(offer for way in ways for offer in way.offers)))


@lru_cache(maxsize=4096)
def _undercut(offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    lines = sorted((offer for offer in offers if len(offer) == 1), key=lambda offer: offer[0][1:])
    kept: list[Offer] = []
    for line in lines:
        if not kept or line[0][2] < kept[-1][0][2]:
            kept.append(line)
    return (*kept, *(offer for offer in offers if len(offer) > 1))


# ---- what is chosen


def choose_ways(
    pricer: MeshPricer,
    buckets: Sequence[Bucket],
    exposed: Callable[[Callable[[Bucket], float]], float],
    wire: Sequence[Wire] = (),
) -> dict[tuple[int, ...], tuple[str, str]]:
    """(algorithm, compressor) per group of axes that sums some bucket: of least exposed seconds, with the coding; what
    ``wire`` has of these axes stands. exposed: seconds of a stage's reductions that nothing hides, given how long each
    bucket travels. Raises ValueError for a wire that its groups cannot do."""
    fixed = {one.axes: (one.algorithm, one.compressor) for one in wire}
    groups: dict[tuple[int, ...], list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.axes, []).append(bucket)
    names: list[list[tuple[str, str]]] = []
    for axes, members in groups.items():
        if axes in fixed:
            names.append([fixed[axes]])
            for size in {itemsize_of(bucket) for bucket in members} if fixed[axes] != ("backend", "none") else ():
                way_of(pricer, axes, size, *fixed[axes])
        else:
            names.append(_worth_a_look(pricer, axes, members))
    combinations = [dict(zip(groups, chosen)) for chosen in product(*names)]
    if len(combinations) == 1:
        return combinations[0]

    def seconds(chosen: Mapping[tuple[int, ...], tuple[str, str]]) -> float:
        prices = {id(bucket): bucket_seconds(pricer, bucket, chosen[bucket.axes]) for bucket in buckets}
        return exposed(lambda bucket: prices[id(bucket)][1]) + sum(coding for coding, _ in prices.values())

    prices = [seconds(chosen) for chosen in combinations]
    lossy = [any(_is_lossy(way) for axes, way in chosen.items() if axes not in fixed) for chosen in combinations]
    return combinations[worthwhile(prices, lossy, pricer.communication.gain)]


def worthwhile(seconds: Sequence[float], lossy: Sequence[bool], gain: float) -> int:
    """The index of the least; of the least exact one, unless a lossy one is ``gain`` times faster."""
    ranked = sorted(range(len(seconds)), key=seconds.__getitem__)
    exact = next((index for index in ranked if not lossy[index]), ranked[0])
    return ranked[0] if gain * seconds[ranked[0]] <= seconds[exact] else exact


def _is_lossy(way: tuple[str, str]) -> bool:
    return CODECS[way[1]].lossy


def bucket_seconds(pricer: MeshPricer, bucket: Bucket, way: tuple[str, str]) -> tuple[float, float]:
    """(coding, sending) of one bucket."""
    if way == ("backend", "none"):
        return 0.0, pricer.reduce_seconds(bucket.nbytes, bucket.axes)
    priced = way_of(pricer, bucket.axes, itemsize_of(bucket), *way)
    return priced.coding(bucket.nbytes), priced.sending(bucket.nbytes)


def way_source(pricer: MeshPricer, bucket: Bucket, way: tuple[str, str]) -> str:
    """Where the seconds that a bucket travels come from: "measured", "scaled" or "analytic"."""
    if way == ("backend", "none"):
        return pricer.reduce_source(bucket.axes)
    return way_of(pricer, bucket.axes, itemsize_of(bucket), *way).source


def coding_source(pricer: MeshPricer, way: tuple[str, str]) -> str:
    """Where the seconds to encode and decode come from: "measured" or "analytic"."""
    return "measured" if pricer.device.coding_rate(way[1]) else "analytic"


def itemsize_of(bucket: Bucket) -> int:
    """Bytes of an element of the bucket's gradients, which agree in their dtype."""
    dtype: Hashable = bucket.gradients[0].key
    assert isinstance(dtype, torch.dtype), dtype
    return dtype.itemsize


def _worth_a_look(pricer: MeshPricer, axes: tuple[int, ...], buckets: Sequence[Bucket]) -> list[tuple[str, str]]:
    """The ways that no other exact or lossy one undercuts for these buckets, the plain sum first where it is among
    them."""
    if pricer.communication.sums_exactly:
        return [("backend", "none")]
    offered: dict[tuple[str, str], list[Way]] = {}
    sizes = {itemsize_of(bucket) for bucket in buckets}
    for size in sorted(sizes):
        for way in offered_ways(pricer, axes, size):
            offered.setdefault((way.algorithm, way.compressor), []).append(way)
    shapes = sorted({(bucket.nbytes, itemsize_of(bucket)) for bucket in buckets})
    prices: dict[tuple[str, str], tuple[float, ...]] = {}
    for name, ways in offered.items():
        if len(ways) == len(sizes):
            of = dict(zip(sorted(sizes), ways))
            coding = sum(of[itemsize_of(bucket)].coding(bucket.nbytes) for bucket in buckets)
            prices[name] = (coding, *(of[size].sending(nbytes) for nbytes, size in shapes))
    kept: list[tuple[str, str]] = []
    for name, price in prices.items():
        rivals = [other for other in kept if _is_lossy(other) == _is_lossy(name)]
        if not any(_no_worse(prices[other], price) for other in rivals):
            kept = [other for other in kept if other not in rivals or not _no_worse(price, prices[other])] + [name]
    return kept or [("backend", "none")]


def _no_worse(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def lossy_notes(stages: Sequence[Stage], codes: Mapping[str, str]) -> list[str]:
    """A line for a plan whose gradients are not summed exactly, and for each of its ``codes``."""
    notes = [f"{what} are compressed by {code}, which is lossy: training differs" for what, code in codes.items()]
    found = {wire.compressor for stage in stages for wire in stage.wire}
    lossy = sorted(name for name in found if name in CODECS and CODECS[name].lossy)
    if lossy:
        text = f"gradients are compressed by {', '.join(lossy)}, which is lossy: training differs from the exact sum"
        notes.insert(0, text)
    return notes
