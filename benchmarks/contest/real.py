"""The contenders of the cells with real compute: ours, DistributedDataParallel, DTensor tensor parallel, 1F1B.

Each function runs on every rank. All contenders of a cell start from the same weights and see the same batch, and use
the same torch optimizer with the same settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from meshwright.architectures import GPT, Attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
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

from .measure import Contender, Rounds, contest
from .models import Case, make_convnet, make_gpt, make_mlp

__all__ = ["data_parallel", "ddp", "ours", "pipeline", "pipeline_1f1b", "tensor_parallel"]

CASES: dict[str, Callable[..., Case]] = {"gpt": make_gpt, "mlp": make_mlp, "convnet": make_convnet}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every contender, with torch's defaults for the rest.

    Small steps, and an ``eps`` above the rounding of gradients: after a hundred steps losses differ by faults only.
    """
    return torch.optim.AdamW(parameters, lr=2e-5, eps=1e-6)


def ours(case: Case, strategy: dict[str, int] | None, microbatches: int = 1, mesh: Any = None) -> tuple[Contender, Any]:
    """Our contender, and the ``Parallel`` behind it."""
    parallel = mw.parallelize(
        copy.deepcopy(case.model),
        mesh,
        example_inputs=(case.x, case.y),
        optimizer=make_optimizer,
        strategy=strategy,
        microbatches=microbatches,
    )
    return Contender("ours", lambda: parallel.train_step(case.x, case.y), float), parallel


def _mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def ddp(case: Case, **options: Any) -> Contender:
    """DistributedDataParallel; every rank computes on its part of the batch."""
    model = DistributedDataParallel(copy.deepcopy(case.model), **options)
    optimizer = make_optimizer(model.parameters())
    world, rank = dist.get_world_size(), dist.get_rank()
    x, y = case.x.chunk(world)[rank], case.y.chunk(world)[rank]

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss

    name = "DDP" + "".join(f", {key}" for key in options)
    return Contender(name, step, _mean_over_ranks)


def data_parallel(name: str, size: dict[str, int], rounds: Rounds) -> list[dict[str, Any]]:
    """The cell of DistributedDataParallel, as it is and with gradients as views of its buckets."""
    case = CASES[name](**size)
    mine, _ = ours(case, {"dp": dist.get_world_size()})
    return contest([mine, ddp(case), ddp(case, gradient_as_bucket_view=True)], rounds)


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


def tensor_parallel(name: str, size: dict[str, int], rounds: Rounds) -> list[dict[str, Any]]:
    """The cell of DTensor: the usual plan in the variants of its inputs and of its head; the fastest is the peer."""
    case = CASES[name](**size)
    mine, _ = ours(case, {"tp": dist.get_world_size()})
    variants = [("each", "parallel"), ("once", "parallel"), ("once", "gathered"), ("once", "replicated")]
    variants.append(("sequence", "parallel"))
    return contest([mine, *(dtensor(case, entry, head) for entry, head in variants)], rounds)


# ---- pipeline


def pipeline_1f1b(case: Case, parallel: Any, microbatches: int) -> Contender:
    """``Schedule1F1B`` with one stage per rank, cut where our plan cuts: units go where most of their weights are."""
    assert case.units is not None
    model = copy.deepcopy(case.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    homes = {name: s for s, stage in enumerate(parallel.plan.stages) for name in stage.chunks[0].parameters}
    world, rank = dist.get_world_size(), dist.get_rank()
    mine: list[nn.Module] = []
    counts = [0] * world
    for unit in case.units(model):
        weight = [0] * world
        for parameter in unit.parameters():
            weight[homes[names[id(parameter)]]] += parameter.numel()
        home = weight.index(max(weight))
        counts[home] += 1
        if home == rank:
            mine.append(unit)
    module = nn.Sequential(*mine)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=case.loss_fn)
    optimizer = make_optimizer(module.parameters())

    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(case.x, return_outputs=False)
        else:
            given = {"target": case.y, "losses": losses} if rank == world - 1 else {}
            schedule.step(return_outputs=False, **given)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    def value(loss: torch.Tensor | None) -> float:
        whole = torch.zeros(()) if loss is None else loss.detach().clone()
        dist.broadcast(whole, world - 1)
        return float(whole)

    return Contender("1F1B", step, value, note=f"units per stage {counts}")


def pipeline(name: str, size: dict[str, int], microbatches: int, rounds: Rounds) -> list[dict[str, Any]]:
    """The cell of ``torch.distributed.pipelining``: 1F1B, one stage per rank."""
    case = CASES[name](**size)
    mine, parallel = ours(case, {"pp": dist.get_world_size()}, microbatches)
    return contest([mine, pipeline_1f1b(case, parallel, microbatches)], rounds)
