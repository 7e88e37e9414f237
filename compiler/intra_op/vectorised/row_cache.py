"""An on-disk cache of cost-table rows. The key of a row is a digest of every number that the row follows from.

A *row* is an array of floats of some shape under a key of 16 bytes. The rows that one search computes go into one
file, a *pack*: an .npz without pickled objects, of (``keysN`` uint8 [rows, 16], ``valuesN`` [*shape, rows]) per shape,
written complete or not at all. A file that cannot be read, or has another form, is ignored. The name of a pack begins
with a digest of the source code that computes rows, so packs of other versions are not even opened.

Packs take at most ``LIMIT_BYTES`` together. Those that were not used for the longest time are deleted first.

**Keys** (``IntervalComposer``). The column of a case in a template holds all inputs of its tables: the terms of all
operators and tensors, the possible border states, and the links between operators, tensors and borders. The key of a
row covers the columns of its layers in their sequence, the seconds of a stage's actions, its level and, where messages
count, the seconds at borders and the memory peaks.

So the cache needs not know what prices depend on (cluster, mesh, microbatch, optimizer, constraints, …): a change of
any of them changes a number, and with it the key. Among equally good choices, a search over other cases may have taken
another one; and the choices to which a layer that is too wide is reduced are those that its search's cases use.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ....costmodel.files import write_atomically
from .layer_tables import LayerTemplate, Level, Terms

__all__ = ["KEY_BYTES", "LIMIT_BYTES", "RowCache", "column_digests", "row_key"]


LIMIT_BYTES = 2**29  # of all packs; a plan of a large model for 64 devices makes some 50 MB
KEY_BYTES = 16
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of a file, read when they are looked up. ValueError for a compressed one: it may take all memory."""
    with zipfile.ZipFile(path) as found:
        if sum(info.file_size for info in found.infolist()) > path.stat().st_size:
            raise ValueError(f"{path}: no pack of rows, whose arrays lie in it as they are")
    with np.load(path, allow_pickle=False) as pack:
        yield pack


class _Pack:
    """The rows of one shape in a file, read when first needed."""

    def __init__(self, path: Path, name: str, num: int) -> None:
        self.path, self.name, self.num = path, name, num

    @cached_property
    def values(self) -> np.ndarray | None:
        """[*shape, rows]; None where they cannot be read."""
        try:
            with _opened(self.path) as pack:
                values: np.ndarray = pack[self.name]
            os.utime(self.path)  # used now
        except _UNREADABLE:
            return None
        return values if values.dtype == np.float64 and values.ndim and values.shape[-1] == self.num else None


@dataclass(frozen=True, eq=False)
class _Made:
    """Rows that this search made: values [*shape, rows]."""

    keys: tuple[bytes, ...]
    values: np.ndarray


