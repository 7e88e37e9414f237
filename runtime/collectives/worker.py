"""The communication thread of a process: what needs several rounds makes progress while the main thread computes.

First come, first served; torch's waits release the interpreter lock. Errors are raised in ``wait``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Job", "submit"]


class Job:
    """A call that the thread makes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return once the call has; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

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
    def __init__(self) -> None:
        self.process = os.getpid()
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        threading.Thread(target=self._serve, name="meshwright-communication", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.jobs.get()._run()


_worker: _Worker | None = None


def submit(call: Callable[[], object]) -> Job:
    """Have the thread make ``call`` once it is through with the earlier ones. To be called from one thread."""
    global _worker
    if _worker is None or _worker.process != os.getpid():  # a fork has no threads
        _worker = _Worker()
    job = Job(call)
    _worker.jobs.put(job)
    return job
