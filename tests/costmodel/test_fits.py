"""Fits recover what made the times, in spite of noise, outliers and knees."""

from __future__ import annotations

import random

import pytest
from meshwright.costmodel.fitting import fit_optimizer, fit_pieces, fit_wire

SIZES = [2.0**k for k in range(10, 27)]


# ---- fits


@pytest.mark.parametrize("seed", range(5))
def test_a_line_is_recovered_from_noise_and_outliers(seed: int) -> None:
    noise = random.Random(seed)
    points = [(x, (1e-4 + 1e-9 * x) * noise.uniform(0.97, 1.03)) for x in SIZES]
    points[5] = (points[5][0], 5 * points[5][1])  # one size was disturbed
    pieces, residual = fit_pieces(points)
    assert len(pieces) == 1
    assert pieces[0].alpha_s == pytest.approx(1e-4, rel=0.05)
    assert pieces[0].beta_s_per_byte == pytest.approx(1e-9, rel=0.05)
    assert residual < 0.05


def test_a_knee_makes_two_pieces_and_lies_where_the_lines_change() -> None:
    knee = 2.0**18

    def seconds(x: float) -> float:
        return 1e-4 + 1e-10 * x if x <= knee else 1e-3 + 5e-10 * x

    pieces, residual = fit_pieces([(x, seconds(x)) for x in SIZES])
    assert len(pieces) == 2
    assert knee <= pieces[1].from_bytes <= 2 * knee
    assert pieces[0].alpha_s == pytest.approx(1e-4, rel=0.02)
    assert pieces[1].beta_s_per_byte == pytest.approx(5e-10, rel=0.02)
    assert residual < 0.02


@pytest.mark.parametrize("seed", range(20))
def test_pieces_never_fall_and_never_have_negative_constants(seed: int) -> None:
    noise = random.Random(seed)
    points = [(x, 10 ** noise.uniform(-4, -2)) for x in SIZES[::2]]
    pieces, _ = fit_pieces(points)
    assert len([p for p in pieces if p.from_bytes < points[-1][0]]) <= 4
    assert pieces[0].from_bytes == 0
    assert all(p.alpha_s >= 0 and p.beta_s_per_byte >= 0 for p in pieces)
    wire = fit_wire("all_reduce", 4, 4, 1, dict(points), 9, "backend")
    for a, b in zip(wire.pieces, wire.pieces[1:]):
        assert b.alpha_s + b.beta_s_per_byte * b.from_bytes >= (a.alpha_s + a.beta_s_per_byte * b.from_bytes) * (
            1 - 1e-9
        )


def test_a_disturbed_tail_does_not_make_larger_messages_free() -> None:
    def seconds(x: float) -> float:
        return 1e-4 + 1e-10 * x if x <= 2.0**16 else 1e-3 + 1e-9 * x

    points = [(x, seconds(x)) for x in SIZES]
    points[-3:] = [(x, 1.3 * seconds(SIZES[-1])) for x, _ in points[-3:]]  # three sizes took the same time
    pieces, residual = fit_pieces(points)
    at_last = pieces[-2].alpha_s + pieces[-2].beta_s_per_byte * SIZES[-1]
    assert pieces[-2].beta_s_per_byte < 1e-11  # what was measured is kept
    assert residual < 0.05
    assert pieces[-1].from_bytes == SIZES[-1]
    assert pieces[-1].alpha_s + pieces[-1].beta_s_per_byte * SIZES[-1] == pytest.approx(at_last)
    wire = fit_wire("all_reduce", 4, 4, 1, dict(points), 9, "backend")
    assert wire.seconds(8 * SIZES[-1]) == pytest.approx(seconds(8 * SIZES[-1]), rel=0.4)


def test_a_tail_that_is_flatter_for_good_stays_as_measured() -> None:
    points = [(x, 1e-4 + 2e-9 * x if x <= 2.0**16 else 1.6e-4 + 1e-9 * x) for x in SIZES]
    pieces, _ = fit_pieces(points)
    assert pieces[-1].from_bytes < SIZES[-1]
    assert pieces[-1].beta_s_per_byte == pytest.approx(1e-9, rel=0.05)


def test_a_fit_needs_two_sizes_and_positive_times() -> None:
    with pytest.raises(ValueError, match="needs two message sizes, but got 1"):
        fit_pieces([(1024.0, 1e-3)])
    with pytest.raises(ValueError, match=r"but got \(2048.0, nan\)"):
        fit_pieces([(1024.0, 1e-3), (2048.0, float("nan"))])


def test_the_rate_of_an_optimizer_separates_tensors_from_bytes() -> None:
    rows = [(n, n * b, 20e-6 * n + 3e-10 * n * b) for n, b in ((64, 4096), (32, 65536), (16, 2**20), (2, 2**24))]
    rate = fit_optimizer("AdamW", rows, 12)
    assert rate.alpha_s == pytest.approx(20e-6, rel=1e-6)
    assert rate.beta_s_per_byte == pytest.approx(3e-10, rel=1e-6)
