"""Models with a submodule that no export can trace: a naive mixture of experts, a branch on a value, and others.

PYTEST_DONT_REWRITE: an assert of theirs is captured as it stands.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, TOKENS = 16, 4


class NaiveMixture(nn.Module):
    """Each token goes to its two best experts, which a Python loop runs on the tokens that they got."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.softmax(self.router(flat), -1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, weights[rows, places, None] * expert(flat[rows]))
        return out.reshape(x.shape)


class Branch(nn.Module):
    """Two layers, of which the mean of the whole input chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.calm, self.wild = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.wild(x).relu() if x.mean().item() > 0 else self.calm(x)


class Again(torch.autograd.Function):
    """A checkpoint as diffusion models have it: the function reads weights, which are arguments as well."""

    @staticmethod
    def forward(context: Any, function: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        context.function, context.tensors = function, (x, *weights)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        x, *weights = context.tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            result = context.function(x.view_as(x))
        return (None, *torch.autograd.grad(result, (x, *weights), gradient, allow_unused=True))


class Checkpointed(nn.Module):
    """A layer under a checkpoint of its own, and a module that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.same = self.equal = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.same(Again.apply(lambda x: self.equal(self.linear(x)).relu(), x, *self.parameters()))


class Rounding(nn.Module):
    """A norm in float32, whatever it is given, beside a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 1e6:
            return x
        return nn.functional.layer_norm(x.float(), (WIDTH,), self.weight.float()).to(x.dtype)


class Noisy(nn.Module):
    """Dropout beside a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) if x.abs().max().item() < 1e6 else x


class Selected(nn.Module):
    """The tokens whose first number is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[..., 0] > 0]


class Counting(nn.Module):
    """A buffer that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * (1 + self.steps.item())


class Averaging(Counting):
    """A buffer that forward updates behind autograd's back, as a codebook's averages are."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps.data.lerp_(x.detach().mean(), 0.5)
        return x * (1 + self.steps.item())


class Keeping(nn.Module):
    """A tensor in an attribute that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.mean()
        return x * self.last.item()


class Fading(nn.Module):
    """A count of its calls in an attribute, by which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * abs(x.mean().item()) / self.calls


class Counted(nn.Module):
    """A count of its calls in an attribute, which it does not read (as solvers of differential equations have), and two
    caches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("places", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.places is None:
            self.places, self.half = torch.arange(x.shape[-1]), 0.5
        return x * abs(x.mean().item()) + self.places * self.half


class Learning(nn.Module):
    """A buffer that forward makes, which the state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().mean()
        return x * abs(x.mean().item())


class InPlace(nn.Module):
    """Its argument is changed."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0) if x.mean().item() > 0 else x.mul_(3.0)


class Chance(nn.Module):
    """Its numbers are not PyTorch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Borrowing(nn.Module):
    """It reads a tensor of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.others[0]


class Telling(nn.Module):
    """A number of values beside them."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, int((x > 0).sum())


class Placing(nn.Module):
    """Rows of ``x``, in a Python loop over the batch, at the places where ``ids`` has the number of an image; as many
    of both."""

    NUMBER = 7

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        rows, places = torch.cat([self.linear(sample) for sample in x]), ids == self.NUMBER
        if int(places.sum()) != len(rows):
            raise ValueError(f"{len(rows)} rows, but {int(places.sum())} places")
        return torch.zeros(*ids.shape, WIDTH).index_put((places,), rows)


class Placed(nn.Module):
    """Images among words: random words have no place for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.placing, self.last = nn.Linear(WIDTH, WIDTH), Placing(), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.last(self.placing(ids, self.first(x))).square().mean()


def placed(size: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.arange(8).repeat(size, 1)
    ids[:, :TOKENS] = Placing.NUMBER
    ids[:, 7] = 0
    return ids, batch(size)[0]


class Checked(nn.Module):
    """Checks of its inputs, and a branch that does more than to raise."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.more, self.net = more, nn.Linear(3, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels is not None and (labels.max() >= 3 or not x.isfinite().all()):
            raise ValueError("a label is too large, or an input is not finite")
        assert x.abs().max() < 100 and not (labels < 0).any()  # noqa: PT018 - both in one test
        if self.more and x.mean() > 0:
            self.more = False
            raise ValueError("a mean")
        return nn.functional.cross_entropy(self.net(x), labels)


MIDDLES = {
    kind.__name__: kind
    for kind in (
        NaiveMixture, Branch, Checkpointed, Rounding, Noisy, Selected, Counting, Averaging, Keeping, Learning, Fading,
        Counted, InPlace, Chance, Borrowing, Telling, nn.Identity,
    )
}  # fmt: skip


class Model(nn.Module):
    """Residual blocks whose middle is one of ``MIDDLES``, between linear layers; the loss is a mean of squares."""

    def __init__(self, middle: str = "NaiveMixture", blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(MIDDLES[middle]()) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.last(x) - y).square().mean()


class Block(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.middle(self.first(x))))


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(size, TOKENS, WIDTH, generator=generator) for _ in range(2))


def longformer() -> tuple[nn.Module, dict[str, Tensor]]:
    """An encoder that branches on whether some token attends globally."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, attention_window=4,
        vocab_size=32, max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(3, 32, (8, 8))
    return transformers.LongformerForMaskedLM(config), {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids
    }  # fmt: skip


def model_of(middle: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    if middle == "Longformer":
        model, inputs = longformer()
        model.zoo = middle  # its capture, of seconds, is the same for each strategy
        return model, (), inputs
    return (Placed(), placed(), {}) if middle == "Placing" else (Model(middle), batch(), {})
