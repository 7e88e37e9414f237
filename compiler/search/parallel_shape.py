"""Forced shapes of a plan: pipeline, data and tensor parallel sizes, for all stages or one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

__all__ = ["StageShape", "Strategy", "check_batch", "divide", "divisors_of", "parse_strategy"]


@dataclass(frozen=True)
class StageShape:
    """One stage of a division: its ``share`` of the repeated layers, and its ``dp`` × ``tp`` devices."""

    share: int
    dp: int = 1
    tp: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of the stage."""
        return self.dp * self.tp

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Its logical mesh, without axes of size 1."""
        return tuple(size for size in (self.dp, self.tp) if size > 1)

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each axis of ``mesh_shape``."""
        return tuple(role for role, size in (("data", self.dp), ("tensor", self.tp)) if size > 1)

    def __str__(self) -> str:
        axes = [f"{name}{size}" for name, size in (("dp", self.dp), ("tp", self.tp)) if size > 1]
        return f"{self.share}:{','.join(axes) or 'dp1'}"


@dataclass(frozen=True)
class Strategy:
    """A forced shape: ``pp`` stages of ``dp`` × ``tp`` devices each, or a division into ``stages`` of their own."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    stages: tuple[StageShape, ...] = ()

    def __post_init__(self) -> None:
        if self.stages and (self.pp, self.dp, self.tp) != (1, 1, 1):
            raise ValueError(
                f"a strategy gives pp, dp and tp or the stages one by one, but got pp{self.pp},dp{self.dp},tp{self.tp} "
                f"beside {self}; leave out one of them"
            )

    @property
    def num_stages(self) -> int:
        """Stages of the shape."""
        return len(self.stages) or self.pp

    @property
    def num_devices(self) -> int:
        """Devices that the shape uses."""
        return sum(s.num_devices for s in self.stages) if self.stages else self.pp * self.dp * self.tp

    @property
    def data_parts(self) -> int:
        """The number of equal parts into which every microbatch must be divisible."""
        return lcm(*(s.dp for s in self.stages)) if self.stages else self.dp

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The logical mesh of each stage, without axes of size 1."""
        return StageShape(1, self.dp, self.tp).mesh_shape

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each axis of ``mesh_shape``."""
        return StageShape(1, self.dp, self.tp).roles

    def to_json(self) -> dict[str, int] | str:
        """Plain JSON values; ``parse_strategy`` reads them."""
        return str(self) if self.stages else {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    def __str__(self) -> str:
        return " + ".join(map(str, self.stages)) if self.stages else f"pp{self.pp},dp{self.dp},tp{self.tp}"


def parse_strategy(value: Strategy | Mapping[str, int] | str | None) -> Strategy | None:
    """``{"pp": 2, "tp": 2}`` or ``"pp2,tp2"`` → Strategy; ``"2:dp2 + 2:dp2 + 4:dp2,tp2"`` is a division: three stages
    with 2, 2 and 4 of 8 parts of the layers, each with its own mesh. Raises ValueError on unknown keys or sizes below
    1."""
    if value is None or isinstance(value, Strategy):
        return value
    if isinstance(value, str) and ":" in value:
        return Strategy(stages=tuple(_parse_stage(text, value) for text in value.replace(" ", "").split("+")))
    rule = "a strategy gives a size ≥ 1 for some of pp, dp and tp"
    if isinstance(value, str):
        value = _parse_sizes(value, ("pp", "dp", "tp"), f"{rule}, as in 'pp2,tp2'", value)
    unknown = set(value) - {"pp", "dp", "tp"}
    if unknown or any(not isinstance(size, int) or size < 1 for size in value.values()):
        raise ValueError(f"{rule}, as in {{'pp': 2, 'tp': 2}}, but got {dict(value)}")
    return Strategy(value.get("pp", 1), value.get("dp", 1), value.get("tp", 1))


def _parse_stage(text: str, whole: str) -> StageShape:
    share, _, axes = text.partition(":")
    rule = "a division gives each stage a share ≥ 1 and its dp and tp, as in '2:dp2 + 4:dp2,tp2'"
    if not share.isdecimal():
        raise ValueError(f"{rule}, but got {text!r} in {whole!r}")
    sizes = _parse_sizes(axes, ("dp", "tp"), rule, whole)
    if min(int(share), *sizes.values(), 1) < 1:
        raise ValueError(f"{rule}, but got {text!r} in {whole!r}")
    return StageShape(int(share), **sizes)


def _parse_sizes(text: str, names: tuple[str, ...], rule: str, whole: str) -> dict[str, int]:
    pairs: dict[str, int] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        if word[:2] not in names or not word[2:].lstrip("=").isdigit():
            raise ValueError(f"{rule}, but got {word!r} in {whole!r}")
        pairs[word[:2]] = int(word[2:].lstrip("="))
    return pairs


def divide(classes: Sequence[str], shares: Sequence[int]) -> list[int]:
    """The first layers of stages with these shares, and the end: ``len(shares) + 1`` positions from 0 to
    ``len(classes)``.

    classes: the class of each layer. What stands before the first layer of a repeated class (an embedding) goes to the
    first stage, what stands after the last (a head) to the last; the layers between are divided at the positions
    nearest to the shares where the same class begins as at the first, so that blocks stay whole. ValueError if a stage
    would get no layer.
    """
    count = Counter(classes)
    body = [index for index, key in enumerate(classes) if count[key] > 1] or list(range(len(classes)))
    begin, end = body[0], body[-1] + 1
    blocks = [index for index in range(begin, end) if classes[index] == classes[begin]]
    ends = [*(blocks if len(blocks) >= len(shares) else range(begin, end)), end]
    bounds, taken = [0], 0
    for share in shares[:-1]:
        taken += share
        wanted = begin + (end - begin) * taken / sum(shares)
        bounds.append(min(ends, key=lambda position: abs(position - wanted)))
    bounds.append(len(classes))
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"every stage of a division needs a layer, but got shares {list(shares)} for a model whose "
            f"{len(classes)} layers have {len(blocks)} repeated blocks; use fewer or more even stages"
        )
    return bounds


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
    """The divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
