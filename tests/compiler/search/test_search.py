"""The compiler's passes against each other: composition against the whole problem, plans against what they promise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from meshwright.compiler.cost.gradient_reduction import max_overlap
from meshwright.compiler.cost.pricing import MeshPricer
from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import cluster_layers
from meshwright.compiler.intra_op.restriction import Restriction
from meshwright.compiler.intra_op.solver.elimination import eliminate
from meshwright.compiler.intra_op.solver.ilp import solve_ilp
from meshwright.compiler.intra_op.solver.problem import evaluate
from meshwright.compiler.ir.graph import op_name
from meshwright.compiler.plan.lower import lower
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search import driver
from meshwright.compiler.search.parallel_shape import Strategy, parse_strategy
from meshwright.compiler.search.space import Space, submeshes
from meshwright.compiler.search.state import StageRow
from meshwright.compiler.search.tables import SearchTables, tables_of
from meshwright.costmodel.cluster import Cluster
from meshwright.models.architectures import GPT
from torch import nn

from tests.oracles.scalar_composer import Composer
from tests.support.planning import make_plan
from tests.support.zoo import ZOO

V100 = Cluster.preset("p3.16xlarge")


@pytest.fixture(scope="module")
def graphs():
    made = {}

    def get(name, batch=8, **options):
        key = (name, batch, *options.items())
        if key not in made:
            made[key] = capture(*ZOO[name](batch, device="meta", **options))
        return made[key]

    return get


@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "convnet", "mixtral", "bert", "vit"])
def test_layers_cover_every_op_once_and_little_crosses(graphs, name):
    graph = graphs(name)
    layering = cluster_layers(graph)
    listed = [op for layer in layering.layers for op in layer.ops] + list(layering.floating)
    assert sorted(listed) == sorted(node.name for node in graph.ops())
    assert len(layering.crossing) == len(layering.layers) + 1
    assert layering.crossing[0] == layering.crossing[-1] == ()
    assert all(1 <= len(names) <= 3 for names in layering.crossing[1:-1])


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_equal_blocks_share_a_class(graphs, name):
    layering = cluster_layers(graphs(name, layers=4))
    keys = [layer.class_key for layer in layering.layers]
    assert len(keys) >= 9
    assert len(set(keys)) <= 5


def test_deeper_models_have_no_more_classes(graphs):
    few, many = (cluster_layers(graphs("gpt", layers=n)) for n in (2, 6))
    assert {x.class_key for x in few.layers} == {x.class_key for x in many.layers}


@pytest.mark.parametrize(("name", "mesh"), [("gpt", (2,)), ("mlp", (2, 2)), ("convnet", (2,)), ("llama", (4,))])
def test_composition_equals_the_whole_problem_between_the_same_boundaries(graphs, name, mesh):
    """The min-plus product of layer tables is the optimum of all layers as one problem, their boundary tensors fixed
    alike."""
    graph = graphs(name).with_batch(8)
    layering = cluster_layers(graph)
    composer = Composer(graph, layering, MeshPricer(V100, 0, mesh), 4)
    count = len(layering.layers)
    first, end = max(0, count - 3), count - 1
    path = composer.path(first, end)
    product = sum(composer.table(first + k).cost[a, b] for k, (a, b) in enumerate(pairwise(path)))
    into, out = composer.states(first)[path[0]], composer.states(end)[path[-1]]
    whole = composer.section(first, end, [into], [out]).problem(0.0)
    best = eliminate(whole)
    assert float(best.cost) <= product * (
        1 + 1e-9
    )  # the whole problem may also leave a canonical state at inner boundaries
    labels, _ = composer.choices(first, end)
    pinned = Composer(graph, layering, composer.pricer, 4, Restriction(pinned=labels)).section(
        first, end, [into], [out]
    )
    assert float(eliminate(pinned.problem(0.0)).cost) <= product * (1 + 1e-9)
    assert float(eliminate(pinned.problem(0.0)).cost) >= float(best.cost) * (1 - 1e-9)


@pytest.mark.parametrize(("name", "mesh"), [("mlp", (2,)), ("mlp", (2, 2)), ("gpt", (2,))])
def test_layer_tables_equal_the_integer_program(graphs, name, mesh):
    graph = graphs(name).with_batch(8)
    layering = cluster_layers(graph)
    composer = Composer(graph, layering, MeshPricer(V100, 0, mesh), 1)
    rng = np.random.default_rng(0)
    for layer in range(len(layering.layers)):
        table = composer.table(layer)
        finite = np.argwhere(np.isfinite(table.cost))
        for a, b in finite[rng.permutation(len(finite))[:3]]:
            fixed = composer.section(layer, layer + 1, [composer.states(layer)[a]], [composer.states(layer + 1)[b]])
            solution = solve_ilp(fixed.problem(0.0))
            assert solution.seconds == pytest.approx(table.cost[a, b], rel=1e-6)


def test_a_frozen_weight_lies_as_a_trained_one_may():
    model, args, kwargs = ZOO["mlp"](8, device="meta")
    model.requires_grad_(False)
    next(reversed(list(model.parameters()))).requires_grad_(True)
    graph = capture(model, args, kwargs)
    layering = cluster_layers(graph)
    composer = Composer(graph, layering, MeshPricer(V100, 0, (2,)), 1)
    section = composer.section(0, len(layering.layers), [()], [()])
    homes = [home for kind, found in zip(section.kinds, section.choices) if kind == "parameter" for home in found]
    choices = [home.compute for home in homes]
    assert any(value.is_shard for pair in choices for value in pair.value)
    assert all(c.is_partial or c == v for pair in choices for v, c in zip(pair.value, pair.cotangent))


def test_interval_bytes_are_those_of_the_chosen_assignment(graphs):
    graph = graphs("gpt").with_batch(8)
    layering = cluster_layers(graph)
    composer = Composer(graph, layering, MeshPricer(V100, 0, (2,)), 1)
    costs = composer.intervals()
    table = composer.table(2)
    for a, b in ((0, 0), (1, 1)):
        if not np.isfinite(table.cost[a, b]):
            continue
        kept = [section_choice(table, kind, name, composer, a, b) for kind, name in table.kept]
        chosen = table.table.assignment(kept)
        resident = sum(float(r[i]) for r, i in zip(table.section.resident, chosen))
        assert table.resident[a, b] == pytest.approx(resident, rel=1e-3, abs=8)
        saved = evaluate(table.section.problem(1.0), chosen)[1] - resident
        assert table.saved[a, b] == pytest.approx(saved, rel=1e-3, abs=8)
    assert np.all(np.diff(costs.resident[0, 1:]) >= -1)


def section_choice(table, kind, name, composer, a, b):
    states = composer.states(2)[a] if kind == "entry" else composer.states(3)[b]
    return table.section.choices[table.section.index(kind)[name]].index(states[0])


def test_the_search_finds_column_and_row_pairs_by_itself(graphs):
    """Tensor parallel MLP and attention with one reduction each way per block: a consequence of the costs, not of a
    pattern."""
    plan = make_plan(graphs("gpt", layers=4), V100, 8, microbatches=1, strategy=Strategy(tp=4))
    labels = {name: labels[0] for name, labels in plan.stages[0].chunks[0].ops.items()}
    graph = graphs("gpt", layers=4)
    for node in graph.ops():
        if op_name(node) == "aten.scaled_dot_product_attention.default":
            assert labels[node.name] == "heads"
    up_down = [
        labels[n.name]
        for n in graph.ops()
        if op_name(n) == "aten.linear.default" and "feed_forward" in n.meta["module"]
    ]
    assert up_down == ["o", "i"] * 4
    counts = plan.prediction.stages[0].collectives
    blocks = 8  # four attentions and four feed-forwards
    sums = counts.get("forward all_reduce", 0) + counts.get("forward reduce_scatter", 0)
    assert blocks <= sums <= blocks + 4


@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "t5", "convnet", "mixtral", "gpt2", "bert", "vit"])
def test_automatic_plans_repeat_no_heavy_work(graphs, name):
    plan = make_plan(graphs(name), V100, 8)
    assert plan.prediction.replicated_flops <= 0.02 * plan.prediction.flops
    assert plan.check() == []
    assert plan.prediction.bound_s <= plan.prediction.step_s
    stages = len(plan.stages)
    small = graphs(name).with_batch(plan.microbatch_size)
    for stage in range(stages):
        program = lower(small, plan, stage)
        assert program.collectives == dict(plan.prediction.stages[stage].collectives)


@pytest.mark.parametrize("devices", [3, 6])
def test_odd_device_counts_are_ordinary(graphs, devices):
    plan = make_plan(graphs("gpt", layers=6), Cluster.local(devices), 12)
    used = [device for stage in plan.stages for device in stage.devices]
    assert len(set(used)) == len(used) <= devices


def test_a_plan_is_the_same_after_a_round_trip(graphs, tmp_path):
    plan = make_plan(graphs("t5"), V100, 8, microbatches=2, strategy=Strategy(pp=2, tp=2))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    small = graphs("t5").with_batch(4)
    for stage in range(2):
        assert lower(small, again, stage).module.code == lower(small, plan, stage).module.code


def test_planning_is_deterministic(graphs):
    first, second = (make_plan(graphs("gpt"), V100, 8) for _ in range(2))
    assert first.stages == second.stages


def test_skip_connections_cross_stages(graphs):
    between = ["stage boundary at decoder.block.0.layer.1.*", "stage boundary at decoder.block.1.layer.0.*"]
    plan = make_plan(graphs("t5"), V100, 8, microbatches=4, strategy=Strategy(pp=3), constraints=between)
    skipping = [t for t in plan.transfers if t.target - t.source > 1]
    assert skipping, "the encoder's output is used by every decoder stage"


def test_memory_is_a_constraint(graphs):
    """The same model on devices with less memory gets a plan that needs less, at a price, or an answer that says what
    is missing."""
    import dataclasses

    graph = graphs("gpt", layers=4)
    free = make_plan(graph, V100, 64, microbatches=1)
    peak = max(stage.peak_bytes - stage.memory_bytes["framework"] for stage in free.prediction.stages)

    def with_memory(usable: float) -> Cluster:
        framework = free.prediction.stages[0].memory_bytes["framework"]
        device = dataclasses.replace(V100.hosts[0].device, memory_bytes=int(usable + framework))
        return dataclasses.replace(V100, hosts=(dataclasses.replace(V100.hosts[0], device=device),))

    tight = make_plan(graph, with_memory(0.6 * peak), 64)
    assert tight.prediction.step_s >= free.prediction.step_s * 0.999 or tight.microbatches > 1
    assert all(s.peak_bytes - s.memory_bytes["framework"] <= 0.62 * peak for s in tight.prediction.stages)
    with pytest.raises(InfeasibleError, match=r"missing"):
        make_plan(graph, with_memory(2e4), 64)


def test_the_forced_shape_is_kept_and_wrong_ones_are_refused(graphs):
    plan = make_plan(graphs("gpt"), V100, 8, strategy=parse_strategy("pp2,dp2,tp2"), microbatches=2)
    assert [stage.mesh_shape for stage in plan.stages] == [(2, 2), (2, 2)]
    with pytest.raises(ValueError, match="needs 16 devices"):
        make_plan(graphs("gpt"), V100, 8, strategy=Strategy(dp=16))
    with pytest.raises(ValueError, match="pp, dp and tp"):
        parse_strategy("pp2,xx3")
    with pytest.raises(ValueError, match="stages, but the model"):
        make_plan(graphs("mlp"), V100, 8, strategy=Strategy(pp=8))
    with pytest.raises(ValueError, match="divide into the microbatches"):
        make_plan(graphs("gpt"), V100, 8, microbatches=3)


def test_messages_are_priced_where_a_submesh_has_neighbours():
    """Stages that begin a host hear from another host, wherever they lie; those in the middle of one do not."""
    cluster = Cluster.parse("p3.16xlarge:4")
    within, across = (MeshPricer(cluster, at, (4,), "AdamW").transfer_seconds(2**20, True) for at in (12, 8))
    assert across > 2 * within
    for sub in (sub for sub in submeshes(cluster, Space()) if sub.shape == (4,)):
        priced = MeshPricer(cluster, sub.site, (4,), "AdamW").transfer_seconds(2**20, True)
        assert priced == (across if sub.offsets[0] % 8 == 0 else within), sub


def test_a_shared_weight_lies_as_its_layers_agree_and_what_hides_is_seen():
    """Tables price it in each of its layers, in states that need not be one, and count reductions that hide: where both
    weigh most, with small work on many devices, the plan is as good as the uniform one that suits."""
    with torch.device("meta"):
        model, tokens = GPT(51200, 12, 1024, 8, 1024).half(), torch.zeros(1024, 1024, dtype=torch.int64)
    graph, cluster = capture(model, (tokens, tokens)), Cluster.parse("p3.16xlarge:64")
    best = make_plan(graph, cluster, 1024).prediction
    data = make_plan(graph, cluster, 1024, strategy=parse_strategy("dp512")).prediction
    assert best.bound_s <= best.step_s < 1.005 * data.step_s


def test_no_more_hides_in_a_built_stage_than_its_layers_can_reduce(monkeypatch):
    """Of candidates that may win by what hides, none is left out."""
    build, hidden = driver.build_plan, []

    def watched(search, candidate, *more, **words):
        plan = build(search, candidate, *more, **words)
        most_s = tables_of(search)._max_reductions(candidate.schedule, candidate.pipeline, candidate.rows)
        for stage, reduced_s in zip(plan.prediction.stages, most_s, strict=True):
            hidden.append(stage.seconds.get("overlapped", 0.0))
            assert hidden[-1] <= max_overlap(search.cluster) * reduced_s * (1 + 1e-9)
        return plan

    monkeypatch.setattr(driver, "build_plan", watched)
    with torch.device("meta"):  # of some buckets
        model, tokens = GPT(512, 12, 512, 8, 512), torch.zeros(64, 512, dtype=torch.int64)
    graph = capture(model, (tokens, tokens))
    for strategy in map(parse_strategy, ("dp8", "pp2,dp4")):
        make_plan(graph, V100, 64, strategy=strategy, space=Space.asked(zero=0))
    assert max(hidden) > 0


def test_one_stage_of_all_devices_is_not_overlooked():
    """The best pipelines with many microbatches have many stages, and no neighbour on the way to few is better."""
    with torch.device("meta"):
        model, tokens = GPT(51200, 24, 1024, 8, 1024).half(), torch.zeros(1024, 1024, dtype=torch.int64)
    graph, cluster = capture(model, (tokens, tokens)), Cluster.parse("p3.16xlarge:8")
    best = make_plan(graph, cluster, 1024).prediction
    data = make_plan(graph, cluster, 1024, strategy=parse_strategy("dp64")).prediction
    assert best.step_s <= data.step_s


def test_a_microbatch_too_small_for_all_devices(graphs):
    """No border of a purely data-parallel mesh has a state then."""
    plan = make_plan(graphs("gpt", 16), Cluster.parse("p3.16xlarge:2"), 16, microbatches=4, alternatives=True)
    assert plan.microbatches == 4
    (data,) = (row for row in plan.prediction.alternatives if row["name"] == "data")
    assert data["why"] == "no microbatch of global batch 16 in 4 parts falls into 16 equal parts"


def test_tensor_parallelism_of_hundreds_of_devices_is_no_alternative(graphs):
    plan = make_plan(graphs("gpt", 64), Cluster.parse("dgx-h100:32"), 1024, microbatches=4, alternatives=True)
    (tensor,) = (row for row in plan.prediction.alternatives if row["name"] == "tensor")
    assert tensor["step_s"] is None
    assert tensor["why"] == "not looked for: 256 devices would share every op"


def test_a_stage_is_asked_for_its_labels_once_for_all_weights_it_shares(monkeypatch):
    """A model that runs its blocks several times shares every weight of theirs among layers."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            for block in (*self.blocks, *self.blocks):
                x = block(x).relu()
            return x.square().mean()

    candidates, asked = [], []
    candidate, labels_of = SearchTables.candidate, StageRow.labels

    def counted(self, m, schedule, pipeline, *rest):
        before = len(asked)
        found = candidate(self, m, schedule, pipeline, *rest)
        candidates.append((len(asked) - before, len(pipeline.stages)))
        return found

    monkeypatch.setattr(SearchTables, "candidate", counted)
    monkeypatch.setattr(StageRow, "labels", lambda *given: asked.append(given) or labels_of(*given))
    with torch.device("meta"):
        graph = capture(Twice(), (torch.zeros(64, 64),))
    make_plan(graph, Cluster.parse("p3.16xlarge:1"), 64)
    assert any(labels for labels, _ in candidates)
    assert all(labels <= stages for labels, stages in candidates)


class _Biased(nn.Module):
    """Attention with a bias that follows from no weight and no input, but has a row per sample, as T5's across has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(samples, 1, length, length)
        bias = torch.where(seen, torch.zeros(1, 4, length, length, device=x.device), -1e9)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return x.square().mean()


def test_a_constant_that_grows_with_the_batch_is_cut():
    with torch.device("meta"):
        graph = capture(_Biased(), (torch.empty(32, 512, 64),))
    plan = make_plan(graph, V100, 32, strategy=Strategy(2, 4, 1), microbatches=2, schedule="1f1b")
    (where,) = (node.name for node in graph.ops() if op_name(node).startswith("aten.where"))
    assert [stage.chunks[0].ops[where] for stage in plan.stages] == [("d0",)] * 2
    clock_s, step_s = plan.provenance["clocks"][0]
    assert clock_s == pytest.approx(step_s, rel=0.02)
    assert where in cluster_layers(graph).growing
