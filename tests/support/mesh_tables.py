"""Random tables of one mesh, small enough that all its regular pipelines are enumerated and simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
from meshwright.compiler.pipeline.families import generate, in_flight_formula, virtual_order
from meshwright.compiler.pipeline.regular import MeshTable, PipelineCase
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.table import PipelineTable, StageOption

__all__ = ["Cells", "Order", "Regular", "at_places", "case_of", "clock", "every_regular", "mesh_table", "peaks"]

#: (group, chunk) of a case's chunks in the order of the layers
Order = Sequence[tuple[int, int]]
#: (option, first layer, end layer) of each chunk
Cells = Sequence[tuple[int, int, int]]

REDUCED = 0.75  # of the work at the end of a step: sums of whole gradients


@dataclass(frozen=True)
class Regular:
    """The cuts of a pipeline of a case, and the level of each chunk in the order of the layers."""

    cuts: tuple[int, ...]
    levels: tuple[int, ...]


def mesh_table(rng: np.random.Generator, layers: int, groups: int, levels: int, m: int, whole: bool,
               overlap: float = 0.0, tied_s: float = 0.0) -> MeshTable:  # fmt: skip
    """Two hosts with half of the ``groups`` groups each; memory often binds. whole: values count the per-step work,
    divided by m, as the search's do where little of it overlaps; else so much of the last backward may hide some.
    tied_s: what the first and the last of several groups exchange at the end of the step."""
    first_host = -(-groups // 2)
    sites = {0: (False, first_host > 1), 1: (True, True), 2: (True, False)}  # front and behind stay inside a host
    at = [0 if k in (0, first_host) else 2 if k in (first_host - 1, groups - 1) else 1 for k in range(groups)]
    near = [sites[site] for site in sorted(set(at))]
    offsets = [tuple(k for k in range(groups) if at[k] == site) for site in sorted(set(at))]
    limit = float(rng.integers(10, 40)) + rng.integers(0, 8) * (rng.random(groups) < 0.5)
    options = tuple(
        StageOption(1, one, tuple(float(limit[k]) for k in one), 0, level) for level in range(levels) for one in offsets
    )
    shape = levels, layers, layers + 1
    first, end = np.indices(shape[1:])
    length, level = np.maximum(end - first, 0), np.arange(levels)[:, None, None]
    pace = np.ceil(length * 24 * (1 + 0.25 * level)) + rng.integers(0, 8, shape)
    pace = np.where(rng.random(shape[1:]) < 0.04, inf, pace)
    resident = np.ceil(length * rng.integers(1, 6, shape) / (1 + level))
    saved = np.ceil(length * rng.integers(0, 4, shape) / (1 + level))
    layer_peaks = np.append(rng.integers(0, 3, layers), 0)
    peak = np.array([[max(layer_peaks[i:j], default=0) for j in range(layers + 1)] for i in range(layers)], dtype=float)
    transient = peak + rng.integers(0, 3, shape)
    step = rng.integers(0, 40, shape) * float(rng.random() < 0.7)
    drawn = rng.random()
    messages = 10.0 if drawn < 0.25 else float(drawn < 0.7)  # slower than the layers, or as fast as some, or free
    forward, weight = rng.uniform(0.2, 0.4, shape), rng.uniform(0.1, 0.5, shape)
    entry, transfer = (
        [messages * rng.integers(0, 6, shape) * (1.0 if one[side] else 3.0) for one in near] for side in (0, 1)
    )

    def by_site(array: np.ndarray) -> np.ndarray:
        return array.repeat(len(near), axis=0)

    table = PipelineTable(
        layers, groups, options, by_site(pace), np.stack(transfer, 1).reshape(-1, *shape[1:]), by_site(step),
        by_site(resident), by_site(saved), by_site(transient), np.stack(entry, 1).reshape(-1, *shape[1:]),
        by_site(forward), by_site(1 - forward - weight),
    )  # fmt: skip
    prices = [
        (0.0, 0.0),
        *((byte, saved_byte) for byte in (0.5, 2.0, 8.0) for saved_byte in (byte, 4 * byte)),
        (99, 99),
    ]
    once = step / m if whole else 0.0
    value = np.array([(pace + once + byte * resident + more * saved).min(axis=0) for byte, more in prices])
    trip = np.where(np.isfinite(pace), pace * (1 - weight), inf).min(axis=0)
    of_a_layer = np.where(length > 0, pace / np.maximum(length, 1), inf)  # equal layers, as fast as in any run
    tied = np.array([0.0, 0.0, *[tied_s] * (groups - 1)])
    phases = [length * (share * of_a_layer).min() for share in (forward, 1 - forward)]
    work = np.zeros(shape[1:])
    for part in (0.0, 0.5, 1.0):
        beside = overlap * (1 - part)
        least = (pace + step * (1 - overlap * part * REDUCED) / (m - beside)).min(axis=0)
        work = np.maximum(work, (m - beside) * least + beside * phases[0])
    every = pace + step * (1 - overlap * REDUCED) / m  # less all that may hide of the sums of gradients
    priced = np.array([(every + byte * resident + more * saved).min(axis=0) for byte, more in prices])
    at = np.array(prices).T
    return MeshTable(
        table, len(near), pace.min(axis=0), value, *at, trip, *phases, peak, near,
        [int(k >= first_host) for k in range(groups)], whole, None, None if whole else work, tied,
        entry=np.array([np.append(one.min(axis=(0, 2)), 0.0) for one in entry]),
        behind=np.array([one.min(axis=(0, 1)) for one in transfer]), work_levels=None if whole else (priced, *at),
    )  # fmt: skip


def case_of(mesh: MeshTable, groups: int, schedule: str, chunks: int) -> tuple[PipelineCase, list[tuple[int, int]]]:
    """The case, and (group, chunk) of its chunks in the order of the layers."""
    return PipelineCase(groups, schedule, chunks), list(virtual_order(schedule, groups, chunks if chunks > 1 else None))


def at_places(mesh: MeshTable, one: Regular, places: Order) -> list[tuple[int, int, int]]:
    """(option, first layer, end layer) of each chunk."""
    options = [level * mesh.sites + mesh.places[group][1] for level, (group, _) in zip(one.levels, places)]
    return [(option, i, j) for option, (i, j) in zip(options, pairwise(one.cuts))]


def clock(mesh: MeshTable, case: PipelineCase, places: Order, m: int, at: Cells, overlap: float = 0.0) -> float:
    """The simulated makespan: messages cross a network only between hosts."""
    table = mesh.table
    pace = [float(table.pace_s[one]) for one in at]
    forward = [t * table.share("forward_share", one) for t, one in zip(pace, at)]
    weight = [t - f - t * table.share("input_share", one) for t, f, one in zip(pace, forward, at)]
    step, ahead, back = [0.0] * case.groups, {}, {}
    for (group, _), one, t, f in zip(places, at, pace, forward):
        once = float(table.step_s[one])
        step[group] += once - overlap * min(REDUCED * once, t - f)
    first, last = places[0][0], places[-1][0]
    for group in {first, last} if first != last and mesh.tied_s is not None else ():
        step[group] += float(mesh.tied_s[case.groups])
    for k, ((here, _), (there, _)) in enumerate(pairwise(places)):
        inside = mesh.hosts[here] == mesh.hosts[there]
        behind = [site for site, (_, behind) in enumerate(mesh.near) if behind == inside]
        front = [site for site, (before, _) in enumerate(mesh.near) if before == inside]
        ahead[k, k + 1] = back[k, k + 1] = 0.0
        if here != there:
            one, other = at[k], at[k + 1]
            site = one[0] % mesh.sites if one[0] % mesh.sites in behind or not behind else behind[0]
            back[k, k + 1] = float(table.transfer_s[one[0] - one[0] % mesh.sites + site, one[1], one[2]])
            site = other[0] % mesh.sites if other[0] % mesh.sites in front or not front else front[0]
            ahead[k, k + 1] = float(table.entry_s[other[0] - other[0] % mesh.sites + site, other[1], other[2]])
    run = generate(case.schedule, case.groups, m, case.chunks if case.chunks > 1 else None)
    split = case.schedule.startswith("zb")
    backward = [t - f for t, f in zip(pace, forward)]
    return simulate(run, forward, backward, ahead or None, step, back or None, weight if split else None).makespan_s


def peaks(mesh: MeshTable, case: PipelineCase, places: Order, m: int, at: Cells) -> list[float]:
    """Bytes of each group, action by action."""
    table, where, held = mesh.table, dict(zip(places, at)), []
    for k, row in enumerate(_actions(case, m)):
        mine = [where[k, chunk] for chunk in range(case.chunks)]
        now = most = 0.0
        for action in row:
            now += {"F": 1, "I": 0}.get(action.kind, -1) * table.saved[mine[action.chunk]]
            most = max(most, now)
        held.append(sum(table.resident[one] for one in mine) + most + max(table.transient[one] for one in mine))
    return held


def _actions(case: PipelineCase, m: int):
    return generate(case.schedule, case.groups, m, case.chunks if case.chunks > 1 else None).actions


def every_regular(mesh: MeshTable, case: PipelineCase, places: Order, m: int,
                  only: Sequence[tuple[int, ...]] | None = None) -> Iterator[tuple[Regular, Cells]]:  # fmt: skip
    """All pipelines of a case that fit, with ``at_places`` of each. only: those with these cuts."""
    table, count = mesh.table, len(places)
    divisions = [(0, *inner, table.num_layers) for inner in combinations(range(1, table.num_layers), count - 1)]
    flights = _flights(case, m)
    for cuts in divisions if only is None else only:
        spans = any(i < cut < j for cut in mesh.constraints.boundaries for i, j in pairwise(cuts))
        if spans or set(cuts) & mesh.constraints.forbidden:
            continue
        fitting = []  # by group, the levels of its chunks that fit
        for k in range(case.groups):
            mine = [number for number, (group, _) in enumerate(places) if group == k]
            some = []
            for levels in product(range(mesh.levels), repeat=len(mine)):
                at = [(level * mesh.sites + mesh.places[k][1], cuts[n], cuts[n + 1]) for level, n in zip(levels, mine)]
                if all(np.isfinite(table.pace_s[one]) for one in at):
                    chunks = [places[n][1] for n in mine]
                    saved = np.array([float(table.saved[one]) for one in at])
                    held = max(float(saved @ times[chunks]) for times in flights[k])
                    held += sum(float(table.resident[one]) for one in at) + max(
                        float(table.transient[one]) for one in at
                    )
                    if held <= mesh.limits[k, 0]:
                        some.append(dict(zip(mine, levels)))
            fitting.append(some)
        for chosen in product(*fitting):
            levels = {number: level for one in chosen for number, level in one.items()}
            regular = Regular(cuts, tuple(levels[number] for number in range(count)))
            yield regular, at_places(mesh, regular, places)


def _flights(case: PipelineCase, m: int) -> list[list[np.ndarray]]:
    """By group, all counts of microbatches in flight of its chunks."""
    found = []
    for row in _actions(case, m):
        now, seen = np.zeros(case.chunks), set()
        for action in row:
            now[action.chunk] += {"F": 1, "I": 0}.get(action.kind, -1)
            seen.add(tuple(now))
        found.append([np.array(one) for one in seen])
    if case.chunks == 1:
        assert [max(one[0] for one in some) for some in found] == [
            in_flight_formula(case.schedule, k, case.groups, m) for k in range(case.groups)
        ]
    return found
