"""Backwards that users write are kept or refused by name, never lost: autograd Functions, hooks, reentrant checkpoints,
derivatives inside forward; and a capture that differs from the model is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io

import meshwright as mw
import pytest
import torch
import torch.utils.checkpoint
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend import capture as capture_module
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.report.explain import explain
from meshwright.compiler.rules import rule_for
from meshwright.compiler.verification.capture_check import check_capture
from meshwright.compiler.verification.check_rules import check_node
from torch import Tensor, nn

from tests.support.custom_backwards import BATCH, Model, Round, batch
from tests.support.parity import trained_eagerly

STEPS = 4


KEPT = ("functions", "whole", "defined_here", "checkpointed", "data")


@pytest.mark.parametrize("middle", KEPT)
def test_the_capture_has_the_users_gradients(middle: str) -> None:
    model, inputs = Model(middle), batch()
    assert check_capture(model, capture(model, inputs), inputs, {}, (), None) == ""


def single_device(middle: str) -> tuple[list[float], dict[str, Tensor]]:
    return trained_eagerly(
        Model(middle), batch(), {}, lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9), STEPS
    )


def trained(middle: str, strategy: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """On one rank of the job."""
    from meshwright.costmodel.cluster import Cluster

    parallel = mw.parallelize(
        Model(middle), Cluster.parse(f"local:{torch.distributed.get_world_size()}"), example_inputs=batch(),
        optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9), strategy=strategy,
        microbatches=1, check_capture=True,
    )  # fmt: skip
    return [float(parallel.train_step(*batch())) for _ in range(STEPS)], parallel.full_state_dict()


@pytest.mark.parametrize("middle", ["functions", "whole", "checkpointed"])
@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2", None])
def test_training_equals_one_device(ranks, middle: str, strategy: str | None) -> None:
    losses, state = single_device(middle)
    (found, weights), _ = ranks.run(2, trained, middle, strategy)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=0)
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


def test_verify_compares_with_the_model() -> None:
    model, inputs = Model(), batch()
    plan = mw.plan(model, "local:4", example_inputs=inputs, strategy="dp2,tp2", cache=False)
    assert mw.verify(plan, model, example_inputs=inputs).ok


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        ("tensor_hook", "register_hook"),
        ("derivative", "torch.func.jvp"),
        ("noise", "random numbers"),
        ("dirty", "in place"),
        ("behind", "in place"),
        ("momentum", "a weight is changed by forward"),
        ("module", "not its argument"),
    ],
)
def test_refused_by_line(middle: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Model(middle), batch())
    assert "custom_backwards.py:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hooks_of_the_model_are_refused_by_name() -> None:
    hooked = Model()
    handle = hooked.first.weight.register_hook(lambda grad: 10 * grad)
    with pytest.raises(CaptureError, match=r"'first\.weight'"):
        capture(hooked, batch())
    handle.remove()
    capture(hooked, batch())
    handle = hooked.second.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="module 'second'"):
        capture(hooked, batch())
    handle.remove()
    hooked.last.bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(CaptureError, match=r"'last\.bias'"):
        capture(hooked, batch())
    capture(hooked, batch(), outputs=True)  # without gradients nothing is lost


def test_a_capture_undoes_what_it_changed() -> None:
    before = vars(Round)["forward"], torch.autograd.Function.apply.__func__, torch.autograd.grad, Tensor.register_hook
    with pytest.raises(CaptureError):
        capture(Model("tensor_hook"), batch())
    after = vars(Round)["forward"], torch.autograd.Function.apply.__func__, torch.autograd.grad, Tensor.register_hook
    assert before == after
    assert "data" not in vars(Tensor)
    x = torch.ones(3, requires_grad=True)
    Round.apply(x).sum().backward()
    assert x.grad is not None


def test_rules_of_functions_hold() -> None:
    """What trials confirm is confirmed by the rule checker, on meshes of two and of two by two."""
    nodes = [n for n in capture(Model(), batch()).with_batch(BATCH).ops() if "custom_function" in str(n.target)]
    assert [[choice.label for choice in rule_for(node).axis_choices(node)] for node in nodes] == [
        ["whole", "in0d0", "in0d1"],
        ["whole", "in0d0", "in0d1"],
        ["whole", "in1d0", "in0d0"],
    ]
    for node in nodes:
        assert check_node(node) == {}


def test_what_no_trial_confirms_is_replicated_aloud() -> None:
    plan = mw.plan(Model("whole"), "local:2", example_inputs=batch(), strategy="dp2", cache=False)
    assert any("LargestAs" in note and "replicated" in note for note in plan.prediction.notes)


class LosesBackwards:
    """Stands for ``CustomBackwards`` and does nothing."""

    def __init__(self, training: bool) -> None:
        pass

    def __enter__(self) -> LosesBackwards:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_lost_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "CustomBackwards", LosesBackwards)
    model, inputs = Model(), batch()
    graph = capture(model, inputs)
    with pytest.raises(ValueError, match=r"gradient of 'first\.weight'"):
        check_capture(model, graph, inputs, {}, (), None)
    plan = mw.plan(model, "local:2", example_inputs=inputs, strategy="dp2", cache=False)
    with pytest.raises(ValueError, match=r"gradient of 'first\.weight'"):
        mw.verify(plan, model, example_inputs=inputs)
    assert mw.verify(plan, model, example_inputs=inputs, check_capture=False).ok


class AllCheckpointed(nn.Module):
    """Everything is in one reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model("data")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.utils.checkpoint.checkpoint(self.model, x, y, use_reentrant=True)


def test_a_model_in_one_reentrant_checkpoint() -> None:
    model, inputs = AllCheckpointed(), batch()
    assert check_capture(model, capture(model, inputs), inputs, {}, (), None) == ""


def bound(middle: str, check: bool | None) -> str:
    """What ``parallelize`` says on one rank."""
    try:
        mw.parallelize(
            Model(middle), mw.Cluster.parse("local:2"), example_inputs=batch(), strategy="dp2", check_capture=check
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("check", [None, True, False])
def test_parallelize_compares_by_itself(ranks, check: bool | None) -> None:
    """A branch that chance decides: the first run of it is what is captured."""
    said = ranks.run(2, bound, "chance", check)
    assert all(("loss" in text) == (check is not False) for text in said)


def small_cluster() -> mw.Cluster:
    """Two V100s, on which so small a model is not worth splitting."""
    eight = mw.Cluster.preset("p3.16xlarge")
    return dataclasses.replace(eight, hosts=(dataclasses.replace(eight.hosts[0], num_devices=2),))


def bound_to_one_device() -> str:
    """What this rank writes to stderr when it binds a plan that leaves a device idle."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        mw.parallelize(Model(), plan=plan_of_one_device(), example_inputs=batch())
    return written.getvalue()


def plan_of_one_device() -> mw.Plan:
    return mw.plan(Model(), small_cluster(), example_inputs=batch(), executable=True, cache=False)


def test_idle_devices_are_said_first(ranks) -> None:
    said = "1 of 2 devices do nothing (1): no plan on more devices was predicted to be faster"
    head = " ".join(line.strip() for line in explain(plan_of_one_device()).splitlines()[:6])
    assert said in head
    first, second = ranks.run(2, bound_to_one_device)
    assert first.startswith(f"meshwright: {said}")
    assert not second
