"""Families of plans that people make by hand or by simpler searches; of each the best that there is, under our prices.

    grid       every dp × tp × pp of all devices, with every microbatch count, ZeRO pattern and recompute mode: the 3-D
               parallelism of a uniform shape. Patterns and modes are free per parameter and per layer here, which is
               more than such grids have
    megatron   the advice of Megatron-LM (Narayanan et al. 2021, section 3.4; Korthikanti et al. 2022): tensor
               parallelism inside a host, then as few stages as fit, the rest data; a distributed optimizer. The best
               over all tensor sizes of a host and modes of recompute (none, selective, full)
    zero       all devices on one data axis, parameters in ZeRO patterns (Rajbhandari et al. 2020), recompute as needed
    published  a division that a paper gives

A family has no plan (None) where none of it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.compiler.errors import InfeasibleError
from meshwright.compiler.ir.graph import Graph
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.driver import make_plan
from meshwright.compiler.search.parallel_shape import Strategy, parse_strategy
from meshwright.compiler.search.request import PlanRequest
from meshwright.compiler.search.space import Space
from meshwright.costmodel.cluster import Cluster

__all__ = ["Task", "best_grid", "megatron", "published", "zero_everywhere"]


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be planned, and from what kinds of decision."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    space: Space

    def plan(
        self, strategy: Strategy | None, space: Space | None = None, microbatches: int | None = None
    ) -> Plan | None:
        """The best plan of this shape; None if nothing fits or the model has too few layers for it."""
        try:
            asked = PlanRequest(
                self.global_batch, microbatches, strategy, optimizer="AdamW+masters", alternatives=False,
                space=space or self.space,
            )  # fmt: skip
            return make_plan(self.graph, self.cluster, asked)
        except InfeasibleError:
            return None
        except ValueError as error:
            if "layers" in str(error) or "dp cuts" in str(error):
                return None
            raise

    @property
    def per_host(self) -> int:
        """Devices of the largest host."""
        return max(host.num_devices for host in self.cluster.hosts)


def best_grid(task: Task, said: Callable[[str], None] = lambda text: None) -> Plan | None:
    """The best uniform grid."""
    best: Plan | None = None
    for shape in _grids(task.cluster.num_devices):
        said(str(shape))
        best = _better(best, task.plan(shape))
    return best


def megatron(task: Task, said: Callable[[str], None] = lambda text: None) -> Plan | None:
    """The best of what the advice gives for each tensor size inside a host and each mode of recompute."""
    best: Plan | None = None
    devices = task.cluster.num_devices
    for mode in ("none", "selective", "full"):
        space = replace(task.space, schedules=("1f1b",), residencies=("replicated", "zero1"), recompute=(mode,))
        for tp in (1 << k for k in range(task.per_host.bit_length())) if mode in task.space.recompute else ():
            for pp in _divisors(devices // tp) if devices % tp == 0 and tp <= task.per_host else ():
                shape = Strategy(pp, devices // tp // pp, tp)
                said(f"{shape}, recompute {mode}")
                found = task.plan(shape, space)
                if found is not None:  # as few stages as fit
                    best = _better(best, found)
                    break
    return best


def zero_everywhere(task: Task) -> Plan | None:
    """Data parallelism over all devices, with the ZeRO patterns and modes of recompute that suit each parameter and
    layer."""
    return task.plan(Strategy(dp=task.cluster.num_devices))


def published(task: Task, division: str, microbatches: int) -> Plan | None:
    """A published division: full recompute of every layer, gradients and states sharded as in ZeRO-2."""
    space = replace(task.space, schedules=("1f1b",), recompute=("full",))
    return task.plan(parse_strategy(division), space, microbatches)


def _grids(devices: int) -> Iterator[Strategy]:
    for pp in _divisors(devices):
        for tp in _divisors(devices // pp):
            yield Strategy(pp, devices // pp // tp, tp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _better(one: Plan | None, other: Plan | None) -> Plan | None:
    plans = [plan for plan in (one, other) if plan is not None]
    return min(plans, key=lambda plan: plan.prediction.step_s, default=None)
