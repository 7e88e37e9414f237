"""Tiny random instances for the exhaustive checker: a model of two to four layers, one to four devices, a batch.

    kind      chain, norm, skip, fan-out, two-heads, tied
    cluster   one host; two hosts of 2 + 1 devices; hosts of unlike devices; 1 to 4 devices, the primes 2 and 3 included
    memory    none, or binding: a part of what the best plan without a limit needs

Sizes are such that compute, messages and reductions all count, and that gradients fill their buckets. The same seed
gives the same case.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from meshwright.compiler.cost.parameter_sharding import PATTERNS
from meshwright.compiler.plan.plan import RECOMPUTE_MODES
from meshwright.compiler.search.space import SCHEDULES, Space
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.hardware import Device, Host
from torch import Tensor, nn

__all__ = ["KINDS", "RandomCase", "chunked_case", "random_case", "with_memory"]

KINDS = ("chain", "norm", "skip", "fan-out", "two-heads", "tied")
PLENTY = 10**15
PLAIN = Space()
_CHUNKED = (("interleaved",), ("zb-v",), ("1f1b", "interleaved"), ("1f1b", "zb-v"), SCHEDULES)


class RandomModel(nn.Module):
    """Linears with what ``kind`` says between them; the mean squared error over [batch, sequence, features]."""

    def __init__(self, kind: str, widths: list[int], activate: list[bool]) -> None:
        super().__init__()
        self.kind, self.activate = kind, activate
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        self.norm = nn.LayerNorm(widths[1], elementwise_affine=False) if kind == "norm" else None
        if kind == "tied":
            self.linears[-1].weight = self.linears[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        linears, h = list(self.linears), x
        if self.kind == "two-heads":
            h = self._act(0, linears[0](h))
            return F.mse_loss(linears[1](h), y) + F.mse_loss(linears[2](h), y)
        if self.kind == "fan-out":
            h = self._act(0, linears[0](h))
            return F.mse_loss(self._act(1, linears[1](h)) * linears[2](h), y)
        first = None
        for index, linear in enumerate(linears):
            h = self._act(index, linear(h))
            if index == 0:
                h = self.norm(h) if self.norm is not None else h
                first = h
        if self.kind == "skip":
            h = h + first
        return F.mse_loss(h, y)

    def _act(self, index: int, x: Tensor) -> Tensor:
        return F.gelu(x) if self.activate[index] else x


@dataclass(frozen=True)
class RandomCase:
    """One instance. memory: None, or the part of what the best plan without a limit needs on its fullest device."""

    seed: int
    kind: str
    model: nn.Module
    inputs: tuple[Tensor, Tensor]
    cluster: Cluster
    global_batch: int
    memory: float | None
    space: Space = PLAIN

    def __str__(self) -> str:
        shapes = " ".join(f"{p.shape[1]}->{p.shape[0]}" for p in self.model.parameters())
        limit = "" if self.memory is None else f", memory {self.memory:.2f}"
        wide = "".join(f", {word}" for word, ok in (("zero", len(self.space.residencies) > 1),
                                                    ("recompute", len(self.space.recompute) > 1),
                                                    ("gpipe", "gpipe" in self.space.schedules)) if ok)  # fmt: skip
        if self.space.chunks == (2,):
            wide += f", {' '.join(self.space.schedules)}"
        shape = tuple(self.inputs[0].shape)
        return f"{self.seed}: {self.kind} [{shapes}] {shape} on {self.cluster.name}{limit}{wide}"


def random_case(seed: int, most_devices: int = 4, wide: bool = True) -> RandomCase:
    """The case of this seed. Half of all cases and more bind memory, fan out or skip. wide: parameters in ZeRO patterns
    and recompute per layer may stand for choice."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    cluster = _cluster(draw, most_devices)
    depth = (
        3 if kind in ("two-heads", "fan-out", "skip") else draw.choice((2, 2, 3) if cluster.num_devices > 3 else (2, 3))
    )
    widths = [draw.choice((512, 768, 1024, 1536, 2048, 3072, 4096)) for _ in range(depth + 1)]
    if draw.random() < 0.5:  # equal widths inside make more cuts
        widths[1:] = [widths[1]] * depth
    if kind in ("two-heads", "fan-out"):
        widths[2] = widths[3]  # both read widths[1]
    if kind == "skip":
        widths[-1] = widths[1]
    if kind == "tied":
        widths[-1], widths[-2] = widths[1], widths[0]
        if depth == 2:
            widths[1] = widths[2] = widths[0]
    batch, sequence = draw.choice((4, 6, 8)), draw.choice((64, 256, 1024))
    with torch.device("meta"):
        model = _built(kind, widths, [draw.random() < 0.5 for _ in range(depth)])
        out = widths[-1]
        inputs = torch.zeros(batch, sequence, widths[0]), torch.zeros(batch, sequence, out)
    memory = draw.choice((0.9, 0.75, 0.6, 0.45)) if draw.random() < 0.35 else None
    return RandomCase(seed, kind, model, inputs, cluster, batch, memory, _space(draw) if wide else PLAIN)


