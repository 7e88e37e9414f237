"""A mesh of threads in one process: the Comm protocol for checks and tests, without torch.distributed.

Every collective is one exchange: each device posts its tensor and what it asks for, all wait, each reads its
neighbours' posts, all wait again. A program that asks for different collectives on different devices gets an error,
not a hang.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch

from ..errors import UnlikeError
from ..ir.comm import CompletedArrival, Context, use_context

__all__ = ["LockstepComm", "LockstepGroup"]


T = TypeVar("T")


class LockstepGroup:
    """Devices of a logical mesh as threads; ranks are row-major, axis 0 major.

    ``timeout_s``: how long a device waits for the others in a collective before the run is given up.
    """

    def __init__(self, mesh_shape: Sequence[int], timeout_s: float = 60.0) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.timeout_s = timeout_s
        self.coordinates = list(itertools.product(*(range(size) for size in self.mesh_shape)))
        self.slots: list[Any] = [None] * len(self)
        self.barrier = threading.Barrier(len(self))

    def __len__(self) -> int:
        return prod(self.mesh_shape)

    def run(self, fn: Callable[[LockstepComm], T], seed: int = 0, step: int = 0, microbatch: int = 0) -> list[T]:
        """``fn(comm)`` on every device under ``use(Context(comm, …))``; the results by rank.

        The first error of a device ends all of them and is raised here; that of a program rather than of one which has
        ended, where they do not ask for the same collectives. CPU autograd runs in the calling thread, so
        ``fn`` may call backward, and collectives in it keep their order.
        """
        self.barrier = threading.Barrier(len(self))
        results: list[Any] = [None] * len(self)
        errors: list[BaseException] = []
        ended: set[int] = set()

        def device(rank: int) -> None:
            comm = LockstepComm(self, rank)
            try:
                with use_context(Context(comm, seed, step, microbatch)):
                    results[rank] = fn(comm)
                ended.add(rank)
                comm.finish()
            except BaseException as error:
                # a broken barrier is the echo of another device's error, which is already in the list
                if not isinstance(error, threading.BrokenBarrierError):
                    errors.insert(len(errors) if rank in ended else 0, error)
                if not isinstance(error, UnlikeError):
                    self.barrier.abort()

        if len(self) == 1:
            with use_context(Context(LockstepComm(self, 0), seed, step, microbatch)) as context:
                return [fn(context.comm)]  # type: ignore[arg-type]
        # In a forked process PyTorch makes its thread pool anew when first asked, and does not mind who else asks
        # meanwhile: of two threads at once, one gets "Invalid thread pool!". So it is asked here.
        torch.set_num_threads(torch.get_num_threads())
        threads = [threading.Thread(target=device, args=(rank,), daemon=True) for rank in range(len(self))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self.barrier.broken:
            raise RuntimeError(
                f"a device must reach each collective within {self.timeout_s} s of the others, but one did not"
            )
        return results


class LockstepComm:
    """One device's view of a LockstepGroup. ``log`` lists (phase, kind, axis, elements) of every collective asked for;
    ``phase`` is whatever the caller last set it to ("forward" at first)."""

    def __init__(self, group: LockstepGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.phase = "forward"
        self.log: list[tuple[str, str, int, int]] = []

    def size(self, axis: int) -> int:
        """Number of devices along ``axis``."""
        return self.group.mesh_shape[axis]

    def index(self, axis: int) -> int:
        """This device's coordinate along ``axis``."""
        return self.group.coordinates[self.rank][axis]

    def all_reduce(self, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        """The sum (or "max") over the axis."""
        if op not in ("sum", "max"):
            raise ValueError(f"all_reduce knows 'sum' and 'max', but got {op!r}")
        parts = self._exchange(x, "all_reduce", axis, op)
        return torch.stack(parts).sum(0, dtype=x.dtype) if op == "sum" else torch.stack(parts).amax(0)

    def all_gather(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """The blocks of the axis concatenated along ``dim``."""
        return torch.cat(self._exchange(x, "all_gather", axis, dim), dim).contiguous()

    def reduce_scatter(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """This device's block along ``dim`` of the sum."""
        parts = self._exchange(x, "reduce_scatter", axis, dim)
        return self._block(torch.stack(parts).sum(0, dtype=x.dtype), axis, dim)

    def all_to_all(self, x: torch.Tensor, axis: int, split_dim: int, concat_dim: int) -> torch.Tensor:
        """From sharded along ``concat_dim`` to sharded along ``split_dim``."""
        parts = self._exchange(x, "all_to_all", axis, (split_dim, concat_dim))
        return torch.cat([self._block(part, axis, split_dim) for part in parts], concat_dim).contiguous()

    def all_to_all_uneven(
        self, x: torch.Tensor, axis: int, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Rows in pieces of these counts to and from the devices of the axis."""
        if sum(sent) != x.shape[0]:
            raise ValueError(f"all rows are sent, but got counts {list(sent)} for {x.shape[0]} rows")
        parts = self._exchange(x, "all_to_all", axis, "uneven")
        counts = self._exchange(torch.tensor(list(sent)), "all_to_all", axis, "counts", logged=False)
        position = self.index(axis)
        pieces = [part.split(count.tolist())[position] for part, count in zip(parts, counts)]
        if [len(piece) for piece in pieces] != list(received):
            raise ValueError(f"{list(received)} rows are to arrive, but got {[len(piece) for piece in pieces]}")
        return torch.cat(pieces)

    def exchange(
        self, before: torch.Tensor | None, after: torch.Tensor | None, axis: int, cyclic: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return ``after`` of the neighbour before this device along the axis, and ``before`` of the one behind it."""
        from_before = None if after is None else self._neighbour(after, axis, -1, cyclic)
        return from_before, None if before is None else self._neighbour(before, axis, 1, cyclic)

    def start_send(self, x: torch.Tensor, axis: int, to: int, source: int) -> Callable[[], torch.Tensor]:
        """Receive the tensor that the device at ``source`` sent, without delay."""
        received = self._exchange(x.contiguous(), "send", axis, "one")[source]
        return lambda: received

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> CompletedArrival:
        """Sum over the axes, without delay."""
        for axis in axes:
            x = self.all_reduce(x, axis)
        return CompletedArrival(x)

    def start_all_gather(self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none") -> CompletedArrival:
        """The rows of all devices of the axes, which are here at once; in no code."""
        rows = x.reshape(1, -1)
        for axis in reversed(axes):
            rows = self.all_gather(rows, axis, 0)
        return CompletedArrival(rows)

    def start_reduce_scatter(
        self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> CompletedArrival:
        """This device's row of the sum; in no code."""
        for axis in axes:
            x = self.reduce_scatter(x, axis, 0)
        return CompletedArrival(x.view(-1))

    def _neighbour(self, x: torch.Tensor, axis: int, step: int, cyclic: bool) -> torch.Tensor:
        parts = self._exchange(x, "send", axis, (step, cyclic))
        there = self.index(axis) + step
        return parts[there % len(parts)] if cyclic or 0 <= there < len(parts) else torch.zeros_like(x)

    def finish(self) -> None:
        """Wait for the others at the end of the program, so that one that asks for more collectives is caught."""
        self._exchange(torch.empty(0), "end of program", -1, None)

    def _block(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        if x.shape[dim] % self.size(axis):
            raise ValueError(f"blocks are even, but got {x.shape[dim]} along dim {dim} for {self.size(axis)} devices")
        return x.chunk(self.size(axis), dim)[self.index(axis)].contiguous()

    def _exchange(self, x: torch.Tensor, kind: str, axis: int, detail: Any, logged: bool = True) -> list[torch.Tensor]:
        """Post ``x``; the posts of all devices along ``axis`` (of this device alone, for axis -1)."""
        group = self.group
        if axis >= 0 and logged:
            self.log.append((self.phase, kind, axis, x.numel()))
        if len(group) == 1:
            return [x.detach().clone()]
        group.slots[self.rank] = (kind, axis, detail, x.detach().clone())  # the caller may reuse its own
        group.barrier.wait(group.timeout_s)
        posts = list(group.slots)
        group.barrier.wait(group.timeout_s)
        coordinates = group.coordinates[self.rank]
        requests = {post[:3] for post in posts}
        if len(requests) > 1:
            raise UnlikeError(f"all devices ask for the same collective, but got {sorted(map(str, requests))}")
        if axis < 0:
            return [x]
        line = [
            rank
            for rank, there in enumerate(group.coordinates)
            if there[:axis] + there[axis + 1 :] == coordinates[:axis] + coordinates[axis + 1 :]
        ]
        return [posts[rank][3] for rank in line]
