"""What a stage of one chunk waits for: lower bounds on the seconds from its first forward to the end of its last
backward, as lines (slope, constant) of the way R behind it, there and back with all messages (``recurrence``).

A stage with q microbatches in flight does q forwards, then a backward and a forward in turn, m − q times, then q
backwards (zb-h1: I for B, and a W behind every I but the first k of stage k). With f, b = t − f and w its seconds, x
the message that a forward waits for and y that of a backward:

    the first backward ends no sooner than f + max(R, (q − 1) max(f, x)) + b
    m − q turns take (m − q) t, and as a message leaves when its receiver has ended the action before the last one
    (``simulate``), from forward to forward f + x each (zb-h1 with a W between: f + i + x), from backward to backward
    b + y (zb-h1: i + w + y, without a W y)
    the last q − 1 backwards take (q − 1) max(b, y) (zb-h1: those with a W i + w each), and the last forward's
    backward comes R after it
    m microbatches of which q are in flight need ⌈m / q⌉ ways of t + R (zb-h1: f + i + R)

where neighbouring sums may count t once, and each other part on its own. Under GPipe all forwards have gone through the
last stage before the first backward: t + R + (m − 1) (max(f, x) + max(b, y)). Under zb-h1 all W but the last k + 1 are
done before the last I.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from .families import is_split
from .table import Floats

__all__ = ["StageSeconds", "end_lines", "wait_lines"]


@dataclass(frozen=True, eq=False)
class StageSeconds:
    """The least seconds of stages: of all actions of a microbatch, of those on its way there and back, of forward and
    of backward alone; of the messages that a forward and that a backward waits for."""

    t: Floats
    trip: Floats
    forward: Floats
    backward: Floats
    entry: Floats | float
    returned: Floats | float


def wait_lines(schedule: str, m: int, q: int, ahead: int, of: StageSeconds) -> list[tuple[float, Floats]]:
    """The lines of a stage with q forwards before its first backward and (zb-h1) ``ahead`` stages before it."""
    t, trip, f, b, x, y = of.t, of.trip, of.forward, of.backward, of.entry, of.returned
    first = np.maximum(f, x)
    if schedule == "gpipe":
        return [(1.0, t + (m - 1) * np.maximum(t, first + np.maximum(b, y)))]
    split, turns = is_split(schedule), m - q
    bare = min(ahead, turns) if split else 0  # turns without a W
    full = turns - bare
    work, awaited = bare * trip + full * t, trip + x if split else f + x
    ends = max(0, min(q - 1, m - 1 - max(turns, ahead)) if split else q - 1) * b
    forwards = (q - 1) * first
    paced = trip + forwards + bare * (f + x) + full * awaited
    lines = [
        (float(ceil(m / q)), ceil(m / q) * trip),
        (1.0, trip + work + ends),
        (1.0, trip + bare * y + full * (b + y) + np.maximum((q - 1) * y, ends)),
        (1.0, paced),
        (0.0, np.maximum(paced, trip + forwards + work) + ends),
    ]
    if turns:
        one, others, more = (trip, bare - 1, full) if bare else (t, 0, full - 1)
        between = np.maximum(work, one + others * (f + x) + more * awaited)
        lines += [(2.0, trip + between), (1.0, trip + between + ends)]
    if split:
        lines.append((0.0, m * trip + max(0, m - 1 - ahead) * (t - trip)))
    return lines


def end_lines(schedule: str, m: int, q: int, of: StageSeconds) -> list[tuple[float, Floats]]:
    """The lines of a stage to the end of its last action, where a W follows its last backward."""
    if not is_split(schedule):
        return []
    turns = (m - q + 1) * of.t
    return [(1.0, turns + (q - 1) * of.backward), *([(2.0, turns)] if m > q else ())]
