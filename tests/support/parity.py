"""Training on ranks against a plain loop on one device: loss and every parameter after five steps.

fp32 at rtol 1e-4. AdamW divides a gradient by its own size, so where the true gradient is zero it amplifies rounding to
steps of lr: eps is 1e-6 (above the rounding of these gradients), and tensors whose gradient is zero throughout are
named below and compared in absolute terms. In float64 no such exception is needed, and the same runs agree to 1e-9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from meshwright.compiler.frontend.padding import capture_padded

from tests.support.clusters import fast_links
from tests.support.special_models import SPECIAL
from tests.support.zoo import ZOO

STEPS, BATCH, LR = 5, 8, 1e-3
ZERO_GRADIENT = {
    "convnet": ("stem.bias", "bn.running_mean")
}  # the batch norm behind the bias subtracts it again, and remembers it


def make_optimizer(kind: str):
    if kind == "sgd":
        return lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)
    return lambda ps: torch.optim.AdamW(ps, lr=LR, eps=1e-6, fused=kind == "fused adamw")


def case(name: str, batch: int = BATCH, **options: Any):
    model, args, kwargs = (ZOO | SPECIAL)[name](batch, **options)
    return model.train(), args, kwargs


def trained_eagerly(
    model: torch.nn.Module, args: Any, kwargs: Any, make: Any, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the plain loop. make: parameters → optimizer."""
    optimizer, losses = make(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def chunks(value: Any, m: int, i: int) -> Any:
    return value.chunk(m)[i] if isinstance(value, torch.Tensor) else value


@cache
def single_device(name: str, kind: str, m: int, double: bool = False, **options: Any):
    """Losses and the state dict of a plain PyTorch loop that accumulates the same microbatches. To be read only: tests
    of one model in several shapes share it."""
    model, args, kwargs = case(name, **options)
    if double:
        model = model.double()
        args = tuple(a.double() if a.is_floating_point() else a for a in args)
    optimizer = make_optimizer(kind)(list(model.parameters()))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for i in range(m):
            out = model(*(chunks(a, m, i) for a in args), **{k: chunks(v, m, i) for k, v in kwargs.items()})
            loss = out if isinstance(out, torch.Tensor) else out.loss
            (loss / m).backward()
            total += loss.item() / m
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


_captures: dict[object, Any] = {}  # of this rank, which is kept


@contextmanager
def captured_once(key: object) -> Iterator[None]:
    """A scope in which the model of this key is captured once by each process: a capture takes longer than the
    steps."""

    def remembered(*arguments: Any, **options: Any) -> Any:
        if key not in _captures:
            _captures[key] = capture_padded(*arguments, **options)
        return _captures[key]

    with mock.patch("meshwright.parallel.capture_padded", remembered):
        yield


def run(
    name: str, kinds: tuple[str, ...], strategy: dict[str, int] | None, m: int | None, schedule: str,
    options: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """One rank of the parallel run, by each kind of optimizer from the same weights: losses, the full state dict (rank
    0), microbatches, counted and planned collectives, stages."""
    import meshwright as mw

    options = dict(options)
    double = options.pop("double", False)
    model, args, kwargs = case(name, **options)
    if double:
        model = model.double()
        args = tuple(a.double() if a.is_floating_point() else a for a in args)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    with captured_once((name, double, *sorted(options.items()))):
        parallel = mw.parallelize(
            model,
            fast_links(torch.distributed.get_world_size()),
            example_inputs=args,
            example_kwargs=kwargs,
            optimizer=make_optimizer(kinds[0]),
            strategy=strategy,
            microbatches=m,
            schedule=schedule,
        )
    session, plan, found = parallel.session, parallel.plan, []
    stage = plan.stage_of(torch.distributed.get_rank())
    for turn, kind in enumerate(kinds):
        if turn:  # capture and search take longer than the steps
            parallel.load_state_dict(start)
            session.optimizer = make_optimizer(kind)(
                [leaf for leaf in session.owned_parameters.values() if leaf.requires_grad]
            )
        before = Counter(session.counts)
        losses = [float(parallel.train_step(*args, **kwargs)) for _ in range(STEPS)]
        counts = {f"{at} {what}": n for (at, what), n in (session.counts - before).items() if at != "step"}
        planned = {} if stage is None else plan.prediction.stages[stage].collectives
        found.append(
            (
                losses, parallel.full_state_dict(), plan.microbatches, Counter(counts),
                Counter({what: n * plan.microbatches * STEPS for what, n in planned.items()}), plan.stages,
            )
        )  # fmt: skip
    return found


def compared(
    ranks: Any, size: int, name: str, strategy: dict[str, int] | None = None, m: int | None = None,
    kinds: tuple[str, ...] = ("sgd", "adamw"), schedule: str = "1f1b", **options: Any,
) -> Any:  # fmt: skip
    """Run by these kinds of optimizer and compare with one device; the stages."""
    results = ranks.run(size, run, name, kinds, strategy, m, schedule, options, timeout_s=120.0)
    for turn, kind in enumerate(kinds):
        compare([result[turn] for result in results], name, kind, options)
    return results[0][0][-1]


def compare(results: Any, name: str, kind: str, options: dict[str, Any]) -> None:
    _, state, m, *_ = results[0]
    double = options.get("double", False)
    rtol = 1e-9 if double else 1e-4
    expected, reference = single_device(name, kind, m, **options)
    for rank, (other, *_rest) in enumerate(results):
        torch.testing.assert_close(
            torch.tensor(other), torch.tensor(expected), rtol=rtol, atol=1e-6, msg=lambda t, r=rank: f"rank {r}: {t}"
        )
    assert set(state) == set(reference)
    for key, value in reference.items():
        zero = kind == "adamw" and not double and key in ZERO_GRADIENT.get(name, ())
        atol = 2 * LR * STEPS if zero else 1e-9 if double else 2e-5
        torch.testing.assert_close(state[key], value, rtol=rtol, atol=atol, msg=lambda t, k=key: f"{k}: {t}")
    for rank, (*_, counts, planned, _stages) in enumerate(results):
        assert counts == planned, f"rank {rank}: ran {dict(counts)}, planned {dict(planned)}"


TOLERANCE = {"bf16": 0.04, "fp16": 0.005}
