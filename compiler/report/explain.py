"""A plan as text for a terminal.

``explain`` lays out, top to bottom: what the plan promises; stages × devices; how every layer is split; the schedule;
seconds by cause; memory by cause; collectives; alternatives; where the prices come from; notes. ``describe.py`` finds
the words, this module the figures, ``compiler/text.py`` the columns.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ...costmodel.cluster import Cluster
from ..intra_op.stage_cost import STEP_CAUSES
from ..ir.graph import Graph
from ..pipeline.families import generate
from ..pipeline.simulate import Simulation, grid, legend
from ..plan.plan import Plan
from ..search.predict import simulate_plan
from ..text import (
    bar_text,
    bytes_text,
    count_text,
    group_runs,
    magnitude_text,
    rate_text,
    seconds_text,
    span_text,
    stack_tables,
    table,
    wrap_lines,
)
from .describe import (
    Group,
    axis_names,
    gradient_reduction_words,
    layer_rows,
    layer_span,
    merged,
    op_summary,
    recompute_words,
    sharding_words,
)

__all__ = [
    "compared", "explain", "idle_text", "num_idle_devices", "replicated_fraction", "source_shares", "summary_json",
    "tflops_per_device",
]  # fmt: skip


#: cause of seconds in ``StagePrediction.seconds`` → its column, in the order of the columns
_CAUSES = {
    "compute": "compute",  # in documents of before
    "forward": "forward",
    "backward_input": "backward",
    "backward_weight": "weight-gradient backward",
    "recompute": "recompute",
    "reshard": "resharding",
    "internal": "op-internal collectives",
    "host": "host",
    "sends": "sending",
    "transfer": "transfer",
    "gradient": "gradients",
    "gather": "gathers",
    "overlapped": "overlapped",
    "optimizer": "optimizer",
    "tied": "tied",
    "loss": "loss",
}
_NEGLIGIBLE_SHARE = 5e-4  # of the step: a cause that takes less on every stage has no column
_SOURCES = (
    ("measured as they are", ("measured",)),
    ("interpolated from measurements", ("interpolated", "extrapolated", "scaled")),
    ("analytic (roofline, data sheet)", ("roofline", "analytic", "free")),
)


def explain(plan: Plan, graph: Graph | None = None, width: int = 100) -> str:
    """The plan in plain text, at most ``width`` columns (never under 80).

    graph: the captured model, if at hand: layers then also say how each module's work is cut, and stages count their
    parameters.
    """
    width = max(width, 80)
    if plan.price_state == "edited":  # its prices are of another plan, and not shown
        return "\n\n".join("\n".join(lines) for lines in _decisions(plan, graph, width) if lines)
    simulation = simulate_plan(plan)
    sections = [
        _header(plan, simulation, width),
        _titled("Stages", _stages(plan, graph, simulation, width)),
        _titled("How each layer is split", _layers(plan, graph, width)),
        _titled(
            f"Schedule: {_schedule_name(plan)}, {count_text(plan.microbatches, 'microbatch')}",
            _schedule(plan, simulation, width),
        ),
        _titled("Seconds of a step, by cause", _seconds(plan, width)),
        _titled("Memory of the fullest device, by cause", _memory(plan, width)),
        _titled("Collectives", _collectives(plan, width)),
        _titled("Alternatives", _alternatives(plan, width)),
        _titled("Where the prices come from", _prices(plan, width)),
        _titled("Notes", _bullets(_notes(plan, graph), width)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _decisions(plan: Plan, graph: Graph | None, width: int) -> list[list[str]]:
    """The sections of an edited plan."""
    return [
        _header(plan, None, width),
        _titled("Stages", _stages(plan, graph, None, width)),
        _titled("How each layer is split", _layers(plan, graph, width)),
        _titled("Notes", _bullets(_notes(plan, graph), width)),
    ]


# ---- sections


def _header(plan: Plan, simulation: Simulation | None, width: int) -> list[str]:
    """simulation: of the step; None where the prices are of another plan."""
    cluster = _cluster(plan)
    devices = " + ".join(
        f"{sum(host.num_devices for host in run)} × {name}"
        for name, run in group_runs(cluster.hosts, lambda host: host.device.name)
    )
    passes = plan.provenance.get("passes", {})
    slow = sorted(((s, name) for name, s in passes.items() if name not in ("total", "capture")), reverse=True)[:3]
    facts = [
        (
            "model",
            f"{plan.model}, {count_text(len(plan.layers), 'layer')}, {count_text(sum(plan.model_ops.values()), 'op')}",
        ),
        ("cluster", f"{cluster.name}: {devices}"),
        ("idle", idle_text(plan)),
        (
            "batch",
            f"{plan.global_batch:,} = {count_text(plan.microbatches, 'microbatch')}"
            f" × {count_text(plan.microbatch_size, 'sample')}",
        ),
        *(
            [("prices", plan.price_note + ("; check prices it again" if simulation is None else ""))]
            if plan.price_note
            else []
        ),
        *([] if simulation is None else _promise(plan)),
        (
            "schedule",
            f"{_schedule_name(plan)}, {count_text(len(plan.stages), 'stage')}"
            + ("" if simulation is None else f", {100 * simulation.bubble_fraction:.0f} % bubble")
            + f"; optimizer {plan.optimizer}",
        ),
        ("recompute", recompute_words(plan)),
        ("weights", sharding_words(plan)),
        ("precision", "" if plan.precision == "model" else plan.precision),
        ("codes", ", ".join(f"{what} in {code}" for what, code in plan.codes.items())),
    ]
    facts = [(name, text) for name, text in facts if text]
    if passes:
        parts = ", ".join(f"{name} {seconds_text(s)}" for s, name in slow)
        before = f"; capture {seconds_text(passes['capture'])}" if "capture" in passes else ""
        facts.append(("search", f"{seconds_text(passes.get('total', 0.0))} ({parts}){before}"))
    lines = [line for name, text in facts for line in wrap_lines(text, width, f"  {name.ljust(9)} ", " " * 12)]
    return ["Plan", *lines]


def _promise(plan: Plan) -> list[tuple[str, str]]:
    """The step and its bound, in words."""
    prediction = plan.prediction
    for_shape = " for the given parallel shape" if plan.provenance.get("strategy") else ""
    rate = rate_text(plan.global_batch / prediction.step_s) if prediction.step_s else "∞"
    bound = (
        f"within {100 * prediction.bound_gap:.1f} % of the proven optimum of the cost model{for_shape}"
        if prediction.bound_s > 0
        else "none holds: these decisions were priced, not searched for"
    )
    speed = f"{rate} samples/s, {tflops_per_device(plan):.3g} TFLOPS per device"
    return [("step", f"{seconds_text(prediction.step_s)} predicted: {speed}"), ("bound", bound)]


def _stages(plan: Plan, graph: Graph | None, simulation: Simulation | None, width: int) -> list[str]:
    cluster = _cluster(plan)
    if simulation is None:
        rows = [
            [str(index), span_text(stage.devices), "×".join(map(str, stage.mesh_shape)) or "1",
             " + ".join(_span(plan, *chunk.layers) for chunk in stage.chunks)]
            for index, stage in enumerate(plan.stages)
        ]  # fmt: skip
        return table(["", "devices", "mesh", "layers"], rows, "<<<<", width, shrink=3)
    head = ["", "devices", "mesh", "layers", "forward", "backward", "busy", "memory per device"]
    rows = []
    for index, (stage, predicted) in enumerate(zip(plan.stages, plan.prediction.stages)):
        limit = min(cluster.device(device).memory_bytes for device in stage.devices)
        busy = predicted.busy_s(plan.microbatches)
        rows.append(
            [
                str(index),
                span_text(stage.devices),
                "×".join(map(str, stage.mesh_shape)) or "1",
                " + ".join(_span(plan, *chunk.layers) for chunk in stage.chunks),
                seconds_text(predicted.forward_s),
                seconds_text(predicted.backward_s),
                f"{100 * busy / simulation.makespan_s:.0f} %" if simulation.makespan_s else "",
                _of_limit(predicted.peak_bytes, limit, width >= 96),
            ]
        )
    lines = table(head, rows, "<<<<>>><", width, shrink=3)
    lines += wrap_lines("forward and backward are of one microbatch", width, "  ")
    if counts := _parameter_counts(plan, graph):
        lines += wrap_lines("parameters: " + ", ".join(map(magnitude_text, counts)), width, "  ", "    ")
    return lines


def _span(plan: Plan, first: int, end: int) -> str:
    span = layer_span(plan.layers[first], plan.layers[end - 1])
    return f"{span} ({end - first})" if end - first > 1 else span


def _of_limit(used: float, limit: float, wide: bool) -> str:
    return (
        f"{bar_text(used / limit)} {used / 2**30:.3g} of {bytes_text(limit)}"
        if wide
        else f"{used / 2**30:.3g}/{bytes_text(limit)}"
    )


def _parameter_counts(plan: Plan, graph: Graph | None) -> list[int]:
    """Elements of each stage's parameters, every copy counted once per stage; empty without the graph."""
    if graph is None:
        return []
    numel = {node.meta["source"].name: node.meta["type"].numel for node in graph.placeholders("parameter")}
    return [sum(numel.get(name, 0) for chunk in stage.chunks for name in chunk.parameters) for stage in plan.stages]


