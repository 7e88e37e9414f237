"""The state of a training run in a checkpoint: saved under one plan, loaded under any other.

Tensors: ``model.<name>`` (a tied weight once, under its first name; the fp32 master under mixed precision),
``optimizer.<name>.<key>`` for each tensor of a parameter's optimizer state, ``outer.<name>.<key>`` for that of the
optimizer that averages replicas, ``wire.<rank>.<sum>.<name>`` for what a rank's sums of gradients carry (only the same
plan takes it up again: another starts without), ``random.<rank>.<generator>`` (only the same number of ranks), and
``extra.…``. State tensors of a parameter's shape lie as what the optimizer updates of it; others (a step count) are
whole on every rank that has them. Of replicas one writes, and tensors are dealt out among them. Facts: the step, the
hyperparameters of the optimizer's groups with the names in each, the loss scale, and what users keep (``extra``).
"""

from __future__ import annotations

import os
import random
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..execution.session import Session
from ..parameters.optimizer import LossScale
from ..transport.error_propagation import fail_together, raise_on_all_ranks
from .extra import decode, encode, state_of
from .storage import (
    Box,
    Checkpoint,
    StoredTensor,
    commit,
    discard,
    fail_part,
    latest_checkpoint,
    partial_folder,
    prepare,
    step_folder,
    write_part,
)

__all__ = [
    "CheckpointWriter", "StateSource", "box_of", "checkpoint_tensors", "load_checkpoint", "load_state",
    "save_checkpoint", "training_facts",
]  # fmt: skip

PART_TIMEOUT_S = 1800.0  # how long an asynchronous save waits for the part of another rank
_Part = tuple[str, tuple[int, ...], Box, torch.Tensor]


