"""The log of a training run: one record a logged step, for a terminal, for files, and for what else listens.

    metrics = MetricsLogger(parallel, "runs/gpt", every=10)
    for batch in batches:
        metrics.on_step(parallel.train_step(*batch))

A record is a flat mapping. ``kind`` says of what: "run" (once, at the start), "step", "evaluation" or "checkpoint".
Those of steps have

    step, loss                 the number of steps done, the mean loss over the replicas
    grad_norm, learning_rate   before clipping; of the first parameter group
    step_s, predicted_step_s   wall seconds a step since the record before, without evaluations and checkpoints; and
                               ``measured_over_predicted``
    tokens_per_s               or ``samples_per_s`` where no input holds tokens; and ``…_per_device``
    tflops_per_device          useful operations, as the plan counts them; and ``share_of_peak``
    peak_bytes                 the most that any rank has held so far
    slow_rank                  a rank that in three records in a row computed 1.5 times as long as the median rank, each
                               held against the plan, or longer; and ``slow_rank_ratio``

and what the caller adds. A value that is not known is left out.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..compiler.plan.plan import Plan
from ..compiler.text import bytes_text, seconds_text
from ..costmodel.cluster import Cluster
from ..costmodel.files import write_atomically
from .profiling.stragglers import Stragglers
from .profiling.trace import peak_bytes
from .transport.progress import PROGRESS

__all__ = ["MetricsLogger", "TrainingCallback", "metrics_writers"]

Record = Mapping[str, Any]


class TrainingCallback(Protocol):
    """A listener to a run: its methods get the records of the logging rank, each as it is made."""

    def on_step(self, record: Record) -> None:
        """A step was logged."""
        ...

    def on_evaluate(self, record: Record) -> None:
        """The model was evaluated."""
        ...

    def on_checkpoint(self, record: Record) -> None:
        """A checkpoint is complete."""
        ...


class MetricsLogger:
    """Logs the steps of ``parallel`` and tells them to writers and callbacks. Every rank makes one, and calls its
    methods alike.

    folder: where writers put their files; made if absent, appended to if there (a run that goes on). every: steps
    between two records; the first step is logged, too. rank: the rank that writes. to: names of ``metrics_writers``,
    by default the terminal, and ``metrics.jsonl`` where there is a folder. callbacks: further listeners, called on
    that rank. tokens_per_step: of the whole batch; by default those of the first input of whole numbers [batch,
    sequence]. ValueError for an unknown writer, or one whose package is missing.
    """

    def __init__(
        self,
        parallel: Any,
        folder: str | os.PathLike[str] | None = None,
        *,
        every: int = 10,
        rank: int = 0,
        to: Sequence[str] | None = None,
        callbacks: Sequence[TrainingCallback] = (),
        tokens_per_step: int | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every is a number of steps, 1 or more, but got {every}")
        names = tuple(to) if to is not None else ("terminal", *(("jsonl",) if folder is not None else ()))
        _require_known(names, folder)
        self._parallel, self._every, self._rank = parallel, every, rank
        self._folder, self._names, self._callbacks = folder, names, list(callbacks)
        PROGRESS.folder = folder
        self._tokens = tokens_per_step
        self._writers: list[Any] | None = None
        self._seconds, self._steps, self._last_s = 0.0, 0, math.nan
        self._stragglers, self._named = Stragglers(), set[int]()

    def on_step(self, loss: torch.Tensor | float, **more: float) -> Record | None:
        """Count a step, and log it if its turn has come. Collective then.

        loss: as ``train_step`` returned it; more: further numbers for the record. Returns the record, None where there
        is none.
        """
        now = time.perf_counter()
        if math.isfinite(self._last_s):
            self._seconds, self._steps = self._seconds + now - self._last_s, self._steps + 1
        step = self._parallel.session.step
        record = None
        if step == 1 or step % self._every == 0:
            record = self._log("on_step", "step", {**self._measured(loss), **more})
            self._seconds, self._steps = 0.0, 0
        self._last_s = time.perf_counter()
        return record

    def on_evaluate(self, **values: float) -> Record:
        """Log the figures of an evaluation. The time since the last step is not counted as training."""
        return self._log("on_evaluate", "evaluation", values)

    def on_checkpoint(self, path: str | os.PathLike[str]) -> Record:
        """Log that a checkpoint is complete. The time since the last step is not counted as training."""
        return self._log("on_checkpoint", "checkpoint", {"path": os.fspath(path)})

    def report(self) -> Any:
        """Gather the report of the run (``Parallel.report``) and write it as ``report.json`` beside the plan, for
        ``meshwright report`` and ``diff``. Collective: the same on every rank."""
        report = self._parallel.report()
        if self._folder is not None and dist.get_rank() == self._rank:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            write_atomically(Path(self._folder) / "report.json", json.dumps(report.to_json(), indent=1) + "\n")
            self._parallel.plan.save(Path(self._folder) / "plan.json")
        return report

    def close(self) -> None:
        """End the files."""
        for writer in self._writers or ():
            writer.close()
        self._writers = []

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one record

    def _log(self, event: str, kind: str, values: Mapping[str, Any]) -> Record:
        """Tell a record. The time until it is told is not counted as training."""
        record = {"kind": kind, "step": self._parallel.session.step, **values}
        self._tell(event, record)
        self._last_s = time.perf_counter()
        return record

    def _measured(self, loss: torch.Tensor | float) -> dict[str, Any]:
        parallel, plan = self._parallel, self._parallel.plan
        mean = parallel.mean_loss(loss) if isinstance(loss, torch.Tensor) else loss
        found: dict[str, Any] = {"loss": float(mean)}
        with suppress(ValueError):  # gradients that are still on their way have no norm
            found["grad_norm"] = float(parallel.grad_norm)
        groups = [] if parallel.session.optimizer is None else parallel.optimizer.param_groups
        if groups:
            found["learning_rate"] = float(groups[0]["lr"])
        if self._steps:
            step_s, devices = self._seconds / self._steps, _num_devices(plan)
            name, count = self._counted()
            flops_per_s, predicted_s = plan.prediction.flops / step_s, plan.prediction.step_s
            found |= {"step_s": step_s, "predicted_step_s": predicted_s}
            if predicted_s > 0:
                found["measured_over_predicted"] = step_s / predicted_s
            found |= {f"{name}_per_s": count / step_s, f"{name}_per_s_per_device": count / step_s / devices}
            found["tflops_per_device"] = flops_per_s / devices / 1e12
            if self._peak_flops_per_s > 0:
                found["share_of_peak"] = flops_per_s / self._peak_flops_per_s
        found["peak_bytes"] = _largest(peak_bytes(parallel.session.device), parallel.session.device)
        if slow := self._stragglers.look(plan, parallel.session):
            found["slow_rank"], found["slow_rank_ratio"] = slow
        return found

    @cached_property
    def _peak_flops_per_s(self) -> float:
        return _peak_flops_per_s(self._parallel)

    def _counted(self) -> tuple[str, int]:
        """The unit of a step's throughput, and how many of them a step has."""
        if self._tokens is not None:
            return "tokens", self._tokens
        for shape, dtype, batch_dim in self._parallel.session.input_sharder.expected.values():
            if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) and len(shape) == 2:
                return "tokens", math.prod(shape) * (self._parallel.data_count if batch_dim is not None else 1)
        return "samples", self._parallel.plan.global_batch

    def _tell(self, event: str, record: Record) -> None:
        if dist.get_rank() != self._rank:
            return
        if self._writers is None:
            self._writers = [_writer(name, self._folder) for name in self._names]
            for writer in self._writers:
                writer.write(_of_run(self._parallel))
        for writer in self._writers:
            writer.write(record)
        if (slow := record.get("slow_rank", -1)) >= 0 and slow not in self._named:
            self._named.add(slow)
            warnings.warn(
                f"rank {slow} computes {record['slow_rank_ratio']:.1f} times as long as the median rank, each held "
                "against the plan; look at its host for other processes, throttled clocks or a failing device",
                stacklevel=4,
            )
        for callback in self._callbacks:
            getattr(callback, event)(record)


