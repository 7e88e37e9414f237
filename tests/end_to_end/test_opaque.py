"""Modules that cannot be traced become one op, by mark or by themselves: training equals the user's model, and what an
op cannot keep is refused by name."""

from __future__ import annotations

import json
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend import opaque_modules
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir.graph import CAPTURE_BATCH, Graph
from meshwright.compiler.ir.opaque_module import OpaqueModule
from meshwright.compiler.plan.validation import validate
from meshwright.compiler.rules import rule_for
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

from tests.support.parity import trained_eagerly
from tests.support.untraceable import Model, Placed, batch, longformer, model_of, placed

STEPS = 3


def opaque_ops(graph: Graph) -> list[Any]:
    return [node for node in graph.ops() if isinstance(node.target, OpaqueModule)]


def single_device(middle: str) -> tuple[list[float], dict[str, Tensor]]:
    return trained_eagerly(*model_of(middle), lambda leaves: torch.optim.SGD(leaves, lr=0.1), STEPS)


def trained(middle: str, strategy: str | None, options: dict[str, Any]) -> Any:
    """On one rank of the job."""
    from meshwright.costmodel.cluster import Cluster

    model, args, kwargs = model_of(middle)
    parallel = mw.parallelize(
        model, Cluster.parse(f"local:{torch.distributed.get_world_size()}"), example_inputs=args, example_kwargs=kwargs,
        optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.1), strategy=strategy, check_capture=True, **options,
    )  # fmt: skip
    losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
    return losses, parallel.full_state_dict(), parallel.plan.prediction.notes


@pytest.mark.parametrize(
    ("middle", "strategy", "options"),
    [
        ("NaiveMixture", "dp2", {}),
        ("NaiveMixture", "pp2", {"recompute": "full", "microbatches": 2}),
        ("NaiveMixture", "tp2", {}),
        ("NaiveMixture", "dp2", {"zero": 3}),
        ("NaiveMixture", None, {}),
        ("Branch", "dp2", {"microbatches": 1}),
        ("Branch", "pp2", {"microbatches": 1}),
        ("Branch", "tp2", {"microbatches": 1}),
        ("Branch", None, {"microbatches": 1}),
        ("Longformer", "dp2", {}),
        ("Longformer", "tp2", {}),
        ("Longformer", "pp2", {}),
        ("Placing", "dp2", {}),
        ("Checkpointed", "dp2", {}),
        ("Checkpointed", "pp2", {}),
        ("Counted", "pp2", {"microbatches": 1}),
    ],
)
def test_training_equals_the_users_model(ranks, middle: str, strategy: str | None, options: dict[str, Any]) -> None:
    losses, state = single_device(middle)
    (found, weights, notes), _ = ranks.run(2, trained, middle, strategy, options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=0)
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)
    path = {"Longformer": "longformer.encoder", "Placing": "placing"}.get(middle, "blocks.0.middle")
    assert any(note.startswith(path) and middle in note for note in notes)


@pytest.mark.parametrize(("strategy", "options"), [("dp2", {}), ("tp2", {}), ("pp2", {"recompute": "full"})])
def test_random_numbers_are_the_same_under_every_plan(ranks, strategy: str, options: dict[str, Any]) -> None:
    (whole, state, notes), _ = ranks.run(2, trained, "Noisy", "pp2", {"microbatches": 1})
    assert any("draws random numbers" in note for note in notes)
    (losses, weights, _), _ = ranks.run(2, trained, "Noisy", strategy, {"microbatches": 1, **options})
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=1e-5, atol=0)
    assert len(set(losses)) == STEPS
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


# ---- what becomes an op


def test_a_mark_makes_an_op_and_changes_nothing_else() -> None:
    model, inputs = Model("Identity"), batch()
    names, forward = list(model.state_dict()), nn.Linear.forward
    assert mw.opaque(model.blocks[1].first) is model.blocks[1].first
    graph = capture(model, inputs)
    (node,) = opaque_ops(graph)
    assert node.meta["module"] == "blocks.1.first"
    assert [operand.meta["source"].name for operand in node.all_input_nodes[:2]] == [
        "blocks.1.first.weight", "blocks.1.first.bias"
    ]  # fmt: skip
    assert list(model.state_dict()) == names
    assert nn.Linear.forward is forward
    assert check_capture(model, graph, inputs, {}, (), None) == ""
    with pytest.raises(ValueError, match="takes a module, but got a function"):
        mw.opaque(batch)  # type: ignore[type-var]


