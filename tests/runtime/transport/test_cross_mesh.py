"""Tiles of a transfer between meshes deliver every element once."""

from __future__ import annotations

import random

import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.compiler.ir.spec import R, S
from meshwright.compiler.plan.cross_mesh import MeshLayout, coordinates, tiles

MESHES = [(), (1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_tiles_deliver_every_element_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([12, 24]) for _ in range(rng.randint(1, 3)))
    layouts = []
    for first in (0, rng.choice([2, 10])):  # the device sets may overlap, as in a gather to rank 0
        mesh = rng.choice(MESHES)
        spec = tuple(rng.choice([R, *[S(d) for d in range(len(shape))]]) for _ in mesh)
        devices = list(range(first, first + torch.Size(mesh).numel()))
        rng.shuffle(devices)
        layouts.append(MeshLayout(tuple(devices), mesh, spec))
    source, target = layouts
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def block(layout: MeshLayout, device: int) -> torch.Tensor:
        out = whole
        place = coordinates(layout.devices.index(device), layout.mesh_shape)
        for placement, size, index in zip(layout.spec, layout.mesh_shape, place, strict=True):
            if placement.is_shard:
                out = out.chunk(size, placement.dim)[index]
        return out

    arrived = {device: torch.full(target.local_shape(shape), -1) for device in target.devices}
    times = {device: torch.zeros(target.local_shape(shape)) for device in target.devices}
    sent = dict.fromkeys(source.devices, 0)
    messages = tiles(shape, source, target)
    assert len({(tile.source, tile.target) for tile in messages}) == len(messages)  # one message per pair of ranks
    for tile in messages:
        take = tuple(slice(*box) for box in tile.source_box)
        put = tuple(slice(*box) for box in tile.target_box)
        arrived[tile.target][put] = block(source, tile.source)[take]
        times[tile.target][put] += 1
        if tile.source != tile.target:
            sent[tile.source] += torch.Size(tile.shape).numel()
        assert (
            tile.source == tile.target
            or tile.target not in source.devices
            or not torch.equal(block(source, tile.source), block(source, tile.target))
        ), "a device that holds the block takes its own"
    for device in target.devices:
        assert torch.equal(arrived[device], block(target, device))
        assert bool((times[device] == 1).all())
    if not set(source.devices) & set(target.devices):  # balanced: replicas of a block differ by one message at most
        largest = max(torch.Size(tile.shape).numel() for tile in messages)
        for device in source.devices:
            twins = [other for other in source.devices if source.box(shape, other) == source.box(shape, device)]
            assert max(sent[t] for t in twins) - min(sent[t] for t in twins) <= largest
