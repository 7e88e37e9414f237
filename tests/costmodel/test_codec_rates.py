"""Seconds of codecs: rates of a profile replace what is assumed."""

from __future__ import annotations

from dataclasses import replace

import meshwright as mw
import pytest
from meshwright.compiler.cost.gradient_communication import Communication
from meshwright.compiler.cost.pricing import MeshPricer, gradient_route, gradient_routes
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.codecs import CODECS, coding_seconds
from meshwright.costmodel.comparison import changes
from meshwright.costmodel.fitting import fit_coding
from meshwright.costmodel.measured import CodingRate, OptimizerRate


def with_rates(cluster: Cluster, *rates: CodingRate) -> Cluster:
    device = replace(cluster.device(0), codings=rates)
    return replace(cluster, hosts=tuple(replace(host, device=device) for host in cluster.hosts))


# ---- seconds


def test_a_rate_is_what_its_points_say():
    rate = fit_coding("int8", [(n, 2e-4 + 3e-9 * n) for n in (2**14, 2**18, 2**22)], 15)
    assert (rate.alpha_s, rate.beta_s_per_element) == pytest.approx((2e-4, 3e-9))
    assert rate.residual < 1e-6
    with pytest.raises(ValueError, match="needs two measurements"):
        fit_coding("int8", [(1.0, 1.0)], 1)
    with pytest.raises(ValueError, match="code int8 needs a finite beta_s_per_element >= 0"):
        CodingRate("int8", 0.0, -1e-9, 0.0, 1)


@pytest.mark.parametrize(
    ("name", "alphas", "betas"), [("bf16", 1, 1), ("int8", 17 / 8, 3.25 / 4), ("topk1%", 1, 1.015)]
)
def test_a_measured_rate_replaces_what_is_assumed(name, alphas, betas):
    cluster = Cluster.local(4)
    measured = with_rates(cluster, CodingRate(name, 1e-3, 1e-8, 0.0, 5))
    once, each = coding_seconds(CODECS[name], measured.device(0), 4)
    assert (once, each) == pytest.approx((1e-3 * alphas, 1e-8 * betas), rel=1e-3)
    assert coding_seconds(CODECS[name], measured.device(0), 1) == pytest.approx((1e-3, 1e-8))
    assert coding_seconds(CODECS[name], cluster.device(0), 4)[0] == 0
    way = gradient_route(MeshPricer(measured, 0, (4,)), (0,), 4, "backend", name)
    assert way.coding(4e6) == pytest.approx(once + each * 1e6)
    assert way.coding(0) == 0


def test_where_codes_were_measured_those_that_were_not_are_left_out():
    allowed = Communication.asked(["bf16", "int8", "topk1%"])
    for rates, wanted in (
        ((), {"none", "bf16", "int8", "topk1%"}),
        ((CodingRate("int8", 0, 1e-9, 0, 1),), {"none", "int8"}),
    ):
        pricer = MeshPricer(with_rates(Cluster.local(4), *rates), 0, (4,), communication=allowed)
        assert {way.compressor for way in gradient_routes(pricer, (0,), 4)} == wanted


def profiled(codes: list[str]) -> tuple[str, str]:
    """A profile of codes and nothing else, and what it leaves of a base that has one of them."""
    base = with_rates(Cluster.local(1), CodingRate("bf16", 1.0, 1.0, 0.0, 1))
    device = replace(base.device(0), optimizers=(OptimizerRate("AdamW", 1e-6, 1e-10, 0.0, 1),))
    base = replace(base, hosts=tuple(replace(host, device=device) for host in base.hosts))
    return mw.profile(quick=True, base=base, codes=codes).to_json(), base.to_json()


def test_a_profile_measures_the_codes_that_are_asked_for(ranks):
    text, before = ranks.run(1, profiled, ["bf16", "int8", "topk1%"])[0]
    old, new = Cluster.from_json(before), Cluster.from_json(text)
    device = new.device(0)
    assert {rate.name for rate in device.codings} == {"bf16", "int8", "topk1%"}
    assert device.coding_rate("bf16") == old.device(0).coding_rate("bf16")
    assert all(0 < rate.beta_s_per_element < 1e-6 for rate in device.codings[1:])
    assert replace(device, codings=()) == replace(old.device(0), codings=())
    assert len([change for change in changes(new, new) if change.section == "codes"]) == 3
    assert old.merge(new).device(0).codings == device.codings
