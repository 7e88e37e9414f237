"""Activation recomputation: the ops that run again for the backward, and the tensors that are saved instead.

Every layer has a mode:

    "none"       every tensor that some op's backward reads is kept from the forward to the backward
    "full"       per microbatch in flight only the tensors that cross a border between layers are kept; the backward of
                 the layer first runs its forward again, and then holds what its ops save, one layer at a time
    "selective"  kept are the tensors at borders and the outputs of heavy ops (matrix products, attention, convolutions,
                 routing, embeddings) with what these ops keep beside them; the rest runs again, as under "full"
                 (Korthikanti et al. 2022, section 5, turned around: what is dear stays)

Conversions of a tensor that crosses a border are not repeated: their results are kept beside it. All others are, where
the layer of their tensor is. Floating ops (``layers``) belong to no layer and are not repeated either. Under 1F1B the
layer with the loss is never repeated: its backward follows its forward at once, so what it saves, although not kept,
never lives longer than a repeated layer's would; its mode is "none", whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from torch.fx import Node

from ..frontend.layers import Layering, cluster_layers
from ..ir.graph import Graph, op_name, output_of
from ..rules import rule_for
from .plan import RECOMPUTE_MODES, Plan, Stage

__all__ = ["HEAVY_KINDS", "NOTHING", "PlanLayers", "Recompute", "layer_modes", "modes_in", "recompute_of"]

HEAVY_KINDS = frozenset({"matmul", "attention", "convolution", "routing", "embedding"})
ALIASES = {"layer": "full"}


@dataclass(frozen=True, eq=False)
class Recompute:
    """The ops that are recomputed and the tensors that are saved for it; false if nothing is recomputed."""

    #: ops that the backward runs once more
    repeated: frozenset[str] = frozenset()
    #: tensors that cross a border between layers, which are saved
    kept: frozenset[str] = frozenset()
    #: node → its layer; empty where nothing is recomputed
    layer_of: Mapping[str, int] = field(default_factory=dict)
    #: the mode in which each layer runs
    modes: tuple[str, ...] = ()
    #: ops of layers that save all that autograd does
    plain: frozenset[str] = frozenset()
    #: ops of "selective" layers whose outputs are saved
    heavy: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.layer_of)

    def converts_again(self, tensor: str) -> bool:
        """True if the backward repeats conversions of ``tensor``."""
        return (tensor in self.repeated or tensor in self.heavy) and tensor not in self.kept

    def modes_of(self, layers: tuple[int, int]) -> tuple[str, ...]:
        """The modes of layers [first, end), as a chunk of a plan has them: empty if all are "none"."""
        modes = self.modes[slice(*layers)]
        return modes if any(mode != "none" for mode in modes) else ()


NOTHING = Recompute()


def recompute_of(graph: Graph, layering: Layering, modes: Mapping[int, str] | str, schedule: str) -> Recompute:
    """The ``Recompute`` of these modes: one for all layers, or by layer ("none" for those left out). ValueError for an
    unknown mode."""
    layers = range(len(layering.layers))
    mode_of = {k: _known(modes if isinstance(modes, str) else modes.get(k, "none")) for k in layers}
    if all(mode == "none" for mode in mode_of.values()):
        return NOTHING
    last = {result.node for result in graph.results if result.kind == "loss"} if schedule == "1f1b" else set()
    at_once = {index for index, layer in enumerate(layering.layers) if last & set(layer.ops)}
    nodes = graph.by_name()
    members: dict[str, set[str]] = {"plain": set(), "repeated": set(), "heavy": set()}
    for index, layer in enumerate(layering.layers):
        if index in at_once:
            continue
        for name in layer.ops:
            if mode_of[index] == "none":
                members["plain"].add(name)
            else:
                dear = mode_of[index] == "selective" and _is_heavy(nodes[name])
                members["heavy" if dear else "repeated"].add(name)
    return Recompute(
        kept=frozenset(name for names in layering.crossing for name in names),
        layer_of={name: index for index, layer in enumerate(layering.layers) for name in layer.ops},
        modes=tuple("none" if index in at_once else mode_of[index] for index in layers),
        **{name: frozenset(found) for name, found in members.items()},
    )


def _is_heavy(node: Node) -> bool:
    maker = output_of(node)[0] if op_name(node) == "getitem" else node
    return rule_for(maker).cost_kind in HEAVY_KINDS


def _known(mode: str) -> str:
    mode = ALIASES.get(mode, mode)
    if mode not in RECOMPUTE_MODES:
        offered = ", ".join(map(repr, RECOMPUTE_MODES))
        raise ValueError(f"recompute is one of {offered}, but got {mode!r}; use one of them")
    return mode


def layer_modes(names: Sequence[str], asked: Mapping[str, str] | str) -> dict[int, str]:
    """The mode of each layer, by its name: ``asked`` is a mode for all, or patterns of layer names ("blocks.*") with
    modes, of which the last that fits counts; "none" where none does.

    Raises ValueError for an unknown mode and for a pattern that fits no layer.
    """
    if isinstance(asked, str):
        return dict.fromkeys(range(len(names)), _known(asked))
    mode_of = dict.fromkeys(range(len(names)), "none")
    for pattern, mode in asked.items():
        fits = [k for k, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not fits:
            shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
            raise ValueError(
                f"recompute= names layers by patterns that fit some, but got {pattern!r}; the layers are {shown}"
            )
        mode_of |= dict.fromkeys(fits, _known(mode))
    return mode_of


class PlanLayers:
    """The layers that a plan counts, and what it recomputes of them: found when first asked for. graph: at the plan's
    microbatch extent."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan

    @cached_property
    def layering(self) -> Layering:
        """The layers."""
        return cluster_layers(self.graph)

    @cached_property
    def recompute(self) -> Recompute:
        """The recomputation of all layers."""
        modes = modes_in(self.plan.stages)
        return recompute_of(self.graph, self.layering, modes, self.plan.schedule) if modes else NOTHING


def modes_in(stages: Sequence[Stage]) -> dict[int, str]:
    """The mode of each layer that some chunk of a plan recomputes."""
    return {
        layer: mode
        for stage in stages
        for chunk in stage.chunks
        for layer, mode in zip(range(*chunk.layers), chunk.recompute)
    }
