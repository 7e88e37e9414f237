"""The parts of a cluster: Device, Link and Host, frozen and validated; and how a preset's data sheet becomes one.

Rates are per direction. Link kinds: "switch" — every end has its own path; "ring" — direct links between pairs, so a
small group reaches only some of a device's links; "shared" — one medium that all ends divide among them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite
from typing import Any

from .curves import Curve, Surface
from .measured import MASTERS, CodingRate, OpTime, OptimizerRate
from .presets import OVERLAP, Constant, DeviceSheet, LinkSheet

__all__ = ["LINK_KINDS", "Device", "HashedOnce", "Host", "Link", "device_of", "link_behind", "link_of", "positive"]

LINK_KINDS = ("switch", "ring", "shared")


class HashedOnce:
    """A frozen dataclass whose hash is computed once, and equality to another instance too; it is a key of many caches,
    and 1,000 hosts or measured ops take a while to hash and compare."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if other.__class__ is not self.__class__ or hash(self) != hash(other):
            return False
        if self.__dict__.get("_equal") is not other:
            if any(getattr(self, f.name) != getattr(other, f.name) for f in fields(self)):  # type: ignore[arg-type]
                return False
            self.__dict__["_equal"] = other
        return True

    def __getstate__(self) -> dict[str, Any]:
        # without the hash: hashes of strings differ from process to process
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Device(HashedOnce):
    """One accelerator or CPU rank. ``flops_per_s``: (dtype name, peak) pairs; ``efficiency``: (op kind, achievable
    share of the peak) pairs; ``view_s``: cost of an op that moves no data; ``kind``: "cuda" or "cpu".

    Measured, if at all: ``curves`` and ``surfaces`` of op times by kind, ``op_times`` by exact signature,
    ``optimizers`` and ``codings`` by name; ``overlap``: the share of a collective that hides behind compute beside it,
    (t_compute + t_collective − t_both) / min(t_compute, t_collective); ``action_s``: host time of one pipeline action
    beyond its ops; ``post_s`` and ``post_s_per_byte``: for how long starting a message between stages keeps its
    ends."""

    name: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    launch_s: float
    source: str
    kind: str = "cuda"
    efficiency: tuple[tuple[str, float], ...] = ()
    curves: tuple[Curve, ...] = ()
    view_s: float = 0.0
    op_times: tuple[OpTime, ...] = ()
    optimizers: tuple[OptimizerRate, ...] = ()
    overlap: float = 0.0
    action_s: float = 0.0
    post_s: float = 0.0
    post_s_per_byte: float = 0.0
    surfaces: tuple[Surface, ...] = ()
    codings: tuple[CodingRate, ...] = ()

    def __post_init__(self) -> None:
        positive(f"device {self.name}", self, "memory_bytes", "memory_bytes_per_s")
        not_negative(
            f"device {self.name}", self, "launch_s", "view_s", "overlap", "action_s", "post_s", "post_s_per_byte"
        )
        if self.overlap > 1:
            raise ValueError(f"device {self.name} needs overlap <= 1, but got {self.overlap}; correct it")
        rates = dict(self.flops_per_s)
        if "float32" not in rates or min(rates.values()) <= 0:
            raise ValueError(
                f"device {self.name} needs positive flops_per_s, float32 among them, but got {self.flops_per_s}; add it"
            )

    @cached_property
    def _op_times(self) -> dict[str, OpTime]:
        return {time.signature: time for time in self.op_times}

    def op_time(self, signature: str) -> OpTime | None:
        """The measured time of the op with this exact signature (``compiler.cost.signature``), if there is one."""
        return self._op_times.get(signature)

    def optimizer_rate(self, name: str, updated_itemsize: int = 4) -> OptimizerRate | None:
        """The measured rate of the optimizer with this name ("AdamW", "SGD", "SGD+momentum", …), if there is one: that
        of updated tensors (weights or their masters) of 16 bits if they are such and it was measured, else of fp32."""
        found = {rate.dtype: rate for rate in self.optimizers if rate.name == name.removesuffix(MASTERS)}
        half = found.get("bfloat16") or found.get("float16")
        return (half if updated_itemsize == 2 else None) or found.get("float32") or half

    def coding_rate(self, name: str) -> CodingRate | None:
        """The measured rate of the code with this name (``codecs.CODECS``), if there is one."""
        return next((rate for rate in self.codings if rate.name == name), None)

    def post_seconds(self, nbytes: float) -> float:
        """For how long starting a message of ``nbytes`` to another stage keeps its ends."""
        return self.post_s + self.post_s_per_byte * nbytes

    def peak(self, dtype: object) -> float:
        """Peak FLOP/s of a torch dtype or its name; a dtype without an entry runs at float32's rate, float64 at half of
        it."""
        name = str(dtype).removeprefix("torch.")
        for known, rate in self.flops_per_s:
            if known == name:
                return rate
        rate = next(rate for known, rate in self.flops_per_s if known == "float32")
        return rate / 2 if name in ("float64", "complex64", "complex128") else rate


