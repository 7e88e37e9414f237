"""The facts about the ranks of a job, and the files of their profiles: an interrupted state, and the last table.

A fingerprint says what a table holds for: devices, driver, torch, backend, hosts and ranks. Files are written by rank 0
alone and told to the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from ...costmodel.cluster import Cluster
from ...costmodel.profiled import RankFacts
from ...costmodel.profiler import ProfileState
from ...costmodel.tables import cache_directory, machine, machine_memory_bytes, usable_cores
from ..transport.error_propagation import broadcast_from_rank0

__all__ = ["ProfileStore", "gather_facts"]

_tables: dict[str, Cluster] = {}  # of this process, by fingerprint


def gather_facts(device: torch.device) -> list[RankFacts]:
    """Every rank's facts, in rank order; the memory of a machine is divided among its CPU ranks. Collective.

    ``$MESHWRIGHT_HOST`` names the host that a rank counts to (by default its machine). ValueError unless the ranks of a
    host follow one another.
    """
    mine = _facts(device)
    facts: list[RankFacts] = [mine] * dist.get_world_size()
    dist.all_gather_object(facts, mine)
    hosts = [each.host for each in facts]
    if len(list(groupby(hosts))) != len(set(hosts)):
        raise ValueError(
            f"the ranks of one host follow one another, but got the hosts {', '.join(hosts)} in rank order; "
            "start the ranks host by host"
        )
    sharing = [each.machine for each in facts]
    return [
        replace(each, memory_bytes=each.memory_bytes // sharing.count(each.machine)) if each.kind == "cpu" else each
        for each in facts
    ]


def _facts(device: torch.device) -> RankFacts:
    name = socket.gethostname()
    software = {"torch": torch.__version__, "backend": dist.get_backend()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        software |= {"cuda": str(torch.version.cuda), "driver": _driver()}
        kind, title, memory, cores = "cuda", properties.name, properties.total_memory, 0
    else:
        about = machine()
        kind, title, memory = "cpu", f"{about['processor']} core", machine_memory_bytes()
        cores = usable_cores()
    software |= {"python": platform.python_version()}
    host = os.environ.get("MESHWRIGHT_HOST") or name
    return RankFacts(host, name, cores, kind, title, memory, tuple(software.items()))


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


class ProfileStore:
    """The files of one job's profiles. path: the file that is asked for; without it everything is in the cache."""

    def __init__(self, facts: Sequence[RankFacts], slowdown: float, path: str | os.PathLike[str] | None) -> None:
        what = [[f.kind, f.device, f.memory_bytes, f.software] for f in facts]
        hosts = [len(list(run)) for _, run in groupby(facts, lambda f: f.host)]
        self.about = hashlib.sha256(json.dumps([what, hosts, slowdown]).encode()).hexdigest()[:16]
        self.writes = dist.get_rank() == 0
        folder = cache_directory()
        self.table = folder / f"cluster-{self.about}.json"
        self.partial = folder / f"profile-{self.about}.partial" if path is None else Path(f"{os.fspath(path)}.partial")

    def save(self, state: ProfileState) -> None:
        """Keep what was measured so far. A folder that cannot be written to costs the resuming, not the profile."""
        if self.writes:
            with suppress(OSError):
                self.partial.parent.mkdir(parents=True, exist_ok=True)
                state.save(self.partial)

    def earlier(self) -> ProfileState:
        """Return the state of an interrupted profile of these same ranks, on every rank. Collective."""
        text = ""
        if self.writes and self.partial.is_file():
            with suppress(ValueError):  # half a file, or another program's: begin anew
                state = ProfileState.load(self.partial)
                text = state.to_json() if state.about == self.about else ""
        text = broadcast_from_rank0(lambda: text)
        return ProfileState.from_json(text) if text else ProfileState(self.about)

    def cached(self) -> Cluster | None:
        """The last table of these same ranks, on every rank. Collective."""
        text = ""
        if self.writes and self.about in _tables:
            text = _tables[self.about].to_json()
        elif self.writes and self.table.is_file():
            with suppress(ValueError):  # of another release: measured again and replaced
                text = Cluster.load(self.table).to_json()
        text = broadcast_from_rank0(lambda: text)
        return Cluster.from_json(text) if text else None

    def finish(self, cluster: Cluster, usual: bool, keep: bool) -> None:
        """On rank 0: the state has served its purpose. A table of ``usual`` conditions is kept for ``cached``, on disk
        if ``keep``, else for this process only."""
        if usual:
            _tables[self.about] = cluster
        with suppress(OSError):
            self.partial.unlink(missing_ok=True)
            if usual and keep:
                self.table.parent.mkdir(parents=True, exist_ok=True)
                cluster.save(self.table)