def _layers(plan: Plan, graph: Graph | None, width: int) -> list[str]:
    """Per stage, or per run of stages with the same mesh and the same split of equal layers."""
    blocks: list[tuple[int, int, str, list[Group]]] = []  # first and last stage, mesh, layers
    for index, stage in enumerate(plan.stages):
        mesh = " × ".join(f"{size} {name}" for size, name in zip(stage.mesh_shape, axis_names(stage)))
        groups = layer_rows(plan, index, graph) if mesh else []
        together = merged(blocks[-1][3], groups) if blocks and blocks[-1][2] == mesh else None
        if together is None:
            blocks.append((index, index, mesh, groups))
        else:
            blocks[-1] = (blocks[-1][0], index, mesh, together)
    lines: list[str] = []
    for begin, last, mesh, groups in blocks:
        title = f"  stage {span_text(range(begin, last + 1))}: "
        lines.append(title + (f"mesh {mesh}" if mesh else "one device each, nothing is split"))
        column = min(
            max((len(n) for g in groups for rows in g.rows for row in rows for n in _names(row.names)), default=0), 30
        )
        for group in groups:
            lines += _group_lines(group, column, width, "" if begin == last else " per stage")
        if graph is None and mesh:
            for family, cuts in op_summary(plan.stages[begin]):
                text = "; ".join(f"{what} ({count}×)" for what, count in cuts)
                lines += wrap_lines(text, width, f"    {family} work: ", "      ")
    return lines


