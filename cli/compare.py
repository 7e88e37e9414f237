"""``meshwright check``: the rules that a plan file breaks, and its price of now where it was edited."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import BAD_INPUT, built_in_target, captured, cluster, fail, load, writable
from .terminal import answers_only, progress_bar

if TYPE_CHECKING:
    from ..compiler.ir.graph import Graph
    from ..compiler.plan.plan import Plan

__all__ = ["add_check", "add_comparisons"]


def add_check(commands: Any, target_help: str, cluster_help: str) -> None:
    """Add ``check`` to the commands."""
    check = commands.add_parser("check", help="list the faults of a plan file, and price it again if it was edited")
    check.add_argument("plan", type=Path, metavar="PLAN")
    check.add_argument("--target", metavar="TARGET", help=f"{target_help} (default: the built-in one that was planned)")
    check.add_argument("--cluster", metavar="CLUSTER", help=cluster_help)
    check.add_argument("--write", action="store_true", help="store the price of now in PLAN")
    check.set_defaults(run=_check)


def add_comparisons(commands: Any, target_help: str, cluster_help: str) -> None:
    """Add what compares plans."""


# ---- check


def _check(arguments: argparse.Namespace) -> int:
    from ..compiler.plan.validation import validate

    plan = load(arguments.plan)
    if arguments.write:
        writable(arguments.plan)
    graph = hardware = now = None
    with progress_bar() as progress, answers_only():
        if arguments.cluster is not None:
            hardware = cluster(arguments.cluster)
        target = built_in_target(plan, arguments.target)
        if target is not None and (arguments.target is not None or plan.price_state != "current"):
            graph = captured(target, progress)
        progress("check", 0.0)
        faults = validate(plan, graph, hardware)
        if not faults and graph is not None and plan.price_state != "current":
            now, faults = _priced(plan, graph)
    if plan.price_note:
        print(f"{arguments.plan} {plan.price_note}" if plan.price_state == "edited" else plan.price_note)
    for fault in faults:
        print(fault)
    if now is not None:
        print(_price_text(plan, now))
    if faults:
        return fail(f"{arguments.plan} no longer holds: {len(faults)} fault{'s' if len(faults) > 1 else ''}", BAD_INPUT)
    tested = ["by itself", *(["for the model"] if graph else []), *(["for the cluster"] if hardware else [])]
    print(f"{arguments.plan} holds {' and '.join(tested)}")
    if now is None and plan.price_state != "current":
        raise ValueError("a plan is priced by its model, but got no --target, and the plan names no built-in one")
    if arguments.write:
        (now or plan).save(arguments.plan)
        print(f"wrote {arguments.plan}", file=sys.stderr)
    return 0


def _priced(plan: Plan, graph: Graph) -> tuple[Plan | None, list[str]]:
    """The plan at the price of now, and the rules that it breaks: it may not fit, or not be priced at all."""
    from ..compiler.report.reprice import memory_faults, reprice
    from ..costmodel.cluster import Cluster

    try:
        now = reprice(plan, graph, Cluster.from_json(json.dumps(plan.cluster)))
    except ValueError as error:
        return None, [str(error)]
    return now, memory_faults(now)


def _price_text(plan: Plan, now: Plan) -> str:
    from ..compiler.text import bytes_text, seconds_text

    fullest = max(now.prediction.stages, key=lambda stage: stage.peak_bytes)
    before = seconds_text(plan.prediction.step_s)
    bound = "no bound holds" if not now.prediction.bound_s else f"bound {seconds_text(now.prediction.bound_s)}"
    return (
        f"priced now: {seconds_text(now.prediction.step_s)} a step (the document says {before}), "
        f"{bytes_text(fullest.peak_bytes)} on the fullest device, {bound}"
    )
