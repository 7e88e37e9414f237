"""Predicted against measured: a plan's step compared term by term with what its ranks measured, and the terms to blame.

Every step of a stage falls into the same terms on both sides::

    step = forward + backward + weights + recompute + collectives + skew + sends + waiting + gradient + optimizer + host

    forward, backward   ops of all microbatches, without the collectives among them
    weights             the half of backwards that makes weight gradients, where the schedule has it apart
    recompute           what backwards run once more, with the collectives there
    collectives         inside forward and backward
    skew                waiting in them, or in the gradients', for a slower rank of the same stage
    sends               starting messages; the transfer itself overlaps the ops
    waiting             for other stages: the bubble, transfers, tied weights, their longer end of the step; the loss
    gradient            what is left of its reduction after the last backward, and the gather of what was updated
    optimizer           clipping and the update
    host                whatever the library does in between

Waiting follows from the rest, so a term is blamed by the clock: the schedule runs once as predicted, and once with this
term alone as measured; by how much the step grows is what the term explains. What no term explains is the waiting's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median

from ...costmodel.measured import RankTimes
from ..pipeline.families import generate
from ..plan.plan import Plan, StagePrediction
from ..search.predict import simulate_stages, weight_seconds
from .step_report import THRESHOLD, Report, Term

__all__ = ["TERMS", "Clock", "compare", "predicted_terms", "without_skew"]

TERMS = (
    "forward", "backward", "weights", "recompute", "collectives", "skew", "sends", "waiting", "gradient", "optimizer",
    "host",
)  # fmt: skip
_BY_MICROBATCH = ("forward", "backward", "weights", "recompute", "collectives", "sends")


def predicted_terms(plan: Plan) -> list[dict[str, float]]:
    """Per stage: term → seconds per step, as the plan predicts them."""
    out, halved = [], _is_halved(plan)
    for stage in plan.prediction.stages:
        forward, backward = _compute_s(stage)
        weights = min(backward, weight_seconds(stage)) if halved else 0.0
        m, (host, sends, again) = plan.microbatches, (stage.seconds.get(x, 0.0) for x in ("host", "sends", "recompute"))
        actions = m * (stage.forward_s + stage.backward_s)
        optimizer, peers = stage.seconds.get("optimizer", 0.0), sum(stage.seconds.get(c, 0.0) for c in ("loss", "tied"))
        # reductions and gathers of every microbatch are in its actions
        ends = sum(stage.seconds.get(cause, 0.0) for cause in ("gradient", "gather"))
        gradient = min(ends, max(0.0, stage.step_s - optimizer - peers))
        out.append({
            "forward": m * forward, "backward": m * (backward - weights), "weights": m * weights,
            "recompute": m * again,
            "collectives": max(0.0, actions - m * (forward + backward + again + host + sends)),
            "skew": 0.0, "sends": m * sends, "gradient": gradient, "optimizer": optimizer, "host": m * host,
            "waiting": max(0.0, plan.prediction.step_s - actions - gradient - optimizer),
        })  # fmt: skip
        if out[-1]["waiting"] < 1e-9 * plan.prediction.step_s:  # rounding
            out[-1]["waiting"] = 0.0
    return out


def _is_halved(plan: Plan) -> bool:
    """True if the plan's schedule has weight-gradient backwards of their own."""
    schedule = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked)
    return any(action.kind == "W" for row in schedule.actions for action in row)


def _compute_s(stage: StagePrediction) -> tuple[float, float]:
    """Seconds of the ops alone per microbatch, forward and backward."""
    seconds = stage.seconds
    if "forward" in seconds:
        backward = ("backward_input", "backward_weight")
        return seconds["forward"], sum(seconds.get(cause, 0.0) for cause in backward)
    whole = stage.forward_s + stage.backward_s  # a document of before: one cause for both, parted like the actions
    share = stage.forward_s / whole if whole else 0.0
    return seconds["compute"] * share, seconds["compute"] * (1 - share)


def compare(plan: Plan, ranks: Sequence[RankTimes], threshold: float = THRESHOLD, notes: Sequence[str] = ()) -> Report:
    """The report of what these ranks measured. ``threshold``: relative error of the step beyond which terms are
    blamed."""
    if not threshold > 0:
        raise ValueError(f"a threshold is a positive fraction like 0.2, but got {threshold}; pass one")
    prediction, m, stages = plan.prediction, plan.microbatches, range(len(plan.stages))
    expected = predicted_terms(plan)
    members = [[rank for rank in ranks if rank.stage == stage and rank.steps] for stage in stages]
    peaks = tuple(stage.peak_bytes for stage in prediction.stages)
    live = tuple(s.peak_bytes - s.memory_bytes.get("framework", 0.0) for s in prediction.stages)
    bubble = mean(terms["waiting"] for terms in expected) / prediction.step_s if prediction.step_s else 0.0
    if not all(members):
        return Report(
            prediction.step_s, None, 0, m, bubble, None, (), tuple(ranks), peaks, live, threshold, tuple(notes)
        )
    measured = [_stage_measured(group) for group in members]
    step_s = median(rank.step_s for group in members for rank in group)
    clock = Clock(plan)
    base = clock.run({})
    terms = []
    for stage in stages:
        for name in TERMS:
            times = m if name in _BY_MICROBATCH else 1
            effect = 0.0
            if name != "waiting":
                effect = clock.run({(stage, name): measured[stage]}) - base
            terms.append(Term(stage, name, expected[stage][name], measured[stage][name], times, effect))
    # transfers, and what the clock does not know of: on the stage whose waiting is furthest off
    everything = clock.run({(stage, name): measured[stage] for stage in stages for name in TERMS})
    unexplained = step_s - prediction.step_s - (everything - base)
    worst = max(stages, key=lambda s: abs(measured[s]["waiting"] - expected[s]["waiting"]))
    terms = [
        Term(t.stage, t.name, t.predicted_s, t.measured_s, t.times, unexplained)
        if (t.stage, t.name) == (worst, "waiting")
        else t
        for t in terms
    ]
    measured_bubble = mean(stage["waiting"] for stage in measured) / step_s if step_s else None
    steps = min(rank.steps for group in members for rank in group)
    return Report(
        prediction.step_s, step_s, steps, m, bubble, measured_bubble, tuple(terms), tuple(ranks), peaks, live,
        threshold, tuple(notes),
    )  # fmt: skip


