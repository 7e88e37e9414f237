"""The command line: one module per group of commands."""

from .commands import BAD_INPUT, INFEASIBLE, main

__all__ = ["BAD_INPUT", "INFEASIBLE", "main"]
