"""On a CUDA device, where there is one: training equals the single-device model; profiler and meters work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.models.architectures import GPT
from meshwright.runtime.profiling.memory_meter import live_bytes
from meshwright.runtime.profiling.trace import Trace

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


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(512, 2, 128, 4, 32, tied=False).train()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(0, 512, (2, 4, 32), generator=torch.Generator().manual_seed(1))
    return tokens.cuda(), targets.cuda()


def test_training_on_the_device_equals_the_model_itself() -> None:
    whole = _gpt().cuda()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    batch, expected = _batch(), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = whole(*batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    parallel = mw.parallelize(
        _gpt(), mw.profile(quick=True), example_inputs=_batch(), microbatches=2,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    )  # fmt: skip
    found = [float(parallel.train_step(*batch)) for _ in range(4)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    state = parallel.full_state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value.cpu(), rtol=1e-4, atol=1e-6)


def test_a_profile_of_the_device_prices_a_step() -> None:
    cluster = mw.profile(budget_s=15)
    assert cluster.device(0).kind == "cuda"
    assert torch.cuda.get_device_name() in cluster.device(0).name
    parallel = mw.parallelize(
        _gpt(), cluster, example_inputs=_batch(), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)
    )
    for _ in range(4):
        parallel.train_step(*_batch())
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
