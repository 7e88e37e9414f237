"""Bytes of parameters, gradients and optimizer states."""

import pytest
import torch
from meshwright.costmodel.memory import OPTIMIZER_STATE, parameter_bytes

from tests.support.prices import measured_state


# ---- memory
def test_mixed_precision_adam_is_16_bytes():
    cost = parameter_bytes(1000, torch.float16, "Adam", mixed_precision=True)
    assert (cost.parameter, cost.gradient, cost.optimizer_state) == (2000, 2000, 12000)
    assert cost.total == 16000
    assert not cost.assumed
    assert parameter_bytes(1000, torch.float32, "AdamW").total == 16000
    assert (
        parameter_bytes(1000, torch.float32, "AdamW", mixed_precision=True).total == 16000
    )  # already fp32: no second master
    assert parameter_bytes(1000, torch.float32, "SGD").total == 8000
    assert parameter_bytes(1000, torch.float32, "SGD+momentum").total == 12000
    assert parameter_bytes(1000, torch.bfloat16, "AdamW").total == 8000  # pure bf16 training
    assert parameter_bytes(1000, torch.bfloat16, "AdamW+masters").total == 16000
    assert parameter_bytes(1000, torch.float32, "AdamW+masters").total == 16000
    assert parameter_bytes(1000, torch.float32, 0.5).optimizer_state == 2000


def test_unknown_optimizer_is_assumed_aloud():
    cost = parameter_bytes(10, torch.float32, "Lion")
    assert cost.optimizer_state == 80
    assert "Lion" in cost.assumed
    with pytest.raises(ValueError, match="never negative"):
        parameter_bytes(-1, torch.float32)


@pytest.mark.parametrize("name", [n for n in OPTIMIZER_STATE if n not in ("none", "SGD+momentum", "SparseAdam")])
def test_optimizer_state_against_the_optimizer(name):
    assert measured_state(lambda ps: getattr(torch.optim, name)(ps)) == OPTIMIZER_STATE[name]


def test_measured_state():
    assert measured_state(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)) == OPTIMIZER_STATE["SGD+momentum"]
    assert measured_state(lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True)) == 3
    assert measured_state(lambda ps: torch.optim.Adam(ps, amsgrad=True)) == 3
    with pytest.raises(ValueError, match="plain matrix"):
        measured_state(lambda ps: torch.optim.LBFGS(ps))
