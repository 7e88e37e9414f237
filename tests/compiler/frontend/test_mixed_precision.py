"""Mixed precision: types of the graph, prices and bytes that follow, and plans that say which model they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from meshwright import cli
from meshwright.api import pareto, plan
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.mixed_precision import check_precision, in_precision
from meshwright.compiler.ir.graph import TensorType, op_name, types_of
from meshwright.compiler.ir.precision import PRECISIONS
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.validation import validate
from meshwright.compiler.report.reprice import reprice
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster
from torch import nn

from tests.support.planning import make_plan
from tests.support.zoo import ZOO

H100 = Cluster.preset("dgx-h100")


@pytest.fixture(scope="module")
def graph():
    return capture(*ZOO["gpt"](16, device="meta"))


def planned(graph, strategy="dp4", cluster=H100, **options):
    space = Space.asked(zero=0, recompute="none")
    return make_plan(graph, cluster, 16, 2, parse_strategy(strategy), space=space, **options)


class Wide(nn.Module):
    """Linears wide enough that arithmetic counts, in any dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def wide(dtype=torch.float32, width=4096):
    with torch.device("meta"):
        return Wide(dtype, width), torch.zeros(4096, width, dtype=dtype)


# ---- the graph


@pytest.mark.parametrize(("name", "precision"), [("llama", "bf16"), ("convnet", "fp16"), ("mlp", "bf16")])
def test_parameters_and_what_is_made_of_them_are_converted(name, precision):
    graph = capture(*ZOO[name](8, device="meta"))
    other = in_precision(graph, precision)
    other.check()
    added = [node for node in other if node.name not in graph.by_name()]
    assert {op_name(node) for node in added} <= {"aten._to_copy.default"}
    learned: set[str] = set()
    for node in graph:
        if node.op == "placeholder":
            learned |= {node.name} if node.meta["source"].kind == "parameter" else set()
        elif any(operand.name in learned for operand in node.all_input_nodes):
            learned.add(node.name)
        made = other.node(node.name)
        kinds = zip(types_of(node), types_of(made), strict=True)
        if node.name in learned and node.op == "placeholder":
            assert types_of(made) == (TensorType(node.meta["type"].shape, PRECISIONS[precision]),)
        elif node.name not in learned:
            assert types_of(made) == types_of(node)
        assert all(new.dtype in (old.dtype, PRECISIONS[precision]) for old, new in kinds)
    heavy = [n for n in other if op_name(n).startswith(("aten.linear", "aten.conv", "aten.scaled"))]
    assert heavy
    assert {types_of(x)[0].dtype for n in heavy for x in (n, *n.all_input_nodes) if types_of(x)[0].is_float} == {
        PRECISIONS[precision]
    }
    losses = [other.node(result.node) for result in other.results if result.kind == "loss"]
    assert [types_of(node)[0].dtype for node in losses] == [torch.float32]


def test_what_is_made_of_inputs_and_buffers_alone_stays_float32():
    """Angles of positions, targets, running statistics."""
    llama = in_precision(capture(*ZOO["llama"](8, device="meta")), "bf16")
    assert {types_of(n)[0].dtype for n in llama if op_name(n) in ("aten.cos.default", "aten.sin.default")} == {
        torch.float32
    }
    convnet = in_precision(capture(*ZOO["convnet"](8, device="meta")), "bf16")
    written = [types_of(convnet.node(r.node))[0] for r in convnet.results if r.kind == "buffer"]
    assert torch.float32 in {kind.dtype for kind in written if kind.is_float}
    assert torch.bfloat16 not in {kind.dtype for kind in written}
    mlp = in_precision(capture(*ZOO["mlp"](8, device="meta")), "bf16")
    loss = next(node for node in mlp if op_name(node) == "aten.mse_loss.default")
    assert [operand.meta["type"].dtype for operand in loss.all_input_nodes] == [torch.float32] * 2


