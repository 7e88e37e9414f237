"""Capture of a PyTorch model as a Graph: the only module that knows ``torch.export``.

The steps, in order (``capture``):

1. ``fake_parameters``: parameters and buffers become fake CPU tensors (one per tensor, so ties survive), Hugging Face
   settings that only matter for generation or that hide the experts are set aside, and checks of values by
   distributions; all of it is undone afterwards, whatever happens;
2. ``fake_inputs``: the example inputs become fake tensors whose batch dim has the extent ``CAPTURE_BATCH``;
3. ``OpaqueModules``: submodules that cannot be traced become ops; where the next step shows another one, again;
4. ``torch.export`` on a wrapper that returns only the loss (training) or the model's output (eval);
5. ``_inline_regions``: ``no_grad`` regions become plain ops whose results are detached;
6. ``decompose_program`` makes the graph functional and leaves composite ops (linear, attention, …) whole;
7. ``_Translator``: the exported program becomes a ``Graph`` with types, sources, modules and lines;
8. ``rewrites.rewrite``: the passes over that graph.

No weight is touched: models on the meta device and real ones give the same graph.
"""

from __future__ import annotations

import gc
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ..errors import CaptureError, UnsoundError
from ..ir.custom_function import FUNCTION_OP
from ..ir.graph import CAPTURE_BATCH, Graph, Result, Source, TensorType
from ..ir.opaque_module import OpaqueModule
from ..ir.ops.experts import experts
from .annotations import SHARD, Annotations
from .custom_backward import CustomBackwards, refuse_hooks
from .decompose import decompose_program
from .example_inputs import Inputs, fake_inputs
from .fake_model import (
    Names,
    assigned_tensors,
    fake_parameters,
    model_settings,
    no_idle_masks,
    refuse_shared_memory,
    silence_torch,
    tensor_names,
    torch_settings,
    training_mode,
    unchanged_attributes,
)
from .flex_attention import flex_attention_as_ops
from .long_loops import LongLoops
from .opaque_modules import Choice, Example, OpaqueModules
from .repeated_blocks import BLOCK, Blocks, BlockTemplate, TracedBlock, live_nodes, template_of
from .rewrites import rewrite
from .source_errors import capture_error, line_of, node_error
from .value_checks import ValueChecks
from .wrappers import refuse_wrappers

__all__ = ["CaptureError", "capture", "experts", "loss_of"]


