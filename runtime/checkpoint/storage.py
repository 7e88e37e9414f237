"""The files of a checkpoint: one folder a step, complete or not there, and nothing in it is code.

    RUN/step-00000042/manifest.json          format, step, facts, and of each tensor its dtype, shape and blocks
                      plan.json              the plan that trained
                      rank-0.safetensors     the blocks that rank 0 writes; other tools read them, too
                      …

A checkpoint is written in ``RUN/.step-00000042.partial``: each rank writes its file, then ``rank-0.json`` about it as
its mark that it is through. Rank 0 waits for the marks of all, puts the manifest together, and renames the folder.
Every file and folder is synced to disk before the step that relies on it. So whoever is killed, and when, the last
complete checkpoint stays; the next save clears what was left behind. A checkpoint that replaces one of the same step
moves that out of the way first, to ``.step-00000042.replaced``, which is found as long as the new one is not there.

A block is the part [start, stop) of each dim of a tensor that lies in one file, with the XXH3-64 of its bytes (the
CRC-32 in checkpoints of schema 1). Whoever needs a part of it reads the block, checks it, and copies: in memory are the
tensors that are filled, and one block.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from ...costmodel.files import parse_document, sync_folder, write_atomically
from .safetensors import DTYPE_NAMES, DTYPES, as_bytes, header, write_safetensors

__all__ = [
    "Box", "Checkpoint", "StoredBlock", "StoredTensor", "commit", "discard", "export_safetensors", "fail_part",
    "latest_checkpoint", "partial_folder", "prepare", "step_folder", "write_part",
]  # fmt: skip

FORMAT = "meshwright checkpoint"
SCHEMA = 2
#: Schema → the key of a block's checksum in the manifest.
_CHECKSUMS = {1: "crc32", SCHEMA: "xxh3"}
MANIFEST = "manifest.json"
MAX_DIMS = 64
_STEP = re.compile(r"step-(\d{8,18})")
_PART = re.compile(r"rank-(\d{1,7})\.safetensors")
_POLL_S = 0.01
_REMEDY = "load an earlier checkpoint"
_CHUNK_BYTES = 2**20  # read or written, and given to the checksum while the processor's cache has it
Box = tuple[tuple[int, int], ...]  # [start, stop) of each dim


@dataclass(frozen=True)
class StoredBlock:
    """A part of a tensor in a file. start: of its bytes in the file."""

    file: str
    start: int
    checksum: int
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint and the blocks that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]


def step_folder(run: str | os.PathLike[str], step: int) -> Path:
    """The folder of a step's checkpoint."""
    return Path(run) / f"step-{step:08d}"


