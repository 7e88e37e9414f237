"""What a caller may force or get back: the shape of a plan, and the answer that nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["InfeasibleError", "Strategy", "check_batch", "divisors_of", "parse_strategy"]


class InfeasibleError(ValueError):
    """No plan fits: the message names the stage, the bytes missing and what would fit."""


@dataclass(frozen=True)
class Strategy:
    """A forced shape: ``pp`` stages of ``dp`` × ``tp`` devices each."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def num_devices(self) -> int:
        """Devices that the shape uses."""
        return self.pp * self.dp * self.tp

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The logical mesh of each stage, without axes of size 1."""
        return tuple(size for size in (self.dp, self.tp) if size > 1)

    @property
    def roles(self) -> tuple[str, ...]:
        """What each axis of ``mesh_shape`` is for."""
        return tuple(role for role, size in (("data", self.dp), ("tensor", self.tp)) if size > 1)


def parse_strategy(value: Strategy | Mapping[str, int] | str | None) -> Strategy | None:
    """``{"pp": 2, "tp": 2}`` or ``"pp2,tp2"`` → Strategy. Raises ValueError on unknown keys or sizes below 1."""
    if value is None or isinstance(value, Strategy):
        return value
    rule = "a strategy gives a size ≥ 1 for some of pp, dp and tp"
    if isinstance(value, str):
        pairs: dict[str, Any] = {}
        for word in filter(None, value.replace(" ", "").split(",")):
            if word[:2] not in ("pp", "dp", "tp") or not word[2:].lstrip("=").isdigit():
                raise ValueError(f"{rule}, as in 'pp2,tp2', but got {word!r} in {value!r}")
            pairs[word[:2]] = int(word[2:].lstrip("="))
        value = pairs
    unknown = set(value) - {"pp", "dp", "tp"}
    if unknown or any(not isinstance(size, int) or size < 1 for size in value.values()):
        raise ValueError(f"{rule}, as in {{'pp': 2, 'tp': 2}}, but got {dict(value)}")
    return Strategy(**value)


def check_batch(global_batch: int, microbatches: int | None) -> None:
    """ValueError unless the batch is positive and divides into the microbatches."""
    if global_batch < 1:
        raise ValueError(f"global_batch is a positive number of samples, but got {global_batch}")
    if microbatches is not None and (microbatches < 1 or global_batch % microbatches):
        fitting = divisors_of(global_batch)
        near = min(fitting, key=lambda m: abs(m - microbatches))
        raise ValueError(
            f"the batch must divide into the microbatches, but got global_batch {global_batch} "
            f"and {microbatches} microbatches; use {near}, for instance"
        )


def divisors_of(number: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
