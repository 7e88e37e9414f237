"""Predict a step from the prices of single stages: messages between stages, tied weights, the loss, the schedule.

transfer   every device of the receiving stage gets its part at once; a part may come in several tiles
sends      starting a message keeps the sender for a while, in each of its actions; so does a codec at both ends
loss       broadcast to all ranks if its stage is not on all devices, after its sum over the stage
tied       copies send their gradients to the owner and get the new values back
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import NamedTuple, Protocol

from torch.fx import Node

from ...costmodel.cluster import Cluster, Mesh
from ...costmodel.collectives import mesh_prices, p2p_seconds
from ..cost.pricing import MeshPricer, gradient_type
from ..frontend.layers import Layering
from ..intra_op.stage import SolvedStage
from ..ir.graph import Graph, TensorType, op_name
from ..ir.spec import Spec, local_shape, without_partials
from ..pipeline.families import PIPEDREAM, generate
from ..pipeline.schedule import Edge, Schedule
from ..pipeline.simulate import Message, Simulation, message_times, simulate, simulate_steady_state
from ..plan.plan import GradientReduction, Plan, Stage, StagePrediction, Transfer
from ..plan.tensor_codecs import coder_seconds, wire_share
from ..rules import mesh_choices

__all__ = [
    "Holder",
    "StepPrediction",
    "loss_seconds",
    "merge_chunks",
    "microbatch_flops",
    "plan_messages",
    "predict",
    "simulate_plan",
    "simulate_stages",
    "tied_seconds",
    "weight_seconds",
]


class Placed(Protocol):
    """Anything on the devices of a logical mesh."""

    @property
    def devices(self) -> Sequence[int]: ...

    @property
    def mesh_shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class StepPrediction:
    """A step of all stages together."""

    step_s: float
    stages: tuple[StagePrediction, ...]
    transfers: tuple[Transfer, ...]
    #: source of prices (measured, analytic, …) → seconds of the busiest stage
    sources: Mapping[str, float]


def predict(
    graph: Graph,
    cluster: Cluster,
    needs_grad: frozenset[str],
    schedule: str,
    microbatches: int,
    optimizer: str,
    parts: Sequence[SolvedStage],
    code: str = "none",
) -> StepPrediction:
    """The prediction of a step with these stages.

    graph: at the microbatch's extent. parts: a stage of several chunks comes from ``merge_chunks``. code: the tensor
    codec of activations between stages.
    """
    stages = [part.stage for part in parts]
    num_chunks = max(len(stage.chunks) for stage in stages)
    chunks = num_chunks if num_chunks > 1 else None
    transfers, posts = _messages(graph, cluster, needs_grad, stages, code)
    tied = tied_seconds(graph, cluster, optimizer, needs_grad, [_holder(stage) for stage in stages])
    told = _loss(graph, cluster, stages)
    once = [{name: seconds for name, seconds in (("tied", t), ("loss", told)) if seconds} for t in tied]
    received: defaultdict[int, float] = defaultdict(float)
    for transfer in transfers:
        received[transfer.target] += transfer.forward_s + transfer.backward_s
    predictions = tuple(
        _with_messages(part.prediction, posts[index], received[index], once[index]) for index, part in enumerate(parts)
    )
    simulation = simulate_stages(schedule, microbatches, chunks, stages, predictions, transfers)
    busy = [stage.busy_s(microbatches) for stage in predictions]
    critical = busy.index(max(busy))
    sources = dict(parts[critical].sources)
    sent = sum(map(sum, posts[critical]))
    sources["measured"] = sources.get("measured", 0.0) + microbatches * sent
    if extra := sum(once[critical].values()):
        sources["analytic"] = sources.get("analytic", 0.0) + extra
    return StepPrediction(
        simulation.makespan_s, predictions, transfers, {k: s for k, s in sorted(sources.items()) if s > 0}
    )


def _with_messages(
    alone: StagePrediction, posts: Sequence[tuple[float, float]], received: float, once: Mapping[str, float]
) -> StagePrediction:
    """A stage's prediction with what it does together with others. posts: seconds per chunk of its forward and its
    backward to start messages."""
    ahead, back = sum(forward for forward, _ in posts), sum(backward for _, backward in posts)
    loss = {"loss": alone.seconds.get("loss", 0.0)}  # its sum; it is told beside
    return replace(
        alone,
        forward_s=alone.forward_s + ahead,
        backward_s=alone.backward_s + back,
        step_s=alone.step_s + sum(once.values()),
        seconds={**alone.seconds, "transfer": received, "sends": ahead + back, **_summed([loss, once])},
        chunk_s=tuple((f + a, b + c, w) for (f, b, w), (a, c) in zip(alone.chunk_s, posts)),
    )


def microbatch_flops(graph: Graph, cluster: Cluster, layering: Layering) -> float:
    """FLOPs of one microbatch, forward and backward: of each layer class once, and of floating ops. ``graph``: at the
    microbatch's extent."""
    single, nodes = MeshPricer(cluster, 0, (), "SGD"), graph.by_name()

    def of(names: Iterable[str]) -> float:
        found = [nodes[name] for name in names if op_name(nodes[name]) != "getitem"]
        return sum(single.op(node, mesh_choices(node, ())[0], layering.needs_grad).flops for node in found)

    first = {layer.class_key: layer for layer in reversed(layering.layers)}
    by_class = {key: of(layer.ops) for key, layer in first.items()}
    return of(layering.floating) + sum(by_class[layer.class_key] for layer in layering.layers)


