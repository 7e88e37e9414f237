"""The first error of a job: the rank that fails writes it where the ranks met, and those that fail because of it quote
it.

    FirstError         an error as other ranks can read it
    publishes_errors   a decorator of collective methods: what they raise is published; a lost peer becomes a PeerError
                       that quotes the error of the rank that was lost, or names the ranks whose processes are gone
    report_uncaught    the exception hook of a rank: one block for the first error, one line on every other rank

A rank publishes before its connections close, so whoever finds one closed finds the error, too. An error that all ranks
share (``error_propagation``) is printed by rank 0, any other by the rank that it is of: rank 0 cannot be woken from a
collective. ``MESHWRIGHT_DEBUG=1`` leaves all tracebacks as Python prints them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from time import sleep
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from ..errors import PeerError, lost_peer
from .progress import PROGRESS

__all__ = [
    "FirstError", "first_error_of", "publish", "publish_through", "publishes_errors", "quote", "remember_rank0",
    "report_uncaught", "world_store",
]  # fmt: skip


P = ParamSpec("P")
T = TypeVar("T")

_KEY, _PROCESS, _PRINTED = "meshwright/first_error", "meshwright/process", "meshwright/printed"
_CLAIM_S = 2.0  # how long rank 0 has to print an error that all ranks share
_LIBRARIES = (str(Path(__file__).parents[2]) + os.sep, os.path.dirname(torch.__file__) + os.sep)
#: what Gloo says when a peer's connection is gone
_LOST = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Timed out waiting|pair closure|gloo/transport"
)

_rank0: str | None = None  # its host and process: the store that tells them may be gone with it
_published: bytes | None = None  # by this rank; withdrawn by its next call


@dataclass(frozen=True)
class FirstError:
    """An error as other ranks can read it. ``shared``: every rank of the job has been told."""

    rank: int
    kind: str
    message: str
    traceback: str
    shared: bool = False

    @classmethod
    def of(cls, error: BaseException, shared: bool = False) -> FirstError:
        """The error of this rank."""
        return cls(dist.get_rank(), type(error).__name__, str(error), _traceback(error), shared)

    @property
    def headline(self) -> str:
        """The rank, the kind of error and its first line."""
        first = next(iter(self.message.splitlines()), "")
        return f"{self.verdict}: {self.kind}: {first}"

    @property
    def verdict(self) -> str:
        """The event on the rank, in words."""
        return f"rank {self.rank} {'lost a peer' if self.kind == 'PeerError' else 'failed first'}"


def _traceback(error: BaseException) -> str:
    """The error with the frames that help: for a ValueError those of the user's code, without what it was made from;
    for a lost peer, too."""
    if not isinstance(error, ValueError | PeerError):
        return "".join(traceback.format_exception(error))
    brief = traceback.TracebackException.from_exception(error, limit=None)
    frames = [frame for frame in brief.stack if not frame.filename.startswith((*_LIBRARIES, "<"))]
    brief.stack = traceback.StackSummary.from_list(frames)
    return "".join(brief.format(chain=False))


def quote(error: BaseException, first: FirstError) -> None:
    """Say of an error that it is the first, or follows from it."""
    error.first_error = first  # type: ignore[attr-defined]


def first_error_of(error: BaseException) -> FirstError | None:
    """The first error that this one is, or follows from, as far as that is known."""
    return getattr(error, "first_error", None)


def world_store() -> Any:
    """The store in which the world's ranks met. RuntimeError where they have parted."""
    group: Any = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group any more")
    return group.get_group_store()


# ---- publishing


def publishes_errors(method: Callable[P, T]) -> Callable[P, T]:
    """The collective method, with its errors published as above."""

    @wraps(method)
    def publishing(*args: P.args, **kwargs: P.kwargs) -> T:
        if _published is not None:
            _withdraw()
        try:
            with PROGRESS.call(method.__name__):
                return method(*args, **kwargs)
        except Exception as error:
            if first_error_of(error) is not None or not dist.is_initialized():
                raise
            if not _is_of_a_lost_peer(error):
                publish(error)
                raise
            found = _explained(error)
        if os.environ.get("MESHWRIGHT_DEBUG"):
            raise found[0] from found[1]
        raise found[0] from None

    return publishing


def _is_of_a_lost_peer(error: BaseException) -> bool:
    return isinstance(error, PeerError | dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    )


def _explained(error: Exception) -> tuple[PeerError, Exception]:
    """The PeerError of a lost peer, which quotes the first error; and what it was found by."""
    first = _read()
    if first is None:
        found = error if isinstance(error, PeerError) else lost_peer("a collective", _missing_ranks(), error)
        publish(found)
        return found, error
    if first.rank == dist.get_rank():
        return (error if isinstance(error, PeerError) else lost_peer("a collective", (), error)), error
    found = PeerError(f"{first.headline}; see its messages, then start all ranks again")
    quote(found, first)
    return found, error


