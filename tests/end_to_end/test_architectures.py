"""One architecture of each kind from the benchmark of architectures, on two ranks against eager PyTorch.

``benchmarks/zoo.py`` has many more. These use nothing beside torch and transformers, are captured once in this process,
and train in forks of it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.clusters import fast_links

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: architecture → the module that registers it, and the strategy under which it trains here
CHOSEN = {
    "LSTM language model": ("recurrent", "dp2"),
    "LSTM cell with attention (loop)": ("recurrent", "dp2"),
    "Bidirectional LSTM with CTC": ("recurrent", "dp2"),
    "Long convolution (Hyena)": ("recurrent", "tp2"),
    "Windowed attention (unfold)": ("recurrent", "tp2"),
    "nn.MultiheadAttention with a mask": ("recurrent", "pp2"),
    "Graph convolution, one graph": ("scientific", "tp2"),
    "Evoformer pairs": ("scientific", "dp2"),
    "DLRM": ("scientific", "tp2"),
    "Vector-quantized autoencoder": ("scientific", "dp2"),
    "Spectral, weight and instance norm": ("scientific", "dp2"),
    "Spatial transformer": ("scientific", "dp2"),
    "Radiance field": ("scientific", "pp2"),
    "Detr": ("vision", "dp2"),
}


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """The modules of ``benchmarks/architectures``, which is not on the path of other tests."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield lambda name: importlib.import_module(f"architectures.{name}")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", CHOSEN)
def test_equals_eager(name: str, benchmarks: Any, tmp_path: Path) -> None:
    module, strategy = CHOSEN[name]
    benchmarks(module)
    registry: ModuleType = benchmarks("registry")
    measure: ModuleType = benchmarks("measure")
    outcome = measure.forked_measure(registry.registered(name), fast_links(2), [strategy])
    assert outcome.errors == {}
    assert outcome.verdicts == {"eager": "ok", "capture": "ok", strategy: "equal"}
    assert outcome.differences[strategy] <= measure.RTOL
