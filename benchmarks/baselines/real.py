"""The cells with real compute. Each function runs on every rank and says how to make the contenders, ours first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import meshwright as mw
import torch.distributed as dist
from meshwright.compiler.plan.plan import Plan

from .interleaved import Build, Contender
from .models import Case, make_convnet, make_gpt, make_mlp
from .peers import ddp, dtensor, eager, even_cut, fsdp, make_optimizer, pipelining, planned_cut

__all__ = [
    "automatic",
    "compiled",
    "data_parallel",
    "ours",
    "pipeline",
    "planned",
    "sharded",
    "single",
    "tensor_parallel",
]

CASES: dict[str, Callable[..., Case]] = {"gpt": make_gpt, "mlp": make_mlp, "convnet": make_convnet}
DTENSOR = [("each", "parallel"), ("once", "parallel"), ("once", "gathered"), ("once", "replicated")]
DTENSOR.append(("sequence", "parallel"))


def _parallel(case: Case, mesh: Any, asked: dict[str, Any]) -> Any:
    return mw.parallelize(
        copy.deepcopy(case.model), mesh, example_inputs=(case.x, case.y), optimizer=make_optimizer, **asked
    )


def ours(case: Case, mesh: Any = None, **asked: Any) -> Contender:
    """Our contender; asked: arguments of ``parallelize``."""
    parallel = _parallel(case, mesh, asked)
    shape = " | ".join("×".join(map(str, stage.mesh_shape)) or "1" for stage in parallel.plan.stages)
    note = f"{parallel.plan.schedule}, microbatches: {parallel.plan.microbatches}, meshes: {shape}"
    return Contender("ours", lambda: parallel.train_step(case.x, case.y), float, note)


def planned(case: Case, mesh: Any = None, **asked: Any) -> Plan:
    """The plan that ``ours`` trains by, alike on every rank."""
    return _parallel(case, mesh, asked).plan


def single(name: str, size: dict[str, int]) -> list[Build]:
    """One device: what does it cost to be led by a plan?"""
    case = CASES[name](**size)
    return [partial(ours, case, zero=0, recompute="none", microbatches=1), partial(eager, case)]


def data_parallel(name: str, size: dict[str, int]) -> list[Build]:
    """DistributedDataParallel, as it is and with gradients as views of its buckets."""
    case = CASES[name](**size)
    mine = partial(ours, case, strategy={"dp": dist.get_world_size()}, zero=0, recompute="none", microbatches=1)
    return [mine, partial(ddp, case), partial(ddp, case, gradient_as_bucket_view=True)]


def compiled(name: str, size: dict[str, int]) -> list[Build]:
    """Both through torch.compile: ours piece by piece, the model as a whole, on one rank or under
    DistributedDataParallel."""
    case, world = CASES[name](**size), dist.get_world_size()
    asked: dict[str, Any] = {"strategy": {"dp": world}, "zero": 0, "recompute": "none", "microbatches": 1}
    mine = partial(ours, case, compile=True, **asked)
    if world == 1:
        return [mine, partial(eager, case, compiled=True)]
    return [mine, partial(ddp, case, compiled="inside"), partial(ddp, case, compiled="whole")]


def sharded(name: str, size: dict[str, int]) -> list[Build]:
    """FSDP2, which keeps parameters from forward to backward or gathers them again; ours as ZeRO-3."""
    case = CASES[name](**size)
    mine = partial(ours, case, strategy={"dp": dist.get_world_size()}, zero=3, recompute="none", microbatches=1)
    return [mine, partial(fsdp, case), partial(fsdp, case, reshard_after_forward=False)]


def tensor_parallel(name: str, size: dict[str, int]) -> list[Build]:
    """DTensor: the usual plan in the variants of its inputs and of its head; the fastest is the peer."""
    case = CASES[name](**size)
    mine = partial(ours, case, strategy={"tp": dist.get_world_size()}, zero=0, recompute="none", microbatches=1)
    return [mine, *(partial(dtensor, case, entry, head) for entry, head in DTENSOR)]


def pipeline(name: str, size: dict[str, int], microbatches: int, schedule: str, kinds: list[str]) -> list[Build]:
    """``torch.distributed.pipelining`` under the schedules ``kinds``, cut where our plan cuts."""
    case = CASES[name](**size)
    asked: dict[str, Any] = {"strategy": {"pp": dist.get_world_size()}, "microbatches": microbatches, "zero": 0}
    asked |= {"schedule": schedule, "recompute": "none"}
    cut = planned_cut(case, planned(case, **asked))
    return [partial(ours, case, **asked), *(partial(pipelining, case, kind, microbatches, cut) for kind in kinds)]


def automatic(name: str, size: dict[str, int], microbatches: int, budget_s: float) -> list[Build]:
    """Our own choice on a profile of the ranks that took ``budget_s``, against all peers that fit the model."""
    case, world = CASES[name](**size), dist.get_world_size()
    peers = [partial(ddp, case), partial(ddp, case, gradient_as_bucket_view=True), partial(fsdp, case)]
    peers.append(partial(fsdp, case, reshard_after_forward=False))
    if name == "gpt":
        peers += [partial(dtensor, case, entry, head) for entry, head in DTENSOR]
    if case.units is not None:
        peers.append(partial(pipelining, case, "1f1b", microbatches, even_cut(case, world)))
        peers += [
            partial(pipelining, case, kind, microbatches, even_cut(case, 2 * world)) for kind in ("interleaved", "zb-v")
        ]
    return [partial(ours, case, mw.profile(budget_s=budget_s)), *peers]
