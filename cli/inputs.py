"""Inputs of commands (numbers, plans, clusters, models, files), and how a command fails: in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from ..compiler.ir.graph import Graph
    from ..compiler.plan.plan import Plan
    from ..costmodel.cluster import Cluster

__all__ = [
    "BAD_INPUT", "built_in_target", "captured", "cluster", "fail", "load", "positive", "pricing_target", "seconds",
    "writable",
]  # fmt: skip

BAD_INPUT = 2


def fail(message: str, status: int) -> int:
    """Print an error in one line; the exit status."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines) if sum(map(len, lines)) < 2000 else lines[0]
    print(f"meshwright: {text}", file=sys.stderr)
    return status


def positive(text: str) -> int:
    """A whole number of 1 or more, for a parser of arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of 1 or more, but got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A positive number of seconds, for a parser of arguments."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds, but got {text!r}")
    return value


def load(path: Path) -> Plan:
    """The plan in a file."""
    from ..compiler.plan.plan import Plan

    return Plan.load(path)


def captured(target: str, progress: Callable[[str, float], None]) -> Graph:
    """The captured model of a TARGET."""
    from ..compiler.frontend.capture import capture
    from .targets import build_target

    progress("building", 0.0)
    built = build_target(target)
    progress("capture", 0.0)
    return capture(built.model, built.args, built.kwargs)


def cluster(text: str) -> Cluster:
    """The cluster that an argument names; what is doubtful about it is said."""
    from ..costmodel.cluster import Cluster

    cluster = Cluster.parse(text)
    for line in cluster.validate():
        print(f"note: {line}", file=sys.stderr)
    return cluster


def writable(path: Path) -> None:
    """ValueError unless a file can be written there: said before the work, not after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(
            f"an output is a file in a folder that can be written to, but got {str(path)!r}; choose another"
        )


def pricing_target(plan: Plan, given: str | None) -> str:
    """``built_in_target`` for who prices the plan; ValueError if there is none."""
    target = built_in_target(plan, given)
    if target is None:
        raise ValueError("a plan is priced by its model, but got no --target, and the plan names no built-in one")
    return target


def built_in_target(plan: Plan, given: str | None) -> str | None:
    """The model to ask: the TARGET that was given, else the built-in one that the plan was made for. A module that a
    file names is not imported."""
    from ..models import names

    planned = plan.provenance.get("target")
    return given if given is not None or planned not in names() else str(planned)
