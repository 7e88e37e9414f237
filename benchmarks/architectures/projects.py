"""Models of other projects, by their own files: what people import where neither Hugging Face nor timm has it.

``NEEDED`` installs them, without what only their trainers and downloads use.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from architectures.registry import BATCH, TOKENS, VOCABULARY, Case, images, register, tokens

__all__ = ["FOUND", "NEEDED"]

NEEDED = (
    "pip install --no-deps x-transformers vit-pytorch litgpt open_clip_torch openai-whisper segment-anything monai "
    "segmentation-models-pytorch torch_geometric e3nn denoising-diffusion-pytorch vector-quantize-pytorch einops einx "
    "torch-einops-utils pope-pytorch loguru ema-pytorch hyper-connections frozendict lightning lightning-utilities "
    "torchmetrics jsonargparse pytorch-lightning timm ftfy regex wcwidth tiktoken more-itertools numba llvmlite "
    "opt_einsum_fx opt-einsum accelerate psutil pyparsing aiohttp xxhash peft torchdiffeq xlstm omegaconf "
    "antlr4-python3-runtime==4.9.3 rtdl_revisiting_models demucs julius openunmix"
)
PACKAGES = (
    "x_transformers", "vit_pytorch", "litgpt", "open_clip", "whisper", "segment_anything", "monai",
    "segmentation_models_pytorch", "torch_geometric", "e3nn", "denoising_diffusion_pytorch", "vector_quantize_pytorch",
    "peft", "torchdiffeq", "xlstm", "rtdl_revisiting_models", "demucs",
)  # fmt: skip
#: whether all of them are here
FOUND = all(importlib.util.find_spec(package) is not None for package in PACKAGES)
CLASSES, WIDTH = 10, 64


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _language(model: nn.Module) -> Case:
    ids = tokens()
    return Case(model, (ids,), {}, (ids.roll(-1, 1),), _cross_entropy)


def _classifier(model: nn.Module, size: int = 32) -> Case:
    return Case(model, (images(size),), {}, (torch.randint(0, CLASSES, (BATCH,)),), _cross_entropy)


def _segmented(model: nn.Module, size: int, channels: int, dims: int = 2) -> Case:
    shape = (size,) * dims
    return Case(
        model,
        (torch.randn(BATCH, channels, *shape),),
        {},
        (torch.randint(0, 2, (BATCH, *shape)),),
        functional.cross_entropy,
    )


def _series(model: nn.Module, *shape: int) -> Case:
    x = torch.randn(BATCH, *shape)
    return Case(model, (x,), {}, (torch.randn_like(x),), functional.mse_loss)


class Contrast(nn.Module):
    """The symmetric loss of pairs of images and texts."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pictures: Tensor, texts: Tensor) -> Tensor:
        image, text, scale = self.net(pictures, texts)
        logits, labels = scale * image @ text.t(), torch.arange(len(image))
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)) / 2


class Invariant(nn.Module):
    """A tensor product of spherical harmonics and what is invariant of it."""

    def __init__(self) -> None:
        super().__init__()
        product = _of("e3nn.o3", "FullyConnectedTensorProduct")
        self.product, self.out = product("8x0e+4x1o", "8x0e+4x1o", "8x0e"), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.product(x, x))
        return out


