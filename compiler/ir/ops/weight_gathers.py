"""Gathers of sharded weights, which are whole only while a layer runs (ZeRO-3: Rajbhandari et al. 2020).

One node of a program gathers those of a layer, and its backward reduces their gradients into blocks::

    forward     blocks of all ranks → wholes        one all-gather over all axes of the cut
    backward    gradients of the wholes → blocks    one reduce-scatter over them

Both are one message for all the tensors (see ``reshard``). Wholes that a backward needs are not kept for it: the layer
is a segment of the program whose gathers are repeated (``segments``). A gradient goes into its message as soon as
autograd has it, so those of a layer are never whole together.
Blocks may be fp32 where ops read 16 bits (master weights): then 16 bits travel in the forward, and gradients are summed
in fp32.

``GatherPrefetcher`` starts gathers before an op needs them. A chunk asks for the weights of one layer after the other,
in an order that is the same in every forward, and the same in every backward, where it is that in which autograd comes
to the layers. The first pass of each kind notes what follows what. In every later one, a gather that has arrived starts
the next, which travels while the layer computes; so there is one at most beside the layer that runs. Which one that is
depends on the programs alone, not on time: all devices of a group start the same gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.fx

from ..comm import Arrival, Comm, current_context, use_context
from ..reshard import Cut, place

__all__ = ["GatherOrder", "GatherPrefetcher", "Gathers", "gather_blocks"]


Cuts = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
"""The fields of a ``Cut`` per tensor, as a literal of a lowered program; all have the same axes."""


def gather_blocks(
    blocks: Sequence[torch.Tensor], cuts: Cuts, number: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The whole tensors, in ``dtype``, of which this rank has ``blocks``; differentiable where all of them are. number:
    among the gathers of the program."""
    context, shapes = current_context(), [block.shape for block in blocks]
    cut = [Cut(*fields) for fields in cuts]
    draw = (context.seed, context.step, context.microbatch, number)
    mail = _GradientMessage(context.comm, cut, shapes, dtype, blocks[0].dtype, context.unscale, context.code, draw)
    wholes: tuple[torch.Tensor, ...] = _Gather.apply(mail, number, *blocks)
    if not any(whole.requires_grad for whole in wholes):
        return wholes
    return tuple(_PostGradient.apply(whole, mail, index) for index, whole in enumerate(wholes))


