"""Random ops inside a model: the same numbers on any number of ranks and in any split, of the right distribution; what
cannot be kept is refused by name."""

from __future__ import annotations

import math
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.ops.random_numbers import random_tensor
from meshwright.compiler.verification.capture_check import check_capture
from meshwright.compiler.verification.check_rules import check_node
from meshwright.compiler.verification.lockstep import LockstepComm, LockstepGroup
from meshwright.compiler.verification.split_execution import example_node
from torch import Tensor, nn

from tests.support.clusters import fast_links

BATCH, WIDTH, STEPS = 8, 16, 3


class DropPath(nn.Module):
    """Stochastic depth as in timm: a coin for each sample."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class Stochastic(nn.Module):
    """A variational autoencoder with stochastic depth, noise, masks, and codes that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.statistics, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Embedding(WIDTH, WIDTH)
        self.drop = DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1 * torch.randn_like(x)
        h = h * (torch.rand(x.shape[0], WIDTH) < 0.8)
        for layer in self.layers:
            h = h + self.drop(F.gelu(layer(h)))
        mean, spread = self.statistics(h).chunk(2, -1)
        z = torch.distributions.Normal(mean, spread.exp()).rsample()
        code = torch.multinomial(z.softmax(-1), 3, replacement=True)
        z = z + self.codes(code).mean(1) + torch.empty_like(z).uniform_(-0.1, 0.1) + F.gumbel_softmax(mean)
        return (self.last(z[:, torch.randperm(WIDTH)]) - x).square().mean()


def stochastic() -> Stochastic:
    torch.manual_seed(0)
    return Stochastic()


def train(strategy: dict[str, int] | None, recompute: str = "none") -> tuple[list[float], dict[str, Any]]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    parallel = mw.parallelize(
        stochastic(), fast_links(torch.distributed.get_world_size()), example_inputs=(x,), strategy=strategy,
        microbatches=2, recompute=recompute, optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9),
    )  # fmt: skip
    return [float(parallel.train_step(x)) for _ in range(STEPS)], parallel.full_state_dict()


def several(asked: list[tuple[dict[str, int] | None, str]]) -> list[Any]:
    return [train(*each) for each in asked]


def test_ranks_draw_what_one_device_draws(ranks: Any) -> None:
    (((losses, state),),) = ranks.run(1, several, [(None, "none")])
    asked = [({"dp": 2}, "none"), ({"tp": 2}, "full"), ({"pp": 2}, "auto")]
    for rank, found in enumerate(ranks.run(2, several, asked)):
        for others, weights in found:
            torch.testing.assert_close(others, losses, rtol=1e-4, atol=0)
            if not rank:
                torch.testing.assert_close(weights, state, rtol=1e-4, atol=1e-5)
    assert len(set(losses)) == STEPS


def draws(law: str, dtype: torch.dtype, *parameters: float, op: int = 0, step: int = 0) -> Tensor:
    with use_context(Context(LockstepComm(LockstepGroup(()), 0), 0, step, 0)):
        return random_tensor(law, (400, 500), parameters, dtype, op)


