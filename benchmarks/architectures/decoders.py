"""Language models of transformers that predict the next token."""

from __future__ import annotations

from typing import Any

import transformers

from architectures.registry import VOCABULARY, Case, register, tokens

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 64}
BASE = SIZES | WORDS | GROUPED
HEADS = BASE | {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
ONE_KIND = {"layer_types": ["full_attention", "full_attention"]}
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def decoder(prefix: str, settings: dict[str, Any], kind: str = "decoder", name: str = "", config: str = "") -> None:
    """Register the language model of ``prefix``Config with its own loss on labels."""

    def builder() -> Case:
        configuration = getattr(transformers, config or f"{prefix}Config")(**settings)
        head = "ForCausalLM" if hasattr(transformers, f"{prefix}ForCausalLM") else "LMHeadModel"
        model = getattr(transformers, f"{prefix}{head}")(configuration)
        return Case(model, kwargs={"input_ids": tokens(), "labels": tokens()})

    register(name or prefix, kind)(builder)


decoder("GPT2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})  # fmt: skip
decoder("GPTNeo", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 8,
                   "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "resid_dropout": 0.0,
                   "embed_dropout": 0.0, "attention_dropout": 0.0})  # fmt: skip
decoder("GPTNeoX", SIZES | WORDS | {"max_position_embeddings": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0})
decoder("GPTNeoXJapanese", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
                            "num_attention_heads": 4, "intermediate_multiple_size": 2, "max_position_embeddings": 64,
                            "attention_dropout": 0.0, "hidden_dropout": 0.0})  # fmt: skip
decoder("GPTJ", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})  # fmt: skip
decoder("GPTBigCode", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
                       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})  # fmt: skip
decoder("CodeGen", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8,
                    "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})  # fmt: skip
decoder("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0,
                  "attention_dropout": 0.0})  # fmt: skip
decoder("OPT", SIZES | {"vocab_size": VOCABULARY, "ffn_dim": 128, "max_position_embeddings": 64, "dropout": 0.0,
                        "word_embed_proj_dim": 64, "attention_dropout": 0.0})  # fmt: skip
decoder("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64,
                "vocab_size": VOCABULARY})  # fmt: skip
decoder("Falcon", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_kv_heads": 2, "new_decoder_architecture": True})  # fmt: skip
decoder("Falcon", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "alibi": True, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False,
                   "bias": True}, name="Falcon (alibi)")  # fmt: skip
decoder("XGLM", {"vocab_size": VOCABULARY, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4,
                 "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0})  # fmt: skip
decoder("BioGpt", SIZES | WORDS | {"max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
                                   "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0})  # fmt: skip
decoder("Llama", BASE)
decoder("Mistral", HEADS | {"sliding_window": 8})
decoder("Qwen2", BASE)
decoder("Qwen3", HEADS)
decoder("Gemma2", HEADS | TWO_KINDS)
decoder("Gemma3", HEADS | TWO_KINDS, config="Gemma3TextConfig")
decoder("Phi3", BASE | {"original_max_position_embeddings": 64})
decoder("StableLm", BASE)
decoder("Starcoder2", BASE | {"residual_dropout": 0.0, "embedding_dropout": 0.0})
decoder("Nemotron", HEADS)
decoder("Cohere2", HEADS | TWO_KINDS)
decoder("Olmo2", BASE)
decoder("Granite", BASE)
decoder("DiffLlama", BASE)
decoder("Olmo3", BASE | TWO_KINDS)
decoder("Glm4", HEADS)
decoder("Exaone4", HEADS | TWO_KINDS)
decoder("SmolLM3", BASE | {"no_rope_layers": [1, 0]})
decoder("SeedOss", HEADS)
decoder("Arcee", HEADS)
decoder("Apertus", BASE)
decoder("HunYuanDenseV1", HEADS)
decoder("NanoChat", BASE)
decoder("Helium", HEADS)

decoder("Mixtral", BASE | LOCAL_EXPERTS, "mixture of experts")
decoder("Qwen2Moe", BASE | EXPERTS | {"shared_expert_intermediate_size": 64}, "mixture of experts")
decoder("Qwen3Moe", HEADS | EXPERTS, "mixture of experts")
decoder("GraniteMoe", BASE | LOCAL_EXPERTS, "mixture of experts")
decoder("Olmoe", BASE | {"num_experts": 4, "num_experts_per_tok": 2}, "mixture of experts")
decoder("Jamba", BASE | {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
                         "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
                         "mamba_dt_rank": 8, "use_mamba_kernels": False}, "state space")  # fmt: skip
decoder("DeepseekV2", SIZES | WORDS | {
    "num_key_value_heads": 4, "max_position_embeddings": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
}, "mixture of experts")  # fmt: skip
decoder("DeepseekV3", SIZES | WORDS | {
    "num_key_value_heads": 4, "max_position_embeddings": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
}, "mixture of experts")  # fmt: skip
decoder("MiniMaxM2", HEADS | LOCAL_EXPERTS, "mixture of experts")
decoder("Phimoe", BASE | LOCAL_EXPERTS, "mixture of experts")
decoder("GptOss", HEADS | TWO_KINDS | LOCAL_EXPERTS, "mixture of experts")
decoder("Llama4", HEADS | {
    "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
}, "mixture of experts", config="Llama4TextConfig")  # fmt: skip
decoder("Qwen3Next", HEADS | EXPERTS | LINEAR | {
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 64,
}, "linear attention")  # fmt: skip
decoder("Glm4Moe", HEADS | {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
                            "n_shared_experts": 1, "first_k_dense_replace": 1}, "mixture of experts")  # fmt: skip
decoder("Ernie4_5_Moe", BASE | {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2,
                                "moe_layer_start_index": 1}, "mixture of experts")  # fmt: skip

decoder("Qwen3_5", HEADS | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, "linear attention",
        config="Qwen3_5TextConfig")  # fmt: skip
decoder("OlmoHybrid", BASE | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, "linear attention")
decoder("Lfm2", BASE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "convolution")

decoder("Mamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "expand": 2,
                  "conv_kernel": 4}, "state space")  # fmt: skip
decoder("FalconMamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2,
                        "expand": 2, "conv_kernel": 4}, "state space")  # fmt: skip
decoder(
    "Mamba2",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "expand": 2,
        "head_dim": 16,
        "num_heads": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "conv_kernel": 4,
    },
    "state space",
)
decoder("Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2,
                 "context_length": 32}, "linear attention")  # fmt: skip
decoder("RecurrentGemma", {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
                           "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 64, "head_dim": 16,
                           "attention_window_size": 16, "num_key_value_heads": 1}, "state space")  # fmt: skip
