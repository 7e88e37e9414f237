"""Padded sequences: models that are accepted do not notice whatever is in the tail, those that would are refused with
the op named, and sequences that devices do not divide train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.frontend.padding import Padding, capture_padded
from meshwright.compiler.plan.plan import Plan
from meshwright.models.architectures import GPT, Llama
from torch import Tensor, nn

from tests.support.clusters import fast_links
from tests.support.manual_plans import by_hand, megatron, sequence
from tests.support.zoo import ZOO

BATCH, LENGTH, WIDTH, VOCAB = 4, 13, 16, 24


def tokens(seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCAB, (BATCH, length), generator=generator)
    return x, torch.randint(VOCAB, (BATCH, length), generator=generator)


class Around(nn.Module):
    """Embeds, does ``middle`` to x [B, S, width], and takes the loss ``end`` of (logits, targets)."""

    def __init__(self, middle: Callable[..., Tensor], end: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.middle, self.end = middle, end or (lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(self.head(self.middle(self.table(x))), y)


def attend(x: Tensor, **options: Any) -> Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **options).transpose(1, 2).flatten(2)


def masked(mask: Callable[[int], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: attend(x, attn_mask=mask(x.shape[1]))


def shifted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def moved(logits: Tensor, y: Tensor) -> Tensor:
    """As Hugging Face shifts labels."""
    return F.cross_entropy(logits.flatten(0, 1), F.pad(y, (0, 1), value=-100)[:, 1:].flatten())


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(VOCAB, 2, 32, 2, 20, tied=True),
    "llama": lambda: Llama(VOCAB, 1, 32, 48, 4, 2),
    "causal": lambda: Around(lambda x: x + attend(x, is_causal=True)),
    "causal mask": lambda: Around(masked(causal)),
    "causal numbers": lambda: Around(masked(lambda n: torch.zeros(n, n).double().masked_fill(~causal(n), -torch.inf))),
    "shifted targets": lambda: Around(torch.tanh, shifted),
    "moved targets": lambda: Around(torch.tanh, moved),
    "sum of losses": lambda: Around(torch.tanh, lambda a, y: F.cross_entropy(a.mT, y, reduction="sum") / 50),
    "own index": lambda: Around(torch.tanh, lambda a, y: F.cross_entropy(a.mT, y, ignore_index=3)),
    "first position": lambda: Around(lambda x: x + x[:, :1] + x[:, 2].unsqueeze(1)),
    "shifted right": lambda: Around(lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "a longer table": lambda: Around(lambda x: x + torch.arange(40.0).unsqueeze(1)[: x.shape[1]]),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a mean over positions": (lambda: Around(lambda x: x - x.mean(1, keepdim=True)), "mean"),
    "sees later ones": (lambda: Around(attend), "attention"),
    "a mask the other way": (lambda: Around(masked(lambda n: causal(n).mT)), "attention"),
    "a window from the end": (lambda: Around(masked(lambda n: causal(n) & (torch.arange(n) > n - 9))), "attention|and"),
    "the last position": (lambda: Around(lambda x: x + x[:, -1:]), "slice"),
    "the last one": (lambda: Around(lambda x: x + x[:, -1].unsqueeze(1)), "select"),
    "turned round": (lambda: Around(lambda x: x + x.flip(1)), "flip"),
    "moved to the left": (lambda: Around(lambda x: x + F.pad(x, (0, 0, 0, 1))[:, 1:]), "pad"),
    "rolled": (lambda: Around(lambda x: x + x.roll(1, 1)), "roll"),
    "neighbours": (lambda: Around(lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT), "avg_pool"),
    "its length": (lambda: Around(lambda x: x * (1 / x.shape[1])), "mul"),
    "a tensor of its length": (lambda: Around(lambda x: x * torch.full((), 1.0 * x.shape[1])), "full"),
    "parts of its length": (lambda: Around(lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None]), "linspace|uns"),
    "a mean of squares": (lambda: Around(torch.tanh, lambda a, y: a.square().mean()), "mean"),
    "weights of losses": (
        lambda: Around(torch.tanh, lambda a, y: F.cross_entropy(a.mT, y, reduction="none").mean()), "mean"
    ),
    "targets as inputs": (
        lambda: Around(torch.tanh, lambda a, y: F.cross_entropy((a + F.one_hot(y, VOCAB)).mT, y)), "one_hot|eq|scatter"
    ),
    "two ways": (lambda: Around(lambda x: x.tanh() if x.shape[1] < 14 else x.sin().cos()), "shorter sequences"),
    "a row of rows": (lambda: Around(lambda x: x.flatten(0, 1).cumsum(0).view_as(x)), "view|cumsum"),
    "of fixed length": (lambda: GPT(VOCAB, 1, 32, 2, 14), "table of 14"),
}  # fmt: skip


def accepted(name: str) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return ACCEPTED[name]().double()


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(x, y)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_models_that_are_accepted_do_not_notice(name: str) -> None:
    model, (x, y) = accepted(name), tokens()
    _, padding = capture_padded(model, (x, y), {}, (), None, 8)
    ignored = 3 if name == "own index" else -100
    assert padding == Padding(LENGTH, 16, {"args.0": (1, None), "args.1": (1, ignored)}, {})
    filled = padding.fill({"args.0": x, "args.1": y})
    assert filled["args.0"][:, LENGTH:].equal(x[:, -1:].expand(-1, 3))
    assert filled["args.1"][:, LENGTH:].unique().tolist() == [ignored]
    expected = gradients(model, x, y)
    for seed in range(3):  # whatever is in the tail
        junk = torch.cat([x, tokens(seed, 3)[0]], 1) if seed else filled["args.0"]
        torch.testing.assert_close(gradients(model, junk, filled["args.1"]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_notice_are_refused(name: str) -> None:
    make, what = REFUSED[name]
    with pytest.raises(ValueError, match=f"pad_to_multiple_of.*({what})"):
        capture_padded(make(), tokens(), {}, (), None, 8)


def test_a_hugging_face_model_is_accepted_and_one_that_sees_all_is_not() -> None:
    model, args, kwargs = ZOO["llama"](BATCH)
    _, padding = capture_padded(model, args, kwargs, (), None, 5)
    assert padding.padded == 20
    model, args, kwargs = ZOO["bert"](BATCH)
    with pytest.raises(ValueError, match=r"modeling_bert\.py"):
        capture_padded(model, args, kwargs, (), None, 5)


def test_what_is_even_is_captured_as_it_is() -> None:
    for multiple in (None, 1, LENGTH):
        assert capture_padded(accepted("gpt"), tokens(), {}, (), None, multiple)[1] == Padding()
    flat = {"args.0": torch.zeros(3), "args.1": 7}
    assert Padding().fill(flat) == flat


def test_the_batch_may_come_second() -> None:
    model = Around(torch.tanh)
    x, y = (z.T for z in tokens())
    _, padding = capture_padded(model, (x, y), {}, (), {"args.0": 1, "args.1": 1}, 8)
    assert padding.inputs == {"args.0": (0, None), "args.1": (0, -100)}
    assert padding.fill({"args.0": x, "args.1": y})["args.1"].shape == (16, BATCH)


def test_bad_multiples_are_refused() -> None:
    for multiple in (0, -4, 2.0, True):
        with pytest.raises(ValueError, match="pad_to_multiple_of is a positive number"):
            mw.parallelize(accepted("gpt"), pad_to_multiple_of=multiple)  # type: ignore[arg-type]


# ---- on ranks


def planned(which: str, size: int) -> str:
    """A plan that cuts the padded sequence, as text."""
    model, given = accepted("gpt"), tokens()
    graph, padding = capture_padded(model, given, {}, (), None, size)
    inputs = tuple(padding.fill({"args.0": given[0], "args.1": given[1]}).values())
    plan = mw.plan(model, fast_links(1), example_inputs=inputs, microbatches=1, optimizer="SGD", executable=True)
    wish = megatron if which == "megatron" else sequence(which)
    return by_hand(graph, plan, (size,), wish).to_json()


def train(text: str | None, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Tensor, list[str]]:
    model = accepted("gpt")
    plan = Plan.from_json(text) if text else None
    parallel = mw.parallelize(
        model, fast_links(torch.distributed.get_world_size()), example_inputs=tokens(), plan=plan,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), **options,
    )  # fmt: skip
    losses = [float(parallel.train_step(*tokens(seed, length))) for seed, length in STEPS]
    logits = parallel.eval()(tokens(9)[0])
    return losses, parallel.full_state_dict(), logits, list(parallel.plan.prediction.notes)


STEPS = ((0, LENGTH), (1, LENGTH), (2, LENGTH), (0, LENGTH - 1))  # (seed, length): the last batch is shorter
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, multiple, what is asked for ("which": by hand)
    "ring": (4, 4, {"which": "ring"}),
    "ulysses": (2, 2, {"which": "heads"}),
    "megatron": (2, 2, {"which": "megatron"}),
    "stages": (2, 8, {"strategy": "pp2", "microbatches": 2}),
    "halves": (2, 8, {"strategy": "pp2", "microbatches": 2, "schedule": "zb-h1", "recompute": "full"}),
    "data": (2, 8, {"strategy": "dp2", "zero": 3, "recompute": "selective", "compile": "eager"}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_sequences_that_do_not_divide_train_as_one_device_does(ranks: Any, case: str) -> None:
    count, multiple, asked = CASES[case]
    which = asked.get("which")
    text = planned(which, multiple) if which else None
    options = {"pad_to_multiple_of": multiple} | ({} if which else asked)
    losses, state, logits, notes = ranks.run(count, train, text, options, timeout_s=180.0)[0]
    model = accepted("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for seed, length in STEPS:
        loss, _ = gradients(model, *tokens(seed, length))
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(tokens(9)[0]), rtol=1e-9, atol=1e-10)
    assert logits.shape == (BATCH, LENGTH, VOCAB)
    assert f"sequences of {LENGTH} are padded to {-(-LENGTH // multiple) * multiple}" in notes