def merge_chunks(parts: Sequence[SolvedStage]) -> SolvedStage:
    """One stage from its chunks, which were priced one by one with their own microbatches in flight. Seconds and kept
    bytes add up; temporary bytes do not."""
    if len(parts) == 1:
        return parts[0]
    first, predictions = parts[0], [part.prediction for part in parts]
    wires: dict[tuple[int, ...], GradientReduction] = {}  # chunks that sum over the same axes do so in the same way
    for wire in (wire for part in parts for wire in part.stage.wire):
        size = wires[wire.axes].bytes if wire.axes in wires else 0.0
        wires[wire.axes] = replace(wires.get(wire.axes, wire), bytes=size + wire.bytes)
    stage = replace(
        first.stage,
        chunks=tuple(chunk for part in parts for chunk in part.stage.chunks),
        wire=tuple(wires[axes] for axes in sorted(wires)),
    )
    memory = _summed([one.memory_bytes for one in predictions])
    for cause in ("temporary", "framework"):
        memory[cause] = max(one.memory_bytes.get(cause, 0.0) for one in predictions)
    prediction = StagePrediction(
        forward_s=sum(one.forward_s for one in predictions),
        backward_s=sum(one.backward_s for one in predictions),
        step_s=sum(one.step_s for one in predictions),
        seconds=_summed([one.seconds for one in predictions]),
        memory_bytes=memory,
        collectives=dict(sorted(sum((Counter(one.collectives) for one in predictions), Counter[str]()).items())),
        chunk_s=tuple((one.forward_s, one.backward_s, one.seconds["backward_weight"]) for one in predictions),
    )
    sources = _summed([part.sources for part in parts])
    return replace(
        first, stage=stage, prediction=prediction, sources=sources, wasted_flops=sum(p.wasted_flops for p in parts)
    )


def _summed(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(table.get(name, 0.0) for table in tables) for table in tables for name in table}


# ---- messages between stages


def _messages(
    graph: Graph, cluster: Cluster, needs_grad: frozenset[str], stages: Sequence[Stage], code: str
) -> tuple[tuple[Transfer, ...], list[list[tuple[float, float]]]]:
    """Every tensor from the chunk that makes it to each chunk of another stage that uses it, priced there and back; and
    per stage and chunk the seconds that its forward and its backward spend on encoding, starting and decoding these
    messages, a device's mean."""
    nodes = graph.by_name()
    made = {
        name: (s, c, spec)
        for s, stage in enumerate(stages)
        for c, chunk in enumerate(stage.chunks)
        for name, spec in chunk.sends.items()
    }
    transfers = []
    posts = [[[0.0, 0.0] for _ in stage.chunks] for stage in stages]
    for index, target in enumerate(stages):
        for number, chunk in enumerate(target.chunks):
            for name, pair in chunk.receives.items():
                origin, home, spec = made[name]
                if origin == index:  # it is there already
                    continue
                source, kind = stages[origin], nodes[name].meta["type"]
                ahead = (source, spec), (target, pair.value)
                forward, backward = _message(cluster, kind, *ahead, code), 0.0
                posts[origin][home][0] += _post(cluster, kind, *ahead, code)
                posts[index][number][0] += _coding(cluster, kind, target, pair.value, code)
                if name in needs_grad and kind.is_float:
                    back = (target, without_partials(pair.cotangent)), (source, without_partials(spec))
                    backward = _message(cluster, kind, *back, code)
                    posts[index][number][1] += _post(cluster, kind, *back, code)
                    posts[origin][home][1] += _coding(cluster, kind, source, without_partials(spec), code)
                transfers.append(Transfer(name, origin, index, forward, backward, home, number))
    return tuple(transfers), [[(forward, backward) for forward, backward in row] for row in posts]


