"""One chunk on all devices of its stage, as threads in lockstep; tensors between chunks as the runtime cuts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import BrokenBarrierError
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

from ..errors import FailedError
from ..ir.reshard import apply_steps, steps_between
from ..ir.spec import Spec, without_partials
from ..plan.cross_mesh import MeshLayout, cut, tiles
from .chunk_programs import PlacedChunk
from .lockstep import LockstepComm, LockstepGroup
from .single_device import distinct
from .split_execution import doubled

__all__ = ["Devices", "Parts", "blocks_of", "moved"]


T = TypeVar("T")
Parts = list[Tensor]  # one device's part each, by rank in the mesh


class Devices:
    """The devices of one part: their weights and buffers, and what their forwards keep for the backwards.

    weights, buffers, constants: whole tensors by name. ``gradients``: name → each device's sum so far.
    """

    def __init__(
        self, part: PlacedChunk, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor], stored: Mapping[str, Spec], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.part, self.group = part, LockstepGroup(part.mesh_shape)
        self.dtype, self.seed, self.step = dtype, 0, 0
        self.calls = [(n, n.target, *doubled((n.args, dict(n.kwargs)), dtype)) for n in part.nodes if n.target]
        self.fixed: dict[str, Parts] = {}
        self.buffers: dict[str, Parts] = {}
        self.saved: dict[int, list[dict[str, Any]]] = {}
        self.gradients: dict[str, Parts] = {}
        for slot in part.program.slots:
            spec = slot.pair.value
            if slot.kind == "parameter":
                home = stored.get(slot.name, spec)
                blocks = self.resharded(blocks_of(weights[slot.name], part.layout(home)), home, spec)
                self.fixed[slot.node] = [x.requires_grad_(slot.requires_grad) for x in blocks]
            elif slot.kind == "constant":
                self.fixed[slot.node] = blocks_of(constants[slot.name], part.layout(spec))
            elif slot.kind == "buffer":
                self.buffers[slot.name] = blocks_of(buffers[slot.name], part.layout(spec))

    # ---- actions

    def forward(self, microbatch: int, inputs: Mapping[str, Tensor], received: Mapping[str, Parts]) -> None:
        """Run the program node by node. inputs: the whole microbatch; received: by slot, with gradient or without."""
        given: dict[str, Parts] = {**self.fixed, **received}
        for slot in self.part.program.slots:
            if slot.kind == "input":
                given[slot.node] = blocks_of(inputs[slot.name], self.part.layout(slot.pair.value))
            elif slot.kind == "buffer":
                given[slot.node] = self.buffers[slot.name]
        results = self.part.results

        def device(comm: LockstepComm) -> dict[str, Any]:
            held: dict[str, Any] = {}
            with torch.enable_grad():
                for node, target, args, kwargs in self.calls:
                    held[node.name] = _call(node, target, args, kwargs, held, given, comm.rank)
            return held

        self.saved[microbatch] = self._run(device, microbatch)
        for exit, node in zip(self.part.program.exits, results, strict=True):
            if exit.kind == "buffer":
                self.buffers[exit.name] = [x.detach() for x in self.tensor(microbatch, node.name)]

    def backward(self, microbatch: int, arrived: Mapping[str, Parts], scale: float) -> dict[str, list[Tensor | None]]:
        """Gradients by node and device, against the cotangents that ``arrived`` for sends (by name) and ``scale`` for
        the loss. What weights get is added to ``gradients``."""
        program = self.part.program
        roots: dict[str, Parts] = {}
        for exit, node in zip(program.exits, self.part.results, strict=True):
            blocks = self.tensor(microbatch, node.name)
            if exit.kind == "send" and exit.name in arrived and blocks[0].requires_grad:
                one = arrived[exit.name]
                roots[node.name] = [a + b for a, b in zip(roots[node.name], one)] if node.name in roots else one
            elif exit.kind == "loss" and blocks[0].requires_grad:
                roots[node.name] = [torch.full_like(x, scale, requires_grad=False) for x in blocks]
        held = self.saved.pop(microbatch)
        tracked = [name for name, x in held[0].items() if isinstance(x, Tensor) and x.requires_grad]

        def device(comm: LockstepComm) -> dict[str, Tensor | None]:
            comm.phase, mine = "backward", held[comm.rank]
            if not roots:
                return {}
            seeds = [parts[comm.rank] for parts in roots.values()]
            try:
                grads = torch.autograd.grad(
                    [mine[name] for name in roots], [mine[name] for name in tracked], seeds, allow_unused=True
                )
            except BrokenBarrierError:
                raise
            except Exception as error:
                raise FailedError(None, error) from error
            return dict(zip(tracked, grads, strict=True))

        gradients = self._run(device, microbatch)
        out = {name: [one.get(name) for one in gradients] for name in tracked}
        self._accumulate(out)
        return out

    def _accumulate(self, found: Mapping[str, list[Tensor | None]]) -> None:
        for slot in self.part.program.slots:
            if slot.kind == "parameter" and slot.requires_grad:
                like = self.fixed[slot.node]
                fresh = [torch.zeros_like(x) if g is None else g for x, g in zip(like, found.get(slot.node, like))]
                if slot.node not in found:
                    fresh = [torch.zeros_like(x) for x in like]
                have = self.gradients.get(slot.name)
                self.gradients[slot.name] = fresh if have is None else [a + b for a, b in zip(have, fresh, strict=True)]

    # ---- tensors

    def tensor(self, microbatch: int, node: str) -> Parts:
        """The devices' parts of a node of this microbatch's forward."""
        return [one[node] for one in self.saved[microbatch]]

    def resharded(self, blocks: Parts, source: Spec, target: Spec) -> Parts:
        """Each device's part in another placement, by the collectives that lead there."""
        steps = steps_between(source, target)
        return self._run(lambda comm: apply_steps(blocks[comm.rank].detach(), steps, comm)) if steps else blocks

    def whole_blocks(self, blocks: Parts, spec: Spec) -> Parts:
        """The parts with their sums done, so that they can be sent."""
        return self.resharded(blocks, spec, without_partials(spec))

    def _run(self, fn: Callable[[LockstepComm], T], microbatch: int = 0) -> list[T]:
        return self.group.run(fn, self.seed, self.step, microbatch)


def _call(node: Node, target: Any, args: Any, kwargs: Any, held: Mapping[str, Any], given: Any, rank: int) -> Any:
    if node.op == "placeholder":
        return given[node.name][rank]
    used: list[Any] = []

    def take(operand: Node) -> Any:
        used.append(held[operand.name])
        return used[-1]

    args, kwargs = torch.fx.map_arg((args, kwargs), take)
    try:
        return distinct(target(*args, **kwargs), used)
    except BrokenBarrierError:
        raise
    except Exception as error:
        raise FailedError(node.name, error) from error


def blocks_of(x: Tensor, layout: MeshLayout) -> Parts:
    """Each device's block of a whole tensor."""
    return [cut(x.detach(), layout.box(x.shape, device)).clone() for device in layout.devices]


def moved(blocks: Sequence[Tensor], shape: Sequence[int], source: MeshLayout, target: MeshLayout) -> Parts:
    """The blocks that arrive where a tensor of global ``shape`` goes from one layout to another."""
    out = {device: blocks[0].new_empty(target.local_shape(shape)) for device in target.devices}
    for tile in tiles(shape, source, target):
        sent = cut(blocks[source.devices.index(tile.source)].detach(), tile.source_box)
        cut(out[tile.target], tile.target_box).copy_(sent)
    return list(out.values())
