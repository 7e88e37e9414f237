"""Values of users beside the weights, as JSON and tensors: a scheduler, the place in the data, numbers of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["decode", "encode", "state_of"]


def state_of(value: Any) -> Any:
    """The state of an object that has ``state_dict``; any other value itself."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON; its tensors go to ``tensors`` under the name ``where`` and what leads to them. ValueError
    names what is neither a number, text, list, tuple, mapping, nor tensor."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach()
        return {"tensor": where}
    if isinstance(value, list | tuple):
        items = [encode(one, f"{where}.{k}", tensors) for k, one in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [
            [encode(key, f"{where}.key", tensors), encode(one, f"{where}.{key}", tensors)] for key, one in value.items()
        ]
        return {"mapping": pairs}
    raise ValueError(
        "a checkpoint holds numbers, texts, lists, tuples, mappings, tensors, and objects with `state_dict`, but "
        f"{where} is {type(value).__module__}.{type(value).__qualname__}; leave it out or give its state"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of ``encode``. tensor: the tensor of a name."""
    if isinstance(value, list):
        return [decode(one, tensor) for one in value]
    match value:
        case {"tensor": str(name)}:
            return tensor(name)
        case {"tuple": list(items)}:
            return tuple(decode(one, tensor) for one in items)
        case {"mapping": list(pairs)} if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {decode(key, tensor): decode(one, tensor) for key, one in pairs}
        case dict():
            raise ValueError(f"what was kept as extra has an unknown form, {str(value)[:60]}")
    return value