def _num_devices(plan: Plan) -> int:
    """The devices that are not idle."""
    return sum(len(stage.devices) for stage in plan.stages)


def _of_run(parallel: Any) -> dict[str, Any]:
    """The record of a run's start."""
    plan = parallel.plan
    return {
        "kind": "run",
        "step": parallel.session.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": plan.model,
        "schedule": plan.schedule,
        "stages": len(plan.stages),
        "devices": _num_devices(plan),
        "global_batch": plan.global_batch,
        "microbatches": plan.microbatches,
        "predicted_step_s": plan.prediction.step_s,
        "flops_per_step": plan.prediction.flops,
    }


def _peak_flops_per_s(parallel: Any) -> float:
    """The sum of the peaks of the plan's devices, in the dtype of most of its parameters; 0 where one is unknown."""
    plan = parallel.plan
    cluster = Cluster.from_json(json.dumps(plan.cluster))
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    sizes: dict[torch.dtype, int] = {}
    for value in parallel.session.state.parameters.values():
        sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
    dtype = kinds.get(plan.precision) or max(sizes, key=sizes.__getitem__, default=torch.float32)
    name = str(dtype).removeprefix("torch.")
    rates = [dict(cluster.device(d).flops_per_s).get(name, 0.0) for stage in plan.stages for d in stage.devices]
    return float(sum(rates)) if all(rates) else 0.0