def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    example_targets: tuple[Any, ...] = (),
    loss_fn: Any = None,
    batch_dims: Mapping[str, int | None] | Sequence[int | None] | None = None,
    training: bool = True,
    *,
    outputs: bool = False,
    extent: int = CAPTURE_BATCH,
    share_blocks: bool = True,
) -> Graph:
    """The graph of ``model`` on inputs like these, at the batch extent ``CAPTURE_BATCH`` (``extent`` and
    ``share_blocks`` are for tests; without the latter every block is traced, to the same graph).

    The example tensors may have any batch size and device, meta included; only shapes and dtypes count. Dim 0 of
    every tensor whose extent equals the first tensor's is the batch; ``batch_dims`` overrides, by source name
    (``{"args.1": None}``) or as one entry per flat input (args, then kwargs, then targets); None: not split.

    training: the result is the loss, ``loss_fn(output, *targets)`` if given, else a scalar output, ``.loss``,
    ``["loss"]`` or the first element; buffers that the forward updates are results too. A model whose root is in eval
    mode is captured after ``train()``; one in training mode keeps the mode of each submodule (so a frozen batch norm
    stays frozen). Without training: every tensor of the output, under ``eval()``. outputs: with training too the result
    is the output, without loss and new buffer values. Modes, weights and settings of the model are as before when this
    returns or raises.

    Raises CaptureError (a ValueError) that names the line of the model and what to change.
    """
    kwargs = dict(example_kwargs or {})
    wants_loss = training and not outputs
    if wants_loss and loss_fn is None and example_targets:
        raise CaptureError(
            "targets are the arguments of `loss_fn`, but got targets and no loss_fn; "
            "pass loss_fn=, or make them inputs of the model"
        )
    refuse_wrappers(model)
    with ExitStack() as stack:
        if gc.isenabled():  # a capture makes many objects and little garbage, and so do PyTorch's imports at the first
            gc.disable()
            stack.callback(gc.enable)
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = fake_inputs(
            fake_mode, tuple(example_inputs), kwargs, tuple(example_targets) if wants_loss else (), batch_dims, extent
        )
        wrapper = _Wrapper(model, loss_fn, wants_loss)
        written = stack.enter_context(silence_torch())
        stack.enter_context(_use_lazy_graph_module(True))  # nobody runs the modules that the export makes on its way
        stack.enter_context(torch_settings())
        stack.enter_context(training_mode(model, training))
        stack.enter_context(model_settings(model))
        stack.enter_context(flex_attention_as_ops())
        if wants_loss:
            refuse_hooks(model)
        backwards = stack.enter_context(CustomBackwards(training))
        loops = stack.enter_context(LongLoops(model, backwards))
        checks = stack.enter_context(ValueChecks())
        annotations = stack.enter_context(Annotations())
        names = tensor_names(model)
        example = Example(model, tuple(example_inputs), kwargs, inputs.batch_dims)
        opaque, trials = Choice(example), dict[Any, Any]()
        banned: frozenset[int] | None = frozenset() if share_blocks else None
        hide, masked = True, True
        while True:
            with (
                OpaqueModules(model, opaque, backwards, loops, extent, trials) as opaques,
                Blocks(model, banned, {**loops.instead, **opaques.instead}) as blocks,
            ):
                if hide:
                    blocks.hide()
                try:
                    with (
                        fake_parameters(model, fake_mode) as registered,
                        unchanged_attributes(model, without_data=True),
                    ):
                        wrapper.blocks, wrapper.registered = [blocks], registered
                        with assigned_tensors() as replaced:
                            program = torch.export.export(
                                wrapper, (inputs.args, inputs.kwargs, inputs.targets), strict=False
                            )
                        _inline_regions(program.graph_module, detach=training)
                        program = decompose_program(program)
                        _refuse_state(program.constants, replaced)
                        refuse_shared_memory(names.tensors | _attributes(program.constants))
                except Exception as error:
                    if blocks.hidden:
                        hide = False  # the error may come from tensors that were hidden: try again with all of them
                    elif masked and "Attention mask should be of size" in str(error):
                        masked = False  # a mask that training leaves out, of a sequence that a layer has shortened
                        stack.enter_context(no_idle_masks())
                    elif (final := opaque.after(error, capture_error(error))) is not None:
                        raise final from error
                    written.seek(0)
                    written.truncate()  # the next try writes it again
                    continue
            try:
                graph = _Translator(program, names, inputs, training, wants_loss, extent, blocks, backwards).graph()
                break
            except CaptureError as error:
                if (final := opaque.after(error, error)) is not None:
                    raise final from error
            except UnsoundError as unsound:
                # these blocks are not copies after all: export again and trace each of them
                banned = (banned or frozenset()) | {unsound.kind}
    graph = replace(rewrite(graph), notes=checks.notes)
    graph.check()
    annotations.check(graph)
    return graph


class _Wrapper(nn.Module):
    """The model followed by its loss (training), or the model alone (eval)."""

    def __init__(self, model: nn.Module, loss_fn: Any, wants_loss: bool) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = [loss_fn]  # in a list, so that a loss_fn that is a module is not registered beside the model
        self.wants_loss = wants_loss
        self.blocks: list[Blocks] = []
        self.registered: Callable[[], AbstractContextManager[None]] = nullcontext  # of ``fake_parameters``

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> Any:
        for blocks in self.blocks:
            blocks.arm()
        try:
            with self.registered():
                return self._result(args, kwargs, targets)
        finally:
            for blocks in self.blocks:
                blocks.armed = False

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> Any:
        output = self.model(*args, **kwargs)
        if not self.wants_loss:
            return output
        loss = loss_of(output, targets, self.loss_fn[0])
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            got = (
                f"a {loss.dtype} tensor of shape {list(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise CaptureError(
                f"training needs a 0-d floating-point loss, but got {got}; "
                "return the loss from forward (or as .loss, or first), or pass loss_fn=lambda output, *targets: ..."
            )
        return loss


