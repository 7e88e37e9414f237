"""The report of a run: every term of a step predicted against measured, memory, and the terms to blame.

This module has the values and their text; ``prediction_error`` computes them from a plan and its ranks' measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...costmodel.forms import Form, listed, record, shown
from ...costmodel.measured import RankTimes
from ..text import bytes_text, count_text, seconds_text, table, wrap_lines

__all__ = ["THRESHOLD", "Report", "Term", "relative_error", "report_part"]


THRESHOLD = 0.2  # relative error of the step beyond which terms are blamed
_LEAST_SHARE = 0.15  # of the difference: terms that explain less are not worth a sentence


@dataclass(frozen=True)
class Term:
    """One term of one stage: seconds per step, the mean over the stage's ranks."""

    stage: int
    name: str
    predicted_s: float
    measured_s: float
    #: count per step
    times: int = 1
    #: seconds that the step gets longer with this term as measured and all others as predicted
    effect_s: float = 0.0

    @property
    def error(self) -> float:
        """(measured − predicted) / predicted; infinite where nothing was predicted."""
        return relative_error(self.predicted_s, self.measured_s)


@dataclass(frozen=True)
class Report:
    """Predicted against measured. Equal on every rank; ``text()`` lays it out, ``report["measured_step_s"]`` reads one
    entry of ``to_json``."""

    predicted_step_s: float
    measured_step_s: float | None
    steps: int
    microbatches: int
    predicted_bubble: float
    measured_bubble: float | None
    terms: tuple[Term, ...]
    ranks: tuple[RankTimes, ...]
    #: by stage, of the fullest device, the framework's share included
    predicted_peak_bytes: tuple[float, ...]
    #: by stage, without the framework's share
    predicted_live_bytes: tuple[float, ...]
    threshold: float = THRESHOLD
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Relative error of the step, (measured − predicted) / predicted; None before a step was measured."""
        return None if self.measured_step_s is None else relative_error(self.predicted_step_s, self.measured_step_s)

    @property
    def drifted(self) -> bool:
        """True if the step is off by more than the threshold."""
        return self.error is not None and abs(self.error) > self.threshold

    def blamed(self) -> list[tuple[Term, float]]:
        """The terms that explain the difference, the worst first, each with its share of it; empty within the
        threshold."""
        if not self.drifted or self.measured_step_s is None:
            return []
        difference = self.measured_step_s - self.predicted_step_s
        shares = [(term, term.effect_s / difference) for term in self.terms]
        return sorted((s for s in shares if s[1] >= _LEAST_SHARE), key=lambda entry: -entry[1])[:3]

    def findings(self) -> list[str]:
        """A sentence for each blamed term, and what to do; empty within the threshold."""
        out = []
        for term, share in self.blamed():
            of = f"waiting of stage {term.stage}" if term.name == "waiting" else f"{term.name} of stage {term.stage}"
            each = 1 / term.times
            rise = "" if term.predicted_s <= 0 else f" ({_percent(term.error)})"
            out.append(
                f"{of}: predicted {seconds_text(term.predicted_s * each)}, measured "
                f"{seconds_text(term.measured_s * each)}{rise}: explains {100 * share:.0f} % of the difference"
            )
        if self.drifted:
            error = self.error
            assert error is not None
            out.append(
                f"the step is off by {_percent(error)}, more than {100 * self.threshold:.0f} %: recalibrate() refits "
                "the cluster and says whether another plan would win"
            )
        return out

    def text(self, width: int = 100) -> str:
        """Return the report as text for a terminal of ``width`` columns."""
        if self.measured_step_s is None or self.error is None:
            return (
                f"Predicted {seconds_text(self.predicted_step_s)} a step; no step has been measured yet: train a few, "
                "then ask again"
            )
        head = ["", "", "predicted", "measured", ""]
        rows = [
            ["step", "", seconds_text(self.predicted_step_s), seconds_text(self.measured_step_s), _percent(self.error)]
        ]
        if self.measured_bubble is not None and len(self.predicted_peak_bytes) > 1:
            rows.append(
                ["waiting share", "", f"{100 * self.predicted_bubble:.0f} %", f"{100 * self.measured_bubble:.0f} %", ""]
            )
        for term in self.terms:
            if max(term.predicted_s, term.measured_s) < 1e-3 * self.measured_step_s:
                continue
            name = f"{term.name}, each of {term.times}" if term.times > 1 else term.name
            rows.append([
                f"stage {term.stage}", name, _seconds(term.predicted_s / term.times),
                _seconds(term.measured_s / term.times), _percent(term.error) if term.predicted_s > 0 else "",
            ])  # fmt: skip
        for before, row in zip([*rows[::-1][1:], None], rows[::-1]):  # a stage is named once
            if before is not None and before[0] == row[0]:
                row[0] = ""
        lines = [
            f"Predicted against measured: the mean of the middle {count_text(self.steps, 'step')} on "
            f"{count_text(len(self.ranks), 'rank')}",
            *table(head, rows, "<<>>>"),
            "",
            *self._memory_lines(),
        ]
        for finding in self.findings():
            lines += wrap_lines(finding, width, "  ")
        for note in self.notes:
            lines += wrap_lines(note, width, "  ")
        return "\n".join(lines)

    __str__ = text

    def _memory_lines(self) -> list[str]:
        counted = any(rank.live_bytes is not None for rank in self.ranks)
        rows = []
        for rank in self.ranks:
            stage = rank.stage
            if counted:
                predicted = "idle" if stage is None else bytes_text(self.predicted_live_bytes[stage])
                live = "" if rank.live_bytes is None else bytes_text(rank.live_bytes)
                rows.append([f"rank {rank.rank}", predicted, live, bytes_text(rank.resident_bytes)])
            else:
                predicted = "idle" if stage is None else bytes_text(self.predicted_peak_bytes[stage])
                rows.append([f"rank {rank.rank}", predicted, bytes_text(rank.resident_bytes)])
        if counted:
            return table(["peak memory", "predicted", "live tensors", "whole process"], rows, "<>>>")
        return table(["peak memory", "predicted", "whole process"], rows, "<>>")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: every field, and what is derived from them."""
        return asdict(self) | {
            "error": self.error,
            "findings": self.findings(),
            "peak_bytes": [rank.resident_bytes for rank in self.ranks],
        }

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def keys(self) -> Iterator[str]:
        """The entries of ``to_json``: ``dict(report)`` is that dict."""
        return iter(self.to_json())


