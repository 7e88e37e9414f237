"""Checkpoints through torch.distributed.checkpoint: written by one plan, read by any other.

Keys: ``model.<name>`` (a tied weight once, under its first name), ``optimizer.<name>.<key>`` for each tensor of a
parameter's optimizer state, and ``session``: the step and the hyperparameters of the optimizer's groups, with the names
in each. State tensors of a parameter's shape lie as what the optimizer updates of it; others (a step count) are whole
on every rank that has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .agreement import agree
from .stage import Session

__all__ = ["load_checkpoint", "save_checkpoint"]


def _whole_key(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


def _encode(value: Mapping[str, Any]) -> torch.Tensor:
    """JSON as bytes: nothing in a checkpoint is a pickle."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            plain = value.item() if isinstance(value, torch.Tensor) else value
            if plain is None or isinstance(plain, bool | int | float | str | list | tuple):
                out[key] = list(plain) if isinstance(plain, tuple) else plain
    return out


def _session_facts(session: Session) -> dict[str, Any]:
    groups = session.optimizer.param_groups if session.optimizer is not None else []
    return {"step": session.step, "groups": [_hyperparameters(group) for group in groups]}


def save_checkpoint(session: Session, path: str | os.PathLike[str]) -> None:
    """Write weights, buffers and optimizer state into the folder ``path``. Collective; ValueError if it cannot be
    written."""
    values: dict[str, Any] = {}
    own = {name for name, homes in session.state.homes.items() if homes and homes[0] == session.stage}
    for name, value in session.state.state_dict(owned_only=True).items():
        if name in own or name in session.state.unplaced:  # first names only
            values[f"model.{name}"] = value
    if session.optimizer is not None:
        for name, leaf in session.owned.items():
            for key, value in session.optimizer.state.get(leaf, {}).items():
                if isinstance(value, torch.Tensor):
                    same = value.shape == leaf.shape and value.ndim > 0
                    shape = session.state.info.parameters[name].type.shape
                    stored = (
                        session.state.as_dtensor(value, name, shape, session.layouts[name])
                        if same
                        else value.detach().cpu()
                    )
                    values[_whole_key(name, key)] = stored
                elif isinstance(value, bool | int | float):
                    values[_whole_key(name, key)] = torch.tensor(value)
    if session.rank == 0:
        values["session"] = _encode(_session_facts(session))
    fault: Exception | None = None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        fault = ValueError(f"{os.fspath(path)}: cannot be written: {error}; choose a folder that every rank can write")
    agree(fault)
    dcp.save(  # type: ignore[attr-defined]
        values, checkpoint_id=os.fspath(path)
    )


def load_checkpoint(session: Session, path: str | os.PathLike[str]) -> None:
    """Read what ``save_checkpoint`` wrote, under this or another plan. Collective.

    Raises ValueError on every rank if the folder has no checkpoint of this model. Optimizer groups are matched by
    position.
    """
    reader = FileSystemReader(os.fspath(path))
    try:
        stored = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: holds no checkpoint ({error})") from error
    values: dict[str, Any] = {}
    mine = {**session.state.parameters, **session.state.buffers, **session.state.unplaced}
    _check_model(session, stored, path)
    with torch.no_grad():
        current = session.state.state_dict()
        for name in mine:
            if name in current:
                values[f"model.{name}"] = current[name]
        states = _state_targets(session, stored)
        for name, keys in states.items():
            values.update({_whole_key(name, key): target for key, target in keys.items()})
        facts = stored["session"]
        assert isinstance(facts, TensorStorageMetadata)
        values["session"] = torch.zeros(facts.size, dtype=torch.uint8)
        dcp.load(  # type: ignore[attr-defined]
            values, checkpoint_id=os.fspath(path)
        )
    session.values.refresh()
    told = json.loads(bytes(values["session"].tolist()).decode())
    session.step = int(told["step"])
    if session.optimizer is None:
        return
    for name, keys in states.items():
        leaf = session.owned[name]
        session.optimizer.state[leaf] = {
            key: value.to_local() if isinstance(value, DTensor) else value for key, value in keys.items()
        }
    for group, saved in zip(session.optimizer.param_groups, told["groups"], strict=False):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _check_model(session: Session, stored: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """The same finding on every rank: it compares the whole model."""
    info = session.state.info
    expected = {
        name: kind.shape
        for name, kind in session.state.types()
        if name in info.parameters or info.buffers[name].persistent
    }
    if "session" not in stored:
        raise ValueError(f"{os.fspath(path)}: was not written by save_checkpoint, or only in part")
    for name, shape in expected.items():
        entry = stored.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{os.fspath(path)}: has no {name!r}; it is of another model")
        if tuple(entry.size) != shape:
            raise ValueError(
                f"{os.fspath(path)}: {name!r} has shape {list(entry.size)}, but the model's is {list(shape)}"
            )


def _state_targets(session: Session, stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Empty tensors for the optimizer state of the parameters that this rank owns: name → key → DTensor or whole
    tensor."""
    found: dict[str, dict[str, Any]] = {}
    if session.optimizer is None:
        return found
    trained = {id(leaf) for group in session.optimizer.param_groups for leaf in group["params"]}
    for name, leaf in session.owned.items():
        if id(leaf) not in trained:
            continue
        prefix = _whole_key(name, "")
        shape = session.state.info.parameters[name].type.shape
        for full, entry in stored.items():
            key = full.removeprefix(prefix)
            if not full.startswith(prefix) or "." in key or not isinstance(entry, TensorStorageMetadata):
                continue
            dtype = entry.properties.dtype
            if tuple(entry.size) == shape and shape:
                local = torch.zeros(leaf.shape, dtype=dtype, device=leaf.device)
                found.setdefault(name, {})[key] = session.state.as_dtensor(local, name, shape, session.layouts[name])
            else:
                found.setdefault(name, {})[key] = torch.zeros(entry.size, dtype=dtype)
    return found
