"""Temporary changes to the user's model during an export: fake weights, training mode and settings, all undone
afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.nn import functional

from ..errors import CaptureError
from ..ir.ops.ctc import reduced_ctc_loss
from ..ir.ops.experts import EXPERTS_NAME, register_experts

__all__ = [
    "Names",
    "assigned_tensors",
    "fake_parameters",
    "model_settings",
    "no_idle_masks",
    "refuse_shared_memory",
    "run_with",
    "silence_torch",
    "tensor_names",
    "torch_settings",
    "training_mode",
    "unchanged_attributes",
]


KNOWN_ELEMENTS = 1024  # of a tensor whose values branches may read
_LEFT_OUT = "_ignore_bidirectional_mask_sdpa"  # of transformers.masking_utils


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the whole model in this mode, unless its root already is; restore every module's mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if model.training != training:
            model.train(training)
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def assigned_tensors() -> Iterator[list[torch.Tensor]]:
    """The tensors of other attributes than buffers that an export replaces. A buffer that is assigned to
    (``self.mean = …``) is changed in place, which an export sees, where the assigned tensor is of its type."""
    module: Any = nn.Module
    assign, replaced = module.__setattr__, list[torch.Tensor]()

    def assign_or_copy(owner: nn.Module, name: str, value: Any) -> None:
        old = vars(owner).get("_buffers", {}).get(name)
        alike = isinstance(old, FakeTensor) and isinstance(value, torch.Tensor) and value is not old
        if alike and (old.shape, old.dtype) == (value.shape, value.dtype):
            old.copy_(value)
            return
        if isinstance(before := vars(owner).get(name), torch.Tensor) and isinstance(value, FakeTensor):
            replaced.append(before)
        assign(owner, name, value)

    module.__setattr__ = assign_or_copy
    try:
        yield replaced
    finally:
        module.__setattr__ = assign


@contextmanager
def unchanged_attributes(model: nn.Module, without_data: bool = False) -> Iterator[None]:
    """Undo what the code of the modules keeps in them, such as masks and positions that a first forward makes. Of
    lists, dicts and sets the members are restored, too.

    without_data: only in modules that keep a tensor without data, which an export makes; what others do once, such as
    to install hooks, stays done.
    """
    tables = [vars(module) for module in model.modules()]
    before = [{key: (value, _members(value)) for key, value in table.items()} for table in tables]
    try:
        yield
    finally:
        for table, attributes in zip(tables, before, strict=True):
            if without_data and not any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(_new(table, attributes))):
                continue
            for key in [key for key in table if key not in attributes]:
                del table[key]
            for key, (value, members) in attributes.items():
                table[key] = value
                if members is None:
                    continue
                value.clear()
                if isinstance(value, list):
                    value.extend(members)
                else:
                    value.update(members)


def _new(table: Mapping[str, Any], attributes: Mapping[str, tuple[Any, Any]]) -> list[Any]:
    """What is in the attributes that was not there before."""
    found = []
    for key, value in table.items():
        old, members = attributes.get(key, (None, None))
        if value is not old:
            found.append(value)
        elif members is not None:
            now, then = (list(x.values()) if isinstance(x, dict) else list(x) for x in (value, members))
            known = set(map(id, then))
            found += [member for member in now if id(member) not in known]
    return found


def _members(value: Any) -> Any:
    """A copy of a list, a dict or a set; None of anything else, types of the user's that are one included."""
    return value.copy() if type(value) in (list, dict, set, OrderedDict, defaultdict) else None