def chunked_case(seed: int) -> RandomCase:
    """A case with layers enough for stages of two chunks: 4 to 6 of them on 2 devices, 4 on 3."""
    draw = random.Random(seed)
    kind = draw.choice(("chain", "chain", "norm", "tied"))
    name = draw.choice(("p3.16xlarge", "dgx-a100-80", "8x4090"))
    base = Cluster.preset(name, 1)
    number = draw.choice((2, 2, 2, 2, 2, 2, 2, 3))
    host = replace(base.hosts[0], device=_plain(base.hosts[0].device), num_devices=number)
    depth = 4 if number > 2 else draw.choice((4, 4, 5, 6))
    widths = [draw.choice((512, 1024, 2048, 4096))] * (depth + 1)
    if draw.random() < 0.5:  # layers of unlike size
        widths = [draw.choice((512, 768, 1024, 1536, 2048, 3072, 4096)) for _ in range(depth + 1)]
    if kind == "tied":
        widths[-1], widths[-2] = widths[1], widths[0]
    batch, sequence = draw.choice((4, 6, 8)), draw.choice((64, 256, 1024))
    activate = [draw.random() < 0.5 for _ in range(depth)]
    space = Space(
        schedules=draw.choice(_CHUNKED),
        chunks=(2,),
        residencies=PATTERNS if draw.random() < 0.3 else ("replicated",),
        recompute=RECOMPUTE_MODES if draw.random() < 0.3 else ("none",),
    )
    if len(space.schedules) == 1:  # nothing fits unless no layer is small enough to join another
        widths = [widths[0]] * (depth + 1)
    with torch.device("meta"):
        model = _built(kind, widths, activate)
        inputs = torch.zeros(batch, sequence, widths[0]), torch.zeros(batch, sequence, widths[-1])
    memory = draw.choice((0.9, 0.75, 0.6)) if draw.random() < 0.4 else None
    cluster = replace(base, name=f"{number}x{host.device.name.split()[0]}", hosts=(host,))
    return RandomCase(seed, kind, model, inputs, cluster, batch, memory, space)


def _space(draw: random.Random) -> Space:
    return Space(
        schedules=("1f1b", "gpipe") if draw.random() < 0.2 else ("1f1b",),
        residencies=PATTERNS if draw.random() < 0.4 else ("replicated",),
        recompute=RECOMPUTE_MODES if draw.random() < 0.3 else ("none",),
    )


def _built(kind: str, widths: list[int], activate: list[bool]) -> RandomModel:
    model = RandomModel(kind, widths, activate)
    if kind in ("two-heads", "fan-out"):
        model.linears[2] = nn.Linear(widths[1], widths[3], bias=False)
    return model


def _cluster(draw: random.Random, most_devices: int) -> Cluster:
    name = draw.choice(("p3.16xlarge", "dgx-a100-80", "8x4090"))
    base = Cluster.preset(name, 1)
    host = replace(base.hosts[0], device=_plain(base.hosts[0].device))
    other = _plain(Cluster.preset(draw.choice(("p3.16xlarge", "dgx-a100-80", "8x4090"))).hosts[0].device)
    shape = draw.choice(("one", "one", "uneven", "mixed"))
    if shape == "one" or most_devices < 3:
        hosts = [replace(host, num_devices=draw.choice((1, 2, 2, 3, 4)[: most_devices + 1]))]
    elif shape == "uneven":
        hosts = [replace(host, num_devices=n) for n in draw.choice(((2, 1), (1, 2)))]
    else:
        hosts = [
            replace(host, num_devices=n)
            for n in draw.choice(((2, 1), (1, 1), (2, 2)) if most_devices > 3 else ((1, 1), (2, 1)))
        ]
        hosts[1:] = [replace(one, device=other) for one in hosts[1:]]
    text = "+".join(f"{one.num_devices}x{one.device.name.split()[0]}" for one in hosts)
    return replace(base, name=text, hosts=tuple(hosts))


def _plain(device: Device) -> Device:
    """The device without a limit that matters, hiding nothing of a collective."""
    return replace(device, memory_bytes=PLENTY, overlap=0.0)


def with_memory(cluster: Cluster, nbytes: int) -> Cluster:
    """The cluster with so many bytes on every device."""
    hosts: list[Host] = [replace(host, device=replace(host.device, memory_bytes=nbytes)) for host in cluster.hosts]
    return replace(cluster, hosts=tuple(hosts))
