"""The models behind the built-in targets, in compact plain PyTorch: decoders, mixtures of experts, residual and
U-shaped networks.

Each ``forward(inputs, targets)`` gives the mean loss (0-d), and ``forward(inputs)`` the logits. ``GPT`` is also the
model that the demo trains.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compiler.ir.ops.experts import experts

__all__ = ["GPT", "Llama", "TransformerMoE", "UNet", "ViTMoE", "WideResNet"]

# ---- transformers


class Attention(nn.Module):
    """Causal (or full) self-attention; ``kv_heads`` < ``heads`` shares keys and values among groups of heads. [B, S,
    H] → [B, S, H]."""

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
    """A router and ``num_experts`` feed-forwards; each token goes through the best ``top_k``, weighted by the router.
    No token is dropped."""

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
    """A decoder with learned positions: ``forward(tokens, targets)`` gives the mean loss, ``forward(tokens)`` the
    logits [B, S, vocab].

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
    """A Llama 3 decoder: ``forward(tokens, targets)`` gives the mean loss, ``forward(tokens)`` the logits. int64 [B,
    S]."""

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


# ---- images


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions with batch norm around a skip; the 3×3 is ``width_factor`` times wider."""

    def __init__(self, channels: int, filters: int, stride: int, width_factor: int) -> None:
        super().__init__()
        wide, out = filters * width_factor, filters * 4
        self.conv1, self.bn1 = nn.Conv2d(channels, filters, 1, bias=False), nn.BatchNorm2d(filters)
        self.conv2, self.bn2 = nn.Conv2d(filters, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv3, self.bn3 = nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, C, height, width]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.skip(x))


class WideResNet(nn.Module):
    """A bottleneck ResNet of ``depth`` 50, 101 or 152; ``forward(images, labels)`` gives the mean loss, without
    labels the logits."""

    def __init__(self, depth: int, channels: int, width_factor: int, classes: int = 1024) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)
        blocks: list[nn.Module] = []
        width = channels
        for stage, count in enumerate({50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]):
            filters = channels * 2**stage
            for i in range(count):
                blocks.append(Bottleneck(width, filters, 2 if stage and not i else 1, width_factor))
                width = filters * 4
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """images: [N, 3, 224, 224]; labels: int64 [N]."""
        x = F.max_pool2d(F.relu(self.bn(self.stem(images))), 3, 2, 1)
        logits = self.head(self.blocks(x).mean((2, 3)))
        return logits if labels is None else F.cross_entropy(logits, labels)


class UNet(nn.Module):
    """Three steps down, three up, skips between equal resolutions; ``forward(images, labels)`` gives the mean loss
    per pixel."""

    def __init__(self, channels: int = 64, steps: int = 3, classes: int = 32) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(steps + 1)]
        self.enter = _double_conv(3, channels)
        self.down = nn.ModuleList(_double_conv(a, b) for a, b in pairwise(widths))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_double_conv(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """images: [N, 3, height, width]; labels: int64 [N, height, width]."""
        x = self.enter(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for widen, up in zip(reversed(self.widen), reversed(self.up), strict=True):
            x = up(torch.cat((skips.pop(), widen(x)), dim=1))
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def _double_conv(channels: int, out: int) -> nn.Module:
    def step(source: int) -> list[nn.Module]:
        return [nn.Conv2d(source, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(*step(channels), *step(out))


class ViTMoE(nn.Module):
    """A vision transformer with a mixture of experts as every second feed-forward; mean loss with labels, else
    logits."""

    def __init__(
        self,
        layers: int = 24,
        hidden: int = 1024,
        heads: int = 16,
        num_experts: int = 32,
        image: int = 224,
        patch: int = 16,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, (image // patch) ** 2, hidden))
        blocks = []
        for i in range(layers):
            inner = Experts(hidden, 4 * hidden, num_experts) if i % 2 else FeedForward(hidden, 4 * hidden)
            blocks.append(Block(Attention(hidden, heads, causal=False), inner, hidden))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 1024)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """images: [N, 3, 224, 224]; labels: int64 [N]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        logits = self.head(self.norm(self.blocks(x)).mean(1))
        return logits if labels is None else F.cross_entropy(logits, labels)
