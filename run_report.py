"""The report and the trace of a run, gathered from its ranks, and the recalibration from it.

Only ``parallel`` imports this module. ``compiler.report.prediction_error`` compares and ``compiler.report.calibration``
refits, both without any rank.
"""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist

from .compiler.pipeline.measured import MeasuredStep, RankSpans
from .compiler.plan.plan import Plan
from .compiler.report.calibration import Recalibration, refit
from .compiler.report.prediction_error import compare, without_skew
from .compiler.report.step_report import Report
from .costmodel.cluster import Cluster
from .costmodel.scaling import CalibrationFactors
from .costmodel.tables import usable_cores
from .runtime.execution.session import Session
from .runtime.profiling.trace import meeting_times, middle_steps, peak_bytes, rank_times

__all__ = ["foreign_bytes", "gather_report", "gather_trace", "recalibration"]


def gather_report(plan: Plan, session: Session, threshold: float, live_bytes: int | None) -> Report:
    """Compare the measurements of all ranks with the plan; the result is the same on every rank. Collective."""
    steps, world = session.trace.usable(), dist.get_world_size()
    walls: list[Any] = [None] * world
    dist.all_gather_object(walls, [step.wall_s for step in steps])
    count = min(map(len, walls))
    chosen = [steps[len(steps) - count + at] for at in middle_steps(walls)]
    own_times = rank_times(session.rank, session.stage, chosen, peak_bytes(session.device), live_bytes)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (own_times, meeting_times(chosen)))
    ranks = without_skew([times for times, _ in everyone], [met for _, met in everyone])
    notes = []
    cores = usable_cores()
    if session.device.type == "cpu" and len(ranks) > cores:
        notes.append(f"{len(ranks)} ranks share {cores} cores: times of single terms include each other's")
    return compare(plan, ranks, threshold, notes)


def gather_trace(plan: Plan, session: Session) -> MeasuredStep:
    """The last step of all ranks on one clock, the same on every rank. Collective; ValueError before a step was
    measured.

    The CPU ranks of one host read the same clock. Clocks of hosts, and those of CUDA devices, are equal when all ranks
    leave a barrier: they are off by as much as ranks leave it apart.
    """
    world = dist.get_world_size()
    dist.barrier()
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    origin = session.trace.mark()
    is_shared = session.device.type == "cpu"
    clocks: list[Any] = [None] * world
    dist.all_gather_object(clocks, (socket.gethostname(), origin if is_shared else None))
    if is_shared:  # the clock of the first rank of this host
        origin = next(mark for host, mark in clocks if host == socket.gethostname())
    own = RankSpans(session.rank, session.stage, tuple(session.trace.spans(origin)), peak_bytes(session.device))
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, own)
    if not any(rank.spans for rank in ranks):
        raise ValueError("a trace is of a measured step, but got none; train a few steps first")
    return MeasuredStep.of(plan.model, ranks)


def foreign_bytes(given: Iterable[weakref.ref[torch.Tensor]], session: Session) -> int:
    """Bytes of the original model's tensors, those that are still alive, on this rank beside the session's own."""
    session_storages = {
        x.untyped_storage().data_ptr() for x in (*session.state.parameters.values(), *session.state.buffers.values())
    }
    sizes: dict[int, int] = {}
    for x in (reference() for reference in given):
        if (
            x is not None
            and x.device.type == session.device.type
            and x.untyped_storage().data_ptr() not in session_storages
        ):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(sizes.values())


def recalibration(
    plan: Plan, report: Report, price: Callable[[Cluster], Plan], search: Callable[[Cluster], Plan]
) -> Recalibration:
    """The plan's cluster refitted to the report, the plan priced there (``price``) and the best plan (``search``).

    Needs no ranks. Raises ValueError for a report without steps."""
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    refitted, factors, current = refit(plan, report, cluster, price)
    about = {"recalibrated": datetime.now(UTC).isoformat(timespec="seconds"), "recalibrated by": _words(factors)}
    refitted = replace(refitted, provenance=tuple((dict(refitted.provenance) | about).items()))
    assert report.measured_step_s is not None
    return Recalibration(
        refitted, factors, report.measured_step_s, report.predicted_step_s, current, search(refitted), report.steps,
        report.notes,
    )  # fmt: skip


def _words(factors: CalibrationFactors) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in factors.to_json().items())
