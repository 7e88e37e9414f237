"""A part of a program that the backward runs once more, because what its ops save is not kept (Chen et al. 2016).

    forward    runs the part; what autograd would save of a *repeated* op is dropped, and its place in the order of all
               that the part saves is remembered; results of *dear* ops are kept, and of what they save only those
               operands are dropped that repeated ops made
    backward   the first who asks for something dropped has the part run again from its inputs, with the results that
               were kept in place of dear ops; everything saved on the way is taken by its place, until it is asked for

Inputs and kept results live as long as the part's own graph. The part runs again under the context of its forward, on
whatever thread autograd asks: random ops draw the same, and collectives meet those of the other devices, which run
the same program. Nothing here writes to buffers: a part returns new statistics, and only the forward's are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .context import Context, current, use

__all__ = ["Repeated"]


class Repeated(torch.nn.Module):
    """One part of a program: ``body(run, *inputs) -> tuple(outputs)``, in which ``run.dear(k, …)`` stands for
    ``dear[k](…)``. kept: those of them whose results repeated ops read. Without autograd it runs as it is written."""

    def __init__(self, body: torch.fx.GraphModule, dear: Sequence[Callable[..., Any]], kept: Collection[int]) -> None:
        super().__init__()
        self.body, self.ops, self.kept = body, tuple(dear), frozenset(kept)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """The part's outputs; its backward will run it again."""
        if not torch.is_grad_enabled():
            made: tuple[Any, ...] = self.body.forward(_Plain(self.ops), *inputs)
            return made
        run = _First(self.body, self.ops, self.kept, inputs, replace(current()))
        with saved_tensors_hooks(run.pack, run.unpack):
            made = self.body.forward(run, *inputs)
        return made


@dataclass(frozen=True)
class _Plain:
    ops: tuple[Callable[..., Any], ...]

    def dear(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.ops[index](*args, **kwargs)


@dataclass(frozen=True)
class _Operand:
    """A tensor that a dear op saves: where it lies in the storage of one of its operands."""

    place: int  # among the op's tensor operands
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, operand: torch.Tensor) -> torch.Tensor:
        """The same part of ``operand``."""
        x = operand.detach()
        if x.size() == self.size and x.stride() == self.stride and x.storage_offset() == self.offset:
            return x
        return x.as_strided(self.size, self.stride, self.offset)


@dataclass(eq=False)
class _First:
    """One run of a part in the forward, and what its backward needs to run it again."""

    body: torch.fx.GraphModule
    ops: tuple[Callable[..., Any], ...]
    read: frozenset[int]
    inputs: tuple[Any, ...]
    context: Context
    count: int = 0  # tensors that repeated ops have saved so far
    kept: dict[int, Any] = field(default_factory=dict)  # dear op → its results, without their graph
    wanted: dict[int, list[_Operand]] = field(default_factory=dict)  # dear op → repeated operands that it saves
    lasting: set[int] = field(default_factory=set)  # storages of inputs and of what dear ops make
    addresses: list[StorageWeakRef] = field(default_factory=list)  # so that no other storage gets one of these
    found: dict[Any, torch.Tensor] = field(default_factory=dict)  # of the last repetition, until asked for

    def __post_init__(self) -> None:
        self.lasting.update(x.untyped_storage()._cdata for x in _tensors(self.inputs))

    def pack(self, x: torch.Tensor) -> int:
        """What a repeated op saves: its place."""
        self.count += 1
        return self.count - 1

    def dear(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Call it and keep its results."""
        given = {
            x.untyped_storage()._cdata: (place, x.dtype)
            for place, x in enumerate(_tensors((*args, *kwargs.values())))
            if x.untyped_storage()._cdata not in self.lasting
        }
        wanted = self.wanted[index] = []

        def pack(x: torch.Tensor) -> Any:
            place, dtype = given.get(x.untyped_storage()._cdata, (-1, x.dtype))
            if place < 0 or dtype != x.dtype:
                return x
            wanted.append(_Operand(place, x.size(), x.stride(), int(x.storage_offset())))
            return index, len(wanted) - 1

        with saved_tensors_hooks(pack, self.unpack):
            made = self.ops[index](*args, **kwargs)
        if index in self.read:
            self.kept[index] = tuple(map(_leaf, made)) if isinstance(made, tuple) else _leaf(made)
        for x in _tensors((made,)):
            self.lasting.add(x.untyped_storage()._cdata)
            self.addresses.append(StorageWeakRef(x.untyped_storage()))
        return made

    def unpack(self, key: Any) -> torch.Tensor:
        """What was saved there; given away, so that asking again repeats the part again."""
        if isinstance(key, torch.Tensor):
            return key
        if key not in self.found:
            self.found = _Again(self).run()
        return self.found.pop(key)


@dataclass(eq=False)
class _Again:
    """A repetition: collects what ``first`` dropped."""

    first: _First
    count: int = 0
    found: dict[Any, torch.Tensor] = field(default_factory=dict)

    def run(self) -> dict[Any, torch.Tensor]:
        """Everything that was dropped, by its place."""
        first = self.first
        with use(first.context), first.context.repeating(), torch.enable_grad(), saved_tensors_hooks(self.pack, _never):
            first.body.forward(self, *first.inputs)
        assert self.count == first.count, f"a repeated part saved {first.count} tensors at first, now {self.count}"
        return self.found

    def pack(self, x: torch.Tensor) -> None:
        """Take it; places are counted up."""
        self.found[self.count] = x.detach()
        self.count += 1

    def dear(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """What it made in the forward; its operands are there now."""
        operands = list(_tensors((*args, *kwargs.values())))
        for number, one in enumerate(self.first.wanted[index]):
            self.found[index, number] = one.of(operands[one.place])
        return self.first.kept.get(index, _NOTHING)


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("no backward runs through a repetition")


def _leaf(x: Any) -> Any:
    """The same values, differentiable or not as before, without what made them."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


class _Nothing:
    """Stands for what a dear op made, in a repetition in which no repeated op reads it."""

    def __getitem__(self, _: Any) -> _Nothing:
        return self


_NOTHING = _Nothing()


def _tensors(arguments: Sequence[Any]) -> Iterator[Any]:
    """All tensors, and what stands for tensors."""
    for x in arguments:
        if isinstance(x, torch.Tensor | _Nothing):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)
