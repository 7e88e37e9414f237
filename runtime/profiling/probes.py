"""Measurements over real ranks: collectives as the runtime runs them, transfers, overlap, optimizers, and codecs.

A *form* is what the price of a collective depends on: how many devices a group has, how many of them on one host, and
how many such groups do the same at once. ``group_forms`` lists every form that a plan for these ranks can ask about.
One visit of a wire task runs the collective on all groups of the form at once; ranks outside wait for the others in
``agree``, the elementwise maximum over all ranks, which also decides how many samples there are.

A collective in a training step follows compute: tensors are out of cache, ranks arrive a little apart, and a thread of
the backend has to be woken while a core is busy. Its mean then is several times what a hot loop of collectives takes
(1 MB over 2 ranks on 2 cores: 0.4 ms at best, 1.3 ms in the median of a loop, 3.6 ms after 8 ms of compute), and a step
pays means. So ``pace`` runs before every sample, and a figure is the mean over samples and ranks. Transfers between
stages are in ``message_probes.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import isqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...costmodel.op_timing import stopwatch
from ..collectives.channel import Channel
from ..collectives.dense import DenseSum
from ..collectives.rounds import ALGORITHMS
from ..compression.registry import make_sum
from ..compression.summing import BucketSpec
from ..transport.process_groups import DistributedComm
from ..transport.shared_memory import SharedMemory, SharedMemoryAllReduce, SharedMemoryMessages
from .message_probes import PACE_S, SLOW_S, RankPair, sample_count, time_call, time_messages

__all__ = [
    "CODED_LENGTHS",
    "COLLECTIVES",
    "OPTIMIZERS",
    "OPTIMIZER_SIZES",
    "OWN_ALGORITHMS",
    "PACE_S",
    "ROOTED_COLLECTIVES",
    "ConcurrentGroups",
    "Ranks",
    "coded_sum_probe",
    "group_forms",
    "matmuls",
    "optimizer_probe",
    "overlap_probe",
    "send_forms",
]  # fmt: skip

Visit = tuple[list[float], int]  # seconds (one or several figures), samples behind them
Agree = Callable[[Sequence[float]], Sequence[float]]

COLLECTIVES = ("all_reduce", "all_reduce_in_place", "all_gather", "reduce_scatter", "all_to_all")
ROOTED_COLLECTIVES = ("broadcast", "reduce", "scatter", "gather")
#: sums by algorithms of our own, where the backend has tagged messages
OWN_ALGORITHMS = tuple(
    f"all_reduce:{name}" for name in ALGORITHMS["all_reduce"] if name not in ("sequential", "parameter_server")
)
_MAX_SAMPLES, _VISIT_S = 15, 0.03
_ALL_SIZES = 16  # ranks up to which submeshes of every size are measured; beyond, powers of two and divisors
OVERLAP_BYTES = 4 << 20


@dataclass(frozen=True)
class ConcurrentGroups:
    """Groups that do the same at once. ``sets``: the ranks of each; members: the most of one group on one host."""

    size: int
    members: int
    sets: tuple[tuple[int, ...], ...]

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.sets)

    @property
    def key(self) -> str:
        """Its name in a profile's state."""
        return f"{self.size}/{self.members}/{self.groups}"


def _form(sets: Sequence[tuple[int, ...]], hosts: Sequence[str]) -> ConcurrentGroups:
    members = max(max(Counter(hosts[rank] for rank in ranks).values()) for ranks in sets)
    return ConcurrentGroups(len(sets[0]), members, tuple(sets))


def group_forms(hosts: Sequence[str]) -> list[ConcurrentGroups]:
    """Every form of the axes of one- and two-dimensional meshes on consecutive ranks, the most valuable first.

    hosts: the host of each rank. Whole-world meshes come first, then submeshes of power-of-two sizes, then others.
    """
    world = len(hosts)
    sizes = sorted(range(2, world + 1), key=lambda s: (s != world, s & (s - 1) != 0, -s))
    if world > _ALL_SIZES:
        sizes = [s for s in sizes if s & (s - 1) == 0 or world % s == 0]
    forms_by_key: dict[tuple[int, int, int], ConcurrentGroups] = {}
    for size in sizes:
        for offset in range(0, world - size + 1, size):
            for rows in (r for r in range(1, size + 1) if size % r == 0):
                cols = size // rows
                grid = [[offset + r * cols + c for c in range(cols)] for r in range(rows)]
                axes = [[tuple(row) for row in grid], [tuple(column) for column in zip(*grid)]]
                for sets in axes:
                    if len(sets[0]) > 1:
                        form = _form(sets, hosts)
                        forms_by_key.setdefault((form.size, form.members, form.groups), form)
    return list(forms_by_key.values())


