"""Backwards that the user wrote: they become ops of the graph where that is possible, else capture refuses them.

``torch.export`` records a model's forward. Planning and training then differentiate the recorded ops, so a backward
that the user wrote would silently be replaced. While ``CustomBackwards`` is active:

- A call of a ``torch.autograd.Function`` becomes one op (``custom_function``) that runs the user's forward and
  backward. The ``forward`` of every existing subclass is replaced by one that calls ``_record``, since user code may
  have bound ``apply`` before; ``Function.apply`` finds classes that the model's forward defines.
- ``torch.utils.checkpoint(use_reentrant=True)`` runs its function as it is: the plan decides what to recompute.
- ``x.data`` is ``x.detach()``, which has the same gradients, and an assignment to it a change in place.
- Hooks on tensors, and derivatives that the forward itself takes, are refused by the line that asks for them.

``refuse_hooks`` refuses what a model carries: backward hooks on its parameters and modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError
from ..ir.custom_function import FUNCTION_OP, CustomFunction, forget_types, set_types
from .source_errors import current_line_error

__all__ = ["CustomBackwards", "Unchanged", "is_literal", "next_number", "refuse_hooks"]

_NUMBERS = itertools.count()  # never twice: fake tensors remember what an op gave
_LITERALS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_FUNCTION_INSTEAD = "write it as a torch.autograd.Function, whose backward is kept"
_REENTRANT = torch.utils.checkpoint.CheckpointFunction


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a backward hook lies on a parameter or a module of ``model``."""
    for name, parameter in model.named_parameters():
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, attribute, None):
                raise CaptureError(
                    f"gradients are those of the model's code, but got a hook on parameter {name!r}, which would not "
                    "run; remove it (its handle has remove()), and do what it does in the optimizer's step, or "
                    + _FUNCTION_INSTEAD
                )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"gradients are those of the model's code, but got a backward hook on module {path or 'model'!r}, "
                f"which would not run; remove it (its handle has remove()), or {_FUNCTION_INSTEAD}"
            )
    hooks = torch.nn.modules.module
    if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
        raise CaptureError(
            "gradients are those of the model's code, but got a backward hook on all modules, which would not run; "
            "remove it (its handle has remove())"
        )


class CustomBackwards:
    """The context of one export, in which custom backwards are recorded or refused.

    training: True if gradients matter; else derivatives inside forward are refused, and nothing else is changed.
    calls: the target of each recorded op, by its number.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.calls: dict[int, CustomFunction] = {}
        self.arguments: dict[int, list[Any]] = {}  # as given; tensors are the op's operands, in order
        self.undo: list[tuple[Any, str, Any]] = []
        self.seen: set[type] = set()
        self.running = False  # True while a Function runs on fakes, to learn the types of its outputs

    def __enter__(self) -> CustomBackwards:
        derivatives = ((torch.autograd, "grad"), (torch.autograd, "backward"), (Tensor, "backward"))
        for owner, name in derivatives:
            advice = "take it with torch.func.jvp, or outside of forward"
            what = f"{name}: the forward takes a derivative by autograd"
            self._set(owner, name, self._refused(getattr(owner, name), what, advice))
        if not self.training:
            return self
        for kind in _subclasses(Function):
            self._lead(kind)
        original = vars(Function)["apply"].__func__

        def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            self._lead(kind)
            return original(kind, *args, **kwargs)

        self._set(Function, "apply", classmethod(apply))
        self._set(Tensor, "data", self._traced_data())
        self._set(_REENTRANT, "apply", classmethod(_run_checkpointed))
        hooked = (
            (Tensor, "register_hook"),
            (Tensor, "register_post_accumulate_grad_hook"),
            (torch.autograd.graph, "register_multi_grad_hook"),
        )
        for owner, name in hooked:
            what = f"{name}: a hook on a gradient"
            self._set(owner, name, self._refused(getattr(owner, name), what, _FUNCTION_INSTEAD))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, before in reversed(self.undo):
            delattr(owner, name) if before is None else setattr(owner, name, before)
        forget_types(self.calls)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self.undo.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def _refused(self, original: Callable[..., Any], what: str, advice: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if self.running:
                return original(*args, **kwargs)
            raise current_line_error(what, advice)

        return refused

    def _traced_data(self) -> property:
        """``x.data`` as ``x.detach()``, and what is assigned to it copied: an export loses sight of what the attribute
        gives and takes."""
        plain: Any = Tensor.data

        def read(x: Tensor) -> Tensor:
            return x.detach() if isinstance(x, FakeTensor) and not self.running else plain.__get__(x)

        def write(x: Tensor, value: Tensor) -> None:
            if not isinstance(x, FakeTensor) or self.running:
                plain.__set__(x, value)
            elif isinstance(x, nn.Parameter):
                raise current_line_error(
                    "a weight is changed by forward", "make it a buffer, or change it in the training loop"
                )
            elif (x.shape, x.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    x.copy_(value)
            else:
                raise current_line_error("data of another type is assigned to a tensor", "make a new tensor of it")

        return property(read, write)

    # ---- Functions

    def _lead(self, kind: type[Function]) -> None:
        """Replace ``kind.forward`` so that calls go to ``_record`` from now on."""
        ours = __name__.partition(".")[0]
        if kind in self.seen or kind.__module__.partition(".")[0] in ("torch", ours):
            return
        self.seen.add(kind)
        forward: Any = kind.forward
        has_context = kind.setup_context is Function.setup_context  # else forward takes the arguments alone

        def led(*given: Any) -> Any:
            if self.running:
                return forward(*given)
            context, args = (given[0], given[1:]) if has_context else (None, given)
            return self._record(kind, context, list(args))

        led.__wrapped__ = forward  # type: ignore[attr-defined]
        self._set(kind, "forward", staticmethod(led))

    def _record(self, kind: type[Function], context: Any, args: list[Any]) -> Any:
        """Record a call as one op of the program; return the op's outputs in the structure of the Function's result."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not tensors:
            raise current_line_error(
                f"{kind.__qualname__}: a Function without tensors", "pass it the tensors that it reads"
            )
        returned, outputs = self._run(kind, args)
        objects = {i: x for i, x in enumerate(args) if not isinstance(x, Tensor) and not is_literal(x)}
        number = next_number()
        self.calls[number] = CustomFunction(kind, objects, len(self.calls))
        self.arguments[number] = [None if i in objects else x for i, x in enumerate(args)]
        set_types(number, outputs)
        results = FUNCTION_OP(tensors, number)
        fixed = [x for x, like in zip(results, outputs, strict=True) if not like.requires_grad]
        if context is not None and fixed:
            context.mark_non_differentiable(*fixed)
        op_outputs = iter(results)
        if isinstance(returned, Tensor):
            return next(op_outputs)
        return tuple(next(op_outputs) if isinstance(x, Tensor) else x for x in returned)

    def _run(self, kind: type[Function], args: list[Any]) -> tuple[Any, list[Tensor]]:
        """Run the Function and its backward on fakes of these arguments: its return value, and the tensors in it.
        CaptureError if it does something that one op cannot represent."""
        name = kind.__qualname__
        self.running = True
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                with mode:
                    fakes = [_like(x) if isinstance(x, Tensor) else x for x in args]
                given = Unchanged([x for x in fakes if isinstance(x, Tensor)])
                with mode, _FunctionAudit(name, mode, given):
                    returned: Any = kind.apply(*fakes)
                    several = returned if isinstance(returned, tuple | list) else (returned,)
                    outputs = [x for x in several if isinstance(x, Tensor)]
                    tracked = [x for x in outputs if x.requires_grad]
                    if tracked:
                        leaves = [x for x in fakes if isinstance(x, Tensor) and x.requires_grad]
                        ones = [torch.ones_like(x) for x in tracked]
                        torch.autograd.grad(tracked, leaves, ones, allow_unused=True)
        finally:
            self.running = False
        if any(not isinstance(x, Tensor | type(None)) for x in several):
            raise current_line_error(
                f"{name}: a Function that returns something else than tensors", "return tensors or None"
            )
        if given.changed():
            raise current_line_error(
                f"{name}: a Function that changes its argument in place", "let it work on a clone()"
            )
        return returned, outputs