def publish(error: BaseException) -> None:
    """Publish an error of this rank, unless another was first or it is known. It takes the place of a lost peer."""
    global _published
    if first_error_of(error) is not None or not dist.is_initialized():
        return
    mine = FirstError.of(error)
    first = mine
    with suppress(RuntimeError, OSError):  # the host of the store may be what is gone
        store, text = world_store(), json.dumps(asdict(mine))
        stored = store.compare_set(_KEY, "", text)
        if stored.decode() != text and json.loads(stored)["kind"] == "PeerError" and mine.kind != "PeerError":
            stored = store.compare_set(_KEY, stored.decode(), text)
        if stored.decode() == text:
            _published = stored
        else:
            first = FirstError(**json.loads(stored))
    quote(error, first)


def publish_through(store: Any, error: BaseException) -> None:
    """Publish an error of this rank through a connection of the caller's, unless another was first."""
    store.compare_set(_KEY, "", json.dumps(asdict(FirstError.of(error))))


def _withdraw() -> None:
    """Take back what this rank published: the caller caught it and goes on."""
    global _published
    assert _published is not None
    with suppress(RuntimeError, OSError):
        world_store().compare_set(_KEY, _published.decode(), "")
    _published = None


def _read() -> FirstError | None:
    """The first error that a rank has published."""
    with suppress(RuntimeError, OSError, ValueError):
        store = world_store()
        if store.check([_KEY]) and (text := store.get(_KEY)):
            return FirstError(**json.loads(text))
    return None


# ---- processes that are gone


def _missing_ranks() -> tuple[int, ...]:
    """The ranks of this host whose processes are gone. A process that is ending closes its connections a little
    earlier."""
    processes = {} if _rank0 is None or dist.get_rank() == 0 else {0: _rank0}
    with suppress(RuntimeError, OSError):
        store = world_store()
        for rank in range(dist.get_world_size()):
            if rank != dist.get_rank() and store.check([f"{_PROCESS}/{rank}"]):
                processes[rank] = store.get(f"{_PROCESS}/{rank}").decode()
    local: dict[int, int] = {}
    for rank, process in processes.items():
        host, _, pid = process.rpartition(" ")
        if host == socket.gethostname():
            local[rank] = int(pid)
    for _ in range(20):
        if gone := tuple(rank for rank, pid in local.items() if _is_gone(pid)):
            return gone
        sleep(0.01)
    others = tuple(rank for rank in range(dist.get_world_size()) if rank != dist.get_rank())
    return others if len(others) == 1 else ()


def remember_rank0(store: Any) -> bool:
    """Read which process rank 0 is; False if it is not there yet."""
    global _rank0
    if found := store.check([f"{_PROCESS}/0"]):
        _rank0 = store.get(f"{_PROCESS}/0").decode()
    return bool(found)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


# ---- errors that nobody catches


def report_uncaught() -> None:
    """Print uncaught errors of this process as the module says, from now on. Tells the other ranks which process this
    is."""
    with suppress(RuntimeError, OSError):
        world_store().set(f"{_PROCESS}/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")
    before = sys.excepthook
    if getattr(before, "of_meshwright", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception):
            publish(error)
        first = first_error_of(error)
        if first is None or os.environ.get("MESHWRIGHT_DEBUG"):
            before(kind, error, trace)
            return
        if PROGRESS.told_why:  # the heartbeat has
            return
        PROGRESS.told_why = True
        print(_text(error, first), file=sys.stderr, end="", flush=True)

    hook.of_meshwright = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _text(error: BaseException, first: FirstError) -> str:
    """The block of the first error where this rank is to print it, else one line that quotes it."""
    rank = dist.get_rank() if dist.is_initialized() else first.rank
    if (first.shared or rank == first.rank) and _claims(rank, first):
        trace = _traceback(error) if rank == first.rank else first.traceback  # from the script on
        body = "".join(f"  {line}\n" for line in trace.rstrip().splitlines())
        return f"meshwright: {first.verdict}, all ranks stop (MESHWRIGHT_DEBUG=1 shows whole tracebacks):\n{body}"
    own = "" if isinstance(error, PeerError) or first.shared or rank == first.rank else (
        f" with {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    )  # fmt: skip
    return f"meshwright: rank {rank} stops{own}, because {first.headline}\n"


def _claims(rank: int, first: FirstError) -> bool:
    """True if this rank is to print the block: rank 0 of an error that all know, or who is left after a while."""
    try:
        store = world_store()
        key = f"{_PRINTED}/{first.rank}/{crc32(first.message.encode())}"
        if first.shared and rank != 0:
            with suppress(RuntimeError):
                store.wait([key], timedelta(seconds=_CLAIM_S))
        return int(store.add(key, 1)) == 1
    except (RuntimeError, OSError, ValueError):  # there is no world any more
        return rank == 0 or not first.shared
