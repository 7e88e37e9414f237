"""The command line: one module per group of commands."""

from .commands import INFEASIBLE, main
from .inputs import BAD_INPUT

__all__ = ["BAD_INPUT", "INFEASIBLE", "main"]