def send_forms(hosts: Sequence[str]) -> list[ConcurrentGroups]:
    """The forms of transfers between two stages of s ranks each, s at once: all within hosts, or all between them."""
    world = len(hosts)
    forms_by_key: dict[tuple[int, int], ConcurrentGroups] = {}
    counts = sorted({1, *(s for s in range(1, world // 2 + 1) if s & (s - 1) == 0 or s == world // 2)})
    for pairs in counts:
        for offset in range(world - 2 * pairs + 1):
            sets = [(offset + i, offset + pairs + i) for i in range(pairs)]
            if len({hosts[a] == hosts[b] for a, b in sets}) == 1:
                form = _form(sets, hosts)
                forms_by_key.setdefault((form.members, pairs), form)
    return list(forms_by_key.values())


class Ranks:
    """All ranks of the job as the engine sees them: who agrees, the groups made so far, and the tasks over them.

    Made collectively. timeout_s: how long a collective may take before a missing peer is an error. pace: what a rank
    does before and beside a collective, by default matmuls for about ``pace_s`` seconds.
    """

    def __init__(
        self, device: torch.device, timeout_s: float, pace: Callable[[], object] | None = None, pace_s: float = PACE_S
    ) -> None:
        self.device, self.timeout = device, timedelta(seconds=timeout_s)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pace = pace or matmuls(device, pace_s)
        self._made: dict[tuple[tuple[int, ...], bool], Any] = {}
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._met: dict[tuple[int, ...], SharedMemory] = {}
        self.whole = self.group(tuple(range(self.world)))

    def group(self, ranks: tuple[int, ...], back: bool = False) -> Any:
        """The process group of ``ranks``, or a second one for their messages back, made at the first call. Collective
        over the world."""
        if (ranks, back) not in self._made:
            self._made[ranks, back] = dist.new_group(list(ranks), timeout=self.timeout)
        return self._made[ranks, back]

    def close(self) -> None:
        """Destroy the groups."""
        for (ranks, _), group in self._made.items():
            if self.rank in ranks:
                dist.destroy_process_group(group)
        self._made, self._channels, self._met = {}, {}, {}

    def agree(self, values: Sequence[float]) -> Sequence[float]:
        """The elementwise maximum over all ranks. Collective."""
        if self.world == 1:
            return values
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.whole)
        return x.tolist()

    def mean(self, value: float | None) -> float:
        """The mean over the ranks that give a value. Collective."""
        x = torch.tensor([value or 0.0, value is not None], dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(x, group=self.whole)
        total, count = x.tolist()
        return total / max(count, 1.0)

    def wire(self, kind: str, form: ConcurrentGroups, nbytes: int) -> Callable[[], Visit]:
        """A call that measures one collective (a kind, one of ``OWN_ALGORITHMS``, or "send") of ``nbytes`` on all
        groups of a form. Collective, as is the call that it returns."""
        groups = [self.group(ranks) for ranks in form.sets]
        mine = next(((ranks, g) for ranks, g in zip(form.sets, groups) if self.rank in ranks), None)
        if kind == "send":
            back = dict(zip(form.sets, [self.group(ranks, back=True) for ranks in form.sets]))
            if mine is None:
                return partial(time_messages, self, None)
            ranks, group = mine
            shared_memory = self._shared_memory(*mine)
            ways = (
                SharedMemoryMessages(shared_memory) if shared_memory is not None and shared_memory.spans_group else None
            )
            return partial(
                time_messages, self, RankPair(ranks, (group, back[ranks]), self.rank, nbytes, self.device, ways)
            )
        call: Callable[..., object] | None = None
        if mine is not None:
            shared_memory = self._shared_memory(*mine) if kind == "all_reduce_in_place" else None
            if kind in OWN_ALGORITHMS:
                call = self._own_sum(*mine, kind, nbytes)
            elif shared_memory is not None and shared_memory.spans_group:
                shared = SharedMemoryAllReduce(shared_memory, max(nbytes // 4, 1), torch.float32)
                call = partial(_run_sum, shared, shared.buffer)
            else:
                call = _CALLS.get(kind, partial(_rooted_call, kind))(*mine, self.rank, nbytes, self.device)
        if kind in COLLECTIVES or kind in OWN_ALGORITHMS:
            return partial(self._paced, call)
        return partial(_median_seconds, call, form.size, self.agree, self.device)

    def _shared_memory(self, ranks: tuple[int, ...], group: Any) -> SharedMemory | None:
        """The ranks of the group that share memory, as training finds them. Collective over the group."""
        if ranks not in self._met and self.device.type == "cpu":
            self._met[ranks] = SharedMemory.connect(group)
        return self._met.get(ranks)

    def _own_sum(self, ranks: tuple[int, ...], group: Any, kind: str, nbytes: int) -> Callable[[], object]:
        channel = self._channels.setdefault(ranks, Channel(group))
        x = torch.ones(max(nbytes // 4, 1))
        return partial(_run_sum, DenseSum(channel, x.numel(), x.dtype, kind.partition(":")[2]), x)

    def _paced(self, call: Callable[[], object] | None) -> Visit:
        """The mean seconds of a call that follows ``pace``, over samples and ranks, without each rank's worst."""

        def timed() -> float:
            self.pace()
            return time_call(call, self.device)

        connecting = time_call(call, self.device)
        begin = perf_counter()
        samples = [timed()]
        connecting, once = self.agree([connecting, perf_counter() - begin])
        count = sample_count(connecting, once, 2 * PACE_S)
        if count > 1:
            samples = sorted(timed() for _ in range(count))[:-1]
        return [self.mean(None if call is None else sum(samples) / len(samples))], count


def matmuls(device: torch.device, seconds: float = PACE_S) -> Callable[[], object]:
    """Matmuls that take about so long on this device, on its own: the default ``pace``."""
    x = torch.ones(256, 256, device=device) / 256

    def chain(length: int) -> None:
        y = x
        for _ in range(length):
            y = y @ x

    chain(8)
    once = min(time_call(partial(chain, 16), device) for _ in range(3)) / 16
    return partial(chain, max(1, round(seconds / once)))


def _median_seconds(call: Callable[[], object] | None, rounds: int, agree: Agree, device: torch.device) -> Visit:
    """The median seconds of a call in a loop, over as many samples as all ranks agree on, by ``rounds`` messages in
    each call. The next call of the same group cannot overtake it."""
    time_call(call, device)  # connections are made at the first use
    (once,) = agree([time_call(call, device)])
    count = max(2, min(_MAX_SAMPLES, int(_VISIT_S / max(once, 1e-6))))
    if call is None:
        return [0.0], count
    return [median(time_call(call, device) for _ in range(count)) / rounds], count


def _elements(nbytes: int, size: int, device: torch.device) -> torch.Tensor:
    """[size, k, size] floats of about ``nbytes`` bytes: both outer dims divide among the group."""
    return torch.ones(size, max(nbytes // (4 * size * size), 1), size, device=device)


def _comm(ranks: tuple[int, ...], group: Any, rank: int) -> DistributedComm:
    return DistributedComm((len(ranks),), ranks, rank, {(0,): group})


def _all_reduce(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).all_reduce, _elements(nbytes, len(ranks), device), 0)


def _sum_in_place(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(dist.all_reduce, _elements(nbytes, len(ranks), device), group=group)


def _all_gather(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).all_gather, _elements(nbytes, len(ranks), device)[:1].contiguous(), 0, 0)


def _reduce_scatter(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).reduce_scatter, _elements(nbytes, len(ranks), device), 0, 0)


def _all_to_all(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).all_to_all, _elements(nbytes, len(ranks), device), 0, 0, 2)


def _run_sum(algorithm: DenseSum | SharedMemoryAllReduce, x: torch.Tensor) -> None:
    algorithm.start(x).wait()


def _rooted_call(
    kind: str, ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device
) -> Callable[[], object]:
    """Once from (or to) each rank in turn, so that no root runs ahead of the others."""
    whole = torch.ones(max(nbytes // 4, len(ranks)), device=device)
    part = torch.ones(max(nbytes // (4 * len(ranks)), 1), device=device)
    parts = [torch.ones_like(part) for _ in ranks]

    def once(root: int) -> None:
        if kind == "broadcast":
            dist.broadcast(whole, root, group=group)
        elif kind == "reduce":
            dist.reduce(whole, root, group=group)
        elif kind == "scatter":
            dist.scatter(part, parts if rank == root else None, root, group=group)
        else:
            dist.gather(part, parts if rank == root else None, root, group=group)

    def call() -> None:
        for root in ranks:
            once(root)

    return call


_CALLS: dict[str, Callable[..., Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_reduce_in_place": _sum_in_place,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


# ---- overlap


def overlap_probe(ranks: Ranks) -> Callable[[], Visit]:
    """A call that measures the seconds of ``ranks.pace``, of an all_reduce over the world that takes about as long, and
    of both at once. Collective, as is the call that it returns."""
    comm = _comm(tuple(range(ranks.world)), ranks.whole, ranks.rank)
    x = torch.zeros(OVERLAP_BYTES // 4, device=ranks.device)

    def finished(call: Callable[[], object]) -> float:
        ranks.agree([0.0])  # start together
        return time_call(call, ranks.device)

    def wire() -> None:
        comm.start_all_reduce(x, (0,)).wait()

    def paces(count: int) -> None:
        for _ in range(count):
            ranks.pace()

    def both(count: int) -> None:
        work = comm.start_all_reduce(x, (0,))
        paces(count)
        work.wait()

    def visit() -> Visit:
        finished(wire)
        alone, single = ranks.agree([finished(wire), finished(ranks.pace)])
        count = max(1, min(64, round(alone / single)))
        samples = 5 if alone < SLOW_S else 1
        rows = [
            (finished(partial(paces, count)), finished(wire), finished(partial(both, count))) for _ in range(samples)
        ]
        return [median(column) for column in zip(*rows)], samples

    return visit


# ---- optimizers

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "AdamW+fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "SGD+momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}
#: (tensors, elements of each)
OPTIMIZER_SIZES = ((64, 1 << 10), (32, 1 << 14), (16, 1 << 18), (2, 1 << 22))
_OUT_OF_CACHE_BYTES = 1 << 26
_CHURNED_MIB = 32  # MiB


def optimizer_probe(
    name: str, dtype: torch.dtype, tensors: int, elements: int, device: torch.device
) -> Callable[[], Visit]:
    """A call that measures a step of one of ``OPTIMIZERS`` over ``tensors`` parameters of ``elements`` each.

    Several sets of parameters take turns, so that none is in the cache when its turn comes, and before each round as
    much memory is taken and given back as activations do: the temporaries of an update then lie on fresh pages.
    """
    count = max(1, min(32, _OUT_OF_CACHE_BYTES // (4 * 4 * tensors * elements)))
    watch = stopwatch(device, host=False)
    sets = []
    for _ in range(count):
        parameters = [nn.Parameter(torch.ones(elements, dtype=dtype, device=device)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sets.append(OPTIMIZERS[name](parameters))

    def step() -> float:
        seconds = 0.0
        for optimizer in sets:
            churn = [torch.ones(1 << 18, device=device) for _ in range(_CHURNED_MIB)]
            del churn
            seconds += watch(optimizer.step)
        return seconds / count

    def visit() -> Visit:
        step()  # the state is made at the first step
        return [median(step() for _ in range(3))], 3 * count

    return visit


# ---- codes

CODED_LENGTHS = (1 << 14, 1 << 20, 1 << 22)  # elements of a bucket; one that is small, then whole messages
_CODED_SIDE = 1 << 10  # of the matrices in it, at the most
_CODED_SAMPLES = 6


def coded_sum_probe(code: str, elements: int, device: torch.device, pace: Callable[[], object]) -> Callable[[], Visit]:
    """A call that measures a sum of ``elements`` in a code over a group of this rank alone: it encodes and decodes, in
    the communication thread, after ``pace``. The bucket holds square matrices of normal noise."""
    side = min(_CODED_SIDE, isqrt(elements))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(side, side, generator=generator).to(device).repeat(elements // side**2, 1).view(-1)
    bucket = BucketSpec(elements, shapes=((side, side),) * (elements // side**2), device=device)
    coded_sum = make_sum(code, bucket)
    x = torch.empty_like(gradient)

    def once() -> float:
        x.copy_(gradient)
        pace()
        return time_call(lambda: coded_sum.start(x).wait(), device)

    def visit() -> Visit:
        once()
        samples = sorted(once() for _ in range(_CODED_SAMPLES))[:-1]
        return [sum(samples) / len(samples)], _CODED_SAMPLES

    return visit
