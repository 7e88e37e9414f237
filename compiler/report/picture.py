"""The picture of a plan as data: one JSON document that the page (``page/``) draws.

Sections of the document, in the order of the page::

    facts        what the plan promises, as (name, text)
    cluster      runs of alike hosts with the stage of every device, links, idle devices
    stages       device group, mesh and its axes, layers, seconds and bytes by cause, limit
    timeline     per stage the simulated actions, messages and end of the step, and the measured ones of a trace
    tree         runs of equal layers; each layer says which of ``outline.kinds`` it is
    choices      this plan, others that were given, and the alternatives of its search
    search       passes, cases, the bound
    prices       seconds by the source of their prices; what was measured of devices and links
    notes        what the plan says about itself

**Rows of a timeline** are compact, since a pipeline repeats itself. Times are whole ticks of ``tick_s``. A row has a
text with one character per action, ``codes[character − "A"]``; the gaps between actions, where ``[gap, n]`` stands for
n equal ones; and the ticks that each code takes, but for ``unlike``: (position, ticks). The microbatch of an action is
how often its code stood before it, unless the row lists ``microbatches``.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ...costmodel.cluster import Cluster
from ..intra_op.stage_cost import STEP_CAUSES
from ..ir.graph import Graph
from ..pipeline.families import PIPEDREAM, generate
from ..pipeline.measured import MeasuredStep, RankSpans
from ..pipeline.simulate import Simulation
from ..plan.plan import Plan, StagePrediction
from ..search.predict import plan_messages, simulate_plan, weight_seconds
from ..text import bytes_text, count_text, rate_text, seconds_text, span_text
from .describe import (
    axis_names,
    gradient_reduction_words,
    layer_rows,
    layer_span,
    recompute_words,
    repeated_blocks,
    sharding_words,
    spell,
)
from .explain import idle_devices, idle_text, replicated_fraction, source_shares, tflops_per_device
from .outline import outline

__all__ = ["picture", "stage_end"]

WHY_SECONDS = 30.0  # that a page may spend on the choices of layers
TICKS = 20_000_000  # per step: a tick is far below what a screen can show
#: causes of seconds that lie beside a stage's own work
BESIDE = ("transfer", "overlapped")


def picture(
    plan: Plan, graph: Graph | None = None, trace: MeasuredStep | None = None, others: Sequence[Plan] = ()
) -> dict[str, Any]:
    """The document of a plan. graph: the captured model, with which layers say why; trace: a measured step of this
    plan; others: plans to compare with. Raises ValueError for a graph or a trace of another model."""
    if trace is not None and trace.model != plan.model:
        raise ValueError(
            f"a trace is of a run of the plan that it is drawn with, but got one of model {trace.model} and a plan for "
            f"{plan.model}; pass the trace of this plan"
        )
    simulation = simulate_plan(plan)
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    model = outline(plan, graph) if graph is not None else _valid_outline(plan)
    return {
        "title": f"{plan.cluster.get('name', 'a cluster')}: {seconds_text(plan.prediction.step_s)} a step",
        "step_s": plan.prediction.step_s,
        "bound_s": plan.prediction.bound_s,
        "microbatches": plan.microbatches,
        "facts": _facts(plan, simulation),
        "cluster": _cluster(plan, cluster),
        "stages": [_stage(plan, index, cluster) for index in range(len(plan.stages))],
        "timeline": _timeline(plan, simulation, trace),
        "outline": {
            "kinds": _kinds(plan, model),
            "why": _why(plan, model, graph),
            "missing": _missing(plan, model),
            "words": {
                label: spell(label)
                for kind in model.get("kinds", [])
                for op in kind["ops"]
                for label in op["labels"].split(",")
                if label
            },
        },
        "tree": _tree(plan, model),
        "choices": _choices(plan, others),
        "search": _search(plan),
        "prices": _prices(plan, cluster),
        "notes": _notes(plan),
    }


# ---- facts


def _facts(plan: Plan, simulation: Simulation) -> list[tuple[str, str]]:
    prediction = plan.prediction
    shape = " for the given parallel shape" if plan.provenance.get("strategy") else ""
    chunks = f", {plan.num_chunks} virtual stages on each" if plan.num_chunks > 1 else ""
    facts = [
        ("step", f"{seconds_text(prediction.step_s)} predicted"),
        ("speed", f"{rate_text(plan.global_batch / prediction.step_s)} samples/s" if prediction.step_s else ""),
        ("work", f"{tflops_per_device(plan):.3g} TFLOPS per device"),
        ("bound", f"at most {100 * prediction.bound_gap:.1f} % above what is proven of the cost model{shape}"),
        (
            "batch",
            f"{plan.global_batch:,} = {count_text(plan.microbatches, 'microbatch')} × "
            f"{count_text(plan.microbatch_size, 'sample')}",
        ),
        ("schedule", f"{plan.schedule}, {count_text(len(plan.stages), 'stage')}{chunks}"),
        ("bubble", f"{100 * simulation.bubble_fraction:.0f} % of all stages' time"),
        ("model", f"{count_text(len(plan.layers), 'layer')}, {count_text(sum(plan.model_ops.values()), 'op')}"),
        ("weights", sharding_words(plan) or "replicated"),
        ("recompute", recompute_words(plan) or "none"),
        ("optimizer", plan.optimizer),
        ("precision", "the model's own" if plan.precision == "model" else plan.precision),
        ("codes", ", ".join(f"{what} in {code}" for what, code in plan.codes.items())),
    ]
    return [(name, text) for name, text in facts if text]


def _notes(plan: Plan) -> list[str]:
    notes = [plan.price_note] if plan.price_state == "edited" else []
    notes += [f"cannot be run yet: {text}" for text in plan.not_executable()]
    notes += [f"does not hold: {text}" for text in plan.check()]
    notes += plan.prediction.notes
    if replicated_fraction(plan) >= 0.0005:
        notes.append(f"{100 * replicated_fraction(plan):.1f} % of all FLOPs are repeated on several devices")
    return notes


# ---- the cluster and its stages


def _cluster(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    stage_of = {device: index for index, stage in enumerate(plan.stages) for device in stage.devices}
    rows, first = [], 0
    for host in cluster.hosts:
        devices = [stage_of.get(device, -1) for device in range(first, first + host.num_devices)]
        rows.append((host, devices, first))
        first += host.num_devices
    hosts = []
    for _, run in groupby(rows, key=lambda row: (row[0], row[1])):
        alike = list(run)
        host, devices, first = alike[0]
        device = host.device
        hosts.append(
            {
                "count": len(alike),
                "first_device": first,
                "stages": devices,
                "device": device.name,
                "memory": bytes_text(device.memory_bytes),
                "link": _link(host.link),
            }
        )
    idle = idle_devices(plan)
    return {
        "name": cluster.name,
        "num_devices": plan.num_devices,
        "hosts": hosts,
        "link": _link(cluster.link) if len(cluster.hosts) > 1 else "",
        "idle": len(idle),
        "idle_text": idle_text(plan),
    }


def _link(link: Any) -> str:
    return f"{link.name}, {link.bytes_per_s / 1e9:.4g} GB/s, {link.alpha_s * 1e6:.3g} µs"


def _stage(plan: Plan, index: int, cluster: Cluster) -> dict[str, Any]:
    stage, predicted = plan.stages[index], plan.prediction.stages[index]
    m, step_s = plan.microbatches, plan.prediction.step_s
    seconds = {cause: s * (1 if cause in STEP_CAUSES else m) for cause, s in predicted.seconds.items() if s > 0}
    busy_s = predicted.busy_s(m)
    return {
        "devices": [stage.devices[0], stage.devices[-1]],
        "mesh": list(stage.mesh_shape),
        "axes": list(axis_names(stage)),
        "layers": [
            f"{layer_span(plan.layers[chunk.layers[0]], plan.layers[chunk.layers[1] - 1])}"
            f" ({count_text(chunk.layers[1] - chunk.layers[0], 'layer')})"
            for chunk in stage.chunks
        ],
        "forward_s": predicted.forward_s,
        "backward_s": predicted.backward_s,
        "step_s": predicted.step_s,
        "busy_s": busy_s,
        "idle_s": max(0.0, step_s - busy_s),
        "seconds": {cause: s for cause, s in seconds.items() if cause not in BESIDE},
        "beside": {cause: s for cause, s in seconds.items() if cause in BESIDE},
        "memory": {cause: size for cause, size in predicted.memory_bytes.items() if size > 0},
        "limit_bytes": min(cluster.device(device).memory_bytes for device in stage.devices),
        "collectives": dict(predicted.collectives),
        "gradients": gradient_reduction_words(stage),
    }


# ---- the timeline


def _timeline(plan: Plan, simulation: Simulation, trace: MeasuredStep | None) -> dict[str, Any]:
    longest = max(simulation.makespan_s, 0.0 if trace is None else trace.step_s) or 1.0
    tick_s = longest / TICKS
    asynchronous = plan.schedule == PIPEDREAM
    messages = plan_messages(plan, simulation)
    places = generate(
        plan.schedule, len(plan.stages), min(plan.microbatches, 2 * len(plan.stages)), plan.chunks_asked
    ).places()
    stages = []
    for index, (row, predicted) in enumerate(zip(simulation.timeline, plan.prediction.stages)):
        last_s = row[-1][1] if row else 0.0
        beside = predicted.seconds.get("overlapped", 0.0)
        parts = [] if asynchronous else stage_end(predicted, last_s)
        ends = [[name, round(start / tick_s), max(1, round(s / tick_s)), "end"] for name, start, s in parts]
        if beside and not asynchronous:
            ends.append(["gradient reduction beside the backward", max(0, round((last_s - beside) / tick_s)),
                         round(min(beside, last_s) / tick_s), "beside"])  # fmt: skip
        stages.append(
            {
                "actions": _row((((a.kind, a.chunk), a.microbatch, s, e) for s, e, a in row), tick_s),
                "messages": _row(
                    (
                        (
                            (places[one.source][0], one.is_forward, one.source, one.target),
                            one.microbatch,
                            one.start_s,
                            one.end_s,
                        )
                        for one in messages[index]
                        if one.end_s > one.start_s
                    ),
                    tick_s,
                ),
                "parts": _parts(predicted),
                "ends": ends,
            }
        )
    return {
        "tick_s": tick_s,
        "pipeline_s": simulation.pipeline_s,
        "makespan_s": simulation.makespan_s,
        "chunks": plan.num_chunks,
        "asynchronous": asynchronous,
        "stages": stages,
        "measured": None if trace is None else _measured(trace, tick_s),
    }


def _row(actions: Iterable[tuple[Any, int, float, float]], tick_s: float) -> dict[str, Any]:
    """The row of (code, microbatch, start, end)."""
    codes: dict[Any, int] = {}
    ticks: list[int] = []
    text: list[str] = []
    gaps: list[Any] = []
    unlike: list[tuple[int, int]] = []
    seen: Counter[Any] = Counter()
    microbatches: list[int] = []
    plain, before = True, 0
    for position, (code, microbatch, start_s, end_s) in enumerate(actions):
        start, length = round(start_s / tick_s), round((end_s - start_s) / tick_s)
        if code not in codes:
            codes[code] = len(codes)
            ticks.append(length)
        at = codes[code]
        if abs(length - ticks[at]) > 1:
            unlike.append((position, length))
        else:
            length = ticks[at]
        text.append(chr(ord("A") + at))
        gap, before = start - before, start + length
        if gaps and isinstance(gaps[-1], list) and gaps[-1][0] == gap:
            gaps[-1][1] += 1
        elif len(gaps) > 1 and gaps[-1] == gaps[-2] == gap:
            gaps[-2:] = [[gap, 3]]
        else:
            gaps.append(gap)
        plain = plain and microbatch == seen[code]
        seen[code] += 1
        microbatches.append(microbatch)
    return {
        "codes": [list(code) for code in codes],
        "ticks": ticks,
        "text": "".join(text),
        "gaps": gaps,
        "unlike": unlike,
        "microbatches": None if plain else microbatches,
    }


def _parts(predicted: StagePrediction) -> dict[str, list[tuple[str, float]]]:
    """Kind of action → its parts as shares of its time, in the order in which they are drawn."""
    seconds = predicted.seconds
    again, weight, host = seconds.get("recompute", 0.0), weight_seconds(predicted), seconds.get("host", 0.0) / 2
    ahead = seconds.get("forward", predicted.forward_s)
    back = seconds.get("backward_input", max(0.0, predicted.backward_s - weight - again))
    kinds = {
        "F": ([("compute", ahead)], predicted.forward_s),
        "B": ([("recompute", again), ("compute", back + weight)], predicted.backward_s),
        "I": ([("recompute", again), ("compute", back)], max(0.0, predicted.backward_s - weight)),
        "W": ([("compute", weight)], weight),
    }
    out = {}
    for kind, (parts, whole) in kinds.items():
        if whole > 0:
            parts = [*parts, ("host", host if kind != "W" else 0.0)]
            rest = max(0.0, whole - sum(s for _, s in parts))
            shares = [(name, s / whole) for name, s in [*parts, ("communication", rest)]]
            out[kind] = [(name, round(share, 4)) for name, share in shares if share > 5e-4]
    return out


def stage_end(predicted: StagePrediction, last_s: float) -> list[tuple[str, float, float]]:
    """The end of a stage's step, whose last action ends at ``last_s``: (what, start, seconds), one after the other."""
    seconds = predicted.seconds
    known = [(name, seconds.get(name, 0.0)) for name in ("optimizer", "tied", "loss")]
    rest = max(0.0, predicted.step_s - sum(s for _, s in known))
    reduction = "gradient reduction and gather" if seconds.get("gather") else "gradient reduction"
    out, at = [], last_s
    for name, s in [(reduction, rest), *known]:
        if s > 0:
            out.append((name, at, s))
            at += s
    return out