def _names(names: Sequence[str]) -> list[str]:
    """Names joined to texts of at most 30 characters."""
    return textwrap.wrap(", ".join(names), 30, break_long_words=False)


def _group_lines(group: Group, column: int, width: int, each: str) -> Iterable[str]:
    repeated = f"  (×{group.count}{each})" if group.count > 1 else ""
    for title, rows in zip(group.titles, group.rows):
        if len(rows) == 1 and rows[0].names == (title.rpartition(".")[2],) and not repeated:
            yield from _columns([title], rows[0].work, rows[0].weights, max(column + 2, len(title)), width, "    ")
            continue
        yield f"    {title}{repeated}"
        for row in rows:
            yield from _columns(_names(row.names), row.work, row.weights, column, width, "      ")


def _columns(names: list[str], work: str, weights: str, column: int, width: int, indent: str) -> Iterable[str]:
    texts = [f"work: {work}"] if work else []
    texts += [f"weight: {weights}" if work else weights] if weights else []
    room = max(20, width - len(indent) - column - 2)
    right = [line for text in texts for line in textwrap.wrap(text, room, subsequent_indent="  ")]
    for k in range(max(len(names), len(right))):
        name = names[k] if k < len(names) else ""
        yield f"{indent}{name.ljust(column)}  {right[k] if k < len(right) else ''}".rstrip()


def _schedule_name(plan: Plan) -> str:
    return plan.schedule if plan.num_chunks == 1 else f"{plan.schedule} with {plan.num_chunks} chunks per stage"


def _schedule(plan: Plan, simulation: Simulation, width: int) -> list[str]:
    if len(plan.stages) == 1 and plan.num_chunks == 1:
        return ["  one stage: every microbatch forward and backward in turn, then the update"]
    schedule = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked)
    picture = grid(schedule, simulation, width - 2).splitlines()
    return [*(f"  {line}" for line in picture), *wrap_lines(legend(schedule), width, "  ")]


