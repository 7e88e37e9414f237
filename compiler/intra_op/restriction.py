"""Restrictions on the choices of a stage, as strategies, constraints and pinned plans ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from ..ir.graph import tensor_operands
from ..rules import MeshChoice

__all__ = ["NO_RESTRICTION", "SPLITTABLE_KINDS", "Restriction", "cuts_weights"]


@dataclass(frozen=True)
class Restriction:
    """Restrictions on the choices of a stage: pinned choices, parameter sharding, axis roles, recompute modes."""

    #: Per mesh axis "data" (cuts the batch of every tensor that has one), "tensor" (cuts no batch, but the work of
    #: every heavy op that it can, by its weights where it has any) or None.
    roles: tuple[str | None, ...] = ()
    #: Op, parameter or source node → the only choice label: labels joined by ",", a pair's text, or for a parameter a
    #: pair and a pattern ("R|P zero2").
    pinned: Mapping[str, str] | None = None
    #: Parameter or source node → a label whose pair it may take beside those that its readers want.
    offered: Mapping[str, str] = field(default_factory=dict)
    #: Leave out choices that the runtime cannot run yet.
    executable_only: bool = False
    #: Patterns of ``parameter_sharding.PATTERNS`` that a parameter may take if it is not pinned. A parameter that can
    #: take none of them may be "replicated".
    residencies: tuple[str, ...] = ("replicated",)
    #: Parameter nodes that are whole on every device.
    replicated: frozenset[str] = frozenset()
    #: Parameter nodes too small to be gathered with their layer: no "zero3" where another pattern is allowed.
    small: frozenset[str] = frozenset()
    #: Op node → labels each of which some axis must carry. Where no axis can, the op is impossible.
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Class of a layer → the recompute modes that its layers may take, where these are not all of the search's.
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Replicas along the "data" axes are independent: they exchange gradients and the loss only (``independent_axes``).
    loose: bool = False

    @property
    def independent_axes(self) -> tuple[int, ...]:
        """The axes along which replicas are independent."""
        return tuple(axis for axis, role in enumerate(self.roles) if self.loose and role == "data")

    def patterns(self, parameter: str) -> tuple[str, ...]:
        """The sharding patterns that a parameter node may take."""
        if parameter in self.replicated:
            return ("replicated",)
        others = tuple(one for one in self.residencies if one != "zero3")
        return others if others and parameter in self.small else self.residencies

    def splits(self, op: str, labels: Sequence[str]) -> bool:
        """True if a choice with these labels keeps to ``split``."""
        return set(self.split.get(op, ())) <= set(labels)


NO_RESTRICTION = Restriction()


SPLITTABLE_KINDS = frozenset({"matmul", "attention", "convolution", "routing"})


def cuts_weights(node: Node, choice: MeshChoice, axis: int) -> bool:
    """True if a choice cuts on this axis all parameters of two dimensions or more that an op reads."""
    weights = [
        pair.value[axis]
        for operand, pair in zip(tensor_operands(node), choice.inputs)
        if operand.op == "placeholder"
        and operand.meta["source"].kind == "parameter"
        and len(operand.meta["type"].shape) > 1
    ]
    return all(placement.is_shard for placement in weights)
