"""Predicted bytes of live tensors against measured ones."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from meshwright.compiler.cost.parameter_sharding import PATTERNS, shardings_by_pattern
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.cost.saved_tensors import extra_saved_bytes, saved_bytes
from meshwright.compiler.errors import StageError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import differentiable_nodes
from meshwright.compiler.ir.graph import op_name
from meshwright.compiler.memory import abstract_run, kernel_workspace
from meshwright.compiler.memory.abstract_run import Tracker
from meshwright.compiler.memory.buffers import update_bytes
from meshwright.compiler.memory.kernel_workspace import attention_stand_in
from meshwright.compiler.memory.stage import stage_memories, with_stage_memories
from meshwright.compiler.plan.recompute import NOTHING
from meshwright.compiler.rules import mesh_choices
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.memory import OPTIMIZER_STATE
from meshwright.models.architectures import GPT, Experts
from meshwright.runtime.parameters.gradients import GradientReducer
from meshwright.runtime.profiling.memory_meter import live_bytes, storages_alive
from torch import nn

from tests.support.peak_memory import MEDIAN, MOST, least_peak
from tests.support.planning import make_plan
from tests.support.prices import measured_state
from tests.support.ranks import RankPool
from tests.support.stage_memory import stage_memory
from tests.support.zoo import HIDDEN, SEQUENCE, ZOO


# ---- optimizers
@pytest.mark.parametrize("name", [n for n in OPTIMIZER_STATE if n not in ("none", "SparseAdam")])
def test_optimizer_state_is_that_of_the_real_optimizer(name: str) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if name == "SGD+momentum":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        found: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=1e-3)
        return found

    tensors = measured_state(make)
    assert tensors == OPTIMIZER_STATE[name]
    state, _ = update_bytes((64, 64), torch.float32, name, "cpu")
    assert abs(state - tensors * 64 * 64 * 4) <= 64  # step counters


def test_optimizer_temporaries_of_adam() -> None:
    size = 256 * 128 * 4
    assert update_bytes((256, 128), torch.float32, "AdamW", "cpu")[1] == 2 * size  # the root, then the denominator
    for kind in ("cpu", "cuda"):
        assert update_bytes((256, 128), torch.float32, "AdamW+fused", kind) == (2 * size + 4, 0)
    masters = [
        update_bytes((256, 128), torch.float16, *how)[0] for how in (("AdamW", "cpu", True), ("AdamW+masters", "cpu"))
    ]
    assert masters == [3 * size, 3 * size]  # two states, one master weight
    state, temporary = update_bytes((256, 128), torch.bfloat16, "AdamW", "cpu")
    assert abs(state - size) <= 64  # two states of 16 bits; step counters
    assert temporary == size


# ---- kernels that take room for a moment

# channels in and out, kernel, stride, groups, batch, pixels a side, dtype
CONVOLUTIONS = {
    "blocked": (32, 48, 3, 1, 1, 8, 16, torch.float32),
    "strided": (32, 64, 3, 2, 1, 8, 16, torch.float32),
    "colours": (3, 32, 3, 1, 1, 8, 16, torch.float32),
    "filled up": (6, 10, 3, 1, 1, 8, 16, torch.float32),
    "by groups": (32, 32, 3, 1, 4, 8, 16, torch.float32),
    "pointwise": (32, 64, 1, 1, 1, 8, 16, torch.float32),
    "columns": (16, 16, 3, 1, 1, 2, 12, torch.float64),
}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_take_the_room_that_the_real_kernels_take(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        monkeypatch.setattr(kernel_workspace, "_BLOCK", 8)
    inside, out, kernel, stride, groups, batch, pixels, dtype = CONVOLUTIONS[case]

    def passes(device: str) -> list[Callable[[], Any]]:
        layer = nn.Conv2d(
            inside, out, kernel, stride, kernel // 2, groups=groups, bias=False, device=device, dtype=dtype
        )
        x = torch.ones(batch, inside, pixels, pixels, device=device, dtype=dtype, requires_grad=True)
        y = layer(x)
        grad = torch.ones(y.shape, device=device, dtype=dtype)
        return [
            lambda: layer(x),
            lambda: torch.autograd.grad(y, [x, layer.weight], grad, retain_graph=True),
            lambda: torch.autograd.grad(y, [layer.weight], grad, retain_graph=True),
        ]

    found, wanted = [], []
    for run in passes("meta"):
        with Tracker("cpu") as tracker:
            run()
        found.append(tracker.peak_total)
    for run in passes("cpu"):
        run()
        with live_bytes() as reading:
            run()
        assert reading.peak_bytes is not None
        assert reading.start_bytes is not None
        wanted.append(reading.peak_bytes - reading.start_bytes)
    assert found == pytest.approx(wanted, rel=0.02)


# ---- predicted against measured

# model, options, batch, strategy, microbatches, ranks
CASES: list[tuple[str, dict[str, Any], int, str, int, int]] = [
    ("mlp", {}, 64, "dp1", 1, 1),
    ("gpt", {}, 8, "dp1", 4, 1),
    ("llama", {}, 8, "dp1", 1, 1),
    ("convnet", {}, 16, "dp1", 1, 1),
    ("moe", {}, 16, "dp1", 1, 1),
    ("gpt", {}, 16, "dp2", 4, 2),
    ("gpt", {}, 64, "tp2", 1, 2),
    ("gpt", {}, 32, "pp2", 4, 2),
    ("llama", {}, 32, "tp2", 2, 2),
    ("convnet", {}, 16, "dp2", 1, 2),
    ("gpt", {"layers": 4}, 64, "pp2,dp2", 8, 4),
    ("llama", {"layers": 4}, 32, "pp2,tp2", 4, 4),
]


def train_and_measure(
    name: str, options: dict[str, Any], batch: int, strategy: str, microbatches: int
) -> tuple[float, int]:
    """(predicted, measured) bytes of this rank; what earlier tests left in the process does not count."""
    gc.collect()
    before = sum(storages_alive().values())
    model, args, kwargs = ZOO[name](batch, device="meta", **options)

    def init(name: str, x: torch.Tensor) -> None:
        nn.init.normal_(x, std=0.02) if x.is_floating_point() else x.zero_()

    parallel = mw.parallelize(
        model, Cluster.local(dist.get_world_size()), example_inputs=args, example_kwargs=kwargs, strategy=strategy,
        microbatches=microbatches, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3), init=init,
    )  # fmt: skip
    parallel.train_step(*args, **kwargs)
    peak = least_peak(lambda: parallel.train_step(*args, **kwargs))
    stage = parallel.plan.stage_of(dist.get_rank())
    assert stage is not None
    memory = parallel.plan.prediction.stages[stage].memory_bytes
    return sum(size for cause, size in memory.items() if cause != "framework"), peak - before


def test_predicted_bytes_are_those_measured(ranks: RankPool) -> None:
    errors: dict[str, float] = {}
    for name, options, batch, strategy, microbatches, count in CASES:
        found = ranks.run(count, train_and_measure, name, options, batch, strategy, microbatches, timeout_s=180.0)
        worst = max((predicted / measured - 1 for predicted, measured in found), key=abs)
        errors[f"{name} {options} {strategy} ×{microbatches}"] = worst
    assert all(abs(error) <= MOST for error in errors.values()), errors
    assert median(map(abs, errors.values())) <= MEDIAN, errors


# ---- the prediction by itself


def test_deeper_flight_keeps_more_and_equal_stages_share_a_run() -> None:
    model, args, _ = ZOO["gpt"](64, device="meta", layers=6, tied=False)
    asked = {"strategy": "pp3", "microbatches": 8, "schedule": "1f1b", "executable": True}
    plan = mw.plan(model, Cluster.local(3), example_inputs=args, **asked)
    graph = capture(model, args)
    found = stage_memories(graph, plan)
    for index in range(3):
        assert found[index] == stage_memory(graph, plan, index)
    kept = [bytes_["activations"] for bytes_ in found if not isinstance(bytes_, Exception)]
    assert kept[0] > kept[2]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_forks_count_the_same(schedule: str) -> None:
    model, args, _ = ZOO["gpt"](64, device="meta", layers=7, tied=True)
    asked = {"strategy": "pp3", "microbatches": 8, "executable": True}
    plan = mw.plan(model, Cluster.local(3), example_inputs=args, schedule=schedule, **asked)
    alone = stage_memories(capture(model, args), plan)
    for workers in (2, 3, 4):
        assert stage_memories(capture(model, args), plan, workers) == alone


def test_attention_without_a_fused_kernel_keeps_its_probabilities() -> None:
    batch, layers, heads, sequence = 64, 2, 4, 128
    with torch.device("meta"):
        model = GPT(256, layers, 64, heads, sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    graph = capture(model, (tokens, tokens))
    cluster = Cluster.preset("p3.16xlarge")
    host = replace(cluster.hosts[0], num_devices=2)
    efficiency = tuple((kind, share) for kind, share in host.device.efficiency if kind != "scores")
    fused = replace(host, device=replace(host.device, efficiency=efficiency))
    plan = mw.plan(
        model,
        replace(cluster, hosts=(host,)),
        example_inputs=(tokens, tokens),
        strategy="tp2",
        microbatches=2,
        executable=True,
    )
    other = replace(plan, cluster=json.loads(replace(cluster, hosts=(fused,)).to_json()))
    kept = [sum(stage_memory(graph, each, 0).values()) for each in (plan, other)]
    rows = layers * (batch // 2) * (heads // 2) * sequence  # of one microbatch on one device
    assert kept[0] - kept[1] == rows * (sequence * 4 - 4)  # fp32 probabilities in place of a log-sum-exp


def test_attention_that_writes_its_scores_has_them_twice_over_the_probabilities_in_the_backward() -> None:
    peaks = []
    for writes_scores in (False, True):
        query = torch.empty(2, 4, 512, 8, device="meta", requires_grad=True)
        with Tracker("cuda", writes_scores=writes_scores) as tracker:
            out = attention_stand_in(writes_scores)(query, query, query)
            forward, kept = tracker.peak_total, tracker.total
            torch.autograd.grad(out, [query], torch.empty_like(out))
        peaks.append((forward, kept, tracker.peak_total))
    scores, rows = 2 * 4 * 512 * 512 * 4, 2 * 4 * 512 * 4
    assert [b - a for a, b in zip(*peaks)][:2] == [2 * scores - rows, scores - rows]
    assert peaks[1][2] > 3 * scores


def test_only_a_cpu_keeps_the_probabilities_of_attention_with_a_learned_mask() -> None:
    kept = {}
    for on_cpu in (False, True):
        query = torch.empty(2, 4, 512, 8, device="meta", requires_grad=True)
        mask = torch.empty(1, 4, 512, 512, device="meta", requires_grad=True)
        with Tracker("cpu" if on_cpu else "cuda") as tracker:
            out = attention_stand_in(False, on_cpu)(query, query, query, mask)
            kept[on_cpu] = tracker.total
            (of_mask,) = torch.autograd.grad(out, [mask], torch.empty_like(out))
        assert of_mask.shape == mask.shape
    scores = 2 * 4 * 512 * 512 * 4
    assert kept[False] < scores / 8
    assert kept[True] >= scores


def test_rules_know_what_attention_with_a_learned_mask_keeps() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.lift = nn.Parameter(torch.zeros(1, 4, 256, 256)), nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.lift(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(*parts, attn_mask=self.bias).square().mean()

    graph = capture(Biased(), (torch.zeros(16, 256, 32),)).with_batch(16)
    (node,) = (one for one in graph.ops() if "attention" in op_name(one))
    on_cpu, fused = (
        extra_saved_bytes(node, MeshPricer(cluster, 0, (), "SGD"), differentiable_nodes(graph))
        for cluster in (Cluster.local(1), Cluster.parse("dgx-a100-80:1"))
    )
    assert on_cpu - fused == 16 * 4 * 256 * 256 * 4


def test_program_that_cannot_run_without_data_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, _ = ZOO["mlp"](device="meta")
    plan = mw.plan(model, Cluster.local(1), example_inputs=args, executable=True)
    graph = capture(model, args)

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("this op reads its data")

    monkeypatch.setattr("meshwright.compiler.memory.chunk.with_stand_ins", refuse)
    with pytest.raises(StageError, match="NotImplementedError: this op reads its data in stage 0"):
        with_stage_memories(graph, plan)


def test_reducer_lets_go_of_its_parameters() -> None:
    leaf, other = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    reducer = GradientReducer(None, [(leaf, (0,), 0), (other, (0,), 0)])
    gone = weakref.ref(leaf)
    del reducer, leaf, other
    gc.collect()
    assert gone() is None


def test_losses_keep_their_share_of_the_probabilities() -> None:
    """A device that does a part of the rows keeps that part, though the loss is one number."""
    example, target, weight = torch.randn(64, 5, 8), torch.randint(0, 5, (64, 8)), torch.rand(5)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y, weight, reduction="sum")

    graph = capture(nn.Linear(8, 8), (example,), example_targets=(target,), loss_fn=loss_fn)
    node = next(node for node in graph.ops() if op_name(node) == "aten.cross_entropy_loss.default")
    logits = node.all_input_nodes[0].meta["type"]
    pricer = MeshPricer(A100, 0, (4,), "AdamW")
    choices = mesh_choices(node, (4,))
    sizes, _ = saved_bytes(node, choices, pricer, set(), set(), {node.name}, {node.name}, NOTHING)
    kept = {choice.labels: size / logits.nbytes for choice, size in zip(choices, sizes)}
    assert kept == {("whole",): 1, ("batch",): 0.25, ("d2",): 0.25}


# ---- what is run again, and weights that lie in parts

A100 = Cluster.preset("dgx-a100-40")


@pytest.fixture(scope="module")
def graph_of_gpt():
    return capture(*ZOO["gpt"](64, device="meta", layers=4))


def test_layers_that_run_again_keep_less(graph_of_gpt) -> None:
    """In the run without data as in the estimate from the rules, stage by stage."""
    plain, some, full = (
        make_plan(graph_of_gpt, A100, 64, 8, parse_strategy("pp2"), recompute=mode)
        for mode in ("none", "selective", "full")
    )
    for index in range(2):
        sizes = [stage_memory(graph_of_gpt, plan, index) for plan in (plain, some, full)]
        kept = [size["activations"] for size in sizes]
        assert kept[2] < kept[1] < kept[0]
        assert sum(sizes[2].values()) < sum(sizes[0].values())
        same = [{cause: size[cause] for cause in ("parameters", "optimizer", "inputs")} for size in sizes]
        assert same[0] == same[1] == same[2]
    with_notes = [plan.prediction.notes for plan in (plain, some, full)]
    assert not any("memory of stage" in note for notes in with_notes for note in notes)


def test_what_runs_again_is_there_while_its_layer_goes_backward(graph_of_gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the check sees a count that leaves it out."""
    plain, full = (
        make_plan(graph_of_gpt, A100, 64, 8, parse_strategy("pp2"), recompute=mode) for mode in ("none", "full")
    )
    hidden = 8 * SEQUENCE * HIDDEN * 4  # bytes of a microbatch between layers
    widest = 2 * 4 * hidden  # of a feed-forward, before and behind its activation

    def extra() -> list[float]:
        found = [[stage_memory(graph_of_gpt, plan, k)["temporary"] for k in range(2)] for plan in (plain, full)]
        return [again - before for before, again in zip(*found)]

    assert min(extra()) > widest

    @contextmanager
    def uncounted(self: Tracker) -> Iterator[None]:
        with original(self), pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "watch", lambda x, cause=None: x)
            yield

    original = Tracker.repeating
    monkeypatch.setattr(Tracker, "repeating", uncounted)
    assert min(extra()) < widest


