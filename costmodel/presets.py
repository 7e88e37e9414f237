"""Data-sheet constants of known hardware, each with its unit and where it comes from. Nothing here was fitted by us
except where a source says so.

Rates are per direction. A link's ``rate`` is what one end can send at once when it may use all its paths (an end is a
device inside a host, a host between hosts); ``pair`` is the most that two single devices can use of it.

Networks that can join hosts, from one rack to across the world: ``"p3.16xlarge:4@world"``.

A network lies behind the hosts' own adapters: its latency counts where it is longer, its rates where they are lower
(``hardware.link_behind``). ``rate`` is what one host gets of it, ``pair`` what one pair of devices does.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOOPBACK", "NETWORKS", "OVERLAP", "PRESETS", "Constant", "DeviceSheet", "LinkSheet", "PresetSheet"]


GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Constant:
    """One number, its unit, and its source."""

    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:.6g} {self.unit} ({self.source})"


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """Constants of one device type. ``flops`` by dtype name, ``efficiency``: achievable share of the peak by op kind
    ("memory": of the memory bandwidth); kinds that are missing take the defaults of ``compute.EFFICIENCY``."""

    name: str
    kind: str
    memory: Constant
    flops: tuple[tuple[str, Constant], ...]
    bandwidth: Constant
    launch: Constant
    efficiency: tuple[tuple[str, Constant], ...] = ()


@dataclass(frozen=True, slots=True)
class LinkSheet:
    """Constants of one link level."""

    name: str
    alpha: Constant
    rate: Constant
    pair: Constant
    message: Constant
    call: Constant


@dataclass(frozen=True, slots=True)
class PresetSheet:
    """One kind of host, and the network that joins several of them. Kinds: "switch" (every end has its own path),
    "ring" (direct links between pairs), "shared" (all ends share one medium)."""

    device: DeviceSheet
    num_devices: int
    link: LinkSheet
    link_kind: str
    network: LinkSheet
    network_kind: str
    backend: str


def _tflops(value: float, source: str) -> Constant:
    return Constant(value * 1e12, "FLOP/s", source)


def _rate(gigabytes: float, source: str) -> Constant:
    return Constant(gigabytes * 1e9, "B/s", source)


def _share(value: float, source: str) -> Constant:
    return Constant(value, "share of peak", source)


def _us(value: float, source: str) -> Constant:
    return Constant(value * 1e-6, "s", source)


_TUNING = "NCCL src/graph/tuning.cc, latency model, ring LL128"
_CALL = _us(8.4, "NCCL src/graph/tuning.cc, base latency of ring Simple")
_ASSUMED_MESSAGE = "assumed: a quarter of alpha for each further message of a round"
_LAUNCH = _us(5.0, "assumed: kernel launch as commonly published, 4-6 us")
_SCORES = "scores written to memory: 5*a*s^2*b bytes per pass (Korthikanti et al. 2022, table 2) beside 4*b*s^2*h FLOP"

#: share of a collective that hides behind compute beside it, by kind of device
OVERLAP = {
    "cuda": Constant(
        0.8,
        "share of the shorter of the two",
        "the collective hides, but compute beside it is 18.9 % slower on average (Lee et al. 2025, arXiv 2507.03114)",
    ),
    "cpu": Constant(0.0, "share of the shorter of the two", "Gloo's threads run on the cores that compute"),
}

V100 = DeviceSheet(
    "V100-SXM2-16GB",
    "cuda",
    Constant(15.78 * GIB, "B", "total memory that the CUDA driver reports"),
    (
        ("float16", _tflops(125.0, "NVIDIA V100 data sheet, tensor cores, SXM2")),
        ("float32", _tflops(15.7, "NVIDIA V100 data sheet, SXM2")),
        ("float64", _tflops(7.8, "NVIDIA V100 data sheet, SXM2")),
    ),
    _rate(900.0, "NVIDIA V100 data sheet"),
    _LAUNCH,
    (
        (
            "matmul",
            _share(
                0.65,
                "derived from Alpa's published 1-GPU row, GPT-350m at 45.1 TFLOPS with recompute counted: 6.41e12 FLOP"
                " per microbatch of 2 take 142 ms; 24 layers x 4 passes x 480 MB (34*s*b*h + 5*a*s^2*b bytes written"
                " and read once, Korthikanti et al. 2022) at 0.8 of 900 GB/s are 63 ms of them; 6.41e12 FLOP in the"
                " other 79 ms are 0.65 of 125 TFLOPS",
            ),
        ),
        ("attention", _share(0.12, _SCORES + ", at the two rates above, head size 64, where shapes are not known")),
        ("scores", _share(0.8, "attention has no fused kernel here: its scores go at the memory's achievable rate")),
    ),
)


def _a100(gib: float, rate: float) -> DeviceSheet:
    label = "40GB" if gib < 60 else "80GB"
    return DeviceSheet(
        f"A100-SXM4-{label}",
        "cuda",
        Constant(gib * GIB, "B", "total memory that the CUDA driver reports"),
        (
            ("float16", _tflops(312.0, "NVIDIA A100 data sheet, dense tensor cores")),
            ("bfloat16", _tflops(312.0, "NVIDIA A100 data sheet, dense tensor cores")),
            ("tfloat32", _tflops(156.0, "NVIDIA A100 data sheet, dense tensor cores")),
            ("float32", _tflops(19.5, "NVIDIA A100 data sheet; PyTorch leaves TF32 off for matmul")),
            ("float64", _tflops(19.5, "NVIDIA A100 data sheet, tensor cores")),
        ),
        _rate(rate, "NVIDIA A100 data sheet, SXM"),
        _LAUNCH,
        (
            ("matmul", _share(0.75, "assumed: large GEMMs as commonly published, 230-260 of 312 TFLOPS")),
            (
                "attention",
                _share(0.5, "FlashAttention-2 paper, 2023: forward and backward at 35-72 % of the A100's peak"),
            ),
        ),
    )


def _hopper(name: str, gib: float, rate: float, source: str) -> DeviceSheet:
    return DeviceSheet(
        name,
        "cuda",
        Constant(gib * GIB, "B", "total memory that the CUDA driver reports"),
        (
            ("float8_e4m3fn", _tflops(1979.0, source + ", dense tensor cores")),
            ("float16", _tflops(989.5, source + ", dense tensor cores")),
            ("bfloat16", _tflops(989.5, source + ", dense tensor cores")),
            ("tfloat32", _tflops(494.7, source + ", dense tensor cores")),
            ("float32", _tflops(66.9, source + "; PyTorch leaves TF32 off for matmul")),
            ("float64", _tflops(66.9, source + ", tensor cores")),
        ),
        _rate(rate, source),
        _LAUNCH,
        (
            (
                "matmul",
                _share(0.65, "assumed: large GEMMs as commonly published, 600-700 of 989 TFLOPS (power-limited)"),
            ),
            (
                "attention",
                _share(0.35, "FlashAttention-3 paper, 2024: FlashAttention-2 reaches 35 % of the H100's peak"),
            ),
        ),
    )


RTX4090 = DeviceSheet(
    "RTX4090",
    "cuda",
    Constant(23.65 * GIB, "B", "total memory that the CUDA driver reports"),
    (
        ("float16", _tflops(165.2, "NVIDIA Ada architecture whitepaper, fp16 with fp32 accumulation, dense")),
        ("bfloat16", _tflops(165.2, "NVIDIA Ada architecture whitepaper, dense")),
        ("tfloat32", _tflops(82.6, "NVIDIA Ada architecture whitepaper, dense")),
        ("float32", _tflops(82.6, "NVIDIA Ada architecture whitepaper")),
        ("float64", _tflops(1.29, "NVIDIA Ada architecture whitepaper, 1/64 of fp32")),
    ),
    _rate(1008.0, "NVIDIA Ada architecture whitepaper"),
    _LAUNCH,
)

CPU_CORE = DeviceSheet(
    "cpu-core",
    "cpu",
    Constant(4 * GIB, "B", "assumed: 4 GiB of RAM per core"),
    (
        ("float32", _tflops(0.096, "3 GHz x 32 FLOP per cycle: two 256-bit fused multiply-adds, AVX2")),
        ("float64", _tflops(0.048, "half of fp32")),
    ),
    _rate(10.0, "assumed: one core's share of two DDR4-3200 channels"),
    _us(5.0, "assumed: one eager PyTorch op on a CPU"),
)

LAPTOP = DeviceSheet(
    "laptop-cpu",
    "cpu",
    Constant(12 * GIB, "B", "assumed: 16 GiB of RAM less 4 for the system"),
    (
        ("float32", _tflops(0.384, "assumed: 4 cores x 3 GHz x 32 FLOP per cycle, AVX2")),
        ("float64", _tflops(0.192, "half of fp32")),
    ),
    _rate(30.0, "assumed: two DDR4-3200 channels, 51.2 GB/s peak, 60 % achieved"),
    _us(5.0, "assumed: one eager PyTorch op on a CPU"),
)


def _link(name: str, alpha: Constant, rate: Constant, pair: Constant, call: Constant = _CALL) -> LinkSheet:
    return LinkSheet(name, alpha, rate, pair, Constant(alpha.value / 4, "s", _ASSUMED_MESSAGE), call)


NVLINK2 = _link(
    "NVLink2",
    _us(1.9, _TUNING),
    _rate(
        125.0, "6 links of 25 GB/s (NVIDIA V100 data sheet), 5/6 of it achieved by rings: the share of NVLink3 below"
    ),
    _rate(21.0, "one link of the DGX-1V cube mesh, 25 GB/s, the same share; some pairs have two"),
)
NVLINK3 = _link(
    "NVLink3",
    _us(1.9, _TUNING),
    _rate(235.0, "NCCL src/graph/tuning.cc: ring bus bandwidth limit on compute capability 8.0, of 300 GB/s"),
    _rate(235.0, "through the NVSwitch a pair has all links of a device"),
)
NVLINK4 = _link(
    "NVLink4",
    _us(1.9, _TUNING),
    _rate(360.0, "450 GB/s (NVIDIA H100 data sheet: 900 both ways), 0.8 of it: the share that NCCL grants NVLink3"),
    _rate(360.0, "through the NVSwitch a pair has all links of a device"),
)
PCIE4_HOST = _link(
    "PCIe4 through the host",
    _us(2.5, _TUNING + ", PCI"),
    _rate(
        160.0, "assumed: 8 devices at 20 of a x16 slot's 31.5 GB/s through host memory (no peer-to-peer on this device)"
    ),
    _rate(20.0, "assumed: 20 of a x16 slot's 31.5 GB/s"),
)
ETHERNET25 = _link(
    "25 Gbit/s network",
    _us(30.0, "assumed: TCP within an AWS placement group"),
    _rate(3.125, "AWS p3.16xlarge: 25 Gbit/s per instance"),
    _rate(3.125, "one interface per instance; AWS limits a single TCP flow to less, NCCL opens several"),
)
HDR8 = _link(
    "8 x 200 Gbit/s InfiniBand",
    _us(4.0, _TUNING + ", network"),
    _rate(192.0, "DGX A100 data sheet: 8 x 200 Gbit/s, 0.96 of it after framing"),
    _rate(24.0, "one adapter per device"),
)
NDR8 = _link(
    "8 x 400 Gbit/s InfiniBand",
    _us(4.0, _TUNING + ", network"),
    _rate(384.0, "DGX H100 data sheet: 8 x 400 Gbit/s, 0.96 of it after framing"),
    _rate(48.0, "one adapter per device"),
)
ETHERNET10 = _link(
    "10 Gbit/s Ethernet",
    _us(30.0, "assumed: TCP through one switch"),
    _rate(1.18, "10 Gbit/s less Ethernet, IP and TCP framing"),
    _rate(1.18, "one interface per host"),
)
WIFI = _link(
    "Wi-Fi",
    _us(2000.0, "assumed: 2 ms one way through an access point"),
    _rate(0.0375, "assumed: 300 Mbit/s of goodput on the air, which both directions and every hop share"),
    _rate(0.0375, "one medium"),
    _us(0.0, "part of alpha"),
)
LOOPBACK = LinkSheet(
    "Gloo on loopback",
    _us(65.0, "shared/PYTORCH.md: 2 ranks, 1 KB all_reduce 0.14 ms in two rounds, low mode of the latency 65 us"),
    _rate(
        1.55, "shared/PYTORCH.md: 2 ranks, 4 MB all_reduce 2.7 ms (64 MB: 0.55; 4 ranks on 2 cores: half of it each)"
    ),
    _rate(2.1, "shared/PYTORCH.md: round trip of 64 MB between 2 ranks in 63 ms (4 MB: 4.9)"),
    _us(40.0, "shared/PYTORCH.md: 1 KB all_to_all 0.08 ms on 2 ranks, 0.30 on 4 that share 2 cores"),
    _us(0.0, "part of alpha"),
)

_H100 = _hopper("H100-SXM5-80GB", 79.1, 3350.0, "NVIDIA H100 data sheet, SXM")
_H200 = _hopper("H200-SXM5-141GB", 139.8, 4800.0, "NVIDIA H200 data sheet, SXM")

PRESETS: dict[str, PresetSheet] = {
    "p3.16xlarge": PresetSheet(V100, 8, NVLINK2, "ring", ETHERNET25, "switch", "nccl"),
    "dgx-a100-40": PresetSheet(_a100(39.39, 1555.0), 8, NVLINK3, "switch", HDR8, "switch", "nccl"),
    "dgx-a100-80": PresetSheet(_a100(79.15, 2039.0), 8, NVLINK3, "switch", HDR8, "switch", "nccl"),
    "dgx-h100": PresetSheet(_H100, 8, NVLINK4, "switch", NDR8, "switch", "nccl"),
    "dgx-h200": PresetSheet(_H200, 8, NVLINK4, "switch", NDR8, "switch", "nccl"),
    "8x4090": PresetSheet(RTX4090, 8, PCIE4_HOST, "shared", ETHERNET10, "switch", "nccl"),
    "two-laptops-wifi": PresetSheet(LAPTOP, 1, LOOPBACK, "switch", WIFI, "shared", "gloo"),
    "cpu": PresetSheet(CPU_CORE, 8, LOOPBACK, "switch", ETHERNET10, "switch", "gloo"),
}
DEFAULT_HOSTS = {"two-laptops-wifi": 2}


_EC2 = "Amazon EC2 user guide, instance network bandwidth"
_NUMBERS = "Jeff Dean, numbers everyone should know"
_FLOW = Constant(0.625e9, "B/s", _EC2 + ": 5 Gbit/s for one flow outside a placement group")
_MESSAGE = Constant(10e-6, "s", "assumed: what an end spends on a further message; the way there is alpha's")
_NETWORK_CALL = Constant(0.0, "s", "part of alpha")


def _network(name: str, alpha: Constant, rate: Constant, pair: Constant) -> LinkSheet:
    return LinkSheet(name, alpha, rate, pair, _MESSAGE, _NETWORK_CALL)


NETWORKS: dict[str, LinkSheet] = {
    "rack": _network(
        "rack network",
        Constant(10e-6, "s", "assumed: kernel TCP through one switch"),
        Constant(12.5e9, "B/s", "assumed: 100 Gbit/s per host"),
        Constant(12.5e9, "B/s", "assumed: one flow may have all of it"),
    ),
    "zone": _network(
        "zone network",
        Constant(250e-6, "s", _NUMBERS + ": half of the 0.5 ms round trip within a data centre"),
        Constant(12.5e9, "B/s", _EC2 + ": the instance's full bandwidth; assumed: up to 100 Gbit/s"),
        _FLOW,
    ),
    "region": _network(
        "region network",
        Constant(1e-3, "s", "assumed: zones at most 100 km apart, 0.5 ms of fibre at 200,000 km/s, twice that routed"),
        Constant(12.5e9, "B/s", _EC2 + ": the instance's full bandwidth; assumed: up to 100 Gbit/s"),
        _FLOW,
    ),
    "continent": _network(
        "continent network",
        Constant(37.5e-3, "s", "half of the 75 ms from New York to San Francisco and back (graphql.guide, latency)"),
        Constant(0.625e9, "B/s", _EC2 + ": 5 Gbit/s to other regions for instances of less than 32 processors"),
        Constant(0.125e9, "B/s", "assumed: 1 Gbit/s for one flow, bound by window and loss"),
    ),
    "world": _network(
        "world network",
        Constant(75e-3, "s", _NUMBERS + ": half of the 150 ms from California to the Netherlands and back"),
        Constant(0.125e9, "B/s", "assumed: 1 Gbit/s to the public internet per host"),
        Constant(0.0625e9, "B/s", "assumed: 500 Mbit/s for one flow, bound by window and loss"),
    ),
}
