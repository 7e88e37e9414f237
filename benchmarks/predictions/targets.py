"""The models of the accuracy benchmark, on the meta device, with their inputs and first weights.

No whole model is alive while it trains: weights are filled one at a time by ``fill``, so that memory is what the plan
says and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from baselines.models import MLP, ConvNet
from baselines.sleeping import Sleeper
from meshwright.models.architectures import GPT, Llama, TransformerMoE
from torch import Tensor, nn

__all__ = ["OPTIMIZERS", "TARGETS", "Target", "fill"]

Inputs = Callable[[int, torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Target:
    """``make`` gives the model, ``inputs(batch, generator)`` one global batch; ``about`` names the size."""

    about: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    optimizer: str = "AdamW"

    def on_meta(self) -> nn.Module:
        """The model without weights, in training mode."""
        with torch.device("meta"):
            return self.make().train()

    def batch(self, size: int) -> tuple[Tensor, ...]:
        """The same global batch on every rank."""
        return self.inputs(size, torch.Generator().manual_seed(1))


def _tokens(sequence: int, vocab: int) -> Inputs:
    def make(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        tokens, targets = torch.randint(0, vocab, (2, batch, sequence), generator=generator)
        return tokens, targets

    return make


def _vectors(features: int) -> Inputs:
    def make(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        x, y = torch.randn(2, batch, features, generator=generator)
        return x, y

    return make


def _images(size: int, classes: int) -> Inputs:
    def make(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        labels = torch.randint(0, classes, (batch,), generator=generator)
        return torch.randn(batch, 3, size, size, generator=generator), labels

    return make


TARGETS: dict[str, Target] = {
    "gpt": Target(
        "GPT: 4 layers, hidden 256, sequence 128, vocabulary 2048",
        lambda: GPT(2048, 4, 256, 4, 128, tied=False),
        _tokens(128, 2048),
    ),
    "gpt-wide": Target(
        "GPT, tied: 2 layers, hidden 512, sequence 64, vocabulary 1024",
        lambda: GPT(1024, 2, 512, 8, 64),
        _tokens(64, 1024),
    ),
    "llama": Target(
        "Llama: 4 layers, hidden 256, feed-forward 688, 4 heads (2 key-value), sequence 128, vocabulary 1024",
        lambda: Llama(1024, 4, 256, 688, 4, 2),
        _tokens(128, 1024),
    ),
    "mlp": Target("MLP: 512, 4 × 1024, 512", lambda: MLP(512, 1024, 4), _vectors(512)),
    "convnet": Target(
        "residual convnet: 32 to 128 channels, 32×32 images", lambda: ConvNet(32, 10), _images(32, 10), "SGD+momentum"
    ),
    "moe": Target(
        "mixture of experts: 4 layers, hidden 192, 4 experts, top-2, sequence 64, vocabulary 1024",
        lambda: TransformerMoE(1024, 4, 192, 4, 4, 64, feed_forward=768),
        _tokens(64, 1024),
    ),
    "sleep-8": Target("sleeping blocks: 8 of hidden 128", lambda: Sleeper(128, 8), _vectors(128)),
    "sleep-16": Target("sleeping blocks: 16 of hidden 128", lambda: Sleeper(128, 16), _vectors(128)),
    "sleep-wide": Target("sleeping blocks: 4 of hidden 192", lambda: Sleeper(192, 4), _vectors(192)),
}

#: small steps, and an ``eps`` above the rounding of gradients; everything else is torch's default
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=2e-5, eps=1e-6),
    "SGD+momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}


def fill(name: str, whole: Tensor) -> None:
    """First weights: normal by the number of inputs, vectors 1 for gains and 0 for biases."""
    if whole.dim() > 1:
        nn.init.normal_(whole, std=whole[0].numel() ** -0.5)
    else:
        whole.fill_(0.0 if name.endswith("bias") else 1.0)
