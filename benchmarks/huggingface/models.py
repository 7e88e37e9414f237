"""Models that people train at scale, at their published sizes, from Hugging Face configurations on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["MODELS", "BuiltModel", "FrontierModel", "Shape", "find"]

BATCH = 1024
TOKENS = 4096


@dataclass(frozen=True)
class Shape:
    """The example tensors of one model: for each input its shape behind the batch dim, and its dtype."""

    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def tensors(self, batch: int) -> dict[str, torch.Tensor]:
        """Inputs without data."""
        return {
            name: torch.empty((batch, *shape), dtype=dtype, device="meta")
            for name, (shape, dtype) in self.inputs.items()
        }


def tokens(*names: str, length: int = TOKENS) -> Shape:
    """Token numbers under each of these names."""
    return Shape(dict.fromkeys(names, ((length,), torch.int64)))


@dataclass(frozen=True)
class BuiltModel:
    """A model without weights and its inputs."""

    model: nn.Module
    kwargs: dict[str, torch.Tensor]

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class FrontierModel:
    """One model of the table.

    architecture, configuration: classes of ``transformers``; settings: what differs from the configuration's defaults,
    or defines the size; depth: the settings that count layers. devices: H100s, in hosts of eight.
    """

    name: str
    architecture: str
    configuration: str
    settings: Mapping[str, Any]
    devices: int
    shape: Shape
    depth: tuple[str, ...] = ("num_hidden_layers",)
    batch: int = BATCH

    def build(self, layers: int | None = None) -> BuiltModel:
        """The model on the meta device, with so many layers if given."""
        settings = dict(self.settings)
        if layers is not None:
            settings |= dict.fromkeys(self.depth, layers)
        config = getattr(transformers, self.configuration)(**settings)
        config.use_cache = False
        architecture = getattr(transformers, self.architecture)
        with torch.device("meta"), transformers.initialization.no_init_weights():
            model = architecture(config)
        model.tie_weights()
        return BuiltModel(model.train(), self.shape.tensors(self.batch))


_LANGUAGE = tokens("input_ids", "labels")
_IMAGE = Shape({"pixel_values": ((3, 224, 224), torch.float32), "labels": ((), torch.int64)})
_SPEECH = Shape({"input_features": ((128, 3000), torch.float32), "labels": ((448,), torch.int64)})

MODELS = (
    FrontierModel(
        "deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
            "n_routed_experts": 256, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "max_position_embeddings": 4096,
        },
        2048, _LANGUAGE,
    ),
    FrontierModel(
        "llama-4-maverick", "Llama4ForCausalLM", "Llama4TextConfig",
        {
            "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "use_qk_norm": False,
            "attention_chunk_size": 8192, "max_position_embeddings": 8192,
        },
        512, _LANGUAGE,
    ),
    FrontierModel(
        "gpt-oss-120b", "GptOssForCausalLM", "GptOssConfig",
        {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
            "num_experts_per_tok": 4, "sliding_window": 128,
        },
        128, _LANGUAGE,
    ),
    FrontierModel(
        "qwen3-235b-a22b", "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True,
        },
        256, _LANGUAGE,
    ),
    FrontierModel(
        "qwen3-next-80b-a3b", "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts": 512, "num_experts_per_tok": 10,
        },
        128, _LANGUAGE,
    ),
    FrontierModel(
        "mixtral-8x22b", "MixtralForCausalLM", "MixtralConfig",
        {
            "vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
            "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "max_position_embeddings": 65536, "sliding_window": None,
        },
        128, _LANGUAGE,
    ),
    FrontierModel(
        "llama-3-70b", "LlamaForCausalLM", "LlamaConfig",
        {
            "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        },
        256, _LANGUAGE,
    ),
    FrontierModel(
        "gemma-3-27b", "Gemma3ForCausalLM", "Gemma3TextConfig",
        {
            "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
        },
        64, _LANGUAGE,
    ),
    FrontierModel(
        "mamba-2-2.7b", "Mamba2ForCausalLM", "Mamba2Config",
        {
            "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
            "state_size": 128, "n_groups": 1, "expand": 2, "chunk_size": 256, "tie_word_embeddings": True,
        },
        16, _LANGUAGE,
    ),
    FrontierModel(
        "jamba-1.5-mini", "JambaForCausalLM", "JambaConfig",
        {
            "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
            "use_mamba_kernels": False,
        },
        64, _LANGUAGE,
    ),
    FrontierModel(
        "rwkv-4-3b", "RwkvForCausalLM", "RwkvConfig",
        {
            "vocab_size": 50277, "hidden_size": 2560, "num_hidden_layers": 32, "context_length": TOKENS,
        },
        16, _LANGUAGE,
    ),
    FrontierModel(
        "whisper-large", "WhisperForConditionalGeneration", "WhisperConfig",
        {
            "vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
            "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120, "max_source_positions": 1500, "max_target_positions": 448,
        },
        8, _SPEECH, ("encoder_layers", "decoder_layers"),
    ),
    FrontierModel(
        "t5-11b", "T5ForConditionalGeneration", "T5Config",
        {
            "vocab_size": 32128, "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24,
            "num_decoder_layers": 24, "num_heads": 128, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
        64, tokens("input_ids", "labels", length=TOKENS // 2), ("num_layers", "num_decoder_layers"),
    ),
    FrontierModel(
        "vit-22b", "ViTForImageClassification", "ViTConfig",
        {
            "hidden_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 48, "intermediate_size": 24576,
            "image_size": 224, "patch_size": 14, "qkv_bias": False, "hidden_dropout_prob": 0.0, "num_labels": 1000,
        },
        64, _IMAGE,
    ),
)  # fmt: skip


def find(name: str) -> FrontierModel:
    """The model of that name; ValueError for another."""
    by_name: dict[str, FrontierModel] = {model.name: model for model in MODELS}
    if name not in by_name:
        raise ValueError(f"a model is one of {', '.join(by_name)}, but got {name!r}")
    return by_name[name]