def test_it_is_found_where_a_module_has_two_names() -> None:
    model, inputs = Model("Checkpointed"), batch()
    graph = capture(model, inputs)
    assert [node.meta["module"] for node in opaque_ops(graph)] == ["blocks.0.middle", "blocks.1.middle"]
    assert check_capture(model, graph, inputs, {}, (), None) == ""
    model.again = model.blocks[0]
    mw.opaque(model.blocks[0].first)
    found = [node.meta["module"] for node in opaque_ops(capture(model, inputs))]
    assert found == ["blocks.0.first", "blocks.0.middle", "blocks.1.middle"]


def test_the_smallest_submodule_is_an_op_and_its_reason_is_told() -> None:
    for middle, split in (("NaiveMixture", True), ("Rounding", True), ("Branch", False), ("Noisy", False)):
        model, inputs = Model(middle), batch()
        graph = capture(model, inputs)
        nodes = opaque_ops(graph)
        assert [node.meta["module"] for node in nodes] == ["blocks.0.middle", "blocks.1.middle"]
        assert "untraceable.py:" in nodes[0].target.reason
        assert "branches on a tensor's value" in nodes[0].target.reason
        assert [choice.label for choice in rule_for(nodes[0]).axis_choices(nodes[0])] == ["whole", "batch"][: 1 + split]
        assert nodes[0].target != nodes[1].target or not nodes[0].target.random
        assert check_capture(model, graph, inputs, {}, (), None) == ""


class Rare(nn.Module):
    """A weight that only large inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 1e4, x * self.weight, x) if x.isfinite().all() else x


def test_a_gradient_that_is_zero_in_all_trials_is_summed() -> None:
    model = Model("Identity")
    model.blocks[0].middle = Rare()
    inputs, _ = opaque_ops(capture(model, batch()))[0].target.split
    assert [tuple(map(str, pair)) for pair in inputs] == [("R", "P"), ("S0", "S0")]


class Recurrent(nn.Module):
    """A recurrent net, tied layers, and dropout that is off in eval, behind a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(16, 16, batch_first=True)
        self.first, self.second, self.dropout = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.second(self.first(self.net(x)[0]))) if x.sum().item() < 1e9 else x


def test_tied_weights_recurrent_nets_and_modes_are_those_of_the_model() -> None:
    model, inputs = Model("Identity"), batch()
    model.blocks[0].middle = Recurrent()
    model.blocks[0].middle.dropout.eval()
    graph = capture(model, inputs)
    model.blocks[0].middle.dropout.train()  # a graph keeps the modes that it was captured in
    (node,) = opaque_ops(graph)
    assert not node.target.random
    model.blocks[0].middle.dropout.eval()
    assert check_capture(model, graph, inputs, {}, (), None) == ""


def test_pieces_of_transformers_are_ops() -> None:
    model, inputs = longformer()
    graph = capture(model, (), inputs)
    (node,) = opaque_ops(graph)
    assert "modeling_longformer.py:" in node.target.reason
    assert len(rule_for(node).axis_choices(node)) == 2
    assert check_capture(model, graph, (), inputs, (), None) == ""


def test_a_module_that_random_values_do_not_suit_is_tried_on_the_example() -> None:
    model, inputs = Placed(), placed()
    graph = capture(model, inputs)
    (node,) = opaque_ops(graph)
    assert "a Python loop over the batch" in node.target.reason
    assert "on samples of the example" in node.target.assumed
    assert [choice.label for choice in rule_for(node).axis_choices(node)] == ["whole", "batch"]
    assert check_capture(model, graph, inputs, {}, (), None) == ""
    with pytest.raises(CaptureError, match=r"untraceable.py:\d+: .*a Python loop over the batch.*batch_dims="):
        capture(model, (torch.zeros_like(inputs[0]), inputs[1]))  # no image has a place in the example either
    with pytest.raises(CaptureError, match="a Python loop over the batch"):
        capture(model, tuple(x.to("meta") for x in inputs))


