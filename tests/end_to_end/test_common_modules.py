"""Modules that people bring, on two ranks against plain PyTorch: flex attention, nn.Transformer, packed sequences,
compiled submodules, adapters on frozen weights, quantization-aware training; what is not kept is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.verification.capture_check import check_capture
from meshwright.compiler.verification.check_rules import check_node, missing_splits
from meshwright.compiler.verification.split_execution import example_node
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from tests.support.clusters import fast_links

BATCH, LENGTH, WIDTH, HEADS, STEPS = 8, 8, 32, 4, 3
aten = torch.ops.aten


class Attention(nn.Module):
    """Attention within documents that share a row, with a trained slope per head; the mean of squares is the loss.

    kind: "flex" or "plain", where the same is written by hand (flex attention has no backward on CPUs).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slope = nn.Parameter(torch.linspace(-0.5, 0.5, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        document = (x[..., 0] > 0.5).int().cumsum(1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attend = self._flex if self.kind == "flex" else self._plain
        return self.out(attend(q, k, v, document).transpose(1, 2).flatten(2)).square().mean()

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        allowed = and_masks(lambda b, h, i, j: document[b, i] == document[b, j], lambda b, h, i, j: i >= j)
        mask = create_block_mask(allowed, q.shape[0], None, LENGTH, LENGTH, device="cpu")
        y = flex_attention(q, k, v, lambda score, b, h, i, j: score + self.slope[h] * (j - i), mask)
        return flex_attention(q, k, y, block_mask=mask)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        i = torch.arange(LENGTH)
        allowed = (document[:, None, :, None] == document[:, None, None, :]) & (i[:, None] >= i)
        bias = self.slope[:, None, None] * (i - i[:, None])
        y = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~allowed, -torch.inf))
        return F.scaled_dot_product_attention(q, k, y, allowed)


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask, then an nn.Transformer on its output."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.both = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x, src_key_padding_mask=x[..., 0] > 1.5)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return (self.both(h, x, tgt_mask=mask, tgt_is_causal=True) - x.flip(1)).square().mean()


class Adapters(nn.Module):
    """Frozen layers with low-rank adapters, the middle one compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(3))
        self.compiled = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for base, down, up in zip(self.base, self.down, self.up):
            y = torch.tanh(base(y) + 2.0 * up(down(y)))
        return (self.compiled(y) - x).square().mean()


class Quantized(nn.Module):
    """Weights rounded per channel and activations per tensor, by fixed scales and by trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((2 * WIDTH,), 0.02))
        self.register_buffer("zero", torch.zeros(2 * WIDTH, dtype=torch.int32))
        self.scales, self.zeros = nn.Parameter(torch.full((WIDTH,), 0.02)), nn.Parameter(torch.zeros(WIDTH))
        self.step, self.middle = nn.Parameter(torch.tensor([0.05])), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        w = torch.fake_quantize_per_channel_affine(self.first.weight, self.scale, self.zero, 0, -8, 7)
        h = torch.fake_quantize_per_tensor_affine(F.relu(F.linear(x, w, self.first.bias)), 0.1, 0, 0, 15)
        scales = self.scales, self.zeros
        w = torch._fake_quantize_learnable_per_channel_affine(self.second.weight, *scales, 0, -8, 7, 0.1)
        y = F.linear(h, w, self.second.bias)
        y = torch._fake_quantize_learnable_per_tensor_affine(y, self.step, self.middle, -8, 7, 0.1)
        return (y - x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "flex": (lambda: Attention("flex"), lambda: Attention("plain")),
    "transformer": (Encoder, Encoder),
    "packed": (lambda: Attention("plain"), lambda: Attention("plain")),
    "adapters": (Adapters, Adapters),
    "quantized": (Quantized, Quantized),
}


