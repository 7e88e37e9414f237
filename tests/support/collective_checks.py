"""What the tests of collectives run on ranks."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import torch
import torch.distributed as dist
from meshwright.runtime.collectives import functional as f
from meshwright.runtime.collectives.channel import Channel
from meshwright.runtime.collectives.dense import DenseSum
from meshwright.runtime.collectives.parameter_server import Server, Worker
from meshwright.runtime.collectives.rounds import ALGORITHMS
from meshwright.runtime.errors import PeerError
from meshwright.runtime.transport.launch import join

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64)


def _own_channel(**options):
    return Channel(dist.new_group(backend="gloo", **options))


def _digest(x):
    """Its bits, to be compared between ranks."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def all_reduces():
    """(what is wrong, the bits of every sum): every algorithm on lengths, dtypes and ops, whole and in chunks."""
    channel = _own_channel()
    wrong, bits = [], []
    names = [*ALGORITHMS["all_reduce"], "hierarchical"]
    for n, dtype in [(0, torch.float32), (1, torch.int8), (2, torch.bfloat16), *((1003, dtype) for dtype in DTYPES)]:
        whole = torch.randint(-9, 10, (channel.size, n), generator=torch.Generator().manual_seed(n)).to(dtype)
        for name in names:
            for op, wanted in (("sum", whole.sum(0).to(dtype)), ("max", whole.amax(0))):
                got = f.all_reduce(whole[channel.rank].clone(), channel, name, op, members=1)
                if not torch.equal(got, wanted):
                    wrong.append((name, n, dtype, op))
    values = torch.randn(1003, generator=torch.Generator().manual_seed(channel.rank))
    for name in names:
        for dtype in DTYPES[:2]:
            for chunk in (1 << 10, 1 << 20):
                one = DenseSum(channel, 1003, dtype, name, members=1, chunk_bytes=chunk)
                for _ in range(3):  # standing receives take turns
                    x = values.to(dtype, copy=True)
                    one.start(x).wait()
                bits.append((name, _digest(x)))
                one.close()
    return wrong, bits


def large(nbytes):
    """Whether sums too large for standing receives, in chunks, two on their way at once, equal Gloo's."""
    channel = _own_channel()
    n = nbytes // 4 + channel.size - 1
    wrong = []
    for name in (*ALGORITHMS["all_reduce"], "hierarchical"):
        one = DenseSum(channel, n, torch.float32, name, members=1, chunk_bytes=1 << 16)
        xs = [torch.arange(n, dtype=torch.float32) % 97 + channel.rank * k for k in (1, 2)]
        wanted = [x.clone() for x in xs]
        for pending in [one.start(x) for x in xs]:
            pending.wait()
        for x, y in zip(xs, wanted):
            dist.all_reduce(y)
            if not torch.equal(x, y):
                wrong.append(name)
        one.close()
    return wrong


def others():
    """What is wrong with the kinds that are no all-reduce."""
    channel = _own_channel()
    p, me, wrong = channel.size, channel.rank, []
    data = torch.arange(p * p * 6, dtype=torch.float32).view(p, p, 2, 3)  # [rank, row, ...]
    mine, total = data[me], data.sum(0)
    hierarchical = [("hierarchical", {"members": members}) for members in range(1, p + 1) if p % members == 0]

    def check(name, got, wanted):
        if (got is None) != (wanted is None) or (got is not None and not torch.equal(got, wanted)):
            wrong.append(name)

    def names(kind):
        powers = p & (p - 1) == 0
        return [name for name in ALGORITHMS[kind] if powers or not name.startswith("recursive")]

    for name, options in [*((n, {}) for n in names("all_gather")), *hierarchical]:
        check(f"all_gather {name}", f.all_gather(data[me, 0], channel, name, **options), data[:, 0])
    for name, options in [*((n, {}) for n in names("reduce_scatter")), *hierarchical]:
        check(f"reduce_scatter {name}", f.reduce_scatter(mine, channel, name, **options), total[me])
    for name in names("all_to_all"):
        check(f"all_to_all {name}", f.all_to_all(mine, channel, name), data[:, me])
    for root in range(p):
        for name in names("broadcast"):
            check(f"broadcast {name}", f.broadcast(mine.clone(), channel, name, root), data[root])
        for name in names("reduce"):
            check(f"reduce {name}", f.reduce(mine, channel, name, root=root), total if me == root else None)
        for name in names("scatter"):
            given = mine if me == root else None
            check(f"scatter {name}", f.scatter(given, torch.empty(2, 3), channel, name, root), data[root, me])
        for name in names("gather"):
            check(f"gather {name}", f.gather(data[me, 0], channel, name, root), data[:, 0] if me == root else None)
    for name, options in hierarchical:
        check(f"broadcast {name}", f.broadcast(mine.clone(), channel, name, **options), data[0])
    if p > 1:
        if me == 0:
            f.send(mine.transpose(0, 1), channel, 1)
        if me == 1:
            check("send", f.receive(torch.empty(2, p, 3), channel, 0), data[0].transpose(0, 1))
    return wrong


