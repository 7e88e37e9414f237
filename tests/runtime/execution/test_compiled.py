"""Programs that torch compiles train as one device does; what cannot be compiled is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.runtime.execution.compilation import Compiler, backend_of
from torch._dynamo.utils import counters
from torch._inductor import config

from tests.support.clusters import fast_links
from tests.support.manual_plans import by_hand, one_device, sent
from tests.support.ranks import RankPool
from tests.support.zoo import ZOO

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
        ALONE[case] = ranks.run(1, run, name, options, alone, False)[0]
    expected, reference, *_ = ALONE[case]
    results = ranks.run(2, run, name, options, asked, backend, timeout_s=TIMEOUT_S)
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
    ((first, again), eager) = ranks.run(1, inductor, str(tmp_path), timeout_s=TIMEOUT_S)[0]
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
