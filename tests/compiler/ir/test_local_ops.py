"""Local ops: dropout, cross entropy, batch norm, embedding and experts, whole and split."""

import math

import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.ir.comm import Context, use_context
from meshwright.compiler.ir.ops import local_ops
from meshwright.compiler.ir.ops.experts import EXPERTS_NAME, register_experts
from meshwright.compiler.memory.abstract_run import AbstractComm, Tracker
from meshwright.compiler.rules import rule_for
from meshwright.compiler.verification.lockstep import LockstepComm, LockstepGroup
from meshwright.compiler.verification.split_execution import example_node

aten = torch.ops.aten
CPU = torch.device("cpu")


def r(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def ints(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


@pytest.fixture(autouse=True)
def _context():
    with use_context(Context(LockstepComm(LockstepGroup((1,)), 0), seed=5)):
        yield


# ---- dropout


def draw(shape=(64, 64), p=0.25, op=3, seed=1, step=0, microbatch=0):
    with use_context(Context(LockstepComm(LockstepGroup((1,)), 0), seed, step, microbatch)):
        return local_ops.keep_mask(shape, p, op, (), CPU)


def test_dropout_hashes_by_splitmix64():
    # published first outputs of splitmix64 from state 0: element group g has the output of state key + g * golden
    assert local_ops._stream(0) == 0xE220A8397B1DCDAF
    key = local_ops._stream(1, 0, 0, 3)
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    expected = []
    for group in range(4):
        z = (key + group * golden) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        lanes = [(z >> (16 * lane)) & 0xFFFF for lane in range(4)]
        expected += [(lane ^ 0x8000) >= 0.25 * 65536 for lane in lanes]  # as signed
    assert draw((16,)).tolist() == expected


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_dropout_statistics(p):
    masks = torch.stack([draw((512, 512), p, step=step).double() for step in range(4)])
    unit = (masks - (1 - p)) / math.sqrt(p * (1 - p))
    n = 512 * 512
    flat = unit[0].flatten()
    scores = [unit[i].mean() for i in range(4)]  # each is normal with deviation 1 / sqrt(n) if elements are independent
    scores += [(flat[lag:] * flat[:-lag]).mean() for lag in (1, 2, 3, 4, 5, 8, 64, 512, 1024)]
    scores += [(unit[i] * unit[j]).mean() for i in range(4) for j in range(i)]
    scores += [unit[0][:, lane::4].mean() / 2 for lane in range(4)]
    assert max(abs(score) for score in scores) * math.sqrt(n) < 4.5
    for dim in (0, 1):
        assert unit[0].mean(dim).var() * 512 == pytest.approx(1, abs=0.3)


def test_dropout_is_a_function_of_its_counters():
    base = draw()
    assert torch.equal(base, draw())
    for change in ({"op": 4}, {"seed": 2}, {"step": 1}, {"microbatch": 1}):
        assert 0.5 < (draw(**change) == base).double().mean() < 0.75  # independent masks agree at p² + (1-p)² = 0.625
    assert not torch.equal(draw(step=1), draw(microbatch=1))


@pytest.mark.parametrize(
    ("mesh", "dims"),
    [((n,), (dim,)) for n in (2, 4) for dim in range(3)]
    + [((2, 2), dims) for dims in ((0, 0), (2, 2), (0, 2), (2, 1))],
)
def test_dropout_cut_draws_the_slice_of_the_whole(mesh, dims):
    x = r(4, 8, 12)
    whole = LockstepGroup((1,)).run(lambda comm: local_ops.dropout(x, 0.4, 9), seed=3, step=2)[0]
    cuts = tuple(enumerate(dims))

    def device(comm):
        mine, expected = x, whole
        for axis, dim in cuts:
            mine, expected = (t.chunk(comm.size(axis), dim)[comm.index(axis)] for t in (mine, expected))
        return torch.equal(local_ops.dropout(mine, 0.4, 9, cuts=cuts), expected)

    assert all(LockstepGroup(mesh).run(device, seed=3, step=2))


def test_dropout_scales_and_passes_gradients_where_it_keeps():
    x = r(32, 32).requires_grad_()
    y = local_ops.dropout(x, 0.2, 1)
    keep = local_ops.keep_mask((32, 32), 0.2, 1, (), CPU)
    assert torch.allclose(y, x * keep / 0.8)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(x, 2.0))
    assert torch.allclose(gradient, keep * 2.5)
    assert local_ops.dropout(x, 0.0, 1) is x
    assert not local_ops.dropout(x, 1.0, 1).any()
    assert local_ops.dropout(x.bfloat16(), 0.2, 1).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
        local_ops.dropout(x, 1.5, 1)


# ---- cross entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32)])
def test_cross_entropy_is_pytorchs(smoothing, shape):
    logits = (r(*shape) * 10).requires_grad_()
    target = ints(32, *shape[:-1]).clone()
    target.view(-1)[3] = -7
    loss, count = local_ops.cross_entropy(logits, target, -7, smoothing)
    flat = logits.reshape(-1, 32), target.reshape(-1)
    expected = F.cross_entropy(*flat, ignore_index=-7, label_smoothing=smoothing, reduction="sum")
    mean = F.cross_entropy(*flat, ignore_index=-7, label_smoothing=smoothing)
    assert count == 15
    assert not count.requires_grad
    assert torch.allclose(loss, expected)
    assert torch.allclose(loss / count, mean)
    (mine,), (theirs,) = (torch.autograd.grad(y * 3, logits) for y in (loss, expected))
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_cross_entropy_of_extreme_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, 1e4], [float("-inf"), 0.0, 0.0]], requires_grad=True)
    target = torch.tensor([2, 0, 1])
    loss, _ = local_ops.cross_entropy(logits, target, -100, 0.0)
    assert torch.allclose(loss, F.cross_entropy(logits, target, reduction="sum"))
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_cross_entropy_of_low_precision_is_computed_in_fp32():
    logits = r(16, 64).bfloat16().requires_grad_()
    target = ints(64, 16)
    loss, _ = local_ops.cross_entropy(logits, target, -100, 0.0)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, F.cross_entropy(logits.float(), target, reduction="sum"))
    assert torch.autograd.grad(loss, logits)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("axes", [(), (0,)])
