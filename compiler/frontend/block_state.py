"""The state of a block as a comparable value: everything but its arguments that its Python code can depend on.

A block's result follows from its code, the module that it runs on, its arguments and the state of the process.
``describe`` turns the module into a value. Equal values mean equal classes (so equal code), equal attributes, and
tensors of equal shapes, dtypes and flags, tied in the same way, in all submodules. ``Audit`` reads the bytecode of
every function that the classes can reach. It refuses code that could carry state from one call to the next: assignments
to globals, to enclosing scopes and to objects other than ``self``, and reads of global containers, tensors and unknown
objects. It notes every other global that the code reads, so that a later call can check that the global is the same.
The code of ``TRUSTED`` packages is not read: it keeps its state in modules and arguments. A module that cannot be
compared raises ``UnprovableError``.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import UnprovableError

__all__ = ["Audit", "BlockState", "Tensors", "canonical", "describe"]


TRUSTED = frozenset(
    {"torch", "transformers", "builtins", "_operator", "math", "operator", "functools", "typing", "itertools", "enum"}
    | {"warnings", "logging", "abc", "contextlib", "dataclasses", "types", "collections"}
)
_REFUSED_BUILTINS = frozenset(
    {"exec", "eval", "globals", "vars", "locals", "setattr", "delattr", "open", "input", "__import__"}
)
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_TORCH_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_HOOK_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_compiled_call_impl",
)
_MODULE_BOOKKEEPING = frozenset(vars(nn.Module())) - {
    "training"
}  # nn.Module's bookkeeping, none of which forward reads


def canonical(value: Any, seen: dict[int, int] | None = None, code: list[Any] | None = None) -> Any:
    """A hashable value, equal for values that no code can tell apart; UnprovableError if that cannot be decided.

    seen: order of the objects met before. code: collects the functions and classes in ``value``, for ``Audit``.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES or kind in _TORCH_TYPES:
        return kind, repr(value) if kind in (float, complex) else value
    seen, code = {} if seen is None else seen, [] if code is None else code
    if kind is FunctionType or kind is BuiltinFunctionType or isinstance(value, type | ModuleType | enum.Enum):
        code.append(value)
        return "is", id(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if kind in (tuple, list, torch.Size):
        return kind, tuple([canonical(item, seen, code) for item in value])
    if kind in (dict, OrderedDict):
        return kind, tuple([(canonical(k, seen, code), canonical(item, seen, code)) for k, item in value.items()])
    if kind in (set, frozenset):
        return kind, frozenset([canonical(item, None, code) for item in value])
    if isinstance(value, torch.Tensor | nn.Module) or not hasattr(value, "__dict__") or _root_package(kind) == "torch":
        raise UnprovableError(f"a {kind.__name__}")
    if any(getattr(base, "__slots__", ()) for base in kind.__mro__) or isinstance(value, dict | list | set | tuple):
        raise UnprovableError(f"a {kind.__name__}")
    code.append(kind)
    return kind, canonical(vars(value), seen, code)


class BlockState:
    """The state of a block, by ``describe``.

    core: everything that must be equal. watched: by (path, name), the attributes that may differ if the code does not
    read them. code: the classes and functions among the attributes.
    """

    def __init__(self, core: Any, watched: dict[tuple[str, str], Any], code: list[Any]) -> None:
        self.core, self.watched, self.code = core, watched, code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockState) and self.core == other.core and self.watched == other.watched

    __hash__ = None  # type: ignore[assignment]


Tensors = tuple[dict[str, Any], dict[str, Any]]  # the parameters and buffers of a module, by name


def describe(
    members: list[tuple[str, nn.Module]], left_out: Mapping[type, frozenset[str]], tensors_of: Mapping[int, Tensors]
) -> BlockState:
    """The state of a block. members: its modules (itself first) by path below it, each once per path; left_out: by
    class, the attributes that go into ``watched``; tensors_of: the tensors of each module, by the id of its ``vars``.

    UnprovableError where a module has hooks or its own ``forward``, or an attribute that cannot be compared.
    """
    tensors: dict[int, int] = {}  # tied tensors and shared modules by order of appearance
    seen: dict[int, int] = {}
    core: list[Any] = []
    watched: dict[tuple[str, str], Any] = {}
    code: list[Any] = []
    for path, module in members:
        table, kind = vars(module), type(module)
        if "forward" in table or any(table.get(name) for name in _HOOK_ATTRIBUTES):
            raise UnprovableError(f"hooks of a {kind.__name__}")
        core.append((path, kind, module.training, tensors.setdefault(id(module), len(tensors))))
        for held in tensors_of[id(table)]:
            for name, tensor in held.items():
                core.append((name, None if tensor is None else _tensor(tensor, tensors)))
        apart = left_out.get(kind, frozenset())
        for name, value in table.items():
            if name in apart:
                watched[path, name] = (type(value), value)
            elif name not in _MODULE_BOOKKEEPING:
                core.append((name, canonical(value, seen, code)))
        code.append(kind)
    return BlockState(core, watched, code)


def _tensor(tensor: torch.Tensor, known: dict[int, int]) -> Any:
    order = known.setdefault(id(tensor), len(known))
    return order, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _root_package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


# ---- what code can reach


