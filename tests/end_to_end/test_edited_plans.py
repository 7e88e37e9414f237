"""Odd worlds and plans that a person edited, on real ranks, against plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from torch import Tensor, nn

from tests.support import zoo
from tests.support.small_net import BATCHES, FEATURES, adamw, batch, losses_of, net, one_device, same_state, sgd

pytestmark = pytest.mark.ranks


# ---- odd worlds
def three(kind: str) -> tuple[list[float], dict[str, Tensor], list[int]]:
    model, args = (net(), BATCHES[0]) if kind == "net" else zoo.gpt(6)[:2]
    batches = [batch(i, 6) for i in range(3)] if kind == "net" else [args] * 3
    parallel = mw.parallelize(model, example_inputs=batches[0], optimizer=sgd, microbatches=2)
    return (
        losses_of(parallel, batches),
        parallel.full_state_dict(),
        [len(stage.devices) for stage in parallel.plan.stages],
    )


@pytest.mark.parametrize("kind", ["net", "gpt"])
def test_three_ranks(ranks: Any, kind: str) -> None:
    model = net() if kind == "net" else zoo.gpt(6)[0]
    batches = [batch(i, 6) for i in range(3)] if kind == "net" else [zoo.gpt(6)[1]] * 3
    expected = one_device(model, batches, 2)
    results = ranks.run(3, three, kind)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, *_ in results)
    same_state(results[0][1], model)


# ---- plans that a person edited


def spliced(folder: Path, model: nn.Module, inputs: Any, first: str, second: str, devices: tuple[int, int]) -> mw.Plan:
    """Stage 0 as in a pp2 plan of shape ``first``, stage 1 as in one of shape ``second``, by editing the document."""
    sizes = [max(1, int(shape[2:])) for shape in (first, second)]
    assert sizes == list(devices)
    asked = {"example_inputs": inputs, "microbatches": 2, "executable": True, "schedule": "1f1b"}
    one = mw.plan(model, "p3.16xlarge", strategy=f"pp2,{first}", **asked)
    (cut,) = (stage.chunks[0].layers[0] for stage in one.stages[1:])
    same_cut = f"stage boundary at {one.layers[cut]}"
    other = mw.plan(model, "p3.16xlarge", strategy=f"pp2,{second}", constraints=same_cut, **asked)
    documents = one.to_json(), other.to_json()
    assert documents[0]["stages"][0]["chunks"][0]["layers"] == documents[1]["stages"][0]["chunks"][0]["layers"]
    made = documents[0]
    made["stages"][1] = documents[1]["stages"][1]
    made["stages"][1]["devices"] = list(range(sizes[0], sum(sizes)))
    made["prediction"]["stages"] = (made["prediction"]["stages"][0], documents[1]["prediction"]["stages"][1])
    made["cluster"]["hosts"][0]["num_devices"] = sum(sizes)
    path = folder / "edited.json"
    path.write_text(json.dumps(made))
    return mw.Plan.load(path)


def by_edited_plan(path: str, kind: str, data: str) -> tuple[list[float], dict[str, Tensor]]:
    model, batches = case(kind)
    parallel = mw.parallelize(model, plan=mw.Plan.load(path), example_inputs=batches[0], optimizer=sgd, data=data)
    return losses_of(parallel, batches), parallel.full_state_dict()


def case(kind: str) -> tuple[nn.Module, list[Any]]:
    return (net(), BATCHES) if kind == "net" else (zoo.gpt(8)[0], [zoo.gpt(8)[1]] * 3)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("net", "tp2", "dp1"), ("net", "dp1", "dp2"), ("gpt", "dp1", "dp2"), ("gpt", "dp2", "dp1")],
)
def test_stages_of_unequal_devices_by_hand(ranks: Any, tmp_path: Path, kind: str, first: str, second: str) -> None:
    model, batches = case(kind)
    sizes = int(first[2:]), int(second[2:])
    plan = spliced(tmp_path, model, batches[0], first, second, sizes)
    assert plan.check() == []
    results = ranks.run(sum(sizes), by_edited_plan, str(tmp_path / "edited.json"), kind, "global")
    expected = one_device(model, batches, 2)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, _ in results)
    same_state(results[0][1], model)


def refused_local(path: str) -> str:
    with pytest.raises(ValueError, match="one split of the batch") as caught:
        by_edited_plan(path, "net", "local")
    return str(caught.value)


def test_local_data_needs_one_split_on_all_stages(ranks: Any, tmp_path: Path) -> None:
    spliced(tmp_path, net(), BATCHES[0], "dp2", "tp2", (2, 2))
    texts = ranks.run(4, refused_local, str(tmp_path / "edited.json"))
    assert len(set(texts)) == 1
    assert "2 parts" in texts[0]
    assert "data='global'" in texts[0]


def moved_to_the_end(path: str) -> tuple[list[float], dict[str, Tensor], list[str], Any]:
    """Rank 0 idles, the model's only stage is on rank 1."""
    parallel = mw.parallelize(
        net(), plan=mw.Plan.load(path), example_inputs=BATCHES[0], optimizer=sgd, clip_grad_norm=1e9
    )
    losses = losses_of(parallel, BATCHES)
    torch.optim.lr_scheduler.StepLR(parallel.optimizer, 1).step()
    norm = float(parallel.grad_norm)
    parallel.eval()
    return losses, parallel.full_state_dict(), list(parallel.state_dict()), (norm, parallel(BATCHES[0][0]))


