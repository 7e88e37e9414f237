"""Batches as people have them, on real ranks against plain PyTorch: containers, other lengths, a short last batch,
labels to ignore, outputs and metrics of a training step.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.small_net import sgd

WORDS, WIDTH, MICROBATCHES, IGNORED = 12, 16, 2, -100


class Tagger(nn.Module):
    """A causal language model with the outputs of Hugging Face: a loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        h = self.table(input_ids)
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(F.gelu(self.up(h))) * scale
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED), "logits": logits}


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def words(step: int, batch: int = 8, length: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (batch, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, : length // 2] = labels[-1, 1] = IGNORED
    return {"input_ids": ids, "labels": labels}


def bound(strategy: str, **options: Any) -> mw.Parallel:
    return mw.parallelize(
        tagger(), mw.Cluster.local(2), example_inputs=words(0), strategy=strategy, microbatches=MICROBATCHES,  # type: ignore[arg-type]
        optimizer=sgd, **options,
    )  # fmt: skip


SIZES = [(8, 8), (4, 8), (8, 12), (8, 8), (4, 12), (8, 12)]  # a short batch, longer ones, and each of them again


def trained(strategy: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor], dict[str, Tensor], int]:
    parallel = bound(strategy, **options)
    losses, logits = [], []
    for step, size in enumerate(SIZES):
        loss, outputs = parallel.train_step(words(step, *size), outputs=("logits",))
        losses.append(loss.item())
        logits.append(outputs["logits"])
    losses.append(float(parallel.train_step(**words(9))))
    batches: Any = parallel._batches
    return losses, logits, parallel.full_state_dict(), len(batches._bound)


def one_device(sizes: list[tuple[int, int]]) -> tuple[list[float], list[Tensor], nn.Module]:
    model, losses, logits = tagger(), [], []
    optimizer = sgd(list(model.parameters()))
    for step, size in [*enumerate(sizes), (9, (8, 8))]:
        optimizer.zero_grad()
        parts = zip(*(x.chunk(MICROBATCHES) for x in words(step, *size).values()), strict=True)
        outputs = [model(*part) for part in parts]
        loss = sum(out["loss"] for out in outputs) / MICROBATCHES  # as documented, the mean of the microbatches
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logits.append(torch.cat([out["logits"].detach() for out in outputs]))
    return losses, logits, model


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("dp2", {}), ("tp2", {}), ("pp2", {}), ("dp2", {"zero": 3, "recompute": "full"}), ("pp2", {"schedule": "zb-h1"}),
     ("tp2", {"pad_to_multiple_of": 8})],
    ids=["dp2", "tp2", "pp2", "zero3", "zb-h1", "padded"],
)  # fmt: skip
def test_shapes_and_outputs_equal_one_device(ranks: Any, strategy: str, options: dict[str, Any]) -> None:
    losses, logits, model = one_device(SIZES)
    results = ranks.run(2, trained, strategy, options)
    for found, outputs, _, kinds in results:
        assert found == pytest.approx(losses, rel=1e-4)
        for mine, expected in zip(outputs, logits, strict=False):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        assert kinds == len(set(SIZES))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(results[0][2][name], value, rtol=1e-4, atol=1e-5)


# ---- metrics


