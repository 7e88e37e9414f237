import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from meshwright.costmodel import tables
from meshwright.costmodel.algorithms import HIERARCHICAL, levels_of
from meshwright.costmodel.cluster import Cluster, Device, Host, Link, Mesh, _local
from meshwright.costmodel.collectives import (
    ALGORITHMS,
    mesh_prices,
    p2p_seconds,
    steps_of,
)
from meshwright.costmodel.compute import op_price, op_seconds
from meshwright.costmodel.memory import OPTIMIZER_STATE, measured_state, parameter_bytes
from meshwright.costmodel.presets import PRESETS
from meshwright.costmodel.tables import Curve, Fit, Table, fit_alpha_beta
from meshwright.runtime.collectives.rounds import schedule_of
from messages import counted

# ---- the formulas against the rounds that really run, as tests/messages.py counts them

ROWS = [(kind, algorithm) for kind, names in ALGORITHMS.items() if kind != "send" for algorithm in names]


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize(("kind", "algorithm"), ROWS)
def test_steps_against_the_rounds(kind, algorithm, p):
    if kind != "all_reduce" and algorithm in ("recursive_doubling", "recursive_halving") and p & (p - 1):
        with pytest.raises(ValueError, match="powers of two"):
            steps_of(kind, algorithm, p)
        return
    d = 8 * p
    wire = counted(schedule_of(kind, algorithm, p), d)
    steps = steps_of(kind, algorithm, p)
    assert steps.rounds == wire.rounds
    assert steps.sent * d == pytest.approx(wire.sent, rel=1e-12)
    assert steps.incast == wire.incast
    assert steps.messages == wire.messages


