"""Timing of single ops as a training step pays for them, and of what a device does that is no op.

An op is measured on many *instances* at once: so many that operands and outputs together are larger than any cache. All
forwards run, holding their outputs and autograd graphs, then all backwards in reverse order, each freeing what it held.
Operands are then out of cache and outputs on fresh pages, as in training; a hot loop over one instance flatters a
pointwise op severalfold. What entering the autograd engine costs (``ENTRY``) is taken off each backward: training
enters it once per stage and microbatch, not once per op.

On a CUDA device an op takes what its kernels take: the host is ahead of a step that is worth planning. What it takes to
queue one kernel (``fact/launch``) is the least of an op that has any. Kernels are timed amid work as dense as a step's:
a device at its limit of power lowers its clock, which one that was idle does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle
from math import ceil, prod
from statistics import median
from time import perf_counter, thread_time
from typing import Any, Protocol

import torch

from .profiler import Task, Visit

__all__ = [
    "ENTRY",
    "FACTS",
    "Make",
    "TimedOp",
    "fact_tasks",
    "normal_values",
    "probe_task",
    "stopwatch",
    "stream_bytes_per_s",
    "timed",
]

OUT_OF_CACHE_BYTES = 1 << 26
_MOST_INSTANCES, _SWEEPS = 64, 3
_LONG_S = 0.02  # a sweep takes no more instances than fill about this long
_LOAD = 8192  # rows and columns of a load's matrices
_LOAD_PASSES = 3.0  # the time of its passes over memory by that of its products: then clocks are as in real steps
_LOAD_S = (0.03, 0.1)  # the least and the most of a load; a clock follows the power of some 60 ms
_NO_KERNEL_S = 1e-6  # on a CUDA device less than that is no kernel
_TILE = 65_537  # random values that an operand repeats; a prime, so that no two rows of a matrix are equal
_STREAM = 1 << 23  # elements; two such operands are twice a common last-level cache, and no page is new

ENTRY = "fact/backward of a view"
FACTS = ("fact/launch", "fact/view", "fact/stream", ENTRY)


class TimedOp(Protocol):
    """One op with its own operands: ``forward`` keeps the output and its graph, ``backward`` uses them up."""

    def forward(self) -> object:
        """Run the op."""

    def backward(self) -> object:
        """Compute the gradients that are wanted, and let go of the output."""


Make = Callable[[torch.device], TimedOp]
Watch = Callable[[Callable[[], object]], float]


def normal_values(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """A tensor of normal values, repeated: equal ones would draw less power, and run faster, than a training step's."""
    numel = prod(shape)
    tile = torch.randn(min(max(1, numel), _TILE), generator=generator).to(device, dtype)
    return tile.repeat(-(-numel // tile.numel()))[:numel].reshape(tuple(shape))


class _Load:
    """Work like a training step's on a CUDA device: a large product of random matrices, then passes over memory."""

    def __init__(self, device: torch.device) -> None:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        self.device, self._ended = device, 0.0
        self._left, self._right, self._out = torch.randn(3, _LOAD, _LOAD, dtype=dtype, device=device).unbind(0)
        self._multiply()  # lazy initialisation
        product_s, pass_s = self._seconds(self._multiply), self._seconds(self._pass)
        self._passes = max(1, round(_LOAD_PASSES * product_s / pass_s))
        self._unit_s = product_s + self._passes * pass_s

    def queue(self) -> None:
        """Start enough of it to fill what the device was idle for twice over."""
        least, most = _LOAD_S
        wanted_s = min(max(2 * (perf_counter() - self._ended), least), most)
        for _ in range(ceil(wanted_s / self._unit_s)):
            self._multiply()
            for _ in range(self._passes):
                self._pass()

    def wait(self) -> None:
        """Until the device has nothing to do."""
        torch.cuda.synchronize(self.device)
        self._ended = perf_counter()

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._out)

    def _pass(self) -> None:
        self._out.mul_(1.0)

    def _seconds(self, call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            call()
        end.record()
        self.wait()
        return start.elapsed_time(end) / 3e3


def stopwatch(device: torch.device, host: bool = True) -> Watch:
    """Seconds of a call on ``device``.

    On a CUDA device by events, behind a load during which the host queues the call, so that the device does not wait
    for it. host: what the host takes to queue it counts where it is more. On a CPU by the time that the thread had a
    core, so that other processes do not count, or by the clock where the call has several threads."""
    if device.type != "cuda":
        now = thread_time if torch.get_num_threads() == 1 else perf_counter

        def clock(call: Callable[[], object]) -> float:
            start = now()
            call()
            return now() - start

        return clock

    load = _Load(device)

    def events(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        load.queue()
        start.record()
        began = perf_counter()
        call()
        queued = perf_counter() - began
        end.record()
        load.wait()
        worked = start.elapsed_time(end) / 1e3
        return max(worked, queued) if host else worked

    return events


def probe_task(key: str, probe: Any, device: torch.device, memory_bytes: float) -> Task:
    """The Task that measures the exact op of a ``compiler.ir.probe.Probe``: a visit is (forward seconds, backward
    seconds, backward seconds without the gradients of parameters; the latter 0 where it has none of both kinds)."""
    both = "^" in probe.signature and "*" in probe.signature
    makes = (probe.make, partial(probe.make, weights=False)) if both else (probe.make,)
    return Task(key, key, 0.0, partial(timed, makes, device, memory_bytes, probe.nbytes, 3), width=3)


def timed(
    makes: Sequence[Make], device: torch.device, memory_bytes: float, nbytes: int, width: int = 2
) -> Callable[[], Visit]:
    """A function that measures one op. It returns (forward seconds, backward seconds), each the median of a few sweeps,
    and the backward seconds of a second Make. memory_bytes: limit of all instances together; nbytes: bytes of one (0:
    they are looked up)."""
    watch, cuda = stopwatch(device, host=False), device.type == "cuda"
    sets = [_instances(make, device, memory_bytes, nbytes, watch) for make in makes]

    def visit() -> Visit:
        forward, backward, samples = _sweeps(*sets[0], watch)
        out = [forward, backward, 0.0]
        if len(sets) > 1:
            out[2] = _sweeps(*sets[1], watch)[1]
        return (_with_launch(out, device) if cuda else _without_entries(out, device))[:width], samples

    return visit


def _with_launch(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Seconds of kernels; none takes less than the host needs to queue one."""
    least = _launch_seconds(device)
    return [max(s, least) if s > _NO_KERNEL_S else s for s in seconds]


def _without_entries(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The forward, and the backwards without entering the autograd engine, but never less than a tenth of them."""
    forward, *backwards = seconds
    entry_s = _entry_seconds(device)
    return [forward, *(max(s - entry_s, 0.1 * s) for s in backwards)]


def _instances(
    make: Make, device: torch.device, memory_bytes: float, nbytes: int, watch: Watch
) -> tuple[list[TimedOp], int]:
    """(instances, sweeps): as many as go beyond the cache, fit the memory and do not take too long."""
    first = make(device)
    first.forward()
    first.backward()  # lazy initialisation
    once = watch(first.forward) + watch(first.backward)
    own = nbytes or max(2 * _bytes(first), 1)  # operands, and about as much for outputs and gradients
    count = min(_MOST_INSTANCES, -(-OUT_OF_CACHE_BYTES // own), int(memory_bytes / own), int(_LONG_S / max(once, 1e-9)))
    out = [first]
    for _ in range(max(count, 2) - 1):
        out.append(make(device))
        prepare = getattr(out[-1], "prepare", None)
        if prepare is not None:
            prepare()
    return out, 1 if once > _LONG_S else _SWEEPS


def _sweeps(instances: Sequence[TimedOp], sweeps: int, watch: Watch) -> tuple[float, float, int]:
    """(forward seconds, backward seconds, samples) of one instance."""

    def forwards() -> None:
        for instance in instances:
            instance.forward()

    def backwards() -> None:
        for instance in reversed(instances):
            instance.backward()

    times = [(watch(forwards), watch(backwards)) for _ in range(sweeps)]
    forward, backward = (median(column) / len(instances) for column in zip(*times))
    return forward, backward, sweeps * len(instances)


def _bytes(instance: object) -> int:
    """Bytes of the tensors that an instance holds, directly or in a list, tuple or dict."""
    storages: dict[int, int] = {}
    for x in _tensors(list(vars(instance).values()) if hasattr(instance, "__dict__") else [], 3):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, depth - 1)


# ---- the facts of a device


def fact_tasks(device: torch.device) -> list[Task]:
    """The tasks that measure no op of the grid: one launch, one view, the memory rate (an addition in place beyond the
    cache), and the entry into the autograd engine."""
    repeated = partial(_repeated, device)

    def view() -> Callable[[], Visit]:
        return repeated(partial(torch.zeros(64, 64, device=device).view, 4096), 200)

    def stream() -> Callable[[], Visit]:
        x, y = torch.zeros(_STREAM, device=device), torch.zeros(_STREAM, device=device)
        return repeated(partial(x.add_, y), 3)

    makes: tuple[Callable[[], Callable[[], Visit]], ...] = (
        partial(_launches, device), view, stream, partial(_entries, device)
    )  # fmt: skip
    return [Task(key, key, 0.0, make) for key, make in zip(FACTS, makes)]


def _repeated(device: torch.device, call: Callable[[], object], count: int) -> Callable[[], Visit]:
    watch = stopwatch(device)
    call()

    def loop() -> None:
        for _ in range(count):
            call()

    return lambda: ([median(watch(loop) for _ in range(3)) / count], 3 * count)


def _entries(device: torch.device) -> Callable[[], Visit]:
    leaf = torch.ones(64, device=device, requires_grad=True)
    cotangent = torch.ones(64, device=device)
    outs = [leaf.view(64) for _ in range(200)]
    rest = cycle(outs)  # one graph serves several backwards: a view saves nothing
    return _repeated(device, lambda: torch.autograd.grad(next(rest), leaf, cotangent, retain_graph=True), 200)


def _launches(device: torch.device) -> Callable[[], Visit]:
    x = torch.ones(64, device=device)
    with torch.no_grad():
        return _repeated(device, partial(torch.add, x, x), 200)


@cache
def _launch_seconds(device: torch.device) -> float:
    """Seconds of the host to queue one kernel."""
    return float(_launches(device)()[0][0])


@cache
def _entry_seconds(device: torch.device) -> float:
    """Seconds of the host to enter the autograd engine."""
    return float(_entries(device)()[0][0])


def stream_bytes_per_s(seconds: float) -> float:
    """The memory rate from the seconds of the stream fact."""
    return 12.0 * _STREAM / seconds
