"""The inter-operator pass: layers × devices → pipeline stages, by dynamic programming. It knows tables, no graph.

Variables. A pipeline cuts layers 0..L into stages of consecutive layers [i, j); stage k runs under an *option* o_k (a
submesh, its logical shape and a memory variant) on the devices d_k, …, d_k + n(o_k) − 1, where d_k is admissible for
o_k (host alignment), and d_k + n(o_k) ≤ d_{k+1}: stages lie in order, devices between them may stay idle.

Constraints, on every stage with q microbatches in flight (``stage_table.StageTable.peak``)::

    resident[o,i,j] + q · saved[o,i,j] + transient[o,i,j] ≤ min of limit over the stage's devices          (memory)

q is what the schedule holds (``schedule.in_flight_formula``): 1F1B min(m, stages from this one to the end), GPipe m.

Objective, with t_k = seconds[o_k,i_k,j_k] and m microbatches::

    T = Σ_k t_k + (m − 1) · max_k t_k

the latency of a 1F1B pipeline whose slowest stage sets the pace (Alpa, OSDI'22, equation 2). GPipe is slower where the
slowest forward and the slowest backward are on different stages; there T is a lower bound.

Recurrence (``_Search.sweep``), for a cap c on max t: with s stages left, from layer i on, on devices d and up,

    F_s(i, d) = min over o, j, d' ≥ d admissible, t ≤ c, memory with q(s):   seconds[o,i,j] + F_{s−1}(j, d' + n(o))

F_0(L, ·) = 0. Alpa's equation 3 counts devices left instead of the offset d, and so needs power-of-two submeshes that
tile the cluster; with d, six GPUs and three hosts are ordinary. Three reductions keep it small and exact:

- options that use equally many devices from the same offsets under the same limit form a *class*; per (class, i, j, q)
  only its fastest option that fits counts (``_Search.costs``);
- F changes with d only at admissible offsets, so d runs over these alone (whole hosts: one per host);
- entries (i, j) slower than the cap leave the sums before they are computed.

Search over the cap (``_Search.minimise``). V(c) = min Σ t under the cap c falls as c grows. Alpa walks c upwards
through all values and skips those closer than ε. Here c is bisected: if the plan at cap c has slowest stage t*, every
plan with max t in [t*, c] is no better, and every plan with max t in [a, b] costs at least V(c) + (m − 1)a for any
c ≥ b where V is known. Intervals with the lowest such bound are split first, until that bound is within ε of the best
plan; it is reported as ``bound_s``. ε = 0 gives the optimum.

Infeasible (``_Search.infeasible``). The same recurrence with max in place of + and the bytes over the limit in place of
seconds finds the pipeline that misses by least: raise the limit by that much, and it fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import fsum, inf, isfinite

import numpy as np
from numpy.typing import NDArray

from .schedule import in_flight_formula
from .stage_table import Infeasible, Pipeline, StageChoice, StageTable

__all__ = ["Infeasible", "Pipeline", "StageChoice", "StageTable", "solve"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]

_CHUNK_ELEMENTS = 1 << 21  # of one temporary in the recurrence: 16 MiB


@dataclass(frozen=True)
class _Class:
    """Options that use ``num_devices`` devices from the same offsets with the same memory limit."""

    num_devices: int
    limit_bytes: float
    options: _Ints
    at: _Ints  # positions in the grid of offsets where it may start
    after: _Ints  # for each of these, the position from which the next stage may start


class _Search:
    """The recurrence over one table; arrays over layer ranges are packed as [(i, j) with i < j], sorted by i."""

    def __init__(
        self, table: StageTable, num_microbatches: int, schedule: str, stages: range, require_all_devices: bool
    ) -> None:
        self.table, self.stages, self.exact_fill = table, stages, require_all_devices
        self.num_microbatches, self.schedule = num_microbatches, schedule
        self.first, self.end = np.triu_indices(table.num_layers, 1, table.num_layers + 1)
        self.row = np.searchsorted(self.first, np.arange(table.num_layers + 1))
        self.seconds = table.seconds[:, self.first, self.end]
        self.resident = table.resident_bytes[:, self.first, self.end]
        self.saved = table.saved_bytes[:, self.first, self.end]
        self.transient = table.transient_bytes[:, self.first, self.end]
        self.grid, self.classes = self._classes()
        self._costs: dict[int, list[tuple[_Floats, _Ints]]] = {}
        self.sweeps = 0

    def _classes(self) -> tuple[_Ints, list[_Class]]:
        table = self.table
        groups: dict[tuple[int, float, tuple[int, ...]], list[int]] = {}
        for option, n in enumerate(map(int, table.devices)):
            by_limit: dict[float, list[int]] = {}
            for d in map(int, np.flatnonzero(table.admissible[option])):
                if d + n <= table.num_devices:
                    by_limit.setdefault(table.limit(option, d), []).append(d)
            for limit, starts in by_limit.items():
                groups.setdefault((n, limit, tuple(starts)), []).append(option)
        grid = np.array(sorted({0, table.num_devices}.union(*(key[2] for key in groups))), dtype=np.intp)
        classes = []
        for (n, limit, offsets), options in sorted(groups.items()):
            at = np.searchsorted(grid, offsets)
            after = np.searchsorted(grid, grid[at] + n)
            if self.exact_fill:  # the next stage starts right there, so there must be an offset
                kept = grid[after] == grid[at] + n
                at, after = at[kept], after[kept]
            if len(at):
                classes.append(_Class(n, limit, np.array(options, dtype=np.intp), at, after))
        return grid, classes

    def in_flight(self, stages_left: int) -> int:
        """Microbatches held by the first of ``stages_left`` stages."""
        return in_flight_formula(self.schedule, 0, stages_left, self.num_microbatches)

    def costs(self, stages_left: int) -> list[tuple[_Floats, _Ints]]:
        """Per class: seconds of its fastest option that fits, and which, both [(i, j)]; inf where none fits."""
        q = self.in_flight(stages_left)
        if q not in self._costs:
            need = self.resident + q * self.saved + self.transient
            self._costs[q] = []
            for c in self.classes:
                fits = np.where(need[c.options] <= c.limit_bytes, self.seconds[c.options], inf)
                best = fits.argmin(axis=0)
                self._costs[q].append((np.take_along_axis(fits, best[None], 0)[0], c.options[best]))
        return self._costs[q]

    def excess(self, stages_left: int) -> list[tuple[_Floats, _Ints]]:
        """Per class: bytes over the limit of the option that misses by least, and which, both [(i, j)]."""
        need = self.resident + self.in_flight(stages_left) * self.saved + self.transient
        out = []
        for c in self.classes:
            over = np.where(np.isfinite(self.seconds[c.options]), need[c.options] - c.limit_bytes, inf).clip(min=0)
            best = over.argmin(axis=0)
            out.append((np.take_along_axis(over, best[None], 0)[0], c.options[best]))
        return out

    def sweep(
        self, costs: Callable[[int], list[tuple[_Floats, _Ints]]], cap: float, combine: np.ufunc
    ) -> tuple[float, tuple[StageChoice, ...]]:
        """The best combined cost under the cap and a pipeline that has it; (inf, ()) if there is none."""
        self.sweeps += 1
        value = np.full((self.table.num_layers + 1, len(self.grid)), inf)
        value[-1, -1 if self.exact_fill else slice(None)] = 0.0
        values = [value]
        for s in range(1, self.stages[-1] + 1):
            before, value = value, np.full_like(value, inf)
            alive = np.isfinite(before).any(axis=1)
            for c, (cost, _) in zip(self.classes, costs(s)):
                chosen = np.flatnonzero((cost <= cap) & np.isfinite(cost) & alive[self.end])
                if not len(chosen):
                    continue
                first, end = self.first[chosen], self.end[chosen]
                begins = np.flatnonzero(np.diff(first, prepend=-1))
                step = max(1, _CHUNK_ELEMENTS // len(chosen))
                for k in range(0, len(c.at), step):
                    total = combine(cost[chosen, None], before[:, c.after[k : k + step]][end])
                    where = np.ix_(first[begins], c.at[k : k + step])
                    value[where] = np.minimum(value[where], np.minimum.reduceat(total, begins, axis=0))
            if not self.exact_fill:  # a stage may also start later than where the one before it ends
                value = np.minimum.accumulate(value[:, ::-1], axis=1)[:, ::-1]
            values.append(value)
            if not np.isfinite(value).any():
                break
        counts = [s for s in self.stages if s < len(values)]
        best = min(counts, key=lambda s: values[s][0, 0], default=0)
        if not best or not isfinite(values[best][0, 0]):
            return inf, ()
        return float(values[best][0, 0]), tuple(self._trace(values[: best + 1], costs, cap, combine))

    def _trace(
        self,
        values: list[_Floats],
        costs: Callable[[int], list[tuple[_Floats, _Ints]]],
        cap: float,
        combine: np.ufunc,
    ) -> Iterator[StageChoice]:
        """Walk the recurrence forwards, finding at each state a choice that attains its value (same sums, so equal)."""
        layer, position = 0, 0
        for s in range(len(values) - 1, 0, -1):
            entries = slice(self.row[layer], self.row[layer + 1])
            for c, (cost, option) in zip(self.classes, costs(s)):
                at = np.flatnonzero(c.at == position if self.exact_fill else c.at >= position)
                allowed = np.where(cost[entries] <= cap, cost[entries], inf)[:, None]
                total = combine(allowed, values[s - 1][np.ix_(self.end[entries], c.after[at])])
                hits = np.argwhere(total == values[s][layer, position])
                if len(hits):
                    entry, k = entries.start + hits[0][0], at[hits[0][1]]
                    yield StageChoice(layer, int(self.end[entry]), int(option[entry]), int(self.grid[c.at[k]]))
                    layer, position = int(self.end[entry]), int(c.after[k])
                    break
            else:
                raise AssertionError("no choice attains the value of its state")

    def _caps(self) -> _Floats:
        """All values that the slowest stage's seconds may have, in order."""
        values: list[_Floats] = []
        before: list[_Floats] = [np.full(len(self.first), inf) for _ in self.classes]
        for s in sorted({self.in_flight(s): s for s in range(1, self.stages[-1] + 1)}.values()):
            now = [cost for cost, _ in self.costs(s)]
            values.extend(new[new != old] for new, old in zip(now, before))  # few change with one more in flight
            before = now
        caps = np.unique(np.concatenate(values)) if values else np.empty(0)
        return caps[np.isfinite(caps)]

    def minimise(self, epsilon: float) -> tuple[tuple[StageChoice, ...], float] | None:
        """The best pipeline and a lower bound on every pipeline's objective; None if nothing fits."""
        pace = self.num_microbatches - 1
        caps = self._caps()
        best: tuple[StageChoice, ...] = ()
        best_s = inf
        # Plans whose slowest stage takes caps[low..high] cost at least `bound`, as their sum is at least `total`.
        queue: list[tuple[float, int, int, float]] = [(0.0, 0, len(caps) - 1, 0.0)] if len(caps) else []
        while queue and queue[0][0] < best_s * (1.0 - epsilon):
            _, low, high, total = heapq.heappop(queue)
            if best and pace:  # what is slower than this cannot win
                high = min(high, int(np.searchsorted(caps, (best_s - total) / pace, "right")) - 1)
            if low > high:
                continue
            middle = high if not best else int(np.searchsorted(caps, (caps[low] + caps[high]) / 2, "right")) - 1
            reached, stages = self.sweep(self.costs, float(caps[middle]), np.add)
            if not stages and not best:
                return None
            if middle < high:
                heapq.heappush(queue, (total + pace * float(caps[middle + 1]), middle + 1, high, total))
            if stages:
                slowest = max(float(self.table.seconds[c.option, c.first_layer, c.end_layer]) for c in stages)
                if (value := _objective(self.table, stages, self.num_microbatches)) < best_s:
                    best, best_s = stages, value
                below = int(np.searchsorted(caps, slowest)) - 1
                if below >= low:
                    heapq.heappush(queue, (reached + pace * float(caps[low]), low, below, reached))
        if not best:
            return None
        return best, min(queue[0][0] if queue else best_s, best_s)

    def infeasible(self) -> Infeasible:
        """Why nothing fits, and what would."""
        table = self.table
        missing, nearest = self.sweep(self.excess, inf, np.maximum)
        if not nearest:
            usable = np.zeros(table.num_layers, dtype=bool)
            for option in {int(o) for c in self.classes for o in c.options}:
                for entry in np.flatnonzero(np.isfinite(self.seconds[option])):
                    usable[self.first[entry] : self.end[entry]] = True
            asked = f"{self.stages[0]} stages" if len(self.stages) == 1 else f"at most {self.stages[-1]} stages"
            fill = ", all in use" if self.exact_fill else ""
            if not usable.all():
                layers = ", ".join(map(str, np.flatnonzero(~usable)))
                return Infeasible(f"no option can run layers {layers} on {table.num_devices} devices", inf)
            return Infeasible(
                f"no way to lay out {table.num_layers} layers as {asked} on {table.num_devices} devices{fill}, "
                "whatever the memory limit; allow other stage counts, more options or idle devices",
                inf,
            )
        return _short_of_memory(table, nearest, missing, self.in_flight)