def _case(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return make(), torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def _optimizer(leaves: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(leaves, lr=0.05, momentum=0.9)


def train(names: list[str], strategies: list[dict[str, int]]) -> list[Any]:
    """The losses, weights, elements with an optimizer state, and notes of each model under each strategy."""
    found = []
    for name in names:
        for strategy in strategies:
            model, x = _case(MODELS[name][0])
            parallel = mw.parallelize(
                model, fast_links(2), example_inputs=(x,), strategy=strategy, microbatches=2, optimizer=_optimizer,
            )  # fmt: skip
            losses = [float(parallel.train_step(x)) for _ in range(STEPS)]
            states = [s["momentum_buffer"].numel() for s in parallel.session.optimizer.state.values()]
            notes = parallel.plan.prediction.notes
            found.append((losses, parallel.full_state_dict(), sum(states), notes))
    return found


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch on one device, in the same two microbatches."""
    model, x = _case(MODELS[name][1])
    optimizer, losses = _optimizer([p for p in model.parameters() if p.requires_grad]), []
    with torch.compiler.set_stance("force_eager"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            each = [model(part) / 2 for part in x.chunk(2)]
            sum(each).backward()
            optimizer.step()
            losses.append(sum(loss.item() for loss in each))
    return losses, model.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_device(ranks: Any, name: str) -> None:
    losses, state = alone(name)
    strategies = [{"dp": 2}, {"tp": 2}, {"pp": 2}]
    results = ranks.run(2, train, [name], strategies)
    for rank, found in enumerate(results):
        for others, weights, _, notes in found:
            torch.testing.assert_close(others, losses, rtol=1e-4, atol=1e-6)
            if not rank:
                torch.testing.assert_close(dict(weights), dict(state), rtol=1e-4, atol=1e-5)
            assert not any("no rule" in note for note in notes)
    if name == "adapters":  # frozen weights have no optimizer state, and are not trained
        trained = sum(p.numel() for p in Adapters().parameters() if p.requires_grad)
        assert sum(found[2][2] for found in results) == trained  # under pp2
        start = _case(Adapters)[0].state_dict()
        assert all(torch.equal(results[0][0][1][key], start[key]) for key in start if key.startswith("base"))


@pytest.mark.parametrize(
    ("op", "operands", "grid"),
    [
        (aten.fake_quantize_per_tensor_affine.default, (0.02, 0), (-8, 7)),
        (aten.fake_quantize_per_tensor_affine.tensor_qparams, (torch.tensor(0.02), torch.tensor(0)), (-8, 7)),
        (aten._fake_quantize_learnable_per_tensor_affine.default, (torch.ones(1), torch.zeros(1)), (-8, 7, 0.5)),
        (aten.fake_quantize_per_channel_affine.default, (torch.ones(8), torch.zeros(8).int(), 1), (-8, 7)),
        (aten._fake_quantize_learnable_per_channel_affine.default, (torch.ones(8), torch.zeros(8), 1), (-8, 7, 0.5)),
        (aten.searchsorted.Tensor, (torch.randn(4, 6),), ()),
    ],
)
def test_rules_hold_and_miss_no_split(op: Any, operands: tuple[Any, ...], grid: tuple[Any, ...]) -> None:
    node = example_node(op, torch.randn(4, 8), *operands, *grid)
    assert check_node(node) == {}
    assert missing_splits(node) == []


def test_a_fast_path_of_evaluation_does_not_get_in_the_way() -> None:
    model, x = _case(Encoder)
    assert check_capture(model, capture(model, (x,)), (x,), {}, (), None) == ""
    assert any("scaled_dot_product" in str(node.target) for node in capture(model, (x,), training=False).ops())


class Flexible(nn.Module):
    """Flex attention with functions of the test's."""

    def __init__(self, score: Any = None, mask: Any = None, early: BlockMask | None = None) -> None:
        super().__init__()
        self.qkv, self.score, self.mask, self.early = nn.Linear(WIDTH, 3 * WIDTH), score, mask, early

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        blocks = self.early
        if self.mask is not None:
            blocks = create_block_mask(self.mask, None, None, LENGTH, LENGTH, device="cpu")
        return flex_attention(q, k, v, self.score, blocks).square().mean()


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def test_a_causal_mask_that_was_made_before_is_attention_with_a_mask() -> None:
    model = Flexible(early=create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu"))
    names = [str(node.target) for node in capture(model, (torch.zeros(4, LENGTH, WIDTH),)).ops()]
    assert names.count("aten.scaled_dot_product_attention.default") == 1
    assert not any("softmax" in name for name in names)


def test_what_flex_attention_cannot_keep_is_refused_by_name() -> None:
    x = torch.zeros(4, LENGTH, WIDTH)
    with pytest.raises(CaptureError, match=r"test_common_modules.py:\d+: .*elementwise here, but got cumsum"):
        capture(Flexible(score=lambda score, b, h, i, j: score.cumsum(0)), (x,))
    ids = torch.zeros(8, LENGTH)
    with pytest.raises(CaptureError, match="index a tensor of the whole at once"):
        capture(Flexible(mask=lambda b, h, i, j: ids[b][i] == ids[b][j]), (x,))
    only_first = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(*only_first, BLOCK_SIZE=(LENGTH, LENGTH // 2), seq_lengths=(LENGTH, LENGTH))
    with pytest.raises(CaptureError, match="may say more than its mask_mod"):
        capture(Flexible(early=blocks), (x,))


def test_packed_rows_are_refused_by_name() -> None:
    from torch.nn.attention.varlen import varlen_attn

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.reshape(-1, HEADS, WIDTH // HEADS) for t in self.qkv(x).chunk(3, -1))
            ends = torch.arange(x.shape[0] + 1, dtype=torch.int32) * LENGTH
            return varlen_attn(q, k, v, ends, ends, LENGTH, LENGTH).square().mean()

    with pytest.raises(CaptureError, match=r"test_common_modules.py:\d+: .*but got varlen_attn.*mask of documents"):
        capture(Packed(), (torch.zeros(4, LENGTH, WIDTH),))
