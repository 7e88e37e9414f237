"""Batches for a plan: a PyTorch ``DataLoader`` that gives each rank what its plan wants of every global batch, and goes
on where it was.

Under ``data="global"`` every rank gets the whole batch, under ``data="local"`` its part of it, the same rows that it
would take of the whole one. The order of an epoch follows from the seed and the epoch alone, not from the number of
ranks, so a run that is resumed under another plan sees the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

__all__ = ["DistributedLoader", "distributed_loader"]


def distributed_loader(
    dataset: Dataset[Any],
    parallel: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    num_workers: int = 0,
    **options: Any,
) -> DistributedLoader:
    """A loader of the batches of ``parallel``, which has a plan already. Every rank makes one.

    dataset: with indices, or a stream (``IterableDataset``), which every rank reads whole. batch_size: of the global
    batch, by default the plan's. shuffle: a new order in every epoch; by default True with indices, never for streams.
    num_workers: processes that load, of a stream 0 or 1. options: of the ``DataLoader`` (collate_fn, pin_memory,
    prefetch_factor, multiprocessing_context). A last batch that is not full is left out. ValueError for a batch that
    does not divide, or for fewer samples than one batch.
    """
    return DistributedLoader(
        dataset, (parallel.data_index, parallel.data_count) if parallel.session.input_sharder.local else (0, 1),
        parallel.plan.global_batch if batch_size is None else batch_size, shuffle, seed, num_workers, options,
    )  # fmt: skip


class DistributedLoader:
    """Yields the batches of one epoch when it is iterated, from where it was; then the next epoch's.

    epoch, batch: those that come next. part: (this rank's part of the batch, the number of parts).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        part: tuple[int, int],
        batch_size: int,
        shuffle: bool | None,
        seed: int,
        num_workers: int,
        options: Mapping[str, Any],
    ) -> None:
        self._is_stream = isinstance(dataset, IterableDataset)
        known = {"collate_fn", "pin_memory", "prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn"}
        if unknown := sorted(set(options) - known):
            raise ValueError(f"a loader's options are {', '.join(sorted(known))}, but got {', '.join(unknown)}")
        if batch_size < 1 or batch_size % part[1]:
            raise ValueError(
                f"a batch divides into the {part[1]} parts that the plan cuts it into, but got one of {batch_size}"
            )
        if self._is_stream and (shuffle or num_workers > 1):
            wish = "shuffle=True" if shuffle else f"num_workers={num_workers}"
            raise ValueError(f"a stream is read in its own order by one worker at most, but got {wish}")
        if not self._is_stream and len(dataset) < batch_size:  # type: ignore[arg-type]
            raise ValueError(f"an epoch has one batch of {batch_size} or more, but got {len(dataset)} samples")  # type: ignore[arg-type]
        self._dataset, self._part, self._size = dataset, part, batch_size
        self._shuffle, self._seed = not self._is_stream if shuffle is None else shuffle, seed
        self._workers, self._options = num_workers, dict(options)
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        """Batches of an epoch; TypeError for a stream."""
        if self._is_stream:
            raise TypeError("a stream has no number of batches")
        return len(self._dataset) // self._size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader():
            self.batch += 1  # counted before it is used: a state saved after its step names the next one
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: plain numbers, the same on every rank."""
        return {"epoch": self.epoch, "batch": self.batch, "batch_size": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from ``state_dict``. A stream is read from its start and what was used is skipped. ValueError where
        batches were of another size or order."""
        for name, mine in (("batch_size", self._size), ("seed", self._seed)):
            if state.get(name) != mine:
                raise ValueError(f"a loader goes on with the {name} that it had, {state.get(name)}, but got {mine}")
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])

    def _loader(self) -> DataLoader[Any]:
        index, count = self._part
        rows = slice(index * self._size // count, (index + 1) * self._size // count)
        common = {"num_workers": self._workers, "generator": torch.Generator().manual_seed(self._seed), **self._options}
        if self._is_stream:
            collate: Callable[[Any], Any] = common.pop("collate_fn", None) or default_collate
            stream = _Batches(self._dataset, self.batch * self._size, self._size, rows)
            return DataLoader(stream, batch_size=None, collate_fn=collate, **common)
        samples = len(self._dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(samples, generator=generator).tolist() if self._shuffle else list(range(samples))
        starts = range(self.batch * self._size, len(self) * self._size, self._size)
        batches = [order[start : start + self._size][rows] for start in starts]
        return DataLoader(self._dataset, batch_sampler=batches, **common)


class _Batches(IterableDataset[Any]):
    """The rows of every full batch of a stream, from sample ``first`` on."""

    def __init__(self, stream: Any, first: int, size: int, rows: slice) -> None:
        self._stream, self._first, self._size, self._rows = stream, first, size, rows

    def __iter__(self) -> Iterator[list[Any]]:
        samples = islice(iter(self._stream), self._first, None)
        while len(batch := list(islice(samples, self._size))) == self._size:
            yield batch[self._rows]
