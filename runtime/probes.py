"""What the profiler measures over real ranks: collectives as the runtime runs them, transfers, overlap, and optimizers.

A *form* is what the price of a collective depends on: how many devices a group has, how many of them on one host, and
how many such groups do the same at once. ``forms`` lists every form that a plan for these ranks can ask about. One
visit of a wire task runs the collective on all groups of the form at once; ranks outside wait for the others in
``agree``, the elementwise maximum over all ranks, which also decides how many samples there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .crossmesh import Port, Tile
from .groups import DistributedComm

__all__ = [
    "KINDS", "OPTIMIZED", "OPTIMIZERS", "ROOTED", "Form", "Ranks", "forms", "optimizer_step", "overlap", "send_forms",
]  # fmt: skip

Visit = tuple[list[float], int]  # seconds (one or several figures), samples behind them
Agree = Callable[[Sequence[float]], Sequence[float]]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
_MOST_SAMPLES, _VISIT_S = 15, 0.03
_TAG = 1 << 29  # beyond the tags of any plan's transfers
_ALL_SIZES = 16  # ranks up to which submeshes of every size are measured; beyond, powers of two and divisors
OVERLAP_BYTES = 8 << 20


@dataclass(frozen=True)
class Form:
    """Groups that do the same at once. ``sets``: the ranks of each; members: the most of one group on one host."""

    size: int
    members: int
    sets: tuple[tuple[int, ...], ...]

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self.sets)

    @property
    def key(self) -> str:
        """Its name in a profile's state."""
        return f"{self.size}/{self.members}/{self.groups}"


def _form(sets: Sequence[tuple[int, ...]], hosts: Sequence[str]) -> Form:
    members = max(max(Counter(hosts[rank] for rank in ranks).values()) for ranks in sets)
    return Form(len(sets[0]), members, tuple(sets))


def forms(hosts: Sequence[str]) -> list[Form]:
    """Every form of the axes of one- and two-dimensional meshes on consecutive ranks, the most valuable first.

    hosts: the host of each rank. Whole-world meshes come first, then submeshes of power-of-two sizes, then others.
    """
    world = len(hosts)
    sizes = sorted(range(2, world + 1), key=lambda s: (s != world, s & (s - 1) != 0, -s))
    if world > _ALL_SIZES:
        sizes = [s for s in sizes if s & (s - 1) == 0 or world % s == 0]
    found: dict[tuple[int, int, int], Form] = {}
    for size in sizes:
        for offset in range(0, world - size + 1, size):
            for rows in (r for r in range(1, size + 1) if size % r == 0):
                cols = size // rows
                grid = [[offset + r * cols + c for c in range(cols)] for r in range(rows)]
                axes = [[tuple(row) for row in grid], [tuple(column) for column in zip(*grid)]]
                for sets in axes:
                    if len(sets[0]) > 1:
                        form = _form(sets, hosts)
                        found.setdefault((form.size, form.members, form.groups), form)
    return list(found.values())


def send_forms(hosts: Sequence[str]) -> list[Form]:
    """The forms of transfers between two stages of s ranks each, s at once: all within hosts, or all between them."""
    world = len(hosts)
    found: dict[tuple[int, int], Form] = {}
    counts = sorted({1, *(s for s in range(1, world // 2 + 1) if s & (s - 1) == 0 or s == world // 2)})
    for pairs in counts:
        for offset in range(world - 2 * pairs + 1):
            sets = [(offset + i, offset + pairs + i) for i in range(pairs)]
            if len({hosts[a] == hosts[b] for a, b in sets}) == 1:
                form = _form(sets, hosts)
                found.setdefault((form.members, pairs), form)
    return list(found.values())


class Ranks:
    """All ranks of the job as the engine sees them: who agrees, the groups made so far, and the tasks over them.

    Made collectively. timeout_s: how long a collective may take before a missing peer is an error.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device, self.timeout = device, timedelta(seconds=timeout_s)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._made: dict[tuple[int, ...], Any] = {}
        self.whole = self.group(tuple(range(self.world)))

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of ``ranks``, made at the first call. Collective over the world."""
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), timeout=self.timeout)
        return self._made[ranks]

    def close(self) -> None:
        """Destroy the groups."""
        for ranks, group in self._made.items():
            if self.rank in ranks:
                dist.destroy_process_group(group)
        self._made = {}

    def agree(self, values: Sequence[float]) -> Sequence[float]:
        """The elementwise maximum over all ranks. Collective."""
        if self.world == 1:
            return values
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.whole)
        return x.tolist()

    def wire(self, kind: str, form: Form, nbytes: int) -> Callable[[], Visit]:
        """What measures one collective (or "send") of ``nbytes`` on all groups of a form. Collective, as is the call
        that it returns."""
        groups = [self.group(ranks) for ranks in form.sets]
        mine = next(((ranks, g) for ranks, g in zip(form.sets, groups) if self.rank in ranks), None)
        call: Callable[[], object] | None = None
        if mine is not None:
            make = _CALLS.get(kind, partial(_rooted, kind))
            call = make(*mine, self.rank, nbytes, self.device)
        rounds = form.size if kind in ROOTED else 2 if kind == "send" else 1
        return partial(_sampled, call, rounds, self.agree, self.device)


def _sampled(call: Callable[[], object] | None, rounds: int, agree: Agree, device: torch.device) -> Visit:
    """The median seconds of a call over as many samples as all ranks agree on, by ``rounds`` messages in each call.

    A call ends when its last message is here; the next call of the same group cannot overtake it."""

    def timed() -> float:
        start = perf_counter()
        if call is not None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return perf_counter() - start

    timed()  # connections are made at the first use
    (once,) = agree([timed()])
    count = max(2, min(_MOST_SAMPLES, int(_VISIT_S / max(once, 1e-6))))
    if call is None:
        return [0.0], count
    return [median(timed() for _ in range(count)) / rounds], count


def _elements(nbytes: int, size: int, device: torch.device) -> torch.Tensor:
    """[size, k, size] floats of about ``nbytes`` bytes: both outer dims divide among the group."""
    return torch.ones(size, max(nbytes // (4 * size * size), 1), size, device=device)


def _comm(ranks: tuple[int, ...], group: Any, rank: int) -> DistributedComm:
    return DistributedComm((len(ranks),), ranks, rank, {(0,): group})


def _all_reduce(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).all_reduce, _elements(nbytes, len(ranks), device), 0)


def _all_gather(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).all_gather, _elements(nbytes, len(ranks), device)[:1].contiguous(), 0, 0)


def _reduce_scatter(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).reduce_scatter, _elements(nbytes, len(ranks), device), 0, 0)


