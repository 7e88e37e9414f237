"""A few hundred random changes of two plan documents and of a cluster document: each is refused in one line, or priced
again and said to be edited, or provably changes nothing that anybody reads."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.compiler.plan.validation import validate
from meshwright.compiler.report.explain import summary_json
from meshwright.compiler.report.reprice import reprice

from tests.support.document_mutants import Network, places

MUTANTS = 300
CPU = mw.Cluster.preset("cpu")
WORDS = (None, "zzz", [], {}, True, -1, float("inf"), float("nan"), 10**400, "", 0, 1.5)


@pytest.fixture(scope="module")
def plans() -> list[mw.Plan]:
    with torch.device("meta"):
        network, x = Network(), torch.zeros(32, 64)
    asked: dict[str, Any] = {"example_inputs": (x, x), "executable": True}
    return [
        mw.plan(network, CPU, strategy="pp2,tp2", microbatches=4, **asked),
        mw.plan(network, CPU, strategy="dp4", zero=1, microbatches=2, **asked),
    ]


def mutant(document: Any, draw: random.Random) -> tuple[Any, tuple[Any, ...], str]:
    """The document with one change; its top-level fields are equally likely."""
    changed = json.loads(json.dumps(document))
    field = draw.choice(sorted(changed))
    path = draw.choice([path for path in places(changed) if path[0] == field])
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    how = draw.choice(["delete", "replace", "number", "swap", "rename", "text"])
    if how == "number" and type(old) in (int, float):
        parent[key] = draw.choice([old * 2, old // 2, -old - 1, old + 1, old - 1])
    elif how == "text" and isinstance(old, str):
        parent[key] = draw.choice([old[::-1] + "x", old.replace("R", "S0"), old.replace("S0", "R"), "gpipe", "whole"])
    elif how == "swap":
        other = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[f"{key}s"] = parent.pop(key)
    elif how == "replace":
        parent[key] = draw.choice(WORDS)
    else:
        del parent[key]
    return changed, path, how


def without_words(document: dict[str, Any]) -> Any:
    """All of a document but the words beside decisions and prices, numbers as numbers."""
    kept = {key: value for key, value in document.items() if key not in ("provenance", "seal")}
    kept["prediction"] = {key: value for key, value in kept["prediction"].items() if key != "notes"}
    return json.loads(json.dumps(kept))


def one_line(error: ValueError, verdict: str) -> str:
    assert str(error)
    assert "\n" not in str(error)
    return verdict


def judged(plan: mw.Plan, text: str) -> str:
    """What becomes of a mutant of ``plan``, as ``check`` and ``show`` treat it; an assertion says if nothing may."""
    try:
        changed = mw.Plan.from_json(json.loads(text))
    except ValueError as error:
        return one_line(error, "refused at load")
    if faults := validate(changed, plan.graph):
        assert not any("\n" in fault for fault in faults)
        return "refused by check"
    figures, words = summary_json(changed), changed.explain()
    if changed.price_state != "current":
        assert changed.price_note[:40] in " ".join(words.split())
        edited = changed.price_state == "edited"
        assert not edited or ("predicted" not in words and figures["step_s"] is None)
        try:
            priced = reprice(changed, plan.graph, mw.Cluster.from_json(json.dumps(changed.cluster)))
        except ValueError as error:
            return one_line(error, "refused by the price")
        assert priced.price_state == "current"
        return f"{changed.price_state}, priced again"
    assert without_words(changed.to_json()) == without_words(plan.to_json())
    return "equal"


def test_no_mutant_of_a_plan_is_shown_at_an_old_price(plans: list[mw.Plan]) -> None:
    found = Counter[str]()
    for number in range(MUTANTS):
        draw = random.Random(number)
        plan = draw.choice(plans)
        changed, path, how = mutant(plan.to_json(), draw)
        try:
            found[judged(plan, json.dumps(changed))] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number}, {how} {'.'.join(map(str, path))}") from error
    assert found["refused at load"] > MUTANTS / 4
    assert found["refused by check"] > 5
    assert found["edited, priced again"] > 20


def test_what_a_person_may_edit_is_priced_again(plans: list[mw.Plan]) -> None:
    plan = plans[0]
    document = {**plan.to_json(), "microbatches": 2}
    edited = mw.Plan.from_json(document)
    assert edited.check() == []
    assert (edited.price_state, edited.price_note) == ("edited", "edited: prices are of another plan")
    assert "prices    edited" in edited.explain()
    priced = reprice(edited, plan.graph, CPU)
    assert priced.prediction.step_s != plan.prediction.step_s
    assert priced.prediction.bound_s == 0
    assert "none holds" in priced.explain()
    again = mw.Plan.from_json(json.loads(json.dumps(priced.to_json())))
    assert again.price_state == "current"
    assert "edited: prices" in str(edited.why("a.weight", plan.graph))


def test_a_price_that_somebody_wrote_is_none(plans: list[mw.Plan]) -> None:
    document = json.loads(json.dumps(plans[0].to_json()))
    document["prediction"]["step_s"] /= 2
    assert mw.Plan.from_json(document).price_state == "edited"
    document = json.loads(json.dumps(plans[0].to_json()))
    document["prediction"]["notes"].append("mine")
    document["provenance"]["mine"] = 1
    assert mw.Plan.from_json(document).price_state == "current"


def test_an_older_document_says_that_it_does_not_know(plans: list[mw.Plan]) -> None:
    document = plans[0].to_json()
    del document["seal"]
    old = mw.Plan.from_json(document)
    assert old == plans[0]
    assert old.price_state == "unknown"
    assert "unknown" in old.explain()
    assert "predicted" in old.explain()
    assert mw.Plan.from_json(old.to_json()).price_state == "unknown"
    assert mw.Plan.from_json({**old.to_json(), "microbatches": 2}).price_state == "edited"


def test_a_misspelt_key_is_named_with_the_one_that_is_meant(plans: list[mw.Plan]) -> None:
    document = plans[0].to_json()
    document["microbatchs"] = document.pop("microbatches")
    with pytest.raises(ValueError, match=r"lacks 'microbatches'; has an unknown key 'microbatchs' .did you mean"):
        mw.Plan.from_json(document)


def test_no_mutant_of_a_cluster_is_planned_with() -> None:
    """Refused by name, or as readable as before and with usable numbers only."""
    text = mw.Cluster.preset("p3.16xlarge", 2).to_json()
    found = Counter[str]()
    for number in range(MUTANTS):
        draw = random.Random(number)
        changed, path, how = mutant(json.loads(text), draw)
        where = f"mutant {number}, {how} {'.'.join(map(str, path))}"
        try:
            cluster = mw.Cluster.from_json(json.dumps(changed))
        except ValueError as error:
            found[one_line(error, "refused")] += 1
            continue
        except Exception as error:
            raise AssertionError(where) from error
        assert usable(cluster), where
        assert mw.Cluster.from_json(cluster.to_json()) == cluster, where
        found["read"] += 1
    assert found["refused"] > MUTANTS / 3


def usable(cluster: mw.Cluster) -> bool:
    links = [cluster.link, *(host.link for host in cluster.hosts)]
    devices = [host.device for host in cluster.hosts]
    rates = [rate for link in links for rate in (link.bytes_per_s, link.pair)]
    rates += [rate for device in devices for _, rate in device.flops_per_s]
    shares = [share for device in devices for _, share in device.efficiency]
    return all(0 < rate < 1e30 for rate in rates) and all(0 < share <= 1 for share in shares)


@pytest.mark.parametrize("value", [float("nan"), -1, 0, 1e30, "fast", None, True])
def test_an_efficiency_is_a_share(value: Any) -> None:
    document = json.loads(mw.Cluster.preset("p3.16xlarge").to_json())
    document["hosts"][0]["device"]["efficiency"][0][1] = value
    with pytest.raises(ValueError, match=r"hosts\[0\]\.device\.efficiency\[0\]\[1\] is a number above 0, at most 1"):
        mw.Cluster.from_json(json.dumps(document))