def _measured(trace: MeasuredStep, tick_s: float) -> dict[str, Any]:
    """The spans of the first rank of every stage, and a line for each rank."""
    firsts: dict[int, RankSpans] = {}
    for rank in trace.ranks:
        if rank.stage is not None:
            firsts.setdefault(rank.stage, rank)

    def ticks(seconds: float) -> int:
        return round(seconds / tick_s)

    return {
        "step_s": trace.step_s,
        "rows": {
            str(stage): {
                "rank": rank.rank,
                "spans": [
                    [s.name, ticks(s.start_s), ticks(s.end_s - s.start_s), ticks(s.wait_s), ticks(s.exchange_s),
                     ticks(s.repeat_s), ticks(s.send_s)]
                    for s in rank.spans
                ],
            }
            for stage, rank in sorted(firsts.items())
        },
        "ranks": [
            {"rank": r.rank, "stage": r.stage, "peak_bytes": r.peak_bytes,
             "end_s": max((s.end_s for s in r.spans), default=0.0)}
            for r in trace.ranks
        ],
    }  # fmt: skip


# ---- the model


def _valid_outline(plan: Plan) -> Mapping[str, Any]:
    """The outline of a saved plan; empty if it has none, or if it is of other decisions."""
    try:
        kinds, kind_of = plan.outline.get("kinds", []), plan.outline.get("layers", [])
        labels = {op: ",".join(x) for stage in plan.stages for chunk in stage.chunks for op, x in chunk.ops.items()}
        rows = [row for kind in kinds for row in kind["ops"]]
        alike = len(kind_of) == len(plan.layers) and all(0 <= kind < len(kinds) for kind in kind_of)
        return plan.outline if alike and all(labels.get(row["name"]) == row["labels"] for row in rows) else {}
    except (KeyError, TypeError, AttributeError):
        return {}


