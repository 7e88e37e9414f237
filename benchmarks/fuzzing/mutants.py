"""A good file with one thing wrong, the same for the same number."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from tests.support.document_mutants import places

__all__ = ["mutant"]

WORDS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, 10**30, 10**400, 1e308, 5e-324, float("inf"), float("nan"), "",
    "x" * 100_000, "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "C:\\nul", "a\0b", "\ud800", "\u202e\n\r\t",
    "%s%n{0}", "__class__", "rank-0.safetensors", [], {}, [[]], [None], {"": None}, {"a": {"b": {}}}, [0] * 100_000,
)  # fmt: skip
DEPTHS = (60, 900, 5_000, 100_000)
DEEP = "meshwright-deep"


def mutant(good: bytes, number: int, seal: Callable[[Any], Any] | None = None) -> tuple[bytes, str]:
    """The changed file, and what was done. seal: what puts a checksum right again, in half of the cases."""
    draw = random.Random(number)
    try:
        document = json.loads(good)
    except ValueError:
        document = None
    if document is None or draw.random() < 0.35:
        return _bytes(good, draw)
    changed, how = _structure(document, draw)
    if seal is not None and draw.random() < 0.7:
        changed = seal(changed)
    text = json.dumps(changed)
    if how == "deep":
        depth = draw.choice(DEPTHS)
        opened, closed = draw.choice([("[", "]"), ('{"a":', "}")])
        text = text.replace(f'"{DEEP}"', opened * depth + "0" + closed * depth)
        how = f"{depth} deep"
    return text.encode("utf-8", "surrogatepass"), how


def _structure(document: Any, draw: random.Random) -> tuple[Any, str]:
    changed = json.loads(json.dumps(document))
    found = list(places(changed))
    if not found or draw.random() < 0.02:
        return draw.choice(WORDS), "another document"
    top = draw.choice(sorted({str(path[0]) for path in found}))
    path = draw.choice([path for path in found if str(path[0]) == top])  # its top-level fields are equally likely
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    how = draw.choice(["delete", "replace", "replace", "number", "swap", "rename", "text", "deep", "again"])
    where = ".".join(map(str, path))
    if how == "number" and type(old) in (int, float):
        parent[key] = draw.choice([old * 2, old // 2, -old - 1, old + 1, old - 1, old * 1e300, old * 10**18])
    elif how == "text" and isinstance(old, str):
        parent[key] = draw.choice(
            [old[::-1] + "x", old.upper(), old.replace("R", "S0"), old * 1000, old[:1], "\0" + old]
        )
    elif how == "swap":
        other = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[draw.choice([f"{key}s", "", "__proto__", "../x", "\0"])] = parent.pop(key)
    elif how == "again" and isinstance(parent, list):
        parent.extend([old] * draw.choice([1, 2, 1000]))
    elif how == "deep":
        parent[key] = DEEP
        return changed, "deep"
    elif how == "replace":
        parent[key] = draw.choice(WORDS)
    else:
        how = "delete"
        del parent[key]
    return changed, f"{how} {where[:80]}"


def _bytes(good: bytes, draw: random.Random) -> tuple[bytes, str]:
    data = bytearray(good)
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    how = draw.choice(["flip", "flip", "flip", "cut", "drop", "repeat", "insert", "digits", "garbage", "empty", "head"])
    if how == "flip":
        for _ in range(draw.choice([1, 1, 2, 8, 64])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == "head":  # where lengths, magic numbers and versions stand
        data[draw.randrange(min(64, len(data)))] = draw.randrange(256)
    elif how == "cut":
        del data[a:]
    elif how == "drop":
        del data[a:b]
    elif how == "repeat":
        data[a:a] = data[a:b] * draw.choice([1, 10])
    elif how == "insert":
        data[a:a] = draw.choice([b"\0", b"\xff\xfe", b"\n", b'"', b"[", b"}", b"NaN", draw.randbytes(16)])
    elif how == "digits":
        found = list(re.finditer(rb"-?\d+(\.\d+)?(e-?\d+)?", data))
        if found:
            one = draw.choice(found)
            data[one.start() : one.end()] = draw.choice([b"9" * 5_000, b"1e999", b"-1e999", b"NaN", b"-0", b"0.1e-999"])
    elif how == "garbage":
        data[:] = draw.randbytes(draw.choice([1, 8, 100, 10_000]))
    else:
        data.clear()
    return bytes(data), how
