"""Prices from measurements: wires by form, curves and surfaces by kind, dtype and direction; and where each is from."""

import math
import operator
import pickle
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.compiler.intra_op.vectorised.pricing import Tariff
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.collectives import _p2p, mesh_prices, p2p_seconds
from meshwright.costmodel.compute import measured_backward, op_price
from meshwright.costmodel.curves import Curve, Surface
from meshwright.costmodel.hardware import Device
from meshwright.costmodel.measured import CollectiveMeasurement, OpTime, OptimizerRate, Piece

CPU = Cluster.preset("cpu", hosts=2)  # 2 × 8, Gloo: one analytic line for each kind
MESHES = [(2, 8), (16,), (4, 4), (2, 2, 4), (8, 2), (4,), (2, 2), (3,), (2, 4)]


def wire(kind, form, *lines, algorithm="backend"):
    """lines: (from_bytes, alpha_s, beta_s_per_byte)."""
    return CollectiveMeasurement(kind, algorithm, *form, tuple(Piece(*line) for line in lines), (), 0.0, 1)


def form_of(mesh, axis):
    """(size, members, groups) of an axis on 8-device hosts."""
    groups = mesh.groups(axis)
    return len(groups[0]), max(sum(d // 8 == h for d in g) for g in groups for h in (0, 1)), len(groups)


def axes():
    for shape in MESHES:
        mesh = Mesh.of(CPU, 0, shape)
        yield from ((mesh, axis) for axis in range(len(shape)))


# ---- collectives


def test_a_wire_of_the_very_form_is_the_price():
    pieces = ((0, 1e-4, 1e-9), (1e6, 6e-4, 5e-10))
    cluster = replace(CPU, wires=(wire("all_reduce", (4, 4, 1), *pieces),))
    mesh = Mesh.of(cluster, 0, (4,))
    price, plain = mesh_prices(cluster, mesh)[0], mesh_prices(CPU, mesh)[0]
    assert price.source("all_reduce") == price.source("all_reduce_max") == "measured"
    assert price.seconds("all_reduce", 1e3) == pytest.approx(1e-4 + 1e-6)
    assert price.seconds("all_reduce", 1e7) == pytest.approx(6e-4 + 5e-3)
    assert price.seconds("all_reduce_max", 1e7) == price.seconds("all_reduce", 1e7)
    assert price.seconds("all_reduce", 0) == 0
    assert price.coefficients("all_reduce") == (6e-4, 5e-10)
    assert price.coefficients("all_reduce", 1e3) == (1e-4, 1e-9)
    assert price.source("all_gather") == "analytic"
    assert price.seconds("all_gather", 1e7) == plain.seconds("all_gather", 1e7)
    assert plain.source("all_reduce") == "analytic"


LINES = st.tuples(st.floats(1, 1e8), st.floats(0, 1e-2), st.floats(1e-12, 1e-8))  # from bytes on, a jump, β


@given(
    st.lists(LINES, max_size=3, unique_by=lambda line: line[0]),
    st.lists(st.floats(1, 1e8), min_size=1, max_size=4),
    st.lists(st.floats(1, 1e8), max_size=2),
    st.floats(1, 1e8),
)
@settings(max_examples=200, deadline=None)
def test_no_message_is_cheaper_per_byte_than_the_least_rate(lines, parts, others, most):
    """Shares of a message at the least rate of any that they may be in add up to no more than it takes, whatever was
    measured, whoever else might be in it and however little large parts count; and to all of it where there is one."""
    steps, lines = sorted(lines), [(0.0, 1e-5, 1e-9)]
    for start, jump, beta in steps:  # seconds do not fall
        _, a, b = lines[-1]
        lines.append((start, max(0.0, a + (b - beta) * start) + jump, beta))
    price = mesh_prices(replace(CPU, wires=(wire("all_gather", (4, 4, 1), *lines),)), Mesh.of(CPU, 0, (4,)))[0]
    total, tariff = sum(parts), Tariff([price.pieces_of("all_gather")])
    largest, counted = sum([*parts, *others]), sum(min(part, most) for part in [*parts, *others])
    spreads = [(largest, counted, max(1.0, part / most)) for part in parts]
    rates = [price.least_rate("all_gather", part, *spread) for part, spread in zip(parts, spreads)]
    assert sum(map(operator.mul, parts, rates)) <= price.seconds("all_gather", total) * (1 + 1e-9)
    assert price.least_rate("all_gather", total, total) * total == pytest.approx(price.seconds("all_gather", total))
    for part, rate, spread in zip(parts, rates, spreads):
        assert tariff.least_rate(np.array([part]), *spread) == pytest.approx([rate])


@given(st.sampled_from(list(axes())), st.sampled_from(list(axes())), st.floats(0.1, 10), st.floats(1, 1e9))
@settings(max_examples=150, deadline=None)
def test_another_form_is_scaled_by_the_analytic_prices(measured, asked, factor, nbytes):
    """If what was measured is a multiple of its analytic price, so is what is derived from it."""
    (mesh, axis), (other, at) = measured, asked
    line = mesh_prices(CPU, mesh)[axis].coefficients("all_gather")
    form, target = form_of(mesh, axis), form_of(other, at)
    cluster = replace(CPU, wires=(wire("all_gather", form, (0, factor * line[0], factor * line[1])),))
    price, plain = mesh_prices(cluster, other)[at], mesh_prices(CPU, other)[at]
    same_level = (form[1] < form[0]) == (target[1] < target[0])
    expected = "measured" if form == target else "scaled" if same_level else "analytic"
    assert price.source("all_gather") == expected
    times = factor if same_level else 1.0
    assert price.seconds("all_gather", nbytes) == pytest.approx(times * plain.seconds("all_gather", nbytes))
    a, b = price.coefficients("all_gather", nbytes)
    assert a + b * nbytes == pytest.approx(price.seconds("all_gather", nbytes))


def test_the_nearest_form_answers():
    near, far = wire("all_reduce", (4, 4, 2), (0, 1.0, 0.0)), wire("all_reduce", (2, 2, 1), (0, 9.0, 0.0))
    mesh = Mesh.of(CPU, 0, (4,))
    for wires in ((near, far), (far, near)):
        price = mesh_prices(replace(CPU, wires=wires), mesh)[0]
        # a switch: groups beside each other do not matter, so the forms of 4 have the same analytic price
        assert price.seconds("all_reduce", 1e6) == pytest.approx(1.0)
        assert price.source("all_reduce") == "scaled"


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e-2), st.floats(0, 1e-8)), min_size=1, max_size=4),
    st.sampled_from([(8,), (2,), (2, 4), (2, 2)]),
)
@settings(deadline=None)
def test_scaled_prices_never_fall(lines, shape):
    """Latency and rate are scaled apart: a measured latency far above the analytic one stays in proportion."""
    lines = [(k * 1e5, a, b) for k, (a, b) in enumerate(lines)]
    for k in range(1, len(lines)):  # valid: no fall at a join
        start, a, b = lines[k]
        lines[k] = (start, max(a, lines[k - 1][1] + lines[k - 1][2] * start - b * start), b)
    cluster = replace(CPU, wires=(wire("all_reduce", (4, 4, 1), *lines),))
    mesh = Mesh.of(CPU, 0, shape)
    price, plain = mesh_prices(cluster, mesh)[0], mesh_prices(CPU, mesh)[0].coefficients("all_reduce")
    own = mesh_prices(CPU, Mesh.of(CPU, 0, (4,)))[0].coefficients("all_reduce")
    assert price.source("all_reduce") == "scaled"
    seconds = [price.seconds("all_reduce", n) for n in (1, 1e3, 9e4, 1.1e5, 2e5, 2.1e5, 3.5e5, 1e7)]
    assert all(b >= 0.999 * a for a, b in pairwise(seconds))
    assert price.seconds("all_reduce", 1e-9) == pytest.approx(lines[0][1] * plain[0] / own[0])
    assert price.coefficients("all_reduce")[1] == pytest.approx(lines[-1][2] * plain[1] / own[1])


