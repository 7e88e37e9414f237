"""A heartbeat beside the training of each rank: whoever stands still or is gone is named, and the job ends.

A killed process closes its connections, which its peers notice at once (``first_error``). One that is stopped, whose
host is cut off, or that waits for something that never comes, closes none. So a thread of each rank writes a beat into
the store in which the ranks met: a count, and what its rank does. Rank 0 reads the beats of all, the others that of
rank 0. If a beat stays away for ``timeout_s``, or a rank is in the same action of a step for so long (three times so
long before its first step is through), one rank writes a verdict; not while it is in the caller's own code, where it
waits for nobody, so that a rank may end before the others. Every rank that reads a verdict writes its action and the
Python stacks of its threads to ``hang/rank-N.txt`` in the run's folder, prints one line, and ends its process: a thread
cannot wake another from a collective.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import math
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import PeerError
from .first_error import publish_through, remember_rank0, world_store
from .progress import PROGRESS

__all__ = ["begin_heartbeat", "timeout_of"]

DEFAULT_TIMEOUT_S = 300.0
FIRST_STEP = 3  # times the time-out before the first step is through: it compiles and allocates
_STEPS = {"train_step", "forward_backward", "optimizer_step", "flush", "__call__"}
_BEAT, _VERDICT = "meshwright/beat", "meshwright/verdict"
_BEATS_PER_TIMEOUT = 20
_MAX_INTERVAL_S = 1.0


def timeout_of(asked: float | None) -> float:
    """``asked``, else $MESHWRIGHT_TIMEOUT_S, else 300 seconds. ValueError for what is not above 0."""
    text = os.environ.get("MESHWRIGHT_TIMEOUT_S")
    name, value = ("timeout_s", asked) if asked is not None or text is None else ("MESHWRIGHT_TIMEOUT_S", text)
    try:
        seconds = DEFAULT_TIMEOUT_S if value is None else float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is the seconds that a rank may stand still, above 0, but got {value!r}")
    return seconds


def begin_heartbeat(timeout_s: float, is_asked: bool = True) -> None:
    """Watch over the ranks of this world from now on. Where that is so already, go on, with this time-out if it was
    asked for."""
    global _running
    group = dist.group.WORLD
    if dist.get_world_size() == 1:
        return
    if _running is not None and _running.is_alive() and _running.group is group:
        _running.timeout_s = timeout_s if is_asked else _running.timeout_s
        return
    if _running is None:
        atexit.register(_end)
    _running = _Heartbeat(group, timeout_s)
    _running.start()


def _end() -> None:
    """A thread that is in a call of C++ while Python ends would abort the process."""
    if _running is not None:
        _running.over.set()
        _running.join(5.0)
        _await_idle_threads()


def _await_idle_threads(most_s: float = 1.0) -> None:
    """Wait until no other thread of this process has anything to do. One of Gloo's drops the last hold on a tensor
    after it has told whoever waited for it, and asks for Python then: 2 of 120 processes on a busy machine aborted
    so."""
    until, mine = time.monotonic() + most_s, str(threading.get_native_id())
    time.sleep(0.01)
    while time.monotonic() < until:
        tasks = [task for task in Path("/proc/self/task").glob("*") if task.name != mine]
        if not any(_runs(task) for task in tasks):
            return
        time.sleep(0.005)


def _runs(task: Path) -> bool:
    with suppress(OSError):  # it has just ended
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


class _Heartbeat(threading.Thread):
    """group: the world that it watches over, as long as that is the world."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.group, self.timeout_s, self.over = group, timeout_s, threading.Event()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.store = world_store().clone()  # a connection of its own: a call on the other one may wait for long
        self.beats, self.knows_rank0 = 0, False
        self.moved, self.count = time.monotonic(), -1
        self.contact = time.monotonic()
        watched = range(1, self.world) if self.rank == 0 else (0,)
        self.seen: dict[int, tuple[str, float]] = {rank: ("", time.monotonic()) for rank in watched}

    def run(self) -> None:
        """Beat, and look, until the world ends or a verdict ends the process."""
        threading.Thread(target=self._guard, name="heartbeat of the store", daemon=True).start()
        while not self.over.wait(self._interval_s) and self._is_of_this_world():
            with suppress(RuntimeError, OSError):
                verdict = self._look()
                self.contact = time.monotonic()
                if verdict is not None and self._is_of_this_world():
                    self._end_job(verdict)

    def _guard(self) -> None:
        """End the job if the store cannot be reached: a call of it may wait for ever."""
        while not self.over.wait(self._interval_s) and self._is_of_this_world():
            silent_s = time.monotonic() - self.contact
            if PROGRESS.calls and silent_s > self.timeout_s + 2 * self._interval_s:
                where = "the store in which the ranks met, as a rule in rank 0 or on its host,"
                self._end_job(
                    f"{where} gives no answer for {silent_s:.0f} s (stopped, or its host cut off)", quiet=True
                )

    @property
    def _interval_s(self) -> float:
        return min(_MAX_INTERVAL_S, self.timeout_s / _BEATS_PER_TIMEOUT)

    def _is_of_this_world(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self.group

    def _look(self) -> str | None:
        """Beat, and read the beats of others; the verdict, if there is one."""
        now = time.monotonic()
        if PROGRESS.count != self.count:
            self.moved, self.count = now, PROGRESS.count
        self.beats += 1
        self.store.set(
            f"{_BEAT}/{self.rank}", json.dumps([self.beats, PROGRESS.told(), now - self.moved, not PROGRESS.calls])
        )
        self.knows_rank0 = self.knows_rank0 or remember_rank0(self.store)
        if self.store.check([_VERDICT]):
            return str(self.store.get(_VERDICT).decode())
        for rank, (last, when) in self.seen.items():
            beat = self._beat_of(rank)
            self.seen[rank] = (beat, now) if beat != last else (last, when)
        if not PROGRESS.calls:
            return None
        lost = [rank for rank, (_, when) in self.seen.items() if now - when > self.timeout_s]
        if lost:
            return self._decided(self._lost(lost[0], now - self.seen[lost[0]][1]))
        times = FIRST_STEP if PROGRESS.steps == 0 else 1
        if PROGRESS.calls[-1] in _STEPS and now - self.moved > times * self.timeout_s:
            return self._decided(self._stuck())
        return None

    def _beat_of(self, rank: int) -> str:
        key = f"{_BEAT}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _lost(self, rank: int, silent_s: float) -> str:
        beat = self._beat_of(rank)
        did = f"; its last known action: {json.loads(beat)[1]}" if beat else ""
        return f"rank {rank} gives no sign of life for {silent_s:.0f} s (stopped, or its host cut off){did}"

    def _stuck(self) -> str:
        """Who keeps this rank waiting: a rank without a beat, else one that is in no call of ours, else the one that
        stands still for longest."""
        before = [self._beat_of(rank) for rank in range(self.world)]
        time.sleep(4 * self._interval_s)
        told = list[tuple[bool, float, int, str]]()
        for rank, beat in enumerate(before):
            if rank != self.rank and beat == self._beat_of(rank):
                return self._lost(rank, json.loads(beat)[2] if beat else self.timeout_s)
            if beat:
                _, action, silent_s, outside = json.loads(beat)
                told.append((outside, silent_s, rank, action))
        _, silent_s, rank, action = max(told)
        return f"rank {rank} stands still for {silent_s:.0f} s, {action}"

    def _decided(self, verdict: str) -> str:
        """The verdict that counts for all: the first one."""
        return str(self.store.compare_set(_VERDICT, "", verdict).decode())

    def _end_job(self, verdict: str, quiet: bool = False) -> None:
        """Tell what this rank does, and end its process. quiet: the store cannot be told."""
        folder = Path(PROGRESS.folder or Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}") / "hang"
        file, since_s = folder / f"rank-{self.rank}.txt", time.monotonic() - self.moved
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with open(file, "w") as out:
                out.write(f"{verdict}\nrank {self.rank}: {PROGRESS.told()}; {since_s:.1f} s ago\n\n")
                out.flush()
                faulthandler.dump_traceback(out, all_threads=True)
        if not quiet:
            with suppress(RuntimeError, OSError, ValueError):
                publish_through(self.store, PeerError(verdict))
        if not PROGRESS.told_why:
            PROGRESS.told_why = True
            line = f"meshwright: rank {self.rank} stops, because {verdict}; stacks are in {file}\n"
            print(line, file=sys.stderr, end="", flush=True)
        if self.rank == 0:  # as a rule the store is in its process: the others are to read the verdict
            time.sleep(3 * self._interval_s)
        os._exit(1)


_running: _Heartbeat | None = None
