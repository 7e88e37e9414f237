"""A meter of the peak memory of a block of code: storages of tensors, and the resident set of the process.

On CPUs the profiler of torch reports every allocation and release of its allocator. It does not know what was allocated
before it started, so those storages are counted once at the start, and each reports its own release into the same
trace. On CUDA devices the caching allocator keeps the count itself. The same meter serves any program, ours or not:

    with live_bytes() as reading:
        step()
    reading.peak_bytes

What another thread releases the profiler does not see, and would count as alive from then on. Gloo's threads hold what
a collective was given a little longer than its wait; so, while bytes are counted, every wait lasts until they let go.

What only C++ holds when the block begins (buckets of DistributedDataParallel, say) no walk can find: begin before it is
made, and read the step's own peak from ``reading.window("step")`` inside the block.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["Reading", "Window", "live_bytes", "peak_rss_bytes", "reset_peak_rss", "storages_alive"]

_PATIENCE_S = 0.002
_FREED = "meshwright.meter: freed "
_WINDOW = "meshwright.meter: window "


@dataclass(frozen=True)
class Window:
    """Bytes alive in storages of tensors when a stretch of the block begins, at its worst, and when it ends."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int


@dataclass
class Reading:
    """The result of ``live_bytes``, filled in when its block ends.

    start_bytes, peak_bytes, end_bytes: storages of tensors on the device; None if they could not be counted, and
    ``why`` says why. peak_rss_bytes: of the whole process; since the block began where ``rss_was_reset``, else since
    the process began.
    """

    start_bytes: int | None = None
    peak_bytes: int | None = None
    end_bytes: int | None = None
    peak_rss_bytes: int = 0
    rss_was_reset: bool = False
    why: str = ""
    windows: dict[str, Window] = field(default_factory=dict)

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Count a stretch of the block apart: ``windows[name]`` once the block has ended (CPU only)."""
        with record_function(_WINDOW + name):
            yield


@contextmanager
def live_bytes(device: torch.device | str = "cpu") -> Iterator[Reading]:
    """Count the bytes of live tensor storages on ``device`` while the block runs; see ``Reading``.

    Storages that other processes or libraries own are not counted, nor is memory that an allocator keeps in reserve.
    While a profiler already runs, CPU bytes cannot be counted: the reading then has None and says so.
    """
    reading = Reading()
    reading.rss_was_reset = reset_peak_rss()
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        try:
            yield reading
        finally:
            torch.cuda.synchronize(device)
            reading.start_bytes, reading.peak_bytes = start, torch.cuda.max_memory_allocated(device)
            reading.end_bytes, reading.peak_rss_bytes = torch.cuda.memory_allocated(device), peak_rss_bytes()
        return
    if torch._C._autograd._profiler_enabled():  # the only way to ask; starting a second profiler would break the first
        reading.why = "a profiler is running, and there can be only one; leave it out to count bytes"
        try:
            yield reading
        finally:
            reading.peak_rss_bytes = peak_rss_bytes()
        return
    gc.collect()  # garbage is not the block's, nor is its end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _waits_until_released():
        alive = storages_alive()
        start = sum(alive.values())
        watched = [weakref.ref(storage, _release_reporter(size)) for storage, size in alive.items()]
        del alive
        try:
            yield reading
        finally:
            reading.peak_rss_bytes = peak_rss_bytes()
            watched.clear()
    whole, reading.windows = _replay(_trace(profiler), start)
    reading.start_bytes, reading.peak_bytes, reading.end_bytes = whole.start_bytes, whole.peak_bytes, whole.end_bytes


@contextmanager
def _waits_until_released() -> Iterator[None]:
    """Whoever waits for a collective keeps what it was given until the thread that carried it has let go of it."""
    if not dist.is_available():
        yield
        return
    work: Any = dist.Work
    original = work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        time.sleep(_PATIENCE_S)
        return out

    work.wait = wait
    try:
        yield
    finally:
        work.wait = original


def _release_reporter(size: int) -> Any:
    def report(_: Any) -> None:
        with record_function(f"{_FREED}{size}"):
            pass

    return report


def storages_alive(device_type: str = "cpu") -> dict[torch.UntypedStorage, int]:
    """Every storage of tensors on the device that Python can reach, gradients included → its bytes."""
    storages: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        for x in (thing, thing.grad if thing.is_leaf else None):
            plain = x is not None and x.layout == torch.strided and x.device.type == device_type
            if x is None or not plain or type(x) not in (torch.Tensor, torch.nn.Parameter):
                continue  # a wrapper's parts are found by themselves
            storage = x.untyped_storage()
            if storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
    return {storage: storage.nbytes() for storage in storages.values()}


def _trace(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="meshwright-meter-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: float(event["ts"]))


def _replay(events: list[dict[str, Any]], start: int) -> tuple[Window, dict[str, Window]]:
    """The count after every event, as the whole block and each window saw it."""
    now = peak = start
    block_bytes: dict[int, int] = {}  # address → bytes of a block of this session
    open_: dict[str, tuple[float, int, int]] = {}  # window → (its end, bytes at its start, peak so far)
    done: dict[str, Window] = {}
    for event in events:
        at, name = float(event["ts"]), str(event.get("name", ""))
        for window in [w for w, (end, _, _) in open_.items() if end < at]:
            _, began, most = open_.pop(window)
            done[window] = Window(began, most, now)
        if name == "[memory]" and event["args"].get("Device Type") == 0:
            size, address = int(event["args"]["Bytes"]), event["args"]["Addr"]
            if size > 0:
                block_bytes[address] = size
            # the profiler may take a block from before it started for one of an earlier session
            now += size if size > 0 else -block_bytes.pop(address, 0)
        elif name.startswith(_FREED) and event.get("ph") == "X":
            now -= int(name.removeprefix(_FREED))
        elif name.startswith(_WINDOW) and event.get("ph") == "X":
            open_[name.removeprefix(_WINDOW)] = (at + float(event["dur"]), now, now)
        peak = max(peak, now)
        open_ = {window: (end, began, max(most, now)) for window, (end, began, most) in open_.items()}
    done |= {window: Window(began, most, now) for window, (_, began, most) in open_.items()}
    return Window(start, peak, now), done


# ---- resident set


def reset_peak_rss() -> bool:
    """Make ``peak_rss_bytes`` count from now on; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int:
    """The largest resident set of this process since ``reset_peak_rss``, or since it began."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
