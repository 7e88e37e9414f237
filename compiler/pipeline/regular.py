"""Regular pipelines: equal groups of devices under one logical mesh, with equally many virtual stages each.

A *case* is a schedule on p device groups with v virtual stages (*chunks*) each, S = p v in all, and a table whose
options are one mesh at several memory multipliers (*levels*) and *sites* (places whose messages cost differently).
Group k lies at the k-th leftmost place, as Megatron lays its pipelines: several groups in a host where they fit. Its
chunks D_k are those of ``families.virtual_order``.

Bounds. T_k = Σ_{c ∈ D_k} t_c is a group's load. By the proof in ``bounds``, with the chunks in place of stages, every
sound schedule takes at least ::

    all           Σ_{c<k} f_c + m T_k, with the end of the step (``least_work``)  interleaved   Σ_{c<k} t_c + m T_k
    one chunk     the least W over all cuts, on lower bounds of t
                  Σ_{c<k} f_c + (m − q_k + 1) t_k + (q_k − 1) b_k + Σ_{c>k} w_c

with f and b the forward and the backward alone, and w a way there and back (zb-h1: without the gradients of weights).
The last line is of a stage that holds q_k ≤ m microbatches: before its first backward, which comes w_c of all later
stages after its first forward, it has q_k forwards to do at most, and waits for the rest of that time.

With its work per step σ_k a group takes m T_k + σ_k − h. What hides beside the last backward, h, is at most the overlap
o of that backward, and o of the sums ρ_k of whole gradients. So for every ω in [0, 1], with β = o (1 − ω) ::

    m T_k + σ_k − h ≥ (m − β) v_k + β f_k,  v_k the least of t + (σ − o ω ρ) / (m − β) over all choices

Weights that the first and the last group hold are exchanged when the last backward of the first has ended, which ends
every microbatch's way there and back (but under zb-v, where one group is both): at least W of the paces, and then the
exchange.

A level (λ, μ), seconds per resident byte and per saved byte, says t_c + λ r_c + μ s_c ≥ value_c for every choice. At
some time group k holds h_c microbatches of each of its chunks, so that Σ (r_c + h_c s_c) ≤ M, and with θ_c = min(1,
λ h_c / μ)

    T_k ≥ Σ_{c ∈ D_k} (pace_c + θ_c (value_c − pace_c)) − λ M

The least seconds of all that follows on each other in the schedule are a bound, too (``cutting_planes``).

W is that of ``regular_solver``. ``case_bounds`` are on all cuts, the bounds of ``regular_solver`` on the cuts that are
tried. Under zb-h1 ``case_bounds`` also have W on t without the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from .families import PIPEDREAM, generate, in_flight_formula, is_split
from .table import Floats, PipelineTable, StageConstraints

__all__ = [
    "MeshTable",
    "Parts",
    "PipelineCase",
    "case_bounds",
    "dual_levels",
    "groups_that_fit",
    "in_flight_by_chunk",
    "least_paths",
    "mesh_bound",
    "places",
    "representative_microbatches",
]  # fmt: skip

_PERIODS = 3  # groups of about p microbatches: after so many a schedule repeats itself
#: the runs of layers of a chunk, (option, first layer, end layer): one, or the two of a mix
Parts = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, order=True)
class PipelineCase:
    """A schedule on ``groups`` device groups with ``chunks`` virtual stages each."""

    groups: int
    schedule: str
    chunks: int = 1


@dataclass(frozen=True, eq=False)
class MeshTable:
    """The costs of one mesh: option ``level · sites + site`` of ``table``, and bounds [levels, L, L + 1].

    near: by site, if messages to the group in front and behind are priced as inside a host; hosts: by group, its host.
    whole: True if seconds t in ``value`` have a stage's work per step, divided by the microbatches, in them.
    value: the least of t + byte · resident + saved_byte · saved of any choice; pace: the least seconds whatever the
    bytes; trip: these without the gradients of weights; forward, backward: of these alone; peak: the bytes that a run
    of layers takes beside at some time, whatever is chosen; actions_s: the part of each pace that a stage takes once,
    where all else is a sum over its layers, so that levels may be mixed (None: they may not). work: the least seconds
    of all work of a step, less what may run beside the last backward (None: no more than all paces); tied_s: by number
    of groups, the least seconds at the end of a step to exchange weights that the first and the last of them hold
    (None: not known). constraints: on the cuts. entry, behind: by site and border, the least seconds of a message ahead
    and of one back.
    """

    table: PipelineTable
    sites: int
    pace: Floats
    value: Floats
    byte: Floats
    saved_byte: Floats
    trip: Floats  # [L, L + 1], as ``pace``, ``forward``, ``backward`` and ``peak``
    forward: Floats
    backward: Floats
    peak: Floats
    near: Sequence[tuple[bool, bool]]
    hosts: Sequence[int]
    whole: bool = True
    actions_s: float | None = None
    work: Floats | None = None  # [L, L + 1]
    tied_s: Floats | None = None
    constraints: StageConstraints = field(default_factory=StageConstraints)
    entry: Floats | None = None  # [sites, L + 1], as ``behind``
    behind: Floats | None = None

    def pace_of(self, parts: Parts) -> float:
        """Seconds per microbatch of a chunk."""
        return float(sum(self.table.pace_s[one] for one in parts)) - (len(parts) - 1) * (self.actions_s or 0.0)

    @property
    def levels(self) -> int:
        """Levels of each site."""
        return len(self.table.options) // self.sites

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(device offset, site) of the groups, leftmost first."""
        return places(
            [option.offsets for option in self.table.options[: self.sites]], self.table.options[0].num_devices
        )

    def messages(self, chunks: Sequence[Parts], groups: Sequence[int]) -> list[tuple[float, float]]:
        """Seconds of a message ahead and back across each border between chunks of these groups, by where the groups
        really lie."""
        found = []
        for ((*_, one), (other, *_)), (a, b) in zip(pairwise(chunks), pairwise(groups)):
            if a == b:
                found.append((0.0, 0.0))
                continue
            inside = self.hosts[a] == self.hosts[b]
            behind, before = (self._option(option, side, inside) for option, side in ((one[0], 1), (other[0], 0)))
            assert self.table.entry_s is not None
            ahead, back = self.table.entry_s[before, *other[1:]], self.table.transfer_s[behind, *one[1:]]
            found.append((float(ahead), float(back)))
        return found

    def least_messages(self, cuts: Sequence[int], groups: Sequence[int]) -> tuple[list[float], list[float]]:
        """The least seconds of a message ahead and of one back across each border between chunks of these groups."""
        ahead, back = [0.0] * (len(groups) - 1), [0.0] * (len(groups) - 1)
        for n, (border, (a, b)) in enumerate(zip(cuts[1:-1], pairwise(groups))):
            if a != b and self.entry is not None and self.behind is not None:
                inside = self.hosts[a] == self.hosts[b]
                for found, least, side in ((ahead, self.entry, 0), (back, self.behind, 1)):
                    sites = [site for site, near in enumerate(self.near) if near[side] == inside]
                    found[n] = float(least[sites or slice(None), border].min())
        return ahead, back

    def _option(self, option: int, side: int, inside: bool) -> int:
        """The option of the same level whose messages to one side are priced so; the option itself if there is none."""
        level, site = divmod(option, self.sites)
        sites = [site, *range(self.sites)]
        return level * self.sites + next((one for one in sites if self.near[one][side] == inside), site)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[L, L + 1] the runs of layers that may be chunks."""
        at = np.indices(self.pace.shape)
        return np.asarray((at[0] < at[1]) & self.constraints.allowed(at[0], at[1]))

    @cached_property
    def least_sums(self) -> Floats:
        """[1 + levels] the least sums of all layers: of ``pace``, and of ``value`` at every level."""
        return _least_sums(np.where(self.allowed, np.concatenate([self.pace[None], self.value]), inf))

    @cached_property
    def most_bytes(self) -> float:
        """The most bytes that any device has."""
        return max(max(option.limit_bytes, default=0.0) for option in self.table.options)

    def least_work(self, m: int) -> Floats:
        """[L, L + 1] ``work``, at least m paces."""
        return m * self.pace if self.work is None else np.maximum(m * self.pace, self.work)

    def tied(self, groups: int) -> Floats:
        """[groups + 1] ``tied_s``, 0 if it is not known."""
        return np.zeros(groups + 1) if self.tied_s is None else self.tied_s[: groups + 1]

    def least_seconds(self, flight: int) -> Floats:
        """[L, L + 1] the least seconds per microbatch of a stage with so many in flight."""
        room = self.most_bytes - self.peak
        prices = np.maximum(self.byte, self.saved_byte / flight)
        bound = np.maximum(self.pace, (self.value - prices[:, None, None] * room).max(axis=0, initial=0.0))
        return np.where(self.allowed & (room >= 0), bound, inf)

    @cached_property
    def limits(self) -> Floats:
        """[groups, 2] the least and the most bytes of each device of a group that a level may fill. What the estimates
        of one level leave out, those of all do, so plans keep to the least; bounds, to the most."""
        found = []
        for offset, site in self.places:
            limits = [option.limit(offset) for option in self.table.options[site :: self.sites]]
            found.append((min(limits), max(limits)))
        return np.array(found)


def places(offsets_by_site: Sequence[Sequence[int]], num_devices: int) -> list[tuple[int, int]]:
    """(offset, site) of as many groups as there is room for, each at the leftmost offset behind the one before."""
    found: list[tuple[int, int]] = []
    end = 0
    for offset, site in sorted((offset, site) for site, offsets in enumerate(offsets_by_site) for offset in offsets):
        if offset >= end:
            found.append((offset, site))
            end = offset + num_devices
    return found


def in_flight_by_chunk(schedule: str, p: int, m: int, v: int) -> tuple[NDArray[np.intp], ...]:
    """Per device group, the microbatches in flight of each of its chunks whenever that is most: [times, v]."""
    if v == 1:
        return tuple(np.array([[in_flight_formula(schedule, k, p, m)]]) for k in range(p))
    return _played_flights(schedule, p, representative_microbatches(schedule, p, m), v)


@lru_cache(maxsize=1024)
def _played_flights(schedule: str, p: int, m: int, v: int) -> tuple[NDArray[np.intp], ...]:
    last = "W" if is_split(schedule) else "B"
    out = []
    for row in generate(schedule, p, m, v).actions:
        now, seen, rose = [0] * v, set(), False
        for action in row:
            if action.kind == "F":
                now[action.chunk] += 1
                rose = True
            elif action.kind == last:
                if rose:
                    seen.add(tuple(now))
                now[action.chunk] -= 1
                rose = False
        out.append(np.array(sorted(seen), dtype=np.intp).reshape(-1, v))
    return tuple(out)


def representative_microbatches(schedule: str, p: int, m: int) -> int:
    """Microbatches that repeat all that ``m`` do: in groups of the same sizes (``interleaved``), a few of each size;
    under zb-v one period more than what it takes to fill the pipeline."""
    if schedule == "zb-v":
        return min(m, 2 * p + 1)
    count = max(1, m // p)
    size, larger = divmod(m, count)
    kept = min(larger, _PERIODS), min(count - larger, _PERIODS)
    few = sum(kept) * size + kept[0]
    return few if few // p == sum(kept) else m


# ---- bounds on all cuts


def mesh_bound(mesh: MeshTable, m: int, groups: int) -> float:
    """Seconds that no pipeline of at most ``groups`` groups of a mesh undercuts, whatever its cuts and schedule."""
    if (np.diagonal(mesh.peak, 1) > mesh.most_bytes).any():
        return inf
    return max(m * _mean_load(mesh, groups), _mean_work(mesh, m) / groups)


def _mean_work(mesh: MeshTable, m: int) -> float:
    """The least sum of ``least_work`` of all layers; 0 where that says no more than ``_mean_load``."""
    if mesh.work is None:
        return 0.0
    return float(_least_sums(np.where(mesh.allowed, mesh.least_work(m), inf)))


def _mean_load(mesh: MeshTable, groups: int) -> float:
    """The least mean load of so many groups, with one microbatch in flight."""
    prices = groups * np.maximum(mesh.byte, mesh.saved_byte)
    pace, values = mesh.least_sums[0], mesh.least_sums[1:]
    return max(float(pace), float((values - mesh.most_bytes * prices).max(initial=0.0))) / groups


def _most_groups(cases: Sequence[PipelineCase]) -> dict[str, int]:
    """The largest number of groups of each schedule with one chunk per group."""
    most: dict[str, int] = {}
    for case in cases:
        if case.chunks == 1:
            most[case.schedule] = max(case.groups, most.get(case.schedule, 0))
    return most


def least_paths(mesh: MeshTable, m: int, most: Mapping[str, int]) -> dict[str, Floats]:
    """By schedule, [most + 1] the least W of pipelines of so many stages, on lower bounds of these."""
    seconds, count = cache(mesh.least_seconds), max(most.values(), default=0)
    work = np.where(mesh.allowed, mesh.least_work(m), inf)
    works = [_paths([(work, mesh.forward)] * count)] if mesh.work is not None else []  # else heads are no less
    # A microbatch's way there and back, without the gradients of weights where these may wait: nothing but the first
    # stage's work per step follows on it, so values that have more of that in them bound what begins with the forwards
    # before a stage and ends with its own work.
    ways = {split: np.where(mesh.allowed, mesh.trip if split else mesh.pace, inf) for split in set(map(is_split, most))}
    tails = {split: _least_tails(way) for split, way in ways.items()}
    trips = {split: _paths([(m * way, way)] * count) + mesh.tied(count) for split, way in ways.items()}

    def stage(name: str, left: int) -> tuple[Floats, Floats | float]:
        """The seconds of the first of so many stages, and those that the others wait for it."""
        flight, split = in_flight_formula(name, 0, left, m), is_split(name)
        bound = seconds(flight)  # of several stages the first holds as many as any that is so far from the end
        if name == PIPEDREAM:
            return m * bound, 0.0
        head = m * bound
        if flight <= m:
            head = np.maximum(head, (m - flight + 1) * bound + (flight - 1) * mesh.backward + tails[split])
        return head, mesh.forward if split or mesh.whole else np.maximum(bound, mesh.forward)

    found = {}
    for name, groups in most.items():
        found[name] = _paths(stage(name, left) for left in range(1, groups + 1))
        for least in (trips[is_split(name)], *works) if name != PIPEDREAM else ():
            found[name] = np.maximum(found[name], least[: groups + 1])
    return found


def _paths(stages: Iterable[tuple[Floats, Floats | float]]) -> Floats:
    """[stages + 1] the least W of so many stages, of [L, L + 1] the seconds of each and those that the others wait for
    it, from the last stage to the first."""
    rest, paths = None, [inf]
    for head, wait in stages:
        if rest is None:
            rest = np.where(np.arange(head.shape[1]) == len(head), 0.0, inf)
        rest = np.append(np.maximum(head, wait + rest).min(axis=1), inf)
        paths.append(float(rest[0]))
    return np.array(paths)


def case_bounds(mesh: MeshTable, m: int, cases: Sequence[PipelineCase]) -> list[float]:
    """Seconds that no pipeline of each case undercuts, whatever its cuts: with one chunk per group the least W on lower
    bounds of stages, else the mean load or the largest chunk."""
    count = max((case.groups * case.chunks for case in cases if case.chunks > 1), default=0)
    slowest = _least_largest(np.where(mesh.allowed, mesh.pace, inf), count)
    trip = float(_least_sums(np.where(mesh.allowed, mesh.trip, inf)))  # of one microbatch through all layers
    trips = {"interleaved": float(mesh.least_sums[0]), "zb-v": trip}
    ends, paths = _mean_work(mesh, m), least_paths(mesh, m, _most_groups(cases))
    return [
        float(paths[case.schedule][case.groups])
        if case.chunks == 1
        else max(
            m * _mean_load(mesh, case.groups),
            ends / case.groups,
            m * float(slowest[case.groups * case.chunks]),
            trips[case.schedule] + (0.0 if case.schedule == "zb-v" else float(mesh.tied(case.groups)[-1])),
        )
        for case in cases
    ]


def groups_that_fit(mesh: MeshTable, m: int, most: int) -> list[int]:
    """The numbers of groups, up to ``most``, of which some pipeline under 1F1B fits by the table: no schedule holds
    less."""
    table, layers = mesh.table, mesh.table.num_layers
    reached, found = np.arange(layers + 1) == layers, []
    for left in range(1, most + 1):
        held = table.resident + table.transient + in_flight_formula("1f1b", 0, left, m) * table.saved
        fits = (np.where(np.isfinite(table.pace_s), held, inf) <= mesh.most_bytes).any(axis=0) & mesh.allowed
        reached = np.append((fits & reached).any(axis=1), False)
        if reached[0]:
            found.append(left)
    return found


def _least_tails(values: Floats) -> Floats:
    """[…, L + 1] the least sum of values […, L, L + 1] from each border on, cut into any number of runs."""
    layers = values.shape[-2]
    tails = np.full((*values.shape[:-2], layers + 1), inf)
    tails[..., layers] = 0.0
    for i in reversed(range(layers)):
        tails[..., i] = (values[..., i, i + 1 :] + tails[..., i + 1 :]).min(axis=-1)
    return tails


def _least_sums(values: Floats) -> Floats:
    """[…] the least sum of values […, L, L + 1] along all layers, cut into any number of runs."""
    return np.asarray(_least_tails(values)[..., 0])


def _least_largest(values: Floats, most: int) -> Floats:
    """[most + 1] the least largest of values [L, L + 1] along exactly so many runs of layers."""
    value, out = np.full(len(values) + 1, inf), np.full(most + 1, inf)
    value[0] = 0.0
    for count in range(1, most + 1):
        value = np.maximum(value[:-1, None], values).min(axis=0)
        out[count] = value[-1]
    return out


def dual_levels(mesh: MeshTable, m: int, case: PipelineCase) -> list[int]:
    """The levels at which the bound on an even share of the work is the highest for some group, except those without
    a price of bytes."""
    count = case.chunks if case.chunks > 1 else None
    held = [in_flight_formula(case.schedule, k, case.groups, m, count) // case.chunks for k in range(case.groups)]
    prices = np.maximum(mesh.byte[:, None], mesh.saved_byte[:, None] / np.maximum(held, 1))  # [levels, groups]
    bounds = mesh.least_sums[1:, None] / case.groups - prices * mesh.limits[: case.groups, 1]
    found = bounds.argmax(axis=0).tolist()
    return [level for level in dict.fromkeys(found) if mesh.byte[level] > 0]
