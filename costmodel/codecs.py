"""Compressors of gradients as descriptions: what they send, in which pattern, and what encoding costs. ``runtime/``
registers an implementation of every family.

Seconds to reduce n elements over a group of p devices, e = encode, d = decode seconds per element, b wire bytes per
element, collectives priced by the axis (``AxisPrice.seconds``)::

    all_reduce   linear codes, summed as they are              e n + all_reduce(b n) + d n  (factors: twice b n / 2)
    two_step     each reduces one part, then tells it          e n (1 + 1/p) + 2 d n + all_to_all(b n) + all_gather(b n)
    all_gather   sparse codes, every device decodes all        e n + all_gather(p b n) + p d b n / 8

Encoding and decoding are measured by a profile (``Device.codings``: one sum over a group of one device takes a + b n)
and brought to p devices by the terms above. Else, on a CPU, ``encode_ns`` is assumed, about what it takes where two
ranks share a core (``benchmarks/codecs.py``, 4 ranks, has all coding of a rank alone on its core at half of it), but
for top-k, dgc, threshold (14 ns) and PowerSGD (2.2 ns), which keep the figures of prototypes that ran over Gloo; on an
accelerator it is assumed to be ``passes`` over the elements at the speed of memory.

What is sent, for n elements over p devices, to the byte (``sent_bytes``)::

    Dense     n elements of ``itemsize``
    Picked    ceil(fraction n) elements of 4 bytes, the same ones on every device
    Levels    part of m = ceil(n/p), rounded up to whole words of bytes with ``per_byte`` elements each:
              4 + 4 scales blocks + m / per_byte bytes; an all-to-all of p parts, an all-gather of p.
              blocks: ceil(m / block); where they go by rows, of that part which has most
    Entries   k = ceil(fraction n), or the sum of that over tensors, rounded up to even:
              4 + 4 extra + 4 ceil(n / span) + k (value_bytes + 2)
    Factors   of each r × c matrix with rank (r + c) < r c: rank r and rank c elements of 4 bytes; all else dense

Blocks that go by rows are the rows of matrices, and vectors: gradients of one neuron are of like magnitude, those of
two tensors are not (Seide et al. 2014, section 3.2, have one scale per column of their transposed matrices). Rows of
less than 64 elements go together, longer ones than ``block`` in equal pieces where they can be. A block also ends where
a message, its part or a tile of 2¹⁸ elements does.

Single tensors (activations between stages, weights that are gathered) may travel in codes too: those of elements that
keep nothing between messages (``CARRIERS``), as one part of n elements.

The first 4 bytes of a message name a rank whose gradient is not finite. Positions of entries take 2 bytes, counted from
the start of a span; 4 bytes per span tell how many entries it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from .algorithms import IN_PLACE
from .hardware import Device

__all__ = [
    "CARRIERS",
    "CHUNK",
    "CODECS",
    "TILE",
    "Codec",
    "Dense",
    "Entries",
    "LowRankFactors",
    "Payload",
    "Picked",
    "QuantizationLevels",
    "Run",
    "carried_bytes",
    "carried_share",
    "carrying_seconds",
    "coded_messages",
    "coding_seconds",
    "sent_bytes",
]

CHUNK = 2**20  # elements of a message, at the most
PATTERNS = ("all_reduce", "two_step", "all_gather")
_NOMINAL_SIDE = 2048  # of the square matrices that factors and rows are priced for
TILE = 2**18  # elements that are coded together: calls cost more than what leaves the cache
_SHORT = 64  # elements: rows of less share a scale

Run = tuple[int, int, int]  # from where to where, and how many: elements of each block, or entries


@dataclass(frozen=True, slots=True)
class Dense:
    """All elements, in ``itemsize`` bytes each."""

    itemsize: int

    @property
    def wire_bytes(self) -> float:
        """Per element."""
        return float(self.itemsize)


@dataclass(frozen=True, slots=True)
class Picked:
    """Some elements, of which every device knows which they are."""

    fraction: float

    @property
    def wire_bytes(self) -> float:
        """Per element."""
        return 4 * self.fraction

    def count(self, n: int) -> int:
        """Elements of n that are sent."""
        return ceil(round(self.fraction * n, 6))


@dataclass(frozen=True, slots=True)
class QuantizationLevels:
    """All elements, each as one of ``levels``, ``per_byte`` of them in a byte; ``scales`` numbers per block of at most
    ``block`` elements; by_row: blocks are rows of the tensors."""

    levels: int
    per_byte: int
    block: int
    scales: int = 1
    by_row: bool = False

    @property
    def wire_bytes(self) -> float:
        """Per element."""
        return 1 / self.per_byte + 4 * self.scales / (min(self.block, _NOMINAL_SIDE) if self.by_row else self.block)

    @property
    def base(self) -> int:
        """Of the digits in a byte: the largest that leaves room for ``per_byte`` of them."""
        return int(256 ** (1 / self.per_byte) + 1e-9)

    def part(self, n: int, group: int) -> int:
        """Elements of a device's part of n."""
        quantum = 4 * self.per_byte
        return ceil(ceil(n / group) / quantum) * quantum

    def part_bytes(self, part: int, blocks: int) -> int:
        """Bytes of the message that carries a part."""
        return 4 + 4 * self.scales * blocks + part // self.per_byte

    def tiles(
        self, n: int, group: int, shapes: Sequence[Sequence[int]] = (), start: int = 0
    ) -> list[list[tuple[Run, ...]]]:
        """Of each device's part its tiles, of each tile its blocks, counted from where the message begins, which is
        ``start`` elements after the tensors do."""
        part, step = self.part(n, group), max(1, TILE // self.block) * self.block
        strips = self._strips(shapes, start) if self.by_row else []
        ends = [(min(j * part, n), min((j + 1) * part, n)) for j in range(group)]
        return [
            [
                tuple(_within(strips or [(low, high, self.block)], at, min(at + step, high)))
                for at in range(low, high, step)
            ]
            for low, high in ends
        ]

    def blocks(self, tiles: list[list[tuple[Run, ...]]]) -> int:
        """Blocks of the part that has most."""
        return max((sum((b - a) // width for tile in part for a, b, width in tile) for part in tiles), default=0)

    def _strips(self, shapes: Sequence[Sequence[int]], start: int) -> list[Run]:
        found, at = [], -start
        for rows, columns in LowRankFactors.sizes(shapes):
            if rows * columns:
                pieces = ceil(columns / self.block)
                even = next((k for k in range(pieces, 4 * pieces) if columns % k == 0), 0)
                width = columns // even if even else self.block
                found.append((at, at + rows * columns, width * ceil(_SHORT / width)))
            at += rows * columns
        return found


def _within(strips: Sequence[Run], low: int, high: int) -> Iterator[Run]:
    """The blocks of low..high, in runs of one width."""
    for start, stop, width in strips:
        a, b = max(start, low), min(stop, high)
        head = min(b, start + ceil((a - start) / width) * width)
        tail = max(head, start + (b - start) // width * width)
        yield from ((x, y, min(width, y - x)) for x, y in ((a, head), (head, tail), (tail, b)) if x < y)


@dataclass(frozen=True, slots=True)
class Entries:
    """At most a ``fraction`` of the elements, with their positions; ``extra`` numbers per message; by_tensor: of the
    elements of every tensor."""

    fraction: float
    value_bytes: int
    extra: int = 0
    by_tensor: bool = False

    @property
    def span(self) -> int:
        """Elements whose positions count from the same start: one bit is the sign where there is no value."""
        return 2**16 if self.value_bytes else 2**15

    @property
    def wire_bytes(self) -> float:
        """Per element."""
        return self.fraction * (self.value_bytes + 2) + 4 / self.span

    def pieces(self, n: int, shapes: Sequence[Sequence[int]] = (), start: int = 0) -> list[Run]:
        """(from, to, entries of these) of a message of n elements, ``start`` elements after where the tensors begin."""
        found, at = [], -start
        for size in [prod(shape) for shape in shapes] if shapes and self.by_tensor else [start + n]:
            low, high, at = max(at, 0), min(at + size, n), at + size
            if low < high:
                found.append((low, high, min(ceil(round(self.fraction * (high - low), 6)), high - low)))
        return found

    def room(self, pieces: Sequence[Run]) -> int:
        """Entries that a message has room for."""
        return ceil(sum(count for *_, count in pieces) / 2) * 2

    def message_bytes(self, n: int, pieces: Sequence[Run]) -> int:
        """Bytes of a message of n elements."""
        return 4 + 4 * self.extra + 4 * ceil(n / self.span) + self.room(pieces) * (self.value_bytes + 2)


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """Matrices by two factors of ``rank`` columns; ``header`` bytes go before them."""

    rank: int
    header: int = 0

    @property
    def wire_bytes(self) -> float:
        """Per element of a large square matrix."""
        return 8 * self.rank / _NOMINAL_SIDE

    def pays(self, rows: int, columns: int, rank: int | None = None) -> bool:
        """True if the factors of a matrix are smaller than the matrix."""
        return (self.rank if rank is None else rank) * (rows + columns) < rows * columns

    @staticmethod
    def sizes(shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """(rows, columns) of tensors: all but the first dim are columns, a vector is one row."""
        return [(shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape)) for shape in shapes]

    def elements(self, shapes: Sequence[Sequence[int]]) -> int:
        """The number of elements that are sent of tensors."""
        return sum(self.rank * (r + c) if self.pays(r, c) else r * c for r, c in self.sizes(shapes))


Payload = Dense | Picked | QuantizationLevels | Entries | LowRankFactors


@dataclass(frozen=True, slots=True)
class Codec:
    """family: the implementation, which takes its parameters from ``payload``; passes: over the elements, reads and
    writes of 4 bytes, to encode and to decode; encode_ns: per element on one CPU thread; lossy: whether the sum differs
    from the exact one by more than the order of summation; drop_in: whether a search may choose it by itself, since
    training needs no other optimizer or learning rate than with the exact sum, be it at a high one
    (``benchmarks/convergence.py``); residuals: fp32 numbers per element that stay between steps (``memory``)."""

    name: str
    family: str
    pattern: str
    payload: Payload
    passes: float
    encode_ns: float
    lossy: bool = True
    drop_in: bool = True
    residuals: int = 0

    @property
    def wire_bytes(self) -> float:
        """Per element of the gradient, of a large bucket."""
        return self.payload.wire_bytes


def _sparse(
    name: str, value_bytes: int, passes: float, encode_ns: float, drop_in: bool = True, residuals: int = 1
) -> Codec:
    family, fraction = name.rstrip("%0123456789."), float(name.strip("%abcdefghijklmnopqrstuvwxyz")) / 100
    payload = Entries(fraction, value_bytes, by_tensor=family in ("topk", "dgc"))
    return Codec(name, family, "all_gather", payload, passes, encode_ns, True, drop_in, residuals)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("none", "none", "all_reduce", Dense(4), 0.0, 0.0, lossy=False),
        Codec("bf16", "bf16", "all_reduce", Dense(2), 1.5, 0.35),
        Codec("fp16", "fp16", "all_reduce", Dense(2), 1.5, 0.35),
        Codec("int8", "int", "two_step", QuantizationLevels(255, 1, 512), 6.0, 2.0),
        Codec("int4", "int", "two_step", QuantizationLevels(15, 2, 256), 6.0, 2.9),
        Codec("int2", "int", "two_step", QuantizationLevels(4, 4, 256), 6.0, 2.9, drop_in=False),
        Codec("terngrad", "int", "two_step", QuantizationLevels(3, 5, 640), 6.0, 3.1, drop_in=False),
        Codec(
            "1bit",
            "1bit",
            "two_step",
            QuantizationLevels(2, 8, 4096, 2, by_row=True),
            8.0,
            2.5,
            drop_in=False,
            residuals=1,
        ),
        Codec(
            "ef-signsgd",
            "ef-signsgd",
            "two_step",
            QuantizationLevels(2, 8, 4096, by_row=True),
            8.0,
            2.2,
            drop_in=False,
            residuals=1,
        ),
        Codec("signsgd", "signsgd", "two_step", QuantizationLevels(2, 8, 4096, 0), 4.0, 2.1, drop_in=False),
        Codec("randomk1%", "randomk", "all_reduce", Picked(0.01), 3.0, 0.6, drop_in=False, residuals=1),
        Codec("randomk10%", "randomk", "all_reduce", Picked(0.1), 4.0, 1.7, drop_in=False, residuals=1),
        *(
            Codec(
                f"powersgd{rank}",
                "powersgd",
                "all_reduce",
                LowRankFactors(rank),
                12.0,
                2.2,
                drop_in=rank > 1,
                residuals=1,
            )
            for rank in (1, 2, 4, 8)
        ),
        _sparse("topk1%", 2, 40.0, 14.0, drop_in=False),
        _sparse("topk0.1%", 2, 40.0, 14.0, drop_in=False),
        _sparse("dgc1%", 2, 44.0, 14.0, drop_in=False, residuals=2),
        _sparse("dgc0.1%", 2, 44.0, 14.0, drop_in=False, residuals=2),
        Codec("threshold10", "threshold", "all_gather", Entries(1 / 32, 0, 1), 40.0, 14.0, drop_in=False, residuals=1),
        _sparse("atomo1%", 4, 60.0, 18.0, drop_in=False, residuals=0),
        _sparse("atomo5%", 4, 60.0, 18.0, residuals=0),
        Codec("atomo-svd2", "atomo-svd", "all_gather", LowRankFactors(2, 4), 4000.0, 350.0, drop_in=False),
        Codec("atomo-svd4", "atomo-svd", "all_gather", LowRankFactors(4, 4), 4000.0, 350.0, drop_in=False),
    )
}


def sent_bytes(
    codec: Codec, n: int, group: int, itemsize: int = 4, shapes: Sequence[Sequence[int]] = (), start: int = 0
) -> dict[str, int]:
    """Bytes of the buffers of one message of n elements, per collective: of an all-reduce the vector, of an all-to-all
    and an all-gather the parts of all devices. shapes: of the tensors in it, where a code looks at them; none: one
    vector. start: elements of the tensors that go before the message; factors have whole buckets."""
    payload = codec.payload
    if isinstance(payload, Dense):
        return {"all_reduce": n * (itemsize if codec.name == "none" else payload.itemsize)}
    if isinstance(payload, Picked):
        return {"all_reduce": 4 * payload.count(n)}
    if isinstance(payload, QuantizationLevels):
        blocks = payload.blocks(payload.tiles(n, group, shapes, start))
        whole = group * payload.part_bytes(payload.part(n, group), blocks)
        return {"all_to_all": whole, "all_gather": whole}
    if isinstance(payload, Entries):
        return {"all_gather": group * payload.message_bytes(n, payload.pieces(n, shapes, start))}
    share = group if codec.pattern == "all_gather" else 1
    return {codec.pattern: share * (4 * payload.elements(shapes or [(n,)]) + payload.header)}


def coding_seconds(codec: Codec, device: Device, group: int) -> tuple[float, float]:
    """(seconds per message, seconds per element of it) to encode and decode on one of ``group`` devices: what was
    measured over a group of one (``Device.codings``), by what more devices make of it; else what is assumed."""
    if rate := device.coding_rate(codec.name):
        grown = _codings(codec, group) / _codings(codec, 1)
        return rate.alpha_s * _calls(codec, group), rate.beta_s_per_element * grown
    encode = codec.encode_ns * 1e-9 if device.kind == "cpu" else codec.passes * 4 / device.memory_bytes_per_s
    return 0.0, encode * _codings(codec, group)


def _codings(codec: Codec, group: int) -> float:
    """The number of times that each element is encoded or decoded."""
    if codec.pattern == "all_reduce":
        return 2
    if codec.pattern == "two_step":
        return 3 + 1 / group
    return 1 + group * codec.wire_bytes / 8  # values that arrive, each added in its place


def _calls(codec: Codec, group: int) -> float:
    """The factor on the fixed coding costs of a message, against those in a group of one. In two steps 3 p + 1 parts
    are coded instead of 4, and half of the costs grow with them."""
    return (1 + (3 * group + 1) / 4) / 2 if codec.pattern == "two_step" else 1.0


@lru_cache(maxsize=64)  # a search asks for each of its meshes
def _factor_bytes(payload: LowRankFactors, shapes: tuple[tuple[int, ...], ...]) -> float:
    """Per element of tensors, without the header; of none those of a large square matrix."""
    count = sum(map(prod, shapes))
    return 4 * payload.elements(shapes) / count if count else payload.wire_bytes


def coded_messages(
    codec: Codec, group: int, itemsize: int, shapes: tuple[tuple[int, ...], ...] = ()
) -> tuple[tuple[str, float], ...]:
    """The collectives that a gradient takes, each with its bytes per byte of the gradient. "none" is the plain
    all-reduce of the gradient in its own dtype. shapes: of the tensors that gradients are made of; of none factors are
    those of large square matrices."""
    payload = codec.payload
    share = (_factor_bytes(payload, shapes) if isinstance(payload, LowRankFactors) else codec.wire_bytes) / itemsize
    if codec.name == "none":
        return ((IN_PLACE, 1.0),)
    if isinstance(payload, LowRankFactors) and codec.pattern == "all_reduce":  # the second is made from the first
        return ((IN_PLACE, share / 2), (IN_PLACE, share / 2))
    if codec.pattern == "all_reduce":
        return ((IN_PLACE, share),)
    if codec.pattern == "two_step":
        return (("all_to_all", share), ("all_gather", share))
    return (("all_gather", group * share),)


# ---- single tensors

CARRIERS = ("none", *(name for name, codec in CODECS.items() if codec.family in ("bf16", "fp16", "int")))
"""The codes that a single tensor may travel in"""


def carried_bytes(code: str, n: int, itemsize: int) -> int:
    """Bytes of the message of a tensor of n elements of ``itemsize`` bytes, which are sent as they are where the code
    would not save any."""
    coded = max(sent_bytes(CODECS[code], n, 1).values()) if code != "none" else n * itemsize
    return min(coded, n * itemsize)


def carried_share(code: str, itemsize: int) -> float:
    """Bytes of the message per byte of a large tensor; 1 where the code would save nothing and is left out."""
    return min(CODECS[code].wire_bytes / itemsize, 1.0) if code != "none" else 1.0


def carrying_seconds(code: str, itemsize: int, device: Device) -> float:
    """Seconds per element to encode such a tensor, and as many again to decode it."""
    if carried_share(code, itemsize) == 1.0:
        return 0.0
    codec = CODECS[code]
    return coding_seconds(codec, device, 1)[1] / _codings(codec, 1)
