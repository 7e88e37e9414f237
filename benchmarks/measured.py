"""Make docs/measured.md and README's table of the records that the benchmarks left under ``benchmarks/results``.

    python benchmarks/measured.py            # what ``make measured`` does
    python benchmarks/measured.py --check    # write nothing; exit status 1 if a document is not what it would be

Rows in which ours is behind a peer, or misses an aim, come first.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reporting.results import RESULTS, ROOT, Record, Run, load_runs

__all__ = ["PAGE", "README", "main", "page", "readme"]

PAGE, README = ROOT / "docs" / "measured.md", ROOT / "README.md"
BEGIN, END = "<!-- measured: made by `make measured` -->", "<!-- end of measured -->"
UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Section:
    """The part of the page about one benchmark: its name, a title, what its figures are, and a chart under docs/."""

    benchmark: str
    title: str
    about: str
    chart: str = ""
    #: the page of the rows without an aim or a peer, if they are not to stand here
    rest: str = ""


SECTIONS = (
    Section(
        "runtime", "A training step against hand-written peers",
        "Ours over the fastest variant of the peer, below 1 where ours is faster. A step's figure is the median of "
        "the ratios within interleaved rounds; “of medians” is the ratio of the medians.",
    ),
    Section(
        "scaling", "Strong scaling", "Layers that sleep in proportion to their local work; messages are real.",
        "scaling.svg",
    ),
    Section("search", "Planning", "The whole process in a fresh interpreter with an empty cache."),
    Section(
        "frontier", "Models at their published sizes",
        "From Hugging Face configurations on the meta device; bf16, a batch of 1,024 on hosts of eight H100.",
    ),
    Section("growth", "How planning grows", "A GPT of width 1,024 on hosts of eight V100.", "search-growth.svg"),
    Section("replan", "Planning again after a change", "Processor seconds of the process less those of its start."),
    Section(
        "failures", "When a rank is killed or stopped",
        "Seconds from the blow to one of three ranks until the others have named it and ended, with a time-out of 5 s.",
    ),
    Section(
        "checkpoints", "Saving and loading",
        "A GPT with Adam on two ranks, files in the page cache; the peer moves the same bytes and does nothing else.",
    ),
    Section(
        "random_graphs", "Random graphs",
        "Graphs of up to eleven of 36 kinds of op, in fp64, under drawn wishes: verified, and trained on two ranks "
        "against eager PyTorch.",
    ),
    Section(
        "hosts", "Three hosts, disturbed",
        "Network namespaces under torchrun's rendezvous; right: the losses are those of the undisturbed run, to the "
        "last bit, or within 1e-4 where two hosts go on for three.",
    ),
    Section(
        "soak", "A long run under blows",
        "2,000 steps of four ranks that are killed and stopped at random and go on from their checkpoints, against a "
        "run that is left alone.",
    ),
    Section(
        "fuzz", "Damaged and hostile files",
        "Files in which one thing is wrong, read by commands and loaders: anything but one line of refusal, and more "
        "than ten times a file's bytes of memory, is a fault.",
    ),
    Section("quality", "Plans against other kinds of plans", "All under the same prices: their step over ours."),
    Section("bruteforce", "The search against all plans there are", "Tiny random instances, every plan document."),
    Section(
        "monotone", "Who is free to do more is never slower",
        "Pairs of questions on 13 models and clusters of 1 to 2,048 devices: a freer one, and one that asks for "
        "something more, or has fewer devices, less memory or slower links.",
    ),
    Section("accuracy", "Predicted against measured", "Every prediction is made before its plan runs."),
    Section("published", "Published runs, predicted", "From data sheets alone; nothing ran on a GPU here."),
    Section(
        "accelerator", "Predicted against measured on a GPU",
        "One card, bfloat16 throughout, AdamW.",
    ),
    Section("collectives", "All-reduce algorithms against Gloo", "The fastest of ours for each size."),
    Section(
        "wire", "Compressed sums of gradients", "One bucket over a link, against Gloo's exact sum; and whether prices "
        "pick the best way.",
    ),
    Section("codecs", "Encoding and decoding", "Processor time of one thread."),
    Section(
        "slow_network", "Training over a slow network", "Four ranks, compute padded to half a second. “ceiling”: what "
        "a network without cost would give.",
    ),
    Section(
        "convergence", "What training by each codec comes to", "SGD on digits and on a small GPT (“gpt x3”: both at "
        "three times the rate). “tuning” data are those on which settings were chosen.",
    ),
    Section("local_ops", "Our own ops against PyTorch's", "Ratio of minima, one thread."),
    Section("equivalence", "Random plans against one device", "In float64, in one process."),
    Section(
        "zoo", "Architectures against eager PyTorch", "On two ranks under four strategies, at tiny sizes.",
        rest="models.md",
    ),
    Section("network", "The links of these benchmarks", "What the shaped links give between two idle ranks."),
)  # fmt: skip

#: README's rows: what they say of a record, its benchmark and its row
CHOSEN = (
    ("planning GPT-39B for 64 V100, the whole process", "search", "gpt-39b on p3.16xlarge:8: seconds"),
    ("a step against DistributedDataParallel (GPT, 2 ranks)", "runtime", "GPT, data parallel, 2 ranks: step"),
    ("a step against FSDP2 (GPT, 2 ranks)", "runtime", "GPT, fully sharded, 2 ranks: step"),
    ("a step against `torch.distributed.pipelining`, 1F1B (GPT, 2 ranks)", "runtime",
     "GPT, 1F1B, 8 microbatches, 2 ranks: step"),
    ("error of the predicted step, median of 29 plans", "accuracy", "real, by table grid: median error"),
)  # fmt: skip

INTRODUCTION = f"""# Measured