@pytest.mark.parametrize(
    ("law", "parameters", "mean", "variance", "distribution"),
    [
        ("uniform", (-1.0, 3.0), 1.0, 16 / 12, lambda x: (x + 1) / 4),
        ("normal", (2.0, 3.0), 2.0, 9.0, lambda x: torch.special.ndtr((x - 2) / 3)),
        ("exponential", (0.5,), 2.0, 4.0, lambda x: 1 - torch.exp(-x / 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_follow_their_law(
    law: str, parameters: tuple[float, ...], mean: float, variance: float, distribution: Any, dtype: torch.dtype
) -> None:
    x = draws(law, dtype, *parameters).double()
    n = x.numel()
    assert abs(float(x.mean()) - mean) < 4 * math.sqrt(variance / n)
    assert abs(float(x.var()) / variance - 1) < 0.03
    ordered = distribution(x.flatten().sort().values)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert float((ordered - steps).abs().max()) < 1.95 / math.sqrt(n)  # Kolmogorov and Smirnov, at one in 1,000
    neighbours = torch.corrcoef(torch.stack([x[:, :-1].flatten(), x[:, 1:].flatten()]))[0, 1]
    others = [draws(law, dtype, *parameters, op=1), draws(law, dtype, *parameters, step=1)]
    apart = [torch.corrcoef(torch.stack([x.flatten(), y.double().flatten()]))[0, 1] for y in others]
    assert all(abs(float(value)) < 4 / math.sqrt(n) for value in [neighbours, *apart])


def test_integers_and_coins_are_fair() -> None:
    counts = draws("integer", torch.int64, -2, 5).flatten().add(2).bincount()
    assert len(counts) == 7
    assert float((counts / 200_000 * 7 - 1).abs().max()) < 0.03
    coins = draws("bernoulli", torch.float32, 0.3)
    assert set(coins.unique().tolist()) == {0.0, 1.0}
    assert abs(float(coins.mean()) - 0.3) < 4 * math.sqrt(0.21 / 200_000)


def test_numbers_stay_within_their_bounds_in_16_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert 0 <= float(draws("uniform", dtype, 0.0, 1.0).max()) < 1
        assert float(draws("exponential", dtype, 1.0).min()) > 0


@pytest.mark.parametrize("law", ["uniform", "normal", "exponential", "bernoulli", "integer"])
def test_a_split_draws_the_same_as_the_whole(law: str) -> None:
    parameters, dtype = ([1, 9], torch.int64) if law == "integer" else ([0.5, 0.7], torch.float32)
    assert check_node(example_node(random_tensor, law, [4, 3, 8], parameters, dtype, 3)) == {}


class Sampling(nn.Module):
    """Choices by given probabilities, counted."""

    def __init__(self, replacement: bool, count: int) -> None:
        super().__init__()
        self.replacement, self.count = replacement, count
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0, 2.0, 5.0]))

    def forward(self, x: Tensor) -> Tensor:
        p = self.weight.expand(x.shape[0], 4)
        return torch.multinomial(p, self.count, replacement=self.replacement)


@pytest.mark.parametrize(("replacement", "count"), [(True, 3), (False, 2), (False, 1)])
def test_choices_follow_their_probabilities(replacement: bool, count: int) -> None:
    model, rows = Sampling(replacement, count), 40_000
    graph = capture(model, (torch.zeros(8, 1),), training=False).with_batch(rows)
    values: dict[Any, Any] = {}
    with use_context(Context(LockstepComm(LockstepGroup(()), 0))):
        for node in graph:
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            given = model.weight.detach() if node.op == "placeholder" else None
            values[node] = given if node.op == "placeholder" else node.target(*args, **kwargs)
    chosen = values[graph.node(graph.results[0].node)]
    assert chosen.shape == (rows, count)
    shares = chosen[:, 0].bincount(minlength=4) / rows
    torch.testing.assert_close(shares, torch.tensor([1.0, 0.0, 2.0, 5.0]) / 8, rtol=0, atol=0.01)
    if not replacement:
        assert all(len(set(row)) == count for row in chosen[:1000].tolist())


def test_the_capture_is_compared_on_equal_numbers() -> None:
    model, x = stochastic(), torch.randn(BATCH, WIDTH)
    graph = capture(model, (x,))
    assert check_capture(model, graph, (x,), {}, (), None) == ""

    class Half(Stochastic):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="got another loss"):
        check_capture(Half(), graph, (x,), {}, (), None)


class Refused(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw, self.last = draw, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(x) * self.draw(x)).square().mean()


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda x: torch.poisson(x.abs()), r"test_random_ops.py:\d+: random numbers are uniform.*aten.poisson"),
        (lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).sample(), "but got aten._standard_gamma.default"),
        (lambda x: torch.rand(WIDTH, generator=torch.Generator()), r"random_ops.py:\d+: .*generator of its own"),
        (lambda x: torch.zeros(WIDTH).random_(3, 9), r"random_\(low, high\).*use torch.randint_like"),
    ],
)
def test_other_laws_and_generators_are_refused_by_name(draw: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Refused(draw), (torch.randn(BATCH, WIDTH),))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
        lambda x: torch.empty_like(x).cauchy_(),
        lambda x: torch.empty_like(x).geometric_(0.4),
        lambda x: torch.zeros(WIDTH, dtype=torch.int64).random_(9),
        lambda x: torch.randint_like(x, 5),
        lambda x: torch.bernoulli(x.sigmoid()) + F.feature_alpha_dropout(x.unsqueeze(-1), 0.3, True).squeeze(-1),
        lambda x: torch.normal(torch.zeros(WIDTH), x.abs()[0]) + F.alpha_dropout(x, 0.4),
    ],
)
def test_further_ops_capture_as_they_run(draw: Any) -> None:
    model, x = Refused(draw), torch.randn(BATCH, WIDTH)
    assert check_capture(model, capture(model, (x,)), (x,), {}, (), None) == ""