def _message(
    cluster: Cluster, kind: TensorType, here: tuple[Placed, Spec], there: tuple[Placed, Spec], code: str = "none"
) -> float:
    """Seconds until every device of ``there`` has its part of a tensor that lies on ``here``."""
    (source, _), (target, _) = here, there
    tiles, size = _tiles(kind, here, there, code)
    backwards = source.devices[0] > target.devices[0]
    ends = (source.devices[0], target.devices[-1]) if backwards else (source.devices[-1], target.devices[0])
    return tiles * p2p_seconds(cluster, *ends, size, len(target.devices))


def _post(
    cluster: Cluster, kind: TensorType, here: tuple[Placed, Spec], there: tuple[Placed, Spec], code: str = "none"
) -> float:
    """Seconds that a device of ``here`` spends on encoding and starting its share of these messages."""
    (source, spec), (target, _) = here, there
    tiles, size = _tiles(kind, here, there, code)
    count = tiles * len(target.devices) / len(source.devices)
    started = count * cluster.device(source.devices[0]).post_seconds(size)
    return started + _coding(cluster, kind, source, spec, code)


def _coding(cluster: Cluster, kind: TensorType, stage: Placed, spec: Spec, code: str) -> float:
    """Seconds that a device spends on encoding its block, or decoding it."""
    elements = prod(local_shape(kind.shape, spec, stage.mesh_shape))
    return elements * coder_seconds(code, kind, cluster.device(stage.devices[0]))


def _tiles(
    kind: TensorType, here: tuple[Placed, Spec], there: tuple[Placed, Spec], code: str = "none"
) -> tuple[int, float]:
    """(blocks of the source that one target device's block touches, bytes of each); each is a message."""
    (source, sent), (target, wanted) = here, there
    count = prod(ceil(a / b) for a, b in zip(_parts(kind, sent, source), _parts(kind, wanted, target)))
    size = prod(local_shape(kind.shape, wanted, target.mesh_shape)) * kind.dtype.itemsize * wire_share(code, kind)
    return count, size / count


def _parts(kind: TensorType, spec: Spec, stage: Placed) -> list[int]:
    parts = [1] * len(kind.shape)
    for placement, size in zip(spec, stage.mesh_shape):
        if placement.is_shard:
            parts[placement.dim] *= size
    return parts


# ---- the end of the step


def _loss(graph: Graph, cluster: Cluster, stages: Sequence[Stage]) -> float:
    """Seconds until everyone knows the loss, once its stage has it."""
    losses = [result.node for result in graph.results if result.kind == "loss"]
    holder = [s for s, stage in enumerate(stages) for chunk in stage.chunks if losses and losses[0] in chunk.ops]
    return loss_seconds(graph, cluster, len(stages[holder[-1]].devices)) if holder else 0.0


def loss_seconds(graph: Graph, cluster: Cluster, num_devices: int) -> float:
    """Seconds until everyone knows the loss that a stage of so many devices has."""
    losses = [result.node for result in graph.results if result.kind == "loss"]
    if not losses or num_devices == cluster.num_devices:
        return 0.0
    world = mesh_prices(cluster, Mesh.of(cluster, 0, (cluster.num_devices,)))[0]
    return world.seconds("broadcast", graph.by_name()[losses[0]].meta["type"].dtype.itemsize)


class Holder(NamedTuple):
    """The devices of a stage, and how its parameters are placed where ops read them, by name."""

    devices: Sequence[int]
    mesh_shape: tuple[int, ...]
    specs: Mapping[str, Spec]


def _holder(stage: Stage) -> Holder:
    return Holder(stage.devices, stage.mesh_shape, {name: home.compute.value for name, home in stage.homes.items()})


def tied_seconds(
    graph: Graph, cluster: Cluster, optimizer: str, needs_grad: frozenset[str], stages: Sequence[Holder]
) -> list[float]:
    """Seconds by stage to exchange the gradients and values of parameters that several stages hold: copies send their
    gradients to the first, and get the new values back."""
    once = [0.0] * len(stages)
    for node in graph.placeholders("parameter"):
        source, kind = node.meta["source"], node.meta["type"]
        owner, *others = [index for index, stage in enumerate(stages) if source.name in stage.specs] or (0,)
        if not others or not source.requires_grad or node.name not in needs_grad:
            continue
        home = stages[owner], stages[owner].specs[source.name]
        pricer = MeshPricer(cluster, home[0].devices[0], home[0].mesh_shape, optimizer)
        for other in others:
            away = stages[other], stages[other].specs[source.name]
            sums = gradient_type(kind, graph.mixed)
            up, down = _message(cluster, sums, away, home), _message(cluster, kind, home, away)
            there = MeshPricer(cluster, away[0].devices[0], away[0].mesh_shape, optimizer)
            copy_s = 2 * there.local_bytes(kind, away[1]) / there.device.memory_bytes_per_s
            once[owner] += up + pricer.add_seconds(sums, home[1]) + down
            once[other] += up + down + copy_s
    return once


