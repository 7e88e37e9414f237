"""What every rank runs: sums of one bucket in interleaved rounds, and their bytes by the kernel's counters.

Every frame has 66 bytes before what TCP carries: 14 of Ethernet, 20 of IP, 32 of TCP with time stamps; a bundle of
segments that leaves as one counts as one frame. Each message of Gloo comes with three headers of its own of 48 bytes:
the sender is ready, the receiver is, and before the payload. Both are subtracted; what remains are payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, isqrt
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from meshwright.costmodel.algorithms import steps_of
from meshwright.costmodel.codecs import CHUNK, CODECS, sent_bytes
from meshwright.runtime.collectives.channel import Channel
from meshwright.runtime.collectives.dense import DenseSum
from meshwright.runtime.collectives.protocol import Sum
from meshwright.runtime.compression import BucketSpec, make_sum
from meshwright.runtime.compression.gathered import MIN_GATHER_BYTES
from meshwright.runtime.parameters.gradient_all_reduce import AlgorithmExchange
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

__all__ = [
    "DENSE",
    "HOOKS",
    "Bucket",
    "Call",
    "compare",
    "formula_bytes",
    "make_call",
    "once_each",
    "rounds_of",
    "spread",
]

DENSE = "gloo"
HOOKS = ("hook bf16", "hook powersgd4")
_SIDE = 1024  # of the matrices in a bucket, at the most
_FRAME_BYTES = 66
_MESSAGE_BYTES = 3 * 48
_SEGMENTS = 2  # at the least, of each rank's part of Gloo's rings
_COUNTED, _COUNTED_BYTES = (3, 50), 2**25  # sums between two looks at the counters
Call = Callable[[torch.Tensor], object]
Pace = Callable[[], object] | None


@dataclass(frozen=True)
class Bucket:
    """A flat gradient [n] of square matrices."""

    n: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the matrices in it."""
        side = min(_SIDE, isqrt(self.n))
        return ((side, side),) * (self.n // side**2)

    def gradient(self, rank: int) -> torch.Tensor:
        """Noise of unlike magnitudes, another one on each rank."""
        generator = torch.Generator().manual_seed(rank)
        block = torch.randn(min(self.n, 2**20), generator=generator)
        block *= torch.rand(block.numel(), generator=generator)
        return block.repeat(self.n // block.numel())


_groups: dict[str, Any] = {}


def make_call(name: str, bucket: Bucket) -> tuple[Call, Callable[[], object]]:
    """A sum by its name, and what ends it: ``DENSE``, one of ``HOOKS``, a code, "<code> by <algorithm>", or "by
    <algorithm>", the plain sum by an algorithm of our own. Collective: each name has a group of its own."""
    if name in HOOKS:
        return _hook(name.split()[1], bucket), lambda: None
    code, algorithm = _parts(name)
    if name not in _groups:
        group = dist.new_group()
        _groups[name] = Channel(group) if algorithm else group
    group = _groups[name]
    if name == DENSE:
        return partial(dist.all_reduce, group=group), lambda: None
    made: Sum
    if code == "none":
        made = DenseSum(group, bucket.n, torch.float32, algorithm)
    else:
        exchange = AlgorithmExchange(group, algorithm) if algorithm else group
        made = make_sum(code, BucketSpec(bucket.n, shapes=tuple(bucket.shapes)), exchange)
    return lambda x: made.start(x).wait(), made.close


def _parts(name: str) -> tuple[str, str]:
    """(code, algorithm) that a name says, "" for the backend's."""
    code, _, algorithm = f" {name}".partition(" by ")
    return {"": "none", DENSE: "none"}.get(code.strip(), code.strip().removeprefix("hook ")), algorithm


def _hook(code: str, bucket: Bucket) -> Call:
    """What DistributedDataParallel calls with a bucket; its result is a mean, in another tensor or in place."""
    shapes = bucket.shapes

    def given(x: torch.Tensor) -> Any:
        pieces = [piece.view(shape) for piece, shape in zip(x.split([r * c for r, c in shapes]), shapes)]
        return SimpleNamespace(buffer=lambda: x, index=lambda: 0, is_last=lambda: True, gradients=lambda: pieces)

    if code == "bf16":
        return lambda x: default_hooks.bf16_compress_hook(None, given(x)).wait()  # type: ignore[arg-type]
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = 2
    return lambda x: powerSGD_hook.powerSGD_hook(state, given(x)).wait()


# ---- time


def _seconds(call: Call, x: torch.Tensor, gradient: torch.Tensor, pace: Pace) -> float:
    """Of the slowest rank, all having begun at about the same time; after ``pace``, of the mean rank."""
    x.copy_(gradient)
    dist.barrier()
    if pace is not None:
        pace()
    begin = perf_counter()
    call(x)
    seconds = torch.tensor([perf_counter() - begin])
    dist.all_reduce(seconds, dist.ReduceOp.MAX if pace is None else dist.ReduceOp.SUM)
    return seconds.item() / (1 if pace is None else dist.get_world_size())


def once_each(call: Call, bucket: Bucket, pace: Pace = None) -> float:
    """Seconds of a call, after one that makes connections."""
    x, gradient = torch.empty(bucket.n), bucket.gradient(dist.get_rank())
    _seconds(call, x, gradient, pace)
    return _seconds(call, x, gradient, pace)


def rounds_of(
    calls: dict[str, Call], bucket: Bucket, rounds: int, budget_s: float, pace: Pace = None
) -> dict[str, list[float]]:
    """Seconds of every call, round by round, after two each that do not count. pace: what every rank computes before
    each of them."""
    x, gradient = torch.empty(bucket.n), bucket.gradient(dist.get_rank())
    once = sum(once_each(call, bucket, pace) for call in calls.values())
    count = max(3, min(rounds, int(budget_s / once)))
    rows = [{name: _seconds(call, x, gradient, pace) for name, call in calls.items()} for _ in range(count)]
    return {name: [row[name] for row in rows] for name in calls}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


# ---- bytes


def _counter(card: str, what: str) -> int:
    return int(Path(f"/sys/class/net/{card}/statistics/{what}").read_text())


def _counted(name: str, call: Call, bucket: Bucket, card: str) -> float:
    """Bytes beyond headers that all ranks send in one sum; on the loopback all ranks share a counter."""
    x, gradient, ranks = torch.empty(bucket.n), bucket.gradient(dist.get_rank()), dist.get_world_size()
    payload = formula_bytes(name, bucket, ranks)
    count = max(_COUNTED[0], min(_COUNTED[1], int(_COUNTED_BYTES / payload)))

    def look() -> int:
        dist.barrier()
        dist.barrier()  # whoever leaves the first one may still send to others who do not
        return _counter(card, "tx_bytes") - _FRAME_BYTES * _counter(card, "tx_packets")

    x.copy_(gradient)
    call(x)
    before = look()
    idle = look() - before  # what two barriers take
    start = look()
    for _ in range(count):
        x.copy_(gradient)
        call(x)
    found = torch.tensor([float(look() - start - idle)]) / count
    dist.all_reduce(found, dist.ReduceOp.MAX if card == "lo" else dist.ReduceOp.SUM)
    return found.item() - _MESSAGE_BYTES * _messages(name, bucket, ranks)


def formula_bytes(name: str, bucket: Bucket, ranks: int) -> float:
    """Bytes that all ranks send in one sum: an all-reduce of B bytes takes 2 (p − 1) B, or what its algorithm says; of
    p parts in B bytes an all-to-all and an all-gather take (p − 1) B each."""
    found = _sent(name, bucket, ranks)
    if algorithm := _parts(name)[1]:
        return sum(ranks * steps_of("all_reduce", algorithm, ranks).sent * size for _, size in found)
    return sum((2 if kind == "all_reduce" else 1) * (ranks - 1) * size for kind, size in found)


def _messages(name: str, bucket: Bucket, ranks: int) -> int:
    """Of all ranks in one sum."""
    if algorithm := _parts(name)[1]:
        return ranks * steps_of("all_reduce", algorithm, ranks).messages * len(_sent(name, bucket, ranks))
    pairs = ranks * (ranks - 1)
    count = 0
    for kind, size in _sent(name, bucket, ranks):
        segments = max(_SEGMENTS, ceil(size / ranks / 2**20))
        count += pairs * {"all_reduce": 2 * segments, "all_gather": segments, "all_to_all": 1}[kind]
    return count


def _sent(name: str, bucket: Bucket, ranks: int) -> list[tuple[str, int]]:
    """The collectives of a sum, with the bytes of their buffers."""
    code, _ = _parts(name)
    codec, n = CODECS[code], bucket.n
    if code.startswith("powersgd"):  # left factors, then right ones
        (size,) = sent_bytes(codec, n, ranks, 4, bucket.shapes).values()
        return [("all_reduce", size // 2)] * 2
    chunk = n if name == DENSE or name in HOOKS else CHUNK
    pieces = [(low, min(chunk, n - low)) for low in range(0, n, chunk)]
    found = [one for low, piece in pieces for one in sent_bytes(codec, piece, ranks, 4, bucket.shapes, low).items()]
    return _together(found, ranks) if codec.pattern == "all_gather" else found


def _together(messages: Sequence[tuple[str, int]], ranks: int) -> list[tuple[str, int]]:
    """Small ones of neighbouring chunks travel as one."""
    runs: list[tuple[str, int]] = []
    for kind, size in messages:
        if runs and runs[-1][1] < ranks * MIN_GATHER_BYTES:
            runs[-1] = (kind, runs[-1][1] + size)
        else:
            runs.append((kind, size))
    return runs


# ---- the comparison


def compare(n: int, names: Sequence[str], rounds: int, budget_s: float, card: str) -> list[dict[str, Any]]:
    """A row per name: seconds, how many times faster than Gloo's dense sum, bytes sent by all ranks. Collective."""
    bucket, ranks = Bucket(n), dist.get_world_size()
    calls = {name: make_call(name, bucket)[0] for name in (DENSE, *names)}
    times = rounds_of(calls, bucket, rounds, budget_s)
    rows = []
    for name, call in calls.items():
        sent, wanted = _counted(name, call, bucket, card), formula_bytes(name, bucket, ranks)
        low, middle, high = spread(times[name])
        faster = [dense / own for dense, own in zip(times[DENSE], times[name])]
        rows.append({
            "code": name, "rounds": len(times[name]), "low_s": low, "median_s": middle, "high_s": high,
            "times_faster": spread(faster)[1], "faster_low": spread(faster)[0], "faster_high": spread(faster)[2],
            "sent_bytes": sent, "formula_bytes": wanted, "wire_ratio": formula_bytes(DENSE, bucket, ranks) / sent,
        })  # fmt: skip
    return rows
