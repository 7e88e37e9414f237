"""Plain text for terminals: tables, wrapped lines, and numbers that read well."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

__all__ = [
    "bar_text",
    "bytes_text",
    "count_text",
    "group_runs",
    "magnitude_text",
    "rate_text",
    "seconds_text",
    "span_text",
    "stack_tables",
    "table",
    "wrap_lines",
]

T = TypeVar("T")
K = TypeVar("K")


def wrap_lines(text: str, width: int, first: str, rest: str | None = None) -> list[str]:
    """``text`` as lines of at most ``width`` columns behind the indents ``first`` and ``rest`` (default: the same)."""
    indent = first if rest is None else rest
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: str,
    width: int | None = None,
    shrink: int | None = None,
) -> list[str]:
    """Columns under a ruled head, indented by two. ``align``: "<" or ">" per column.

    Column ``shrink`` is wrapped (to 12 columns or more) where the table is wider than ``width``.
    """
    sizes = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    if shrink is not None and width is not None:
        over = 2 + sum(sizes) + 2 * (len(sizes) - 1) - width
        sizes[shrink] = max(12, sizes[shrink] - max(0, over))
    lines: list[str] = []
    for number, row in enumerate((head, *rows)):
        cells = [
            (textwrap.wrap(cell, size) or [""]) if k == shrink else [cell]
            for k, (cell, size) in enumerate(zip(row, sizes))
        ]
        for k in range(max(map(len, cells))):
            texts = [cell[k] if k < len(cell) else "" for cell in cells]
            padded = [t.rjust(size) if a == ">" else t.ljust(size) for t, size, a in zip(texts, sizes, align)]
            lines.append("  " + "  ".join(padded).rstrip())
        if number == 0:
            lines.append("  " + "─" * (sum(sizes) + 2 * (len(sizes) - 1)))
    return lines


def stack_tables(head: Sequence[str], rows: Sequence[Sequence[str]], align: str, width: int) -> list[str]:
    """A ``table``, or where that is wider than ``width`` several, one under the other, of about as many columns each.

    Each of them repeats the first column.
    """
    columns = len(head) - 1
    parts: list[list[str]] = []
    for count in range(1, columns + 1):
        each = -(-columns // count)
        chosen = [[0, *range(k, min(k + each, columns + 1))] for k in range(1, columns + 1, each)]
        parts = [
            table([head[k] for k in part], [[row[k] for k in part] for row in rows], "".join(align[k] for k in part))
            for part in chosen
        ]
        if all(len(line) <= width for part in parts for line in part):
            break
    return [line for number, part in enumerate(parts) for line in ([""] if number else []) + part]


def group_runs(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """Group neighbours of equal key: (key, items) of each run."""
    return [(value, list(run)) for value, run in groupby(items, key=key)]


def span_text(numbers: Iterable[int]) -> str:
    """``(0, 1, 2, 5)`` → "0–2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def bar_text(fraction: float, cells: int = 6) -> str:
    """``0.5`` → "███░░░"; above 1 it is full."""
    full = min(cells, max(0, round(fraction * cells)))
    return "█" * full + "░" * (cells - full)


def count_text(number: int, noun: str) -> str:
    """``(2, "batch")`` → "2 batches"."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def rate_text(number: float) -> str:
    """Three digits, or whole with separators from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def seconds_text(seconds: float) -> str:
    """``0.00123`` → "1.23 ms"."""
    if seconds >= 1 or seconds <= 0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def bytes_text(size: float) -> str:
    """``3 * 2**20`` → "3 MiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{rate_text(size / scale)} {unit}"
    return f"{size:.0f} B"


def magnitude_text(number: float) -> str:
    """``2_600_000`` → "2.6 M"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"