def _seconds(plan: Plan, width: int) -> list[str]:
    rows = []
    least_s = _NEGLIGIBLE_SHARE * plan.prediction.step_s
    shown = [
        cause
        for cause in _CAUSES
        if any(s.seconds.get(cause, 0.0) * _times(plan, cause) > least_s for s in plan.prediction.stages)
    ]
    for stage in plan.prediction.stages:
        seconds = [stage.seconds.get(c, 0.0) * _times(plan, c) for c in shown]
        # a transfer overlaps compute: the stage itself is busy with the other causes only
        busy = stage.busy_s(plan.microbatches)
        rows.append([*seconds, max(0.0, plan.prediction.step_s - busy)])
    lines = _by_stage([*(_CAUSES[c] for c in shown), "idle"], rows, seconds_text, width)
    if "transfer" in shown:
        lines.append("  transfers overlap the other columns; idle = step minus the other columns")
    if "overlapped" in shown:
        said = "overlapped: the part of the gradient reduction that runs during the last backward; in no sum"
        lines += wrap_lines(said, width, "  ")
    return lines


def _times(plan: Plan, cause: str) -> int:
    return 1 if cause in STEP_CAUSES else plan.microbatches


def _memory(plan: Plan, width: int) -> list[str]:
    shown = {"parameters": "weights"} | dict.fromkeys(("buffers", "inputs", "framework"), "runtime")
    sums: list[Counter[str]] = []
    for stage in plan.prediction.stages:
        sums.append(Counter())
        for cause, size in stage.memory_bytes.items():
            sums[-1][shown.get(cause, cause)] += size  # type: ignore[assignment]
    names = list(dict.fromkeys(name for by_cause in sums for name in by_cause))
    rows = [[*(by_cause[name] for name in names), sum(by_cause.values())] for by_cause in sums]
    legend_line = "  runtime = framework overhead, input batch, message buffers"
    return [*_by_stage([*names, "total"], rows, bytes_text, width), legend_line]


def _by_stage(
    head: Sequence[str], rows: Sequence[Sequence[float]], text: Callable[[float], str], width: int
) -> list[str]:
    """A row per stage; neighbours whose rows read alike are one row."""
    cells = [[text(value) for value in row] for row in rows]
    merged = []
    for key, run in groupby(enumerate(cells), key=lambda pair: pair[1]):
        numbers = [index for index, _ in run]
        merged.append([span_text(numbers), *key])
    return stack_tables(["stage", *head], merged, "<" + ">" * len(head), width)


def _collectives(plan: Plan, width: int) -> list[str]:
    rows: list[tuple[int, str]] = []
    for index, stage in enumerate(plan.prediction.stages):
        counts = sorted(stage.collectives.items(), key=lambda item: (item[0].split()[0] != "forward", item[0]))
        each = ", ".join(
            f"{count} × {name.replace('_', '-')}" for name, count in counts if not name.startswith("step ")
        )
        once = ", ".join(
            f"{count} × {name.removeprefix('step ').replace('_', '-')}"
            for name, count in counts
            if name.startswith("step ")
        )
        summed = gradient_reduction_words(plan.stages[index])
        rows.append(
            (
                index,
                f"{each or 'none'} per microbatch"
                + (f"; {once} per step" if once else "")
                + (f"; gradients summed over {summed}" if summed else ""),
            )
        )
    lines: list[str] = []
    for text, run in group_runs(rows, lambda row: row[1]):
        lines += wrap_lines(text, width, f"  stage {span_text([index for index, _ in run])}: ", "    ")
    return lines


def _alternatives(plan: Plan, width: int) -> list[str]:
    others = plan.prediction.alternatives
    if not others:
        return []
    chosen = ["this plan", seconds_text(plan.prediction.step_s), "1.00×", str(plan.microbatches), ""]
    rows = [chosen]
    for other in others:
        step_s = other.get("step_s")
        rows.append(
            [
                f"{other['name']} parallel only",
                "–" if step_s is None else seconds_text(step_s),
                "–" if step_s is None else f"{step_s / plan.prediction.step_s:.2f}×",
                str(other.get("microbatches", "–")),
                str(other.get("why", "")),
            ]
        )
    return table(["", "step", "ratio", "microbatches", "why"], rows, "<>>><", width, shrink=4)


