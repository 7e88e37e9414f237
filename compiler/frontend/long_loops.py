"""Long Python loops, over time for example, become one op: the function that contains them is not traced.

``torch.export`` unrolls every loop. While ``LongLoops`` is active, each function with a ``for … in range(…)`` in the
files of the model's modules is led through ``_call``, and ``range`` in these files is ``_Range``, which interrupts the
function where a loop has ``LONG`` iterations or more. The call is then recorded as one op (``ir.long_loop``) that runs
the function as it is. So is a module whose ``forward`` loops as often as one of its inputs is long: its parameters and
buffers are operands of the op. A trial of the function on tensors without data tells the types of its results, its
FLOPs and what it keeps for its backward. A function that cannot be one op is traced: if it changes an argument, reads
tensors of the model that are not its arguments, draws random numbers, or returns an argument.

A loop over the batch is refused by its line: it would be as long as the fictitious batch of a capture.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from ..ir.custom_function import FUNCTION_OP, set_types
from ..ir.graph import PRIME
from ..ir.long_loop import LoopFunction, LoopWork, ModuleCall
from .custom_backward import CustomBackwards, Unchanged, is_literal, next_number
from .source_errors import current_line_error

__all__ = ["LONG", "LongLoops", "not_exporting"]

#: iterations of a loop that is not traced
LONG = 32


class _Interrupt(BaseException):
    """Raised at the head of a long loop, past the handlers of the user's code."""


class _NotOneOpError(Exception):
    """Raised in a trial of a function that cannot be one op."""


class _Range(type):
    """The class of the stand-in for ``range``, which asks ``LongLoops`` before it gives a range."""

    loops: LongLoops

    def __call__(cls, *bounds: Any) -> range:
        return cls.loops.checked(range(*bounds))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, range)


@dataclass(frozen=True)
class _Trial:
    """The result of a function's trial. returned: per leaf of its result, the type ``Tensor`` or the value itself."""

    work: LoopWork
    returned: list[Any]
    structure: Any


