"""What replicas that step by themselves keep: predicted bytes equal those that live, and what does not fit is said."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.memory.buffers import CAUSE, with_replica_memory
from meshwright.runtime.profiling.memory_meter import storages_alive

from tests.support import zoo
from tests.support.clusters import fast_links
from tests.support.peak_memory import least_peak

CASES = {  # delay, local steps, whether the outer optimizer has momentum
    "one late": (1, 1, False),
    "three late": (3, 1, False),
    "averages": (0, 2, False),
    "late averages": (2, 3, True),
}


def weigh(case: str) -> tuple[float, int]:
    """(predicted, measured) bytes of this rank."""
    delay, every, momentum = CASES[case]
    gc.collect()
    before = sum(storages_alive().values())
    model, args, kwargs = zoo.mlp(8)
    parallel = mw.parallelize(
        model, fast_links(torch.distributed.get_world_size()), example_inputs=args, example_kwargs=kwargs,
        strategy="dp2", microbatches=2, zero=0, schedule="1f1b", delay=delay, local_steps=every,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3),
        outer_optimizer=(lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9)) if momentum else None,
    )  # fmt: skip
    del model
    period = max(delay, every) + 1
    for _ in range(2 * period):  # until as much is on its way as ever will be
        parallel.train_step(*args, **kwargs)
    peak = least_peak(lambda: [parallel.train_step(*args, **kwargs) for _ in range(every)])
    memory = parallel.plan.prediction.stages[parallel.plan.stage_of(torch.distributed.get_rank())].memory_bytes
    assert CAUSE in memory
    return sum(memory.values()) - memory["framework"], peak - before


@pytest.mark.ranks
@pytest.mark.parametrize("case", list(CASES))
def test_bytes_are_those_predicted(ranks: Any, case: str) -> None:
    for predicted, measured in ranks.run(2, weigh, case):
        assert predicted == pytest.approx(measured, rel=0.05)


def planned() -> tuple[mw.Plan, Any]:
    model, args, kwargs = zoo.mlp(8)
    plan = mw.plan(
        model, fast_links(2), example_inputs=args, example_kwargs=kwargs, strategy="dp2", zero=0, executable=True
    )
    return plan, capture(model, args, kwargs)


def test_a_plan_that_was_saved_with_replicas_counts_them_once() -> None:
    plan, graph = planned()
    once = with_replica_memory(plan, graph, 2, 1, None)
    assert with_replica_memory(once, graph, 2, 1, None) == once
    assert with_replica_memory(once, graph, 0, 1, None) == plan
    twice = with_replica_memory(plan, graph, 4, 1, None)
    gradients = sum(p.numel() * 4 for p in zoo.mlp(8)[0].parameters())
    assert twice.prediction.stages[0].peak_bytes - once.prediction.stages[0].peak_bytes == 4 * gradients


def test_what_does_not_fit_is_said() -> None:
    plan, graph = planned()
    (host,) = plan.cluster["hosts"]
    (stage,) = plan.prediction.stages
    framework = stage.memory_bytes["framework"]
    device = host["device"] | {"memory_bytes": int(framework + 1.5 * (stage.peak_bytes - framework))}
    tight = replace(plan, cluster=dict(plan.cluster) | {"hosts": [host | {"device": device}]})
    with pytest.raises(mw.InfeasibleError, match=r"each device of stage 0 \(delay=20.*use a smaller delay"):
        with_replica_memory(tight, graph, 20, 1, None)
