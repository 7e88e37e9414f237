"""A submodule that cannot be traced, as one op of a graph: it runs the user's own code under eager autograd.

While a model is captured (``frontend.opaque_modules``), a call of such a module becomes one node whose target is an
``OpaqueModule``. The module's parameters and buffers are operands of the op, before the arguments of its ``forward``,
so they are placed, sharded, gathered and summed as those of other ops. The op may cut the batch, where a trial
confirmed it; else every device runs it whole. On tensors without data a stand-in takes its place (``long_loop``).

A module that draws random numbers is never cut. It draws from PyTorch's generator, seeded by (seed, step, microbatch,
op), so every device, every plan of as many microbatches and every recompute draws the same.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OpaqueError
from .custom_function import source_digest
from .graph import PRIME, Graph
from .long_loop import LoopFunction, LoopWork
from .ops.local_ops import mask_key
from .spec import Placement

__all__ = ["MARK", "ModuleCopy", "OpaqueModule", "opaque_notes", "seeded"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
#: the attribute of a module that a user marked
MARK = "_meshwright_opaque"
_UNREAD = (frozenset(vars(nn.Module())) | {MARK}) - {"training"}  # attributes that the user's code does not read
_RANDOM = 1 << 32  # the first op number of random opaque modules; dropouts count from 0

AxisPairs = tuple[tuple[Placement, Placement], ...]


class OpaqueModule(LoopFunction):
    """The target of a graph node that runs a module; the node's args are the leaves of its tensors and arguments.

    path: of the module in the model. reason: why it is not traced. random: True if it draws random numbers. split: the
    placements of operands and outputs where the batch is cut; None: it is never cut, because ``whole_reason``. batch:
    the extent of the capture, at which ``work`` is counted. assumed: what the work was counted on.
    """

    __name__ = "opaque_module"

    def __init__(
        self, module: ModuleCopy, structure: Any, objects: Mapping[int, Any], number: int, work: LoopWork
    ) -> None:
        super().__init__(module, structure, objects, number, work)
        self.op_name = f"meshwright.opaque_module.{module.__module__}.{module.__qualname__}@{module.digest}"
        if self.objects:
            self.op_name += f"#{number}"
        self.path = self.reason = self.assumed = self.whole_reason = ""
        self.random = False
        self.split: tuple[AxisPairs, AxisPairs] | None = None
        self.number = number

    def numbered(self, number: int) -> OpaqueModule:
        """This op with random numbers of its own."""
        made = copy.copy(self)
        made.number = number
        return made

    def run(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors that the module returns. Every operand with a gradient gets one, zeros where the code did not
        use it, so that all devices sum the same gradients."""
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        if places and torch.is_grad_enabled():
            joined = _ZeroGradients.apply(*(args[i] for i in places))
            table = dict(zip(places, joined, strict=True))
            args = [table.get(i, x) for i, x in enumerate(args)]
        with seeded(mask_key(_RANDOM + self.number), args) if self.random else nullcontext():
            results = super().run(args)
        shapes, expected = [tuple(x.shape) for x in results], self.output_shapes(args)
        if shapes != expected:
            raise OpaqueError(
                self.path, f"its results have shapes {shapes} for these values, and not {expected}, as when it was "
                "captured; return tensors of fixed shape"
            )  # fmt: skip
        return results

    def output_shapes(self, args: Sequence[Any]) -> list[tuple[int, ...]]:
        """The shapes that the outputs have for these leaves: multiples of the batch shrink as the operands' do."""
        operands = [x for x in args if isinstance(x, Tensor)]
        share = Fraction(1)
        for shape, operand in zip(self.work.operands, operands, strict=True):
            for extent, local in zip(shape, operand.shape, strict=True):
                if extent and extent % PRIME == 0:
                    share = Fraction(int(local), extent)
        return [
            tuple(int(extent * share) if extent % PRIME == 0 else extent for extent in shape)
            for shape, _ in self.work.outputs
        ]

    def _identity(self) -> tuple[Any, ...]:
        objects = tuple((position, id(value)) for position, value in self.objects.items())
        return self.op_name, objects, self.number if self.random else -1, self.work.operands


