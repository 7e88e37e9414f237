"""Parallel work in forked copies of this process, so that Python uses more than one core.

A fork has all data of its parent, so only the answer travels, through a pipe. A fork is safe if no other thread holds a
lock that the work needs and no accelerator is open. That holds for planning on the command line, but not for every
program, so nothing forks unless the caller asks for it (``workers`` of ``plan``). Where an accelerator is present and
this process has computed gradients, a child cannot: then the work is done here. Children may have children; on Linux
none outlives its parent.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Sequence
from math import isfinite
from typing import IO, Generic, TypeVar

import torch

__all__ = ["ForkedTask", "most_workers", "run_all"]

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # of prctl(2)


class _Pickler(pickle.Pickler):
    """Writes objects of ``common``, which both processes have, as their places in it."""

    def __init__(self, file: IO[bytes], common: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._places = {id(one): place for place, one in enumerate(common)}

    def persistent_id(self, one: object) -> int | None:
        return self._places.get(id(one))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], common: Sequence[object]) -> None:
        super().__init__(file)
        self._common = common

    def persistent_load(self, place: int) -> object:
        return self._common[place]


class ForkedTask(Generic[T]):
    """The answer of ``work()``: computed by a child process if ``apart``, else at once in this one.

    The child prints nothing and ignores Ctrl-C; its changes to data are lost, only its answer comes back. common:
    objects that the answer may refer to, and that are not copied.
    """

    def __init__(self, work: Callable[[], T], apart: bool, common: Sequence[object] = ()) -> None:
        self._work, self._common, self._child, self._answers = work, common, 0, -1
        self._received: list[bytes] = []
        self._answer: list[T] = []  # empty until it is known
        if not (apart and self._fork()):
            self._answer.append(work())

    def ready(self, timeout_s: float) -> bool:
        """Wait for the answer for so many seconds; True if it is known by then or the child is gone."""
        timeout = max(timeout_s, 0.0) if isfinite(timeout_s) else None
        return bool(self._answer or select.select([self._answers], [], [], timeout)[0])

    def result(self) -> T:
        """The answer, or what ``work`` raised. Where the child died without one, the work is done here."""
        if not self._answer:
            pickled = self._receive()
            self._answer.append(_Unpickler(io.BytesIO(pickled), self._common).load() if pickled else self._work())
        return self._answer[0]

    def drop(self) -> None:
        """Kill the child, if there is one: its answer is not needed any more."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            self._reap()

    def _fork(self) -> bool:
        """Start the child; True if there is one."""
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
            _die_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            torch.set_num_threads(1)  # OpenMP waits forever for the parent's threads, which are not here
            os.close(self._answers)
            torch.ones((), requires_grad=True).backward()  # fails where autograd's threads stayed with the parent
            with os.fdopen(into, "wb") as pipe:
                _Pickler(pipe, self._common).dump(self._work())
            status = 0
        finally:
            os._exit(status)  # whatever happened: the parent's handlers and buffers are not the child's

    def _receive(self) -> bytes:
        """The bytes that the child wrote; none if it failed. A second call goes on where an interrupted one ended."""
        while chunk := os.read(self._answers, 2**20):
            self._received.append(chunk)
        return b"" if self._reap() else b"".join(self._received)

    def _reap(self) -> int:
        """Close the pipe and wait for the child; returns its exit status."""
        os.close(self._answers)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return status


def _die_with_parent() -> None:
    """Have Linux kill this child where its parent ends, even if that was killed itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_all(works: Sequence[Callable[[], T]], common: Sequence[object] = ()) -> list[T]:
    """The results of all of these: this process computes the first one, and a child each of the others. common: as in
    ``ForkedTask``."""
    others: list[ForkedTask[T]] = []
    try:
        for work in works[1:]:
            others.append(ForkedTask(work, True, common=common))
        first = works[0]()
        return [first, *(other.result() for other in others)]
    finally:
        for other in others:
            other.drop()


def most_workers() -> int:
    """The number of processes that may plan at once: 1 where forks are not available."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") and hasattr(os, "fork") else 1
