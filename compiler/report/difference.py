"""Two plans, clusters or runs side by side: a ``Comparison`` is data, of which ``text`` and ``to_json`` are two forms.

    plans      what they promise; decisions that differ; layers that are placed, split or recomputed in another way;
               seconds of the busiest stage and bytes of the fullest device by cause; messages of a step by kind
    clusters   the hardware, and every measured price that both have
    runs       reports of ``Parallel.report()``: the step, each term as measured, memory by rank

An edited plan has no prices to compare; its side says so. A plan and a run are compared by the plan's prediction, a
plan and a cluster by the plan's own cluster.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ...costmodel.cluster import Cluster
from ...costmodel.comparison import changes
from ...costmodel.files import parse_json, read_document, write_atomically
from ...costmodel.forms import maybe, number, positive, text, whole
from ...costmodel.memory import usable_bytes
from ..intra_op.stage_cost import STEP_CAUSES
from ..plan.plan import Plan
from ..text import bytes_text, rate_text, seconds_text, span_text, table, wrap_lines
from .describe import axis_names, layer_span, recompute_words, sharding_words
from .page import filled
from .step_report import report_part

__all__ = ["Comparison", "ComparisonSection", "Row", "diff", "read_side"]

Value = float | str | None
#: unit of a row → how a number of it is written
_UNITS: Mapping[str, Callable[[float], str]] = {
    "s": seconds_text, "B": bytes_text, "share": lambda x: f"{100 * x:.1f} %", "": rate_text,
}  # fmt: skip
_SAME = 5e-4  # relative: what differs by less is written without a ratio
_MOST_ROWS = 40  # of a section as text


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a number or words on either side; None: the side does not have it. unit: of the
    numbers, "s", "B", "share" or ""."""

    name: str
    before: Value
    after: Value
    unit: str = ""

    @property
    def differs(self) -> bool:
        """True if the sides are not the same."""
        return self.before != self.after

    @property
    def ratio(self) -> float | None:
        """After over before, where both are numbers and the first is not 0."""
        both = isinstance(self.before, int | float) and isinstance(self.after, int | float)
        return self.after / self.before if both and self.before else None  # type: ignore[operator]


