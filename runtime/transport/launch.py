"""Starting ranks: joining a torchrun world, and local ranks of one function for demos, benchmarks and tests.

The start barrier goes over the store that ranks meet in, so that a missing rank is named and not waited for.

A collective with a rank missing blocks until its group's time-out and then names nobody. A store is asked instead:
every rank writes a key, rank 0 waits for all keys until a deadline and tells the others who is missing.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.worker import drain
from ..errors import MissingRankError
from .first_error import first_error_of, publish, report_uncaught, world_store
from .heartbeat import begin_heartbeat, timeout_of
from .restarts import store_of_attempt

__all__ = [
    "await_all_ranks",
    "ensure_initialized",
    "join",
    "leave",
    "missing_ranks",
    "resolve",
    "spawn_local",
]


_TIMEOUT = timedelta(minutes=10)


def resolve(path: str) -> Callable[..., Any]:
    """``"package.module:function"`` → the function; ValueError if there is none."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"a function is named 'package.module:function', but got {path!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path!r} cannot be found: {error}") from error


def join(rank: int, world_size: int, store_path: str, timeout: timedelta = _TIMEOUT) -> None:
    """Make this process rank ``rank`` of a Gloo world that meets in the file ``store_path``, with one compute
    thread."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # a rank that is through at once must not leave while another still connects to it


def leave() -> None:
    """Destroy the process group, once nothing is on its way; Gloo aborts a process that exits with one."""
    drain()
    if dist.is_initialized():
        dist.destroy_process_group()


def ensure_initialized(timeout_s: float | None = None) -> tuple[int, int]:
    """Join the world that torchrun describes in the environment, if this process has not; returns (rank, world size).

    timeout_s: how long a rank may stand still (``heartbeat``); None: as asked before, else $MESHWRIGHT_TIMEOUT_S, else
    300.

    Uncaught errors are printed as ``first_error`` says. NCCL where CUDA is available (one device per local rank), else
    Gloo with one compute thread unless OMP_NUM_THREADS says otherwise. Without torchrun it is a world of one.
    """
    seconds = timeout_of(timeout_s)
    if not dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        # Two ranks cannot share a device under NCCL
        cuda = torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        if cuda:
            torch.cuda.set_device(local)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        backend = "nccl" if cuda else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            timeout = max(
                _TIMEOUT, timedelta(seconds=5 * seconds)
            )  # the heartbeat, which names who is lost, comes first
            store, rank, world_size = store_of_attempt(timeout) or (None, -1, -1)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    report_uncaught()
    begin_heartbeat(seconds, is_asked=timeout_s is not None)
    return dist.get_rank(), dist.get_world_size()


def _rank_main(
    path: str, rank: int, world_size: int, store: str, arguments: Sequence[Any], results: Connection
) -> None:
    try:
        join(rank, world_size, store)
        answer = ("ok", resolve(path)(*arguments))
    except BaseException as error:
        publish(error)
        first = first_error_of(error)
        answer = ("error", (rank, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        if first is not None and first.rank != rank:
            answer = ("error", (first.rank, f"{first.kind}: {first.message}\n{first.traceback}"))
    results.send(answer)
    if answer[0] == "error":
        os._exit(1)  # the peers may be gone: destroying the group could wait for them
    with suppress(EOFError):
        results.recv()  # all have their results: a rank that left at once would take its connections from the others
    leave()


@contextmanager
def _one_thread_environment() -> Iterator[None]:
    """Set OMP_NUM_THREADS=1 for child processes: OpenMP reads it before any of our code runs."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def spawn_local(path: str, num_ranks: int, arguments: Sequence[Any] = (), timeout_s: float | None = None) -> list[Any]:
    """Run ``"module:function"`` with ``arguments`` on ``num_ranks`` local Gloo ranks, one thread each; their results in
    rank order.

    The process group is up when the function starts (``dist.get_rank()``) and is destroyed after it. Raises
    RuntimeError with the traceback of the first rank that failed, after ending the others; TimeoutError after
    ``timeout_s``.
    """
    resolve(path)
    context = multiprocessing.get_context("spawn")
    results: list[Any] = [None] * num_ranks
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, _one_thread_environment():
        store = str(Path(folder) / "store")
        processes, pipes = [], {}
        for rank in range(num_ranks):
            reader, writer = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(path, rank, num_ranks, store, tuple(arguments), writer), daemon=True
            )
            process.start()
            writer.close()
            processes.append(process)
            pipes[reader] = rank
        try:
            _collect(pipes, results, None if timeout_s is None else monotonic() + timeout_s)
            for pipe in pipes:
                pipe.send("leave")
            for process in processes:
                process.join()
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                    process.join(5)
                if process.is_alive():
                    process.kill()
    return results


def _collect(pipes: dict[Connection, int], results: list[Any], deadline: float | None) -> None:
    waiting = dict(pipes)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - monotonic())
        ready = wait(list(waiting), left)
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word; was it killed for memory?") from None
            if kind == "error":
                raise RuntimeError(f"rank {value[0]} failed: {value[1]}")
            results[rank] = value


def await_all_ranks(purpose: str, timeout_s: float, store: Any = None, place: tuple[int, int] | None = None) -> None:
    """Return once every rank is here; raise AbsentRankError on all ranks that are, naming those that are not.

    purpose: what the ranks meet for, as the error says it. store and place = (rank, world size): by default the
    process group's.
    """
    rank, world = place or (dist.get_rank(), dist.get_world_size())
    missing = missing_ranks(purpose, timeout_s, store or world_store(), rank, world)
    if missing:
        names = ", ".join(map(str, missing))
        verb = "rank" if len(missing) == 1 else "ranks"
        raise MissingRankError(
            f"every rank takes part in {purpose}, but got no answer from {verb} {names} of {world} within"
            f" {timeout_s:.3g} s; start them again and check the network between the hosts"
        )


def missing_ranks(purpose: str, timeout_s: float, store: Any, rank: int, world: int) -> Sequence[int]:
    """The ranks that did not come within ``timeout_s``; rank 0 alone if it is the one that cannot be reached."""
    deadline = monotonic() + timeout_s
    try:
        # every rank calls in the same order, so equal numbers are the same call
        prefix = f"meshwright/{store.add(f'meshwright/calls/{rank}', 1)}/{purpose}"
        store.set(f"{prefix}/{rank}", b"here")
        if rank != 0:
            # rank 0 answers at the latest when its own time is over, which may start later than ours
            store.wait([f"{prefix}/missing"], timedelta(seconds=2 * timeout_s + 5))
            return [int(r) for r in json.loads(store.get(f"{prefix}/missing"))]
    except (RuntimeError, OSError):
        return [0]
    missing = []
    for other in range(1, world):
        try:
            store.wait([f"{prefix}/{other}"], timedelta(seconds=max(deadline - monotonic(), 0.001)))
        except RuntimeError:
            missing.append(other)
    store.set(f"{prefix}/missing", json.dumps(missing))
    return missing
