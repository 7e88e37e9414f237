"""The values of the inter-operator pass: the table it searches, the pipeline it finds, or why there is none.

An *option* is a submesh, its logical shape and a memory variant. Tables are made by whoever knows the graph
(``search``) and solved by ``inter_op``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Infeasible", "Pipeline", "StageChoice", "StageTable"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class StageTable:
    """What a stage of layers [i, j) costs under each option. Entries with j ≤ i are never read.

    ``seconds`` are per microbatch, forward and backward, with the stage's share of per-step work and of cross-stage
    transfers; inf where the option cannot run these layers. Bytes are per device. ``limit_bytes`` is per device of the
    cluster, ``admissible[o, d]`` says whether option o may start at device d. ValueError on shapes that disagree.
    """

    num_layers: int
    num_devices: int
    devices: _Ints  # [options]
    seconds: _Floats  # [options, L, L + 1]
    resident_bytes: _Floats  # [options, L, L + 1], parameters, gradients, optimizer
    saved_bytes: _Floats  # [options, L, L + 1], per microbatch in flight
    transient_bytes: _Floats  # [options, L, L + 1], the peak beside these
    admissible: NDArray[np.bool_]  # [options, num_devices]
    limit_bytes: _Floats  # [num_devices]

    def __post_init__(self) -> None:
        options, layers, devices = len(self.devices), self.num_layers, self.num_devices
        if options < 1 or layers < 1 or devices < 1:
            raise ValueError(
                "a stage table needs options, layers and devices, but got "
                f"{options} options, {layers} layers and {devices} devices"
            )
        layer_ranges = ("seconds", "resident_bytes", "saved_bytes", "transient_bytes")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(layer_ranges, (options, layers, layers + 1))
        shapes |= {"admissible": (options, devices), "limit_bytes": (devices,)}
        for name, shape in shapes.items():
            if (got := getattr(self, name).shape) != shape:
                raise ValueError(f"StageTable.{name} has shape {shape}, but got {got}")
        first, end = np.triu_indices(layers, 1, layers + 1)
        for name in layer_ranges:
            used = getattr(self, name)[:, first, end]
            if not (used >= 0).all():
                raise ValueError(f"StageTable.{name} is not negative, but got {used[~(used >= 0)][0]}")
        if (np.asarray(self.devices) < 1).any():
            raise ValueError(f"an option uses at least one device, but got {self.devices}")

    def peak(self, option: int, first_layer: int, end_layer: int, in_flight: int) -> float:
        """Bytes per device of a stage with ``in_flight`` microbatches."""
        at = (option, first_layer, end_layer)
        return float(self.resident_bytes[at] + in_flight * self.saved_bytes[at] + self.transient_bytes[at])

    def limit(self, option: int, device_offset: int) -> float:
        """The smallest memory limit among the devices of ``option`` placed at ``device_offset``."""
        return float(self.limit_bytes[device_offset : device_offset + self.devices[option]].min())


class StageChoice(NamedTuple):
    """Layers [first_layer, end_layer) under an option, on the devices from ``device_offset`` on."""

    first_layer: int
    end_layer: int
    option: int
    device_offset: int


@dataclass(frozen=True)
class Pipeline:
    """A solution. No pipeline of the table takes less than ``bound_s``; lists are in stage order."""

    stages: tuple[StageChoice, ...]
    objective_s: float
    bound_s: float
    seconds: tuple[float, ...]
    in_flight: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    idle_devices: int
    sweeps: int = 0  # how many times the recurrence ran

    @property
    def gap(self) -> float:
        """How far above the bound the objective may be, as a fraction of the objective."""
        return 1.0 - self.bound_s / self.objective_s if self.objective_s else 0.0


@dataclass(frozen=True)
class Infeasible:
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
