"""Tiny real models for tests: CPU, fp32, seeded; each function returns ``(model, args, kwargs)`` at the batch size
asked for.

The model is in training mode, the loss is its output (or ``.loss``); language-model labels contain ignored ones
(-100). ``ZOO`` lists all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from meshwright.models.architectures import GPT, TransformerMoE
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

VOCAB, HIDDEN, SEQUENCE, CLASSES = 128, 64, 16, 8


def tokens_and_labels(batch: int, sequence: int = SEQUENCE, seed: int = 1) -> tuple[Tensor, Tensor]:
    """int64 [batch, sequence] each; some labels are -100, unevenly over the rows, none of them all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (batch, sequence), generator=generator)
    labels = torch.randint(0, VOCAB, (batch, sequence), generator=generator)
    hidden = torch.rand(batch, sequence, generator=generator) < torch.linspace(0.1, 0.5, batch)[:, None]
    hidden[:, 1:3] = False
    return tokens, labels.masked_fill(hidden, -100)


def _images(batch: int, size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, size, size, generator=generator), torch.randint(
        0, CLASSES, (batch,), generator=generator
    )


class MLP(nn.Module):
    """Two hidden layers; mean squared error."""

    def __init__(self, features: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.dropout(self.down(F.gelu(self.up(x)))), y)


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 or out != channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.skip(x))


class ConvNet(nn.Module):
    """A small residual network with batch norm and max pooling; cross entropy."""

    def __init__(self, channels: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1)
        self.bn = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(_Residual(channels, channels, 1), _Residual(channels, 2 * channels, 2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * channels, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.bn(self.stem(x)))))
        return F.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), labels)


def _build(make: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    place: AbstractContextManager[Any] = torch.device(device)
    with place:
        return make().train()


def mlp(batch: int = 8, dropout: float = 0.0, device: str = "cpu") -> Case:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, batch, 32, generator=generator)
    return _build(lambda: MLP(dropout=dropout), device), (x, y), {}


def gpt(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2, tied: bool = True) -> Case:
    make = lambda: GPT(VOCAB, layers, HIDDEN, 4, SEQUENCE, dropout=dropout, tied=tied)  # noqa: E731
    return _build(make, device), tokens_and_labels(batch), {}


def moe(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2) -> Case:
    make = lambda: TransformerMoE(VOCAB, layers, HIDDEN, 4, 4, SEQUENCE, feed_forward=128, dropout=dropout)  # noqa: E731
    return _build(make, device), tokens_and_labels(batch), {}


def convnet(batch: int = 8, dropout: float = 0.0, device: str = "cpu") -> Case:
    return _build(lambda: ConvNet(dropout=dropout), device), _images(batch, 16), {}


def gpt2(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=HIDDEN,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return _lm(lambda: GPT2LMHeadModel(config), batch, device)


def llama(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2, kv_heads: int = 2) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_llama_like(layers, kv_heads), attention_dropout=dropout)
    return _lm(lambda: LlamaForCausalLM(config), batch, device)


def mixtral(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2, kv_heads: int = 2) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_llama_like(layers, kv_heads), num_local_experts=4, attention_dropout=dropout)
    return _lm(lambda: MixtralForCausalLM(config), batch, device)


def bert(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=4,
        vocab_size=VOCAB,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _lm(lambda: BertForMaskedLM(config), batch, device)


def t5(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers,
        d_model=HIDDEN,
        d_ff=128,
        num_heads=4,
        d_kv=16,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        dropout_rate=dropout,
    )
    return _lm(lambda: T5ForConditionalGeneration(config), batch, device)


def vit(batch: int = 8, dropout: float = 0.0, device: str = "cpu", layers: int = 2) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    images, labels = _images(batch, 32)
    return _build(lambda: ViTForImageClassification(config), device), (), {"pixel_values": images, "labels": labels}


def _llama_like(layers: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCAB,
    }


def _lm(make: Callable[[], nn.Module], batch: int, device: str) -> Case:
    tokens, labels = tokens_and_labels(batch)
    return _build(make, device), (), {"input_ids": tokens, "labels": labels}


def _named(make: Callable[..., Case]) -> Callable[..., Case]:
    """The model says what it is but for its batch, as ``model.zoo``."""

    @wraps(make)
    def named(*args: Any, **options: Any) -> Case:
        model, *rest = make(*args, **options)
        kept = {name: value for name, value in options.items() if name not in ("batch", "device")}
        model.zoo = (make.__name__, args[1:], tuple(sorted(kept.items())))
        return model, *rest

    return named


ZOO: dict[str, Callable[..., Case]] = {
    f.__name__: _named(f) for f in (mlp, gpt, moe, convnet, gpt2, llama, bert, vit, t5, mixtral)
}
