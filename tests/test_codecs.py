"""Prices of compressed gradients: what is sent decides on slow links, what is encoded on fast ones."""

import pytest
from meshwright.costmodel.cluster import Cluster
from meshwright.costmodel.codecs import CODECS, PATTERNS, coded_seconds
from meshwright.costmodel.collectives import mesh_prices

SIZE = 64 * 2**20


def priced(cluster: Cluster) -> dict[str, float]:
    (axis,) = mesh_prices(cluster, cluster.mesh())
    device = cluster.device(0)
    return {name: coded_seconds(axis, device, SIZE, 4, codec) for name, codec in CODECS.items()}


def test_encoding_costs_more_than_sending_on_loopback():
    prices = priced(Cluster.local(4))
    assert min(prices, key=prices.__getitem__) in ("none", "bf16")


def test_whoever_sends_little_wins_over_the_world():
    prices = priced(Cluster.parse("p3.16xlarge:4@world"))
    assert prices["1bit"] < prices["int8"] < prices["bf16"] < prices["none"]
    assert prices["none"] > 5 * min(prices.values())


def test_nothing_is_to_be_sent_alone_or_when_there_is_nothing():
    cluster = Cluster.preset("dgx-h100")
    (axis,) = mesh_prices(cluster, cluster.mesh())
    assert all(coded_seconds(axis, cluster.device(0), 0, 4, codec) == 0 for codec in CODECS.values())


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_every_code_names_a_known_pattern_and_only_the_plain_sum_is_exact(codec):
    assert codec.pattern in PATTERNS
    assert codec.lossy == (codec.name != "none")
    assert codec.wire_bytes <= 4
