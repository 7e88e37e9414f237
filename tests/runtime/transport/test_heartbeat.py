"""A rank that stands still is named by the others, in one line each, and all end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import meshwright as mw
import pytest
import torch.distributed as dist
from meshwright.runtime.transport.heartbeat import timeout_of
from meshwright.runtime.transport.launch import ensure_initialized
from meshwright.runtime.transport.progress import PROGRESS, Progress

from tests.support.ranks import RankError, RankPool
from tests.support.small_net import BATCHES, net, sgd

CASES = {
    "stopped in a step": (1, "step", r"rank 1 gives no sign of life for \d+ s \(stopped, or its host cut off\)"),
    "rank 0 is stopped": (0, "step", r"rank 0 gives no sign of life for \d+ s .*; its last known action: in \w+, at "),
    "stopped before planning": (1, "start", r"rank 1 gives no sign of life for \d+ s .* in the caller's code, after"),
    "waits in its own code": (1, "sleep", r"rank 1 stands still for \d+ s, in the caller's code, after .* of step 0"),
}


def stand_still(folder: str, who: int, when: str) -> None:
    """Train, with a rank that stands still at some time."""
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    PROGRESS.folder = folder
    ensure_initialized(2.0)

    def perhaps(now: str) -> None:
        if rank == who and when == now:
            time.sleep(60) if when == "sleep" else os.kill(os.getpid(), signal.SIGSTOP)

    time.sleep(0.3)  # so that there was a beat
    perhaps("start")
    parallel = mw.parallelize(
        net(), mw.Cluster.local(2), example_inputs=BATCHES[0], optimizer=sgd, strategy="dp2", microbatches=1
    )
    parallel.train_step(*BATCHES[0])
    perhaps("sleep")
    real = parallel.session.optimizer.step

    def step() -> None:
        perhaps("step")
        real()

    parallel.session.optimizer.step = step
    parallel.train_step(*BATCHES[1])


@pytest.mark.parametrize("case", list(CASES))
def test_who_stands_still_is_named_and_all_end(tmp_path: Path, case: str) -> None:
    who, when, expected = CASES[case]
    pool = RankPool()
    try:
        with pytest.raises(RankError, match="the process died"):
            pool.run(2, stand_still, str(tmp_path), who, when, timeout_s=30.0)
    finally:
        pool.close()
    line = (tmp_path / f"stderr-{1 - who}").read_text()
    assert re.fullmatch(rf"meshwright: rank {1 - who} stops, because {expected}.*; stacks are in \S+\n", line), line
    stacks = (tmp_path / "hang" / f"rank-{1 - who}.txt").read_text()
    assert f"rank {1 - who}: in " in stacks
    assert "Thread" in stacks
    assert "stand_still" in stacks


def test_what_a_rank_does_in_words() -> None:
    progress = Progress()
    assert progress.told() == "in the caller's code, after the start"
    with progress.call("train_step"):
        progress.step = 7
        progress.note("1F3c1")
        assert progress.told() == "in train_step, at forward of microbatch 3 on stage 1, chunk 1 of step 7"
        progress.note("optimizer")
        assert progress.told() == "in train_step, at the update of step 7"
    assert progress.steps == 1
    assert progress.count == 4


def test_the_time_out_is_asked_or_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_of(None) == 300.0
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", "20")
    assert timeout_of(None) == 20.0
    assert timeout_of(5) == 5.0
    with pytest.raises(ValueError, match=r"timeout_s is the seconds .* above 0, but got 0"):
        timeout_of(0)
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match=r"MESHWRIGHT_TIMEOUT_S is the seconds .*, but got 'soon'"):
        timeout_of(None)


def end_apart() -> int:
    """Rank 1 stops beating, as one that has ended, while rank 0 is in its own code for longer than the time-out."""
    from meshwright.runtime.transport import heartbeat

    ensure_initialized(0.5)
    dist.barrier()
    if dist.get_rank() == 1:
        heartbeat._end()
    time.sleep(1.5)
    dist.barrier()
    return dist.get_rank()


@pytest.mark.ranks
def test_a_rank_may_end_before_the_others(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks.run(2, end_apart) == [0, 1]