def run_with(model: nn.Module, tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any = None) -> Any:
    """``model(*args, **kwargs)`` with these tensors in place of its own, by any name of each.

    ``functional_call`` gives a module that has several names its tensors by each of them, and then takes the last ones
    given for the model's own: they stay in the model. It does not know of attributes that hold a parameter.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    with _instead(model, {id(tensor): tensors[name] for name, tensor in named if name in tensors}):
        return model(*args, **(kwargs or {}))


@contextmanager
def _instead(model: nn.Module, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put other tensors, by the identity of the present ones, in the place of parameters and buffers, registered or in
    attributes (``_attributes_with``); put the present ones back at the end."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for table in tables:
                for key, old in list(table.items()):
                    if id(old) in others:
                        undo.append((table, key, old))
                        table[key] = others[id(old)]
        with _attributes_with(model, others):
            yield
    finally:
        for place, key, old in reversed(undo):
            place[key] = old


@contextmanager
def _attributes_with(model: nn.Module, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the place of those that attributes hold beside the registered ones: a second name of a
    parameter, or lists, tuples and dicts of some (as RNNs keep them)."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            table = vars(module)
            for key, old in list(table.items()):
                if key not in ("_parameters", "_buffers", "_modules") and (new := _replaced(old, others)) is not old:
                    undo.append((table, key, old))
                    table[key] = new
        yield
    finally:
        for place, key, old in reversed(undo):
            place[key] = old


def _replaced(value: Any, others: Mapping[int, torch.Tensor], depth: int = 3) -> Any:
    """``value`` itself, or its copy with other tensors in place of some."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    kind = type(value)
    if kind not in (list, tuple, dict, OrderedDict) or depth == 0:
        return value
    olds = list(value.values() if isinstance(value, dict) else value)
    news = [_replaced(one, others, depth - 1) for one in olds]
    if all(new is old for new, old in zip(news, olds)):
        return value
    return kind(zip(value, news)) if isinstance(value, dict) else kind(news)


@contextmanager
def silence_torch() -> Iterator[io.StringIO]:
    """Suppress torch's own log lines, graph dumps and deprecation notices: the exception says what goes wrong.

    Text that the model's code writes to stderr is printed at the end of a capture that succeeds; the value of the block
    is where it is until then.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    written = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(written):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "Unable to execute the generated python source code")
            yield written
    finally:
        logging.disable(before)
    sys.stderr.write(written.getvalue())


@contextmanager
def model_settings(model: nn.Module) -> Iterator[None]:
    """Apply Hugging Face settings for a capture: no generation cache, no recompute (a plan matter), experts as one op.

    The whole configuration is restored afterwards, since some forwards write to it.
    """
    wanted: dict[str, Any] = {"use_cache": False}
    if register_experts():
        wanted["_experts_implementation_internal"] = EXPERTS_NAME
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    saved = [(vars(config), dict(vars(config))) for config in configs.values()]
    recomputed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for table, before in saved:
            table.update({key: value for key, value in wanted.items() if key in before})
        for module in recomputed:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for table, before in saved:
            table.clear()
            table.update(before)
        for module in recomputed:
            module.gradient_checkpointing = True  # type: ignore[assignment]


@contextmanager
def no_idle_masks() -> Iterator[None]:
    """Let transformers leave out masks that hide nothing, as it does in training."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    left_out = getattr(masks, _LEFT_OUT, None)
    if left_out is None:
        yield
        return
    setattr(masks, _LEFT_OUT, _unmasked(left_out))
    try:
        yield
    finally:
        setattr(masks, _LEFT_OUT, left_out)


