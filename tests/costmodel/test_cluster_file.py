"""Clusters as documents, joined, merged, compared and checked; networks and presets as data."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cli import main
from meshwright.costmodel import cluster as cluster_module
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.collectives import mesh_prices, p2p_seconds
from meshwright.costmodel.comparison import changes, compare
from meshwright.costmodel.curves import Curve, Surface
from meshwright.costmodel.measured import CollectiveMeasurement, OpTime, OptimizerRate, Piece
from meshwright.costmodel.presets import NETWORKS, OVERLAP, PRESETS, Constant, LinkSheet

from tests.support.paths import DOCS

CPU = Cluster.preset("cpu")


def wire(kind="all_reduce", size=4, alpha=1e-4, beta=1e-9, **more):
    made = CollectiveMeasurement(
        kind, "backend", size, size, 1, (Piece(0, alpha, beta),), ((1024, 1.1e-4), (1048576, 1.2e-3)), 0.05, 9
    )
    return replace(made, **more)


def with_device(cluster, **measured):
    """Every host's device gets these fields."""
    hosts = tuple(replace(host, device=replace(host.device, **measured)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


CURVE = Curve("matmul", "float32", "flops", ((1e3, 1e-6), (1e9, 1e-2)))
SURFACE = Surface("matmul", "float32", (64.0, 256.0), (64.0,), (64.0, 128.0), (1e-5, 2e-5, 4e-5, 8e-5), "backward")
OP = OpTime("aten.linear.default(f32[512,256]*, f32[1024,256]^)", 1e-3, 1.1e-3, 0.9e-3, 12)
RATE = OptimizerRate("AdamW", 2e-6, 1.5e-10, 0.02, 8)
HALF = OptimizerRate("AdamW", 2e-6, 2.5e-10, 0.02, 8, "bfloat16")
MEASURED = replace(
    with_device(
        CPU, curves=(CURVE,), surfaces=(SURFACE,), op_times=(OP,), optimizers=(RATE, HALF), overlap=0.25, action_s=3e-5
    ),
    wires=(wire(), wire("send", 2)),
    provenance=(("processor", "a processor"), ("torch", torch.__version__), ("date", "2026-01-01")),
)


# ---- documents


def test_measurements_survive_the_file(tmp_path):
    MEASURED.save(tmp_path / "c.json")
    loaded = Cluster.load(tmp_path / "c.json")
    assert loaded == MEASURED
    assert hash(loaded) == hash(MEASURED)
    assert loaded.device(7).op_time(OP.signature) == OP
    assert "measured: 2 collectives, 2 op curves, 1 exact ops, 2 optimizers (a processor, torch " in loaded.text()
    assert "measured" not in CPU.text()


finite = st.floats(0, 1e3)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), finite, finite), min_size=1, max_size=1),
    st.lists(st.tuples(st.text(max_size=20), finite, finite, finite), unique_by=lambda entry: entry[0]),
    st.floats(0, 1),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
)
@settings(deadline=None, max_examples=50)
def test_round_trip_of_any_measurement(pieces, times, overlap, provenance):
    wires = tuple(wire(alpha=a, beta=b, residual=r) for r, a, b in pieces)
    ops = tuple(OpTime(signature, f, i, w, 1) for signature, f, i, w in times)
    cluster = replace(with_device(CPU, op_times=ops, overlap=overlap), wires=wires)
    cluster = replace(cluster, provenance=tuple(provenance.items()))
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_the_first_schema_still_loads():
    data = json.loads(CPU.to_json())
    data["schema"] = 1
    del data["wires"], data["provenance"]
    for host in data["hosts"]:
        for key in ("op_times", "optimizers", "overlap", "action_s", "surfaces"):
            del host["device"][key]
    loaded = Cluster.from_json(json.dumps(data))
    assert loaded == CPU  # a CPU's overlap is 0
    assert json.loads(loaded.to_json())["schema"] == 2


def wires_of(data):
    return data["wires"][0]


def piece_of(data):
    return data["wires"][0]["pieces"][0]


