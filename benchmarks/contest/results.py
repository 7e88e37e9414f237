"""The document that a benchmark leaves: how, when and where it ran, then what it found."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["write_results"]


def write_results(path: Path, found: Mapping[str, Any]) -> None:
    """Write ``found`` below the header. Called again and again, an interrupted run keeps what it has finished."""
    header = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "torch": torch.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header | dict(found), indent=1))
