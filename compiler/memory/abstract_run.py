"""A local program run on tensors without data, with every storage counted: what it allocates, when, and for what.

Tensors live on the ``meta`` device, so a run costs microseconds per op and no memory. A ``Tracker`` sees every op of
forward and backward below autograd, and each new storage until it is let go. Where a meta tensor takes another way than
a real one, a stand-in does what the real kernel would: fused attention keeps its log-sum-exp, experts get equally many
tokens each (all of them, or a few where there are many), autograd adds a second gradient into the first one's storage
where nobody else reads it, and the CPU's convolutions hold copies in another layout for a moment.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch.fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...costmodel.codecs import carried_bytes
from ..ir.comm import cut_blocks, merge_blocks
from ..ir.ops import local_ops
from ..ir.ops.ring_attention import ring_attention
from ..ir.program import ChunkProgram
from ..plan.segments import repeating
from .kernel_workspace import attention_stand_in, convolution_workspace

__all__ = ["AbstractComm", "Memo", "Tracker", "allocation_cause", "with_stand_ins"]

aten = torch.ops.aten


#: Experts of a device that get tokens: what a run takes grows with them, and what it counts hardly depends on them.
MOST_EXPERTS = 16


class Tracker(TorchDispatchMode):
    """While active, counts the storages of all tensors that ops make, by the ``cause`` set when each was made.

    bytes_now: cause → bytes alive; peak: the same at the worst moment since ``restart``. Tensors that were made outside
    are counted as soon as an op returns them, unless it was told to ``ignore`` them. device_kind: whose kernels to
    imitate; writes_scores: whether attention keeps its probabilities there (no fused kernel). memo: types of results
    that are known already, shared by runs. What ops would make on another device they make on ``meta``, unless
    ``devices_as_given``.
    """

    def __init__(
        self,
        device_kind: str = "cpu",
        devices_as_given: bool = False,
        memo: Memo | None = None,
        writes_scores: bool = False,
    ) -> None:
        super().__init__()
        self.writes_scores = writes_scores
        self.memo = {} if memo is None else memo
        self.on_cpu = device_kind == "cpu"
        self.devices_as_given = devices_as_given
        self.in_place_counts = _in_place_counts()
        self.cause = "temporary"
        self.bytes_now: Counter[str] = Counter()
        self.total = 0
        self.peak_total = 0
        self.peak: dict[str, int] = {}
        self.live: dict[int, list[Any]] = {}  # storage → [weak reference, bytes, cause]
        self.in_backward = False  # whether the engine's sums of gradients may come
        self.expert_blocks = 1  # over how many devices the experts of the op that runs are spread
        self.token_blocks = 1  # between how many devices rows travel to their experts

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """While a backward runs ops of the forward once more: none of their sums is the engine's."""
        before, self.in_backward = self.in_backward, False
        try:
            yield
        finally:
            self.in_backward = before

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_total, self.peak = self.total, dict(self.bytes_now)

    def watch(self, x: torch.Tensor, cause: str | None = None) -> torch.Tensor:
        """Count the storage of ``x`` from now on (once)."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.live and size:
            self.live[key] = [weakref.ref(storage, lambda _: self._freed(key)), size, cause or self.cause]
            self.bytes_now[cause or self.cause] += size
            self.total += size
            if self.total > self.peak_total:
                self.peak_total, self.peak = self.total, dict(self.bytes_now)
        return x

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Never count the storages of these; ops may return views of them."""
        for x in tensors:
            storage = x.untyped_storage()
            self.live[storage._cdata] = [storage, 0, "ignored"]

    def relabel(self, x: torch.Tensor, cause: str) -> None:
        """From now on the storage of ``x`` counts under another cause."""
        self._move(self.live[x.untyped_storage()._cdata], cause)

    def relabel_all(self, old: str, new: str) -> None:
        """From now on everything under ``old`` counts under ``new``."""
        for entry in self.live.values():
            if entry[2] == old:
                self._move(entry, new)

    def _move(self, entry: list[Any], cause: str) -> None:
        self.bytes_now[entry[2]] -= entry[1]
        self.bytes_now[cause] += entry[1]
        entry[2] = cause

    def _freed(self, key: int) -> None:
        _, size, cause = self.live.pop(key)
        self.bytes_now[cause] -= size
        self.total -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.add.Tensor and self.in_backward and _accumulates_in_place(self.in_place_counts, *args):
            return args[0]
        if func is aten.bincount.default and args[0].device.type == "meta":
            return self._balanced(args[0].numel(), args[2] if len(args) > 2 else kwargs["minlength"])
        device = kwargs.get("device")
        if device is not None and not self.devices_as_given:
            kwargs = {**kwargs, "device": "meta"}
        out = self._made(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            if func is aten.mse_loss.default and self.on_cpu and not out.dim():
                out = args[0].new_empty(args[0].shape).as_strided((), ())  # the scalar keeps the storage of its addends
            self.watch(out)
        elif isinstance(out, tuple | list):
            for x in out:
                if isinstance(x, torch.Tensor):
                    self.watch(x)
        if self.on_cpu and (workspace := _workspace_bytes(func, args, out)):
            self.watch(torch.empty(workspace, dtype=torch.uint8, device="meta"))
        return out

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of ``func``. For operands of types seen before it is not run again, if all its results are
        new tensors."""
        if self.devices_as_given or func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            return func(*args, **kwargs)
        key = (func, _signature(args), _signature(tuple(sorted(kwargs.items()))))
        if key not in self.memo:
            out = func(*args, **kwargs)
            self.memo[key] = _layouts(out, args)
            return out
        known = self.memo[key]
        if known is None:
            return func(*args, **kwargs)
        single, layouts = known
        made = [None if x is None else torch.empty_strided(x[0], x[1], dtype=x[2], device="meta") for x in layouts]
        return made[0] if single else tuple(made)

    def _balanced(self, picks: int, bins: int) -> torch.Tensor:
        """The tokens of each expert on this device if ``picks`` choices are spread evenly: over devices, and on each
        over its first ``MOST_EXPERTS``. The last bin counts those of other devices."""
        experts, local = bins - 1, picks // self.expert_blocks
        block = experts // self.token_blocks
        chosen = [e for e in range(experts) if e % block < MOST_EXPERTS]
        counts = [0] * experts
        for k, e in enumerate(chosen):
            counts[e] = local // len(chosen) + (k < local % len(chosen))
        return torch.tensor([*counts, picks - local])


def _workspace_bytes(func: Any, args: Any, out: Any) -> int:
    """Bytes that a CPU kernel takes beside its results and gives back: addends, operands in another layout."""
    if func is aten.mse_loss.default:
        return max(args[0].nbytes, args[1].nbytes)
    if func is aten.convolution.default:
        return convolution_workspace(args, [out], backward=False)
    return convolution_workspace(args, out, backward=True) if func is aten.convolution_backward.default else 0


Layouts = tuple[bool, list[tuple[Any, Any, torch.dtype] | None]]  # whether it is one tensor; shape, strides, dtype
Memo = dict[Any, Layouts | None]  # op and types of operands → types of results; None: run it


def _signature(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device.type
    if isinstance(x, list | tuple):
        return tuple(_signature(item) for item in x)
    return type(x), x


def _layouts(out: Any, args: Any) -> Layouts | None:
    """The types of what an op made; None if it is not all new tensors without data."""
    single = isinstance(out, torch.Tensor)
    if not single and not isinstance(out, tuple):
        return None
    items = [out] if single else list(out)
    given = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
    seen = {x.untyped_storage()._cdata for x in given if isinstance(x, torch.Tensor)}
    layouts: list[tuple[Any, Any, torch.dtype] | None] = []
    for x in items:
        if x is None:
            layouts.append(None)
        elif isinstance(x, torch.Tensor) and x.device.type == "meta" and x.untyped_storage()._cdata not in seen:
            seen.add(x.untyped_storage()._cdata)
            layouts.append((x.shape, x.stride(), x.dtype))
        else:
            return None
    return single, layouts


# ---- sums that autograd makes


def _counts(x: torch.Tensor) -> tuple[int, int]:
    private: Any = x
    return int(private._use_count()), int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def _accumulates_in_place(limit: tuple[int, int] | None, *args: Any) -> bool:
    """True if the engine, seeing no mode, would add the second of two gradients into the first: nobody else holds it,
    and it is dense."""
    x = args[0]
    if limit is None or len(args) != 2 or not isinstance(args[1], torch.Tensor) or x.device.type != "meta":
        return False
    dense = x.numel() * x.itemsize == x.untyped_storage().nbytes()
    return dense and x.shape == args[1].shape and all(a <= b for a, b in zip(_counts(x), limit, strict=True))


@cache
def _in_place_counts() -> tuple[int, int] | None:
    """The ``_counts`` of a gradient that the engine alone holds, as a dispatch mode sees it; None if this torch cannot
    say."""
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor:
                seen.append(_counts(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.empty(2, 2, device="meta", requires_grad=True)
    h = x * 2
    out = torch.relu(torch.relu(h) * 3 + torch.relu(h) * 5)
    try:
        with Probe():
            torch.autograd.backward(out, torch.empty(2, 2, device="meta"))
    except AttributeError:
        return None
    return seen[0] if len(seen) == 1 else None


# ---- stand-ins


def _experts(tracker: Tracker, mesh_shape: Sequence[int]) -> Callable[..., torch.Tensor]:
    def experts(*args: Any, **kwargs: Any) -> torch.Tensor:
        tracker.expert_blocks = prod(mesh_shape[axis] for axis in kwargs.get("expert_axes", ()))
        tracker.token_blocks = prod(mesh_shape[axis] for axis in kwargs.get("dispatch_axes", ()))
        return local_ops.experts(*args, **kwargs)

    return experts


def with_stand_ins(program: ChunkProgram, tracker: Tracker) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The program as a function of meta tensors whose backward repeats its segments."""
    attention = attention_stand_in(tracker.writes_scores, tracker.on_cpu)

    def ring(*args: Any, **kwargs: Any) -> torch.Tensor:
        return ring_attention(*args, **{**kwargs, "kernel": attention, "writes_scores": tracker.writes_scores})

    swaps: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: attention,
        ring_attention: ring,
        local_ops.experts: _experts(tracker, program.mesh_shape),
    }
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = swaps.get(node.target, node.target)
    module = repeating(torch.fx.GraphModule(torch.nn.Module(), graph), program.segments)
    forward: Callable[..., tuple[torch.Tensor, ...]] = module.forward
    return forward


