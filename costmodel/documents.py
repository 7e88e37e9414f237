"""A cluster as a JSON document: versioned, readable, no pickle; and back, with one clear error for what is wrong.

Schema 2 adds what was measured: a device's surfaces, exact op times, optimizer rates, overlap and action, and the
cluster's wires and provenance. Documents of schema 1 still load; they have none of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .curves import curve_from, surface_from
from .files import parse_document
from .hardware import Device, Host, Link
from .measured import CodingRate, OpTime, OptimizerRate, Piece, Wire

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["cluster_fields", "cluster_text"]

FORMAT, SCHEMA, READABLE = "meshwright-cluster", 2, (1, 2)


def cluster_text(cluster: Cluster) -> str:
    """The document; equal neighbouring hosts are written once with a count."""
    hosts = [{"count": len(list(run))} | asdict(host) for host, run in groupby(cluster.hosts)]
    body: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA, "name": cluster.name, "backend": cluster.backend}
    body |= {
        "oversubscription": cluster.oversubscription,
        "link_kind": cluster.link_kind,
        "link": asdict(cluster.link),
        "hosts": hosts,
        "wires": [asdict(wire) for wire in cluster.wires],
        "provenance": dict(cluster.provenance),
    }
    return json.dumps(body, indent=1)


def cluster_fields(text: str) -> dict[str, Any]:
    """The fields of the Cluster that ``text`` describes; ValueError on a corrupt, foreign or outdated document and on
    impossible values, naming the entry."""
    data = parse_document(text, "cluster", FORMAT, READABLE, "save it again")
    try:
        hosts: list[Host] = []
        for entry in data["hosts"]:
            link = Link(**entry["link"])
            host = Host(_device(entry["device"]), int(entry["num_devices"]), link, str(entry["link_kind"]))
            hosts += [host] * int(entry["count"])
        return {
            "name": str(data["name"]),
            "hosts": tuple(hosts),
            "link": Link(**data["link"]),
            "link_kind": str(data["link_kind"]),
            "backend": str(data["backend"]),
            "oversubscription": float(data["oversubscription"]),
            "wires": tuple(_wire(entry) for entry in data.get("wires", ())),
            "provenance": tuple((str(key), str(value)) for key, value in data.get("provenance", {}).items()),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a cluster document lacks or misnames a field ({error!r}); see Cluster.to_json for the form"
        ) from None


def _device(entry: Mapping[str, Any]) -> Device:
    fields = dict(entry)
    fields["curves"] = tuple(curve_from(curve) for curve in fields.get("curves", ()))
    fields["surfaces"] = tuple(surface_from(surface) for surface in fields.get("surfaces", ()))
    fields["op_times"] = tuple(OpTime(**time) for time in fields.get("op_times", ()))
    fields["optimizers"] = tuple(OptimizerRate(**rate) for rate in fields.get("optimizers", ()))
    fields["codings"] = tuple(CodingRate(**rate) for rate in fields.get("codings", ()))
    for key in ("flops_per_s", "efficiency"):
        fields[key] = tuple((str(name), float(value)) for name, value in fields.get(key, ()))
    return Device(**fields)


def _wire(entry: Mapping[str, Any]) -> Wire:
    try:
        pieces = tuple(Piece(**piece) for piece in entry["pieces"])
    except ValueError as error:
        raise ValueError(f"wire {entry['kind']} of {entry['size']}: {error}") from None
    points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in entry["points"])
    return Wire(**(dict(entry) | {"pieces": pieces, "points": points}))
