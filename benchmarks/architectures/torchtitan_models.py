"""torchtitan's own Llama 3 and DeepSeek-V3, with packed documents under its block masks (flex attention).

They need what ``NEEDED`` installs, or a clone of that version on ``PYTHONPATH``. Only the files of the models run: its
trainer wants triton and tensorboard, in whose place stand empty modules here. A capture sees the models as they are. Of
the eager run, PyTorch has two things on GPUs alone: the backward of flex attention, in whose place stands attention
with the whole mask, and the histogram of integers, which is one of floats. ``torch.compile`` is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask, flex_attention

from architectures.registry import TOKENS, VOCABULARY, Case, register, tokens

__all__ = ["FOUND", "NEEDED"]

NEEDED = "pip install --no-deps torchtitan==0.2.2 tyro docstring_parser typeguard torchdata"

SPEC = importlib.util.find_spec("torchtitan")
#: whether torchtitan is here, in a version that has these files
FOUND = bool(
    SPEC
    and SPEC.submodule_search_locations
    and Path(SPEC.submodule_search_locations[0], "models", "llama3", "model", "model.py").exists()
)
END_OF_DOCUMENT, HISTC = 0, torch.histc


def module_of(name: str) -> ModuleType:
    """A module of torchtitan, past what the packages around it import."""
    assert SPEC is not None
    assert SPEC.submodule_search_locations is not None
    root = Path(SPEC.submodule_search_locations[0])
    for package in ("", ".models", ".models.llama3", ".models.deepseek_v3"):
        bare = sys.modules.setdefault(f"torchtitan{package}", ModuleType(f"torchtitan{package}"))
        bare.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
    kernels = sys.modules.setdefault("torchtitan.models.moe.kernels", ModuleType("torchtitan.models.moe.kernels"))
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]  # of expert parallelism
    protocols = importlib.import_module("torchtitan.protocols.model")
    sys.modules.setdefault("torchtitan.protocols.train_spec", protocols)
    return importlib.import_module(f"torchtitan.models.{name}")


class Packed(nn.Module):
    """A model of torchtitan that makes its block mask from the tokens, as its trainer does before each step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.tokenizer = SimpleNamespace(eos_id=END_OF_DOCUMENT)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        masks = self.net.get_attention_masks(ids, self.tokenizer)
        logits = self.net(ids, attention_masks=masks)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """Flex attention, outside of a capture with the whole mask."""
    if isinstance(q, FakeTensor):
        return flex_attention(q, k, v, **settings)  # type: ignore[return-value]
    blocks = settings["block_mask"]
    mask = create_mask(blocks.mask_mod, *blocks.shape[:2], q.shape[2], k.shape[2], str(q.device))
    grouped = settings.get("enable_gqa", False)
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=settings.get("scale"), enable_gqa=grouped)


def packed(net: nn.Module) -> Case:
    """The model on documents that end within the rows."""
    torch.compiler.set_stance("force_eager")
    wrapper = module_of("attention").FlexAttentionWrapper
    wrapper._compiled_flex_attn = staticmethod(attention)
    torch.histc = lambda x, **settings: HISTC(x.float(), **settings).to(x.dtype)
    with torch.no_grad():
        net.init_weights(buffer_device=torch.device("cpu"))
    ids = tokens()
    ids[:, 11::13] = END_OF_DOCUMENT
    return Case(Packed(net), (ids, tokens()))


SIZES: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": TOKENS, "attn_type": "flex",
    "attn_mask_type": "block_causal",
}  # fmt: skip


@register("torchtitan Llama 3", "decoder", "torchtitan")
def _llama3() -> Case:
    model = module_of("llama3.model.model")
    arguments = module_of("llama3.model.args")
    settings = arguments.TransformerModelArgs(**SIZES, n_kv_heads=2, multiple_of=32, rope_theta=500000)
    return packed(model.Transformer(settings))


@register("torchtitan DeepSeek-V3", "mixture of experts", "torchtitan")
def _deepseek_v3() -> Case:
    model, moe = module_of("deepseek_v3.model.model"), module_of("moe.moe")
    arguments = module_of("deepseek_v3.model.args")
    experts = moe.MoEArgs(
        num_experts=4, num_shared_experts=1, top_k=2, score_func="softmax", use_grouped_mm=False,
        score_before_experts=False, load_balance_coeff=None,
    )  # fmt: skip
    settings = arguments.DeepSeekV3ModelArgs(
        **SIZES, inter_dim=128, moe_inter_dim=32, moe_args=experts, q_lora_rank=0, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, original_seq_len=TOKENS,
    )  # fmt: skip
    settings.moe_impl = settings.expert_parallel_comm_backend  # as its update_from_config does
    return packed(model.DeepSeekV3Model(settings))