def latest_checkpoint(run: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in the folder of a run; None if there is none."""
    found = _complete(run)
    return found[-1][1] if found else None


def _complete(run: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, by step."""
    found: dict[int, Path] = {}
    for path in sorted(Path(run).glob("*step-*"), reverse=True):  # "step-" before ".step-": not what it replaced
        name = path.name.removeprefix(".").removesuffix(".replaced") if path.name.endswith(".replaced") else path.name
        if (match := _STEP.fullmatch(name)) and (path / MANIFEST).is_file():
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


# ---- writing


def _aside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")


def partial_folder(folder: Path) -> Path:
    """Where the checkpoint is until it is complete."""
    return _aside(folder, "partial")


def prepare(folder: Path) -> None:
    """Make the place where a checkpoint is written, and clear what saves that were cut off have left. By rank 0."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".step-*"):
        whole = folder.parent / left.name.removeprefix(".").removesuffix(".replaced")
        if left.name.endswith((".partial", ".removed")) or (left.name.endswith(".replaced") and whole.is_dir()):
            shutil.rmtree(left)
    partial_folder(folder).mkdir()


def write_part(folder: Path, rank: int, tensors: Iterable[tuple[str, tuple[int, ...], Box, torch.Tensor]]) -> None:
    """Write this rank's blocks, (name, shape of the whole, box, values), and its mark. Raises OSError."""
    blocks = [(name, shape, box, values.detach()) for name, shape, box, values in tensors]
    partial, file = partial_folder(folder), f"rank-{rank}.safetensors"
    begin = header((name, values.dtype, [stop - start for start, stop in box]) for name, _, box, values in blocks)
    entries, start = [], len(begin)
    with open(partial / file, "wb") as out:
        out.write(begin)
        for name, shape, box, values in blocks:
            checksum, data = xxhash.xxh3_64(), memoryview(as_bytes(values))
            for k in range(0, len(data), _CHUNK_BYTES):
                piece = data[k : k + _CHUNK_BYTES]
                checksum.update(piece)
                out.write(piece)
            entry = [name, DTYPE_NAMES[values.dtype], list(shape), start, checksum.intdigest()]
            entries.append([*entry, [list(part) for part in box]])
            start += len(data)
        out.flush()
        os.fsync(out.fileno())
    write_atomically(partial / f"rank-{rank}.json", json.dumps({"file": file, "bytes": start, "blocks": entries}))


def fail_part(folder: Path, rank: int) -> None:
    """Tell rank 0 that this rank's part will not come: an empty file, for which a full disk has room as a rule."""
    with suppress(OSError):
        (partial_folder(folder) / f"rank-{rank}.failed").touch()


def commit(folder: Path, facts: Mapping[str, Any], ranks: int, keep: int | None, waiting_s: float) -> None:
    """Put the parts of all ranks together, and make the folder appear; then remove all but the newest ``keep``
    checkpoints. By rank 0.

    waiting_s: how long the next part may take to come. Raises OSError, TimeoutError among them.
    """
    partial, tensors, files = partial_folder(folder), dict[str, Any](), dict[str, int]()
    seen = set[object]()
    for rank in range(ranks):
        mark, until = partial / f"rank-{rank}.json", time.monotonic() + waiting_s
        while not mark.exists():
            if (partial / f"rank-{rank}.failed").exists():
                raise OSError(f"rank {rank} could not write its part")
            if time.monotonic() > until:
                raise TimeoutError(f"rank {rank} has not written its part in {partial} as rank 0 sees that folder")
            time.sleep(_POLL_S)
        part = json.loads(mark.read_text())
        files[part["file"]] = part["bytes"]
        for name, dtype, shape, start, checksum, box in part["blocks"]:
            blocks = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "blocks": []})["blocks"]
            if (key := (name, tuple(map(tuple, box)))) not in seen:  # a block that several ranks wrote counts once
                seen.add(key)
                blocks.append({"file": part["file"], "start": start, _CHECKSUMS[SCHEMA]: checksum, "box": box})
    for rank in range(ranks):
        (partial / f"rank-{rank}.json").unlink()
    manifest = {"format": FORMAT, "schema": SCHEMA, "ranks": ranks, **facts, "files": files, "tensors": tensors}
    write_atomically(partial / MANIFEST, json.dumps({**manifest, "crc32": _checksum(manifest)}))
    sync_folder(partial)
    if folder.exists():
        os.rename(folder, _aside(folder, "replaced"))
    os.rename(partial, folder)
    sync_folder(folder.parent)
    shutil.rmtree(_aside(folder, "replaced"), ignore_errors=True)
    for _, old in _complete(folder.parent)[:-keep] if keep else ():
        gone = old.with_name(f".{old.name.removeprefix('.')}.removed")
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def discard(folder: Path) -> None:
    """Remove what a save that failed has written. By rank 0."""
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


# ---- reading