class _ZeroGradients(torch.autograd.Function):
    """The tensors themselves; gradients that nothing gives become zeros."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


@contextmanager
def seeded(key: int, tensors: Sequence[Any]) -> Iterator[None]:
    """Seed PyTorch's generators for a block, those of the tensors' devices included; restore them afterwards."""
    devices = sorted({x.device.index or 0 for x in tensors if isinstance(x, Tensor) and x.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield


class ModuleCopy:
    """A module without its tensors, as it is while it is captured (modes and settings), and a function of these.

    names: of its parameters and buffers, each tensor once, in the order in which a call takes them.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        #: True if a run was seen to leave something in an attribute
        self.leaves_values = False
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.names = tuple(named)
        self._index = {id(x): i for i, x in enumerate(named.values())}
        self._modules: dict[int, nn.Module] = {}
        self._root = self._bare(module)
        kind = type(module)
        self.__name__, self.__qualname__, self.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        self.digest = _digest(module)

    def _bare(self, module: nn.Module) -> nn.Module:
        """The module with numbers of tensors in the places of tensors."""
        if id(module) not in self._modules:
            self._modules[id(module)] = made = object.__new__(type(module))
            made.__dict__.update({key: self._number(value) for key, value in module.__dict__.items()})
            for table in ("_parameters", "_buffers"):
                made.__dict__[table] = {name: self._number(x) for name, x in module.__dict__[table].items()}
            children = module._modules.items()
            made.__dict__["_modules"] = {
                name: child if child is None else self._bare(child) for name, child in children
            }
        return self._modules[id(module)]

    def _number(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Number(self._index[id(value)]) if id(value) in self._index else value
        if isinstance(value, weakref.ref) and id(value()) in self._index:
            return _Reference(self._index[id(value())])
        return [self._number(item) for item in value] if type(value) is list else value

    def __call__(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` with these tensors. Numbers and caches that it leaves in attributes are not kept: ``twice``
        shows whether they matter. OpaqueError if it changes others."""
        return self._run((), tensors, args, kwargs)

    def twice(self, seed: Callable[[], Any], tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` returns in a second run in a row, with what the first one left in attributes. seed: called
        between them."""
        return self._run((seed,), tensors, args, kwargs)

    def _run(self, again: Sequence[Callable[[], Any]], tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """Run ``forward``, and once more after each call of ``again``; what the last run returns."""
        copies: dict[int, nn.Module] = {}
        module = _filled(self._root, tensors, copies)
        before = [_attributes(one) for one in copies.values()]
        returned = module.forward(*args, **kwargs)
        for seed in again:
            seed()
            returned = module.forward(*args, **kwargs)
        after = [_attributes(one) for one in copies.values()]
        self.leaves_values |= any(map(_made, before, after))
        if not all(map(_keeps, copies.values(), before, after)):
            raise OpaqueError(
                self.path, f"the forward of {self.__qualname__} changes its attributes; return what it keeps there"
            )
        return returned


class _Number(int):
    """The number of a tensor, in its place."""


class _Reference(int):
    """The number of a tensor, in the place of a weak reference to it (recurrent nets keep such)."""


def _filled(bare: nn.Module, tensors: Sequence[Tensor], copies: dict[int, nn.Module]) -> nn.Module:
    if id(bare) in copies:
        return copies[id(bare)]
    copies[id(bare)] = made = object.__new__(type(bare))

    def tensor(value: Any) -> Any:
        if type(value) is list:
            return [tensor(item) for item in value]
        if type(value) is _Reference:
            return weakref.ref(tensors[value])
        return tensors[value] if type(value) is _Number else value

    made.__dict__.update({key: tensor(value) for key, value in bare.__dict__.items()})
    for table in ("_parameters", "_buffers"):
        made.__dict__[table] = {name: tensor(x) for name, x in bare.__dict__[table].items()}
    children = bare._modules.items()
    made.__dict__["_modules"] = {
        name: child if child is None else _filled(child, tensors, copies) for name, child in children
    }
    return made


_Attributes = dict[tuple[str, str], tuple[Any, int]]  # (table, name) → value, length


def _attributes(module: nn.Module) -> _Attributes:
    tables = {"": module.__dict__, **{name: module.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}}
    return {
        (table, name): (value, len(value) if isinstance(value, list | dict | set) else 0)
        for table, held in tables.items()
        for name, value in held.items()
        if name not in tables
    }


def _made(before: _Attributes, after: _Attributes) -> list[tuple[str, str]]:
    """The (table, name) of what was not there before."""
    missing = None, -1
    pairs = ((key, before.get(key, missing), now) for key, now in after.items())
    return [key for key, then, now in pairs if then[0] is not now[0] or then[1] != now[1]]


def _keeps(module: nn.Module, before: _Attributes, after: _Attributes) -> bool:
    """True if a run left tensors, submodules and collections as they were, and made nothing that a state dict has."""
    made = _made(before, after)
    tied = [key for key, (x, _) in before.items() if isinstance(x, Tensor | nn.Module | list | dict | set)]
    cached = [name for table, name in made if table == "_buffers" and name in module._non_persistent_buffers_set]
    return all(key in after and key not in made for key in tied) and all(
        not table or name in cached for table, name in made
    )


# ---- identity


def _digest(module: nn.Module) -> str:
    """8 hex digits over the code and the plain attributes of the module and of those below it."""
    lines = []
    for path, one in module.named_modules(remove_duplicate=False):
        own = [kind for kind in type(one).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
        code = "".join(map(source_digest, own))
        values = {name: value for name, value in vars(one).items() if name not in _UNREAD}
        tensors = [f"{name} {x.requires_grad}" for name, x in one.named_parameters(recurse=False)]
        lines.append(f"{path} {type(one).__qualname__} {code} {tensors} {_text(values, 4)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def _text(value: Any, depth: int) -> str:
    """A text of a value that is the same in every process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, FunctionType | type):
        return f"{value.__qualname__} {source_digest(value)}"
    if isinstance(value, functools.partial):
        return f"partial({_text(value.func, depth)}, {_text([value.args, value.keywords], depth - 1)})"
    name = type(value).__qualname__
    if depth == 0 or isinstance(value, nn.Module) or inspect.ismodule(value):
        return name
    if isinstance(value, dict):
        return name + ",".join(sorted(f"{_text(k, depth - 1)}={_text(v, depth - 1)}" for k, v in value.items()))
    if isinstance(value, list | tuple):
        return name + ",".join(_text(item, depth - 1) for item in value)
    if isinstance(value, set | frozenset):
        return name + ",".join(sorted(_text(item, depth - 1) for item in value))
    return name + _text(getattr(value, "__dict__", {}), depth - 1)


# ---- notes


def opaque_notes(graph: Graph) -> list[str]:
    """A note per kind of opaque module: which they are, why they are not traced, how they are split and priced."""
    groups: dict[str, list[str]] = {}
    for node in graph.ops():
        op: Any = node.target
        if not isinstance(op, OpaqueModule):
            continue
        way = "its batch may be split, by trials" if op.split else f"replicated, since {op.whole_reason}"
        random = "; its random numbers are seeded by step and microbatch, the same on every device"
        text = (
            f"run as they are, each one opaque op ({op.kind.__qualname__}): {op.reason}; {way}"
            f"{random if op.random else ''}; {op.assumed}"
        )
        groups.setdefault(text, []).append(node.meta["module"] or op.path)
    notes = []
    for text, paths in groups.items():
        names = [f"{path} ({count}×)" if count > 1 else path for path, count in Counter(paths).items()]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        notes.append(f"{shown} {text}")
    return notes
