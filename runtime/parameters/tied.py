"""Tied parameters: those that several stages hold.

Such a parameter has an owner, the first of its stages. The others send it their reduced gradient and get the updated
value back, so all copies stay bit-equal. A gradient travels from where the copy's stage leaves it after the reduction
to where the owner's does; a value from where the owner stores it to where the copy's stage does. Under mixed precision
gradients travel in fp32, and values in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...compiler.ir.graph import TensorType
from ...compiler.ir.precision import computed_type
from ...compiler.ir.spec import Spec
from ...compiler.plan.cross_mesh import MeshLayout, tiles
from ...compiler.plan.plan import Plan, parameter_stages
from ..transport.cross_mesh import Port

__all__ = ["TiedParameters", "parameter_layout"]

_TIED_TAG = 1 << 30


def parameter_layout(plan: Plan, stage: int, name: str, of: str = "stored") -> MeshLayout:
    """The layout of a parameter's value on that stage; ``of``: or of its "gradient" after the reduction, or of its
    "optimizer" state."""
    stage_plan = plan.stages[stage]
    spec: Spec = getattr(stage_plan.homes[name], of)
    return MeshLayout(stage_plan.devices, stage_plan.mesh_shape, spec)


class TiedParameters:
    """The parameters that more than one stage holds, as this rank sees them.

    local: this rank's leaves by name; held: where their reduced gradients are, by name; types: the global type of each
    parameter.
    """

    def __init__(
        self,
        plan: Plan,
        local: Mapping[str, nn.Parameter],
        held: Mapping[str, nn.Parameter],
        types: Mapping[str, TensorType],
        rank: int,
        device: torch.device,
        group: Any,
    ) -> None:
        mine = plan.stage_of(rank)
        self.local, self.held = local, held
        self.up: list[tuple[str, Port, bool]] = []  # copies → owner (gradients); whether this rank is the owner
        self.down: list[tuple[str, Port, bool]] = []  # owner → copies (values)
        self.copies: set[str] = set()  # names whose owner is another stage
        tag = _TIED_TAG
        for name, stages in parameter_stages(plan.stages).items():
            owner, *others = stages
            if mine in others:
                self.copies.add(name)
            for other in others:
                for of, source_stage, target_stage, ports in (
                    ("gradient", other, owner, self.up),
                    ("stored", owner, other, self.down),
                ):
                    source, target = (parameter_layout(plan, at, name, of) for at in (source_stage, target_stage))
                    messages = tiles(types[name].shape, source, target)
                    shape = target.local_shape(types[name].shape)
                    kind = types[name] if of == "gradient" else computed_type(types[name], plan.precision)
                    port = Port.make(messages, rank, tag, shape, kind.dtype, device=device, group=group)
                    tag += len(messages)
                    if mine in (owner, other):
                        ports.append((name, port, mine == owner))

    def gather_gradients(self) -> None:
        """Each owner's gradient becomes the sum over all copies; the copies' gradients are let go."""
        active = [(name, port, owner) for name, port, owner in self.up if self.local[name].requires_grad]
        arriving = [(name, port.receive(0)) for name, port, owner in active if owner]
        started = []
        for name, port, owner in active:
            if not owner:
                leaf = self.held[name]
                started += port.send(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, 0)
                leaf.grad = None
        for name, incoming in arriving:
            leaf, addend = self.held[name], incoming.wait()
            # not in place: the gradient may be a view of a bucket
            leaf.grad = addend if leaf.grad is None else leaf.grad + addend
        for work, _ in started:
            work.wait()

    def publish_values(self) -> None:
        """Every copy becomes bit-equal to its owner's value."""
        active = [(name, port, owner) for name, port, owner in self.down if self.local[name].requires_grad]
        arriving = [(name, port.receive(0)) for name, port, owner in active if not owner]
        started = []
        for name, port, owner in active:
            if owner:
                started += port.send(self.local[name].detach().to(port.dtype), 0)
        for name, incoming in arriving:
            with torch.no_grad():
                self.local[name].copy_(incoming.wait())
        for work, _ in started:
            work.wait()
