"""What a person would write by hand with PyTorch alone: each peer as a contender on the ranks of this world.

All peers of a cell start from the same weights, see the same batch and use the same torch optimizer with the same
settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.plan.plan import Plan
from meshwright.models.architectures import GPT, Attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .interleaved import Contender
from .models import Case

__all__ = ["ddp", "dtensor", "eager", "even_cut", "fsdp", "make_optimizer", "pipelining", "planned_cut"]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every contender, with torch's defaults for the rest.

    Small steps, and an ``eps`` above the rounding of gradients: after a hundred steps losses differ by faults only.
    """
    return torch.optim.AdamW(parameters, lr=2e-5, eps=1e-6)


def _stepper(model: nn.Module, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    optimizer = make_optimizer(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        return loss

    return step


def eager(case: Case, compiled: bool = False) -> Contender:
    """The loop that everybody writes, on one device."""
    model = copy.deepcopy(case.model)
    step = _stepper(torch.compile(model, dynamic=False) if compiled else model, case.x, case.y)  # type: ignore[arg-type]
    return Contender("torch.compile" if compiled else "eager", step, lambda loss: float(loss.detach()))


# ---- data parallel


def _mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _part(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def ddp(case: Case, compiled: str = "", **options: Any) -> Contender:
    """DistributedDataParallel; every rank computes on its part of the batch. compiled: the model "inside" it, or the
    "whole", which is compiled bucket by bucket."""
    model = copy.deepcopy(case.model)
    if compiled == "inside":
        model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    model = DistributedDataParallel(model, **options)
    if compiled == "whole":
        model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    name = "DDP" + "".join(f", {key}" for key in options) + (f", compiled {compiled}" if compiled else "")
    return Contender(name, _stepper(model, _part(case.x), _part(case.y)), _mean_over_ranks)


def fsdp(case: Case, **options: Any) -> Contender:
    """``fully_shard`` of every unit that ``Case.shards`` names, then of the whole, as its documentation says."""
    model = copy.deepcopy(case.model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in case.shards(model):
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    name = "FSDP2" + "".join(f", {key}={value}" for key, value in options.items())
    return Contender(name, _stepper(model, _part(case.x), _part(case.y)), _mean_over_ranks)


# ---- tensor parallel


def _block_plan(entry: str) -> dict[str, Any]:
    columns, sequence = ColwiseParallel(), entry == "sequence"
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, Any] = {
        "attention.query": columns,
        "attention.key": columns,
        "attention.value": columns,
        "attention.out": rows,
        "feed_forward.up": columns,
        "feed_forward.down": rows,
    }
    if entry != "each":
        layout = Shard(1) if sequence else Replicate()
        plan["attention"] = PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),))
    if sequence:
        plan["feed_forward"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["norm1"] = plan["norm2"] = SequenceParallel()
    return plan


def dtensor(case: Case, entry: str, head: str) -> Contender:
    """``parallelize_module`` by the usual plan: columns for q, k, v and up, rows for out and down.

    entry: "each" (every column-parallel linear takes a replicated input by itself), "once" (the attention's input
    becomes a DTensor once, so that its three gradients are summed before one all-reduce) or "sequence" (the stream and
    the norms are cut along the sequence). head: "parallel" (cut over the vocabulary, with ``loss_parallel``),
    "gathered" (cut, then gathered logits) or "replicated".
    """
    model = copy.deepcopy(case.model)
    assert isinstance(model, GPT)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        block.attention.heads //= world
        block.attention.kv_heads //= world
        parallelize_module(block, mesh, _block_plan(entry))
    ends: dict[str, Any] = {}
    stream = Replicate()
    if entry == "sequence":
        stream = Shard(1)
        ends["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        ends["position_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        ends["norm"] = SequenceParallel()
    if head == "parallel":
        ends["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    elif head == "gathered":
        ends["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    parallelize_module(model, mesh, ends)
    optimizer = make_optimizer(model.parameters())
    context: Callable[[], AbstractContextManager[Any]] = loss_parallel if head == "parallel" else nullcontext

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with context():
            loss = model(case.x, case.y)
            loss.backward()
        optimizer.step()
        return loss

    def value(loss: torch.Tensor) -> float:
        return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())

    return Contender(f"DTensor, input {entry}, head {head}", step, value)


# ---- pipelines

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


def planned_cut(case: Case, plan: Plan) -> list[int]:
    """The virtual stage of each unit where a plan of ours cuts: it goes where most of its weights are."""
    assert case.units is not None
    places = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked).places()
    homes = {name: v for v, (s, c) in enumerate(places) for name in plan.stages[s].chunks[c].parameters}
    names = {id(parameter): name for name, parameter in case.model.named_parameters()}
    cut = []
    for unit in case.units(case.model):
        weight = [0] * len(places)
        for parameter in unit.parameters():
            weight[homes[names[id(parameter)]]] += parameter.numel()
        cut.append(weight.index(max(weight)))
    return cut


def even_cut(case: Case, parts: int) -> list[int]:
    """The virtual stage of each unit where every stage has as many units as any other, or one more."""
    assert case.units is not None
    count = len(case.units(case.model))
    return [index * parts // count for index in range(count)]


def pipelining(case: Case, kind: str, microbatches: int, cut: Sequence[int]) -> Contender:
    """``torch.distributed.pipelining`` under a schedule of ``_SCHEDULES``; cut: the virtual stage of each unit."""
    assert case.units is not None
    world, rank = dist.get_world_size(), dist.get_rank()
    parts, last = max(cut) + 1, world - 1
    mine = range(rank, parts, world)
    if kind == "zb-v":
        mine, last = (rank, 2 * world - 1 - rank), 0  # type: ignore[assignment]
    units = case.units(copy.deepcopy(case.model))
    modules = [nn.Sequential(*(unit for unit, v in zip(units, cut, strict=True) if v == stage)) for stage in mine]
    made = [PipelineStage(module, v, parts, torch.device("cpu")) for module, v in zip(modules, mine, strict=True)]
    schedule = _SCHEDULES[kind](made[0] if kind == "1f1b" else made, microbatches, loss_fn=case.loss_fn)
    optimizer = make_optimizer(nn.ModuleList(modules).parameters())

    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = {"target": case.y, "losses": losses} if rank == last else {}
        schedule.step(*([case.x] if rank == 0 else []), return_outputs=False, **given)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    def value(loss: torch.Tensor | None) -> float:
        whole = torch.zeros(()) if loss is None else loss.detach().clone()
        dist.broadcast(whole, last)
        return float(whole)

    counts = [sum(v == part for v in cut) for part in range(parts)]
    return Contender(f"pipelining {kind}", step, value, note=f"units per stage {counts}")
