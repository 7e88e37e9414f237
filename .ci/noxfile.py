"""The tests on each Python and torch that the package declares: ``nox -f .ci/noxfile.py``, or one of them, as in
``nox -f .ci/noxfile.py -s "tests-3.12(torch='2.13.0')" -- tests/runtime``.

$TORCH_INDEX is where torch comes from: the builds without CUDA, or "" for pip's own index."""

import os
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0")
INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """All tests, or those named after ``--``."""
    session.chdir(ROOT)
    pins = [line for line in Path("constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join([*pins, f"torch=={torch}"]))
    session.install("-c", str(constraints), "setuptools", "wheel")
    session.install(f"torch=={torch}", *(["--index-url", INDEX] if INDEX else []))
    session.install("--no-build-isolation", "-c", str(constraints), "-e", ".[dev]")
    session.run(
        "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )
