"""The values of the pipeline pass: costs of stages, constraints on cuts, and the pipelines or the reason why none fits.

An *option* is a way to use some devices for a stage: how many, in which logical shape, from which devices on, at which
price of memory. Options of one shape whose devices cost differently (mixed hosts) are different options. Tables are
made by whoever knows the graph and solved by ``stage_dp`` and ``regular``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .families import virtual_order

__all__ = [
    "PHASE_SHARE",
    "InfeasiblePipeline",
    "LagrangianBound",
    "LowerBounds",
    "Mix",
    "Pipeline",
    "PipelineSolution",
    "PipelineTable",
    "StageChoice",
    "StageConstraints",
    "StageOption",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

PHASE_SHARE = 1.0 / 3.0  # of a pace: forward, backward of inputs, backward of weights, if nothing else is known


@dataclass(frozen=True)
class StageOption:
    """``num_devices`` devices from any of ``offsets`` on (ascending; a device of the cluster each), with as many bytes
    per device there as ``limit_bytes`` says (the least among the devices).

    Pipelines whose stages hold the same layers on equally many devices of equal ``shape`` count as one; ``level`` says
    which price of memory the option was solved at. adjacent: no device may be idle right in front of the stage (that
    would gain nothing in the middle of a host, and its messages are priced as of neighbours).
    """

    num_devices: int
    offsets: tuple[int, ...]
    limit_bytes: tuple[float, ...]
    shape: int = 0
    level: int = 0
    adjacent: bool = False

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ValueError(f"an option uses at least one device, but got {self.num_devices}")
        if len(self.offsets) != len(self.limit_bytes):
            raise ValueError(
                f"an option has a memory limit for each of its {len(self.offsets)} offsets, but got "
                f"{len(self.limit_bytes)}"
            )
        if any(a >= b for a, b in zip(self.offsets, self.offsets[1:])) or (self.offsets and self.offsets[0] < 0):
            raise ValueError(f"an option's offsets ascend from 0 on, but got {self.offsets}")

    def limit(self, offset: int) -> float:
        """The bytes per device at one of the offsets."""
        return self.limit_bytes[self.offsets.index(offset)]


@dataclass(frozen=True, eq=False)
class LagrangianBound:
    """A Lagrangian lower bound: value[o, i, j] ≤ t + byte · resident + saved_byte · saved for each strategy of option
    o's stage. t: its seconds per microbatch, with its per-step work / m where ``whole``, without its backward of
    weights where ``trip``."""

    byte: float
    saved_byte: float
    value: Floats  # [options of the floors, L, L + 1]
    whole: bool = False
    trip: bool = False


@dataclass(frozen=True, eq=False)
class LowerBounds:
    """Lower bounds on every strategy of a stage; arrays [options, L, L + 1].

    pace_s: seconds per microbatch; whole_s: these and its per-step work / m together; step_s: per-step work;
    entry_s: a message ahead across the border before the stage; transfer_s: one back across the border behind it (both
    where entry_s is None); transient: bytes beside resident and saved ones. forward_s, backward_s: seconds of a
    microbatch's forward, and of its backward, alone. tied_s: what the first and the last of several stages
    exchange at the end of a step.
    """

    options: tuple[StageOption, ...]
    pace_s: Floats
    whole_s: Floats | None = None
    step_s: Floats | None = None
    transfer_s: Floats | None = None
    transient: Floats | None = None
    entry_s: Floats | None = None
    forward_s: Floats | None = None
    backward_s: Floats | None = None
    tied_s: float = 0.0
    rows: tuple[LagrangianBound, ...] = ()

    def __post_init__(self) -> None:
        shape = (len(self.options), *self.pace_s.shape[1:])
        optional = ("whole_s", "step_s", "transfer_s", "transient", "entry_s", "forward_s", "backward_s")
        _check_arrays(self, shape, ("pace_s", *optional))
        for row in self.rows:
            _check_arrays(row, shape, ("value",))


def _check_arrays(owner: object, shape: tuple[int, ...], names: Collection[str]) -> None:
    """Raise ValueError where an array has another shape or a negative entry for layers i < j."""
    upper = np.triu(np.ones(shape[1:], dtype=bool), 1)
    for name in names:
        if (array := getattr(owner, name)) is None:
            continue
        where = f"{type(owner).__name__}.{name}"
        if array.shape != shape:
            raise ValueError(f"{where} has shape {shape}, but got {array.shape}")
        if not (array.min() >= 0 or np.where(upper, array, 0.0).min() >= 0):  # also true of NaN
            raise ValueError(f"{where} is not negative for layers i < j, but got {array[:, upper].min()}")


@dataclass(frozen=True, eq=False)
class PipelineTable:
    """The costs of a stage of layers [i, j) under each option, for one microbatch count; entries with j ≤ i are not
    read.

    pace_s: seconds per microbatch, forward and backward, without messages; inf where the option cannot run the layers.
    transfer_s: messages across the border behind the stage, there and back; entry_s: those across the border before it
    (a message is in one of the two). step_s: once per step. Bytes are per device, ``saved`` per microbatch in flight.
    forward_share and input_share: the parts of the pace that are forward and backward of inputs; the rest is backward
    of weights. ValueError on shapes that disagree or negative entries.
    """

    num_layers: int
    num_devices: int
    options: tuple[StageOption, ...]
    pace_s: Floats  # [options, L, L + 1], as all below
    transfer_s: Floats
    step_s: Floats
    resident: Floats
    saved: Floats
    transient: Floats
    entry_s: Floats | None = None
    forward_share: Floats | float = PHASE_SHARE
    input_share: Floats | float = PHASE_SHARE

    def __post_init__(self) -> None:
        layers = self.num_layers
        if not self.options or layers < 1 or self.num_devices < 1:
            raise ValueError(
                "a pipeline table needs options, layers and devices, but got "
                f"{len(self.options)} options, {layers} layers and {self.num_devices} devices"
            )
        for option in self.options:
            if option.offsets and option.offsets[-1] + option.num_devices > self.num_devices:
                raise ValueError(
                    f"an option's devices are among the {self.num_devices} of the cluster, but got "
                    f"{option.num_devices} devices from device {option.offsets[-1]} on"
                )
        shape = (len(self.options), layers, layers + 1)
        _check_arrays(self, shape, ("pace_s", "transfer_s", "step_s", "resident", "saved", "transient", "entry_s"))

    def with_mixes(self, mixes: Sequence[Mix], actions_s: float) -> PipelineTable:
        """The table with an option behind the others for each mix, which can run its layers only. actions_s: the part
        of each pace that a stage takes once, whatever its layers."""
        if not mixes:
            return self
        arrays: dict[str, Any] = {}
        for name in ("pace_s", "transfer_s", "step_s", "resident", "saved", "transient", "entry_s"):
            if (known := getattr(self, name)) is None:
                continue
            made = np.full((len(mixes), *known.shape[1:]), inf if name == "pace_s" else 0.0)
            for number, (one, other, first, cut, end) in enumerate(mixes):
                ahead, behind = known[one, first, cut], known[other, cut, end]
                match name:
                    case "pace_s":
                        value = ahead + behind - actions_s
                    case "transient":
                        value = max(ahead, behind)
                    case "entry_s":
                        value = ahead
                    case "transfer_s":
                        value = behind
                    case _:
                        value = ahead + behind
                made[number, first, end] = value
            arrays[name] = np.concatenate([known, made])
        options = (*self.options, *(self.options[mix.first] for mix in mixes))
        return replace(self, options=options, **arrays)

    def peak(self, choice: StageChoice, in_flight: int) -> float:
        """Bytes per device of a stage with ``in_flight`` microbatches."""
        at = (choice.option, choice.first_layer, choice.end_layer)
        return float(self.resident[at] + self.transient[at] + in_flight * self.saved[at])

    def share(self, name: str, at: tuple[int, int, int]) -> float:
        """``forward_share`` or ``input_share`` of one entry."""
        value = getattr(self, name)
        if isinstance(value, float):
            return value
        return float(np.broadcast_to(value, self.pace_s.shape)[at])


@dataclass(frozen=True)
class StageConstraints:
    """boundaries: layers before which a stage must begin; forbidden: layers before which none may; stages: the least
    and the largest number of stages (None: as many as there can be)."""

    boundaries: frozenset[int] = frozenset()
    forbidden: frozenset[int] = frozenset()
    stages: tuple[int, int | None] = (1, None)

    def allowed(self, first: Ints, end: Ints) -> NDArray[np.bool_]:
        """A mask of the ranges of layers [first, end) that may be stages."""
        ok = np.ones(first.shape, dtype=bool)
        for cut in self.boundaries:
            ok &= (cut <= first) | (end <= cut)
        for cut in self.forbidden:
            ok &= (first != cut) & (end != cut)
        return ok


class StageChoice(NamedTuple):
    """Layers [first_layer, end_layer) under an option (behind the table's options: a mix), on the devices from
    ``device_offset`` on."""

    first_layer: int
    end_layer: int
    option: int
    device_offset: int


class Mix(NamedTuple):
    """Layers [first_layer, cut) under the option ``first``, [cut, end_layer) under ``then``, as one stage."""

    first: int
    then: int
    first_layer: int
    cut: int
    end_layer: int


@dataclass(frozen=True)
class Pipeline:
    """A way to cut the layers; lists are in stage order (with ``chunks`` > 1: ``stages`` in the order of the layers,
    the other lists by device group).

    path_s and latency_s: the objectives W and T of ``stage_dp``; estimate_s: the larger of what is proven of this
    one pipeline's makespan (``bounds.candidate_makespan``) — what to rank by before it is simulated.
    """

    stages: tuple[StageChoice, ...]
    path_s: float
    latency_s: float
    estimate_s: float
    in_flight: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    idle_devices: int
    chunks: int = 1
    #: seconds ahead and back of the messages between consecutive stages, where they are known by the stages' places
    messages_s: tuple[tuple[float, float], ...] = ()
    chunk_bytes: tuple[float, ...] = ()  # of each of several chunks: its part of its group's peak, and its transient
    chunk_in_flight: tuple[int, ...] = ()  # of each of several chunks: microbatches in flight at its group's peak

    def homes(self, schedule: str) -> list[int]:
        """The device group of each of its stages."""
        groups = len(self.stages) // self.chunks
        return [group for group, _ in virtual_order(schedule, groups, self.chunks if self.chunks > 1 else None)]


@dataclass(frozen=True)
class PipelineSolution:
    """Pipelines by ascending ``estimate_s``: the best by it (zb-h1: by W and T), each with other cuts or meshes."""

    pipelines: tuple[Pipeline, ...]
    #: seconds that no estimate of the table undercuts (zb-h1: no W)
    least_s: float
    #: True if the pipelines are proven to be the best, and are all that there are or as many as were asked for
    complete: bool = True

    @property
    def best(self) -> Pipeline:
        """The pipeline of the least estimate."""
        return self.pipelines[0]


@dataclass(frozen=True)
class InfeasiblePipeline:
    """Nothing fits. ``nearest`` is the pipeline that misses by least: with ``missing_bytes`` more per device it fits.

    ``stage`` is the position in ``nearest`` of the stage that misses most, ``choice`` what it is. If no pipeline exists
    at any memory limit, ``nearest`` is empty, ``choice`` is None and ``missing_bytes`` is inf.
    """

    reason: str
    missing_bytes: float
    nearest: tuple[StageChoice, ...] = ()
    stage: int | None = None
    choice: StageChoice | None = None
    needed_bytes: float = inf
    limit_bytes: float = 0.0

    def __str__(self) -> str:
        return self.reason
