"""Parts of a search that another question shares: what is reused is what would have been made, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import meshwright as mw
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.intra_op.restriction import Restriction
from meshwright.compiler.intra_op.vectorised import row_cache
from meshwright.compiler.intra_op.vectorised.cases import Case, Cases
from meshwright.compiler.intra_op.vectorised.interval_tables import IntervalComposer
from meshwright.compiler.intra_op.vectorised.layer_tables import LayerTemplate, Level
from meshwright.compiler.intra_op.vectorised.row_cache import KEY_BYTES, RowCache, column_digests, row_key
from meshwright.compiler.search import plan_cache
from meshwright.costmodel.cluster import Cluster
from meshwright.models import GPT

from tests.support.zoo import ZOO

LEVELS = [Level(), Level(1e-9, 4e-9), Level(1e-9, 4e-9, 0.0)]
SIZES = {"cost", "floor_s", "pace_s", "step_s", "transfer_s", "resident", "saved", "transient", "entry_s"}

# ---- rows of numbers


def numbered(*names: int) -> list[bytes]:
    return [name.to_bytes(KEY_BYTES, "big") for name in names]


def recall(rows: RowCache, *names: int, shape: tuple[int, ...] = (3,), add: float = 0.0) -> list[int]:
    """The names that were made; those that were not have the values of names."""
    asked: list[int] = []

    def make(some: list[int]) -> np.ndarray:
        asked.extend(names[k] for k in some)
        return np.full((*shape, len(some)), [names[k] + add for k in some])

    found = rows.recall(numbered(*names), shape, make)
    np.testing.assert_array_equal(found, np.full((*shape, len(names)), [n + add * (n in asked) for n in names]))
    return asked


def kept(folder: Path, *names: int, shape: tuple[int, ...] = (3,), family: str = "one") -> list[int]:
    with RowCache(folder, family).keeping() as rows:
        return recall(rows, *names, shape=shape)


def test_rows_are_made_once(tmp_path: Path) -> None:
    with RowCache(tmp_path, "one").keeping() as rows:
        assert recall(rows, 1, 2, 1) == [1, 2]
        assert recall(rows, 2, 3, add=0.5) == [3]
        assert recall(rows, 7, shape=(2, 4)) == [7]
    rows = RowCache(tmp_path, "one")
    assert recall(rows, 4, 2, 1, 2, add=0.25) == [4]
    assert recall(rows, 7, shape=(2, 4)) == []
    assert recall(rows, 7, shape=(4, 2)) == [7]  # of another shape is another row
    assert kept(tmp_path, 1, family="other") == [1]


def test_what_was_made_before_an_error_is_kept(tmp_path: Path) -> None:
    def interrupted() -> None:
        with RowCache(tmp_path, "one").keeping() as rows:
            recall(rows, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert kept(tmp_path, 1) == []


def test_a_part_of_a_search_may_keep_its_own(tmp_path: Path) -> None:
    """As a fork must, whose memory is lost."""
    with RowCache(tmp_path, "one").keeping() as rows:
        recall(rows, 1)
        with rows.keeping():
            assert recall(rows, 1, 2) == [2]
        assert kept(tmp_path, 2) == []
        assert kept(tmp_path, 1, family="reader") == [1]
        recall(rows, 3)
    assert kept(tmp_path, 1, 2, 3) == []
    assert sum(len(np.load(path)["keys0"]) for path in tmp_path.iterdir()) == 3 + 1  # each once, and the reader's


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_packs_are_made_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("packs")
    kept(folder, 1, 2, 3)
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    file.write_bytes(content)
    kept(folder, 1, 2, 3)  # asserts the values


def test_foreign_files_are_not_there(tmp_path: Path) -> None:
    kept(tmp_path, 1)
    (file,) = tmp_path.iterdir()
    keys = np.frombuffer(b"".join(numbered(1)), np.uint8).reshape(1, -1)
    bad: list[dict[str, Any]] = [
        {"keys0": keys, "values0": np.array([{}], dtype=object)}, {"keys0": keys},
        {"keys0": keys, "values0": np.zeros((3, 2))}, {"keys0": keys, "values0": np.zeros((3, 1), np.float32)},
        {"keys0": keys[:, :8], "values0": np.zeros((3, 1))}, {"keys0": keys, "values0": np.zeros(())},
        {"keys0": np.array([{}], dtype=object)}, {"keys0": np.zeros((), np.uint8)},
    ]  # fmt: skip
    for arrays in bad:
        np.savez(file, **arrays)
        assert kept(tmp_path, 1) == [1], arrays
    for content in (b"", b"PK", b"{}"):
        file.write_bytes(content)
        assert kept(tmp_path, 1) == [1]


def test_the_longest_unused_go_beyond_the_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (1, 2, 3):
        kept(tmp_path, name, shape=(500,))
        for file in tmp_path.iterdir():  # an hour passes
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 3600 * 10**9))
    each = max(file.stat().st_size for file in tmp_path.iterdir())
    assert kept(tmp_path, 1, shape=(500,)) == []  # used now
    monkeypatch.setattr(row_cache, "LIMIT_BYTES", int(3.5 * each))
    kept(tmp_path, 4, shape=(500,))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3.5 * each
    rows = RowCache(tmp_path, "one")
    assert recall(rows, 1, 2, 3, 4, shape=(500,)) == [2]


def test_small_rows_before_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "LIMIT_BYTES", 2 * 8 * 1000)
    with RowCache(tmp_path, "one").keeping() as rows:
        recall(rows, 1, shape=(2000,))
        recall(rows, *range(10), shape=(10,))
    rows = RowCache(tmp_path, "one")
    assert recall(rows, *range(10), shape=(10,)) == []
    assert recall(rows, 1, shape=(2000,)) == [1]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * 8 * 1000


def test_a_place_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "rows", 1) == [1]


# ---- keys


@pytest.fixture(scope="module")
def graph() -> Any:
    return capture(*ZOO["gpt"](64, device="meta", layers=2))


def composer_of(graph: Any, **changed: Any) -> IntervalComposer:
    cluster = changed.get("cluster", Cluster.preset("p3.16xlarge"))
    cases = changed.get("cases", (((2, 2), 0, 4), ((2, 4), 0, 4), ((4, 2), 0, 4)))
    batch, optimizer = changed.get("batch", 64), changed.get("optimizer", "AdamW")
    variants = Cases(
        graph, cluster_layers(graph), cluster, optimizer, batch, tuple(Case(*case) for case in cases),
        changed.get("schedule", "1f1b"),
    )  # fmt: skip
    restriction = changed.get("restriction", Restriction())
    return IntervalComposer(
        variants, restriction, changed.get("levels", LEVELS), changed.get("modes", ["none", "full"])
    )


def arrays_of(template: LayerTemplate) -> Iterator[np.ndarray]:
    """Every array of numbers that tables are made of."""
    for terms in (*template.operators, *template.tensors):
        for found in (terms.seconds, terms.sure, terms.step_s, terms.resident):
            yield from () if found is None else (found,)
        yield from (
            found for each in (terms.again, terms.saved, terms.transient) for found in each if found is not None
        )


@contextmanager
def nudged(array: np.ndarray, case: int, data: st.DataObject) -> Iterator[None]:
    """The array with one of a case's numbers changed by as little as can be."""
    cells = array.reshape(-1, array.shape[-1])
    assert np.shares_memory(cells, array)
    cell = data.draw(st.integers(0, len(cells) - 1))
    before = cells[cell, case]
    cells[cell, case] = not before if array.dtype == bool else np.nextafter(before, 1.0)
    try:
        yield
    finally:
        cells[cell, case] = before


