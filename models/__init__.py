"""Built-in models: their architectures, and a registry of them by name (``build``, ``names``)."""

from .architectures import GPT, Llama, TransformerMoE, UNet, ViTMoE, WideResNet
from .registry import Target, build, gpt_flops, names

__all__ = ["GPT", "Llama", "Target", "TransformerMoE", "UNet", "ViTMoE", "WideResNet", "build", "gpt_flops", "names"]
