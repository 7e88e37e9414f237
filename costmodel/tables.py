"""Measured op times of this machine: curves with provenance, a robust α–β fit, and their versioned JSON.

A curve is op time against work (FLOPs or bytes) on a grid (``curves``). Sample statistics are minima: on a shared
machine noise only ever adds. ``local_table`` takes at most two seconds once per machine and is cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .curves import Curve, curve_from
from .files import parse_document, read_document, write_atomically
from .fitting import rising, two_rates

__all__ = [
    "Curve",
    "Fit",
    "MachineTable",
    "cache_directory",
    "fit_alpha_beta",
    "local_table",
    "machine",
    "machine_memory_bytes",
    "measure",
    "usable_cores",
]

FORMAT, SCHEMA = "meshwright-table", 1


@dataclass(frozen=True, slots=True)
class Fit:
    """``seconds ≈ alpha_s + beta_s_per_byte · bytes``; residual: median relative error over the ``sizes`` distinct
    sizes."""

    alpha_s: float
    beta_s_per_byte: float
    residual: float
    sizes: int
    samples: int


def fit_alpha_beta(samples: Sequence[tuple[float, float]]) -> Fit:
    """Fit (bytes, seconds) samples by robust relative least squares on the minimum of each size; neither constant is
    ever negative.

    Iteratively reweighted with Huber weights on the relative residual, so one disturbed size does not bend the line.
    Raises ValueError on fewer than two sizes or a sample that is not a positive finite time.
    """
    best: dict[float, float] = {}
    for size, seconds in samples:
        if not (isfinite(seconds) and seconds > 0 and isfinite(size) and size >= 0):
            raise ValueError(
                f"a sample is (bytes >= 0, seconds > 0), but got ({size}, {seconds}); measure that size again"
            )
        best[size] = min(seconds, best.get(size, seconds))
    if len(best) < 2:
        raise ValueError(f"a fit needs two message sizes, but got {len(best)}; measure more sizes")
    points = sorted(best.items())
    alpha, beta = two_rates([(1.0, size, seconds) for size, seconds in points])
    errors = sorted(abs(alpha + beta * x - t) / t for x, t in points)
    return Fit(alpha, beta, errors[len(errors) // 2], len(points), len(samples))


@dataclass(frozen=True, slots=True)
class MachineTable:
    """One machine's measurements. ``launch``: the fit of additions within the cache, whose α is the cost of one call;
    ``view_s``: one view-like op; ``memory_bytes_per_s``: an in-place addition beyond the cache; ``provenance``: what
    was measured where and when, as (name, text) pairs."""

    curves: tuple[Curve, ...]
    launch: Fit
    view_s: float
    memory_bytes_per_s: float
    provenance: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not (self.launch.alpha_s >= 0 and self.launch.beta_s_per_byte > 0):
            raise ValueError(f"a table needs launch α >= 0 and β > 0, but got {self.launch}; profile again")
        if not self.memory_bytes_per_s > 0:
            raise ValueError(f"a table needs a memory rate > 0, but got {self.memory_bytes_per_s}; profile again")
        if self.view_s < 0:
            raise ValueError(f"a table needs a view time >= 0, but got {self.view_s}; profile again")

    def peak_flops_per_s(self) -> float:
        """The best rate on the matmul curve, FLOP/s."""
        return max(work / seconds for curve in self.curves if curve.kind == "matmul" for work, seconds in curve.points)

    def to_json(self) -> str:
        """Human-readable, versioned JSON."""
        body: dict[str, Any] = {"memory_bytes_per_s": self.memory_bytes_per_s}
        body |= {"format": FORMAT, "schema": SCHEMA, "provenance": dict(self.provenance), "view_s": self.view_s}
        return json.dumps(body | {"launch": asdict(self.launch), "curves": [asdict(c) for c in self.curves]}, indent=1)

    @staticmethod
    def from_json(text: str) -> MachineTable:
        """The inverse of ``to_json``; ValueError on a corrupt, foreign, or outdated document and on impossible
        values."""
        data = parse_document(text, "table", FORMAT, (SCHEMA,), "profile again")
        try:
            curves = tuple(curve_from(entry) for entry in data["curves"])
            fit = data["launch"]
            alpha, beta, residual = (float(fit[key]) for key in ("alpha_s", "beta_s_per_byte", "residual"))
            launch = Fit(alpha, beta, residual, int(fit["sizes"]), int(fit["samples"]))
            provenance = tuple((str(k), str(v)) for k, v in data["provenance"].items())
            return MachineTable(curves, launch, float(data["view_s"]), float(data["memory_bytes_per_s"]), provenance)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"a table needs curves, launch, view_s and provenance, but {error!r}; profile again"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write to ``path``: complete or not at all."""
        write_atomically(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> MachineTable:
        """Read a table; ValueError names the file and what is wrong with it."""
        return read_document(path, MachineTable.from_json)


# ---- measuring


def measure(call: Callable[[], object], budget_s: float) -> tuple[float, int]:
    """(fastest seconds of one call, samples taken). Calls shorter than the clock is fine are timed in batches; at least
    two samples."""
    call()  # allocations, lazy initialisation
    budget_s = max(budget_s, 0.0)
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-7)
    batch = max(1, int(2e-5 / once))
    best, samples, deadline = once, 1, start + budget_s
    while samples < 2 or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(batch):
            call()
        best, samples = min(best, (time.perf_counter() - start) / batch), samples + 1
    return best, samples


