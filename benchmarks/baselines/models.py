"""The models that are trained, whole and as chains of units that a hand-written pipeline may be cut between.

Every model gives the mean loss from ``model(*inputs)``; ``units`` gives modules that share its parameters, of which all
but the last map one tensor to one tensor, and whose end is the tensor that ``loss_fn`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from meshwright.models.architectures import GPT, Block
from torch import Tensor, nn

__all__ = ["MLP", "Case", "ConvNet", "make_convnet", "make_gpt", "make_mlp"]


@dataclass(frozen=True)
class Case:
    """A seeded model with one global batch, (x, y), its parts for a hand-written pipeline, and the modules that a
    person would shard each for itself."""

    model: nn.Module
    x: Tensor
    y: Tensor
    units: Callable[[nn.Module], list[nn.Module]] | None = None
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    shards: Callable[[nn.Module], list[nn.Module]] = lambda model: list(model.children())


class _Embed(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)


class _Attend(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attention = block.norm1, block.attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x))


class _Transform(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm2, self.feed_forward = block.norm2, block.feed_forward

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm2(x))


class _Head(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def _gpt_units(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, GPT)
    halves = [half for block in model.blocks for half in (_Attend(block), _Transform(block))]
    return [_Embed(model), *halves, _Head(model)]


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def make_gpt(batch: int, layers: int = 4, hidden: int = 256, sequence: int = 128, vocab: int = 2048) -> Case:
    """A decoder of ``architectures.GPT``, embeddings untied, as in most hand-written plans."""
    torch.manual_seed(0)
    model = GPT(vocab, layers, hidden, hidden // 64, sequence, tied=False).train()
    tokens, targets = torch.randint(0, vocab, (2, batch, sequence))
    return Case(model, tokens, targets, _gpt_units, _token_loss, lambda model: list(model.blocks))


class MLP(nn.Module):
    """Linear layers and GELU; mean squared error."""

    def __init__(self, features: int, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [features, *[hidden] * layers, features]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for linear in self.linears[:-1]:  # type: ignore[union-attr]
            x = F.gelu(linear(x))
        return F.mse_loss(self.linears[-1](x), y)


def make_mlp(batch: int, features: int = 512, hidden: int = 1024, layers: int = 4) -> Case:
    """Linear layers and GELU; many parameters for its compute, so gradients weigh."""
    torch.manual_seed(0)
    model = MLP(features, hidden, layers).train()
    x, y = torch.randn(2, batch, features)
    return Case(model, x, y, shards=lambda model: list(model.linears))


class _Residual(nn.Module):
    """Normalized by groups: DistributedDataParallel keeps batch statistics per rank, so with batch norm the two would
    not train the same function (and torch's SyncBatchNorm has no CPU kernel)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, out)
        same = stride == 1 and out == channels
        self.skip = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.skip(x))


class ConvNet(nn.Module):
    """Residual blocks; cross entropy."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        widths = (channels, 2 * channels, 4 * channels)
        self.blocks = nn.Sequential(
            *(_Residual(a, b, 1 if a == b else 2) for a, b in zip((channels, *widths), widths, strict=False))
        )
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), y)


def make_convnet(batch: int, channels: int = 32, size: int = 32, classes: int = 10) -> Case:
    """A small residual network."""
    torch.manual_seed(0)
    model = ConvNet(channels, classes).train()
    x, y = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return Case(model, x, y, shards=lambda model: list(model.blocks))
