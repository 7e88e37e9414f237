"""TARGETs of the command line: a built-in name, or ``package.module:callable`` that makes a model and its inputs."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import models
from ..compiler.frontend.batch_containers import call_arguments

__all__ = ["PlanningTarget", "build_target"]


@dataclass(frozen=True)
class PlanningTarget:
    """A model with example inputs. global_batch: what it is meant to be trained with, if it says; optimizer: likewise,
    by default."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    global_batch: int | None
    optimizer: str = "AdamW"


def build_target(name: str) -> PlanningTarget:
    """The model and example inputs that a TARGET names; ValueError says what is wrong with it."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        built = models.build(name)
        return PlanningTarget(built.model, built.args, built.kwargs, built.global_batch, built.optimizer)
    sys.path.insert(0, os.getcwd())
    try:
        returned = getattr(importlib.import_module(module_name), attribute)()
    except Exception as error:
        raise ValueError(f"target {name!r} cannot be made: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    return _unpacked(name, returned)


def _unpacked(name: str, made: Any) -> PlanningTarget:
    rule = "a target returns (model, example inputs) or (model, args, kwargs)"
    if not isinstance(made, tuple | list) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        got = f"{type(made).__name__} of {len(made)}" if isinstance(made, tuple | list) else type(made).__name__
        raise ValueError(f"{rule}, but {name!r} returned {got}")
    kwargs = made[2] if len(made) == 3 else {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"{rule}, but the kwargs of {name!r} are {type(kwargs).__name__}; return a dict")
    args, kwargs = call_arguments(made[0], made[1], kwargs)
    return PlanningTarget(made[0], args, kwargs, None)
