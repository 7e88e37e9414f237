"""The command line: ``meshwright demo | plan | show | why | check | verify | simulate | diff | export | …``.

Answers go to stdout, everything else (progress, notes, errors) to stderr. An error is one line. Exit status: 0 done,
1 a fault of meshwright itself (``MESHWRIGHT_DEBUG=1`` shows where), 2 bad input, 3 no plan fits, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from . import inputs
from .compare import add_check, add_comparisons
from .picture import add_picture_options, asks_for_pictures, write_pictures
from .runs import add_report
from .terminal import answers_only, progress_bar, width

__all__ = ["main"]

INFEASIBLE, INTERRUPTED = 3, 130
MAX_WORKERS = 2  # processes that plan, where there are so many cores


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); the exit status."""
    try:
        arguments = _parser().parse_args(argv)
        with warnings.catch_warnings():
            if not sys.warnoptions:  # warnings are for programmers; python -W default shows them
                warnings.simplefilter("ignore")
            return int(arguments.run(arguments) or 0)
    except SystemExit as done:  # argparse: --help and --version with 0, usage errors with 2
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        return inputs.fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("MESHWRIGHT_DEBUG"):
            raise
        from ..compiler.errors import InfeasibleError

        if isinstance(error, InfeasibleError):
            return inputs.fail(str(error), INFEASIBLE)
        if isinstance(error, ValueError | OSError):
            return inputs.fail(str(error), inputs.BAD_INPUT)
        return inputs.fail(f"{type(error).__name__}: {error} (MESHWRIGHT_DEBUG=1 shows where)", 1)
    finally:
        if argv is not None:  # else the process ends here
            gc.enable()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(inputs.BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = _Parser(prog="meshwright", description="Find, read and check plans to train PyTorch models in parallel.")
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    target_help = "package.module:callable that returns (model, args) or (model, args, kwargs), or a built-in name"
    cluster_help = "preset:hosts (p3.16xlarge:8, 8x4090:2@world, dgx-h100+dgx-h200), local:ranks, or a cluster file"

    demo = commands.add_parser("demo", help="train a small GPT on local ranks by a plan found on the spot")
    demo.add_argument("--ranks", type=inputs.positive, default=4, metavar="N", help="local ranks (default 4)")
    demo.add_argument("--steps", type=inputs.positive, default=None, metavar="N", help="training steps")
    demo.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to FILE")
    demo.set_defaults(run=_demo)

    plan = commands.add_parser("plan", help="find the best plan for a model on a cluster")
    plan.add_argument("target", metavar="TARGET", help=target_help)
    plan.add_argument("--cluster", required=True, metavar="CLUSTER", help=cluster_help)
    plan.add_argument(
        "--global-batch", type=inputs.positive, metavar="N", help="samples per step (default: the target's)"
    )
    plan.add_argument("--microbatches", type=inputs.positive, metavar="M", help="fix the number of microbatches")
    plan.add_argument("--strategy", metavar="SHAPE", help="fix the parallel shape: pp2,dp2,tp2, or '3:dp2 + 5:tp2'")
    _add_space(plan)
    plan.add_argument(
        "--optimizer",
        metavar="NAME",
        help="torch.optim class, which sizes the optimizer's state; AdamW+fused is made with fused=True, AdamW+masters "
        "keeps fp32 masters of 16-bit weights (default AdamW; with masters for built-in models of 16 bits)",
    )
    plan.add_argument("--like", type=Path, metavar="PLAN", help="keep the decisions of this plan file")
    plan.add_argument(
        "--keep", metavar="PARTS", help="of --like: 'stages 0-3', 'layers blocks.*', strategy, splits, … (default: all)"
    )
    plan.add_argument(
        "--time-limit", type=inputs.seconds, metavar="S", help="stop after S seconds and take the best plan so far"
    )
    plan.add_argument(
        "--no-cache", dest="cache", action="store_false", help="search again, even if the answer is cached"
    )
    several = plan.add_mutually_exclusive_group()
    several.add_argument(
        "--top-k",
        type=inputs.positive,
        metavar="K",
        help="the K best plans that differ in stages, meshes or microbatches",
    )
    several.add_argument("--pareto", action="store_true", help="the Pareto front of step time and peak memory")
    plan.add_argument(
        "--pick",
        type=int,
        metavar="N",
        help="the row of --top-k or --pareto that -o and --html write (default 0, the fastest)",
    )
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan to FILE")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the picture of the plan to FILE")
    plan.add_argument("--json", action="store_true", help="print one JSON object with the figures, or a list of them")
    plan.set_defaults(run=_plan)

    show = commands.add_parser("show", help="explain a plan file")
    show.add_argument("plan", type=Path, metavar="PLAN")
    show.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    add_picture_options(show, target_help)
    show.set_defaults(run=_show)

    why = commands.add_parser("why", help="list what other choices for a layer, module, op or weight would cost")
    why.add_argument("plan", type=Path, metavar="PLAN")
    why.add_argument(
        "name", metavar="NAME", help="a name that `show` prints: blocks.0.feed_forward, head.weight, linear_4"
    )
    why.add_argument("--target", metavar="TARGET", help=f"{target_help} (default: the built-in one that was planned)")
    why.set_defaults(run=_why)

    add_check(commands, target_help, cluster_help)

    verify = commands.add_parser(
        "verify", help="check numerically, without the cluster, that a plan computes what one device does"
    )
    verify.add_argument("plan", type=Path, metavar="PLAN")
    verify.add_argument("--model", required=True, metavar="TARGET", help=target_help)
    verify.add_argument("--dtype", default="float64", metavar="D", help="float64 or float32 (default float64)")
    verify.set_defaults(run=_verify)

    profile = commands.add_parser("profile", help="measure this machine, or every rank of a torchrun job")
    profile.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the cluster to FILE")
    profile.add_argument(
        "--ranks", type=inputs.positive, metavar="N", help="local ranks (default: one per core or device)"
    )
    profile.add_argument(
        "--budget", type=inputs.seconds, default=60.0, metavar="S", help="seconds to spend (default 60)"
    )
    profile.add_argument(
        "--quick", action="store_true", help="a few seconds: the profile that parallelize takes by itself"
    )
    profile.add_argument("--model", metavar="TARGET", help=f"also measure the ops of this model's plans: {target_help}")
    profile.add_argument(
        "--global-batch",
        type=inputs.positive,
        metavar="N",
        help="samples per step of the model (default: the target's)",
    )
    profile.add_argument(
        "--optimizer", metavar="NAME", help="torch.optim class of the model's plans (default: as plan has it)"
    )
    profile.add_argument(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="start again instead of resuming an interrupted profile",
    )
    profile.add_argument(
        "--timeout",
        type=inputs.seconds,
        default=60.0,
        metavar="S",
        help="seconds that a rank may be silent (default 60)",
    )
    profile.set_defaults(run=_profile)

    add_comparisons(commands, target_help, cluster_help)
    add_report(commands)

    models = commands.add_parser("models", help="list the built-in targets")
    models.set_defaults(run=_models)
    return parser