def loss_of(output: Any, targets: tuple[Any, ...], loss_fn: Any) -> Any:
    """``loss_fn(output, *targets)``, else the output itself, ``.loss``, ``["loss"]`` or the first element, in this
    order; of a tensor with one element that element, as ``backward()`` takes it."""
    loss = loss_fn(output, *targets) if loss_fn is not None else _loss_in(output)
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.dim() and loss.numel() == 1 else loss


def _loss_in(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple | list) and output:
        return output[0]
    return output


# ---- the exported program


def _inline_regions(module: torch.fx.GraphModule, detach: bool) -> None:
    """Inline ``no_grad`` regions and detach their results (decomposition would inline them and let gradients
    through)."""
    regions = torch.ops.higher_order.wrap_with_set_grad_enabled
    graph = module.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is regions]:
        enabled, body, *operands = node.args
        inner = getattr(module, body.target)
        _inline_regions(inner, detach and enabled)
        env: dict[Node, Any] = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            for inside in inner.graph.nodes:
                if inside.op in ("placeholder", "output"):
                    continue
                assert inside.op == "call_function", inside.format_node()
                env[inside] = graph.node_copy(inside, env.__getitem__)
            (results,) = next(n for n in inner.graph.nodes if n.op == "output").args
            for getitem in list(node.users):
                source = results[getitem.args[1]]
                value = env[source]
                if detach and not enabled and _type_of(source.meta["val"]).is_float:
                    value = graph.call_function(torch.ops.aten.detach.default, (value,))
                    value.meta = {**source.meta}
                getitem.replace_all_uses_with(value)
                graph.erase_node(getitem)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
    module.recompile()


