"""A cluster whose prices are multiples of another's: what recalibration changes, kind of work by kind of work.

It is the same hardware, so its fingerprint stays; only rates and measured times differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cluster import Cluster
from .compute import TWO_SIDED
from .curves import Curve, Surface
from .hardware import Device, Link
from .measured import CollectiveMeasurement, Piece

__all__ = ["LIMIT", "CalibrationFactors", "limited", "scaled_cluster"]

LIMIT = 100.0  # no factor is beyond this, or below one over it


def limited(factor: float) -> float:
    """``factor`` within the limits."""
    return min(max(factor, 1 / LIMIT), LIMIT)


@dataclass(frozen=True)
class CalibrationFactors:
    """Measured over priced seconds, kind by kind. ``forward``, ``backward``, ``optimizer`` and ``action_s`` (seconds to
    add) are by host."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    optimizer: tuple[float, ...]
    action_s: tuple[float, ...]
    collectives: float = 1.0
    transfers: float = 1.0

    @classmethod
    def none(cls, hosts: int) -> CalibrationFactors:
        """Those that change nothing."""
        return cls((1.0,) * hosts, (1.0,) * hosts, (1.0,) * hosts, (0.0,) * hosts)

    def then(self, other: CalibrationFactors) -> CalibrationFactors:
        """Both, one after the other."""
        product = lambda a, b: tuple(limited(x * y) for x, y in zip(a, b))  # noqa: E731
        return CalibrationFactors(
            product(self.forward, other.forward),
            product(self.backward, other.backward),
            product(self.optimizer, other.optimizer),
            tuple(x + y for x, y in zip(self.action_s, other.action_s)),
            limited(self.collectives * other.collectives),
            limited(self.transfers * other.transfers),
        )

    def all_by(self, factor: float) -> CalibrationFactors:
        """Every factor times ``factor``."""
        every = (factor,) * len(self.forward)
        return self.then(CalibrationFactors(every, every, every, (0.0,) * len(every), factor, factor))

    def to_json(self) -> dict[str, float]:
        """Name → number, of the host where there are several."""
        out: dict[str, float] = {}
        for name in ("forward", "backward", "optimizer", "action_s"):
            values: tuple[float, ...] = getattr(self, name)
            for host, value in enumerate(values):
                out[name if len(set(values)) == 1 else f"{name} of host {host}"] = value
        return out | {"collectives": self.collectives, "transfers": self.transfers}


def scaled_cluster(cluster: Cluster, factors: CalibrationFactors, forward_share: float = 1 / 3) -> Cluster:
    """``cluster`` with every price times its factor. ``forward_share``: of forward and backward together, where one
    rate serves both."""
    hosts = []
    for host, forward, backward, optimizer, action_s in zip(
        cluster.hosts, factors.forward, factors.backward, factors.optimizer, factors.action_s, strict=True
    ):
        device = _device(host.device, forward, backward, optimizer, action_s, forward_share)
        hosts.append(replace(host, device=device, link=_link(host.link, factors.collectives)))
    wires = tuple(
        _wire(wire, factors.transfers if wire.kind == "send" else factors.collectives) for wire in cluster.wires
    )
    return replace(cluster, hosts=tuple(hosts), link=_link(cluster.link, factors.collectives), wires=wires)


def _device(device: Device, forward: float, backward: float, optimizer: float, action_s: float, share: float) -> Device:
    apart = bool(device.curves or device.surfaces)
    both = share * forward + (1 - share) * backward
    rate = min(forward, backward) if apart else both  # beside measurements the roofline is a floor
    by = {"forward": forward, "backward": backward}
    curves = [*device.curves, *(_backward_curves(device) if abs(backward / forward - 1) > 0.01 else ())]
    return replace(
        device,
        flops_per_s=tuple((dtype, flops / rate) for dtype, flops in device.flops_per_s),
        memory_bytes_per_s=device.memory_bytes_per_s / rate,
        launch_s=device.launch_s * both,
        view_s=device.view_s * both,
        curves=tuple(replace(c, points=tuple((work, s * by[c.direction]) for work, s in c.points)) for c in curves),
        surfaces=tuple(replace(s, seconds=tuple(x * by[s.direction] for x in s.seconds)) for s in device.surfaces),
        op_times=tuple(
            replace(
                op,
                forward_s=op.forward_s * forward,
                backward_input_s=op.backward_input_s * backward,
                backward_weight_s=op.backward_weight_s * backward,
            )
            for op in device.op_times
        ),
        optimizers=tuple(
            replace(o, alpha_s=o.alpha_s * optimizer, beta_s_per_byte=o.beta_s_per_byte * optimizer)
            for o in device.optimizers
        ),
        codings=tuple(
            replace(c, alpha_s=c.alpha_s * both, beta_s_per_element=c.beta_s_per_element * both) for c in device.codings
        ),
        action_s=max(0.0, device.action_s + action_s),
    )


def _backward_curves(device: Device) -> list[Curve]:
    """For kinds that were measured forward only, the backward as it is priced without a measurement."""
    measured: tuple[Curve | Surface, ...] = (*device.curves, *device.surfaces)
    known = {one.kind for one in measured if one.direction == "backward"}
    return [
        replace(
            curve,
            direction="backward",
            points=tuple((work, s * (2.0 if curve.kind in TWO_SIDED else 1.5)) for work, s in curve.points),
        )
        for curve in device.curves
        if curve.kind not in known
    ]


def _link(link: Link, factor: float) -> Link:
    return replace(
        link,
        alpha_s=link.alpha_s * factor,
        message_s=link.message_s * factor,
        call_s=link.call_s * factor,
        bytes_per_s=link.bytes_per_s / factor,
        pair_bytes_per_s=link.pair_bytes_per_s / factor,
    )


def _wire(wire: CollectiveMeasurement, factor: float) -> CollectiveMeasurement:
    return replace(
        wire,
        pieces=tuple(Piece(p.from_bytes, p.alpha_s * factor, p.beta_s_per_byte * factor) for p in wire.pieces),
        points=tuple((size, seconds * factor) for size, seconds in wire.points),
    )