class Audit:
    """A reader of bytecode that refuses code with state of its own. It reads each class once.

    reads: (namespace, name, value) of every global that the code reads. instead: the original of each function that is
    replaced during a capture, to be read in its place (None: it was a builtin).
    """

    def __init__(self) -> None:
        self.instead: dict[Any, Any] = {}
        self.reads: list[tuple[Mapping[str, Any], str, Any]] = []
        self.verdicts: dict[int, str] = {}
        self.done: set[int] = set()
        self.visited: list[Any] = []  # keeps the values alive, so that no other one gets their id

    def require(self, code: list[Any]) -> None:
        """UnprovableError unless none of these classes and functions can carry state between calls, but for attributes
        of ``self``."""
        for item in code:
            if id(item) not in self.verdicts:
                self.verdicts[id(item)] = ""
                try:
                    self._value(item)
                except UnprovableError as refused:
                    self.verdicts[id(item)] = str(refused)
            if self.verdicts[id(item)]:
                raise UnprovableError(self.verdicts[id(item)])

    def unchanged(self) -> bool:
        """True if all globals that the code reads are still bound to the same values."""
        return all(space.get(name, self) is value for space, name, value in self.reads)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _root_package(base) in TRUSTED or not self._first(base):
                continue
            for name, value in vars(base).items():
                if isinstance(value, property):
                    for accessor in (value.fget, value.fset, value.fdel):
                        self._value(accessor)
                elif isinstance(value, staticmethod | classmethod):
                    self._value(value.__func__)
                elif isinstance(value, FunctionType):
                    self._function(self._original(value))
                elif not name.startswith("__") and name != "_abc_impl" and not hasattr(type(value), "__get__"):
                    self._read(vars(base), name)

    def _first(self, value: Any) -> bool:
        if id(value) in self.done:
            return False
        self.done.add(id(value))
        self.visited.append(value)
        return True

    def _read(self, space: Mapping[str, Any] | MappingProxyType[str, Any], name: str) -> Any:
        value = space[name]
        self.reads.append((space, name, value))
        self._value(value)
        return value

    def _value(self, value: Any) -> None:
        """UnprovableError if reading ``value`` from outside of a block could give something else at another time."""
        value = self._original(value)
        kind = type(value)
        if kind in _PLAIN_TYPES or kind in _TORCH_TYPES or isinstance(value, enum.Enum | ModuleType):
            return
        if kind is tuple:
            for item in value:
                self._value(item)
        elif kind is FunctionType:
            self._function(value)
        elif isinstance(value, type):
            if _root_package(value) not in TRUSTED:
                self._class(value)
        elif kind is functools.partial:
            self._value((value.func, *value.args, *value.keywords.values()))
        elif hasattr(value, "__wrapped__") and kind.__module__ == "functools":  # a cache of a pure function
            self._value(value.__wrapped__)
        elif isinstance(value, torch.Tensor | nn.Module | torch.Generator) or not self._trusted(value):
            raise UnprovableError(f"a global {kind.__name__}")

    def _original(self, value: Any) -> Any:
        while isinstance(value, FunctionType | type) and value in self.instead:
            value = self.instead[value]
        return value

    def _trusted(self, value: Any) -> bool:
        if isinstance(value, dict | list | set | bytearray) or type(value).__module__ == "collections":
            return False
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            named = owner is None or isinstance(owner, ModuleType | type)
            home = value.__module__ or getattr(owner, "__module__", None) or getattr(owner, "__name__", "")
            return named and str(home).partition(".")[0] in TRUSTED
        return _root_package(type(value)) in TRUSTED and _root_package(type(value)) != "builtins"

    def _function(self, function: Any) -> None:
        if _root_package(function) in TRUSTED and function.__globals__.get("__name__", "").partition(".")[0] in TRUSTED:
            return
        if not self._first(function):
            return
        code = function.__code__
        free = set(code.co_freevars)
        for cell, name in zip(function.__closure__ or (), code.co_freevars, strict=True):
            if name != "__class__":
                self._value(cell.cell_contents)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(default)
        for nested in _codes(code):
            self._code(nested, function.__globals__, free)

    def _code(self, code: CodeType, space: Mapping[str, Any], outer: set[str]) -> None:
        instructions = list(dis.get_instructions(code))
        first_argument = code.co_varnames[0] if code.co_argcount else ""
        for index, step in enumerate(instructions):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
                raise UnprovableError(f"{step.opname} in {code.co_qualname}")
            if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in outer:
                raise UnprovableError(f"nonlocal {step.argval} in {code.co_qualname}")
            if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                before = instructions[index - 1]
                on_self = before.opname == "LOAD_FAST" and before.argval == first_argument == "self"
                if not on_self:
                    raise UnprovableError(f"an assignment to .{step.argval} in {code.co_qualname}")
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._global(str(step.argval), space, instructions[index + 1 :])

    def _global(self, name: str, space: Mapping[str, Any], after: list[Any]) -> None:
        if name not in space:
            if name in _REFUSED_BUILTINS or not hasattr(builtins, name):
                raise UnprovableError(f"the name {name}")
            return
        value = self._read(space, name)
        for step in after:
            if not isinstance(value, ModuleType) or value.__name__.partition(".")[0] in TRUSTED:
                return
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or step.argval not in vars(value):
                raise UnprovableError(f"the module {value.__name__}")
            value = self._read(vars(value), step.argval)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