def report_part(
    document: Any, fields: Mapping[str, Form], term: Mapping[str, Form], rank: Mapping[str, Form]
) -> dict[str, Any]:
    """These fields of a document of ``Report.to_json``, those of its terms and ranks; ValueError for another one."""

    def part(value: Any, forms: Mapping[str, Form]) -> Any:
        return {key: value[key] for key in forms if key in value} if isinstance(value, Mapping) else value

    lists: dict[str, Any] = {}
    for name, forms in (("terms", term), ("ranks", rank)):
        values = document.get(name)
        lists[name] = [part(one, forms) for one in values] if isinstance(values, list) else values
    found = {**part(document, fields), **lists}
    form = record({**fields, "terms": listed(record(dict(term))), "ranks": listed(record(dict(rank)))})
    if faults := shown(form("", found)):
        raise ValueError(f"a run is a report as Report.to_json writes it, but {faults}; is it another file?")
    return found


# ---- words


def relative_error(predicted_s: float, measured_s: float) -> float:
    """(measured − predicted) / predicted; infinite where nothing was predicted."""
    if predicted_s > 0:
        return (measured_s - predicted_s) / predicted_s
    return float("inf") if measured_s > 0 else 0.0


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.0f} %" if abs(fraction) < 10 else f"×{1 + fraction:.0f}"


def _seconds(value: float) -> str:
    return seconds_text(value) if value > 0 else "—"
