"""Capture: every model of the zoo, with and without weights; values against eager; the batch symbol."""

from __future__ import annotations

import copy
import re
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.ir import comm
from meshwright.compiler.ir.graph import CAPTURE_BATCH, Graph, op_name
from meshwright.compiler.ir.ops.experts import experts
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

from tests.support.untraceable import Checked
from tests.support.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")


class OneDevice:
    """A mesh without axes."""

    def size(self, axis: int) -> int:
        raise AssertionError(f"there is no axis {axis}")

    index = all_reduce = all_gather = reduce_scatter = all_to_all = size


def flat_inputs(args: tuple, kwargs: dict, targets: tuple = ()) -> list[Any]:
    return pytree.tree_leaves((args, kwargs, targets))


def interpret(
    graph: Graph, model: nn.Module, args: tuple, kwargs: dict, targets: tuple = ()
) -> dict[tuple[str, str], Tensor]:
    """Run the graph with the model's tensors; {(kind, name): value}. Views as ``reshape``: copies were dropped."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    inputs = iter(leaf for leaf in flat_inputs(args, kwargs, targets) if isinstance(leaf, Tensor))
    env: dict[torch.fx.Node, Any] = {}
    with comm.use_context(comm.Context(OneDevice())):
        for node in graph:
            if node.op == "placeholder":
                source = node.meta["source"]
                if source.kind == "input":
                    env[node] = next(inputs)
                elif source.kind == "constant":
                    env[node] = graph.constants[source.name]
                else:
                    env[node] = tensors[source.name]
                continue
            target = torch.ops.aten.reshape.default if op_name(node) == "aten.view.default" else node.target
            operands, options = torch.fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = target(*operands, **options)
            values = env[node] if isinstance(env[node], tuple | list) else (env[node],)
            types = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
            for value, kind in zip(values, types, strict=True):
                assert (tuple(value.shape), value.dtype) == (kind.shape, kind.dtype), node.format_node()
    return {(result.kind, result.name): env[graph.node(result.node)] for result in graph.results}


def eager_loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


@pytest.fixture(scope="module")
def graphs() -> dict[tuple[str, float], Graph]:
    """Captured from the meta device, without weights, at batch 6."""
    found = {}
    for name, make in ZOO.items():
        for dropout in (0.0, 0.25):
            model, args, kwargs = make(6, dropout=dropout, device="meta")
            found[name, dropout] = capture(model, args, kwargs)
    return found


# ---- every model of the zoo


@pytest.mark.parametrize("name", ZOO)
def test_loss_and_gradients_equal_eager(name: str, graphs: dict) -> None:
    model, args, kwargs = ZOO[name](4)
    graph = graphs[name, 0.0].with_batch(4)
    graph.check()
    oracle = copy.deepcopy(model)
    loss = eager_loss(oracle(*args, **kwargs))
    loss.backward()
    results = interpret(graph, model, args, kwargs)
    torch.testing.assert_close(results["loss", "loss"], loss, rtol=1e-5, atol=1e-6)
    results["loss", "loss"].backward()
    for (path, ours), (_, theirs) in zip(model.named_parameters(), oracle.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), path
        if theirs.grad is not None:
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}"
            )
    updated = {path: value for (kind, path), value in results.items() if kind == "buffer"}
    changed = {path for path, old in model.named_buffers() if not torch.equal(old, oracle.get_buffer(path))}
    assert changed == set(updated)
    for path, value in updated.items():
        torch.testing.assert_close(value, oracle.get_buffer(path), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ZOO)
def test_other_batch_equals_a_fresh_capture(name: str, graphs: dict) -> None:
    for dropout, batch in ((0.0, 4), (0.25, 24)):
        model, args, kwargs = ZOO[name](6, dropout=dropout, device="meta")
        fresh = capture(model, args, kwargs, extent=batch)
        assert graphs[name, dropout].with_batch(batch).text() == fresh.text()


def test_the_last_few_batch_extents_are_kept(graphs: dict) -> None:
    graph = next(iter(graphs.values()))
    first, text = graph.with_batch(4), graph.with_batch(4).text()
    assert graph.with_batch(6).with_batch(4) is first
    for batch in (6, 10, 12, 14, 16):
        graph.with_batch(batch)
    again = graph.with_batch(4)
    assert again is not first
    assert again.text() == text


@pytest.mark.parametrize("name", ZOO)
def test_dropout_is_ours_and_numbered(name: str, graphs: dict) -> None:
    drops = [node for node in graphs[name, 0.25].ops() if op_name(node) == "meshwright.dropout"]
    assert drops
    assert [node.args[2] for node in drops] == list(range(len(drops)))
    assert {node.args[1] for node in drops} == {0.25}
    assert not any("dropout" in op_name(node) for node in graphs[name, 0.0].ops())
    attention = [node for node in graphs[name, 0.25].ops() if "scaled_dot_product" in op_name(node)]
    assert not any(len(node.args) > 4 and node.args[4] for node in attention)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5"])
def test_attention_dropout_is_attention(name: str, graphs: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dropouts of the graph made idle, the spelled-out attention equals the model without dropout."""
    model, args, kwargs = ZOO[name](4)
    graph = graphs[name, 0.25].with_batch(4)
    for node in graph.ops():
        if op_name(node) == "meshwright.dropout":
            node.args = (node.args[0], 0.0, node.args[2])
    got = interpret(graph, model, args, kwargs)["loss", "loss"]
    torch.testing.assert_close(got, eager_loss(model(*args, **kwargs)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ZOO)
def test_every_op_has_a_line_and_the_model_is_as_before(name: str) -> None:
    model, args, kwargs = ZOO[name](4)
    model.requires_grad_(True)
    parameters = {path: (p, p.detach().clone()) for path, p in model.named_parameters(remove_duplicate=False)}
    buffers = {path: (b, b.clone()) for path, b in model.named_buffers(remove_duplicate=False)}
    settings = str(getattr(model, "config", None)), [m.training for m in model.modules()]
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    graph = capture(model, args, kwargs)
    assert all(node.meta["line"] for node in graph.ops())
    modules = {path for path, _ in model.named_modules()}
    assert all(node.meta["module"] in modules for node in graph.ops())
    for table, before in ((model.named_parameters, parameters), (model.named_buffers, buffers)):
        after = dict(table(remove_duplicate=False))
        assert after.keys() == before.keys()
        assert all(after[path] is tensor and torch.equal(tensor, value) for path, (tensor, value) in before.items())
    assert settings == (str(getattr(model, "config", None)), [m.training for m in model.modules()])
    assert implementation == getattr(getattr(model, "config", None), "_experts_implementation", None)


@pytest.mark.parametrize("name", ["gpt", "convnet", "bert", "t5", "mixtral", "llama"])
def test_eval_outputs_equal_eager(name: str) -> None:
    model, args, kwargs = ZOO[name](4, dropout=0.25)
    graph = capture(model, args, kwargs, training=False).with_batch(4)
    assert model.training
    assert not any("dropout" in op_name(node) for node in graph.ops())
    model.eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    eager = model(*args, **kwargs)
    results = interpret(graph, model, args, kwargs)
    flat = [results["output", str(i)] for i in range(len(results))]
    rebuilt = pytree.tree_unflatten(flat, graph.output_spec)
    assert type(rebuilt) is type(eager)
    torch.testing.assert_close(flat, pytree.tree_leaves(eager), rtol=1e-4, atol=1e-5)


# ---- sources


def test_tied_weights_are_one_placeholder(graphs: dict) -> None:
    sources = [node.meta["source"] for node in graphs["gpt", 0.0].placeholders("parameter")]
    tied = [source for source in sources if source.aliases]
    assert [(s.name, s.aliases) for s in tied] == [("token_embedding.weight", ("head.weight",))]
    assert "head.weight" not in {source.name for source in sources}
    (node,) = [n for n in graphs["gpt", 0.0].placeholders() if n.meta["source"] == tied[0]]
    assert {op_name(user) for user in node.users} == {"aten.embedding.default", "aten.linear.default"}
    untied, args, kwargs = ZOO["gpt"](2, tied=False)
    assert not any(n.meta["source"].aliases for n in capture(untied, args, kwargs).placeholders())


def test_input_names_dims_and_types() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, pair: dict, *, scale: Tensor, flag: bool) -> Tensor:
            return (x * pair["w"] * scale).mean() if flag else x.sum()

    x, table = torch.randn(5, 3), torch.randn(5, 3)
    args, kwargs = (x, {"w": table}), {"scale": torch.randn(()), "flag": True}
    graph = capture(Model(), args, kwargs, batch_dims={"args.1.w": None}, extent=5)
    dims = {n.meta["source"].name: n.meta["source"].batch_dim for n in graph.placeholders("input")}
    assert dims == {"args.0": 0, "args.1.w": None, "kwargs.scale": None}
    torch.testing.assert_close(interpret(graph, Model(), args, kwargs)["loss", "loss"], Model()(*args, **kwargs))
    with pytest.raises(ValueError, match=r"args\.9"):
        capture(Model(), args, kwargs, batch_dims={"args.9": 0})
    with pytest.raises(ValueError, match="one entry per input"):
        capture(Model(), args, kwargs, batch_dims=[0])


