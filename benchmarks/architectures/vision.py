"""Vision models of transformers. Models without a loss of their own get a smooth one on all outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from architectures.decoders import SIZES
from architectures.encoders import NO_DROPOUT
from architectures.registry import BATCH, Case, images, register, smooth

CLASSES = 10


def classes(count: int = CLASSES) -> Tensor:
    """A class for each image."""
    return torch.randint(0, count, (BATCH,))


def last_hidden(output: Any) -> Tensor:
    """A smooth loss on the hidden states."""
    return smooth(output.last_hidden_state)


def pooled(output: Any) -> Tensor:
    """A smooth loss on the pooled features."""
    return smooth(output.pooler_output)


def classifier(prefix: str, settings: dict[str, Any], size: int = 32, name: str = "") -> None:
    """Register ``prefix``ForImageClassification with its own loss on labels."""

    def builder() -> Case:
        configuration = getattr(transformers, f"{prefix}Config")(**settings, num_labels=CLASSES)
        model = getattr(transformers, f"{prefix}ForImageClassification")(configuration)
        return Case(model, kwargs={"pixel_values": images(size), "labels": classes()})

    register(name or prefix, "vision")(builder)


def backbone(prefix: str, settings: dict[str, Any], loss: Callable[[Any], Tensor], size: int = 32) -> None:
    """Register ``prefix``Model with a smooth loss."""

    def builder() -> Case:
        model = getattr(transformers, f"{prefix}Model")(getattr(transformers, f"{prefix}Config")(**settings))
        return Case(model, kwargs={"pixel_values": images(size)}, loss_fn=loss)

    register(prefix, "vision")(builder)


PATCHES = SIZES | NO_DROPOUT | {"image_size": 32, "patch_size": 8}
classifier("ViT", PATCHES)
classifier("DeiT", PATCHES)
classifier("Beit", PATCHES | {"drop_path_rate": 0.0, "use_relative_position_bias": True})
classifier("Dinov2", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2,
                      "image_size": 28, "patch_size": 14, "drop_path_rate": 0.0}, 28)  # fmt: skip
classifier("ResNet", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2], "layer_type": "bottleneck"})
classifier("RegNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8})
classifier("ConvNext", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0})
classifier("ConvNextV2", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0})
classifier("Swin", {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                    "window_size": 4, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0})  # fmt: skip
classifier("Swin", {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                    "window_size": 4}, name="Swin (as shipped, drop path 0.1)")  # fmt: skip
classifier("Swinv2", {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                      "window_size": 4, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0})  # fmt: skip
classifier("PoolFormer", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [7, 3],
                          "strides": [4, 2], "padding": [2, 1], "drop_path_rate": 0.0})  # fmt: skip
classifier("Levit", {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 4],
                     "depths": [1, 1, 1], "key_dim": [8, 8, 8], "drop_path_rate": 0, "mlp_ratio": [2, 2, 2],
                     "attention_ratio": [2, 2, 2]}, 64)  # fmt: skip
classifier("MobileNetV1", {"depth_multiplier": 0.25, "image_size": 32, "classifier_dropout_prob": 0.0})
classifier("MobileNetV2", {"depth_multiplier": 0.25, "image_size": 32, "classifier_dropout_prob": 0.0})
backbone("EfficientNet", {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "dropout_rate": 0.0,
                          "drop_connect_rate": 0.0, "hidden_dim": 320}, pooled, 64)  # fmt: skip
backbone("MobileViT", {"image_size": 64,
                       "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 128],
                       "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
         pooled, 64)  # fmt: skip
backbone("Hiera", {"embed_dim": 16, "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4],
                   "patch_padding": [3, 3], "mlp_ratio": 2.0, "depths": [1, 1], "num_heads": [1, 2],
                   "query_stride": [2, 2], "masked_unit_size": [4, 4], "masked_unit_attention": [True, False],
                   "drop_path_rate": 0.0, "num_query_pool": 1}, last_hidden)  # fmt: skip
backbone("PvtV2", {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2],
                   "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
                   "mlp_ratios": [2, 2], "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0,
                   "attention_probs_dropout_prob": 0.0}, last_hidden)  # fmt: skip


@register("Segformer", "segmentation")
def _segformer() -> Case:
    configuration = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, decoder_hidden_size=32, num_labels=6,
    )  # fmt: skip
    labels = torch.randint(0, 6, (BATCH, 64, 64))
    model = transformers.SegformerForSemanticSegmentation(configuration)
    return Case(model, kwargs={"pixel_values": images(64), "labels": labels})


@register("ViTMAE", "vision")
def _masked_autoencoder() -> Case:
    configuration = transformers.ViTMAEConfig(
        **PATCHES, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )  # fmt: skip
    model = transformers.ViTMAEForPreTraining(configuration)
    return Case(model, kwargs={"pixel_values": images(), "noise": torch.rand(BATCH, 16)})


def _detector() -> transformers.DetrForObjectDetection:
    features = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=features,
            d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            num_queries=10, num_labels=6,
        )
    )  # fmt: skip


@register("Detr", "detection")
def _detr() -> Case:
    def loss(output: Any) -> Tensor:
        return smooth(torch.cat([output.logits, output.pred_boxes], -1))

    return Case(_detector(), kwargs={"pixel_values": images(64)}, loss_fn=loss)


@register("VivitModel", "video")
def _vivit() -> Case:
    configuration = transformers.VivitConfig(**SIZES, **NO_DROPOUT, image_size=32, num_frames=4, tubelet_size=[2, 8, 8])
    return Case(
        transformers.VivitModel(configuration), kwargs={"pixel_values": torch.randn(BATCH, 4, 3, 32, 32)},
        loss_fn=last_hidden,
    )  # fmt: skip


@register("TimesformerModel", "video")
def _timesformer() -> Case:
    configuration = transformers.TimesformerConfig(
        **SIZES, **NO_DROPOUT, image_size=32, patch_size=8, num_frames=4, drop_path_rate=0
    )
    return Case(
        transformers.TimesformerModel(configuration), kwargs={"pixel_values": torch.randn(BATCH, 4, 3, 32, 32)},
        loss_fn=last_hidden,
    )  # fmt: skip


@register("DepthAnything", "depth")
def _depth_anything() -> Case:
    features = transformers.Dinov2Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, mlp_ratio=2, image_size=28, patch_size=14,
        drop_path_rate=0.0, out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
    )  # fmt: skip
    configuration = transformers.DepthAnythingConfig(
        backbone_config=features, patch_size=14, reassemble_hidden_size=64, neck_hidden_sizes=[16, 32, 32, 64],
        fusion_hidden_size=16, head_hidden_size=8,
    )  # fmt: skip
    return Case(
        transformers.DepthAnythingForDepthEstimation(configuration), kwargs={"pixel_values": images(28)},
        targets=(torch.rand(BATCH, 28, 28),),
        loss_fn=lambda output, depth: functional.mse_loss(output.predicted_depth, depth),
    )  # fmt: skip
