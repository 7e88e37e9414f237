"""PipeDream equals a sequential run in which every stage's microbatch sees weights exactly as old as the schedule says;
its losses, its memory, its prediction, and what it refuses."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.ops.local_ops import dropout
from meshwright.compiler.memory.abstract_run import AbstractComm
from meshwright.compiler.pipeline.families import delay, generate, in_flight_formula, lag_steps, stashed_versions
from meshwright.compiler.pipeline.schedule import in_flight, validate
from meshwright.compiler.plan.validation import require_valid
from torch import nn
from torch.func import functional_call

from tests.support.clusters import fast_links

BATCH, WIDTH, STEPS, DROPOUT, SEED, TIMEOUT_S = 12, 8, 7, 0.1, 3, 180.0


class Drawn(nn.Module):
    """Dropout as programs have it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, DROPOUT, self.index)


class Model(nn.Module):
    """Eight blocks with a frozen weight, dropout and running statistics among them. drawn: dropout draws as ranks
    do."""

    def __init__(self, drawn: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        drop = [Drawn(index) if drawn else nn.Dropout(DROPOUT) for index in range(7)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), one, nn.Linear(2 * WIDTH, WIDTH)) for one in drop),
            nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
        )
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.flip(1).tanh()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}

CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {  # strategy, microbatches, optimizer, what else is asked
    "2 stages, the original": ("pp2", 1, "sgd", {}),
    "4 stages, the original": ("pp4", 1, "adamw", {"recompute": "full"}),
    "4 stages, 2 microbatches": ("pp4", 2, "sgd", {"recompute": "selective"}),
    "4 stages, 6 microbatches": ("pp4", 6, "adamw", {}),
    "data": ("pp2,dp2", 2, "sgd", {"recompute": "full", "compile": "eager"}),
    "tensor": ("pp2,tp2", 3, "adamw", {"compile": "eager"}),
}


# ---- in one process