def test_all_algorithms_take_the_cheapest_wire():
    own, tree = wire("all_reduce", (4, 4, 1), (0, 1e-3, 1e-9)), wire("all_reduce", (4, 4, 1), (0, 1e-5, 1e-8))
    cluster = replace(CPU, wires=(own, replace(tree, algorithm="tree")))
    mesh = Mesh.of(cluster, 0, (4,))
    backend, every = mesh_prices(cluster, mesh)[0], mesh_prices(cluster, mesh, "all")[0]
    assert backend.seconds("all_reduce", 1e3) == pytest.approx(1e-3, rel=0.01)
    assert every.seconds("all_reduce", 1e3) == pytest.approx(1e-5 + 1e-5)
    assert every.seconds("all_reduce", 1e7) == backend.seconds("all_reduce", 1e7)
    assert every.coefficients("all_reduce")[1] == 1e-9


def test_sends_by_how_many_at_once():
    inside, across = wire("send", (2, 2, 1), (0, 1e-5, 1e-10)), wire("send", (2, 1, 1), (0, 1e-3, 2e-9))
    cluster = replace(CPU, wires=(inside, across))
    assert p2p_seconds(cluster, 0, 1, 1e6) == pytest.approx(1e-5 + 1e-4)
    assert p2p_seconds(cluster, 0, 8, 1e6) == pytest.approx(1e-3 + 2e-3)
    exact, scaled = (_p2p(cluster, 0, 1, groups)[1] for groups in (1, 4))
    assert exact.exact
    assert not scaled.exact
    assert _p2p(CPU, 0, 1, 1)[1] is None
    # latency as it was, a quarter of the rate
    assert p2p_seconds(cluster, 0, 8, 1e6, concurrent=4) == pytest.approx(1e-3 + 4 * 2e-3)
    four = replace(CPU, wires=(across, replace(across, groups=4, pieces=(Piece(0, 0.5, 0.0),))))
    assert p2p_seconds(four, 0, 8, 1e6, concurrent=4) == 0.5
    assert p2p_seconds(cluster, 3, 3, 1e6) == 0


