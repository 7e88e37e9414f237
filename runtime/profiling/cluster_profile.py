"""``profile``: measure the ranks of this job, and make the Cluster that they are.

    roll call      every rank answers, or the missing ones are named
    collectives    all ranks together: every form of group that a plan can ask about            (``probes``)
    ops            at most one rank per core at a time, the others asleep: facts, grid, exact ops      (``op_grid``)
    codes, optimizers, overlap
    again          whatever time is left: further visits, finer sizes
    cluster        the same on every rank                                                    (``costmodel.profiled``)

What has been measured is on disk every few seconds, so that an interrupted profile continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, product
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...compiler.ir.probe import Probe
from ...costmodel.cluster import Cluster, Mesh
from ...costmodel.codecs import CODECS
from ...costmodel.hardware import Host
from ...costmodel.op_grid import coarse, grid, op_task
from ...costmodel.op_timing import fact_tasks, probe_task
from ...costmodel.profiled import (
    extended_device,
    inner_link,
    measured_device,
    network_link,
    view,
    wires_of,
    with_overlap,
)
from ...costmodel.profiler import Engine, ProfileState, Progress, Task, TaskRecord
from ...costmodel.tables import machine
from ..errors import MissingRankError
from ..transport.error_propagation import broadcast_from_rank0, fail_together, raise_on_all_ranks
from ..transport.first_error import world_store
from ..transport.launch import await_all_ranks, ensure_initialized, missing_ranks
from ..transport.progress import PROGRESS
from . import probes as over_ranks
from .message_probes import PACE_S
from .probes import COLLECTIVES, OWN_ALGORITHMS, ROOTED_COLLECTIVES, ConcurrentGroups, Ranks
from .profile_store import ProfileStore, gather_facts

__all__ = ["QUICK_BUDGET_S", "default_cluster", "profile"]

QUICK_BUDGET_S = 8.0  # on an idle machine it is through in a third of it
QUICK_PACE_S = 0.002
KIB, MIB = 1 << 10, 1 << 20
# each in order of value: the ends first, so that a fit has both wherever the budget ends
_COARSE_SIZES = (KIB, 512 * KIB, 4 * MIB, 64 * KIB, 32 * MIB)  # two that every link has time for, then larger ones
_FINE_SIZES = (8 * KIB, MIB, 16 * MIB, 128 * KIB, 64 * MIB, 256 * MIB)
_QUICK_SIZES = (KIB, MIB, 8 * MIB)
_VISITS, _REPEAT_VISITS = 3, 2  # of every task; and once everything was visited
_MIN_SHARE = 0.05  # of the budget, for what no plan can do without
_BUSY = 0.1  # of the time, without a core for a rank that needs one: worth a word
_CODES = tuple(name for name, codec in CODECS.items() if codec.lossy and codec.drop_in)
_MAX_BYTES = {"cpu": 64 * MIB, "cuda": 512 * MIB}


@PROGRESS.call("profile")
def profile(
    mesh: DeviceMesh | Mesh | Cluster | None = None,
    *,
    budget_s: float = 60.0,
    quick: bool = False,
    probes: Iterable[Probe] = (),
    base: Cluster | None = None,
    path: str | Path | None = None,
    progress: Progress | None = None,
    resume: bool = True,
    timeout_s: float = 60.0,
    pace: Callable[[], object] | None = None,
    codes: Sequence[str] | None = None,
) -> Cluster:
    """Measure the ranks of this job within about ``budget_s`` seconds; the same Cluster on every rank. Collective.

    mesh: only its size is checked. quick: a few seconds, or none where this machine's table is in the cache. probes:
    exact ops (``compiler.cost.signature``) to measure as well, alike on every rank. base: a Cluster of these ranks
    whose tables are kept; only what it lacks is measured. path: where rank 0 writes the result. resume: continue what
    an interrupted profile left. timeout_s: how long a rank may be silent. pace: what a rank does before and beside each
    collective that is measured; by default matmuls for some milliseconds, for that is how training meets collectives.
    codes: compressors whose encoding and decoding is measured; by default those of "auto-lossy", none if quick.

    Raises ValueError for bad input and TimeoutError that names the ranks that cannot be reached.
    """
    if not budget_s > 0:
        raise ValueError(f"a budget is a positive number of seconds, but got {budget_s}; give it a few")
    ensure_initialized()
    _check_size(mesh, base)
    await_all_ranks("profiling", timeout_s)
    try:
        measured_codes = (() if quick else _CODES) if codes is None else codes
        request = _ProfileRequest(
            QUICK_BUDGET_S if quick else budget_s, quick, tuple(probes), base, path, progress, resume, timeout_s, pace,
            tuple(measured_codes),
        )  # fmt: skip
        return _Profiler(request).run()
    except RuntimeError as error:
        rank, world = dist.get_rank(), dist.get_world_size()
        missing = missing_ranks("the end of profiling", min(timeout_s, 10.0), world_store(), rank, world)
        if missing:
            names = ", ".join(map(str, missing))
            raise MissingRankError(
                f"every rank takes part in profiling to its end, but got no answer from rank {names} any more; "
                "start again (what was measured is kept)"
            ) from error
        raise


def default_cluster(codes: Sequence[str] = ()) -> Cluster:
    """The cluster that these ranks plan on by default: their quick profile, from the cache if there is one, with the
    rates of ``codes``, which take less than a second. Collective."""
    cluster = profile(quick=True)
    lacking = [code for code in codes if code != "none" and cluster.device(0).coding_rate(code) is None]
    return profile(quick=True, base=cluster, codes=lacking) if lacking else cluster


def _check_size(mesh: DeviceMesh | Mesh | Cluster | None, base: Cluster | None) -> None:
    world = dist.get_world_size()
    for name, given in (("mesh", mesh), ("base", base)):
        size = world if given is None else given.size() if isinstance(given, DeviceMesh) else given.num_devices
        if size != world:
            raise ValueError(
                f"profile measures one device per rank, but got a {name} of {size} devices and {world} ranks; "
                f"start {size} ranks"
            )


@dataclass(frozen=True)
class _ProfileRequest:
    """The arguments of ``profile``, with its defaults filled in."""

    budget_s: float
    quick: bool
    #: exact ops to measure as well
    probes: tuple[Probe, ...]
    #: a cluster of which only the gaps are measured
    base: Cluster | None
    #: the file of the result
    path: str | Path | None
    progress: Progress | None
    #: continue an interrupted profile
    resume: bool
    #: seconds that a rank may be silent
    timeout_s: float
    #: the computation before and beside each collective; None: matmuls
    pace: Callable[[], object] | None
    #: compressors to measure
    codes: tuple[str, ...]

    @property
    def is_cacheable(self) -> bool:
        """True if the request asks for nothing beyond a quick profile, so that the cached table answers it."""
        return self.quick and self.base is None and not self.probes and self.pace is None and not self.codes


class _Profiler:
    """One run of the profiler on this rank."""

    def __init__(self, request: _ProfileRequest) -> None:
        self.request = request
        self.budget_s, self.quick, self.probes, self.base = (
            request.budget_s, request.quick, request.probes, request.base,
        )  # fmt: skip
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.progress = request.progress if self.rank == 0 else None
        self.timeout_s, self.started = request.timeout_s, perf_counter()
        self.alone_s = self.core_s = 0.0  # while this rank measured alone: by the clock, and with a core
        self.facts = gather_facts(self.device)
        self.hosts = [facts.host for facts in self.facts]
        mine, machines = self.facts[self.rank], [facts.machine for facts in self.facts]
        sharing, place = machines.count(mine.machine), machines[: self.rank].count(mine.machine)
        self.slowdown = max(1.0, sharing / mine.cores) if mine.kind == "cpu" else 1.0
        self.measures_ops = mine.kind != "cpu" or place < mine.cores
        self.names = list(dict.fromkeys(facts.device for facts in self.facts))
        self.suffix = f"@{self.names.index(mine.device)}"
        self.store = ProfileStore(self.facts, self.slowdown, request.path)
        ops = grid(mine.kind)
        self.ops = coarse(ops) if self.quick else ops
        self.state = ProfileState(self.store.about)

    # ---- the run

    def run(self) -> Cluster:
        """Measure and tell everyone."""
        if self.request.is_cacheable and (cached := self.store.cached()) is not None:
            return cached
        if self.request.resume and not self.quick:
            self.state = self.store.earlier()
        ranks = Ranks(self.device, max(self.timeout_s, 30.0), self.request.pace, QUICK_PACE_S if self.quick else PACE_S)
        wires = self._wire_tasks(ranks) if self.world > 1 and not (self.base and self.base.wires) else []
        known = self.base is not None and bool(self.base.device(0).curves)
        memory = min(self.facts[self.rank].memory_bytes / 8, 2e9)
        facts = [] if known else fact_tasks(self.device)
        if known and self.probes:
            facts = fact_tasks(self.device)[-1:]  # what a backward is measured with
        ops = [] if known else [op_task(op, self.device, memory) for op in self.ops]
        steps, coded = self._optimizer_tasks(), self._coding_tasks(ranks.pace)
        exact = [probe_task(f"probe/{probe.signature}", probe, self.device, memory) for probe in self.probes]
        shares = (0.3, 0.5, 0.6, 0.9) if exact else (0.5, 0.9, 1.0, 1.0) if self.quick else (0.4, 0.75, 0.9, 0.9)
        if not wires:
            shares = (0.0, 0.45, 0.6, 0.9) if exact else (0.0, 0.75, 0.95, 0.95)
        visits = 1 if self.quick else _VISITS
        if steps:  # the first optimizer of a process imports for a second or two, which no step pays
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        self.started = perf_counter()
        try:
            self._alone(facts, 1.0, "facts", 1)
            self._together(ranks, wires, shares[0], "collectives", visits)
            self._alone(ops, shares[1], "ops", visits, _MIN_SHARE)
            self._alone(coded, (shares[1] + shares[2]) / 2, "codes", visits, _MIN_SHARE)
            self._alone(steps, shares[2], "optimizers", visits)
            if self.world > 1 and not known:
                task = Task("fact/overlap", "fact/overlap", 0.0, partial(over_ranks.overlap_probe, ranks), width=3)
                self._together(ranks, [task], shares[2] + 0.03, "overlap", 1)
            self._alone(exact, shares[3], "exact ops", visits)
            if not self.quick:
                several = sum(f.device == self.facts[self.rank].device for f in self.facts)  # whose visits are together
                self._alone([*exact, *ops], 0.95, "again", _VISITS * several + _REPEAT_VISITS)
                self._together(ranks, wires, 1.0, "again", _VISITS + _REPEAT_VISITS)
        finally:
            ranks.close()
        return self._finish()

    def _left(self, share: float) -> float:
        return max(share * self.budget_s - (perf_counter() - self.started), 0.0)

    def _together(self, ranks: Ranks, tasks: Sequence[Task], share: float, title: str, visits: int) -> None:
        """Tasks of all ranks at once, until ``share`` of the budget is spent."""
        if tasks:
            (left,) = ranks.agree([self._left(share)])
            engine = Engine(self.state, agree=ranks.agree, save=self.store.save, progress=self.progress)
            engine.run(tasks, left, title=title, visits=visits)

    def _alone(self, tasks: Sequence[Task], share: float, title: str, visits: int, least: float = 0.0) -> None:
        """Tasks of single ranks, at most one per core at once; then every rank knows all results. least: share of the
        budget that they have, however long what went before took."""
        if not tasks:
            return
        until = perf_counter() + max(self._left(share), least * self.budget_s)
        tasks = [replace(task, key=task.key + self.suffix) for task in tasks]
        local = ProfileState.from_json(self.state.to_json())
        before = {key: (len(record.visits), record.samples) for key, record in local.records.items()}
        fault: Exception | None = None
        began, core_s = perf_counter(), thread_time()
        try:
            if self.measures_ops:
                engine = Engine(local, save=self.store.save, progress=self.progress)
                engine.run(tasks, until - perf_counter(), title=title, visits=visits)
        except Exception as error:
            fault = error
        self.alone_s += perf_counter() - began
        self.core_s += thread_time() - core_s
        left = max(until - perf_counter(), 0.0)
        await_all_ranks("profiling", left + self.timeout_s)  # a rank that hangs is named, not waited for
        raise_on_all_ranks(fault)
        new = {}
        for key, record in local.records.items():
            visits_before, samples_before = before.get(key, (0, 0))
            if len(record.visits) > visits_before:
                new[key] = (record.visits[visits_before:], record.samples - samples_before)
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (new, local.skipped) if self.measures_ops else None)
        for entry in everyone:
            for key, (found, samples) in (entry[0] if entry else {}).items():
                record = self.state.records.setdefault(key, TaskRecord())
                record.visits += found
                record.samples += samples
        for entry in everyone:
            for key, why in (entry[1] if entry else {}).items():
                if key not in self.state.records:
                    self.state.skipped.setdefault(key, why)
        for key in [key for key in self.state.skipped if key in self.state.records]:
            del self.state.skipped[key]
        self.store.save(self.state)

    # ---- tasks

    def _wire_tasks(self, ranks: Ranks) -> list[Task]:
        """In order of value: what every plan of the whole world asks for at a few sizes, then the rest."""
        axes, sends = over_ranks.group_forms(self.hosts), over_ranks.send_forms(self.hosts)
        whole = [form for form in axes if form.size * form.groups == self.world]
        parts = [form for form in axes if form.size * form.groups != self.world]
        largest = min(_MAX_BYTES[self.facts[0].kind], min(f.memory_bytes for f in self.facts) // 64)

        def tasks(kinds: Sequence[str], among: Sequence[ConcurrentGroups], sizes: Sequence[int]) -> list[Task]:
            return [
                self._wire_task(ranks, kind, form, nbytes)
                for nbytes in sizes if nbytes <= largest for form in among for kind in kinds
            ]  # fmt: skip

        coarse = _QUICK_SIZES if self.quick else _COARSE_SIZES
        first = [  # the smaller sizes of all before the larger ones of any: on slow links those take the whole budget
            task for nbytes in coarse
            for task in (*tasks(("send",), sends, (nbytes,)), *tasks(COLLECTIVES, whole, (nbytes,)))
        ]  # fmt: skip
        if self.quick:
            return first
        return [
            *first,
            *tasks(COLLECTIVES, parts, coarse),
            *tasks(COLLECTIVES, whole, _FINE_SIZES),
            *tasks(("send",), sends, _FINE_SIZES),
            *tasks(ROOTED_COLLECTIVES, whole, coarse),
            *tasks(COLLECTIVES, parts, _FINE_SIZES),
            *tasks(ROOTED_COLLECTIVES, parts, coarse),
            *tasks(OWN_ALGORITHMS if dist.get_backend() == "gloo" else (), whole, coarse),
        ]

    def _wire_task(self, ranks: Ranks, kind: str, form: ConcurrentGroups, nbytes: int) -> Task:
        series = f"wire/{kind}/{form.key}"
        width = 2 if kind == "send" else 1
        return Task(f"{series}/{nbytes}", series, float(nbytes), partial(ranks.wire, kind, form, nbytes), width)

    def _optimizer_tasks(self) -> list[Task]:
        base = self.base.device(0).optimizers if self.base is not None else ()
        known = {(rate.name, rate.dtype) for rate in base}
        names = ("AdamW",) if self.quick else tuple(over_ranks.OPTIMIZERS)
        dtypes = ("float32",) if self.quick else ("float32", "bfloat16")
        grown = 16 if self.device.type == "cuda" else 1  # the host takes longer to ask for the small ones than they do
        sizes = [(tensors, grown * elements) for tensors, elements in over_ranks.OPTIMIZER_SIZES]
        tasks = []
        for name, dtype in product(names, dtypes):
            if (name, dtype) in known:
                continue
            series = f"optimizer/{name}" + ("" if dtype == "float32" else f":{dtype}")
            for tensors, elements in sizes[:-1] if self.quick else sizes:
                make = partial(over_ranks.optimizer_probe, name, getattr(torch, dtype), tensors, elements, self.device)
                tasks.append(Task(f"{series}/{tensors}x{elements}", series, float(tensors * elements), make))
        return tasks

    def _coding_tasks(self, pace: Callable[[], object]) -> list[Task]:
        known = {rate.name for rate in self.base.device(0).codings} if self.base is not None else set()
        sizes = over_ranks.CODED_LENGTHS[:-1] if self.quick else over_ranks.CODED_LENGTHS
        return [
            Task(f"coding/{name}/{elements}", f"coding/{name}", float(elements),
                 partial(over_ranks.coded_sum_probe, name, elements, self.device, pace))
            for elements in sizes for name in self.request.codes if name not in known and name != "none"
        ]  # fmt: skip

    # ---- the result

    def _finish(self) -> Cluster:
        text = ""
        with fail_together():
            if self.rank == 0:
                cluster = self._cluster()
                if self.request.path is not None:
                    cluster.save(self.request.path)
                # a table with gaps is worth a profile, not a place in the cache
                self.store.finish(cluster, self.request.pace is None, keep=not (self.quick and self.state.skipped))
                text = cluster.to_json()
        return Cluster.from_json(broadcast_from_rank0(lambda: text))

    def _cluster(self) -> Cluster:
        provenance = self._provenance()
        if self.base is not None:
            return self._extended(self.base, provenance)
        source = "measured: " + ", ".join(f"{key} {value}" for key, value in provenance if key != "skipped")
        devices = {}
        for number, name in enumerate(self.names):
            facts = next(facts for facts in self.facts if facts.device == name)
            mine = view(self.state, f"@{number}")
            device = measured_device(facts, self.ops, mine, self.state, self.slowdown, source)
            devices[name] = with_overlap(device, self.state)
        wires = wires_of(self.state)
        inner = inner_link(self.facts[0].kind, wires, self.slowdown)
        hosts = []
        for _, run in groupby(self.facts, lambda facts: facts.host):
            of_host = list(run)
            hosts.append(Host(devices[of_host[0].device], len(of_host), inner))
        return Cluster(
            f"measured:{self.world}",
            tuple(hosts),
            inner if len(hosts) == 1 else network_link(wires),
            "switch",
            dist.get_backend(),
            self.slowdown,
            wires,
            provenance,
        )

    def _extended(self, base: Cluster, provenance: tuple[tuple[str, str], ...]) -> Cluster:
        """The base with what it lacked."""
        hosts = []
        for host in base.hosts:
            name = host.device.name
            state = view(self.state, f"@{self.names.index(name)}" if name in self.names else "@0")
            hosts.append(replace(host, device=extended_device(host.device, state, self.slowdown)))
        before, after = dict(base.provenance), dict(provenance)
        for key in ("seconds", "samples"):
            after[key] = f"{float(before.get(key, 0)) + float(after[key]):.10g}"
        known = {key.partition("@")[0] for key in self.state.records}
        still_skipped = [
            entry for entry in before.pop("skipped", "").split("; ") if entry and entry.split("@")[0] not in known
        ]
        still_skipped += [
            entry for entry in after.pop("skipped", "").split("; ") if entry and entry not in still_skipped
        ]
        skipped = {"skipped": "; ".join(still_skipped)} if still_skipped else {}
        return replace(
            base,
            hosts=tuple(hosts),
            wires=base.wires or wires_of(self.state),
            provenance=tuple((before | after | skipped).items()),
        )

    def _provenance(self) -> tuple[tuple[str, str], ...]:
        mine = self.facts[0]
        out = dict(machine()) | dict(mine.software)
        out |= {"ranks": str(self.world), "hosts": str(len(set(self.hosts))), "mode": "quick" if self.quick else "full"}
        out |= {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": f"{perf_counter() - self.started:.1f}",
            "samples": str(sum(record.samples for record in self.state.records.values())),
        }
        busy = 1.0 - self.core_s / max(self.alone_s, 1e-9)
        if mine.kind == "cpu" and busy > _BUSY:
            out["busy"] = f"{busy:.0%}"
        if self.state.skipped:
            out["skipped"] = "; ".join(f"{key} ({why})" for key, why in self.state.skipped.items())
        return tuple(out.items())
