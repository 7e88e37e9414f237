"""Documents of older plans as ones of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["upgraded"]


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A document of version 1 as one of version 2; what is missing in it stays missing."""
    mode = str(data.get("recompute", "none"))
    mode = "full" if mode == "layer" else mode
    last = len(data.get("layers", ())) - 1 if data.get("schedule") == "1f1b" else None  # never ran again under 1F1B

    def with_modes(chunk: Any) -> Any:
        if not isinstance(chunk, Mapping) or mode == "none" or "layers" not in chunk:
            return {**chunk, "recompute": []} if isinstance(chunk, Mapping) else chunk
        modes = ["none" if layer == last else mode for layer in range(*map(int, chunk["layers"]))]
        return {**chunk, "recompute": modes}

    found: dict[str, Any] = {name: value for name, value in data.items() if name != "recompute"}
    if isinstance(data.get("stages"), list) and all(isinstance(stage, Mapping) for stage in data["stages"]):
        found["stages"] = [
            {**stage, "wire": [], "chunks": [with_modes(chunk) for chunk in stage.get("chunks", ())]}
            for stage in data["stages"]
        ]
    return {**found, "version": 2, "precision": "model"}
