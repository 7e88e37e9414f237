"""Clusters and meshes: presets, files, the words of the command line, and what is refused."""

import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.hardware import Device, Host, Link
from meshwright.costmodel.presets import PRESETS


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
        (lambda text: text.replace('"num_devices"', '"devices"'), "lacks 'num_devices'.*unknown key 'devices'"),
        (lambda text: text.replace('"alpha_s"', '"alpha"'), "lacks 'alpha_s'.*unknown key 'alpha' .did you mean"),
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