def device_of(data):
    return data["hosts"][0]["device"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: piece_of(d).update(alpha_s=-1e-6),
            "wire all_reduce of 4: .* alpha_s >= 0, but got -1e-06",
        ),
        (
            lambda d: piece_of(d).update(beta_s_per_byte=math.nan),
            "wire all_reduce of 4: .*beta_s_per_byte",
        ),
        (lambda d: piece_of(d).update(from_bytes=8), "wire all_reduce of 4 .* the first at 0"),
        (lambda d: wires_of(d).update(pieces=[]), "wire all_reduce of 4 .* the first at 0"),
        (
            lambda d: wires_of(d)["pieces"].append({"from_bytes": 1e6, "alpha_s": 0.0, "beta_s_per_byte": 1e-12}),
            "wire all_reduce of 4 .* do not fall",
        ),
        (lambda d: wires_of(d)["points"].reverse(), "wire all_reduce of 4 .* rising bytes"),
        (lambda d: wires_of(d)["points"][0].__setitem__(1, math.inf), "wire all_reduce of 4 .* finite seconds"),
        (lambda d: wires_of(d).update(members=5), "wire all_reduce of 4 .* members <= size"),
        (lambda d: wires_of(d).pop("kind"), r"wires\[0\] lacks 'kind'"),
        (lambda d: wires_of(d).update(wifi=1), r"wires\[0\] has an unknown key 'wifi'"),
        (lambda d: piece_of(d).update(alpha_s="fast"), "alpha_s is a number .* but got 'fast'"),
        (lambda d: device_of(d)["op_times"][0].update(forward_s=-1), r"op time aten\.linear.* forward_s >= 0"),
        (lambda d: device_of(d)["optimizers"][0].update(alpha_s=-1), "optimizer AdamW .* alpha_s >= 0"),
        (lambda d: device_of(d)["curves"][0]["points"].reverse(), "curve matmul/float32/forward.* must not fall"),
        (lambda d: device_of(d)["surfaces"][0]["seconds"].pop(), "surface matmul/float32/backward.* but got 3"),
        (lambda d: device_of(d).update(overlap=1.5), "overlap <= 1"),
        (lambda d: device_of(d).update(action_s=-1e-6), "action_s >= 0"),
        (lambda d: d.update(provenance=[1]), "provenance is an object, but got"),
        (lambda d: d.update(schema=3), "schemas 1 and 2, but got 3"),
        (lambda d: d.update(format="meshwright-table"), "is it another file"),
    ],
)
def test_bad_measurements_are_named(edit, message, tmp_path):
    data = json.loads(MEASURED.to_json())
    edit(data)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as error:
        Cluster.load(path)
    assert str(error.value).startswith(f"{path}: ")


# ---- merge


def test_merge_keeps_both_and_prefers_the_second():
    first = MEASURED
    newer = replace(wire(alpha=5e-4), samples=99)
    other = OpTime("aten.gelu.default(f32[8]*)", 1e-6, 1e-6, 0.0, 4)
    second = replace(
        with_device(CPU, curves=(replace(CURVE, kind="pointwise"),), op_times=(other,), launch_s=7e-6),
        wires=(newer, wire("all_gather")),
        provenance=(("date", "2026-02-02"),),
    )
    both = first.merge(second)
    assert [w.kind for w in both.wires] == ["all_reduce", "send", "all_gather"]
    assert both.wires[0].samples == 99
    device = both.device(0)
    assert [c.kind for c in device.curves] == ["matmul", "pointwise"]
    assert [t.signature for t in device.op_times] == [OP.signature, other.signature]
    assert (device.surfaces, device.optimizers) == ((SURFACE,), (RATE, HALF))
    assert device.launch_s == 7e-6  # measured later
    assert dict(both.provenance)["date"] == "2026-02-02"
    assert dict(both.provenance)["processor"] == "a processor"
    assert both.fingerprint() == CPU.fingerprint()
    assert first.merge(first) == first
    # a data sheet adds nothing and takes nothing away
    assert first.merge(CPU).device(0).curves == first.device(0).curves
    assert first.merge(CPU).device(0).overlap == 0.25
    assert CPU.merge(first).wires == first.wires
    assert CPU.merge(first).hosts == first.hosts


def test_merge_refuses_other_hardware():
    with pytest.raises(ValueError, match=r"same hardware, but got cpu:1 and cpu:2.*16") as error:
        CPU.merge(Cluster.preset("cpu", 2))
    assert "merge tables of one cluster" in str(error.value)