class Checkpoint:
    """A complete checkpoint, open for reading.

    Raises ValueError in one line, for a folder without one or whose manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / MANIFEST).is_file():
            if (self.path / ".metadata").is_file():
                raise ValueError(
                    f"{self.path}: is a checkpoint of an older version, whose metadata is a pickle, which is never "
                    "read; load it with that version and save `full_state_dict()`"
                )
            newest = latest_checkpoint(path)
            if newest is None:
                raise ValueError(f"{self.path}: holds no checkpoint (no complete folder step-N)")
            self.path = newest
        try:
            self._read(parse_document((self.path / MANIFEST).read_text(), "checkpoint", FORMAT, [*_CHECKSUMS], _REMEDY))
        except OSError as error:
            raise ValueError(f"{self.path / MANIFEST}: cannot be read: {error}") from error
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self.path / MANIFEST}: lacks a part or has another type ({error!r}); {_REMEDY}"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.path / MANIFEST}: {str(error)[:300]}") from error

    def _read(self, document: dict[str, Any]) -> None:
        if document.pop("crc32") != _checksum(document):
            raise ValueError(f"is not as it was written (checksum); {_REMEDY}")
        self.facts, self._checksum_key = document, _CHECKSUMS[document["schema"]]
        for name, kinds in (("extra", dict), ("groups", list), ("loss_scale", dict | None)):
            if not isinstance(document[name], kinds):
                raise ValueError(f"{name} is {str(document[name])[:40]!r}; {_REMEDY}")
        self.step = _count(document["step"])
        self.ranks = _count(document["ranks"])
        sizes = {name: _count(size) for name, size in document["files"].items()}
        for name, size in sizes.items():
            if not _PART.fullmatch(name):
                raise ValueError(f"file {name!r} is not named rank-N.safetensors")
            real = (self.path / name).stat().st_size if (self.path / name).is_file() else None
            if real != size:
                raise ValueError(f"{name} has {'no' if real is None else real} bytes instead of {size}")
        key = self._checksum_key
        self.tensors = {name: _tensor(name, entry, sizes, key) for name, entry in document["tensors"].items()}

    def finish(self) -> None:
        """Nothing is left to do: blocks are read when they are asked for."""

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Copy the part ``box`` of a stored tensor into ``target``, of that shape. Raises ValueError where bytes are
        not those that were written, or a part is in no file."""
        stored, filled = self.tensors[name], 0
        for block in stored.blocks:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, block.box)]
            if any(start >= stop for start, stop in common):
                continue
            if block.box == box and target.is_contiguous() and target.dtype == stored.dtype and target.is_cpu:
                self._read_block(name, block, target)
                return
            values = torch.empty([stop - start for start, stop in block.box], dtype=stored.dtype)
            self._read_block(name, block, values)
            inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, block.box))
            into = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box))
            target[into].copy_(values[inside])
            filled += prod(stop - start for start, stop in common)
        if filled != prod(stop - start for start, stop in box):
            raise ValueError(f"{self.path}: parts of {name!r} are in no file")

    def whole(self, name: str) -> torch.Tensor:
        """A stored tensor, whole, on the CPU."""
        stored = self.tensors[name]
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, out, tuple((0, size) for size in stored.shape))
        return out

    def _read_block(self, name: str, block: StoredBlock, values: torch.Tensor) -> None:
        data, read = memoryview(as_bytes(values)), 0
        checksum = xxhash.xxh3_64() if self._checksum_key == "xxh3" else _Crc32()
        try:
            with open(self.path / block.file, "rb", buffering=0) as file:
                file.seek(block.start)
                while read < len(data) and (got := file.readinto(data[read : read + _CHUNK_BYTES])):
                    checksum.update(data[read : read + got])
                    read += got
        except OSError as error:
            raise ValueError(f"{self.path / block.file}: cannot be read: {error}") from error
        if read < len(data) or checksum.intdigest() != block.checksum:
            raise ValueError(
                f"{self.path / block.file}: the bytes of {name!r} are not those that were written (checksum); {_REMEDY}"
            )


class _Crc32:
    """CRC-32 as ``xxhash`` has its checksums."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def export_safetensors(
    checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], max_file_bytes: int = 5 * 10**9
) -> list[Path]:
    """Write the weights and buffers of a checkpoint, or of the newest in a run's folder, as Hugging Face's
    ``from_pretrained`` reads them: whole tensors by the names of the model, in files of at most ``max_file_bytes``.

    No ranks are needed, and memory for one tensor. Returns the files. ValueError for what is no checkpoint or damaged,
    OSError where files cannot be written.
    """
    stored, start = Checkpoint(checkpoint), "model."
    entries = [
        (name.removeprefix(start), one.dtype, one.shape)
        for name, one in stored.tensors.items()
        if name.startswith(start)
    ]
    return write_safetensors(folder, entries, lambda name: stored.whole(start + name), max_file_bytes)


def _count(value: Any, limit: int = 2**62) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _tensor(name: str, entry: Mapping[str, Any], sizes: Mapping[str, int], checksum: str) -> StoredTensor:
    dtype, shape = DTYPES[entry["dtype"]], tuple(_count(size) for size in entry["shape"])
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{name!r} has {len(shape)} dims")
    blocks = []
    for one in entry["blocks"]:
        box = tuple((_count(start), _count(stop)) for start, stop in one["box"])
        start = _count(one["start"])
        if len(box) != len(shape) or any(not a <= b <= size for (a, b), size in zip(box, shape)):
            raise ValueError(f"a block of {name!r} lies outside of its shape")
        if start + prod(b - a for a, b in box) * dtype.itemsize > sizes[one["file"]]:
            raise ValueError(f"a block of {name!r} lies outside of {one['file']}")
        blocks.append(StoredBlock(one["file"], start, _count(one[checksum], 2**64), box))
    if sum(prod(stop - start for start, stop in block.box) for block in blocks) != prod(shape):
        raise ValueError(f"the blocks of {name!r} are not the whole tensor; {_REMEDY}")
    return StoredTensor(dtype, shape, tuple(blocks))
