"""Regular pipelines: equal groups of devices under one logical mesh, with equally many virtual stages each.

A *case* is a schedule on p device groups with v virtual stages (*chunks*) each, S = p v in all, and a table whose
options are one mesh at several memory multipliers (*levels*) and *sites* (places whose messages cost differently).
Group k lies at the k-th leftmost place, as Megatron lays its pipelines: several groups in a host where they fit. Its
chunks D_k are those of ``families.virtual_order``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from .families import generate, in_flight_formula, is_split
from .table import Floats, PipelineTable, StageConstraints

__all__ = [
    "MeshTable",
    "Parts",
    "PipelineCase",
    "dual_levels",
    "groups_that_fit",
    "in_flight_by_chunk",
    "least_sums",
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
    whole: True if seconds t in ``value`` have a stage's work per step, divided by the microbatches, in them. value: the
    least of t + byte · resident + saved_byte · saved of any choice; pace: the least seconds whatever the bytes; trip:
    these without the gradients of weights; forward, backward: of these alone; peak: the bytes that a run of layers
    takes beside at some time, whatever is chosen; actions_s: the part of each pace that a stage takes once, where all
    else is a sum over its layers, so that levels may be mixed (None: they may not). work: the least seconds of all work
    of a step, less what may run beside the last backward (None: no more than all paces); tied_s: by number of groups,
    the least seconds at the end of a step to exchange weights that the first and the last of them hold (None: not
    known). work_levels: ``value``, ``byte`` and ``saved_byte`` of more levels, the first without prices, where all work
    of a step counts, less what may run beside the last backward, divided by the microbatches (None: not known).
    constraints: on the cuts. entry, behind: by site and border, the least seconds of a message ahead and of one back.
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
    work_levels: tuple[Floats, Floats, Floats] | None = None

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

    def hop(self, a: int, b: int) -> tuple[Floats, Floats]:
        """[L + 1] by border the least seconds of a message ahead from group a to group b, and of one back."""
        if a == b or self.entry is None or self.behind is None:
            return np.zeros(self.pace.shape[1]), np.zeros(self.pace.shape[1])
        return self._hops[self.hosts[a] == self.hosts[b]]

    @cached_property
    def _hops(self) -> dict[bool, tuple[Floats, Floats]]:
        """``hop`` within a host and between hosts."""
        assert self.entry is not None
        assert self.behind is not None
        found = {}
        for inside in (False, True):
            ahead, back = ([n for n, near in enumerate(self.near) if near[side] == inside] for side in (0, 1))
            found[inside] = (
                self.entry[ahead or slice(None)].min(axis=0), self.behind[back or slice(None)].min(axis=0),
            )  # fmt: skip
        return found

    def least_messages(self, cuts: Sequence[int], groups: Sequence[int]) -> tuple[list[float], list[float]]:
        """The least seconds of a message ahead and of one back across each border between chunks of these groups."""
        hops = [self.hop(*both) for both in pairwise(groups)]
        ahead, back = ([float(hop[way][at]) for hop, at in zip(hops, cuts[1:-1])] for way in (0, 1))
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
        return least_sums(np.where(self.allowed, np.concatenate([self.pace[None], self.value]), inf))

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

    @cached_property
    def priced_work(self) -> MeshTable | None:
        """The same with ``work_levels`` alone: ``pace`` and ``value`` are of all work of a step."""
        if self.work_levels is None:
            return None
        value, byte, saved_byte = self.work_levels
        pace = np.maximum(self.pace, value[0])
        return replace(self, pace=pace, value=value, byte=byte, saved_byte=saved_byte, work=None, work_levels=None)

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


def least_sums(values: Floats) -> Floats:
    """[…] the least sum of values […, L, L + 1] along all layers, cut into any number of runs."""
    layers = values.shape[-2]
    tails = np.full((*values.shape[:-2], layers + 1), inf)  # from each border on
    tails[..., layers] = 0.0
    for i in reversed(range(layers)):
        tails[..., i] = (values[..., i, i + 1 :] + tails[..., i + 1 :]).min(axis=-1)
    return np.asarray(tails[..., 0])


def dual_levels(mesh: MeshTable, m: int, case: PipelineCase) -> list[int]:
    """The levels at which the bound on an even share of the work is the highest for some group, except those without
    a price of bytes."""
    count = case.chunks if case.chunks > 1 else None
    held = [in_flight_formula(case.schedule, k, case.groups, m, count) // case.chunks for k in range(case.groups)]
    prices = np.maximum(mesh.byte[:, None], mesh.saved_byte[:, None] / np.maximum(held, 1))  # [levels, groups]
    bounds = mesh.least_sums[1:, None] / case.groups - prices * mesh.limits[: case.groups, 1]
    found = bounds.argmax(axis=0).tolist()
    return [level for level in dict.fromkeys(found) if mesh.byte[level] > 0]
