"""A partly specified plan is completed: what is kept of an earlier plan, and what is searched again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.models import GPT

HOST = replace(mw.Cluster.preset("p3.16xlarge").hosts[0], num_devices=4)
ONE_HOST, TWO_HOSTS = (replace(mw.Cluster.preset("p3.16xlarge"), hosts=(HOST,) * count) for count in (1, 2))


def planned(cluster: mw.Cluster = ONE_HOST, heads: int = 8, **wishes: Any) -> mw.Plan:
    with torch.device("meta"):
        model = GPT(vocab=256, layers=2, hidden=64, heads=heads, sequence=32)
        tokens = torch.zeros(64, 32, dtype=torch.int64)
    return mw.plan(model, cluster, example_inputs=(tokens, tokens), global_batch=64, executable=True, **wishes)


@pytest.fixture(scope="module")
def old() -> mw.Plan:
    return planned(strategy="pp2,tp2", microbatches=4, schedule="1f1b", recompute="full")


def shape(plan: mw.Plan) -> Any:
    return [(stage.mesh_shape, stage.chunks[0].layers) for stage in plan.stages]


def cuts(plan: mw.Plan, stage: int, stem: str) -> dict[str, set[str]]:
    ops = plan.stages[stage].chunks[0].ops
    return {op: set(labels) - {"whole"} for op, labels in ops.items() if op.startswith(stem)}


def test_everything_is_kept(old: mw.Plan) -> None:
    new = planned(like=old)
    assert (shape(new), new.microbatches, new.schedule) == (shape(old), old.microbatches, old.schedule)
    assert [stage.chunks[0].recompute for stage in new.stages] == [stage.chunks[0].recompute for stage in old.stages]
    assert all(cuts(new, k, "linear") == cuts(old, k, "linear") for k in range(2))
    assert new.prediction.step_s <= old.prediction.step_s * 1.01


def test_what_is_asked_beside_it_goes_first(old: mw.Plan) -> None:
    new = planned(like=old, microbatches=8, schedule="gpipe")
    assert (new.microbatches, new.schedule, shape(new)) == (8, "gpipe", shape(old))


def test_single_stages_keep_their_layers_cuts_and_modes(old: mw.Plan) -> None:
    new = planned(like=old, keep="stages 0")
    first = old.stages[0].chunks[0]
    assert new.stages[0].chunks[0].layers == first.layers
    assert cuts(new, 0, "linear").items() >= {op: c for op, c in cuts(old, 0, "linear").items() if not c}.items()
    assert all(cuts(old, 0, "linear")[op] <= found for op, found in cuts(new, 0, "linear").items())
    assert new.stages[0].chunks[0].recompute == first.recompute
    assert new.microbatches != old.microbatches


def test_a_larger_cluster_keeps_all_but_the_meshes(old: mw.Plan) -> None:
    new = planned(TWO_HOSTS, like=old, keep="schedule, microbatches, boundaries")
    assert (new.microbatches, len(new.stages), new.num_devices) == (4, 2, 8)


def test_layers_by_name(old: mw.Plan) -> None:
    new = planned(like=old, keep="layers blocks.0.*")
    names = set(cuts(old, 0, "linear"))
    stage = next(k for k, one in enumerate(new.stages) if names & set(one.chunks[0].ops))
    kept = cuts(new, stage, "linear")
    inside = [op for op in names if op in kept and op in ("linear", "linear_1", "linear_2", "linear_3")]
    assert inside
    assert all(cuts(old, 0, "linear")[op] <= kept[op] for op in inside)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("stages 0-3", "keep= names stages 0 to 1 of the plan, but got 'stages 0-3'"),
        ("stage one", "keep= is of 'stages 0-3'"),
        ("layers nowhere.*", "keep= names layers like"),
        ("meshes", "keep= is of 'stages 0-3'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(old: mw.Plan, keep: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(like=old, keep=keep)


def test_another_model_and_keep_alone_are_refused(old: mw.Plan) -> None:
    with pytest.raises(ValueError, match="like= is a plan of this model"):
        planned(heads=4, like=old)
    with pytest.raises(ValueError, match="pass like= too"):
        planned(keep="splits")


def test_chunks_are_kept_as_a_whole() -> None:
    zigzag = planned(strategy="pp2,dp2", schedule="zb-v", microbatches=8)
    with pytest.raises(ValueError, match="each is one run of layers"):
        planned(like=zigzag, keep="stages 0")
    again = planned(like=zigzag)
    assert (again.schedule, again.num_chunks, again.stages[0].mesh_shape) == ("zb-v", 2, (2,))
