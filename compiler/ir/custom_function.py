"""A user's ``torch.autograd.Function`` as one op of a graph: it runs the user's own forward, and autograd the user's
own backward.

An export records what a Function's forward does and loses its backward. While a model is captured
(``custom_backward``), each call of a Function becomes one ``meshwright::custom_function`` op in the exported program,
and then one node of the graph whose target is a ``CustomFunction``. The rule of such an op (``rules.custom_function``)
finds by trial which dims of its tensors can be split.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTION_OP", "CustomFunction", "forget_types", "set_types", "source_digest"]

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("custom_function(Tensor[] operands, int call) -> Tensor[]")
_TYPES: dict[int, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}  # call → the types of its outputs


def _output_types(operands: list[Tensor], call: int) -> list[Tensor]:
    return [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in _TYPES[call]]


_LIBRARY.impl("custom_function", _output_types, "Meta")
FUNCTION_OP = torch.ops.meshwright.custom_function.default


def set_types(call: int, outputs: list[Tensor]) -> None:
    """Register the output types of a call for as long as a capture takes."""
    _TYPES[call] = [(x.shape, x.stride(), x.dtype) for x in outputs]


def forget_types(calls: Mapping[int, Any]) -> None:
    """Drop the types of these calls."""
    for call in calls:
        _TYPES.pop(call, None)


class CustomFunction:
    """The target of a graph node that calls ``kind.apply``.

    The node's args are those of the call, one by one. ``objects`` holds the arguments that no graph can hold
    (functions, for example) by position; the node has None in their places. Calling it returns the tensors among the
    outputs.
    """

    __name__ = "custom_function"

    def __init__(self, kind: Any, objects: Mapping[int, Any], number: int) -> None:
        self.kind, self.objects = kind, dict(objects)
        #: the name of the op in the text of a graph, so that a plan of other code is refused; ``number`` tells calls
        #: with different objects apart
        self.op_name = f"meshwright.custom_function.{kind.__module__}.{kind.__qualname__}@{source_digest(kind)}"
        if self.objects:
            self.op_name += f"#{number}"

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Run the Function on these arguments."""
        given = [self.objects.get(position, value) for position, value in enumerate(args)]
        with _device_of(given):
            outputs: Any = self.kind.apply(*given)
        several = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return tuple(x for x in several if isinstance(x, Tensor))

    def __eq__(self, other: object) -> bool:
        """Equal targets call the same code with the same objects."""
        return isinstance(other, CustomFunction) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return self.op_name

    def _identity(self) -> tuple[Any, ...]:
        return self.kind, tuple((position, id(value)) for position, value in self.objects.items())


@cache
def source_digest(kind: Any) -> str:
    """8 hex digits over the source of a class or function; of its name, where there is no source to read."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        text = kind.__qualname__
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _device_of(args: list[Any]) -> AbstractContextManager[Any]:
    """Tensors that the code makes lie where its operands do, where these have no data."""
    return torch.device("meta") if any(isinstance(x, Tensor) and x.is_meta for x in args) else nullcontext()