def test_cross_entropy_holds_a_block_of_probabilities(axes, monkeypatch):
    monkeypatch.setattr(local_ops, "_GPU_LOGITS", 5000)
    logits = torch.empty(64, 1000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    target = torch.empty(64, dtype=torch.int64, device="meta")
    tracker = Tracker("cuda")
    tracker.ignore(logits, target)
    with use_context(Context(AbstractComm((2,), native=True))), tracker:
        loss, _ = local_ops.cross_entropy(logits, target, -100, 0.0, axes)
        assert tracker.peak_total < 1.5 * 4 * 5000
        loss.backward()
    assert logits.nbytes <= tracker.peak_total < 1.4 * logits.nbytes  # the gradient, and a block in fp32


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_in_blocks_is_that_of_all_rows(smoothing, monkeypatch):
    logits, target = r(16, 32).requires_grad_(), ints(32, 16)
    results = []
    for elements in (2**20, 5 * 32):  # the last block has one row
        monkeypatch.setattr(local_ops, "_CPU_LOGITS", elements)
        loss, _ = local_ops.cross_entropy(logits, target, 3, smoothing)
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_cross_entropy_over_a_cut_vocabulary(mesh, smoothing):
    logits, target = r(6, 16) * 5, ints(16, 6).clone()
    target[2] = 3
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target, ignore_index=3, label_smoothing=smoothing, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, leaf)
    blocks = logits.chunk(4 if mesh != (2,) else 2, 1)

    def device(comm):
        mine = blocks[comm.rank].clone().requires_grad_()
        loss, count = local_ops.cross_entropy(mine, target, 3, smoothing, vocab_axes=tuple(range(len(mesh))))
        return loss.detach(), count, torch.autograd.grad(loss, mine)[0]

    runs = LockstepGroup(mesh).run(device)
    for loss, count, _ in runs:
        assert torch.allclose(loss, expected)
        assert count == (target != 3).sum()
    assert torch.allclose(torch.cat([run[2] for run in runs], 1), gradient, atol=1e-6)


# ---- batch norm