@pytest.fixture(scope="module")
def template(graph: Any) -> LayerTemplate:
    return composer_of(graph).template(2)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_number_counts_for_its_case_and_for_no_other(template: LayerTemplate, data: st.DataObject) -> None:
    before = column_digests(template)
    assert len(set(before)) == len(before) == 3
    every = [*{id(array): array for array in arrays_of(template)}.values(), template.possible]
    case = data.draw(st.integers(0, len(before) - 1))
    with nudged(data.draw(st.sampled_from(every)), case, data):
        after = column_digests(template)
    assert [old != new for old, new in zip(before, after)] == [k == case for k in range(3)]


def test_the_structure_of_a_template_counts(template: LayerTemplate) -> None:
    section, (edge, *others) = template.section, template.section.edges
    (entering, leaving), (operator, choices) = template.borders, edge.consumers[0]
    resident = next(k for k, terms in enumerate(template.operators) if terms.resident is not None)

    def with_edge(**changed: Any) -> LayerTemplate:
        copies = {name: getattr(edge, name) for name in ("producer", "source", "consumers")} | changed
        one = type("Edge", (), copies)()
        return replace(template, section=type("Section", (), {"edges": [one, *others]})())

    def with_terms(**changed: Any) -> LayerTemplate:
        operators = list(template.operators)
        operators[resident] = replace(operators[resident], **changed)
        return replace(template, operators=tuple(operators))

    others_of_it = [
        with_edge(producer=edge.producer + 1),
        with_edge(source=edge.source[::-1] + 1),
        with_edge(consumers=((operator, choices + 1), *edge.consumers[1:])),
        with_edge(consumers=edge.consumers[1:]),
        with_terms(resident=None),
        with_terms(resident=template.operators[resident].seconds),
        replace(template, modes=("none",)),
        replace(template, links=template.links[1:]),
        replace(template, operators=template.operators[::-1]),
        replace(template, tensors=template.tensors[::-1]),
        replace(template, borders=(leaving, entering)),
        replace(template, borders=(replace(entering, of_state=entering.of_state[::-1].copy()), leaving)),
    ]
    assert section.edges[0] is edge
    found = {tuple(column_digests(one)) for one in (template, with_edge(), *others_of_it)}
    assert len(found) == 1 + len(others_of_it)


