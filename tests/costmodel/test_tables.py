"""Measured tables of this machine: fits, curves, the cache, and bad files."""

import json
import math
from dataclasses import replace

import pytest
import torch
from meshwright.costmodel import tables
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.collectives import mesh_prices
from meshwright.costmodel.tables import MachineTable, fit_alpha_beta

from tests.support.clusters import TABLE, on_two_cores
from tests.support.prices import op_seconds


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
        assert MachineTable.load(file) == TABLE
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
    assert MachineTable.from_json(table.to_json()) == table
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
        MachineTable.load(path)
    assert str(path) in str(error.value)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    TABLE.save(path)
    monkeypatch.setattr(tables.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        replace(TABLE, view_s=1.0).save(path)
    assert MachineTable.load(path) == TABLE
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
