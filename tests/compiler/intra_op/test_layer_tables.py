"""Tables of layers against all assignments of their choices; layers that are too wide; loops that Python unrolled."""

import itertools

import meshwright as mw
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.intra_op.restriction import NO_RESTRICTION
from meshwright.compiler.intra_op.solver.elimination_order import Limits
from meshwright.compiler.intra_op.vectorised import layer_tables, repeats
from meshwright.compiler.intra_op.vectorised.cases import Case, Cases
from meshwright.compiler.intra_op.vectorised.interval_tables import IntervalComposer
from meshwright.compiler.intra_op.vectorised.layer_tables import Level, Terms, Weights
from meshwright.costmodel.cluster import Cluster
from torch import nn

from tests.support.zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")
LEVELS = [
    Level(),
    Level(byte=1e-13, saved_byte=3e-13),
    Level(step_share=0.0),
    Level(step_share=5.0, gradient_share=0.2),
]


def composer(asked, meshes, modes=("none",)):
    graph = capture(*asked)
    cases = tuple(Case(mesh, 0, m) for mesh in meshes for m in (1, 4))
    made = Cases(graph, cluster_layers(graph), V100, "AdamW", 64, cases)
    return IntervalComposer(made, NO_RESTRICTION, LEVELS, modes)


@pytest.mark.parametrize("mesh", [(2,), (8,)])
def test_floors_are_the_optimum_and_never_above_it(mesh):
    """The check is sharp: 0.1 % too high or too low fails."""
    made = composer(ZOO["mlp"](64, device="meta"), [mesh], ("none", "full"))
    checked = 0
    for layer in range(len(made.cases.layering.layers)):
        template = made.template(layer)
        kept = {i for border in template.borders for i in border.operators}
        ranges = [range(1 if i in kept else len(terms.seconds)) for i, terms in enumerate(template.operators)]
        if np.prod([len(r) for r in ranges]) > 300_000:
            continue
        chosen = list(np.stack(list(itertools.product(*ranges))).T)
        for case, (number, level) in itertools.product(range(made.cases.num), enumerate(LEVELS)):
            weights = Weights.of([(case, level)])
            floors, tables = template.floors(weights)[..., 0], template.tables(weights)
            assert (floors <= tables.cost[..., 0]).all()
            for into, out in np.argwhere(np.isfinite(floors)):
                full = list(chosen)
                for border, state in zip(template.borders, (into, out)):
                    for operator, choices in zip(border.operators, border.choices.T):
                        full[operator] = np.full(len(chosen[0]), choices[border.of_state[state]])
                best = np.inf
                for mode in range(len(template.modes)):
                    cost = np.asarray(_objective(template, full, mode, case, level))
                    best = min(best, float(cost.min()))
                assert floors[into, out] <= best * (1 + 1e-6)
                assert tables.cost[into, out, 0] == pytest.approx(best, rel=1e-9)
                if number != 1:  # without a price on bytes one mode is the best of all ops
                    assert floors[into, out] >= best * (1 - 1e-3)
                checked += 1
    assert checked > 20


def _objective(template, chosen, mode, case, level):
    """[assignments] what a stage is sure to pay for each under a level."""
    total = np.zeros(len(chosen[0]))

    def add(terms, at, where=1.0):
        seconds = terms.seconds[(*at, case)]
        shares = level.step_share, level.weight_share, 1 - level.step_share * (1 - level.gradient_share)
        for share, part in zip(shares, (terms.step_s, terms.weight_s, terms.gradient_s)):
            seconds = seconds if part is None else seconds - (1 - share) * part[(*at, case)]
        again, saved = terms.again[mode], terms.saved[mode]
        seconds = seconds if again is None else seconds + again[(*at, case)]
        seconds = seconds if terms.sure is None else seconds * terms.sure[(*at, case)]
        held = 0.0 if terms.resident is None else terms.resident[(*at, case)] * (level.byte + layer_tables.TIE)
        kept = 0.0 if saved is None else saved[(*at, case)] * (level.saved_byte + layer_tables.TIE)
        total[:] += np.where(where, seconds + held + kept, 0.0)

    for terms, choice in zip(template.operators, chosen):
        add(terms, (choice,))
    for edge, terms in zip(template.section.edges, template.tensors):
        wanted = []
        for k, target in edge.consumers:
            state = target[chosen[k]]
            add(
                terms,
                (edge.source[chosen[edge.producer]], state),
                np.all([state != o for o in wanted] or [True], axis=0),
            )
            wanted.append(state)
    return total


def test_what_is_less_in_all_corners_is_less_at_every_level():
    """So presolve may leave out the other choice. The integers are small, so that many pairs can be compared."""
    rng, none, one = np.random.default_rng(0), (None,), np.zeros(1, dtype=np.intp)
    levels = [*LEVELS, Level(step_share=0.0, weight_share=0.0), Level(gradient_share=0.2), Level(step_share=1.8)]
    compared = 0
    for _ in range(200):
        weight, other, gradient, update = rng.integers(0, 3, (4, 6, 1)).astype(float)
        terms = Terms(weight + other + gradient + update, None, gradient + update, weight, gradient, None, *[none] * 3)
        corners = layer_tables._corners(terms)
        costs = np.stack([terms.objective(Weights.of([(0, level)]), one, [0])[:, 0] for level in levels], axis=1)
        for a, b in itertools.permutations(range(6), 2):
            if (corners[a] <= corners[b]).all():
                assert (costs[a] <= costs[b] + 1e-9).all()
                compared += 1
    assert compared > 200


