"""Built-in targets by name (``gpt-39b``, ``llama3-8b``, ``moe-10b``, ``wrn-4b``, …): compact plain-PyTorch models on
the meta device.

The shapes are published ones, so that plans can be held against published plans: GPT, GShard mixtures and
Wide-ResNets as in Alpa (OSDI'22, table 4), Llama 3 as in arXiv:2407.21783. ``build(name)`` gives a ``Target``;
``names()`` lists all with a line each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .architectures import GPT, Llama, TransformerMoE, UNet, ViTMoE, WideResNet

__all__ = ["GPT", "Llama", "Target", "TransformerMoE", "UNet", "ViTMoE", "WideResNet", "build", "gpt_flops", "names"]


@dataclass(frozen=True)
class Target:
    """A model and what to plan it with.

    args, kwargs: example inputs with ``global_batch`` rows. flops_per_step: the model's FLOPs of one training step at
    ``global_batch`` (forward and backward, no recomputation); None where no formula is given.
    """

    name: str
    description: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    global_batch: int
    dtype: torch.dtype
    flops_per_step: float | None = None

    @property
    def optimizer(self) -> str:
        """The optimizer by which a training of this model is planned: one with fp32 masters where it has 16 bits."""
        return "AdamW+masters" if self.dtype.itemsize == 2 else "AdamW"


# ---- targets by name


@dataclass(frozen=True)
class _Recipe:
    description: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    global_batch: int
    dtype: torch.dtype
    flops_per_sample: float | None = None
    needs: str = ""


def _token_inputs(sequence: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.zeros(batch, sequence, dtype=torch.int64), torch.zeros(batch, sequence, dtype=torch.int64)), {}

    return make


def _image_inputs(size: int, pixels: bool = False) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        labels = torch.zeros((batch, size, size) if pixels else (batch,), dtype=torch.int64)
        return (torch.zeros(batch, 3, size, size), labels), {}

    return make


def gpt_flops(batch: int, sequence: int, layers: int, hidden: int, vocab: int) -> float:
    """Model FLOPs of one training step of a GPT: 72·B·S·L·H²·(1 + S/(6H)) + 6·B·S·H·V (MODELS.md; no recomputation)."""
    return (
        72.0 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden))
        + 6.0 * batch * sequence * hidden * vocab
    )


def _t5_3b() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration  # an optional dependency

    shape: dict[str, Any] = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
    shape |= {"vocab_size": 32128, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**shape))


def _t5_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens = torch.zeros(batch, 1024, dtype=torch.int64)
    return (), {"input_ids": tokens, "labels": torch.zeros_like(tokens)}


_GPT = {
    "350m": (24, 1024, 16), "760m": (24, 1536, 16), "1.3b": (24, 2048, 32), "2.6b": (32, 2560, 32),
    "6.7b": (32, 4096, 32), "15b": (48, 5120, 40), "39b": (48, 8192, 64), "175b": (96, 12288, 96),
}  # fmt: skip
_MOE = {
    "380m": (8, 768, 8), "690m": (8, 768, 16), "1.3b": (16, 768, 16), "2.4b": (16, 1024, 16),
    "10b": (16, 1536, 32), "27b": (16, 2048, 48), "70b": (32, 2048, 64),
}  # fmt: skip
_WRN = {
    "250m": (50, 160, 2), "500m": (50, 224, 2), "1b": (50, 320, 2), "2b": (50, 448, 2),
    "4b": (50, 640, 2), "6.8b": (50, 320, 16), "13b": (101, 320, 16),
}  # fmt: skip
_LLAMA = {
    "8b": (32, 4096, 14336, 32, 8), "70b": (80, 8192, 28672, 64, 8), "405b": (126, 16384, 53248, 128, 8),
}  # fmt: skip


def _recipes() -> dict[str, _Recipe]:
    half, full = torch.float16, torch.float32
    found: dict[str, _Recipe] = {}
    found["gpt-demo"] = _Recipe(
        "GPT on bytes: 4 layers, hidden 128, 4 heads, sequence 128",
        partial(GPT, 256, 4, 128, 4, 128),
        _token_inputs(128),
        32,
        full,
        gpt_flops(1, 128, 4, 128, 256),
    )
    for size, (layers, hidden, heads) in _GPT.items():
        sequence = 2048 if size == "175b" else 1024
        found[f"gpt-{size}"] = _Recipe(
            f"GPT: {layers} layers, hidden {hidden}, {heads} heads, sequence {sequence}, vocabulary 51,200",
            partial(GPT, 51200, layers, hidden, heads, sequence),
            _token_inputs(sequence),
            1024,
            half,
            gpt_flops(1, sequence, layers, hidden, 51200),
        )
    for size, (layers, hidden, inner, heads, kv_heads) in _LLAMA.items():
        found[f"llama3-{size}"] = _Recipe(
            f"Llama 3: {layers} layers, hidden {hidden}, feed-forward {inner}, {heads} heads ({kv_heads} key-value), "
            "sequence 8192",
            partial(Llama, 128256, layers, hidden, inner, heads, kv_heads),
            _token_inputs(8192),
            1024,
            torch.bfloat16,
        )
    for size, (layers, hidden, num_experts) in _MOE.items():
        found[f"moe-{size}"] = _Recipe(
            f"GShard mixture of experts: {layers} layers, hidden {hidden}, {num_experts} experts every second, top-2",
            partial(TransformerMoE, 32000, layers, hidden, 16, num_experts, 1024),
            _token_inputs(1024),
            1024,
            half,
        )
    for size, (depth, channels, factor) in _WRN.items():
        found[f"wrn-{size}"] = _Recipe(
            f"Wide-ResNet: depth {depth}, {channels} channels, width factor {factor}, 224×224 images",
            partial(WideResNet, depth, channels, factor),
            _image_inputs(224),
            1536,
            full,
        )
    found["resnet-152"] = _Recipe(
        "ResNet-152, 224×224 images", partial(WideResNet, 152, 64, 1), _image_inputs(224), 1024, full
    )
    found["unet"] = _Recipe("U-Net: 3 down, 3 up, skips, 256×256 images", UNet, _image_inputs(256, True), 256, full)
    found["vit-moe"] = _Recipe(
        "ViT-L/16 with 32 experts in every second layer, top-2", ViTMoE, _image_inputs(224), 1024, half
    )
    found["t5-3b"] = _Recipe(
        "T5 3B, encoder and decoder (needs transformers)", _t5_3b, _t5_inputs, 1024, full, needs="transformers"
    )
    return found


def names() -> dict[str, str]:
    """Every built-in target with a line of description, by name."""
    return {name: recipe.description for name, recipe in _recipes().items()}


@contextmanager
def _idle_initializers(device: str) -> Iterator[None]:
    """On the meta device ``torch.nn.init`` does nothing: there is nothing to fill, and its kernels there are Python."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    before = {name: getattr(nn.init, name) for name in names}
    try:
        if torch.device(device).type == "meta":
            for name in names:
                setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)


def build(name: str, device: str = "meta") -> Target:
    """The built-in target of that name on ``device`` (meta: no weights); ValueError for another name."""
    recipes = _recipes()
    if name not in recipes:
        close = difflib.get_close_matches(name.lower(), recipes, 3) or list(recipes)[:3]
        raise ValueError(
            f"a target is package.module:callable or a built-in model, but got {name!r}; "
            f"did you mean {', '.join(close)}?"
        )
    recipe = recipes[name]
    try:
        with torch.device(device), _idle_initializers(device):
            model = recipe.make().to(recipe.dtype).train()
            args, kwargs = recipe.inputs(recipe.global_batch)
    except ImportError as error:
        raise ValueError(f"{name} needs {recipe.needs}, but got {error}; install meshwright[huggingface]") from None
    args = tuple(x.to(recipe.dtype) if x.is_floating_point() else x for x in args)
    flops = None if recipe.flops_per_sample is None else recipe.flops_per_sample * recipe.global_batch
    return Target(name, recipe.description, model, args, kwargs, recipe.global_batch, recipe.dtype, flops)