def least_tied_seconds(
    graph: Graph, cluster: Cluster, node: Node, pieces: int, first: Sequence[int], last: Sequence[int]
) -> float:
    """The least that ``tied_seconds`` says of a parameter that two stages hold on equally many devices, each of which
    holds at least one of so many pieces of it."""
    kind, num = node.meta["type"], len(first)
    up = p2p_seconds(cluster, last[0], first[-1], gradient_type(kind, graph.mixed).nbytes / pieces, num)
    return up + p2p_seconds(cluster, first[-1], last[0], kind.nbytes / pieces, num)


def simulate_plan(plan: Plan) -> Simulation:
    """The schedule on the clock with the plan's own predicted seconds."""
    stages = plan.prediction.stages
    return simulate_stages(
        plan.schedule, plan.microbatches, plan.chunks_asked, plan.stages, stages, _with_seconds(plan.transfers, stages)
    )


def _with_seconds(transfers: Sequence[Transfer], stages: Sequence[StagePrediction]) -> Sequence[Transfer]:
    """Transfers of a document of before with seconds: a stage's, there and back, evenly on its edges."""
    if any(transfer.forward_s for transfer in transfers):
        return transfers
    edges = {(transfer.source, transfer.target): transfer for transfer in transfers}
    sources = {target: sum(other == target for _, other in edges) for _, target in edges}
    each = {edge: stages[edge[1]].seconds.get("transfer", 0.0) / 2 / sources[edge[1]] for edge in edges}
    return [replace(edges[edge], forward_s=seconds, backward_s=seconds) for edge, seconds in each.items()]


def simulate_stages(
    schedule: str,
    microbatches: int,
    chunks: int | None,
    stages: Sequence[Stage],
    predictions: Sequence[StagePrediction],
    transfers: Sequence[Transfer],
) -> Simulation:
    """A schedule (of ``chunks`` per stage, None for its own number) on the clock with predicted seconds. Tensors that
    one chunk makes for another of its stage are there at once."""
    made = generate(schedule, len(stages), microbatches, chunks)
    ahead, back = _edges(made, stages, transfers)
    seconds = [(one.chunk_s or [(one.forward_s, one.backward_s, weight_seconds(one))]) for one in predictions]
    each = [seconds[s][c] for s, c in made.places()]
    if schedule == PIPEDREAM:
        forward, backward = [f for f, _, _ in each], [b for _, b, _ in each]
        return simulate_steady_state(
            microbatches, forward, backward, ahead, [stage.step_s for stage in predictions], back
        )
    return simulate(
        made,
        [forward for forward, _, _ in each],
        [backward for _, backward, _ in each],
        ahead or None,
        [stage.step_s for stage in predictions],
        back or None,
        [min(weight, backward) for _, backward, weight in each],
    )


def _edges(
    made: Schedule, stages: Sequence[Stage], transfers: Sequence[Transfer]
) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """Seconds of the messages of every edge, forward and back."""
    number = {place: index for index, place in enumerate(made.places())}
    ahead: dict[Edge, float] = {}
    back: dict[Edge, float] = {}
    for s, stage in enumerate(stages):
        senders = {name: c for c, chunk in enumerate(stage.chunks) for name in chunk.sends}
        for c, chunk in enumerate(stage.chunks):
            for edge in {(number[s, senders[name]], number[s, c]) for name in chunk.receives if name in senders}:
                ahead[edge] = back[edge] = 0.0
    for transfer in transfers:
        edge = number[transfer.source, transfer.source_chunk], number[transfer.target, transfer.target_chunk]
        ahead[edge] = ahead.get(edge, 0.0) + transfer.forward_s
        back[edge] = back.get(edge, 0.0) + transfer.backward_s
    return ahead, back


def plan_messages(plan: Plan, simulation: Simulation) -> list[list[Message]]:
    """Per stage, the messages that it receives in ``simulate_plan``; none under "pipedream", whose steps overlap."""
    if plan.schedule == PIPEDREAM:
        return [[] for _ in plan.stages]
    made = generate(plan.schedule, len(plan.stages), plan.microbatches, plan.chunks_asked)
    ahead, back = _edges(made, plan.stages, _with_seconds(plan.transfers, plan.prediction.stages))
    return message_times(made, simulation, ahead, back)


def weight_seconds(stage: StagePrediction) -> float:
    """Seconds of a stage's backward that are for weights; half of it where a document of before does not say."""
    return stage.seconds.get("backward_weight", stage.backward_s / 2)
