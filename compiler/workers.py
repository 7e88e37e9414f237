"""Work in a forked copy of this process while this one goes on: a second core for Python.

A fork has all that was found so far, so only the answer travels, through a pipe. It is safe where no other thread holds
what the work needs and no accelerator is open: the command line's planning, but not just any program, which is why
nobody forks without being asked (``workers`` of ``plan``).
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

__all__ = ["ForkedTask", "run_all", "usable_cores"]

LOW_PRIORITY = 10  # of ``nice``: a tenth of the share

T = TypeVar("T")


class ForkedTask(Generic[T]):
    """The answer of ``work()``, which must not depend on who asks: made by a child if ``apart``, else here and now.

    The child prints nothing and outlives Ctrl-C; what it changes but does not return is lost. later: whether its answer
    is wanted later than what goes on here, so that this process comes first where cores are few.
    """

    def __init__(self, work: Callable[[], T], apart: bool, later: bool = False) -> None:
        self._work, self._later, self._child, self._answers = work, later, 0, -1
        self._said: list[bytes] = []
        self._found: list[T] = []
        if not (apart and self._fork()):
            self._found.append(work())

    def result(self) -> T:
        """The answer, or what ``work`` raised. Where the child died without one, the work is done here."""
        if not self._found:
            answer = self._received()
            self._found.append(pickle.loads(answer) if answer else self._work())
        return self._found[0]

    def drop(self) -> None:
        """End the child, if there is one: nobody wants its answer."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            self._over()

    def _fork(self) -> bool:
        """Whether there is a child."""
        self._answers, into = os.pipe()
        try:
            self._child = os.fork()
        except OSError:  # no memory, or no more processes
            os.close(self._answers)
            os.close(into)
            return False
        if self._child:
            os.close(into)
            return True
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            torch.set_num_threads(1)  # OpenMP waits forever for the parent's threads, which are not here
            os.nice(LOW_PRIORITY if self._later else 0)
            os.close(self._answers)
            with os.fdopen(into, "wb") as pipe:
                pipe.write(pickle.dumps(self._work(), protocol=pickle.HIGHEST_PROTOCOL))
            status = 0
        finally:
            os._exit(status)  # whatever happened: the parent's handlers and buffers are not the child's

    def _received(self) -> bytes:
        """All that the child says; nothing where it failed. Whoever is interrupted here may come again."""
        while chunk := os.read(self._answers, 2**20):
            self._said.append(chunk)
        return b"" if self._over() else b"".join(self._said)

    def _over(self) -> int:
        """Close the pipe; the status with which the child ended."""
        os.close(self._answers)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return status


def run_all(works: Sequence[Callable[[], T]]) -> list[T]:
    """What all of these give, the first of them made here while a child each makes the others."""
    others: list[ForkedTask[T]] = []
    try:
        for work in works[1:]:
            others.append(ForkedTask(work, True))
        first = works[0]()
        return [first, *(other.result() for other in others)]
    finally:
        for other in others:
            other.drop()


def usable_cores() -> int:
    """Processes that may plan at once: 1 where forks are not safe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") and hasattr(os, "fork") else 1