{BEGIN}

All figures of this project stand here, and five of them in the [README](../README.md). `make measured` makes both of
the records under `benchmarks/results/`, which the benchmarks write. How each benchmark measures is in
[its README](../benchmarks/README.md).

- *Against* names the peer, or an aim of ours. *Behind*: the figure is on the wrong side of it. *Even*: the spread holds
  it. *Ahead*: the rest, ties and aims that are met among them.
- *Spread* is what the benchmark says of its own noise. “computed” figures have none: the next run has the same.
- *Run* leads to the table of [runs](#runs): date, commit, command, machine, torch. Figures that are older than the
  records were taken over from the document that is named there, with the date and the commit at which they entered it;
  what that document did not say is “{UNKNOWN}”.
- Figures of a GPU are those of one card, in the section of that name. NCCL between cards has never run here.
"""


def runs_of(folder: Path) -> list[tuple[Section, list[tuple[str, Run]]]]:
    """Per section that has records: its runs with their names, oldest first. ValueError for a file of no section."""
    known = {section.benchmark for section in SECTIONS}
    if strange := sorted({path.stem for path in folder.glob("*.json")} - known):
        raise ValueError(f"every file of results has a section in measured.py, but got {', '.join(strange)}; add one")
    found = []
    for section in SECTIONS:
        runs = [run for run in load_runs(section.benchmark, folder) if run.records]
        if runs:
            found.append((section, [(f"{section.benchmark} {index}", run) for index, run in enumerate(runs, 1)]))
    return found


def page(folder: Path = RESULTS) -> str:
    """The text of docs/measured.md."""
    found = runs_of(folder)
    lines = [INTRODUCTION, "## Where ours is behind", ""]
    behind = [
        (f"{section.benchmark}: {record.row}", record, name, run)
        for section, runs in found
        for name, run in runs
        for record in run.records
        if record.verdict == "behind"
    ]
    lines += table(behind)
    for section, runs in found:
        script = f"`benchmarks/{section.benchmark}.py`"
        about = f"{section.about} {script}" if (ROOT / script.strip("`")).exists() else section.about
        lines += ["", f"## {section.title}", "", *textwrap.wrap(about, 118)]
        if section.chart:
            lines += ["", f"![{section.title}]({section.chart})"]
        if section.rest:
            lines += ["", f"Row by row: [{section.rest}]({section.rest})."]
        rows = [
            (record.row, record, name, run)
            for name, run in runs
            for record in run.records
            if not section.rest or record.verdict
        ]
        rank = {"behind": 0, "even": 1, "ahead": 2, "": 3}
        rows.sort(key=lambda row: (rank[row[1].verdict], row[0]))
        lines += ["", *table(rows)]
    lines += ["", "## Runs", "", *runs_table(found), ""]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, Record, str, Run]]) -> list[str]:
    """A line per record: title, record, the name of its run and the run."""
    lines = ["| what | figure | spread | against | | run |", "|---|---|---|---|---|---|"]
    for title, record, name, run in rows:
        what = title + (f" ({record.note})" if record.note else "")
        cells = (what, figure(record), spread(record), record.peer, record.verdict, f"[{name}](#runs), {run.date}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def runs_table(found: Sequence[tuple[Section, list[tuple[str, Run]]]]) -> list[str]:
    """A line per run."""
    lines = ["| run | date | commit | command | machine | torch | taken over from |", "|---|---|---|---|---|---|---|"]
    for _, runs in found:
        for name, run in runs:
            command = f"`{run.command}`" if run.command else UNKNOWN
            cells = (name, run.date or UNKNOWN, run.commit or UNKNOWN, command, machine(run), run.torch or UNKNOWN)
            lines.append("| " + " | ".join((*cells, run.transcribed or "")) + " |")
    return lines


def figure(record: Record) -> str:
    """The value with its unit; a dash where nothing came out."""
    if record.value is None:
        return "–"
    return f"{number(record.value, record.decimals)} {record.unit}".strip()


def spread(record: Record) -> str:
    """From where to where, and of what; or that it is not known."""
    known = record.spread
    if known is None:
        return UNKNOWN
    if known.of == "computed":
        return "computed"
    decimals = 2 if record.unit.startswith("×") else record.decimals
    return f"{number(known.low, decimals)}–{number(known.high, decimals)} ({known.of})"


def number(value: float, decimals: int | None) -> str:
    """With so many decimals, or with four significant digits."""
    return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"


def machine(run: Run) -> str:
    """Processor, cores and GPU, as far as they are known."""
    known = run.machine or {}
    cores = f"{known['cores']} cores" if known.get("cores") else f"cores {UNKNOWN}"
    return ", ".join(filter(None, (cores, known.get("cpu") or f"processor {UNKNOWN}", known.get("gpu"))))


def readme(text: str, folder: Path = RESULTS) -> str:
    """README's text with the table of the chosen records between its marks. ValueError without marks or records."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md has one {BEGIN} and one {END}, but got another number; put them back")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + "\n".join([BEGIN, "", *chosen(folder), "", END]) + after


def chosen(folder: Path) -> Iterator[str]:
    """The lines of README's table."""
    yield "| what | figure | range | command |"
    yield "|---|---|---|---|"
    for title, benchmark, row in CHOSEN:
        found = [(run, one) for run in load_runs(benchmark, folder) for one in run.records if one.row == row]
        if not found:
            raise ValueError(f"README shows the row {row!r} of {benchmark}, but its results have none; measure it")
        run, record = found[-1]
        yield f"| {title} | {figure(record)} | {spread(record)} | `{run.command or UNKNOWN}` |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say which documents differ")
    options = parser.parse_args()
    made = {PAGE: page(), README: readme(README.read_text())}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not options.check:
            path.write_text(made[path])
        print(f"{path.relative_to(ROOT)}: {'differs; run make measured' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
