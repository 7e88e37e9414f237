"""The files of a checkpoint: complete or not there, whoever is killed; checked when read; and never code."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from meshwright.runtime.checkpoint import storage
from meshwright.runtime.checkpoint.storage import Checkpoint, commit, latest_checkpoint, prepare, write_part

FACTS: dict[str, Any] = {"extra": {}, "groups": [], "loss_scale": None}


def saved(run: Path, step: int = 1, value: float = 0.0, keep: int | None = None) -> Path:
    """A checkpoint of two ranks: ``w`` split by rows, ``flag`` and ``z`` whole on both."""
    folder, w = storage.step_folder(run, step), torch.arange(24.0).view(6, 4) + value
    prepare(folder)
    for rank, (start, stop) in enumerate([(0, 4), (4, 6)]):
        own = [
            ("w", (6, 4), ((start, stop), (0, 4)), w[start:stop]),
            ("flag", (), (), torch.tensor(True)),
            ("z", (2,), ((0, 2),), torch.tensor([1 + 2j, 3 - 1j])),
        ]
        write_part(folder, rank, own)
    commit(folder, {**FACTS, "step": step}, 2, keep, 0.0)
    return folder


def test_any_part_is_read_and_other_tools_read_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = saved(tmp_path)
    checkpoint = Checkpoint(folder)
    w = torch.arange(24.0).view(6, 4)
    assert torch.equal(checkpoint.whole("w"), w)
    assert checkpoint.whole("flag").item() is True
    assert checkpoint.whole("z")[1] == 3 - 1j
    part = torch.zeros(3, 2)
    checkpoint.fill("w", part, ((2, 5), (1, 3)))
    assert torch.equal(part, w[2:5, 1:3])
    assert len(checkpoint.tensors["flag"].blocks) == 1
    assert torch.equal(load_file(folder / "rank-1.safetensors")["w"], w[4:])
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "rank-0.safetensors", "rank-1.safetensors",
    ]  # fmt: skip


def test_a_checkpoint_of_schema_1_is_read_and_checked(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    manifest, w = folder / "manifest.json", torch.arange(24.0).view(6, 4)
    document = json.loads(manifest.read_text())
    del document["crc32"]
    document["schema"] = 1
    for tensor in document["tensors"].values():
        for block in tensor["blocks"]:
            data, count = (folder / block["file"]).read_bytes(), 1
            for start, stop in block["box"]:
                count *= stop - start
            size = storage.DTYPES[tensor["dtype"]].itemsize * count
            del block["xxh3"]
            block["crc32"] = zlib.crc32(data[block["start"] : block["start"] + size])
    manifest.write_text(json.dumps({**document, "crc32": storage._checksum(document)}))
    assert torch.equal(Checkpoint(folder).whole("w"), w)
    flip = folder / "rank-0.safetensors"
    data = bytearray(flip.read_bytes())
    data[document["tensors"]["w"]["blocks"][0]["start"]] ^= 1
    flip.write_bytes(data)
    with pytest.raises(ValueError, match="'w' are not those that were written"):
        Checkpoint(folder).whole("w")


def test_newest_is_found_and_the_oldest_go(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for step in (9, 10, 11):
        saved(tmp_path, step, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]
    assert Checkpoint(tmp_path).step == 11
    saved(tmp_path, 11, 50.0)  # the same step again
    assert Checkpoint(tmp_path).whole("w")[0, 0] == 50.0


class Killed(BaseException):
    """What ends a save between two system calls."""


@pytest.mark.parametrize("again", [False, True])
def test_a_save_that_is_cut_off_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Cut before each file that is written, each removal and each rename, of a new step and of the same one."""
    step, left = 2 if again else 3, 0
    saved(tmp_path, 2, 7.0)
    names = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")
    real = {name: getattr(os, name) for name in names}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real[name](*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(os, name, counted(name))
    for cut in range(1, 100):
        left = cut
        try:
            saved(tmp_path, step, 8.0 + cut)
            break
        except Killed:
            left = 0
            checkpoint = Checkpoint(tmp_path)
            assert checkpoint.whole("w")[0, 0] in (7.0, *(8.0 + one for one in range(1, cut + 1)))
            assert torch.equal(checkpoint.whole("w") - checkpoint.whole("w")[0, 0], torch.arange(24.0).view(6, 4))
    assert 10 < cut < 99
    assert Checkpoint(tmp_path).whole("w")[0, 0] == 8.0 + cut
    assert not list(tmp_path.glob(".step-*"))


def test_a_killed_process_loses_only_its_last_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from meshwright.runtime.checkpoint.storage import *\n"
        "for step in range(10**6):\n"
        "    folder, w = step_folder(sys.argv[1], step), torch.full((2**20,), float(step))\n"
        "    prepare(folder); write_part(folder, 0, [('w', (2**20,), ((0, 2**20),), w)])\n"
        "    commit(folder, {'step': step, 'extra': {}, 'groups': [], 'loss_scale': None}, 1, 2, 0.0)\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    done = int(process.stdout.readline())
    time.sleep(random.Random(0).uniform(0.05, 0.1))
    process.send_signal(signal.SIGKILL)
    done = max([done, *map(int, process.stdout.read().split())])
    process.wait()
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.step >= done
    assert torch.equal(checkpoint.whole("w"), torch.full((2**20,), float(checkpoint.step)))
    saved(tmp_path, 10**7)
    assert not list(tmp_path.glob(".step-*"))


# ---- damage


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    file = saved(tmp_path) / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"rank-0.safetensors: the bytes of '\w+' are not those that were written"):
        [Checkpoint(tmp_path).whole(name) for name in ("w", "flag", "z")]
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"rank-0.safetensors has \d+ bytes instead of \d+"):
        Checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"rank-0.safetensors has no bytes instead of \d+"):
        Checkpoint(tmp_path)


