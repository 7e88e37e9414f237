"""A schedule as text: a row per round, a column per device, in each cell what the device takes.

+2 ← 3       adds segment 2 of device 3 to its own         =0-1 ← 3     puts segments 0 and 1 of device 3 there
+0 ← 1,2     from several devices                          2=0 ← 1      segment 0 of device 1 in place of segment 2
"""

from __future__ import annotations

from collections.abc import Sequence

from .rounds import CollectiveSchedule, SegmentMessage

__all__ = ["format_rounds"]


def format_rounds(schedule: CollectiveSchedule) -> str:
    """The rounds of ``schedule``."""
    p = schedule.size
    heads = ["round", *(f"device {i}" for i in range(p))]
    rows = [
        [str(number), *(_cell([m for m in sends if m.target == i]) for i in range(p))]
        for number, sends in enumerate(schedule.rounds, 1)
    ]
    widths = [max(len(row[k]) for row in [heads, *rows]) for k in range(p + 1)]
    counts = [(p, "device"), (schedule.segments, "segment"), (len(schedule.rounds), "round")]
    sizes = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
    title = f"{schedule.kind} by {schedule.algorithm}: {sizes}"
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
    return "\n".join([title, *lines])


def _cell(messages: Sequence[SegmentMessage]) -> str:
    sources: dict[str, list[int]] = {}
    for m in messages:
        last = "" if m.last == m.first + 1 else f"-{m.last - 1}"
        where = "" if m.into == m.first else str(m.into)
        sources.setdefault(f"{where}{'+' if m.add else '='}{m.first}{last}", []).append(m.source)
    return "; ".join(f"{what} ← {','.join(map(str, sorted(of)))}" for what, of in sources.items()) or "·"
