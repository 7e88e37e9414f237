"""How one rank's block of a tensor falls into the smaller blocks of a finer spec, and many of them into one message.

On the wire a bundle of tensors whose small blocks have k₁, k₂, … elements is a tensor [d, Σ kᵢ] for a group of d ranks:
row j is for (or from) rank j of the group and holds one block of each, so one collective serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .spec import Spec

__all__ = ["Cut", "place"]


@dataclass(frozen=True)
class Cut:
    """``axes`` of the mesh (ascending), the tensor dim that each of them cuts, and into how many parts.

    A rank's number in the group of these axes is row-major in its coordinates on them.
    """

    axes: tuple[int, ...]
    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def between(cls, name: str, coarse: Spec, fine: Spec, mesh_shape: Sequence[int]) -> Cut:
        """From one spec to a finer one. ValueError if its blocks do not lie inside those of the coarse one."""
        wide = [axis for axis, size in enumerate(mesh_shape) if size > 1]
        axes = tuple(axis for axis in wide if coarse[axis] != fine[axis])
        last = {coarse[axis].dim: axis for axis in wide if coarse[axis].is_shard}
        for axis in axes:
            if not fine[axis].is_shard or coarse[axis].is_shard or last.get(fine[axis].dim, -1) > axis:
                raise ValueError(
                    f"a part of {name!r} must lie inside the block that its ops read, but got "
                    f"{','.join(map(str, fine))} inside {','.join(map(str, coarse))}; plan again"
                )
        return cls(axes, tuple(fine[axis].dim for axis in axes), tuple(mesh_shape[axis] for axis in axes))

    @property
    def parts(self) -> int:
        """Ranks in a group."""
        return prod(self.sizes)

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The coarse block as a view [*sizes, *shape of a small block], by coordinates on the axes."""
        for dim in reversed(range(x.ndim)):  # from the last, so that the dims before keep their numbers
            split = [size for size, at in zip(self.sizes, self.dims, strict=True) if at == dim]
            if split:
                x = x.unflatten(dim, (*split, x.shape[dim] // prod(split)))
        cuts = list(enumerate(self.dims))
        front = [dim + sum((other, j) < (dim, k) for j, other in cuts) for k, dim in cuts]
        return x.movedim(front, list(range(len(front))))

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the coarse block whose small blocks have ``shape``."""
        out = list(shape)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            out[dim] *= size
        return tuple(out)


def place(wire: torch.Tensor, start: int, cut: Cut, block_shape: Sequence[int]) -> torch.Tensor:
    """The view [*sizes, *block_shape] of the blocks that begin in column ``start`` of a tensor on the wire."""
    return wire.narrow(1, start, prod(block_shape)).view(*cut.sizes, *block_shape)