@pytest.mark.parametrize("pattern", PATTERNS)
def test_weights_in_parts_take_their_share(graph_of_gpt, pattern: str) -> None:
    plan = make_plan(graph_of_gpt, A100, 64, 4, parse_strategy("dp4"))
    (stage,) = plan.stages
    types = {node.meta["source"].name: node.meta["type"] for node in graph_of_gpt.placeholders("parameter")}
    (chunk,) = stage.chunks
    homes = {
        name: dict(shardings_by_pattern(types[name], home.compute, stage.mesh_shape, True))[pattern]
        for name, home in chunk.parameters.items()
    }
    lying = replace(plan, stages=(replace(stage, chunks=(replace(chunk, parameters=homes),)),))
    found, whole = stage_memory(graph_of_gpt, lying, 0), sum(kind.nbytes for kind in types.values())
    value, gradient, state = {
        "replicated": (1, 1, 1), "zero1": (1, 1, 4), "zero2": (1, 4, 4), "zero3": (4, 4, 4),
    }[pattern]  # fmt: skip
    assert found["parameters"] == pytest.approx(whole / value, rel=0.01)
    assert found["optimizer"] == pytest.approx(2 * whole / state, rel=0.01)
    if pattern != "replicated":  # whose buckets come beside
        assert found["gradients"] == pytest.approx(whole / gradient, rel=0.05)
    before = stage_memory(graph_of_gpt, plan, 0)
    assert found["activations"] == pytest.approx(before["activations"], rel=0.1)
    if pattern == "zero3":  # what is gathered
        assert found["temporary"] > before["temporary"]


class Routed(nn.Module):
    """Many experts, of which each token goes through two."""

    def __init__(self, hidden: int = 128, num_experts: int = 64) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(hidden, hidden), Experts(hidden, 4 * hidden, num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.experts(self.before(x))).square().mean()


@pytest.mark.parametrize("label", ["token", "dispatch"])
def test_a_few_experts_that_get_all_tokens_take_as_much_as_many(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    with torch.device("meta"):
        model, x = Routed(), torch.rand(512, 1024, 128)
    constraints = ("stages = 1", f"split experts* by {label}")
    plan = mw.plan(model, "dgx-a100-40", example_inputs=(x,), microbatches=1, constraints=constraints)
    graph, found = capture(model, (x,)), []
    for most in (1, 16, 64):
        monkeypatch.setattr(abstract_run, "MOST_EXPERTS", most)
        found.append(sum(stage_memory(graph, plan, 0).values()))
    assert found[0] > 1.02 * found[2]
    assert found[1] == pytest.approx(found[2], rel=0.002)
