"""The trials of one part and one number of ranks over shaped links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from network.ranks import run_over_links

from .ranks import Settings, run
from .trials import Trial

__all__ = ["run_shaped", "run_task"]


def run_shaped(trials: Sequence[Trial], settings: Settings, timeout_s: float) -> list[dict[str, Any]]:
    """The results of trials of one part, which is the name of its links. Raises as ``run_over_links`` does."""
    arguments = [[asdict(trial) for trial in trials], asdict(settings)]
    return run_over_links("predictions.over_links:run_task", arguments, trials[0].ranks, trials[0].part, timeout_s)


def run_task(trials: list[dict[str, Any]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of the ranks runs."""
    return run([Trial(**trial) for trial in trials], Settings(**settings))
