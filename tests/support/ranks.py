"""A pool of local Gloo ranks that all tests share: importing torch takes seconds, so the processes are kept, and forked
from one that has imported it.

``pool.run(n, function, *arguments)`` runs a function of a module on ranks 0..n-1 of a fresh world and returns their
results in order. A failure on any rank raises ``RankError`` with that rank's traceback; a hang is ended after a
time-out with the stack of every rank printed. After either the processes are started anew.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.support.paths import ROOT

MAX_RANKS = 8
TIMEOUT_S = 60.0
PRELOADED = "tests.support.preload"


class RankError(AssertionError):
    """A rank raised, died or hung."""


def _worker(pipe: Connection, stacks: str, search_path: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the parent, which closes the pipe
    sys.path[:] = search_path
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115 - open as long as the process lives
    assert PRELOADED in sys.modules, "the fork server could not import what ranks are to have"
    import torch
    from meshwright.runtime.transport.launch import join, leave

    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        rank, world_size, store, call, timeout_s = task
        try:
            function, arguments = ForkingPickler.loads(call)
            torch.manual_seed(0)
            join(rank, world_size, store, timedelta(seconds=2 * timeout_s))
            _tell(pipe, ("ok", function(*arguments)))
            pipe.recv()  # a rank that left at once would take its connections from the others
            leave()
            pipe.send(("ok", None))
        except BaseException as error:
            _tell(pipe, ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _tell(pipe: Connection, answer: tuple[str, Any]) -> None:
    try:
        pipe.send(answer)
    except Exception as error:
        pipe.send(("error", f"the result cannot be sent back: {error}"))


def start_fork_server() -> None:
    """Start the server that ranks are forked from, if it does not run yet. It knows no path but that of its
    environment, and says nothing of what it cannot import."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        forkserver.ensure_running()


class RankPool:
    """At most ``MAX_RANKS`` persistent processes, started when first needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        self._workers: list[tuple[Any, Connection, Path]] = []
        self._runs = 0

    def _grow(self, count: int) -> None:
        if not self._workers:
            start_fork_server()
        while len(self._workers) < count:
            here, there = self._context.Pipe()
            stacks = Path(self._folder.name) / f"stack-{self._runs}-{len(self._workers)}"
            process = self._context.Process(target=_worker, args=(there, str(stacks), list(sys.path)), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here, stacks))

    def run(
        self, num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        """The results of ``function(*arguments)`` on ``num_ranks`` ranks, in rank order."""
        assert 1 <= num_ranks <= MAX_RANKS, num_ranks
        self._runs += 1
        self._grow(num_ranks)
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        for rank, (_, pipe, _) in enumerate(self._workers[:num_ranks]):
            call = ForkingPickler.dumps((function, arguments))  # what a rank cannot import is an error of that rank
            pipe.send((rank, num_ranks, store, bytes(call), timeout_s))
        name = f"{function.__module__}.{function.__qualname__}"
        results = self._answers(num_ranks, name, timeout_s)
        for _, pipe, _ in self._workers[:num_ranks]:
            pipe.send("leave")
        self._answers(num_ranks, f"leaving {name}", timeout_s)
        return results

    def _answers(self, num_ranks: int, name: str, timeout_s: float) -> list[Any]:
        results: list[Any] = [None] * num_ranks
        waiting = {pipe: rank for rank, (_, pipe, _) in enumerate(self._workers[:num_ranks])}
        failures: dict[int, str] = {}
        deadline = monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    kind, value = "error", "the process died"
                if kind == "error":
                    failures[rank] = value
                    deadline = min(deadline, monotonic() + 3.0)  # the others may wait for it, or fail with more to tell
                else:
                    results[rank] = value
        if failures:
            self.close()
            text = "\n".join(f"--- rank {rank} of {num_ranks}: {failures[rank]}" for rank in sorted(failures))
            raise RankError(f"{name} failed on ranks {sorted(failures)}\n{text}")
        if waiting:
            stacks = self._stacks(num_ranks)
            stuck = sorted(waiting.values())
            self.close()
            raise RankError(f"{name}: ranks {stuck} of {num_ranks} did not finish in {timeout_s} s\n{stacks}")
        return results

    def _stacks(self, num_ranks: int) -> str:
        for process, _, _ in self._workers[:num_ranks]:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        sleep(0.5)
        return "\n".join(
            f"--- rank {i}\n{stacks.read_text()}" for i, (_, _, stacks) in enumerate(self._workers[:num_ranks])
        )

    def close(self) -> None:
        """End the processes; the next ``run`` starts new ones."""
        for process, pipe, _ in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []


def pool_check(mode: str) -> int:
    """What the pool's own tests run: "rank", "raise" on rank 1, or "hang" on rank 0."""
    import torch.distributed as dist

    if mode == "raise" and dist.get_rank() == 1:
        raise ValueError("rank one says no")
    if mode == "hang" and dist.get_rank() == 0:
        sleep(600)
    return dist.get_rank()
