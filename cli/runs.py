"""``meshwright report``: the log of a run, read again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .inputs import writable
from .terminal import width

__all__ = ["add_report"]


def add_report(commands: Any) -> None:
    """Add ``report`` to the commands."""
    report = commands.add_parser("report", help="sum up the log of a run: predicted against measured, what was slow")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a MetricsLogger")
    report.add_argument("--html", type=Path, metavar="FILE", help="write the run as a page that needs no network")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    from ..compiler.report.run_log import RunLog

    log = RunLog.load(arguments.run_dir)
    if arguments.html is not None:
        writable(arguments.html)
        log.to_html(arguments.html)
        print(f"wrote {arguments.html}", file=sys.stderr)
    print(json.dumps(log.to_json()) if arguments.json else log.summary(width=width()))