@given(
    st.lists(st.tuples(st.floats(1, 1e8), st.floats(0, 1e-3), st.floats(0, 1e-8)), min_size=1, max_size=4),
    st.lists(st.floats(0, 1e9), min_size=2, max_size=8),
)
@settings(deadline=None)
def test_a_wire_never_falls_or_is_refused(pieces, sizes):
    ordered = sorted({start: (start, a, b) for start, a, b in pieces}.values())
    lines = [(0.0, *ordered[0][1:]), *ordered[1:]]
    falls = any(c + d * start < 0.99 * (a + b * start) for (_, a, b), (start, c, d) in pairwise(lines))
    if falls:
        with pytest.raises(ValueError, match=r"wire all_reduce of 2 .* do not fall"):
            wire("all_reduce", (2, 2, 1), *lines)
        return
    seconds = [wire("all_reduce", (2, 2, 1), *lines).seconds(n) for n in sorted(sizes)]
    assert all(b >= 0.98**3 * a for a, b in pairwise(seconds))


# ---- ops


def device(**fields):
    base = Device("d", 2**30, (("float32", 1e11), ("bfloat16", 2e11)), 1e10, 1e-6, "test", kind="cpu")
    return replace(base, **fields)


F32 = Curve("matmul", "float32", "flops", ((1e3, 2e-6), (1e9, 2e-2)))
BACK = replace(F32, direction="backward", points=((1e3, 5e-6), (1e9, 5e-2)))


def test_the_own_dtype_comes_first():
    own = replace(F32, dtype="bfloat16", points=((1e3, 7e-6), (1e9, 7e-2)))
    both = device(curves=(F32, own))
    assert op_price("matmul", 1e9, 1, torch.bfloat16, both).seconds == pytest.approx(7e-2)
    assert op_price("matmul", 1e9, 1, torch.float32, both).seconds == pytest.approx(2e-2)
    # without its own: fp32 scaled by the peaks
    assert op_price("matmul", 2e9, 1, torch.bfloat16, device(curves=(F32,))).seconds == pytest.approx(2e-2)
    # only another one there
    assert op_price("matmul", 1e9, 1, torch.float32, device(curves=(own,))).seconds == pytest.approx(14e-2)


