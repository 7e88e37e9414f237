"""Recomputed layers, executed: the same numbers as without, what runs again and what does not, and the bytes that it
saves, which are those that the plan predicts."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.program import Segment
from meshwright.compiler.memory.abstract_run import AbstractComm
from meshwright.compiler.plan.segments import repeating
from meshwright.runtime.profiling.memory_meter import storages_alive

from tests.support.peak_memory import least_peak
from tests.support.ranks import RankPool
from tests.support.zoo import ZOO

STEPS, LR = 2, 1e-3
MIXED = {"*": "selective", "*1*": "full", "*0*": "none"}


def trained(
    name: str, options: dict[str, Any], strategy: str, recompute: Any, double: bool = False, schedule: str = "1f1b"
) -> Any:
    torch.manual_seed(0)
    model, args, kwargs = ZOO[name](8, **options)
    if double:
        model, args = model.double(), tuple(a.double() if a.is_floating_point() else a for a in args)
    parallel = mw.parallelize(
        model.train(), mw.Cluster.local(torch.distributed.get_world_size()), example_inputs=args, example_kwargs=kwargs,
        strategy=strategy, microbatches=4, schedule=schedule, recompute=recompute, seed=5,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=LR, eps=1e-6),
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
    return parallel, losses, args, kwargs


def run(name: str, options: dict[str, Any], strategy: str, recompute: Any, double: bool, schedule: str) -> Any:
    """One rank: losses, the whole state (rank 0), the outputs of an evaluation, modes of its stage, collectives that
    ran and that the plan counts, the report's terms."""
    parallel, losses, args, kwargs = trained(name, options, strategy, recompute, double, schedule)
    plan = parallel.plan
    stage = plan.stage_of(torch.distributed.get_rank())
    counts = {f"{phase} {kind}": n for (phase, kind), n in parallel.session.counts.items() if phase != "step"}
    planned = {k: n * 4 * STEPS for k, n in plan.prediction.stages[stage].collectives.items()}
    terms = {term.name: (term.predicted_s, term.measured_s) for term in parallel.report().terms if term.stage == stage}
    modes = {mode for each in plan.stages for chunk in each.chunks for mode in chunk.recompute}
    outputs = parallel.eval()(*args, **kwargs) if name == "convnet" else None
    return losses, parallel.full_state_dict(), outputs, modes, Counter(counts), Counter(planned), terms["recompute"]


# model, options, strategy, ranks, recompute, float64, schedule
CASES: list[tuple[str, dict[str, Any], str, int, Any, bool, str]] = [
    ("gpt", {"dropout": 0.1}, "pp2", 2, "full", False, "1f1b"),
    ("gpt", {"dropout": 0.1}, "pp2,tp2", 4, MIXED, True, "zb-h1"),
    ("moe", {"dropout": 0.1}, "tp2", 2, "selective", False, "1f1b"),
    ("convnet", {}, "dp2", 2, "full", True, "1f1b"),
]


@pytest.mark.parametrize(("name", "options", "strategy", "count", "recompute", "double", "schedule"), CASES)
def test_the_same_numbers_as_without(
    ranks: RankPool,
    name: str,
    options: dict[str, Any],
    strategy: str,
    count: int,
    recompute: Any,
    double: bool,
    schedule: str,
) -> None:
    """Dropout is a function of step and microbatch, so one device without recompute draws the same."""
    alone = ranks.run(1, run, name, options, "pp1", "none", double, "1f1b")
    expected, reference, evaluated, modes, *_ = alone[0]
    assert not modes
    results = ranks.run(count, run, name, options, strategy, recompute, double, schedule)
    rtol, atol = (1e-9, 1e-9) if double else (1e-4, 2e-5)
    for losses, _, outputs, modes, counts, planned, (predicted_s, measured_s) in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=atol)
        assert outputs is None or torch.allclose(outputs, evaluated, rtol=10 * rtol, atol=10 * atol)
        assert counts == planned
        assert modes >= ({"full", "selective"} if recompute is MIXED else {recompute})
        assert (predicted_s > 0) == (measured_s > 0)
    assert any(measured_s > 0 for *_, (_, measured_s) in results)
    for key, value in results[0][1].items():
        small = 2 * LR * STEPS if key in ("stem.bias", "bn.running_mean") and not double else atol
        torch.testing.assert_close(value, reference[key], rtol=rtol, atol=small, msg=lambda t, k=key: f"{k}: {t}")


# ---- what runs again

aten = torch.ops.aten


def chain(call: Callable[[Any], Any]) -> torch.fx.GraphModule:
    """linear, gelu, linear, outside: exp, then tanh and a sum with what came in."""
    graph = torch.fx.Graph()
    x, v, w = (graph.placeholder(name) for name in ("x", "v", "w"))

    def add(name: str, op: Any, *args: Any) -> torch.fx.Node:
        return graph.create_node("call_function", call(op), args, name=name)

    down = add("down", aten.linear.default, add("act", aten.gelu.default, add("up", aten.linear.default, x, v)), w)
    again = add("again", aten.tanh.default, add("between", aten.exp.default, down))
    graph.output((add("total", aten.add.Tensor, again, x),))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(("heavy", "linears"), [((), 4), (("up",), 3), (("up", "down"), 2)])
