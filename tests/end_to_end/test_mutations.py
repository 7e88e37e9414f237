"""Each realistic bug of parallel training, planted one at a time, is caught: by ``verify`` in this process, or by the
parity of a run on two ranks with one device. The same checks pass where nothing is planted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.comm import CompletedArrival, Context, current_context, use_context
from meshwright.compiler.ir.ops import local_ops, ring_attention
from meshwright.compiler.verification import parts
from meshwright.compiler.verification.lockstep import LockstepComm
from meshwright.models.architectures import GPT, TransformerMoE
from meshwright.runtime.execution.input_sharding import InputSharder
from meshwright.runtime.parameters.gradients import GradientReducer
from meshwright.runtime.parameters.tied import TiedParameters
from meshwright.runtime.transport.process_groups import DistributedComm

from tests.support.clusters import fast_links
from tests.support.zoo import MLP

STEPS, BATCH, MICROBATCHES = 3, 8, 2

# ---- bugs of the compiler's programs, caught by verify


def tokens(batch: int = BATCH, sequence: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 16, (2, batch, sequence), generator=generator))  # type: ignore[return-value]


class Space(torch.nn.Module):
    """Two convolutions over words and their features."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 8)
        self.one, self.two = (torch.nn.Conv2d(*channels, 3, padding=1) for channels in ((1, 2), (2, 1)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.two(self.one(self.words(x).unsqueeze(1)).relu()).squeeze(1)
        return torch.nn.functional.mse_loss(h, self.words(y))


class Turned(torch.nn.Module):
    """Features of words as complex numbers, turned by trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8)
        self.turn = torch.nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.view_as_complex(self.words(x).unflatten(-1, (4, 2))) * self.turn
        return torch.nn.functional.mse_loss(self.last(torch.view_as_real(h).flatten(-2)), self.words(y))


def small(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "complex":
        return Turned()
    if kind == "halo":
        return Space()
    if kind in ("moe", "dispatch"):
        return TransformerMoE(16, 2, 16, 2, 4, 8, feed_forward=16, dropout=0.0)
    return GPT(16, 1, 16, 2, 8, dropout=0.2 if kind == "dropout" else 0.0, tied=True)


@pytest.fixture(scope="module")
def plans() -> Callable[[str, str], Any]:
    """(kind of model, strategy) → (model, plan), made once."""
    made: dict[tuple[str, str], Any] = {}

    def make(kind: str, strategy: str) -> Any:
        if (kind, strategy) not in made:
            model, devices = small(kind), 4 if "," in strategy else 2
            plan = mw.plan(model, fast_links(devices), example_inputs=tokens(), strategy=strategy, executable=True,
                           microbatches=MICROBATCHES, zero=3 if kind == "zero3" else 0, cache=False)  # fmt: skip
            made[kind, strategy] = model, forced(plan, kind)
        return made[kind, strategy]

    return make


FORCED = {"ring": ("attention", "ring"), "halo": ("conv", "height"), "dispatch": ("experts", "dispatch")}


def forced(plan: mw.Plan, kind: str) -> mw.Plan:
    """The plan with a label on the ops that this kind of model is about."""
    if kind not in FORCED:
        return plan
    part, label = FORCED[kind]
    (stage,) = plan.stages
    (chunk,) = stage.chunks
    ops = {name: (label,) if part in name else labels for name, labels in chunk.ops.items()}
    assert (label,) in ops.values()
    return replace(plan, stages=(replace(stage, chunks=(replace(chunk, ops=ops),)),))


def everywhere(change: Callable[[Any, str, int], tuple[Any, int]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change (tensor, axis) of every reduction of the devices."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for kind in ("all_reduce", "reduce_scatter"):
            original = getattr(LockstepComm, kind)

            def planted(self: Any, x: Any, axis: int, *rest: Any, kind: str = kind, original: Any = original) -> Any:
                x, axis = change(x, kind, axis)
                return original(self, x, axis, *rest)

            patch.setattr(LockstepComm, kind, planted)

    return plant


def missing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockstepComm, "all_reduce", lambda self, x, axis, op="sum": x.clone())


def missing_complex(patch: pytest.MonkeyPatch) -> None:
    """What has complex numbers is not summed, and all else is."""
    original = LockstepComm.all_reduce
    patch.setattr(
        LockstepComm, "all_reduce",
        lambda self, x, *rest, **more: x.clone() if x.is_complex() else original(self, x, *rest, **more),
    )  # fmt: skip


def ungathered(patch: pytest.MonkeyPatch) -> None:
    def own(self: Any, x: torch.Tensor, axes: tuple[int, ...]) -> CompletedArrival:
        return CompletedArrival(torch.stack([x] * math.prod(map(self.size, axes))))

    patch.setattr(LockstepComm, "start_all_gather", own)


def wrong_peer(patch: pytest.MonkeyPatch) -> None:
    def swapped(shape: Any, source: Any, target: Any) -> Any:
        return tuple(
            replace(tile, source=source.devices[source.devices.index(tile.source) - 1])
            for tile in original(shape, source, target)
        )

    original = parts.tiles
    patch.setattr(parts, "tiles", swapped)


def last_mask_for_all(patch: pytest.MonkeyPatch) -> None:
    original = ring_attention._Ring.parts
    patch.setattr(ring_attention._Ring, "parts", lambda self, index, *rest: original(self, self.count - 1, *rest))


def shared_mask(patch: pytest.MonkeyPatch) -> None:
    original = local_ops.keep_mask
    patch.setattr(local_ops, "keep_mask", lambda shape, p, op, cuts, device: original(shape, p, op, (), device))


def own_seeds(patch: pytest.MonkeyPatch) -> None:
    def keep(*arguments: Any) -> torch.Tensor:
        here = current_context()
        with use_context(Context(here.comm, here.seed + here.comm.rank, here.step, here.microbatch)):  # type: ignore[attr-defined]
            return original(*arguments)

    original = local_ops.keep_mask
    patch.setattr(local_ops, "keep_mask", keep)


def unordered_tokens(patch: pytest.MonkeyPatch) -> None:
    class Rolled:
        @staticmethod
        def apply(rows: torch.Tensor, *rest: Any) -> Any:
            return original.apply(rows.roll(current_context().comm.rank, 0), *rest)  # type: ignore[attr-defined]

    original = local_ops._Combine
    patch.setattr(local_ops, "_Combine", Rolled)


def wrong_neighbours(patch: pytest.MonkeyPatch) -> None:
    """A device's rows go to the device behind it where they should go to the one before it."""

    def exchange(self: Any, before: Any, after: Any, axis: int, cyclic: bool = False) -> Any:
        return original(self, after, before, axis, cyclic)

    original = LockstepComm.exchange
    patch.setattr(LockstepComm, "exchange", exchange)


def unordered_rows(patch: pytest.MonkeyPatch) -> None:
    def all_to_all_uneven(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return original(self, x, *rest).flip(0)

    original = LockstepComm.all_to_all_uneven
    patch.setattr(LockstepComm, "all_to_all_uneven", all_to_all_uneven)


VERIFIED = {
    "a missing all-reduce": ("gpt", "tp2", missing),
    "a missing all-reduce of a complex gradient": ("complex", "dp2", missing_complex),
    "a doubled reduction": ("gpt", "tp2", everywhere(lambda x, kind, axis: (x * 2, axis))),
    "the wrong group": ("gpt", "dp2,tp2", everywhere(lambda x, kind, axis: (x, 1 - axis))),
    "the wrong peer in a send": ("gpt", "pp2,dp2", wrong_peer),
    "the wrong block of a causal mask": ("ring", "tp2", last_mask_for_all),
    "a dropout seed that is shared": ("dropout", "dp2", shared_mask),
    "a dropout seed that is not shared": ("dropout", "dp2", own_seeds),
    "an expert's tokens in the wrong order": ("moe", "tp2", unordered_tokens),
    "the rows of dispatched tokens in the wrong order": ("dispatch", "tp2", unordered_rows),
    "a halo of the wrong neighbour": ("halo", "dp2", wrong_neighbours),
    "a weight that is not gathered": ("zero3", "dp2", ungathered),
    "weight gradients scattered in the wrong group": (
        "zero3",
        "dp2,tp2",
        everywhere(lambda x, kind, axis: (x, 1 - axis if x.ndim == 1 else axis)),
    ),
}


@pytest.mark.parametrize(("kind", "strategy"), sorted({(kind, strategy) for kind, strategy, _ in VERIFIED.values()}))
def test_without_a_bug_verify_finds_none(plans: Any, kind: str, strategy: str) -> None:
    model, plan = plans(kind, strategy)
    found = mw.verify(plan, model, example_inputs=tokens())
    assert found.ok, str(found)


@pytest.mark.parametrize("bug", list(VERIFIED))
def test_verify_catches(plans: Any, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    kind, strategy, plant = VERIFIED[bug]
    model, plan = plans(kind, strategy)
    plant(monkeypatch)
    found = mw.verify(plan, model, example_inputs=tokens())
    assert not found.ok
    assert found.first_difference is not None


# ---- bugs of the runtime, caught by parity with one device


def doubled_sum(patch: pytest.MonkeyPatch) -> None:
    def start(self: Any, x: torch.Tensor, *rest: Any) -> Any:
        return original(self, x.mul_(2), *rest)

    original = DistributedComm.start_all_reduce
    patch.setattr(DistributedComm, "start_all_reduce", start)


def divided_sum(patch: pytest.MonkeyPatch) -> None:
    def start(self: Any, x: torch.Tensor, *rest: Any) -> Any:
        return original(self, x.div_(2), *rest)

    original = DistributedComm.start_all_reduce
    patch.setattr(DistributedComm, "start_all_reduce", start)


def no_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DistributedComm, "start_all_reduce", lambda self, x, *rest: None)


def too_early(patch: pytest.MonkeyPatch) -> None:
    """Each bucket is summed, to the end, as soon as the first microbatch fills it: a sum that is only started might
    read its memory after the last microbatch has added to it, and be right by chance."""

    def arm(self: Any, leaves: frozenset[int]) -> None:
        original(self, leaves.union(id(parameter) for bucket in self.buckets for parameter in bucket.parameters))

    def launch(self: Any, bucket: Any) -> None:
        launched(self, bucket)
        self._settle(bucket)

    original, launched = GradientReducer.arm, GradientReducer._launch
    patch.setattr(GradientReducer, "arm", arm)
    patch.setattr(GradientReducer, "_launch", launch)


def left_out(patch: pytest.MonkeyPatch) -> None:
    def init(self: Any, comm: Any, parameters: Any, *rest: Any, **more: Any) -> None:
        original(self, comm, list(parameters)[:-1], *rest, **more)

    original = GradientReducer.__init__
    patch.setattr(GradientReducer, "__init__", init)


def stale_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TiedParameters, "publish_values", lambda self: None)


def one_side(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TiedParameters, "gather_gradients", lambda self: None)


def other_order(patch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, arguments: Any, inputs: Any, microbatch: int, *chunk: int) -> None:
        last = torch.distributed.get_rank() == 1
        original(self, arguments, inputs, self.microbatches - 1 - microbatch if last else microbatch, *chunk)

    original = InputSharder.fill
    patch.setattr(InputSharder, "fill", fill)


PARITY = {
    "nothing": ("dp2", None),
    "a gradient that is not summed": ("dp2", no_sum),
    "a gradient that is summed twice": ("dp2", doubled_sum),
    "a gradient scaled by the number of ranks": ("dp2", divided_sum),
    "a reduction before the last microbatch": ("dp2", too_early),
    "a parameter left out of a bucket": ("dp2", left_out),
    "nothing between stages": ("pp2", None),
    "a stale copy of a tied weight": ("pp2", stale_copy),
    "a tied weight with one side's gradient": ("pp2", one_side),
    "microbatches in another order on one stage": ("pp2", other_order),
}


class Tied(torch.nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.two(self.one(x).tanh()), y)


def example(strategy: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(2, BATCH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (Tied() if strategy == "pp2" else MLP(8)).double(), (x, y)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@contextmanager
def planted(plant: Any) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield patch


def trained(documents: dict[str, Any]) -> dict[str, Any]:
    """One rank: bug → (losses, the whole state on rank 0)."""
    out, captured = {}, {strategy: capture(*example(strategy)) for strategy in documents}
    for bug, (strategy, plant) in PARITY.items():
        model, inputs = example(strategy)
        with planted(plant) as patch:
            kept = captured[strategy]
            patch.setattr("meshwright.compiler.frontend.padding.capture", lambda *_, kept=kept, **__: kept)
            parallel = mw.parallelize(
                model, example_inputs=inputs, plan=mw.Plan.from_json(documents[strategy]), optimizer=optimizer
            )
            losses = [float(parallel.train_step(*inputs)) for _ in range(STEPS)]
            out[bug] = losses, parallel.full_state_dict()
    return out


def one_device(strategy: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, inputs = example(strategy)
    steps, losses = optimizer(model.parameters()), []
    for _ in range(STEPS):
        steps.zero_grad()
        parts = [model(*pair) / MICROBATCHES for pair in zip(*(x.chunk(MICROBATCHES) for x in inputs), strict=True)]
        sum(parts).backward()  # type: ignore[union-attr]
        steps.step()
        losses.append(float(sum(x.detach() for x in parts)))
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def runs(ranks: Any) -> dict[str, Any]:
    """Rank 0's runs, of all bugs in one world; and those of one device."""
    documents = {}
    for strategy in ("dp2", "pp2"):
        model, inputs = example(strategy)
        found = mw.plan(model, fast_links(2), example_inputs=inputs, strategy=strategy, microbatches=MICROBATCHES,
                        executable=True, zero=0, cache=False)  # fmt: skip
        documents[strategy] = found.to_json()
    return {
        **ranks.run(2, trained, documents, timeout_s=120.0)[0],
        **{s: one_device(s) for s in documents},
    }


@pytest.mark.parametrize("bug", list(PARITY))
def test_parity_catches(runs: dict[str, Any], bug: str) -> None:
    strategy, plant = PARITY[bug]
    (losses, state), (expected, reference) = runs[bug], runs[strategy]
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    off = max(off, *(float((state[k] - x).abs().max() / x.abs().max()) for k, x in reference.items()))
    assert off < 1e-9 if plant is None else off > 1e-6, (bug, off)