@dataclass(eq=False)
class _GradientMessage:
    """The message of the gradients of one gather: rows [ranks, Σ elements of blocks], ``there``: whose are in it.
    dtype: of wholes; sums: of gradients in the message; unscale: what they are multiplied with there; code, draw: of
    messages (``Comm.start_reduce_scatter``)."""

    comm: Comm
    cuts: list[Cut]
    shapes: list[torch.Size]
    dtype: torch.dtype
    sums: torch.dtype
    unscale: float = 1.0
    code: str = "none"
    draw: tuple[int, ...] = ()
    wire: torch.Tensor | None = None
    there: set[int] = field(default_factory=set)

    def place(self, index: int) -> torch.Tensor:
        assert self.wire is not None
        start = sum(prod(shape) for shape in self.shapes[:index])
        return place(self.wire, start, self.cuts[index], self.shapes[index])

    def put(self, index: int, grad: torch.Tensor) -> None:
        """The gradient of a whole."""
        if self.wire is None:
            self.wire = grad.new_empty((self.cuts[0].parts, sum(map(prod, self.shapes))), dtype=self.sums)
        here = self.place(index).copy_(self.cuts[index].blocks(grad))
        if self.unscale != 1.0:
            here.mul_(self.unscale)
        self.there.add(index)

    def send(self) -> list[torch.Tensor | None]:
        """The sums of the blocks of this rank; those of gradients that did not come are not sent."""
        if self.wire is None:
            return [None] * len(self.shapes)
        there, sizes = sorted(self.there), [prod(shape) for shape in self.shapes]
        if len(there) < len(sizes):
            columns = [self.wire.narrow(1, sum(sizes[:index]), sizes[index]) for index in there]
            self.wire = torch.cat(columns, 1)
        arrival = self.comm.start_reduce_scatter(self.wire, self.cuts[0].axes, self.code, self.draw)
        self.wire, self.there = None, set()
        pieces = arrival.wait().split([sizes[index] for index in there])
        found = {index: piece.view(self.shapes[index]) for index, piece in zip(there, pieces, strict=True)}
        return [found.get(index) for index in range(len(sizes))]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mail: _GradientMessage, number: int, *blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.mail, ahead = mail, current_context().ahead
        ctx.set_materialize_grads(False)
        arrival = (
            start_gather(mail.comm, mail.cuts, blocks, mail.dtype, mail.code)
            if ahead is None
            else ahead.arrival(number)
        )
        wholes = _assemble_wholes(arrival.wait(), mail.cuts, mail.shapes)
        if ahead is not None:
            ahead.follow(number)
        return wholes

    @staticmethod
    def backward(ctx: Any, *grads: None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.mail.send()


class _PostGradient(torch.autograd.Function):
    """A whole as ops read it. Its gradient ends here, in the message."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mail: _GradientMessage, index: int) -> torch.Tensor:
        ctx.mail, ctx.index = mail, index
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.mail.put(ctx.index, grads[0])
        return None, None, None


def start_gather(
    comm: Comm, cuts: Sequence[Cut], blocks: Sequence[torch.Tensor], dtype: torch.dtype, code: str = "none"
) -> Arrival:
    """The blocks of all ranks of the axes, in ``dtype``, on their way in a code: [ranks, Σ elements of blocks]."""
    flat = [block.detach().reshape(-1).to(dtype) for block in blocks]
    mine = torch.cat(flat) if len(flat) > 1 else flat[0]
    del flat
    return comm.start_all_gather(mine, cuts[0].axes, code)


def _assemble_wholes(wire: torch.Tensor, cuts: Sequence[Cut], shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    if len(cuts) == 1 and not any(cuts[0].dims):  # already in order
        return (wire.view(cuts[0].whole_shape(shapes[0])),)
    out = []
    for cut, shape, start in zip(cuts, shapes, accumulate(map(prod, shapes), initial=0)):
        whole = wire.new_empty(cut.whole_shape(shape))
        cut.blocks(whole).copy_(place(wire, start, cut, shape))
        out.append(whole)
    return tuple(out)


class Gathers:
    """The gathers of a program: which of its arguments each of them reads, and the order in which they follow each
    other."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        places = {node: place for place, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
        nodes = [node for node in graph.nodes if node.target is gather_blocks]
        nodes.sort(key=lambda node: node.args[2])
        self.reads = [[places[operand] for operand in node.all_input_nodes] for node in nodes]
        self.cuts = [[Cut(*fields) for fields in node.args[1]] for node in nodes]
        self.dtypes = [node.args[3] for node in nodes]
        self.order = GatherOrder()

    @contextmanager
    def forward(self, arguments: Sequence[Any]) -> Iterator[None]:
        """While a program runs on ``arguments``, and in the backward of what it makes, gathers start ahead."""
        if not self.reads:
            yield
            return
        context = current_context()

        def start(number: int) -> Arrival:
            blocks = [arguments[place] for place in self.reads[number]]
            return start_gather(context.comm, self.cuts[number], blocks, self.dtypes[number], context.code)

        ahead = GatherPrefetcher(self.order, start)
        with use_context(replace(context, ahead=ahead)):
            yield
        ahead.turn()


@dataclass
class GatherOrder:
    """The order of gathers in one chunk, which its first forward and backward record."""

    #: (direction, gather) → the gather that comes next
    after: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(eq=False)
class GatherPrefetcher:
    """The prefetcher of one microbatch: when a gather arrives, it starts the next one."""

    order: GatherOrder
    #: starts the gather of this number
    start: Callable[[int], Arrival]
    direction: str = "forward"
    last: int | None = None
    flying: dict[int, Arrival] = field(default_factory=dict)

    def arrival(self, number: int) -> Arrival:
        """The gather of this number, started now if it is not in flight yet."""
        return self.flying.pop(number) if number in self.flying else self.start(number)

    def follow(self, number: int) -> None:
        """Note that this gather has arrived, and start the next one."""
        if self.last is not None:
            self.order.after[self.direction, self.last] = number
        self.last = number
        following = self.order.after.get((self.direction, number))
        if following is not None and following not in self.flying:
            self.flying[following] = self.start(following)

    def turn(self) -> None:
        """Switch from the forward to the backward."""
        self.direction, self.last = "backward", None
        for arrival in self.flying.values():
            arrival.wait()
        self.flying.clear()
