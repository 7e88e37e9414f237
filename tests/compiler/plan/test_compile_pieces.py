"""The pieces of a program that are compiled: where they end, and that none waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshwright.compiler.ir.program import Segment
from meshwright.compiler.plan.compiled_pieces import in_pieces, units

aten = torch.ops.aten


# ---- pieces


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ("", []),
        ("abc", [0, 1, 2]),
        ("eamamamh", [0, 1, 1, 2, 2, 3, 3, 4]),
        ("ebbbbh", [0, 1, 2, 3, 4, 5]),
        ("aabaab", [0, 0, 0, 1, 1, 1]),  # all of it, rather than its beginning
        ("ababa", [0, 0, 1, 1, 2]),
    ],
)
def test_layers_that_are_repeated_together_are_a_unit(classes: str, expected: list[int]) -> None:
    assert units(list(classes)) == expected


def program(*lines: tuple[str, Any, tuple[str, ...]], out: str) -> torch.fx.GraphModule:
    """Inputs x and w, then a line (name, function, operands) for each node."""
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "w")}
    for name, target, operands in lines:
        nodes[name] = graph.create_node("call_function", target, tuple(nodes[o] for o in operands), name=name)
    graph.output((nodes[out],))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def pieces_of(module: torch.fx.GraphModule, layers: str, apart: tuple[int, ...] = (), *segments: Segment) -> Any:
    """(the new program, its segments, names of the ops of every piece); layers: of the ops, in order."""
    calls = [node.name for node in module.graph.nodes if node.op == "call_function"]
    made: list[list[str]] = []

    def make(body: torch.fx.Graph) -> Any:
        made.append([str(node.target).split(".")[1] for node in body.nodes if node.op == "call_function"])
        run = torch.fx.GraphModule(torch.nn.Module(), body)
        return lambda *args: run(*args)

    layer_of = {name: int(layer) for name, layer in zip(calls, layers) if layer != "-"}
    new, found = in_pieces(module, segments, layer_of, apart, make)
    x, w = torch.rand(4, 4), torch.rand(4, 4)
    torch.testing.assert_close(new(x, w), module(x, w))
    return new, found, made


def message(x: torch.Tensor) -> torch.Tensor:
    """Not known to the compiler, as a collective."""
    return x * 2


UP, TANH, ADD, EXP = aten.matmul.default, aten.tanh.default, aten.add.Tensor, aten.exp.default


def test_a_piece_ends_at_a_message_and_at_a_layer() -> None:
    lines = [("a", UP, ("x", "w")), ("b", TANH, ("a",)), ("c", message, ("b",)), ("d", EXP, ("c",))]
    lines += [("e", ADD, ("d", "b")), ("f", UP, ("e", "w")), ("g", TANH, ("f",)), ("h", ADD, ("g", "e"))]
    module = program(*lines, out="h")
    assert pieces_of(module, "00000111")[2] == [["matmul", "tanh"], ["exp", "add"], ["matmul", "tanh", "add"]]
    assert pieces_of(module, "000--111")[2] == [["matmul", "tanh"], ["matmul", "tanh", "add"]]


def test_pieces_never_wait_for_each_other() -> None:
    """a → b of another layer, d of that layer → c: neither layer can be one piece beside the other."""
    lines = [("a", EXP, ("x",)), ("b", TANH, ("a",)), ("d", EXP, ("w",)), ("c", TANH, ("d",)), ("e", ADD, ("b", "c"))]
    for layers in ("01101", "01100", "00110", "01010"):
        pieces_of(program(*lines, out="e"), layers)


def test_what_is_made_of_weights_alone_runs_apart_from_what_reads_it_in_halves() -> None:
    lines = [("a", aten.t.default, ("w",)), ("b", EXP, ("a",)), ("c", UP, ("x", "b")), ("d", TANH, ("c",))]
    module = program(*lines, out="d")
    assert pieces_of(module, "0000")[2] == [["t", "exp", "matmul", "tanh"]]
    assert pieces_of(module, "0000", (1,))[2] == [["matmul", "tanh"]]


def test_a_piece_is_repeated_whole_or_kept_whole() -> None:
    lines = [("a", EXP, ("x",)), ("b", TANH, ("a",)), ("c", UP, ("b", "w")), ("d", UP, ("c", "w")), ("e", EXP, ("d",))]
    segment = Segment(frozenset("abcd"), frozenset("cd"))
    new, (found,), made = pieces_of(program(*lines, out="e"), "00000", (), segment)
    assert made == [["exp", "tanh"], ["matmul", "matmul"]]
    calls = {node.name for node in new.graph.nodes if node.name.startswith("piece")}
    assert calls | {"b", "d"} == found.nodes
    assert len(found.heavy) == 1
    assert found.heavy < calls