def _add_space(plan: argparse.ArgumentParser) -> None:
    """Add the options that open or close parts of the search space."""
    plan.add_argument(
        "--schedule",
        default="auto",
        metavar="NAME",
        help="auto, gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v or pipedream (default auto)",
    )
    plan.add_argument(
        "--recompute",
        default="auto",
        metavar="MODE",
        help="auto, none, full (run each layer's forward again for its backward) or selective (its light ops only)",
    )
    plan.add_argument(
        "--zero", default="auto", metavar="LEVEL", help="auto, or the level of parameter sharding, 0 to 3"
    )
    plan.add_argument(
        "--no-sequence", dest="sequence", action="store_false", help="do not shard sequence or spatial dimensions"
    )
    plan.add_argument(
        "--regular", default="prefer", metavar="HOW", help="plans of equal device groups: prefer (default), only or any"
    )
    plan.add_argument("--executable", action="store_true", help="only plans that the runtime can execute")
    plan.add_argument(
        "--communication",
        metavar="HOW",
        type=_communication,
        help="gradient communication: exact (default), auto (any exact algorithm), auto-lossy (compressed), or names: "
        "ring,bf16; codecs of other tensors: activations=int8,weights=int8",
    )
    plan.add_argument(
        "--precision", default="model", metavar="P", help="model (its dtypes), bf16, fp16 or auto (default model)"
    )
    plan.add_argument(
        "--constraint",
        action="append",
        metavar="TEXT",
        help="such as 'stage boundary at blocks.4' or 'no tensor parallel' (docs/search.md); repeatable",
    )


def _communication(text: str) -> str | dict[str, str]:
    """Names with commas between them; codes of other tensors become a mapping."""
    parts = [part.strip() for part in text.split(",")]
    codes = dict(part.split("=", 1) for part in parts if "=" in part)
    gradients = ",".join(part for part in parts if "=" not in part)
    return {**({"gradients": gradients} if gradients else {}), **codes} if codes else text


# ---- commands


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        inputs.writable(arguments.json)
    from . import demo

    demo.run(arguments.ranks, arguments.steps, arguments.json)


