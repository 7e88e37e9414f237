"""What tests share lies in ``tests/support`` and ``tests/oracles``: no test module imports another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_a_test_module() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found = [name for name in imported(path) if any(part.startswith("test_") for part in name.split("."))]
        assert not found, f"{path.relative_to(ROOT)} imports {found}"
