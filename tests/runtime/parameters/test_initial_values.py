"""First values of a model on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx

from tests.support.toy_model import CASES, Part, Toy, session_of


def initial(parts: list[Part], kind: str) -> dict[str, torch.Tensor]:
    def fill(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.is_floating_point():
            tensor.normal_()
            return None
        return torch.zeros_like(tensor)

    init: Any = fill if kind == "function" else Toy().state_dict() | {"shift": torch.tensor(0.5)}
    return session_of(parts, weights=Toy().to("meta"), init=init, seed=3).full_state_dict()


@pytest.mark.ranks
def test_meta_models_take_init(ranks: Any) -> None:
    found = []
    for case in ("one", "mixed"):
        world, parts, _, _ = CASES[case]
        found.append(ranks.run(world, initial, parts, "function")[0])
    assert found[0].keys() == Toy().state_dict().keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0]["w0"].std() > 0.5
    by_name = ranks.run(world, initial, parts, "mapping")[0]
    assert all(torch.equal(value, by_name[name]) for name, value in Toy().state_dict().items())
