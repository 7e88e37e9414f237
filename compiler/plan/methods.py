"""Methods of ``Plan`` whose code lies above plans, because it reads them: reports and validation.

A plan is data that every package reads, so it imports none of its readers. The package's root
(``meshwright/__init__.py``), which lies above both and which every import runs first, says here where the code of a
method is. The code is imported at the first call, as the public names of the root are.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["method", "provide"]

_HOMES: dict[str, str] = {}


def provide(**homes: str) -> None:
    """Register the functions behind methods: method name → "package.module:function", the plan its first argument."""
    _HOMES.update(homes)


def method(name: str) -> Callable[..., Any]:
    """The function behind a method of ``Plan``."""
    module, _, function = _HOMES[name].partition(":")
    return getattr(import_module(module), function)