@dataclass(frozen=True, slots=True)
class Link:
    """One link level. ``bytes_per_s``: what one end sends at once over all its paths; ``pair_bytes_per_s``: the most
    that two single devices get of it (0: the same); ``alpha_s``: one message; ``message_s``: each further message that
    an end handles in the same round; ``call_s``: once per collective."""

    name: str
    alpha_s: float
    bytes_per_s: float
    source: str
    pair_bytes_per_s: float = 0.0
    message_s: float = 0.0
    call_s: float = 0.0

    def __post_init__(self) -> None:
        positive(f"link {self.name}", self, "bytes_per_s")
        not_negative(f"link {self.name}", self, "alpha_s", "pair_bytes_per_s", "message_s", "call_s")

    @property
    def pair(self) -> float:
        """Bytes per second between two single devices."""
        return self.pair_bytes_per_s or self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Host:
    """``num_devices`` equal devices joined by ``link``."""

    device: Device
    num_devices: int
    link: Link
    link_kind: str = "switch"

    def __post_init__(self) -> None:
        positive("host", self, "num_devices")
        if self.link_kind not in LINK_KINDS:
            raise ValueError(
                f"a link kind is one of {', '.join(LINK_KINDS)}, but got {self.link_kind!r}; correct the host"
            )


def device_of(sheet: DeviceSheet) -> Device:
    """The Device of a data sheet; its source quotes every constant."""
    constants: list[tuple[str, Constant]] = [
        ("memory", sheet.memory),
        ("memory rate", sheet.bandwidth),
        ("launch", sheet.launch),
    ]
    constants += [(f"{dtype} peak", c) for dtype, c in sheet.flops]
    constants += [(f"{kind} share", c) for kind, c in sheet.efficiency]
    constants.append(("overlap", OVERLAP[sheet.kind]))
    return Device(
        name=sheet.name,
        memory_bytes=int(sheet.memory.value),
        flops_per_s=tuple((dtype, c.value) for dtype, c in sheet.flops),
        memory_bytes_per_s=sheet.bandwidth.value,
        launch_s=sheet.launch.value,
        source="; ".join(f"{name}: {constant}" for name, constant in constants),
        kind=sheet.kind,
        efficiency=tuple((kind, c.value) for kind, c in sheet.efficiency),
        # compiled away on an accelerator; on a CPU measured here: 0.7 µs against 1 to 3 for an op
        view_s=0.0 if sheet.kind == "cuda" else sheet.launch.value / 5,
        overlap=OVERLAP[sheet.kind].value,
    )


def link_of(sheet: LinkSheet, slowdown: float = 1.0) -> Link:
    """The Link of a data sheet, every rate divided by ``slowdown``; its source quotes every constant."""
    parts = {"alpha": sheet.alpha, "rate": sheet.rate, "pair": sheet.pair, "message": sheet.message, "call": sheet.call}
    return Link(
        sheet.name,
        sheet.alpha.value * slowdown,
        sheet.rate.value / slowdown,
        "; ".join(f"{name}: {constant}" for name, constant in parts.items()),
        sheet.pair.value / slowdown,
        sheet.message.value * slowdown,
        sheet.call.value * slowdown,
    )


def link_behind(own: Link, network: LinkSheet) -> Link:
    """The link of hosts whose own adapter is ``own`` over a network: the longer latencies, the lower rates of the
    two."""
    far = link_of(network)
    return Link(
        f"{own.name} over {far.name}",
        max(own.alpha_s, far.alpha_s),
        min(own.bytes_per_s, far.bytes_per_s),
        f"{far.source}; where the adapter is slower: {own.source}",
        min(own.pair, far.pair),
        min(own.message_s, far.message_s) if far.alpha_s > own.alpha_s else own.message_s,
        max(own.call_s, far.call_s),
    )


def positive(where: str, value: object, *names: str) -> None:
    """Raise ValueError unless the named fields of ``value`` are positive finite numbers."""
    for name in names:
        number = getattr(value, name)
        if not (isinstance(number, int | float) and isfinite(number) and number > 0):
            raise ValueError(f"{where} needs a positive {name}, but got {number!r}; correct it")


def not_negative(where: str, value: object, *names: str) -> None:
    """Raise ValueError unless the named fields of ``value`` are finite numbers of 0 or more."""
    for name in names:
        number = getattr(value, name)
        if not (isinstance(number, int | float) and isfinite(number) and number >= 0):
            raise ValueError(f"{where} needs {name} >= 0, but got {number!r}; correct it")
