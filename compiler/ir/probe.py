"""A probe: one op that runs by itself, repeatedly, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["OpInstance", "Probe"]


@dataclass(frozen=True)
class Probe:
    """The signature of an op, and a factory of runnable instances of it."""

    signature: str
    #: ``make(device, weights=True)`` gives a new instance with operands in memory of its own; with ``weights=False``
    #: its backward leaves the parameters' gradients out
    make: Callable[..., OpInstance]
    #: bytes of operands, outputs and cotangents of one instance
    nbytes: int = 0


class OpInstance:
    """An op with operands and cotangents: ``forward()`` keeps what a training step keeps, ``backward()`` uses it up.
    Both may be called again, in this order. Several instances may be alive, forwards first, then backwards."""

    def __init__(
        self,
        call: Callable[[], Any],
        operands: Sequence[Tensor],
        cotangents: Callable[[int, Tensor], Tensor | None],
    ) -> None:
        self.operands = tuple(operands)
        self._call, self._make_cotangent = call, cotangents
        self._leaves = [x for x in self.operands if x.requires_grad]
        self._roots: list[Tensor] = []
        self._outputs: Any = None
        self._cotangents: list[tuple[int, Tensor]] | None = None

    def forward(self) -> None:
        """Run the op; its outputs and what autograd saved stay."""
        self._outputs = self._call()

    def backward(self) -> None:
        """The gradients of all leaves from ready cotangents, then let go of everything; nothing without a leaf."""
        outputs, self._outputs = self._outputs, None
        if not self._leaves:
            return
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        if self._cotangents is None:
            tracked = [(k, y) for k, y in enumerate(outputs) if y is not None and y.requires_grad]
            grads = [(k, self._make_cotangent(k, y)) for k, y in tracked]
            self._cotangents = [(k, g) for k, g in grads if g is not None]
        roots = [outputs[k] for k, _ in self._cotangents]
        del outputs
        if roots:
            torch.autograd.grad(roots, self._leaves, [g for _, g in self._cotangents], allow_unused=True)

    def prepare(self) -> None:
        """Make the cotangents, which need outputs to be like; call it once before timing."""
        self.forward()
        self.backward()
