"""Architectures of transformers, timm, diffusers and torchvision, and hand-written ones: which of them work.

    python benchmarks/zoo.py                        # all; makes docs/models.md (make zoo)
    python benchmarks/zoo.py --only Llama Mixtral   # these; the others keep their rows
    python benchmarks/zoo.py --family timm
    python benchmarks/zoo.py --unet                 # seconds of planning a large one
    python benchmarks/zoo.py --resume               # what this commit has not measured yet

Needs transformers, timm, diffusers, torchvision and pillow, torchtitan for its two models, and for those of other
projects what ``architectures/projects.py`` names (README.md). Each
architecture is captured, planned for eight V100, and trained for three steps on two local ranks under dp2, tp2, pp2 and
the automatic plan. Losses and every entry of ``full_state_dict`` are compared with those of the user's model under
eager PyTorch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import warnings

import meshwright as mw
import torch
from architectures import projects
from architectures.libraries import published_unet
from architectures.measure import STRATEGIES, TARGET, Outcome, dumped, forked_measure, parsed
from architectures.page import PAGE, page, records
from architectures.registry import FAMILIES, architectures
from architectures.torchtitan_models import FOUND, NEEDED
from reporting.results import RESULTS, ROOT, Record, save_records

JOURNAL = RESULTS / "zoo.jsonl"  # the last outcome of each architecture, a line each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these architectures")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, help="only these families")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has measured")
    parser.add_argument("--steps", default=",".join(["plan", *STRATEGIES]), help="comma-separated; none: capture alone")
    parser.add_argument("--unet", action="store_true", help="only plan Stable Diffusion's U-Net at its published size")
    parser.add_argument("--page", action="store_true", help="measure nothing, make the page")
    parser.add_argument("--dry", action="store_true", help="print, and keep nothing")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    every = architectures()
    absent = {} if FOUND else {"torchtitan": NEEDED}
    absent |= {} if projects.FOUND else {"projects": projects.NEEDED}
    for family, needed in absent.items():
        print(f"the models of {family} are left out: {needed}", file=sys.stderr)
    if unknown := sorted(set(options.only or ()) - set(every)):
        parser.error(f"no architecture is called {', '.join(unknown)}")
    if options.unet:
        save_records("zoo", [_unet_seconds()])
        return 0
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    journal = _journal()
    chosen = [
        one
        for one in every.values()
        if (not options.only or one.name in options.only)
        and (not options.family or one.family in options.family)
        and not (options.resume and one.name in journal and journal[one.name].commit == commit)
        and one.family not in absent
    ]
    if not options.page:
        torch.set_num_threads(1)
        cluster = _warm()
        for number, one in enumerate(chosen, 1):
            outcome = forked_measure(one, cluster, [step for step in options.steps.split(",") if step], commit)
            journal[one.name] = outcome
            print(f"{number}/{len(chosen)} {_line(outcome)}", flush=True)
            if not options.dry:
                JOURNAL.write_text("".join(dumped(journal[name]) + "\n" for name in every if name in journal))
    if not options.dry:
        known = {name: journal[name] for name in every if name in journal}
        save_records("zoo", records(every, known))
        PAGE.write_text(page(every, known))
    return 0


def _unet_seconds() -> Record:
    """Processor seconds of capture and search; wall seconds mean little on a shared machine."""
    case, started = published_unet(), time.process_time()
    mw.plan(
        case.model, TARGET, example_inputs=case.args, targets=case.targets, loss_fn=case.loss_fn, cache=False
    )  # fmt: skip
    return Record(
        "planning Stable Diffusion's U-Net (872 M) for eight devices, processor", time.process_time() - started, "s", 0,
        None, "aim", 60.0, note="default UNet2DConditionModel, batch 64",
    )  # fmt: skip


def _journal() -> dict[str, Outcome]:
    """The last outcome of every architecture that has one."""
    lines = JOURNAL.read_text().splitlines() if JOURNAL.exists() else []
    return {outcome.name: outcome for outcome in map(parsed, lines)}


def _warm() -> mw.Cluster:
    """Import in this process what every fork would import, and measure the machine once."""
    import transformers

    transformers.logging.set_verbosity_error()
    return mw.Cluster.local(2)


def _line(outcome: Outcome) -> str:
    cells = [
        f"{step} {verdict}" + (f" {outcome.differences[step]:.0e}" if step in outcome.differences else "")
        + f" {outcome.seconds.get(step, 0.0):.0f}s"
        for step, verdict in outcome.verdicts.items()
    ]  # fmt: skip
    errors = [f"\n    {step}: {text[:300]}" for step, text in outcome.errors.items()]
    whole = f" whole: {' '.join(outcome.whole)}" if outcome.whole else ""
    return f"{outcome.name}: {', '.join(cells)}{whole}{''.join(errors)}"


if __name__ == "__main__":
    sys.exit(main())
