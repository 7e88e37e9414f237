"""Gathers of weights that are on their way before they are asked for.

A chunk asks for the weights of one layer after the other, in an order that is the same in every forward, and the same
in every backward, where it is that in which autograd comes to the layers. The first pass of each kind notes what
follows what. In every later one, a gather that has arrived starts the next, which travels while the layer computes; so
there is one at most beside the layer that runs. Which one that is depends on the programs alone, not on time: all
devices of a group start the same gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .context import Arrival

__all__ = ["Ahead", "Order"]


@dataclass
class Order:
    """Of one chunk: (direction, gather) → the gather that comes next."""

    after: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(eq=False)
class Ahead:
    """The gathers of one microbatch. start: puts the one of this number on its way."""

    order: Order
    start: Callable[[int], Arrival]
    direction: str = "forward"
    last: int | None = None
    flying: dict[int, Arrival] = field(default_factory=dict)

    def arrival(self, number: int) -> Arrival:
        """A gather that is asked for now."""
        return self.flying.pop(number) if number in self.flying else self.start(number)

    def follow(self, number: int) -> None:
        """This one is there: note it, and start the next."""
        if self.last is not None:
            self.order.after[self.direction, self.last] = number
        self.last = number
        following = self.order.after.get((self.direction, number))
        if following is not None and following not in self.flying:
            self.flying[following] = self.start(following)

    def turn(self) -> None:
        """After the forward."""
        self.direction, self.last = "backward", None
        for arrival in self.flying.values():
            arrival.wait()
        self.flying.clear()