def _short_of_memory(
    table: StageTable, nearest: tuple[StageChoice, ...], missing: float, in_flight: Callable[[int], int]
) -> Infeasible:
    rows = [
        (table.peak(c.option, c.first_layer, c.end_layer, in_flight(len(nearest) - k)), table.limit(c[2], c[3]))
        for k, c in enumerate(nearest)
    ]
    stage = max(range(len(rows)), key=lambda k: rows[k][0] - rows[k][1])
    need, limit = rows[stage]
    c = nearest[stage]
    return Infeasible(
        f"no pipeline fits; the nearest has {len(nearest)} stages, and its stage {stage} (layers {c.first_layer} to "
        f"{c.end_layer - 1} on {table.devices[c.option]} devices, option {c.option}) needs {need:,.0f} bytes per "
        f"device where the limit is {limit:,.0f}: {missing:,.0f} bytes are missing",
        missing,
        nearest,
        stage,
        c,
        need,
        limit,
    )


def _objective(table: StageTable, stages: tuple[StageChoice, ...], num_microbatches: int) -> float:
    seconds = [float(table.seconds[c.option, c.first_layer, c.end_layer]) for c in stages]
    return fsum(seconds) + (num_microbatches - 1) * max(seconds)


def _pipeline(
    table: StageTable, stages: tuple[StageChoice, ...], m: int, schedule: str, bound_s: float, sweeps: int
) -> Pipeline:
    held = tuple(in_flight_formula(schedule, k, len(stages), m) for k in range(len(stages)))
    return Pipeline(
        stages=stages,
        objective_s=_objective(table, stages, m),
        bound_s=bound_s,
        seconds=tuple(float(table.seconds[c.option, c.first_layer, c.end_layer]) for c in stages),
        in_flight=held,
        peak_bytes=tuple(table.peak(c.option, c.first_layer, c.end_layer, q) for c, q in zip(stages, held)),
        limit_bytes=tuple(table.limit(c.option, c.device_offset) for c in stages),
        idle_devices=table.num_devices - int(sum(table.devices[c.option] for c in stages)),
        sweeps=sweeps,
    )