class StateSource(Protocol):
    """The source of a session's state: ``storage.Checkpoint``, or ``live_state.LiveState``, whose values are there
    after ``finish``."""

    @property
    def path(self) -> object:
        """Its name in complaints."""
        ...

    @property
    def step(self) -> int:
        """The steps that were done."""
        ...

    @property
    def ranks(self) -> int:
        """How many ranks have states of random generators in it."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """The values that are no tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Its tensors, by name."""
        ...

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Fill ``target`` with a part of a tensor."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        ...

    def finish(self) -> None:
        """Complete what was asked for."""
        ...


class CheckpointWriter:
    """Saves the checkpoints of a run, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None
        self._folder: Path | None = None

    def save(
        self,
        session: Session,
        run: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """As ``Parallel.save_checkpoint``. Collective."""
        self.wait()
        session.require_drained("a checkpoint")
        if keep is not None and keep < 1:
            raise ValueError(f"keep is the number of checkpoints that stay, 1 or more, but got {keep}")
        rank, self._folder = session.rank, step_folder(run, session.step)
        fault: Exception | None = None
        parts, facts = list(_parts(session)), dict[str, Any]()
        try:
            if rank == 0:
                tensors = dict[str, torch.Tensor]()
                kept = {
                    name: encode(state_of(value), f"extra.{name}", tensors) for name, value in (extra or {}).items()
                }
                facts = {**training_facts(session), "extra": kept}
                parts += [_whole(name, value) for name, value in tensors.items()]
                prepare(self._folder)
                session.plan.save(partial_folder(self._folder) / "plan.json")
        except (OSError, ValueError) as error:
            fault = self._explained(error) if isinstance(error, OSError) else error
        raise_on_all_ranks(fault)
        if asynchronous:
            parts = [(name, shape, box, x.detach().to("cpu", copy=True)) for name, shape, box, x in parts]
            arguments = (rank, parts, facts, dist.get_world_size(), keep)
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
            self._thread.start()
            return self._folder
        try:
            write_part(self._folder, rank, parts)
        except OSError as error:
            self._fault = self._explained(error)
        self._raise()
        if rank == 0:
            self._commit(facts, dist.get_world_size(), keep, 0.0)
        self._raise()
        return self._folder

    def wait(self) -> None:
        """Return when the last checkpoint is complete. Collective. Raises ValueError, on every rank, where it could not
        be written."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._raise()

    def _raise(self) -> None:
        """Raise on all ranks what went wrong on one, after what was written is removed."""
        assert self._folder is not None
        fault, self._fault = self._fault, None
        try:
            raise_on_all_ranks(fault)
        except (ValueError, RuntimeError):
            if dist.get_rank() == 0:
                discard(self._folder)
            raise

    def _write(self, rank: int, parts: list[_Part], facts: Mapping[str, Any], ranks: int, keep: int | None) -> None:
        """Do the part of an asynchronous save that runs beside the training."""
        assert self._folder is not None
        try:
            write_part(self._folder, rank, parts)
        except OSError as error:
            self._fault = self._explained(error)
            fail_part(self._folder, rank)
        parts.clear()
        if rank == 0 and self._fault is None:
            self._commit(facts, ranks, keep, PART_TIMEOUT_S)

    def _commit(self, facts: Mapping[str, Any], ranks: int, keep: int | None, waiting_s: float) -> None:
        assert self._folder is not None
        try:
            commit(self._folder, facts, ranks, keep, waiting_s)
        except OSError as error:
            self._fault = self._explained(error)

    def _explained(self, error: OSError) -> ValueError:
        assert self._folder is not None
        last = latest_checkpoint(self._folder.parent)
        return ValueError(
            f"{self._folder}: cannot be written: {error}; give a folder with room that every rank can write "
            f"({'no checkpoint is there yet' if last is None else f'{last} is complete'})"
        )


def save_checkpoint(session: Session, run: str | os.PathLike[str], **options: Any) -> Path:
    """``CheckpointWriter.save``, by a writer of its own. Collective."""
    return CheckpointWriter().save(session, run, **options)


def _whole(name: str, value: torch.Tensor) -> _Part:
    return name, tuple(value.shape), tuple((0, size) for size in value.shape), value


def checkpoint_tensors(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a session's state that this rank holds, by the names that they have in a checkpoint: DTensors, and
    plain tensors that every rank which has them has whole. Of copies of a weight on several stages the owner's, and
    buffers that state dicts leave out, too."""
    state = session.state
    for name, kind in state.types():
        local = state.value(name)
        if local is None and name in state.unplaced:
            yield f"model.{name}", state.unplaced[name]
        elif local is not None and state.homes[name][0] == session.stage:
            yield f"model.{name}", state.as_dtensor(local, name, kind.shape)
    for prefix, optimizer, leaves in _optimizers(session):
        for name, leaf in leaves.items():
            shape = state.info.parameters[name].type.shape
            for key, value in optimizer.state.get(leaf, {}).items():
                full = f"{prefix}.{name}.{key}"
                if isinstance(value, bool | int | float):
                    yield full, torch.tensor(value)
                elif isinstance(value, torch.Tensor) and value.shape == leaf.shape and value.ndim > 0:
                    yield full, state.as_dtensor(value, name, shape, session.layouts[name])
                elif isinstance(value, torch.Tensor):
                    yield full, value


def _parts(session: Session) -> Iterator[_Part]:
    """The parts that this rank writes."""
    hidden = {f"model.{name}" for name, entry in session.state.info.buffers.items() if not entry.persistent}
    for full, value in checkpoint_tensors(session):
        if full not in hidden:
            yield from _mine(full, value)
    for name, value in {**_carried(session), **_random_states(session)}.items():
        yield _whole(name, value)


def _mine(name: str, value: torch.Tensor) -> Iterator[_Part]:
    """The block of a tensor that this rank writes, if it is the one of its replicas whose turn it is."""
    if not isinstance(value, DTensor):
        yield _whole(name, value)
        return
    index, replicas = 0, 1
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    for at, size, placement in zip(coordinate, value.device_mesh.shape, value.placements, strict=True):
        if placement.is_replicate():
            index, replicas = index * size + at, replicas * size
    if index == zlib.crc32(name.encode()) % replicas:
        yield name, tuple(value.shape), box_of(value), value.to_local()


def box_of(value: torch.Tensor) -> Box:
    """The part of a tensor that this rank holds."""
    if not isinstance(value, DTensor):
        return tuple((0, size) for size in value.shape)
    (chunk,) = value.__create_chunk_list__()
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))


def _random_states(session: Session) -> dict[str, torch.Tensor]:
    """The states of the generators that a user's own code may draw from; the runtime's draws depend on the step."""
    _, python, python_next = random.getstate()
    _, keys, at, _, numpy_next = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python),
        "python_next": torch.tensor([] if python_next is None else [python_next], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), at]),
        "numpy_next": torch.tensor([] if numpy_next is None else [numpy_next], dtype=torch.float64),
    }
    if session.state.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(session.state.device)
    return {f"random.{session.rank}.{name}": value for name, value in found.items()}