@pytest.mark.parametrize(("hosts", "members"), [(2, 1), (2, 2), (3, 4), (4, 3), (5, 2), (8, 8)])
@pytest.mark.parametrize(("kind", "between"), [(kind, name) for kind, names in HIERARCHICAL.items() for name in names])
def test_hierarchical_steps_against_the_rounds(kind, between, hosts, members):
    d = 8 * hosts * members
    schedule = schedule_of(kind, "hierarchical", hosts * members, members=members, between=between)
    inner = counted(schedule, d, lambda a, b: a // members == b // members)
    outer = counted(schedule, d, lambda a, b: a // members != b // members)
    adapter = counted(schedule, d, lambda a, b: a // members != b // members, per=members)
    levels = levels_of(kind, between, hosts, members)
    assert (levels.within.rounds, levels.within.messages) == (inner.rounds, inner.messages)
    assert (levels.between.rounds, levels.between.messages) == (outer.rounds, outer.messages)
    assert levels.within.sent * d == pytest.approx(inner.sent)
    assert levels.between.sent * d == pytest.approx(outer.sent)
    assert levels.flows * levels.between.sent * d == pytest.approx(adapter.sent)
    with pytest.raises(ValueError, match="hierarchical are"):
        levels_of("all_to_all", between, hosts, members)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_formulas_of_the_literature(p):
    """α·rounds + β·bytes as published: ring, all-to-all ("parallel"), recursive halving-doubling, parameter server."""
    log_p, share = p.bit_length() - 1, (p - 1) / p
    ring, halving_doubling = (steps_of("all_reduce", name, p) for name in ("ring", "recursive_halving_doubling"))
    assert (ring.rounds, ring.sent) == (2 * (p - 1), 2 * share)
    assert (halving_doubling.rounds, halving_doubling.sent) == (2 * log_p, 2 * share)
    wire = counted(schedule_of("all_reduce", "all_to_all", p), 8 * p)
    assert (wire.rounds, wire.total) == (1, p * p - p)  # p² with those to oneself
    # a server of its own: p devices and one more, whose link takes p·d and sends p·d
    d = 8 * (p + 1)
    served = counted(schedule_of("all_reduce", "parameter_server", p + 1), d)
    assert (served.rounds, served.sent) == (2, 2 * p * d)
    assert steps_of("all_reduce", "parameter_server", p + 1).incast == p
    naive = steps_of("all_reduce", "sequential", p)
    assert (naive.rounds, naive.sent, naive.incast) == (2 * (p - 1), 2 * (p - 1), 1)


def joined(size, backend="nccl", **link):
    """A host of ``size`` devices behind one switch."""
    device = Device("d", 1, (("float32", 1.0),), 1.0, 0.0, "t")
    wire = replace(Link("l", 10e-6, 1e9, "t"), **link)
    cluster = Cluster("c", (Host(device, size, wire),), wire, backend=backend)
    return mesh_prices(cluster, cluster.mesh())[0], mesh_prices(cluster, cluster.mesh(), "all")[0]


def test_price_formula_and_cheapest():
    ring, _ = joined(4)
    assert ring.seconds("all_reduce", 8e6) == pytest.approx(6 * 10e-6 + 2 * 0.75 * 8e6 / 1e9)
    assert ring.seconds("all_reduce_max", 100) == ring.seconds("all_reduce", 100)
    _, cheapest = joined(6)
    for nbytes in (1, 1e8):
        rows = [steps_of("all_reduce", name, 6) for name in ALGORITHMS["all_reduce"]]
        each = [row.rounds * 10e-6 + row.sent * nbytes / 1e9 for row in rows]
        assert cheapest.seconds("all_reduce", nbytes) == pytest.approx(min(each))
    assert joined(1)[0].seconds("all_gather", 8e6) == 0.0
    # further messages into one device cost
    slow, _ = joined(5, message_s=5e-6)
    assert slow.seconds("all_to_all", 1) == pytest.approx(10e-6 + 3 * 5e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "algorithm", "size", "message"),
    [
        ("gossip", "ring", 4, "a collective is one of"),
        ("all_reduce", "magic", 4, "has the algorithms"),
        ("all_reduce", "ring", 0, "at least one"),
        ("all_gather", "recursive_doubling", 6, "powers of two"),
    ],
)
def test_collective_errors(kind, algorithm, size, message):
    with pytest.raises(ValueError, match=message):
        steps_of(kind, algorithm, size)


# ---- clusters and meshes


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trip_and_sources(name, tmp_path):
    cluster = Cluster.preset(name, hosts=3)
    assert len(cluster.hosts) == 3
    assert cluster.num_devices == 3 * PRESETS[name].num_devices
    cluster.save(tmp_path / "c.json")
    loaded = Cluster.load(tmp_path / "c.json")
    assert loaded == cluster
    assert hash(loaded) == hash(cluster)
    assert loaded.fingerprint() == cluster.fingerprint()
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]  # the temporary file is gone
    device = cluster.device(0)
    assert device.source.count("(") >= 4  # every constant names its unit and source
    assert "B/s (" in cluster.link.source
    assert 2**30 < device.memory_bytes < 200 * 2**30
    assert all(device.peak(d) > 0 for d in (torch.float32, torch.float16, torch.int64, "float64"))
    copy = pickle.loads(pickle.dumps(cluster))
    assert copy == cluster
    assert "_hash" not in pickle.loads(pickle.dumps(cluster)).__dict__


def test_published_constants():
    v100, h200 = Cluster.preset("p3.16xlarge", hosts=8), Cluster.preset("dgx-h200")
    assert v100.num_devices == 64
    assert v100.device(63).peak(torch.float16) == 125e12
    assert v100.link.bytes_per_s == pytest.approx(25e9 / 8)
    assert v100.host_of(8) == 1
    assert v100.host_of(63) == 7
    assert h200.device(0).memory_bytes > 139 * 2**30
    assert h200.device(0).peak("bfloat16") > 8 * v100.device(0).peak(
        "bfloat16"
    )  # the V100 has no bf16 units: fp32's rate


def test_parse():
    assert Cluster.parse("p3.16xlarge:8") == Cluster.preset("p3.16xlarge", 8)
    assert Cluster.parse("two-laptops-wifi").num_devices == 2
    for text, message in (
        ("p3.2xlarge:8", "p3.16xlarge"),
        ("p3.16xlarge:x", "whole number"),
        ("p3.16xlarge:0", "at least one host"),
    ):
        with pytest.raises(ValueError, match=message):
            Cluster.parse(text)


def test_parse_reads_files(tmp_path):
    path = tmp_path / "mine.json"
    Cluster.preset("cpu").save(path)
    assert Cluster.parse(str(path)) == Cluster.preset("cpu")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2], "breaks off"),
        (lambda text: "[]", "format"),
        (lambda text: text.replace('"schema": 2', '"schema": 99'), "schema"),
        (lambda text: text.replace('"num_devices"', '"devices"'), "lacks or misnames"),
        (lambda text: text.replace('"alpha_s"', '"alpha"'), "lacks or misnames"),
        (lambda text: json.dumps(json.loads(text) | {"hosts": []}), "at least one host"),
        (lambda text: text.replace('"alpha_s": ', '"alpha_s": -'), "alpha_s >= 0"),
        (lambda text: text.replace('"memory_bytes": 1', '"memory_bytes": -1'), "positive memory_bytes"),
        (lambda text: text.replace('"link_kind": "ring"', '"link_kind": "string"'), "link kind"),
    ],
)
def test_bad_cluster_files(edit, message, tmp_path):
    path = tmp_path / "c.json"
    text = Cluster.preset("p3.16xlarge").to_json()
    assert edit(text) != text
    path.write_text(edit(text))
    with pytest.raises(ValueError, match=message) as error:
        Cluster.load(path)
    assert str(path) in str(error.value)


