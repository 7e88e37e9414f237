"""Ranks of one machine that reach each other without a network: numbers in pages that both have mapped, words about
them over Unix sockets.

Over a loopback every byte is copied four times, and on its way waits for a thread of the backend to get a core, which
takes milliseconds where ranks compute on all of them. A word wakes the thread that waits for it, and nobody else.

    near = Near.meet(group)  # collective
    if near.is_all:
        mine, theirs = near.share(1 << 20)  # collective

A word is (kind, key, value); those of one kind and key arrive in the order in which they were told. A rank has one
connection to each of its peers, from which one thread reads.
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
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from .collectives.channel import PeerError

__all__ = ["Near"]

_WORD = struct.Struct("<qqq")
_PAGES, _FIRST_KIND = 0, 1
_TOKEN_BYTES = 16


class Near:
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
    def meet(cls, group: Any = None) -> Near:
        """Collective over the group. There are no peers where tensors are not in the machine's memory, where the system
        cannot share it, for ranks that $MESHWRIGHT_HOST counts to different hosts, and where
        $MESHWRIGHT_SHARED_MEMORY is 0."""
        group = dist.group.WORLD if group is None else group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1 or dist.get_backend(group) != "gloo":
            return cls(group, {}, 1.0)
        listener, token = _listener(size), secrets.token_bytes(_TOKEN_BYTES)
        mine = None if listener is None else (_machine(), listener.getsockname(), token)
        every: list[tuple[tuple[Any, ...], bytes, bytes] | None] = [None] * size
        dist.all_gather_object(every, mine, group=group)
        near = [p for p, one in enumerate(every) if one and mine and one[0] == mine[0] and p != rank]
        timeout_s = _patience_s(group)
        peers: dict[int, socket.socket] = {}
        if listener is not None:
            try:
                listener.settimeout(timeout_s)
                for peer in (p for p in near if p < rank):  # their backlogs take all who come
                    _, address, secret = every[peer]  # type: ignore[misc]
                    peers[peer] = _socket()
                    peers[peer].connect(address)
                    peers[peer].send(struct.pack("<q", rank) + secret)
                while len(peers) < len(near):
                    connection, _ = listener.accept()
                    connection.settimeout(timeout_s)
                    said = connection.recv(64)
                    if said[8:] == token:
                        peers[struct.unpack_from("<q", said)[0]] = connection
                    else:
                        connection.close()  # of somebody else
            except OSError as error:
                raise PeerError(
                    f"shared memory: of ranks {near} of this machine got only {sorted(peers)} ({error}); see the "
                    "others' messages, then start all ranks again, or set MESHWRIGHT_SHARED_MEMORY=0"
                ) from error
            finally:
                listener.close()
        return cls(group, peers, timeout_s)

    @property
    def is_all(self) -> bool:
        """Whether the group's other ranks are all peers, and there are any."""
        return 0 < len(self.peers) == self.size - 1

    def reserve(self, kinds: int) -> int:
        """The first of so many kinds of words that nobody else uses. Alike on all ranks if they ask in the same
        order."""
        first, self._kinds = self._kinds, self._kinds + kinds
        return first

    def tell(self, peer: int, kind: int, key: int = 0, value: int = 0, pages: int = -1) -> None:
        """Send a word, and with it a file of pages. Raises PeerError where the peer is no more."""
        word = _WORD.pack(kind, key, value)
        try:
            if pages < 0:
                self._sockets[peer].send(word)
            else:
                socket.send_fds(self._sockets[peer], [word], [pages])
        except OSError as error:
            raise self._failed(peer, str(error)) from error

    def hear(self, peer: int, kind: int, key: int = 0) -> int:
        """Wait for a word; its value. Raises PeerError if none comes within the group's time-out."""
        return self._next(peer, kind, key)[0]

    def heard(self, peer: int, kind: int, key: int = 0) -> bool:
        """Whether such a word is here."""
        while not self._inbox[peer, kind, key] and self._ready[peer].poll(0):
            self._read(peer)
        return bool(self._inbox[peer, kind, key])

    def share(self, nbytes: int) -> tuple[torch.Tensor, dict[int, mmap.mmap]]:
        """Bytes of this rank that the others can read and write, and theirs by rank. Collective, where ``is_all``.

        Whoever sums what tensors hold finds every rank's bytes at this rank alone: theirs become tensors where they are
        used.
        """
        self._shared += 1
        mine, pages = own_pages(nbytes)
        for peer in self.peers:
            self.tell(peer, _PAGES, self._shared, nbytes, pages)
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
        return PeerError(
            f"shared memory: got nothing from or through to rank {dist.get_global_rank(self.group, peer)}, which may "
            f"have died or stand still ({why}); see its own messages, then start all ranks again"
        )


def own_pages(nbytes: int) -> tuple[torch.Tensor, int]:
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


def _patience_s(group: Any) -> float:
    """How long the group waits for a rank."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return (default_pg_timeout if options is None else options._timeout).total_seconds()


def _machine() -> tuple[Any, ...]:
    """What ranks have in common if they can share memory: the kernel, and its network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        booted = file.read()
    return booted, os.stat("/proc/self/ns/net").st_ino, os.environ.get("MESHWRIGHT_HOST", "")


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
