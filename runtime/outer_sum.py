"""A compressed sum between hosts with exact ones inside: only what crosses the network is coded.

With m ranks per host, a flat bucket x [n] padded to m parts of k elements::

    inside   all-to-all of parts, each rank adds up one          exact, (m − 1)/m · n elements
    between  sum of that part over the hosts                     in the code, k elements
    inside   all-gather of the parts                             exact, (m − 1)/m · n elements
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .collectives.protocol import Pending, Submit
from .compression.exchange import Exchange, finish
from .compression.summing import CompressedSum

__all__ = ["OuterSum", "part_of"]


class OuterSum:
    """Sums flat tensors [n] over the ranks of a host exactly (``inner``), and between hosts by ``coded``: the sum of
    one of ``inner.size`` parts over the ranks that have this part in their hosts."""

    def __init__(self, n: int, inner: Exchange, coded: CompressedSum, submit: Submit) -> None:
        self.n, self.inner, self.coded, self._submit = n, inner, coded, submit
        assert coded.place.n == part_of(n, inner.size), (coded.place.n, n, inner.size)

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x`` in place; ``wait`` raises NonFiniteGradient on the ranks whose part has one."""
        return self._submit(lambda: self._run(x))

    @torch.no_grad()
    def _run(self, x: torch.Tensor) -> None:
        members, part = self.inner.size, self.coded.place.n
        rows = x.new_zeros(members, part)
        rows.view(-1)[: self.n].copy_(x)
        arrived = torch.empty_like(rows)
        self.inner.all_to_all(arrived, rows).wait()
        mine = arrived.sum(0)
        try:
            finish(self.coded.run(mine))
        finally:  # the others in this host wait for it, whatever it is
            self.inner.all_gather(rows, mine).wait()
            x.copy_(rows.view(-1)[: self.n])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of the code."""
        return self.coded.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what ``state_dict`` gave."""
        self.coded.load_state_dict(state)

    def close(self) -> None:
        """Nothing stands."""
        self.coded.close()


def part_of(n: int, members: int) -> int:
    """Elements of one of ``members`` parts of n."""
    return -(-n // members)
