"""A stage's parameters and buffers: how they get their first values, and how they leave under their original names.

Rank 0's values win, as in DDP: tensor by tensor they are broadcast and every rank keeps its block, so no rank ever
holds more than its shards and one whole tensor besides what it was given. Tensors on the meta device take ``init``.

Under mixed precision programs read 16 bits, and what the optimizer updates, an fp32 master, has storage of its own: the
owner's stage keeps it, cut as the optimizer's state is. It is the parameter's value in state dicts. Frozen parameters
and copies of tied ones have no master; where programs gather a parameter themselves, its master is what they gather.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...compiler.ir.graph import Graph, TensorType
from ...compiler.ir.precision import PRECISIONS, computed_type
from ...compiler.ir.spec import Spec
from ...compiler.plan.cross_mesh import MeshLayout, cut
from ...compiler.plan.plan import Plan, parameter_stages
from ..transport.cross_mesh import transfer_now, wire
from ..transport.error_propagation import raise_on_all_ranks
from ..transport.process_groups import DistributedComm
from .optimizer import name_parameter
from .tied import parameter_layout

__all__ = [
    "BufferInfo", "Init", "ModelInfo", "ParameterInfo", "ParameterState", "Weights", "without_initial_values",
    "without_values",
]  # fmt: skip

Init = Callable[[str, torch.Tensor], "torch.Tensor | None"]
Weights = nn.Module | Mapping[str, torch.Tensor]


class ParameterInfo(NamedTuple):
    """A parameter of the original model; aliases are its other names."""

    type: TensorType
    aliases: tuple[str, ...] = ()
    requires_grad: bool = True


class BufferInfo(NamedTuple):
    """A buffer of the original model; node: its placeholder's name in the graph, the key of ``Chunk.sources``."""

    type: TensorType
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    node: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """The tensors of the original model by first qualified name, those that no chunk uses included."""

    parameters: Mapping[str, ParameterInfo]
    buffers: Mapping[str, BufferInfo] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, model: nn.Module) -> ModelInfo:
        """Every tensor that programs or state dicts need; those that the graph does not have come from the model."""
        parameters: dict[str, ParameterInfo] = {}
        buffers: dict[str, BufferInfo] = {}
        results = {result.name for result in graph.results}
        for node in graph.placeholders("parameter", "buffer"):
            source = node.meta["source"]
            if not (node.users or source.persistent or source.name in results):
                continue  # nothing needs its value
            if source.kind == "parameter":
                parameters[source.name] = ParameterInfo(node.meta["type"], source.aliases, source.requires_grad)
            else:
                buffers[source.name] = BufferInfo(node.meta["type"], source.aliases, source.persistent, node.name)
        known_names = {alias for name, p in parameters.items() for alias in (name, *p.aliases)}
        known_names |= {alias for name, b in buffers.items() for alias in (name, *b.aliases)}
        for name, parameter in model.named_parameters():
            if name not in known_names:
                kind = TensorType(tuple(parameter.shape), parameter.dtype)
                parameters[name] = ParameterInfo(kind, (), parameter.requires_grad)
        return cls(parameters, buffers)