def oracle(
    stages: Sequence[Sequence[str]], m: int, optimizer: str, steps: int, flushes: Sequence[int]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the last state of a sequential run in which stage s of p runs microbatch j, counted from the last
    flush, with the weights that max(0, j − (p − 1 − s)) backwards have left. flushes: the steps that one follows."""
    model, comm = Model(drawn=True).double(), AbstractComm((1,), native=False)
    weights = dict(model.named_parameters())
    made = OPTIMIZERS[optimizer]([p for p in weights.values() if p.requires_grad])
    stage_of = {name: index for index, names in enumerate(stages) for name in names}
    losses, history, done = [], [copied(weights)], 0
    for step in range(steps):
        parts = list(zip(*(tensor.chunk(m) for tensor in data(step)), strict=True))
        total = 0.0
        for k, (x, y) in enumerate(parts):
            warm = {name: len(stages) - 1 - stage for name, stage in stage_of.items()}
            seen = {name: history[max(0, done + k - warm[name]) // m][name] for name in weights}
            with use_context(Context(comm, SEED, step, k)):
                loss = nn.functional.mse_loss(functional_call(model, seen, (x,)), y) / m
            trained = [name for name in weights if weights[name].requires_grad]
            for name, grad in zip(trained, torch.autograd.grad(loss, [seen[n] for n in trained]), strict=True):
                weights[name].grad = grad if k == 0 else weights[name].grad + grad
            total += loss.item()
        made.step()
        losses.append(total)
        done += m
        history.append(copied(weights))
        if step in flushes:
            history, done = [copied(weights)], 0
    return losses, {name: x.detach() for name, x in model.state_dict().items()}


def copied(weights: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in weights.items()}


# ---- on ranks


def newest_in_backward(executor: Any) -> None:
    """No version is stashed: backwards read what the optimizer has written meanwhile."""
    if executor.stash is not None:
        executor.stash.keep = lambda: None


def oldest_in_forward(executor: Any) -> None:
    """Forwards go on with the first weights."""
    if executor.stash is not None:
        executor.stash.renew = lambda: None


PLANTED = {"newest in backward": newest_in_backward, "oldest in forward": oldest_in_forward}


def start(strategy: str, m: int, optimizer: str, schedule: str = "pipedream", **options: Any) -> Any:
    x, y = data(0)
    return mw.parallelize(
        Model().double().train(), fast_links(dist.get_world_size()), example_inputs=(x,), targets=(y,),
        loss_fn=nn.functional.mse_loss, optimizer=OPTIMIZERS[optimizer], strategy=strategy, microbatches=m,
        schedule=schedule, seed=SEED, **options,
    )  # fmt: skip


def train(case: str, flushes: Sequence[int], steps: int = STEPS, bug: str = "") -> tuple[Any, ...]:
    """Losses by step, returned and flushed; the last state; the parameters of each stage; how many steps late losses
    were; what was left in flight; notes. One tensor serves all batches."""
    strategy, m, optimizer, options = CASES[case]
    parallel = start(strategy, m, optimizer, **options)
    if bug:
        PLANTED[bug](parallel.session.executor)
    found: dict[int, float] = {}
    lags, batch = [], data(0)
    for step in range(steps):
        for held, new in zip(batch, data(step), strict=True):
            held.copy_(new)
        loss = float(parallel.train_step(batch[0], targets=batch[1]))
        lags.append(None if parallel.loss_step is None else step - parallel.loss_step)
        assert math.isnan(loss) == (parallel.loss_step is None)
        if parallel.loss_step is not None:
            assert parallel.loss_step not in found
            found[parallel.loss_step] = loss
        if step in flushes:
            late = {number: float(value) for number, value in parallel.flush().items()}
            assert not late.keys() & found.keys()
            found |= late
    held = max((len(part._flying) for part in [parallel.session.executor] if part.programs), default=0)
    names = [list(stage.chunks[0].parameters) for stage in parallel.plan.stages]
    return found, parallel.full_state_dict(), names, lags, held, parallel.plan.prediction.notes


def check(results: Sequence[tuple[Any, ...]], case: str, flushes: Sequence[int]) -> None:
    _, m, optimizer, _ = CASES[case]
    found, state, names, lags, _, notes = results[0]
    losses, expected = oracle(names, m, optimizer, STEPS, flushes)
    lag = lag_steps(len(names), m)
    assert lags[:lag] == [None] * lag
    assert lags[lag : flushes[0] + 1] == [lag] * (flushes[0] + 1 - lag)
    assert all(result[0] == found and result[4] == 0 for result in results)
    torch.testing.assert_close([found[step] for step in range(STEPS)], losses, rtol=1e-9, atol=0.0)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    assert any("changes the optimisation" in note for note in notes)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_equals_a_sequential_run_with_weights_as_old(ranks: Any, case: str) -> None:
    flushes = (4, STEPS - 1)
    world = {"pp2": 2}.get(CASES[case][0], 4)
    check(ranks.run(world, train, case, flushes, timeout_s=TIMEOUT_S), case, flushes)


@pytest.mark.ranks
@pytest.mark.parametrize("bug", PLANTED)
def test_other_weights_are_noticed(ranks: Any, bug: str) -> None:
    case, flushes = "2 stages, the original", (STEPS - 1,)
    results = ranks.run(2, train, case, flushes, STEPS, bug)
    with pytest.raises(AssertionError, match="blocks"):
        check([(oracle(results[0][2], 1, "sgd", STEPS, flushes)[0], *result[1:]) for result in results], case, flushes)


def refusals(folder: str) -> dict[str, str]:
    """What is said to misuse, in a session that then trains on; and that a checkpoint goes on where it was."""
    said: dict[str, str] = {}

    def tried(name: str, do: Callable[[], Any]) -> None:
        try:
            do()
        except ValueError as error:
            said[name] = str(error)

    parallel = start("pp2", 2, "sgd")
    x, y = data(0)
    tried("half", lambda: parallel.forward_backward(x, targets=y))
    tried("other half", parallel.optimizer_step)
    tried("norm", lambda: parallel.grad_norm)
    parallel.train_step(x, targets=y)
    for name, do in {
        "state": parallel.state_dict, "whole state": parallel.full_state_dict, "evaluation": lambda: parallel(x),
        "checkpoint": lambda: parallel.save_checkpoint(folder), "restore": lambda: parallel.load_checkpoint(folder),
        "load": lambda: parallel.load_state_dict({}), "meter": lambda: parallel.metered_step(x, targets=y),
    }.items():  # fmt: skip
        tried(name, do)
    tried("clipping", lambda: start("pp2", 2, "sgd", clip_grad_norm=1.0))
    tried("zero", lambda: start("pp2", 2, "sgd", zero=2))
    parallel.flush()
    parallel.save_checkpoint(folder)
    again = start("pp2", 2, "sgd")
    again.load_checkpoint(folder)
    for step in (1, 2):
        for one in (parallel, again):
            one.train_step(*data(step)[:1], targets=data(step)[1])
    losses = [{step: float(loss) for step, loss in one.flush().items()} for one in (parallel, again)]
    assert losses[0] == losses[1]
    assert list(losses[0]) == [2]
    assert torch.isfinite(again(x)).all()
    assert again.report().measured_step_s is not None
    tried("not finite", lambda: [parallel.train_step(x * math.nan, targets=y), parallel.flush()])
    return said


@pytest.mark.ranks
def test_says_what_cannot_be_done_and_goes_on_from_a_checkpoint(ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = ranks.run(2, refusals, folder)
    assert first == second
    for name in ("half", "other half"):
        assert "call train_step" in first.pop(name)
    assert "no grad_norm" in first.pop("norm")
    assert "clip_grad_norm=1.0" in first.pop("clipping")
    assert "zero=2" in first.pop("zero")
    assert "rank 1 (stage 1) at step 3" in first.pop("not finite")
    assert len(first) == 7
    assert all("call flush() before" in text for text in first.values()), first


def test_refuses_weights_that_two_stages_share() -> None:
    from tests.support.zoo import ZOO

    model, args, kwargs = ZOO["gpt"](8, layers=4)
    plan = mw.plan(
        model, fast_links(2), example_inputs=args, example_kwargs=kwargs, strategy="pp2", microbatches=2,
        schedule="pipedream",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"the weight '.*' on stages 0 and 1, whose versions would differ"):
        require_valid(plan, runnable=True)


def converge() -> tuple[float, float]:
    parallel = start("pp4", 1, "adamw")
    x, y = data(0)
    losses: dict[int, float] = {}
    for _ in range(60):
        loss = float(parallel.train_step(x, targets=y))
        if parallel.loss_step is not None:
            losses[parallel.loss_step] = loss
    losses |= {step: float(loss) for step, loss in parallel.flush().items()}
    assert list(losses) == list(range(60))
    return losses[0], losses[59]


@pytest.mark.ranks
def test_converges(ranks: Any) -> None:
    (first, last), *_ = ranks.run(4, converge)
    assert last < 0.1 * first


# ---- what is known beforehand


@pytest.mark.parametrize("p", range(1, 9))
def test_runs_over_any_number_of_steps_with_delays_as_told(p: int) -> None:
    for m in range(1, 10):
        steps = 4
        schedule = generate("pipedream", p, m * steps)
        validate(schedule)
        assert in_flight(generate("pipedream", p, m * steps + p)) == tuple(
            in_flight_formula("pipedream", s, p, m) for s in range(p)
        )
        for stage, row in enumerate(schedule.actions):
            done = 0
            for action in row:
                batch, k = divmod(action.microbatch, m)
                if action.kind == "F":
                    assert batch - done // m == min(batch, delay(stage, p, m, k))
                else:
                    done += 1
            assert stashed_versions(stage, p, m) == max(delay(stage, p, m, k) for k in range(m))


def planned(schedule: str, m: int) -> mw.Plan:
    x, y = data(0)
    return mw.plan(
        Model().double(), fast_links(4), example_inputs=(x,), targets=(y,), loss_fn=nn.functional.mse_loss,
        strategy="pp4", microbatches=m, schedule=schedule, recompute="none", zero=0,
    )  # fmt: skip


@pytest.mark.parametrize("m", [1, 4])
def test_predicts_a_step_without_a_bubble_and_the_versions(m: int) -> None:
    plan, other = planned("pipedream", m), planned("1f1b", m)
    stages = plan.prediction.stages
    busy = [m * (stage.forward_s + stage.backward_s) + stage.step_s for stage in stages]
    assert max(busy) <= plan.prediction.step_s * (1 + 1e-9)
    assert plan.prediction.step_s < 0.75 * other.prediction.step_s
    assert plan.prediction.bound_s <= plan.prediction.step_s
    assert "changes the optimisation" in plan.explain()
    alone = [sum(8 * p.numel() for name, p in Model().named_parameters() if name in stage.chunks[0].parameters)
             for stage in plan.stages]  # fmt: skip
    for s, (one, size) in enumerate(zip(stages, alone, strict=True)):
        assert one.memory_bytes["parameters"] >= (1 + stashed_versions(s, 4, m)) * (size - 8 * 2 * WIDTH * WIDTH)
        assert one.memory_bytes["parameters"] <= (1 + stashed_versions(s, 4, m)) * size + 1024


def test_auto_never_changes_the_optimisation() -> None:
    assert planned("auto", 4).schedule != "pipedream"


def test_what_is_left_open_is_what_it_runs_with() -> None:
    """16 bits and codes of gradients would be faster, and are refused where they are asked for."""
    x, y = data(0)

    def asked(**wishes: Any) -> mw.Plan:
        return mw.plan(
            Model(), fast_links(4), example_inputs=(x.float(),), targets=(y.float(),), loss_fn=nn.functional.mse_loss,
            strategy="pp2,dp2", microbatches=2, schedule="pipedream", executable=True, cache=False, **wishes,
        )  # fmt: skip

    plan = asked(precision="auto", communication="auto-lossy")
    assert (plan.schedule, plan.precision) == ("pipedream", "model")
    assert {wire.compressor for stage in plan.stages for wire in stage.wire} <= {"none"}
    with pytest.raises(
        ValueError,
        match="the runtime cannot execute this plan: schedule pipedream in precision bf16; plan again without",
    ):
        asked(precision="bf16")
    with pytest.raises(ValueError, match=r"sums gradients exactly, but got .* leave out int8"):
        asked(communication={"gradients": "int8"})
