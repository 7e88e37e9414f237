"""What a caller pins or forbids: the grammar, what excludes what, and that plans keep to it."""

from __future__ import annotations

import re

import pytest
from meshwright.compiler.cost.parameter_sharding import PATTERNS
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import Layering, cluster_layers
from meshwright.compiler.ir.graph import Graph, op_name
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.validation import validate
from meshwright.compiler.search.constraints import Range, parse_constraints, resolve
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster

from tests.support import zoo
from tests.support.planning import make_plan
from tests.support.special_models import SPECIAL

V100 = Cluster.preset("p3.16xlarge", 1)
WIDE = Space(residencies=PATTERNS, recompute=("none", "selective", "full"), sequence=True)


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, args, kwargs = zoo.gpt(layers=2, tied=False)
    return capture(model, args, kwargs)


def planned(graph: Graph, constraints: str | list[str], cluster: Cluster = V100, **more: object) -> Plan:
    more = {"space": WIDE, **more}
    return make_plan(graph, cluster, 8, constraints=constraints, **more)  # type: ignore[arg-type]


# ---- the grammar


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("stage boundary at blocks.1", "boundaries", ("blocks.1",)),
        ("no stage  boundary at blocks.*", "joined", ("blocks.*",)),
        ("STAGES = 2", "stages", Range(2, 2)),
        ("stages<=3", "stages", Range(1, 3)),
        ("microbatches >= 4", "microbatches", Range(4, None)),
        ("tensor parallel <= 8", "tensor", Range(1, 8)),
        ("no tensor parallel", "tensor", Range(1, 1)),
        ("Tensor parallel inside a host", "tensor_inside_host", True),
        ("no sequence parallel", "sequence", False),
        ("replicate head.weight", "replicated", ("head.weight",)),
        ("split blocks.0.up by out", "split", (("blocks.0.up", "out"),)),
        ("recompute none, full", "recompute", ("none", "full")),
        ("no recompute", "recompute", ("none",)),
        ("zero <= 2", "zero", Range(0, 2)),
        ("no zero", "zero", Range(0, 0)),
        ("schedule 1f1b, zb-h1", "schedules", ("1f1b", "zb-h1")),
    ],
)
def test_every_form_of_the_grammar_is_read(text: str, field: str, value: object) -> None:
    found = parse_constraints(text)
    assert getattr(found, field) == value
    assert found.texts() == [text]
    assert parse_constraints([text, " "]) == parse_constraints(f"{text};") == found


def test_several_constraints_of_one_subject_narrow_each_other() -> None:
    found = parse_constraints("stages >= 2; stages <= 4; recompute none, full; recompute full, selective")
    assert found.stages == Range(2, 4)
    assert found.recompute == ("full",)
    assert not parse_constraints(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("make it fast", "a constraint reads like .* but got 'make it fast'"),
        ("stages = 2; stages = 3", "got 'stages = 2' and 'stages = 3': no number satisfies them; drop one"),
        ("no tensor parallel; tensor parallel >= 2", "got 'no tensor parallel' and 'tensor parallel >= 2'"),
        ("no zero; zero = 3", "got 'no zero' and 'zero = 3'"),
        ("no recompute; recompute full", "got 'no recompute' and 'recompute full': no recompute is left"),
        ("schedule 2f2b", "schedule is one of .*1f1b.* but got '2f2b'"),
        ("recompute sometimes", "recompute is one of none, selective, full, but got 'sometimes'"),
    ],
)
def test_texts_that_say_nothing_or_exclude_each_other_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_constraints(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage boundary at blocks.7", r"names a layer of the model, but got 'blocks.7'; use one like "),
        ("replicate blocks.0.up", r"names a parameter of the model, but got"),
        ("split nothing by out", r"names an op or module of the model"),
        ("split *.up by sideways", r"may be split by b0, b1, i, o, but got 'sideways'"),
        ("stage boundary at LAYER1; no stage boundary at LAYER1", "would and would not begin at"),
        ("stage boundary at LAYER1; stages = 1", "the boundaries alone make 2 stages"),
        ("no stage boundary at *; stages = 2", "make at most 1 stages"),
    ],
)
def test_names_that_match_nothing_and_impossible_cuts_are_refused(graph: Graph, text: str, message: str) -> None:
    layering = cluster_layers(graph)
    text = text.replace("LAYER1", layering.layers[1].name)
    with pytest.raises(ValueError, match=message):
        resolve(parse_constraints(text), graph, layering)


# ---- what the search makes of them


def test_boundaries_and_numbers_of_stages_are_kept(graph: Graph) -> None:
    layers = cluster_layers(graph).layers
    plan = planned(graph, [f"stage boundary at {layers[2].name}", "stages = 2"], Cluster.local(2))
    assert [stage.chunks[0].layers for stage in plan.stages] == [(0, 2), (2, len(layers))]
    free = planned(graph, [f"no stage boundary at {layers[2].name}", "stages = 2"], Cluster.local(2))
    assert len(free.stages) == 2
    assert free.stages[1].chunks[0].layers[0] != 2


def test_microbatches_and_schedules_are_kept(graph: Graph) -> None:
    plan = planned(graph, "microbatches >= 4; stages = 2; schedule zb-h1", space=Space(schedules=("1f1b", "zb-h1")))
    assert plan.microbatches in (4, 8)
    assert plan.schedule == "zb-h1"