class _Translator:
    """The translation of one exported program into a Graph, before any rewrite."""

    def __init__(
        self,
        program: Any,
        names: Names,
        inputs: Inputs,
        training: bool,
        wants_loss: bool,
        extent: int,
        blocks: Blocks,
        backwards: CustomBackwards,
    ) -> None:
        self.program, self.names, self.inputs, self.extent, self.blocks = program, names, inputs, extent, blocks
        self.backwards = backwards
        self.training, self.wants_loss = training, wants_loss
        self.nodes = {node.name: node for node in program.graph.nodes}
        self.fx = torch.fx.Graph()
        self.env: dict[Node, Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, Node] = {}  # parameters and buffers by their first name
        self.descriptions: dict[Node, tuple[Any, str, str]] = {}  # type, module and line of exported nodes
        self.opaque_calls = 0
        self.templates: dict[int, BlockTemplate] = {}
        self.updates: list[tuple[str, Node]] = []  # buffers that the copied blocks change

    def graph(self) -> Graph:
        self._placeholders()
        order = list(self.program.graph.nodes)
        (results,) = order[-1].args
        live = live_nodes([node for node in results if isinstance(node, Node)])
        for node in order:
            if node.op in ("placeholder", "output") or (node.target is not BLOCK and node not in live):
                continue
            if node.target is BLOCK:
                self._block(node, order, live)
            elif node not in self.env:
                self._op(node)
        named_results = self._results()
        self.fx.output(tuple(node for _, _, node in named_results))
        return Graph(
            self.fx,
            tuple(Result(kind, name, node.name) for kind, name, node in named_results),
            self.extent,
            self.constants,
            None if self.wants_loss else self.program.call_spec.out_spec,
            self.training,
        )

    def _placeholders(self) -> None:
        """Parameters in the model's order, buffers, constants, inputs."""
        specs: dict[str, Any] = {}
        constants, inputs = [], []
        for spec in self.program.graph_signature.input_specs:
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                specs[_unwrapped(spec.target)] = spec
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                constants.append(spec)
            elif spec.kind == InputKind.USER_INPUT:
                inputs.append(spec)
            elif isinstance(self.program.constants.get(spec.target), torch.Generator):
                users = [line_of(user.meta.get("stack_trace")) for user in self.nodes[spec.arg.name].users]
                raise CaptureError(
                    f"{(users or [''])[0] or spec.target}: random numbers are a function of the run's seed and the "
                    "step, but got a generator of its own; leave generator= out, or draw outside of forward"
                )
            else:
                raise CaptureError(
                    f"inputs are tensors, but got {spec.arg.name}, a {spec.kind.name.lower()}; pass tensors only"
                )
        for kind, table in (("parameter", self.names.parameters), ("buffer", self.names.buffers)):
            for name, aliases in table.items():
                exported = [specs[alias] for alias in aliases if alias in specs]
                persistent = kind == "parameter" or not self.names.transient.issuperset(aliases)
                tensor = self.names.tensors[name]
                read = any(self.nodes[spec.arg.name].users for spec in exported)
                if tensor.layout != torch.strided and (persistent or read):
                    raise CaptureError(
                        f"parameters and buffers are dense tensors, but got {name}, which is {tensor.layout}; "
                        "register its indices and its values as two buffers, or make it dense (to_dense)"
                    )
                grad = kind == "parameter" and tensor.requires_grad
                self.tensors[name] = new = self.fx.placeholder(f"{kind[0]}_model_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}")
                new.meta = {
                    "type": _type_of(tensor),
                    "source": Source(kind, name, tuple(aliases[1:]), None, grad, persistent),
                }
                for spec in exported:
                    self.env[self.nodes[spec.arg.name]] = new
        for spec in constants:
            self._constant(spec)
        for spec, name, dim in zip(inputs, self.inputs.names, self.inputs.batch_dims, strict=True):
            node = self.nodes[spec.arg.name]
            if isinstance(node.meta.get("val"), torch.Tensor):
                grad = bool(node.meta["val"].requires_grad)
                self._placeholder(node, Source("input", name, (), dim, grad))

    def _placeholder(self, node: Node, source: Source) -> Node:
        new = self.fx.placeholder(node.name)
        new.meta = {"type": _type_of(node.meta["val"]), "source": source}
        self.env[node] = new
        return new

    def _constant(self, spec: Any) -> None:
        name, value = _unwrapped(spec.target), self.program.constants[spec.target]
        if getattr(value, "requires_grad", False):
            raise CaptureError(
                f"every parameter is registered, but got {name}, a trainable tensor outside of the model's parameters; "
                "assign it as nn.Parameter attribute, nn.ParameterList or nn.ParameterDict"
            )
        if isinstance(value, FakeTensor) or value.device.type == "meta":
            raise CaptureError(
                f"a constant has a value, but got {name} without one; "
                "register it with register_buffer(..., persistent=False), or build the model outside of the meta device"
            )
        node = self._placeholder(self.nodes[spec.arg.name], Source("constant", name, persistent=False))
        self.constants[name] = value.detach()
        assert node.meta["source"].name == name

    def _op(self, node: Node) -> None:
        types, module, line = self._describe(node)
        self.env[node] = self._emit(node, self.env, types, module, line, Annotations.stage_of(node))

    def _describe(self, node: Node) -> tuple[Any, str, str]:
        """(type, module, line) of an exported op; CaptureError if no graph has such an op."""
        if node not in self.descriptions:
            trace = node.meta.get("stack_trace")
            if node.op != "call_function" or not (
                node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)
            ):
                raise node_error(trace, f"a graph is made of tensor ops, but got {node.target}")
            types = _types_or_none(node.meta.get("val"))
            if types is None:
                number = node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
                error = node_error(
                    trace, ".item()" if number else f"{node.target}: a tensor whose shape depends on values"
                )
                error.module = _module_of(node)
                raise error
            if node.target is torch.ops.aten.lstm.input:
                types = _lstm_types(node, types)
            self.descriptions[node] = types, _module_of(node), line_of(trace)
        return self.descriptions[node]

    def _emit(
        self, node: Node, env: Mapping[Node, Node], types: Any, module: str, line: str, stage: Mapping[str, int]
    ) -> Node:
        """A copy of an exported op with its operands as ``env`` has them; named after its op, whatever its name was."""
        target: Any = node.target
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if target is FUNCTION_OP:
            return self._function(args, types, module, line)
        if target is SHARD:
            return Annotations.mark(*args)  # type: ignore[arg-type]
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else target.__name__
        new = self.fx.create_node("call_function", target, args, kwargs, name)
        new.meta = {"type": types, "module": module, "line": line, **stage}
        return new

    def _function(self, args: tuple[Any, ...], types: Any, module: str, line: str) -> Node:
        """A call of a user's autograd Function, with its arguments as the user gave them."""
        operands, number = iter(args[0]), args[1]
        given = [next(operands) if isinstance(x, torch.Tensor) else x for x in self.backwards.arguments[number]]
        target = self.backwards.calls[number]
        if isinstance(target, OpaqueModule):  # copies of a block draw numbers of their own
            self.opaque_calls += 1
            target = target.numbered(self.opaque_calls)
        new = self.fx.create_node("call_function", target, tuple(given), {}, target.kind.__name__)
        new.meta = {"type": types, "module": module, "line": line}
        return new

    def _block(self, node: Node, order: list[Node], live: set[Node]) -> None:
        """Translate a block op: a traced block stands for what it computed, an equal one gets a copy of its nodes."""
        operands: Any = node.args
        inputs, outputs, number = operands
        record, path = self.blocks.calls[number]
        items: list[tuple[Node, Any]] = [(user, user.args[1]) for user in node.users if user in live]
        used: dict[Node, int] = dict(items)
        if outputs:
            sources = {old: new.meta["source"] for old, new in self.env.items() if new.op == "placeholder"}
            names = {old: (s.name, *s.aliases) for old, s in sources.items() if s.kind in ("parameter", "buffer")}
            updates = {name: self.nodes[spec.arg.name] for spec, name in self._updated()}
            self.templates[record.number] = template_of(node, record, names, updates, order)
            self.env.update({user: self.env[outputs[index]] for user, index in used.items()})
            return
        if record.number not in self.templates:
            raise UnsoundError(record.kind, "the block that was traced is not in the program")
        template = self.templates[record.number]
        env = {old: self.env[new] for old, new in zip(template.inputs, inputs, strict=True)}
        env |= {old: self._tensor_of_copy(record, f"{path}.{below}") for old, below in template.tensors.items()}
        traced_module, module_here = _module_of(template.block), _module_of(node)
        call_lines = line_of(template.block.meta.get("stack_trace")), line_of(node.meta.get("stack_trace"))
        for inside in template.needed([*used.values()]):
            types, module, line = self._describe(inside)
            if Annotations.stage_of(inside) != Annotations.stage_of(template.block):
                raise UnsoundError(record.kind, "a stage begins inside of the block")
            module = module_here + module[len(traced_module) :]
            line = call_lines[1] if line == call_lines[0] else line
            env[inside] = self._emit(inside, env, types, module, line, Annotations.stage_of(node))
        self.env.update({user: env[template.outputs[index]] for user, index in used.items()})
        for below, changed in template.updates.items():
            self._update(record, f"{path}.{below}", env[changed])

    def _tensor_of_copy(self, record: TracedBlock, name: str) -> Node:
        """The parameter or buffer of a copied block."""
        tensor = self.tensors[self.names.first[name]]
        changed = {name for _, name in self._updated()}
        if tensor.meta["source"].kind == "buffer" and tensor.meta["source"].name in changed:
            raise UnsoundError(record.kind, f"{name} is changed outside of the block")
        return tensor

    def _update(self, record: TracedBlock, name: str, value: Node) -> None:
        """Record that a copied block changes a buffer of its own, which nothing else may use."""
        first = self.names.first[name]
        exported = [old for old, new in self.env.items() if new is self.tensors[first]]
        if first in dict(self.updates) or any(old.users for old in exported):
            raise UnsoundError(record.kind, f"{name} is used outside of the block, which changes it")
        self.updates.append((first, value))

    def _updated(self) -> list[tuple[Any, str]]:
        """(spec, name) of the buffers that the exported program changes."""
        specs = self.program.graph_signature.output_specs
        changed = [(spec, _unwrapped(spec.target)) for spec in specs if spec.kind == OutputKind.BUFFER_MUTATION]
        return [(spec, self.names.first.get(name, name)) for spec, name in changed]

    def _results(self) -> list[tuple[str, str, Node]]:
        results: list[tuple[str, str, Node]] = []
        updates = [(name, self.env[self.nodes[spec.arg.name]]) for spec, name in self._updated()] + self.updates
        index = 0
        for spec in self.program.graph_signature.output_specs:
            if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
                node = self.nodes.get(getattr(spec.arg, "name", ""))
                if node is not None and isinstance(node.meta.get("val"), torch.Tensor):
                    kind, name = ("loss", "loss") if self.wants_loss else ("output", str(index))
                    results.append((kind, name, self.env[node]))
                elif getattr(spec.arg, "value", None) is not None:
                    raise CaptureError(
                        f"outputs are tensors or None, but got {spec.arg.value!r} at place {index}; "
                        "leave it out of the output"
                    )
                index += 1
            elif spec.kind != OutputKind.BUFFER_MUTATION:
                what = _unwrapped(spec.target or "") or spec.arg.name
                raise CaptureError(
                    f"inputs and parameters are not changed in place, but forward changes {what}; work on a clone()"
                )
        place = {name: index for index, name in enumerate(self.names.buffers)}
        changed = [("buffer", name, node) for name, node in sorted(updates, key=lambda update: place[update[0]])]
        return results + changed if self.wants_loss or not self.training else results


