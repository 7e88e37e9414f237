"""Stage programs through torch.compile: piece by piece (``compiler/plan/compiled_pieces.py``), equal pieces once.

Two pieces are equal if their graphs are and the tensors of their first calls have equal shapes, strides, dtypes and
devices: equal layers are compiled once, weights come in as arguments. Shapes do not change from step to step, so
nothing is compiled after the first microbatch. What a compiler made is kept on disk, for ranks of the same machine and
for later runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.fx
from filelock import FileLock
from torch._functorch import config

from ...compiler.ir.program import ChunkProgram, Segment
from ...compiler.plan.compiled_pieces import in_pieces, units

__all__ = ["Compiler", "backend_of"]

_Call = Callable[..., tuple[Any, ...]]


def backend_of(compile: bool | str) -> str | None:
    """The torch.compile backend that ``parallelize(compile=)`` asks for; None: none. ValueError for an unknown one."""
    if isinstance(compile, bool):
        return "inductor" if compile else None
    known = torch.compiler.list_backends(exclude_tags=())
    if compile not in known:
        raise ValueError(
            f"compile is True, False or a backend of torch.compile ({', '.join(known)}), but got {compile!r}; "
            "use one of them"
        )
    return compile


class Compiler:
    """Compiles the programs of one rank. layer_of: op of the model → its layer; classes: of the layers. folder: where
    inductor keeps what it made, unless TORCHINDUCTOR_CACHE_DIR says otherwise.

    Raises ValueError if ``backend`` cannot work on this machine.
    """

    def __init__(self, backend: str, layer_of: Mapping[str, int], classes: Sequence[str], folder: Path) -> None:
        unit = units(classes)
        self.backend = backend
        self.unit_of = {op: unit[layer] for op, layer in layer_of.items()}
        self.compiled_pieces: dict[Any, _Call] = {}  # graph and types of arguments → the compiled piece
        self.pieces = 0  # that programs have
        if backend == "inductor":
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
            _require_compiler()

    def compiled(
        self, program: ChunkProgram, module: torch.fx.GraphModule, late: Sequence[int]
    ) -> tuple[torch.fx.GraphModule, tuple[Segment, ...]]:
        """``module``, which has the nodes of the ``program``, in compiled pieces, and its segments. late: slots of
        parameters whose gradients are made after the backward of what reads them."""
        return in_pieces(module, program.segments, self.unit_of, late, self._piece)

    def _piece(self, body: torch.fx.Graph) -> _Call:
        """Return the callable of a piece. At its first call it takes the compiled piece that is equal, or compiles
        it."""
        self.pieces += 1
        text = _text(body)
        bound: _Call | None = None

        def piece(*args: torch.Tensor) -> tuple[Any, ...]:
            nonlocal bound
            if bound is not None:
                return bound(*args)
            tensors = [(tuple(x.shape), x.stride(), str(x.dtype), x.requires_grad, str(x.device)) for x in args]
            key = f"{text}\n{tensors}"
            bound = self.compiled_pieces.get(key)
            if bound is not None:
                return bound(*args)
            bound = self.compiled_pieces[key] = self._compile(body)
            with self._turn(key), config.patch(force_non_lazy_backward_lowering=True):
                return bound(*args)  # compiles forward and backward

        return piece

    def _compile(self, body: torch.fx.Graph) -> _Call:
        module = torch.fx.GraphModule(torch.nn.Module(), body)
        compiled_piece: _Call = torch.compile(module.forward, backend=self.backend, fullgraph=True, dynamic=False)
        return compiled_piece

    def _turn(self, key: str) -> AbstractContextManager[Any]:
        """Of the ranks of a machine that compile the same one does, and the others find what it made."""
        if self.backend != "inductor":
            return nullcontext()
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "turns"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / sha256(key.encode()).hexdigest()[:32])


def _text(body: torch.fx.Graph) -> str:
    """Equal for graphs that do the same: nodes by their place, functions by their names, literals as they are."""
    place = {node: f"%{index}" for index, node in enumerate(body.nodes)}
    lines = []
    for node in body.nodes:
        arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Named(place[n]))
        lines.append(f"{node.op} {_name(node.target)} {arguments}")
    return "\n".join(lines)


class _Named(str):
    """A string that is written without quotes."""

    __repr__ = str.__str__


def _name(target: Any) -> str:
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _require_compiler() -> None:
    """ValueError unless inductor finds what it writes programs for."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ValueError(
            f"compile=True needs a C++ compiler (g++ or clang++, or what CXX names), but got: {error}; install one, or "
            "leave compile out"
        ) from error
