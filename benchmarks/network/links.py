"""Namespaces of this machine joined by links of a chosen rate and delay; ``Links`` makes them and takes them away.

Without delay the kernel does all: a bridge, a pair of virtual cards per namespace, and a token bucket on both ends of
each pair, so that what several ends send to one has to share its downlink. This kernel may lack the network emulator,
so with a delay the links are those of ``relay.py``, a switch in user space that models rate and delay itself; fast
enough for 100 Mbit/s, not for 1 Gbit/s.

    with Links(4, 100e6, 0.010) as links:
        subprocess.run(links.command(0, ["ping", "-c", "3", links.address(1)]))
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["Links", "missing"]

_PREFIX = "mwlink"
_RELAY_BITS_PER_S = 2e8  # what the relay in user space keeps up with
_SOCKET_BYTES = 2**19  # that one connection may have under way, at least; or twice what the link holds in a round trip
_BUNDLE_BYTES = 16384  # the largest bundle of segments: 1.3 ms at 100 Mbit/s; two may pass at once after a pause


def missing() -> str:
    """What this machine lacks for shaped links, in one sentence; "" if nothing."""
    if not sys.platform.startswith("linux"):
        return f"shaped links need Linux's network namespaces, but got {sys.platform}; run the other parts"
    if os.geteuid() != 0:
        return "shaped links need root to make network namespaces, but this is another user; run it as root"
    if lacks := [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]:
        return f"shaped links need ip, tc and sysctl, but {', '.join(lacks)} is missing; install iproute2 and procps"
    return ""


class Links:
    """``count`` namespaces; ``bits_per_s`` up and down for each, ``delay_s`` one way between any two; with a delay, of
    all frames the share ``loss`` is dropped.

    Use as a context manager. Namespaces that a killed process left behind are removed when the next ``Links`` starts.
    OSError with what is missing where links cannot be made.
    """

    def __init__(self, count: int, bits_per_s: float, delay_s: float = 0.0, loss: float = 0.0) -> None:
        if loss and not delay_s:
            raise ValueError(f"only links with delay drop frames, but got loss {loss} without delay_s; give one")
        if delay_s and bits_per_s > _RELAY_BITS_PER_S:
            raise ValueError(
                f"links with delay carry at most {_RELAY_BITS_PER_S:.3g} bit/s, but got {bits_per_s:.3g}; ask for less"
            )
        self.count, self.bits_per_s, self.delay_s, self.loss = count, bits_per_s, delay_s, loss
        self._name = f"{_PREFIX}{os.getpid()}-"
        self._switch = f"{self._name}s"
        self._relay: subprocess.Popen[bytes] | None = None

    def namespace(self, index: int) -> str:
        """The name of namespace ``index``."""
        return f"{self._name}{index}"

    def address(self, index: int) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{index + 1}"

    def command(self, index: int, words: Sequence[str]) -> list[str]:
        """``words`` run inside of namespace ``index``."""
        return ["ip", "netns", "exec", self.namespace(index), *words]

    def start(
        self, index: int, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``words`` as rank ``index`` of a world with one rank per namespace, as torchrun would: the environment
        names the rank, the meeting point and the network card, and each namespace is a host of its own."""
        given = {"RANK": str(index), "WORLD_SIZE": str(self.count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        given |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
        given |= {"MESHWRIGHT_HOST": self.namespace(index), "OMP_NUM_THREADS": "1", **(environment or {})}
        return subprocess.Popen(self.command(index, words), env={**os.environ, **given})

    # ---- up and down

    def __enter__(self) -> Links:
        if why := missing():
            raise OSError(why)
        _remove_strays()
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def _up(self) -> None:
        _run("ip", "netns", "add", self._switch)
        for index in range(self.count):
            _run("ip", "netns", "add", self.namespace(index))
        if self.delay_s:
            self._relayed()
        else:
            self._bridged()
        held = max(_SOCKET_BYTES, int(self.bits_per_s / 8 * 4 * self.delay_s))
        for index in range(self.count):
            space = self.namespace(index)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", "eth0", "up", "address", f"02:00:00:00:00:{index + 1:02x}")
            _run("ip", "-n", space, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            # a step's pauses are no reason to start slowly again
            settings = ["net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_congestion_control=reno"]
            settings += [f"net.ipv4.tcp_wmem=4096 16384 {held}", "net.ipv6.conf.all.disable_ipv6=1"]
            _run(*self.command(index, ["sysctl", "-qw", *settings]))

    def _bridged(self) -> None:
        switch = self._switch
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for index in range(self.count):
            space, port = self.namespace(index), f"port{index}"
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            for where, card in ((space, "eth0"), (switch, port)):
                _run("ip", "-n", where, "link", "set", card, "gso_max_size", str(_BUNDLE_BYTES))
                bucket = (
                    "tbf",
                    "rate",
                    f"{self.bits_per_s:.0f}bit",
                    "burst",
                    str(2 * _BUNDLE_BYTES),
                    "limit",
                    "4000000",
                )
                _run("tc", "-n", where, "qdisc", "add", "dev", card, "root", *bucket)

    def _relayed(self) -> None:
        script = str(Path(__file__).with_name("relay.py"))
        words = [sys.executable, script, str(self.count), str(self.bits_per_s), str(self.delay_s), str(self.loss)]
        self._relay = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != b"ready":
            raise OSError(
                "shaped links with delay need /dev/net/tun, but the relay did not start; see its message above"
            )
        for index in range(self.count):
            space = self.namespace(index)
            _run("ip", "-n", self._switch, "link", "set", f"port{index}", "netns", space)
            _run("ip", "-n", space, "link", "set", f"port{index}", "name", "eth0")
            # a tap drops what its queue does not hold: that has room for what the senders' sockets may have under way
            _run("ip", "-n", space, "link", "set", "eth0", "txqueuelen", "1000", "gso_max_size", str(_BUNDLE_BYTES))

    def _down(self) -> None:
        if self._relay is not None:
            for pipe in (self._relay.stdin, self._relay.stdout):
                assert pipe is not None
                pipe.close()  # it ends when its input closes, by whatever cause
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._relay.wait(5)
            self._relay.kill()
            self._relay = None
        _remove([space for space in _namespaces() if space.startswith(self._name)])


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _remove(spaces: Sequence[str]) -> None:
    """End what runs in our namespaces, then delete them."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        found = [pid for space in spaces for pid in _processes(space)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        if found:
            time.sleep(0.5)
    for space in spaces:
        subprocess.run(["ip", "netns", "delete", space], check=False)


def _processes(space: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in listed.split()]


def _remove_strays() -> None:
    """Namespaces of processes that are no more."""
    strays = []
    for space in _namespaces():
        match = re.match(rf"{_PREFIX}(\d+)-", space)
        if match and not Path(f"/proc/{match[1]}").exists():
            strays.append(space)
    _remove(strays)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"shaped links need `{' '.join(words)}`, but it says: {done.stderr.strip() or done.returncode}")
