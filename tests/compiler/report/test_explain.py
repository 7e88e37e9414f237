"""What a plan says of itself, and what is said of a plan that no longer holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.intra_op.stage_cost import CAUSES
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.ir.spec import Placement
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.plan.validation import require_valid, validate
from meshwright.compiler.report.describe import axis_names, axis_roles, layer_rows, layer_span, op_summary
from meshwright.compiler.report.explain import explain, summary_json
from meshwright.compiler.search.parallel_shape import parse_strategy
from meshwright.compiler.text import bar_text, bytes_text, count_text, seconds_text, span_text, stack_tables, table
from meshwright.costmodel.cluster import Cluster

from tests.support.planning import make_plan
from tests.support.zoo import gpt, mlp

CLUSTER = Cluster.preset("p3.16xlarge")


@pytest.fixture(scope="module")
def graph() -> Graph:
    model, args, kwargs = gpt(device="meta", layers=4)
    return capture(model, args, kwargs)


def planned(graph: Graph, strategy: str, microbatches: int = 8) -> Plan:
    return make_plan(graph, CLUSTER, 64, microbatches=microbatches, strategy=parse_strategy(strategy))


@pytest.fixture(scope="module")
def mixed(graph: Graph) -> Plan:
    return planned(graph, "pp2,dp2,tp2")


@pytest.fixture(scope="module")
def automatic() -> Plan:
    model, args, kwargs = mlp(device="meta")
    return make_plan(capture(model, args, kwargs), CLUSTER, 64, alternatives=True)


# ---- words


def test_axes_are_named_by_what_heavy_ops_cut(mixed: Plan) -> None:
    assert [axis_roles(stage) for stage in mixed.stages] == [("data", "tensor")] * 2
    stage = mixed.stages[0]
    both_batch = {op: (labels[0], labels[0]) for op, labels in stage.chunks[0].ops.items()}
    twice = replace(stage, chunks=(replace(stage.chunks[0], ops=both_batch),))
    assert axis_names(twice) == ("data 0", "data 1")
    nothing = dict.fromkeys(stage.chunks[0].ops, ("whole", "whole"))
    assert axis_roles(replace(stage, chunks=(replace(stage.chunks[0], ops=nothing),))) == ("replicas", "replicas")


def test_equal_blocks_are_told_once(mixed: Plan) -> None:
    groups = layer_rows(mixed, 0)
    block = next(group for group in groups if group.count > 1)
    assert (block.titles, block.count) == (("blocks.0–1.attention", "blocks.0–1.feed_forward"), 2)
    assert sum(len(group.titles) * group.count for group in groups) == 6


def test_a_different_neighbour_is_told_apart(mixed: Plan) -> None:
    stage = mixed.stages[0]
    name = "blocks.1.feed_forward.down.weight"
    parameters = dict(stage.chunks[0].parameters)
    parameters[name] = parameters["blocks.1.feed_forward.up.weight"]
    edited = replace(stage, chunks=(replace(stage.chunks[0], parameters=parameters),))
    titles = [title for g in layer_rows(replace(mixed, stages=(edited, mixed.stages[1])), 0) for title in g.titles]
    assert "blocks.1.feed_forward" in titles


def test_weights_say_their_cut_and_where_gradients_are_summed(mixed: Plan, graph: Graph) -> None:
    for given in (None, graph):
        rows = {n: row for g in layer_rows(mixed, 0, given) for rs in g.rows for row in rs for n in row.names}
        assert rows["query"].weights == "output features (columns) over tensor; gradient summed over data"
        assert rows["down"].weights == "input features (rows) over tensor; gradient summed over data"
    assert rows["attention"].work == "batch over data, heads over tensor"
    assert rows["up"].work == "batch over data, output features (columns) over tensor"


def test_work_is_counted_by_family(mixed: Plan) -> None:
    found = dict(op_summary(mixed.stages[1]))
    assert found["attention"] == [("batch over data, heads over tensor", 2)]
    assert sum(count for _, count in found["matmul"]) == 13


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        ("h.0.mlp", "h.11.mlp", "h.0–11.mlp"),
        ("h.0–3.mlp", "h.4–7.mlp", "h.0–7.mlp"),
        ("embed", "head", "embed … head"),
        ("a.1.b.1", "a.2.b.2", "a.1.b.1 … a.2.b.2"),
        ("head", "head", "head"),
    ],
)
def test_spans_of_layers(first: str, last: str, text: str) -> None:
    assert layer_span(first, last) == text


# ---- the page


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("with_graph", [False, True])
def test_no_line_is_wider_than_asked(mixed: Plan, graph: Graph, width: int, with_graph: bool) -> None:
    text = mixed.explain(graph if with_graph else None, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_page_has_every_part(mixed: Plan) -> None:
    text = explain(mixed)
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "Plan",
        "Stages",
        "How each layer is split",
        "Schedule: 1f1b, 8 microbatches",
        "Seconds of a step, by cause",
        "Memory of the fullest device, by cause",
        "Collectives",
        "Where the prices come from",
        "Notes",
    ]
    assert mixed.model in text
    assert "64 = 8 microbatches × 8 samples" in text
    assert "stage 0: mesh 2 data × 2 tensor" in text
    assert "the parallel shape was given: pp 2, dp 2, tp 2" in text
    count = mixed.prediction.stages[0].collectives["forward all_reduce"]
    assert f"stage 0: {count} × forward all-reduce" in text
    assert len(re.findall(r"^  stage [01] .*[0-9₀-₉]$|^  stage [01] .*[=·]+$", text, re.MULTILINE)) >= 2


def test_every_cause_has_a_column(mixed: Plan) -> None:
    first = mixed.prediction.stages[0]
    every = replace(mixed.prediction, stages=(replace(first, seconds=dict.fromkeys(CAUSES, first.forward_s)),))
    text = explain(replace(mixed, stages=mixed.stages[:1], transfers=(), prediction=every), width=300)
    (head,) = [line for line in text.splitlines() if line.startswith("  stage  forward")]
    assert len(re.split(r"  +", head.strip())) == 2 + len(CAUSES)


def test_equal_stages_are_told_together(graph: Graph) -> None:
    plan = planned(graph, "pp4,tp2")
    text = explain(plan)
    inner = [line for line in text.splitlines() if re.match(r"  stage \d+(–\d+)?: mesh", line)]
    assert 1 <= len(inner) <= 4
    assert text.count("Plan\n") == 1


def test_alternatives_are_listed(automatic: Plan) -> None:
    text = explain(automatic)
    assert {row["name"] for row in automatic.prediction.alternatives} == {"data", "tensor", "pipeline"}
    part = text.split("Alternatives\n")[1].split("\n\n")[0]
    for row in automatic.prediction.alternatives:
        line = next(line for line in part.splitlines() if f"{row['name']} parallel only" in line)
        expected = "–" if row["step_s"] is None else seconds_text(row["step_s"])
        assert expected in line


def test_a_printed_plan_is_explained(automatic: Plan) -> None:
    assert str(automatic) == explain(automatic)
    assert repr(automatic).startswith("Plan(model=")


def test_idle_devices_are_said(automatic: Plan) -> None:
    used = sum(len(stage.devices) for stage in automatic.stages)
    assert summary_json(automatic)["idle_devices"] == 8 - used
    assert (f"{8 - used} of 8 devices stay idle" in explain(automatic)) == (used < 8)


def test_figures_are_plain_json(mixed: Plan) -> None:
    figures = json.loads(json.dumps(summary_json(mixed)))
    wanted = (
        "step_s search_s capture_s passes bound_gap stages peak_memory_bytes microbatches schedule tflops_per_device"
    )
    assert set(f"{wanted} replicated_flops_fraction idle_devices".split()) <= set(figures)
    assert figures["microbatches"] == 8
    assert figures["search_s"] == mixed.provenance["passes"]["total"]
    assert figures["stages"][1]["devices"] == [4, 5, 6, 7]
    assert figures["stages"][0]["layers"] == list(mixed.layers[:6])
    assert figures["peak_memory_bytes"] == [stage.peak_bytes for stage in mixed.prediction.stages]
    flops_per_s = figures["tflops_per_device"] * 1e12 * 8
    assert flops_per_s * figures["step_s"] == pytest.approx(mixed.prediction.flops)


def test_devices_of_all_hosts_count(mixed: Plan) -> None:
    assert mixed.num_devices == 8
    two = replace(mixed, cluster=json.loads(Cluster.preset("p3.16xlarge", 2).to_json()))
    assert two.num_devices == 16
    assert summary_json(two)["idle_devices"] == 8


# ---- text


def test_numbers_read_well() -> None:
    assert [seconds_text(s) for s in (0.0, 2e-6, 0.00123, 12.3)] == ["0 s", "2 µs", "1.23 ms", "12.3 s"]
    assert [bytes_text(b) for b in (12, 3 * 2**20, 15.78 * 2**30, 800 * 2**20)] == [
        "12 B",
        "3 MiB",
        "15.8 GiB",
        "800 MiB",
    ]
    assert span_text((0, 1, 2, 5)) == "0–2, 5"
    assert (bar_text(0.5), bar_text(7), bar_text(0)) == ("███░░░", "██████", "░░░░░░")
    assert (count_text(1, "layer"), count_text(1200, "batch")) == ("1 layer", "1,200 batches")


def test_a_wide_column_is_wrapped() -> None:
    lines = table(["a", "why"], [["-", "one two three four five six"]], "<<", width=20, shrink=1)
    assert max(map(len, lines)) <= 20
    assert " ".join(line.strip(" -") for line in lines[2:]) == "one two three four five six"


def test_a_wide_table_is_stacked() -> None:
    head, row = ["stage", "aaaa", "bbbb", "cccc"], ["0", "1", "2", "3"]
    assert stack_tables(head, [row], "<>>>", width=30) == table(head, [row], "<>>>")
    lines = stack_tables(head, [row], "<>>>", width=20)
    assert max(map(len, lines)) <= 20
    tables = [[line.split() for line in part.splitlines()] for part in "\n".join(lines).split("\n\n")]
    assert [part[0] for part in tables] == [["stage", "aaaa", "bbbb"], ["stage", "cccc"]]
    assert [part[2] for part in tables] == [["0", "1", "2"], ["0", "3"]]


# ---- does it hold?


def test_a_fresh_plan_holds(mixed: Plan, graph: Graph) -> None:
    assert validate(mixed, graph, CLUSTER) == []
    require_valid(mixed, graph, CLUSTER)
    assert validate(Plan.from_json(json.loads(json.dumps(mixed.to_json()))), graph.with_batch(16), CLUSTER) == []


def test_another_model_is_refused_with_the_difference(mixed: Plan) -> None:
    model, args, kwargs = gpt(device="meta", layers=3)
    other = capture(model, args, kwargs)
    faults = validate(mixed, other)
    assert "only in the plan: 6 × aten.linear.default" in faults[0]
    assert any("which the model does not have" in fault for fault in faults)
    with pytest.raises(ValueError, match=r"this plan is for another model: .* 6 × aten\.linear\.default"):
        require_valid(mixed, other)
    wider = capture(*gpt(device="meta", layers=4, tied=False))
    with pytest.raises(ValueError, match="the same ops, but other shapes, constants or connections"):
        require_valid(replace(mixed, model_ops=mixed.model_ops), wider)


def test_another_cluster_is_refused_with_the_difference(mixed: Plan, graph: Graph) -> None:
    two = Cluster.preset("p3.16xlarge", 2)
    assert "the cluster differs: 8 devices against 16" in validate(mixed, graph, two)
    with pytest.raises(ValueError, match=r"this plan is for another cluster: .*8 devices against 16"):
        require_valid(mixed, graph, two)


def edited(plan: Plan, **changes: object) -> Plan:
    """The plan with fields of its first chunk changed."""
    first = plan.stages[0]
    chunk = replace(first.chunks[0], **changes)  # type: ignore[arg-type]
    return replace(plan, stages=(replace(first, chunks=(chunk,)), *plan.stages[1:]))


def test_edits_that_do_not_hold_are_named(mixed: Plan, graph: Graph) -> None:
    chunk = mixed.stages[0].chunks[0]
    (fault,) = validate(edited(mixed, ops={**chunk.ops, "linear": ("b0", "sideways")}), graph)
    assert "stage 0: linear (aten.linear.default) may be split by" in fault
    assert "'sideways'" in fault
    (fault,) = validate(edited(mixed, ops={k: v for k, v in chunk.ops.items() if k != "linear"}), graph)
    assert fault == "op linear of the model is in no stage"
    (fault,) = validate(edited(mixed, ops={**chunk.ops, "invented": ("b0", "o")}), graph)
    assert fault == "stage 0 names op invented, which the model does not have"
    name = "blocks.0.attention.query.weight"
    (fault,) = validate(edited(mixed, parameters={k: v for k, v in chunk.parameters.items() if k != name}), graph)
    assert fault == f"parameter {name} of the model is in no stage"
    with pytest.raises(ValueError, match=r"the plan does not hold: .*not divisible"):
        require_valid(replace(mixed, microbatches=7))


def test_what_the_runtime_cannot_execute_is_a_fault_only_where_it_must_run(mixed: Plan, graph: Graph) -> None:
    assert validate(mixed, graph, CLUSTER, runnable=True) == []
    name, home = next(iter(mixed.stages[0].chunks[0].parameters.items()))
    custom = replace(home, optimizer=(Placement("S", 0), *home.optimizer[1:]), reduce="step", gather="microbatch")
    plan = edited(mixed, parameters={**mixed.stages[0].chunks[0].parameters, name: custom})
    assert custom.pattern == "custom"
    assert (plan.check(), validate(plan, graph, CLUSTER)) == ([], [])
    (fault,) = validate(plan, graph, CLUSTER, runnable=True)
    assert [fault] == plan.not_executable(graph) == [f"parameters in a custom sharding (1: {name})"]
    with pytest.raises(ValueError, match=r"the runtime cannot execute this plan: parameters in a .*; plan again"):
        require_valid(plan, runnable=True)


def test_all_faults_are_listed_and_the_first_rule_is_raised(mixed: Plan, graph: Graph) -> None:
    broken = replace(edited(mixed, ops={}), microbatches=7)
    faults = validate(broken, graph, Cluster.preset("p3.16xlarge", 2), runnable=True)
    assert faults[0] == "global_batch 64 is not divisible by microbatches 7"
    assert any("of the model is in no stage" in fault for fault in faults)
    assert any(fault.startswith("the cluster differs") for fault in faults)
    with pytest.raises(ValueError, match=r"^the plan does not hold: global_batch 64 [^;]*; plan again, or correct "):
        require_valid(broken, graph)