def test_everything_else_of_a_row_counts() -> None:
    level, others = Level(1.0, 2.0, 0.5), [np.arange(3.0), np.arange(2.0)]
    keys = [
        row_key(b"ab", [b"c"], level, 1.0, others), row_key(b"a", [b"bc"], level, 1.0, others),
        row_key(b"ab", [b"c", b""], level, 1.0, others), row_key(b"ab", [b"c"], level, 1.5, others),
        row_key(b"ab", [b"c"], level, 1.0, others[:1]), row_key(b"ab", [b"c"], level, 1.0, others[::-1]),
        row_key(b"ab", [b"c"], level, 1.0, [np.arange(5.0)]),
        *(row_key(b"ab", [b"c"], replace(level, **{f.name: 3.0}), 1.0, others) for f in fields(Level)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert keys[0] == row_key(b"ab", [b"c"], replace(level), 1.0, [array.copy() for array in others])


INGREDIENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cluster": {"cluster": Cluster.preset("dgx-a100-40")},
    "hosts": {"cluster": Cluster.parse("p3.16xlarge:2")},
    "offset": {"cluster": Cluster.parse("p3.16xlarge:2"), "cases": (((2, 2), 4, 4), ((2, 4), 8, 4))},
    "meshes": {"cases": (((4, 2), 0, 4), ((2, 2), 0, 4))},
    "microbatches": {"cases": (((2, 2), 0, 4), ((2, 4), 0, 8), ((4, 2), 0, 2))},
    "batch": {"batch": 128},
    "optimizer": {"optimizer": "SGD"},
    "modes": {"modes": ["none", "selective"]},
    "schedule": {"schedule": "gpipe"},
    "levels": {"levels": [Level(), Level(1e-9, 1e-9), Level(2e-9, 4e-9, 0.5)]},
    "residencies": {"restriction": Restriction(residencies=("replicated", "zero1"))},
    "roles": {"restriction": Restriction(roles=("data", None))},
    "executable": {"restriction": Restriction(executable_only=True)},
}


@pytest.fixture(scope="module")
def shared(graph: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of the composer that no ingredient was changed of."""
    folder = tmp_path_factory.mktemp("shared")
    with RowCache(folder, "one").keeping() as rows:
        made_by(composer_of(graph), rows)
    return folder


def made_by(composer: IntervalComposer, rows: RowCache | None) -> tuple[np.ndarray, Any]:
    composer.kept = rows
    asked = [(v, level) for v in range(composer.cases.num) for level in range(len(LEVELS))]
    return composer.floors(asked)[0], composer.intervals(asked)


@pytest.mark.parametrize("name", INGREDIENTS)
def test_whatever_changes_rows_are_those_that_would_be_made(name: str, graph: Any, shared: Path) -> None:
    changed, rows = INGREDIENTS[name], RowCache(shared, "one")
    floors, intervals = made_by(composer_of(graph, **changed), rows)
    expected_floors, expected = made_by(composer_of(graph, **changed), None)
    np.testing.assert_array_equal(floors, expected_floors)
    for size in SIZES:
        np.testing.assert_array_equal(getattr(intervals, size), getattr(expected, size), err_msg=size)
    assert bool(rows._made) == (name not in ("nothing", "meshes", "executable"))


# ---- plans

CLUSTER = mw.Cluster.parse("p3.16xlarge:1")
CHANGES: dict[
    str, tuple[dict[str, Any], float]
] = {  # what is asked, and which part of the layers' rows is made at most
    "boundary": ({"constraints": "stage boundary at blocks.1.attention"}, 0.5),
    "stages": ({"constraints": "stages <= 2; microbatches >= 2"}, 0.7),
    "weight": ({"constraints": "replicate blocks.1.attention.out.weight"}, 0.9),
    "schedule": ({"schedule": "1f1b"}, 0.1),
    # multipliers follow the number of groups that there is room for, so fewer rows are shared than before (0.9 then)
    "hosts": ({"cluster": mw.Cluster.parse("p3.16xlarge:2")}, 0.95),
    "batch": ({"global_batch": 8}, 1.0),
}


def asked(**changed: Any) -> Any:
    arguments = {"global_batch": 4, "cluster": CLUSTER, **changed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.api.capture", lambda *_: small())
        return mw.plan(torch.nn.Identity(), example_inputs=(), **arguments)


@cache
def small() -> Any:
    """A captured GPT of two layers."""
    with torch.device("meta"):
        model, tokens = GPT(vocab=64, layers=2, hidden=64, heads=4, sequence=16), torch.zeros(4, 16, dtype=torch.int64)
    return capture(model, (tokens, tokens), {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plans_of_other_tests: None) -> Path:
    monkeypatch.setattr(plan_cache, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many rows of layers were made."""
    counts: Counter[str] = Counter()
    for name in ("tables", "floors"):
        monkeypatch.setattr(LayerTemplate, name, counting(getattr(LayerTemplate, name), counts))
    return counts


def counting(method: Any, counts: Counter[str]) -> Any:
    def counted(self: LayerTemplate, weights: Any) -> Any:
        counts["rows"] += len(weights.case)
        return method(self, weights)

    return counted


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first question leaves, without its answer."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache, "cache_directory", lambda: folder)
        asked()
    shutil.rmtree(folder / "plans")
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_question_reuses_rows_and_has_the_same_answer(
    name: str, folder: Path, first: Path, made: Counter[str]
) -> None:
    changed, most = CHANGES[name]
    anew = asked(**changed, cache=False)
    shutil.copytree(first, folder)
    before, made["rows"] = made["rows"], 0
    again = asked(**changed)
    assert made["rows"] <= most * before, made["rows"] / before
    assert bare(again) == bare(anew)


def test_it_can_be_left_out(folder: Path, first: Path, made: Counter[str]) -> None:
    asked(cache=False)
    before, made["rows"] = made["rows"], 0
    shutil.copytree(first, folder)
    files = sorted(folder.rglob("*"))
    asked(cache=False)
    assert made["rows"] == before
    assert sorted(folder.rglob("*")) == files


def test_other_code_makes_its_own_rows(
    folder: Path, first: Path, made: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(first, folder)
    monkeypatch.setattr(plan_cache, "_code", lambda: "another")
    asked()
    assert made["rows"] > 100
    assert len({path.name.partition("-")[0] for path in (folder / "rows").iterdir()}) == 2


def bare(plans: Any) -> list[mw.Plan]:
    """Plans without what took how long."""
    return [replace(plan, provenance={}) for plan in (plans if isinstance(plans, list) else [plans])]