def _plan(arguments: argparse.Namespace) -> None:
    for path in filter(None, (arguments.output, arguments.html)):
        inputs.writable(path)
    picked = _picked(arguments)
    if arguments.pareto and (arguments.like or arguments.keep):
        raise ValueError("--like completes one plan, but got --pareto beside it; leave out one of them")
    like = None if arguments.like is None else inputs.load(arguments.like)
    with progress_bar() as progress, answers_only():  # targets may print what they like
        progress("importing", 0.0)
        gc.disable()  # what is imported and built stays: looking for garbage in it takes half a second
        from .. import api
        from ..compiler.report.explain import compared, summary_json
        from ..compiler.workers import most_workers
        from .targets import build_target

        cluster = inputs.cluster(arguments.cluster)
        progress("building", 0.0)
        target = build_target(arguments.target)
        gc.freeze()
        atexit.register(gc.freeze)  # nor look for it in all that there is at the end
        if arguments.pareto or arguments.precision == "auto":
            gc.enable()  # what one search leaves is garbage to the next
        progress("capture", 0.0)
        request = {
            "example_inputs": target.args,
            "example_kwargs": target.kwargs,
            "global_batch": arguments.global_batch or target.global_batch,
            "microbatches": arguments.microbatches,
            "strategy": arguments.strategy,
            "schedule": arguments.schedule,
            "optimizer": arguments.optimizer or target.optimizer,
            "recompute": arguments.recompute,
            "zero": arguments.zero,
            "sequence": arguments.sequence,
            "regular": arguments.regular,
            "executable": arguments.executable,
            "communication": arguments.communication,
            "precision": arguments.precision,
            "constraints": arguments.constraint,
            "time_limit_s": arguments.time_limit,
            "progress": progress,
            "workers": min(most_workers(), MAX_WORKERS),
        }
        several = arguments.pareto or arguments.top_k is not None
        if arguments.pareto:
            plans = api.pareto(target.model, cluster, **request)
        else:
            request |= {"like": like, "keep": arguments.keep, "cache": arguments.cache}
            plans = api.plan(target.model, cluster, top_k=arguments.top_k or 1, **request)
    plans = [replace(plan, provenance={**plan.provenance, "target": arguments.target}) for plan in plans]
    if picked < len(plans):
        chosen, row = plans[picked], f", row {picked}" if several else ""
        if arguments.output is not None:
            chosen.save(arguments.output)
            print(f"wrote {arguments.output}{row}", file=sys.stderr)
        if arguments.html is not None:
            chosen.to_html(arguments.html, others=[plan for plan in plans if plan is not chosen])
            print(f"wrote {arguments.html}{row}", file=sys.stderr)
    if arguments.json:
        figures = [summary_json(plan) for plan in plans]
        print(json.dumps(figures if several else figures[0]))
    elif several:
        print(compared(plans, width()))
    else:
        print(plans[0].explain(width=width()))
    if picked >= len(plans):
        raise ValueError(f"--pick is a row of the table, 0 to {len(plans) - 1}, but got {picked}; nothing was written")


def _picked(arguments: argparse.Namespace) -> int:
    """The row that is written; ValueError if there cannot be such a row."""
    if arguments.pick is None:
        return 0
    if not (arguments.pareto or arguments.top_k) or arguments.output is None:
        raise ValueError("--pick is of a row that --top-k or --pareto finds and -o writes, but got neither; add them")
    if arguments.pick < 0 or (arguments.top_k and arguments.pick >= arguments.top_k):
        most = f"to {arguments.top_k - 1}" if arguments.top_k else "or more"
        raise ValueError(f"--pick is the number of a row, 0 {most}, but got {arguments.pick}; choose one of these")
    return int(arguments.pick)


def _show(arguments: argparse.Namespace) -> None:
    from ..compiler.plan.validation import require_valid
    from ..compiler.report.explain import summary_json

    plan = inputs.load(arguments.plan)
    require_valid(plan)
    if plan.price_state == "edited":
        print(f"note: {plan.price_note}; meshwright check --write prices it again", file=sys.stderr)
    if asks_for_pictures(arguments):
        for path in filter(None, (arguments.html, arguments.trace)):
            inputs.writable(path)
        with progress_bar() as progress, answers_only():
            write_pictures(plan, arguments, inputs.load, lambda target: inputs.captured(target, progress))
        return
    print(json.dumps(summary_json(plan)) if arguments.json else plan.explain(width=width()))


def _why(arguments: argparse.Namespace) -> None:
    from ..compiler.plan.validation import require_valid

    plan = inputs.load(arguments.plan)
    target = inputs.built_in_target(plan, arguments.target)
    if target is None:
        raise ValueError("why asks the model, but got no --target, and the plan names no built-in one; pass it")
    with progress_bar() as progress, answers_only():
        graph = inputs.captured(target, progress)
        require_valid(plan, graph)
        answer = plan.why(arguments.name, graph)
    print(answer)


def _verify(arguments: argparse.Namespace) -> int:
    plan = inputs.load(arguments.plan)
    with progress_bar() as progress, answers_only():
        from ..compiler import verification
        from .targets import build_target

        progress("building", 0.0)
        target = build_target(arguments.model)
        progress("verify", 0.0)
        result = verification.verify(
            plan, target.model, example_inputs=target.args, example_kwargs=target.kwargs, dtype=arguments.dtype
        )
    print(result)
    return 0 if result else inputs.BAD_INPUT


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        inputs.writable(arguments.output)
    from .profile import Options, run

    output = None if arguments.output is None else str(arguments.output.absolute())
    options = Options(
        output, arguments.budget, arguments.quick, arguments.model, arguments.global_batch, arguments.optimizer,
        arguments.resume, arguments.timeout,
    )  # fmt: skip
    return run(options, arguments.ranks)


def _models(_: argparse.Namespace) -> None:
    from ..models import names

    listed = names()
    width = max(map(len, listed))
    for name, description in listed.items():
        print(f"{name.ljust(width)}  {description}")
