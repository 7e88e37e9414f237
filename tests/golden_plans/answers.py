"""What is recorded of an answer: numbers and decisions in one part, words in another, and how two answers differ.

Of a plan's document three things vary from run to run, and are left out: the seconds of the search's passes, the
versions that made it, and the line of ``explain`` that says these seconds.

*Decisions* have names of their own here, and numbers that the document keeps by cause ("forward", "gradients", …) are
the sorted values that are not zero, so that renaming a field or a cause changes nothing there. Lists of many names
(ops, parameters) are a count and a digest. *Words* are what people read: notes, reasons, explanations, the names of
causes in the order of their values, the fields of the plan's document, and the text of an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import meshwright as mw

from tests.golden_plans.questions import Question

__all__ = ["answer", "as_text", "differences"]

NAMED = ("model_ops", "ops", "parameters", "sources", "receives", "sends", "collectives")
LISTED = 16  # names that are written out
WIDTH = 120
SEARCH_SECONDS = re.compile(r"^  search  ")
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def answer(question: Question, workers: int = 1) -> dict[str, Any]:
    """The recorded document of a question, as JSON values: what was asked, ``decisions`` and ``words``."""
    asked = {name: value for name, value in asdict(question).items() if value not in ((), {})}
    try:
        plans = question.plans(workers)
    except (ValueError, mw.InfeasibleError) as error:
        text = str(error)
        kind = "InfeasibleError" if isinstance(error, mw.InfeasibleError) else "ValueError"
        decisions: Any = {"error": kind, "numbers": NUMBER.findall(text)}
        words: Any = {"error": text}
    else:
        documents = [plan.to_json() for plan in plans]
        whys = {name: plans[0].why(name) for name in question.why}
        decisions = {"plans": [_decisions(document) for document in documents]}
        for plan, decided in zip(plans, decisions["plans"]):
            decided["runs"] = not plan.not_executable()
        if whys:
            decisions["why"] = {
                name: [[row.label, row.chosen, row.seconds, row.bytes] for row in why.rows]
                for name, why in whys.items()
            }
        words = {
            "plans": [_words(document) for document in documents],
            "not_executable": [plan.not_executable() for plan in plans],
            "fields": sorted({path for document in documents for path in _field_paths(document)}),
            "explain": [line for line in plans[0].explain().splitlines() if not SEARCH_SECONDS.match(line)],
        }
        if whys:
            words["why"] = {name: str(why).splitlines() for name, why in whys.items()}
    return json.loads(json.dumps({"question": asked, "decisions": decisions, "words": words}))


# ---- numbers and decisions


def _decisions(document: Mapping[str, Any]) -> dict[str, Any]:
    predicted, provenance = document["prediction"], document["provenance"]
    return {
        "step_s": predicted["step_s"],
        "bound_s": predicted["bound_s"],
        "flops": predicted["flops"],
        "replicated_flops": predicted["replicated_flops"],
        "alternatives": [[one.get("step_s"), one.get("microbatches")] for one in predicted["alternatives"]],
        "price_sources": _values(predicted["sources"]),
        "global_batch": document["global_batch"],
        "microbatches": document["microbatches"],
        "schedule": document["schedule"],
        "optimizer": document["optimizer"],
        "precision": document["precision"],
        "codes": document["codes"],
        "strategy": provenance["strategy"],
        "constraints": provenance["constraints"],
        "model": document["model"],
        "model_ops": dict(sorted(document["model_ops"].items())),
        "cluster": provenance["cluster"],
        "layers": _listed(document["layers"]),
        "stages": [_stage(*both) for both in zip(document["stages"], predicted["stages"], strict=True)],
        "transfers": [list(transfer.values()) for transfer in document["transfers"]],
    }


def _stage(stage: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "devices": stage["devices"],
        "mesh": stage["mesh_shape"],
        "chunks": [_chunk(chunk) for chunk in stage["chunks"]],
        "gradients": [[one["axes"], one["algorithm"], one["compressor"], one["bytes"]] for one in stage["wire"]],
        "forward_backward_step_s": [predicted["forward_s"], predicted["backward_s"], predicted["step_s"]],
        "seconds": _values(predicted["seconds"]),
        "memory_bytes": _values(predicted["memory_bytes"]),
        "collectives": _values(predicted["collectives"]),
        "chunk_s": predicted["chunk_s"],
    }


def _chunk(chunk: Mapping[str, Any]) -> dict[str, Any]:
    homes = {name: " / ".join(home.values()) for name, home in chunk["parameters"].items()}
    return {
        "layers": chunk["layers"],
        "recompute": chunk["recompute"],
        "program": _listed(list(chunk["ops"])),
        "ops": _grouped(chunk["ops"]),
        "parameters": _grouped(homes),
        "sources": dict(sorted(chunk["sources"].items())),
        "receives": dict(sorted(chunk["receives"].items())),
        "sends": dict(sorted(chunk["sends"].items())),
    }


def _grouped(choices: Mapping[str, str]) -> dict[str, Any]:
    """Choice → the names that have it."""
    groups: dict[str, list[str]] = {}
    for name, choice in sorted(choices.items()):
        groups.setdefault(choice, []).append(name)
    return {choice: _listed(names) for choice, names in sorted(groups.items())}


def _listed(names: Sequence[str]) -> Any:
    if len(names) <= LISTED:
        return list(names)
    digest = hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]
    return {"count": len(names), "first": names[0], "last": names[-1], "digest": digest}


def _values(by_cause: Mapping[str, float]) -> list[float]:
    return sorted(value for value in by_cause.values() if value)


# ---- words


def _words(document: Mapping[str, Any]) -> dict[str, Any]:
    predicted = document["prediction"]
    return {
        "notes": predicted["notes"],
        "alternatives": [[one["name"], one["why"]] for one in predicted["alternatives"]],
        "price_sources": _causes(predicted["sources"]),
        "stages": [
            {name: _causes(stage[name]) for name in ("seconds", "memory_bytes", "collectives")}
            for stage in predicted["stages"]
        ],
    }


def _causes(by_cause: Mapping[str, float]) -> list[str]:
    """The names of the values, in their order."""
    return [cause for value, cause in sorted((value, cause) for cause, value in by_cause.items()) if value]


def _field_paths(document: Any, path: str = "") -> Iterator[str]:
    """Where a plan's document has values, as ``stages[].chunks[].layers[]``; names that are no fields (ops, tensors,
    passes) are ``*``."""
    if path in ("cluster", "provenance.passes"):  # the cluster has a document of its own
        yield path
    elif isinstance(document, dict):
        own = path.rpartition(".")[2] in NAMED
        for name, value in document.items():
            yield from _field_paths(value, f"{path}.{'*' if own else name}".lstrip("."))
    elif isinstance(document, (list, tuple)):
        for value in document:
            yield from _field_paths(value, f"{path}[]")
    else:
        yield path


# ---- text and comparison


def as_text(value: Any, indent: str = "") -> str:
    """JSON in which whatever fits on a line stands on one, and every number has all its digits."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, (dict, list)) or len(indent) + len(line) <= WIDTH:
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {as_text(part, deeper)}" for name, part in value.items()]
    else:
        parts = [as_text(part, deeper) for part in value]
    ends = "{}" if isinstance(value, dict) else "[]"
    return f"{ends[0]}\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}{ends[1]}"


def differences(recorded: Any, found: Any, path: str = "") -> list[str]:
    """A line for each place at which two JSON values are not the same, numbers to all digits."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = [*recorded, *(name for name in found if name not in recorded)]
        pairs = [(f".{name}", recorded.get(name, "(nothing)"), found.get(name, "(nothing)")) for name in names]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = [(f"[{index}]", *both) for index, both in enumerate(zip(recorded, found))]
    elif type(recorded) is type(found) and recorded == found:
        return []
    else:
        return [f"{path or 'answer'}: {_brief(recorded)} was recorded, found {_brief(found)}{_change(recorded, found)}"]
    return [line for name, before, now in pairs for line in differences(before, now, (path + name).lstrip("."))]


def _change(recorded: Any, found: Any) -> str:
    if all(isinstance(value, float) and value for value in (recorded, found)):
        return f" ({found / recorded - 1:+.3g} of it)"
    return ""


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
