"""Line charts on two logarithmic axes as SVG text, for pages that show how something grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

__all__ = ["Panel", "chart"]

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 300, 64, 34, 16, 48
COLOURS = ("#0b6fa4", "#c2410c", "#3f7d20", "#7c3aed", "#8a6d00")


@dataclass(frozen=True)
class Panel:
    """One chart: lines by name, each a list of (x, y) > 0; x values in ``ticks`` are written below the axis."""

    title: str
    across: str
    upwards: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def chart(panels: Sequence[Panel]) -> str:
    """The panels side by side as one SVG document."""
    body = "".join(f'<g transform="translate({index * WIDTH},0)">{_panel(one)}</g>' for index, one in enumerate(panels))
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    style = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.axis{stroke:#999}.grid{stroke:#e5e5e5}"
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{background}{body}</svg>\n'


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    low_x, high_x = log10(min(xs)), log10(max(xs))
    low_y, high_y = floor(log10(min(ys))), ceil(log10(max(ys)) + 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - low_x) / max(high_x - low_x, 1e-9)
        up = (log10(y) - low_y) / max(high_y - low_y, 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [f'<text class="title" x="{LEFT}" y="18">{panel.title}</text>']
    for power in range(low_y, high_y + 1):
        _, y = at(xs[0], 10.0**power)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for tick in xs:
        x, _ = at(tick, 10.0**low_y)
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:,.0f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{panel.across}</text>')
    turn = f'transform="rotate(-90 14 {HEIGHT / 2})"'
    out.append(f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" {turn}>{panel.upwards}</text>')
    for index, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [at(x, y) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        if len(panel.lines) > 1:
            y = TOP + 14 * (index + 1)
            out.append(f'<text x="{LEFT + 8}" y="{y}" style="fill:{colour}">{name}</text>')
    return "".join(out)
