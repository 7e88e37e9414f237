"""Small models of unusual kinds, like ``zoo``: their code assigns to slices, computes in complex numbers, loops over
time, or brings experts of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.recurrent import HIDDEN as CHANNELS
from tests.support.recurrent import Gated, Recurrent
from tests.support.zoo import HIDDEN, SEQUENCE, VOCAB, Case, tokens_and_labels


class Assigning(nn.Module):
    """A part of a tensor is assigned to a slice, in another type and with fewer dims; part of the rest to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        h[:, 1:] = self.first(x)[:, :-1].double()
        h[:, 0] = self.second(x).mean((0, 1))
        h[..., 3] = 2.0
        return (self.last(torch.tanh(h)) - y).square().mean()


class Rotary(nn.Module):
    """Queries rotated as complex numbers, as in Meta's Llama, before a product with keys; then a spectral layer."""

    def __init__(self, heads: int = 4, width: int = 8) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.query, self.key = nn.Linear(16, heads * width), nn.Linear(16, heads * width)
        self.angle, self.last = nn.Linear(16, width // 2), nn.Linear(heads * width, 16)
        self.filter = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(self.angle(x)), self.angle(x)).unsqueeze(2)
        query, key = (f(x).unflatten(-1, (self.heads, self.width)) for f in (self.query, self.key))
        query, key = (torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn for t in (query, key))
        h = torch.view_as_real(query * key.conj()).flatten(2)
        spectrum = torch.fft.rfft(h, dim=1) * self.filter[:, None]
        return (self.last(torch.fft.irfft(spectrum, n=h.shape[1], dim=1)) - y).square().mean()


class Spectral(nn.Module):
    """Fourier layers that assign what they keep to slices of zeros, as neural operators do; weights have their real and
    imaginary parts in the first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.randn(2, 2, 16, 16) / 4) for _ in range(2))
        self.one = nn.Parameter(torch.randn(16) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.fft.rfft(x.transpose(1, 2))
        kept = torch.zeros_like(found)
        for weight, part in ((self.low, slice(0, 2)), (self.high, slice(-2, None))):
            weight = torch.view_as_complex(weight.permute(2, 3, 1, 0).contiguous())
            kept[:, :, part] = torch.einsum("bim,iom->bom", found[:, :, part], weight)
        kept[..., 2] = found[..., 2] * self.one
        return (torch.fft.irfft(kept, n=x.shape[1]).transpose(1, 2) - y).square().mean()


class TwoNames(nn.Module):
    """A layer that runs twice and is held by two names, as in MONAI's DynUNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(16), nn.Linear(16, 16)
        self.second = self.first
        self.out = nn.Sequential(self.norm, nn.Linear(16, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.second(torch.tanh(self.first(self.norm(x))))) - y).square().mean()


class SharedNorm(nn.Module):
    """A norm that runs twice, with most of the model between: no pipeline may divide that part."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))
        self.first, self.second, self.third, self.last = blocks
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.second(self.norm(self.first(x)))
        hidden = self.last(self.norm(self.third(hidden)))
        return (hidden - y).square().mean()


class Averaging(nn.Module):
    """Buffers that the forward assigns to: a running mean, which the loss depends on, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.steps = self.steps + 1
        return (self.second(hidden - self.mean / self.steps) - y).square().mean()


class Sparse(nn.Module):
    """Tables whose gradients are sparse, and a sparse buffer that training does not read, as in OpenAI's Whisper."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bags = nn.Embedding(32, 8, sparse=True), nn.EmbeddingBag(32, 8, sparse=True, mode="sum")
        self.out = nn.Linear(8, 32)
        self.register_buffer("heads", torch.ones(2, 2, dtype=torch.bool).to_sparse(), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.table(x) + self.bags(x).unsqueeze(1)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), y.flatten())


def _series(model: nn.Module, batch: int, steps: int, channels: int) -> Case:
    generator = torch.Generator().manual_seed(1)
    return model, tuple(torch.randn(batch, steps, channels, generator=generator) for _ in range(2)), {}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def assigning(batch: int = 8) -> Case:
    return _series(_seeded(Assigning), batch, 8, 16)


def rotary(batch: int = 8) -> Case:
    return _series(_seeded(Rotary), batch, 8, 16)


def recurrent(batch: int = 8) -> Case:
    return _series(_seeded(Recurrent), batch, 40, CHANNELS)


def gated(batch: int = 8) -> Case:
    return _series(_seeded(lambda: Gated(layers=2)), batch, 40, CHANNELS)


def _language(architecture: str, configuration: str, batch: int, sequence: int = SEQUENCE, **settings: Any) -> Case:
    import transformers

    config = getattr(transformers, configuration)(vocab_size=VOCAB, hidden_size=HIDDEN, **settings)
    tokens, labels = tokens_and_labels(batch, sequence)
    model = _seeded(lambda: getattr(transformers, architecture)(config))
    return model, (), {"input_ids": tokens, "labels": labels}


def gpt_oss(batch: int = 8) -> Case:
    return _language(
        "GptOssForCausalLM", "GptOssConfig", batch, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def rwkv(batch: int = 8) -> Case:
    return _language(
        "RwkvForCausalLM", "RwkvConfig", batch, 40, num_hidden_layers=2, context_length=40, use_cache=False
    )


def deepseek(batch: int = 8) -> Case:
    return _language(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", batch, num_hidden_layers=2, intermediate_size=64,
        moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip


def qwen3_next(batch: int = 8) -> Case:
    return _language(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", batch, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=4, linear_num_value_heads=8, moe_intermediate_size=32, num_experts=4,
        shared_expert_intermediate_size=32, num_experts_per_tok=2, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def llama4(batch: int = 8) -> Case:
    return _language(
        "Llama4ForCausalLM", "Llama4TextConfig", batch, num_hidden_layers=2, intermediate_size=64,
        intermediate_size_mlp=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_local_experts=4,
        interleave_moe_layer_step=2, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def spectral(batch: int = 8) -> Case:
    return _series(_seeded(Spectral), batch, 12, 16)


def two_names(batch: int = 8) -> Case:
    return _series(_seeded(TwoNames), batch, 8, 16)


def shared_norm(batch: int = 8) -> Case:
    return _series(_seeded(SharedNorm), batch, 8, 16)


def averaging(batch: int = 8) -> Case:
    return _series(_seeded(Averaging), batch, 8, 16)


def sparse(batch: int = 8) -> Case:
    generator = torch.Generator().manual_seed(1)
    return _seeded(Sparse), tuple(torch.randint(0, 32, (batch, 8), generator=generator) for _ in range(2)), {}


def jamba(batch: int = 8) -> Case:
    return _language(
        "JambaForCausalLM", "JambaConfig", batch, 40, num_hidden_layers=2, intermediate_size=64, num_experts=4,
        num_attention_heads=4, num_key_value_heads=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4,
        mamba_dt_rank=4,
    )  # fmt: skip


_MAKERS = (
    assigning, rotary, recurrent, gated, spectral, two_names, shared_norm, averaging, sparse, gpt_oss, rwkv,
    deepseek, qwen3_next, llama4, jamba,
)  # fmt: skip
SPECIAL: dict[str, Callable[..., Case]] = {maker.__name__: maker for maker in _MAKERS}