def test_batch_in_another_dim() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1).reshape(x.shape[1], -1).sum(1).mean()

    graph = capture(Model(), (torch.randn(3, 7, 2),), batch_dims=[1])
    (node,) = graph.placeholders("input")
    assert node.meta["type"].shape == (3, CAPTURE_BATCH, 2)
    x = torch.randn(3, 4, 2)
    torch.testing.assert_close(interpret(graph.with_batch(4), Model(), (x,), {})["loss", "loss"], Model()(x))


def test_unused_parameters_buffers_and_constants() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.randn(3))
            self.unused = nn.Parameter(torch.randn(2))
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("kept", torch.randn(3))
            self.register_buffer("transient", torch.randn(3), persistent=False)
            self.plain = torch.tensor([3.0, 2.0, 1.0])

        def forward(self, x: Tensor) -> Tensor:
            here = torch.tensor([1.0, 2.0, 4.0])
            return (x * self.used * self.frozen + self.kept * self.transient + self.plain * here).mean()

    model, x = Model(), torch.randn(4, 3)
    graph = capture(model, (x,))
    sources = {node.meta["source"].name: node.meta["source"] for node in graph.placeholders()}
    assert [s for s in sources if sources[s].kind == "parameter"] == ["used", "unused", "frozen"]
    assert [sources[s].requires_grad for s in ("used", "unused", "frozen")] == [True, True, False]
    assert (sources["kept"].persistent, sources["transient"].persistent) == (True, False)
    assert sorted(map(torch.Tensor.tolist, graph.constants.values())) == [[1.0, 2.0, 4.0], [3.0, 2.0, 1.0]]
    torch.testing.assert_close(interpret(graph.with_batch(4), model, (x,), {})["loss", "loss"], model(x))


