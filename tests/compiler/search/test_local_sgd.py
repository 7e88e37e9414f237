"""Delays and local steps that the search chooses by itself."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.search.local_sgd import worthwhile_delay
from meshwright.costmodel.cluster import Cluster

from tests.support.clusters import far
from tests.support.ranks import RankPool
from tests.support.replicas import Model, data, loss_of


def asked(cluster: Cluster, **wishes: Any) -> mw.Plan:
    x, y = data(0)
    wishes = {"strategy": "dp2", "zero": 0, "communication": "auto-lossy", "executable": True, "cache": False, **wishes}
    return mw.plan(Model(), cluster, example_inputs=(x,), targets=(y,), loss_fn=loss_of, optimizer="SGD", **wishes)


def test_a_delay_pays_where_messages_take_longer_than_steps():
    near = asked(far(2, 1e-7))
    assert worthwhile_delay(near) is None
    assert not [note for note in near.prediction.notes if "delayed averaging" in note]
    step_s = near.prediction.step_s
    plan = asked(far(2, 0.4 * step_s))
    found = worthwhile_delay(plan)
    assert found.steps == 1
    assert step_s / 1.3 < found.step_s <= plan.prediction.step_s / 1.25
    assert "delayed averaging would take" in plan.explain()
    slow = asked(far(2, 20 * step_s))
    late = worthwhile_delay(slow)
    exposed = slow.prediction.stages[0].seconds
    assert late.step_s == pytest.approx(exposed["gradient"] + exposed["overlapped"])  # sums go one after another
    assert late.steps == 2


def test_no_delay_for_what_cannot_step_by_itself():
    cluster = far(2, 0.01)
    assert worthwhile_delay(asked(cluster, zero=1)) is None
    assert worthwhile_delay(asked(cluster, strategy="tp2")) is None
    exact = asked(cluster, communication="exact")
    assert worthwhile_delay(exact) is not None
    assert not [note for note in exact.prediction.notes if "delayed averaging" in note]


def late(seconds: float, strategy: str, delay: Any) -> tuple[int, list[str], list[float]]:
    """Of this rank: the delay that was taken, notes, losses (means)."""
    x, y = data(0)
    parallel = mw.parallelize(
        Model(), far(dist.get_world_size(), seconds), example_inputs=(x,), targets=(y,), loss_fn=loss_of, delay=delay,
        strategy=strategy, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05), communication="exact",
    )  # fmt: skip
    losses = []
    for step in range(4):
        x, y = data(step)
        losses.append(float(parallel.mean_loss(parallel.train_step(x, targets=y))))
    parallel.flush()
    means = parallel.session.independent_replicas
    return means.local_updates.delay if means else 0, list(parallel.plan.prediction.notes), losses


def test_auto_takes_it_and_says_so(ranks: RankPool):
    chosen = ranks.run(2, late, 0.4, "dp2", "auto")
    steps, notes, losses = chosen[0]
    assert steps > 0
    assert notes[0].startswith("delayed averaging:")
    assert chosen[1][0] == steps
    by_hand = ranks.run(2, late, 0.4, "dp2", steps)
    assert by_hand[0][2] == losses
    for seconds, strategy in ((1e-7, "dp2"), (0.4, "tp2")):
        none = ranks.run(2, late, seconds, strategy, "auto")
        assert [one[0] for one in none] == [0, 0]
        assert not [note for note in none[0][1] if "delayed" in note]


@pytest.mark.parametrize("wishes", [{"delay": "soon"}, {"delay": "auto", "local_steps": 4}])
def test_another_word_is_one_clear_error(wishes):
    with pytest.raises(ValueError, match="delay is a number of steps, or 'auto'"):
        mw.parallelize(Model(), far(1, 0.1), **wishes)
