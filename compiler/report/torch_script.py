"""``export --torch``: a plan as a Python module for PyTorch's own libraries, which needs no meshwright.

The text has the plan's decisions as tables (the device mesh, the modules of each stage, DTensor placements of their
weights) and functions on them (``_FUNCTIONS``)::

    device_mesh(device)           all devices of the plan, with the axes' roles as names
    part_of(model, stage, chunk)  the modules of a stage; the model's forward skips what is None (as in torchtitan)
    parallelize(part, mesh)       tensor parallelism by ColwiseParallel and RowwiseParallel, recomputation by
                                  checkpoints, data parallelism and ZeRO by fully_shard
    schedule_of(parts, mesh, …)   the pipeline's stages and schedule

What these libraries express in another way, or not at all, stands in the comment at the head; a plan that they would
compute wrongly is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

from ..pipeline.families import virtual_order
from ..plan.plan import Plan, Stage, parameter_stages
from ..plan.validation import require_valid
from ..text import wrap_lines
from .describe import axis_roles, sharding_words

__all__ = ["torch_script"]

#: schedule → its class in torch.distributed.pipelining
_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "eager-1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "Schedule1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def torch_script(plan: Plan) -> str:
    """The text of the module. Raises ValueError for a plan that does not hold, and for one that DTensor, FSDP and
    PyTorch's pipelines would not compute as it says."""
    require_valid(plan)
    names, shape = _axes(plan)
    if faults := list(_refused(plan)):
        raise ValueError(f"a plan is exported where PyTorch's libraries compute it, but got {'; '.join(faults)}")
    about = [
        f"A plan of meshwright for model {plan.model}.",
        "",
        "Pass each data-parallel rank its part of the batch, in the order of the ranks. Where PyTorch's libraries",
        "differ from the plan:",
        *(line for text in _unexpressed(plan, names) for line in wrap_lines(text, 110, "- ", "  ")),
    ]
    lines = [
        f'"""{_inert(about)}\n"""',
        "",
        _IMPORTS.strip(),
        "",
        f"GLOBAL_BATCH, MICROBATCHES = {plan.global_batch}, {plan.microbatches}",
        f"MESH = {dict(zip(names, shape))}  # axis → devices, the first one outermost",
        f"SCHEDULE = {_SCHEDULES[plan.schedule] if 'pipeline' in names else None}",
        f"PRECISION = {'None' if plan.precision == 'model' else f'torch.{_DTYPES[plan.precision]}'}",
        "#: of each stage and chunk: (its place in the model, {weight: its placements over the axes of a stage})",
        "STAGES = [",
    ]
    order = {place: k for k, place in enumerate(virtual_order(plan.schedule, len(plan.stages), plan.num_chunks))}
    inner = [name for name in names if name != "pipeline"]
    for index, stage in enumerate(plan.stages):
        lines.append("    [")
        for number in range(len(stage.chunks)):
            lines.append(f"        ({order[index, number]}, {{")
            lines += _placements(stage, number, inner)
            lines.append("        }),")
        lines.append("    ],")
    layers = _layers(plan)
    lines += [
        "]",
        "#: modules that fully_shard takes one by one: True if the backward gathers their weights again (ZeRO-3)",
        f"SHARDED = {_table(layers)}",
        "#: modules whose forward runs again in the backward",
        f"RECOMPUTED = {_rows(_recomputed(plan))}",
        "",
        _FUNCTIONS.strip(),
        "",
    ]
    return "\n".join(lines)


def _inert(lines: Sequence[str]) -> str:
    """Text for within a docstring, which no name in a plan can end."""
    return "\n".join(lines).replace("\\", "/").replace('"', "'")


# ---- tables


def _axes(plan: Plan) -> tuple[list[str], list[int]]:
    """(names, sizes) of the axes of one mesh for the plan, neighbours of one role as one axis."""
    meshes = {(stage.mesh_shape, axis_roles(stage)) for stage in plan.stages}
    if len({shape for shape, _ in meshes}) > 1:
        raise ValueError(
            "a plan is exported where all stages have one mesh, but got "
            f"{' and '.join('×'.join(map(str, shape)) or '1' for shape, _ in sorted(meshes))}; plan with regular='only'"
        )
    roles = [_role(each) for each in zip(*(axis_roles(stage) for stage in plan.stages))]
    runs = [(role, [k for k, _ in run]) for role, run in groupby(enumerate(roles), key=lambda pair: pair[1])]
    names = [role for role, _ in runs]
    sizes = [prod(plan.stages[0].mesh_shape[k] for k in axes) for _, axes in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"a plan is exported where axes of one role are neighbours, but got {', '.join(roles)}")
    if len(plan.stages) > 1:
        names, sizes = ["pipeline", *names], [len(plan.stages), *sizes]
    return names or ["data"], sizes or [1]


