"""One architecture on ranks against eager PyTorch, in processes of its own.

``measure`` builds the model and captures it once. Forks of that process then plan for eight devices, train on two Gloo
ranks under each strategy, and train the user's model on one device. So a crash or a hang ends a fork, and is a result.
Where fp32 differs, the same is done in float64, and that decides. A model that draws random numbers in forward draws
others in eager PyTorch: it is held against a plan of one device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import meshwright as mw
import meshwright.api
import meshwright.parallel
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from meshwright.compiler.frontend.example_inputs import batch_dims_of, flat_inputs
from meshwright.compiler.frontend.padding import Padding, capture_padded
from meshwright.runtime.transport.launch import join, leave
from torch import Tensor

from architectures.registry import Architecture, Case, build

__all__ = ["STRATEGIES", "TARGET", "Outcome", "dumped", "forked_measure", "measure", "parsed"]

RANKS, STEPS, RATE = 2, 3, 0.05
SEEDS = 5  # of which some show whether random numbers change the loss
STRATEGIES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "auto": None}
TARGET = "p3.16xlarge:1"
TIME_OUT_S = {"eager": 60, "capture": 180, "plan": 150, "double": 400, "all": 900} | dict.fromkeys(STRATEGIES, 100)
RTOL, RTOL_DOUBLE = 1e-4, 1e-6
PACKAGE = Path(mw.__file__).parent


@dataclass
class Outcome:
    """What became of one architecture, as plain data."""

    name: str
    #: of each step ("capture", "plan", "dp2", …): "equal", "ok", "wrong", "refused", "crash" or "hang"
    verdicts: dict[str, str] = field(default_factory=dict)
    #: of each strategy: the largest relative difference of the losses and of the entries of the state dict
    differences: dict[str, float] = field(default_factory=dict)
    #: of each step that failed: the error in one line
    errors: dict[str, str] = field(default_factory=dict)
    #: seconds of each step
    seconds: dict[str, float] = field(default_factory=dict)
    #: ops of which the plans say that they are whole on every device
    whole: list[str] = field(default_factory=list)
    #: parts that run as they are, with what the plans say of them
    opaque: list[str] = field(default_factory=list)
    #: whether its forward draws random numbers
    random: bool = False
    parameters: int = 0
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class _Run:
    """What rank 0 has after the steps."""

    losses: list[float]
    state: dict[str, Tensor]
    microbatches: int
    notes: tuple[str, ...]


def measure(architecture: Architecture, cluster: mw.Cluster, steps: Sequence[str], commit: str) -> Outcome:
    """All of it for one architecture. steps: of "plan" and the names of ``STRATEGIES``."""
    outcome = Outcome(architecture.name, commit=commit, date=time.strftime("%Y-%m-%d"))
    with tempfile.TemporaryDirectory(prefix="zoo") as folder:
        measurement = _Measurement(build(architecture), cluster, Path(folder), outcome)
        measurement.run(steps)
    return outcome


def forked_measure(architecture: Architecture, cluster: mw.Cluster, steps: Sequence[str], commit: str = "") -> Outcome:
    """``measure`` in a fork, of which nothing stays in this process."""
    with tempfile.TemporaryDirectory(prefix="zoo") as folder:
        found = _forked([lambda: measure(architecture, cluster, steps, commit)], Path(folder), TIME_OUT_S["all"])
    if found.verdict == "ok":
        return found.values[0]
    return Outcome(
        architecture.name, {"all": found.verdict}, errors={"all": found.error}, commit=commit,
        date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip


class _Measurement:
    """The steps of one model; ``double``: whether it is the repetition in float64."""

    def __init__(self, case: Case, cluster: mw.Cluster, folder: Path, outcome: Outcome, double: bool = False) -> None:
        self.case, self.cluster, self.folder, self.outcome, self.double = case, cluster, folder, outcome, double
        self.references: dict[int, _Run] = {}

    def run(self, steps: Sequence[str]) -> None:
        self.outcome.parameters = sum(x.numel() for x in self.case.model.parameters())
        draws = self._step("eager", [self._draws])
        if draws is None or not self._capture():
            return
        self.outcome.random = draws[0]
        for step in steps:
            if step == "plan":
                found = self._step(step, [self._plan])
                if found is not None:
                    self._note(found[0])
            else:
                self._strategy(step)

    # ---- steps

    def _draws(self) -> bool:
        """Train once eagerly; whether the loss follows from the seed."""
        losses = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            before, loss = torch.get_rng_state(), self.case.loss(self.case.args, self.case.kwargs, self.case.targets)
            losses.append(float(loss))
            if not seed:
                loss.backward()
            if torch.equal(torch.get_rng_state(), before):
                return False
        return len(set(losses)) > 1

    def _capture(self) -> bool:
        """Capture here: the forks that follow share the graph."""
        case = self.case

        def late(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, late)
        signal.alarm(TIME_OUT_S["capture"])
        started = time.perf_counter()
        try:
            graph, padding = capture_padded(
                case.model, case.args, dict(case.kwargs), case.targets, case.batch_dims, None, loss_fn=case.loss_fn
            )
        except TimeoutError:
            self._fail("capture", "hang", f"not through after {TIME_OUT_S['capture']} s")
            return False
        except Exception as error:
            self._fail("capture", *_described(error))
            return False
        finally:
            signal.alarm(0)
        self.outcome.seconds["capture"] = time.perf_counter() - started
        self.outcome.verdicts["capture"] = "ok"
        meshwright.api.capture = lambda *_, **__: graph
        meshwright.parallel.capture_padded = lambda *_, **__: (graph, padding or Padding())
        return True

    def _plan(self) -> tuple[str, ...]:
        case = self.case
        plan = mw.plan(
            case.model, TARGET, example_inputs=case.args, example_kwargs=case.kwargs, targets=case.targets,
            loss_fn=case.loss_fn, batch_dims=case.batch_dims, global_batch=case.global_batch, cache=False,
        )  # fmt: skip
        return tuple(plan.prediction.notes)

    def _strategy(self, name: str) -> None:
        found = self._step(name, [lambda rank=rank: self._train(name, rank) for rank in range(RANKS)])
        if found is None:
            return
        run: _Run = found[0]
        self._note(run.notes)
        if run.microbatches not in self.references:
            reference = _forked([lambda: self._reference(run.microbatches)], self.folder, TIME_OUT_S["eager"])
            if reference.verdict != "ok":
                self._fail(name, reference.verdict, f"the eager run: {reference.error}")
                return
            self.references[run.microbatches] = reference.values[0]
        difference, worst = _difference(run, self.references[run.microbatches])
        self.outcome.differences[name] = difference
        if difference <= (RTOL_DOUBLE if self.double else RTOL):
            self.outcome.verdicts[name] = "equal"
        elif self.double:
            self._fail(name, "wrong", f"{worst} differs by {difference:.1e} in float64")
        else:
            self._decide_in_double(name, f"{worst} differs by {difference:.1e}")

    def _decide_in_double(self, name: str, text: str) -> None:
        found = _forked([lambda: self._doubled(name)], self.folder, TIME_OUT_S["double"])
        if found.verdict != "ok":
            self._fail(name, found.verdict, f"{text}, and float64 does not decide: {found.error}")
            return
        again: Outcome = found.values[0]
        self.outcome.verdicts[name] = again.verdicts.get(name, "crash")
        if name in again.differences:
            self.outcome.differences[name] = again.differences[name]
        if self.outcome.verdicts[name] != "equal":
            error = again.errors.get(name) or "; ".join(again.errors.values())
            self._fail(name, again.verdicts.get(name, "crash"), f"{text}; {error}")

    def _doubled(self, name: str) -> Outcome:
        outcome = Outcome(self.outcome.name)
        folder = self.folder / f"double-{name}"
        folder.mkdir()
        _Measurement(_double(self.case), self.cluster, folder, outcome, double=True).run([name])
        return outcome

    def _train(self, name: str, rank: int) -> _Run:
        join(rank, RANKS, str(self.folder / f"store-{name}"))
        return self._trained(self.cluster, strategy=STRATEGIES[name])

    def _trained(self, cluster: mw.Cluster, **asked: Any) -> _Run:
        case = self.case
        parallel = mw.parallelize(
            case.model, cluster, example_inputs=case.args, example_kwargs=case.kwargs, targets=case.targets,
            loss_fn=case.loss_fn, batch_dims=case.batch_dims, global_batch=case.global_batch, optimizer=_optimizer,
            **asked,
        )  # fmt: skip
        losses = [float(parallel.train_step(*case.args, targets=case.targets, **case.kwargs)) for _ in range(STEPS)]
        state = parallel.full_state_dict()
        return _Run(losses, state, parallel.plan.microbatches, tuple(parallel.plan.prediction.notes))

    def _reference(self, microbatches: int) -> _Run:
        """The user's model on one device, whose gradients are accumulated over as many microbatches. If it draws random
        numbers, it is run by a plan."""
        if self.outcome.random:
            join(0, 1, str(self.folder / f"store-{microbatches}"))
            return self._trained(mw.Cluster.local(1), microbatches=microbatches)
        case, model = self.case, self.case.model
        optimizer, losses = _optimizer(list(model.parameters())), []
        parts = _microbatches(case, microbatches)
        for _ in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for part in parts:
                loss = case.loss(*part) / microbatches
                loss.backward()
                total += float(loss)
            optimizer.step()
            losses.append(total)
        return _Run(losses, {k: v.detach() for k, v in model.state_dict().items()}, microbatches, ())

    # ---- results

    def _step(self, name: str, functions: Sequence[Callable[[], Any]]) -> list[Any] | None:
        started = time.perf_counter()
        found = _forked(functions, self.folder, TIME_OUT_S[name])
        self.outcome.seconds[name] = time.perf_counter() - started
        if found.verdict != "ok":
            self._fail(name, found.verdict, found.error)
            return None
        self.outcome.verdicts[name] = "ok"
        return found.values

    def _fail(self, name: str, verdict: str, error: str) -> None:
        self.outcome.verdicts[name], self.outcome.errors[name] = verdict, error

    def _note(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note.startswith("no rule for"):
                for op in note.removeprefix("no rule for").partition(":")[0].split(","):
                    short = op.strip().split(" ")[0]
                    if short not in self.outcome.whole:
                        self.outcome.whole.append(short)
            elif "opaque" in note and note not in self.outcome.opaque:
                self.outcome.opaque.append(note)


def _optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def _microbatches(case: Case, count: int) -> list[tuple[Any, Any, Any]]:
    """(args, kwargs, targets) of every microbatch."""
    inputs = (case.args, dict(case.kwargs), case.targets)
    dims = batch_dims_of(flat_inputs(*inputs), case.batch_dims)
    leaves, tree = pytree.tree_flatten(inputs)

    def part(leaf: Any, dim: int | None, k: int) -> Any:
        return leaf if dim is None or count == 1 else leaf.chunk(count, dim)[k]

    return [
        pytree.tree_unflatten([part(leaf, dim, k) for leaf, dim in zip(leaves, dims.values(), strict=True)], tree)
        for k in range(count)
    ]


def _double(case: Case) -> Case:
    """The same in float64."""

    def wide(x: Any) -> Any:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            return x
        return x.to(torch.complex128 if x.is_complex() else torch.float64)

    for tensor in (*case.model.parameters(), *case.model.buffers()):
        tensor.data = wide(tensor.data)
    args, kwargs, targets = pytree.tree_map(wide, (case.args, dict(case.kwargs), case.targets))
    return replace(case, args=args, kwargs=kwargs, targets=targets)


def _difference(run: _Run, reference: _Run) -> tuple[float, str]:
    """The largest relative difference, and of what."""
    rows = [(abs(a - b) / (abs(b) + 1e-12), "the loss") for a, b in zip(run.losses, reference.losses, strict=True)]
    for name, expected in reference.state.items():
        if name not in run.state:
            return float("inf"), f"{name} is missing, and so it"
        value = run.state[name]
        if not (expected.is_floating_point() or expected.is_complex()):
            rows.append((0.0 if torch.equal(value, expected) else 1.0, name))
        elif expected.numel():
            apart = torch.where(value == expected, 0.0, (value - expected).abs())  # masks hold infinities
            scale = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else 0.0
            rows.append((float(apart.max() / (scale + 1e-6)), name))
    if strange := sorted(set(run.state) - set(reference.state)):
        return float("inf"), f"{strange[0]} is one entry too many, and so it"
    return max(rows, key=lambda row: row[0] if row[0] == row[0] else float("inf"))


# ---- forks


@dataclass(frozen=True)
class _Forked:
    """verdict: "ok", "refused", "crash" or "hang"."""

    verdict: str
    values: list[Any]
    error: str = ""


def _forked(functions: Sequence[Callable[[], Any]], folder: Path, time_out_s: float) -> _Forked:
    """Run each function in a fork; what they return."""
    paths = [folder / f"answer-{os.getpid()}-{time.monotonic_ns()}-{k}" for k in range(len(functions))]
    children = [_fork(function, path) for function, path in zip(functions, paths)]
    codes = _await(children, time_out_s)
    answers = [torch.load(path, weights_only=False) if path.exists() else None for path in paths]
    errors = [answer["error"] for answer in answers if answer and "error" in answer]
    if errors:
        # of several ranks that fail, the others often tell only that their peer is gone
        verdict, text = min(errors, key=lambda e: (e[0] == "crash", "PeerError" in e[1] or "Gloo" in e[1]))
        return _Forked(verdict, [], text)
    if None in codes:
        return _Forked("hang", [], f"not through after {time_out_s} s")
    if any(codes) or None in answers:
        return _Forked("crash", [], f"a process ended with {next(code for code in codes if code)}")
    return _Forked("ok", [answer["value"] for answer in answers if answer])


def _fork(function: Callable[[], Any], path: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        sink = os.open(os.devnull if "ZOO_DEBUG" not in os.environ else "/dev/stderr", os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            answer = {"value": function()}
        except BaseException as error:
            if "ZOO_DEBUG" in os.environ:
                traceback.print_exc()
            answer = {"error": _described(error)}
        part = path.with_suffix(".part")
        torch.save(answer, part)
        part.rename(path)
        code = 0
        if dist.is_initialized() and "error" not in answer:
            with suppress(BaseException):
                dist.barrier()
                leave()
    finally:
        os._exit(code)


def _await(children: Sequence[int], time_out_s: float) -> list[int | None]:
    """The exit codes; None of those that had to be killed."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + time_out_s
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for child in set(children) - set(codes):
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.02)
    return [codes[child] for child in children]


def _described(error: BaseException) -> tuple[str, str]:
    """Whether an error is a refusal, and its text in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE) and ".venv" not in frames[-1].filename
    refused = isinstance(error, ValueError) and (ours or type(error).__module__.startswith("meshwright"))
    text = " ".join(str(error).split())
    return ("refused", text) if refused else ("crash", f"{type(error).__name__}: {text}"[:600])


def dumped(outcome: Outcome) -> str:
    """One line of JSON."""
    return json.dumps(vars(outcome))


def parsed(line: str) -> Outcome:
    """The outcome of ``dumped``."""
    found: Mapping[str, Any] = json.loads(line)
    return Outcome(**found)