def _kinds(plan: Plan, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kinds of the outline, every weight with its sharding."""
    out = []
    for kind in model.get("kinds", []):
        homes = plan.stages[kind["stage"]].homes
        weights = [
            {"messages": [], **row, "sharding": homes[row["name"]].to_json(), "pattern": homes[row["name"]].pattern}
            for row in kind["weights"]
            if row["name"] in homes
        ]
        ops = [{"messages": [], "again": False, **row} for row in kind["ops"]]
        out.append({"gathers": [], **kind, "ops": ops, "weights": weights})
    return out


def _missing(plan: Plan, model: Mapping[str, Any]) -> str:
    """A sentence about what is not known of the model; "" if all is."""
    if model:
        return ""
    how = "make the page with --target MODEL (or graph=), or plan and save again"
    if plan.outline:
        return f"The plan was edited: what it holds of modules, shapes and messages is of other decisions. {how}."
    return f"This plan was saved without modules, shapes and messages of the model; {how} to see them."


def _tree(plan: Plan, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs of equal layers, chunk by chunk in the order of the model."""
    chunks = sorted(
        (
            (chunk.layers, index, number)
            for index, stage in enumerate(plan.stages)
            for number, chunk in enumerate(stage.chunks)
        )
    )
    out: list[dict[str, Any]] = []
    for (first, end), index, number in chunks:
        where = {"stage": index, "chunk": number}
        if not model:
            if number:
                continue
            groups = layer_rows(plan, index)
            out += [
                {
                    **where,
                    "title": " + ".join(group.titles),
                    "count": group.count,
                    "words": [[", ".join(row.names), row.weights] for rows in group.rows for row in rows],
                }
                for group in groups
            ]
            continue
        modes = dict(zip(range(first, end), plan.stages[index].chunks[number].recompute))
        keys = [(model["layers"][k], modes.get(k, "none")) for k in range(first, end)]
        for at, period, count in repeated_blocks(keys):
            block = range(first + at, first + at + period)
            last = range(first + at + (count - 1) * period, first + at + count * period)
            spans = [layer_span(plan.layers[a], plan.layers[b]) for a, b in zip(block, last)]
            out.append(
                {
                    **where,
                    "title": spans[0] if period == 1 else f"{spans[0]} … {spans[-1].rpartition('.')[2]}",
                    "count": count,
                    "layers": [
                        {
                            "name": name,
                            "first": plan.layers[k],
                            "like": plan.layers[model["kinds"][model["layers"][k]]["layer"]],
                            "kind": model["layers"][k],
                            "recompute": modes.get(k, "none"),
                        }
                        for k, name in zip(block, spans)
                    ],
                }
            )
    return out


def _why(plan: Plan, model: Mapping[str, Any], graph: Graph | None) -> dict[str, list[dict[str, Any]]]:
    """Kind of layer → what ``why`` says of its first layer; empty without the graph. Kinds that come after
    ``WHY_SECONDS`` are left out, and the page says how to ask."""
    if graph is None:
        return {}
    out: dict[str, list[dict[str, Any]]] = {}
    begin = time.perf_counter()
    for number, kind in enumerate(model["kinds"]):
        if time.perf_counter() - begin > WHY_SECONDS:
            break
        answer = plan.why(plan.layers[kind["layer"]], graph)
        out[str(number)] = [{**asdict(row), **_finite(asdict(row)), "chosen": row.chosen} for row in answer.rows]
    return out


def _finite(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: row[name] if abs(row[name]) < float("inf") else None for name in ("seconds", "bytes")}


# ---- other plans, the search, prices


def _choices(plan: Plan, others: Sequence[Plan]) -> dict[str, Any]:
    return {
        "plans": [_summary(one, "this plan" if one is plan else "") for one in (plan, *others)],
        "alternatives": [
            {
                "name": str(row.get("name", "")),
                "step_s": row.get("step_s"),
                "microbatches": row.get("microbatches"),
                "why": str(row.get("why", "")),
            }
            for row in plan.prediction.alternatives
        ],
    }


def _summary(plan: Plan, name: str) -> dict[str, Any]:
    worst = max(range(len(plan.stages)), key=lambda s: plan.prediction.stages[s].peak_bytes)
    meshes = [
        f"{len(list(run))} × {'×'.join(map(str, shape)) or '1'}"
        for shape, run in groupby(stage.mesh_shape for stage in plan.stages)
    ]
    busiest = max(plan.prediction.stages, key=lambda stage: stage.busy_s(plan.microbatches))
    return {
        "name": name or f"{plan.schedule}, {' + '.join(meshes)}, {count_text(plan.microbatches, 'microbatch')}",
        "step_s": plan.prediction.step_s,
        "peak_bytes": plan.prediction.stages[worst].peak_bytes,
        "bound_gap": plan.prediction.bound_gap,
        "details": [
            ("stages", " + ".join(meshes)),
            ("axes", "; ".join(dict.fromkeys(" × ".join(axis_names(stage)) or "one device" for stage in plan.stages))),
            ("schedule", f"{plan.schedule}, {count_text(plan.microbatches, 'microbatch')}"),
            ("weights", sharding_words(plan) or "replicated"),
            ("recompute", recompute_words(plan) or "none"),
            ("fullest", f"stage {worst}, {bytes_text(plan.prediction.stages[worst].peak_bytes)}"),
            ("busiest stage", ", ".join(_largest(busiest, plan.microbatches))),
        ],
    }


def _largest(stage: StagePrediction, microbatches: int) -> list[str]:
    causes = [(s * (1 if c in STEP_CAUSES else microbatches), c) for c, s in stage.seconds.items() if c not in BESIDE]
    return [f"{cause.replace('_', ' ')} {seconds_text(s)}" for s, cause in sorted(causes, reverse=True)[:4] if s > 0]


def _search(plan: Plan) -> dict[str, Any]:
    provenance, prediction = plan.provenance, plan.prediction
    passes = {str(name): float(s) for name, s in dict(provenance.get("passes", {})).items()}
    cases, sentences = provenance.get("cases") or {}, []
    if cases:
        sentences.append(
            f"Lower bounds were made for {count_text(cases['meshes'], 'pair')} of a mesh and a microbatch count, and "
            f"for {count_text(cases['bounded'], 'case')} of them (groups, schedule, virtual stages). "
            f"{count_text(cases['solved'], 'case')} were solved."
        )
        if cases["left"] and cases.get("left_bound_s") is not None:
            sentences.append(
                f"The queue ended with {cases['left']:,} left: none of them takes less than "
                f"{seconds_text(cases['left_bound_s'])}, by its lower bound."
            )
        elif not cases["left"]:
            sentences.append("Nothing was left in the queue.")
    else:
        sentences.append("This plan does not say how many cases its search explored: it was made before that was kept.")
    if clocks := provenance.get("clocks"):
        sentences.append(f"{count_text(len(clocks), 'pipeline')} were built in full and simulated.")
    if provenance.get("strategy"):
        sentences.append("The parallel shape was given, and no other was searched.")
    sentences += [f"Constraint: {text}" for text in provenance.get("constraints") or ()]
    return {
        "passes": passes,
        "sentences": sentences,
        "bound": f"Proven: no plan of the stated space takes less than {seconds_text(prediction.bound_s)}; this one "
        f"takes {seconds_text(prediction.step_s)}, {100 * prediction.bound_gap:.1f} % of which is the gap.",
        "versions": [f"{name} {provenance[name]}" for name in ("meshwright", "torch") if name in provenance],
    }


def _prices(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    lines = []
    for host in dict.fromkeys(host.device for host in cluster.hosts):
        kinds = list(dict.fromkeys(curve.kind for curve in host.curves))
        lines.append([
            host.name,
            f"measured: {', '.join(kinds)}, memory rate and launch; everything else: roofline from these rates"
            if kinds else "nothing measured: roofline from data sheet constants",
        ])  # fmt: skip
    links = [host.link for host in cluster.hosts] + ([cluster.link] if len(cluster.hosts) > 1 else [])
    for link in dict.fromkeys(links):
        kind = "measured" if "measured" in link.source else "published and assumed constants"
        lines.append([link.name, f"{kind}: {link.bytes_per_s / 1e9:.4g} GB/s, {link.alpha_s * 1e6:.3g} µs"])
    return {
        "shares": source_shares(plan),
        "lines": lines,
        "idle": span_text(idle_devices(plan)),
    }