def _all_to_all(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Any:
    return partial(_comm(ranks, group, rank).all_to_all, _elements(nbytes, len(ranks), device), 0, 0, 2)


def _send(ranks: tuple[int, ...], group: Any, rank: int, nbytes: int, device: torch.device) -> Callable[[], object]:
    """There and back through the runtime's own ports."""
    x = torch.ones(max(nbytes // 4, 1), device=device)
    box = ((0, x.numel()),)
    there, back = (
        Port.make([Tile(a, b, box, box)], rank, tag, (x.numel(),), x.dtype, device=device, group=group)
        for a, b, tag in ((ranks[0], ranks[1], _TAG), (ranks[1], ranks[0], _TAG + 1))
    )

    def first() -> None:
        started = there.send(x, 0)
        back.receive(0).wait()
        for work, _ in started:
            work.wait()

    def second() -> None:
        there.receive(0).wait()
        for work, _ in back.send(x, 0):
            work.wait()

    return first if rank == ranks[0] else second


def _rooted(
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
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}


# ---- overlap


def overlap(ranks: Ranks) -> Callable[[], Visit]:
    """What measures the seconds of a chain of matmuls, of an all_reduce over the world, and of both at once.
    Collective, as is the call that it returns."""
    everyone = tuple(range(ranks.world))
    comm = _comm(everyone, ranks.whole, ranks.rank)
    x, w = torch.zeros(OVERLAP_BYTES // 4, device=ranks.device), torch.ones(256, 256, device=ranks.device) / 256

    def finished(call: Callable[[], object]) -> float:
        ranks.agree([0.0])  # start together
        start = perf_counter()
        call()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return perf_counter() - start

    def chain(length: int) -> None:
        y = w
        for _ in range(length):
            y = y @ w

    def wire() -> None:
        comm.start_all_reduce(x, (0,)).wait()

    def both(length: int) -> None:
        work = comm.start_all_reduce(x, (0,))
        chain(length)
        work.wait()

    def visit() -> Visit:
        finished(wire)
        finished(partial(chain, 8))
        single, alone = ranks.agree([finished(partial(chain, 32)) / 32, finished(wire)])
        length = max(1, min(4096, round(alone / single)))
        rows = [(finished(partial(chain, length)), finished(wire), finished(partial(both, length))) for _ in range(3)]
        return [median(column) for column in zip(*rows)], 3

    return visit


# ---- optimizers

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "SGD+momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}
#: (tensors, elements of each)
OPTIMIZED = ((64, 1 << 10), (32, 1 << 14), (16, 1 << 18), (2, 1 << 22))
_OUT_OF_CACHE_BYTES = 1 << 26


def optimizer_step(name: str, tensors: int, elements: int, device: torch.device) -> Callable[[], Visit]:
    """What measures a step of one of ``OPTIMIZERS`` over ``tensors`` fp32 parameters of ``elements`` each.

    Several sets of parameters take turns, so that none is in the cache when its turn comes.
    """
    count = max(1, min(32, _OUT_OF_CACHE_BYTES // (4 * 4 * tensors * elements)))
    sets = []
    for _ in range(count):
        parameters = [nn.Parameter(torch.ones(elements, device=device)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sets.append(OPTIMIZERS[name](parameters))

    def step() -> float:
        start = perf_counter()
        for optimizer in sets:
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - start) / count

    def visit() -> Visit:
        step()  # the state is made at the first step
        return [median(step() for _ in range(3))], 3 * count

    return visit
