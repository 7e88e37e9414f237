"""The architectures by name, and what a model is trained on.

A module of architectures registers builders on import; ``build(name)`` seeds and calls one. Sizes are tiny, weights
random, dropout is off: a plan draws its random numbers in another order than eager PyTorch does.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "BATCH", "FAMILIES", "TOKENS", "VOCABULARY", "Architecture", "Case", "architectures", "build", "images", "register",
    "registered", "smooth", "tokens",
]  # fmt: skip

BATCH, TOKENS, VOCABULARY = 8, 32, 512

#: families of architectures, in the order of the table
FAMILIES = ("transformers", "timm", "diffusers", "torchvision", "torchtitan", "projects", "handwritten")
MODULES = (
    "decoders", "encoders", "vision", "modalities", "libraries", "torchtitan_models", "projects", "recurrent",
    "scientific",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and one global batch, in the words of ``mw.parallelize``."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    loss_fn: Callable[..., Tensor] | None = None
    batch_dims: Mapping[str, int | None] | None = None
    #: samples per step, where no input has a batch dim
    global_batch: int | None = None

    def loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> Tensor:
        """The loss of the user's model, eagerly."""
        output = self.model(*args, **kwargs)
        if self.loss_fn is not None:
            return self.loss_fn(output, *targets)
        return output if isinstance(output, Tensor) else output.loss


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str
    family: str
    #: what sort of model it is, such as "decoder"
    kind: str
    build: Callable[[], Case]


_ARCHITECTURES: dict[str, Architecture] = {}


def register(name: str, kind: str, family: str = "transformers") -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a builder under a name of its own."""

    def bind(builder: Callable[[], Case]) -> Callable[[], Case]:
        assert name not in _ARCHITECTURES, f"two architectures are called {name}"
        assert family in FAMILIES, family
        _ARCHITECTURES[name] = Architecture(name, family, kind, builder)
        return builder

    return bind


def architectures() -> dict[str, Architecture]:
    """All of them, family by family."""
    for module in MODULES:
        importlib.import_module(f"architectures.{module}")
    return dict(sorted(_ARCHITECTURES.items(), key=lambda item: FAMILIES.index(item[1].family)))


def registered(name: str) -> Architecture:
    """The architecture of this name, of a module that has been imported."""
    return _ARCHITECTURES[name]


def build(architecture: Architecture) -> Case:
    """The model in training mode, from a fixed seed."""
    torch.manual_seed(0)
    random.seed(0)
    case = architecture.build()
    case.model.train()
    return case


# ---- inputs and losses that builders share


def tokens(length: int = TOKENS, low: int = 3) -> Tensor:
    """Token numbers, none of them special."""
    return torch.randint(low, VOCABULARY, (BATCH, length))


def images(size: int = 32, channels: int = 3) -> Tensor:
    """Normal pixels."""
    return torch.randn(BATCH, channels, size, size)


def smooth(y: Tensor) -> Tensor:
    """A loss on any output that is sensitive to every element."""
    return y.float().square().mean() + torch.logsumexp(y.float(), -1).mean()
