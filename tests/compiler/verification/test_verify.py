"""``verify``: sound plans are equal to one device, a bug is named where it first shows, causes are told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.ir.spec import parse_spec
from meshwright.compiler.verification import Verification, capture_check, parts
from meshwright.compiler.verification.compare import Tolerance, difference
from meshwright.compiler.verification.lockstep import LockstepComm
from torch import nn

from tests.support.clusters import fast_links
from tests.support.zoo import MLP, ZOO

EXACT = Tolerance(1e-9, 1e-4)


def planned(name: str, devices: int, *, batch: int = 8, executable: bool = False, options: Any = None, **asked: Any):
    """(plan, model, the arguments of both): of a tiny model on fast links."""
    model, args, kwargs = ZOO[name](batch, **(options or {}))
    inputs = {"example_inputs": args, "example_kwargs": kwargs}
    asked.setdefault("microbatches", 2)
    return mw.plan(model, fast_links(devices), executable=executable, **inputs, **asked), model, inputs


def verified(name: str, devices: int, **asked: Any) -> Verification:
    plan, model, inputs = planned(name, devices, **asked)
    return mw.verify(plan, model, **inputs)


def test_a_capture_is_compared_in_both_parts_of_complex_numbers() -> None:
    loss, gradient = torch.ones(()), torch.randn(4, dtype=torch.complex64)
    runs = [(loss, {"turn": x}) for x in (gradient, gradient, gradient.conj().resolve_conj())]
    assert not capture_check._difference((runs[0], runs[1]), None)
    assert "gradient of 'turn'" in capture_check._difference((runs[0], runs[2]), None)


# ---- sound plans


@pytest.mark.parametrize(
    ("name", "devices", "asked"),
    [
        ("gpt", 8, {"strategy": "pp2,dp2,tp2", "options": {"dropout": 0.1, "layers": 1}}),
        ("moe", 4, {"strategy": "dp2,tp2", "executable": True, "options": {"dropout": 0.1, "layers": 1}}),
        ("convnet", 4, {"strategy": "pp2,dp2", "zero": 0}),  # batch norm over devices
        ("mlp", 2, {"strategy": "dp2", "zero": 3, "recompute": "full"}),
        ("mlp", 4, {"strategy": "tp4", "precision": "bf16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sound_plan_is_equal_to_one_device(name: str, devices: int, asked: dict[str, Any]) -> None:
    found = verified(name, devices, **asked)
    assert found.ok, str(found)
    assert found
    assert found.microbatches == 2
    assert found.compared > 40
    assert found.worst < 1e-11
    assert str(found).startswith(f"equal to one device: {found.compared} tensors over 2 microbatches")
    assert ("not in bf16" in str(found)) == ("precision" in asked)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_chunks_and_tied_weights_in_two_of_them(schedule: str) -> None:
    found = verified("gpt", 4, strategy="pp2,dp2", schedule=schedule, microbatches=4, options={"layers": 2})
    assert found.ok, str(found)


def test_frozen_weights_and_weights_without_values() -> None:
    with torch.device("meta"):
        model, x = MLP(32), torch.zeros(16, 32)
    model.up.requires_grad_(False)
    batch: Any = {"x": x, "y": x}  # as a loader gives it
    plan = mw.plan(model, fast_links(4), example_inputs=batch, strategy="pp2,tp2", microbatches=2)
    found = mw.verify(plan, model, example_inputs=batch)
    assert found.ok, str(found)
    assert found.microbatch_size == 2  # of 8: the smallest whose cuts are even
    assert all(p.is_meta for p in model.parameters())


def test_single_precision_and_the_default_dtype() -> None:
    plan, model, inputs = planned("gpt", 4, strategy="dp2,tp2", options={"layers": 1})
    found = mw.verify(plan, model, dtype="float32", **inputs)
    assert found.ok, str(found)
    assert 1e-9 < found.worst < 1e-3
    assert torch.get_default_dtype() == torch.float32


# ---- refusals


class NoDoubles(nn.Module):
    """As kernels of other libraries are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mw.opaque(NoDoublesInside())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


class NoDoublesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float32, got Double\nfrom a kernel")
        return x * self.weight


def test_what_does_not_run_in_float64_is_checked_in_float32() -> None:
    model, inputs = NoDoubles(), {"example_inputs": (torch.randn(8, 4),)}
    plan = mw.plan(model, fast_links(2), strategy="dp2", microbatches=2, executable=True, **inputs)
    with pytest.raises(ValueError, match=r"does not run in float64 \(expected Float32, got Double\); check with dtype"):
        mw.verify(plan, model, **inputs)
    assert mw.verify(plan, model, dtype="float32", **inputs).ok


def test_what_cannot_be_verified() -> None:
    plan, model, inputs = planned("mlp", 2, strategy="dp2")
    with pytest.raises(ValueError, match="this plan is for another model"):
        mw.verify(plan, MLP(64), example_inputs=(torch.zeros(8, 64), torch.zeros(8, 64)))
    with pytest.raises(ValueError, match="dtype is one of float64, float32, but got 'half'"):
        mw.verify(plan, model, dtype="half", **inputs)
    with pytest.raises(ValueError, match="a check needs a finite loss, but got"):
        mw.verify(plan, model, example_inputs=(torch.full((8, 32), float("inf")),) * 2)
    faulty = replace(plan, global_batch=plan.global_batch + 1)
    with pytest.raises(ValueError, match="the plan does not hold"):
        mw.verify(faulty, model, **inputs)


