"""The shared memory transport between ranks of one machine, and its tagged messages and all-reduce.

Data lie in pages that both ranks have mapped; short control messages, called words, go over Unix sockets. Over a
loopback every byte is copied four times and waits for a thread of the backend to get a core, which takes milliseconds
where ranks compute on all of them. A word wakes the thread that waits for it, and nobody else.

    memory = SharedMemory.connect(group)  # collective
    if memory.spans_group:
        mine, theirs = memory.share(1 << 20)  # collective

A word is (kind, key, value); those of one kind and key arrive in the order in which they were sent. A rank has one
connection to each of its peers, from which one thread reads.

*Messages.* The sender copies a message into pages of its own that the receiver has mapped, and sends a word. The
receiver copies it out when it needs it, and sends a word that the pages are free. Neither needs the other one's
processor meanwhile. Where a peer has ``_BUFFERS_PER_SIZE`` messages of a size already, the backend sends the next one:
buffers do not grow with the number of messages in flight.

*All-reduce.* Every rank has a row [n] in shared memory and sends a word when its numbers are in it. Once all have, each
rank adds up its part of all rows, in the order of ranks, and writes the sum into every row. That moves some 2.5 n
numbers with two ranks, no more than n (1 + 3/p) of them by one rank of p, where a ring over a loopback copies most of
them eight times.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..collectives.protocol import Pending, Submit
from ..collectives.worker import submit
from ..errors import PeerError, lost_peer

__all__ = ["SharedMemory", "SharedMemoryAllReduce", "SharedMemoryMessages", "SharedMessage"]


_WORD = struct.Struct("<qqq")
_PAGES, _FIRST_KIND = 0, 1
_TOKEN_BYTES = 16


class SharedMemory:
    """This rank's connections to the ``peers``, ranks of a group that are on its machine."""

    def __init__(self, group: Any, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = tuple(sorted(peers))
        self._sockets = peers
        self._ready = {peer: select.poll() for peer in peers}
        for peer, connection in peers.items():
            connection.settimeout(timeout_s)
            self._ready[peer].register(connection, select.POLLIN)
        self._inbox: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._kinds, self._shared = _FIRST_KIND, 0
        weakref.finalize(self, _close, list(peers.values()))

    @classmethod
    def connect(cls, group: Any = None) -> SharedMemory:
        """Collective over the group. There are no peers where tensors are not in the machine's memory, where the system
        cannot share it, for ranks that $MESHWRIGHT_HOST counts to different hosts, and where
        $MESHWRIGHT_SHARED_MEMORY is 0."""
        group = dist.group.WORLD if group is None else group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1 or dist.get_backend(group) != "gloo":
            return cls(group, {}, 1.0)
        listener, token = _listener(size), secrets.token_bytes(_TOKEN_BYTES)
        mine = None if listener is None else (_machine_identity(), listener.getsockname(), token)
        every: list[tuple[tuple[Any, ...], bytes, bytes] | None] = [None] * size
        dist.all_gather_object(every, mine, group=group)
        memory = [p for p, one in enumerate(every) if one and mine and one[0] == mine[0] and p != rank]
        timeout_s = _group_timeout_s(group)
        peers: dict[int, socket.socket] = {}
        if listener is not None:
            try:
                listener.settimeout(timeout_s)
                for peer in (p for p in memory if p < rank):  # their backlogs take all who come
                    _, address, secret = every[peer]  # type: ignore[misc]
                    peers[peer] = _socket()
                    peers[peer].connect(address)
                    peers[peer].send(struct.pack("<q", rank) + secret)
                while len(peers) < len(memory):
                    connection, _ = listener.accept()
                    connection.settimeout(timeout_s)
                    said = connection.recv(64)
                    if said[8:] == token:
                        peers[struct.unpack_from("<q", said)[0]] = connection
                    else:
                        connection.close()  # of somebody else
            except OSError as error:
                raise PeerError(
                    f"shared memory: of ranks {memory} of this machine got only {sorted(peers)} ({error}); see the "
                    "others' messages, then start all ranks again, or set MESHWRIGHT_SHARED_MEMORY=0"
                ) from error
            finally:
                listener.close()
        return cls(group, peers, timeout_s)

    @property
    def spans_group(self) -> bool:
        """True if all other ranks of the group are peers, and there are any."""
        return 0 < len(self.peers) == self.size - 1

    def reserve(self, kinds: int) -> int:
        """The first of so many kinds of words that nobody else uses. Alike on all ranks if they ask in the same
        order."""
        first, self._kinds = self._kinds, self._kinds + kinds
        return first

    def send_word(self, peer: int, kind: int, key: int = 0, value: int = 0, pages: int = -1) -> None:
        """Send a word, and with it a file of pages. Raises PeerError where the peer is no more."""
        word = _WORD.pack(kind, key, value)
        try:
            if pages < 0:
                self._sockets[peer].send(word)
            else:
                socket.send_fds(self._sockets[peer], [word], [pages])
        except OSError as error:
            raise self._failed(peer, str(error)) from error

    def receive_word(self, peer: int, kind: int, key: int = 0) -> int:
        """Wait for a word; its value. Raises PeerError if none comes within the group's time-out."""
        return self._next(peer, kind, key)[0]

    def has_word(self, peer: int, kind: int, key: int = 0) -> bool:
        """True if such a word has arrived."""
        while not self._inbox[peer, kind, key] and self._ready[peer].poll(0):
            self._read(peer)
        return bool(self._inbox[peer, kind, key])

    def share(self, nbytes: int) -> tuple[torch.Tensor, dict[int, mmap.mmap]]:
        """Bytes of this rank that the others can read and write, and theirs by rank. Collective, where ``spans_group``.

        Whoever sums what tensors hold finds every rank's bytes at this rank alone: theirs become tensors where they are
        used.
        """
        self._shared += 1
        mine, pages = allocate_pages(nbytes)
        for peer in self.peers:
            self.send_word(peer, _PAGES, self._shared, nbytes, pages)
        os.close(pages)
        return mine, {peer: self.pages_of(peer, _PAGES, self._shared) for peer in self.peers}

    def pages_of(self, peer: int, kind: int, key: int) -> mmap.mmap:
        """The bytes of which a word tells, with the file of its pages and their number."""
        nbytes, pages = self._next(peer, kind, key)
        try:
            return mmap.mmap(pages, nbytes)
        finally:
            os.close(pages)

    def _next(self, peer: int, kind: int, key: int) -> tuple[int, int]:
        inbox = self._inbox[peer, kind, key]
        while not inbox:
            self._read(peer)
        return inbox.popleft()

    def _read(self, peer: int) -> None:
        try:
            try:
                said, pages, _, _ = socket.recv_fds(self._sockets[peer], _WORD.size, 1)
            except ConnectionResetError:  # it left, with words unread; what it told before comes after this
                said, pages, _, _ = socket.recv_fds(self._sockets[peer], _WORD.size, 1)
        except OSError as error:
            raise self._failed(peer, str(error)) from error
        if not said:
            raise self._failed(peer, os.strerror(errno.ECONNRESET))
        kind, key, value = _WORD.unpack(said)
        self._inbox[peer, kind, key].append((value, pages[0] if pages else -1))

    def _failed(self, peer: int, why: str) -> PeerError:
        return lost_peer("shared memory", [dist.get_global_rank(self.group, peer)], why)


def allocate_pages(nbytes: int) -> tuple[torch.Tensor, int]:
    """Fresh zeros [nbytes] that can be shared, and the file of their pages, which is to be closed."""
    assert nbytes > 0, "there are no pages of nothing"
    pages = os.memfd_create("meshwright")
    os.ftruncate(pages, nbytes)
    return torch.from_file(f"/proc/self/fd/{pages}", shared=True, size=nbytes, dtype=torch.uint8), pages


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _listener(backlog: int) -> socket.socket | None:
    """None where this system, or the user, has no memory to share."""
    if os.environ.get("MESHWRIGHT_SHARED_MEMORY") == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        listener = _socket()
        listener.bind("")  # to a name that the kernel chooses, of no file
        listener.listen(backlog)
    except OSError:
        return None
    return listener


def _group_timeout_s(group: Any) -> float:
    """The seconds for which the group waits for a rank."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return (default_pg_timeout if options is None else options._timeout).total_seconds()


def _machine_identity() -> tuple[Any, ...]:
    """The identity of the machine, equal on ranks that can share memory: the kernel, and its network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        booted = file.read()
    return booted, os.stat("/proc/self/ns/net").st_ino, os.environ.get("MESHWRIGHT_HOST", "")


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


_BUFFERS_PER_SIZE = 4
_SENT_BY_BACKEND = -1


class SharedMemoryMessages:
    """This rank's messages to and from its peers. Made on all ranks of the group of ``memory`` alike."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory, self.peers = memory, memory.peers
        self._here = memory.reserve(3)
        self._free, self._mapped = self._here + 1, self._here + 2
        self._mine: list[torch.Tensor] = []
        self._theirs: dict[tuple[int, int], mmap.mmap] = {}
        self._empty: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._made: Counter[tuple[int, int]] = Counter()

    def send(self, x: torch.Tensor, peer: int, tag: int) -> bool:
        """Send a contiguous tensor, which may change at once. False: it is to be sent by the backend, as the peer
        expects now."""
        number = self._free_buffer(peer, x.nbytes) if x.numel() else _SENT_BY_BACKEND
        if number >= 0:
            self._mine[number].copy_(x.view(-1).view(torch.uint8))
        # the word goes out in either case: it tells the receiver by which way the message comes
        self.memory.send_word(peer, self._here, tag, number)
        return number >= 0

    def _free_buffer(self, peer: int, nbytes: int) -> int:
        size, memory = (peer, nbytes), self.memory
        empty = self._empty[size]
        while not empty and memory.has_word(peer, self._free, nbytes):
            empty.append(memory.receive_word(peer, self._free, nbytes))
        if empty:
            return empty.pop()
        if self._made[size] == _BUFFERS_PER_SIZE:
            return _SENT_BY_BACKEND
        self._made[size] += 1
        bytes_, pages = allocate_pages(nbytes)
        self._mine.append(bytes_)
        memory.send_word(peer, self._mapped, len(self._mine) - 1, nbytes, pages)
        os.close(pages)
        return len(self._mine) - 1

    def _take(self, x: torch.Tensor, peer: int, tag: int) -> bool:
        number, memory = self.memory.receive_word(peer, self._here, tag), self.memory
        if number == _SENT_BY_BACKEND:
            return False
        if (peer, number) not in self._theirs:
            self._theirs[peer, number] = memory.pages_of(peer, self._mapped, number)
        x.view(-1).view(torch.uint8).copy_(torch.frombuffer(self._theirs[peer, number], dtype=torch.uint8))
        with suppress(PeerError):  # who sends no more may have left
            memory.send_word(peer, self._free, x.nbytes, number)
        return True


@dataclass
class SharedMessage:
    """A message that will be in ``out``, contiguous, once it has been waited for. group: where it comes by the
    backend."""

    messages: SharedMemoryMessages
    out: torch.Tensor
    peer: int
    tag: int
    group: Any

    def wait(self) -> None:
        """Block until it is here. Raises PeerError."""
        if not self.messages._take(self.out, self.peer, self.tag):
            self.group.recv([self.out], self.peer, self.tag).wait()


_ALIGNED = 64  # elements: parts begin at cache lines


class SharedMemoryAllReduce:
    """The sum, by the communication thread, of flat tensors over the ranks of a group that are all memory. Made on all
    of them alike, and started in the same order. ``buffer`` [length]: the row of this rank. What is summed there need
    not be copied; other tensors, of any length, go through it piece by piece."""

    def __init__(self, memory: SharedMemory, length: int, dtype: torch.dtype, submit: Submit = submit) -> None:
        assert memory.spans_group, "a shared sum is of ranks that share memory"
        self.memory, self._submit = memory, submit
        mine, self._others = memory.share(length * dtype.itemsize)
        self.buffer = mine.view(dtype)
        self._there = memory.reserve(2)
        self._done = self._there + 1

    def start(self, x: torch.Tensor) -> Pending:
        """Start summing ``x``, contiguous, in place."""
        flat = x.detach().view(-1)
        if flat.data_ptr() != self.buffer.data_ptr():
            return self._submit(lambda: self._pass(flat))
        self._notify(self._there)
        return self._submit(lambda: self._sum(len(flat)))

    def _pass(self, x: torch.Tensor) -> None:
        for piece in x.split(len(self.buffer)):
            here = self.buffer[: len(piece)]
            here.copy_(piece)
            self._notify(self._there)
            self._sum(len(piece))
            piece.copy_(here)

    def _sum(self, length: int) -> None:
        """The sum of the first elements of all rows, once they are there, in all rows."""
        self._await_peers(self._there)
        rows = {rank: torch.frombuffer(row, dtype=self.buffer.dtype) for rank, row in self._others.items()}
        rows[self.memory.rank] = self.buffer
        part = -(-length // (self.memory.size * _ALIGNED)) * _ALIGNED
        mine = slice(min(self.memory.rank * part, length), min((self.memory.rank + 1) * part, length))
        total, *others = [rows[rank][mine] for rank in sorted(rows)]
        for other in others:
            total.add_(other)
        for other in others:
            other.copy_(total)
        self._notify(self._done)
        self._await_peers(self._done)

    def _notify(self, kind: int) -> None:
        for peer in self.memory.peers:
            self.memory.send_word(peer, kind)

    def _await_peers(self, kind: int) -> None:
        for peer in self.memory.peers:
            self.memory.receive_word(peer, kind)