def test_what_is_kept_does_not_run_again(heavy: tuple[str, ...], linears: int) -> None:
    """A segment that is left and entered again runs in two parts."""
    calls, hooks = Counter[str](), Counter[str]()

    def counted(op: Any) -> Any:
        def call(*args: Any) -> torch.Tensor:
            calls[str(op).split(".")[1]] += 1
            made: torch.Tensor = op(*args)
            return made

        return call

    segment = Segment(frozenset({"up", "act", "down", "again", "total"}), frozenset(heavy))
    plain, module = chain(lambda op: op), repeating(chain(counted), [segment])
    assert len(list(module.children())) == 2
    leaves = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(plain(*leaves)[0].sum(), leaves)
    for index, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, index=index: hooks.update([str(index)]))
    with use_context(Context(AbstractComm((), False))):
        (out,) = module(*leaves)
        out.sum().backward(retain_graph=True)
        assert calls == {"linear": linears, "gelu": 2, "exp": 1, "tanh": 2, "add": 2}
        assert hooks == {"0": 1, "1": 1, "2": 1}
        for leaf, grad in zip(leaves, wanted):
            torch.testing.assert_close(leaf.grad, grad)
        out.sum().backward()  # what was given away is made again
        torch.testing.assert_close(leaves[1].grad, 2 * wanted[1])
        calls.clear()
        with torch.no_grad():
            module(*leaves)
    assert calls == {"linear": 2, "gelu": 1, "exp": 1, "tanh": 1, "add": 1}


@pytest.mark.parametrize("seed", range(20))
def test_segments_that_need_each_other_fall_apart(seed: int) -> None:
    """Random programs, their ops dealt out to three segments and none: what a program with them gives is the same."""
    draw, graph = random.Random(seed), torch.fx.Graph()
    made = [graph.placeholder(name) for name in ("x", "y")]
    homes: list[set[str]] = [set() for _ in range(4)]
    for index in range(14):
        operands = [draw.choice(made[-5:]) for _ in range(2)] if index else made
        made.append(graph.create_node("call_function", aten.mul.Tensor, tuple(operands), name=f"n{index}"))
        draw.choice(homes).add(f"n{index}")
    total = made[-1]
    for node in made[2:-1]:
        if not node.users:
            total = graph.create_node("call_function", aten.add.Tensor, (total, node))
    graph.output((total,))
    plain = torch.fx.GraphModule(torch.nn.Module(), graph)
    segments = [Segment(frozenset(names), frozenset()) for names in homes[:3] if names]
    module = repeating(plain, segments)
    assert len(segments) <= len(list(module.children())) <= 14
    leaves = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    wanted = plain(*leaves)[0]
    with use_context(Context(AbstractComm((), False))):
        (found,) = module(*leaves)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves))


def test_two_layers_that_need_each_other_run_in_three_parts() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a1, b1 = (graph.create_node("call_function", aten.sin.default, (x,), name=name) for name in ("a1", "b1"))
    a2 = graph.create_node("call_function", aten.mul.Tensor, (a1, b1), name="a2")
    b2 = graph.create_node("call_function", aten.mul.Tensor, (b1, a1), name="b2")
    graph.output((a2, b2))
    module = repeating(
        torch.fx.GraphModule(torch.nn.Module(), graph),
        [Segment(frozenset({"a1", "a2"}), frozenset()), Segment(frozenset({"b1", "b2"}), frozenset())],
    )
    assert len(list(module.children())) == 3


# ---- bytes


def weighed(strategy: str, mode: str) -> tuple[float, int]:
    """(predicted, measured) bytes of this rank."""
    gc.collect()
    before = sum(storages_alive().values())
    parallel, _, args, _ = trained("gpt", {}, strategy, mode)
    peak = least_peak(lambda: parallel.train_step(*args))
    stage = parallel.plan.stage_of(torch.distributed.get_rank())
    memory = parallel.plan.prediction.stages[stage].memory_bytes
    return sum(memory.values()) - memory["framework"], peak - before


def test_bytes_are_those_predicted(ranks: RankPool) -> None:
    alone = [ranks.run(1, weighed, "pp1", mode)[0] for mode in ("none", "selective", "full")]
    together = [ranks.run(2, weighed, "tp2", mode)[0] for mode in ("none", "full")]
    assert all(abs(predicted / measured - 1) < 0.05 for predicted, measured in (*alone, *together)), (alone, together)
    assert alone[0][1] > alone[1][1] > alone[2][1]
    assert together[0][1] > together[1][1]
