"""Compiled stages: the same numbers as one device, every piece compiled, equal ones once, and nothing after the first
step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from by_hand import by_hand, one_device
from meshwright.compiler.compiled_ops import dropout_ticket, plain_cross_entropy, ticketed_dropout
from meshwright.compiler.context import Context, use
from meshwright.compiler.local_ops import cross_entropy, dropout
from meshwright.compiler.pieces import in_pieces, units
from meshwright.compiler.program import Segment
from meshwright.compiler.rules.check import LockstepGroup
from meshwright.runtime.compiled import Compiler, backend_of
from ranks import RankPool
from test_experts_run import sent
from test_parity import fast_links
from torch._dynamo.utils import counters
from torch._inductor import config
from zoo import ZOO

STEPS, LR, TIMEOUT_S = 3, 1e-3, 180.0
GPT: dict[str, Any] = {"dropout": 0.1, "layers": 2}
aten = torch.ops.aten


def run(name: str, options: dict[str, Any], asked: dict[str, Any], compile: bool | str) -> Any:
    """One rank: losses, the whole state (rank 0), pieces of its programs, graphs that were compiled."""
    torch.manual_seed(0)
    model, args, kwargs = ZOO[name](4, **options)
    if name == "moe":  # as ``by_hand`` writes plans
        model = model.double()
    if "plan" in asked:
        asked = {"plan": mw.Plan.from_json(asked["plan"])}
    before = counters["stats"]["unique_graphs"]
    parallel = mw.parallelize(
        model.train(), fast_links(torch.distributed.get_world_size()), example_inputs=args, example_kwargs=kwargs,
        seed=5, optimizer=lambda ps: torch.optim.AdamW(ps, lr=LR, eps=1e-6), compile=compile, **asked,
    )  # fmt: skip
    losses, graphs = [], []
    for _ in range(STEPS):
        losses.append(float(parallel.train_step(*args, **kwargs)))
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert len(set(graphs)) == 1, "shapes do not change, so nothing is compiled after the first step"
    compiler = parallel.session.compiler
    return losses, parallel.full_state_dict(), 0 if compiler is None else compiler.pieces, graphs[0]


# model, its options, backend, what is asked, (pieces, graphs compiled) of each rank: a layer is half a block, and two
# of them are a unit where blocks repeat; what the backward runs again, gathers among it, keeps to a layer
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any], list[tuple[int, int]]]] = [
    ("gpt", {**GPT, "layers": 1}, "aot_eager", {"strategy": "dp2", "zero": 3, "recompute": "selective"}, [(6, 5)] * 2),
    ("gpt", GPT, "eager", {"strategy": "tp2", "zero": 0, "recompute": "full"}, [(9, 4)] * 2),
    ("gpt", GPT, "eager", {"strategy": "pp2", "zero": 0, "recompute": "none", "schedule": "zb-h1"}, [(4, 3)] * 2),
    ("gpt", {"layers": 4}, "eager", {"strategy": "dp2", "zero": 1, "recompute": "none"}, [(5, 2)] * 2),
    ("gpt", {"layers": 4}, "eager", {"strategy": "dp2", "zero": 3, "recompute": "none"}, [(9, 3)] * 2),
    ("moe", {}, "eager", {}, [(5, 4)] * 2),
]
ALONE: dict[str, Any] = {}


@pytest.mark.parametrize(("name", "options", "backend", "asked", "compiled"), CASES)
def test_the_same_numbers_as_one_device(
    ranks: RankPool,
    name: str,
    options: dict[str, Any],
    backend: str,
    asked: dict[str, Any],
    compiled: list[tuple[int, int]],
) -> None:
    """Experts get other numbers of tokens in every step; dropout is a function of step and microbatch."""
    count = 2 if name == "gpt" else 1
    asked = {**asked, "microbatches": count}
    if name == "moe":
        graph, plan, *_ = one_device(name, ())
        asked = {"plan": by_hand(graph, plan, (2,), sent("dispatch")).to_json()}
    case = f"{name} {options}"
    if case not in ALONE:
        alone = {"strategy": "pp1", "microbatches": count}
        ALONE[case] = ranks.run(1, "test_compile_run:run", name, options, alone, False)[0]
    expected, reference, *_ = ALONE[case]
    results = ranks.run(2, "test_compile_run:run", name, options, asked, backend, timeout_s=TIMEOUT_S)
    for losses, *_ in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for key, value in results[0][1].items():
        torch.testing.assert_close(value, reference[key], rtol=1e-4, atol=2e-5, msg=lambda t, k=key: f"{k}: {t}")
    assert [found[2:] for found in results] == compiled


def inductor(folder: str) -> Any:
    """One rank, twice, as two processes would: what each found in the cache or had to make, and the losses."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    found = []
    # what takes long, and pays where there is more to compile
    with config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 1, "compile_threads": 1}):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            losses, *_ = run("mlp", {"dropout": 0.1}, {"strategy": "pp1"}, True)
            found.append((losses, counters["inductor"]["fxgraph_cache_miss"]))
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    return found, run("mlp", {"dropout": 0.1}, {"strategy": "pp1"}, False)[0]


def test_what_inductor_made_is_found_again(ranks: RankPool, tmp_path: Path) -> None:
    ((first, again), eager) = ranks.run(1, "test_compile_run:inductor", str(tmp_path), timeout_s=TIMEOUT_S)[0]
    assert first[1] > 0 == again[1]
    for losses, _ in (first, again):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(eager), rtol=1e-5, atol=1e-6)


# ---- errors


def test_an_unknown_backend_is_named() -> None:
    assert (backend_of(False), backend_of(True), backend_of("aot_eager")) == (None, "inductor", "aot_eager")
    with pytest.raises(ValueError, match=r"a backend of torch\.compile .*inductor.*, but got 'gcc'"):
        backend_of("gcc")


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler .* but got"):
        Compiler("inductor", {}, (), tmp_path)


