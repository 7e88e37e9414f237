"""``meshwright check | simulate | diff | export``: what is done with a plan file beside reading it.

check      lists the broken rules, and prices an edited plan again
simulate   prices the decisions of a plan with other numbers, or on another cluster
diff       compares any two of plans, clusters and runs
export     writes a plan as calls of PyTorch's own libraries
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import BAD_INPUT, built_in_target, captured, cluster, fail, load, pricing_target, writable
from .terminal import answers_only, progress_bar, width

if TYPE_CHECKING:
    from ..compiler.ir.graph import Graph
    from ..compiler.plan.plan import Plan
    from ..compiler.report.difference import Comparison

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
    """Add ``simulate``, ``export`` and ``diff`` to the commands."""
    target = f"{target_help} (default: the built-in one that was planned)"
    simulate = commands.add_parser("simulate", help="price a plan's decisions with other numbers or on another cluster")
    simulate.add_argument("plan", type=Path, metavar="PLAN")
    simulate.add_argument("--cluster", metavar="CLUSTER", help=cluster_help)
    simulate.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="NAME=VALUE",
        help="microbatches=32, batch=2x, schedule=gpipe, recompute=full, network=4x, hosts=-2 (docs/how-to.md lists "
        "all); repeatable",
    )  # fmt: skip
    simulate.add_argument("--target", metavar="TARGET", help=target)
    simulate.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan as priced to FILE")
    simulate.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    simulate.add_argument(
        "--html", type=Path, metavar="FILE", help="write the comparison as a page that needs no network"
    )
    simulate.set_defaults(run=_simulate)

    export = commands.add_parser("export", help="write a plan for PyTorch's own libraries")
    export.add_argument("plan", type=Path, metavar="PLAN")
    export.add_argument(
        "--torch", action="store_true", required=True, help="DTensor placements, FSDP and pipeline calls"
    )
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE (default: print)")
    export.set_defaults(run=_export)

    diff = commands.add_parser("diff", help="compare two plans, clusters or runs, or a plan on another cluster")
    diff.add_argument("before", metavar="A", help=f"a plan file, a run's report or its folder, {cluster_help}")
    diff.add_argument("after", metavar="B", nargs="?", help="the same; not with --cluster")
    diff.add_argument("--cluster", metavar="CLUSTER", help="compare plan A with itself as priced on this cluster")
    diff.add_argument("--target", metavar="TARGET", help=target)
    diff.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    diff.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as a page that needs no network")
    diff.set_defaults(run=_diff)


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
        pricing_target(plan, arguments.target)
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


# ---- simulate, diff


def _simulate(arguments: argparse.Namespace) -> int:
    from ..compiler.report.what_if import parse_changes

    for path in filter(None, (arguments.output, arguments.html)):
        writable(path)
    changes = parse_changes(arguments.changes)
    plan = load(arguments.plan)
    words = [f"{name}={value}" for name, value in changes.items()]
    words += [f"on {arguments.cluster}"] if arguments.cluster else []
    now = _priced_anew(
        arguments, plan, str(arguments.plan), changes, f"{arguments.plan}: {', '.join(words) or 'as it is'}"
    )
    if arguments.output is not None:
        now.save(arguments.output)
        print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


def _priced_anew(arguments: argparse.Namespace, plan: Plan, name: str, changes: Mapping[str, str], title: str) -> Plan:
    """Print the comparison of a plan, by this name, with itself at another price; that plan."""
    from ..compiler.report.difference import diff
    from ..compiler.report.what_if import simulate

    target = pricing_target(plan, arguments.target)
    with progress_bar() as progress, answers_only():
        hardware = None if arguments.cluster is None else cluster(arguments.cluster)
        graph = captured(target, progress)
        progress("simulate", 0.0)
        now = simulate(plan, graph, hardware, changes)
    found = diff(plan, now, (name, title))
    print(json.dumps(found.to_json()) if arguments.json else found.text(width()))
    _write_page(found, arguments.html)
    for note in now.prediction.notes:
        if note.startswith("does not fit: "):
            print(f"note: {note}", file=sys.stderr)
    return now


def _write_page(found: Comparison, path: Path | None) -> None:
    if path is not None:
        found.to_html(path)
        print(f"wrote {path}", file=sys.stderr)


def _export(arguments: argparse.Namespace) -> int:
    from ..compiler.report.torch_script import torch_script
    from ..costmodel.files import write_atomically

    if arguments.output is not None:
        writable(arguments.output)
    text = torch_script(load(arguments.plan))
    if arguments.output is None:
        print(text, end="")
    else:
        write_atomically(arguments.output, text)
        print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from ..compiler.plan.plan import Plan
    from ..compiler.plan.validation import require_valid
    from ..compiler.report.difference import diff, read_side
    from ..costmodel.cluster import Cluster
    from ..costmodel.comparison import compare

    if (arguments.after is None) == (arguments.cluster is None):
        raise ValueError("diff compares A with B, or plan A with itself on --cluster; pass one of B and --cluster")
    if arguments.html is not None:
        writable(arguments.html)
    before = read_side(arguments.before)
    if isinstance(before, Plan):
        require_valid(before)
    if arguments.cluster is not None:
        if not isinstance(before, Plan):
            raise ValueError(f"--cluster prices a plan again, but got {arguments.before!r}, which is none; pass B")
        _priced_anew(arguments, before, arguments.before, {}, f"{arguments.before} on {arguments.cluster}")
        return 0
    after = read_side(arguments.after)
    if isinstance(after, Plan):
        require_valid(after)
    for side in (before, after):
        for line in side.validate() if isinstance(side, Cluster) else ():
            print(f"note: {line}", file=sys.stderr)
    found = diff(before, after, (arguments.before, arguments.after))
    if arguments.json:
        print(json.dumps(found.to_json()))
    elif isinstance(before, Cluster) and isinstance(after, Cluster):
        print(compare(before, after))
    else:
        print(found.text(width()))
    _write_page(found, arguments.html)
    return 0