class Unchanged:
    """A watch over tensors that code must not change, by ops that a dispatch mode tells of. Versions alone do not show
    what is written through ``x.data``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.written = tensors, set[int]()
        self.before = [(x._version, x.untyped_storage()._cdata) for x in tensors]

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take note of the tensors that an op writes to."""
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else kwargs.get(argument.name)
                    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
                    self.written.update(x.untyped_storage()._cdata for x in tensors)

    def changed(self) -> list[int]:
        """The tensors that were changed, by their numbers."""
        return [
            number
            for number, (x, (version, storage)) in enumerate(zip(self.tensors, self.before, strict=True))
            if x._version != version or x.untyped_storage()._cdata != storage or storage in self.written
        ]


class _FunctionAudit(TorchDispatchMode):
    """A dispatch mode that refuses two kinds of ops inside a Function: random ones, which would draw other numbers
    where tensors are split, and reads of the model's tensors that are no arguments, which training would not update."""

    def __init__(self, name: str, mode: FakeTensorMode, given: Unchanged) -> None:
        super().__init__()
        self.name, self.mode, self.given = name, mode, given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.given.note(func, args, kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise current_line_error(
                f"{self.name}: a Function that draws random numbers ({func})",
                "draw them outside of forward and pass them in",
            )
        for x in pytree.tree_leaves((args, kwargs)):
            of_the_model = isinstance(x, nn.Parameter) or (isinstance(x, FakeTensor) and x.fake_mode is not self.mode)
            if of_the_model:
                raise current_line_error(
                    f"{self.name}: a Function that reads a tensor of the model which is not its argument",
                    "pass it that tensor",
                )
        return func(*args, **(kwargs or {}))


def _run_checkpointed(kind: type, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Run a checkpointed function without the checkpoint: the plan decides what is computed again."""
    return function(*args)


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def next_number() -> int:
    """A number for the next call that becomes one op."""
    return next(_NUMBERS)


def is_literal(value: Any) -> bool:
    """True if a graph can hold the value as an argument."""
    if isinstance(value, list | tuple):
        return all(map(is_literal, value))
    return isinstance(value, _LITERALS)


def _like(x: Tensor) -> Tensor:
    """A tensor of the same type without data; no leaf, since autograd forbids leaves to be changed in place."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", requires_grad=x.requires_grad).clone()
