"""Cells of four ranks on two cores: linear layers that sleep in proportion to their local FLOPs, over real collectives.

``bench::sleep_linear`` is ``torch.nn.functional.linear`` on matrices so small that their arithmetic hardly counts,
and a sleep until ``2·B·I·O / RATE`` seconds are over: once in the forward, once for the gradient of its input and once
for that of its weight, where the backward is asked for them. B, I and O are those of the local operands. A rank that
splits the work therefore sleeps less, and one that waits for another really idles. Results are those of a linear layer,
so losses compare. Peers use the same op. That ours can plan and split it takes one line: the registration of its rule,
below.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshwright.compiler.rules import register
from meshwright.compiler.rules.einsum import EinsumRule
from meshwright.costmodel.curves import DIRECTIONS, Curve
from meshwright.costmodel.fitting import rising
from meshwright.runtime.execution.split_backward import register_halves
from meshwright.runtime.transport.error_propagation import broadcast_from_rank0
from torch import Tensor, nn

from .interleaved import Build, Contender
from .models import Case
from .peers import ddp, even_cut, fsdp, make_optimizer, pipelining, planned_cut
from .real import ours, planned
from .sleeping_cluster import PACE, RATE_FLOPS_PER_S, sleeping_cluster

__all__ = [
    "RATE_FLOPS_PER_S",
    "Sleeper",
    "automatic",
    "data_parallel",
    "make_sleeper",
    "pipeline",
    "sharded",
    "sleep_linear",
    "tensor_parallel",
]


_SIZES = ((1, 64, 64), (4, 64, 256), (8, 256, 256), (8, 256, 1024), (64, 256, 1024))  # rows, inputs, outputs
_SAMPLES = 7


def _doze(started: float, x: Tensor, w: Tensor) -> None:
    """Sleep until one product of these operands would be done on the simulated device."""
    due = started + 2.0 * prod(x.shape[:-1]) * w.numel() / RATE_FLOPS_PER_S
    time.sleep(max(0.0, due - time.perf_counter()))


@torch.library.custom_op("bench::sleep_linear", mutates_args=())
def sleep_linear(x: Tensor, w: Tensor) -> Tensor:
    """x: [..., I]; w: [O, I]; returns [..., O] after the time that this takes on the simulated device."""
    started = time.perf_counter()
    y = F.linear(x, w)
    _doze(started, x, w)
    return y


@sleep_linear.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _asked_for(ctx: Any) -> list[bool]:
    """Whether this backward needs the gradient of each input (``ctx.needs_input_grad`` tells it of any backward)."""
    wanted = []
    for needed, (node, _) in zip(ctx.needs_input_grad, ctx.next_functions, strict=True):
        try:
            wanted.append(needed and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # a leaf that ``torch.autograd.grad`` was given
            wanted.append(True)
    return wanted


def _of_input(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    started = time.perf_counter()
    made = grad @ w
    _doze(started, x, w)
    return made


def _of_weight(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    started = time.perf_counter()
    made = grad.flatten(0, -2).T @ x.flatten(0, -2)
    _doze(started, x, w)
    return made


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, w = ctx.saved_tensors
    for_x, for_w = _asked_for(ctx)
    return _of_input(grad, x, w) if for_x else None, _of_weight(grad, x, w) if for_w else None


sleep_linear.register_autograd(_backward, setup_context=_save)
register("bench.sleep_linear.default")(EinsumRule("b* i, o i -> b* o"))
register_halves(torch.ops.bench.sleep_linear.default, _of_input, _of_weight)


class SleepLinear(nn.Module):
    """A linear layer without bias that sleeps."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return sleep_linear(x, self.weight)


class SleepBlock(nn.Module):
    """``x + down(gelu(up(norm(x))))``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = SleepLinear(hidden, 4 * hidden), SleepLinear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Sleeper(nn.Module):
    """Blocks in a row; mean squared error."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SleepBlock(hidden) for _ in range(layers)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


def make_sleeper(batch: int, hidden: int = 64, layers: int = 8) -> Case:
    """x and y: [batch, hidden]. A step sleeps ``48·batch·hidden²·layers / RATE`` seconds in all."""
    torch.manual_seed(0)
    model = Sleeper(hidden, layers)
    x, y = torch.randn(2, batch, hidden)
    return Case(model, x, y, _units, F.mse_loss, _units)


def _units(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Sleeper)
    return list(model.blocks)


