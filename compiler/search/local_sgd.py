"""Predicted gain of delayed gradient averaging (``runtime/execution/local_sgd.py``), and the best delay.

A plan's step waits for what of its sums of gradients nothing hides. With a delay nothing waits, as long as the network
takes a step's sum in a step's time. With S the seconds of the sums of the stage that sums longest, and C the step on
the clock without those seconds that are exposed::

    step = max(C, S),    delay = ⌊S / step⌋ + 1

Sums go in the plan's ways, and take a stage as long as one after another: that two halves of them go at once is not
priced. It changes the optimisation, so it is taken, or told of, only where the step gets shorter by a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ..frontend.mixed_precision import in_precision
from ..ir.graph import Graph
from ..plan.independent_axes import loose_axes
from ..plan.lower import lower
from ..plan.plan import Plan, Stage, StagePrediction
from .predict import simulate_stages

__all__ = ["LEAST_GAIN", "Delay", "chosen_delay", "delay_notes", "delay_taken", "worthwhile_delay"]

MAX_DELAY_STEPS = 20  # steps: what has been published without loss of accuracy (Zhu et al. 2021)
LEAST_GAIN = 1.25
_WOULD, _TAKEN = "delayed averaging would take", "delayed averaging:"


@dataclass(frozen=True)
class Delay:
    """A number of steps for which a mean is on its way, and the predicted seconds of a step with it."""

    steps: int
    step_s: float


def worthwhile_delay(plan: Plan) -> Delay | None:
    """The delay that would pay; None if none would, or if the plan's replicas cannot step by themselves
    (``independent_axes`` says for certain, from the lowered programs)."""
    homes = [home for stage in plan.stages for chunk in stage.chunks for home in chunk.parameters.values()]
    if plan.schedule == "pipedream" or plan.precision == "fp16":
        return None
    if any(home.pattern != "replicated" for home in homes):
        return None
    stages = plan.prediction.stages
    exposed = [stage.seconds.get("gradient", 0.0) for stage in stages]
    sums_s = max(s + stage.seconds.get("overlapped", 0.0) for s, stage in zip(exposed, stages))
    if not sums_s:
        return None
    everyone = any(len(stage.devices) == plan.num_devices for stage in plan.stages)
    told_s = 0.0 if everyone else min(stage.seconds.get("loss", 0.0) for stage in stages)
    alone = tuple(_alone(*one, told_s) for one in zip(plan.stages, stages))
    clock = simulate_stages(plan.schedule, plan.microbatches, plan.chunks_asked, plan.stages, alone, plan.transfers)
    step_s = max(clock.makespan_s, sums_s)
    steps = int(sums_s // step_s) + 1
    if steps > MAX_DELAY_STEPS or plan.prediction.step_s < LEAST_GAIN * step_s:
        return None
    return Delay(steps, step_s)


def _alone(stage: Stage, prediction: StagePrediction, told_s: float) -> StagePrediction:
    """The stage's prediction without sums of gradients and, on a mesh of one axis, without what its replicas send each
    other for the loss. told_s: the seconds, of every stage's seconds for the loss, until all ranks know it."""
    alone = replace(prediction, step_s=prediction.step_s - prediction.seconds.get("gradient", 0.0))
    if sum(size > 1 for size in stage.mesh_shape) != 1:
        return alone
    alone = replace(alone, step_s=alone.step_s - (prediction.seconds.get("loss", 0.0) - told_s))
    sent = sum(prediction.seconds.get(cause, 0.0) for cause in ("reshard", "internal"))
    chunks = alone.chunk_s[:-1] + tuple((f - sent, b, w) for f, b, w in alone.chunk_s[-1:])  # the loss is in the last
    return replace(alone, forward_s=alone.forward_s - sent, chunk_s=chunks)


def chosen_delay(plan: Plan, graph: Graph) -> Delay | None:
    """``worthwhile_delay``, if every stage's replicas can step by themselves. graph: as it was captured."""
    delay = worthwhile_delay(plan)
    if delay is None:
        return None
    small = in_precision(graph, plan.precision).with_batch(plan.microbatch_size)
    counts = set()
    for index, stage in enumerate(plan.stages):
        axes, _ = loose_axes(stage, [lower(small, plan, index, chunk) for chunk in range(len(stage.chunks))])
        counts.add(prod(stage.mesh_shape[axis] for axis in axes))
    return delay if len(counts) == 1 and 1 not in counts else None


def delay_taken(plan: Plan, delay: Delay) -> Plan:
    """The plan with a note that says so."""
    kept = [note for note in plan.prediction.notes if not note.startswith(_WOULD)]
    note = (
        f"{_TAKEN} {delay.step_s:.3g} s a step are expected instead of {plan.prediction.step_s:.3g}: gradients travel "
        f"for {_steps(delay)} while replicas go on, which changes the optimisation"
    )
    return replace(plan, prediction=replace(plan.prediction, notes=(note, *kept)))


def delay_notes(plan: Plan) -> list[str]:
    """A line for a plan that a delay would make faster."""
    delay = worthwhile_delay(plan)
    if delay is None:
        return []
    return [
        f"{_WOULD} {delay.step_s:.3g} s a step instead of {plan.prediction.step_s:.3g}: gradients travel for "
        f"{_steps(delay)} while replicas go on; it changes the optimisation, so it is only done for who asks for it: "
        'parallelize(delay="auto")'
    ]


def _steps(delay: Delay) -> str:
    return f"{delay.steps} step{'s' if delay.steps > 1 else ''}"
