"""An asynchronous parameter server: workers push gradients and pull the newest values without waiting for each other.

Stale synchronous parallel (Ho et al., NIPS 2013): a worker's *clock* is the number of gradients that it has pushed, and
it gets its values once

    its clock − the slowest worker's clock ≤ staleness

so these values contain every gradient of the first clock − staleness steps of everyone, and whatever came since.
``staleness=0`` makes all keep step; a worker that has closed is not waited for. What training computes is then no
longer what one device would, nor twice the same.

A gradient and the word whether it is the last (0: goodbye) travel in one message of n + 1 elements; the answer is the
n values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .channel import Channel

__all__ = ["LocalWorker", "Server", "Worker"]

Update = Callable[[torch.Tensor, torch.Tensor], object]


class Server:
    """Holds ``values`` (a copy) and applies ``update(values, gradient)`` in place, one gradient at a time, to each that
    comes from ``workers`` (ranks of the channel; this one among them takes part by ``local``).

    Made when the workers make theirs. A worker that pushes nothing for as long as the group's time-out counts as dead.
    """

    def __init__(
        self, channel: Channel, values: torch.Tensor, update: Update, workers: Sequence[int], staleness: int
    ) -> None:
        if staleness < 0 or not workers or any(not 0 <= rank < channel.size for rank in workers):
            raise ValueError(
                f"a server has workers among its channel's {channel.size} ranks and a staleness >= 0, but got "
                f"{list(workers)} and {staleness}; name the ranks that push"
            )
        self.channel, self.update, self.staleness = channel, update, staleness
        self.values = values.detach().clone(memory_format=torch.contiguous_format)
        self.clocks = dict.fromkeys(workers, 0)  # of those that have not closed
        self.largest_lead = 0  # of a worker over the slowest, when it was given values
        self._tag = channel.reserve(2)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        remote = [rank for rank in workers if rank != channel.rank]
        self._threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in remote]

    def start(self) -> None:
        """Serve, on threads of this process."""
        for thread in self._threads:
            thread.start()

    def local(self) -> LocalWorker:
        """The worker of the server's own rank."""
        return LocalWorker(self, self.channel.rank)

    def finish(self) -> None:
        """Return once every worker has closed. Raises what went wrong while serving."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def exchange(self, worker: int, gradient: torch.Tensor, out: torch.Tensor) -> None:
        """Take a gradient; the newest values into ``out`` once the worker is not too far ahead."""
        with self._changed:
            self.update(self.values.view(-1), gradient)
            self.clocks[worker] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or self._lead(worker) <= self.staleness)
            if self._failure is not None:
                raise self._failure
            self.largest_lead = max(self.largest_lead, self._lead(worker))
            out.copy_(self.values.view(-1))

    def leave(self, worker: int) -> None:
        """Nobody waits for this worker any more."""
        with self._changed:
            del self.clocks[worker]
            self._changed.notify_all()

    def _lead(self, worker: int) -> int:
        return self.clocks[worker] - min(self.clocks.values())

    def _serve(self, worker: int) -> None:
        message = self.values.new_empty(self.values.numel() + 1)
        answer = self.values.new_empty(self.values.numel())
        try:
            while True:
                self._await(self.channel.receive(message, worker, self._tag), worker)
                if not message[-1]:
                    return self.leave(worker)
                self.exchange(worker, message[:-1], answer)
                self._await(self.channel.send(answer, worker, self._tag + 1), worker)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _await(self, work: Any, worker: int) -> None:
        self.channel.await_peer(work, worker, "parameter server")


class Worker:
    """The end of a worker on another rank than the server's. ``values``: its parameters, which every ``pull`` fills in
    place."""

    def __init__(self, channel: Channel, values: torch.Tensor, server: int) -> None:
        assert values.is_contiguous(), values.stride()
        self.channel, self.server, self.values = channel, server, values
        self._tag = channel.reserve(2)
        self._message = values.detach().new_empty(values.numel() + 1)
        self._works: list[Any] = []

    def push(self, gradient: torch.Tensor) -> None:
        """Start sending a gradient, like ``values``; it may be written to afterwards. Then ``pull`` before the next."""
        assert not self._works, "pull before you push again"
        self._message[:-1].copy_(gradient.reshape(-1))
        self._message[-1] = 1
        with torch.no_grad():
            incoming = self.channel.receive(self.values.detach().view(-1), self.server, self._tag + 1)
        self._works = [incoming, self.channel.send(self._message, self.server, self._tag)]

    def pull(self) -> None:
        """The newest values. Waits where this worker is further ahead than the server lets it be."""
        for work in self._works:
            self.channel.await_peer(work, self.server, "parameter server")
        self._works = []

    def step(self, gradient: torch.Tensor) -> None:
        """Push, and pull."""
        self.push(gradient)
        self.pull()

    def close(self) -> None:
        """Say goodbye: the others go on without this worker."""
        self._message.zero_()
        self.channel.await_peer(
            self.channel.send(self._message, self.server, self._tag), self.server, "parameter server"
        )


class LocalWorker:
    """The end of a worker on the server's rank."""

    def __init__(self, server: Server, rank: int) -> None:
        self.server, self.rank, self.values = server, rank, server.values.clone()

    def step(self, gradient: torch.Tensor) -> None:
        """Push, and pull."""
        self.server.exchange(self.rank, gradient.reshape(-1), self.values.view(-1))

    def close(self) -> None:
        """The others go on without this worker."""
        self.server.leave(self.rank)
