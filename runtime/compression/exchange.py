"""The three collectives that codes travel by, started without waiting, and a rehearsal of them within one process.

What a compressed sum does is a generator of the work that it must see done before it goes on (``Steps``). On a real
group a thread waits for each piece of work in turn (``wait_all``); a ``Rehearsal`` runs all ranks of a group in
lockstep in one thread, which tests and simulations use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = [
    "CompletedWork",
    "Exchange",
    "GroupExchange",
    "Rehearsal",
    "Steps",
    "Work",
    "all_gather_single",
    "reduce_scatter_single",
    "wait_all",
]  # fmt: skip


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any:
        """Block until it is done."""
        ...


Steps = Iterator[Work]


class Exchange(Protocol):
    """One rank's side of a group. ``sent[kind]``: bytes of the buffers so far, counted as ``codecs.sent_bytes`` has
    them. Buffers stay untouched until the work is done."""

    rank: int
    size: int
    sent: Counter[str]

    def all_reduce(self, x: torch.Tensor) -> Work:
        """Sum x in place."""
        ...

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Work:
        """Row j of x [size, m] goes to rank j, whose row comes into out[j]."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Work:
        """x [m] of rank j comes into out[j]."""
        ...


def wait_all(steps: Steps) -> None:
    """Wait for each piece of work in turn."""
    for work in steps:
        work.wait()


class GroupExchange:
    """The collectives of a process group, which nothing else sends over meanwhile. None: a group of one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.sent: Counter[str] = Counter()

    def all_reduce(self, x: torch.Tensor) -> Work:
        """Sum x in place."""
        self.sent["all_reduce"] += x.nbytes
        if self.size == 1 or not x.numel():
            return CompletedWork()
        return dist.all_reduce(x, group=self.group, async_op=True)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Work:
        """Row j of x goes to rank j."""
        assert out.shape == x.shape == (self.size, *x.shape[1:]), (out.shape, x.shape)
        self.sent["all_to_all"] += x.nbytes
        if self.size == 1:
            out.copy_(x)
            return CompletedWork()
        return dist.all_to_all_single(out.view(-1), x.view(-1), group=self.group, async_op=True)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Work:
        """x of all ranks."""
        assert out.shape == (self.size, *x.shape), (out.shape, x.shape)
        self.sent["all_gather"] += out.nbytes
        if self.size == 1:
            out[0].copy_(x)
            return CompletedWork()
        return all_gather_single(out.view(-1), x, group=self.group, async_op=True)


class CompletedWork:
    """Work that is over when it starts."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Rehearsal:
    """``size`` ranks in one process: ``exchanges[rank]`` is each one's side, ``run`` their steps in lockstep. Ranks
    that start unlike collectives are found out: AssertionError."""

    def __init__(self, size: int) -> None:
        self.calls: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = [[] for _ in range(size)]
        self.done = 0
        self.exchanges = [_RehearsedExchange(self, rank) for rank in range(size)]

    def add(self, rank: int, kind: str, out: torch.Tensor, x: torch.Tensor) -> int:
        """The number of a collective that one rank starts; it happens once all have."""
        self.calls[rank].append((kind, out, x))
        while all(len(calls) > self.done for calls in self.calls):
            self._happen([calls[self.done] for calls in self.calls])
            self.done += 1
        return len(self.calls[rank])

    def _happen(self, calls: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        forms = {(kind, out.shape, out.dtype, x.shape) for kind, out, x in calls}
        assert len(forms) == 1, f"all ranks must start the same collective, but got {forms}"
        rows = [x.clone() for _, _, x in calls]
        for rank, (kind, out, _) in enumerate(calls):
            if kind == "all_reduce":
                total = rows[0].clone()
                for row in rows[1:]:
                    total += row
                out.copy_(total)
            else:
                for j, row in enumerate(rows):
                    out[j].copy_(row[rank] if kind == "all_to_all" else row)

    def run(self, steps: Sequence[Steps]) -> None:
        """Run the ranks' steps to their ends; an error of any is raised after all have ended, the first rank's."""
        waiting: dict[int, _Rehearsed | None] = dict.fromkeys(range(len(steps)))
        errors: dict[int, Exception] = {}
        while waiting:
            free = [rank for rank, work in waiting.items() if work is None or work.number <= self.done]
            assert free, f"ranks {sorted(waiting)} wait for collectives that others never start"
            for rank in free:
                try:
                    work = next(steps[rank], None)
                except Exception as error:
                    errors[rank], work = error, None
                if work is None:
                    del waiting[rank]
                else:
                    waiting[rank] = work if isinstance(work, _Rehearsed) else None
        for rank in sorted(errors):
            raise errors[rank]


class _Rehearsed:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        """Only ``Rehearsal.run`` waits."""
        raise AssertionError("rehearsed work is waited for by Rehearsal.run")


class _RehearsedExchange:
    def __init__(self, world: Rehearsal, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, len(world.calls)
        self.sent: Counter[str] = Counter()

    def _start(self, kind: str, out: torch.Tensor, x: torch.Tensor) -> Work:
        self.sent[kind] += out.nbytes
        return _Rehearsed(self.world.add(self.rank, kind, out, x))

    def all_reduce(self, x: torch.Tensor) -> Work:
        return self._start("all_reduce", x, x)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Work:
        assert out.shape == x.shape == (self.size, *x.shape[1:]), (out.shape, x.shape)
        return self._start("all_to_all", out, x)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Work:
        assert out.shape == (self.size, *x.shape), (out.shape, x.shape)
        return self._start("all_gather", out, x)


# ---- The flat collectives of torch.distributed, which torch renamed in 2.13; both names are public in
# their releases


all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