def labels_of(plan: Plan, op: str) -> tuple[str, ...]:
    return next(chunk.ops[op] for stage in plan.stages for chunk in stage.chunks if op in chunk.ops)


def op_of(graph: Graph, module: str) -> str:
    return next(node.name for node in graph.ops() if node.meta["module"] == module)


def test_an_op_is_split_and_a_weight_whole_where_that_is_asked(graph: Graph) -> None:
    module = next(n.meta["module"] for n in graph.ops() if n.meta["module"].endswith("up"))
    op = op_of(graph, module)
    plan = planned(graph, [f"split {module} by o", "stages = 1"], Cluster.local(2))
    assert "o" in labels_of(plan, op)
    both = planned(graph, [f"split {module} by o", f"split {module} by b0", "stages = 1"], Cluster.local(4))
    assert {"o", "b0"} <= set(labels_of(both, op))
    whole = planned(
        graph, [f"replicate {module}.weight", "tensor parallel >= 2", "no sequence parallel"], Cluster.local(2)
    )
    home = whole.stages[0].chunks[0].parameters[f"{module}.weight"]
    assert home.pattern == "replicated"
    assert not any(value.is_shard for value in home.compute.value)
    others = [h for h in whole.stages[0].chunks[0].parameters.values() if any(v.is_shard for v in h.compute.value)]
    assert others, "tensor parallelism cuts other weights"


def test_without_tensor_parallelism_no_op_wants_a_part_of_a_weight(graph: Graph) -> None:
    plan = planned(graph, "no tensor parallel; stages = 1; zero = 3; microbatches = 1; tensor parallel inside a host")
    homes = plan.stages[0].chunks[0].parameters.values()
    assert not any(value.is_shard for home in homes for value in home.compute.value)


def test_recompute_and_zero_are_kept_layer_by_layer(graph: Graph) -> None:
    names = [layer.name for layer in cluster_layers(graph).layers]
    asked = {"*": "full", names[1]: "none"}
    plan = planned(graph, "stages = 1", Cluster.local(2), recompute=asked)
    modes = plan.stages[0].chunks[0].recompute
    assert modes[1] == "none"
    assert set(modes[2:-1]) == {"full"}
    with pytest.raises(ValueError, match=r"'no recompute' and 'recompute full of .*': no mode is left"):
        planned(graph, "no recompute", recompute={names[1]: "full"})


def test_what_is_forced_beside_constraints_must_agree_with_them(graph: Graph) -> None:
    with pytest.raises(ValueError, match="got 'stages = 3' and 'strategy pp2,dp1,tp1'"):
        planned(graph, "stages = 3", strategy=parse_strategy("pp2"))
    with pytest.raises(ValueError, match="got 'no tensor parallel' and 'strategy pp1,dp1,tp2'"):
        planned(graph, "no tensor parallel", strategy=parse_strategy("tp2"))
    with pytest.raises(ValueError, match="got 'microbatches >= 4' and 'microbatches=2'"):
        planned(graph, "microbatches >= 4", microbatches=2)
    with pytest.raises(ValueError, match="got 'microbatches = 3': a global batch of 8 falls into 1, 2, 4, 8 equal"):
        planned(graph, "microbatches = 3")
    with pytest.raises(ValueError, match="got 'stages = 9': the cluster has 8 devices"):
        planned(graph, "stages = 9")


def test_constraints_that_only_the_search_finds_impossible_are_named(graph: Graph) -> None:
    module = next(n.meta["module"] for n in graph.ops() if n.meta["module"].endswith("up"))
    texts = [f"split {module} by o", "no tensor parallel", "stages <= 2"]
    with pytest.raises(InfeasibleError) as caught:
        planned(graph, texts, Cluster.local(2))
    message = str(caught.value)
    assert re.search(re.escape(texts[0]), message)
    assert "no tensor parallel" in message
    assert "stages <= 2" not in message


def test_no_stage_boundary_between_two_updates_of_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = SPECIAL["shared_norm"](8)
    graph = capture(model, args, kwargs)
    layering = cluster_layers(graph)
    first, last = (
        layering.layer_of[node.name] for node in graph.ops() if op_name(node) == "meshwright.batch_norm"
    )  # fmt: skip
    assert first < last
    assert set(layering.updated_across(graph)) == set(range(first + 1, last + 1))
    plan = planned(graph, "stages = 2", microbatches=2)
    assert not first < plan.stages[1].chunks[0].layers[0] <= last
    assert not validate(plan, graph)
    with pytest.raises(ValueError, match=r"layers make at most 3: stages do not share a buffer .* update norm\."):
        planned(graph, [], strategy=parse_strategy("pp4"))
    with pytest.raises(ValueError, match=r"make at most 2 stages, as buffer norm\.\w+ is updated in several"):
        planned(graph, ["no stage boundary at last", "stages = 3"])
    boundary = f"stage boundary at {layering.layers[last].name}"
    with pytest.raises(ValueError, match=f"'{boundary}': buffer norm.* is updated before and after"):
        planned(graph, boundary)

    monkeypatch.setattr(Layering, "updated_across", lambda *_: {})
    faults = validate(planned(graph, [boundary, "stages = 2"], microbatches=2), graph)
    assert len(faults) == 3
    assert "stages 0 and 1 read or update buffer norm.num_batches_tracked, which one alone may" in faults