def correct(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """What a training loop would log, and which rank was asked."""
    hits = (logits.argmax(-1) == labels)[labels != IGNORED]
    return {"accuracy": hits.float().mean(), "words": hits.numel(), "rank": torch.distributed.get_rank()}


def measured(strategies: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        parallel = bound(strategy)
        found[strategy] = [
            parallel.train_step(batch, outputs=("logits",), metrics=lambda x, y=batch["labels"]: correct(x, y))
            for batch in map(words, range(2))
        ]
    texts = []
    for wrong in ({"metrics": correct}, {"metrics": correct, "outputs": ("logits",)}):  # labels are no targets here
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            parallel.train_step(words(3), **wrong)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    return {**found, "errors": texts}


@pytest.mark.ranks
def test_metrics_are_those_of_one_device(ranks: Any) -> None:
    losses, logits, _ = one_device([(8, 8)] * 2)
    for found in ranks.run(2, measured, ("dp2", "tp2", "pp2")):
        unnamed, raised = found.pop("errors")
        assert "metrics= is a function of outputs, but got none" in unnamed
        assert "missing 1 required positional argument: 'labels'" in raised
        for strategy, steps in found.items():
            for step, (loss, result) in enumerate(steps):
                labels = words(step)["labels"]
                hits = (logits[step].argmax(-1) == labels)[labels != IGNORED]
                assert float(loss) == pytest.approx(losses[step], rel=1e-4)
                assert result["accuracy"] == hits.float().mean(), strategy
                assert result["words"] == hits.numel()
                assert result["rank"] == (1 if strategy == "pp2" else 0)  # where the logits are


# ---- refusals


def refusals() -> list[str]:
    parallel, texts = bound("dp2"), []
    odd = words(1)
    odd["labels"] = odd["labels"][:, :6]
    for batch, options in (
        (words(1, 6), {}), (words(1, 3), {}), (words(1), {"outputs": ("hidden",)}),
        (words(1), {"outputs": ("loss",)}), (odd, {}),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared below
            parallel.train_step(batch, **options)
        texts.append(str(caught.value))
    assert torch.isfinite(parallel.train_step(words(2)))
    return texts


@pytest.mark.ranks
def test_what_a_plan_cannot_cut_is_refused(ranks: Any) -> None:
    for six, three, name, scalar, odd in ranks.run(2, refusals):
        assert "must be 8 (2 microbatches), but got 6" in six
        assert "3 samples do not divide into 2 microbatches" in three
        assert "outputs= names tensors that the model gives (loss, logits), but got 'hidden'" in name
        assert "has a dim that is the batch, but got 'loss'" in scalar
        assert "planned with shape [8, 8], but got [8, 6]" in odd


# ---- containers


@dataclass
class Batch:
    """A batch as a collate function makes it."""

    input_ids: Tensor
    labels: Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping that is no dict, like Hugging Face's BatchEncoding."""


class Taking(nn.Module):
    """Takes its batch in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, tagger()

    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        if self.kind == "dataclass":
            ids, labels = batch.input_ids, batch.labels
        elif self.kind == "nested":
            ids, (labels, _) = batch
        else:
            ids, labels = batch["input_ids"], batch["labels"]
        loss: Tensor = self.net(ids, labels, scale)["loss"]
        return loss


def contained(kind: str, step: int) -> Any:
    batch = words(step)
    if kind == "dataclass":
        return Batch(**batch)
    if kind == "nested":
        return (batch["input_ids"], [batch["labels"], None])
    return batch if kind == "dict" else Encoding(batch)


def containers(kinds: tuple[str, ...]) -> dict[str, list[float]]:
    losses = {}
    for kind in kinds:
        parallel = mw.parallelize(
            Taking(kind), mw.Cluster.local(2), example_inputs=(contained(kind, 0),), example_kwargs={"scale": 0.5},
            strategy="dp2", microbatches=MICROBATCHES, optimizer=sgd,
        )  # fmt: skip
        losses[kind] = [float(parallel.train_step(contained(kind, step), scale=0.5)) for step in range(2)]
        parallel.eval()
        losses[kind].append(float(parallel(contained(kind, 0), scale=0.5)))
    parallel = bound("dp2")
    losses["keywords"] = [float(parallel.train_step(Encoding(words(step)))) for step in range(2)]
    return losses


@pytest.mark.ranks
def test_containers(ranks: Any) -> None:
    expected = {}
    for scale in (0.5, 1.0):
        model, expected[scale] = tagger(), list[float]()
        optimizer = sgd(list(model.parameters()))
        for step in range(2):
            optimizer.zero_grad()
            parts = zip(*(x.chunk(MICROBATCHES) for x in words(step).values()), strict=True)
            loss = sum(model(*part, scale)["loss"] for part in parts) / MICROBATCHES
            loss.backward()
            optimizer.step()
            expected[scale].append(loss.item())
        if scale != 1.0:
            expected[scale].append(model(**words(0), scale=scale)["loss"].item())
    for losses in ranks.run(2, containers, ("dataclass", "nested", "dict", "encoding"), timeout_s=120.0):
        keywords = losses.pop("keywords")
        assert keywords == pytest.approx(expected[1.0], rel=1e-4)
        for kind, found in losses.items():
            assert found == pytest.approx(expected[0.5], rel=1e-4), kind
