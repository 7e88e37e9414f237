"""Exact elimination of many problems at once that differ in numbers only.

The mathematics is that of ``elimination``: shared targets of a tensor are paid once, what is left is one table over the
kept operators. The order comes from sizes alone (``elimination_order``), once for all rows; every table then has the
rows as its *last* axis, so that each numpy call runs along rows that lie side by side and the interpreter's share does
not grow with them. Rows go in chunks whose widest temporary stays in a core's cache. (Threads gain nothing here: two
of them take a third more processor time and as long.)

**The minimum.** One choice of the leaving variable at a time: sum its slices, then

    better = row < cost;   cost = min(cost, row);   best = max(best, better · choice)

where the last is right because choices come in ascending order. All four run in vector registers, at under a
nanosecond per cell together (masked copies take four times as long, and argmin over a leading axis more).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from .elimination_order import NO_STEP, Fixed, Joined, Least, Minimum, Recipe, Scatter, Substitute, SumOperand

__all__ = [
    "EliminatedRows",
    "Running",
    "chunk_rows",
    "follow",
    "in_chunks",
]

_TEMPORARY_BYTES = 2**22  # of the widest temporary of a chunk, where it can be had
_LEAST_ROWS = 32  # fewer make numpy's inner loops too short …
_MOST_BYTES = 2**26  # … but no temporary gets larger than this
_MOST_ROWS = 128
_BLOCK_CELLS = 2**16  # of a minimum's temporaries

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EliminatedRows:
    """The result of a recipe for some rows.

    cost: [*kept choices, rows]; argmins: per step of the recipe [*scope, rows], None where a map says it.
    """

    recipe: Recipe
    cost: np.ndarray
    argmins: tuple[np.ndarray | None, ...]

    def walk(self, kept: Sequence[np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
        """Choices per operator (original indices) behind cells: flat index arrays, of kept choices and of rows.

        Where the cost is inf, the choices mean nothing."""
        value = dict(zip(self.recipe.keep, kept))
        num = self.cost.shape[-1]
        for step, best in zip(reversed(self.recipe.steps), reversed(self.argmins)):
            if step.values is not None:
                value[step.variable] = step.values.take(value[step.scope[0]], mode="clip")
                continue
            assert best is not None
            at = rows
            stride = num
            for v, size in zip(reversed(step.scope), reversed(step.sizes)):
                at = at + np.multiply(value[v], stride, dtype=np.intp)
                stride *= size
            value[step.variable] = best.reshape(-1).take(at, mode="clip")
        return [alive.take(value[i], mode="clip") for i, alive in enumerate(self.recipe.alive)]


def chunk_rows(recipe: Recipe) -> int:
    """The number of rows that are eliminated together."""
    row = 8 * recipe.most_cells
    return max(1, min(_MOST_ROWS, max(_LEAST_ROWS, _TEMPORARY_BYTES // row), _MOST_BYTES // row))


def in_chunks(work: Callable[[slice], T], num_rows: int, most: int) -> list[T]:
    """``work`` of even slices of at most ``most`` rows, in order."""
    count = max(1, -(-num_rows // most))
    return [work(slice(a, b)) for a, b in pairwise(num_rows * k // count for k in range(count + 1))]


# ---- following a recipe


def follow(
    recipe: Recipe, costs: Sequence[np.ndarray], links: Sequence[np.ndarray], walkable: bool = True
) -> EliminatedRows:
    """The recipe carried out for some rows, in the precision of the costs. costs: [all choices, rows] per operator;
    links: [S, T, rows] each, in the original states. walkable: whether choices may be asked for afterwards."""
    rows, kind = costs[0].shape[-1], costs[0].dtype
    tables = {
        i: cost if len(alive) == len(cost) else cost.take(alive, axis=0)
        for i, (cost, alive) in enumerate(zip(costs, recipe.alive))
    }
    argmins: list[np.ndarray | None] = [None] * len(recipe.steps)
    found: dict[int, np.ndarray | None] = {}  # the argmins of minima by their tables
    for do, gone in zip(recipe.instructions, recipe.last):
        match do:
            case Joined():
                tables[do.out] = _joined(do, links[do.link])
            case Fixed():
                tables[do.out] = do.table[..., None].astype(kind, copy=False)
            case Substitute():
                tables[do.out] = _substituted(do, tables[do.table])
            case Minimum():
                tables[do.out], found[do.out] = _minimum(
                    do, [_view(tables[p.table], p) for p in do.parts], walkable and do.step != NO_STEP
                )
            case Scatter():
                tables[do.out], found[do.out] = _scattered(do, [_view(tables[p.table], p) for p in do.parts], walkable)
            case Least():
                costs_of = [_view(tables[p.table], p) for p in do.parts]
                bests = [found.pop(p.table) for p in do.parts]
                views = [_view(best, p) for best, p in zip(bests, do.parts) if best is not None]
                tables[do.out], found[do.out] = _least_of_parts(do, costs_of, views)
        if isinstance(do, Minimum | Scatter | Least) and do.step >= 0:
            argmins[do.step] = found.pop(do.out)
        for table in gone:
            del tables[table]
    total = np.zeros((*recipe.kept_shape, rows), kind)
    for part in recipe.result:
        total += _view(tables[part.table], part)
    return EliminatedRows(recipe, total, tuple(argmins))


def _view(table: np.ndarray, part: SumOperand) -> np.ndarray:
    """The table with an axis (or 1) per variable of the sum, and the rows."""
    return table.transpose(*part.order, len(part.order))[(*part.index, slice(None))]


def _joined(do: Joined, cost: np.ndarray) -> np.ndarray:
    table = _of_unions(do, cost)
    if do.others is not None:
        targets, count = do.others
        least = np.sort(cost[do.rows[:, None], targets], axis=1)[:, :count].sum(axis=1)
        table = np.concatenate([table, table[:, :1] + least[:, None]], axis=1)
    return table[0] if do.alone else table


def _of_unions(do: Joined, cost: np.ndarray) -> np.ndarray:
    num_targets = cost.shape[1]
    flat = cost.reshape(-1, cost.shape[2])
    at = do.rows[:, None] * num_targets + do.members[:, 0]
    if do.members.shape[1] == 1 and (do.members >= 0).all():
        if do.index is not None:
            at = at[:, do.index]
        return flat.take(at, axis=0)
    table = flat.take(np.maximum(at, 0), axis=0)
    table[:, do.members[:, 0] < 0] = 0.0
    for column in do.members.T[1:]:
        more = np.flatnonzero(column >= 0)
        table[:, more] += flat.take(do.rows[:, None] * num_targets + column[more], axis=0)
    return table if do.index is None else table.take(do.index, axis=1)


def _substituted(do: Substitute, table: np.ndarray) -> np.ndarray:
    if do.onto is None:
        return table.take(do.values, axis=do.axis)
    front = np.moveaxis(table, (do.axis, do.onto), (0, 1))
    return np.asarray(front[do.values, np.arange(len(do.values))])


def _summed(parts: Sequence[np.ndarray], before: int) -> list[np.ndarray]:
    """The parts with the narrow ones of them added up."""
    if before < 2:
        return list(parts)
    total = parts[0] + parts[1]
    for part in parts[2:before]:
        total = total + part
    return [total, *parts[before:]]


class Running:
    """The least rows so far, and which choices they were."""

    def __init__(self, cost: np.ndarray, size: int) -> None:
        """size: of choices."""
        self.cost = cost
        self.best = np.zeros(cost.shape, dtype=np.uint8 if size <= 256 else np.uint16)

    @staticmethod
    def of(cost: np.ndarray, best: np.ndarray) -> Running:
        """A part of another, given by views of its arrays."""
        part = Running.__new__(Running)
        part.cost, part.best = cost, best
        return part

    def offer(self, row: np.ndarray, choice: int, cell: tuple[int | slice, ...] | None, better: np.ndarray) -> None:
        """Take ``row`` where it is less. better: bool scratch of its shape."""
        cost, best = (self.cost, self.best) if cell is None else (self.cost[cell], self.best[cell])
        np.less(row, cost, out=better)
        np.minimum(cost, row, out=cost)
        flags = better.view(np.uint8)
        if best.dtype == np.uint8:
            np.multiply(flags, np.uint8(choice), out=flags)
            np.maximum(best, flags, out=best)
        else:
            np.copyto(best, choice, where=better)


def _minimum(do: Minimum, parts: list[np.ndarray], walkable: bool) -> tuple[np.ndarray, np.ndarray | None]:
    parts = _summed(parts, do.before)
    shape = (*do.shape, max(part.shape[-1] for part in parts))
    running = Running(np.empty(shape, parts[0].dtype), do.size) if walkable else None
    cost = np.empty(shape, parts[0].dtype) if running is None else running.cost
    for block in _blocks(shape):
        views = [_block_of(p, (slice(None), *block)) for p in parts]
        _least(views, cost[block], do.size, None if running is None else Running.of(cost[block], running.best[block]))
    return cost, None if running is None else running.best


def _least(parts: Sequence[np.ndarray], cost: np.ndarray, size: int, running: Running | None) -> None:
    """The minimum over the leading axis of the sum of parts. running: takes it where choices count."""
    if len(parts) == 1:
        cost[...] = parts[0][0]
    else:
        _add(parts, 0, cost)
    if size == 1:
        return
    row = np.empty_like(cost)
    better = np.empty(cost.shape if running else (), dtype=bool)
    for choice in range(1, size):
        offered = parts[0][choice] if len(parts) == 1 else _add(parts, choice, row)
        if running:
            running.offer(offered, choice, None, better)
        else:
            np.minimum(cost, offered, out=cost)


def _least_of_parts(
    do: Least, parts: list[np.ndarray], bests: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None]:
    """bests: the argmins of the parts, or nothing where choices do not count."""
    shape = (*do.shape, max(part.shape[-1] for part in parts))
    cost = np.empty(shape, parts[0].dtype)
    best = np.empty(shape, bests[0].dtype) if bests else None
    for block in _blocks(shape):
        first, *others = (_block_of(part, block) for part in parts)
        cost[block] = first
        if best is None:
            for other in others:
                np.minimum(cost[block], other, out=cost[block])
            continue
        best[block] = _block_of(bests[0], block)
        for other, choice in zip(others, bests[1:]):
            np.copyto(best[block], _block_of(choice, block), where=other < cost[block])
            np.minimum(cost[block], other, out=cost[block])
    return cost, best


def _block_of(part: np.ndarray, block: tuple[slice, ...]) -> np.ndarray:
    """The part of an operand, whose axes may be 1, in a block."""
    return part[tuple(s if n > 1 else slice(None) for s, n in zip(block, part.shape))]


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The array in slabs that stay in a core's cache: slices of its leading axes."""
    if not shape or math.prod(shape) <= _BLOCK_CELLS:
        yield ()
        return
    line = max(1, math.prod(shape[1:]))
    step = max(1, _BLOCK_CELLS // line)
    for first in range(0, shape[0], step):
        for rest in _blocks(shape[1:]) if line > _BLOCK_CELLS else [()]:
            yield (slice(first, first + step), *rest)


def _add(parts: Sequence[np.ndarray], choice: int, out: np.ndarray) -> np.ndarray:
    np.add(parts[0][choice], parts[1][choice], out=out)
    for part in parts[2:]:
        np.add(out, part[choice], out=out)
    return out


def _scattered(do: Scatter, parts: list[np.ndarray], walkable: bool) -> tuple[np.ndarray, np.ndarray | None]:
    parts = _summed(parts, do.before)
    rows, kind = max(part.shape[-1] for part in parts), parts[0].dtype
    cost = np.full((*do.shape, rows), np.inf, kind)
    running = Running(cost, do.size) if walkable else None
    row = np.empty(cost[do.cells[0]].shape, kind)
    better = np.empty(row.shape if running else (), dtype=bool)
    for choice, (cell, read) in enumerate(zip(do.cells, do.reads)):
        first, *others = (
            part[tuple(0 if isinstance(i, int) and n == 1 else i for i, n in zip(read, part.shape))] for part in parts
        )
        offered = np.broadcast_to(first, row.shape)
        for other in others:
            offered = np.add(offered, other, out=row)
        if running:
            running.offer(offered, choice, cell, better)
        else:
            np.minimum(cost[cell], offered, out=cost[cell])
    return cost, None if running is None else running.best
