"""Wishes for a plan in the code of a model: ``with stage(2):`` and ``x = shard(x, "tensor", dim=1)``.

Both change nothing that the model computes, here and under any plan. A capture writes them into the nodes of its graph:

    node.meta["stage"]    k       the op was called inside of ``with stage(k)``
    node.meta["split"]    rows    (dim, line of the call) of each ``shard`` of the op's result

and a search turns them into constraints (``search.constraints.annotations_of``), beside those that the caller gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx import traceback as fx_traceback

from ..errors import CaptureError

__all__ = ["SHARD", "Annotations", "shard", "stage"]

_KEY = "meshwright.stage"
_lines: set[str] | None = None  # the lines that called ``shard`` in the capture that runs


@contextmanager
def stage(index: int) -> Iterator[None]:
    """Put the ops that are called inside into pipeline stage ``index`` of every plan of the model: 0, 1, ... in the
    order in which ``forward`` comes to them, without a gap; they are all of its stages. An op outside of them stays
    with the one that runs before it.

    A layer of the plan begins where a stage does. Planning raises ValueError for other numbers, and for a stage that
    begins among the outputs of one op. ValueError for what is no index.
    """
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ValueError(f"a stage is 0, 1, 2, …, but got {index!r}")
    if _lines is None:
        yield
        return
    with fx_traceback.preserve_node_meta(), fx_traceback.annotate({_KEY: index}):
        yield


def shard(x: Tensor, parallelism: str, dim: int) -> Tensor:
    """``x`` itself; every plan cuts its dim ``dim`` over the devices of its stage.

    parallelism: "tensor". x: the result of an op, as a model computes it. Planning raises ValueError where no rule of
    that op cuts the dim. ValueError for another parallelism, and for a dim that ``x`` does not have.
    """
    if parallelism != "tensor":
        raise ValueError(f"a tensor is cut by 'tensor' parallelism, but got {parallelism!r}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of {x.dim()} dims is cut in one of them, but got dim={dim!r}")
    if _lines is None:
        return x
    caller = sys._getframe(1)
    line = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    _lines.add(line)
    marked: Tensor = SHARD(x, dim % x.dim(), line)
    return marked


@torch.library.custom_op("meshwright::shard", mutates_args=())
def _shard(x: Tensor, dim: int, line: str) -> Tensor:
    return x.clone()


@_shard.register_fake
def _(x: Tensor, dim: int, line: str) -> Tensor:
    return torch.empty_like(x)


_shard.register_autograd(lambda _, grad: (grad, None, None))
SHARD = torch.ops.meshwright.shard.default


class Annotations:
    """The annotations that one capture meets. A context manager around it."""

    def __enter__(self) -> Annotations:
        global _lines
        self._outer, _lines = _lines, set()
        return self

    def __exit__(self, *error: Any) -> None:
        global _lines
        self.lines, _lines = _lines or set(), self._outer

    @staticmethod
    def stage_of(exported: Node) -> dict[str, int]:
        """The entries of ``meta`` that the node of an exported op hands on to those made of it."""
        custom = exported.meta.get("custom") or {}
        return {"stage": custom[_KEY]} if _KEY in custom else {}

    @staticmethod
    def mark(producer: Node, dim: int, line: str) -> Node:
        """Note on the node that ``line`` cuts its result."""
        if producer.op != "call_function":
            raise CaptureError(
                f"{line}: mw.shard cuts the result of an op, but got {producer.name}, an input or a weight; name the "
                "op that reads it"
            )
        producer.meta["split"] = (*producer.meta.get("split", ()), (dim, line))
        return producer

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise CaptureError for a call of ``shard`` that no node knows of."""
        known = {line for node in nodes for _, line in node.meta.get("split", ())}
        for line in sorted(self.lines - known):
            raise CaptureError(
                f"{line}: mw.shard cuts a tensor that the graph does not have: it lies inside of a loop, of an opaque "
                "module or of several ops that became one; cut another tensor near it"
            )
