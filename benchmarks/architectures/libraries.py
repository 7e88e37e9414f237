"""Models of timm, diffusers and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from architectures.registry import BATCH, Case, images, register
from architectures.vision import CLASSES, classes

# The wheel of torchvision may be built for CUDA: then its C++ ops cannot be loaded, of which it needs these names.
_missing = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _missing.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import diffusers  # noqa: E402
import timm  # noqa: E402
import torchvision  # noqa: E402


def classified(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy on the model's logits."""
    return functional.cross_entropy(output, labels)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout at 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ---- timm


def of_timm(name: str, size: int = 32, **settings: Any) -> None:
    """Register a classifier of timm."""

    def builder() -> Case:
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
        return Case(without_dropout(model), (images(size),), targets=(classes(),), loss_fn=classified)

    register(name, "vision", "timm")(builder)


of_timm("mobilenetv3_small_050", drop_rate=0.0)
of_timm("mixer_s32_224", 64, img_size=64)
of_timm("resmlp_12_224", img_size=32)
of_timm("regnety_002", 64)
of_timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2)
of_timm("maxvit_rmlp_pico_rw_256", 64, img_size=64, depths=(1, 1), embed_dim=(32, 64), stem_width=32,
        drop_path_rate=0.0)  # fmt: skip
of_timm("nf_resnet26")
of_timm("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))
of_timm("cait_xxs24_224", img_size=32, depth=2)
of_timm("xcit_nano_12_p16_224", img_size=32, depth=2)
of_timm("ghostnet_050", 64, drop_rate=0.0)
of_timm("vit_tiny_patch16_224", img_size=32, depth=2)

# ---- diffusers


def denoised(output: Any, noise: Tensor) -> Tensor:
    """Mean squared error of the predicted noise."""
    return functional.mse_loss(output.sample, noise)


def of_diffusers(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a denoiser of diffusers."""
    return register(name, "diffusion", "diffusers")


def _times() -> Tensor:
    return torch.randint(0, 1000, (BATCH,))


@of_diffusers("UNet2DModel")
def _unet() -> Case:
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    return Case(model, (images(16), _times()), targets=(images(16),), loss_fn=denoised)


@of_diffusers("UNet2DConditionModel (Stable Diffusion)")
def _stable_diffusion() -> Case:
    model = diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    text = torch.randn(BATCH, 8, 32)
    return Case(model, (images(16, 4), _times(), text), targets=(images(16, 4),), loss_fn=denoised)


def published_unet() -> Case:
    """The denoiser of Stable Diffusion at its published size (the default configuration), on the meta device."""
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel()
        latents, text = torch.zeros(64, 4, 64, 64), torch.zeros(64, 77, 1280)
        times = torch.zeros(64, dtype=torch.int64)
        return Case(model, (latents, times, text), targets=(torch.zeros_like(latents),), loss_fn=denoised)


@of_diffusers("DiTTransformer2DModel")
def _diffusion_transformer() -> Case:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=16,
        patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=8, dropout=0.0,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    kwargs = {"timestep": _times(), "class_labels": classes()}
    return Case(model, (images(16, 4),), kwargs, (images(16, 4),), denoised)


@of_diffusers("SD3Transformer2DModel")
def _stable_diffusion_3() -> Case:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=32,
        pos_embed_max_size=16,
    )  # fmt: skip
    kwargs = {
        "hidden_states": images(16, 4), "encoder_hidden_states": torch.randn(BATCH, 8, 32),
        "pooled_projections": torch.randn(BATCH, 32), "timestep": _times(),
    }  # fmt: skip
    return Case(model, (), kwargs, (images(16, 4),), denoised)


@of_diffusers("FluxTransformer2DModel")
def _flux() -> Case:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    kwargs = {
        "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": torch.randn(BATCH, 8, 32),
        "pooled_projections": torch.randn(BATCH, 32), "timestep": torch.rand(BATCH),
        "img_ids": torch.randint(0, 4, (16, 3)).float(), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip
    no_batch = {"kwargs.img_ids": None, "kwargs.txt_ids": None}
    return Case(model, (), kwargs, (torch.randn(BATCH, 16, 16),), denoised, no_batch)


@of_diffusers("PixArtTransformer2DModel")
def _pixart() -> Case:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=16,
        patch_size=2, cross_attention_dim=64, caption_channels=32, norm_num_groups=8, use_additional_conditions=False,
    )  # fmt: skip
    kwargs = {
        "hidden_states": images(16, 4), "encoder_hidden_states": torch.randn(BATCH, 8, 32), "timestep": _times(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return Case(model, (), kwargs, (images(16, 4),), denoised)


@of_diffusers("AutoencoderKL (decoder)")
def _decoder() -> Case:
    model = diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(32,), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=16,
    )  # fmt: skip
    return Case(model, (images(16),), targets=(images(16),), loss_fn=denoised)


# ---- torchvision


def of_torchvision(name: str, size: int = 32, **settings: Any) -> None:
    """Register a classifier of torchvision."""

    def builder() -> Case:
        model = getattr(torchvision.models, name)(num_classes=CLASSES, **settings)
        return Case(without_dropout(model), (images(size),), targets=(classes(),), loss_fn=classified)

    register(name, "vision", "torchvision")(builder)


of_torchvision("resnet18")
of_torchvision("mobilenet_v2")
of_torchvision("shufflenet_v2_x0_5", 64)
of_torchvision("squeezenet1_1", 64)
of_torchvision("convnext_tiny", 64)


@register("DenseNet (two short blocks)", "vision", "torchvision")
def _densenet() -> Case:
    model = torchvision.models.DenseNet(8, (2, 2), 16, num_classes=CLASSES)
    return Case(model, (images(),), targets=(classes(),), loss_fn=classified)


@register("fcn_resnet50", "segmentation", "torchvision")
def _segmentation() -> Case:
    model = torchvision.models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, num_classes=6, aux_loss=False
    )
    labels = torch.randint(0, 6, (BATCH, 32, 32))
    return Case(
        without_dropout(model), (images(),), targets=(labels,),
        loss_fn=lambda output, labels: functional.cross_entropy(output["out"], labels),
    )  # fmt: skip


@register("r3d_18", "video", "torchvision")
def _video() -> Case:
    model = torchvision.models.video.r3d_18(weights=None, num_classes=CLASSES)
    return Case(model, (torch.randn(BATCH, 3, 4, 32, 32),), targets=(classes(),), loss_fn=classified)