def _refuse_state(constants: Mapping[str, Any], replaced: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError if the forward replaces a tensor that it reads: a state, of which a capture knows the first
    value only."""
    for name, value in constants.items():
        if any(value is one for one in replaced):
            raise CaptureError(
                f"a state is in buffers, but got {_unwrapped(name)!r}, an attribute that forward reads and replaces; "
                "make it a buffer (register_buffer)"
            )


def _attributes(constants: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the constants of a program."""
    return {_unwrapped(name): value for name, value in constants.items() if isinstance(value, torch.Tensor)}


def _unwrapped(name: str) -> str:
    return name.removeprefix("model.")


def _type_of(value: torch.Tensor) -> TensorType:
    return TensorType(tuple(int(extent) for extent in value.shape), value.dtype)


def _types_or_none(value: Any) -> TensorType | tuple[TensorType, ...] | None:
    """The type(s) of a node's value; None if any of it is not a tensor."""
    if isinstance(value, torch.Tensor):
        fixed = all(isinstance(extent, int) for extent in value.shape)
        return _type_of(value) if fixed else None
    if isinstance(value, tuple | list) and value:
        types = [_types_or_none(item) for item in value]
        return tuple(types) if all(isinstance(t, TensorType) for t in types) else None  # type: ignore[arg-type]
    return None


def _lstm_types(node: Node, types: Any) -> Any:
    """The types of an LSTM: torch before 2.13 exports its last states with a dim too many (its issue 151200)."""
    states: Any = node.args[1]
    right = (types[0], *(_type_of(state.meta["val"]) for state in states))
    if right != types and any(user.args[1] and user.users for user in node.users):
        raise node_error(node.meta.get("stack_trace"), "the last states of an LSTM")
    return right


def _module_of(node: Node) -> str:
    """The dotted path of the innermost module, in the user's names; "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return "" if path in ("", "model") else _unwrapped(path.split("@")[0])
