"""Tracing of repeated blocks: of equal blocks the export traces the first one, and the others are copies of it.

``torch.export`` takes milliseconds per op, so a model of 100 equal blocks is traced as one. While ``Blocks`` is active,
the ``forward`` of every class of which the model has repeated instances calls ``_run``:

- The first call of a kind runs as it is. Its inputs and outputs then become operands of one ``meshwright::block`` op,
  so that its nodes can be found in the exported program: those between the op's ``outputs`` and ``inputs``.
- A later call that is *equal* makes one ``meshwright::block`` op without outputs, whose results have the types of the
  first call's. The translation of the program (``capture``) puts the first call's nodes in its place, with parameters
  and buffers substituted by path.

Correctness: the copy is the same as a trace. A trace is a function of the code that runs, of the module and arguments
that it runs on, and of the state of the process. Two calls are taken for equal only if (1) the classes of all modules,
their attributes, the shapes, strides, dtypes, flags and ties of their tensors are equal (``block_state.describe``,
before both calls, and unchanged after the first); an attribute that differs, such as a layer's index, may do so if the
first call did not read it (a descriptor on the class sees every read); (2) the arguments have equal structure,
constants, types, strides, aliases and identities; (3) gradient mode, autocast, default dtype and function modes are
equal; (4) the code can neither keep state outside of the module nor read a global that has changed
(``block_state.Audit``); (5) the first call returned nothing but tensors of its own, its arguments and constants, and
left its arguments as they were; (6) its nodes use only its inputs, its own parameters and buffers and each other: no
constants, nothing from outside; (7) buffers that it changes are touched by nobody else. (1) to (5) are checked when
the call happens; a call that fails is traced. (6) and (7) are checked in the exported program: ``UnsoundError`` then
names the blocks, and the capture is repeated without them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from ..errors import HiddenError, UnprovableError, UnsoundError
from .block_state import Audit, BlockState, Tensors, canonical, describe

__all__ = ["BLOCK", "BlockTemplate", "Blocks", "TracedBlock", "live_nodes", "template_of"]


_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("block(Tensor[] inputs, Tensor[] outputs, int call) -> Tensor[]")
_TYPES: dict[int, list[Any]] = {}  # call → what its op gives; for the time of a capture
_NUMBERS = itertools.count()  # never twice: fake tensors remember what an op gave


def _block_type(inputs: list[torch.Tensor], outputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in _TYPES[call]]


_LIBRARY.impl("block", _block_type, "Meta")
BLOCK = torch.ops.meshwright.block.default


@dataclass
class _Candidate:
    """A module that seems to have equals: other modules with the same classes and shapes."""

    module: nn.Module
    path: str
    #: number of the group of modules that seem equal
    kind: int
    #: the module itself and its submodules, by path below it
    members: list[tuple[str, nn.Module]]


@dataclass
class _Call:
    """The comparable description of one call."""

    state: BlockState
    #: the state of the process (``_process_state``)
    mode: Any
    #: the structure of the arguments
    spec: Any
    #: a comparable value per flat argument
    leaves: list[Any]
    #: the distinct tensors among the arguments
    inputs: list[torch.Tensor]
    #: version counters of ``inputs``, which show changes in place
    versions: list[int]


@dataclass
class TracedBlock:
    """The first call of its kind, of which equal calls become copies."""

    number: int
    kind: int
    path: str
    call: _Call
    #: (path, name) of the watched attributes that the call read
    reads: set[tuple[str, str]] = field(default_factory=set)
    #: the structure of the returned value
    spec: Any = None
    #: per leaf of the returned value ("input", i), ("made", i) or ("is", value)
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    #: for each new tensor that was returned, True if it requires a gradient
    grads: list[bool] = field(default_factory=list)
    #: True once the call is known to compute its outputs and nothing else
    usable: bool = False


class Blocks:
    """The context of one export of ``model``, in which equal blocks are traced once.

    banned: the kinds of which every block is traced by itself (None: all). instead: of ``Audit``. calls: number of the
    op → (record, path).
    """

    def __init__(
        self, model: nn.Module, banned: frozenset[int] | None = frozenset(), instead: Mapping[Any, Any] | None = None
    ) -> None:
        self.candidates: dict[int, _Candidate] = {}
        self.records: dict[int, list[TracedBlock]] = defaultdict(list)
        self.calls: dict[int, tuple[TracedBlock, str]] = {}
        self.audit = Audit()
        self.audit.instead.update(instead or {})
        self.current: tuple[TracedBlock, dict[int, list[str]]] | None = None
        self.undo: list[tuple[type, str, Any]] = []
        self.left_out: dict[type, frozenset[str]] = {}
        self.original: dict[int, Tensors] = {}  # the model's own tensors, by the id of a module's vars
        self.present: dict[int, Tensors] = {}  # those that stand for them
        self.hidden: dict[int, tuple[nn.Module, Tensors]] = {}
        self.armed = False
        self.model = model
        groups = [] if banned is None else _repeated_modules(model)
        for kind, group in enumerate(groups):
            if banned is not None and kind not in banned:
                for candidate in group:
                    candidate.kind = kind
                    self.candidates[id(vars(candidate.module))] = candidate
                    for _, module in candidate.members:
                        self.original[id(vars(module))] = dict(module._parameters), dict(module._buffers)
                self._leave_out(group)

    # ---- while it is active

    def __enter__(self) -> Blocks:
        for kind in {type(candidate.module) for candidate in self.candidates.values()}:
            self._set(kind, "forward", self._replacement(kind.forward))
        self.audit.instead |= {vars(kind)[name]: vars(kind)[name].__wrapped__ for kind, name, _ in self.undo}
        for kind, names in self.left_out.items():
            for name in names:
                self._set(kind, name, _WatchedAttribute(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for kind, name, before in reversed(self.undo):
            delattr(kind, name) if before is None else setattr(kind, name, before)
        for number in self.calls:
            _TYPES.pop(number, None)
        for module, (parameters, buffers) in self.hidden.values():
            vars(module)["_parameters"], vars(module)["_buffers"] = parameters, buffers

    def hide(self) -> None:
        """Take the tensors away from blocks that look like copies: export takes a millisecond for each of them.

        What reads them nevertheless, while ``forward`` runs, raises ``HiddenError``."""
        paths = Counter(id(module) for _, module in self.model.named_modules(remove_duplicate=False))
        first: dict[int, list[Any]] = defaultdict(list)
        for candidate in self.candidates.values():
            try:
                state = describe(candidate.members, self.left_out, self.original)
                self.audit.require(state.code)
            except UnprovableError:
                continue
            if state.core not in first[candidate.kind]:
                first[candidate.kind].append(state.core)
            elif all(paths[id(module)] == 1 for _, module in candidate.members):
                for _, module in candidate.members:
                    self.hidden[id(vars(module))] = module, (module._parameters, module._buffers)
                    vars(module)["_parameters"], vars(module)["_buffers"] = _HiddenTensors(self), _HiddenTensors(self)

    def arm(self) -> None:
        """Record the model's tensors when ``forward`` begins; a call whose tensors have changed since is traced."""
        for candidate in self.candidates.values():
            for _, module in candidate.members:
                if id(vars(module)) not in self.hidden:
                    self.present[id(vars(module))] = dict(module._parameters), dict(module._buffers)
        self.armed = True

    def _set(self, kind: type, name: str, value: Any) -> None:
        self.undo.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, value)

    def _leave_out(self, group: list[_Candidate]) -> None:
        """Find the integers that differ from block to block, such as a layer's index: their reads are watched."""
        for copies in zip(*(candidate.members for candidate in group), strict=True):
            first = copies[0][1]
            for name, value in vars(first).items():
                values = [vars(module).get(name) for _, module in copies]
                if type(value) is int and len(set(map(repr, values))) > 1 and not hasattr(type(first), name):
                    self.left_out[type(first)] = self.left_out.get(type(first), frozenset()) | {name}

    def note_read(self, module: Any, name: str) -> None:
        """Note that the current call read ``module.name``, which may differ from block to block."""
        if self.current is not None:
            record, paths = self.current
            record.reads.update((path, name) for path in paths.get(id(module.__dict__), ()))

    def _replacement(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            candidate = self.candidates.get(id(module.__dict__))
            if candidate is None or self.current is not None:
                return forward(module, *args, **kwargs)
            return self._run(candidate, lambda: self._forward(module, forward, args, kwargs), args, kwargs)

        run.__wrapped__ = forward  # type: ignore[attr-defined]
        return run

    def _forward(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if id(module.__dict__) in self.hidden:
            raise HiddenError("a block that looked like a copy is none")
        return forward(module, *args, **kwargs)

    def _run(self, candidate: _Candidate, forward: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        try:
            call = self._call(candidate, args, kwargs)
        except UnprovableError:
            return forward()
        for record in self.records[candidate.kind]:
            if record.usable and _is_equal_call(record, call) and self.audit.unchanged():
                return self._copy(record, call, candidate, forward)
        record = TracedBlock(next(_NUMBERS), candidate.kind, candidate.path, call)
        paths: dict[int, list[str]] = defaultdict(list)
        for path, member in candidate.members:
            paths[id(vars(member))].append(path)
        self.current = record, paths
        try:
            returned = forward()
        finally:
            self.current = None
        try:
            return self._finish_trace(record, candidate, returned, args, kwargs)
        except UnprovableError:
            return returned

    def _call(self, candidate: _Candidate, args: Any, kwargs: Any) -> _Call:
        for _, module in candidate.members:
            table = vars(module)
            tensors = table["_parameters"], table["_buffers"]
            if id(table) not in self.hidden and not _same_tensors(tensors, self.present.get(id(table))):
                raise UnprovableError("another tensor than at first")
        state = describe(candidate.members, self.left_out, self.original)
        self.audit.require(state.code)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        described, inputs = _describe_leaves(leaves)
        if not inputs:
            raise UnprovableError("no inputs")
        return _Call(state, _process_state(), spec, described, inputs, [tensor._version for tensor in inputs])

    def _finish_trace(self, record: TracedBlock, candidate: _Candidate, returned: Any, args: Any, kwargs: Any) -> Any:
        """Make the block op of a first call; UnprovableError if the call did more than compute its outputs."""
        call = record.call
        after = self._call(candidate, args, kwargs)
        same_inputs = [*map(id, after.inputs)] == [*map(id, call.inputs)]
        if not same_inputs or (after.state, after.mode, after.spec) != (call.state, call.mode, call.spec):
            raise UnprovableError("the call changed its module or its arguments")
        if (after.leaves, after.versions) != (call.leaves, call.versions):
            raise UnprovableError("the call changed its arguments")
        leaves, record.spec = pytree.tree_flatten(returned)
        made: list[torch.Tensor] = []
        places = {id(tensor): ("input", i) for i, tensor in enumerate(call.inputs)}
        storages = {_storage(tensor) for tensor in call.inputs}
        storages |= {_storage(t) for _, m in candidate.members for t in (*m._parameters.values(), *m._buffers.values())}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                canonical(leaf)
                record.outputs.append(("is", leaf))
                continue
            if id(leaf) not in places:
                if type(leaf) is not FakeTensor or leaf.constant is not None or _storage(leaf) in storages:
                    raise UnprovableError("an output that is part of something else")
                storages.add(_storage(leaf))
                places[id(leaf)] = ("made", len(made))
                made.append(leaf)
            record.outputs.append(places[id(leaf)])
        if not made:
            raise UnprovableError("no outputs")
        record.grads = [tensor.requires_grad for tensor in made]
        _TYPES[record.number] = [(t.shape, t.stride(), t.dtype) for t in made]
        results = self._op(record, call, record.number, candidate.path, made)
        if results is None:
            raise UnprovableError("an output that needs no gradient")
        record.usable = True
        self.records[candidate.kind].append(record)
        return _rebuild_outputs(record, call, results)

    def _copy(self, record: TracedBlock, call: _Call, candidate: _Candidate, forward: Callable[[], Any]) -> Any:
        number = next(_NUMBERS)
        _TYPES[number] = _TYPES[record.number]
        results = self._op(record, call, number, candidate.path, [])
        return forward() if results is None else _rebuild_outputs(record, call, results)

    def _op(self, record: TracedBlock, call: _Call, number: int, path: str, made: list[torch.Tensor]) -> Any:
        self.calls[number] = record, path
        results = BLOCK(call.inputs, made, number)
        return results if [t.requires_grad for t in results] == record.grads else None


class _HiddenTensors(dict[str, Any]):
    """An empty dict in place of the tensors of a hidden module; a read while ``forward`` runs raises HiddenError."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks

    def _look(self, name: str) -> Callable[..., Any]:
        if self.blocks.armed:
            raise HiddenError("the tensors of a block that looked like a copy are read from outside of it")
        return getattr(super(), name)

    def __contains__(self, key: object) -> bool:
        return bool(self._look("__contains__")(key))

    def __getitem__(self, key: str) -> Any:
        return self._look("__getitem__")(key)

    def __iter__(self) -> Any:
        return self._look("__iter__")()

    def __len__(self) -> int:
        return int(self._look("__len__")())

    def get(self, key: str, default: Any = None) -> Any:
        return self._look("get")(key, default)

    def keys(self) -> Any:
        return self._look("keys")()

    def values(self) -> Any:
        return self._look("values")()

    def items(self) -> Any:
        return self._look("items")()


class _WatchedAttribute:
    """A descriptor on the class that shadows the instances' attribute of that name and reports its reads."""

    def __init__(self, blocks: Blocks, name: str) -> None:
        self.blocks, self.name = blocks, name

    def __get__(self, module: Any, kind: type) -> Any:
        if module is None or self.name not in module.__dict__:
            raise AttributeError(self.name)
        self.blocks.note_read(module, self.name)
        return module.__dict__[self.name]

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self.name] = value

    def __delete__(self, module: Any) -> None:
        del module.__dict__[self.name]


def _rebuild_outputs(record: TracedBlock, call: _Call, made: list[torch.Tensor]) -> Any:
    leaf_of = {"input": lambda i: call.inputs[i], "made": lambda i: made[i], "is": lambda value: value}
    return pytree.tree_unflatten([leaf_of[kind](value) for kind, value in record.outputs], record.spec)


def _is_equal_call(record: TracedBlock, call: _Call) -> bool:
    first = record.call
    return (
        (first.mode, first.spec, first.leaves, first.state.core) == (call.mode, call.spec, call.leaves, call.state.core)
        and first.state.watched.keys() == call.state.watched.keys()
        and all(first.state.watched[place] == call.state.watched[place] for place in record.reads)
    )


def _describe_leaves(leaves: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """(per leaf a comparable value, the distinct tensors); UnprovableError for leaves that are neither tensors nor
    constants."""
    inputs: list[torch.Tensor] = []
    order: dict[int, int] = {}
    storages: dict[Any, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(canonical(leaf))
            continue
        if not isinstance(leaf, FakeTensor) or leaf.constant is not None:
            raise UnprovableError("a tensor with a known value")
        if id(leaf) not in order:
            order[id(leaf)] = len(inputs)
            inputs.append(leaf)
        where = storages.setdefault(_storage(leaf), len(storages)), leaf.storage_offset()
        kind = leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, isinstance(leaf, nn.Parameter)
        described.append((order[id(leaf)], where, kind))
    return described, inputs


def _same_tensors(now: Tensors, before: Tensors | None) -> bool:
    """True if the same names refer to the same tensors."""
    return before is not None and all(
        a.keys() == b.keys() and all(value is b[name] for name, value in a.items())
        for a, b in zip(now, before, strict=True)
    )


def _storage(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.untyped_storage()._cdata


def _process_state() -> Any:
    """The state of the process on which a trace depends: gradient mode, autocast, default dtype, function modes."""
    if nn.modules.module._has_any_global_hook():
        raise UnprovableError("a hook on all modules")
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch._C._len_torch_function_stack(),
    )  # fmt: skip


# ---- which modules have equals


def _repeated_modules(model: nn.Module) -> list[list[_Candidate]]:
    """Groups of the outermost modules with submodules that seem equal by class and shapes, in order of appearance."""
    looks: dict[Any, int] = {}
    by_module: dict[int, int] = {}

    def look(module: nn.Module) -> int:
        if id(module) not in by_module:
            tensors = [
                (name, None if t is None else (t.shape, t.dtype))
                for held in (module._parameters, module._buffers)
                for name, t in held.items()
            ]
            children = [(name, None if m is None else look(m)) for name, m in module._modules.items()]
            by_module[id(module)] = looks.setdefault((type(module), (*tensors,), (*children,)), len(looks))
        return by_module[id(module)]

    look(model)
    count = Counter(by_module.values())
    groups: dict[int, list[_Candidate]] = {}
    visited: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is None or id(child) in visited or not child._modules:
                continue
            visited.add(id(child))
            below = f"{path}.{name}" if path else name
            if count[look(child)] > 1 and type(child).forward is not nn.Module.forward:
                members = list(child.named_modules(remove_duplicate=False))
                groups.setdefault(look(child), []).append(_Candidate(child, below, -1, members))
            else:
                walk(child, below)

    walk(model, "")
    return list(groups.values())


# ---- The nodes of a traced block in an exported program, to be copied for the blocks that equal it (see
# ``repeated_blocks``)


@dataclass
class BlockTemplate:
    """The nodes of one traced block, to be copied."""

    record: TracedBlock
    #: the block op
    block: Node
    #: the nodes that its results need, in program order
    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    #: placeholder of a parameter or buffer of the block → its path below the block
    tensors: dict[Node, str]
    #: path of a buffer below the block → the node with its new value
    updates: dict[str, Node]
    _needed: dict[frozenset[int], list[Node]] = field(default_factory=dict)

    def needed(self, used: Collection[int]) -> list[Node]:
        """The nodes that these outputs and the new buffers need, in program order."""
        key = frozenset(used)
        if key not in self._needed:
            stop = {*self.inputs, *self.tensors}
            roots = [*(self.outputs[i] for i in key), *self.updates.values()]
            needed = set(_needed_nodes(roots, stop))
            self._needed[key] = [node for node in self.nodes if node in needed]
        return self._needed[key]


def template_of(
    block: Node,
    record: TracedBlock,
    names: Mapping[Node, Collection[str]],
    updates: Mapping[str, Node],
    order: list[Node],
) -> BlockTemplate:
    """The block that ends at ``block``. names: all names of the tensor of each parameter and buffer placeholder;
    updates: buffer name → the node with its new value. UnsoundError if it is not a function of its inputs and its own
    parameters and buffers."""
    inputs: Any = block.args[0]
    outputs: Any = block.args[1]
    path, inside = record.path + ".", _module_stack(block)
    own_updates = {name.removeprefix(path): node for name, node in updates.items() if name.startswith(path)}
    tensors: dict[Node, str] = {}
    if any(_module_stack(node)[: len(inside)] == inside for node in inputs if node.op != "placeholder"):
        raise UnsoundError(record.kind, "an input that the block changed")
    needed = set(_needed_nodes([*outputs, *own_updates.values()], set(inputs)))
    for node in needed:
        if node.op == "placeholder":
            below = [name.removeprefix(path) for name in names.get(node, ()) if name.startswith(path)]
            if not below:
                raise UnsoundError(record.kind, f"{node.name} is not the block's own")
            tensors[node] = below[0]
        elif _module_stack(node)[: len(inside)] != inside or node.target is BLOCK:
            raise UnsoundError(record.kind, f"{node.name} is not made in the block")
    if any(name.startswith(path) for node in inputs for name in names.get(node, ())):
        raise UnsoundError(record.kind, "an input that is the block's own parameter")
    nodes = [node for node in order if node in needed and node not in tensors]
    return BlockTemplate(record, block, nodes, list(inputs), list(outputs), tensors, own_updates)


def live_nodes(results: list[Node]) -> set[Node]:
    """The nodes that these results need; of a traced block's outputs only the used ones."""
    live: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        source: Any = node.args[0] if node.args else None
        if isinstance(source, Node) and source.target is BLOCK and source.args[1]:
            made: Any = source.args[1]
            stack.append(made[node.args[1]])
            live.add(source)
        else:
            stack += node.all_input_nodes
    return live


def _needed_nodes(roots: list[Node], stop: Collection[Node]) -> Iterator[Node]:
    """``roots`` and what they need, without the nodes of ``stop``."""
    seen: set[Node] = set(stop)
    stack = [node for node in roots if node not in seen]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += node.all_input_nodes


def _module_stack(node: Node) -> list[Any]:
    """The modules that the node was made in, outermost first."""
    return list((node.meta.get("nn_module_stack") or {}).items())