def test_results_of_other_shapes_than_at_the_capture_are_refused() -> None:
    model, inputs = Model("Identity"), batch()
    mw.opaque(model.blocks[0].first)
    (node,) = opaque_ops(capture(model, inputs))
    weights = [torch.zeros(2 * 16, 16), torch.zeros(2 * 16)]
    with pytest.raises(ValueError, match=r"'blocks.0.first': its results have shapes .* for these values"):
        node.target.run([*weights, inputs[0]])


# ---- what is refused


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean() if x.mean().item() > 0 else x.sum()


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        ("Selected", r"'blocks\.0\.middle': its output 0 has a shape that depends on values"),
        ("Counting", r"'blocks\.0\.middle': it changes its tensor 'steps' in place"),
        ("Averaging", r"'blocks\.0\.middle': it changes its tensor 'steps' in place"),
        ("Keeping", r"'blocks\.0\.middle': .*Keeping changes its attributes"),
        ("Learning", r"'blocks\.0\.middle': .*Learning changes its attributes"),
        ("InPlace", r"'blocks\.0\.middle': it changes an argument in place"),
        ("Fading", r"'blocks\.0\.middle': it gives other values for the same inputs"),
        ("Chance", r"'blocks\.0\.middle': it gives other values for the same inputs"),
        ("Borrowing", r"'blocks\.0\.middle': it reads a tensor of the model that is neither its own nor an argument"),
        ("Telling", r"'blocks\.0\.middle': it returns constants or a structure that depend on values"),
    ],
)
def test_refused_by_name(middle: str, words: str) -> None:
    model = Model(middle)
    for block in model.blocks:
        mw.opaque(block.middle)
    if middle == "Borrowing":
        model.blocks[0].middle.others.append(model.last.weight)
    with pytest.raises(CaptureError, match=words) as caught:
        capture(model, batch())
    assert "\n" not in str(caught.value)


def test_the_root_is_refused_as_ever_and_a_failed_attempt_is_told() -> None:
    with pytest.raises(CaptureError, match=r"`return x\.mean\(\) if .*the code branches on a tensor's value") as caught:
        capture(Root(), (torch.randn(4, 3),))
    assert "one op" not in str(caught.value)
    with pytest.raises(CaptureError, match=r"untraceable.py:\d+: .*nor can .*'blocks\.0\.middle': .*'steps'"):
        capture(Model("Counting"), batch())


# ---- plans


def test_plans_are_priced_kept_and_verified() -> None:
    with torch.device("meta"):
        model = Model()
    plan = mw.plan(model, "p3.16xlarge:1", example_inputs=batch(), strategy="dp2,pp2", cache=False)
    assert any("measured in a trial" in note for note in plan.prediction.notes)
    again = mw.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    graph = capture(Model(), batch())
    assert validate(again, graph) == []
    assert mw.verify(again, Model(), example_inputs=batch()).ok
    changed = Model()
    changed.blocks[0].middle.experts[0][1] = nn.ReLU()
    assert any("opaque_module" in fault for fault in validate(again, capture(changed, batch())))


def test_work_and_kept_bytes_are_those_of_the_run() -> None:
    node = opaque_ops(capture(Model("Branch"), batch()).with_batch(8))[0]
    products = 2 * 8 * 4 * 16 * 16
    assert products <= rule_for(node).flops(node) <= 1.2 * products
    assert 0 < rule_for(node).temporary_bytes(node) <= 2 * 8 * 4 * 16 * 4


def test_a_module_that_is_too_large_for_a_trial_runs_without_data_or_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(opaque_modules, "_MOST_FLOPS", 1.0)
    model = Model("Identity")
    mw.opaque(model.blocks[0].first)
    target = opaque_ops(capture(model, batch()))[0].target
    assert target.split is None
    assert "assumed from a run without data" in target.assumed
    assert target.work.flops == pytest.approx(2 * CAPTURE_BATCH * 4 * 16 * 16, rel=0.2)
    with pytest.raises(CaptureError, match=r"'blocks\.0\.middle': it does not run on tensors without data \(it is too"):
        capture(Model("Branch"), batch())