def without_skew(
    ranks: Sequence[RankTimes], meetings: Sequence[Sequence[Sequence[tuple[str, float]]]]
) -> list[RankTimes]:
    """The ranks with their collectives as long as on the rank that came last to each, and the rest as skew.

    meetings: rank → step → (kind "F", "B" or "G", seconds), alike on all ranks of a stage.
    """
    out = list(ranks)
    for stage in {rank.stage for rank in ranks if rank.stage is not None}:
        members = [index for index, rank in enumerate(ranks) if rank.stage == stage and rank.steps]
        last = {"F": 0.0, "B": 0.0, "G": 0.0}
        for steps in zip(*(meetings[index] for index in members)):
            for entries in zip(*steps):
                last[entries[0][0]] += min(seconds for _, seconds in entries)
        for index in members:
            rank = ranks[index]
            forward, backward, gradient = (last[kind] / rank.steps for kind in "FBG")
            whole = rank.forward_exchange_s + rank.backward_exchange_s + rank.gradient_s
            out[index] = replace(
                rank, forward_exchange_s=forward, backward_exchange_s=backward, gradient_s=gradient,
                skew_s=max(0.0, whole - forward - backward - gradient),
            )  # fmt: skip
    return out


def _stage_measured(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Term → seconds per step; "collectives" also apart by direction."""

    out = {name: mean(float(getattr(rank, f"{name}_s")) for rank in ranks) for name in TERMS if name != "collectives"}
    out["forward collectives"] = mean(rank.forward_exchange_s for rank in ranks)
    out["backward collectives"] = mean(rank.backward_exchange_s for rank in ranks)
    out["collectives"] = out["forward collectives"] + out["backward collectives"]
    return out


class Clock:
    """The plan's schedule with the predicted times, some of them replaced by measured ones."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.m, self.stages = plan, plan.microbatches, plan.prediction.stages
        self.expected = predicted_terms(plan)

    @property
    def has_transfers(self) -> bool:
        """True if any message between stages takes time."""
        return any(transfer.forward_s for transfer in self.plan.transfers)

    def run(self, replaced: Mapping[tuple[int, str], Mapping[str, float]], transfers: float = 1.0) -> float:
        """Simulate the step with the measured seconds of these (stage, term)s, and transfers so many times longer."""
        extra = [dict.fromkeys(("forward", "backward", "weights", "once"), 0.0) for _ in self.stages]
        for (stage, name), measured in replaced.items():
            more, added = measured[name] - self.expected[stage][name], extra[stage]
            if name in ("forward", "backward", "weights", "recompute"):
                added["backward" if name == "recompute" else name] += more / self.m
            elif name in ("collectives", "sends"):
                share = 0.5
                if f"forward {name}" in measured and measured[name] > 0:
                    share = measured[f"forward {name}"] / measured[name]
                added["forward"] += share * more / self.m
                added["backward"] += (1 - share) * more / self.m
            elif name != "waiting":
                added["once"] += more
        stages = [_with_extra(stage, added) for stage, added in zip(self.stages, extra)]
        messages = [
            replace(one, forward_s=transfers * one.forward_s, backward_s=transfers * one.backward_s)
            for one in self.plan.transfers
        ]
        plan = self.plan
        return simulate_stages(
            plan.schedule, plan.microbatches, plan.chunks_asked, plan.stages, stages, messages
        ).makespan_s


def _with_extra(stage: StagePrediction, extra: Mapping[str, float]) -> StagePrediction:
    """The prediction of a stage that takes ``extra`` longer per microbatch ("once": per step), all its chunks in
    proportion."""
    before = weight_seconds(stage)
    forward = max(0.0, stage.forward_s + extra["forward"])
    backward = max(0.0, stage.backward_s + extra["backward"] + extra["weights"])
    weights = min(backward, max(0.0, before + extra["weights"]))

    def grown(value: float, old: float, new: float) -> float:
        return value * new / old if old else new / len(stage.chunk_s)

    chunks = tuple(
        (
            grown(f, stage.forward_s, forward),
            grown(b - w, stage.backward_s - before, backward - weights) + grown(w, before, weights),
            grown(w, before, weights),
        )
        for f, b, w in stage.chunk_s
    )
    return replace(
        stage, forward_s=forward, backward_s=backward, step_s=max(0.0, stage.step_s + extra["once"]),
        seconds={**stage.seconds, "backward_weight": weights}, chunk_s=chunks,
    )  # fmt: skip
