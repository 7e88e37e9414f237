"""Ranks that compute more slowly than the others, each held against what the plan predicts for its stage."""

from __future__ import annotations

from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.plan.plan import Plan

__all__ = ["Stragglers"]

SLOW = 1.5  # times the median of all ranks
IN_A_ROW = 3  # looks, so that one busy moment is no finding


class Stragglers:
    """Looks for a slow rank now and then; every rank has one, and asks it alike."""

    def __init__(self) -> None:
        self._suspect, self._times = -1, 0

    def look(self, plan: Plan, session: Any) -> tuple[int, float] | None:
        """(rank, how many times as long its own work takes as that of the median rank, each over the predicted) of the
        rank that was the slowest, by ``SLOW``, in this look and those before it. Collective: the same on every rank.

        A stage whose ranks are all slow is mispredicted, which is the report's to say.
        """
        of_stage = [stage.devices for stage in plan.stages]
        ratios = _everyone(_own(plan, session), session.device)
        if len(ratios) < 2 or not all(ratios[rank] > 0 for devices in of_stage for rank in devices):
            return None
        usual = median_low(ratios[rank] for devices in of_stage for rank in devices)
        slowest, devices = max(
            ((rank, devices) for devices in of_stage for rank in devices), key=lambda pair: ratios[pair[0]]
        )
        others = [ratios[rank] for rank in devices if rank != slowest]
        if ratios[slowest] < SLOW * usual or (others and min(others) > SLOW * usual):
            self._suspect = -1
            return None
        self._times = self._times + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        return (slowest, ratios[slowest] / usual) if self._times >= IN_A_ROW else None


def _own(plan: Plan, session: Any) -> float:
    """Seconds of this rank's own work in the last kept step over the predicted ones; 0 if either is unknown."""
    steps = session.trace.steps()[-1:]
    if session.stage is None or not steps:
        return 0.0
    stage = plan.prediction.stages[session.stage]
    predicted_s = plan.microbatches * (stage.forward_s + stage.backward_s)
    own_s = steps[0].sum_s("", "compute_s") + steps[0].sum_s("", "repeat_s")
    return own_s / steps[0].batches / predicted_s if predicted_s > 0 else 0.0


def _everyone(value: float, device: torch.device) -> list[float]:
    """The value of each rank."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float32, device=device if device.type == "cuda" else "cpu")
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()
