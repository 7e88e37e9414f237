"""Parts of a stage's document that no other undercuts, and the prices of one tensor between its pairs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from meshwright.compiler.ir.spec import Pair, R
from meshwright.compiler.plan.plan import Chunk, ParameterSharding

if TYPE_CHECKING:
    from tests.oracles.stage_documents import StageDocuments

__all__ = ["StagePart", "TensorPrices"]


@dataclass(frozen=True)
class StagePart:
    """One part of a document that no other undercuts: what it costs, and how to find its choices again."""

    forward_s: float
    backward_s: float
    step_s: float
    weight_s: float  # of the backward, for gradients of weights
    resident: float
    saved: float
    transient: float
    largest: float
    receives: tuple[tuple[str, Pair], ...]
    sends: tuple[tuple[str, Pair], ...]
    shared: tuple[tuple[str, ParameterSharding], ...]
    row: int
    stage: StageDocuments = field(repr=False)

    def bytes(self, in_flight: int) -> float:
        """What ``describe_stage`` estimates."""
        return self.kept(in_flight) + 2 * self.largest

    def kept(self, in_flight: int) -> float:
        """Of these, what adds up where a stage has several chunks."""
        return self.resident + in_flight * self.saved + self.transient

    def busy_s(self, microbatches: int) -> float:
        """Seconds of all its actions and the end of its step."""
        return microbatches * (self.forward_s + self.backward_s) + self.step_s

    def document(self) -> Chunk:
        """The chunk of a plan."""
        stage, chosen = self.stage, self.stage.chosen(self.row)
        parameters, sources = {}, {}
        for name, choices in stage.placed.items():
            if name in chosen:
                source = stage.nodes[name].meta["source"]
                if source.kind == "parameter":
                    parameters[source.name] = choices[chosen[name]]
                else:
                    sources[name] = choices[chosen[name]]
        return Chunk(
            stage.layers,
            {name: choices[chosen[name]].labels for name, choices in stage.choices.items()},
            parameters,
            sources,
            dict(self.receives),
            {name: pair.value for name, pair in self.sends},
            stage.recompute.modes_of(stage.layers),
        )


class TensorPrices:
    """What is known of one tensor (or placeholder) in a stage: its pairs and the prices between them."""

    def __init__(self, stage: StageDocuments, name: str) -> None:
        self.stage, self.name, self.node = stage, name, stage.nodes[name]
        self.grad = name in stage.grad
        self.kind = self.node.meta["type"]
        self.pairs: dict[Pair, int] = {}
        self.uses = 0
        self.copied = False
        self.keeps = True
        self._tables: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def index(self, pair: Pair) -> int:
        pair = pair if self.grad else Pair(pair.value, (R,) * len(pair.value))
        return self.pairs.setdefault(pair, len(self.pairs))

    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds forward, seconds backward, bytes of the copy, each [from, to]."""
        if self._tables is None or len(self._tables[0]) != len(self.pairs):
            self._tables = self._priced()
        return self._tables

    def _priced(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        size, pricer = len(self.pairs), self.stage.pricer
        assert size < 60, f"{self.name} has {size} pairs, more than a mask of bits holds"
        ahead, back, copy = (np.zeros((size, size)) for _ in range(3))
        free_to_slice = self.node.op == "placeholder" and not self.grad
        again = self.stage.recompute.converts_again(self.name)
        for (one, i), (other, j) in itertools.product(self.pairs.items(), self.pairs.items()):
            if self.copied and (one.value != other.value or self.name in self.stage.on_edges.read):
                copy[i, j] = pricer.local_bytes(self.kind, other.value)
            if i == j:
                continue
            if not (free_to_slice and all(v in (R, w) for v, w in zip(one.value, other.value))):
                there, home = pricer.reshard(one, other, self.kind, self.grad)
                ahead[i, j], back[i, j] = there, home + (there if again else 0.0)
        return ahead, back, copy