def test_missing_file():
    with pytest.raises(ValueError, match="nowhere"):
        Cluster.load("/nowhere/c.json")


def test_fingerprint_is_of_hardware_not_of_rates():
    cluster = Cluster.preset("dgx-h100", 2)
    profiled = replace(cluster, link=replace(cluster.link, bytes_per_s=1e9))
    assert profiled.fingerprint() == cluster.fingerprint()
    assert profiled.to_json() != cluster.to_json()
    other = Cluster.preset("dgx-a100-80", 2)
    assert other.fingerprint() != cluster.fingerprint()
    assert any("A100" in line for line in cluster.difference(other))
    assert cluster.difference(Cluster.preset("dgx-h100", 2)) == []
    assert "16 devices against 8" in cluster.difference(Cluster.preset("dgx-h100", 1))


def test_mesh_is_row_major():
    cluster = Cluster.preset("p3.16xlarge", 2)
    mesh = Mesh.of(cluster, 4, (2, 3))
    assert mesh.devices == (4, 5, 6, 7, 8, 9)
    assert mesh.groups(0) == ((4, 7), (5, 8), (6, 9))
    assert mesh.groups(1) == ((4, 5, 6), (7, 8, 9))
    assert mesh.coordinates(8) == (1, 1)
    assert str(mesh) == "2x3@4"
    assert Mesh.parse(cluster, "2x3@4") == mesh
    assert Mesh.parse(cluster, "@3") == Mesh.of(cluster, 3, ())
    assert Mesh.of(cluster, 3, ()).num_devices == 1
    deep = Mesh.of(cluster, 0, (2, 2, 4))
    for axis in range(3):
        groups = deep.groups(axis)
        assert sorted(d for g in groups for d in g) == list(range(16))
        for group in groups:
            assert [deep.coordinates(d)[axis] for d in group] == list(range(deep.shape[axis]))


def test_mesh_errors():
    cluster = Cluster.preset("cpu")
    for offset, shape, names, message in (
        (1, (8,), None, "shrink the mesh"),
        (-1, (2,), None, "shrink the mesh"),
        (0, (2, 0), None, "positive sizes"),
        (0, (2, 2), ("a", "a"), "distinct name"),
    ):
        with pytest.raises(ValueError, match=message):
            Mesh.of(cluster, offset, shape, names)
    with pytest.raises(ValueError, match="SHAPE@FIRST"):
        Mesh.parse(cluster, "2*4")
    with pytest.raises(ValueError, match="devices 0 to 7"):
        cluster.device(8)


