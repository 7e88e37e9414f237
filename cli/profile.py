"""``meshwright profile``: profiles the ranks of a torchrun job, or local ranks that it starts itself, and prints a
table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from ..compiler.errors import InfeasibleError
from ..compiler.frontend.capture import capture
from ..compiler.frontend.example_inputs import batch_extent, flat_inputs
from ..costmodel.cluster import Cluster
from ..costmodel.hardware import Device
from ..costmodel.tables import usable_cores
from ..model_profile import profile_model
from ..runtime.profiling.cluster_profile import profile
from ..runtime.transport.error_propagation import fail_together
from ..runtime.transport.launch import ensure_initialized, leave, spawn_local
from .targets import build_target
from .terminal import answers_only, progress_bar

__all__ = ["Options", "on_rank", "run", "table"]

_MODEL_SHARE = 0.5  # of the budget, for the ops of a model


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    output: str | None
    budget_s: float
    quick: bool
    model: str | None
    global_batch: int | None
    optimizer: str | None
    resume: bool
    timeout_s: float


def run(options: Options, ranks: int | None) -> int:
    """The command: 0, or the exit status of what went wrong. Raises ValueError for bad input."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world):
            raise ValueError(f"torchrun started {world} ranks, but got --ranks {ranks} beside it; leave it out")
        return _shown(_in_this_process(options), options, int(os.environ["RANK"]) == 0)
    cuda = torch.cuda.is_available()
    count = ranks or (torch.cuda.device_count() if cuda else usable_cores())
    if count == 1:
        return _shown(_in_this_process(options), options, True)
    if cuda and ranks is None:
        raise ValueError(
            f"this machine has {count} GPUs, which one process cannot profile; "
            f"run torchrun --nproc-per-node {count} -m meshwright profile"
        )
    return _shown(spawn_local("meshwright.cli.profile:on_rank", count, (options,))[0], options, True)


def _shown(answer: tuple[str, str], options: Options, speaks: bool) -> int:
    kind, text = answer
    if kind != "ok":
        raise {"infeasible": InfeasibleError, "bad input": ValueError}[kind](text)
    if speaks:
        print(text)
        if options.output is not None:
            print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _in_this_process(options: Options) -> tuple[str, str]:
    """A rank of a job that somebody else started, or a world of one."""
    try:
        ensure_initialized()
        return on_rank(options)
    finally:
        leave()


def on_rank(options: Options) -> tuple[str, str]:
    """Profile on this rank of a world: ("ok", table) or what a user did wrong and how it is said."""
    try:
        with progress_bar(dist.get_rank() == 0) as progress:
            return "ok", _profiled(options, progress)
    except InfeasibleError as error:
        return "infeasible", str(error)
    except (ValueError, OSError) as error:
        return "bad input", str(error)


def _profiled(options: Options, progress: Callable[[str, float], None]) -> str:
    started = perf_counter()
    target = graph = None
    notes: list[str] = []
    if options.model is not None:
        with fail_together(), answers_only():  # targets may print what they like
            progress("building", 0.0)
            target = build_target(options.model)
            graph = capture(target.model, target.args, target.kwargs)
    share = 1.0 if graph is None else 1.0 - _MODEL_SHARE
    cluster = profile(
        budget_s=options.budget_s * share,
        quick=options.quick,
        path=options.output,
        progress=progress,
        resume=options.resume,
        timeout_s=options.timeout_s,
    )
    if graph is not None and target is not None:
        batch = options.global_batch or target.global_batch
        cluster, unknown = profile_model(
            graph,
            cluster,
            batch or batch_extent(graph, flat_inputs(target.args, target.kwargs, ())),
            optimizer=options.optimizer or target.optimizer,
            budget_s=max(options.budget_s - (perf_counter() - started), 1.0),
            path=options.output,
            progress=progress,
            timeout_s=options.timeout_s,
        )
        if unknown:
            notes.append(f"{unknown} ops of its plans had no time; a larger --budget measures them")
    return "\n".join([table(cluster), *notes])


# ---- the table


def table(cluster: Cluster) -> str:
    """The measurements of a cluster as text."""
    lines = [cluster.text()]
    if cluster.wires:
        rows: list[Sequence[str]] = [
            ("collective", "group", "on a host", "at once", "α µs", "GB/s", "pieces", "error", "samples")
        ]
        for wire in cluster.wires:
            first, last = wire.pieces[0], wire.pieces[-1]
            rate = f"{1e-9 / last.beta_s_per_byte:.3g}" if last.beta_s_per_byte else "-"
            numbers = (wire.size, wire.members, wire.groups)
            fit = (f"{first.alpha_s * 1e6:.1f}", rate, len(wire.pieces), f"{wire.residual:.1%}", wire.samples)
            kind = wire.kind if wire.algorithm == "backend" else f"{wire.kind} by {wire.algorithm}"
            rows.append((kind, *map(str, numbers), *map(str, fit)))
        lines += ["", *_columns(rows)]
    for device in dict.fromkeys(host.device for host in cluster.hosts):
        lines += ["", *_device(device)]
    where = dict(cluster.provenance)
    skipped = where.pop("skipped", "")
    lines += ["", ", ".join(f"{key} {value}" for key, value in where.items())]
    if skipped:
        entries = skipped.split("; ")
        shown = "; ".join(entries[:6]) + (f"; and {len(entries) - 6} more" if len(entries) > 6 else "")
        lines.append(f"not measured: {shown}")
    warnings = cluster.validate()
    return "\n".join([*lines, *(f"warning: {warning}" for warning in warnings)])


def _device(device: Device) -> list[str]:
    lines = [
        f"{device.name}: launch {device.launch_s * 1e6:.2f} µs, view {device.view_s * 1e6:.2f} µs, memory "
        f"{device.memory_bytes_per_s / 1e9:.3g} GB/s, overlap {device.overlap:.0%}, action "
        f"{device.action_s * 1e6:.1f} µs, start of a 1 MiB message {device.post_seconds(1 << 20) * 1e6:.0f} µs"
    ]
    rows: list[Sequence[str]] = [("op", "dtype", "pass", "points", "from", "to", "best rate")]
    for curve in device.curves:
        best = max(work / seconds for work, seconds in curve.points)
        unit = "FLOP/s" if curve.variable == "flops" else "B/s"
        ends = (f"{seconds * 1e6:.1f} µs" for _, seconds in (curve.points[0], curve.points[-1]))
        row = (curve.kind, curve.dtype, curve.direction, str(len(curve.points)), *ends, f"{best / 1e9:.3g} G{unit}")
        rows.append(row)
    lines += _columns(rows)
    rates: list[Sequence[str]] = [("optimizer", "µs per tensor", "GB/s", "error", "samples")]
    for rate in device.optimizers:
        speed = f"{1e-9 / rate.beta_s_per_byte:.3g}" if rate.beta_s_per_byte else "-"
        rates.append((rate.label, f"{rate.alpha_s * 1e6:.2f}", speed, f"{rate.residual:.1%}", str(rate.samples)))
    if device.optimizers:
        lines += ["", *_columns(rates)]
    if device.codings:
        codes: list[Sequence[str]] = [("code", "µs per sum", "ns per element", "error", "samples")]
        for code in device.codings:
            fit = f"{code.alpha_s * 1e6:.0f}", f"{code.beta_s_per_element * 1e9:.2f}", f"{code.residual:.1%}"
            codes.append((code.name, *fit, str(code.samples)))
        lines += ["", *_columns(codes)]
    if device.op_times:
        lines += ["", f"{len(device.op_times)} exact ops"]
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
