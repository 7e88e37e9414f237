"""Models of transformers for speech, for text with images, and for time series."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from architectures.decoders import BASE, SIZES
from architectures.encoders import padding_mask
from architectures.registry import BATCH, TOKENS, VOCABULARY, Case, images, register, smooth, tokens
from architectures.vision import last_hidden

# ---- speech

SPEECH = SIZES | {
    "vocab_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False,
    "mask_time_prob": 0.0, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def speech(prefix: str, settings: dict[str, Any]) -> None:
    """Register ``prefix``Model on waves."""

    def builder() -> Case:
        model = getattr(transformers, f"{prefix}Model")(getattr(transformers, f"{prefix}Config")(**settings))
        return Case(model, kwargs={"input_values": torch.randn(BATCH, 2000)}, loss_fn=last_hidden)

    register(prefix, "speech")(builder)


speech("Wav2Vec2", SPEECH)
speech("Hubert", SPEECH)
speech("WavLM", SPEECH | {"num_buckets": 32, "max_bucket_distance": 64})
speech("SEW", SPEECH | {"squeeze_factor": 2})
speech("Data2VecAudio", SPEECH | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3})


@register("Wav2Vec2 (CTC)", "speech")
def _ctc() -> Case:
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SPEECH, ctc_loss_reduction="mean"))
    return Case(model, kwargs={"input_values": torch.randn(BATCH, 2000), "labels": torch.randint(1, 32, (BATCH, 10))})


@register("Whisper", "speech")
def _whisper() -> Case:
    configuration = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, max_source_positions=32, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, apply_spec_augment=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(configuration)
    return Case(model, kwargs={"input_features": torch.randn(BATCH, 16, 64), "labels": tokens(24)})


@register("ASTModel", "speech")
def _spectrogram_transformer() -> Case:
    configuration = transformers.ASTConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_length=64, num_mel_bins=32,
        patch_size=16, frequency_stride=10, time_stride=10,
    )  # fmt: skip
    return Case(
        transformers.ASTModel(configuration), kwargs={"input_values": torch.randn(BATCH, 64, 32)}, loss_fn=last_hidden
    )


# ---- text with images

TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
                "eos_token_id": 2}  # fmt: skip
IMAGE = SIZES | {"image_size": 32, "patch_size": 16}


@register("CLIP", "text and images")
def _clip() -> Case:
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=32))
    kwargs = {"input_ids": tokens(), "pixel_values": images(), "attention_mask": padding_mask(), "return_loss": True}
    return Case(model, kwargs=kwargs)


@register("SigLIP", "text and images")
def _siglip() -> Case:
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=IMAGE))
    return Case(model, kwargs={"input_ids": tokens(), "pixel_values": images(), "return_loss": True})


@register("CLIPSeg", "text and images")
def _clipseg() -> Case:
    configuration = transformers.CLIPSegConfig(
        text_config=TEXT, vision_config=IMAGE, projection_dim=64, extract_layers=[0, 1], reduce_dim=32,
        decoder_num_attention_heads=4, decoder_intermediate_size=64, decoder_attention_dropout=0.0,
    )  # fmt: skip
    kwargs = {"input_ids": tokens(), "pixel_values": images(), "labels": torch.rand(BATCH, 32, 32).round()}
    return Case(transformers.CLIPSegForImageSegmentation(configuration), kwargs=kwargs)


@register("BLIP", "text and images")
def _blip() -> Case:
    text = TEXT | {"sep_token_id": 2, "encoder_hidden_size": 64, "hidden_dropout_prob": 0.0,
                   "attention_probs_dropout_prob": 0.0}  # fmt: skip
    configuration = transformers.BlipConfig(text_config=text, vision_config=IMAGE, projection_dim=32)
    kwargs = {"pixel_values": images(), "input_ids": tokens(), "labels": tokens()}
    return Case(transformers.BlipForConditionalGeneration(configuration), kwargs=kwargs)


@register("LLaVA", "text and images")
def _llava() -> Case:
    configuration = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**IMAGE), text_config=transformers.LlamaConfig(**BASE),
        image_token_index=5, image_token_id=5, vision_feature_layer=-1, image_seq_length=4,
    )  # fmt: skip
    words = tokens(low=6)
    words[:, 2:6] = 5
    kwargs = {"input_ids": words, "pixel_values": images(), "attention_mask": torch.ones_like(words), "labels": words}
    return Case(transformers.LlavaForConditionalGeneration(configuration), kwargs=kwargs)


@register("ViLT", "text and images")
def _vilt() -> Case:
    configuration = transformers.ViltConfig(
        **SIZES, vocab_size=VOCABULARY, image_size=32, patch_size=16, hidden_dropout_prob=0.0, max_image_length=-1,
        attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    kwargs = {"input_ids": tokens(), "pixel_values": images(), "pixel_mask": torch.ones(BATCH, 32, 32).long()}
    return Case(transformers.ViltModel(configuration), kwargs=kwargs, loss_fn=last_hidden)


# ---- time series

SERIES = {
    "prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 2, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def series(architecture: str, config: str, **settings: Any) -> None:
    """Register a forecaster with its own loss on the values to come."""

    def builder() -> Case:
        configuration = getattr(transformers, config)(**SERIES, **settings)
        kwargs = {
            "past_values": torch.randn(BATCH, 19), "past_time_features": torch.randn(BATCH, 19, 2),
            "past_observed_mask": torch.ones(BATCH, 19), "future_values": torch.randn(BATCH, 8),
            "future_time_features": torch.randn(BATCH, 8, 2),
        }  # fmt: skip
        return Case(getattr(transformers, architecture)(configuration), kwargs=kwargs)

    register(architecture.removesuffix("ForPrediction"), "time series")(builder)


series("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig")
series("InformerForPrediction", "InformerConfig", attention_type="prob")
series("AutoformerForPrediction", "AutoformerConfig", moving_average=5, label_length=8)


@register("PatchTST", "time series")
def _patches() -> Case:
    configuration = transformers.PatchTSTConfig(
        num_input_channels=4, context_length=32, patch_length=8, patch_stride=8, prediction_length=8, d_model=32,
        num_attention_heads=4, num_hidden_layers=2, ffn_dim=64, attention_dropout=0.0, positional_dropout=0.0,
        ff_dropout=0.0, head_dropout=0.0, path_dropout=0.0, dropout=0.0, loss="mse",
    )  # fmt: skip
    kwargs = {"past_values": torch.randn(BATCH, 32, 4), "future_values": torch.randn(BATCH, 8, 4)}
    return Case(transformers.PatchTSTForPrediction(configuration), kwargs=kwargs)


@register("PatchTSMixer", "time series")
def _mixer() -> Case:
    configuration = transformers.PatchTSMixerConfig(
        num_input_channels=4, context_length=32, patch_length=8, patch_stride=8, prediction_length=8, d_model=16,
        num_layers=2, dropout=0.0, head_dropout=0.0, loss="mse",
    )  # fmt: skip
    kwargs = {"past_values": torch.randn(BATCH, 32, 4), "future_values": torch.randn(BATCH, 8, 4)}
    return Case(transformers.PatchTSMixerForPrediction(configuration), kwargs=kwargs)


@register("DecisionTransformer", "reinforcement learning")
def _decisions() -> Case:
    configuration = transformers.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=64, max_ep_len=64, n_positions=128, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    time = torch.arange(TOKENS).expand(BATCH, TOKENS).clone()
    kwargs = {
        "states": torch.randn(BATCH, TOKENS, 5), "actions": torch.randn(BATCH, TOKENS, 3),
        "rewards": torch.randn(BATCH, TOKENS, 1), "returns_to_go": torch.randn(BATCH, TOKENS, 1), "timesteps": time,
        "attention_mask": torch.ones(BATCH, TOKENS),
    }  # fmt: skip

    def loss(output: Any) -> Tensor:
        return smooth(output.action_preds)

    return Case(transformers.DecisionTransformerModel(configuration), kwargs=kwargs, loss_fn=loss)
