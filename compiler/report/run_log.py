"""The log of a run, as ``runtime.metrics`` writes it: read again, summed up as text, and drawn as a page.

A folder has ``metrics.jsonl``, and ``report.json`` if the run's report was gathered. A run that went on after a stop
has steps twice; the later record counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...costmodel.files import parse_json, read_document, write_atomically
from ...costmodel.forms import listed, maybe, number, positive, text, whole
from ..text import bytes_text, count_text, rate_text, seconds_text, table, wrap_lines
from .page import filled
from .step_report import report_part

__all__ = ["RunLog"]

_ROWS = 12  # of the table of steps
_SLOW = 1.1  # times the median of the ranks' own work from which a rank is named


@dataclass(frozen=True)
class RunLog:
    """The records of a run by kind, in the order of steps. report: ``Report.to_json()``, None if there is none."""

    name: str
    run: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Mapping[str, Any]]
    report: Mapping[str, Any] | None

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> RunLog:
        """Read a folder. ValueError names what is missing or broken; a last line that was cut short is left out."""
        path = Path(folder) / "metrics.jsonl"
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from error
        kinds: dict[str, dict[int, Mapping[str, Any]]] = {"run": {}, "step": {}, "evaluation": {}, "checkpoint": {}}
        for at, line in enumerate(lines, 1):
            try:
                record = parse_json(line, "record")
            except ValueError as error:
                if at == len(lines):
                    break
                raise ValueError(f"{path}:{at}: a record is a JSON object, but got {line[:40]!r}") from error
            if not isinstance(record, dict) or record.get("kind") not in kinds or not _is_count(record.get("step")):
                raise ValueError(f"{path}:{at}: a record has a kind and a step, but got {line[:60]!r}")
            kinds[record["kind"]][record["step"]] = record
        ordered = {kind: [found[step] for step in sorted(found)] for kind, found in kinds.items()}
        if not ordered["step"]:
            raise ValueError(f"{path}: a log has records of steps, but got none")
        run = ordered["run"][-1] if ordered["run"] else {}
        return RunLog(
            Path(folder).name, run, ordered["step"], ordered["evaluation"], ordered["checkpoint"], _report(folder)
        )

    # ---- figures

    def values(self, name: str) -> list[float]:
        """All finite values of one figure, by step."""
        found = [record.get(name) for record in self.steps]
        return [float(x) for x in found if isinstance(x, int | float) and math.isfinite(x)]

    def facts(self) -> list[tuple[str, str]]:
        """The run and its outcome: name and words of each fact."""
        losses, step_s, predicted_s = self.values("loss"), self.values("step_s"), self.values("predicted_step_s")
        facts = [("steps", f"{self.steps[-1]['step']:,}")]
        if self.run:
            facts.append(
                (
                    "plan",
                    f"{self.run.get('schedule')}, {self.run.get('stages')} stages, {self.run.get('devices')} devices",
                )
            )
            facts.append(("batch", f"{self.run.get('global_batch')} in {self.run.get('microbatches')} microbatches"))
        if losses:
            facts.append(("loss", f"{losses[0]:.4f} to {losses[-1]:.4f}, least {min(losses):.4f}"))
        if step_s:
            facts.append(("step", f"{seconds_text(median(step_s))} (median), {seconds_text(max(step_s))} at most"))
        if step_s and predicted_s:
            facts.append(
                (
                    "predicted",
                    f"{seconds_text(predicted_s[-1])}, {median(step_s) / predicted_s[-1]:.2f}× measured over it",
                )
            )
        for name in ("tokens", "samples"):
            if rates := self.values(f"{name}_per_s"):
                facts.append(("speed", f"{rate_text(median(rates))} {name}/s (median)"))
        if shares := self.values("share_of_peak"):
            facts.append(("use", f"{median(shares):.0%} of the devices' peak"))
        if peaks := self.values("peak_bytes"):
            facts.append(("memory", f"{bytes_text(max(peaks))} on the fullest rank"))
        if self.checkpoints:
            facts.append(("checkpoint", f"{self.checkpoints[-1].get('path')}, step {self.checkpoints[-1]['step']:,}"))
        return facts

    def findings(self) -> list[str]:
        """Sentences on what is to blame where the run is slower than predicted, and on a slow rank."""
        if self.report is None:
            return ["no report was gathered: MetricsLogger.report() at the end of a run says which terms are off"]
        found = list(self.report["findings"])
        by_stage: dict[Any, list[tuple[float, int]]] = {}
        for rank in self.report["ranks"]:
            own_s = rank["forward_s"] + rank["backward_s"] + rank["weights_s"] + rank["recompute_s"] - rank["skew_s"]
            by_stage.setdefault(rank["stage"], []).append((own_s, rank["rank"]))
        for stage, times in by_stage.items():
            usual, (slowest, rank) = median(own for own, _ in times), max(times)
            if stage is not None and len(times) > 1 and usual > 0 and slowest > _SLOW * usual:
                found.append(f"rank {rank} is slow: {slowest / usual:.2f}× the median of the ranks of stage {stage}")
        return found or [
            "every term is within the report's threshold, and no rank is slower than the others of its stage"
        ]

    def summary(self, width: int = 100) -> str:
        """The run for a terminal."""
        lines = [f"Run {self.name}", *(f"  {name:<11}{words}" for name, words in self.facts()), ""]
        picked = self.steps[:: max(1, len(self.steps) // _ROWS)]
        rows = [
            [
                f"{record['step']:,}",
                *(_words(record, name, form) for name, form in (("loss", "{:.4f}"), ("grad_norm", "{:.3g}"))),
                seconds_text(record["step_s"]) if record.get("step_s") else "",
                _words(record, "measured_over_predicted", "{:.2f}×"),
            ]
            for record in picked
        ]  # fmt: skip
        lines += table(["step", "loss", "gradient", "seconds", "of predicted"], rows, ">>>>>")
        if self.evaluations:
            last = {k: v for k, v in self.evaluations[-1].items() if k not in ("kind", "step")}
            values = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if isinstance(value, int | float))
            lines += ["", f"{count_text(len(self.evaluations), 'evaluation')}; the last one: {values}"]
        lines.append("")
        for finding in self.findings():
            lines += wrap_lines(finding, width, "  ")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "name": self.name, "facts": dict(self.facts()), "findings": self.findings(), "run": dict(self.run),
            "steps": [dict(one) for one in self.steps], "evaluations": [dict(one) for one in self.evaluations],
            "checkpoints": [dict(one) for one in self.checkpoints], "report": self.report,
        }  # fmt: skip

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The run as one page that needs no network, written to ``path`` where one is given."""
        document = self.to_json() | {"facts": self.facts(), "title": f"Run {self.name}"}
        text = filled("run.html", document["title"], document, ("words.js", "run.js"))
        if path is not None:
            write_atomically(path, text)
        return text


def _words(record: Mapping[str, Any], name: str, form: str) -> str:
    value = record.get(name)
    return form.format(value) if isinstance(value, int | float) else ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


_REPORT = {"predicted_step_s": number, "measured_step_s": maybe(positive), "findings": listed(text)}
_TERM = {"stage": whole(), "name": text, "predicted_s": number, "measured_s": number, "times": whole()}
_SPANS = ("forward_s", "backward_s", "weights_s", "recompute_s", "skew_s")
_RANK = {"rank": whole(), "stage": maybe(whole()), **dict.fromkeys(_SPANS, number), "resident_bytes": number}


def _report(folder: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    path = Path(folder) / "report.json"
    return read_document(path, _parsed) if path.exists() else None


def _parsed(content: str) -> Mapping[str, Any]:
    """The part of a report that is shown; ValueError for another document."""
    document = parse_json(content, "report")
    if not isinstance(document, dict):
        raise ValueError("a run is a report as Report.to_json writes it, but this is no JSON object")
    return report_part(document, _REPORT, _TERM, _RANK)