class Scan(nn.Module):
    """A state-space model as Python unrolls it: one tensor with a select per step."""

    def __init__(self, steps=24, width=64):
        super().__init__()
        self.steps, self.inner, self.decay = steps, nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x, y):
        u, a = self.inner(x), torch.sigmoid(self.decay(x))
        state, outs = torch.zeros_like(u[:, 0]), []
        for t in range(self.steps):
            state = a[:, t] * state + u[:, t]
            outs.append(torch.tanh(state))
        return F.mse_loss(self.outer(torch.stack(outs, 1)), y)


@pytest.fixture(scope="module")
def scan():
    with torch.device("meta"):
        x = torch.zeros(64, 24, 64)
        return composer((Scan(), (x, x)), [(4,), (8,)])


def test_an_unrolled_loop_is_one_step(scan, monkeypatch):
    wide = [scan.template(k) for k in range(len(scan.cases.layering.layers))]
    template = max(wide, key=lambda one: 0 if one.whole is None else len(one.whole[0].names))
    assert template.whole is not None, "repeats are merged"
    assert len(template.section.names) < 0.5 * len(template.whole[0].names)
    weights = Weights.of([(case, level) for case in range(scan.cases.num) for level in LEVELS[:2]])
    tables, floors = template.tables(weights), template.floors(weights)
    monkeypatch.setattr(repeats, "_WORTH", 10**9)
    exact = scan._template(template.layer)
    assert exact.whole is None
    assert exact.lower is None
    expected = exact.tables(weights)
    # below the optimum of the layer with a choice for every step, above it by little, and a decision of that layer
    assert (floors <= expected.cost * (1 + 1e-6)).all()
    finite = np.isfinite(expected.cost)
    assert (tables.cost[finite] >= expected.cost[finite] * (1 - 1e-9)).all()
    best = expected.cost.min(axis=(0, 1))
    np.testing.assert_allclose(tables.cost.min(axis=(0, 1)), best, rtol=0.01)
    assert (floors.min(axis=(0, 1)) >= 0.95 * best).all()
    for row, cell in enumerate(tables.cost.reshape(-1, len(weights.case)).argmin(axis=0)):
        into, out = np.unravel_index(cell, tables.cost.shape[:2])
        chosen, mode = tables.choices(row, into, out)
        section, whole = template.decision(chosen)
        assert section.names == exact.section.names
        sums = exact.add_up([np.array([c]) for c in whole], np.array([mode]), weights.case[[row]])
        np.testing.assert_allclose([float(s[0]) for s in sums], tables.values[1:, into, out, row], rtol=1e-9)


@pytest.mark.parametrize(("meshes", "cells"), [([(8,)], 2**5), ([(2, 4), (4, 2)], 2**8)])
def test_a_layer_that_is_too_wide_keeps_good_choices(meshes, cells, monkeypatch):
    exact = composer(ZOO["gpt"](64, device="meta", layers=1), meshes)
    monkeypatch.setattr(layer_tables, "EXACT", Limits(cells))
    monkeypatch.setattr(layer_tables, "REDUCED", Limits(cells))
    monkeypatch.setattr(layer_tables, "RELAXED_CELLS", cells)
    monkeypatch.setattr(layer_tables, "PROPOSED_CELLS", cells)
    reduced = composer(ZOO["gpt"](64, device="meta", layers=1), meshes)
    rows = [(case, level) for case in range(exact.cases.num) for level in range(len(LEVELS))]
    expected, found = exact.intervals(rows), reduced.intervals(rows)
    below, _ = reduced.floors(rows)
    assert any(reduced.template(k).groups for k in range(len(reduced.cases.layering.layers)))
    finite = np.isfinite(expected.cost)
    assert (found.cost[finite] >= expected.cost[finite] * (1 - 1e-9)).all()
    assert (found.floor_s <= expected.floor_s * (1 + 1e-6)).all()
    assert (below <= expected.floor_s * (1 + 1e-6)).all()
    whole = expected.run[0, -1]
    np.testing.assert_allclose(found.cost[whole], expected.cost[whole], rtol=0.05)
    assert (below[whole] >= 0.7 * expected.floor_s[whole]).all()


class Codebook(nn.Module):
    """A vector quantizer: its code is read by five ops, its input by four."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder, self.codes = nn.Linear(8, 16), nn.Embedding(32, 8)

    def forward(self, x):
        z = self.encoder(x)
        index = torch.cdist(z.detach().flatten(0, 1), self.codes.weight.detach()).argmin(1).view(z.shape[:-1])
        q = self.codes(index)
        loss = F.mse_loss(self.decoder(z + (q - z).detach()), x)
        return loss + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


def test_no_graph_is_too_wide_for_a_plan():
    with torch.device("meta"):
        plan = mw.plan(Codebook(), V100, example_inputs=(torch.zeros(8, 8, 16),), global_batch=64)
    assert plan.prediction.step_s > 0
