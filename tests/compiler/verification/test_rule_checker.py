"""The rule checker is checked: right rules pass, wrong ones are found; devices in lock-step."""

import pytest
import torch
from meshwright.compiler.ir.reshard import reshard
from meshwright.compiler.ir.spec import PMAX, P, Pair, R, S, parse_pair
from meshwright.compiler.rules import _RULES, register
from meshwright.compiler.rules.base import FREE_GRAD, ROW, WHOLE, AxisChoice, Internal, shard
from meshwright.compiler.rules.einsum import EinsumRule
from meshwright.compiler.verification.check_rules import check_choice, main, missing_splits
from meshwright.compiler.verification.lockstep import LockstepGroup
from meshwright.compiler.verification.split_execution import assemble, distribute, example_node

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def f(*shape):
    return torch.randn(shape, generator=GENERATOR)


# ---- the checker is checked


def double(x):
    return 2 * x


def scale_sum(x):
    return (x * x).sum()


class Fixed(EinsumRule):
    """A rule that claims what it is told to."""

    def __init__(self, choice):
        self.choice = choice

    def axis_choices(self, node):
        whole = AxisChoice("whole", (WHOLE,) * len(self.choice.inputs), (WHOLE,), 1, splits_work=False)
        return (whole, self.choice)


def verdict(target, choice, *args):
    name = f"meshwright.{target.__name__}"
    register(name)(Fixed(choice))
    try:
        return check_choice(example_node(target, *args), ("x",), (2,))
    finally:
        del _RULES[name]


def test_right_rules_pass():
    assert verdict(double, AxisChoice("x", (shard(0),), (shard(0),), 4), f(4)) == []
    assert verdict(double, AxisChoice("x", (ROW,), (ROW,), 4), f(4)) == []
    assert verdict(double, AxisChoice("x", (FREE_GRAD,), (FREE_GRAD,), 4), f(4)) == []
    assert verdict(scale_sum, AxisChoice("x", (shard(0),), (ROW,), 4), f(4)) == []


@pytest.mark.parametrize(
    ("target", "inputs", "output", "complaint"),
    [
        (scale_sum, shard(0), (R, R), "output 0 as R: replicas differ"),
        (scale_sum, shard(0), (P, P), "gradient of operand 0 as S0 differs"),
        (scale_sum, ROW, ROW, "output 0 as P differs"),
        (double, (R, R), (R, P), "gradient of operand 0 as R: replicas differ"),
        (double, (R, P), (R, R), "gradient of operand 0 as P differs"),
        (double, shard(0), (R, R), "Mismatch in shape"),
        (double, (R, R), shard(0), "Mismatch in shape"),
        (double, (S(0), R), shard(0), "cut differently"),
    ],
)
def test_wrong_rules_are_found(target, inputs, output, complaint):
    problems = verdict(target, AxisChoice("x", (inputs,), (output,), 4), f(4))
    assert any(complaint in problem for problem in problems), problems


def test_a_bias_added_by_every_device_is_found():
    def biased(x, w, b):
        return x @ w.t() + b

    choice = AxisChoice("x", (shard(1), shard(1), WHOLE), (ROW,), 8)
    problems = verdict(biased, choice, f(4, 8), f(4, 8), f(4))
    assert any("output 0 as P differs" in problem for problem in problems)


def test_collectives_are_counted():
    from meshwright.compiler.ir.comm import current_context

    def summed(x):
        comm = current_context().comm
        rest = comm.all_reduce(x, 0) - x.detach() if comm.size(0) > 1 else 0
        return (x + rest).sum()

    good = Internal("forward", "all_reduce", ("input", 0))
    assert verdict(summed, AxisChoice("x", (ROW,), (WHOLE,), 4, internal=(good,)), f(4)) == []
    for claim in ((), (good, good), (Internal("backward", "all_reduce", ("input", 0)),)):
        problems = verdict(summed, AxisChoice("x", (ROW,), (WHOLE,), 4, internal=claim), f(4))
        assert any("runs collectives" in problem for problem in problems)


