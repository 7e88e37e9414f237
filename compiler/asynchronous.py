"""Asynchronous pipelines, which never drain between steps: PipeDream's 1F1B with weight stashing (Harlap et al. 2018,
Narayanan et al., SOSP 2019), its minibatches made of m microbatches.

Stage s of p runs F of microbatch j as soon as it has it and then B of microbatch j − w, w = p − 1 − s, across the
borders of steps, and updates its weights after the B of each batch's last microbatch. The B of a microbatch uses the
weights of its F, of which a version is kept (*stashed*) until then. So with microbatches counted from the last flush,
microbatch k of batch t meets at stage s the weights after ⌊(t m + k − w)/m⌋ updates, at least none: they are

    d(s, k) = ⌈(w − k)/m⌉ updates old, where that is positive; never more than t

and one update of batch t at stage s is, with g the gradient of a microbatch's loss,

    W_s[t + 1] = W_s[t] − step(1/m Σ_k g_s(W_0[t − d(0, k)], …, W_{p−1}[t − d(p − 1, k)]))

For m = 1 this is PipeDream's w[t+1] = w[t] − ν ∇f(w_1[t − p + 1], …, w_p[t]) (SOSP 2019, section 3.3); from m = p − 1
on no delay is above 1, and it meets only the first p − 1 − s microbatches of a batch. At the last stage nothing is old.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["PIPEDREAM", "delay", "faults", "is_asynchronous", "lag_steps", "notes", "stashed"]

PIPEDREAM = "pipedream"


def is_asynchronous(plan: Plan) -> bool:
    """Whether steps overlap; a pipeline of one stage has nothing to overlap."""
    return plan.schedule == PIPEDREAM and len(plan.stages) > 1


def delay(stage: int, num_stages: int, num_microbatches: int, microbatch: int) -> int:
    """By how many updates the weights are old that ``stage`` uses for this microbatch of a batch, d(s, k)."""
    return -(-max(0, num_stages - 1 - stage - microbatch) // num_microbatches)


def stashed(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Versions of its weights that ``stage`` keeps besides the newest."""
    return delay(stage, num_stages, num_microbatches, 0)


def lag_steps(num_stages: int, num_microbatches: int) -> int:
    """Steps after which the first stage has the gradients of a batch, and so everybody its loss without waiting."""
    return delay(0, num_stages, num_microbatches, 0)


def notes(plan: Plan) -> list[str]:
    """What a person must know of the plan."""
    if not is_asynchronous(plan):
        return []
    p, m = len(plan.stages), plan.microbatches
    most = lag_steps(p, m)
    copies = ", ".join(str(stashed(s, p, m)) for s in range(p))
    return [
        f"schedule {PIPEDREAM} changes the optimisation: steps overlap, and gradients are of weights that are up to "
        f"{most} update{'s' if most > 1 else ''} old (stages keep {copies} old versions of their weights); "
        "flush() drains the pipeline"
    ]


def faults(plan: Plan) -> Iterator[str]:
    """Decisions that no asynchronous pipeline can run with, a line each."""
    if not is_asynchronous(plan):
        return
    holders: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for chunk in stage.chunks:
            for name in chunk.parameters:
                holders.setdefault(name, set()).add(index)
    homes = [(n, home) for stage in plan.stages for chunk in stage.chunks for n, home in chunk.parameters.items()]
    tied = next((name for name, stages in holders.items() if len(stages) > 1), None)
    if tied is not None:
        where = " and ".join(map(str, sorted(holders[tied])))
        yield f"schedule {PIPEDREAM} and the weight {tied!r} on stages {where}, whose versions would differ"
    if sharded := next((name for name, home in homes if home.pattern != "replicated"), None):
        yield f"schedule {PIPEDREAM} and sharded parameters ({sharded}), of which it would have to stash every version"
    if plan.precision != "model":
        yield f"schedule {PIPEDREAM} in precision {plan.precision}"
    if coded := next((w.compressor for stage in plan.stages for w in stage.wire if w.compressor != "none"), None):
        yield f"schedule {PIPEDREAM} and gradients compressed by {coded}"
    if plan.num_chunks > 1:
        yield f"schedule {PIPEDREAM} with several chunks per stage"
