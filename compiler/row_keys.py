"""Keys of the rows of ``BatchComposer``: digests of the very numbers that a row follows from.

A case's column of a template is everything that its tables are made of: the terms of all operators and tensors, which
border states are possible, and how operators, tensors and borders hang together. A row is its layers' columns in
their sequence, a stage's actions and, where messages count, seconds at borders and peaks of memory, under a level.

So nothing needs to be known of what prices depend on (cluster, mesh, microbatch, optimizer, constraints, …): rows are
equal where their numbers are, and whatever changes a number changes the key. What makes rows of numbers, the source,
is the business of ``KeptRows``. Of equally good choices another one may have been taken among other cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple

import numpy as np

from .batch_tables import Level, Template, Terms
from .kept_rows import KEY_BYTES

__all__ = ["column_digests", "row_key"]

_AT_ONCE_BYTES = 2**24  # of columns that are gathered at once


def column_digests(template: Template) -> list[bytes]:
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
        one = terms.seconds, terms.sure, terms.step_s, terms.weight_s, terms.resident
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
    found = []
    for first in range(0, num, most):
        columns = np.concatenate([array[:, first : first + most] for array in flat], dtype=np.float64).T
        found += [_digest([structure, column]) for column in columns]
    return found


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
