"""Many cases composed at once against the scalar composer, case by case; recompute modes; runs that are one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from meshwright.compiler.cost.parameter_sharding import PATTERNS
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.intra_op.restriction import NO_RESTRICTION, Restriction
from meshwright.compiler.intra_op.solver.elimination import eliminate
from meshwright.compiler.intra_op.vectorised import interval_tables
from meshwright.compiler.intra_op.vectorised.cases import Case, Cases
from meshwright.compiler.intra_op.vectorised.interval_tables import IntervalComposer
from meshwright.compiler.intra_op.vectorised.layer_tables import Level
from meshwright.compiler.intra_op.vectorised.row_cache import RowCache
from meshwright.compiler.intra_op.vectorised.section import build_case_section
from meshwright.costmodel.cluster import Cluster
from torch import nn

from tests.oracles.stacked_sections import scalar_composers, stacked_section
from tests.support.zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")
CASES = {
    0: [((), 0, 4), ((), 3, 1)],
    1: [((2,), 0, 4), ((4,), 0, 8), ((8,), 0, 2)],
    2: [((2, 2), 0, 4), ((4, 2), 0, 1), ((2, 4), 0, 4)],
}


@pytest.fixture(scope="module")
def graph():
    return capture(*ZOO["gpt"](64, device="meta", layers=3))


def variants_of(graph, axes):
    cases = tuple(Case(*case) for case in CASES[axes])
    return Cases(graph, cluster_layers(graph), V100, "AdamW", 64, cases)


def assert_equal_to_scalar(found, variants, byte_weight=0.0):
    for row, scalar in enumerate(scalar_composers(variants, NO_RESTRICTION, ["none"])):
        one = scalar["none"]
        one.byte_weight = byte_weight
        expected = one.intervals()
        seconds = sum(found.of(name, [row])[0] for name in ("pace_s", "step_s", "transfer_s"))
        possible = np.isfinite(expected.seconds)
        np.testing.assert_array_equal(np.isfinite(found.of("cost", [row])[0]), possible)
        np.testing.assert_allclose(seconds[possible], expected.seconds[possible], rtol=1e-9)
        for name in ("resident", "saved", "transient"):
            values, theirs = found.of(name, [row])[0], getattr(expected, name)
            np.testing.assert_allclose(values[possible], theirs[possible], rtol=1e-9, err_msg=name)
        floor = found.of("floor_s", [row])[0]
        assert (floor[possible] <= found.of("cost", [row])[0][possible] * (1 + 1e-12)).all()


@pytest.mark.parametrize("axes", [0, 1, 2])
@pytest.mark.parametrize("byte_weight", [0.0, 1e-9])
def test_intervals_equal_the_scalar_composer(graph, axes, byte_weight):
    variants = variants_of(graph, axes)
    composer = IntervalComposer(
        variants, NO_RESTRICTION, [Level(), Level(byte_weight, byte_weight)], ["none"], stacked_section
    )
    found = composer.intervals([(v, 1) for v in range(variants.num)])
    assert_equal_to_scalar(found, variants, byte_weight)


class Skip(nn.Module):
    """A tensor that passes by two layers and joins the third; another is made in between and does so too."""

    def __init__(self):
        super().__init__()
        self.first, self.wide, self.narrow, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x, y):
        skip = self.first(x)
        here = self.narrow(torch.relu(self.down(torch.relu(self.up(skip)))))
        there = self.wide(torch.relu(self.down(torch.relu(self.up(here)))))
        return nn.functional.mse_loss(self.last(torch.relu(there * skip + here)), y)


@pytest.mark.parametrize("axes", [1, 2])
def test_borders_of_several_tensors(axes):
    with torch.device("meta"):
        variants = variants_of(capture(Skip(), (torch.empty(64, 16), torch.empty(64, 16)), {}), axes)
    crossing = variants.layering.crossing
    assert any(len(after) > 1 and set(before) & set(after) for before, after in pairwise(crossing))
    composer = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], stacked_section)
    assert_equal_to_scalar(composer.intervals([(v, 0) for v in range(variants.num)]), variants)


def test_runs_through_few_ways_are_min_plus_products():
    """Layers most of whose pairs of states are impossible; their seconds are all of a pace, so both must be equal."""
    generator = np.random.default_rng(0)
    tables = {key: generator.random((6, 6, 3)) for key in "ab"}
    for table in tables.values():
        table[generator.random((6, 6)) < 0.6] = np.inf
    runs, _ = interval_tables.runs_of("abab", [None] * 5)
    nothing, zero = {b: (np.zeros((6, 3)),) * 2 for b in range(5)}, np.zeros(3)
    taken = {
        key: (t, np.stack([np.where(np.isfinite(t), t, 0.0), *np.zeros((4, *t.shape))]), t) for key, t in tables.items()
    }
    floors = interval_tables.floors_of(runs, tables, zero)
    results = interval_tables.Composition(runs, taken, nothing, zero, dict.fromkeys("ab", zero), np.arange(3)).run()
    for run, floor, cost, pace in zip(runs, floors, results[0], results[2]):
        whole = np.zeros((6, 3))
        for key in "abab"[run.first : run.last + 1]:
            whole = (whole[:, None] + tables[key]).min(axis=0)
        for found in (floor, cost, pace):
            np.testing.assert_allclose(found, whole.min(axis=0), rtol=1e-12)


def test_intervals_of_templates_equal_the_scalar_composer(graph):
    """The same with sections that are priced for all cases at once, which is how a search has them."""
    variants = variants_of(graph, 2)
    composer = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"])
    assert_equal_to_scalar(composer.intervals([(v, 0) for v in range(variants.num)]), variants)
    labels, modes, _ = composer.choices((0, 0), 1, 3)
    nodes = variants.source.by_name()
    assert {nodes[name].op for name in labels} == {"call_function", "placeholder"}
    assert modes == ("none", "none")


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_floors_are_intervals_without_transfers(graph, axes, monkeypatch):
    variants = variants_of(graph, axes)
    composer = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], stacked_section)
    found = composer.intervals([(v, 0) for v in range(variants.num)])
    for row, scalar in enumerate(scalar_composers(variants, NO_RESTRICTION, ["none"])):
        monkeypatch.setattr(scalar["none"].pricer, "transfer_seconds", lambda size, before=False: 0.0)
        expected = scalar["none"].intervals().seconds
        possible = np.isfinite(expected)
        np.testing.assert_allclose(found.of("floor_s", [row])[0][possible], expected[possible], rtol=1e-9)


@pytest.mark.parametrize("axes", [1, 2])
def test_choices_attain_the_interval(graph, axes):
    variants = variants_of(graph, axes)
    composer = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], stacked_section)
    rows = [(v, 0) for v in range(variants.num)]
    found = composer.intervals(rows)
    count = len(variants.layering.layers)
    for row, first, end in ((rows[0], 0, count), (rows[-1], 1, count - 1), (rows[1], 2, 4)):
        if not np.isfinite(found.of("cost", [row[0]])[0, first, end]):
            continue
        labels, modes, states = composer.choices(row, first, end)
        assert modes == ("none",) * (end - first)
        one = scalar_composers(variants, NO_RESTRICTION, ["none"])[row[0]]["none"]
        parameters = {name for name in labels if variants.source.by_name()[name].op == "placeholder"}
        assert parameters
        pinned = one.afresh(restriction=Restriction(pinned=labels))
        seconds = 0.0
        for layer, (into, out) in zip(range(first, end), pairwise(states)):
            problem = pinned.section(layer, layer + 1, [into], [out]).problem(0.0)
            seconds += float(eliminate(problem).cost)
        seconds += one.entry_seconds(first)[one.states(first).index(states[0])]
        seconds += one.exit_seconds(end)[one.states(end).index(states[-1])]
        assert seconds == pytest.approx(found.of("cost", [row[0]])[0, first, end], rel=1e-9)


@pytest.mark.parametrize("axes", [0, 1, 2])
@pytest.mark.parametrize("byte_weight", [0.0, 1e-9, 1e-7])
def test_tables_have_the_best_mode_of_each_cell(graph, axes, byte_weight):
    variants = variants_of(graph, axes)
    modes = ["none", "full"]
    composer = IntervalComposer(variants, NO_RESTRICTION, [Level(byte_weight, 2 * byte_weight)], modes, stacked_section)
    tables = composer.tables([(v, 0) for v in range(variants.num)])
    seen = set()
    for row, scalar in enumerate(scalar_composers(variants, NO_RESTRICTION, modes)):
        for layer, one in enumerate(variants.layering.layers):
            ours = tables[one.class_key]
            expected = []
            for mode in modes:
                scalar[mode].byte_weight, scalar[mode].in_flight = byte_weight, 2.0
                expected.append(scalar[mode].table(layer))
            both = np.stack([aligned(composer, scalar["none"], layer, t.cost) for t in expected])
            np.testing.assert_allclose(ours.cost[..., row], both.min(axis=0), rtol=1e-9)
            for name in ("resident", "saved", "transient"):
                theirs = np.stack([aligned(composer, scalar["none"], layer, getattr(t, name), 0.0) for t in expected])
                chosen = np.take_along_axis(theirs, ours.mode[None, ..., row].astype(int), axis=0)[0]
                clear = np.isfinite(both.min(axis=0)) & (abs(both[0] - both[1]) > 1e-9 * both.min(axis=0))
                np.testing.assert_allclose(getattr(ours, name)[..., row][clear], chosen[clear], rtol=1e-9)
            seen |= set(ours.mode[..., row][np.isfinite(ours.cost[..., row])].tolist())
    assert seen >= ({0} if byte_weight == 0 else {0, 1})


def aligned(composer, scalar, layer, table, empty=np.inf):
    """A scalar table over the states of all cases."""
    into, out = composer.states(layer)[0], composer.states(layer + 1)[0]
    full = np.full((len(into), len(out)), empty)
    rows = [into.index(state) for state in scalar.states(layer)]
    columns = [out.index(state) for state in scalar.states(layer + 1)]
    full[np.ix_(rows, columns)] = table
    return full


def test_tables_that_children_make_are_those_of_this_process(graph, monkeypatch, tmp_path):
    """So are the choices behind them, and what a cache keeps of them."""
    monkeypatch.setattr(interval_tables, "FORKED_CELLS", 0)
    variants = variants_of(graph, 2)
    rows, num = [(v, 0) for v in range(variants.num)], len(variants.layering.layers)
    found = []
    for workers in (1, 3):
        composer = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none", "full"], workers=workers)
        composer.kept = RowCache(tmp_path / str(workers), "family")
        arrays = [composer.floors(rows)[0], *(getattr(composer.intervals(rows), f) for f in ("cost", "saved"))]
        found.append(
            (arrays, composer.choices(rows[0], 0, num), {key for one in composer.kept.made for key in one.keys})
        )
    (ours, choices, kept), (theirs, *others) = found
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs))
    assert [choices, kept] == others


def test_equal_runs_are_one_and_cost_what_each_of_them_costs(graph):
    variants = variants_of(graph, 1)
    composer = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], stacked_section)
    found = composer.intervals([(0, 0)])
    count = len(variants.layering.layers)
    keys = [layer.class_key for layer in variants.layering.layers]
    assert len(np.unique(found.run[found.run >= 0])) == len(found.cost) < count * (count + 1) / 2
    one = scalar_composers(variants, NO_RESTRICTION, ["none"])[0]["none"]
    for first in range(count):
        for end in range(first + 1, count + 1):
            for other in range(count - (end - first) + 1):
                if found.run[other, other + end - first] == found.run[first, end]:
                    assert keys[other : other + end - first] == keys[first:end]
            assert one.path(first, end) is not None
    assert (found.run[np.tril_indices(count, 0)] == -1).all()
    assert np.isinf(found.of("cost")[0][np.tril_indices(count, 0)]).all()


def test_the_order_and_repetition_of_rows_do_not_matter(graph):
    variants = variants_of(graph, 2)
    levels = [Level(), Level(1e-8, 1e-8)]
    composer = IntervalComposer(variants, NO_RESTRICTION, levels, ["none", "full"], stacked_section)
    rows = [(2, 1), (0, 0), (1, 1), (0, 1), (2, 0)]
    together = composer.intervals(rows)
    for place, row in enumerate(rows):
        alone = composer.intervals([row])
        for name in ("cost", "floor_s", "pace_s", "step_s", "transfer_s", "resident", "saved", "transient"):
            np.testing.assert_allclose(together.of(name, [place]), alone.of(name), rtol=1e-12)


def test_a_level_that_counts_half_of_what_a_step_costs_once(graph):
    """As if the section had half of it only."""
    variants = variants_of(graph, 1)

    def lighter(*arguments):
        section = stacked_section(*arguments)
        section.seconds = tuple(s - 0.5 * once for s, once in zip(section.seconds, section.step_seconds))
        section.floor_seconds = section.seconds
        return section

    rows = [(v, 0) for v in range(variants.num)]
    ours = IntervalComposer(variants, NO_RESTRICTION, [Level(step_share=0.5)], ["none"], stacked_section).intervals(
        rows
    )
    theirs = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], lighter).intervals(rows)
    np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-9)
    np.testing.assert_allclose(ours.floor_s, theirs.floor_s, rtol=1e-9)


#: shares of a level → the parts of a section's seconds that do not count, and how much of each
UNCOUNTED = {
    ("step_share", "weight_share"): (0.0, {"step_seconds": 1.0, "weight_seconds": 1.0}),
    ("gradient_share",): (0.2, {"gradient_seconds": 0.8}),
}
LIGHTER = [(shares, 0.0) for shares in UNCOUNTED]
LIGHTER += [(("step_share", "weight_share"), 1e-9), (("gradient_share",), 1e-13)]  # at 1e-9 nothing is whole


@pytest.mark.parametrize(("shares", "byte"), LIGHTER)
def test_a_level_without_parts_of_the_seconds(graph, shares, byte):
    """As if the section did not have them."""
    variants, (share, parts) = variants_of(graph, 1), UNCOUNTED[shares]

    def lighter(*arguments):
        section = build_case_section(*arguments)
        known = [np.where(np.isfinite(s) & (s > 0), s, 1.0) for s in section.seconds]
        counts = [np.where(np.isfinite(floor), floor, 1.0) / s for s, floor in zip(known, section.floor_seconds)]
        seconds = list(section.seconds)
        for name, off in parts.items():
            seconds = [s - off * part for s, part in zip(seconds, getattr(section, name))]
        none = {name: tuple(np.zeros_like(s) for s in seconds) for name in parts}
        floor = tuple(np.where(np.isfinite(s), s * count, np.inf) for s, count in zip(seconds, counts))
        return replace(section, seconds=tuple(seconds), floor_seconds=floor, **none)

    rows, modes = [(v, 0) for v in range(variants.num)], ["none", "full"]
    level, restriction = (
        Level(byte, byte, step_share=float("step_share" not in shares)),
        Restriction(residencies=PATTERNS),
    )

    def floors(level, *build):
        return IntervalComposer(variants, restriction, [level], modes, *build).floors(rows)[0]

    ours = floors(replace(level, **dict.fromkeys(shares, share)))
    np.testing.assert_allclose(ours, floors(level, lighter), rtol=1e-9)
    whole = floors(level)
    assert (ours <= whole).all()
    assert (ours < whole).any()


def test_a_floor_counts_in_the_objective_and_not_in_the_pace(graph):
    variants = variants_of(graph, 1)

    def shared(*arguments):
        section = stacked_section(*arguments)
        section.floor_seconds = tuple(0.5 * s for s in section.seconds)
        for edge in section.edges:
            edge.floor = 0.5
        return section

    rows = [(v, 0) for v in range(variants.num)]
    ours = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], shared)
    theirs = IntervalComposer(variants, NO_RESTRICTION, [Level()], ["none"], stacked_section)
    expected = theirs.tables(rows)
    for key, table in ours.tables(rows).items():
        found = np.isfinite(expected[key].cost)
        np.testing.assert_allclose(table.cost, 0.5 * expected[key].cost, rtol=1e-9)
        np.testing.assert_allclose((table.pace_s + table.step_s)[found], expected[key].cost[found], rtol=1e-9)


MODES = ["none", "selective", "full"]
PRICED = [Level(), Level(1e-9, 4e-9), Level(1e-7, 1e-7)]


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_floors_are_what_nothing_undercuts(axes):
    """Where bytes have no price, or there is one mode, they are the floors of the intervals; elsewhere at most that, as
    each op may have a mode of its own; what runs again counts. All are rounded down."""

    def check_rounded(floors, exact):
        np.testing.assert_allclose(floors, exact, rtol=1e-4)
        assert (floors[np.isfinite(exact)] < exact[np.isfinite(exact)]).all()

    graph = capture(*ZOO["gpt"](64, device="meta", layers=3))
    composer = IntervalComposer(variants_of(graph, axes), NO_RESTRICTION, PRICED, MODES)
    rows = [(v, level) for v in range(composer.cases.num) for level in range(len(PRICED))]
    floors, run = composer.floors(rows)
    made = composer.intervals(rows)
    np.testing.assert_array_equal(run, made.run)
    possible = np.isfinite(made.floor_s)
    np.testing.assert_array_equal(np.isfinite(floors), possible)
    free = [place for place, (_, level) in enumerate(rows) if not PRICED[level].byte]
    check_rounded(floors[:, free], made.floor_s[:, free])
    assert (floors[possible] < made.floor_s[possible]).all()
    for mode in MODES:
        alone = IntervalComposer(variants_of(graph, axes), NO_RESTRICTION, PRICED, [mode])
        check_rounded(alone.floors(rows)[0], alone.intervals(rows).floor_s)


def test_cases_of_equal_prices_share_their_tables():
    graph = capture(*ZOO["gpt"](64, device="meta", layers=3))
    composer = IntervalComposer(variants_of(graph, 1), NO_RESTRICTION, PRICED, MODES)
    twice = replace(composer, alike=[0] * composer.cases.num)
    first = twice.intervals([(0, 1), (1, 1)])
    np.testing.assert_array_equal(first.pace_s[:, 0], first.pace_s[:, 1])
    np.testing.assert_array_equal(first.pace_s[:, 0], composer.intervals([(0, 1)]).pace_s[:, 0])
    (table, *_) = twice.tables([(0, 2), (1, 2)]).values()
    assert table.cost.shape[-1] == 1