class RowCache:
    """Rows in a folder. family: what all their keys share."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        self._prefix = hashlib.sha256(family.encode()).hexdigest()[:16]
        self._made: list[_Made] = []

    @cached_property
    def _places(self) -> dict[bytes, tuple[_Pack | _Made, int]]:
        """Key → where its row is."""
        found: dict[bytes, tuple[_Pack | _Made, int]] = {}
        for path in sorted(self.folder.glob(f"{self._prefix}-*.npz")):
            with contextlib.suppress(*_UNREADABLE), _opened(path) as pack:
                for name in pack:
                    kind, number = name[:4], name[4:]
                    keys = pack[name] if kind == "keys" else None
                    if keys is None or keys.dtype != np.uint8 or keys.shape[1:] != (KEY_BYTES,):
                        continue
                    part = _Pack(path, f"values{number}", len(keys))
                    found.update({key.tobytes(): (part, place) for place, key in enumerate(keys)})
        return found

    def recall(
        self, keys: Sequence[bytes], shape: tuple[int, ...], make: Callable[[list[int]], np.ndarray]
    ) -> np.ndarray:
        """[*shape, rows] the rows of these keys. make: [*shape, some] of those at some positions, for what is not
        there."""
        missing: dict[bytes, int] = {}
        for number, key in enumerate(keys):
            part, _ = self._places.get(key, (None, 0))
            if part is None or part.values is None or part.values.shape[:-1] != shape:
                missing.setdefault(key, number)
        if missing:
            made = _Made(tuple(missing), make(list(missing.values())))
            assert made.values.shape == (*shape, len(missing)), (made.values.shape, shape)
            self._made.append(made)
            self._places.update({key: (made, place) for place, key in enumerate(missing)})
            if len(missing) == len(keys):
                return made.values
        where: dict[_Pack | _Made, list[tuple[int, int]]] = {}
        for number, key in enumerate(keys):
            part, place = self._places[key]
            where.setdefault(part, []).append((number, place))
        found = np.empty((*shape, len(keys)))
        for part, pairs in where.items():
            assert part.values is not None
            numbers, places = np.array(pairs).T
            found[..., numbers] = part.values[..., places]
        return found

    @property
    def made(self) -> tuple[_Made, ...]:
        """What was made so far."""
        return tuple(self._made)

    def add(self, made: Sequence[_Made]) -> None:
        """Take over what another process made."""
        self._made += made
        self._places.update({key: (part, place) for part in made for place, key in enumerate(part.keys)})

    @contextmanager
    def keeping(self) -> Iterator[RowCache]:
        """Write what is made inside when it ends, however it does. One within another writes its own."""
        before, self._made = self._made, []
        try:
            yield self
        finally:
            with contextlib.suppress(OSError):  # a full disk or a read-only home costs the next search, not this one
                self._write()
            self._made = before

    def _write(self) -> None:
        by_shape: dict[tuple[int, ...], list[_Made]] = {}
        for made in self._made:
            by_shape.setdefault(made.values.shape[:-1], []).append(made)
        arrays: dict[str, np.ndarray] = {}
        digest, free_bytes = hashlib.sha256(), LIMIT_BYTES // 2
        for number, (_, parts) in enumerate(sorted(by_shape.items(), key=lambda item: np.prod(item[0]))):
            free_bytes -= sum(part.values.nbytes for part in parts)
            if free_bytes < 0:
                break  # many small rows rather than few large ones
            keys = b"".join(key for part in parts for key in part.keys)
            digest.update(keys)
            arrays[f"keys{number}"] = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
            arrays[f"values{number}"] = np.concatenate([part.values for part in parts], axis=-1)
        if arrays:
            data = io.BytesIO()
            np.savez(data, allow_pickle=False, **arrays)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / f"{self._prefix}-{digest.hexdigest()[:16]}.npz", data.getbuffer())
            _evict(self.folder)


def _evict(folder: Path) -> None:
    """Remove the packs that were not used for the longest time, until the others are within the limit."""
    facts = [(path, path.stat()) for path in folder.iterdir()]  # with what an interrupted write left
    left = sum(fact.st_size for _, fact in facts)
    for path, fact in sorted(facts, key=lambda pair: pair[1].st_mtime_ns):
        if left <= LIMIT_BYTES:
            break
        path.unlink(missing_ok=True)
        left -= fact.st_size


_AT_ONCE_BYTES = 2**24  # of columns that are gathered at once


def column_digests(template: LayerTemplate) -> list[bytes]:
    """A digest per case of its column of a template."""
    places: dict[int, int] = {}
    arrays: list[np.ndarray] = []

    def place(array: np.ndarray | None) -> int:
        if array is None:
            return -1
        if id(array) not in places:
            places[id(array)] = len(arrays)
            arrays.append(array)
        return places[id(array)]

    def described(terms: Terms) -> list[object]:
        one = terms.seconds, terms.sure, terms.step_s, terms.weight_s, terms.gradient_s, terms.resident
        by_mode = terms.again, terms.saved, terms.transient
        return [terms.seconds.shape[:-1], *map(place, one), *([*map(place, each)] for each in by_mode)]

    edges = [
        (edge.producer, edge.source.tolist(), [(k, target.tolist()) for k, target in edge.consumers])
        for edge in template.section.edges
    ]
    borders = [(one.operators, one.choices.tolist(), one.of_state.tolist()) for one in template.borders]
    terms = [[*map(described, some)] for some in (template.operators, template.tensors)]
    structure = repr((template.modes, terms, edges, template.links, borders, template.possible.shape[:-1])).encode()
    num = template.possible.shape[-1]
    flat = [array.reshape(-1, num) for array in (*arrays, template.possible)]
    most = max(1, _AT_ONCE_BYTES // (8 * sum(map(len, flat))))
    digests = []
    for first in range(0, num, most):
        columns = np.concatenate([array[:, first : first + most] for array in flat], dtype=np.float64).T
        digests += [_digest([structure, column]) for column in columns]
    if template.lower is None:
        return digests
    return [_digest(pair) for pair in zip(digests, column_digests(template.lower))]


def row_key(
    sequence: bytes, layers: Iterable[bytes], level: Level, action_s: float, others: Iterable[np.ndarray]
) -> bytes:
    """The key of a row. sequence: of layers and borders; layers: the columns of their classes, in order of first use;
    others: what else counts."""
    numbers = np.array([*astuple(level), action_s])
    return _digest([sequence, *layers, numbers, *others])


def _digest(parts: Iterable[bytes | np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else part
        digest.update(len(data).to_bytes(8, "little"))  # else a part's end could be the next one's begin
        digest.update(data)
    return digest.digest()
