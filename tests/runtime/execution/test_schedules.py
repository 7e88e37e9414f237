"""Every schedule on real ranks equals one device: chunks, backwards in halves, tied weights, skips, uneven counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import TensorType
from meshwright.compiler.ir.program import ChunkProgram, Slot
from meshwright.compiler.ir.spec import Pair
from meshwright.compiler.pipeline.families import generate
from meshwright.compiler.pipeline.schedule import Action
from meshwright.compiler.plan.boundaries import links_of, metadata_of, places_of
from meshwright.compiler.plan.lower import lower
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.runtime.execution import executor as executor_module
from meshwright.runtime.execution import split_backward
from meshwright.runtime.execution.split_backward import register_halves, split_program
from torch import nn

from tests.support.clusters import fast_links
from tests.support.parity import compare
from tests.support.planning import make_plan
from tests.support.zoo import ZOO

# model, strategy, microbatches, schedule, options
CASES: dict[str, tuple[str, str, int, str, dict[str, Any]]] = {
    # tied weights on the first and the last stage; zb-v: both on the first, in different chunks
    "zb-h1": ("gpt", "pp2", 3, "zb-h1", {"batch": 6, "double": True}),
    "zb-v": ("gpt", "pp2", 3, "zb-v", {"batch": 6, "layers": 4, "double": True}),
    "interleaved": ("gpt", "pp3", 4, "interleaved", {"layers": 6}),
    "skips": ("t5", "pp2", 4, "zb-v", {}),
    "addmm": ("gpt2", "pp2", 2, "zb-h1", {}),
    "buffers": ("convnet", "pp2", 4, "zb-v", {"double": True}),
    "tensor": ("gpt", "pp2,tp2", 4, "zb-v", {"layers": 4}),
    "data": ("gpt", "pp2,dp2", 4, "interleaved", {"layers": 4}),
    "experts": ("moe", "pp2,dp2", 2, "zb-h1", {}),
}


def run(case: str) -> tuple[list[float], dict[str, torch.Tensor], int, int, int, tuple[int, ...], Any, int]:
    """What ``test_parity.compare`` takes, without counts of collectives; chunks of every stage; then the labels of a
    step's actions, and how much is left between actions when it has ended."""
    import meshwright as mw

    name, strategy, m, schedule, options = CASES[case]
    options = dict(options)
    double = options.pop("double", False)
    model, args, kwargs = ZOO[name](options.pop("batch", 8), **options)
    if double:
        model = model.double()
        args = tuple(a.double() if a.is_floating_point() else a for a in args)
    parallel = mw.parallelize(
        model.train(), fast_links(dist.get_world_size()), example_inputs=args, example_kwargs=kwargs,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        strategy=strategy, microbatches=m, schedule=schedule,
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(5)]
    session = parallel.session
    labels = [label for label, _ in session.timings["actions"]]
    parts = session.executor.parts
    owed = sum(len(part.halves.owed) for part in parts if part.halves is not None)
    left = sum(len(one.values) + len(one.cotangents) for part in parts for one in part.local_outputs)
    chunks = tuple(len(stage.chunks) for stage in parallel.plan.stages)
    return losses, parallel.full_state_dict(), m, 0, 0, chunks, labels, owed + left


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_every_schedule_equals_one_device(ranks: Any, case: str) -> None:
    name, strategy, m, schedule, options = CASES[case]
    world = parse_strategy(strategy).num_devices
    results = ranks.run(world, run, case)
    compare([result[:6] for result in results], name, "sgd", options)
    stages, (chunks, *_) = len(results[0][5]), results[0][5]
    rows = generate(schedule, stages, m, chunks if chunks > 1 else None).actions
    assert chunks > 1 or schedule not in ("interleaved", "zb-v")
    for rank, (*_, labels, left) in enumerate(results):
        assert labels == [str(action).lstrip("0123456789") for action in rows[rank * stages // world]]
        assert left == 0


# ---- what cannot run


def planned(schedule: str, strategy: str = "pp2", m: int = 4):
    graph = capture(*ZOO["gpt"](8, device="meta", layers=4))
    space = replace(Space.asked(schedule, executable=True), sequence=False)
    shape = parse_strategy(strategy)
    plan = make_plan(graph, fast_links(shape.num_devices), 8, m, shape, space=space)
    return graph.with_batch(8 // m), plan


def start() -> str:
    """What a session says to a schedule in which two actions of stage 0 have changed places."""
    import meshwright as mw

    model, args, _ = ZOO["gpt"](8, layers=4)
    kept = executor_module.generate

    def exchanged(*given: Any) -> Any:
        made = kept(*given)
        row = list(made.actions[0])
        at, to = row.index(Action(0, "F", 0, 1)), row.index(Action(0, "I", 0, 1))
        row[at], row[to] = row[to], row[at]
        return replace(made, actions=(tuple(row), *made.actions[1:]))

    executor_module.generate = exchanged
    try:
        mw.parallelize(model, fast_links(2), strategy="pp2", microbatches=4, schedule="zb-v", example_inputs=args)
    except ValueError as error:
        return str(error)
    finally:
        executor_module.generate = kept
    return ""


@pytest.mark.ranks
def test_an_order_that_cannot_run_is_refused_on_every_rank(ranks: Any) -> None:
    assert all("F comes before I" in said for said in ranks.run(2, start))


def test_a_wrong_edge_is_seen() -> None:
    graph, plan = planned("zb-v")
    assert plan.check() == []
    first = plan.transfers[0]
    wrong = replace(plan, transfers=(replace(first, target_chunk=1 - first.target_chunk), *plan.transfers[1:]))
    assert any("does not receive" in fault for fault in wrong.check())
    facts = {(s, c): metadata_of(lower(graph, plan, s, c), s, c) for s, c in places_of(plan)}
    assert {link.is_local for link in links_of(plan, facts)} == {True, False}
    with pytest.raises(ValueError, match=r"no transfer of .* to chunk"):
        links_of(wrong, facts)


def test_the_halves_of_a_program_are_its_backward() -> None:
    """Gradients are those of the whole backward; after I only inputs have them, and W adds each leaf's once."""
    graph, plan = planned("1f1b", "pp2")
    program = lower(graph, plan, 1)
    torch.manual_seed(0)
    tensors = [
        torch.randn(slot.type.shape).requires_grad_(slot.requires_grad or slot.kind == "receive")
        if slot.type.is_float
        else torch.randint(0, 8, slot.type.shape)
        for slot in program.slots
    ]
    (loss,) = program.module(*tensors)
    loss.backward()
    expected = [tensor.grad for tensor in tensors]
    halves = split_program(program)
    for tensor in tensors:
        tensor.grad = None
    calls: list[int] = []
    for position, tensor in enumerate(tensors):
        if program.slots[position].kind == "parameter":
            tensor.register_post_accumulate_grad_hook(lambda _, at=position: calls.append(at))
    halves.begin(0)
    halves.module(*tensors)[0].backward()
    assert not set(calls) - set(halves.early)
    assert all(
        tensors[at].grad is not None for at, s in enumerate(program.slots) if s.kind == "receive" and s.type.is_float
    )
    early, calls[:] = set(calls), []
    halves.settle(0)
    assert sorted(calls) == sorted(halves.late)
    assert early == set(halves.early)
    for tensor, want in zip(tensors, expected, strict=True):
        if want is not None:
            torch.testing.assert_close(tensor.grad, want)


def test_an_op_of_ones_own_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_backward, "_SPLIT_OPS", {})
    made: list[str] = []

    def of_weight(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made.append("W")
        return g.t() @ x

    register_halves(torch.ops.aten.linear.default, lambda g, x, w: g @ w, of_weight)
    local = torch.fx.Graph()
    x, w = local.placeholder("x"), local.placeholder("w")
    local.output((local.call_function(torch.ops.aten.linear.default, (x, w)),))
    kind, whole = TensorType((2, 2), torch.float32), Pair((), ())
    slots = Slot("receive", "x", "x", whole, kind), Slot("parameter", "w", "w", whole, kind, requires_grad=True)
    program = ChunkProgram(local, slots, (), (), {}, {})
    halves = split_program(program)
    a, b = torch.randn(2, 2, 2).unbind(0)
    a.requires_grad_(), b.requires_grad_()
    halves.begin(0)
    halves.module(a, b)[0].sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(2, 2) @ b.detach())
    assert (b.grad, made) == (None, [])
    halves.settle(0)
    torch.testing.assert_close(b.grad, torch.ones(2, 2) @ a.detach())


class Odd(nn.Module):
    """A weight used twice, through a view, with a bias, in products from both sides and in convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.table, self.conv = nn.Embedding(9, 6), nn.Conv1d(6, 6, 3, padding=1, groups=2)

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.linear(self.table(tokens), self.w, self.b)
        x = x + torch.matmul(x, self.w.t()) + torch.matmul(self.w, x.mT).mT
        x = x * self.b + self.conv(x.mT).mT
        return (x - y).square().mean()


def odd() -> tuple[list[float], dict[str, torch.Tensor]]:
    import meshwright as mw

    torch.manual_seed(0)
    model = Odd().double()
    batch = torch.randint(0, 9, (4, 5)), torch.randn(4, 5, 6, dtype=torch.float64)
    parallel = mw.parallelize(
        model, fast_links(1), example_inputs=batch, microbatches=2, schedule="zb-h1", strategy="pp1",
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )  # fmt: skip
    losses = [float(parallel.train_step(*batch)) for _ in range(3)]
    return losses, parallel.full_state_dict()


@pytest.mark.ranks
def test_weights_that_are_read_twice_and_through_views(ranks: Any) -> None:
    ((losses, state),) = ranks.run(1, odd)
    torch.manual_seed(0)
    model = Odd().double()
    x, y = torch.randint(0, 9, (4, 5)), torch.randn(4, 5, 6, dtype=torch.float64)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        parts = [model(a, b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        for part in parts:
            part.backward()
        optimizer.step()
        expected.append(float(sum(part.detach() for part in parts)))
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