def test_loss_function_and_targets() -> None:
    model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    graph = capture(model, (x,), example_targets=(y,), loss_fn=F.l1_loss)
    assert [n.meta["source"].name for n in graph.placeholders("input")] == ["args.0", "targets.0"]
    assert [n.meta["source"].name for n in graph.placeholders("parameter")] == ["weight", "bias"]
    got = interpret(graph.with_batch(4), model, (x,), {}, (y,))["loss", "loss"]
    torch.testing.assert_close(got, F.l1_loss(model(x), y))
    with pytest.raises(ValueError, match="no loss_fn"):
        capture(model, (x,), example_targets=(y,))
    with pytest.raises(ValueError, match=r"0-d floating-point loss, but got .*\[8072, 2\]"):
        capture(model, (x,))


def test_stop_gradients_survive() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                fixed = self.a(x) * 2
            return (self.b(fixed) + self.a(x).detach() * self.b(x)).mean()

    model, x = Model(), torch.randn(4, 3)
    graph = capture(model, (x,)).with_batch(4)
    interpret(graph, model, (x,), {})["loss", "loss"].backward()
    assert model.a.weight.grad is None
    got = model.b.weight.grad.clone()
    model.zero_grad()
    model(x).backward()
    torch.testing.assert_close(got, model.b.weight.grad)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (6, 5)),
        ({"reduction": "sum"}, (6, 5)),
        ({"label_smoothing": 0.2, "ignore_index": 1}, (6, 5)),
        ({}, (6, 5, 3)),
        ({"ignore_index": 0, "label_smoothing": 0.1}, (6, 5, 2, 3)),
        ({"weight": torch.rand(5)}, (6, 5)),
    ],
)
def test_cross_entropy(options: dict, shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, requires_grad=True)
    target = torch.randint(0, 5, (shape[0], *shape[2:]))
    target[1] = options.get("ignore_index", -100)
    loss_fn = lambda out, y: F.cross_entropy(out, y, **options)  # noqa: E731
    graph = capture(nn.Identity(), (logits,), example_targets=(target,), loss_fn=loss_fn)
    ours = any(op_name(node) == "meshwright.cross_entropy" for node in graph.ops())
    assert ours == ("weight" not in options)
    got = interpret(graph.with_batch(6), nn.Identity(), (logits,), {}, (target,))["loss", "loss"]
    expected = loss_fn(logits, target)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("merged", [True, False])