def test_batch_norm_is_pytorchs():
    x, weight, bias = (t.requires_grad_() for t in (r(4, 6, 5, 5), r(6), r(6)))
    running = torch.zeros(6), torch.zeros(6)
    expected = F.batch_norm(x, *running, weight, bias, True, 1.0)
    y, mean, var = local_ops.batch_norm(x, weight, bias, 1e-5)
    assert torch.equal(y, expected)
    assert torch.equal(mean, running[0])
    assert torch.equal(var, running[1])
    assert not mean.requires_grad
    assert not var.requires_grad


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_over_cut_samples_is_that_of_the_whole_batch(affine):
    x = r(8, 6, 5) * 0.01 + 100  # a large mean, where naive sums of squares cancel
    weight, bias = (r(6), r(6) + 1) if affine else (None, None)
    cotangent = r(8, 6, 5)
    module = torch.nn.BatchNorm1d(6, affine=affine).double()
    if affine:
        module.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    leaf = x.double().requires_grad_()
    expected = module(leaf)
    parameters = [leaf, *module.parameters()]
    gradients = torch.autograd.grad(expected, parameters, cotangent.double())

    def device(comm):
        mine = [x.chunk(4)[comm.rank].clone()] + [p.clone() for p in (weight, bias) if p is not None]
        mine = [p.requires_grad_() for p in mine]
        y, mean, var = local_ops.batch_norm(mine[0], *(mine[1:] or (None, None)), 1e-5, batch_axes=(0, 1))
        return y.detach(), mean, var, torch.autograd.grad(y, mine, cotangent.chunk(4)[comm.rank])

    runs = LockstepGroup((2, 2)).run(device)
    assert torch.allclose(torch.cat([run[0] for run in runs]).double(), expected, atol=5e-3)
    for _, mean, var, _ in runs:
        assert torch.allclose(mean.double() * 0.1, module.running_mean, rtol=1e-6)
        assert torch.allclose(0.9 + var.double() * 0.1, module.running_var, rtol=1e-6)
        assert torch.allclose(var.double(), x.double().var((0, 2)), rtol=1e-4)
    assert torch.allclose(torch.cat([run[3][0] for run in runs]).double(), gradients[0], rtol=1e-3, atol=0.1)
    for k in range(1, len(parameters)):
        assert torch.allclose(sum(run[3][k] for run in runs).double(), gradients[k], atol=5e-3)


# ---- embedding and experts


def test_embedding_shard_refuses_counting_by_frequency():
    with pytest.raises(ValueError, match="cut the hidden dim"):
        local_ops.embedding_shard(r(8, 4), ints(8, 4), scale_grad_by_freq=True, vocab_axes=(0,))


def test_embedding_looks_up_its_rows_where_they_are_cut():
    node = example_node(aten.embedding.default, r(8, 4), ints(8, 4, 4), 2, False, False)
    assert rule_for(node).localize(node, ("b0",), (2,))[0] is aten.embedding.default
    target, args, kwargs = rule_for(node).localize(node, ("vocab", "b0"), (2, 2))
    assert target is local_ops.embedding_shard
    assert args[2:] == (2, False, False)
    assert kwargs == {"vocab_axes": (0,)}


def test_experts_are_mixtrals():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    module = mixtral.MixtralExperts(config)
    with torch.no_grad():
        module.gate_up_proj.copy_(r(4, 24, 8))
        module.down_proj.copy_(r(4, 8, 12))
    x, weight = r(16, 8).requires_grad_(), r(16, 2).abs().requires_grad_()
    index = torch.stack([torch.tensor([0, 3]), torch.tensor([3, 1])]).repeat(8, 1)  # expert 2 has no token
    index[5, 1] = 4  # outside: contributes nothing
    leaves = (x, weight, module.gate_up_proj, module.down_proj)
    expected = module(x, index.clamp(max=3), weight * (index < 4))  # not every version lets one stand for no expert
    got = local_ops.experts(x, index, weight, module.gate_up_proj, module.down_proj, "silu")
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
    cotangent = r(16, 8)
    for mine, theirs in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (got, expected))):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-3)


def test_experts_with_biases_and_a_gate_of_their_own_are_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    assert register_experts()
    config = gpt_oss.GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    module = gpt_oss.GptOssExperts(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(4 * r(*parameter.shape))  # some beyond the limit of its gate
    x, weight = r(16, 8).requires_grad_(), r(16, 2).abs().requires_grad_()
    index = ints(4, 16, 2)
    leaves, cotangent, found = (x, weight, *module.parameters()), r(16, 8), []
    for implementation in ("eager", EXPERTS_NAME):
        config._experts_implementation = implementation
        out = module(x, index, weight)
        found.append((out, *torch.autograd.grad(out, leaves, cotangent)))
    for mine, theirs in zip(*found):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-3)
    assert any("GptOssExperts" in name and "limit=7.0" in name for name in local_ops.GATES)


def test_experts_without_tokens_have_zero_gradients():
    leaves = [t.requires_grad_() for t in (r(4, 6), r(4, 2), r(3, 8, 6), r(3, 6, 4))]
    out = local_ops.experts(leaves[0], torch.full((4, 2), 3), *leaves[1:], "silu")
    assert not out.any()
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves)):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


def test_experts_refuse_an_unknown_activation():
    with pytest.raises(ValueError, match=r"one of silu, .* but got 'softplus'"):
        local_ops.experts(r(4, 6), ints(3, 4, 2), r(4, 2), r(3, 8, 6), r(3, 6, 4), "softplus")