# ---- prices on meshes


def test_axis_that_spans_hosts_costs_more():
    cluster = Cluster.preset("p3.16xlarge", 2)
    inter, intra = mesh_prices(cluster, Mesh.of(cluster, 0, (2, 8)))
    assert inter.crosses_hosts
    assert not intra.crosses_hosts
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert inter.seconds(kind, 1e8) > 10 * intra.seconds(kind, 1e8)
        for price in (inter, intra):
            a, b = price.coefficients(kind)
            assert a + b * 1e8 == pytest.approx(price.seconds(kind, 1e8))
            assert a + b * 10 >= price.seconds(kind, 10)


def test_groups_share_the_host_adapter():
    cluster = Cluster.preset("p3.16xlarge", 2)
    one = mesh_prices(cluster, Mesh.of(cluster, 7, (2,)))[0].coefficients("all_reduce")[1]
    eight = mesh_prices(cluster, Mesh.of(cluster, 0, (2, 8)))[0].coefficients("all_reduce")[1]
    assert eight == pytest.approx(8 * one)
    assert one == pytest.approx(1 / 3.125e9)  # two devices: each sends its d once over 25 Gbit/s
    h100 = Cluster.preset("dgx-h100", 2)  # one adapter per device: no contention until all are used
    single = mesh_prices(h100, Mesh.of(h100, 7, (2,)))[0].coefficients("all_reduce")[1]
    all_at_once = mesh_prices(h100, Mesh.of(h100, 0, (2, 8)))[0].coefficients("all_reduce")[1]
    assert all_at_once == pytest.approx(single)


def test_hierarchical_beats_flat_ring_across_hosts():
    cluster = Cluster.preset("p3.16xlarge", 4)
    mesh = cluster.mesh()
    nccl = mesh_prices(cluster, mesh)[0]
    flat = mesh_prices(replace(cluster, backend="gloo"), mesh)[0]
    assert nccl.seconds("all_reduce", 1e9) < 0.9 * flat.seconds("all_reduce", 1e9)
    # between hosts 2 (4-1)/4 d over the adapter, within hosts 2 (8-1)/8 d over NVLink
    assert nccl.coefficients("all_reduce")[1] == pytest.approx(1.5 / 3.125e9 + 1.75 / 125e9)
    assert nccl.seconds("all_reduce", 1e9) >= mesh_prices(cluster, mesh, "all")[0].seconds("all_reduce", 1e9)


def test_small_groups_on_direct_links_and_shared_media():
    v100, pcie = Cluster.preset("p3.16xlarge"), Cluster.preset("8x4090")
    pair = mesh_prices(v100, Mesh.of(v100, 0, (2,)))[0].coefficients("all_gather")[1]
    eight = mesh_prices(v100, Mesh.of(v100, 0, (8,)))[0].coefficients("all_gather")[1]
    assert pair / (1 / 2) > 4 * eight / (7 / 8)  # per byte on the wire
    crowded = Cluster(
        "narrow", (replace(pcie.hosts[0], link=replace(pcie.hosts[0].link, bytes_per_s=40e9)),), pcie.link
    )
    alone = mesh_prices(crowded, Mesh.of(crowded, 0, (2,)))[0].seconds("all_reduce", 1e9)
    together = mesh_prices(crowded, Mesh.of(crowded, 0, (4, 2)))[1].seconds("all_reduce", 1e9)
    assert together == pytest.approx(4 * alone, rel=0.01)  # 20 GB/s each against 40/8


