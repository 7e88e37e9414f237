"""Built-in targets by name (``gpt-39b``, ``llama3-8b``, ``moe-10b``, ``wrn-4b``, …): compact plain-PyTorch models on the meta device.

The shapes are published ones, so that plans can be held against published plans: GPT, GShard mixtures and Wide-ResNets as in Alpa
(OSDI'22, table 4), Llama 3 as in arXiv:2407.21783. ``build(name)`` gives a ``Target``; ``names()`` lists all with a line each.
``GPT`` is also the model that the demo trains.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiler.experts import experts

__all__ = ["GPT", "Llama", "Target", "TransformerMoE", "UNet", "ViTMoE", "WideResNet", "build", "names"]


@dataclass(frozen=True)
class Target:
    """A model and what to plan it with.

    args, kwargs: example inputs with ``global_batch`` rows. flops_per_step: the model's FLOPs of one training step at ``global_batch``
    (forward and backward, no recomputation); None where no formula is given.
    """

    name: str
    description: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    global_batch: int
    dtype: torch.dtype
    flops_per_step: float | None = None


# ---- transformers


class Attention(nn.Module):
    """Causal (or full) self-attention; ``kv_heads`` < ``heads`` shares keys and values among groups of heads. [B, S, H] → [B, S, H]."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads or heads, hidden // heads
        self.dropout, self.causal = dropout, causal
        self.query = nn.Linear(hidden, self.heads * self.width, bias)
        self.key = nn.Linear(hidden, self.kv_heads * self.width, bias)
        self.value = nn.Linear(hidden, self.kv_heads * self.width, bias)
        self.out = nn.Linear(self.heads * self.width, hidden, bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x: [B, S, H]; rotary: cosines and sines [S, width] to turn queries and keys by."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        if rotary is not None:
            query, key = _rotate(query, *rotary), _rotate(key, *rotary)
        y = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, self.heads * self.width))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class FeedForward(nn.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden]."""
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A router and ``num_experts`` feed-forwards; each token goes through the best ``top_k``, weighted by the router. No token is dropped."""

    def __init__(self, hidden: int, inner: int, num_experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, inner, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, inner) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, hidden]."""
        tokens = x.reshape(-1, x.shape[-1])
        probability = F.softmax(self.router(tokens).float(), dim=-1)
        weight, index = probability.topk(self.top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        return experts(tokens, index, weight, self.up, self.down, "gelu", False).view_as(x)


class Block(nn.Module):
    """Attention, then a feed-forward, each on a normalized input and added to the stream."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.feed_forward = attention, feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, hidden]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    """A decoder with learned positions: ``forward(tokens, targets)`` gives the mean loss, ``forward(tokens)`` the logits [B, S, vocab].

    tokens, targets: int64 [B, S], S at most ``sequence``; targets of -100 do not count.
    """

    def __init__(
        self,
        vocab: int,
        layers: int,
        hidden: int,
        heads: int,
        sequence: int,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"heads divide hidden, but got {heads} heads and hidden {hidden}; change one of them")
        self.token_embedding = nn.Embedding(vocab, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(self._block(i, hidden, heads, dropout) for i in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # keep the variance of the residual stream
                nn.init.normal_(parameter, std=0.02 * (2 * layers) ** -0.5)
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def _block(self, index: int, hidden: int, heads: int, dropout: float) -> Block:
        return Block(Attention(hidden, heads, dropout=dropout), FeedForward(hidden, 4 * hidden), hidden, dropout)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss (0-d) if there are targets, else the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class TransformerMoE(GPT):
    """GPT with a mixture of experts as every second feed-forward (GShard, arXiv:2006.16668, but dropless)."""

    def __init__(
        self,
        vocab: int,
        layers: int,
        hidden: int,
        heads: int,
        num_experts: int,
        sequence: int,
        feed_forward: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        self.inner, self.num_experts = feed_forward or 8 * hidden, num_experts
        super().__init__(vocab, layers, hidden, heads, sequence, dropout, tied=True)

    def _block(self, index: int, hidden: int, heads: int, dropout: float) -> Block:
        dense = index % 2 == 0
        inner = FeedForward(hidden, self.inner) if dense else Experts(hidden, self.inner, self.num_experts)
        return Block(Attention(hidden, heads, dropout=dropout), inner, hidden, dropout)


class RMSNorm(nn.Module):
    """Root-mean-square normalization in fp32 with a gain."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden]."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions and a SwiGLU feed-forward."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """x: [B, S, hidden]."""
        x = x + self.attention(self.norm1(x), rotary)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama 3 decoder: ``forward(tokens, targets)`` gives the mean loss, ``forward(tokens)`` the logits. int64 [B, S]."""

    def __init__(
        self, vocab: int, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, theta: float = 5e5
    ) -> None:
        super().__init__()
        self.width, self.theta = hidden // heads, theta
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, inner, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss (0-d) if there are targets, else the logits [B, S, vocab]."""
        x = self.embedding(tokens)
        exponents = torch.arange(0, self.width, 2, device=tokens.device).float() / self.width
        positions = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = positions.unsqueeze(1) * torch.exp(exponents * -torch.log(torch.full_like(exponents, self.theta)))
        angles = torch.cat((angles, angles), dim=-1)
        rotary = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
