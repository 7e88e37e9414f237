"""Gradients that travel as a plan's wires say, on real ranks: exact by every algorithm, alike on all replicas in every
code, resumed with what they owe."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshwright.compiler.ir.spec import R
from meshwright.compiler.plan.plan import Plan
from meshwright.costmodel.codecs import CODECS, sent_bytes
from meshwright.runtime.errors import NonFiniteGradient
from torch import nn

from tests.support.clusters import fast_links
from tests.support.parity import case, make_optimizer
from tests.support.plan_documents import BATCH, agree, forced, rewired, train
from tests.support.zoo import ZOO


@pytest.mark.parametrize(
    ("algorithm", "strategy", "patterns"),
    [
        ("ring", "dp2", ("replicated",)), ("recursive_halving_doubling", "pp2,dp2", ("replicated", "zero1")),
        ("hierarchical", "dp2,tp2", ("replicated",)), ("two_step", "dp2", ("zero2",)),
    ],
)  # fmt: skip
def test_every_algorithm_sums_exactly(ranks, algorithm, strategy, patterns):
    document = rewired(forced("gpt", patterns, strategy, 2), algorithm)
    results = ranks.run(Plan.from_json(document).num_devices, train, document, "gpt", "adamw", {})
    agree(results, "gpt", "adamw", 2, {})
    assert results[0][4].get("step all_reduce", 0) <= 4  # of the backend's own: the loss


def digests_of(parallel: Any) -> list[str]:
    """Of every parameter that is whole on each rank of the stage."""
    homes, held = parallel.plan.stages[parallel.session.stage].homes, parallel.session.state.parameters
    whole = sorted(name for name in held if set(homes[name].stored) == {R})
    return [name + hashlib.sha256(held[name].detach().numpy().tobytes()).hexdigest() for name in whole]


def train_coded(document: dict[str, Any], steps: int) -> tuple[list[float], list[str], int, int]:
    """Losses, a digest of every parameter by its name and place, bytes handed to collectives by the codes, and bytes
    as ``sent_bytes`` has them."""
    model, args, kwargs = case("gpt")
    parallel = mw.parallelize(
        model, plan=Plan.from_json(document), example_inputs=args, example_kwargs=kwargs,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(steps)]
    made, wanted = parallel.session.gradient_all_reduce.made, 0
    for one in made:
        shapes = one.bucket.shapes
        wanted += sum(sent_bytes(CODECS[one.name], one.bucket.n, dist.get_world_size(), 4, shapes).values()) * steps
    return losses, digests_of(parallel), sum(sum(one.exchange.sent.values()) for one in made), wanted


@pytest.mark.parametrize(  # one that sends a hundredth of the elements begins later
    ("compressor", "steps"), [("bf16", 6), ("int8", 6), ("1bit", 6), ("powersgd4", 6), ("topk1%", 12)]
)
def test_replicas_stay_alike_in_a_code_and_learn(ranks, compressor, steps):
    document = forced("gpt", ("replicated",), "dp2", 1)
    exact = ranks.run(2, train_coded, document, steps)[0][0]
    found = ranks.run(2, train_coded, rewired(document, "backend", compressor), steps)
    (losses, digests, sent, wanted), (_, others, *_) = found
    assert digests == others != []
    assert sent == wanted > 0
    assert losses[0] == exact[0]
    assert losses[1:] != exact[1:]
    assert losses[0] - losses[-1] > 0.5 * (exact[0] - exact[-1])


def test_codes_go_with_pipelines_parts_of_parameters_and_algorithms(ranks):
    document = forced("gpt", ("replicated", "zero1", "zero2", "zero3"), "pp2,dp2", 2)
    exact = ranks.run(4, train_coded, document, 4)[0][0]
    for way in (("ring", "bf16"), ("backend", "int8")):
        losses = ranks.run(4, train_coded, rewired(document, *way), 4)[3][0]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=2e-2, atol=0)
        assert losses != exact


def test_only_what_goes_between_hosts_is_coded(ranks):
    cluster = fast_links(2)
    hosts = replace(cluster, hosts=cluster.hosts * 2, name="two hosts of two")
    document = forced("gpt", ("replicated",), "dp4", 1, hosts)
    exact = ranks.run(4, train_coded, document, 4)[0][0]
    found = ranks.run(4, train_outer, rewired(document, "hierarchical", "int8"), 4)
    for losses, digests, inner, between in found:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=2e-2, atol=0)
        assert digests == found[0][1]
        assert 1 / 8 < between / inner < 1 / 7.5  # of half of the elements a quarter of the bytes, and scales
    assert found[0][0] != exact


def train_outer(document: dict[str, Any], steps: int) -> tuple[list[float], list[str], int, int]:
    """Losses, digests, bytes handed to collectives inside the host, and between hosts."""
    model, args, _ = case("gpt")
    parallel = mw.parallelize(
        model, plan=Plan.from_json(document), example_inputs=args, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)
    )
    losses = [float(parallel.train_step(*args)) for _ in range(steps)]
    made = parallel.session.gradient_all_reduce.made
    between = sum(sum(one.coded.exchange.sent.values()) for one in made)
    return losses, digests_of(parallel), sum(sum(one.inner.sent.values()) for one in made), between


def save_and_go_on(document: dict[str, Any], other: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """Losses of four steps without a break, and of the last two after a checkpoint; then loads it under ``other``."""

    def made(wanted: dict[str, Any]) -> Any:
        return mw.parallelize(
            case("gpt")[0], plan=Plan.from_json(wanted), example_inputs=args, optimizer=make_optimizer("adamw")
        )

    _, args, _ = case("gpt")
    first = made(document)
    losses = [float(first.train_step(*args)) for _ in range(2)]
    first.save_checkpoint(folder)
    losses += [float(first.train_step(*args)) for _ in range(2)]
    second = made(document)
    second.load_checkpoint(folder)
    resumed = [float(second.train_step(*args)) for _ in range(2)]
    third = made(other)
    third.load_checkpoint(folder)  # nothing owed fits there
    assert float(third.train_step(*args)) == pytest.approx(resumed[0], rel=1e-5)
    return losses, resumed


@pytest.mark.filterwarnings("ignore:the checkpoint was written under another plan")
@pytest.mark.parametrize("compressor", ["topk1%", "powersgd4"])
def test_what_is_owed_survives_a_checkpoint(ranks, tmp_path, compressor):
    document = forced("gpt", ("replicated",), "dp2", 1)
    coded = rewired(document, "backend", compressor)
    losses, resumed = ranks.run(2, save_and_go_on, coded, document, str(tmp_path))[0]
    assert resumed == losses[2:]


class Rooted(nn.Module):
    """Its gradient is not a number where a row of inputs is zero; its loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.linear(x).abs()
        return F.mse_loss(torch.where(z > 0, torch.sqrt(z), z), y)


def rooted(batch: int, device: str = "cpu") -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Rooted().to(device), (torch.ones(batch, 4), torch.zeros(batch, 4)), {}


def train_on_a_zero(document: dict[str, Any]) -> str:
    model, (x, y), _ = rooted(BATCH)
    parallel = mw.parallelize(
        model, plan=Plan.from_json(document), example_inputs=(x, y), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)
    )
    before = parallel.full_state_dict()
    spoilt = x.clone()
    spoilt[-1] = 0.0  # of the second rank
    try:
        parallel.train_step(spoilt, y)
    except NonFiniteGradient as error:
        after = parallel.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        parallel.train_step(x, y)  # it goes on
        return str(error)
    return "nothing"


@pytest.mark.parametrize("compressor", ["int8", "topk1%"])
def test_a_gradient_that_is_not_a_number_is_reported_by_all(ranks, monkeypatch, compressor):
    monkeypatch.setitem(ZOO, "rooted", rooted)
    document = rewired(forced("rooted", ("replicated",), "dp2", 1), "backend", compressor)
    for text in ranks.run(2, train_on_a_zero, document):
        assert "gradients must be finite" in text
        assert "rank 1 of the group" in text