def _largest(value: int, device: torch.device) -> int:
    """The largest value of any rank. Collective."""
    largest = torch.tensor([value], device=device if device.type == "cuda" else "cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


# ---- writers


class _Terminal:
    """One line a record, on standard output."""

    def write(self, record: Record) -> None:
        if record["kind"] != "run":
            print(log_line(record), file=sys.stdout, flush=True)

    def close(self) -> None:
        pass


def log_line(record: Record) -> str:
    """A record as people read it."""
    known = dict(record)
    kind, step = known.pop("kind"), known.pop("step")
    if kind == "checkpoint":
        return f"step {step:,} | checkpoint {known['path']}"
    parts = [f"step {step:,}" if kind == "step" else f"step {step:,} | evaluation"]
    if "loss" in known:
        parts.append(f"loss {known.pop('loss'):.4f}")
    if "grad_norm" in known:
        parts.append(f"grad norm {known.pop('grad_norm'):.3g}")
    if "learning_rate" in known:
        parts.append(f"lr {known.pop('learning_rate'):.2e}")
    for name in ("tokens", "samples"):
        if f"{name}_per_s" in known:
            each = known.pop(f"{name}_per_s_per_device")
            parts.append(f"{known.pop(f'{name}_per_s'):,.0f} {name}/s ({each:,.0f} a device)")
    if "tflops_per_device" in known:
        share = f" ({known.pop('share_of_peak'):.0%} of peak)" if "share_of_peak" in known else ""
        parts.append(f"{known.pop('tflops_per_device'):.3g} TFLOPS{share}")
    if "peak_bytes" in known:
        parts.append(bytes_text(known.pop("peak_bytes")))
    if "slow_rank" in known:
        parts.append(f"rank {known.pop('slow_rank')} is slow ({known.pop('slow_rank_ratio'):.2f}×)")
    if "step_s" in known:
        predicted_s = known.pop("predicted_step_s")
        ratio = f", predicted {seconds_text(predicted_s)}" if known.pop("measured_over_predicted", 0.0) else ""
        parts.append(f"{seconds_text(known.pop('step_s'))} a step{ratio}")
    return " | ".join([*parts, *(f"{name} {value:.4g}" for name, value in known.items())])


class _Jsonl:
    """A JSON object a line; numbers that JSON does not have are null."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 - open as long as the run

    def write(self, record: Record) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Csv:
    """A row a step. Its columns are those of the second record of steps, which knows throughput: the first one waits
    for it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.csv"
        self._columns: list[str] | None = None
        self._waiting: list[Record] = []
        if self._path.exists() and self._path.stat().st_size:
            with open(self._path, newline="") as file:
                self._columns = next(csv.reader(file))

    def write(self, record: Record) -> None:
        if record["kind"] != "step":
            return
        self._waiting.append(record)
        if self._columns is not None or len(self._waiting) > 1:
            self._flush()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        with open(self._path, "a", newline="") as file:
            fresh = self._columns is None
            if self._columns is None:
                self._columns = [name for name in self._waiting[-1] if name != "kind"]
            rows = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if fresh:
                rows.writeheader()
            rows.writerows(self._waiting)
        self._waiting = []


def _numbers(record: Record) -> dict[str, float]:
    """The numbers of a record, but for its step."""
    return {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}


class _TensorBoard:
    """Scalars by step."""

    def __init__(self, folder: Path) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        for name, value in _numbers(record).items() if record["kind"] != "run" else ():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """The run that the caller started by ``wandb.init``, or a new one."""

    def __init__(self, folder: Path) -> None:
        self._wandb = import_module("wandb")
        if self._wandb.run is None:
            self._wandb.init(dir=str(folder))

    def write(self, record: Record) -> None:
        values = {f"{record['kind']}/{name}": value for name, value in _numbers(record).items()}
        self._wandb.log(values, step=record["step"])

    def close(self) -> None:
        pass  # the run is the caller's


class _Mlflow:
    """The active run of MLflow, or a new one."""

    def __init__(self, folder: Path) -> None:
        self._mlflow = import_module("mlflow")

    def write(self, record: Record) -> None:
        values = {f"{record['kind']}.{name}": float(value) for name, value in _numbers(record).items()}
        if record["kind"] != "run" and values:
            self._mlflow.log_metrics(values, step=record["step"])

    def close(self) -> None:
        pass


_WRITERS: dict[str, tuple[Any, str | None]] = {
    "terminal": (_Terminal, None),
    "jsonl": (_Jsonl, None),
    "csv": (_Csv, None),
    "tensorboard": (_TensorBoard, "tensorboard"),
    "wandb": (_Wandb, "wandb"),
    "mlflow": (_Mlflow, "mlflow"),
}


def metrics_writers() -> tuple[str, ...]:
    """The names that ``to`` may have."""
    return tuple(_WRITERS)


def _require_known(names: Sequence[str], folder: str | os.PathLike[str] | None) -> None:
    for name in names:
        if name not in _WRITERS:
            raise ValueError(f"metrics go to {', '.join(_WRITERS)}, but got {name!r}")
        if name != "terminal" and folder is None:
            raise ValueError(f"metrics to {name} need a folder, but got none; MetricsLogger(parallel, folder)")
        package = _WRITERS[name][1]
        if package is not None:
            try:
                import_module(package)
            except ImportError:
                raise ValueError(f"metrics to {name} need a package that is missing; pip install {package}") from None


def _writer(name: str, folder: str | os.PathLike[str] | None) -> Any:
    make = _WRITERS[name][0]
    if name == "terminal":
        return make()
    assert folder is not None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return make(Path(folder))
