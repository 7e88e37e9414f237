"""Every part that one stage of a plan document may have, by itself: the half of ``exhaustive`` that prices.

The ops of a stage are gone through in program order. A row is a beginning: what it costs (``values``) and what its
continuation may depend on (``columns``): the pair of every tensor that is still read, the pairs into which it was
converted already, its state at borders, and the gradients to be reduced at the end. Of rows with equal columns only
those stay that no other undercuts (``exhaustive`` says why that is enough).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from meshwright.compiler.cost.gradient_reduction import Gradient, make_buckets
from meshwright.compiler.cost.parameter_sharding import (
    accumulate_seconds,
    gathered_bytes,
    parameter_shardings,
    sharding_bytes,
    sharding_seconds,
    unfilled_messages,
)
from meshwright.compiler.cost.pricing import MeshPricer, partial_axes
from meshwright.compiler.cost.saved_tensors import kept_operands, saved_by_readers, saved_bytes, saved_tensors
from meshwright.compiler.ir.graph import op_name, output_of, tensor_operands, types_of
from meshwright.compiler.ir.spec import P, Pair, R
from meshwright.compiler.plan.plan import ParameterSharding
from meshwright.compiler.plan.recompute import recompute_of
from meshwright.compiler.rules import MeshChoice, mesh_choices, rule_for
from meshwright.compiler.search.space import Submesh

from tests.oracles.border_states import border_states, is_even
from tests.oracles.frontier import (
    BACKWARD,
    COLUMNS,
    FORWARD,
    HELD,
    LARGEST,
    ONCE,
    PEAK,
    RESIDENT,
    SAVED,
    WEIGHT,
    Frontier,
)
from tests.oracles.stage_parts import StagePart, TensorPrices

if TYPE_CHECKING:
    from tests.oracles.exhaustive import Exhaustive


__all__ = ["StageDocuments"]

_PASSING = ("src", "state", "paid", "lately", "charged")


class StageDocuments(Frontier):
    """Every part that one stage may have, by frontier: rows are beginnings in program order, columns what follows may
    depend on."""

    def __init__(
        self, of: Exhaustive, m: int, layers: tuple[int, int], mesh: Submesh, modes: tuple[str, ...], schedule: str
    ) -> None:
        super().__init__(f"stage {layers} on {mesh.shape}", of.split, of.limited)
        self.of, self.m, self.layers, self.mesh, self.modes = of, m, layers, mesh, modes
        self.graph, self.layering, self.grad = of.graphs[m], of.layering, of.layering.needs_grad
        self.nodes = self.graph.by_name()
        self.pricer = MeshPricer(of.cluster, mesh.site, mesh.shape, of.optimizer)
        asked = dict(zip(range(*layers), modes))
        self.recompute = recompute_of(self.graph, self.layering, asked, schedule)
        self.ops = self.layering.ops_of(self.graph, *layers)
        self.members = {node.name for node in self.ops}
        self.layer_of = {name: k for k, layer in enumerate(self.layering.layers) for name in layer.ops}
        self.saved = saved_tensors(self.ops, self.grad)
        kept = [node for node in self.ops if self._keeps(node.name)]
        self.plain = saved_tensors(kept, self.grad) if self.recompute else self.saved
        self.on_edges = saved_by_readers(
            [node for node in self.ops if node.name not in self.layering.static], self.grad, self.recompute
        )
        self.tensors: dict[str, TensorPrices] = {}
        self.choices: dict[str, list[MeshChoice]] = {}
        self.placed: dict[str, list[Any]] = {}  # placeholder → its choices
        self.possible = self._prepare()
        self.parts = self._enumerate() if self.possible else []

    # ---- what may be chosen

    def _keeps(self, op: str) -> bool:
        return not self.recompute or op in self.recompute.plain

    def _offered(self, node: Any) -> list[MeshChoice]:
        mesh = self.mesh.shape
        if node.name in self.layering.static:
            return mesh_choices(node, mesh, 1)
        choices = self.of.offered(self.layering, node, self.graph.batch, mesh)
        if rule_for(node).cost_kind in ("matmul", "attention", "convolution", "routing"):
            for axis in range(len(mesh)):
                choices = [c for c in choices if c.labels[axis] != "whole"] or choices
        most = 0.01 * self.layering.total_flops * self.graph.batch / self.layering.batch
        return [c for c in choices if self.pricer.op(node, c, self.grad).wasted_flops <= most]

    def _prepare(self) -> bool:
        wants: dict[str, list[Pair]] = defaultdict(list)
        kept = kept_operands(self.ops, self.grad)
        for node in self.ops:
            if op_name(node) == "getitem":
                continue
            found = self.choices[node.name] = self._offered(node)
            if not found:
                return False
            for k, operand in enumerate(tensor_operands(node)):
                tensor = self._tensor(operand.name)
                tensor.uses += 1
                tensor.copied |= k in kept[node.name]
                numbers = [tensor.index(c.inputs[k]) for c in found]
                known = list(tensor.pairs)
                wants[operand.name] += [known[number] for number in numbers]
        for name, tensor in self.tensors.items():
            readers = [user.name for user in tensor.node.users if user.name in self.members]
            tensor.keeps = not self.recompute.converts_again(name) or any(map(self._keeps, readers))
            if tensor.node.op == "placeholder":
                self.placed[name] = self._placements(tensor, wants[name])
        return True

    def _tensor(self, name: str) -> TensorPrices:
        return (
            self.tensors.setdefault(name, TensorPrices(self, name)) if name not in self.tensors else self.tensors[name]
        )

    def _placements(self, tensor: TensorPrices, wanted: Sequence[Pair]) -> list[Any]:
        """Pairs of an input, residencies of a parameter."""
        source, axes = tensor.node.meta["source"], len(self.mesh.shape)
        whole = (R,) * axes
        trained = source.kind == "parameter" and source.requires_grad and tensor.grad
        if trained:
            pairs = {p for p in wanted if all(v == c or (v == R and c == P) for v, c in zip(p.value, p.cotangent))}
            pairs |= {Pair(whole, whole), Pair(whole, (P,) * axes)}
        else:
            values = {p.value for p in wanted if not any(v.is_partial for v in p.value)} | {whole}
            pairs = {Pair(v, v if source.kind == "parameter" else whole) for v in values}
        if source.kind == "input" and not self.of.limited:
            return [Pair(whole, whole)]  # every rank has it: any part costs nothing, and without a limit no bytes count
        fitting = [p for p in sorted(pairs, key=str) if is_even(tensor.kind, p.value, self.mesh.shape)]
        if source.kind != "parameter":
            return fitting
        allowed = self.of.space.residencies
        return parameter_shardings(tensor.kind, fitting, self.mesh.shape, trained, allowed)

    # ---- the run

    def _enumerate(self) -> list[StagePart]:
        first, end = self.layers
        entering = self.layering.crossing[first]
        if entering:
            self._enter(first)
        self.done = first  # the last border that was passed
        for position, node in enumerate(self.ops):
            while self.done < self.layer_of.get(node.name, self.done):
                self.done += 1
                self._border(self.done)
            if op_name(node) != "getitem":
                self._op(node, position)
            self._forget(position)
            if not len(self.values):
                return []
            self.prune()
        self._border(end, leaving=True)
        self.prune()
        return self._finished() if len(self.values) else []

    def _enter(self, first: int) -> None:
        states = border_states(self.layering, self.nodes, self.mesh.shape, first)
        pick = self.cross(len(states), "entry")
        for name in self.layering.crossing[first]:
            tensor = self._tensor(name)
            pair = np.array([tensor.index(state[name]) for state in states])
            self._introduce(name, pair[pick], crossed=True)
            users = [user.name for user in tensor.node.users if user.name in self.members]
            again = bool(self.recompute) and name in self.recompute.kept and not all(map(self._keeps, users))
            if users and (name in self.plain or again):
                size = np.array([self.pricer.local_bytes(tensor.kind, state[name].value) for state in states])
                self.values[:, SAVED] += size[pick]
            if tensor.uses:
                self.columns[f"in {name}"] = pair[pick]

    def _introduce(self, name: str, source: np.ndarray, crossed: bool = False) -> None:
        zero = np.zeros(len(source), int)
        self.columns[f"{name} src"] = source
        self.columns[f"{name} state"] = source if crossed else zero - 1
        for what in ("paid", "lately"):
            self.columns[f"{name} {what}"] = zero
        self.columns[f"{name} charged"] = zero + (1 if crossed else 0)

    def _op(self, node: Any, position: int) -> None:
        choices = self.choices[node.name]
        pick = self.cross(len(choices), node.name)
        values, largest = self._op_values(node, choices)[pick], self.values[:, LARGEST].copy()
        self.values += values
        self.values[:, LARGEST] = np.maximum(largest, values[:, LARGEST])
        self.columns["now"] = pick
        operands = sorted(enumerate(tensor_operands(node)), key=lambda one: one[1].op == "placeholder")
        inner = sum(operand.op != "placeholder" for _, operand in operands)
        for number, (k, operand) in enumerate(operands):
            if number == inner:
                self._forget(position, placeholders=False)
            tensor = self._tensor(operand.name)
            wanted = np.array([tensor.index(c.inputs[k]) for c in choices])
            if tensor.node.op == "placeholder" and f"{operand.name} src" not in self.columns:
                self.prune()
                self._place(tensor, wanted)
            self._read(tensor, wanted[self.columns["now"]], self.layer_of.get(node.name))
        pick = self.columns.pop("now")
        outputs = [(node, 0)]
        if isinstance(node.meta["type"], tuple):
            outputs = [(user, output_of(user)[1]) for user in node.users if user.name in self.members]
        for out, k in outputs:
            tensor = self._tensor(out.name)
            self._introduce(out.name, np.array([tensor.index(c.outputs[k]) for c in choices])[pick])
            whole = (R,) * len(self.mesh.shape)
            for kind in (result.kind for result in self.graph.results if result.node == out.name):
                left = [whole] * len(choices)
                if kind == "loss" and not any(user.op != "output" for user in out.users):  # addends, summed once
                    left = [tuple(P if p == P else R for p in c.outputs[k].value) for c in choices]
                    self.values[:, ONCE] += np.array([self._sum_seconds(spec, tensor.kind) for spec in left])[pick]
                wanted = np.array([tensor.index(Pair(spec, whole)) for spec in left])
                self._read(tensor, wanted[pick], None)

    def _sum_seconds(self, spec: Sequence[Any], kind: Any) -> float:
        """Of all-reduces over the axes where the devices have addends."""
        return sum(axis.seconds("all_reduce", kind.nbytes) for axis, p in zip(self.pricer.axes, spec) if p == P)

    def _op_values(self, node: Any, choices: Sequence[MeshChoice]) -> np.ndarray:
        out, pricer = np.zeros((len(choices), COLUMNS)), self.pricer
        again = node.name in self.recompute.repeated
        for row, choice in zip(out, choices):
            price = pricer.op(node, choice, self.grad)
            row[FORWARD] = price.forward_s + price.internal_forward_s
            row[BACKWARD] = price.backward_s + price.internal_backward_s + (row[FORWARD] if again else 0.0)
            row[WEIGHT] = price.backward_weight_s
        if not self.of.limited:
            return out
        out[:, SAVED], out[:, HELD] = saved_bytes(
            node, choices, pricer, self.saved - self.on_edges.results,
            self.plain - self.on_edges.results, self.grad, self.members,
            self.recompute,
        )  # fmt: skip
        for row, choice in zip(out, choices):
            row[LARGEST] = sum(pricer.local_bytes(t, p.value) for t, p in zip(types_of(node), choice.outputs))
            for operand, pair in zip(tensor_operands(node), choice.inputs):
                if operand.op != "placeholder":
                    row[LARGEST] += pricer.operand_bytes(operand, pair.value)
        return out

    def _place(self, tensor: TensorPrices, wanted: np.ndarray) -> None:
        """A placeholder at its first use, by an op whose choices want these pairs."""
        choices = self.placed[tensor.name]
        pairs = [c.compute if isinstance(c, ParameterSharding) else c for c in choices]
        number = np.array([tensor.index(pair) for pair in pairs])
        values, kinds = self._placed_values(tensor, choices), self._gradient_kinds(tensor, choices)
        classes = np.array([kinds[key] for key in map(self._gradient_key, itertools.repeat(tensor), choices)])
        offered = [np.arange(len(choices))] * len(wanted)
        if tensor.uses == 1 and tensor.name not in self.of.shared:
            offered = [self._worthwhile(tensor, values, classes, number, int(want)) for want in wanted]
        counts, now = np.array([len(some) for some in offered]), self.columns["now"]
        before = np.repeat(np.arange(len(now)), counts[now])
        pick = np.concatenate([offered[c] for c in now]) if len(now) else np.zeros(0, int)
        self.take(before, tensor.name, pick)
        self._introduce(tensor.name, number[pick])
        self.values += values[pick]
        if isinstance(choices[0], ParameterSharding) and tensor.grad:
            self.columns[f"{tensor.name} gradient"] = classes[pick]
            self._classes[tensor.name] = list(kinds)
        if tensor.name in self.of.shared:
            self.columns[f"{tensor.name} shared"] = pick

    def _worthwhile(
        self, tensor: TensorPrices, values: np.ndarray, classes: np.ndarray, number: np.ndarray, want: int
    ) -> np.ndarray:
        """Placements of a tensor with one reader that no other undercuts for this reader, gradients being equal."""
        ahead, back, copy = (table[number, want] for table in tensor.tables())
        total = values.copy()
        total[:, FORWARD] += ahead
        total[:, BACKWARD] += back
        total[:, SAVED if tensor.keeps else HELD] += copy
        finite, total = np.isfinite(total).all(axis=1), self.compared(total)
        kept: list[int] = []
        for k in sorted(np.flatnonzero(finite), key=lambda k: tuple(total[k])):
            if not any(classes[j] == classes[k] and (total[j] <= total[k]).all() for j in kept):
                kept.append(k)
        return np.array(kept, int)

    def _placed_values(self, tensor: TensorPrices, choices: Sequence[Any]) -> np.ndarray:
        rows, source, pricer = np.zeros((len(choices), COLUMNS)), tensor.node.meta["source"], self.pricer
        trained = source.kind == "parameter" and source.requires_grad and tensor.grad
        for row, choice in zip(rows, choices):
            if source.kind != "parameter":
                row[RESIDENT] = pricer.local_bytes(tensor.kind, choice.value) if source.kind == "buffer" else 0.0
                continue
            price = sharding_seconds(pricer, tensor.kind, choice, self.m, trained)
            added = accumulate_seconds(pricer, tensor.kind, choice, self.m) if trained else 0.0
            row[BACKWARD] = price.reduce_microbatch_s + added / self.m
            row[WEIGHT] = added / self.m
            row[ONCE] = price.gather_step_s + price.update_s
            row[ONCE] += price.reduce_step_s if choice.scattered_axes else 0.0
            row[RESIDENT] = sum(sharding_bytes(pricer, tensor.kind, choice, source.requires_grad).values())
            row[HELD] = gathered_bytes(pricer, tensor.kind, choice, False)
        return rows

    def _gradient_key(self, tensor: TensorPrices, choice: Any) -> tuple:
        """What the messages of parameters need to know."""
        if not isinstance(choice, ParameterSharding):
            return ()
        if choice.scattered_axes:
            return (choice,)
        axes = partial_axes(choice.compute, self.mesh.shape)
        return (axes, self.pricer.local_bytes(tensor.kind, choice.compute.value)) if axes else ()

    def _gradient_kinds(self, tensor: TensorPrices, choices: Sequence[Any]) -> dict[tuple, int]:
        found: dict[tuple, int] = {}
        for choice in choices:
            found.setdefault(self._gradient_key(tensor, choice), len(found))
        return found

    @cached_property
    def _classes(self) -> dict[str, list[tuple]]:
        return {}

    def _read(self, tensor: TensorPrices, wanted: np.ndarray, layer: int | None) -> None:
        """An op reads the tensor in these pairs: a conversion is paid once per pair; by way of the state at a border
        between layers it may not cost more."""
        name, columns = tensor.name, self.columns
        ahead, back, copy = tensor.tables()
        source, paid, state = (columns[f"{name} {what}"] for what in ("src", "paid", "state"))
        new = ((wanted != source) | (name in self.on_edges.read)) & ((paid >> wanted) & 1 == 0)
        direct = np.where(new, ahead[source, wanted] + back[source, wanted], 0.0)
        self.values[:, FORWARD] += np.where(new, ahead[source, wanted], 0.0)
        self.values[:, BACKWARD] += np.where(new, back[source, wanted], 0.0)
        factor = np.where(wanted != source, 1.0, self.on_edges.read.get(name, 0.0))
        self.values[:, SAVED if tensor.keeps else HELD] += np.where(new, factor * copy[source, wanted], 0.0)
        crossed = state >= 0
        if crossed.any() and tensor.node.op != "placeholder":
            lately, charged = columns[f"{name} lately"], columns[f"{name} charged"]
            both = ahead + back
            first = (charged == 0) & ((paid >> np.maximum(state, 0)) & 1 == 0)
            around = np.where(first, both[source, state], 0.0)
            around += np.where((wanted != state) & ((lately >> wanted) & 1 == 0), both[state, wanted], 0.0)
            good = ~crossed | (around <= direct * (1 + 1e-12) + 1e-18)
            columns[f"{name} charged"] = np.where(crossed, 1, charged)
            columns[f"{name} lately"] = np.where(crossed, lately | (1 << wanted), lately)
            columns[f"{name} paid"] = paid | (1 << wanted)
            self.keep(good)
        else:
            columns[f"{name} paid"] = paid | (1 << wanted)
        self.keep(np.isfinite(self.values).all(axis=1))

    @cached_property
    def _last_use(self) -> dict[str, int]:
        return {name: k for k, node in enumerate(self.ops) for name in {o.name for o in node.all_input_nodes}}

    @cached_property
    def _last_border(self) -> dict[str, int]:
        first, end = self.layers
        return {name: border for border in range(first + 1, end + 1) for name in self.layering.crossing[border]}

    def _forget(self, position: int, placeholders: bool = True) -> None:
        """Columns of what nothing reads any more."""
        for name in {column.rsplit(" ", 1)[0] for column in self.columns if column.endswith(" src")}:
            alive = self._last_border.get(name, 0) > self.done if name not in self.placed else not placeholders
            if not alive and self._last_use.get(name, -1) <= position:
                for what in _PASSING:
                    del self.columns[f"{name} {what}"]

    def _border(self, border: int, leaving: bool = False) -> None:
        """Before layer ``border``: whatever crosses takes a joint state; what leaves the stage is converted to it."""
        self.values[:, PEAK] = np.maximum(self.values[:, PEAK], self.values[:, HELD])
        self.values[:, HELD] = 0.0
        names = self.layering.crossing[border]
        if not names:
            return
        states = border_states(self.layering, self.nodes, self.mesh.shape, border)
        pick = self.cross(len(states), "exit" if leaving else "border")
        good = np.ones(len(pick), bool)
        entering = self.layering.crossing[self.layers[0]]
        wanted: dict[str, np.ndarray] = {}
        for name in names:
            tensor = self._tensor(name)
            wanted[name] = np.array([tensor.index(state[name]) for state in states])[pick]
            before = self.columns[f"{name} state"]
            good &= (before < 0) | (before == wanted[name])
            self.columns[f"{name} state"] = wanted[name]
            self.columns[f"{name} lately"] = np.zeros(len(pick), int)
            if leaving and name not in entering:
                self.columns[f"out {name}"] = wanted[name]
        self.keep(good)
        for name in names if leaving else ():
            if name not in entering:
                tensor = self._tensor(name)
                self.columns[f"{name} state"] = np.full(len(self.values), -1)
                self._read(tensor, self.columns[f"out {name}"], None)
        if leaving:
            for column in [c for c in self.columns if c.rsplit(" ", 1)[-1] in _PASSING]:
                del self.columns[column]

    def _finished(self) -> list[StagePart]:
        """Gradients in their buckets, then the parts that no other undercuts."""
        order = {
            name: k
            for k, node in reversed(list(enumerate(self.ops)))
            for name in (o.name for o in node.all_input_nodes)
        }
        trained = sorted(self._classes, key=order.__getitem__)
        if trained:
            keys = np.stack([self.columns[f"{name} gradient"] for name in trained], axis=1)
            kinds, which = np.unique(keys, axis=0, return_inverse=True)
            seconds = np.array([self._reduction(trained, kind) for kind in kinds])[which.reshape(-1)]
            self.values[:, FORWARD] += seconds[:, 0]
            self.values[:, BACKWARD] += seconds[:, 1]
            self.values[:, ONCE] += seconds[:, 2]
            for name in trained:
                del self.columns[f"{name} gradient"]
        self.prune()
        received = [c[3:] for c in self.columns if c.startswith("in ")]
        sent = [c[4:] for c in self.columns if c.startswith("out ")]
        shared = [c.rsplit(" ", 1)[0] for c in self.columns if c.endswith(" shared")]
        host = self.pricer.device.action_s
        parts = []
        for row, value in enumerate(self.values):
            seconds = value[FORWARD] + host, value[BACKWARD] + host, value[ONCE], value[WEIGHT]
            nbytes = value[RESIDENT], value[SAVED], value[PEAK], value[LARGEST]
            held = tuple((name, self.placed[name][self.columns[f"{name} shared"][row]]) for name in shared)
            ends = self._ends("in", received, row), self._ends("out", sent, row)
            parts.append(StagePart(*map(float, (*seconds, *nbytes)), *ends, held, row, self))
        return parts

    def _ends(self, side: str, names: Sequence[str], row: int) -> tuple[tuple[str, Pair], ...]:
        values = [list(self._tensor(name).pairs)[self.columns[f"{side} {name}"][row]].value for name in names]
        return tuple((name, Pair(value, value)) for name, value in zip(names, values))

    def _reduction(self, trained: Sequence[str], kinds: Sequence[int]) -> tuple[float, float, float]:
        """Seconds per microbatch in the forward, in the backward, per step."""
        gradients, blocks, layerwise = [], [], {}
        for name, kind in zip(trained, kinds):
            found = self._classes[name][kind]
            if len(found) == 1 and found[0].gather == "microbatch":
                layerwise[name] = found[0]
            elif len(found) == 1:
                blocks.append((self._tensor(name).kind, *found))
            elif found:
                gradients.append(Gradient(name, found[0], found[1], self._tensor(name).kind.dtype))
        more = unfilled_messages(self.pricer, blocks)
        forward, back = self._layerwise(layerwise)
        often = back + sum(one.seconds for one in more if one.often)
        seconds = sum(one.seconds for one in more if not one.often)
        for bucket in make_buckets(gradients):
            seconds += self.pricer.reduce_seconds(bucket.nbytes, bucket.axes)
            if len(bucket.gradients) > 1:
                seconds += 2 * bucket.nbytes / self.pricer.device.memory_bytes_per_s
        return forward, often, seconds

    def _layerwise(self, homes: dict[str, ParameterSharding]) -> tuple[float, float]:
        """Seconds of one message per layer and axes: gathered, gathered again where a product with an activation that
        has a gradient, or a layer that is run again, reads them; summed."""
        forward = back = 0.0
        for layer in range(*self.layers) if homes else ():
            ops = [node for node in self.ops if self.layer_of.get(node.name) == layer]
            sizes: dict[tuple[int, ...], float] = defaultdict(float)
            for name in {operand.name for node in ops for operand in tensor_operands(node)} & set(homes):
                sizes[homes[name].scattered_axes] += self.pricer.local_bytes(
                    self._tensor(name).kind, homes[name].compute.value
                )
            again = any(
                node.name in self.recompute.repeated or (any(o.name in self.grad for o in others) and read)
                for node in ops
                for read in [[o for o in tensor_operands(node) if o.name in homes]]
                for others in [[o for o in tensor_operands(node) if o.name not in homes]]
            )
            for axes, size in sizes.items():
                gather = self.pricer.joint(axes).seconds("all_gather", size)
                forward += gather
                back += again * gather + self.pricer.joint(axes).seconds("reduce_scatter", size)
        return forward, back
