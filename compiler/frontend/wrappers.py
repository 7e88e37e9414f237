"""Modules that PyTorch has wrapped, sharded or compiled to other code: refused by name, before an export fails on them
in its own words."""

from __future__ import annotations

from torch import nn

from ..errors import CaptureError

__all__ = ["refuse_wrappers"]

_SHARDED = "a plan shards the weights itself: pass the plain module"
#: class of torch → what to do instead
_WRAPPERS = {
    "DataParallel": "a plan splits the batch itself: pass model.module",
    "DistributedDataParallel": "a plan splits the batch itself: pass model.module",
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": f"{_SHARDED}, without fully_shard()",
    "ScriptModule": "a capture reads Python code: pass the module that was scripted or traced",
}


def refuse_wrappers(model: nn.Module) -> None:
    """Raise CaptureError if ``model`` or a module in it is one that PyTorch has wrapped for another way to run it, or
    if a parameter is a DTensor."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                where = f"module {path!r}" if path else "the model"
                raise CaptureError(
                    f"a model is made of plain modules, but got {kind.__name__} as {where}; {_WRAPPERS[kind.__name__]}"
                )
    for name, parameter in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise CaptureError(f"a parameter is a plain tensor, but got a DTensor as {name!r}; {_SHARDED}")