def _prices(plan: Plan, width: int) -> list[str]:
    lines: list[str] = []
    if text := _source_shares(plan):
        lines += wrap_lines(text, width, "  ", "    ")
    cluster = _cluster(plan)
    devices: set[str] = set()
    for host in cluster.hosts:
        device = host.device
        if device.name in devices:
            continue
        devices.add(device.name)
        kinds = list(dict.fromkeys(curve.kind for curve in device.curves))
        if kinds:
            text = f"measured: {', '.join(kinds)}, memory rate and launch; everything else: roofline from these rates"
        else:
            text = "nothing measured: roofline from data sheet constants"
        lines += wrap_lines(text, width, f"  {device.name}: ", "    ")
    links = [host.link for host in cluster.hosts] + ([cluster.link] if len(cluster.hosts) > 1 else [])
    for link in dict.fromkeys(links):
        kind = "measured" if "measured" in link.source else "published and assumed constants"
        lines += wrap_lines(
            f"{kind}, {link.bytes_per_s / 1e9:.4g} GB/s, {link.alpha_s * 1e6:.3g} µs", width, f"  {link.name}: ", "    "
        )
    return lines


def _source_shares(plan: Plan) -> str:
    """The shares of the busiest stage's seconds that were measured, in words; "" for a document that does not say."""
    shares = source_shares(plan)
    if not shares:
        return ""
    parts = [
        f"{100 * sum(shares.get(source, 0.0) for source in sources):.0f} % {words}"
        for words, sources in _SOURCES
        if any(shares.get(source) for source in sources)
    ]
    return f"prices of the busiest stage: {', '.join(parts)}"


def _notes(plan: Plan, graph: Graph | None) -> list[str]:
    notes = [f"not executable yet: {text}" for text in plan.not_executable(graph)]
    notes += plan.prediction.notes
    idle = num_idle_devices(plan)
    if idle and not any("idle" in note for note in notes):
        notes.append(f"{idle} of {plan.num_devices} devices stay idle")
    if replicated_fraction(plan) >= 0.0005:
        notes.append(f"{100 * replicated_fraction(plan):.1f} % of all FLOPs are repeated on several devices")
    if forced := plan.provenance.get("strategy"):
        shape = forced if isinstance(forced, str) else ", ".join(f"{key} {size}" for key, size in forced.items())
        notes.append(f"the parallel shape was given: {shape}")
    return notes


# ---- text


def _titled(title: str, lines: list[str]) -> list[str]:
    return [title, *lines] if lines else []


def _bullets(texts: Sequence[str], width: int) -> list[str]:
    return [line for text in texts for line in wrap_lines(text, width, "  - ", "    ")]


def _cluster(plan: Plan) -> Cluster:
    return Cluster.from_json(json.dumps(plan.cluster))


# ---- A plan's figures as numbers: one flat JSON object, and those of them that are computed from several


def summary_json(plan: Plan) -> dict[str, Any]:
    """The plan's figures as plain JSON values: seconds, bytes, fractions; lists in stage order. "prices" is the plan's
    ``price_state``; where it is "edited" the figures that are prices are null."""
    passes = dict(plan.provenance.get("passes", {}))
    prediction = plan.prediction
    figures: dict[str, Any] = {
        "model": plan.model,
        "prices": plan.price_state,
        "cluster": str(plan.cluster.get("name", "")),
        "num_devices": plan.num_devices,
        "global_batch": plan.global_batch,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "optimizer": plan.optimizer,
        "recompute": plan.recompute,
        "chunks": plan.num_chunks,
        "precision": plan.precision,
        "not_executable": plan.not_executable(),
        "step_s": prediction.step_s,
        "bound_gap": prediction.bound_gap,
        "sources": source_shares(plan),
        "tflops_per_device": tflops_per_device(plan),
        "replicated_flops_fraction": replicated_fraction(plan),
        "idle_devices": num_idle_devices(plan),
        "search_s": passes.get("total", 0.0),
        "capture_s": passes.get("capture", 0.0),
        "passes": passes,
        "peak_memory_bytes": [stage.peak_bytes for stage in prediction.stages],
        "stages": [
            {
                "devices": list(stage.devices),
                "mesh_shape": list(stage.mesh_shape),
                "axes": list(axis_names(stage)),
                "layers": [plan.layers[k] for chunk in stage.chunks for k in range(*chunk.layers)],
                "recompute": [
                    mode
                    for chunk in stage.chunks
                    for mode in chunk.recompute or ("none",) * (chunk.layers[1] - chunk.layers[0])
                ],
                "residencies": dict(Counter(h.pattern for chunk in stage.chunks for h in chunk.parameters.values())),
                "wire": [asdict(wire) for wire in stage.wire],
                "forward_s": predicted.forward_s,
                "backward_s": predicted.backward_s,
                "step_s": predicted.step_s,
                "seconds": dict(predicted.seconds),
                "memory_bytes": dict(predicted.memory_bytes),
                "collectives": dict(predicted.collectives),
            }
            for stage, predicted in zip(plan.stages, prediction.stages)
        ],
        "alternatives": [dict(row) for row in prediction.alternatives],
        "notes": list(prediction.notes),
    }
    if plan.price_state != "edited":
        return figures
    old = dict.fromkeys(("step_s", "bound_gap", "sources", "tflops_per_device", "peak_memory_bytes", "alternatives"))
    named = ("forward_s", "backward_s", "step_s", "seconds", "memory_bytes", "collectives")
    return {**figures, **old, "stages": [{**stage, **dict.fromkeys(named)} for stage in figures["stages"]]}


