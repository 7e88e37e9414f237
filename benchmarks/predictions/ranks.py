"""What every rank of one world runs: predict all its trials, then measure them in interleaved rounds."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import torch.distributed as dist
from baselines.interleaved import Contender, Rounds, compare
from meshwright.runtime.profiling.memory_meter import live_bytes, peak_rss_bytes, reset_peak_rss, storages_alive

from .tables import Forecast, forecasts
from .targets import OPTIMIZERS, TARGETS, fill
from .trials import Trial

__all__ = ["Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """rounds: of one step of each plan, after ``warmup`` steps of each; budget_s: seconds that a profile may take."""

    rounds: int = 10
    warmup: int = 2
    budget_s: float = 60.0


def run(trials: Sequence[Trial], settings: Settings) -> list[dict[str, Any]]:
    """One dict per trial, alike on every rank. Collective; every trial has as many ranks as this world.

    Keys: those of the trial; "predicted_s" by table, with its
    "sources" and the "stages"' seconds by cause; "step_s" (seconds of the slowest rank in each round), "median_s",
    "min_s", "cpu_s"; "memory": predicted and measured bytes of each rank; "load".
    """
    made = forecasts(trials, settings.budget_s)
    contenders, memory = [], []
    for trial, forecast in zip(trials, made, strict=True):
        contender, used = _bound(trial, forecast)
        contenders.append(contender)
        memory.append(used)
    gc.collect()
    gc.freeze()  # the captures of all trials: training has one model, whose collections are short
    measured = compare(contenders, Rounds(settings.warmup, settings.rounds, 1, lead=1))
    return [
        {
            **trial.to_json(),
            "predicted_s": {name: found.step_s for name, found in forecast.predictions.items()},
            "sources": {name: dict(found.sources) for name, found in forecast.predictions.items()},
            "stages": {
                name: [dict(stage.seconds) for stage in found.stages] for name, found in forecast.predictions.items()
            },
            **{key: result[key] for key in ("median_s", "min_s", "cpu_s", "step_s")},
            "memory": used,
            "load": os.getloadavg()[0],
        }
        for trial, forecast, used, result in zip(trials, made, memory, measured, strict=True)
    ]


def _bound(trial: Trial, forecast: Forecast) -> tuple[Contender, dict[str, Any]]:
    """The trial ready to step, and what it holds, in bytes of each rank beyond what other trials hold.

    "live": storages of tensors during the third step, at their peak; "resident": growth of the process's resident set
    until then, which the pages left by earlier trials make smaller.
    """
    target = TARGETS[trial.target]
    before = sum(storages_alive().values())
    batch = target.batch(trial.batch)
    reset_peak_rss()
    resident = peak_rss_bytes()
    parallel = mw.parallelize(
        target.on_meta(), example_inputs=batch, optimizer=OPTIMIZERS[target.optimizer], plan=forecast.plan, init=fill
    )
    for _ in range(2):
        parallel.train_step(*batch)
    mine = {"resident": max(0, peak_rss_bytes() - resident)}
    with live_bytes() as reading:
        parallel.train_step(*batch)
    mine["live"] = (reading.peak_bytes or before) - before
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    stage = [forecast.plan.stage_of(rank) for rank in range(len(every))]
    predicted = {
        name: [
            0.0 if s is None else found.stages[s].peak_bytes - found.stages[s].memory_bytes.get("framework", 0.0)
            for s in stage
        ]
        for name, found in forecast.predictions.items()
    }
    used = {"predicted": predicted} | {key: [one[key] for one in every] for key in mine}
    return Contender(trial.name, lambda: parallel.train_step(*batch), float), used
