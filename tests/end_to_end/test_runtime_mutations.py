"""Bugs of optimizers, shards, pipelines and precision, planted one at a time in two ranks, are caught by parity with
one device. The same checks pass where nothing is planted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import meshwright as mw
import meshwright.parallel as binding
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.comm import current_context, use_context
from meshwright.compiler.ir.ops import local_ops
from meshwright.compiler.plan.cross_mesh import MeshLayout
from meshwright.runtime.execution import chunk, session
from meshwright.runtime.execution.chunk import BoundChunk
from meshwright.runtime.execution.executor import BatchLoss
from meshwright.runtime.execution.input_sharding import InputSharder
from meshwright.runtime.execution.split_backward import SplitProgram
from meshwright.runtime.parameters import gradients
from meshwright.runtime.parameters.gradients import GradientReducer
from meshwright.runtime.parameters.optimizer_shards import ShardBucket, ValueGatherer
from meshwright.runtime.parameters.tied import TiedParameters
from meshwright.runtime.transport.cross_mesh import Incoming, Port
from torch import Tensor, nn

from tests.support.clusters import fast_links

Patch = pytest.MonkeyPatch
STEPS, BATCH, WIDTH, MICROBATCHES, CLIP = 3, 8, 8, 2, 0.05


class Net(nn.Module):
    """Three linears, the outer ones with one weight, and dropout if it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.three.weight = self.one.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.three(self.two(self.dropout(self.one(x).tanh())).tanh()), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


# ---- the bugs


