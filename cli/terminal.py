"""The terminal of a command: its width, a progress bar on stderr, and a stdout that has answers only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from time import perf_counter

__all__ = ["answers_only", "progress_bar", "width"]

_QUICK_S, _PAUSE_S = 2.0, 10.0  # between lines of progress: of different passes, of the same one


def width() -> int:
    """Columns to write to."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


@contextlib.contextmanager
def progress_bar(shown: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that is gone afterwards; where stderr is no terminal, a line for what takes a while; nothing if
    it is not to be ``shown``. Gives progress(pass, fraction)."""
    if not shown:
        yield lambda name, fraction: None
        return
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(name: str, fraction: float) -> None:
            bar.update(task, description=name, total=1.0 if fraction > 0 else None, completed=min(fraction, 1.0))

        yield report


def _lines() -> Callable[[str, float], None]:
    """progress(pass, fraction) that writes "[12 s] floors 40 %": for each pass, and within one now and then, but
    nothing in the first seconds."""
    begin = last = perf_counter()
    said = ""

    def report(name: str, fraction: float) -> None:
        nonlocal last, said
        now = perf_counter()
        if now - last < (_PAUSE_S if name == said else _QUICK_S):
            return
        last, said = now, name
        share = f" {100 * min(fraction, 1.0):.0f} %" if fraction > 0 else ""
        print(f"[{now - begin:.0f} s] {name}{share}", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def answers_only() -> Iterator[None]:
    """Send stdout to stderr meanwhile: prints of a user's module, and those of a solver's library, which writes to the
    file descriptor."""
    with contextlib.redirect_stdout(sys.stderr):
        _flush()
        try:
            stdout_copy = os.dup(1)
        except OSError:  # nobody has a stdout
            yield
            return
        try:
            os.dup2(2, 1)
            yield
        finally:
            _flush()
            os.dup2(stdout_copy, 1)
            os.close(stdout_copy)


def _flush() -> None:
    """Flush the stdout buffers of Python and C."""
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    ctypes.CDLL(None).fflush(None)