@dataclass(frozen=True)
class ComparisonSection:
    """The lines on one subject. all_rows: False if only those that differ are in it; note: one more sentence."""

    title: str
    rows: tuple[Row, ...]
    all_rows: bool = True
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The common and the differing lines of ``before`` and ``after`` (their names). kind: "plans", "clusters", "runs"
    or "plan and run"."""

    kind: str
    before: str
    after: str
    sections: tuple[ComparisonSection, ...]

    @property
    def same(self) -> bool:
        """True if no line differs."""
        return not any(row.differs for section in self.sections for row in section.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every row with its ratio."""
        document = asdict(self)
        for section, of in zip(document["sections"], self.sections):
            section["rows"] = [{**asdict(row), "ratio": row.ratio} for row in of.rows]
        return {**document, "same": self.same}

    def text(self, width: int = 100) -> str:
        """Return the comparison for a terminal of ``width`` columns, 40 or more; where two columns do not fit, one side
        stands below the other."""
        width = max(width, 40)
        lines = [f"A  {self.before}", f"B  {self.after}"]
        if self.same:
            lines += ["", "no difference"]
        for section in () if self.same else self.sections:
            if section.rows or section.note:
                lines += ["", section.title, *_section_lines(section, width)]
        return "\n".join(line for each in lines for line in (wrap_lines(each, width, "", "   ") or [""]))

    __str__ = text

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The comparison as one page that needs no network, written to ``path`` where one is given."""
        document = {**self.to_json(), "title": f"{self.before} and {self.after}"}
        page = filled("compare.html", document["title"], document, ("words.js", "compare.js"))
        if path is not None:
            write_atomically(path, page)
        return page


def _section_lines(section: ComparisonSection, width: int) -> Iterator[str]:
    rows = [(row.name, _cell(row.before, row.unit), _cell(row.after, row.unit), _ratio(row)) for row in section.rows]
    shown_rows = rows[:_MOST_ROWS]
    sizes = [max((len(row[k]) for row in (("", "A", "B", ""), *shown_rows)), default=0) for k in range(4)]
    if rows and 8 + sum(sizes) <= width:
        aligned = "<" + "".join("<" if any(isinstance(r.before or r.after, str) for r in section.rows) else ">"
                                for _ in range(2)) + ">"  # fmt: skip
        yield from table(("", "A", "B", ""), shown_rows, aligned)
    else:
        for name, before, after, ratio in shown_rows:
            yield from wrap_lines(name + (f"  {ratio}" if ratio else ""), width, "  ", "    ")
            yield from wrap_lines(before, width, "    A  ", "       ")
            yield from wrap_lines(after, width, "    B  ", "       ")
    if len(rows) > _MOST_ROWS:
        yield f"  and {len(rows) - _MOST_ROWS} more (--json has all)"
    if section.note:
        yield from wrap_lines(section.note, width, "  ")


def _cell(value: Value, unit: str) -> str:
    return "–" if value is None else value if isinstance(value, str) else _UNITS.get(unit, rate_text)(value)


def _ratio(row: Row) -> str:
    if row.unit == "share" or row.ratio is None:
        return ""
    return "=" if abs(row.ratio - 1) < _SAME else f"{row.ratio:.2f}×" if row.ratio < 100 else f"{row.ratio:.0f}×"


# ---- plans


def diff(
    before: Plan | Cluster | Mapping[str, Any],
    after: Plan | Cluster | Mapping[str, Any],
    names: tuple[str, str] = ("before", "after"),
) -> Comparison:
    """Compare two plans, clusters or runs (``Report.to_json()``), in any pair that has something in common; ValueError
    for a cluster and a run."""
    if isinstance(before, Plan) and isinstance(after, Plan):
        return Comparison("plans", *names, tuple(_plan_sections(before, after)))
    if isinstance(before, Mapping) or isinstance(after, Mapping):
        if isinstance(before, Cluster) or isinstance(after, Cluster):
            raise ValueError(
                "a run is compared with a run or a plan, but got a cluster beside it; what a run says of the cluster "
                "is Parallel.recalibrate()"
            )
        kind = "runs" if isinstance(before, Mapping) and isinstance(after, Mapping) else "plan and run"
        return Comparison(kind, *names, tuple(_run_sections(before, after)))
    ours, theirs = (Cluster.from_json(json.dumps(x.cluster)) if isinstance(x, Plan) else x for x in (before, after))
    return Comparison("clusters", *names, tuple(_cluster_sections(ours, theirs)))


def _plan_sections(a: Plan, b: Plan) -> Iterator[ComparisonSection]:
    priced = [plan.price_state != "edited" for plan in (a, b)]
    sides = [side for side, known in zip("AB", priced) if not known]
    note = f"{' and '.join(sides)}: edited: prices are of another plan" if sides else ""
    yield ComparisonSection("What they promise", tuple(_promises(a, b, priced)), note=note)
    decisions = [row for row in _rows(_decisions(a), _decisions(b)) if row.differs]
    yield ComparisonSection("Decisions that differ", tuple(decisions), all_rows=False)
    yield ComparisonSection("Layers that differ", tuple(_layer_rows(a, b)), all_rows=False)
    if all(priced):
        yield ComparisonSection(
            "Seconds of a step on the busiest stage, by cause", tuple(_rows(_seconds(a), _seconds(b), "s"))
        )
        yield ComparisonSection("Bytes on the fullest device, by cause", tuple(_rows(_bytes(a), _bytes(b), "B")))
        messages = [row for row in _rows(_messages(a), _messages(b)) if row.differs]
        yield ComparisonSection("Messages of a step that differ, of all stages", tuple(messages), all_rows=False)


def _rows(a: Mapping[str, Value], b: Mapping[str, Value], unit: str = "") -> list[Row]:
    return [Row(name, a.get(name), b.get(name), unit) for name in dict.fromkeys((*a, *b))]


def _promises(a: Plan, b: Plan, priced: Iterable[bool]) -> Iterator[Row]:
    units = {"step": "s", "samples per second": "", "fullest device": "B", "its memory": "B", "bound": "s"}
    sides = [_figures(plan) if known else {} for plan, known in zip((a, b), priced)]
    for name, unit in units.items():
        yield Row(name, sides[0].get(name), sides[1].get(name), unit)


def _figures(plan: Plan) -> dict[str, Value]:
    prediction, usable = plan.prediction, usable_bytes(Cluster.from_json(json.dumps(plan.cluster)))
    fullest = _fullest(plan)
    least = min(usable[device] for device in plan.stages[fullest].devices)
    return {
        "step": prediction.step_s,
        "samples per second": plan.global_batch / prediction.step_s if prediction.step_s else None,
        "fullest device": prediction.stages[fullest].peak_bytes,
        "its memory": least + prediction.stages[fullest].memory_bytes["framework"],
        "bound": prediction.bound_s or None,
    }


def _fullest(plan: Plan) -> int:
    sizes = [stage.peak_bytes for stage in plan.prediction.stages]
    return sizes.index(max(sizes))


def _decisions(plan: Plan) -> dict[str, Value]:
    shapes = [
        "×".join(f"{size} {name}" for size, name in zip(stage.mesh_shape, axis_names(stage))) or "1 device"
        for stage in plan.stages
    ]
    runs = [(shape, len(list(run))) for shape, run in groupby(shapes)]
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    return {
        "model": plan.model,
        "cluster": f"{cluster.name}, {cluster.num_devices} devices",
        "batch": float(plan.global_batch),
        "microbatches": float(plan.microbatches),
        "schedule": plan.schedule,
        "chunks per stage": float(plan.num_chunks),
        "stages": float(len(plan.stages)),
        "meshes": ", ".join(f"{count} of {shape}" if count > 1 else shape for shape, count in runs),
        "recompute": recompute_words(plan),
        "weights": sharding_words(plan),
        "gradients": _wires(plan),
        "optimizer": plan.optimizer,
        "precision": plan.precision,
        "codes": ", ".join(f"{what} in {code}" for what, code in plan.codes.items()) or "none",
    }


def _wires(plan: Plan) -> str:
    ways = dict.fromkeys(
        wire.algorithm if wire.compressor == "none" else f"{wire.algorithm} in {wire.compressor}"
        for stage in plan.stages
        for wire in stage.wire
    )
    return "summed by " + ", ".join(ways) if ways else "no sums"


def _layer_rows(a: Plan, b: Plan) -> list[Row]:
    """A row for all layers that are treated alike on either side, and not the same on both."""
    ours, theirs = _treatment(a), _treatment(b)
    rows: dict[tuple[str | None, str | None], list[str]] = {}
    cells = [(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*a.layers, *b.layers))]
    for (before, after), run in groupby(cells, key=lambda cell: cell[1:]):
        layers = [name for name, _, _ in run]
        if before != after:
            rows.setdefault((before, after), []).append(layer_span(layers[0], layers[-1]))
    return [Row(", ".join(spans), before, after) for (before, after), spans in rows.items()]


def _treatment(plan: Plan) -> dict[str, str]:
    """Layer → its stage, mesh, the cuts of its weights, and its recompute mode, in words."""
    found: dict[str, str] = {}
    for index, stage in enumerate(plan.stages):
        mesh = "×".join(map(str, stage.mesh_shape)) or "1"
        names = axis_names(stage)
        for chunk in stage.chunks:
            first, end = chunk.layers
            for layer in range(first, end):
                name = plan.layers[layer]
                mode = chunk.recompute[layer - first] if chunk.recompute else "none"
                parts = [
                    f"stage {index}, devices {span_text(stage.devices)}, mesh {mesh}",
                    *_weights(name, chunk, names),
                ]
                found[name] = "; ".join([*parts, *([f"recompute {mode}"] if mode != "none" else [])])
    return found


def _weights(layer: str, chunk: Any, axes: tuple[str, ...]) -> list[str]:
    """How the weights below the module ``layer`` lie, each way once."""
    cuts: Counter[str] = Counter()
    for name, home in chunk.parameters.items():
        if name.startswith(f"{layer}."):
            spec = [f"dim {p.dim} over {axis}" for p, axis in zip(home.compute.value, axes) if str(p).startswith("S")]
            pattern = "" if home.pattern == "replicated" else f" ({home.pattern})"
            cuts[(" and ".join(spec) or "whole") + pattern] += 1
    return [f"{count} weights {how}" if count > 1 else f"a weight {how}" for how, count in cuts.items()]


def _seconds(plan: Plan) -> dict[str, Value]:
    """Seconds of a step by cause; they add up to the step."""
    m = plan.microbatches
    busy = [stage.busy_s(m) for stage in plan.prediction.stages]
    stage = plan.prediction.stages[busy.index(max(busy))]
    causes = {name: s * (1 if name in STEP_CAUSES else m) for name, s in stage.seconds.items()}
    beside = [f"{name} (beside the rest)" for name in ("transfer", "overlapped")]
    moved = {f"{name} (beside the rest)": causes.pop(name, 0.0) for name in ("transfer", "overlapped")}
    waits = {"waiting": max(0.0, plan.prediction.step_s - max(busy))}
    every = {**causes, **waits, **{name: moved[name] for name in beside}}
    return {name.replace("_", " "): seconds for name, seconds in every.items() if seconds}


def _bytes(plan: Plan) -> dict[str, Value]:
    memory = plan.prediction.stages[_fullest(plan)].memory_bytes
    return {name: size for name, size in memory.items() if size}


def _messages(plan: Plan) -> dict[str, Value]:
    """Collectives of a step by kind, and transfers between stages."""
    found: Counter[str] = Counter()
    for stage in plan.prediction.stages:
        for name, count in stage.collectives.items():
            found[name.replace("_", "-")] += count * (1 if name.startswith("step ") else plan.microbatches)
    if plan.transfers:
        found["tensors between stages"] = 2 * plan.microbatches * len(plan.transfers)
    return {name: float(count) for name, count in sorted(found.items())}


# ---- clusters


def _cluster_sections(a: Cluster, b: Cluster) -> Iterator[ComparisonSection]:
    yield ComparisonSection("Hardware", tuple(_rows(_hardware(a), _hardware(b))))
    every = changes(a, b)
    for title in dict.fromkeys(change.section for change in every):
        rows = tuple(Row(c.name, c.before, c.after, c.unit) for c in every if c.section == title)
        differing = tuple(row for row in rows if row.differs)
        note = f"{len(rows) - len(differing)} of {len(rows)} prices are the same"
        yield ComparisonSection(f"Prices of {title}", differing, all_rows=False, note=note)


def _hardware(cluster: Cluster) -> dict[str, Value]:
    lines = [line.strip() for line in cluster.text().splitlines()[1:]]
    return {
        "devices": float(cluster.num_devices),
        "hosts": float(len(cluster.hosts)),
        "backend": cluster.backend,
        "parts": "; ".join(line for line in lines if not line.startswith("between hosts: ")),
        "between hosts": next((line.partition(": ")[2] for line in lines if line.startswith("between hosts: ")), None),
    }


# ---- runs


_TERM = {"stage": whole(), "name": text, "measured_s": number}
_RANK = {"stage": maybe(whole()), "resident_bytes": number}
_RUN = {"predicted_step_s": number, "measured_step_s": maybe(positive)}


def _run_sections(a: Plan | Mapping[str, Any], b: Plan | Mapping[str, Any]) -> Iterator[ComparisonSection]:
    sides = [_of_plan(side) if isinstance(side, Plan) else _of_run(side) for side in (a, b)]
    titles = {
        "step": ("The step", "s"), "terms": ("Seconds of a step by term", "s"), "memory": ("Peak memory", "B"),
    }  # fmt: skip
    for key, (title, unit) in titles.items():
        yield ComparisonSection(title, tuple(_rows(sides[0][key], sides[1][key], unit)))


def _of_plan(plan: Plan) -> dict[str, dict[str, Value]]:
    if plan.price_state == "edited":
        return {"step": {}, "terms": {}, "memory": {}}
    peaks = {f"stage {index}": stage.peak_bytes for index, stage in enumerate(plan.prediction.stages)}
    return {"step": {"step": plan.prediction.step_s}, "terms": {}, "memory": dict(peaks)}


def _of_run(run: Mapping[str, Any]) -> dict[str, dict[str, Value]]:
    step: dict[str, Value] = {"step": run["measured_step_s"], "predicted": run["predicted_step_s"]}
    terms: dict[str, Value] = {f"stage {term['stage']}: {term['name']}": term["measured_s"] for term in run["terms"]}
    memory: dict[str, Value] = {}
    for rank in run["ranks"]:
        if rank["stage"] is not None:
            name = f"stage {rank['stage']}"
            memory[name] = max(float(rank["resident_bytes"]), memory.get(name) or 0.0)
    return {"step": step, "terms": terms, "memory": memory}


# ---- files


def read_side(what: str) -> Plan | Cluster | Mapping[str, Any]:
    """The plan, the cluster or the run that an argument names: a file of one of them, a folder with ``report.json``, or
    a cluster in the words of ``Cluster.parse``. ValueError for anything else."""
    path = Path(what)
    if path.is_dir():
        path = path / "report.json"
        if not path.is_file():
            raise ValueError(f"the folder of a run has a report.json, but got {what!r} without one")
    if not path.is_file():
        try:
            return Cluster.parse(what)
        except ValueError as error:
            raise ValueError(f"{what!r} is no file of a plan, a cluster or a run, and no cluster: {error}") from None
    return read_document(path, _read)


def _read(content: str) -> Plan | Cluster | Mapping[str, Any]:
    if '"meshwright-cluster"' in content[:60]:  # a plan has its cluster further on
        return Cluster.from_json(content)
    document = parse_json(content, "plan, cluster or run")
    if isinstance(document, dict) and "format" in document:
        return Cluster.from_json(content)  # another format, which it names
    if isinstance(document, dict) and isinstance(document.get("report"), dict) and "version" not in document:
        document = document["report"]  # the figures of a demo
    if isinstance(document, dict) and "terms" in document:
        return report_part(document, _RUN, _TERM, _RANK)
    return Plan.from_json(document)