def _unmasked(left_out: Callable[..., bool]) -> Callable[..., bool]:
    """The function by which transformers leaves out a mask that hides nothing, without its exception for exports: a
    layer that shortens the sequence (Informer's) does not shorten the mask."""

    def decide(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        if padding_mask is None:
            return local_attention_size is None or kv_length < local_attention_size
        return left_out(padding_mask, kv_length, local_attention_size)

    return decide


@contextmanager
def torch_settings() -> Iterator[None]:
    """For a capture, leave out what PyTorch does beside the computation: distributions do not look at the values that
    they are given (a value outside of their domain makes a loss that is not finite), ``Module.to`` returns a module
    that is of that dtype already, ``ctc_loss`` does not read its lengths, and ``histc`` counts integers on any
    device. Branches may read tensors that forward makes of a few Python numbers, not of one alone."""
    tracers: list[Any] = [fake_tensor, proxy_tensor]
    limits = [(one, one.CONSTANT_NUMEL_LIMIT) for one in tracers]
    validate, to, ctc_loss, histc = Distribution._validate_args, nn.Module.to, functional.ctc_loss, torch.histc

    def to_if_needed(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        if device is None and layout is None and all(x.dtype == dtype for x in tensors if x.is_floating_point()):
            return module
        return to(module, *args, **kwargs)

    def counts(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        if x.dtype.is_floating_point or (min, max) != (0, bins):
            return histc(x, bins, min, max)
        numbers = torch.where(x == bins, bins - 1, x).reshape(-1, 1)  # the last bin has its right end as well
        return (numbers == torch.arange(bins, device=x.device)).sum(0).to(x.dtype)

    Distribution.set_default_validate_args(False)
    torch.histc = counts  # type: ignore[assignment]
    nn.Module.to = to_if_needed  # type: ignore[method-assign, assignment]
    functional.ctc_loss = reduced_ctc_loss
    for one, _ in limits:
        one.CONSTANT_NUMEL_LIMIT = KNOWN_ELEMENTS
    try:
        yield
    finally:
        for one, limit in limits:
            one.CONSTANT_NUMEL_LIMIT = limit
        nn.Module.to = to  # type: ignore[method-assign]
        functional.ctc_loss, torch.histc = ctc_loss, histc
        Distribution.set_default_validate_args(validate)


@dataclass
class Names:
    """Qualified names of the model's tensors, grouped by identity: a tied tensor has several."""

    #: first name → all names, the first one first
    parameters: dict[str, list[str]]
    #: first name → all names, the first one first
    buffers: dict[str, list[str]]
    #: any name → first name
    first: dict[str, str]
    #: tensors by first name
    tensors: dict[str, torch.Tensor]
    #: names of buffers that are in no state dict
    transient: frozenset[str]


def tensor_names(model: nn.Module) -> Names:
    """The names of all parameters and buffers of ``model``. CaptureError if one has no shape yet."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    names = Names({}, {}, {}, {}, frozenset(transient))
    for table, named in (
        (names.parameters, model.named_parameters(remove_duplicate=False)),
        (names.buffers, model.named_buffers(remove_duplicate=False)),
    ):
        first: dict[int, str] = {}
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise CaptureError(
                    f"weights have shapes, but got {name!r} of a lazy module; call the model once on a batch before"
                )
            names.first[name] = first.setdefault(id(tensor), name)
            table.setdefault(first[id(tensor)], []).append(name)
            names.tensors[first[id(tensor)]] = tensor
    return names


def refuse_shared_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError if a trained one of these tensors lies in the memory of another one: in eager PyTorch a step
    changes both, in a plan each is a tensor of its own."""
    spans: defaultdict[int, list[tuple[int, int, bool, str]]] = defaultdict(list)
    for name, x in tensors.items():
        if x.layout == torch.strided and x.numel() and not isinstance(x, FakeTensor):
            begin = int(x.storage_offset()) * x.itemsize
            extent = sum((size - 1) * int(stride) for size, stride in zip(x.shape, x.stride())) + 1
            spans[x.untyped_storage()._cdata].append((begin, begin + extent * x.itemsize, x.requires_grad, name))
    for held in spans.values():
        any_end, trained_end = (0, ""), (0, "")  # the furthest so far
        for begin, end, trained, name in sorted(held):
            until, other = any_end if trained else trained_end
            if begin < until:
                raise CaptureError(
                    f"each weight has memory of its own, but got {name!r} in that of {other!r}; tie two weights as one "
                    "Parameter under two names, and clone() what is to keep its value"
                )
            any_end = max(any_end, (end, name))
            if trained:
                trained_end = max(trained_end, (end, name))


@contextmanager
def fake_parameters(model: nn.Module, mode: FakeTensorMode) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Replace every parameter and buffer by a fake CPU tensor, one per tensor; put the originals back at the end.

    The value of the block makes contexts in which attributes hold what is registered at that time: an export registers
    tensors of its own while it traces."""
    fakes: dict[int, torch.Tensor] = {}
    places: dict[int, tuple[nn.Module, str]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new

    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in fakes:
                fakes[id(tensor)] = fake(tensor)
                places[id(fakes[id(tensor)])] = module, key

    def present() -> AbstractContextManager[None]:
        return _attributes_with(model, {key: getattr(*place) for key, place in places.items()})

    with _instead(model, fakes):
        for module in model.modules():
            _refuse_unregistered(module, fakes)
        yield present


def _refuse_unregistered(module: nn.Module, known: Mapping[int, torch.Tensor]) -> None:
    """Raise CaptureError for a trainable parameter in a plain attribute or container.

    An export would take it for a constant, and it would silently not be trained.
    """
    ours = {id(fake) for fake in known.values()}
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers", "_modules"):
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if isinstance(item, nn.Parameter) and item.requires_grad and id(item) not in ours:
                raise CaptureError(
                    f"every parameter is registered, but got one in {type(module).__name__}.{key}, a plain attribute; "
                    "use an nn.Parameter attribute, nn.ParameterList or nn.ParameterDict"
                )