def _stage_counts(table: StageTable, m: int, max_stages: int | None, num_stages: int | None) -> range:
    if m < 1:
        raise ValueError(f"a step has at least one microbatch, but got {m}")
    most = min(table.num_layers, table.num_devices)
    if num_stages is not None:
        if not 1 <= num_stages <= most:
            raise ValueError(
                f"the number of stages is from 1 to {most} ({table.num_layers} layers, {table.num_devices} devices), "
                f"but got {num_stages}"
            )
        return range(num_stages, num_stages + 1)
    if max_stages is not None and max_stages < 1:
        raise ValueError(f"max_stages is at least 1, but got {max_stages}")
    return range(1, min(most, 32 if max_stages is None else max_stages) + 1)


def solve(
    table: StageTable,
    num_microbatches: int,
    schedule: str = "1f1b",
    max_stages: int | None = None,
    num_stages: int | None = None,
    require_all_devices: bool = False,
    epsilon: float = 1e-4,
) -> Pipeline | Infeasible:
    """The pipeline of least Σ t + (m − 1)·max t, within the fraction ``epsilon`` of optimal (0: optimal).

    ``num_stages`` forces the number of stages; otherwise it is at most ``max_stages``, by default min(L, D, 32), and
    the bound speaks of those only. Devices may stay idle unless ``require_all_devices``. ValueError on bad arguments.
    """
    search = _Search(
        table,
        num_microbatches,
        schedule,
        _stage_counts(table, num_microbatches, max_stages, num_stages),
        require_all_devices,
    )
    found = search.minimise(epsilon)
    if found is None:
        return search.infeasible()
    return _pipeline(table, found[0], num_microbatches, schedule, found[1], search.sweeps)
