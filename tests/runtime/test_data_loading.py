"""Batches for a plan: each rank gets its rows, every epoch another order, a resumed run the batches that come next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.runtime.data_loading import DistributedLoader
from torch.utils.data import Dataset, IterableDataset

from tests.support.small_net import FEATURES, net, sgd

SAMPLES, BATCH = 29, 8


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(index))
        return x, y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loader(dataset: Any, part: tuple[int, int] = (0, 1), **wishes: Any) -> DistributedLoader:
    shuffle, seed, workers = wishes.get("shuffle"), wishes.get("seed", 0), wishes.get("num_workers", 0)
    return DistributedLoader(dataset, part, BATCH, shuffle, seed, workers, wishes.get("options", {}))


def epoch(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("make", [Indices, Stream])
def test_parts_are_those_of_the_whole_batch(make: Any) -> None:
    whole, parts = loader(make()), [loader(make(), (index, 2)) for index in range(2)]
    for _ in range(2):
        batches = epoch(whole)
        assert len(batches) == SAMPLES // BATCH
        assert [a + b for a, b in zip(*map(epoch, parts), strict=True)] == batches
        assert len({sample for batch in batches for sample in batch}) == 3 * BATCH


def test_orders() -> None:
    shuffled, again, other = loader(Indices()), loader(Indices()), loader(Indices(), seed=1)
    first, second = epoch(shuffled), epoch(shuffled)
    assert first != second
    assert [epoch(again), epoch(again)] == [first, second]
    assert epoch(other) != first
    assert (
        epoch(loader(Indices(), shuffle=False))
        == epoch(loader(Stream()))
        == [list(range(k, k + 8)) for k in (0, 8, 16)]
    )


@pytest.mark.parametrize(("make", "workers"), [(Indices, 0), (Indices, 2), (Stream, 1)])
def test_a_loader_goes_on(make: Any, workers: int) -> None:
    before, unbroken = loader(make(), num_workers=workers), loader(make())
    seen = [batch.tolist() for _, batch in zip(range(2), before)]
    after = loader(make(), (0, 2), num_workers=workers)  # under another plan
    after.load_state_dict(before.state_dict())
    expected = [*epoch(unbroken), *epoch(unbroken)]
    assert seen == expected[:2]
    assert epoch(after) + epoch(after) == [batch[: BATCH // 2] for batch in expected[2:]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loader(Indices(), (0, 3)), "divides into the 3 parts that the plan cuts it into, but got one of 8"),
        (lambda: loader(Stream(), shuffle=True), "but got shuffle=True"),
        (lambda: loader(Stream(), num_workers=2), "but got num_workers=2"),
        (lambda: loader([1, 2]), "one batch of 8 or more, but got 2 samples"),
        (lambda: loader(Indices(), options={"drop_last": False}), "but got drop_last"),
        (lambda: loader(Indices()).load_state_dict({"batch_size": 4}), "the batch_size that it had, 4, but got 8"),
    ],
)  # fmt: skip
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def trained(data: str) -> list[float]:
    """One rank: the losses of an epoch."""
    example = next(iter(torch.utils.data.DataLoader(Numbers(), batch_size=BATCH)))
    parallel = mw.parallelize(
        net(norm=False), mw.Cluster.local(2), example_inputs=tuple(example), strategy="dp2", optimizer=sgd, data=data
    )
    return [float(parallel.train_step(*batch)) for batch in mw.distributed_loader(Numbers(), parallel)]


@pytest.mark.ranks
def test_training_by_parts_equals_training_by_whole_batches(ranks: Any) -> None:
    (whole, _), (parts, others) = ranks.run(2, trained, "global"), ranks.run(2, trained, "local")
    assert len(whole) == SAMPLES // BATCH
    assert parts == others
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-4, atol=1e-6)
