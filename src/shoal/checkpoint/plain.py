"""A plain full checkpoint: one folder with the whole model and optimizer state, written by rank 0.

    step-300/model.safetensors        every parameter and buffer, by name
    step-300/optimizer.safetensors    every optimizer tensor, as "<key>/<parameter name>"
    step-300/state.json               step, loss scale, learning rate
    latest                            the name of the newest folder

A folder is written under a temporary name, flushed to disk and renamed; `latest` moves last. So whatever moment
the process dies at, `latest` names a whole checkpoint. Loading runs no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.errors import ConfigError

LATEST = "latest"
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """Everything a run needs to go on."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, Any]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each tensor once: a tied weight is kept under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's own extra state is not ours to store
        key = (value.data_ptr(), int(value.storage_offset()), value.shape)
        if value.numel() and key in seen:
            continue
        seen.add(key)
        found[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return found


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy a checkpoint's tensors into a model, or say which name does not fit."""
    wanted = {name: t.shape for name, t in model_tensors(model).items()}
    for name in sorted(wanted.keys() ^ tensors.keys()):
        where = "the model" if name in wanted else source
        raise ConfigError(f"'{name}' is only in {where}; the checkpoint {source} is of another model.")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"'{name}' is {list(tensors[name].shape)} in {source} and {list(shape)} in the model; "
                "use another checkpoint folder for another model."
            )
    model.load_state_dict(dict(tensors), strict=False)


def write(root: Path, name: str, snapshot: Snapshot) -> Path:
    """Write a checkpoint and make it the latest; returns its folder."""
    if name == LATEST or name.startswith(".") or "/" in name:
        raise ConfigError(f"a checkpoint cannot be called '{name}'; use a plain name, such as 'final'.")
    root.mkdir(parents=True, exist_ok=True)
    final, temporary, old = root / name, root / f".{name}.new", root / _old(name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    flat = {
        f"{key}/{n}": value.cpu()
        for n, entries in snapshot.optimizer.items()
        for key, value in entries.items()
    }
    save_file(dict(snapshot.model), temporary / "model.safetensors")
    save_file({k: v.contiguous() for k, v in flat.items()}, temporary / "optimizer.safetensors")
    (temporary / "state.json").write_text(json.dumps(dict(snapshot.state), indent=1))
    for file in [*temporary.iterdir(), temporary]:
        _flush(file)
    if final.exists():  # the same name again: until the new one is in its place, `read_latest` finds the old
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    _flush(root)
    shutil.rmtree(old, ignore_errors=True)
    pointer = root / f".{LATEST}.{os.getpid()}"
    pointer.write_text(name)
    _flush(pointer)
    os.replace(pointer, root / LATEST)
    _flush(root)
    return final


def read_latest(root: Path) -> tuple[str, Snapshot] | None:
    """The newest checkpoint under `root` and its name, or None if there is none."""
    pointer = root / LATEST
    if not pointer.exists():
        return None
    name = pointer.read_text().strip()
    folder = root / name
    if not folder.exists() and (root / _old(name)).exists():  # died while replacing it
        folder = root / _old(name)
    if not folder.exists():
        raise ConfigError(f"{pointer} names '{name}', which is gone; put another name into it, or remove it.")
    flat = _read(folder / "optimizer.safetensors", load_file)
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for path, value in flat.items():
        key, name = path.split("/", 1)
        optimizer.setdefault(name, {})[key] = value
    model = _read(folder / "model.safetensors", load_file)
    state = _read(folder / "state.json", lambda file: json.loads(file.read_text()))
    return str(folder), Snapshot(model, optimizer, state)


def _read(file: Path, load: Callable[[Path], dict[str, T]]) -> dict[str, T]:
    try:
        return load(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); put the name of a whole checkpoint into '{LATEST}' beside its folder."
        ) from error


def _old(name: str) -> str:
    return f".{name}.old"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