def _optimizers(session: Session) -> list[tuple[str, torch.optim.Optimizer, Mapping[str, nn.Parameter]]]:
    """(prefix of its keys, optimizer, its parameters by name), the one that averages replicas last."""
    optimizers: list[tuple[str, torch.optim.Optimizer, Mapping[str, nn.Parameter]]] = []
    if session.optimizer is not None:
        optimizers.append(("optimizer", session.optimizer, session.owned_parameters))
    if session.independent_replicas is not None and (outer := session.independent_replicas.outer) is not None:
        anchors = {name: outer[1][id(leaf)] for name, leaf in session.owned_parameters.items() if id(leaf) in outer[1]}
        optimizers.append(("outer", outer[0], anchors))
    return optimizers


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            plain = value.item() if isinstance(value, torch.Tensor) else value
            if plain is None or isinstance(plain, bool | int | float | str | list | tuple):
                out[key] = list(plain) if isinstance(plain, tuple) else plain
    return out


def training_facts(session: Session) -> dict[str, Any]:
    """The values that are no tensors: the step, hyperparameters of the optimizer's groups, and the loss scale."""
    groups = session.optimizer.param_groups if session.optimizer is not None else []
    return {
        "step": session.step,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "groups": [_hyperparameters(group) for group in groups],
        "loss_scale": None if session.loss_scale is None else asdict(session.loss_scale),
    }


def load_checkpoint(
    session: Session, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """As ``Parallel.load_checkpoint``. Collective."""
    session.require_drained("loading a checkpoint")
    with fail_together():
        checkpoint = Checkpoint(path)
    return load_state(session, checkpoint, extra)


def load_state(session: Session, checkpoint: StateSource, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Take up the state in a checkpoint, on disk or of another session. Collective."""
    with fail_together():
        _check_model(session, checkpoint)
        if missing := sorted(set(extra or {}) - set(checkpoint.facts["extra"])):
            raise ValueError(f"{checkpoint.path}: nothing was saved as {missing[0]!r}; it has {_saved(checkpoint)}")
        scale, groups = _loss_scale(checkpoint), _groups(session, checkpoint)
        values = {name: decode(state, checkpoint.whole) for name, state in checkpoint.facts["extra"].items()}
    with torch.no_grad(), fail_together():
        for name, kind in session.state.types():
            local = session.state.value(name)
            value = (
                session.state.unplaced.get(name) if local is None else session.state.as_dtensor(local, name, kind.shape)
            )
            if value is not None and f"model.{name}" in checkpoint.tensors:
                _fill(checkpoint, f"model.{name}", value)
        states = [
            (optimizer, leaves, _optimizer_state(session, checkpoint, prefix, optimizer, leaves))
            for prefix, optimizer, leaves in _optimizers(session)
        ]
        carried = {
            name: checkpoint.whole(name)
            for name, x in _carried(session).items()
            if _alike(checkpoint.tensors.get(name), x)
        }
        if checkpoint.ranks == dist.get_world_size():
            _restore_random_states(session, checkpoint)
    with torch.no_grad():
        checkpoint.finish()
    session.value_gatherer.refresh()
    if session.independent_replicas is not None:
        session.independent_replicas.renew()
    session.step = checkpoint.step
    _carry_on(session, carried)
    if session.loss_scale is not None and scale is not None:
        session.loss_scale = scale
    for optimizer, leaves, found in states:
        for name, keys in found.items():
            optimizer.state[leaves[name]] = keys
    for group, saved in groups:
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    for name, keeper in (extra or {}).items():
        if hasattr(keeper, "load_state_dict"):
            keeper.load_state_dict(values[name])
    return values


def _loss_scale(checkpoint: StateSource) -> LossScale | None:
    kept, fresh = checkpoint.facts["loss_scale"], asdict(LossScale())
    if kept is None:
        return None
    if kept.keys() != fresh.keys() or not all(isinstance(x, int | float) and 0 <= x < 1e38 for x in kept.values()):
        raise ValueError(f"{checkpoint.path}: the loss scale cannot be read, {str(kept)[:80]}")
    return LossScale(**kept)


def _groups(session: Session, checkpoint: StateSource) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The groups of the optimizer, each with what was saved of it. ValueError for values of another kind."""
    mine = session.optimizer.param_groups if session.optimizer is not None else []
    for number, (group, saved) in enumerate(pairs := list(zip(mine, checkpoint.facts["groups"], strict=False))):
        if not isinstance(saved, Mapping):
            raise ValueError(f"{checkpoint.path}: group {number} of the optimizer is {str(saved)[:40]!r}")
        for key, value in saved.items():
            if key == "params" or not _same_kind(group.get(key), value):
                raise ValueError(
                    f"{checkpoint.path}: {key!r:.40} of group {number} of the optimizer is {str(value)[:40]}, but here "
                    f"it is {str(group.get(key))[:40]}"
                )
    return pairs


def _same_kind(mine: Any, saved: Any) -> bool:
    """True if a hyperparameter may take this value. None: not set."""
    mine = mine.item() if isinstance(mine, torch.Tensor) else mine
    if mine is None or saved is None:
        return True
    if isinstance(mine, list | tuple):
        return isinstance(saved, list) and len(mine) == len(saved) and all(map(_same_kind, mine, saved))
    kinds = [kind for kind in (bool, int | float, str) if isinstance(mine, kind)]
    return bool(kinds) and isinstance(saved, kinds[0])


def _saved(checkpoint: StateSource) -> str:
    return ", ".join(map(repr, checkpoint.facts["extra"])) or "nothing beside the training state"


def _fill(checkpoint: StateSource, name: str, value: torch.Tensor) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    checkpoint.fill(name, local, box_of(value))


def _restore_random_states(session: Session, checkpoint: StateSource) -> None:
    start = f"random.{session.rank}."
    state = {name.removeprefix(start): checkpoint.whole(name) for name in checkpoint.tensors if name.startswith(start)}
    if "cuda" in state and session.state.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], session.state.device)
    torch.set_rng_state(state["torch"])
    following = state["python_next"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), following[0] if following else None))
    *keys, at = state["numpy"].tolist()
    following = state["numpy_next"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), at, len(following), *(following or [0.0])))


