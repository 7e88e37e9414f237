"""``flex_attention`` as plain ops: a capture has no function of tensors inside an op, and CPUs have no backward of it.

While ``flex_attention_as_ops`` is active, ``torch.nn.attention.flex_attention``'s function checks its arguments as ever
and then computes

    no score_mod    scaled_dot_product_attention, with the mask that ``mask_mod`` says, element by element
    score_mod       softmax of score_mod(q k^T scale) where mask_mod allows it, times v; rows without any are zero

``mask_mod`` and ``score_mod`` speak of one element. They are called once, with indices of the shapes [B, 1, 1, 1],
[H, 1, 1], [Q, 1] and [K], which gives the same where all that they do is elementwise or an index into a tensor;
anything else is refused (``_Elementwise``). PyTorch's ``vmap`` over them would be lost in an export.

A ``BlockMask`` only saves work where ``create_block_mask`` made it. One whose blocks say more than its ``mask_mod`` (by
``from_kv_blocks``) is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from .source_errors import current_line_error

__all__ = ["flex_attention_as_ops"]

_CAUSE = "the blocks of a BlockMask may say more than its mask_mod"
_CHANGE = "make it by create_block_mask, of a mask_mod that says all"


@contextmanager
def flex_attention_as_ops() -> Iterator[None]:
    """Let ``flex_attention`` compute by plain ops, whoever holds a reference to it."""
    made = vars(flex.BlockMask)["from_kv_blocks"].__func__

    def from_kv_blocks(kind: type, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename != flex.__file__:
            raise current_line_error(_CAUSE, _CHANGE)
        return made(kind, *args, **kwargs)

    changes: dict[str, Any] = {"flex_attention_hop": _attention, "_validate_device": lambda *_: None}
    changes["_vmap_for_bhqkv"] = _over_all
    changes["_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"] = True
    before = {name: vars(flex)[name] for name in changes}
    vars(flex).update(changes)
    flex.BlockMask.from_kv_blocks = classmethod(from_kv_blocks)  # type: ignore[assignment]
    try:
        yield
    finally:
        vars(flex).update(before)
        flex.BlockMask.from_kv_blocks = classmethod(made)  # type: ignore[assignment]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], blocks: tuple[Any, ...], scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(output, log2 of the sums of exponentials, largest scores); what nobody uses of these is dropped later."""
    mask = _mask(blocks, query, key)
    heads = query.shape[1]
    several = heads // key.shape[1]
    keys, values = (x if several == 1 else x.repeat_interleave(several, 1) for x in (key, value))
    scores = (query @ keys.transpose(-2, -1)).float() * scale
    if score_mod is not flex._identity:
        b, h, q, k = (torch.arange(n, device=query.device) for n in scores.shape)
        scores = _over_all(score_mod, (0,))(scores, b, h, q, k)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if score_mod is flex._identity:
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=several > 1)
    else:
        out = torch.ops.aten._safe_softmax.default(scores, -1).to(query.dtype) @ values
    return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _mask(blocks: tuple[Any, ...], query: Tensor, key: Tensor) -> Tensor | None:
    """bool[batch or 1, heads or 1, queries, keys], True where attention is allowed; None if it is everywhere."""
    mask_mod, counts = blocks[-1], blocks[2]
    if type(counts) is Tensor and not _says_all(blocks):
        raise current_line_error(_CAUSE, _CHANGE)
    if mask_mod is flex.noop_mask:
        return None
    batch, heads = counts.shape[:2]
    return flex.create_mask(mask_mod, batch, heads, query.shape[2], key.shape[2], query.device)


def _says_all(blocks: tuple[Any, ...]) -> bool:
    """True if the blocks of a mask that was made before the capture follow from its mask_mod."""
    length, others, counts, indices, full_counts, full_indices = blocks[:6]
    size, mask_mod = blocks[-3:-1], blocks[-1]
    try:
        with _disable_current_modes():
            batch, heads = counts.shape[:2]
            again = flex.create_block_mask(mask_mod, batch, heads, length, others, counts.device, size)
    except CaptureError:
        raise
    except Exception:  # the function reads tensors of the model, which have no values here
        return False
    made = again.kv_num_blocks, again.kv_indices, again.full_kv_num_blocks, again.full_kv_indices
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip((counts, indices, full_counts, full_indices), made)
    )


_NAMES = """ge gt le lt eq ne and or xor invert logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
    bitwise_not bitwise_xor add sub subtract rsub mul multiply div divide truediv floordiv floor_divide mod rmod
    remainder radd rmul rtruediv rand ror rxor pow rpow neg abs sign floor ceil round sqrt rsqrt square exp exp2 log
    log2 tanh sigmoid sin cos relu clamp clamp_min clamp_max minimum maximum where masked_fill isin lshift rshift
    to type float double half bfloat16 int long bool clone detach contiguous dtype device"""
_ELEMENTWISE = frozenset(_NAMES.split())  # names of functions, and of the attributes that may be read


class _Elementwise(TorchFunctionMode):
    """Refuses what is not elementwise, except for an index into a tensor that was there before."""

    def __init__(self, indices: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.made = {id(x): x for x in indices}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func)).strip("_")
        if name == "get":  # an attribute
            name = func.__self__.__name__
        if name in ("getitem", "index") and self._looks_up(*args):
            pass
        elif name in ("new_ones", "new_zeros", "new_full") and not args[1]:
            pass  # one element, as PyTorch's and_masks and or_masks begin with
        elif name not in _ELEMENTWISE:
            raise current_line_error(
                f"a mask_mod or score_mod is elementwise here, but got {name}",
                "use operators and torch.where, and index a tensor of the whole at once (ids[b, q])",
            )
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made[id(out)] = out
        return out

    def _looks_up(self, x: Tensor, at: Any) -> bool:
        at = at if isinstance(at, tuple | list) else (at,)
        plain = all(isinstance(i, int) or (isinstance(i, Tensor) and not i.dtype.is_floating_point) for i in at)
        masks = any(isinstance(i, bool) or (isinstance(i, Tensor) and i.dtype == torch.bool) for i in at)
        return id(x) not in self.made and len(at) == x.dim() and plain and not masks


def _over_all(fn: Callable[..., Tensor], prefix: tuple[int | None, ...], *_: Any, **__: Any) -> Callable[..., Tensor]:
    """``fn`` of single elements as a function of whole tensors: those of ``prefix`` have the shape [b, h, q, k]."""

    def over_all(*args: Tensor) -> Tensor:
        given, indices = args[: len(prefix)], args[len(prefix) :]
        shape = tuple(x.shape[0] for x in indices)
        if fn is flex.noop_mask:
            return torch.ones(shape, dtype=torch.bool, device=indices[0].device)
        spread = tuple(x.view(-1, *(1 for _ in range(3 - place))) for place, x in enumerate(indices))
        with _Elementwise((*given, *spread)):
            out = fn(*given, *spread)
        return out.expand(shape)

    return over_all
