"""Prices of compressed gradients: what is sent decides on slow links, what is encoded on fast ones; and which codes a
search may take by itself."""

from importlib import import_module

import pytest
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.codecs import CODECS, PATTERNS
from meshwright.costmodel.collectives import mesh_prices

from tests.support.paths import BENCHMARKS
from tests.support.prices import coded_seconds

SIZE = 64 * 2**20


def priced(cluster: Cluster) -> dict[str, float]:
    (axis,) = mesh_prices(cluster, cluster.mesh())
    device = cluster.device(0)
    return {name: coded_seconds(axis, device, SIZE, 4, codec) for name, codec in CODECS.items()}


def test_encoding_costs_more_than_sending_on_loopback():
    prices = priced(Cluster.local(4))  # as was measured: 0.42, 0.58 and 0.75 of the dense speed
    assert all(prices[name] > prices["none"] for name in ("int8", "1bit", "topk1%"))
    assert prices["powersgd4"] < prices["int8"]


def test_nothing_but_half_precision_pays_inside_a_host():
    prices = priced(Cluster.preset("dgx-h100"))
    assert all(prices[name] > 0.9 * prices["none"] for name in ("1bit", "powersgd4", "topk1%"))


def test_whoever_sends_little_wins_over_the_world():
    prices = priced(Cluster.parse("p3.16xlarge:4@world"))
    assert all(prices[name] < 0.5 * prices["none"] for name in ("1bit", "randomk1%", "topk1%"))
    assert prices["randomk1%"] < prices["powersgd4"] < 0.6 * prices["none"]  # which waits for the other side twice


def test_nothing_is_to_be_sent_alone_or_when_there_is_nothing():
    cluster = Cluster.preset("dgx-h100")
    (axis,) = mesh_prices(cluster, cluster.mesh())
    assert all(coded_seconds(axis, cluster.device(0), 0, 4, codec) == 0 for codec in CODECS.values())


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_every_code_names_a_known_pattern_and_only_the_plain_sum_is_exact(codec):
    assert codec.pattern in PATTERNS
    assert codec.lossy == (codec.name != "none")
    assert codec.wire_bytes <= 4


def test_a_search_takes_by_itself_what_training_takes_without_a_setting(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    settings = import_module("convergence").SETTINGS
    assert all(settings.values())
    needy = {name for of_task in settings.values() for name in of_task}
    dear = {"atomo-svd2", "atomo-svd4"}  # in processor time, whatever the link
    assert {name for name, codec in CODECS.items() if codec.drop_in} == CODECS.keys() - needy - dear
