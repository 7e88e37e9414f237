"""Draws the pictures of schedules and collectives under ``docs/images``, from what the code does: ``make pictures``.

    schedules.svg     every family on the clock, four stages and eight microbatches, with its idle time
    primitives.svg    what four devices hold before and after each collective, with its rounds and bytes
    all-reduce.svg    the messages of each all-reduce algorithm, round by round, with its rounds and bytes

``python docs/pictures.py --check`` writes nothing; exit status 1 if a picture is not what it would be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.compiler.pipeline.families import generate, known_schedules
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.costmodel.algorithms import steps_of
from meshwright.runtime.collectives.rounds import ALGORITHMS, CollectiveSchedule, schedule_of

IMAGES = Path(__file__).with_name("images")
STAGES, MICROBATCHES, DEVICES = 4, 8, 4
#: Okabe and Ito's colours: of devices, and of forward, backward, input-gradient and weight-gradient
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
KINDS = {"F": "#56b4e9", "B": "#e69f00", "I": "#e69f00", "W": "#009e73"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b2026}.quiet{fill:#57606a}.title{font-weight:600}.white{fill:#fff}"
    ".dark{fill:#10151a}.empty{fill:none;stroke:#8c96a0;stroke-dasharray:2 2}.idle{fill:#8c96a033}"
    ".line{stroke:#57606a;stroke-width:1.4;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#e6eaee}.quiet{fill:#a3adb8}.line{stroke:#a3adb8}.dark{fill:#10151a}}"
)
#: collective → the algorithm whose messages are played
PRIMITIVES = {
    "all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "all_to_all": "all_to_all",
    "broadcast": "ring", "reduce": "ring", "scatter": "direct", "gather": "direct",
}  # fmt: skip


def text(x: float, y: float, words: str, look: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{look}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "", look: str = "") -> str:
    """A rectangle in a colour, or of a class."""
    paint = f'fill="{fill}"' if fill else f'class="{look}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" {paint}/>'


def document(parts: list[str], width: float, height: float, title: str) -> str:
    """A whole picture."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title><style>{STYLE}</style>'
    return head + marker + "\n".join(["", *parts]) + "</svg>\n"


def cost(kind: str, algorithm: str) -> str:
    """The α–β cost of a collective of four devices."""
    steps = steps_of(kind, algorithm, DEVICES)
    return f"{steps.rounds} α + {f'{steps.sent:g} ' if steps.sent != 1 else ''}d β"


# ---- schedules


def schedules() -> str:
    """Forward takes one second of a stage, backward two, in halves where a family splits it; messages are free."""
    parts, y, scale, left = [box(10, 8, 12, 12, KINDS["F"]), text(28, 18, "forward", "quiet")], 44.0, 17.0, 62
    for k, (name, kind) in enumerate((("backward, or its input gradient", "B"), ("weight gradient", "W"))):
        parts += [box(100 + 230 * k, 8, 12, 12, KINDS[kind]), text(118 + 230 * k, 18, name, "quiet")]
    parts += [box(470, 8, 12, 12, look="idle"), text(488, 18, "idle", "quiet")]
    width = 0.0
    for family in known_schedules():
        schedule = generate(family, STAGES, MICROBATCHES)
        virtual = schedule.num_virtual
        clock = simulate(schedule, [STAGES / virtual] * virtual, [2 * STAGES / virtual] * virtual)
        idle = "none from step to step" if family == "pipedream" else f"{clock.bubble_fraction:.1%} idle"
        parts.append(text(10, y, f"{family}: {idle}", "title"))
        for stage, row in enumerate(clock.timeline):
            top = y + 8 + 22 * stage
            parts.append(text(10, top + 14, f"stage {stage}", "quiet"))
            parts.append(box(left, top, clock.makespan_s * scale, 20, look="idle"))
            for start, end, action in row:
                at, size = left + start * scale, (end - start) * scale
                parts.append(box(at + 0.5, top, size - 1, 20, KINDS[action.kind]))
                if size > 9:
                    parts.append(text(at + size / 2, top + 14, f"{action.microbatch}", "dark", "middle"))
        width = max(width, left + clock.makespan_s * scale + 10)
        y += 22 * STAGES + 34
    return document(parts, width, y - 10, "Pipeline schedules on the clock")


# ---- collectives


Held = list[list[frozenset[int]]]  # device → segment → whose values are in it


def before(kind: str, segments: int) -> Held:
    """What devices hold at first."""
    none, held = frozenset[int](), list[list[frozenset[int]]]()
    for device in range(DEVICES):
        mine = frozenset([device])
        if kind in ("all_gather", "gather"):
            held.append([mine if k == device else none for k in range(segments)])
        else:
            held.append([mine if kind not in ("broadcast", "scatter") or device == 0 else none] * segments)
    return held


