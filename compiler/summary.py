"""A plan's figures as numbers: one flat JSON object, and those of them that are computed from several."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..costmodel.cluster import Cluster
from .describe import axis_names
from .typeset import bytes_text, seconds_text, span_text, table

if TYPE_CHECKING:
    from .plan import Plan

__all__ = [
    "compared",
    "idle_text",
    "num_idle_devices",
    "replicated_fraction",
    "source_shares",
    "summary_json",
    "tflops_per_device",
]


def summary_json(plan: Plan) -> dict[str, Any]:
    """The plan's figures as plain JSON values: seconds, bytes, fractions; lists in stage order."""
    passes = dict(plan.provenance.get("passes", {}))
    prediction = plan.prediction
    return {
        "model": plan.model,
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


def tflops_per_device(plan: Plan) -> float:
    """Useful 10¹² operations per second and device of the cluster, idle ones counted; 0 for a step of no time."""
    step_s = plan.prediction.step_s
    return plan.prediction.flops / step_s / plan.num_devices / 1e12 if step_s else 0.0


def replicated_fraction(plan: Plan) -> float:
    """The share of all FLOPs that several devices do alike."""
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
    """Why a plan leaves devices idle, as far as the document tells."""
    if plan.provenance.get("strategy"):
        return "the strategy that was asked for has no use for them"
    whole = [(row["step_s"], row["name"]) for row in plan.prediction.alternatives if row.get("step_s")]
    asked = " that keeps the constraints" if plan.provenance.get("constraints") else ""
    if not whole:
        return f"no plan on more devices{asked} was predicted to be faster"
    step_s, name = min(whole)
    return (
        f"no plan on more devices{asked} was predicted to be faster (pure {name} on all of them: "
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