def test_ranks_without_a_stage(ranks: Any, tmp_path: Path) -> None:
    made = mw.plan(net(), "local:2", example_inputs=BATCHES[0], strategy="pp1", microbatches=2, executable=True)
    document = made.to_json()
    document["stages"][0]["devices"] = [1]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    (losses, state, nothing, (norm, out)), (other, empty, names, (other_norm, other_out)) = ranks.run(
        2, moved_to_the_end, str(path)
    )
    model = net()
    expected = one_device(model, BATCHES, 2)
    assert losses == other == pytest.approx(expected["losses"], rel=1e-4)
    assert norm == other_norm == pytest.approx(expected["norms"][-1], rel=1e-4)
    assert nothing == []
    assert empty == {}
    assert set(names) == set(state)
    same_state(state, model)
    torch.testing.assert_close(out, model.eval()(BATCHES[0][0]), rtol=1e-4, atol=1e-5)
    assert torch.equal(out, other_out)


class Bare(nn.Module):
    """Parameters in its first layer only: a later stage has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.first(x)[:, :, None] * y[:, None, :]
        for _ in range(4):
            out = torch.tanh(out @ out.mT @ out / 64)
        return out.square().mean()


def bare() -> Bare:
    torch.manual_seed(0)
    return Bare()


def without_parameters(strategy: str) -> tuple[list[float], list[float], int, dict[str, Tensor]]:
    parallel = mw.parallelize(bare(), example_inputs=BATCHES[0], strategy=strategy, microbatches=2, optimizer=adamw)
    losses, norms = [], []
    for inputs in BATCHES:
        losses.append(float(parallel.train_step(*inputs)))
        norms.append(float(parallel.grad_norm))
    return losses, norms, len(parallel.state_dict()), parallel.full_state_dict()


def test_a_stage_without_parameters(ranks: Any) -> None:
    results = ranks.run(2, without_parameters, "pp2")
    model = bare()
    expected = one_device(model, BATCHES, 2, factory=adamw)
    for losses, norms, *_ in results:
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        assert norms == pytest.approx(expected["norms"], rel=1e-4)
    assert [count for _, _, count, _ in results] == [2, 0]
    same_state(results[0][3], model)


def pipeline_of_three() -> tuple[list[float], dict[str, Tensor], list[list[int]]]:
    model, args, _ = zoo.gpt(6)
    parallel = mw.parallelize(
        model, example_inputs=args, strategy="pp3", microbatches=3, optimizer=sgd, schedule="gpipe"
    )
    losses = losses_of(parallel, [args] * 3)
    return losses, parallel.full_state_dict(), [list(stage.devices) for stage in parallel.plan.stages]


def test_three_stages(ranks: Any) -> None:
    results = ranks.run(3, pipeline_of_three)
    model, args, _ = zoo.gpt(6)
    expected = one_device(model, [args] * 3, 3)
    assert all(losses == pytest.approx(expected["losses"], rel=1e-4) for losses, *_ in results)
    assert results[0][2] == [[0], [1], [2]]
    same_state(results[0][1], model)
