"""Checkpoints through torch.distributed.checkpoint: written by one plan, read by any other.

Keys: ``model.<name>`` (a tied weight once, under its first name; the fp32 master under mixed precision),
``optimizer.<name>.<key>`` for each tensor of a parameter's optimizer state, ``outer.<name>.<key>`` for that of the
optimizer that averages replicas, ``wire.<rank>.<sum>.<name>`` for what a rank's sums of gradients carry (only the same
plan takes it up again: another starts without), and ``session``: the step and the hyperparameters of the optimizer's
groups, with the names in each. State tensors of a parameter's shape lie as what the optimizer updates of it; others (a
step count) are whole on every rank that has them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..execution.session import Session
from ..parameters.optimizer import LossScale
from ..transport.error_propagation import raise_on_all_ranks

__all__ = ["load_checkpoint", "save_checkpoint"]


def _optimizers(session: Session) -> list[tuple[str, torch.optim.Optimizer, Mapping[str, nn.Parameter]]]:
    """(prefix of its keys, optimizer, its parameters by name), the one that averages replicas last."""
    optimizers: list[tuple[str, torch.optim.Optimizer, Mapping[str, nn.Parameter]]] = []
    if session.optimizer is not None:
        optimizers.append(("optimizer", session.optimizer, session.owned_parameters))
    if session.independent_replicas is not None and (outer := session.independent_replicas.outer) is not None:
        anchors = {name: outer[1][id(leaf)] for name, leaf in session.owned_parameters.items() if id(leaf) in outer[1]}
        optimizers.append(("outer", outer[0], anchors))
    return optimizers


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
    scaling = {} if session.loss_scale is None else {"loss_scale": asdict(session.loss_scale)}
    return {"step": session.step, "groups": [_hyperparameters(group) for group in groups], **scaling}


def save_checkpoint(session: Session, path: str | os.PathLike[str]) -> None:
    """Write weights, buffers and optimizer state into the folder ``path``. Collective; ValueError if it cannot be
    written."""
    session.require_drained("a checkpoint")
    values: dict[str, Any] = {}
    owned_names = {name for name, homes in session.state.homes.items() if homes and homes[0] == session.stage}
    for name, value in session.state.state_dict(owned_only=True).items():
        if name in owned_names or name in session.state.unplaced:  # first names only
            values[f"model.{name}"] = value
    for prefix, optimizer, leaves in _optimizers(session):
        for name, leaf in leaves.items():
            for key, value in optimizer.state.get(leaf, {}).items():
                if isinstance(value, torch.Tensor):
                    same = value.shape == leaf.shape and value.ndim > 0
                    shape = session.state.info.parameters[name].type.shape
                    stored = (
                        session.state.as_dtensor(value, name, shape, session.layouts[name])
                        if same
                        else value.detach().cpu()
                    )
                    values[f"{prefix}.{name}.{key}"] = stored
                elif isinstance(value, bool | int | float):
                    values[f"{prefix}.{name}.{key}"] = torch.tensor(value)
    values |= _carried(session)
    if session.rank == 0:
        values["session"] = _encode(_session_facts(session))
    fault: Exception | None = None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        fault = ValueError(f"{os.fspath(path)}: cannot be written: {error}; choose a folder that every rank can write")
    raise_on_all_ranks(fault)
    dcp.save(  # type: ignore[attr-defined]
        values, checkpoint_id=os.fspath(path)
    )


def load_checkpoint(session: Session, path: str | os.PathLike[str]) -> None:
    """Read what ``save_checkpoint`` wrote, under this or another plan. Collective.

    Raises ValueError on every rank if the folder has no checkpoint of this model. Optimizer groups are matched by
    position.
    """
    session.require_drained("loading a checkpoint")
    reader = FileSystemReader(os.fspath(path))
    try:
        stored = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: holds no checkpoint ({error})") from error
    values: dict[str, Any] = {}
    local_tensors = {**session.state.parameters, **session.state.buffers, **session.state.unplaced}
    _check_model(session, stored, path)
    with torch.no_grad():
        current = session.state.state_dict()
        for name in local_tensors:
            if name in current:
                values[f"model.{name}"] = current[name]
        loaded = [
            (prefix, optimizer, leaves, _state_targets(session, stored, prefix, optimizer, leaves))
            for prefix, optimizer, leaves in _optimizers(session)
        ]
        for prefix, _, _, states in loaded:
            for name, keys in states.items():
                values.update({f"{prefix}.{name}.{key}": target for key, target in keys.items()})
        carried = {key: x for key, x in _carried(session).items() if _alike(stored.get(key), x)}
        values |= carried
        facts = stored["session"]
        assert isinstance(facts, TensorStorageMetadata)
        values["session"] = torch.zeros(facts.size, dtype=torch.uint8)
        dcp.load(  # type: ignore[attr-defined]
            values, checkpoint_id=os.fspath(path)
        )
    session.value_gatherer.refresh()
    if session.independent_replicas is not None:
        session.independent_replicas.renew()
    session_values = json.loads(bytes(values["session"].tolist()).decode())
    session.step = int(session_values["step"])
    _carry_on(session, carried)
    if session.loss_scale is not None and "loss_scale" in session_values:
        session.loss_scale = LossScale(**session_values["loss_scale"])
    for _, optimizer, leaves, states in loaded:
        for name, keys in states.items():
            optimizer.state[leaves[name]] = {
                key: value.to_local() if isinstance(value, DTensor) else value for key, value in keys.items()
            }
    if session.optimizer is None:
        return
    for group, saved in zip(session.optimizer.param_groups, session_values["groups"], strict=False):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _carried(session: Session) -> dict[str, torch.Tensor]:
    return {f"wire.{session.rank}.{name}": x for name, x in session.gradient_all_reduce.state_dict().items()}


def _alike(entry: Any, x: torch.Tensor) -> bool:
    return isinstance(entry, TensorStorageMetadata) and entry.size == x.shape and entry.properties.dtype == x.dtype


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


def _state_targets(
    session: Session,
    stored: Mapping[str, Any],
    prefix: str,
    optimizer: torch.optim.Optimizer,
    leaves: Mapping[str, nn.Parameter],
) -> dict[str, dict[str, Any]]:
    """Empty tensors for an optimizer's state of the parameters that this rank owns: name → key → DTensor or whole
    tensor."""
    targets: dict[str, dict[str, Any]] = {}
    trained = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    for name, leaf in leaves.items():
        if id(leaf) not in trained:
            continue
        start = f"{prefix}.{name}."
        shape = session.state.info.parameters[name].type.shape
        for full, entry in stored.items():
            key = full.removeprefix(start)
            if not full.startswith(start) or "." in key or not isinstance(entry, TensorStorageMetadata):
                continue
            dtype = entry.properties.dtype
            if tuple(entry.size) == shape and shape:
                local = torch.zeros(leaf.shape, dtype=dtype, device=leaf.device)
                targets.setdefault(name, {})[key] = session.state.as_dtensor(local, name, shape, session.layouts[name])
            else:
                targets.setdefault(name, {})[key] = torch.zeros(entry.size, dtype=dtype)
    return targets
