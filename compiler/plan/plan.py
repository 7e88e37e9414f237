"""The plan: one JSON document with the place of every op, the sharding of every tensor, and the predicted cost.

Grammar::

    plan      ::= header stage+ transfer* prediction provenance seal
    header    ::= version, model fingerprint, cluster (whole description), global_batch, microbatches, schedule,
                  optimizer, precision ("model": the model's own dtypes), codecs of activations between stages and of
                  weights that are stored in blocks (none at all: as they are), outline of the model (none at all: not
                  known)
    stage     ::= devices, mesh_shape, chunk+, wire*  (one chunk per stage, except under schedules with virtual stages)
    chunk     ::= layers [first, end), recompute mode per layer (none at all: "none" for each), ops {node: labels},
                  parameters {name: sharding}, sources {node: pair}, receives {node: pair}, sends {node: spec}
    wire      ::= mesh axes, algorithm, compressor, bytes    (the reduction of the gradients that are partial there)
    labels    ::= label per mesh axis joined by ","   (the named dim of the op that the axis cuts; "whole" if none)
    sharding  ::= compute pair, stored spec, gradient spec, optimizer spec, frequency of gather and reduction
    transfer  ::= node, source stage and chunk, target stage and chunk, seconds of both messages    (value forward,
                  cotangent backward)

Nothing here is code: a plan is read with ``json`` and every field is checked. Loading solves nothing. Documents of
version 1 are read as well: they had one recompute mode for the whole plan, one chunk per stage, and no wires.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from ...costmodel.cluster import Cluster
from ...costmodel.files import parse_json, read_document, write_atomically
from ...costmodel.forms import shown
from ..ir.graph import Graph
from ..ir.spec import Pair, Spec, parse_pair, parse_spec, spec_text
from .document import Seal, document_faults, sealed
from .methods import method

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "PLAN_VERSION",
    "RECOMPUTE_MODES",
    "Chunk",
    "GradientReduction",
    "ParameterSharding",
    "Plan",
    "Prediction",
    "Stage",
    "StagePrediction",
    "Transfer",
    "gradient_buckets",
    "parameter_stages",
    "upgraded",
]  # fmt: skip


PLAN_VERSION = 2
RECOMPUTE_MODES = ("none", "selective", "full")  # per layer, see ``recompute``
BUCKET_BYTES = 25 * 2**20  # gradients are priced and reduced in buckets of this size, as in DistributedDataParallel


@dataclass(frozen=True)
class ParameterSharding:
    """The placement of a parameter, its gradient and its optimizer state. ZeRO-1/2/3 are patterns of these specs, not
    names.

    compute: the placement that the ops read, paired with that of the gradient that the backward leaves behind.
    stored, gradient, optimizer: specs of the parameter between steps, of its gradient after the reduction, of its
    optimizer state.
    gather, reduce: "step" or "microbatch", how often the value is gathered and the gradient reduced.
    """

    compute: Pair
    stored: Spec
    gradient: Spec
    optimizer: Spec
    gather: str = "step"
    reduce: str = "step"

    @property
    def pattern(self) -> str:
        """The name of these specs: one of ``parameter_sharding.PATTERNS``, or "custom" where they follow none of
        them."""
        value, cut = self.compute.value, self.optimizer
        if self.stored == value == cut:
            return "replicated" if (self.gather, self.reduce) == ("step", "step") else "custom"
        if cut == value or self.gradient != cut or self.stored not in (value, cut):
            return "custom"
        if self.stored == cut:
            frozen = self.compute.cotangent == value
            frequencies = ("microbatch", "step" if frozen else "microbatch")
            return "zero3" if (self.gather, self.reduce) == frequencies else "custom"
        if self.gather != "step":
            return "custom"
        return "zero2" if self.reduce == "microbatch" else "zero1"

    @property
    def leaf(self) -> Pair:
        """The pair in which programs take the parameter: where they store less than ops read, they gather it themselves
        and reduce its gradient."""
        triples = zip(self.compute.value, self.stored, self.compute.cotangent, strict=True)
        return Pair(self.stored, tuple(back if one == other else other for one, other, back in triples))

    @property
    def scattered_axes(self) -> tuple[int, ...]:
        """The axes that cut the optimizer's state, but not the value that ops read."""
        pairs = zip(self.compute.value, self.optimizer, strict=True)
        return tuple(axis for axis, (one, other) in enumerate(pairs) if one != other)

    def to_json(self) -> dict[str, str]:
        """Specs as text."""
        return {
            "compute": str(self.compute),
            "stored": spec_text(self.stored),
            "gradient": spec_text(self.gradient),
            "optimizer": spec_text(self.optimizer),
            "gather": self.gather,
            "reduce": self.reduce,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> ParameterSharding:
        """The inverse of ``to_json``."""
        specs = {key: parse_spec(data[key]) for key in ("stored", "gradient", "optimizer")}
        return cls(compute=parse_pair(data["compute"]), gather=data["gather"], reduce=data["reduce"], **specs)


@dataclass(frozen=True)
class Chunk:
    """A contiguous run of layers on one stage.

    ops: each op node with one label per mesh axis, in program order; nodes derived from constants alone may stand in
    several chunks.
    sources: the pair of each input, buffer and constant placeholder (parameters have their own table).
    receives: boundary tensors with the pair in which this chunk gets them; sends: those that leave, with the spec at
    departure. recompute: a mode per layer, empty if all are "none".
    """

    layers: tuple[int, int]
    ops: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, ParameterSharding]
    sources: Mapping[str, Pair]
    receives: Mapping[str, Pair] = field(default_factory=dict)
    sends: Mapping[str, Spec] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "layers": list(self.layers),
            "recompute": list(self.recompute),
            "ops": {name: ",".join(labels) for name, labels in self.ops.items()},
            "parameters": {name: sharding.to_json() for name, sharding in self.parameters.items()},
            "sources": {name: str(pair) for name, pair in self.sources.items()},
            "receives": {name: str(pair) for name, pair in self.receives.items()},
            "sends": {name: spec_text(spec) for name, spec in self.sends.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Chunk:
        """The inverse of ``to_json``."""
        return cls(
            layers=(int(data["layers"][0]), int(data["layers"][1])),
            recompute=tuple(map(str, data["recompute"])),
            ops={name: tuple(text.split(",")) if text else () for name, text in data["ops"].items()},
            parameters={name: ParameterSharding.from_json(value) for name, value in data["parameters"].items()},
            sources={name: parse_pair(text) for name, text in data["sources"].items()},
            receives={name: parse_pair(text) for name, text in data["receives"].items()},
            sends={name: parse_spec(text) for name, text in data["sends"].items()},
        )


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of the gradients that are partial over the same mesh axes."""

    axes: tuple[int, ...]
    #: of the collective; "backend": the library's own
    algorithm: str = "backend"
    #: "none": exact
    compressor: str = "none"
    #: on one device
    bytes: float = 0.0

    @property
    def is_plain(self) -> bool:
        """True if the library's own collective does it, exactly."""
        return (self.algorithm, self.compressor) == ("backend", "none")

    @property
    def is_outer(self) -> bool:
        """True if only messages between hosts are compressed."""
        return self.algorithm == "hierarchical" and self.compressor != "none"


@dataclass(frozen=True)
class Stage:
    """Consecutive devices of the cluster as a logical mesh (row-major, axis 0 major), the chunks that run on them, in
    the order of the model, and how their gradients travel."""

    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    wire: tuple[GradientReduction, ...] = ()

    @cached_property
    def homes(self) -> dict[str, ParameterSharding]:
        """Parameter → its sharding on this stage, which is that of the first chunk that reads it."""
        return {name: home for chunk in reversed(self.chunks) for name, home in chunk.parameters.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "devices": list(self.devices),
            "mesh_shape": list(self.mesh_shape),
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "wire": [asdict(wire) for wire in self.wire],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stage:
        """The inverse of ``to_json``."""
        chunks = tuple(Chunk.from_json(chunk) for chunk in data["chunks"])
        wire = tuple(GradientReduction(**{**one, "axes": tuple(map(int, one["axes"]))}) for one in data["wire"])
        return cls(tuple(map(int, data["devices"])), tuple(map(int, data["mesh_shape"])), chunks, wire)


def parameter_stages(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Parameter → the stages that hold it, in order; the first is its owner."""
    stages_of: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(stages):
        for name in dict.fromkeys(name for chunk in stage.chunks for name in chunk.parameters):
            stages_of[name] = (*stages_of.get(name, ()), index)
    return stages_of


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from a chunk of one stage to a chunk of another, and whose cotangent comes back; seconds of
    each message."""

    node: str
    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    source_chunk: int = 0
    target_chunk: int = 0


@dataclass(frozen=True)
class StagePrediction:
    """The predicted cost of one stage: seconds per microbatch, except ``step_s``; bytes on the fullest device."""

    forward_s: float
    backward_s: float
    #: seconds once per step
    step_s: float
    #: seconds by cause, see ``stage_cost``; older documents have "compute" in place of "forward" and "backward_…"
    seconds: Mapping[str, float]
    #: bytes by cause at the peak: "parameters" (and model buffers), "gradients", "optimizer", "activations",
    #: "temporary", "buffers" (messages), "inputs" (the whole batch), "framework"
    memory_bytes: Mapping[str, float]
    #: "forward all_reduce" → count per microbatch; "step all_reduce" → count per step
    collectives: Mapping[str, int]
    #: seconds of each chunk: forward, backward, the weight-gradient part of the backward; empty for a single chunk
    chunk_s: tuple[tuple[float, float, float], ...] = ()

    @property
    def peak_bytes(self) -> float:
        """Sum over the causes."""
        return sum(self.memory_bytes.values())

    def busy_s(self, microbatches: int) -> float:
        """Seconds of a step of so many microbatches in which the stage is not idle."""
        return microbatches * (self.forward_s + self.backward_s) + self.step_s


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a step, and the proven lower bound of the cost model."""

    step_s: float
    bound_s: float
    stages: tuple[StagePrediction, ...]
    #: of one step, forward and backward, without recomputation
    flops: float
    #: FLOPs per step that several devices repeat, counted once per extra device
    replicated_flops: float
    #: plans of data, tensor and pipeline parallelism alone: name, step_s, why
    alternatives: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    #: seconds per step of the busiest stage by the source of their prices: "measured" (this very op or message),
    #: "interpolated", "extrapolated", "scaled", "roofline", "analytic", "free"; empty in older documents
    sources: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound_gap(self) -> float:
        """(step − bound) / step, a fraction."""
        return max(0.0, (self.step_s - self.bound_s) / self.step_s) if self.step_s else 0.0


@dataclass(frozen=True)
class Plan:
    """An executable plan; see the module's grammar."""

    #: the fingerprint of the graph
    model: str
    #: op → count in the graph, so that a refusal can show the difference
    model_ops: Mapping[str, int]
    #: ``Cluster.to_json``
    cluster: Mapping[str, Any]
    global_batch: int
    microbatches: int
    schedule: str
    optimizer: str
    #: a readable name per layer
    layers: tuple[str, ...]
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    prediction: Prediction
    provenance: Mapping[str, Any] = field(default_factory=dict)
    version: int = PLAN_VERSION
    #: of the computation; "model": the model's own dtypes
    precision: str = "model"
    #: codecs of "activations" and "weights", see ``tensor_codecs``
    codes: Mapping[str, str] = field(default_factory=dict)
    #: the modules, shapes and messages of the model under these decisions (``report.outline``); a saved plan has it
    outline: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    #: made when the plan was priced, see ``document``; None: it is new, and its prices are its own
    seal: Seal | None = field(default=None, compare=False, repr=False)
    #: the captured model, only in the process that made the plan
    graph: Graph | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "graph": None}  # a graph stays in the process that captured it

    @property
    def num_devices(self) -> int:
        """Devices that the plan's cluster has, the idle ones included."""
        return int(sum(host.get("count", 1) * host["num_devices"] for host in self.cluster["hosts"]))

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch over all devices."""
        return self.global_batch // self.microbatches

    @property
    def num_chunks(self) -> int:
        """Chunks per stage: 1 but for chunked schedules."""
        return max(len(stage.chunks) for stage in self.stages)

    @property
    def chunks_asked(self) -> int | None:
        """``num_chunks`` as ``families.generate`` takes it: None where the schedule's own number stands."""
        return self.num_chunks if self.num_chunks > 1 else None

    def noted(self, *notes: str) -> Plan:
        """The plan with these notes, each of them once."""
        new = tuple(note for note in notes if note not in self.prediction.notes)
        if not new:
            return self
        return replace(self, prediction=replace(self.prediction, notes=(*self.prediction.notes, *new)))

    @cached_property
    def price_state(self) -> str:
        """The standing of the prices: "current", they are of these decisions; "edited" (they are of another plan, or
        somebody wrote them); "unknown" for a document without a seal."""
        if self.seal is None:
            return "current"
        now = sealed(self._to_json(), self.seal.known)
        return "edited" if now != self.seal else "current" if now.known else "unknown"

    @property
    def price_note(self) -> str:
        """One sentence on the prices, "" where they are current."""
        return {
            "current": "",
            "edited": "edited: prices are of another plan",
            "unknown": "whether the prices are of these decisions is unknown: the document is older than its seal",
        }[self.price_state]

    def sealed(self) -> Plan:
        """The plan with the seal of its decisions and prices as they are now: for who has just priced it."""
        return replace(self, seal=sealed(self._to_json()))

    def code(self, what: str) -> str:
        """The codec of "activations" or "weights"; "none" if they travel as they are."""
        return self.codes.get(what, "none")

    def host_of(self, device: int) -> int:
        """Position of the host that this device is in."""
        alike = ((int(host.get("count", 1)), int(host["num_devices"])) for host in self.cluster["hosts"])
        return bisect_right(_host_ends(tuple(alike)), device)

    def stage_of(self, device: int) -> int | None:
        """The stage that runs on this device (or rank); None if it is idle."""
        return next((index for index, stage in enumerate(self.stages) if device in stage.devices), None)

    @property
    def recompute(self) -> str:
        """The mode in which layers are recomputed: "none" if none is, "mixed" if they are in several."""
        modes = {mode for stage in self.stages for chunk in stage.chunks for mode in chunk.recompute} - {"none"}
        return "none" if not modes else modes.pop() if len(modes) == 1 else "mixed"

    def explain(self, graph: Graph | None = None, width: int = 100) -> str:
        """The plan as text for a terminal of ``width`` columns; with the captured graph it names the ops of each
        module."""
        text: str = method("explain")(self, graph, width)
        return text

    def __str__(self) -> str:
        """The text of ``explain``, which ``print(plan)`` shows."""
        return self.explain()

    def why(self, name: str, graph: Graph | None = None, cluster: Cluster | None = None) -> Any:
        """Return the choice for a layer, module, op or weight with the cost per step of every alternative: a
        ``compiler.report.why.Why``.

        graph: the captured model, which a plan knows only in the process that made it; cluster: by default the plan's.
        Raises ValueError for a name that the model does not have.
        """
        graph = graph or self.graph
        if graph is None:
            raise ValueError(
                "a plan that was loaded knows decisions, but got no graph= to ask the model about others; "
                "pass what compiler.frontend.capture.capture(model, inputs) gives"
            )
        return method("why")(self, name, graph, cluster)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        graph: Graph | None = None,
        trace: Any = None,
        others: Sequence[Plan] = (),
    ) -> str:
        """The picture of the plan as one HTML page that needs no network (docs/picture.md); ``path`` is where it is
        written as well.

        graph: the captured model, by default the plan's own; with it a layer says what other choices would cost.
        trace: a measured step (``Parallel.trace``), drawn below the predicted one. others: plans to compare with, such
        as the rest of a Pareto front.
        """
        text: str = method("to_html")(self, path, graph, trace, others)
        return text

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None, *, trace: Any = None) -> dict[str, Any]:
        """The predicted step, and a measured one on the same clock, as a document for Perfetto and chrome://tracing;
        ``path`` is where it is written as well. trace: as in ``to_html``."""
        document: dict[str, Any] = method("to_chrome_trace")(self, path, trace)
        return document

    def _repr_html_(self) -> str:
        text: str = method("notebook_html")(self)
        return text

    def simulate(
        self,
        graph: Graph | None = None,
        cluster: Cluster | None = None,
        changes: Mapping[str, Any] | Sequence[str] | None = None,
    ) -> Plan:
        """The same decisions with other numbers, or on another cluster, at the price of now; the code and the words of
        changes are in ``compiler.report.what_if``."""
        priced: Plan = method("simulate")(self, graph, cluster, changes)
        return priced

    # ---- the document

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, in the order of the grammar, sealed."""
        document = self._to_json()
        return {**document, "seal": asdict(self.seal or sealed(document))}

    def _to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model": self.model,
            "model_ops": dict(self.model_ops),
            "cluster": dict(self.cluster),
            "global_batch": self.global_batch,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "optimizer": self.optimizer,
            "precision": self.precision,
            "codes": dict(self.codes),
            "layers": list(self.layers),
            "stages": [stage.to_json() for stage in self.stages],
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "prediction": asdict(self.prediction),
            "provenance": dict(self.provenance),
            **({"outline": dict(self.outline)} if self.outline else {}),
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """The inverse of ``to_json``; ValueError that names what is wrong with the document."""
        if not isinstance(data, dict) or "version" not in data:
            raise ValueError("a plan is a JSON object with a 'version', but got " + _brief(data))
        if data["version"] not in (1, PLAN_VERSION):
            raise ValueError(
                f"meshwright reads plans of versions 1 to {PLAN_VERSION}, but got version {data['version']!r}; plan "
                "again"
            )
        if data["version"] == 1:
            data = upgraded(data)
        data = {"codes": {}, "outline": {}, **data}  # younger than version 2
        missing = [f.name for f in fields(cls) if f.name not in data and f.name not in ("graph", "seal")]
        if missing:
            raise ValueError(f"the plan {shown(document_faults(data))}; it is truncated or was edited badly")
        if faults := shown(document_faults(data)):
            raise ValueError(f"the plan does not follow the format: {faults}; correct it")
        try:
            Cluster.from_json(json.dumps(data["cluster"]))
        except ValueError as error:
            raise ValueError(f"the plan does not follow the format: {error}") from error
        try:
            prediction = dict(data["prediction"])
            prediction["stages"] = tuple(
                StagePrediction(**{**stage, "chunk_s": tuple(map(tuple, stage.get("chunk_s", ())))})
                for stage in prediction["stages"]
            )
            prediction["alternatives"] = tuple(prediction.get("alternatives", ()))
            prediction["notes"] = tuple(prediction.get("notes", ()))
            plan = cls(
                model=str(data["model"]),
                model_ops=dict(data["model_ops"]),
                cluster=dict(data["cluster"]),
                global_batch=int(data["global_batch"]),
                microbatches=int(data["microbatches"]),
                schedule=str(data["schedule"]),
                optimizer=str(data["optimizer"]),
                layers=tuple(data["layers"]),
                stages=tuple(Stage.from_json(stage) for stage in data["stages"]),
                transfers=tuple(Transfer(**transfer) for transfer in data["transfers"]),
                prediction=Prediction(**prediction),
                provenance=dict(data["provenance"]),
                precision=str(data["precision"]),
                codes={str(what): str(code) for what, code in dict(data["codes"]).items()},
                outline=dict(data["outline"]),
                seal=Seal(**data["seal"]) if "seal" in data else None,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"the plan does not follow the format: {type(error).__name__}: {error}") from error
        return plan if plan.seal else replace(plan, seal=sealed(plan._to_json(), known=False))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document, with the outline of the model where the plan knows the model; the file appears whole or
        not at all."""
        document = self.to_json()
        outline = document.pop("outline", None)
        if self.graph is not None and not outline:
            with suppress(Exception):  # a plan is kept, whatever its picture may lack
                outline = method("outline")(self, self.graph)
        text = json.dumps(document, indent=1)
        if outline:  # nobody edits it, so it is one line
            text = f'{text.removesuffix(chr(10) + "}")},\n "outline": {json.dumps(outline, separators=(",", ":"))}\n}}'
        write_atomically(path, text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a document that ``save`` wrote or a person edited. Raises ValueError that names the file and the
        fault."""
        return read_document(path, lambda text: cls.from_json(parse_json(text, "plan")))

    # ---- validation

    def not_executable(self, graph: Graph | None = None) -> list[str]:
        """The decisions of this plan that the runtime cannot execute yet, a line each; with the captured graph also the
        ops. The code is ``validation.runtime_faults``."""
        lines: list[str] = method("not_executable")(self, graph)
        return lines

    def require_executable(self, graph: Graph | None = None) -> None:
        """Raise ValueError if the runtime cannot execute this plan, or if the plan does not hold by itself or, with the
        captured graph, for the model. The code is ``validation.require_valid``."""
        method("require_valid")(self, graph, runnable=True)

    def check(self) -> list[str]:
        """The contradictions inside of the document, which a person may have edited; empty if there are none. The code
        is ``validation.validate``, which also compares a plan with its model and its cluster."""
        faults: list[str] = method("check")(self)
        return faults


def _brief(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 80 else text[:77] + "..."


# ---- Documents of older plans as ones of today


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a document of version 1 to version 2; a field that is missing in it stays missing."""
    mode = str(data.get("recompute", "none"))
    mode = "full" if mode == "layer" else mode
    last = len(data.get("layers", ())) - 1 if data.get("schedule") == "1f1b" else None  # never ran again under 1F1B

    def with_modes(chunk: Any) -> Any:
        if not isinstance(chunk, Mapping) or mode == "none" or "layers" not in chunk:
            return {**chunk, "recompute": []} if isinstance(chunk, Mapping) else chunk
        modes = ["none" if layer == last else mode for layer in range(*map(int, chunk["layers"]))]
        return {**chunk, "recompute": modes}

    document: dict[str, Any] = {name: value for name, value in data.items() if name != "recompute"}
    if isinstance(data.get("stages"), list) and all(isinstance(stage, Mapping) for stage in data["stages"]):
        document["stages"] = [
            {**stage, "wire": [], "chunks": [with_modes(chunk) for chunk in stage.get("chunks", ())]}
            for stage in data["stages"]
        ]
    return {**document, "version": 2, "precision": "model"}


@lru_cache
def _host_ends(alike: tuple[tuple[int, int], ...]) -> list[int]:
    """The devices behind the last of every host, of so many hosts with so many devices each."""
    return list(accumulate(size for count, size in alike for _ in range(count)))


# ---- Gradient buckets: the flat pieces in which partial gradients are summed


FIRST_BUCKET_BYTES = 2**20  # small, so that the first message starts early


def gradient_buckets(parameters: Sequence[tuple[Hashable | None, float]], bucket_bytes: int) -> list[list[int]]:
    """Group the positions of parameters into buckets of about ``bucket_bytes``, the last used first.

    parameters: (key, bytes) in program order; only equal keys (axes and dtype) share a bucket, None has none.
    """
    full: list[list[int]] = []
    openings: dict[Hashable, tuple[list[int], float, int]] = {}
    for position, (key, size) in reversed(list(enumerate(parameters))):
        if key is None:
            continue
        bucket, filled, limit = openings.get(key) or ([], 0.0, min(FIRST_BUCKET_BYTES, bucket_bytes))
        if bucket and filled + size > limit:
            full.append(bucket)
            bucket, filled, limit = [], 0.0, bucket_bytes
        bucket.append(position)
        openings[key] = (bucket, filled + size, limit)
    return full + [bucket for bucket, _, _ in openings.values()]