def refusals():
    """The messages of the errors."""
    channel, said = _own_channel(), []
    one = DenseSum(channel, 4, torch.float32)
    for call in (
        lambda: one.start(torch.zeros(5)),
        lambda: one.start(torch.zeros(4, dtype=torch.float64)),
        lambda: one.load_state_dict({"residual": torch.zeros(4)}),
        lambda: DenseSum(channel, 4, torch.float32, "rings"),
        lambda: f.all_reduce(torch.zeros(4), channel, op="mean"),
        lambda: f.all_to_all(torch.zeros(3), channel),
        lambda: f.send(torch.zeros(3), channel, channel.rank),
        lambda: f.scatter(None, torch.zeros(1), channel, root=channel.rank),
    ):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    one.close()
    dist.barrier(channel.group)  # nobody leaves while another still posts receives
    return said


def without_one(rank, folder, name, seconds):
    """Rank 1 of 3 dies between two sums; the others write down how long the next two took and what they raised."""
    join(rank, 3, f"{folder}/store")
    channel = _own_channel(timeout=timedelta(seconds=seconds))
    one = DenseSum(channel, 8, torch.float32, name)
    one.start(torch.ones(8)).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin, said = monotonic(), []
    for _ in range(2):
        try:
            one.start(torch.ones(8)).wait()
        except PeerError as error:
            said.append(str(error))
    Path(folder, f"rank-{rank}").write_text(json.dumps([monotonic() - begin, said]))
    os._exit(0)  # such a group cannot be left in good order


def last_part(name):
    """Two sums; before the second its peers are made to look gone to whoever posts a receive. Its result, and what the
    third one says."""
    channel = _own_channel()
    one = DenseSum(channel, 8, torch.float32, name)
    one.start(torch.ones(8)).wait()
    dist.barrier()

    def gone(x, peer, tag):
        raise channel._failed(peer, "a message from it", RuntimeError("Connection closed by peer"))

    channel.receive = gone
    x = torch.full((8,), channel.rank + 1.0)
    one.start(x).wait()
    dist.barrier()
    try:
        one.start(torch.ones(8)).wait()
    except PeerError as error:
        return x.tolist(), str(error)
    return x.tolist(), ""


def serve(staleness):
    """A quadratic problem: rank 0 serves and works, rank 1 is fast, rank 2 slow. The server's largest lead, values and
    number of updates; a worker's last values."""
    channel, optimum, weights = _own_channel(), torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    steps, pause_s = [(80, 0.001), (40, 0.0), (60, 0.003)][channel.rank]
    if channel.rank == 0:
        count = []
        server = Server(
            channel, weights, lambda w, g: (w.sub_(g, alpha=0.05), count.append(1)), [0, 1, 2], staleness
        )  # fmt: skip
        server.start()
        worker = server.local()
    else:
        worker = Worker(channel, weights, server=0)
    for _ in range(steps):
        sleep(pause_s)
        worker.step(worker.values - optimum)
    worker.close()
    if channel.rank != 0:
        return worker.values.tolist()
    server.finish()
    return server.largest_lead, server.values.tolist(), len(count)
