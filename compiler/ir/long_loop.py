"""A function with a long Python loop, over time for example, as one op of a graph: it runs the user's own code.

An export would unroll the loop, which takes minutes and gives a graph of 100,000 ops. While a model is captured
(``frontend.long_loops``), each call of such a function becomes one node whose target is a ``LoopFunction``. Autograd
differentiates the code as it runs. On tensors without data nothing loops: a stand-in returns tensors of the right types
and keeps as many bytes for the backward as the loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .custom_function import CustomFunction

__all__ = ["LoopFunction", "LoopWork", "ModuleCall"]


@dataclass(frozen=True)
class LoopWork:
    """The tensors and the work of one call, at the extents of the capture."""

    #: shapes of the operands
    operands: tuple[tuple[int, ...], ...]
    #: (shape, dtype) of the outputs
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    #: of the forward; an elementwise op counts one per element
    flops: float
    #: bytes kept for the backward, operands aside
    saved_bytes: float
    #: the operands that are kept too
    saved_operands: tuple[int, ...]

    def share(self, outputs: Sequence[Sequence[int]]) -> float:
        """The share of the work that a call with outputs of these shapes does."""
        whole = sum(prod(shape) for shape, _ in self.outputs)
        return sum(map(prod, outputs)) / whole if whole else 1.0


class LoopFunction(CustomFunction):
    """The target of a graph node that calls ``function``; the node's args are the leaves of its arguments.

    structure: of ``(args, kwargs)``. objects: the leaves that no graph can hold, by position.
    """

    __name__ = "long_loop"

    def __init__(
        self, function: Callable[..., Any], structure: Any, objects: Mapping[int, Any], number: int, work: LoopWork
    ) -> None:
        super().__init__(function, objects, number)
        self.op_name = self.op_name.replace("custom_function", "long_loop", 1)
        self.structure, self.work = structure, work

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Run the function on these leaves; its tensors, flattened."""
        operands = [x for x in args if isinstance(x, Tensor)]
        if any(x.is_meta or isinstance(x, FakeTensor) for x in operands):
            return _StandIn.apply(self, args, *operands)
        return self.run(args)

    def run(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors that the function itself returns."""
        given = [self.objects.get(position, value) for position, value in enumerate(args)]
        arguments, keywords = pytree.tree_unflatten(given, self.structure)
        returned = self.kind(*arguments, **keywords)
        return tuple(x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor))

    def output_shapes(self, args: Sequence[Any]) -> list[tuple[int, ...]]:
        """The shapes that the outputs have for these leaves: an extent shrinks as that of the operands does; where
        this does not tell, the function runs."""
        shrinks: dict[int, set[Fraction]] = {}
        operands = [x for x in args if isinstance(x, Tensor)]
        for shape, operand in zip(self.work.operands, operands, strict=True):
            for extent, local in zip(shape, operand.shape, strict=True):
                shrinks.setdefault(extent, set()).add(Fraction(int(local), extent or 1))
        shapes = []
        for shape, _ in self.work.outputs:
            factors = [shrinks.get(extent, set()) for extent in shape]
            if any(len(factor) != 1 for factor in factors):
                return self._run_shapes(args)
            local_extents = [extent * next(iter(factor)) for extent, factor in zip(shape, factors)]
            if any(extent.denominator > 1 for extent in local_extents):
                return self._run_shapes(args)
            shapes.append(tuple(map(int, local_extents)))
        return shapes

    def _run_shapes(self, args: Sequence[Any]) -> list[tuple[int, ...]]:
        meta = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in args]
        with torch.no_grad(), torch.device("meta"):
            return [tuple(x.shape) for x in self.run(meta)]


class ModuleCall:
    """A module's ``forward`` as a function of its parameters and buffers, in the order of ``names``, and its
    arguments."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], names: tuple[str, ...]) -> None:
        self.module, self.names = module, names
        self.__wrapped__ = forward  # by which ``inspect`` finds the source
        self.__name__, self.__module__ = forward.__qualname__.replace(".", "_"), forward.__module__
        self.__qualname__ = forward.__qualname__

    def __call__(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` on a copy of the module that has these tensors. ValueError if it sets an attribute, which the
        module would not keep."""
        copies: dict[int, nn.Module] = {}
        module = _copy_with(self.module, "", dict(zip(self.names, tensors, strict=True)), copies)
        before = [_attributes(one) for one in copies.values()]
        returned = self.__wrapped__(module, *args, **kwargs)
        if before != [_attributes(one) for one in copies.values()]:
            raise ValueError(
                f"a forward that is one op leaves its module as it is, but {self.__qualname__} sets attributes"
            )
        return returned

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleCall) and self.module is other.module

    def __hash__(self) -> int:
        return id(self.module)


def _copy_with(module: nn.Module, path: str, tensors: Mapping[str, Tensor], copies: dict[int, nn.Module]) -> nn.Module:
    """A copy of the module at ``path``, and of those below it, with these tensors, by the first of their names."""
    if id(module) in copies:
        return copies[id(module)]
    copies[id(module)] = made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers"):
        held = module.__dict__[table].items()
        made.__dict__[table] = {name: x if x is None else tensors.get(path + name, x) for name, x in held}
    children = module._modules.items()
    made.__dict__["_modules"] = {
        name: child if child is None else _copy_with(child, f"{path}{name}.", tensors, copies)
        for name, child in children
    }
    return made


def _attributes(module: nn.Module) -> list[tuple[str, int]]:
    tables = [module.__dict__, *(module.__dict__[name] for name in ("_parameters", "_buffers", "_modules"))]
    return [(name, id(value)) for table in tables for name, value in table.items()]


class _StandIn(torch.autograd.Function):
    """The types and the kept bytes of a loop, without its work."""

    @staticmethod
    def forward(ctx: Any, loop: LoopFunction, args: tuple[Any, ...], *operands: Tensor) -> tuple[Tensor, ...]:
        shapes, first = loop.output_shapes(args), operands[0]
        kept = first.new_empty(int(loop.work.saved_bytes * loop.work.share(shapes)), dtype=torch.uint8)
        ctx.save_for_backward(kept, *(operands[k] for k in loop.work.saved_operands))
        ctx.types = [(x.shape, x.dtype) for x in operands]
        ctx.like = first.detach()
        return tuple(first.new_empty(s, dtype=dtype) for s, (_, dtype) in zip(shapes, loop.work.outputs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = (ctx.like.new_empty(shape, dtype=dtype) for shape, dtype in ctx.types)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(x if needed else None for x, needed in zip(made, wanted))