# ---- planted bugs


def test_the_first_wrong_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model, inputs = planned("gpt", 4, strategy="pp2,tp2", options={"layers": 1})
    gelu = torch.ops.aten.gelu.default
    seen = []

    def off_on_one_device(node: Any, target: Any, args: Any, kwargs: Any, held: Any, given: Any, rank: int) -> Any:
        out = original(node, target, args, kwargs, held, given, rank)
        if target is gelu:
            seen.append(node.name)
            out = out * 1.001 if rank == 1 else out
        return out

    original = parts._call
    monkeypatch.setattr(parts, "_call", off_on_one_device)
    found = mw.verify(plan, model, **inputs)
    first = found.first_difference
    assert not found
    assert first is not None
    assert (first.kind, first.tensor, first.op, first.microbatch) == ("value", seen[0], "aten.gelu.default", 0)
    assert seen[0] in plan.stages[first.stage].chunks[0].ops
    assert first.module.startswith("blocks.0")
    assert 1e-5 < first.error < 2e-3
    assert "first:\n  value of gelu (aten.gelu.default in blocks.0" in str(found)


def test_a_wrong_gradient_behind_a_right_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model, inputs = planned("gpt", 2, strategy="tp2", sequence=False, executable=True, options={"layers": 1})
    original = LockstepComm.reduce_scatter

    def doubled_in_the_backward(self: LockstepComm, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        return original(self, x, axis, dim) * (2 if torch._C._current_graph_task_id() != -1 else 1)

    monkeypatch.setattr(LockstepComm, "reduce_scatter", doubled_in_the_backward)
    first = mw.verify(plan, model, **inputs).first_difference
    assert first is not None
    assert first.kind == "gradient"
    assert "2 times the true value" in first.cause


def test_devices_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model, inputs = planned("mlp", 2, strategy="tp2")
    original = LockstepComm.all_reduce

    def left_out(self: LockstepComm, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        return x if self.rank else original(self, x, axis, op)

    monkeypatch.setattr(LockstepComm, "all_reduce", left_out)
    first = mw.verify(plan, model, **inputs).first_difference
    assert first is not None
    assert first.error == float("inf")
    assert "a device fails there" in first.cause


# ---- causes


X = torch.arange(1, 9, dtype=torch.float64).reshape(4, 2)
A, B = X[:2], X[2:]


@pytest.mark.parametrize(
    ("blocks", "spec", "cause"),
    [
        ([A, B], "S0", ""),
        ([X, X], "R", ""),
        ([X / 4, X * 3 / 4], "P", ""),
        ([B, A], "S0", "the blocks along axis 0 are in another order"),
        ([X / 4, X * 3 / 4], "R", "a reduction over axis 0 is missing"),
        ([X, X + 1], "R", "devices along axis 0 should hold equal values, but differ"),
        ([X, X], "P", "2 times the true value: reduced or counted 2 times over axis 0"),
        ([X / 2, X / 2], "R", "it is 1/2 of the true value: a reduction is missing"),
        ([A / 2, B / 2], "S0", "1/2 of the true value"),
        ([X * 0, X * 0], "R", "nothing arrives there"),
        ([X + 5, X + 5], "R", "another microbatch"),
        ([X * float("nan")] * 2, "R", "it is NaN"),
        ([X, A], "P", "the parts do not fit together"),
        ([X, X], "S0", "the parts make [8, 2] of [4, 2]"),
    ],
)
def test_causes(blocks: list[torch.Tensor], spec: str, cause: str) -> None:
    error, found = difference(blocks, parse_spec(spec), (2,), X, 8.0, EXACT, [X + 5])
    assert (error > 1e-9) == bool(cause)
    assert cause in found


def test_replicas_are_compared_along_their_own_axis() -> None:
    halves = [A, A, B, B]  # axis 0 cuts, axis 1 replicates
    assert difference(halves, parse_spec("S0,R"), (2, 2), X, 8.0, EXACT) == (0.0, "")
    error, cause = difference([A, A, B, B + 1], parse_spec("S0,R"), (2, 2), X, 8.0, EXACT)
    assert error == pytest.approx(1 / 8)
    assert "along axis 1" in cause
    flags = torch.tensor([True, False])
    assert difference([flags, ~flags], parse_spec("R"), (2,), flags, 1.0, EXACT)[0] == float("inf")


def test_ops_that_return_their_argument_are_told_apart() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.one(x)
            return (torch.nn.functional.dropout(h, 0.0).contiguous() * h.contiguous()).sum()

    x = torch.randn(8, 8)
    plan = mw.plan(Idle(), fast_links(2), example_inputs=(x,), strategy="dp2", microbatches=2)
    found = mw.verify(plan, Idle(), example_inputs=(x,))
    assert found.ok, str(found)