def test_wifi_is_shared_by_both_directions():
    cluster = Cluster.preset("two-laptops-wifi")
    price = mesh_prices(cluster, cluster.mesh())[0]
    air = cluster.link.bytes_per_s
    # a ring of two: each sends the whole tensor once, both over the same air
    assert price.coefficients("all_reduce")[1] == pytest.approx(2 / air)
    assert p2p_seconds(cluster, 0, 1, 1e9) == pytest.approx(1e9 / air, rel=0.01)


def test_uneven_and_mixed_hosts_take_the_slowest_group():
    fast, slow = Cluster.preset("dgx-h100").hosts[0], Cluster.preset("8x4090").hosts[0]
    cluster = Cluster("mixed", (fast, replace(slow, num_devices=4)), Cluster.preset("dgx-h100").link)
    assert cluster.num_devices == 12
    assert cluster.device(8).name == "RTX4090"
    assert Cluster.from_json(cluster.to_json()) == cluster
    by_host = mesh_prices(cluster, Mesh.of(cluster, 0, (3, 4)))[1]
    only_fast = mesh_prices(cluster, Mesh.of(cluster, 0, (2, 4)))[1]
    assert by_host.seconds("all_reduce", 1e8) > 5 * only_fast.seconds("all_reduce", 1e8)
    assert mesh_prices(cluster, cluster.mesh())[0].seconds("all_reduce", 1e8) > 0  # 8 + 4 devices in one group


def test_prices_grow_with_bytes_and_vanish_on_one_device():
    cluster = Cluster.preset("cpu")
    one, four = mesh_prices(cluster, Mesh.of(cluster, 0, (1, 4)))
    assert one.seconds("all_reduce", 1e9) == 0
    assert one.coefficients("all_reduce") == (0.0, 0.0)
    for kind in (*ALGORITHMS, "all_reduce_max"):
        seconds = [four.seconds(kind, n) for n in (0, 1, 1e4, 1e8)]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0 < seconds[1]
    assert mesh_prices(cluster, Mesh.of(cluster, 0, ())) == ()


def test_p2p():
    cluster = Cluster.preset("p3.16xlarge", 2)
    near, far = p2p_seconds(cluster, 0, 1, 1e8), p2p_seconds(cluster, 0, 8, 1e8)
    assert p2p_seconds(cluster, 3, 3, 1e8) == 0
    assert far > 5 * near
    assert p2p_seconds(cluster, 0, 8, 1e8, concurrent=8) == pytest.approx(8 * far, rel=0.01)
    assert p2p_seconds(cluster, 0, 1, 1e8, concurrent=8) == near


@pytest.mark.parametrize(
    ("ranks", "kind", "nbytes", "measured_s"),
    [
        (2, "all_reduce", 2**10, 0.14e-3),
        (4, "all_reduce", 2**10, 0.94e-3),
        (2, "all_reduce", 2**22, 2.7e-3),
        (4, "all_reduce", 2**22, 7.6e-3),
        (2, "all_gather", 2**10, 0.10e-3),
        (4, "all_to_all", 2**10, 0.30e-3),
        (2, "all_to_all", 2**22, 1.5e-3),
    ],
)
def test_gloo_prices_against_measured(ranks, kind, nbytes, measured_s):
    """Two cores; the published minima on loopback that gave the constants, and others that did not."""
    cluster = on_two_cores(ranks)
    price = mesh_prices(cluster, cluster.mesh())[0].seconds(kind, nbytes)
    assert measured_s / 1.7 < price < measured_s * 1.7


# ---- this machine


TABLE = Table(
    (
        Curve("matmul", "float32", "flops", ((1e3, 2e-6), (1e6, 2e-5), (1e9, 1e-2))),
        Curve("pointwise", "float32", "bytes", ((1e3, 2e-6), (1e6, 1e-4))),
    ),
    Fit(1e-6, 1e-11, 0.0, 5, 5),
    5e-7,
    1e11,
    (("processor", "test"),),
)


def on_two_cores(ranks):
    return _local(TABLE, ranks, max(1.0, ranks / 2))


