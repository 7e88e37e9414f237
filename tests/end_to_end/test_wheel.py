"""The wheel: built from a copy of the sources, installed outside the checkout, every module imported from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

OUTSIDE = (".venv", "benchmarks", "build", "dist", "docs", "out", "tests")
PACKAGES = tuple(
    name.removeprefix("meshwright").removeprefix(".").replace(".", "/")
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
)


def source_modules() -> set[str]:
    """Paths, as in a wheel, of every module of the checkout that belongs to the package."""
    found = [path for package in PACKAGES for path in (ROOT / package).glob("*.py")]
    return {f"meshwright/{path.relative_to(ROOT).as_posix()}" for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout, made without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "anything", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "-w", str(folder), str(folder / "anything")], capture_output=True, text=True, cwd=folder
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    page = {f"meshwright/compiler/report/page/{path.name}" for path in (ROOT / "compiler/report/page").glob("*.*")}
    assert len(page) == 13
    assert package == {*source_modules(), *page, "meshwright/py.typed"}
    (metadata,) = (name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
    assert f"{metadata}/licenses/LICENSE" in names


def test_every_package_folder_is_listed() -> None:
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in OUTSIDE]
    files = [ROOT / "__init__.py", *(path for room in rooms for path in room.rglob("__init__.py"))]
    assert {path.parent.relative_to(ROOT).as_posix() for path in files} == {package or "." for package in PACKAGES}


def test_every_module_imports_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    assert (target / "bin" / "meshwright").is_file()
    names = sorted(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in source_modules())
    names.remove("meshwright.__main__") if "meshwright.__main__" in names else None
    script = f"""
import importlib, pathlib
for name in {names!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to({str(target)!r}), (name, module.__file__)
print("imported", {len(names)})
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["imported", str(len(names))]
