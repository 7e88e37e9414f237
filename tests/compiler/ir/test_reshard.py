"""Conversions between specs: every pair of specs on small meshes, by execution, with their bytes and their
conjugates."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshwright.compiler.ir.reshard import LOCAL_STEPS, apply_steps, reshard, step_bytes, steps_between
from meshwright.compiler.ir.spec import PMAX, P, Pair, R, S, local_shape, parse_pair, parse_spec, spec_text
from meshwright.compiler.verification.lockstep import LockstepGroup
from meshwright.compiler.verification.split_execution import assemble, distribute

SHAPE = (12, 24)


def placements():
    return [R, P, S(0), S(1)]


def rank_of(comm, mesh) -> int:
    index = 0
    for axis, size in enumerate(mesh):
        index = index * size + comm.index(axis)
    return index


def parts_of(x, spec, mesh):
    return [part.clone() for part in distribute(x, spec, mesh, torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)])
def test_every_conversion_by_execution(mesh):
    x = torch.randn(SHAPE, dtype=torch.float64)
    specs = list(itertools.product(placements(), repeat=len(mesh)))
    group = LockstepGroup(mesh)
    for source, target in itertools.product(specs, specs):
        steps = steps_between(source, target)

        before = parts_of(x, source, mesh)
        parts = group.run(
            lambda comm, before=before, steps=steps: apply_steps(before[rank_of(comm, mesh)], steps, comm)
        )
        for part in parts:
            assert part.shape == local_shape(SHAPE, target, mesh), (source, target)
        torch.testing.assert_close(
            assemble(parts, target, mesh, 1e-9), x, msg=f"{spec_text(source)} to {spec_text(target)}: {steps}"
        )


def test_steps_are_few():
    assert [s.kind for s in steps_between((P,), (S(0),))] == ["reduce_scatter"]
    assert [s.kind for s in steps_between((S(0),), (S(1),))] == ["all_to_all"]
    assert [s.kind for s in steps_between((S(0), R), (S(0), S(1)))] == ["slice"]
    assert [s.kind for s in steps_between((S(0), S(0)), (S(0), R))] == ["all_gather"]
    assert [s.kind for s in steps_between((R, S(0)), (S(0), S(0)))] == ["all_gather", "slice", "slice"]
    assert steps_between((PMAX,), (R,))[0].kind == "all_reduce_max"
    with pytest.raises(ValueError, match="no conversion"):
        steps_between((R,), (PMAX,))


def test_bytes_follow_the_convention_of_the_prices():
    steps = steps_between((S(0), P), (R, S(1)))
    sizes = dict(step_bytes((S(0), P), steps, SHAPE, 4, (2, 2)))
    total = SHAPE[0] * SHAPE[1] * 4
    for step, size in sizes.items():
        assert (size == 0) == (step.kind in LOCAL_STEPS)
    gather = next(size for step, size in sizes.items() if step.kind == "all_gather")
    assert gather in (total, total // 2)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("R|R", "R|P"),
        ("P|R", "R|R"),
        ("S0|S0", "R|P"),
        ("R|R", "S1|S1"),
        ("R|P", "S0|S0"),
        ("S0|S0", "S1|S1"),
        ("P|R", "S0|S0"),
    ],
)
def test_the_backward_is_the_conjugate(source, target):
    """Value and cotangent each arrive in the placement that the other side's pair states."""
    mesh, a, b = (2,), parse_pair(source), parse_pair(target)
    x, g = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)

    values, cotangents = parts_of(x, a.value, mesh), parts_of(g, b.cotangent, mesh)

    def run(comm):
        local = values[comm.index(0)].requires_grad_()
        out = reshard(local, a, b)
        out.backward(cotangents[comm.index(0)])
        return out.detach(), local.grad

    parts = LockstepGroup(mesh).run(run)
    torch.testing.assert_close(assemble([v for v, _ in parts], b.value, mesh, 1e-9), x)
    torch.testing.assert_close(assemble([c for _, c in parts], a.cotangent, mesh, 1e-9), g)


def test_specs_and_pairs_round_trip_through_text():
    for text in ("", "R", "S0,R", "P,S12", "Pmax"):
        assert spec_text(parse_spec(text)) == text
    assert str(parse_pair("S0,R|S0,P")) == "S0,R|S0,P"
    assert parse_pair("R|P") == Pair((R,), (P,))
    for bad in ("X", "S", "S-1", "R;R"):
        with pytest.raises(ValueError, match="placement"):
            parse_spec(bad)
    with pytest.raises(ValueError, match="pair"):
        parse_pair("R,R|P")
