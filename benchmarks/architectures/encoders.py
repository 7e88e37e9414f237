"""Encoders and encoder-decoders of transformers, with their own losses; encoders with a real padding mask."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from architectures.decoders import SIZES
from architectures.registry import BATCH, TOKENS, VOCABULARY, Case, register, tokens

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BASE = SIZES | NO_DROPOUT | {"vocab_size": VOCABULARY, "max_position_embeddings": 80, "pad_token_id": 0}


def padding_mask(length: int = TOKENS) -> torch.Tensor:
    """Samples of different lengths."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    for sample in range(BATCH):
        mask[sample, length - sample :] = 0
    return mask


def encoder(prefix: str, settings: dict[str, Any], name: str = "", masked: bool = True, length: int = TOKENS) -> None:
    """Register ``prefix``ForMaskedLM, of which a third of the labels does not count."""

    def builder() -> Case:
        configuration = getattr(transformers, f"{prefix}Config")(**settings)
        model = getattr(transformers, f"{prefix}ForMaskedLM")(configuration)
        labels = tokens(length)
        labels[:, ::3] = -100
        kwargs = {"input_ids": tokens(length), "labels": labels}
        return Case(model, kwargs=kwargs | ({"attention_mask": padding_mask(length)} if masked else {}))

    register(name or prefix, "encoder")(builder)


encoder("Bert", BASE)
encoder("Roberta", BASE | {"pad_token_id": 1})
encoder("DistilBert", {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4,
                       "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64})  # fmt: skip
encoder("Electra", BASE | {"embedding_size": 32})
encoder("Albert", BASE | {"embedding_size": 32, "classifier_dropout_prob": 0.0})
encoder("MobileBert", BASE | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32})
encoder("ConvBert", BASE | {"embedding_size": 64, "head_ratio": 2, "num_groups": 1})
encoder("MPNet", BASE | {"pad_token_id": 1})
encoder("RoFormer", BASE | {"embedding_size": 64})
encoder("Deberta", BASE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0})
encoder("DebertaV2", BASE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0})
encoder("Longformer", BASE | {"attention_window": 8, "pad_token_id": 1})
encoder("BigBird", BASE | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2,
                           "max_position_embeddings": 128}, length=64)  # fmt: skip
encoder("BigBird", BASE | {"attention_type": "original_full"}, name="BigBird (full attention)")
encoder("ModernBert", SIZES | {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "global_attn_every_n_layers": 2,
})  # fmt: skip
encoder("FNet", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY,
                 "max_position_embeddings": 64, "hidden_dropout_prob": 0.0}, masked=False)  # fmt: skip
encoder("Esm", BASE | {"position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False})
encoder("Nystromformer", BASE | {"num_landmarks": 8, "segment_means_seq_len": 32}, masked=False)
encoder("Yoso", BASE | {"use_expectation": True})
encoder("SqueezeBert", BASE | {"embedding_size": 64, "q_groups": 2, "k_groups": 2, "v_groups": 2,
                               "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2})  # fmt: skip
encoder("IBert", BASE | {"pad_token_id": 1})
encoder("Funnel", {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 64, "n_head": 4,
                   "d_head": 16, "d_inner": 128, "hidden_dropout": 0.0, "attention_dropout": 0.0,
                   "activation_dropout": 0.0})  # fmt: skip
encoder("Perceiver", {"num_latents": 16, "d_latents": 64, "d_model": 64, "num_blocks": 1,
                      "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
                      "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "qk_channels": 64,
                      "v_channels": 64, "attention_probs_dropout_prob": 0.0})  # fmt: skip


def encoder_decoder(architecture: str, config: str, settings: dict[str, Any], masked: bool = True) -> None:
    """Register a sequence-to-sequence model whose targets are shorter than its sources."""

    def builder() -> Case:
        model = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
        kwargs = {"input_ids": tokens(), "labels": tokens(24)}
        return Case(model, kwargs=kwargs | ({"attention_mask": padding_mask()} if masked else {}))

    register(config.removesuffix("Config"), "encoder-decoder")(builder)


BART = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
      "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
encoder_decoder("T5ForConditionalGeneration", "T5Config", T5)
encoder_decoder("MT5ForConditionalGeneration", "MT5Config", T5)
encoder_decoder("LongT5ForConditionalGeneration", "LongT5Config", T5 | {"local_radius": 8})
encoder_decoder("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
                T5 | {"num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 1,
                      "num_sparse_decoder_layers": 1, "num_decoder_layers": 2, "router_jitter_noise": 0.0})  # fmt: skip
encoder_decoder("BartForConditionalGeneration", "BartConfig", BART)
encoder_decoder("PegasusForConditionalGeneration", "PegasusConfig", BART | {"pad_token_id": 0})
encoder_decoder("MarianMTModel", "MarianConfig", BART | {"decoder_vocab_size": VOCABULARY})
encoder_decoder("M2M100ForConditionalGeneration", "M2M100Config", BART | NO_LAYERDROP)
encoder_decoder("LEDForConditionalGeneration", "LEDConfig",
                BART | {"attention_window": 8, "max_encoder_position_embeddings": 64,
                        "max_decoder_position_embeddings": 64})  # fmt: skip