class AbstractComm:
    """The collectives of the last device of a mesh (the first one's masks need no zeros) as they allocate over
    torch.distributed. ``native``: whether the backend has a reduce-scatter of its own (NCCL)."""

    def __init__(self, mesh_shape: Sequence[int], native: bool) -> None:
        self.mesh_shape, self.native = tuple(mesh_shape), native

    def size(self, axis: int) -> int:
        """Number of devices along ``axis``."""
        return self.mesh_shape[axis]

    def index(self, axis: int) -> int:
        """The last coordinate along ``axis``."""
        return self.mesh_shape[axis] - 1

    def all_reduce(self, x: torch.Tensor, axis: int, op: str = "sum") -> torch.Tensor:
        """One copy, reduced in place."""
        return x.clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """The blocks as they arrive, and as one where that is another order."""
        size = self.mesh_shape[axis]
        if size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        x = x.contiguous()
        return merge_blocks(x.new_empty((size, *x.shape)), dim)

    def reduce_scatter(self, x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
        """The blocks that leave, those that arrive, and their sum."""
        if self.mesh_shape[axis] == 1:
            return x.clone(memory_format=torch.contiguous_format)
        blocks = cut_blocks(x, self.mesh_shape[axis], dim)
        if self.native:
            return torch.empty_like(blocks[0])
        parts = torch.empty_like(blocks)
        return torch.add(parts[0], parts[1]) if len(parts) == 2 else parts.sum(0, dtype=x.dtype)

    def all_to_all(self, x: torch.Tensor, axis: int, split_dim: int, concat_dim: int) -> torch.Tensor:
        """The blocks that leave, those that arrive, and as one where that is another order. Counts, which are real,
        arrive as they leave: experts are chosen alike everywhere."""
        if self.mesh_shape[axis] == 1 or x.device.type != "meta":
            return x.clone(memory_format=torch.contiguous_format)
        return merge_blocks(torch.empty_like(cut_blocks(x, self.mesh_shape[axis], split_dim)), concat_dim)

    def all_to_all_uneven(
        self, x: torch.Tensor, axis: int, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """The rows that arrive."""
        return x.new_empty((sum(received), *x.shape[1:]))

    def exchange(
        self, before: torch.Tensor | None, after: torch.Tensor | None, axis: int, cyclic: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Allocate the tensors that arrive."""
        above, below = (None if x is None else torch.empty_like(x) for x in (after, before))
        return above, below

    def start_send(self, x: torch.Tensor, axis: int, to: int, source: int) -> Callable[[], torch.Tensor]:
        """Allocate the tensors that leave and arrive."""
        x = x.contiguous()
        came = torch.empty_like(x)
        return partial(_arrived, x, came)

    def start_sum(self, x: torch.Tensor, axes: Sequence[int]) -> _Underway:
        """Reduced in place."""
        return _Underway(x, [])

    def start_all_gather(self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none") -> _Underway:
        """Allocate the tensors that leave and arrive. Gloo gathers into a buffer of its own first."""
        parts = prod(self.mesh_shape[axis] for axis in axes)
        if _is_coded(code, x):
            row = x.new_empty(carried_bytes(code, x.numel(), x.element_size()), dtype=torch.uint8)
            came = row.new_empty((parts, len(row)))
            held = [row, came] if self.native else [row, came, torch.empty_like(came)]
            return _Underway(came, held, partial(_decoded, rows=parts, n=x.numel(), dtype=x.dtype))
        out = x.new_empty((parts, x.numel()))
        return _Underway(out, [x] if self.native else [x, torch.empty_like(out)])

    def start_reduce_scatter(
        self, x: torch.Tensor, axes: tuple[int, ...], code: str = "none", draw: tuple[int, ...] = ()
    ) -> _Underway:
        """Allocate the blocks that leave, those that arrive, and their sum."""
        parts, n = x.shape
        if _is_coded(code, x):
            rows = x.new_empty((parts, carried_bytes(code, n, x.element_size())), dtype=torch.uint8)
            came = torch.empty_like(rows)
            return _Underway(came, [rows], lambda here: _summed(_decoded(here, parts, n, x.dtype)))
        if self.native:
            return _Underway(x.new_empty(n), [x])
        return _Underway(torch.empty_like(x), [x], _summed)


@dataclass
class _Underway:
    """A collective on its way. held: until it is there."""

    out: torch.Tensor
    held: list[torch.Tensor]
    last: Callable[[torch.Tensor], torch.Tensor] | None = None

    def wait(self) -> torch.Tensor:
        """Return the tensor that arrives, and release the buffers of the message."""
        self.held.clear()
        out = self.out
        del self.out
        return out if self.last is None else self.last(out)


def _is_coded(code: str, x: torch.Tensor) -> bool:
    n = x.shape[-1]
    return x.is_floating_point() and carried_bytes(code, n, x.element_size()) < n * x.element_size()


def _summed(rows: torch.Tensor) -> torch.Tensor:
    return rows[0] + rows[1]


def _decoded(came: torch.Tensor, rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """One row after another, then all in one tensor."""
    return torch.stack([came.new_empty(n, dtype=dtype) for _ in range(rows)])


def _arrived(left: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    """Return the tensor that arrived, and release ``left``."""
    return came


@contextmanager
def allocation_cause(tracker: Tracker, cause: str) -> Iterator[None]:
    """Storages that the block makes count under ``cause``."""
    before, tracker.cause = tracker.cause, cause
    try:
        yield
    finally:
        tracker.cause = before