def after(schedule: CollectiveSchedule, first: Held) -> Held:
    """What they hold when all messages have arrived, of what the collective promises."""
    held = [list(row) for row in first]
    source = [list(row) for row in first] if schedule.kind == "all_to_all" else held
    for sends in schedule.rounds:
        payloads = [source[m.source][m.first : m.last] for m in sends]
        for m, payload in zip(sends, payloads, strict=True):
            for k, value in enumerate(payload):
                here = held[m.target][m.into + k]
                held[m.target][m.into + k] = here | value if m.add else value
    kept = {
        "reduce_scatter": lambda device, k: k == device, "scatter": lambda device, k: k == device,
        "reduce": lambda device, k: device == 0, "gather": lambda device, k: device == 0,
    }.get(schedule.kind, lambda device, k: True)  # fmt: skip
    return [[x if kept(d, k) else frozenset() for k, x in enumerate(row)] for d, row in enumerate(held)]


def blocks(held: Held, x: float, y: float) -> Iterator[str]:
    """A column of segments per device."""
    for device, row in enumerate(held):
        yield text(x + 26 * device + 11, y - 5, f"{device}", "quiet", "middle")
        for k, owners in enumerate(row):
            at, top = x + 26 * device, y + 20 * k
            if not owners:
                yield box(at, top, 22, 17, look="empty")
            elif len(owners) == 1:
                yield box(at, top, 22, 17, COLOURS[min(owners)])
                yield text(at + 11, top + 13, f"{min(owners)}", "dark", "middle")
            else:
                yield box(at, top, 22, 17, "#3a434d")
                yield text(at + 11, top + 13, "Σ", "white", "middle")


def primitives() -> str:
    """Two collectives in a row."""
    parts = []
    for number, (kind, algorithm) in enumerate(PRIMITIVES.items()):
        x, y = 10 + 330 * (number % 2), 18 + 140 * (number // 2)
        schedule = schedule_of(kind, algorithm, DEVICES)
        first = before(kind, schedule.segments)
        parts.append(text(x, y, kind, "title"))
        parts.append(text(x + 120, y, f"{cost(kind, algorithm)}  ({algorithm.replace('_', ' ')})", "quiet"))
        parts += [*blocks(first, x, y + 26), *blocks(after(schedule, first), x + 160, y + 26)]
        middle = y + 26 + 10 * schedule.segments
        parts.append(f'<path class="line" marker-end="url(#tip)" d="M{x + 116} {middle:g}H{x + 148}"/>')
    return document(parts, 660, 150 * (len(PRIMITIVES) // 2) - 20, "What devices hold before and after a collective")


def all_reduce() -> str:
    """A row for each algorithm, a panel for each of its rounds: who sends to whom."""
    parts, y, most = [], 18.0, 0
    for algorithm in ALGORITHMS["all_reduce"]:
        schedule = schedule_of("all_reduce", algorithm, DEVICES)
        parts.append(text(10, y, algorithm.replace("_", " "), "title"))
        parts.append(text(200, y, cost("all_reduce", algorithm), "quiet"))
        most = max(most, len(schedule.rounds))
        for number, sends in enumerate(schedule.rounds):
            left, top = 14 + 130 * number, y + 18
            for m in sends:
                a, b = top + 24 * m.source + 8, top + 24 * m.target + 8
                dash = "" if m.add else ' stroke-dasharray="4 3"'
                parts.append(
                    f'<path class="line"{dash} marker-end="url(#tip)" d="M{left + 18} {a:g}L{left + 84} {b:g}"/>'
                )
            for device in range(DEVICES):
                for at in (left, left + 86):
                    parts.append(box(at, top + 24 * device, 17, 17, COLOURS[device]))
                    parts.append(text(at + 8.5, top + 24 * device + 13, f"{device}", "dark", "middle"))
        y += 24 * DEVICES + 46
    parts.append(text(10, y, "solid: the receiver adds what comes; dashed: it takes it as it is", "quiet"))
    return document(parts, max(560, 14 + 130 * most), y + 12, "All-reduce algorithms, round by round")


def write_or_check(documents: Mapping[Path, str]) -> int:
    """Write the files, or with ``--check`` compare them: 1 if one is not what it would be."""
    wrong = 0
    for path, made in documents.items():
        if "--check" not in sys.argv:
            path.write_text(made)
        elif not path.exists() or path.read_text() != made:
            wrong += 1
            print(f"{path} is not what it would be; run make pictures")
    return 1 if wrong else 0


def main() -> int:
    """Write the pictures, or check them."""
    drawn = {"schedules": schedules(), "primitives": primitives(), "all-reduce": all_reduce()}
    return write_or_check({IMAGES / f"{name}.svg": made for name, made in drawn.items()})


if __name__ == "__main__":
    sys.exit(main())
