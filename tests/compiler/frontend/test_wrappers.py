"""Modules that PyTorch has wrapped, sharded or compiled to other code are refused by name; ``torch.compile`` is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from torch import nn


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def distributed() -> nn.Module:
    return nn.parallel.DistributedDataParallel(net())


def fully_sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    module = net()
    fully_shard(module[2])
    return module


def of_dtensors() -> nn.Module:
    from torch.distributed.tensor import distribute_module, init_device_mesh

    return distribute_module(net(), init_device_mesh("cpu", (2,)))


def refusal(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(make(), (torch.randn(8, 4),), outputs=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (distributed, "got DistributedDataParallel as the model; a plan splits the batch itself: pass model.module"),
        (
            fully_sharded,
            "got FSDPModule as module '2'; a plan shards the weights itself: pass the plain module, without",
        ),
        (of_dtensors, "got a DTensor as '0.weight'; a plan shards the weights itself: pass the plain module"),
    ],
)
def test_what_ranks_share_already(ranks, make: Callable[[], nn.Module], words: str) -> None:
    assert all(words in found for found in ranks.run(2, refusal, make))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_one_process_makes() -> None:
    assert "got DataParallel as the model" in refusal(lambda: nn.DataParallel(net()))
    for make in (torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(8, 4))):
        found = refusal(lambda make=make: nn.Sequential(nn.Linear(4, 4), make(net())))
        assert "got ScriptModule as module '1'; a capture reads Python code: pass the module that was" in found


def test_compiled_modules_are_captured() -> None:
    x, whole = torch.randn(8, 4), net()
    plain = capture(net(), (x,), outputs=True)
    inner = net()
    inner[0] = torch.compile(inner[0])
    for module in (torch.compile(whole), inner):
        assert [node.target for node in capture(module, (x,), outputs=True).ops()] == [n.target for n in plain.ops()]