def without_values(model: nn.Module) -> nn.Module:
    """The model on the meta device, tied as it is, so that whole weights live no longer than their owner keeps them;
    the model itself where it cannot be copied."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    meta_tensors = {
        id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) if isinstance(x, nn.Parameter) else x.to("meta")
        for _, x in tensors
    }
    try:
        return copy.deepcopy(model, meta_tensors)
    except Exception:  # a module may hold what no copy can be made of: a lock, an open file
        return model


def without_initial_values(name: str, whole: torch.Tensor) -> None:
    """An ``Init`` for tensors that get their values later."""


class ParameterState:
    """One rank's shards, and where every tensor of the model lives.

    parameters: local leaves, as programs read them; masters: of those, what the optimizer updates where that is
    another tensor already at the start (mixed precision); buffers: local tensors (replaced, not written to, by the
    executor); unplaced: whole tensors that no stage uses, kept on rank 0 for the state dict.
    """

    def __init__(
        self,
        plan: Plan,
        info: ModelInfo,
        comm: DistributedComm | None,
        device: torch.device,
        buffer_specs: Sequence[Mapping[str, Spec]],
        buffer_writers: Mapping[str, int],
    ) -> None:
        self.plan, self.info, self.comm, self.device = plan, info, comm, device
        self.buffer_specs = buffer_specs  # per stage: buffer → its placement there
        self.rank = dist.get_rank()
        self.stage = plan.stage_of(self.rank)
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.unplaced: dict[str, torch.Tensor] = {}
        placed = parameter_stages(plan.stages)
        self.homes: dict[str, tuple[int, ...]] = dict(placed)  # the first stage is the tensor's owner
        for name in info.buffers:
            holders = [index for index, specs in enumerate(buffer_specs) if name in specs]
            writer = buffer_writers.get(name)
            self.homes[name] = tuple(([writer] if writer is not None else []) + [s for s in holders if s != writer])
        unknown = [name for name in placed if name not in info.parameters]
        if unknown:
            raise ValueError(
                f"the plan places parameters that the model does not have: {', '.join(unknown[:5])}; plan again"
            )
        self._mesh: DeviceMesh | None = None

    def layout(self, name: str, stage: int) -> MeshLayout:
        """The layout of the parameter or buffer on a stage that holds it."""
        if name in self.info.parameters:
            return parameter_layout(self.plan, stage, name)
        here = self.plan.stages[stage]
        return MeshLayout(here.devices, here.mesh_shape, self.buffer_specs[stage][name])

    def value_layout(self, name: str, stage: int) -> MeshLayout:
        """The layout, on a stage that holds it, of the value that state dicts show."""
        mastered = name in self.info.parameters and self._has_master(name, stage)
        return parameter_layout(self.plan, stage, name, "optimizer") if mastered else self.layout(name, stage)

    def value(self, name: str) -> torch.Tensor | None:
        """This rank's block of the parameter or buffer as state dicts show it; None if it holds none."""
        held: Mapping[str, torch.Tensor] = self.masters
        return held.get(name, self.parameters.get(name, self.buffers.get(name)))

    def _has_master(self, name: str, stage: int) -> bool:
        trained = self.plan.precision in PRECISIONS and self.info.parameters[name].requires_grad
        return trained and stage == self.homes[name][0] and not self._is_gathered(name, stage)

    def _is_gathered(self, name: str, stage: int) -> bool:
        """True if programs gather the parameter themselves."""
        home = self.plan.stages[stage].homes[name]
        return home.stored != home.compute.value

    def types(self) -> Iterator[tuple[str, TensorType]]:
        """Every tensor of the model and its global type, parameters first."""
        yield from ((name, parameter.type) for name, parameter in self.info.parameters.items())
        yield from ((name, buffer.type) for name, buffer in self.info.buffers.items())

    def names(self, name: str) -> tuple[str, ...]:
        """All names of one tensor."""
        entry = self.info.parameters.get(name) or self.info.buffers[name]
        return (name, *entry.aliases)

    # ---- first values

    def initialize(self, weights: Weights | None, init: Init | None, seed: int = 0) -> None:
        """Fill this rank's shards. Collective.

        weights: a module or a state dict; only rank 0's is read. init: ``(name, whole tensor) -> None`` after writing
        in place, or a tensor; called for tensors that ``weights`` lacks or has on the meta device, with a generator
        seeded by (seed, name), so the values do not depend on the plan. Raises ValueError on every rank if a tensor has
        neither.
        """
        tensors = _tensors(weights)
        available = [
            next((alias for alias in self.names(name) if _has_values(tensors.get(alias))), None)
            for name, _ in self.types()
        ]
        shared: list[Any] = [
            (available, {n: tuple(tensors[a].shape) for (n, _), a in zip(self.types(), available, strict=True) if a})
        ]
        dist.broadcast_object_list(shared, src=0)
        source_names, shapes = shared[0]
        lacking = [name for (name, _), alias in zip(self.types(), source_names, strict=True) if alias is None]
        if lacking and init is None:
            raise ValueError(
                f"weights are needed for every tensor, but got none on rank 0 for {len(lacking)} "
                f"({', '.join(lacking[:5])}); "
                "give the model real weights, or init= as a function (name, tensor) or a state dict"
            )
        for name, kind in self.types():
            if name in shapes and shapes[name] != kind.shape:
                raise ValueError(f"{name!r} has shape {list(kind.shape)} in the plan, but got {list(shapes[name])}")
        fault: Exception | None = None  # of init, on this rank: told to all ranks after the last broadcast
        whole: torch.Tensor | None = None
        for (name, kind), alias in zip(self.types(), source_names, strict=True):
            needed = self.stage in self.homes.get(name, ()) or (self.rank == 0 and not self.homes.get(name))
            if alias is not None:
                whole = torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
                if self.rank == 0:
                    whole.copy_(tensors[alias].detach())
                dist.broadcast(wire(whole), 0)
            elif needed and fault is None:
                assert init is not None
                try:
                    whole = _make_initial(name, kind, init, seed).to(self.device)
                except Exception as error:
                    fault = error
            if needed and whole is not None:
                self._keep(name, whole)
            whole = None  # before the next one is made: one whole tensor at a time
        raise_on_all_ranks(fault)

    def _keep(self, name: str, whole: torch.Tensor) -> None:
        if not self.homes.get(name):
            self.unplaced[name] = whole.cpu()
            return
        assert self.stage is not None
        if name not in self.info.parameters:
            self.buffers[name] = self._block(whole, self.layout(name, self.stage), whole.dtype)
            return
        kind, trained = self.info.parameters[name].type, self.info.parameters[name].requires_grad
        is_gathered = trained and self._is_gathered(name, self.stage)
        dtype = kind.dtype if is_gathered else computed_type(kind, self.plan.precision).dtype
        places = [(self.parameters, self.layout(name, self.stage), dtype)]
        if self._has_master(name, self.stage):
            places.append((self.masters, self.value_layout(name, self.stage), kind.dtype))
        for held, layout, dtype in places:
            local = self._block(whole, layout, dtype)
            if name in held:
                with torch.no_grad():
                    held[name].copy_(local)
            else:
                held[name] = name_parameter(nn.Parameter(local, requires_grad=trained), name, whole.shape)

    def _block(self, whole: torch.Tensor, layout: MeshLayout, dtype: torch.dtype) -> torch.Tensor:
        local = cut(whole, layout.box(whole.shape, self.rank))
        return local.to(dtype, memory_format=torch.contiguous_format, copy=True)

    # ---- state dicts

    def device_mesh(self) -> DeviceMesh:
        """This stage's devices as a torch DeviceMesh, axes of extent 1 left out (one axis stays)."""
        assert self.comm is not None
        if self._mesh is None:
            axes = [axis for axis, size in enumerate(self.comm.mesh_shape) if size > 1]
            kind = self.device.type
            if len(axes) > 1:
                groups = [self.comm.groups[axis,] for axis in axes]
                mesh = torch.tensor(self.comm.devices).view([self.comm.mesh_shape[axis] for axis in axes])
                names = tuple(f"axis{axis}" for axis in axes)
                self._mesh = DeviceMesh.from_group(groups, kind, mesh=mesh, mesh_dim_names=names)
            else:
                group = self.comm.groups[(axes[0],) if axes else ()]
                mesh = torch.tensor(self.comm.devices)
                self._mesh = DeviceMesh.from_group(group, kind, mesh=mesh, mesh_dim_names=("axis0",))
        return self._mesh

    def as_dtensor(
        self, local: torch.Tensor, name: str, shape: torch.Size | tuple[int, ...], layout: MeshLayout | None = None
    ) -> DTensor:
        """This rank's block of a tensor laid out like parameter or buffer ``name``, or as ``layout`` says, as a DTensor
        over the stage's mesh."""
        assert self.stage is not None
        layout = layout or self.value_layout(name, self.stage)
        wide = [p for p, size in zip(layout.spec, layout.mesh_shape, strict=True) if size > 1]
        placements = [Shard(p.dim) if p.is_shard else Replicate() for p in wide] or [Replicate()]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(), self.device_mesh(), placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def state_dict(self, owned_only: bool = False) -> dict[str, Any]:
        """Original name → DTensor, of this rank's stage, under all names; what no stage uses is a plain tensor on rank
        0.

        The DTensors share memory with the live parameters. owned_only: leave out tied copies and buffers that another
        stage owns.
        """
        tensors: dict[str, Any] = {}
        for name, kind in self.types():
            if name in self.info.buffers and not self.info.buffers[name].persistent:
                continue
            local = self.value(name)
            if owned_only and local is not None and self.homes[name][0] != self.stage:
                continue
            value = self.unplaced.get(name) if local is None else self.as_dtensor(local, name, kind.shape)
            if value is not None:
                tensors.update(dict.fromkeys(self.names(name), value))
        return tensors

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take values by any of a tensor's names: whole tensors, or DTensors as ``state_dict`` makes them. Tied copies
        need both stages to load.

        Raises ValueError for a name that is missing or a shape that differs; nothing is changed then.
        """
        mine = {**self.parameters, **self.masters, **self.buffers, **self.unplaced}
        chosen: dict[str, Any] = {}
        for name, kind in self.types():
            if name not in mine or (name in self.info.buffers and not self.info.buffers[name].persistent):
                continue
            key = next((alias for alias in self.names(name) if alias in values), None)
            if key is None:
                raise ValueError(f"a state dict must have every tensor of this rank's stage, but got none for {name!r}")
            if tuple(values[key].shape) != kind.shape:
                raise ValueError(f"{name!r} has shape {list(kind.shape)}, but got {list(values[key].shape)}")
            chosen[name] = values[key]
        for name, value in chosen.items():
            if isinstance(value, DTensor):
                mine_now = self.as_dtensor(mine[name], name, value.shape)
                if value.device_mesh == mine_now.device_mesh and value.placements == mine_now.placements:
                    with torch.no_grad():
                        mine[name].copy_(value.to_local())
                    continue
                value = value.full_tensor()
            self._keep(name, value.detach().to(self.device))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Original names → whole CPU tensors on rank 0, empty elsewhere; loads strictly into the original model.
        Collective."""
        tensors: dict[str, torch.Tensor] = {}
        for name, _ in self.types():
            if name in self.info.buffers and not self.info.buffers[name].persistent:
                continue
            whole = self._on_first(name)
            if whole is not None:
                tensors.update(dict.fromkeys(self.names(name), whole.cpu()))
        return tensors

    def whole(self, name: str) -> torch.Tensor:
        """One whole tensor on every rank. Collective."""
        kind = dict(self.types())[name]
        on_first_rank = self._on_first(name)
        whole = (
            torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
            if on_first_rank is None
            else on_first_rank.to(self.device)
        )
        dist.broadcast(wire(whole), 0)
        return whole

    def _on_first(self, name: str) -> torch.Tensor | None:
        """The whole tensor on rank 0, None elsewhere."""
        stages = self.homes.get(name, ())
        if not stages:
            return self.unplaced.get(name)
        if self.rank != 0 and self.stage != stages[0]:
            return None
        kind = dict(self.types())[name]
        local = self.value(name) if self.stage == stages[0] else None
        local = None if local is None else local.detach().to(kind.dtype)
        return transfer_now(
            local, kind.shape, kind.dtype, self.value_layout(name, stages[0]), MeshLayout((0,), (), ()), self.device
        )


def _tensors(weights: Weights | None) -> dict[str, torch.Tensor]:
    """All names of all tensors of a module or a state dict."""
    if weights is None:
        return {}
    if isinstance(weights, nn.Module):
        return {
            **dict(weights.named_parameters(remove_duplicate=False)),
            **dict(weights.named_buffers(remove_duplicate=False)),
        }
    return dict(weights)


def _has_values(x: torch.Tensor | None) -> bool:
    return x is not None and x.device.type != "meta"


def _make_initial(name: str, kind: TensorType, init: Init, seed: int) -> torch.Tensor:
    """Call ``init`` for one whole CPU tensor under a generator of its own."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    whole = torch.empty(kind.shape, dtype=kind.dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        value = init(name, whole)
    value = whole if value is None else value.detach()
    if tuple(value.shape) != kind.shape:
        raise ValueError(f"init must give {name!r} the shape {list(kind.shape)}, but got {list(value.shape)}")
    return value.to(kind.dtype)
