"""Brute force: the optimum of small problems by trying everything, with no code of the solvers that it judges."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

from meshwright.compiler.inter_op import StageChoice, StageTable
from meshwright.compiler.intra_op import Infeasible, Problem, Solution, evaluate
from meshwright.compiler.schedule import in_flight_formula


def brute_force_assignment(problem: Problem, limit_bytes: float = math.inf) -> Solution | Infeasible:
    """The intra-op optimum within the limit; of equally fast assignments the leanest."""
    start = time.perf_counter()
    best: tuple[float, float, tuple[int, ...]] | None = None
    leanest: tuple[float, float, tuple[int, ...]] | None = None
    for choice in itertools.product(*(range(len(op.labels)) for op in problem.operators)):
        seconds, num_bytes = evaluate(problem, choice)
        if not math.isfinite(seconds):
            continue
        if leanest is None or (num_bytes, seconds) < leanest[:2]:
            leanest = num_bytes, seconds, choice
        if num_bytes <= limit_bytes and (best is None or (seconds, num_bytes) < best[:2]):
            best = seconds, num_bytes, choice
    elapsed_s = time.perf_counter() - start
    if best is not None:
        return Solution(best[2], best[0], best[1], best[0], "optimal", elapsed_s)
    if leanest is None:
        return Infeasible(limit_bytes, math.inf, None, math.inf, elapsed_s)
    return Infeasible(limit_bytes, leanest[0], leanest[2], leanest[1], elapsed_s)


def brute_force_pipeline(
    table: StageTable,
    num_microbatches: int,
    schedule: str = "1f1b",
    max_stages: int | None = None,
    num_stages: int | None = None,
    require_all_devices: bool = False,
) -> tuple[float, float]:
    """(seconds of the best pipeline that fits, bytes over the limit of the one that misses by least).

    The seconds are inf where nothing fits; the bytes are 0 where something does, and inf where no pipeline exists at
    any memory limit.
    """

    def pipelines(layer: int, device: int, left: int) -> Iterator[tuple[StageChoice, ...]]:
        if layer == table.num_layers and left == 0 and (device == table.num_devices or not require_all_devices):
            yield ()
        if left == 0:
            return
        for end in range(layer + 1, table.num_layers + 1):
            for option, n in enumerate(map(int, table.devices)):
                if not math.isfinite(table.seconds[option, layer, end]):
                    continue
                for d in range(device, device + 1 if require_all_devices else table.num_devices):
                    if d + n <= table.num_devices and table.admissible[option, d]:
                        for rest in pipelines(end, d + n, left - 1):
                            yield (StageChoice(layer, end, option, d), *rest)

    most = min(table.num_layers, table.num_devices, max_stages or table.num_layers)
    best_s = least = math.inf
    for count in [num_stages] if num_stages else range(1, most + 1):
        held = [in_flight_formula(schedule, k, count, num_microbatches) for k in range(count)]
        for stages in pipelines(0, 0, count):
            over = max(
                table.peak(c.option, c.first_layer, c.end_layer, q) - table.limit(c.option, c.device_offset)
                for c, q in zip(stages, held, strict=True)
            )
            least = min(least, max(over, 0.0))
            if over <= 0:
                seconds = [float(table.seconds[c.option, c.first_layer, c.end_layer]) for c in stages]
                best_s = min(best_s, math.fsum(seconds) + (num_microbatches - 1) * max(seconds))
    return best_s, least
