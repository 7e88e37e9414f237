"""docs/models.md and the records of a sweep: one line an architecture, with counts at the top."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from statistics import median

from reporting.results import ROOT, Record

from architectures.measure import STRATEGIES, Outcome
from architectures.registry import FAMILIES, Architecture

__all__ = ["PAGE", "page", "records", "status"]

PAGE = ROOT / "docs" / "models.md"
WORKS, OPAQUE, PARTLY, REFUSED, BROKEN = "works", "opaque part", "in part", "refused", "fails"
STATUSES = (WORKS, OPAQUE, PARTLY, REFUSED, BROKEN)
MEANINGS = {
    WORKS: "equal to eager PyTorch under every strategy, and planned for eight devices",
    OPAQUE: "as before, with a part that runs as it is, its batch split or whole on every device",
    PARTLY: "the automatic plan is equal; some other strategy or plan was refused",
    REFUSED: "an error says what cannot be kept, and what to do",
    BROKEN: "wrong numbers, a crash or a hang",
}


def status(outcome: Outcome) -> str:
    """One of ``STATUSES``."""
    verdicts = set(outcome.verdicts.values())
    if verdicts & {"wrong", "crash", "hang"}:
        return BROKEN
    if "refused" in verdicts:
        return PARTLY if outcome.verdicts.get("auto") == "equal" else REFUSED
    return OPAQUE if outcome.opaque else WORKS


def _counts(outcomes: Mapping[str, Outcome]) -> Counter[str]:
    return Counter(status(outcome) for outcome in outcomes.values())


def records(every: Mapping[str, Architecture], outcomes: Mapping[str, Outcome]) -> list[Record]:
    """The counts, with what they are held against, and a record of each architecture."""
    counts, total = _counts(outcomes), len(outcomes)
    kinds = Counter(verdict for outcome in outcomes.values() for verdict in outcome.verdicts.values())
    share = 100 * (counts[WORKS] + counts[OPAQUE]) / max(1, total)
    rows = [
        Record("architectures that work", share, "%", 1, None, "aim", 95.0, "more", f"{total} architectures"),
        *(
            Record(f"runs that are {verdict}", float(kinds[name]), "runs", 0, None, "aim", 0.0, "less")
            for name, verdict in (("wrong", "silently wrong"), ("crash", "crashes"), ("hang", "hangs"))
        ),
        *(Record(f"architectures: {name}", float(counts[name]), "", 0) for name in STATUSES),
    ]
    plans = [
        outcome.seconds["plan"]
        for outcome in outcomes.values()
        if outcome.verdicts.get("plan") == "ok" and "plan" in outcome.seconds
    ]
    if plans:
        rows.append(Record("planning for eight devices, median", median(plans), "s", 1))
    for name, outcome in outcomes.items():
        worst = max(outcome.differences.values(), default=None)
        note = status(outcome) + (f": {_reason(outcome)}" if _reason(outcome) else "")
        rows.append(Record(f"{name} ({every[name].family})", worst, "relative", note=note))
    return rows


def page(every: Mapping[str, Architecture], outcomes: Mapping[str, Outcome]) -> str:
    """The text of docs/models.md."""
    counts, total = _counts(outcomes), len(outcomes)
    worst = [max(outcome.differences.values()) for outcome in outcomes.values() if outcome.differences]
    about = (
        f"`make zoo` takes {total} architectures as their libraries ship them, at tiny sizes with random weights. Each "
        "is captured, planned for eight V100 (`p3.16xlarge:1`), and trained for three steps on two local ranks under "
        "dp2, tp2, pp2 and the automatic plan. Losses and every entry of `full_state_dict` are compared with eager "
        "PyTorch of the same model, which accumulates the plan's microbatches; where fp32 differs by more than 1e-4, "
        "float64 decides. A model that draws random numbers in forward is compared with a plan of one device, which "
        f"draws the same. Of those that ran, the largest difference is {max(worst, default=0.0):.0e}."
    )
    lines = ["# Models", "", *textwrap.wrap(about, 118), "", "| | models | |", "|---|---|---|"]
    lines += [f"| {name} | {counts[name]} | {MEANINGS[name]} |" for name in STATUSES]
    by_family = Counter(every[name].family for name in outcomes)
    lines += ["", ", ".join(f"{by_family[family]} of {family}" for family in FAMILIES) + ".", ""]
    about = (
        f"{_left(every, outcomes)}“Difference” is the largest relative one over all strategies. “Whole on every "
        "device” are ops that no rule splits: the run is right, and their work is repeated."
    )
    lines += textwrap.wrap(about, 118)
    for family in FAMILIES:
        names = sorted((name for name in outcomes if every[name].family == family), key=str.lower)
        if not names:
            continue
        lines += ["", f"## {family}", "", "| model | kind | | difference | measured | what to know |", "|---" * 6 + "|"]
        for name in names:
            outcome = outcomes[name]
            worst_of = max(outcome.differences.values(), default=None)
            cells = (
                name, every[name].kind, status(outcome), "–" if worst_of is None else f"{worst_of:.0e}",
                f"{outcome.commit}, {outcome.date}", _reason(outcome),
            )  # fmt: skip
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _left(every: Mapping[str, Architecture], outcomes: Mapping[str, Outcome]) -> str:
    """The architectures that have no row."""
    left = [name for name in every if name not in outcomes]
    return f"Not measured yet: {', '.join(left)}. " if left else ""


def _reason(outcome: Outcome) -> str:
    """The errors, each with the steps that met it; else what is whole or opaque."""
    steps: dict[str, list[str]] = {}
    for step, text in outcome.errors.items():
        steps.setdefault(f"{_adverb(outcome.verdicts[step])}{text}", []).append(step)
    every = {"plan", *STRATEGIES}
    texts = [
        text if set(names) & {"capture", "all"} or set(names) >= every else f"{', '.join(names)}: {text}"
        for text, names in steps.items()
    ]
    texts += ["random numbers"] * outcome.random + [text.partition("; its FLOPs")[0] for text in outcome.opaque]
    if outcome.whole:
        texts.append(f"whole on every device: {', '.join(f'`{op}`' for op in sorted(outcome.whole))}")
    return "; ".join(texts)


def _adverb(verdict: str) -> str:
    return "" if verdict == "refused" else f"**{verdict}**: "