# ---- pieces


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ("", []),
        ("abc", [0, 1, 2]),
        ("eamamamh", [0, 1, 1, 2, 2, 3, 3, 4]),
        ("ebbbbh", [0, 1, 2, 3, 4, 5]),
        ("aabaab", [0, 0, 0, 1, 1, 1]),  # all of it, rather than its beginning
        ("ababa", [0, 0, 1, 1, 2]),
    ],
)
def test_layers_that_are_repeated_together_are_a_unit(classes: str, expected: list[int]) -> None:
    assert units(list(classes)) == expected


def program(*lines: tuple[str, Any, tuple[str, ...]], out: str) -> torch.fx.GraphModule:
    """Inputs x and w, then a line (name, function, operands) for each node."""
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "w")}
    for name, target, operands in lines:
        nodes[name] = graph.create_node("call_function", target, tuple(nodes[o] for o in operands), name=name)
    graph.output((nodes[out],))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def pieces_of(module: torch.fx.GraphModule, layers: str, apart: tuple[int, ...] = (), *segments: Segment) -> Any:
    """(the new program, its segments, names of the ops of every piece); layers: of the ops, in order."""
    calls = [node.name for node in module.graph.nodes if node.op == "call_function"]
    made: list[list[str]] = []

    def make(body: torch.fx.Graph) -> Any:
        made.append([str(node.target).split(".")[1] for node in body.nodes if node.op == "call_function"])
        run = torch.fx.GraphModule(torch.nn.Module(), body)
        return lambda *args: run(*args)

    layer_of = {name: int(layer) for name, layer in zip(calls, layers) if layer != "-"}
    new, found = in_pieces(module, segments, layer_of, apart, make)
    x, w = torch.rand(4, 4), torch.rand(4, 4)
    torch.testing.assert_close(new(x, w), module(x, w))
    return new, found, made


def message(x: torch.Tensor) -> torch.Tensor:
    """Not known to the compiler, as a collective."""
    return x * 2


UP, TANH, ADD, EXP = aten.matmul.default, aten.tanh.default, aten.add.Tensor, aten.exp.default


def test_a_piece_ends_at_a_message_and_at_a_layer() -> None:
    lines = [("a", UP, ("x", "w")), ("b", TANH, ("a",)), ("c", message, ("b",)), ("d", EXP, ("c",))]
    lines += [("e", ADD, ("d", "b")), ("f", UP, ("e", "w")), ("g", TANH, ("f",)), ("h", ADD, ("g", "e"))]
    module = program(*lines, out="h")
    assert pieces_of(module, "00000111")[2] == [["matmul", "tanh"], ["exp", "add"], ["matmul", "tanh", "add"]]
    assert pieces_of(module, "000--111")[2] == [["matmul", "tanh"], ["matmul", "tanh", "add"]]


def test_pieces_never_wait_for_each_other() -> None:
    """a → b of another layer, d of that layer → c: neither layer can be one piece beside the other."""
    lines = [("a", EXP, ("x",)), ("b", TANH, ("a",)), ("d", EXP, ("w",)), ("c", TANH, ("d",)), ("e", ADD, ("b", "c"))]
    for layers in ("01101", "01100", "00110", "01010"):
        pieces_of(program(*lines, out="e"), layers)


def test_what_is_made_of_weights_alone_runs_apart_from_what_reads_it_in_halves() -> None:
    lines = [("a", aten.t.default, ("w",)), ("b", EXP, ("a",)), ("c", UP, ("x", "b")), ("d", TANH, ("c",))]
    module = program(*lines, out="d")
    assert pieces_of(module, "0000")[2] == [["t", "exp", "matmul", "tanh"]]
    assert pieces_of(module, "0000", (1,))[2] == [["matmul", "tanh"]]


def test_a_piece_is_repeated_whole_or_kept_whole() -> None:
    lines = [("a", EXP, ("x",)), ("b", TANH, ("a",)), ("c", UP, ("b", "w")), ("d", UP, ("c", "w")), ("e", EXP, ("d",))]
    segment = Segment(frozenset("abcd"), frozenset("cd"))
    new, (found,), made = pieces_of(program(*lines, out="e"), "00000", (), segment)
    assert made == [["exp", "tanh"], ["matmul", "matmul"]]
    calls = {node.name for node in new.graph.nodes if node.name.startswith("piece")}
    assert calls | {"b", "d"} == found.nodes
    assert len(found.heavy) == 1
    assert found.heavy < calls


# ---- ops in the form for compilers


def test_dropout_by_a_ticket_draws_the_same() -> None:
    for mesh, cuts in (((2, 2), ((0, 0), (1, 1))), ((2, 2), ((0, 1), (1, 1))), ((2,), ())):

        def device(comm: Any, cuts: Any = cuts) -> torch.Tensor:
            x = torch.rand(4, 10).requires_grad_()
            with use(Context(comm, 3, 1, 2)):
                expected = dropout(x, 0.3, 7, cuts)
                dims = tuple(dict.fromkeys(dim for _, dim in cuts))
                got = ticketed_dropout(x, dropout_ticket(7, cuts), 0.3, dims)
            assert torch.equal(got, expected)
            ones = torch.ones_like(x)
            gradients = [torch.autograd.grad(y, x, ones)[0] for y in (got, expected)]
            assert torch.equal(*gradients)
            return got.detach()

        LockstepGroup(mesh).run(device)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_without_a_gradient_of_its_own(smoothing: float) -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, -100, 2, -100, 1])
    both = [op(logits, target, -100, smoothing) for op in (cross_entropy, plain_cross_entropy)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(value[0], logits)[0] for value in both))
