"""Submodules that cannot be traced become one op of the graph, which runs their own code (``ir.opaque_module``).

``opaque`` marks a submodule; ``Choice`` finds those where a capture fails: the smallest submodule whose forward was
running, then, if it cannot be one op, those around it. The root is never one. While ``OpaqueModules`` is active, a call
of such a module is recorded as one op. Trials on the CPU (or where the weights lie), with real weights and random
inputs at batches of 2 and 4, tell what no trace can (``_Trials``):

- the types of the results: an extent scales with the batch or is fixed, else its shape depends on values;
- the FLOPs, and the bytes that autograd keeps, scaled with the batch;
- whether it draws random numbers (then it is never cut, and seeded), and whether it gives the same values twice;
- whether a cut of the batch gives the same results and gradients (``rules.custom_function.batch_split``), under more
  seeds, at other magnitudes, where the code takes values into Python.

A module that does not run on random inputs (a mask that hides all, tokens that stand for images) is tried on those that
it gets when the model runs on the example (``Example``), in other orders and at other magnitudes.

Refused by name: results whose shapes depend on values, buffers, parameters or arguments that forward changes in place,
attributes that it sets, tensors of the model that it reads and that are not its own, results other than tensors and
constants. Weights without data are made up. A module with too much work for a trial runs on tensors without data,
where its code allows that, and is replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from ..errors import CaptureError, OpaqueError
from ..ir.custom_function import FUNCTION_OP, set_types
from ..ir.graph import PRIME, TensorType, rescale
from ..ir.long_loop import LoopWork
from ..ir.opaque_module import MARK, ModuleCopy, OpaqueModule, seeded
from ..ir.spec import Placement, R, S
from ..rules.custom_function import batch_split
from .custom_backward import CustomBackwards, Unchanged, is_literal, next_number
from .fake_model import run_with, unchanged_attributes
from .long_loops import LongLoops, not_exporting

__all__ = ["Choice", "Example", "OpaqueModules", "opaque"]

_ASKED = "mw.opaque asked for it"
_RANDOM_VALUES = "it does not run on random values"
_BATCHES = (2, 4)
_MOST_FLOPS = 4e11  # of a trial's forward, by 2 · parameters · tokens
_MOST_ELEMENTS = 1 << 28  # of a trial's weights
#: magnitudes of inputs by the seed of a trial
_SCALES = (1.0, 1.0, 1.0, 1 / 16, 16.0)

_Module = TypeVar("_Module", bound=nn.Module)


def opaque(module: _Module) -> _Module:
    """``module``, marked: where it is part of a model, it becomes one op that runs its own code and is not traced.

    State dicts and the module itself stay as they are. See "Get a model captured" in docs/how-to.md.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"opaque takes a module, but got a {type(module).__name__}; put the code into an nn.Module")
    setattr(module, MARK, True)
    return module


