"""Random and even tables of stage costs, small enough to be enumerated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from meshwright.compiler.pipeline.table import (
    LagrangianBound,
    LowerBounds,
    PipelineTable,
    StageConstraints,
    StageOption,
)


@dataclass(frozen=True, eq=False)
class BoundedTable(PipelineTable):
    """A table with lower bounds of its stages."""

    floors: LowerBounds | None = None


def random_options(rng: np.random.Generator, devices: int, shapes: int, levels: int) -> list[StageOption]:
    """Submeshes with gaps between their offsets; devices of several sizes of memory; each at several levels."""
    limit = np.full(devices, float(rng.integers(4, 40)))
    if rng.random() < 0.5:  # a second pool
        limit[rng.integers(0, devices) :] += rng.integers(0, 12)
    options = []
    for shape in range(shapes):
        n = int(rng.integers(1, min(devices, 3) + 1))
        offsets = [d for d in range(devices - n + 1) if rng.random() < 0.85]
        limits = tuple(float(limit[d : d + n].min()) for d in offsets)
        options += [StageOption(n, tuple(offsets), limits, shape, level) for level in range(levels)]
    return options


def random_table(rng: np.random.Generator, layers: int, devices: int, shapes: int, levels: int, m: int) -> BoundedTable:
    """Integer seconds and bytes, so that sums are exact; memory often binds; floors of all the levels of a shape."""
    options = random_options(rng, devices, shapes, levels)
    shape = (len(options), layers, layers + 1)
    first, end = np.indices(shape[1:])
    length = np.maximum(end - first, 0)
    count = np.array([option.num_devices for option in options])[:, None, None]
    level = np.array([option.level for option in options])[:, None, None]
    pace = np.ceil(length * 24 / count**0.6 * (1 + 0.2 * level)) + rng.integers(0, 8, shape)
    pace = np.where(rng.random((shapes, layers, layers + 1)).repeat(levels, axis=0) < 0.05, inf, 3 * pace)
    resident = np.ceil(length * rng.integers(1, 6, shape) / (1 + level))
    saved = np.ceil(length * rng.integers(0, 4, shape) / (1 + level))
    transient, step = rng.integers(0, 4, shape).astype(float), rng.integers(0, 30, shape).astype(float)
    transfer = 2.0 * rng.integers(0, 12, shape)
    entry = 2.0 * rng.integers(0, 6, shape) if rng.random() < 0.3 else None

    def least(array: np.ndarray) -> np.ndarray:
        return array.reshape(shapes, levels, layers, layers + 1).min(axis=1)

    rows = []
    for byte, saved_byte, whole in ((0.5, 0.5, False), (4.0, 1.0, True), (1.0, 6.0, False)):
        value = pace + (step / m if whole else 0.0) + byte * resident + saved_byte * saved
        rows.append(LagrangianBound(byte, saved_byte, least(value), whole))
    rows.append(LagrangianBound(0.0, 0.0, least(pace) * 2 / 3, trip=True))
    floors = LowerBounds(
        tuple(options[::levels]), least(pace), least(pace + step / m), least(step), least(transfer), least(transient),
        None if entry is None else least(entry), least(pace) / 3, least(pace) * 2 / 3,
        rows=tuple(rows),
    )  # fmt: skip
    return BoundedTable(
        layers, devices, tuple(options), pace, transfer, step, resident, saved, transient, entry, floors=floors
    )


def with_slow_messages(table: BoundedTable) -> BoundedTable:
    """The same table with messages, ahead and back, that take longer than most layers."""
    assert table.floors is not None
    shape = table.pace_s.shape
    entry = np.broadcast_to(40.0 + 20 * np.arange(shape[1])[:, None], shape)
    transfer = 8 * table.transfer_s
    floors = replace(table.floors, entry_s=entry[: len(table.floors.options)], transfer_s=8 * table.floors.transfer_s)
    return replace(table, entry_s=entry, transfer_s=transfer, floors=floors)


def random_constraints(rng: np.random.Generator, layers: int) -> StageConstraints:
    cuts = list(rng.permutation(np.arange(1, layers)))
    kind = rng.integers(4)
    if kind == 0 and cuts:
        return StageConstraints(boundaries=frozenset({int(cuts[0])}), forbidden=frozenset(map(int, cuts[1:2])))
    if kind == 1 and layers > 1:
        least = int(rng.integers(1, layers))
        return StageConstraints(stages=(least, least if rng.random() < 0.5 else least + 1))
    return StageConstraints()


def even_table(layers: int, devices: int, sizes: list[int], hosts: list[int], limit: float = inf, saved: float = 0.0):
    """Layers of one second and one byte each that split perfectly; submeshes lie in one host or begin at one."""
    first, end = np.indices((layers, layers + 1))
    length = np.maximum(end - first, 0).astype(float)
    starts = np.concatenate([[0], np.cumsum(hosts)])
    options = []
    for shape, n in enumerate(sizes):
        room = [(d, int(starts[starts > d].min()) - d) for d in range(devices - n + 1)]
        offsets = tuple(d for d, left in room if n <= left or d in starts)
        options.append(StageOption(n, offsets, (limit,) * len(offsets), shape))
    work = length[None] / np.array(sizes)[:, None, None]
    zero = np.zeros_like(work)
    return PipelineTable(layers, devices, tuple(options), work, zero, zero, work, saved * work, zero)
