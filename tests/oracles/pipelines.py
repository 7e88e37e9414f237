"""Every pipeline of a small table, and what one costs by the simulated schedule."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite

from meshwright.compiler.pipeline.families import generate, in_flight_formula
from meshwright.compiler.pipeline.simulate import simulate
from meshwright.compiler.pipeline.table import PipelineTable, StageChoice, StageConstraints


def every_pipeline(table: PipelineTable, constraints: StageConstraints) -> Iterator[tuple[StageChoice, ...]]:
    """All pipelines at any memory limit, whatever devices stay idle."""
    least, most = constraints.stages

    def rest(layer: int, device: int, count: int) -> Iterator[tuple[StageChoice, ...]]:
        if layer == table.num_layers and count >= least:
            yield ()
        for end in range(layer + 1, table.num_layers + 1):
            spans = any(layer < cut < end for cut in constraints.boundaries)
            if spans or {layer, end} & constraints.forbidden or (most is not None and count >= most):
                continue
            for index, option in enumerate(table.options):
                if isfinite(table.pace_s[index, layer, end]):
                    for offset in option.offsets:
                        if offset >= device:
                            for tail in rest(end, offset + option.num_devices, count + 1):
                                yield (StageChoice(layer, end, index, offset), *tail)

    return rest(0, 0, 0)


def over_the_limit(table: PipelineTable, stages: tuple[StageChoice, ...], schedule: str, m: int) -> float:
    return max(
        table.peak(stage, in_flight_formula(schedule, k, len(stages), m))
        - table.options[stage.option].limit(stage.device_offset)
        for k, stage in enumerate(stages)
    )


def objectives(table: PipelineTable, stages: tuple[StageChoice, ...], m: int, schedule: str) -> tuple[float, float]:
    """W and T as the docstring of the pass states them; under zb-h1 a third of the pace fills (f = i = w)."""
    path, total, slowest = 0.0, 0.0, 0.0
    share = 1 / 3 if schedule == "zb-h1" else 1.0
    for k in reversed(range(len(stages))):
        at = (stages[k].option, stages[k].first_layer, stages[k].end_layer)
        t, last = table.pace_s[at], k == len(stages) - 1
        x = 0.0 if last else table.transfer_s[at]
        e = 0.0 if k == 0 or table.entry_s is None else table.entry_s[at]
        path = e + max(m * t, share * t + x + path)
        total, slowest = total + e + share * t + x, max(slowest, t)
    step = table.step_s[stages[0].option, 0, stages[0].end_layer]
    return path + step, total + (m - share) * slowest + step


def clock(table: PipelineTable, stages: tuple[StageChoice, ...], schedule: str, m: int) -> float:
    """The simulated makespan: a third of a pace forward, as much for I and for W."""
    pace = [table.pace_s[stage.option, stage.first_layer, stage.end_layer] for stage in stages]
    step = [table.step_s[stage.option, stage.first_layer, stage.end_layer] for stage in stages]
    ahead, back = messages(table, [(stage.option, stage.first_layer, stage.end_layer) for stage in stages])
    run = generate(schedule, len(stages), m)
    return simulate(
        run, [t / 3 for t in pace], [t * 2 / 3 for t in pace], ahead or None, step, back or None
    ).makespan_s  # fmt: skip


def messages(
    table: PipelineTable, at: Sequence[tuple[int, int, int]]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Seconds of a message ahead and of one back across each border; where the table does not tell them apart, half of
    the sum each."""
    ahead, back = {}, {}
    for k, (one, other) in enumerate(pairwise(at)):
        both = float(table.transfer_s[one])
        ahead[k, k + 1], back[k, k + 1] = (
            (both / 2, both / 2) if table.entry_s is None else (float(table.entry_s[other]), both)
        )
    return ahead, back


def meshes(table: PipelineTable, stages: tuple[StageChoice, ...]) -> tuple[tuple[int, ...], ...]:
    options = table.options
    return tuple((s[0], s[1], options[s.option].num_devices, options[s.option].shape) for s in stages)