class Dynamics(nn.Module):
    """The right side of a differential equation, which counts its calls, as torchdiffeq's examples do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, WIDTH), nn.Tanh(), nn.Linear(WIDTH, width))
        self.calls = 0

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.net(state)
        return out


class Solved(nn.Module):
    """The solution at time 1, by a method with steps of its own choice and by the adjoint equation backwards."""

    def __init__(self, dynamics: nn.Module) -> None:
        super().__init__()
        self.dynamics, self.times = dynamics, torch.tensor([0.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _of("torchdiffeq", "odeint_adjoint")(self.dynamics, x, self.times, rtol=1e-3, atol=1e-3)[1]
        return out


class Quantised(nn.Module):
    """A quantiser between two layers."""

    def __init__(self, quantiser: nn.Module) -> None:
        super().__init__()
        self.first, self.quantiser, self.last = nn.Linear(16, 4), quantiser, nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.quantiser(self.first(x))[0])
        return out


def _graph(kind: str) -> Case:
    net = _of("torch_geometric.nn.models", kind)(16, 32, 2, CLASSES)
    inputs = torch.randn(64, 16), torch.randint(0, 64, (2, 256))
    whole = dict.fromkeys(("args.0", "args.1", "targets.0"))
    return Case(net, inputs, {}, (torch.randint(0, CLASSES, (64,)),), _cross_entropy, whole, 1)


def _litgpt(**settings: Any) -> Case:
    sizes = {
        "block_size": TOKENS, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4,
        "n_embd": WIDTH, "n_query_groups": 2, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
        "norm_class_name": "RMSNorm", "intermediate_size": 2 * WIDTH,
    }  # fmt: skip
    return _language(_of("litgpt", "GPT")(_of("litgpt", "Config")(**{**sizes, **settings})))


def _x_transformer(layers: str, **settings: Any) -> Case:
    wrapper, kind = _of("x_transformers", "TransformerWrapper"), _of("x_transformers", layers)
    memory = {"num_memory_tokens": 4} if layers == "Encoder" else {}
    net = kind(dim=WIDTH, depth=2, heads=4, **settings)
    return _language(wrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=net, **memory))


def _whisper() -> Case:
    sizes = {"n_audio_ctx": 16, "n_audio_state": WIDTH, "n_audio_head": 4, "n_audio_layer": 1}
    sizes |= {"n_text_ctx": TOKENS, "n_text_state": WIDTH, "n_text_head": 4, "n_text_layer": 1}
    net = _of("whisper.model", "Whisper")(_of("whisper.model", "ModelDimensions")(16, n_vocab=VOCABULARY, **sizes))
    ids = tokens()
    return Case(net, (torch.randn(BATCH, 16, 32), ids), {}, (ids.roll(-1, 1),), _cross_entropy)


def _clip() -> Case:
    vision, text = (_of("open_clip.model", f"CLIP{kind}Cfg") for kind in ("Vision", "Text"))
    net = _of("open_clip.model", "CLIP")(
        WIDTH, vision(layers=1, width=WIDTH, head_width=16, patch_size=8, image_size=32),
        text(context_length=16, vocab_size=VOCABULARY, width=WIDTH, heads=4, layers=1),
    )  # fmt: skip
    return Case(Contrast(net), (images(), tokens(16)))


def _vit(name: str, size: int = 32, **settings: Any) -> Case:
    module, _, kind = name.partition(".")
    return _classifier(_of(f"vit_pytorch.{module}", kind)(num_classes=CLASSES, **settings), size)


def _adapted(**settings: Any) -> Case:
    config, model = (_of("transformers", f"Llama{kind}") for kind in ("Config", "ForCausalLM"))
    net = model(config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ))  # fmt: skip
    adapter = _of("peft", "LoraConfig")(r=4, task_type="CAUSAL_LM", **settings)
    ids = tokens()
    return Case(_of("peft", "get_peft_model")(net, adapter), (), {"input_ids": ids, "labels": ids})


def _ode() -> Case:
    _of("torchdiffeq", "odeint_adjoint")  # at its import it makes tables, which a capture would make without data
    return _series(nn.Sequential(nn.Linear(16, 16), Solved(Dynamics(16)), nn.Linear(16, 16)), 16)


def _xlstm() -> Case:
    def config(name: str) -> Any:
        return _of("xlstm", f"{name}Config")

    mlstm = config("mLSTMBlock")(mlstm=config("mLSTMLayer")(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4))
    cell = config("sLSTMLayer")(backend="vanilla", num_heads=4, conv1d_kernel_size=4)
    slstm = config("sLSTMBlock")(slstm=cell, feedforward=config("FeedForward")(proj_factor=1.3))
    return _language(_of("xlstm", "xLSTMLMModel")(config("xLSTMLMModel")(
        vocab_size=VOCABULARY, embedding_dim=WIDTH, num_blocks=2, context_length=TOKENS, mlstm_block=mlstm,
        slstm_block=slstm, slstm_at=[1],
    )))  # fmt: skip


def _table() -> Case:
    net = _of("rtdl_revisiting_models", "FTTransformer")(
        n_cont_features=6, cat_cardinalities=[4, 5], d_out=CLASSES, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    inputs = torch.randn(BATCH, 6), torch.randint(0, 4, (BATCH, 2))
    return Case(net, inputs, {}, (torch.randint(0, CLASSES, (BATCH,)),), _cross_entropy)


def _demucs() -> Case:
    net = _of("demucs.htdemucs", "HTDemucs")(
        ["voice", "rest"], audio_channels=1, channels=8, depth=2, t_layers=1, t_heads=2, nfft=256, segment=0.05,
        samplerate=8000, bottom_channels=0, use_train_segment=False,
    )  # fmt: skip
    return Case(net, (torch.randn(BATCH, 1, 1024),), {}, (torch.randn(BATCH, 2, 1, 1024),), functional.l1_loss)


STAGES = {"dim": (32, 32, WIDTH, WIDTH), "depth": (1, 1, 1, 1)}
PATCHES = {"image_size": 32, "patch_size": 8, "dim": WIDTH, "depth": 2, "heads": 4, "mlp_dim": WIDTH}
MODELS: dict[str, tuple[str, Callable[[], Case]]] = {
    "x-transformers decoder": ("decoder", lambda: _x_transformer(
        "Decoder", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, attn_kv_heads=2)),
    "x-transformers encoder": ("encoder", lambda: _x_transformer("Encoder", rel_pos_bias=True, macaron=True)),
    "litgpt Gemma 2": ("decoder", lambda: _litgpt(
        head_size=16, scale_embeddings=True, attention_scores_scalar=16, attention_logit_softcapping=50.0,
        final_logit_softcapping=30.0, sliding_window_size=8, sliding_window_indices=[1, 0], mlp_class_name="GemmaMLP",
        gelu_approximate="tanh", post_attention_norm=True, post_mlp_norm=True)),
    "litgpt Mixtral": ("mixture of experts", lambda: _litgpt(
        mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, intermediate_size=WIDTH)),
    "OpenAI Whisper": ("speech", _whisper),
    "OpenCLIP": ("image and text", _clip),
    "vit-pytorch CrossFormer": ("vision", lambda: _vit(
        "crossformer.CrossFormer", WIDTH, **STAGES, global_window_size=(4, 2, 2, 1), local_window_size=2)),
    "vit-pytorch XCiT": ("vision", lambda: _vit(
        "xcit.XCiT", **PATCHES, cls_depth=1, layer_dropout=0.0, local_patch_kernel_size=3)),
    "vit-pytorch CvT": ("vision", lambda: _vit("cvt.CvT", **{
        f"s{k}_{what}": value for k, width in ((1, 32), (2, 32), (3, WIDTH))
        for what, value in (("emb_dim", width), ("heads", 1), ("depth", 1))})),
    "Segment Anything, encoder": ("vision", lambda: Case(_of("segment_anything.modeling", "ImageEncoderViT")(
        img_size=64, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=4, out_chans=32, use_rel_pos=True, window_size=3,
        global_attn_indexes=(1,)), (images(64),), {}, (torch.randn(BATCH, 32, 8, 8),), functional.mse_loss)),
    "segmentation-models U-Net": ("segmentation", lambda: _segmented(
        _of("segmentation_models_pytorch", "Unet")("resnet18", encoder_weights=None, classes=2), 64, 3)),
    "MONAI DynUNet": ("segmentation", lambda: _segmented(
        _of("monai.networks.nets", "DynUNet")(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), 32, 1)),
    "MONAI Swin UNETR": ("segmentation", lambda: _segmented(_of("monai.networks.nets", "SwinUNETR")(
        in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), spatial_dims=2),
        64, 1)),
    "MONAI U-Net, 3-D": ("segmentation", lambda: _segmented(_of("monai.networks.nets", "UNet")(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        16, 1, 3)),
    "denoising-diffusion U-Net": ("diffusion", lambda: Case(
        _of("denoising_diffusion_pytorch", "Unet")(dim=16, dim_mults=(1, 2), flash_attn=False),
        (images(16), torch.randint(0, 100, (BATCH,)).float()), {}, (images(16),), functional.mse_loss)),
    "PyG GCN": ("graph", lambda: _graph("GCN")),
    "PyG GAT": ("graph", lambda: _graph("GAT")),
    "e3nn tensor product": ("science", lambda: _series(Invariant(), 20)),
    "finite scalar quantisation": ("quantiser", lambda: _series(
        Quantised(_of("vector_quantize_pytorch", "FSQ")(levels=[8, 5, 5, 5])), TOKENS, 16)),
    "vector quantisation by averages": ("quantiser", lambda: _series(
        Quantised(_of("vector_quantize_pytorch", "VectorQuantize")(dim=4, codebook_size=32)), TOKENS, 16)),
    "PEFT LoRA on Llama": ("adapter", lambda: _adapted(target_modules="all-linear", modules_to_save=["lm_head"])),
    "PEFT DoRA on Llama": ("adapter", lambda: _adapted(target_modules=["q_proj", "v_proj"], use_dora=True)),
    "torchdiffeq neural ODE": ("differential equation", _ode),
    "xLSTM": ("recurrent", _xlstm),
    "FT-Transformer": ("tabular", _table),
    "Hybrid Demucs": ("audio", _demucs),
}  # fmt: skip

for _name, (_kind, _build) in MODELS.items():
    register(_name, _kind, "projects")(_build)