class Filled(nn.Module):
    """Writes numbers into tensors that 16 bits do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ self.weight
        masked = scores.masked_fill(x < 0, torch.finfo(torch.float32).min).softmax(1)
        chosen = torch.where(x > 0, scores, -1e9).softmax(1) + scores.clamp(-1e30, 1e30)
        return (masked + chosen + scores.masked_fill(x > 2, -torch.inf).softmax(1)).square().mean()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fills_stay_within_16_bits(precision):
    """Rows that are masked throughout do not become NaN."""
    model, x = Filled(), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    x[0], x[1] = -x[0].abs(), x[1].abs()
    graph = in_precision(capture(model, (x,)), precision)
    half = model.weight.detach().to(PRECISIONS[precision])
    values = [half if node.meta["source"].kind == "parameter" else x for node in graph if node.op == "placeholder"]
    (found,) = torch.fx.GraphModule(nn.Module(), graph.fx)(*values)
    torch.testing.assert_close(found, model(x), rtol=0.02, atol=0.0)
    numbers = [value for node in graph for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
    assert -torch.inf in numbers


def test_the_graph_keeps_its_fingerprint_at_every_extent(graph):
    other = in_precision(graph, "bf16")
    assert other.text() != graph.text()
    small = other.with_batch(4)
    assert {other.fingerprint(), small.fingerprint(), graph.fingerprint()} == {graph.fingerprint()}
    assert small.precision == other.precision == "bf16"
    assert in_precision(graph.with_batch(4), "bf16").text() == small.text()
    assert in_precision(other, "bf16") is other
    assert in_precision(graph, "model") is graph
    with pytest.raises(ValueError, match="but got 'fp16' for one in bf16"):
        in_precision(other, "fp16")


def test_a_model_of_16_bits_is_left_alone():
    model, x = wide(torch.bfloat16)
    graph = capture(model, (x,))
    assert in_precision(graph, "bf16") is graph
    wishes = {"example_inputs": (x,), "recompute": "none", "zero": 0, "strategy": "dp2", "microbatches": 1}
    found = [plan(model, H100, precision=precision, **wishes) for precision in ("model", "bf16", "auto")]
    assert [one.precision for one in found] == ["model"] * 3
    assert len({one.prediction.step_s for one in found}) == 1


def test_16_bits_by_precision_cost_what_a_model_of_16_bits_does(graph):
    """Whose optimizer keeps masters; but for the sums of gradients, which are of 4 bytes."""
    model, args, _ = ZOO["gpt"](16, device="meta")
    own = planned(capture(model.bfloat16(), args), optimizer="AdamW+masters")
    mixed = planned(in_precision(graph, "bf16"))
    mine, theirs = (one.prediction.stages[0] for one in (mixed, own))
    assert mine.forward_s == pytest.approx(theirs.forward_s, rel=0.02)
    for cause in ("parameters", "optimizer", "activations", "inputs"):
        assert mine.memory_bytes[cause] == pytest.approx(theirs.memory_bytes[cause], rel=0.02), cause


# ---- plans


def test_weights_of_two_bytes_with_master_weights_and_gradients_of_two(graph):
    plain, mixed = planned(graph), planned(in_precision(graph, "bf16"))
    own, other = (one.prediction.stages[0].memory_bytes for one in (plain, mixed))
    assert other["parameters"] == pytest.approx(own["parameters"] / 2, rel=0.01)
    assert other["optimizer"] == pytest.approx(own["optimizer"] * 12 / 8, rel=0.01)
    assert [wire.bytes for s in mixed.stages for wire in s.wire] == [w.bytes / 2 for s in plain.stages for w in s.wire]


def test_messages_between_stages_are_half_as_large():
    model, x = wide()
    graph = capture(model, (x,))
    plain, mixed = planned(graph, "pp2"), planned(in_precision(graph, "bf16"), "pp2")
    assert [(t.node, t.source) for t in plain.transfers] == [(t.node, t.source) for t in mixed.transfers]
    assert all(b.forward_s < a.forward_s for a, b in zip(plain.transfers, mixed.transfers, strict=True))
    assert all(b.backward_s < a.backward_s for a, b in zip(plain.transfers, mixed.transfers, strict=True))


def test_a_document_is_repriced_in_its_precision(graph, tmp_path):
    mixed = planned(in_precision(graph, "fp16"), "pp2,dp2")
    assert mixed.model == graph.fingerprint()
    assert mixed.precision == "fp16"
    mixed.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert validate(loaded, graph, H100) == []
    again = reprice(loaded, graph, H100)
    assert again.prediction.step_s == pytest.approx(mixed.prediction.step_s, rel=1e-12)
    assert [dict(s.memory_bytes) for s in again.prediction.stages] == [
        dict(s.memory_bytes) for s in mixed.prediction.stages
    ]
    other = reprice(replace(loaded, precision="model"), graph, H100)
    assert other.prediction.step_s > mixed.prediction.step_s
    weight = next(name for name in mixed.stages[0].chunks[0].parameters if name.endswith("weight"))
    assert str(loaded.why(weight, graph)) == str(mixed.why(weight, graph))


def test_it_says_what_it_is(graph):
    mixed = planned(in_precision(graph, "bf16"))
    assert mixed.not_executable(graph) == []
    text = mixed.explain(graph, width=200)
    assert "computed in bf16 with fp32 master weights" in text
    assert "precision bf16" in text


def test_auto_takes_the_faster_and_never_more_than_either():
    model, x = wide()
    wishes = {"example_inputs": (x,), "recompute": "none", "zero": 0, "strategy": "dp2", "microbatches": 1}
    found = {name: plan(model, H100, precision=name, **wishes) for name in ("model", "bf16", "auto")}
    steps = {name: one.prediction.step_s for name, one in found.items()}
    assert steps["bf16"] < steps["model"] / 2
    assert steps["auto"] == steps["bf16"]
    assert found["auto"].precision == "bf16"
    both = plan(model, H100, precision="auto", top_k=2, **wishes)
    assert [one.precision for one in both] == ["bf16", "model"]
    assert both[1].prediction.bound_s <= both[0].prediction.step_s


def test_auto_fits_where_only_one_precision_does():
    model, x = wide(width=1024)
    wishes = {"example_inputs": (x,), "recompute": "none", "zero": 0, "strategy": "dp2", "microbatches": 1}
    wishes |= {"global_batch": 2**16}
    peaks = [plan(model, H100, precision=p, **wishes).prediction.stages[0].peak_bytes for p in ("bf16", "model")]
    host = H100.hosts[0]
    limited = replace(host, device=replace(host.device, memory_bytes=int(sum(peaks) / 2)))
    small = replace(H100, hosts=(limited,))
    with pytest.raises(InfeasibleError):
        plan(model, small, precision="model", **wishes)
    assert plan(model, small, precision="auto", **wishes).precision == "bf16"


def test_a_front_may_mix_precisions():
    model, x = wide()
    wishes = {"example_inputs": (x,), "recompute": "none", "zero": 0, "strategy": "dp2", "microbatches": 1}
    front = pareto(model, H100, precision="auto", points=2, **wishes)
    assert 1 <= len(front) <= 2
    assert front[0].precision == "bf16"


# ---- what is asked


@pytest.mark.parametrize("asked", ["", "half", "bfloat16", "BF16"])
def test_unknown_precisions_are_refused(asked):
    with pytest.raises(ValueError, match="precision is one of model, bf16, fp16, auto, but got"):
        check_precision(asked)


def test_the_command_takes_it(capsys):
    assert cli.main(["plan", "gpt-350m", "--cluster", "dgx-h100", "--precision", "half"]) == cli.BAD_INPUT
    assert "precision is one of model" in capsys.readouterr().err
