"""A capture and its check leave the user's model as it was: weights, caches that a forward makes, modules with two
names."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.fake_model import run_with, unchanged_attributes
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

from tests.support.special_models import SPECIAL

pytestmark = pytest.mark.filterwarnings("ignore")


class Caching(nn.Module):
    """What it makes in a first forward it keeps: a buffer, an attribute, an entry of a dict and one of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tables: dict[int, Tensor] = OrderedDict()
        self.shapes: list[torch.Size] = []
        self.calls = 0
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.mask is None:
            self.register_buffer("mask", torch.ones(length, length).tril(), persistent=False)
        if not hasattr(self, "places"):
            self.places = torch.arange(length)
        if length not in self.tables:
            self.tables[length] = torch.ones(length)
        self.shapes.append(x.shape)
        self.calls += 1
        return (self.mask @ self.linear(x) * (self.places + self.tables[length])[:, None]).square().mean()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Caching(), Caching()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) + self.first(2 * x)


def test_what_a_forward_keeps_goes_with_the_capture() -> None:
    model, x = Twice(), torch.randn(4, 3, 4)
    before = [dict(vars(module)) for module in model.modules()]
    graph = capture(model, (x,))
    assert check_capture(model, graph, (x,), {}, (), None) == ""
    assert [dict(vars(module)) for module in model.modules()] == before
    assert not model.first.tables
    assert not model.first.shapes
    assert "mask" in model.first._non_persistent_buffers_set
    first = model(x)
    capture(model, (x,))  # now the caches have data
    assert torch.equal(model(x), first)
    assert type(model.first.mask) is Tensor


def test_other_collections_are_left_alone() -> None:
    class Frozen(dict[str, int]):
        def clear(self) -> None:
            raise AssertionError("it is frozen")

    model = Caching()
    model.frozen = Frozen(a=1)
    with unchanged_attributes(model):
        model.calls = 7
        del model.shapes
    assert model.calls == 0
    assert model.shapes == []


class Stateful(nn.Module):
    """A forward that goes by what the one before has left."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.value: object = {"tensor": torch.zeros(()), "number": 0}.get(kind)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        before = 0.0 if self.value is None or self.kind == "auxiliary" else self.value
        if self.kind != "auxiliary":
            self.value = before + (1 if self.kind == "number" else x.detach().mean())
        loss = (hidden * (1 + before)).square().mean()
        if self.kind == "auxiliary":
            self.value = hidden.abs().mean()
            loss = loss + self.value
        return loss


def test_a_tensor_that_a_forward_replaces_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"'1\.value', an attribute that forward reads and replaces"):
        capture(nn.Sequential(nn.Linear(4, 4), Stateful("tensor")), (torch.rand(4, 4),))


@pytest.mark.parametrize("kind", ["number", "none"])
def test_a_state_outside_of_buffers_is_refused(kind: str) -> None:
    model, x = Stateful(kind), torch.rand(4, 4)
    with pytest.raises(ValueError, match=r"as the loss of one and .* of the next .*register a buffer"):
        check_capture(model, capture(model, (x,)), (x,), {}, (), None)


def test_what_a_forward_tells_itself_is_no_state() -> None:
    model, x = Stateful("auxiliary"), torch.rand(4, 4)
    assert check_capture(model, capture(model, (x,)), (x,), {}, (), None) == ""


def test_a_module_with_two_names_gets_its_own_weights_back() -> None:
    model, inputs, _ = SPECIAL["two_names"](8)
    weight = model.first.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = model(*inputs)
    zeros = run_with(model, {"second.weight": torch.zeros(16, 16), "out.0.bias": torch.ones(16)}, inputs)
    assert not torch.equal(zeros, loss)
    assert check_capture(model, capture(model, inputs), inputs, {}, (), None) == ""
    assert model.first.weight is weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class SecondNames(nn.Module):
    """Registered tensors that forward reads by an attribute, or from a container in one."""

    def __init__(self, kind: str, trained: bool) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.scale = nn.Parameter(torch.full((4,), 2.0), trained)
        self.register_buffer("shift", torch.full((4,), 3.0))
        both = (self.scale, self.shift)
        held = {
            "attribute": self.scale, "list": [*both], "tuple": both, "dict": dict(zip("ab", both)),
            "nested": {"a": [both]},
        }  # fmt: skip
        vars(self)["held"] = held[kind]

    def forward(self, x: Tensor) -> Tensor:
        held = self.held
        if self.kind == "nested":
            held = held["a"][0]
        scale, shift = (
            (held, self.shift) if self.kind == "attribute" else held.values() if self.kind == "dict" else held
        )
        return (self.linear(x) * scale + shift).square().mean(dim=(0, 1)).sum()[None]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["attribute", "list", "tuple", "dict", "nested"])
def test_second_names_of_registered_tensors_are_these(kind: str, trained: bool) -> None:
    model, x = SecondNames(kind, trained), torch.randn(8, 3, 4)
    held = model.held
    graph = capture(model, (x,))
    assert not graph.constants
    assert model.held is held
    assert check_capture(model, graph, (x,), {}, (), None) == ""
    other = torch.full((4,), 5.0)
    assert torch.equal(
        run_with(model, {"scale": other}, (x,)), ((model.linear(x) * 5 + 3) ** 2).mean((0, 1)).sum()[None]
    )
    assert model.held is held