def tflops_per_device(plan: Plan) -> float:
    """Useful 10¹² operations per second and device of the cluster, idle ones counted; 0 for a step of no time."""
    step_s = plan.prediction.step_s
    return plan.prediction.flops / step_s / plan.num_devices / 1e12 if step_s else 0.0


def replicated_fraction(plan: Plan) -> float:
    """The share of all FLOPs that several devices repeat."""
    total = plan.prediction.flops + plan.prediction.replicated_flops
    return plan.prediction.replicated_flops / total if total else 0.0


def source_shares(plan: Plan) -> dict[str, float]:
    """The busiest stage's seconds by where their prices come from, as shares of 1; empty where the plan does not
    say."""
    total = sum(plan.prediction.sources.values())
    return {name: seconds / total for name, seconds in plan.prediction.sources.items()} if total else {}


def num_idle_devices(plan: Plan) -> int:
    """Devices of the cluster that no stage uses."""
    return len(idle_devices(plan))


def idle_devices(plan: Plan) -> tuple[int, ...]:
    """The devices of the cluster that no stage uses, in order."""
    used = {device for stage in plan.stages for device in stage.devices}
    return tuple(device for device in range(plan.num_devices) if device not in used)


def idle_text(plan: Plan) -> str:
    """One sentence: which devices do nothing under this plan, and why; "" where all work."""
    idle = idle_devices(plan)
    if not idle:
        return ""
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    kinds = {cluster.device(device).name for device in idle}
    used = {cluster.device(device).name for stage in plan.stages for device in stage.devices}
    kind = "" if kinds <= used else f", {' and '.join(sorted(kinds))}"
    return f"{len(idle)} of {plan.num_devices} devices do nothing ({span_text(idle)}{kind}): {_idle_reason(plan)}"


def _idle_reason(plan: Plan) -> str:
    """The reason why a plan leaves devices idle, as far as the document tells."""
    if plan.provenance.get("strategy"):
        return "the given strategy does not use them"
    whole = [(row["step_s"], row["name"]) for row in plan.prediction.alternatives if row.get("step_s")]
    constrained = " that keeps the constraints" if plan.provenance.get("constraints") else ""
    if not whole:
        return f"no plan on more devices{constrained} was predicted to be faster"
    step_s, name = min(whole)
    return (
        f"no plan on more devices{constrained} was predicted to be faster ({name} parallel only, on all of them: "
        f"{seconds_text(step_s)} a step, this plan {seconds_text(plan.prediction.step_s)})"
    )


def compared(plans: Sequence[Plan], width: int = 100) -> str:
    """Several plans side by side as text, a line each."""
    rows = []
    for number, plan in enumerate(plans):
        meshes = " + ".join("×".join(map(str, stage.mesh_shape)) or "1" for stage in plan.stages)
        rows.append(
            (
                str(number),
                seconds_text(plan.prediction.step_s),
                bytes_text(max(stage.peak_bytes for stage in plan.prediction.stages)),
                f"{plan.prediction.bound_gap:.1%}",
                f"{plan.microbatches} × {plan.schedule}",
                meshes,
                plan.recompute,
                "no" if plan.not_executable() else "yes",
            )
        )
    head = ("", "step", "peak", "gap", "microbatches", "stages", "recompute", "runs")
    return "\n".join(table(head, rows, ">>>><<<<", width, 5))
