"""The captured graph against the model itself: one eager forward and backward of both, at a tiny batch.

Planning, training and ``verify`` all follow the captured graph. So if the capture lost something (a backward of the
user's that nobody recognised, a branch that Python chose by chance), nothing after it would notice. ``check_capture``
runs the user's model as PyTorch does and compares the loss and the gradient of every parameter.

Both run on the same weights and inputs: the model's own, with noise where all values are equal, and made up where a
tensor has no data. Dropout is left out of both, since ours draws other masks than PyTorch's; other random ops draw our
numbers in both, which for one shape are the same at every place. They run in the model's own dtypes. If they differ
there, both run in float64 and that decides, unless the model's code cannot run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..frontend.capture import loss_of
from ..frontend.example_inputs import flat_inputs
from ..frontend.fake_model import model_settings, run_with, silence_torch, training_mode, unchanged_attributes
from ..frontend.random_ops import CountedDraws
from ..ir.comm import Context, use_context
from ..ir.graph import Graph, output_of
from ..ir.ops import local_ops
from ..ir.ops.random_numbers import random_tensor
from ..rules import rule_for
from .lockstep import LockstepComm, LockstepGroup
from .split_execution import doubled
from .values import as_dtype, batch_of, buffers_of, weights_of

__all__ = ["check_capture", "is_cheap"]

SIZES = (2, 4, 8, 16)  # batches to try, the first that the graph and the model can be run at counts
#: largest difference of a gradient, as a share of its norm; by the narrowest dtype of the parameters
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
SAME_LOSS = 1e-6  # relative difference of the losses of two runs of a model
FLOOR = 1e-5  # of the largest gradient's norm: below it a gradient is rounding
SECONDS_PER_OP = 2e-4  # assumed, of a forward and a backward by both
SECONDS = 1.0  # what a check may take where nobody asked for it
FLOPS_PER_S = 5e9  # assumed, of one core in eager PyTorch at a small batch
BYTES_PER_S = 1e9  # assumed, of weights that are copied, filled with noise, read and given gradients

_DROPOUTS = (torch.dropout, torch.native_dropout, torch.nn.functional.dropout)

_Gradients = tuple[Tensor, dict[str, Tensor | None]]
_Runs = tuple[_Gradients, _Gradients]


def is_cheap(graph: Graph) -> bool:
    """True where ``check_capture`` takes less than a second, as far as FLOPs and bytes tell."""
    ops = [node for node in graph.ops() if output_of(node)[0] is node]
    per_sample = sum(rule_for(node).flops(node) for node in ops) / graph.batch
    nbytes = sum(node.meta["type"].nbytes for node in graph.placeholders("parameter"))
    seconds = 6 * SIZES[0] * per_sample / FLOPS_PER_S + nbytes / BYTES_PER_S + len(ops) * SECONDS_PER_OP
    return seconds < SECONDS


def check_capture(
    model: nn.Module,
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: tuple[Any, ...],
    loss_fn: Callable[..., Tensor] | None,
) -> str:
    """Compare ``model`` with ``graph``, which was captured of it with these inputs.

    The model then runs once more with the same tensors: a state that it keeps in attributes gives it another loss.

    Returns "" if they agree, and why they could not be compared if the model does not run at a tiny batch here. Raises
    ValueError that names the first parameter (in the model's order) whose gradient differs, or the loss, and for such a
    state.
    """
    inputs = flat_inputs(args, dict(kwargs), targets)
    leaves, tree = pytree.tree_flatten((args, dict(kwargs), targets))
    run = _Pair(model, graph, inputs, leaves, tree, loss_fn)
    try:
        with silence_torch(), torch.random.fork_rng(devices=[]):
            difference = _difference(run.at_some_size(None), None)
            if difference:
                with suppress(_CannotRunError):  # else what the model's own dtypes said stands
                    difference = _difference(run.at_some_size(torch.float64), torch.float64)
    except _CannotRunError as error:
        return f"the capture was not compared with the model, which does not run at a tiny batch here: {error}"
    if difference:
        raise ValueError(
            "a captured graph computes what the model does, forward and backward, but got another "
            f"{difference}. Something in forward is not captured as it runs (a backward of its own, a branch that "
            "chance or a state outside of the model decides); move it out of forward, or pass check_capture=False if "
            "the difference is meant"
        )
    first, second = run.losses
    if isfinite(first) and abs(first - second) > SAME_LOSS * max(abs(first), 1e-6):
        raise ValueError(
            f"a forward follows from its inputs, weights and buffers, but got {first:.6g} as the loss of one and "
            f"{second:.6g} of the next with the same ones: the model keeps a state in attributes that are no buffers, "
            "or draws numbers outside of PyTorch, of which a capture knows the first value only; register a buffer, or "
            "pass check_capture=False if that value is meant"
        )
    return ""


class _CannotRunError(Exception):
    """The model or its graph raised."""


class _Pair:
    """The model and its graph, to be run on the same numbers."""

    def __init__(
        self, model: nn.Module, graph: Graph, inputs: Mapping[str, Any], leaves: list[Any], tree: Any, loss_fn: Any
    ) -> None:
        self.model, self.graph, self.inputs, self.loss_fn = model, graph, inputs, loss_fn
        self.leaves, self.tree = leaves, tree
        #: of two runs of the model, one behind the other
        self.losses = 0.0, 0.0

    def at_some_size(self, dtype: torch.dtype | None) -> _Runs:
        """The loss and the gradients of both, at the first batch at which both run."""
        error: Exception | None = None
        for size in SIZES:
            try:
                return self._run(size, dtype)
            except Exception as found:  # of the user's code, or an extent that the graph cannot have
                error = error or found
        raise _CannotRunError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error

    def _run(self, size: int, dtype: torch.dtype | None) -> _Runs:
        graph = self.graph.with_batch(size)
        weights = weights_of(self.model, graph, dtype)
        buffers = buffers_of(self.model, graph, dtype)
        batch = batch_of(graph, self.inputs, 1, dtype)
        trained = {n.meta["source"].name: n.meta["source"].requires_grad for n in graph.placeholders("parameter")}

        def fresh() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            leaves = {name: x.detach().requires_grad_(trained[name]) for name, x in weights.items()}
            return leaves, {name: x.clone() for name, x in buffers.items()}

        with _default_dtype(dtype), torch.enable_grad():
            with _NoDropout():  # an opaque module has its own
                captured = _captured_run(graph, *fresh(), batch, dtype)
            try:
                return self._eager_run(*fresh(), batch), captured
            except Exception:  # experts, for example, that no CPU kernel computes: as the capture has them
                with model_settings(self.model):
                    return self._eager_run(*fresh(), batch), captured

    def _eager_run(
        self, leaves: dict[str, Tensor], buffers: dict[str, Tensor], batch: Mapping[str, Tensor]
    ) -> _Gradients:
        given = [batch.get(name, leaf) for name, leaf in zip(self.inputs, self.leaves, strict=True)]

        def run(backward: bool) -> Tensor:
            tensors = leaves | {name: x.clone() for name, x in buffers.items()}
            named = {f"model.{name}": x for name, x in tensors.items()}
            with _NoDropout(), _counters():
                trained = _Trained(self.model, self.loss_fn, backward)
                loss: Tensor = run_with(trained, named, pytree.tree_unflatten(given, self.tree))
            return loss

        with (
            training_mode(self.model, True), torch.compiler.set_stance("force_eager"),
            unchanged_attributes(self.model),
        ):  # fmt: skip
            loss = run(backward=True)
            self.losses = float(loss), float(run(backward=False))
        return loss, _gradients(leaves)


class _Trained(nn.Module):
    """A model, its loss and its backward: what is computed again in the backward needs the same tensors."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor] | None, backward: bool) -> None:
        super().__init__()
        self.backward = backward
        self.model, self.loss_fn = model, [loss_fn]  # in a list: a loss that is a module is none of the model's

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> Tensor:
        loss: Tensor = loss_of(self.model(*args, **kwargs), targets, self.loss_fn[0])
        if self.backward:
            _run_backward(loss)
        return loss.detach()


def _captured_run(
    graph: Graph,
    leaves: dict[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> _Gradients:
    constants = {name: as_dtype(x, dtype) for name, x in graph.constants.items()}
    tables = {"input": batch, "parameter": leaves, "buffer": buffers, "constant": constants}
    values: dict[Any, Any] = {}
    with _counters():
        for node in graph:
            if node.op == "placeholder":
                source = node.meta["source"]
                values[node] = tables[source.kind][source.name]
                continue
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if dtype is not None:
                args, kwargs = doubled(args, dtype), doubled(kwargs, dtype)
            if node.target is random_tensor:
                args = (*args[:-1], 0)  # as every draw of ``CountedDraws``
            target = local_ops.of_any_strides(node.target)
            values[node] = args[0] if target is local_ops.dropout else target(*args, **kwargs)
    result = next(result for result in graph.results if result.kind == "loss")
    loss = values[graph.node(result.node)]
    _run_backward(loss)
    return loss.detach(), _gradients(leaves)


@contextmanager
def _counters() -> Iterator[None]:
    """The counters of random numbers, and random ops of PyTorch that follow them."""
    with use_context(Context(LockstepComm(LockstepGroup(()), 0), 0, 0, 0)), CountedDraws():
        yield


def _run_backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()  # not ``autograd.grad``, which a reentrant checkpoint refuses


def _gradients(leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    grads = {name: x.grad for name, x in leaves.items() if x.requires_grad}
    return {name: x.to_dense() if x is not None and x.is_sparse else x for name, x in grads.items()}


def _difference(runs: _Runs, dtype: torch.dtype | None) -> str:
    """The first difference, in words; "" if there is none."""
    (loss, grads), (other_loss, others) = runs
    narrow = min((x.dtype for x in grads.values() if x is not None), key=lambda d: d.itemsize, default=loss.dtype)
    tolerance = TOLERANCES.get(dtype or narrow, 1e-3)
    if not bool(loss.isfinite()) or not bool(other_loss.isfinite()):
        return "" if bool(loss.isfinite()) == bool(other_loss.isfinite()) else "loss: one of the two is not finite"
    if abs(float(loss) - float(other_loss)) > tolerance * max(abs(float(loss)), 1e-6):
        return f"loss: {float(loss):.6g} of the model, {float(other_loss):.6g} of the capture"
    norms = {name: (_norm(grads[name]), _norm(others[name])) for name in grads}
    floor = FLOOR * max((norm for pair in norms.values() for norm in pair), default=0.0)
    for name, (norm, other) in norms.items():
        if max(norm, other) <= floor:
            continue
        a, b = grads[name], others[name]
        off = max(norm, other) if a is None or b is None else float((_wide(a) - _wide(b)).norm())
        if off > tolerance * max(norm, other) + floor:
            words = [f"a norm of {x:.4g}" if g is not None else "none" for x, g in ((norm, a), (other, b))]
            return f"gradient of {name!r}: {words[0]} in the model, {words[1]} in the capture, {off:.4g} apart"
    return ""


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(_wide(x).norm())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _NoDropout(TorchFunctionMode):
    """Dropouts give what they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return (x, torch.ones_like(x, dtype=torch.bool)) if func is torch.native_dropout else x
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
