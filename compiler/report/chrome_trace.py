"""A step as a document for Perfetto and chrome://tracing: predicted, and measured on the same clock.

Every stage of the prediction is a process with three threads: its actions, the messages that it receives, the end of
its step. Every rank of a measured step is a process: its actions with the wait before them, and the end of the step.
Second 0 is the begin of the step in both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from ...costmodel.files import write_atomically
from ..pipeline.families import PIPEDREAM, generate
from ..pipeline.measured import MeasuredStep
from ..plan.plan import Plan
from ..search.predict import plan_messages, simulate_plan
from ..text import span_text
from .picture import stage_end

__all__ = ["to_chrome_trace"]

_KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_MEASURED = 100_000  # process numbers of ranks begin here


def to_chrome_trace(
    plan: Plan, path: str | os.PathLike[str] | None = None, trace: MeasuredStep | None = None
) -> dict[str, Any]:
    """The events of a predicted step, and of a measured one; written to ``path`` where one is given. Raises ValueError
    for a trace of another model."""
    if trace is not None and trace.model != plan.model:
        raise ValueError(
            f"a trace is of a run of the plan that it is merged with, but got one of model {trace.model} and a plan "
            f"for {plan.model}; pass the trace of this plan"
        )
    events = [*_predicted(plan), *([] if trace is None else _measured(trace))]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": plan.model}}
    if path is not None:
        write_atomically(path, json.dumps(document))
    return document


def _predicted(plan: Plan) -> Iterator[dict[str, Any]]:
    simulation = simulate_plan(plan)
    messages = plan_messages(plan, simulation)
    few = min(plan.microbatches, 2 * len(plan.stages))
    places = generate(plan.schedule, len(plan.stages), few, plan.chunks_asked).places()
    for index, (stage, row) in enumerate(zip(plan.stages, simulation.timeline)):
        yield from _process(index, f"predicted: stage {index}, devices {span_text(stage.devices)}", index)
        yield from (_thread(index, number, name) for number, name in enumerate(("actions", "messages", "end of step")))
        for start, end, action in row:
            name = str(action).removeprefix(str(index))
            arguments = {"microbatch": action.microbatch, "chunk": action.chunk}
            yield _event(name, _KINDS[action.kind], index, 0, start, end, arguments)
        for one in messages[index]:
            if one.end_s > one.start_s:
                what = "activation" if one.is_forward else "gradient"
                name = f"{what} {one.microbatch} from stage {places[one.source][0]}"
                yield _event(name, "message", index, 1, one.start_s, one.end_s, {"microbatch": one.microbatch})
        if plan.schedule != PIPEDREAM:
            last_s = row[-1][1] if row else 0.0
            for name, start, seconds in stage_end(plan.prediction.stages[index], last_s):
                yield _event(name, "end of step", index, 2, start, start + seconds, {})


def _measured(trace: MeasuredStep) -> Iterator[dict[str, Any]]:
    for one in trace.ranks:
        number = _MEASURED + one.rank
        where = "idle" if one.stage is None else f"stage {one.stage}"
        yield from _process(number, f"measured: rank {one.rank}, {where}", number)
        yield _thread(number, 0, "actions")
        yield _thread(number, 1, "waiting")
        for span in one.spans:
            arguments = {
                "collectives_us": 1e6 * span.exchange_s, "recompute_us": 1e6 * span.repeat_s,
                "sends_us": 1e6 * span.send_s,
            }  # fmt: skip
            kind = _KINDS.get(span.name[0], "end of step") if span.name[1:2].isdigit() else "end of step"
            yield _event(span.name, kind, number, 0, span.start_s, span.end_s, arguments)
            if span.wait_s > 0:
                yield _event(
                    f"wait for {span.name}", "waiting", number, 1, span.start_s - span.wait_s, span.start_s, {}
                )


def _event(
    name: str, category: str, process: int, thread: int, start_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": 1e6 * start_s,
        "dur": 1e6 * (end_s - start_s), "args": arguments,
    }  # fmt: skip


def _process(number: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": order}}


def _thread(process: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}
