"""Tables of the accuracy benchmark, and the summaries that its targets are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from reporting.results import Record
from rich.console import Console
from rich.table import Table

from .errors import Summary, relative_error, summarize
from .trials import PARTS

__all__ = ["records", "show", "summaries"]

Result = dict[str, Any]


def summaries(results: Sequence[Result]) -> dict[str, Any]:
    """Part → table → {"step": {"all": …, model: …}, "memory": {…}} of what was predicted by that table."""
    found: dict[str, Any] = {}
    for part in _unique(result["part"] for result in results):
        of_part = [result for result in results if result["part"] == part]
        found[part] = {}
        for name in of_part[0]["predicted_s"]:
            groups = {"all": of_part}
            for target in _unique(result["target"] for result in of_part):
                groups[target] = [result for result in of_part if result["target"] == target]
            found[part][name] = {
                "step": {key: _step(some, name).to_json() for key, some in groups.items()},
                "memory": {key: memory.to_json() for key, some in groups.items() if (memory := _memory(some, name))},
            }
    return found


def show(results: Sequence[Result], console: Console) -> None:
    """Per part: one row per plan, then one per table with the summaries."""
    found = summaries(results)
    for part, tables in found.items():
        of_part = [result for result in results if result["part"] == part]
        console.print(_rows(part, of_part))
        console.print(_summary(part, tables))


def records(results: Sequence[Result]) -> list[Record]:
    """Per part and table: the errors of the predicted step and the ranking's tau; per part the errors of memory."""
    found = []
    for part, tables in summaries(results).items():
        aimed = part != "crowd"  # more ranks than cores: reported, without an aim
        for name, kinds in tables.items():
            step = kinds["step"]["all"]
            row, note = f"{part}, by table {name}", f"{step['count']} plans"
            for key, text, aim in (("median", "median error", 5.0), ("p90", "90th percentile", 15.0)):
                even = aim if aimed else None
                found.append(Record(f"{row}: {text}", 100 * step[key], "%", 1, None, "the aim", even, "less", note))
            if step["tau"] is not None:
                even = 0.9 if aimed else None
                found.append(Record(f"{row}: Kendall's τ", step["tau"], "", 2, None, "the aim", even, "more", note))
        memory = list(tables.values())[-1]["memory"].get("all")
        if memory:
            for key, text, even in (("median", "median error", 5.0), ("p90", "90th percentile", None)):
                row = f"{part}, peak of live bytes: {text}"
                peer = "" if even is None else "the aim"
                found.append(
                    Record(row, 100 * memory[key], "%", 1, None, peer, even, "less", f"{memory['count']} plans")
                )
    return found


def _rows(part: str, results: Sequence[Result]) -> Table:
    names = list(results[0]["predicted_s"])
    table = Table(title=f"{PARTS[part]}: milliseconds per step; megabytes of the fullest rank")
    table.add_column("plan")
    for heading in ("ranks", "measured", "min", "cpu", *(f"{name} {word}" for name in names for word in ("", "err"))):
        table.add_column(heading.strip(), justify="right")
    for heading in ("live", "predicted", "err", "resident", "load"):
        table.add_column(heading, justify="right")
    for result in results:
        row = [result["name"], str(result["ranks"])]
        row += [f"{1e3 * result[key]:.1f}" for key in ("median_s", "min_s", "cpu_s")]
        for name in names:
            predicted = result["predicted_s"][name]
            row += [f"{1e3 * predicted:.1f}", f"{100 * relative_error(predicted, result['median_s']):+.1f}%"]
        memory = result["memory"]
        live, predicted = max(memory.get("live", [0])), max(memory["predicted"][names[-1]])
        row += [f"{live / 1e6:.2f}" if live else "", f"{predicted / 1e6:.2f}"]
        row += [f"{100 * relative_error(predicted, live):+.1f}%" if live else ""]
        row += [f"{max(memory['resident']) / 1e6:.1f}", f"{result['load']:.1f}"]
        table.add_row(*row)
    return table


def _summary(part: str, tables: dict[str, Any]) -> Table:
    table = Table(title=f"{part}: relative errors, and the ranking's tau")
    for heading in ("table", "of", "plans"):
        table.add_column(heading)
    for heading in ("median", "p90", "bias", "tau", "memory median", "memory p90"):
        table.add_column(heading, justify="right")
    for name, kinds in tables.items():
        for key, step in kinds["step"].items():
            memory = kinds["memory"].get(key)
            tau = "" if step["tau"] is None else f"{step['tau']:.2f}"
            row = [name if key == "all" else "", key, str(step["count"])]
            row += [f"{100 * step['median']:.1f}%", f"{100 * step['p90']:.1f}%", f"{100 * step['bias']:+.1f}%", tau]
            row += [f"{100 * memory['median']:.1f}%", f"{100 * memory['p90']:.1f}%"] if memory else ["", ""]
            table.add_row(*row)
        table.add_section()
    return table


def _step(results: Sequence[Result], name: str) -> Summary:
    return summarize([result["predicted_s"][name] for result in results], [result["median_s"] for result in results])


def _memory(results: Sequence[Result], name: str) -> Summary | None:
    """Of the fullest rank of each plan; None where no live bytes were measured."""
    if any("live" not in result["memory"] for result in results):
        return None
    return summarize(
        [max(result["memory"]["predicted"][name]) for result in results],
        [max(result["memory"]["live"]) for result in results],
    )


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