def around(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Replace a function by ``change(original, *arguments)``."""

    def plant(patch: Patch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return plant


def old_buffer(patch: Patch) -> None:
    """A port gives what arrived first."""
    first: dict[int, Tensor] = {}

    def receive(self: Port, microbatch: int) -> Incoming:
        incoming = original(self, microbatch)
        waits = incoming.wait
        incoming.wait = lambda: first.setdefault(id(self), waits()).clone()  # type: ignore[method-assign]
        return incoming

    original = Port.receive
    patch.setattr(Port, "receive", receive)


def unpaid(original: Any, self: SplitProgram, microbatch: int) -> None:
    if microbatch == MICROBATCHES - 1:
        self.owed.pop(microbatch)
    else:
        original(self, microbatch)


def other_activations(original: Any, self: SplitProgram, microbatch: int) -> None:
    """W multiplies with what another microbatch left."""
    for other in list(self.owed):
        if other != microbatch:
            self.owed[microbatch] = list(self.owed[other])
    original(self, microbatch)


def forgetful(original: Any, self: BoundChunk, exits: Any, arrived: Any, microbatch: int, scale: float) -> None:
    for slot in self.program.slots:
        if slot.kind == "parameter" and microbatch:
            self.state.parameters[slot.name].grad = None
    original(self, exits, arrived, microbatch, scale)


def twice(original: Any, self: TiedParameters) -> None:
    before = {name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in self.held.items()}
    original(self)
    for name, _, owner in self.up:
        if owner:
            leaf = self.held[name]
            leaf.grad = 2 * leaf.grad - before[name]


def other_masks(patch: Patch) -> None:
    """The second run of a layer draws again."""
    runs = Counter[Any]()

    class Drawn:
        @staticmethod
        def apply(x: Tensor, *rest: Any) -> Any:
            here = current_context()
            place = (here.step, here.microbatch, x.shape, rest)
            runs[place] += 1
            with use_context(replace(here, step=here.step + 1000 * (runs[place] > 1))):
                return original.apply(x, *rest)

    original = local_ops._Dropout
    patch.setattr(local_ops, "_Dropout", Drawn)


def shifted_state(original: Any, held: Any, path: Any, extra: Any) -> None:
    original(held, path, extra)
    for state in held.optimizer.state.values():
        state["momentum_buffer"].copy_(state["momentum_buffer"].flatten().roll(1).view_as(state["momentum_buffer"]))


def other_shard(original: Any, self: ShardBucket, row: Tensor) -> list[Tensor]:
    return [piece.flip(0) for piece in original(self, row)]


def last_element(original: Any, self: Any, comm: Any) -> None:
    self.wire.view(-1)[-1] = 0
    original(self, comm)


def one_rank_steps(original: Any, self: Any, *rest: Any) -> None:
    if dist.get_rank() == 0 or self.last_epoch < 0:
        original(self, *rest)


def nothing(original: Any, *rest: Any) -> None:
    """Leave it out."""


Scheduler = torch.optim.lr_scheduler.ExponentialLR
Scatter = gradients._ReduceScatterBucket
BUGS: dict[str, tuple[str, Callable[[Patch], None] | None]] = {
    "nothing in replicas": ("clip", None),
    "clipping that counts replicas": ("clip", around(MeshLayout, "is_first_copy", lambda *_: True)),
    "clipping left out": ("clip", around(session, "clip_gradients", nothing)),
    "clipping to half": ("clip", around(session, "clip_gradients", lambda f, ps, norm, most: f(ps, norm, most / 2))),
    "a loss scaled by the wrong count": ("clip", around(
        BoundChunk, "backward", lambda f, self, exits, arrived, i, scale: f(self, exits, arrived, i, scale * (1 + i)))),
    "a gradient of the last microbatch alone": ("clip", around(BoundChunk, "backward", forgetful)),
    "a microbatch that is read twice": ("clip", around(
        InputSharder, "fill", lambda f, self, arguments, inputs, i, *chunk: f(self, arguments, inputs, 0, *chunk))),
    "a loss without its last microbatch": ("clip", around(
        BatchLoss, "add", lambda f, self, loss: None if self.losses else f(self, loss))),
    "a scheduler step lost": ("clip", around(Scheduler, "step", one_rank_steps)),
    "gradients of the last step that stay": ("clip", around(GradientReducer, "begin", lambda f, self, scale: (
        f(self, scale), [bucket.kept.append((leaf, torch.ones_like(leaf))) for bucket in self.buckets
                         for leaf in bucket.parameters[:1]]))),
    "nothing in shards": ("zero2", None),
    "values of shards that are not gathered": ("zero2", around(ValueGatherer, "run", nothing)),
    "an optimizer shard off by one after a load": ("zero2", around(binding, "load_checkpoint", shifted_state)),
    "a shard of another order": ("zero2", around(ShardBucket, "split", other_shard)),
    "a message without its last element": ("zero2", around(Scatter, "launch", last_element)),
    "nothing between stages": ("zb-h1", None),
    "a stale receive buffer": ("zb-h1", old_buffer),
    "activations of the wrong microbatch in W": ("zb-h1", around(SplitProgram, "settle", other_activations)),
    "a W left out": ("zb-h1", around(SplitProgram, "settle", unpaid)),
    "a tied copy added twice": ("zb-h1", around(TiedParameters, "gather_gradients", twice)),
    "a cotangent sent twice": ("zb-h1", around(chunk, "_gradient", lambda f, leaf: 2 * f(leaf))),
    "activations rounded on their way": ("zb-h1", around(
        BoundChunk, "send_values",
        lambda f, self, exits, *rest: f(self, tuple(x.bfloat16().to(x.dtype) for x in exits), *rest))),
    "nothing in what runs again": ("recompute", None),
    "dropout masks that differ under recompute": ("recompute", other_masks),
}  # fmt: skip

PLANS = {
    "clip": {"strategy": "dp2", "zero": 0},
    "zero2": {"strategy": "dp2", "zero": 2},
    "zb-h1": {"strategy": "pp2", "zero": 0, "schedule": "zb-h1"},
    "recompute": {"strategy": "dp2", "zero": 0, "recompute": "full"},
    "kept": {"strategy": "dp2", "zero": 0, "recompute": "none"},
}


def model_of(kind: str) -> nn.Module:
    return Net(0.3 if kind in ("recompute", "kept") else 0.0).double()


def steps_of(kind: str, document: dict[str, Any], folder: str) -> tuple[list[float], dict[str, Tensor]]:
    parallel = mw.parallelize(
        model_of(kind), example_inputs=batch(0), plan=mw.Plan.from_json(document), optimizer=momentum,
        clip_grad_norm=CLIP if kind == "clip" else None, check_capture=False,
    )  # fmt: skip
    scheduler, losses = Scheduler(parallel.optimizer, 0.7), []
    for step in range(STEPS):
        if kind == "zero2" and step == 2:
            parallel.save_checkpoint(folder)
            parallel.load_checkpoint(folder)
        losses.append(float(parallel.train_step(*batch(step))))
        scheduler.step()
    return losses, parallel.full_state_dict()


def trained(documents: dict[str, Any], folder: str) -> dict[str, Any]:
    """One rank: bug → (losses, the whole state on rank 0)."""
    out, captured = {}, {kind: capture(model_of(kind), batch(0)) for kind in documents}
    for bug, (kind, plant) in {**BUGS, "kept": ("kept", None)}.items():
        with Patch.context() as patch:
            if plant is not None:
                plant(patch)
            patch.setattr("meshwright.compiler.frontend.padding.capture", lambda *_, of=captured[kind], **__: of)
            out[bug] = steps_of(kind, documents[kind], f"{folder}/{bug}")
    return out


def one_device(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of(kind)
    optimizer, losses = momentum(model.parameters()), []
    scheduler = Scheduler(optimizer, 0.7)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [
            model(*pair) / MICROBATCHES for pair in zip(*(x.chunk(MICROBATCHES) for x in batch(step)), strict=True)
        ]
        sum(parts).backward()  # type: ignore[union-attr]
        if kind == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(float(sum(x.detach() for x in parts)))
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def runs(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rank 0's runs, of all bugs in one world; and those that they are held against."""
    documents = {
        kind: mw.plan(model_of(kind), fast_links(2), example_inputs=batch(0), microbatches=MICROBATCHES,
                      executable=True, cache=False, **options).to_json()
        for kind, options in PLANS.items()
    }  # fmt: skip
    found = ranks.run(2, trained, documents, str(tmp_path_factory.mktemp("checkpoints")), timeout_s=180.0)[0]
    return {**found, **{kind: one_device(kind) for kind in ("clip", "zero2", "zb-h1")}, "recompute": found["kept"]}


@pytest.mark.ranks
@pytest.mark.parametrize("bug", list(BUGS))
def test_parity_catches(runs: dict[str, Any], bug: str) -> None:
    kind, plant = BUGS[bug]
    (losses, state), (expected, reference) = runs[bug], runs[kind]
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    off = max(off, *(float((state[k] - x).abs().max() / x.abs().max()) for k, x in reference.items()))
    assert off < 1e-9 if plant is None else off > 1e-6, (bug, off)


# ---- sums of fp32


def rounded_sums(original: Any, self: Any, comm: Any) -> None:
    if self.work is not None:
        wait = self.work.wait
        self.work.wait = lambda: (row := wait()).copy_(row.bfloat16())
    original(self, comm)


def fine_gradients(document: dict[str, Any]) -> dict[str, float]:
    """One rank: the share of the masters' gradients that 16 bits cannot hold, without and with the bug."""
    shares = {}
    for bug, plant in (("nothing", None), ("truncated", around(Scatter, "settle", rounded_sums))):
        with Patch.context() as patch:
            if plant is not None:
                plant(patch)
            inputs = tuple(x.float() for x in batch(0))
            parallel = mw.parallelize(
                Net(), example_inputs=inputs, plan=mw.Plan.from_json(document), optimizer=momentum, check_capture=False
            )
            parallel.forward_backward(*inputs)
            grads = [leaf.grad for leaf in parallel.session.owned_parameters.values() if leaf.grad is not None]
            whole = torch.cat([x.flatten() for x in grads])
            assert whole.dtype == torch.float32
            shares[bug] = float((whole != whole.bfloat16()).float().mean())
    return shares


@pytest.mark.ranks
def test_masters_are_updated_from_sums_of_fp32(ranks: Any) -> None:
    """Many sums of two 16-bit gradients have more digits than 16 bits do. Truncated ones, even in place, never."""
    inputs = tuple(x.float() for x in batch(0))
    plan = mw.plan(Net(), fast_links(2), example_inputs=inputs, microbatches=1, executable=True, cache=False,
                   strategy="dp2", zero=2, precision="bf16")  # fmt: skip
    for shares in ranks.run(2, fine_gradients, plan.to_json()):
        assert shares["nothing"] > 0.2
        assert shares["truncated"] == 0.0
