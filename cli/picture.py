"""The pictures that ``meshwright show`` writes: a page and a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..compiler.ir.graph import Graph
    from ..compiler.plan.plan import Plan

__all__ = ["add_picture_options", "asks_for_pictures", "write_pictures"]


def add_picture_options(show: argparse.ArgumentParser, target_help: str) -> None:
    """Add the options of pictures to a command that has a plan."""
    show.add_argument(
        "--html", type=Path, metavar="FILE", help="write the picture of the plan, a page that needs no network"
    )
    show.add_argument("--trace", type=Path, metavar="FILE", help="write the step as a trace for Perfetto")
    show.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a measured step, as Parallel.trace writes it, for --html and --trace",
    )
    show.add_argument(
        "--with", dest="others", type=Path, action="append", default=[], metavar="PLAN",
        help="another plan to compare with on the page; repeatable",
    )  # fmt: skip
    show.add_argument(
        "--target", metavar="TARGET", help=f"the model, with which layers on the page say why: {target_help}"
    )


def asks_for_pictures(arguments: argparse.Namespace) -> bool:
    """True if the command is to write a page or a trace. ValueError for options that only these have, alone."""
    asked = bool(arguments.html or arguments.trace)
    alone = [
        f"--{name}"
        for name, given in (("measured", arguments.measured), ("with", arguments.others), ("target", arguments.target))
        if given and not asked
    ]  # fmt: skip
    if alone:
        raise ValueError(f"only a picture takes {' and '.join(alone)}, but got no --html and no --trace; add one")
    return asked


def write_pictures(
    plan: Plan,
    arguments: argparse.Namespace,
    load: Callable[[Path], Plan],
    captured: Callable[[str], Graph],
) -> None:
    """Write what ``arguments`` ask for, and say so."""
    from ..compiler.pipeline.measured import MeasuredStep

    trace = MeasuredStep.load(arguments.measured) if arguments.measured else None
    if arguments.html:
        graph = captured(arguments.target) if arguments.target else None
        plan.to_html(arguments.html, graph=graph, trace=trace, others=[load(path) for path in arguments.others])
        print(f"wrote {arguments.html}", file=sys.stderr)
    if arguments.trace:
        plan.to_chrome_trace(arguments.trace, trace=trace)
        print(f"wrote {arguments.trace}", file=sys.stderr)
