"""Clusters on whose prices tiny models are worth parallelizing, or that have what one test needs."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from meshwright.costmodel.cluster import Cluster, _local
from meshwright.costmodel.collectives import mesh_prices
from meshwright.costmodel.curves import Curve
from meshwright.costmodel.hardware import Device, Host, Link
from meshwright.costmodel.memory import FRAMEWORK_BYTES
from meshwright.costmodel.tables import Fit, MachineTable

from tests.support.random_instances import with_memory


def joined(size, backend="nccl", **link):
    """A host of ``size`` devices behind one switch."""
    device = Device("d", 1, (("float32", 1.0),), 1.0, 0.0, "t")
    wire = replace(Link("l", 10e-6, 1e9, "t"), **link)
    cluster = Cluster("c", (Host(device, size, wire),), wire, backend=backend)
    return mesh_prices(cluster, cluster.mesh())[0], mesh_prices(cluster, cluster.mesh(), "all")[0]


TABLE = MachineTable(
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


def far(devices: int, seconds: float, bytes_per_s: float = 1e12) -> Cluster:
    """Hosts of one device each; a message between two of them takes so long."""
    near = fast_links(1)
    return replace(near, hosts=near.hosts * devices, link=Link("far", seconds, bytes_per_s, "assumed"))


def fast_links(devices: int):
    """V100s that compute a thousand times slower: on their prices even tiny models are worth parallelizing."""
    eight = Cluster.preset("p3.16xlarge")
    device = eight.hosts[0].device
    slow = dataclasses.replace(
        device,
        flops_per_s=tuple((dtype, rate / 1000) for dtype, rate in device.flops_per_s),
        memory_bytes_per_s=device.memory_bytes_per_s / 1000,
    )
    return dataclasses.replace(eight, hosts=(dataclasses.replace(eight.hosts[0], device=slow, num_devices=devices),))


V100 = Cluster.preset("p3.16xlarge")
FRAMEWORK = FRAMEWORK_BYTES[V100.device(0).kind]


def limited(mib: float) -> Cluster:
    """Eight devices with so much beside the framework."""
    return with_memory(V100, int(FRAMEWORK + mib * 2**20))
