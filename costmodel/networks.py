"""Networks that can join hosts, from one rack to across the world: ``"p3.16xlarge:4@world"``.

A network lies behind the hosts' own adapters: its latency counts where it is longer, its rates where they are lower
(``hardware.link_behind``). ``rate`` is what one host gets of it, ``pair`` what one pair of devices does.
"""

from __future__ import annotations

from .presets import Constant, LinkSheet

__all__ = ["NETWORKS"]

_EC2 = "Amazon EC2 user guide, instance network bandwidth"
_NUMBERS = "Jeff Dean, numbers everyone should know"
_FLOW = Constant(0.625e9, "B/s", _EC2 + ": 5 Gbit/s for one flow outside a placement group")
_MESSAGE = Constant(10e-6, "s", "assumed: what an end spends on a further message; the way there is alpha's")
_CALL = Constant(0.0, "s", "part of alpha")


def _network(name: str, alpha: Constant, rate: Constant, pair: Constant) -> LinkSheet:
    return LinkSheet(name, alpha, rate, pair, _MESSAGE, _CALL)


NETWORKS: dict[str, LinkSheet] = {
    "rack": _network(
        "rack network",
        Constant(10e-6, "s", "assumed: kernel TCP through one switch"),
        Constant(12.5e9, "B/s", "assumed: 100 Gbit/s per host"),
        Constant(12.5e9, "B/s", "assumed: one flow may have all of it"),
    ),
    "zone": _network(
        "zone network",
        Constant(250e-6, "s", _NUMBERS + ": half of the 0.5 ms round trip within a data centre"),
        Constant(12.5e9, "B/s", _EC2 + ": the instance's full bandwidth; assumed: up to 100 Gbit/s"),
        _FLOW,
    ),
    "region": _network(
        "region network",
        Constant(1e-3, "s", "assumed: zones at most 100 km apart, 0.5 ms of fibre at 200,000 km/s, twice that routed"),
        Constant(12.5e9, "B/s", _EC2 + ": the instance's full bandwidth; assumed: up to 100 Gbit/s"),
        _FLOW,
    ),
    "continent": _network(
        "continent network",
        Constant(37.5e-3, "s", "half of the 75 ms from New York to San Francisco and back (graphql.guide, latency)"),
        Constant(0.625e9, "B/s", _EC2 + ": 5 Gbit/s to other regions for instances of less than 32 processors"),
        Constant(0.125e9, "B/s", "assumed: 1 Gbit/s for one flow, bound by window and loss"),
    ),
    "world": _network(
        "world network",
        Constant(75e-3, "s", _NUMBERS + ": half of the 150 ms from California to the Netherlands and back"),
        Constant(0.125e9, "B/s", "assumed: 1 Gbit/s to the public internet per host"),
        Constant(0.0625e9, "B/s", "assumed: 500 Mbit/s for one flow, bound by window and loss"),
    ),
}
