"""What cannot be captured is refused with its line and what to change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.mean()
        return x.sum()


class Items(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.max().item()
        return (x * scale).mean()


class Floats(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * float(x[0, 0])


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.min() > 0
        return x.mean()


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).mean()


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.mean(), lambda x: x.sum(), (x,))


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean() + torch.from_numpy(np.tanh(x.detach().numpy())).mean()


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].mean()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.poisson(x.abs())).mean()


class Mutates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.mean()


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(3))]

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights[0]).mean()


class Sparse(nn.Module):
    """A sparse buffer that the forward reads, or one that is in the state dict."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("links", torch.eye(3).to_sparse(), persistent=not read)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.links, x.t()).mean() if self.read else x.mean()


class Aliased(nn.Module):
    """A weight, and another tensor in its memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.value = self.first.weight.detach() if kind == "value" else torch.zeros(3, 3)
        if kind == "weight":
            self.second.weight.data = self.first.weight.data
        if kind == "parts":  # which do not overlap
            flat = torch.randn(2, 3, 3)
            self.first.weight, self.second.weight = (nn.Parameter(part) for part in flat)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) @ self.value).mean()


@pytest.mark.parametrize(
    ("model", "code", "advice"),
    [
        (Branches(), "if x.sum() > 0:", "torch.where"),
        (Items(), "x.max().item()", "keep it a tensor"),
        (Floats(), "float(x[0, 0])", "keep it a tensor"),
        (Asserts(), "assert x.min() > 0", "torch.where"),
        (Mixes(), "x * self.scale", "register_buffer"),
        (Conditional(), "torch.cond", "without torch.cond"),
        (Numpy(), "np.tanh(x.detach().numpy())", "torch function of the same name"),
        (Selects(), "x[x > 0]", "fixed shape"),
    ],
)
def test_errors_name_the_line_and_the_change(model: nn.Module, code: str, advice: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(4, 3),))
    text = str(caught.value)
    assert "\n" not in text
    first = type(model).forward.__code__.co_firstlineno
    assert any(f"test_capture_refusals.py:{line}:" in text for line in range(first, first + 5)), text
    assert code in text
    assert advice in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Noise(), "random numbers are uniform"),
        (Mutates(), "args_0"),
        (Unregistered(), "nn.ParameterList"),
        (Aliased("weight"), r"each weight has memory of its own, but got 'second\.weight' in that of 'first\.weight'"),
        (Aliased("value"), r"each weight has memory of its own, but got 'first\.weight' in that of 'value'"),
        (nn.Sequential(nn.LazyLinear(3)), r"got '0\.weight' of a lazy module; call the model once"),
        (Sparse(read=True), r"got links, which is torch.sparse_coo; .*to_dense"),
        (Sparse(read=False), r"got links, which is torch.sparse_coo"),
    ],
)
def test_other_refusals(model: nn.Module, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(model, (torch.randn(4, 3),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(4).to_sparse(), r"got args.0, a tensor of torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"got args.0, a nested tensor; .* pad it"),
    ],
)
def test_inputs_are_dense(make: Callable[[], Tensor], words: str) -> None:
    values = make()
    with pytest.raises(ValueError, match=words):
        capture(nn.Linear(4, 4), (values,))


def test_weights_may_be_parts_of_one_tensor() -> None:
    capture(Aliased("parts"), (torch.randn(4, 3),))


def test_failures_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"same reduction dim.*check that the model runs"):
        capture(nn.Linear(3, 3), (torch.randn(2, 4),))
    with pytest.raises(CaptureError):
        capture(Branches(), (torch.randn(4, 3),))
    assert capfd.readouterr() == ("", "")


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Mixes()).eval()
    weight = model[0].weight
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(4, 3),))
    assert model[0].weight is weight
    assert not model.training