def test_oversubscription_divides_every_rate():
    two, four = on_two_cores(2), on_two_cores(4)
    assert two.oversubscription == 1
    assert four.oversubscription == 2
    assert "oversubscribed 2×" in four.text()
    assert "oversubscribed" not in two.text()
    a, b = two.device(0), four.device(0)
    assert b.memory_bytes == a.memory_bytes // 2
    assert b.peak("float32") == a.peak("float32") / 2
    for kind, flops in (("matmul", 3e5), ("matmul", 1e12), ("pointwise", 0), ("normalization", 1e6), ("view", 0)):
        assert op_seconds(kind, flops, 1e4, "float32", b) == pytest.approx(
            2 * op_seconds(kind, flops, 1e4, "float32", a)
        )
    assert mesh_prices(four, Mesh.of(four, 0, (2,)))[0].seconds("all_reduce", 1e6) == pytest.approx(
        2 * mesh_prices(two, two.mesh())[0].seconds("all_reduce", 1e6)
    )


def test_local_measures_once_and_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    calls = []

    def measured():
        calls.append(1)
        return TABLE

    monkeypatch.setattr(tables, "measure_machine", measured)
    tables._table_at.cache_clear()
    try:
        cluster = Cluster.local(3)
        assert Cluster.local(3) == cluster
        assert len(calls) == 1
        tables._table_at.cache_clear()  # another process
        assert Cluster.local(3) == cluster
        assert len(calls) == 1
        [file] = (tmp_path / "cache").iterdir()
        file.write_text(file.read_text()[:50])
        tables._table_at.cache_clear()
        assert Cluster.local(3) == cluster  # a corrupt cache is measured again and replaced
        assert len(calls) == 2
        assert Table.load(file) == TABLE
    finally:
        tables._table_at.cache_clear()
    assert cluster.num_devices == 3
    assert cluster.backend == "gloo"
    assert Cluster.from_json(cluster.to_json()) == cluster
    with pytest.raises(ValueError, match="at least one rank"):
        Cluster.local(0)


def test_measurement_of_this_machine():
    threads = torch.get_num_threads()
    table = tables.measure_machine(budget_s=0.2)
    assert torch.get_num_threads() == threads
    assert Table.from_json(table.to_json()) == table
    assert {c.kind for c in table.curves} == {
        "matmul", "attention", "convolution", "normalization", "pointwise", "embedding", "loss",
    }  # fmt: skip
    assert 1e8 < table.peak_flops_per_s() < 1e13
    assert 1e8 < table.memory_bytes_per_s < 1e13
    matmul = next(c for c in table.curves if c.kind == "matmul").points
    assert matmul[-1][0] / matmul[-1][1] > 3 * matmul[0][0] / matmul[0][1]  # small ops run at a small rate


# ---- tables


def test_fit_recovers_constants_despite_noise_and_an_outlier():
    noise = [1.3, 1.0, 2.0, 1.1]
    samples = [(n, (50e-6 + n * 2e-9) * f) for n in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8) for f in noise]
    samples = [(n, t * 3 if n == 1e5 else t) for n, t in samples]  # one size disturbed in every sample
    fit = fit_alpha_beta(samples)
    assert fit.alpha_s == pytest.approx(50e-6, rel=0.15)
    assert fit.beta_s_per_byte == pytest.approx(2e-9, rel=0.05)
    assert fit.sizes == 6
    assert fit.samples == 24
    assert fit.residual < 0.1


