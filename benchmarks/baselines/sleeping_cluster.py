"""What devices are whose layers sleep, to the planner: made from a profile of the ranks at hand."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import meshwright as mw
from meshwright.costmodel.curves import Curve
from meshwright.costmodel.hardware import Device

__all__ = ["PACE", "RATE_FLOPS_PER_S", "sleeping_cluster"]

RATE_FLOPS_PER_S = 1e9  # of a simulated device; the real arithmetic is some fifty times faster
PACE = partial(time.sleep, 0.005)  # what a rank does between collectives that are measured: a sleeping layer


def sleeping_cluster(cluster: mw.Cluster, matmuls: tuple[Curve, ...] = ()) -> mw.Cluster:
    """The cluster as sleeping layers make it, from its profile.

    Matmuls run at the simulated rate, unless their exact op was measured, or as these curves have it. Ranks that sleep
    leave their core to others: nothing is oversubscribed. What a collective costs after and beside sleeping was
    measured so.
    """
    crowd = cluster.oversubscription

    def slowed(device: Device) -> Device:
        return replace(
            device,
            flops_per_s=(("float32", RATE_FLOPS_PER_S),),
            memory_bytes_per_s=device.memory_bytes_per_s * crowd,
            launch_s=device.launch_s / crowd,
            view_s=device.view_s / crowd,
            action_s=device.action_s / crowd,
            surfaces=(),
            curves=tuple(
                replace(curve, points=tuple((work, seconds / crowd) for work, seconds in curve.points))
                for curve in device.curves
                if curve.kind != "matmul"
            )
            + matmuls,
            op_times=tuple(
                replace(
                    op,
                    forward_s=op.forward_s / crowd,
                    backward_input_s=op.backward_input_s / crowd,
                    backward_weight_s=op.backward_weight_s / crowd,
                )
                for op in device.op_times
            ),
            optimizers=tuple(
                replace(rate, alpha_s=rate.alpha_s / crowd, beta_s_per_byte=rate.beta_s_per_byte / crowd)
                for rate in device.optimizers
            ),
        )

    hosts = tuple(replace(host, device=slowed(host.device)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts, oversubscription=1.0)