def _role(roles: tuple[str, ...]) -> str:
    """The role of an axis that stages agree on; one that cuts nothing on some stage is as on the others."""
    found = sorted(set(roles) - {"replicas"}) or ["replicas"]
    if len(found) > 1 or found[0] not in ("data", "tensor", "replicas"):
        raise ValueError(
            "a plan is exported where each mesh axis is of data or tensor parallelism, but got one of "
            f"{' and '.join(found)}; plan with sequence=False, or with strategy='dp2,tp2'"
        )
    return found[0]


def _placements(stage: Stage, chunk: int, names: list[str]) -> Iterator[str]:
    """A line per parameter of a chunk."""
    roles = axis_roles(stage)
    for name, home in stage.chunks[chunk].parameters.items():
        dims = {role: p.dim for p, role in zip(home.compute.value, roles) if p.dim >= 0}
        placements = [
            f"Shard({dims['tensor']})" if n == "tensor" and "tensor" in dims else "Replicate()" for n in names
        ]
        yield f"            {name!r}: ({', '.join(placements)}{',' if len(placements) == 1 else ''}),"


def _layers(plan: Plan) -> dict[str, bool]:
    """Module → True if its weights are in ZeRO-3: those of numbered layers that have weights."""
    found: dict[str, bool] = {}
    for stage in plan.stages:
        for chunk in stage.chunks:
            for layer in (_module(plan.layers[k]) for k in range(*chunk.layers)):
                mine = [home for name, home in chunk.parameters.items() if name.startswith(f"{layer}.")]
                if mine and any(part.isdecimal() for part in layer.split(".")):
                    found[layer] = all(home.pattern == "zero3" for home in mine)
    return found


def _recomputed(plan: Plan) -> list[str]:
    """Numbered modules all of whose layers are recomputed whole."""
    modes: dict[str, set[str]] = {}
    for stage in plan.stages:
        for chunk in stage.chunks:
            for k, mode in zip(range(*chunk.layers), chunk.recompute):
                modes.setdefault(_module(plan.layers[k]), set()).add(mode)
    return [name for name, found in modes.items() if found == {"full"} and any(map(str.isdecimal, name.split(".")))]


def _module(layer: str) -> str:
    """The module of a layer: the second half of blocks.0 is called blocks.0#2."""
    return layer.partition("#")[0]


def _table(values: dict[str, bool]) -> str:
    return "\n".join(["{", *(f"    {name!r}: {value}," for name, value in values.items()), "}"]) if values else "{}"


def _rows(values: list[str]) -> str:
    return "\n".join(["[", *(f"    {name!r}," for name in values), "]"]) if values else "[]"


# ---- what differs


def _refused(plan: Plan) -> Iterator[str]:
    """Decisions that would compute something else."""
    if plan.schedule not in _SCHEDULES:
        yield f"schedule {plan.schedule}, which PyTorch does not have; plan with another schedule"
    if tied := [name for name, stages in parameter_stages(plan.stages).items() if len(stages) > 1]:
        yield f"{tied[0]} on several stages, whose copies nobody keeps equal; plan with fewer stages"
    if plan.codes:
        yield f"compressed {' and '.join(plan.codes)}, which DTensor does not have; plan without communication="


def _divided(plan: Plan) -> list[str]:
    """Numbered modules whose weights lie in several chunks."""
    homes: dict[str, set[tuple[int, int]]] = {}
    for index, stage in enumerate(plan.stages):
        for number, chunk in enumerate(stage.chunks):
            for name in chunk.parameters:
                parts = name.split(".")
                if numbered := [k for k, part in enumerate(parts[:-1]) if part.isdecimal()]:
                    homes.setdefault(".".join(parts[: numbered[-1] + 1]), set()).add((index, number))
    return [module for module, places in homes.items() if len(places) > 1]


def _unexpressed(plan: Plan, names: list[str]) -> Iterator[str]:
    """A sentence for each decision that is carried out in another way."""
    patterns = Counter(home.pattern for stage in plan.stages for home in stage.homes.values())
    if "data" in names and set(patterns) - {"zero3"}:
        words = sharding_words(plan) or "replicated"
        yield (
            f"weights are {words} in the plan; fully_shard without reshard_after_forward shards their gradients and "
            "optimizer states (ZeRO-2): the same numbers, less memory"
        )
    for module in _divided(plan):
        yield (
            f"a stage ends inside of {module}: the forward of that module, too, has to skip what is None; a constraint "
            "'stage boundary at' another layer avoids it"
        )
    if plan.schedule in ("eager-1f1b", "zb-h1"):
        yield f"schedule {plan.schedule} runs as 1F1B: PyTorch has none that is closer, with one chunk per stage"
    ways = {(w.algorithm, w.compressor) for stage in plan.stages for w in stage.wire if not w.is_plain}
    if ways:
        each = ", ".join(a if c == "none" else f"{a} in {c}" for a, c in sorted(ways))
        yield f"gradients are summed by the backend, not by {each}"
    modes = {mode for stage in plan.stages for chunk in stage.chunks for mode in chunk.recompute}
    if "selective" in modes:
        yield "selective recomputation is left out: pass checkpoint a policy of torch.utils.checkpoint"
    if plan.precision != "model":
        yield f"{plan.precision} is fully_shard's MixedPrecisionPolicy, with sums of gradients in fp32"
    if "tensor" in names:
        yield (
            "weights that are cut but belong to no nn.Linear (embeddings, experts) stay whole, and a column-parallel "
            "layer without a row-parallel one beside it gathers its output"
        )
        yield (
            "activations between a column- and a row-parallel layer are each rank's part, as in torchtitan: views of "
            "the model must take the number of heads from -1; hold the first loss against one device's"
        )
    if "data" in names:
        yield "the loss is a mean over the batch: fully_shard averages gradients over data-parallel ranks"
    idle = plan.num_devices - sum(len(stage.devices) for stage in plan.stages)
    if idle:
        yield f"{idle} of {plan.num_devices} devices are idle: start {plan.num_devices - idle} ranks"
    yield "buckets, overlap and the order of messages are the libraries' own, and so is the time that a step takes"


_IMPORTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
"""

_FUNCTIONS = '''
def device_mesh(device: str) -> DeviceMesh:
    """All devices of the plan; call it on every rank after init_process_group."""
    return init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def stage_of(mesh: DeviceMesh) -> int:
    """The pipeline stage of this rank."""
    return mesh.get_local_rank("pipeline") if "pipeline" in MESH else 0


def part_of(model: nn.Module, stage: int, chunk: int = 0) -> nn.Module:
    """Cut the modules of other stages out of the model, in place. Its forward has to skip what is None."""
    kept = {name.rpartition(".")[0] for name in STAGES[stage][chunk][1]}

    def cut(module: nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            where = f"{path}.{name}" if path else name
            if any(one == where or one.startswith(where + ".") for one in kept):
                cut(child, where)
            elif next(child.parameters(), None) is not None:
                if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                    del module._modules[name]  # the others keep their names
                else:
                    setattr(module, name, None)

    cut(model, "")
    return model


def paired_layers(linears: dict[str, int | None]) -> set[str]:
    """Column-parallel layers whose outputs stay cut, and the row-parallel layer of the same module that reads them: the
    next linear layer that is not column-parallel."""
    paired, waiting, module = set(), [], None
    for name, dim in linears.items():
        if (parent := name.rpartition(".")[0]) != module or dim is None:
            waiting, module = [], parent
        if dim == 0 and parent:
            waiting.append(name)
        elif dim == 1 and waiting:
            paired |= {*waiting, name}
            waiting = []
    return paired


def parallelize(part: nn.Module, mesh: DeviceMesh, chunk: int = 0) -> nn.Module:
    """Tensor parallelism, recomputation and sharding of a stage, in place: before the optimizer is made."""
    placements = STAGES[stage_of(mesh)][chunk][1]
    if "tensor" in MESH:
        axis = [name for name in MESH if name != "pipeline"].index("tensor")
        linears = {}  # layer -> the dim of its weight that is cut
        for name, weight in placements.items():
            owner, _, field = name.rpartition(".")
            if field == "weight" and isinstance(part.get_submodule(owner), nn.Linear):
                linears[owner] = getattr(weight[axis], "dim", None)
        paired = paired_layers(linears)
        for name, dim in linears.items():
            if dim == 0:
                style = ColwiseParallel(output_layouts=Shard(-1) if name in paired else Replicate())
            elif dim == 1:
                style = RowwiseParallel(input_layouts=Shard(-1) if name in paired else Replicate())
            else:
                continue
            parallelize_module(part.get_submodule(name), mesh["tensor"], style)
    if RECOMPUTED:
        again = {module for name, module in part.named_modules() if name in RECOMPUTED}
        apply_activation_checkpointing(
            part, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: module in again
        )
    if "data" in MESH and (MESH["data"] > 1 or PRECISION is not None):
        policy = MixedPrecisionPolicy(param_dtype=PRECISION, reduce_dtype=torch.float32 if PRECISION else None)
        modules = {name.replace("._checkpoint_wrapped_module", ""): module for name, module in part.named_modules()}
        for name, gathered_again in SHARDED.items():
            if name in modules:
                fully_shard(modules[name], mesh=mesh["data"], reshard_after_forward=gathered_again, mp_policy=policy)
        fully_shard(part, mesh=mesh["data"], reshard_after_forward=False, mp_policy=policy)
    return part


def schedule_of(parts: list[nn.Module], mesh: DeviceMesh, device: torch.device, loss_fn):
    """The pipeline of this rank's parallelized parts, one per chunk: call its step(inputs) on the first stage,
    step(target=…, losses=[]) on the last one, with this data-parallel rank's part of the batch."""
    stage, total = stage_of(mesh), sum(map(len, STAGES))
    stages = [
        PipelineStage(part, STAGES[stage][chunk][0], total, device, group=mesh.get_group("pipeline"))
        for chunk, part in enumerate(parts)
    ]
    single = len(STAGES[0]) == 1
    return SCHEDULE(stages[0] if single else stages, MICROBATCHES, loss_fn=loss_fn)
'''
