"""Weights in safetensors, as Hugging Face's models keep them: read by any plan, and written from a checkpoint.

    file    ::= length of the header (8 bytes, little endian), header (JSON), data
    header  ::= {name: {"dtype", "shape", "data_offsets": [from, to) in the data}, …, "__metadata__": texts}
    folder  ::= model.safetensors | model-00001-of-00003.safetensors … and model.safetensors.index.json: name → file

Reading maps files into memory, so a tensor takes room while it is copied to where it trains; writing holds one tensor.
The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...costmodel.files import write_atomically

__all__ = ["DTYPES", "DTYPE_NAMES", "as_bytes", "header", "open_safetensors", "write_safetensors"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "C128": torch.complex128, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
_Entry = tuple[str, torch.dtype, Sequence[int]]  # name, dtype, shape


def as_bytes(values: torch.Tensor) -> Any:
    """The bytes of a tensor: its own memory if that is contiguous and on the CPU."""
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def header(entries: Iterable[_Entry]) -> bytes:
    """The beginning of a file with these tensors one after the other."""
    described, at = dict[str, Any]({"__metadata__": {"format": "pt"}}), 0
    for name, dtype, shape in entries:
        size = prod(shape) * dtype.itemsize
        described[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- reading


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Name → tensor of a ``.safetensors`` file, or of a folder with ``model.safetensors`` or several files and their
    index, as ``parallelize(..., state_dict=…)`` takes them.

    The tensors are on the CPU, mapped from the files: bytes are read when they are used. Changes of them reach no file.
    ValueError for what is no such file, or damaged.
    """
    path = Path(path)
    if path.is_dir() and (path / INDEX).is_file():
        found: dict[str, torch.Tensor] = {}
        for file in _files_of(path / INDEX):
            found |= _mapped(path / file)
        return found
    return _mapped(path / "model.safetensors" if path.is_dir() else path)


def _files_of(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except OSError as error:
        raise ValueError(f"{index}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: is no index of safetensors files ({error!r:.100})") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable() or len(file) > 255:
            raise ValueError(f"{index}: names files beside it, but got {file!r:.100}")
    return files


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    try:
        length = int.from_bytes(data[:8], "little")
        if size < 8 or length > size - 8:
            raise ValueError("the header is longer than the file")
        described = json.loads(data[8 : 8 + length])
        described.pop("__metadata__", None)
        return {name: _tensor(data, 8 + length, size, entry) for name, entry in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: is damaged or no safetensors file ({error!r:.200})") from error


def _tensor(data: Any, start: int, size: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, (first, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(isinstance(one, int) and one >= 0 for one in (*shape, first, end)):
        raise ValueError("shapes and offsets are whole numbers")
    if start + end > size or end - first != prod(shape) * dtype.itemsize:
        raise ValueError("a tensor does not lie in its bytes")
    if first == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8, count=end - first, offset=start + first).view(dtype).view(shape)


# ---- writing


def write_safetensors(
    folder: str | os.PathLike[str], entries: Sequence[_Entry], values: Callable[[str], torch.Tensor], max_bytes: int
) -> list[Path]:
    """Write these tensors into ``folder``, one in memory at a time; the files.

    One is ``model.safetensors``; several, of at most ``max_bytes`` where no tensor is larger, have an index. OSError
    where they cannot be written: a file appears whole or not at all, the index last.
    """
    files: list[list[_Entry]] = [[]]
    used = 0
    for entry in entries:
        size = prod(entry[2]) * entry[1].itemsize
        if files[-1] and used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append(entry)
        used += size
    Path(folder).mkdir(parents=True, exist_ok=True)
    written, weight_map, total = list[Path](), dict[str, str](), 0
    for number, inside in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        partial = Path(folder) / f".{file}.partial"
        with open(partial, "wb") as out:
            out.write(header(inside))
            for name, *_ in inside:
                total += out.write(memoryview(as_bytes(values(name))))
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, Path(folder) / file)
        written.append(Path(folder) / file)
        weight_map |= {name: file for name, *_ in inside}
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(Path(folder) / INDEX, json.dumps(index, indent=1))
        written.append(Path(folder) / INDEX)
    return written