class LongLoops:
    """The context of one export, in which functions with long loops become ops.

    instead: by replaced function, the one to be read in its place when code is compared (None: a builtin).
    """

    def __init__(self, model: nn.Module, backwards: CustomBackwards) -> None:
        self.model, self.backwards = model, backwards
        self.instead: dict[Any, Any] = {}
        self.undo: list[Callable[[], None]] = []
        self.trials: dict[Any, _Trial | None] = {}
        #: of the calls that are running, innermost last: the lengths of loops that are long (None: all from LONG)
        self.watched: list[frozenset[int] | None] = []

    def __enter__(self) -> LongLoops:
        kinds: list[Any] = [kind for kind in dict.fromkeys(map(type, self.model.modules())) if not _is_torch(kind)]
        spaces = [vars(sys.modules[name]) for name in {kind.__module__: None for kind in kinds} if name in sys.modules]
        stand_in = _Range("range", (), {"loops": self})
        self.instead[stand_in] = None
        leads: dict[Any, Any] = {}

        def led(function: Any, lead: Callable[[Any], Any]) -> Any:
            """The function that leads to this one, if it has a loop of its own, else itself."""
            if function in self.instead:  # a base class's
                return function
            looping = [inner for inner in _unwrapped(function) if not _is_torch(inner) and _calls_range(inner)]
            if looping and function not in leads:
                leads[function] = lead(function)
                self.instead[leads[function]] = function
                spaces.extend(inner.__globals__ for inner in looping)
            return leads[function] if looping else function

        for space in [*spaces, *(vars(module) for module in self.model.modules())]:
            for name, value in list(space.items()):
                if isinstance(value, FunctionType) and led(value, self._lead) is not value:
                    self._set(space, name, leads[value])
        for kind in kinds:
            if led(kind.forward, self._lead_module) is not kind.forward:
                self._set_attribute(kind, "forward", leads[kind.forward])
        for space in spaces:
            if space.get("range") is not stand_in:
                self._set(space, "range", stand_in)
        for owner, name in ((Tensor, "__iter__"), (Tensor, "unbind"), (torch, "unbind")):
            self._set_attribute(owner, name, self._checked_unbind(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self.undo):
            undo()

    def _set(self, space: dict[str, Any], name: str, value: Any) -> None:
        if name in space:
            self.undo.append(functools.partial(space.__setitem__, name, space[name]))
        else:
            self.undo.append(functools.partial(space.__delitem__, name))
        space[name] = value

    def _set_attribute(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)
        restore = functools.partial(delattr, owner, name) if before is None else None
        self.undo.append(restore or functools.partial(setattr, owner, name, before))
        setattr(owner, name, value)

    # ---- loops

    def checked(self, steps: range) -> range:
        """These steps; CaptureError where they go over the batch, an interrupt where they are many."""
        _refuse_batch(len(steps))
        if self.watched and len(steps) >= LONG:
            lengths = self.watched[-1]
            if lengths is None or len(steps) in lengths:
                raise _Interrupt
        return steps

    @staticmethod
    def _checked_unbind(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unbind(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, FakeTensor) and x.dim():
                _refuse_batch(x.shape[int(args[0] if args else kwargs.get("dim", 0))])
            return original(x, *args, **kwargs)

        return unbind

    def _lead(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def led(*args: Any, **kwargs: Any) -> Any:
            return self._call(function, args, kwargs, None, lambda: function(*args, **kwargs))

        return led

    def _lead_module(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def led(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            lengths = frozenset(extent - less for x in inputs for extent in x.shape for less in (0, 1))
            call = ModuleCall(module, forward, tuple(tensors))
            given = list(tensors.values()), *args
            return self._call(call, given, kwargs, lengths, lambda: forward(module, *args, **kwargs))

        return led

    def _call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, lengths: frozenset[int] | None,
        run: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """The result of ``run``, which calls ``function`` with these arguments, or of the op that stands for it."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(x, FakeTensor) for x in leaves):
            return run()
        try:
            with self._watching([*self.watched, lengths]):
                return run()
        except _Interrupt:
            pass
        key = function, structure, tuple(map(_key, leaves))
        if key not in self.trials:
            with self._watching([]):
                self.trials[key] = _trial(function, structure, leaves)
        trial = self.trials[key]
        if trial is None:
            with self._watching([]):
                return run()
        return self._record(function, structure, leaves, trial)

    def unwatched(self) -> AbstractContextManager[None]:
        """A block in which no loop is interrupted."""
        return self._watching([])

    @contextmanager
    def _watching(self, watched: list[frozenset[int] | None]) -> Iterator[None]:
        before, self.watched = self.watched, watched
        try:
            yield
        finally:
            self.watched = before

    def _record(self, function: Callable[..., Any], structure: Any, leaves: list[Any], trial: _Trial) -> Any:
        objects = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tensor) and not is_literal(x)}
        number, outputs = next_number(), trial.work.outputs
        calls = self.backwards.calls
        calls[number] = LoopFunction(function, structure, objects, len(calls), trial.work)
        self.backwards.arguments[number] = [None if i in objects else x for i, x in enumerate(leaves)]
        set_types(number, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in outputs])
        results = iter(FUNCTION_OP([x for x in leaves if isinstance(x, Tensor)], number))
        flat = [next(results) if leaf is Tensor else leaf for leaf in trial.returned]
        return pytree.tree_unflatten(flat, trial.structure)


def _refuse_batch(steps: int) -> None:
    if steps and not steps % PRIME:
        raise current_line_error(
            "a Python loop over the batch", "write it as tensor ops, or say with batch_dims= that this dim is no batch"
        )


def _is_torch(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] == "torch"


def _unwrapped(function: Any) -> Iterator[FunctionType]:
    """The function and those that it decorates."""
    while isinstance(function, FunctionType):
        yield function
        function = getattr(function, "__wrapped__", None)


def _calls_range(function: FunctionType) -> bool:
    """True if the function's own code, functions in it included, calls ``range``."""
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any("range" in code.co_names for code in codes)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    return (type(leaf), leaf) if is_literal(leaf) and not isinstance(leaf, list) else id(leaf)


# ---- trials


def _trial(function: Callable[..., Any], structure: Any, leaves: list[Any]) -> _Trial | None:
    """The results of the function for such arguments, by a run on tensors without data; None if it cannot be one op."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        made = [_without_data(x) if isinstance(x, Tensor) else x for x in leaves]
    operands = [x for x in made if isinstance(x, Tensor)]
    given = Unchanged(operands)
    own = {x.untyped_storage()._cdata: k for k, x in enumerate(operands)}
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so that no other storage gets such an address

    def keep(x: Tensor) -> None:  # autograd itself then keeps nothing
        kept.setdefault(x.untyped_storage()._cdata, x)

    args, kwargs = pytree.tree_unflatten(made, structure)
    try:
        with (
            _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad(), not_exporting(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), _Meter(given) as meter,
        ):  # fmt: skip
            returned = function(*args, **kwargs)
    except Exception:  # the user's code, on tensors that it was not written for
        return None
    flat, result_structure = pytree.tree_flatten(returned)
    outputs = [x for x in flat if isinstance(x, Tensor)]
    if given.changed() or any(x.untyped_storage()._cdata in own for x in outputs):
        return None
    if not outputs or not all(isinstance(x, Tensor) or is_literal(x) for x in flat):
        return None
    work = LoopWork(
        tuple(tuple(x.shape) for x in operands),
        tuple((tuple(x.shape), x.dtype) for x in outputs),
        meter.flops,
        float(sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in own)),
        tuple(sorted(own[address] for address in kept if address in own)),
    )
    return _Trial(work, [Tensor if isinstance(x, Tensor) else x for x in flat], result_structure)


def _without_data(x: Tensor) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
    return made.view_as(made) if x.requires_grad else made


@contextmanager
def not_exporting() -> Iterator[None]:
    """Let the code take the way that it takes in training, and modules be called as they are."""
    flags: Any = torch.compiler
    module: Any = nn.Module
    before = flags._is_exporting_flag, flags._is_compiling_flag
    traced = module.__call__, module.__getattr__
    flags._is_exporting_flag = flags._is_compiling_flag = False
    module.__call__, module.__getattr__ = symbolic_trace._orig_module_call, symbolic_trace._orig_module_getattr
    try:
        yield
    finally:
        module.__call__, module.__getattr__ = traced
        flags._is_exporting_flag, flags._is_compiling_flag = before


class _Meter(TorchDispatchMode):
    """A dispatch mode that counts FLOPs, one per element of an op that is no product, makes new tensors without data,
    and refuses what one op cannot represent. An op that has run on such tensors already does not run again."""

    def __init__(self, given: Unchanged) -> None:
        super().__init__()
        self.given, self.flops = given, 0.0
        self.known: dict[Any, tuple[float, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        self.given.note(func, args, kwargs)
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        key = func, *map(_signature, args), *map(_signature, kwargs.items())
        known = self.known.get(key)
        if known is not None:
            flops, (size, stride, dtype) = known
            self.flops += flops
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NotOneOpError("random numbers")
        out = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        flops = count(*args, **kwargs, out_val=out) if count else float(sum(x.numel() for x in tensors))
        self.flops += flops
        if isinstance(out, Tensor):
            self.known[key] = flops, (out.shape, out.stride(), out.dtype)
        return out


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor | nn.Parameter):
            raise _NotOneOpError("a tensor of the model that is no argument")
        return value.shape, value.stride(), value.dtype
    return tuple(map(_signature, value)) if isinstance(value, list | tuple) else (type(value), value)