def test_old_and_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        Checkpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"a pickle")
    with pytest.raises(ValueError, match="of an older version, whose metadata is a pickle, which is never read"):
        Checkpoint(tmp_path)


def _mutant(document: Any, draw: random.Random) -> Any:
    """The document with one value replaced."""
    at = document
    while True:
        key = draw.choice(list(at)) if isinstance(at, dict) else draw.randrange(len(at))
        if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.8:
            at = at[key]
            continue
        odd = [None, -1, 2**70, 1e400, "", "../../etc/passwd", [], {}, [[]], True, 0.5, "rank-7.safetensors", 2**40]
        if draw.random() < 0.2 and isinstance(at, dict):
            del at[key]
        else:
            at[key] = draw.choice(odd)
        return document


def test_mutants_of_the_manifest_are_refused_in_one_line_or_read_right(tmp_path: Path) -> None:
    manifest = saved(tmp_path) / "manifest.json"
    text, draw, refused = manifest.read_text(), random.Random(1), list[str]()
    for case in range(600):
        kind = case % 3
        if kind == 0:
            mutant = json.dumps(_mutant(json.loads(text), draw))
        elif kind == 1:
            mutant = text[: draw.randrange(len(text))]
        else:
            at = draw.randrange(len(text))
            mutant = text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :]
        manifest.write_text(mutant)
        try:
            read = Checkpoint(tmp_path).whole("w")
        except ValueError as error:
            refused.append(str(error))
        else:
            assert torch.equal(read, torch.arange(24.0).view(6, 4))  # only blanks differed
    assert len(refused) > 570
    assert not any("\n" in one for one in refused)
    read_all = 0
    for _ in range(600):  # as somebody would write them who knows the checksum
        document = _mutant(json.loads(text), draw)
        document.pop("crc32", None)
        try:
            manifest.write_text(json.dumps({**document, "crc32": storage._checksum(document)}))
            checkpoint = Checkpoint(tmp_path)
            for name in checkpoint.tensors:
                checkpoint.whole(name)
            read_all += 1
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017 - some are read
    assert 50 < read_all < 300
    for bomb in ("[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "\x00\xff", ""):
        manifest.write_text(bomb)
        with pytest.raises(ValueError, match=r"manifest\.json: "):
            Checkpoint(tmp_path)