def test_missing_splits_are_found():
    choice = AxisChoice("x", (shard(0),), (shard(0),), 4)
    register("meshwright.double")(Fixed(choice))
    try:
        assert missing_splits(example_node(double, f(4, 8))) == ["S1 -> S1"]
    finally:
        del _RULES["meshwright.double"]


# ---- lockstep


@pytest.mark.parametrize("text", ["S0,S0", "S0,S1", "P,S1", "S1,P", "P,P", "R,P", "P,R", "R,R"])
def test_dealing_out_and_putting_together(text):
    spec = parse_pair(f"{text}|{text}").value
    x = f(4, 8).double()
    parts = distribute(x, spec, (2, 2), GENERATOR)
    assert torch.allclose(assemble(parts, spec, (2, 2), 1e-8), x)


def test_pmax_is_the_maximum_of_the_parts():
    x = f(4, 8).double()
    assert torch.equal(assemble(distribute(x, (PMAX,), (4,), GENERATOR), (PMAX,), (4,), 1e-8), x)


@pytest.mark.parametrize(
    ("source", "target"), [("S0,S0", "R,S0"), ("P,S1", "S0,S1"), ("S0,R", "S1,R"), ("P,P", "R,R"), ("R,S0", "S0,S0")]
)
def test_resharding_in_lockstep_keeps_the_tensor_and_its_gradient(source, target):
    x, g = f(4, 8).double(), f(4, 8).double()
    from_pair, to_pair = parse_pair(f"{source}|{source}"), parse_pair(f"{target}|{target}")
    # a value's addends meet whole gradients and the other way round
    from_pair = Pair(from_pair.value, tuple(R if p == P else p for p in from_pair.value))
    parts, grads = (
        distribute(x, from_pair.value, (2, 2), GENERATOR),
        distribute(g, to_pair.cotangent, (2, 2), GENERATOR),
    )

    def device(comm):
        leaf = parts[comm.rank].clone().requires_grad_()
        y = reshard(leaf, from_pair, to_pair)
        y.backward(grads[comm.rank])
        return y.detach(), leaf.grad

    results = LockstepGroup((2, 2)).run(device)
    assert torch.allclose(assemble([y for y, _ in results], to_pair.value, (2, 2), 1e-8), x)
    assert torch.allclose(assemble([d for _, d in results], from_pair.cotangent, (2, 2), 1e-8), g)


def test_lockstep_coordinates_are_row_major():
    coordinates = LockstepGroup((2, 3)).run(lambda comm: (comm.index(0), comm.index(1), comm.size(1)))
    assert coordinates == [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 3), (1, 1, 3), (1, 2, 3)]


def test_an_error_on_one_device_ends_all():
    def device(comm):
        if comm.rank == 1:
            raise ArithmeticError("broken here")
        return comm.all_reduce(torch.ones(2), 0)

    with pytest.raises(ArithmeticError, match="broken here"):
        LockstepGroup((3,)).run(device)


def test_different_collectives_are_an_error_and_not_a_hang():
    def device(comm):
        return comm.all_gather(torch.ones(2), 0, 0) if comm.rank else comm.all_reduce(torch.ones(2), 0)

    with pytest.raises(RuntimeError, match="same collective"):
        LockstepGroup((2,)).run(device)
    with pytest.raises(RuntimeError, match="same collective"):
        LockstepGroup((2,)).run(lambda comm: comm.all_reduce(torch.ones(2), 0) if comm.rank else None)


def test_the_command_reports(capsys):
    assert main([f"{__name__}:small_graphs", "--batch", "4"]) == 0
    shown = capsys.readouterr().out
    assert "aten.linear.default" in shown
    assert "wrong rules: 0" in shown
    with pytest.raises(SystemExit) as stopped:
        main(["no_such_module:x"])
    assert stopped.value.code == 2


def small_graphs():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return [lambda: (_Loss(model), (f(8, 4),), {})]


class _Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()
