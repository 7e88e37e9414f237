"""Random ops of PyTorch in terms of ``random_tensor``, whose draws do not depend on how a tensor is cut.

Each op is written as draws and ordinary ops (``EXPANSIONS``, by the op's name without the ``_`` of those in place), so
that its parameters may be tensors and only the draws have a rule of their own:

    bernoulli(p)                u < p, for a tensor p
    normal(mean, std)           mean + std z, without a gradient to either
    multinomial(p, 1), or n without replacement
                                the n largest p / e, of exponential e (what PyTorch does; Gumbel's trick)
    multinomial(p, n)           with replacement: the place of u Σp among the cumulative sums of p
    randperm                    the order of uniform numbers
    dropout of channels, alpha  a mask of bernoulli numbers, as in PyTorch's source

The same table serves a captured graph (``draw_random_numbers``) and an eager run (``CountedDraws``), which
``check_capture`` compares. Ops that are not in it (gamma, poisson, binomial, …) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.graph import Graph, TensorType
from ..ir.ops.random_numbers import random_tensor
from .graph_edits import Insertion, arguments_of, replace_node

__all__ = ["EXPANSIONS", "CountedDraws", "draw_random_numbers"]

aten = torch.ops.aten
_SELU = 1.7580993408473766  # -α λ of selu: the value that alpha dropout gives what it drops


class _Build(Protocol):
    """A builder of the ops of an expansion: nodes of a graph, or tensors of an eager run."""

    def __call__(self, target: Any, /, *args: Any, type: Any = None, **kwargs: Any) -> Any:
        """Add an op."""
        ...

    def item(self, several: Any, index: int, /) -> Any:
        """One of the outputs of an op."""
        ...

    def draw(self, law: str, kind: TensorType, *parameters: float) -> Any:
        """Add independent draws."""
        ...

    def kind(self, value: Any, /) -> TensorType:
        """The type of a value."""
        ...


_Expansion = Callable[[_Build, Mapping[str, Any], TensorType], Any]


def _uniform(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    return at.draw("uniform", kind, given.get("from", 0.0), given.get("to", 1.0))


def _normal(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if isinstance(mean, int | float) and isinstance(std, int | float):
        return at.draw("normal", kind, mean, std)
    drawn = at.draw("normal", kind, 0.0, 1.0)
    for op, value in ((aten.mul.Tensor, std), (aten.add.Tensor, mean)):
        drawn = at(op, drawn, value if isinstance(value, int | float) else at(aten.detach.default, value))
    return drawn


def _log_normal(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    return at(aten.exp.default, _normal(at, given, kind))


def _cauchy(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    turn = at(aten.tan.default, at.draw("uniform", kind, -math.pi / 2, math.pi / 2))
    return at(aten.add.Tensor, at(aten.mul.Tensor, turn, given["sigma"]), given["median"])


def _exponential(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    return at.draw("exponential", kind, given["lambd"])


def _geometric(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    wide = TensorType(kind.shape, kind.dtype if kind.is_float else torch.float32)
    trials = at(aten.ceil.default, at.draw("exponential", wide, -math.log1p(-given["p"])))
    return trials if wide == kind else at(aten._to_copy.default, trials, dtype=kind.dtype)


def _integer(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    low, high = given.get("low", given.get("from")), given.get("high", given.get("to"))
    if high is None:  # ``random_`` without bounds: all integers that the type has
        high = 2 if kind.dtype == torch.bool else 1 << 24 if kind.is_float else torch.iinfo(kind.dtype).max
    return at.draw("integer", kind, low or 0, high)


def _bernoulli(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    p = given.get("p")
    p = given["self"] if p is None else p
    if isinstance(p, int | float):
        return at.draw("bernoulli", kind, p)
    numbers = TensorType(kind.shape, at.kind(p).dtype)
    return at(aten._to_copy.default, at(aten.lt.Tensor, at.draw("uniform", numbers, 0.0, 1.0), p), dtype=kind.dtype)


def _multinomial(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    p, count = at(aten.detach.default, given["self"]), given["num_samples"]
    shape, dtype = at.kind(p).shape, at.kind(p).dtype
    if count == 1 or not given["replacement"]:
        scores = at(aten.div.Tensor, p, at.draw("exponential", TensorType(shape, dtype), 1.0))
        both = (TensorType((*shape[:-1], count), dtype), kind)
        return at.item(at(aten.topk.default, scores, count, type=both), 1)
    sums = at(aten.cumsum.default, p, -1)
    total = at(aten.slice.Tensor, sums, -1, shape[-1] - 1, shape[-1])
    places = at(aten.mul.Tensor, at.draw("uniform", TensorType(kind.shape, dtype), 0.0, 1.0), total)
    return at(aten.searchsorted.Tensor, sums, places, right=True)


def _permutation(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
    order = at(aten.argsort.default, at.draw("uniform", TensorType(kind.shape, torch.float64), 0.0, 1.0))
    return order if kind.dtype == torch.int64 else at(aten._to_copy.default, order, dtype=kind.dtype)


def _mask_dropout(channels: bool, alpha: bool) -> _Expansion:
    """Dropout of elements or of whole channels ([N, C] of [N, C, …]), to zero or to the value of ``_SELU``."""

    def expand(at: _Build, given: Mapping[str, Any], kind: TensorType) -> Any:
        x, p = given["input"], given["p"]
        if not given["train"] or not p:
            return x
        if p == 1:
            return at(aten.mul.Tensor, x, 0.0)
        shape = (*kind.shape[:2], *(1 for _ in kind.shape[2:])) if channels else kind.shape
        keep = at.draw("bernoulli", TensorType(shape, kind.dtype), 1 - p)
        if not alpha:
            return at(aten.mul.Tensor, x, at(aten.div.Tensor, keep, 1 - p))
        scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
        dropped = at(aten.mul.Tensor, at(aten.sub.Tensor, keep, 1.0), _SELU * scale)
        kept = at(aten.mul.Tensor, x, at(aten.mul.Tensor, keep, scale))
        return at(aten.add.Tensor, kept, at(aten.add.Tensor, dropped, _SELU * scale * p))

    return expand


EXPANSIONS: Mapping[str, _Expansion] = {
    "rand": _uniform, "rand_like": _uniform, "uniform": _uniform,
    "randn": _normal, "randn_like": _normal, "normal": _normal, "normal_functional": _normal,
    "log_normal": _log_normal, "cauchy": _cauchy, "exponential": _exponential, "geometric": _geometric,
    "randint": _integer, "randint_like": _integer, "random": _integer, "randperm": _permutation,
    "bernoulli": _bernoulli, "multinomial": _multinomial,
    "feature_dropout": _mask_dropout(True, False), "alpha_dropout": _mask_dropout(False, True),
    "feature_alpha_dropout": _mask_dropout(True, True),
}  # fmt: skip


def _expansion_of(op: Any) -> _Expansion | None:
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    return EXPANSIONS.get(op._schema.name.removeprefix("aten::").removesuffix("_"))


class _NewNodes(Insertion):
    """The builder of nodes, which numbers the draws of a graph."""

    numbers: list[int]

    def draw(self, law: str, kind: TensorType, *parameters: float) -> Node:
        """Random numbers of a running number of their own."""
        self.numbers.append(len(self.numbers))
        args = (law, list(kind.shape), list(parameters), kind.dtype, self.numbers[-1])
        return self(random_tensor, *args, device=torch.device("cpu"), type=kind)

    def kind(self, value: Node) -> TensorType:
        """The type of a node."""
        found: TensorType = value.meta["type"]
        return found

    def item(self, several: Node, index: int) -> Node:
        """One of the outputs of a node."""
        return self.items(several)[index]


def draw_random_numbers(graph: Graph) -> None:
    """Replace every op of ``EXPANSIONS`` by draws of ``random_tensor`` and ordinary ops."""
    numbers: list[int] = []
    for node in list(graph.fx.nodes):
        expand = _expansion_of(node.target) if node.op == "call_function" else None
        if expand is None:
            continue
        at = _NewNodes(graph, node)
        at.numbers = numbers
        replace_node(graph, node, expand(at, arguments_of(node), node.meta["type"]))


class _NewTensors:
    """The builder of an eager run."""

    def __call__(self, target: Any, /, *args: Any, type: Any = None, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def draw(self, law: str, kind: TensorType, *parameters: float) -> torch.Tensor:
        """Random numbers, the same for every draw of this shape."""
        return random_tensor(law, kind.shape, parameters, kind.dtype, 0)

    def kind(self, value: torch.Tensor) -> TensorType:
        """The type of a tensor."""
        return TensorType(tuple(value.shape), value.dtype)

    def item(self, several: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
        """One of the outputs of an op."""
        return several[index]


class CountedDraws(TorchDispatchMode):
    """Random ops of an eager run draw what ``random_tensor`` does as op 0 of the bound context. Those in place too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, expand = func(*args, **(kwargs or {})), _expansion_of(func)
        if expand is None:
            return result
        names = [argument.name for argument in func._schema.arguments]
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= dict(zip(names, args)) | (kwargs or {})
        kind = TensorType(tuple(result.shape), result.dtype)
        drawn = expand(_NewTensors(), given, kind)
        return result.copy_(drawn) if func._schema.is_mutable else drawn
