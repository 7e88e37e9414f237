"""Equal blocks are traced once: the graph is that of a full trace, and what is not equal is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshwright.compiler.errors import CaptureError, UnprovableError
from meshwright.compiler.frontend import capture as capture_module
from meshwright.compiler.frontend.block_state import canonical
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.opaque_modules import Choice
from meshwright.compiler.frontend.repeated_blocks import Blocks
from meshwright.compiler.ir.graph import Graph
from torch import Tensor, nn

from tests.support.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")


H = 8


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Blocks]:
    """The ``Blocks`` of every export, in order."""
    made: list[Blocks] = []

    class Noted(Blocks):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(capture_module, "Blocks", Noted)
    return made


def facts(graph: Graph) -> Any:
    ops = [(node.meta["line"], node.meta["module"]) for node in graph.ops()]
    return graph.text(), ops, [node.meta["source"] for node in graph.placeholders()]


def copies(exports: list[Blocks]) -> int:
    """How many blocks the last export copied."""
    return sum(number != record.number for number, (record, _) in exports[-1].calls.items())


def same(model: nn.Module, *args: Any, exports: list[Blocks], **kwargs: Any) -> int:
    """Assert that sharing blocks changes nothing; the number of blocks that were copied."""
    shared = capture(model, args, kwargs)
    num = copies(exports)
    assert facts(shared) == facts(capture(model, args, kwargs, share_blocks=False))
    return num


@pytest.mark.parametrize(
    ("name", "dropout"),
    [*((name, 0.25) for name in ZOO if name not in ("mlp", "convnet")), ("gpt", 0.0), ("bert", 0.0)],
)
def test_equals_a_full_trace(name: str, dropout: float, exports: list[Blocks]) -> None:
    model, args, kwargs = ZOO[name](2, dropout=dropout, device="meta", layers=3)
    num = same(model, *args, exports=exports, **kwargs)
    assert num == {"moe": 1, "t5": 3}.get(name, 2)


def test_equals_a_full_trace_in_eval(exports: list[Blocks]) -> None:
    model, args, kwargs = ZOO["llama"](2, device="meta", layers=3)
    shared = capture(model, args, kwargs, training=False)
    assert copies(exports) == 2
    assert facts(shared) == facts(capture(model, args, kwargs, training=False, share_blocks=False))


# ---- hand-made stacks


class Block(nn.Module):
    """Work that can be bent: ``body(block, x)``."""

    def __init__(self, index: int, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.index, self.body, self.scale = nn.Linear(H, H), index, body, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Stack(nn.Module):
    def __init__(self, body: Callable[..., Tensor], layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(H, H)
        self.blocks = nn.ModuleList(Block(i, body) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.mean()


X = torch.zeros(2, 4, H)
COUNT = 0
SEEN: list[Tensor] = []
HELD: dict[str, int] = {"scale": 2}


def plain(block: Any, x: Tensor) -> Tensor:
    return x + F.gelu(block.inner(x))


def reads_index(block: Any, x: Tensor) -> Tensor:
    return block.inner(x) * (1 + block.index)


def counts(block: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return block.inner(x) * COUNT


def appends(block: Any, x: Tensor) -> Tensor:
    SEEN.append(x)
    return block.inner(x) * len(SEEN)


def reads_global_table(block: Any, x: Tensor) -> Tensor:
    return block.inner(x) * HELD["scale"]


def changes_itself(block: Any, x: Tensor) -> Tensor:
    block.scale = block.scale + 1
    return block.inner(x) * block.scale


def makes_a_constant(block: Any, x: Tensor) -> Tensor:
    return block.inner(x) * torch.tensor([2.0] * H)


def in_place(block: Any, x: Tensor) -> Tensor:
    return x.add_(block.inner(x))


def gives_a_view(block: Any, x: Tensor) -> Tensor:
    return x.view(x.shape) if block.inner is None else x.transpose(1, 2).transpose(1, 2)


def local_in_place(block: Any, x: Tensor) -> Tensor:
    y = block.inner(x)
    y.mul_(2)
    return x + y


def without_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = block.inner(x)
    return x * gate


@pytest.mark.parametrize(
    ("body", "copied"),
    [
        (plain, 2), (local_in_place, 2), (without_gradient, 2), (reads_index, 0), (counts, 0), (appends, 0),
        (reads_global_table, 0), (changes_itself, 0), (makes_a_constant, 0), (in_place, 0), (gives_a_view, 0),
    ],
)  # fmt: skip
def test_bodies(body: Callable[..., Tensor], copied: int, exports: list[Blocks]) -> None:
    global COUNT
    graphs = []
    for share in (True, False):
        COUNT = 0
        SEEN.clear()
        graphs.append(facts(capture(Stack(body), (X,), share_blocks=share)))
        if share:
            assert copies(exports) == copied
    assert graphs[0] == graphs[1]


def test_a_counter_in_a_closure(exports: list[Blocks]) -> None:
    def body() -> Callable[..., Tensor]:
        count = 0

        def counted(block: Any, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return block.inner(x) * count

        return counted

    shared, full = (capture(Stack(body()), (X,), share_blocks=share) for share in (True, False))
    assert facts(shared) == facts(full)


@pytest.mark.parametrize("change", ["attribute", "frozen", "mode", "hook", "forward", "dtype", "tensor"])
def test_one_that_differs_is_traced(change: str, exports: list[Blocks]) -> None:
    model = Stack(plain, 4)
    odd: Any = model.blocks[2]
    if change == "attribute":
        odd.scale = 2.0
    elif change == "frozen":
        odd.requires_grad_(False)
    elif change == "mode":
        odd.eval()
    elif change == "hook":
        odd.inner.register_forward_hook(lambda module, args, out: out * 2)
    elif change == "forward":
        odd.forward = lambda x: x * 2
    elif change == "dtype":
        odd.double()
        odd.body = lambda block, x: block.inner(x.double()).float()
    else:
        odd.extra = torch.ones(H)
    assert same(model, X, exports=exports) == 2


def test_the_parent_changes_a_block_before_its_call(exports: list[Blocks]) -> None:
    class Parent(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                block.scale = float(i)
                x = block(x)
            return x.mean()

    assert same(Parent(lambda block, x: block.inner(x) * block.scale), X, exports=exports) == 0


def test_the_parent_reads_the_tensors_of_blocks(exports: list[Blocks]) -> None:
    class Parent(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + sum(p.square().sum() for p in self.parameters())

    assert same(Parent(plain), X, exports=exports) == 2
    assert len(exports) == 3, "with hidden tensors, without hiding, without sharing"


def test_arguments_and_structure(exports: list[Blocks]) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(H, H)

        def forward(self, x: Tensor, *, table: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            y = self.inner(x) * table["mask"]
            return y if table["flag"] else y.relu(), {"mask": table["mask"], "flag": table["flag"], "aux": y.sum()}

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            table: dict[str, Any] = {"mask": x > 0, "flag": True}
            for i, block in enumerate(self.blocks):
                x, out = block(x, table=table)
                table = {"mask": out["mask"], "flag": i < 2}
            return x.mean() + out["aux"]

    x = torch.zeros(2, H, requires_grad=True)
    assert same(Parent(), x, exports=exports) == 4


def test_tied_and_repeated_blocks(exports: list[Blocks]) -> None:
    model = Stack(plain, 4)
    model.blocks[3].inner.weight = model.blocks[1].inner.weight  # type: ignore[union-attr]
    model.blocks[2] = model.blocks[1]
    assert same(model, X, exports=exports) == 3


def test_running_statistics(exports: list[Blocks]) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(H, H), nn.BatchNorm1d(H)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    x = torch.zeros(4, H)
    loss: dict[str, Any] = {"loss_fn": lambda y: y.mean()}
    for make, copied in ((nn.Sequential, 2), (Twice, 0)):
        model = make(nn.Linear(H, H), Norm(), Norm(), Norm())
        shared = capture(model, (x,), **loss)
        assert copies(exports) == copied
        assert sum(result.kind == "buffer" for result in shared.results) == 9
        assert facts(shared) == facts(capture(model, (x,), share_blocks=False, **loss))


def test_errors_in_blocks_name_the_line_and_leave_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choice, "after", lambda self, error, final: final)  # no module is one op

    def fails(block: Any, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return block.inner(x)

    model = Stack(fails)
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(CaptureError, match=r"test_repeated_blocks.py:\d+: `if x.sum\(\) > 0:`"):
        capture(model, (X,))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert "forward" in vars(Block)
    assert Block.forward.__code__.co_filename == __file__
    assert "index" not in vars(Block)


def test_canonical_values() -> None:
    assert canonical([1, {"a": (2.0, torch.float16)}]) == canonical([1, {"a": (2.0, torch.float16)}])
    for a, b in ((1, 1.0), (True, 1), (0.0, -0.0), ((1,), [1]), ({"a": 1, "b": 2}, {"b": 2, "a": 1})):
        assert canonical(a) != canonical(b)
    for value in (torch.ones(1), nn.Linear(1, 1), object(), iter(())):
        with pytest.raises(UnprovableError):
            canonical(value)