def test_cross_entropy_needs_no_wide_logits(dtype: torch.dtype, merged: bool) -> None:
    logits, target = torch.randn(6, 3, 5, dtype=dtype, requires_grad=True), torch.randint(0, 5, (6, 3))

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide = out.float() if merged else out.flatten(0, 1).float()
        return F.cross_entropy(wide.view(-1, 5), y.view(-1))

    graph = capture(nn.Identity(), (logits,), example_targets=(target,), loss_fn=loss_fn)
    assert "aten._to_copy.default" not in map(op_name, graph.ops())
    got = interpret(graph.with_batch(6), nn.Identity(), (logits,), {}, (target,))["loss", "loss"]
    expected = loss_fn(logits, target)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits))


def test_half_precision_loss_stays_in_fp32() -> None:
    model, args, kwargs = ZOO["gpt"](4)
    graph = capture(model.half(), args, kwargs)
    assert graph.node(graph.results[0].node).meta["type"].dtype == torch.float32


def test_frozen_batch_norm_stays_frozen() -> None:
    model, args, kwargs = ZOO["convnet"](4)
    model.bn.eval()
    graph = capture(model, args, kwargs)
    updated = {result.name for result in graph.results if result.kind == "buffer"}
    assert "blocks.0.bn1.running_mean" in updated
    assert not any(name.startswith("bn.") for name in updated)
    assert not model.bn.training
    assert model.blocks[0].bn1.training


def test_experts_are_one_op_and_differentiate(graphs: dict) -> None:
    names = {op_name(node) for node in graphs["mixtral", 0.0].ops()}
    assert "meshwright.experts" in names
    assert not any(word in name for name in names for word in ("sort", "histc", "grouped", "nonzero", "index_add"))
    for gated in (True, False):
        rows = 12 if gated else 6
        x, weight = torch.randn(5, 4, dtype=torch.double), torch.rand(5, 2, dtype=torch.double)
        gate_up, down = torch.randn(3, rows, 4, dtype=torch.double), torch.randn(3, 4, 6, dtype=torch.double)
        index = torch.tensor([[0, 1], [2, 0], [1, 2], [1, 0], [0, 2]])
        leaves = [t.requires_grad_() for t in (x, weight, gate_up, down)]
        run = lambda x, w, u, d, index=index, gated=gated: experts(x, index, w, u, d, "gelu", gated)  # noqa: E731
        assert torch.autograd.gradcheck(run, leaves)


def test_a_wrong_shape_of_an_lstms_last_states_is_put_right_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recurrent(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.rnn, self.last = nn.LSTM(3, 4, 2, batch_first=True), last

        def forward(self, x: Tensor) -> Tensor:
            result, (hidden, _) = self.rnn(x)
            return (hidden[-1] if self.last else result).mean()

    right = torch._decomp.decompositions.one_layer_lstm

    def as_before_2_13(*args: Any, **kwargs: Any) -> Any:
        result, states = right(*args, **kwargs)
        return result, tuple(state.unsqueeze(0) for state in states)

    x = torch.randn(4, 5, 3)
    expected = capture(Recurrent(False), (x,)).text()
    monkeypatch.setattr(torch._decomp.decompositions, "one_layer_lstm", as_before_2_13)
    assert capture(Recurrent(False), (x,)).text() == expected
    with pytest.raises(CaptureError, match=r"last states of an LSTM with a wrong shape; use torch 2"):
        capture(Recurrent(True), (x,))


def test_idle_random_ops_pass() -> None:
    class Recurrent(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, 2, batch_first=True, dropout=dropout)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0].mean()

    model, x = Recurrent(0.0), torch.randn(4, 5, 3)
    graph = capture(model, (x,)).with_batch(4)
    torch.testing.assert_close(interpret(graph, model, (x,), {})["loss", "loss"], model(x))
    with pytest.raises(CaptureError, match=r"random numbers are .* but got aten\.lstm"):
        capture(Recurrent(0.5), (x,))