def test_the_backward_has_its_own_curve():
    both = device(curves=(F32, BACK))
    assert measured_backward("matmul", torch.float32, both)
    assert op_price("matmul", 1e9, 1, "float32", both, direction="backward").seconds == pytest.approx(5e-2)
    only = device(curves=(F32, replace(F32, kind="pointwise", variable="bytes")))
    assert not measured_backward("matmul", "float32", only)
    assert op_price("matmul", 1e9, 1, "float32", only, direction="backward").seconds == pytest.approx(4e-2)
    forward = op_price("pointwise", 0, 1.5e6, "float32", only).seconds
    assert op_price("pointwise", 0, 1e6, "float32", only, direction="backward").seconds == forward
    # a backward curve alone says nothing about the forward
    assert op_price("matmul", 1e9, 1, "float32", device(curves=(BACK,))).source == "roofline"
    with pytest.raises(ValueError, match="forward or backward"):
        op_price("matmul", 1e9, 1, "float32", both, direction="sideways")


def test_sources_of_op_prices():
    measured = device(curves=(F32,))
    for flops, source in ((1e6, "interpolated"), (1e12, "extrapolated"), (1e2, "extrapolated")):
        assert op_price("matmul", flops, 1, "float32", measured).source == source
    assert op_price("matmul", 1e6, 1, "float32", device()).source == "roofline"
    assert op_price("view", 0, 0, "float32", measured).source == "free"
    # the guard outside the grid: a curve that ends at an impossible rate is held by the peak
    fast = device(curves=(replace(F32, points=((1e3, 1e-9), (1e6, 1e-8))),))
    assert op_price("matmul", 1e9, 1, "float32", fast).seconds == pytest.approx(1e9 / 1e11)
    # in-cache bytes are faster than the memory: what was measured counts
    cached = device(curves=(Curve("pointwise", "float32", "bytes", ((1e3, 1e-8), (1e6, 1e-5))),))
    assert op_price("pointwise", 0, 1e6, "float32", cached).seconds == pytest.approx(1e-5)


GRID = ((64.0, 256.0, 1024.0), (128.0, 512.0), (32.0, 128.0, 2048.0))


def surface(time, **fields):
    rows, inner, cols = GRID
    seconds = tuple(time(r, i, c) for r in rows for i in inner for c in cols)
    return replace(Surface("matmul", "float32", rows, inner, cols, seconds), **fields)


def matmul(rows, inner, cols, on, dtype="float32", **fields):
    flops = 2.0 * rows * inner * cols
    moved = 4.0 * (rows * inner + inner * cols + rows * cols)
    return op_price("matmul", flops, moved, dtype, on, shapes=((rows, inner), (cols, inner), (rows, cols)), **fields)


def power(r, i, c):
    return 1e-9 * r**0.9 * i**0.8 * c**0.7


@given(st.floats(64, 1024), st.floats(128, 512), st.floats(32, 2048))
@settings(deadline=None)
def test_a_surface_is_exact_for_products_of_powers(rows, inner, cols):
    found = surface(power)
    assert found.covers(rows, inner, cols)
    assert found.at(rows, inner, cols, 1e-6) == pytest.approx(power(rows, inner, cols))


@given(
    st.lists(st.floats(1e-6, 1e-1), min_size=18, max_size=18),
    st.tuples(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(1, 1e5)),
    st.floats(1, 4),
)
@settings(deadline=None)
def test_a_surface_stays_between_its_points_and_grows_outside(seconds, sizes, more):
    found = Surface("matmul", "float32", *GRID, tuple(seconds))
    inside = [min(max(size, lines[0]), lines[-1]) for size, lines in zip(sizes, GRID)]
    at = found.at(*inside, 1e-6)
    assert min(seconds) * 0.999 <= at <= max(seconds) * 1.001
    above = [lines[-1] * more for lines in GRID]
    assert found.at(*above, 1e-6) == pytest.approx(seconds[-1] * more**3)
    below = found.at(*(lines[0] / more for lines in GRID), 1e-6)
    assert min(1e-6, seconds[0]) * 0.999 <= below <= seconds[0] * 1.001


