"""The communication threads of a process: what needs several rounds makes progress while the main thread computes.

There are ``LANES`` of them. On one lane first come is first served; what is on different ones goes on at once, so it
needs process groups of its own. torch's waits release the interpreter lock. Errors are raised in ``wait``.

A process must not end while a thread is inside of such a wait: taking the lock then ends the thread, and C++ answers
with ``terminate``. So who leaves waits for what is on its way (``drain``), at exit at the latest.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic

__all__ = ["LANES", "Job", "drain", "submit"]

LANES = 2
_EXIT_TIMEOUT_S = 10.0


class Job:
    """A call that the thread makes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return once the call has; raises what it raised."""
        self.is_done()
        if self._error is not None:
            raise self._error

    def is_done(self, timeout_s: float | None = None) -> bool:
        """Wait up to ``timeout_s`` seconds (None: as long as it takes); True if the call has returned or raised."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


class _Worker:
    def __init__(self, lane: int) -> None:
        self.process = os.getpid()
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        threading.Thread(target=self._serve, name=f"meshwright-communication-{lane}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.jobs.get()._run()


_workers: dict[int, _Worker] = {}


def submit(call: Callable[[], object], lane: int = 0) -> Job:
    """Have the thread of a lane make ``call`` once it is through with the earlier ones. To be called from one
    thread."""
    assert 0 <= lane < LANES, lane
    worker = _workers.get(lane)
    if worker is None or worker.process != os.getpid():  # a fork has no threads
        worker = _workers[lane] = _Worker(lane)
    job = Job(call)
    worker.jobs.put(job)
    return job


def drain(timeout_s: float = _EXIT_TIMEOUT_S) -> None:
    """Wait for what was submitted, so many seconds at the most: of who has died nothing comes."""
    end = monotonic() + timeout_s
    mine = [lane for lane, worker in _workers.items() if worker.process == os.getpid()]
    for last in [submit(lambda: None, lane) for lane in mine]:
        last.is_done(max(end - monotonic(), 0.0))


atexit.register(drain)
