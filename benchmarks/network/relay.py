"""A switch in user space with slow, long links: ``python relay.py COUNT BITS_PER_S DELAY_S LOSS``.

It makes a tap "port0", "port1", … for each end, writes "ready" and carries frames between them until its standard input
closes. A frame waits for its uplink, takes its bits' time on it and ``DELAY_S`` on the way, then waits for the downlink
of the end that it goes to, and takes its time there::

    leaves  = max(read, uplink free) + bits / rate      arrives = max(leaves + delay, downlink free) + bits / rate

An end whose uplink is busy is not read: its own queue fills, as that of a network card would. A downlink that several
ends send to at once queues at most ``QUEUE_BYTES`` and drops the rest. Frames may be bundles of TCP segments (generic
segmentation offload); the headers of each segment count. Of all frames the share ``LOSS`` is dropped on the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

QUEUE_BYTES = 4_000_000
AHEAD_S = 0.002  # how far ahead of its uplink an end is read
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETSNDBUF = 0x400454CA, 0x400454D0, 0x400454D4  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02  # TUN_F_CSUM, TUN_F_TSO4
_VIRTUAL = 10  # bytes of struct virtio_net_hdr before each frame


def make_tap(name: str) -> int:
    """The file descriptor of a new tap."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS)
    fcntl.ioctl(tap, _TUNSETSNDBUF, struct.pack("i", 1 << 26))
    return tap


def bits_of(frame: bytes) -> int:
    """Bits on the wire: every segment of a bundle carries the headers."""
    header, segment = struct.unpack_from("<HH", frame, 2)
    size = len(frame) - _VIRTUAL
    segments = -(-(size - header) // segment) if segment else 1
    return 8 * (size + (segments - 1) * header)


def carry(taps: list[int], rate: float, delay_s: float, loss: float) -> None:
    """Carry frames until standard input closes. The last byte of an end's address is its number plus 1."""
    count = len(taps)
    uplink, downlink = [0.0] * count, [0.0] * count
    under_way: list[tuple[float, int, int, bytes]] = []  # leaves its uplink + delay, serial, end, frame
    arriving: list[tuple[float, int, int, bytes]] = []
    serial, draw = 0, random.Random(0)
    clock = time.monotonic
    while True:
        now = clock()
        free = [taps[i] for i in range(count) if uplink[i] < now + AHEAD_S]
        due = [queue[0][0] for queue in (under_way, arriving) if queue]
        due += [uplink[i] - AHEAD_S for i in range(count) if uplink[i] >= now + AHEAD_S]
        timeout = max(0.0, min(due) - now) if due else None
        ready, _, _ = select.select([*free, 0], [], [], timeout)
        now = clock()
        for tap in ready:
            if tap == 0:
                if not os.read(0, 1):
                    return
                continue
            source = taps.index(tap)
            while uplink[source] < now + AHEAD_S:
                try:
                    frame = os.read(tap, 1 << 17)
                except BlockingIOError:
                    break
                uplink[source] = max(now, uplink[source]) + bits_of(frame) / rate
                broadcast = frame[_VIRTUAL] & 1
                last = frame[_VIRTUAL + 5] - 1
                for end in range(count) if broadcast else (last,) if 0 <= last < count else ():
                    if end != source and draw.random() >= loss:
                        heapq.heappush(under_way, (uplink[source] + delay_s, serial, end, frame))
                        serial += 1
        while under_way and under_way[0][0] <= now:
            at, number, end, frame = heapq.heappop(under_way)
            if downlink[end] - at < 8 * QUEUE_BYTES / rate:
                downlink[end] = max(at, downlink[end]) + bits_of(frame) / rate
                heapq.heappush(arriving, (downlink[end], number, end, frame))
        while arriving and arriving[0][0] <= now:
            _, _, end, frame = heapq.heappop(arriving)
            with contextlib.suppress(OSError):  # an end that is not up yet
                os.write(taps[end], frame)


def main() -> None:
    count, (rate, delay_s, loss) = int(sys.argv[1]), map(float, sys.argv[2:5])
    taps = [make_tap(f"port{i}") for i in range(count)]
    with contextlib.suppress(OSError):
        os.nice(-10)  # frames are due whatever the ranks do
    print("ready", flush=True)
    carry(taps, rate, delay_s, loss)


if __name__ == "__main__":
    main()
