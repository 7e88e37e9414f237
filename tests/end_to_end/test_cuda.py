"""On a CUDA device, where there is one: training equals the single-device model; profiler and meters work."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.ops.random_numbers import random_tensor
from meshwright.compiler.verification.lockstep import LockstepComm, LockstepGroup
from meshwright.runtime.profiling.memory_meter import live_bytes
from meshwright.runtime.profiling.trace import Trace
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.support import custom_backwards, untraceable
from tests.support.parity import TOLERANCE, trained_eagerly
from tests.support.special_models import SPECIAL
from tests.support.zoo import ZOO

STEPS = 3
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture(scope="module", autouse=True)
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A job of one rank on NCCL."""
    os.environ["MESHWRIGHT_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in fp32, as products of matrices are."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def _moved(case: tuple[nn.Module, Any, Any]) -> tuple[nn.Module, Any, Any]:
    """The model stays on the CPU; the batch goes to the device."""
    model, args, kwargs = case
    return model.train(), *tree_map_only(Tensor, Tensor.cuda, (args, kwargs))


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    **{name: partial(make, 4) for name, make in (ZOO | SPECIAL).items()},
    **{
        f"custom {middle}": lambda middle=middle: (custom_backwards.Model(middle), custom_backwards.batch(), {})
        for middle in ("functions", "whole", "checkpointed")
    },
    **{f"opaque {middle}": partial(untraceable.model_of, middle) for middle in ("NaiveMixture", "Longformer")},
}


def _sgd(leaves: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(leaves, lr=0.05, momentum=0.9)


def _eager(case: tuple[nn.Module, Any, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the plain loop on the device."""
    model, args, kwargs = case
    return trained_eagerly(copy.deepcopy(model).cuda(), args, kwargs, _sgd, STEPS)


def _parallel(case: tuple[nn.Module, Any, Any], **options: Any) -> mw.Parallel:
    model, args, kwargs = case
    cluster = mw.Cluster.parse("local:1")
    return mw.parallelize(
        model, cluster, example_inputs=args, example_kwargs=kwargs, optimizer=_sgd, **{"microbatches": 1} | options
    )


def _compare(parallel: mw.Parallel, case: tuple[nn.Module, Any, Any]) -> None:
    expected, weights = _eager(case)
    found = [float(parallel.train_step(*case[1], **case[2])) for _ in range(STEPS)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    state = parallel.full_state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value.cpu(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_training_on_the_device_equals_the_model_itself(name: str) -> None:
    case = _moved(CASES[name]())
    _compare(_parallel(case), case)


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"compile": True}, {"microbatches": 2}], ids=str)
def test_options_change_nothing(options: dict[str, Any]) -> None:
    case = _moved(ZOO["vit"](4))
    _compare(_parallel(case, **options), case)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_near(precision: str) -> None:
    case = _moved(ZOO["gpt"](4))
    parallel = _parallel(case, precision=precision)
    expected, _ = _eager(case)
    found = [float(parallel.train_step(*case[1], **case[2])) for _ in range(STEPS)]
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[precision], atol=0)


def test_checkpoints_and_evaluation(tmp_path: Path) -> None:
    case = _moved(ZOO["gpt"](4))
    parallel = _parallel(case)
    for _ in range(2):
        parallel.train_step(*case[1], **case[2])
    parallel.save_checkpoint(tmp_path / "saved")
    following = [float(parallel.train_step(*case[1], **case[2])) for _ in range(2)]
    again = _parallel(case)
    again.load_checkpoint(tmp_path / "saved")
    assert [float(again.train_step(*case[1], **case[2])) for _ in range(2)] == following
    whole = copy.deepcopy(case[0])
    whole.load_state_dict(again.full_state_dict())
    with torch.no_grad():
        expected = whole.cuda().eval()(*case[1], **case[2])
    torch.testing.assert_close(again.eval()(*case[1], **case[2]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("law", ["uniform", "normal", "exponential", "bernoulli", "integer"])
def test_random_numbers_are_those_of_the_cpu(law: str) -> None:
    parameters, dtype = ([1, 9], torch.int64) if law == "integer" else ([0.5, 0.7], torch.float32)
    with use_context(Context(LockstepComm(LockstepGroup(()), 0), 0, 0, 0)):
        here, there = (
            random_tensor(law, (100, 50), parameters, dtype, 3, torch.device(kind)).cpu() for kind in ("cpu", "cuda")
        )
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


def test_a_profile_of_the_device_prices_a_step() -> None:
    cluster = mw.profile(budget_s=15)
    assert cluster.device(0).kind == "cuda"
    assert torch.cuda.get_device_name() in cluster.device(0).name
    model, args, kwargs = _moved(ZOO["gpt"](4))
    parallel = mw.parallelize(model, cluster, example_inputs=args, example_kwargs=kwargs, optimizer=_sgd)
    for _ in range(4):
        parallel.train_step(*args, **kwargs)
    assert parallel.report().measured_step_s > 0


def test_events_of_a_trace_are_those_of_the_stream() -> None:
    trace = Trace("cuda")
    x = torch.randn(2048, 2048, device="cuda")
    trace.begin()
    with trace.call(1):
        marks = [trace.mark()]
        for count in (1, 50, 1):
            for _ in range(count):
                x @ x
            marks.append(trace.mark())
        trace.action("F0", *marks)
    trace.close()
    (action,) = trace.steps()[0].actions
    assert action.compute_s > 5 * action.send_s > 0


def test_live_bytes_are_those_of_the_allocator() -> None:
    with live_bytes("cuda") as reading:
        x = torch.empty(1 << 20, device="cuda")
        del x
    assert reading.peak_bytes is not None
    assert reading.peak_bytes >= 4 << 20