def _carried(session: Session) -> dict[str, torch.Tensor]:
    return {f"wire.{session.rank}.{name}": x for name, x in session.gradient_all_reduce.state_dict().items()}


def _alike(stored: StoredTensor | None, x: torch.Tensor) -> bool:
    return stored is not None and stored.shape == tuple(x.shape) and stored.dtype == x.dtype


def _carry_on(session: Session, carried: Mapping[str, torch.Tensor]) -> None:
    """Sums go on, or on all ranks start anew. Collective where there are any."""
    mine = session.gradient_all_reduce.state_dict()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (len(mine), len(carried)))
    if all(wanted == found for wanted, found in everyone):
        session.gradient_all_reduce.load_state_dict(
            {k.removeprefix(f"wire.{session.rank}."): x for k, x in carried.items()}
        )
    elif session.rank == 0:
        warnings.warn(
            "the checkpoint was written under another plan: what compressed gradients still owed is lost", stacklevel=3
        )


def _check_model(session: Session, checkpoint: StateSource) -> None:
    """The same finding on every rank: it compares the whole model."""
    info = session.state.info
    for name, kind in session.state.types():
        if name in info.buffers and not info.buffers[name].persistent:
            continue
        stored = checkpoint.tensors.get(f"model.{name}")
        if stored is None:
            raise ValueError(f"{checkpoint.path}: has no {name!r}; it is of another model")
        if stored.shape != tuple(kind.shape):
            raise ValueError(
                f"{checkpoint.path}: {name!r} has shape {list(stored.shape)}, but the model's is {list(kind.shape)}"
            )


def _optimizer_state(
    session: Session, checkpoint: StateSource, prefix: str, optimizer: torch.optim.Optimizer,
    leaves: Mapping[str, nn.Parameter],
) -> dict[str, dict[str, torch.Tensor]]:  # fmt: skip
    """An optimizer's state of the parameters that this rank owns: name → key → this rank's block, or the whole."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    trained = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    keys: dict[str, list[str]] = {}
    for full in checkpoint.tensors:
        name, _, key = full.removeprefix(f"{prefix}.").rpartition(".")
        if full.startswith(f"{prefix}."):
            keys.setdefault(name, []).append(key)
    for name, leaf in leaves.items():
        shape = tuple(session.state.info.parameters[name].type.shape)
        for key in keys.get(name, []) if id(leaf) in trained else []:
            full = f"{prefix}.{name}.{key}"
            stored = checkpoint.tensors[full]
            if stored.shape == shape and shape:
                value = torch.empty(leaf.shape, dtype=stored.dtype, device=leaf.device)
                _fill(checkpoint, full, session.state.as_dtensor(value, name, shape, session.layouts[name]))
            else:
                value = checkpoint.whole(full)
            found.setdefault(name, {})[key] = value
    return found
