"""Prices of messages on meshes: hosts, shared adapters and media, uneven groups, measured Gloo sums."""

import math
from dataclasses import replace

import pytest
from meshwright.costmodel.algorithms import ALGORITHMS
from meshwright.costmodel.cluster import Cluster, Mesh
from meshwright.costmodel.collectives import mesh_prices, p2p_seconds

from tests.support.clusters import joined, on_two_cores


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


def test_a_backend_has_every_kind_and_is_never_cheaper_than_all_algorithms():
    for backend in ("nccl", "gloo"):
        own, every = joined(6, backend)
        for kind in (*ALGORITHMS, "all_reduce_max"):
            assert 0 < every.seconds(kind, 1e8) <= own.seconds(kind, 1e8) < math.inf