@dataclass(frozen=True)
class Example:
    """A model and the inputs with which it is captured, which may have data."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: one per flat leaf, of args and kwargs first; None if it has no batch dim
    batch_dims: tuple[int | None, ...]

    def calls(self, modules: Mapping[str, nn.Module]) -> dict[str, list[list[Tensor]]]:
        """By path, the tensors of each call of these modules in eager forwards of two and of four samples; nothing
        where the model has no data here, is too large, or does not run."""
        leaves, tree = pytree.tree_flatten((self.args, dict(self.kwargs)))
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        tensors = [x for x in (*leaves, *state.values()) if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors) or sum(x.numel() for x in state.values()) > _MOST_ELEMENTS:
            return {}
        calls: dict[str, list[list[Tensor]]] = {path: [] for path in modules}

        def note(path: str) -> Callable[[nn.Module, Any, Any], None]:
            def before(_: nn.Module, args: Any, kwargs: Any) -> None:
                given = pytree.tree_leaves((args, kwargs))
                calls[path].append([x.detach().clone() for x in given if isinstance(x, Tensor)])

            return before

        with ExitStack() as stack:
            for path, module in modules.items():
                stack.callback(module.register_forward_pre_hook(note(path), with_kwargs=True).remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(not_exporting())
            for batch in _BATCHES:
                order = torch.arange(batch)
                few = [
                    x.index_select(dim, (order % x.shape[dim]).to(x.device)) if dim is not None else x
                    for x, dim in zip(leaves, self.batch_dims)
                ]
                args, kwargs = pytree.tree_unflatten(few, tree)
                copied = {name: x.detach().clone() for name, x in state.items()}
                # the user's code, at a batch that it was not written for
                with suppress(Exception), unchanged_attributes(self.model):
                    run_with(self.model, copied, args, kwargs)
        return calls


class Choice:
    """The submodules that are opaque: those that were marked, and those that captures of this model asked for.

    reasons: by path, why each is not traced. observed: by path, the tensors of its calls in a run of the example.
    """

    def __init__(self, example: Example) -> None:
        self.example, model = example, example.model
        self.observed: dict[str, list[list[Tensor]]] = {}
        # by attributes: an export of a model with shared modules puts other objects that have them in place of modules
        self.paths = {id(vars(module)): path for path, module in model.named_modules() if path}
        self.modules = {path: module for path, module in model.named_modules() if path}
        every = model.named_modules(remove_duplicate=False)
        self.first = {path: self.paths[id(vars(module))] for path, module in every if id(vars(module)) in self.paths}
        self.reasons = {path: _ASKED for path, module in self.modules.items() if getattr(module, MARK, False)}
        self.refused: dict[str, str] = {}
        self.original: CaptureError | None = None

    def after(self, error: Exception, found: CaptureError) -> CaptureError | None:
        """Make another submodule opaque after a failed capture: None, or the error to raise if there is none to make.

        found: the error as it is told to users.
        """
        refusal = next((link for link in _chain(error) if isinstance(link, OpaqueError)), None)
        if refusal is not None and refusal.path not in self.observed and _RANDOM_VALUES in str(refusal):
            kind = type(self.modules[refusal.path])
            called = {path: module for path, module in self.modules.items() if type(module) is kind}
            self.observed |= {refusal.path: [], **self.example.calls(called)}
            if self.observed[refusal.path]:
                return None
        if refusal is not None:
            if self.reasons.get(refusal.path) == _ASKED:
                return CaptureError(str(refusal))
            # of code that does not run in eager PyTorch either, the first error says enough
            told = refusal.__cause__ is None or "without data" in str(refusal)
            self.refused[refusal.path] = str(refusal) if told else ""
            path = refusal.path
        else:
            self.original = found
            path = self.first.get(found.module, "") or self._running(error)
        reason = self.reasons.get(path) or str(found)
        kind = type(self.modules[path]) if path else nn.Module
        if path in self.refused:
            for other in [p for p in self.reasons if type(self.modules[p]) is kind and self.reasons[p] != _ASKED]:
                del self.reasons[other]
        while path:
            module = self.modules.get(path)
            if path not in self.refused and path not in self.reasons and module is not None and _is_called(module):
                alike = [p for p, other in self.modules.items() if type(other) is type(module)]
                for other in alike:
                    if other not in self.refused:
                        self.reasons.setdefault(other, reason)
                return None
            path = path.rpartition(".")[0]
        last = self.original or found
        why = "; ".join(dict.fromkeys(filter(None, self.refused.values())))
        if not why:
            return last
        return CaptureError(f"{last}; nor can a submodule of it be one op: {why}"[:2000])

    def _running(self, error: Exception) -> str:
        """The path of the innermost module whose forward raised, or that called the Function which did; "" if that is
        the root."""
        for link in _chain(error):
            running = ""
            for frame in _frames(link.__traceback__):
                owner = frame.f_locals.get("self")
                if isinstance(owner, CustomBackwards):
                    break
                if isinstance(owner, nn.Module):
                    running = self.paths.get(id(vars(owner)), running)
            if running:
                return running
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _frames(traceback: TracebackType | None) -> Iterator[Any]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class OpaqueModules:
    """The context of one export, in which the chosen modules are ops. instead: as in ``LongLoops``."""

    def __init__(
        self, model: nn.Module, choice: Choice, backwards: CustomBackwards, loops: LongLoops, extent: int,
        kept: dict[Any, _Trials],
    ) -> None:  # fmt: skip
        self.choice, self.backwards, self.loops, self.extent = choice, backwards, loops, extent
        self.instead: dict[Any, Any] = {}
        self.undo = ExitStack()
        self.modules = {path: module for path, module in choice.modules.items() if path in choice.reasons}
        #: what was learnt of modules; it outlives a failed export
        self.kept = kept
        self.copies: dict[str, tuple[ModuleCopy, list[Tensor]]] = {}

    def __enter__(self) -> OpaqueModules:
        for path, module in self.modules.items():
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            self.copies[path] = ModuleCopy(path, module), list(tensors.values())
            owner: Any = module if "forward" in vars(module) else type(module)
            if owner.forward not in self.instead:
                before, own = owner.forward, "forward" in vars(owner)
                lead = self._lead_instance(module, before) if owner is module else self._lead(before)
                self.instead[lead] = before
                restore = functools.partial(setattr, owner, "forward", before)
                self.undo.callback(restore if own else functools.partial(delattr, owner, "forward"))
                owner.forward = lead
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def _lead(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def led(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.choice.paths.get(id(vars(module)))
            traced = any(isinstance(x, FakeTensor) for x in pytree.tree_leaves((args, kwargs)))
            if path not in self.copies or not traced:
                return forward(module, *args, **kwargs)
            return self._record(path, self.modules[path], args, kwargs)

        return led

    def _lead_instance(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        led = self._lead(lambda _, *args, **kwargs: forward(*args, **kwargs))
        return functools.wraps(forward)(functools.partial(led, module))

    def _record(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        called, tensors = self.copies[path]
        own = [*module.parameters(), *module.buffers()]
        leaves, structure = pytree.tree_flatten(((own, *args), kwargs))
        objects = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tensor) and not is_literal(x)}
        kinds = [x for x in leaves if isinstance(x, Tensor)]
        if any(not isinstance(extent, int) for x in kinds for extent in x.shape):
            raise OpaqueError(path, "one of its arguments has a shape that depends on values")
        types = [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else None for x in leaves]
        literals = [None if isinstance(x, Tensor) or i in objects else x for i, x in enumerate(leaves)]
        key = called.digest, str(structure), tuple(types), repr(literals), tuple(map(id, objects.values()))
        if key not in self.kept:
            running, self.backwards.running = self.backwards.running, True
            try:
                with (
                    self.loops.unwatched(), _disable_current_modes(), torch._C.DisableTorchFunction(),
                    torch.enable_grad(), not_exporting(), seeded(0, tensors),
                ):  # fmt: skip
                    observed = self.choice.observed.get(path, [])
                    self.kept[key] = _Trials(path, called, structure, leaves, tensors, objects, self.extent, observed)
            finally:
                self.backwards.running = running
        trials = self.kept[key]
        number = next_number()
        calls = self.backwards.calls
        op = OpaqueModule(called, structure, objects, len(calls), trials.work)
        op.path, op.reason, op.assumed = path, self.choice.reasons[path], trials.assumed
        op.random, op.split, op.whole_reason = trials.random, trials.split, trials.whole_reason
        calls[number] = op
        self.backwards.arguments[number] = [None if i in objects else x for i, x in enumerate(leaves)]
        outputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in trials.work.outputs]
        set_types(number, outputs)
        flat = FUNCTION_OP([x for x in leaves if isinstance(x, Tensor)], number)
        results = iter([x if tracked else x.detach() for x, tracked in zip(flat, trials.tracked, strict=True)])
        returned = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in trials.returned]
        return pytree.tree_unflatten(returned, trials.structure)


@dataclass
class _Run:
    """One run of a module and its backward."""

    #: the leaves of its result
    leaves: list[Any]
    structure: Any
    #: the tensors among the leaves, and the gradients of the operands
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    flops: float
    saved_bytes: float
    saved_operands: tuple[int, ...]
    random: bool
    reads_values: bool


class _Trials:
    """The facts about a module, found by running it.

    returned, structure: of its result, with some tensor for each tensor. tracked: by output, whether gradients flow
    through it.
    """

    def __init__(
        self, path: str, module: ModuleCopy, structure: Any, leaves: Sequence[Any], tensors: Sequence[Tensor],
        objects: Mapping[int, Any], extent: int, observed: Sequence[Sequence[Tensor]],
    ) -> None:  # fmt: skip
        self.path, self.module, self.leaves, self.tensors = path, module, leaves, tensors
        self.arguments, self.objects, self.extent = structure, objects, extent
        self.kinds = [TensorType(tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor)]
        if not self.kinds:
            raise OpaqueError(path, "it has neither tensors nor tensors as arguments")
        self.batched = [[d for d, e in enumerate(kind.shape) if e and e % PRIME == 0] for kind in self.kinds]
        self.is_scaled = any(self.batched)
        self.device = next((x.device for x in tensors if x.device.type != "meta"), torch.device("cpu"))
        self.has_data = self._is_small()
        calls = [([TensorType(tuple(x.shape), x.dtype) for x in call], call) for call in observed]
        found = [next((call for kinds, call in calls if kinds == self._small_kinds(n)), None) for n in _BATCHES]
        #: by batch, the arguments of a real call, where random ones do not do
        self.observed = {n: call for n, call in zip(_BATCHES, found) if call} if None not in found else None
        if not self.has_data:
            self.device = torch.device("meta")
        small, again = self._run(2, 0), self._run(2, 0, twice=True)
        other, large = self._run(2, 1), self._run(4, 2)
        self.random = any(run.random for run in (small, again, other, large))
        if self.has_data and not _is_equal(small, again):
            raise OpaqueError(path, "it gives other values for the same inputs (a state or chance outside of PyTorch)")
        if self.module.leaves_values and not self.has_data:
            raise OpaqueError(path, "it changes its attributes, and is too large for a trial of what that does")
        self.returned, self.structure = small.leaves, small.structure
        outputs = self._outputs(small, (other, large))
        several = zip(small.outputs, other.outputs, large.outputs, strict=True)
        self.tracked = [any(x.requires_grad or not x.is_floating_point() for x in same) for same in several]
        share = self.extent / _BATCHES[1] if self.is_scaled else 1.0
        flops, saved = (
            max(getattr(large, name), 2 * getattr(small, name), 2 * getattr(other, name))
            for name in ("flops", "saved_bytes")
        )
        self.work = LoopWork(
            tuple(kind.shape for kind in self.kinds), outputs, flops * share, saved * share,
            tuple(sorted({*small.saved_operands, *large.saved_operands})),
        )  # fmt: skip
        self.assumed = "its FLOPs and kept bytes are measured in a trial at a batch of 4 and scaled"
        if self.observed is not None:
            self.assumed += ", on samples of the example"
        if not self.has_data:
            self.assumed = "too large for a trial, its FLOPs and kept bytes are assumed from a run without data"
        reads_values = any(run.reads_values for run in (small, other, large))
        self.split, self.whole_reason = self._split(reads_values)

    def _is_small(self) -> bool:
        elements = sum(x.numel() for x in self.tensors)
        tokens = max((kind.numel // kind.shape[-1] for kind in self._small_kinds(4) if kind.shape), default=1)
        return elements <= _MOST_ELEMENTS and 2.0 * elements * tokens <= _MOST_FLOPS

    def _small_kinds(self, batch: int) -> list[TensorType]:
        """The types of the arguments, without the module's own tensors, at a batch."""
        kinds = self.kinds[len(self.tensors) :]
        return [TensorType(tuple(self._at(e, batch) for e in kind.shape), kind.dtype) for kind in kinds]

    def _at(self, value: Any, batch: int) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._at(item, batch) for item in value)
        return value if isinstance(value, str) else rescale(value, self.extent, batch)

    # ---- runs

    def _operands(self, batch: int, seed: int, wide: bool = False) -> list[Tensor]:
        """The module's own tensors, made up where they have no data, and random arguments."""
        generator = torch.Generator().manual_seed(seed)
        if self.device.type == "meta":
            return [torch.empty(k.shape, dtype=k.dtype, device="meta") for k in self._all_kinds(batch)]
        made = []
        for x in self.tensors:
            if x.device.type != "meta":
                made.append(x.detach().to(self.device).clone())
            elif x.dtype.is_floating_point:
                values = torch.randn(x.shape, generator=generator)
                made.append((0.02 * values if x.dim() > 1 else values.abs() + 0.5).to(self.device, x.dtype))
            else:
                made.append(torch.zeros(x.shape, dtype=x.dtype, device=self.device))
        arguments = [x for x in self.leaves if isinstance(x, Tensor)][len(self.tensors) :]
        for number, (x, kind) in enumerate(zip(arguments, self._small_kinds(batch), strict=True)):
            if self.observed is not None:
                x = self._observed_value(number, batch, seed)
            elif seed % 2 and not x.requires_grad and kind.dtype != torch.bool:
                x = torch.zeros(kind.shape, dtype=kind.dtype)  # such as a mask that hides nothing
            elif kind.is_float:
                x = _SCALES[seed] * torch.randn(kind.shape, generator=generator).to(kind.dtype)
            else:
                x = torch.randint(0, 2, kind.shape, generator=generator).to(kind.dtype)
            made.append(x.to(self.device))
        return [_in_double(x) if wide else x for x in made]

    def _observed_value(self, number: int, batch: int, seed: int) -> Tensor:
        assert self.observed is not None
        x = self.observed[batch][number]
        for dim in self.batched[len(self.tensors) + number]:
            x = x.roll(seed, dim)
        return x * _SCALES[seed] if x.is_floating_point() else x.clone()

    def _all_kinds(self, batch: int) -> list[TensorType]:
        return [*self.kinds[: len(self.tensors)], *self._small_kinds(batch)]

    def _arguments(self, batch: int) -> list[Any]:
        """The leaves of a call at a batch, with its type for every tensor."""
        kinds = iter(self._all_kinds(batch))
        return [
            next(kinds) if isinstance(x, Tensor) else x if i in self.objects else self._at(x, batch)
            for i, x in enumerate(self.leaves)
        ]

    def _run(self, batch: int, seed: int, twice: bool = False) -> _Run:
        """A run with PyTorch's generator seeded, and its backward, or the second one of two. OpaqueError if it does
        what one op cannot."""
        try:
            torch.manual_seed(seed)
            return self._audited(batch, seed, twice)
        except OpaqueError:
            raise
        except Exception as error:  # the user's code, on tensors that it was not written for
            text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]
            where = "it does not run on tensors without data (it is too large for a trial here)"
            if self.has_data:
                where = _RANDOM_VALUES if self.observed is None else "it does not run on a few samples of the example"
            raise OpaqueError(self.path, f"{where}: {text}") from error

    def _audited(self, batch: int, seed: int, twice: bool) -> _Run:
        grads = [x.requires_grad for x in self.leaves if isinstance(x, Tensor)]
        operands = self._operands(batch, seed)
        given = [x.requires_grad_(grad) for x, grad in zip(operands, grads, strict=True)]
        given = [x.clone() if x.requires_grad else x for x in given]  # autograd lets no leaf be changed in place
        own, kept = {x.untyped_storage()._cdata: k for k, x in enumerate(given)}, dict[int, Tensor]()

        def keep(x: Tensor) -> Tensor:
            kept.setdefault(x.untyped_storage()._cdata, x)
            return x

        tensors = iter(given)
        leaves = [next(tensors) if isinstance(x, TensorType) else x for x in self._arguments(batch)]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments)
        watch, state = Unchanged(given), self._generators()
        on: AbstractContextManager[Any] = torch.device("meta") if self.device.type == "meta" else nullcontext()
        with on, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), _Audit(self.path, watch) as audit:
            seeds = functools.partial(torch.manual_seed, seed)
            run = functools.partial(self.module.twice, seeds) if twice else self.module
            returned = run(*args, **kwargs)
        self._refuse_changes(watch.changed())
        flat, structure = pytree.tree_flatten(returned)
        outputs = [x for x in flat if isinstance(x, Tensor)]
        if not outputs or not all(isinstance(x, Tensor) or is_literal(x) for x in flat):
            raise OpaqueError(self.path, "it returns something else than tensors and constants")
        random = audit.draws if self.device.type == "meta" else not torch.equal(state, self._generators())
        addressed = {address: x for address, x in kept.items() if x.device == self.device}
        return _Run(
            flat, structure, outputs, self._gradients(operands, outputs), audit.flops,
            float(sum(x.untyped_storage().nbytes() for address, x in addressed.items() if address not in own)),
            tuple(sorted(own[address] for address in kept if address in own)), random, audit.reads_values,
        )  # fmt: skip

    def _generators(self) -> Tensor:
        """The states of PyTorch's generators that the module may draw from."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return torch.cat(states)

    def _refuse_changes(self, changed: list[int]) -> None:
        if not changed:
            return
        if changed[0] >= len(self.tensors):
            raise OpaqueError(self.path, "it changes an argument in place; let it work on a clone()")
        name = self.module.names[changed[0]]
        raise OpaqueError(
            self.path, f"it changes its tensor {name!r} in place; put that into eval mode, or move it out"
        )

    @staticmethod
    def _gradients(operands: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor | None]:
        tracked, wanted = [x for x in outputs if x.requires_grad], [x for x in operands if x.requires_grad]
        if not tracked or not wanted:
            return []
        return list(torch.autograd.grad(tracked, wanted, [torch.ones_like(x) for x in tracked], allow_unused=True))

    # ---- conclusions

    def _outputs(self, small: _Run, others: Sequence[_Run]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The types of the outputs at the extent of the capture."""
        other, large = others
        for run in others:
            constant = [(type(x), None if isinstance(x, Tensor) else x) for x in run.leaves]
            if run.structure != small.structure or constant != [
                (type(x), None if isinstance(x, Tensor) else x) for x in small.leaves
            ]:
                raise OpaqueError(self.path, "it returns constants or a structure that depend on values or the batch")
        types = []
        for number, (x, y, z) in enumerate(zip(small.outputs, other.outputs, large.outputs, strict=True)):
            shape = []
            ranks = {x.dim(), y.dim(), z.dim()}
            for a, b, c in zip(x.shape, y.shape, z.shape):
                if len(ranks) > 1 or a != b or c not in (a, 2 * a) or (c != a and not self.is_scaled):
                    break
                shape.append(a if c == a else a * self.extent // _BATCHES[0])
            if len(shape) != x.dim() or len(ranks) > 1 or x.dtype != z.dtype:
                raise OpaqueError(
                    self.path, f"its output {number} has a shape that depends on values: {list(x.shape)}, then "
                    f"{list(y.shape)} at a batch of 2, {list(z.shape)} at 4; return a tensor of fixed shape"
                )  # fmt: skip
            types.append((tuple(shape), x.dtype))
        return tuple(types)

    def _split(self, reads_values: bool) -> tuple[Any, str]:
        """(placements under a cut of the batch, why it is not cut)."""
        if not self.is_scaled:
            return None, "none of its arguments has a batch"
        if self.random:
            return None, "it draws random numbers"
        if not self.has_data:
            return None, "it is too large for a trial of a cut"
        if any(len(dims) > 1 for dims in self.batched):
            return None, "an argument has two dims of the batch"
        cut: tuple[Placement, ...] = tuple(S(dims[0]) if dims else R for dims in self.batched)
        probe = OpaqueModule(self.module, self.arguments, self.objects, 0, self.work)
        seeds = range(len(_SCALES)) if reads_values else range(2)
        split = batch_split(
            probe, tuple(self._arguments(_BATCHES[1])), cut,
            lambda seed, wide: self._operands(_BATCHES[1], seed, wide), list(seeds),
        )  # fmt: skip
        return split, "" if split else "its parts do not make up the whole in a trial of a cut batch"


def _in_double(x: Tensor) -> Tensor:
    """The tensor in float64 or complex128; integers as they are."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _is_equal(a: _Run, b: _Run) -> bool:
    pairs = zip([*a.outputs, *a.gradients], [*b.outputs, *b.gradients])
    return all(
        (x is None) == (y is None)
        and (
            x is None
            or y is None
            or (x.shape == y.shape and torch.allclose(_in_double(x), _in_double(y), equal_nan=True))
        )
        for x, y in pairs
    )


class _Audit(TorchDispatchMode):
    """A dispatch mode that counts FLOPs, one per element of an op that is no product, notes random ops and values that
    Python takes, and refuses tensors of the model that are no operands."""

    def __init__(self, path: str, given: Unchanged) -> None:
        super().__init__()
        self.given = given
        self.path, self.flops, self.draws, self.reads_values = path, 0.0, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, FakeTensor | nn.Parameter) for x in pytree.tree_leaves((args, kwargs))):
            raise OpaqueError(self.path, "it reads a tensor of the model that is neither its own nor an argument")
        self.given.note(func, args, kwargs)
        out = func(*args, **kwargs)
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.reads_values |= func is torch.ops.aten._local_scalar_dense.default or torch.Tag.data_dependent_output in (
            func.tags
        )
        if not func.is_view:
            count = flop_registry.get(func.overloadpacket)
            tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            self.flops += count(*args, **kwargs, out_val=out) if count else float(sum(x.numel() for x in tensors))
        return out
