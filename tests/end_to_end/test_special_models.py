"""Models of unusual kinds train on two ranks as on one device: slices assigned, complex numbers, loops over time,
routers and experts of several makes."""

from __future__ import annotations

import pytest

from tests.support.parity import compared
from tests.support.special_models import SPECIAL

SHAPES = {"dp2": ({"dp": 2}, 2), "tp2": ({"tp": 2}, 2), "pp2": ({"pp": 2}, 2)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SPECIAL)
def test_equals_one_device(ranks, name, shape):
    strategy, m = SHAPES[shape]
    compared(ranks, 2, name, strategy, m, ("sgd",))