def profiled_cluster(budget_s: float = 0.0) -> mw.Cluster:
    """This machine's ranks with the compute rate of the sleeping layers, for the planner. budget_s: for which links are
    profiled, beside sleep, as training meets them; 0: taken as they are assumed."""
    curves = _curves()
    if budget_s:
        return sleeping_cluster(mw.profile(budget_s=budget_s, pace=PACE), curves)
    cluster = mw.Cluster.local(dist.get_world_size())
    rates = (("float32", RATE_FLOPS_PER_S),)
    hosts = tuple(
        replace(host, device=replace(host.device, flops_per_s=rates, curves=curves, efficiency=()))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def _curves() -> tuple[Curve, ...]:
    """What sleeping layers take, as a profile has it of real ones: sleep is late by some tenths of a millisecond, and
    an op written in Python takes as much. Rank 0's, on every rank."""
    return tuple(
        Curve("matmul", "float32", "flops", tuple(rising(points)), direction)
        for points, direction in zip(broadcast_from_rank0(_measured), DIRECTIONS)
    )


def _measured() -> tuple[list[tuple[float, float]], ...]:
    """(FLOPs of the forward, seconds) of the forward, and of the backward, medians of ``_SAMPLES``."""
    points: tuple[list[tuple[float, float]], ...] = ([], [])
    for rows, inputs, outputs in _SIZES:
        x, w = torch.randn(rows, inputs, requires_grad=True), torch.randn(outputs, inputs, requires_grad=True)
        times = []
        for _ in range(_SAMPLES):
            start = time.perf_counter()
            y = sleep_linear(x, w)
            middle = time.perf_counter()
            torch.autograd.backward(y, torch.ones_like(y))
            times.append((middle - start, time.perf_counter() - middle))
        for found, seconds in zip(points, zip(*times)):
            found.append((2.0 * rows * inputs * outputs, median(seconds)))
    return points


def _mine(case: Case, cluster: mw.Cluster, zero: int = 0, **asked: Any) -> Build:
    return partial(ours, case, cluster, zero=zero, recompute="none", **asked)


def data_parallel(size: dict[str, int]) -> list[Build]:
    """DistributedDataParallel on all ranks."""
    case = make_sleeper(**size)
    mine = _mine(case, profiled_cluster(), strategy={"dp": dist.get_world_size()}, microbatches=1)
    return [mine, partial(ddp, case), partial(ddp, case, gradient_as_bucket_view=True)]


def sharded(size: dict[str, int]) -> list[Build]:
    """FSDP2 on all ranks."""
    case = make_sleeper(**size)
    mine = _mine(case, profiled_cluster(), strategy={"dp": dist.get_world_size()}, microbatches=1, zero=3)
    return [mine, partial(fsdp, case), partial(fsdp, case, reshard_after_forward=False)]


def pipeline(size: dict[str, int], microbatches: int, schedule: str, kinds: list[str]) -> list[Build]:
    """The schedules ``kinds`` of ``torch.distributed.pipelining``, cut where our plan cuts."""
    case, cluster = make_sleeper(**size), profiled_cluster()
    asked = {"strategy": {"pp": dist.get_world_size()}, "microbatches": microbatches, "schedule": schedule}
    cut = planned_cut(case, planned(case, cluster, zero=0, recompute="none", **asked))
    return [_mine(case, cluster, **asked), *(partial(pipelining, case, kind, microbatches, cut) for kind in kinds)]


def automatic(size: dict[str, int], microbatches: int, budget_s: float) -> list[Build]:
    """Our own choice on the profiled links against all that a person may write."""
    case, world = make_sleeper(**size), dist.get_world_size()
    peers: list[Build] = [partial(ddp, case), partial(ddp, case, gradient_as_bucket_view=True), partial(fsdp, case)]
    peers += [partial(megatron, case), partial(pipelining, case, "1f1b", microbatches, even_cut(case, world))]
    peers += [
        partial(pipelining, case, kind, microbatches, even_cut(case, 2 * world)) for kind in ("interleaved", "zb-v")
    ]
    return [partial(ours, case, profiled_cluster(budget_s)), *peers]


# ---- tensor parallel by hand


class _Copy(torch.autograd.Function):
    """Identity forwards, sum over the ranks backwards (Megatron-LM's f, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total


class _Sum(torch.autograd.Function):
    """Sum over the ranks forwards, identity backwards (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _MegatronBlock(nn.Module):
    """The block with columns of ``up`` and rows of ``down`` on each rank, on plain tensors."""

    def __init__(self, block: SleepBlock) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.norm = block.norm
        self.up = nn.Parameter(block.up.weight.detach().chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(block.down.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(sleep_linear(_Copy.apply(self.norm(x)), self.up))
        return x + _Sum.apply(sleep_linear(inner, self.down))


def megatron(case: Case) -> Contender:
    """Tensor parallel written by hand: DTensor knows no split of the sleeping op."""
    whole = copy.deepcopy(case.model)
    assert isinstance(whole, Sleeper)
    model = nn.Sequential(*(_MegatronBlock(block) for block in whole.blocks))  # type: ignore[arg-type]
    optimizer = make_optimizer(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(case.x), case.y)
        loss.backward()
        optimizer.step()
        return loss

    value: Callable[[Tensor], float] = lambda loss: float(loss.detach())  # noqa: E731
    return Contender("Megatron by hand", step, value)


def tensor_parallel(size: dict[str, int]) -> list[Build]:
    """Columns and rows on all ranks: two all-reduces per block and step."""
    case = make_sleeper(**size)
    mine = _mine(case, profiled_cluster(), strategy={"tp": dist.get_world_size()}, microbatches=1)
    return [mine, partial(megatron, case)]