# ---- compare


def test_compare_says_which_prices_changed_by_how_much():
    slower = replace(OP, forward_s=1.5e-3)
    device = {"curves": (replace(CURVE, points=((1e3, 1e-6), (1e9, 2e-2))),), "op_times": (slower,)}
    rate = replace(RATE, beta_s_per_byte=3e-10)
    after = replace(
        with_device(MEASURED, **device, optimizers=(rate, HALF), action_s=6e-5),
        wires=(wire(beta=2e-9), wire("all_gather")),
        provenance=(("processor", "a processor"), ("torch", "9.9"), ("date", "2026-01-01")),
    )
    text = compare(MEASURED, after)
    assert text.splitlines()[0] == "hardware: the same"
    assert f"torch: {torch.__version__} → 9.9" in text
    assert "date" not in text
    assert "wire all_reduce of 4 (4 on a host, 1 at once), 16 MiB: 16.88 → 33.65 ms (+99.4 %)" in text
    assert "1 KiB: 101 →" not in text  # α is the same there: within the 2 %
    assert "curve matmul float32 forward, 2 points: 10 → 20 ms (+100.0 %)" in text
    assert f"{OP.signature} forward: 1 → 1.5 ms (+50.0 %)" in text
    assert f"{OP.signature} backward" not in text
    assert "AdamW, a tensor of 4 MB: 0.602 → 1.202 ms (+99.7 %)" in text
    assert "AdamW, bfloat16" not in text
    assert "pipeline action: 30 → 60 µs (+100.0 %)" in text
    assert "only before: wire send of 2 (2 on a host, 1 at once)" in text
    assert "only after: wire all_gather of 4 (4 on a host, 1 at once)" in text
    assert "surface" not in text.split("only")[0]
    assert "1 KiB" in compare(MEASURED, after, at_least=0.0001)


def test_compare_of_equal_and_of_other_hardware():
    same = compare(MEASURED, MEASURED)
    assert "→" not in same
    assert "wires: 0 of 6 prices changed" in same
    assert all(change.ratio == 1 for change in changes(MEASURED, MEASURED))
    text = compare(Cluster.preset("dgx-h100", 2), Cluster.preset("dgx-a100-80", 2))
    assert text.startswith("hardware: dgx-h100:2 against dgx-a100-80:2")
    assert "+ 2 × 8 A100-SXM4-80GB" in text


# ---- validate


def test_validate_warns_of_other_software_and_hardware(monkeypatch):
    here = {"processor": "a processor", "torch": torch.__version__}
    monkeypatch.setattr(cluster_module, "machine", lambda: here)
    assert MEASURED.validate() == []
    assert CPU.validate() == []
    [line] = replace(MEASURED, provenance=(("torch", "1.0"),)).validate()
    assert "measured with torch 1.0, this is" in line
    [line] = replace(MEASURED, provenance=(("busy", "34%"),)).validate()
    assert "other processes had the cores for 34% of the time" in line
    [line] = replace(MEASURED, provenance=(("processor", "another"),)).validate()
    assert "another processor, another, this is a processor" in line
    gpu = replace(MEASURED, provenance=(("processor", "another"), ("gpu", "a GPU")))
    assert gpu.validate() == []  # plans for it are made elsewhere
    here["gpu"] = "b GPU"
    assert any("another GPU, a GPU, this is b GPU" in line for line in gpu.validate())


def test_validate_warns_of_doubtful_wires_and_refuses_foreign_ones():
    noisy = replace(MEASURED, wires=(wire(points=((1024, 9e-4), (4096, 1e-4))),), provenance=())
    [line] = noisy.validate()
    assert "wire all_reduce of 4" in line
    assert "idle machine" in line
    assert "median error of 80 %" in replace(noisy, wires=(wire(residual=0.8),)).validate()[0]
    for foreign in (wire(size=16), wire(size=8, members=3), wire(size=16, members=1)):
        if foreign.size <= 8:
            assert replace(noisy, wires=(foreign,)).validate() == []
            continue
        with pytest.raises(ValueError, match=r"8 devices, 8 on a host, but got wire all_reduce of 16"):
            replace(noisy, wires=(foreign,)).validate()