_STREAM = 1 << 23  # elements; two such operands are twice a common last-level cache, and no page is new
_IN_CACHE = 2e7  # bytes; above, fresh pages for the output dominate, which the pointwise curve shows and a line cannot


def _grid() -> list[tuple[str, str, float, Callable[[], object]]]:
    """(kind, variable, work, call) for every point that a table holds, fp32."""
    out: list[tuple[str, str, float, Callable[[], object]]] = []
    r = torch.rand
    for n in (8, 16, 32, 64, 128, 256, 512):
        x, w = r(n, n), r(n, n)
        out.append(("matmul", "flops", 2.0 * n**3, partial(F.linear, x, w)))
    for s in (16, 32, 64, 128, 256, 512):
        q = r(1, 4, s, 32)
        out.append(("attention", "flops", 4.0 * 4 * s * s * 32, partial(F.scaled_dot_product_attention, q, q, q)))
    for c, hw in ((8, 8), (16, 16), (32, 16), (32, 32), (64, 32)):
        x, k = r(2, c, hw, hw), r(c, c, 3, 3)
        out.append(("convolution", "flops", 2.0 * 2 * c * c * 9 * hw * hw, partial(F.conv2d, x, k, padding=1)))
    weight = r(4096, 128)
    for rows in (4, 32, 256, 1024, 4096):
        x, row = r(rows, 256), torch.arange(rows)
        out.append(("normalization", "bytes", 8.0 * x.numel(), partial(F.layer_norm, x, (256,))))
        out.append(("embedding", "bytes", 8.0 * rows * 128, partial(F.embedding, row, weight)))
        target = row % 256
        out.append(("loss", "bytes", 4.0 * x.numel(), partial(F.cross_entropy, x, target)))
    for n in (256, 4096, 65536, 262144, 1048576, 4194304):
        x = r(n)
        y, long = r(n), r(n + n // 2)  # gelu moves 8 bytes an element and add 12: the same bytes from n + n/2 elements
        out.append(("add", "bytes", 12.0 * n, partial(torch.add, x, y)))
        out.append(("gelu", "bytes", 12.0 * n, partial(F.gelu, long)))
    return out


def measure_machine(budget_s: float = 1.4) -> MachineTable:
    """Time the grid on one thread of this machine within about ``budget_s`` seconds. "pointwise" is the mean of add and
    gelu at equal bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        with torch.no_grad():
            grid = _grid()
            found: dict[tuple[str, str], list[tuple[float, float]]] = {}
            samples = 0
            for number, (kind, variable, work, call) in enumerate(grid):
                # what is left of the budget, evenly: on a busy machine the last points get fewer samples
                share = (started + budget_s - time.perf_counter()) / (len(grid) + 2 - number)
                seconds, count = measure(call, share)
                found.setdefault((kind, variable), []).append((work, seconds))
                samples += count
            view_s, count = measure(partial(torch.zeros(64, 64).view, 4096), share)
            x, y = torch.zeros(_STREAM), torch.zeros(_STREAM)
            stream_s, streams = measure(partial(x.add_, y), share)
            samples += count + streams
    finally:
        torch.set_num_threads(threads)
    add, gelu = found.pop(("add", "bytes")), found.pop(("gelu", "bytes"))
    found["pointwise", "bytes"] = [(work, (a + g) / 2) for (work, a), (_, g) in zip(add, gelu)]
    curves = tuple(
        Curve(kind, "float32", variable, tuple(rising(points))) for (kind, variable), points in sorted(found.items())
    )
    provenance = (*machine().items(), ("date", datetime.now(UTC).isoformat(timespec="seconds")))
    spent = (("threads", "1"), ("samples", str(samples)), ("seconds", f"{time.perf_counter() - started:.2f}"))
    launch = fit_alpha_beta([point for point in add if point[0] < _IN_CACHE])
    return MachineTable(curves, launch, view_s, 12.0 * _STREAM / stream_s, provenance + spent)


# ---- this machine


@cache
def machine() -> dict[str, str]:
    """The facts that a measurement depends on: processor, cores, torch; GPU, CUDA and driver where there is a GPU."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    found = {"processor": processor, "cores": str(os.cpu_count()), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
        with contextlib.suppress(OSError):
            version = re.search(r"Module.*?(\d+[.\d]+)", Path("/proc/driver/nvidia/version").read_text())
            found["driver"] = version[1] if version else "unknown"
    return found


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory_bytes() -> int:
    """Of this machine, or the container's share of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # "max" where there is no limit
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    return memory


def cache_directory() -> Path:
    """``$MESHWRIGHT_CACHE_DIR``, else ``meshwright`` under the user's cache directory."""
    if chosen := os.environ.get("MESHWRIGHT_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"


def local_table() -> MachineTable:
    """This machine's table: from this process, else from the cache on disk, else measured now (≤ 2 s) and cached."""
    key = hashlib.sha256(json.dumps([SCHEMA, machine()]).encode()).hexdigest()[:16]
    return _table_at(cache_directory() / f"local-{key}.json")


@cache
def _table_at(path: Path) -> MachineTable:
    try:
        return MachineTable.load(path)
    except ValueError:
        pass  # none yet, or one that cannot be read: either way it is measured and replaced
    table = measure_machine()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
    except OSError:
        pass  # a read-only home costs a measurement per process, not the run
    return table
