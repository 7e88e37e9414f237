"""Placements of a tensor on a logical mesh, and the pairs *(value, cotangent)* that describe it in the compiler.

Grammar::

    placement ::= S<dim>        the tensor's dim is cut into equal contiguous blocks along the mesh axis
                | R             every device of the axis holds the same tensor
                | P             the devices hold addends: the tensor is their sum
                | Pmax          the tensor is their elementwise maximum (values only; carries no gradient)
    spec      ::= placement per mesh axis, joined by ","         "S0,R"     ("" on a mesh without axes)
    pair      ::= spec "|" spec     the value's, then its gradient's            "R,S0|P,S0"

A dim that several axes shard is cut by the first axis first (axis 0 is the major one).
Equal blocks only: a choice that would cut a dim unevenly is not offered.

The four pairs that matter on one axis: ``S|S`` data; ``R|R`` replicated work; ``R|P`` the input of a column-parallel
matmul (each device contributes an addend to its gradient); ``P|R`` the output of a row-parallel one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "PMAX",
    "P",
    "Pair",
    "Placement",
    "R",
    "S",
    "Spec",
    "local_shape",
    "parse_pair",
    "parse_spec",
    "replicated",
    "without_partials",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a tensor on one mesh axis: ``kind`` is "S", "R", "P" or "Pmax"; ``dim`` counts only for "S"."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.kind == "S" else self.kind

    __repr__ = __str__

    @property
    def is_shard(self) -> bool:
        """True if this placement cuts a dim."""
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        """True if this placement leaves a reduction to be done."""
        return self.kind in ("P", "Pmax")


R = Placement("R")
P = Placement("P")
PMAX = Placement("Pmax")


def S(dim: int) -> Placement:
    """Shard along tensor dim ``dim`` (non-negative)."""
    assert dim >= 0, dim
    return Placement("S", dim)


Spec = tuple[Placement, ...]


@dataclass(frozen=True)
class Pair:
    """The placement of a value and of the gradient that flows against it, one placement per mesh axis each."""

    value: Spec
    cotangent: Spec

    @cached_property
    def _hash(self) -> int:
        return hash((self.value, self.cotangent))

    def __hash__(self) -> int:  # pairs are looked up a million times in a search
        return self._hash

    def __str__(self) -> str:
        return f"{spec_text(self.value)}|{spec_text(self.cotangent)}"

    __repr__ = __str__


def spec_text(spec: Spec) -> str:
    """``(S(0), R)`` → ``"S0,R"``."""
    return ",".join(map(str, spec))


def parse_spec(text: str) -> Spec:
    """``"S0,R"`` → ``(S(0), R)``; ValueError on anything else."""
    if not text:
        return ()
    out = []
    for word in text.split(","):
        if match := re.fullmatch(r"S(\d+)", word):
            out.append(S(int(match[1])))
        elif word in ("R", "P", "Pmax"):
            out.append(Placement(word))
        else:
            raise ValueError(f"a placement is S<dim>, R, P or Pmax, but got {word!r} in spec {text!r}")
    return tuple(out)


def parse_pair(text: str) -> Pair:
    """``"R|P"`` → ``Pair((R,), (P,))``; ValueError on anything else."""
    value, bar, cotangent = text.partition("|")
    pair = Pair(parse_spec(value), parse_spec(cotangent))
    if not bar or len(pair.value) != len(pair.cotangent):
        raise ValueError(f"a pair is two specs of equal length joined by '|', but got {text!r}")
    return pair


def replicated(num_axes: int) -> Pair:
    """The pair ``R…|R…``."""
    return Pair((R,) * num_axes, (R,) * num_axes)


def without_partials(spec: Spec) -> Spec:
    """The spec once every reduction that it leaves is done."""
    return tuple(R if placement.is_partial else placement for placement in spec)


def local_shape(shape: Sequence[int], spec: Spec, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that one device holds of a tensor of global ``shape``; asserts that every cut is even."""
    out = list(shape)
    for placement, size in zip(spec, mesh_shape, strict=True):
        if placement.is_shard:
            assert out[placement.dim] % size == 0, (shape, spec, mesh_shape)
            out[placement.dim] //= size
    return tuple(out)