def test_matmuls_are_read_from_the_surface():
    on = device(surfaces=(surface(power),), curves=(F32,))
    price = matmul(256, 512, 128, on)
    assert (price.seconds, price.source) == (pytest.approx(power(256, 512, 128)), "interpolated")
    # a batch counts as rows; the inner size comes from the FLOPs
    batched = op_price("matmul", 2.0 * 4 * 64 * 512 * 128, 1, "float32", on, shapes=((4, 64, 512), (4, 64, 128)))
    assert batched.seconds == pytest.approx(price.seconds)
    assert Surface.sizes(2.0 * 6 * 7, (6,)) == (1.0, 7.0, 6.0)
    assert matmul(8192, 512, 128, on).source == "extrapolated"
    assert matmul(8192, 512, 128, on).seconds >= power(1024, 512, 128) * 7.99
    # without shapes: the curve
    assert op_price("matmul", 1e9, 1, "float32", on).seconds == pytest.approx(2e-2)
    # a curve of the own dtype is nearer than a surface of another
    bf16 = replace(F32, dtype="bfloat16")
    assert (
        matmul(256, 512, 128, device(surfaces=(surface(power),), curves=(bf16,)), "bfloat16").source == "interpolated"
    )
    scaled = matmul(256, 512, 128, device(surfaces=(surface(power),)), "bfloat16").seconds
    assert scaled == pytest.approx(power(256, 512, 128) / 2)
    backward = surface(lambda r, i, c: 3 * power(r, i, c), direction="backward")
    both = device(surfaces=(surface(power), backward))
    assert matmul(256, 512, 128, both, direction="backward").seconds == pytest.approx(3 * power(256, 512, 128))
    assert measured_backward("matmul", "float32", both)
    # no curve or surface: two times the forward
    assert matmul(64, 128, 32, device(), direction="backward").seconds == 2 * matmul(64, 128, 32, device()).seconds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": (64.0, 64.0, 1024.0)}, "rows are positive and rising"),
        ({"cols": (0.0, 128.0, 2048.0)}, "cols are positive and rising"),
        ({"inner": (128.0,)}, "9 grid points, but got 18"),
        ({"seconds": (math.nan,) * 18}, "positive and finite"),
        ({"direction": "up"}, "forward or backward"),
    ],
)
def test_bad_surfaces(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        surface(power, **fields)
    assert "surface matmul/float32" in str(error.value)


# ---- values


def test_lookups_by_name_and_signature():
    times = tuple(OpTime(f"aten.add.Tensor(f32[{n}]*)", n * 1e-6, 1e-6, 2e-6, 3) for n in range(1, 50))
    on = device(op_times=times, optimizers=(OptimizerRate("SGD", 1e-6, 1e-10, 0.1, 5),))
    assert on.op_time(times[17].signature) is times[17]
    assert times[17].backward_s == pytest.approx(3e-6)
    assert on.op_time("aten.mul.Tensor(f32[1])") is None
    assert on.optimizer_rate("SGD").alpha_s == 1e-6
    assert on.optimizer_rate("AdamW") is None
    half = OptimizerRate("SGD", 2e-6, 1e-10, 0.1, 5, "bfloat16")
    both = replace(on, optimizers=(*on.optimizers, half))
    assert (on.optimizer_rate("SGD", 2), both.optimizer_rate("SGD", 4)) == (on.optimizers[0],) * 2
    assert (both.optimizer_rate("SGD", 2), replace(on, optimizers=(half,)).optimizer_rate("SGD")) == (half, half)
    copy = pickle.loads(pickle.dumps(on))
    assert set(copy.__dict__) == {field.name for field in fields(Device)}  # caches stay behind
    assert copy == on


def test_equal_devices_share_cached_prices_cheaply():
    times = tuple(OpTime(f"op{n}", 1e-6, 1e-6, 0.0, 1) for n in range(20))
    first, second = device(op_times=times), device(op_times=tuple(replace(time) for time in times))
    assert first == second
    assert {first: 1}[second] == 1
    assert first != replace(second, op_times=times[:-1])
    assert first != "a device"
    compared = []

    class Counted(OpTime):
        __hash__ = OpTime.__hash__

        def __eq__(self, other):
            compared.append(other)
            return OpTime.__eq__(self, other)

    counted = device(op_times=(Counted("op", 1e-6, 1e-6, 0.0, 1),))
    twin = device(op_times=(Counted("op", 1e-6, 1e-6, 0.0, 1),))
    prices = {counted: 1}
    for _ in range(5):
        assert prices[twin] == 1
    assert len(compared) == 1


def test_fingerprints_ignore_measurements():
    measured = replace(CPU, wires=(wire("send", (2, 2, 1), (0, 1e-5, 1e-10)),), provenance=(("torch", "1"),))
    assert measured.fingerprint() == CPU.fingerprint()
    assert measured != CPU
