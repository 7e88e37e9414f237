"""What a command shows beside its answer: how wide the terminal is, and a bar on stderr while it works."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar", "width"]


def width() -> int:
    """Columns to write to."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


@contextlib.contextmanager
def progress_bar(shown: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that is gone afterwards; nothing where stderr is no terminal or it is not
    to be ``shown``. Gives progress(pass, fraction)."""
    if not shown or not sys.stderr.isatty():
        yield lambda name, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(name: str, fraction: float) -> None:
            bar.update(task, description=name, total=1.0 if fraction > 0 else None, completed=min(fraction, 1.0))

        yield report