def test_distributions_are_captured_without_their_checks_of_values() -> None:
    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            mean, scale = self.net(x).chunk(2, -1)
            return -torch.distributions.Normal(mean, F.softplus(scale)).log_prob(x).mean()

    model, x = Density(), torch.randn(4, 3)
    graph = capture(model, (x,)).with_batch(4)
    torch.testing.assert_close(interpret(graph, model, (x,), {})["loss", "loss"], model(x))
    with pytest.raises(ValueError, match="constraint"):  # outside of a capture they are as before
        torch.distributions.Normal(x, -x.abs())


def test_a_module_that_converts_itself_to_its_own_dtype() -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.net = self.net.to(x.dtype)
            return self.net(x).square().mean()

    model, x = Converts(), torch.randn(4, 3)
    to = nn.Module.to
    graph = capture(model, (x,)).with_batch(4)
    torch.testing.assert_close(interpret(graph, model, (x,), {})["loss", "loss"], model(x))
    with pytest.raises(CaptureError, match=re.escape("self.net.to(x.dtype)")):
        capture(model, (x.double(),))
    assert nn.Module.to is to


def test_a_branch_may_read_numbers_that_forward_knows() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            times = torch.tensor([0.0, 0.5, 1.0])
            if times[0] > times[1]:
                times = times.flip(0)
            for step in (times[1:] - times[:-1]).tolist():
                x = x + step * self.linear(x)
            return x.square().mean()

    model, x = Steps(), torch.randn(8, 4)
    graph = capture(model, (x,))
    assert check_capture(model, graph, (x,), {}, (), None) == ""


def test_checks_that_only_raise_are_left_out_and_noted() -> None:
    inputs = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    model, before = Checked(more=False), Tensor.__bool__
    graph = capture(model, inputs)
    torch.testing.assert_close(interpret(graph.with_batch(4), model, inputs, {})["loss", "loss"], model(*inputs))
    first = Checked.forward.__code__.co_firstlineno
    (note,) = graph.notes
    assert re.findall(r"untraceable.py:(\d+)", note) == [str(first + 1), str(first + 3)]
    plan = mw.plan(model, "local:1", example_inputs=inputs, cache=False)
    assert note in plan.prediction.notes
    assert Tensor.__bool__ is before
    with pytest.raises(
        CaptureError, match=r"`if self.more and x.mean\(\) > 0:`: cannot be captured: the code branches"
    ):
        capture(Checked(more=True), inputs)


def test_counts_of_integers_that_cpus_do_not_have() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (torch.histc(x, bins=4, min=0, max=4) * w).sum()

    x, w, histc = torch.tensor([[0, 1, 4], [3, 3, 5]]), torch.randn(4), torch.histc
    graph = capture(Counts(), (x, w), batch_dims={"args.1": None}).with_batch(2)
    found = interpret(graph, Counts(), (x, w), {})["loss", "loss"]
    torch.testing.assert_close(found, (torch.histc(x.float(), bins=4, min=0, max=4) * w).sum())
    assert torch.histc is histc


def test_a_prime_that_the_batch_must_divide() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0] // 2, 2, -1).mean()

    graph = capture(Halves(), (torch.randn(4, 3),))
    assert graph.with_batch(6).by_name()["view"].meta["type"].shape == (3, 2, 3)
    with pytest.raises(ValueError, match="use a multiple"):
        graph.with_batch(5)


def test_fingerprint_ignores_weights_and_batch() -> None:
    one, args, kwargs = ZOO["gpt"](4)
    two, args2, kwargs2 = ZOO["gpt"](8, device="meta")
    graphs = capture(one, args, kwargs), capture(two, args2, kwargs2)
    assert graphs[0].fingerprint() == graphs[1].with_batch(16).fingerprint()
    other, args3, kwargs3 = ZOO["gpt"](4, layers=1)
    assert capture(other, args3, kwargs3).fingerprint() != graphs[0].fingerprint()