def test_a_foreign_table_is_refused_on_loading(tmp_path):
    path = tmp_path / "c.json"
    replace(MEASURED, wires=(wire(size=16),)).save(path)
    with pytest.raises(ValueError, match="is it of another cluster") as error:
        Cluster.load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_the_command_compares_and_notes(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    replace(MEASURED, provenance=(("torch", "1.0"),)).save(before)
    replace(MEASURED, wires=(wire(alpha=2e-4),), provenance=()).save(after)
    assert main(["diff", str(before), str(after)]) == 0
    out, err = capsys.readouterr()
    assert "hardware: the same" in out
    assert "wire all_reduce of 4 (4 on a host, 1 at once), 1 KiB: 101 → 201 µs (+99.0 %)" in out
    assert err.startswith("note: cpu:1 was measured with torch 1.0, this is ")
    before.write_text(before.read_text()[:99])
    assert main(["diff", str(before), str(after)]) == 2
    assert capsys.readouterr().err.startswith(f"meshwright: {before}: a cluster is a JSON document, but it breaks off")


# ---- joining and networks


def test_join_uneven_and_mixed():
    a, b = Cluster.preset("dgx-h100"), Cluster.preset("8x4090", 2)
    small = replace(a.hosts[0], num_devices=3)
    cluster = Cluster.join(a, b, replace(a, hosts=(small,)), name="mine")
    assert (cluster.name, cluster.num_devices, len(cluster.hosts)) == ("mine", 8 + 16 + 3, 4)
    assert [cluster.device(i).name for i in (0, 8, 24)] == ["H100-SXM5-80GB", "RTX4090", "H100-SXM5-80GB"]
    assert cluster.link == replace(b.link, alpha_s=max(a.link.alpha_s, b.link.alpha_s))
    assert Cluster.from_json(cluster.to_json()) == cluster
    # all 27 in one group: a price, no cheaper than within the fast host
    whole, host = mesh_prices(cluster, cluster.mesh())[0], mesh_prices(cluster, Mesh.of(cluster, 0, (8,)))[0]
    assert whole.seconds("all_reduce", 1e8) > host.seconds("all_reduce", 1e8) > 0
    own = Cluster.join(a, a, link=b.link, link_kind="shared")
    assert (own.link, own.link_kind) == (b.link, "shared")
    assert Cluster.join(a) is a


def test_join_drops_wires_and_refuses_other_backends():
    assert Cluster.join(MEASURED, MEASURED).wires == ()
    assert Cluster.join(MEASURED, MEASURED).device(9).curves == (CURVE,)
    for parts, message in (((CPU, Cluster.preset("dgx-h100")), "one backend, but got cpu:1: gloo"), ((), "none")):
        with pytest.raises(ValueError, match=message):
            Cluster.join(*parts)


def test_networks_from_a_rack_to_the_world():
    clusters = [Cluster.parse(f"p3.16xlarge:2@{name}") for name in NETWORKS]
    assert list(NETWORKS) == ["rack", "zone", "region", "continent", "world"]
    plain = Cluster.preset("p3.16xlarge", 2)
    for cluster in clusters:
        assert cluster.link.alpha_s >= plain.link.alpha_s  # the adapter is still there
        assert cluster.link.bytes_per_s <= plain.link.bytes_per_s
        assert Cluster.from_json(cluster.to_json()) == cluster
        assert cluster.fingerprint() != plain.fingerprint()
    for nbytes in (1, 1e5, 1e9):
        sends = [p2p_seconds(cluster, 0, 8, nbytes) for cluster in clusters]
        sums = [mesh_prices(c, Mesh.of(c, 0, (2, 8)))[0].seconds("all_reduce", nbytes) for c in clusters]
        assert sends == sorted(sends)
        assert sums == sorted(sums)
    assert 1e3 * p2p_seconds(clusters[-1], 0, 8, 1) == pytest.approx(75, rel=0.01)
    inside = [mesh_prices(c, Mesh.of(c, 0, (2, 8)))[1].seconds("all_reduce", 1e6) for c in clusters]
    assert len(set(inside)) == 1  # within a host nothing changes


def test_parse_joins_and_networks(tmp_path):
    cluster = Cluster.parse("p3.16xlarge:2+8x4090@region")
    assert [host.device.name for host in cluster.hosts] == ["V100-SXM2-16GB"] * 2 + ["RTX4090"]
    assert cluster.link.alpha_s == 1e-3
    assert cluster.name == "p3.16xlarge:2+8x4090:1@region"
    for text, message in (
        ("p3.16xlarge:2@moon", "a network is one of rack, zone, region, continent, world, but got 'moon'"),
        ("p3.16xlarge:2@", "a network is one of"),
        ("p3.16xlarge:2+p4", "no such file"),
        ("p3.16xlarge+8x4090:x", "whole number"),
        ("p3.16xlarge+cpu", "one backend"),
    ):
        with pytest.raises(ValueError, match=message):
            Cluster.parse(text)
    odd = tmp_path / "a+b@c.json"
    CPU.save(odd)
    assert Cluster.parse(str(odd)) == CPU


# ---- presets as data


def constants(sheet):
    """Every Constant below a sheet."""
    if isinstance(sheet, Constant):
        yield sheet
    elif isinstance(sheet, tuple):
        for part in sheet:
            yield from constants(part)
    elif hasattr(sheet, "__dataclass_fields__"):
        for field in fields(sheet):
            yield from constants(getattr(sheet, field.name))


@pytest.mark.parametrize("name", PRESETS)
def test_every_constant_has_a_unit_and_a_source(name):
    found = list(constants(PRESETS[name])) + [c for n in NETWORKS.values() for c in constants(n)] + [*OVERLAP.values()]
    assert len(found) > 25
    for constant in found:
        assert constant.unit in ("B", "B/s", "FLOP/s", "s") or "share" in constant.unit, constant
        assert len(constant.source) >= 8, constant
        assert math.isfinite(constant.value)
        assert constant.value >= 0
    for link in (PRESETS[name].link, PRESETS[name].network):
        assert isinstance(link, LinkSheet)
        assert link.pair.value > 0
        assert 0 < link.alpha.value < 0.01


#: GiB of memory, GB/s of it, TFLOP/s in half precision (fp32 on CPUs), devices of a host, GB/s between two hosts:
#: the makers' data sheets
SHEETS = {
    "p3.16xlarge": (16, 900, 125, 8, 25 / 8),
    "dgx-a100-40": (40, 1555, 312, 8, 200),
    "dgx-a100-80": (80, 2039, 312, 8, 200),
    "dgx-h100": (80, 3350, 989, 8, 400),
    "dgx-h200": (141, 4800, 989, 8, 400),
    "8x4090": (24, 1008, 165, 8, 10 / 8),
    "two-laptops-wifi": (12, 30, 0.4, 1, 0.04),
    "cpu": (4, 10, 0.1, 8, 10 / 8),
}


def test_presets_agree_with_data_sheets():
    assert set(SHEETS) == set(PRESETS)
    for name, (gib, rate, tflops, count, network) in SHEETS.items():
        cluster = Cluster.preset(name)
        device = cluster.device(0)
        assert device.memory_bytes / 2**30 == pytest.approx(gib, rel=0.02), name
        assert device.memory_bytes <= gib * 2**30, name
        assert device.memory_bytes_per_s / 1e9 == pytest.approx(rate, rel=0.01), name
        peak = device.peak("float16") if device.kind == "cuda" else device.peak("float32")
        assert peak / 1e12 == pytest.approx(tflops, rel=0.05), name
        assert cluster.hosts[0].num_devices == count, name
        assert cluster.link.bytes_per_s / 1e9 == pytest.approx(network, rel=0.07), name
        assert device.overlap == (0.8 if device.kind == "cuda" else 0.0)


def test_the_only_devices_of_two_clusters_are_compared_whatever_their_names() -> None:
    h100, h200 = (Cluster.load(DOCS / "examples" / f"{name}.json") for name in ("h100", "h200"))
    text = compare(h200, h100)
    assert "  NVIDIA H200 → NVIDIA H100 80GB HBM3, memory rate: 3.893 → 2.789 TB/s (-28.4 %)" in text.splitlines()
    assert "AdamW+fused, a tensor of 4 MB" in text
    assert "only before: NVIDIA" not in text
    both = replace(h200, hosts=(*h200.hosts, *h100.hosts))
    text = compare(h200, both)
    assert "only before" not in text
    assert "only after: NVIDIA H100 80GB HBM3: AdamW+fused" in text.splitlines()