def test_fit_is_never_negative():
    assert fit_alpha_beta([(10.0, 1e-6), (100.0, 1e-5), (1000.0, 2e-4)]).alpha_s == 0
    assert fit_alpha_beta([(10.0, 1e-5), (100.0, 9e-6), (1000.0, 8e-6)]).beta_s_per_byte == 0
    for samples in ([(1.0, 1e-6)], [(1.0, 1e-6), (2.0, -1e-6)], [(1.0, 1e-6), (2.0, math.nan)]):
        with pytest.raises(ValueError, match=r"needs two message sizes|a sample is"):
            fit_alpha_beta(samples)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema=2), "schema"),
        (lambda d: d.update(format="other"), "format"),
        (lambda d: d["launch"].update(alpha_s=-1e-6), "α >= 0"),
        (lambda d: d["curves"][0]["points"].reverse(), "must not fall"),
        (lambda d: d["curves"][0]["points"][1].__setitem__(1, 1e-9), "must not fall"),
        (lambda d: d["curves"][0].update(points=[[1, 1]]), "two points"),
        (lambda d: d["curves"][0].pop("kind"), "kind"),
        (lambda d: d.pop("launch"), "launch"),
    ],
)
def test_bad_tables(edit, message, tmp_path):
    data = json.loads(TABLE.to_json())
    edit(data)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as error:
        Table.load(path)
    assert str(path) in str(error.value)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    TABLE.save(path)
    monkeypatch.setattr(tables.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        replace(TABLE, view_s=1.0).save(path)
    assert Table.load(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]


def test_curve_interpolates_in_log_space():
    curve = TABLE.curves[0]
    assert curve.seconds(1e6, 1e-6) == pytest.approx(2e-5)
    assert curve.seconds(math.sqrt(1e6 * 1e9), 1e-6) == pytest.approx(math.sqrt(2e-5 * 1e-2))
    assert curve.seconds(1e10, 1e-6) == pytest.approx(1e-1)  # the last rate holds
    assert curve.seconds(0, 1e-6) == pytest.approx(1e-6)  # down to a launch
    grid = [10 ** (k / 4) for k in range(4, 44)]
    seconds = [curve.seconds(x, 1e-6) for x in grid]
    assert seconds == sorted(seconds)


# ---- compute


def test_roofline():
    device = Device(
        "d",
        2**30,
        (("float32", 1e12), ("float16", 4e12)),
        1e11,
        5e-6,
        "test",
        efficiency=(("matmul", 0.5), ("memory", 1.0)),
    )
    assert op_price("matmul", 1e9, 1, torch.float32, device).seconds == pytest.approx(1e9 / 5e11 + 5e-6)
    assert op_seconds("matmul", 1e9, 1, torch.float16, device) == pytest.approx(1e9 / 2e12 + 5e-6)
    assert op_seconds("matmul", 1, 1e9, torch.float32, device) == pytest.approx(1e-2 + 5e-6)
    assert op_seconds("pointwise", 0, 1e9, "float32", device) == pytest.approx(1e-2 + 5e-6)
    assert op_price("pointwise", 0, 1e9, "float32", device).source == "roofline"
    assert op_seconds("view", 0, 1e9, "float32", device) == 0
    with pytest.raises(ValueError, match="op kind is one of"):
        op_price("magic", 1, 1, "float32", device)
    with pytest.raises(ValueError, match="never negative"):
        op_price("matmul", -1, 1, "float32", device)


def test_price_from_a_curve_says_so():
    device = on_two_cores(2).device(0)
    assert op_price("matmul", 1e6, 1e3, "float32", device).source == "interpolated"
    assert op_price("matmul", 1e6, 1e3, "float32", device).seconds == pytest.approx(2e-5)
    assert op_price("matmul", 1e12, 1e3, "float32", device).source == "extrapolated"
    assert op_price("normalization", 0, 1e6, "float32", device).source == "roofline"  # no curve in this table
    assert op_seconds("matmul", 1e6, 1e8, "float32", device) == pytest.approx(1e-3)  # bytes still bind
    assert op_seconds("matmul", 1e6, 1e3, "float64", device) > op_seconds("matmul", 1e6, 1e3, "float32", device)
    assert op_seconds("view", 0, 0, "float32", device) == 5e-7


def test_v100_share_reproduces_the_row_it_came_from():
    """GPT-350m on one V100, microbatch 2, forward + recompute + 2 × backward, against the published 45.1 TFLOPS; then
    GPT-1.3b's compute against 58.2, which no constant was taken from."""
    device = Cluster.preset("p3.16xlarge").device(0)
    for layers, hidden, heads, batch, published in ((24, 1024, 16, 2, 45.1), (24, 2048, 32, 4, 58.2)):
        tokens, seq, vocab = batch * 1024, 1024, 51200
        dense = op_seconds("matmul", 24 * tokens * hidden**2, 0, "float16", device)
        attention = op_seconds("attention", 4 * tokens * seq * hidden, 0, "float16", device)
        rest = op_seconds("pointwise", 0, 2 * 34 * tokens * hidden, "float16", device)
        head = op_seconds("matmul", 6 * tokens * hidden * vocab, 0, "float16", device)
        seconds = 4 * layers * (dense + attention + rest) + head
        flops = 96 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6 * tokens * hidden * vocab
        assert flops / seconds / 1e12 == pytest.approx(published, rel=0.1), (hidden, heads)


# ---- memory


def test_mixed_precision_adam_is_16_bytes():
    cost = parameter_bytes(1000, torch.float16, "Adam", mixed_precision=True)
    assert (cost.parameter, cost.gradient, cost.optimizer_state) == (2000, 2000, 12000)
    assert cost.total == 16000
    assert not cost.assumed
    assert parameter_bytes(1000, torch.float32, "AdamW").total == 16000
    assert (
        parameter_bytes(1000, torch.float32, "AdamW", mixed_precision=True).total == 16000
    )  # already fp32: no second master
    assert parameter_bytes(1000, torch.float32, "SGD").total == 8000
    assert parameter_bytes(1000, torch.float32, "SGD+momentum").total == 12000
    assert parameter_bytes(1000, torch.bfloat16, "AdamW").total == 8000  # pure bf16 training
    assert parameter_bytes(1000, torch.float32, 0.5).optimizer_state == 2000


def test_unknown_optimizer_is_assumed_aloud():
    cost = parameter_bytes(10, torch.float32, "Lion")
    assert cost.optimizer_state == 80
    assert "Lion" in cost.assumed
    with pytest.raises(ValueError, match="never negative"):
        parameter_bytes(-1, torch.float32)


@pytest.mark.parametrize("name", [n for n in OPTIMIZER_STATE if n not in ("none", "SGD+momentum", "SparseAdam")])
def test_optimizer_state_against_the_optimizer(name):
    assert measured_state(lambda ps: getattr(torch.optim, name)(ps)) == OPTIMIZER_STATE[name]


def test_measured_state():
    assert measured_state(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)) == OPTIMIZER_STATE["SGD+momentum"]
    assert measured_state(lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True)) == 3
    assert measured_state(lambda ps: torch.optim.Adam(ps, amsgrad=True)) == 3
    with pytest.raises(ValueError, match="plain matrix"):
        measured_state(lambda ps: torch.optim.LBFGS(ps))


def test_a_backend_has_every_kind_and_is_never_cheaper_than_all_algorithms():
    for backend in ("nccl", "gloo"):
        own, every = joined(6, backend)
        for kind in (*ALGORITHMS, "all_reduce_max"):
            assert 0 < every.seconds(kind, 1e8) <= own.seconds(kind, 1e8) < math.inf


def test_values_are_checked():
    link = Link("l", 0.0, 1e9, "t")
    device = Device("d", 1, (("float32", 1.0),), 1.0, 0.0, "t")
    for make in (
        lambda: Link("l", -1.0, 1e9, "t"),
        lambda: Link("l", 0.0, math.inf, "t"),
        lambda: Device("d", 1, (("float16", 1.0),), 1.0, 0.0, "t"),
        lambda: Host(device, 0, link),
        lambda: Cluster("c", (), link),
        lambda: Cluster("c", (Host(device, 1, link),), link, backend="mpi"),
    ):
        with pytest.raises(ValueError, match="but got"):
            make()
