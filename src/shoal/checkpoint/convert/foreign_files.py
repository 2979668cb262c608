"""Files of others that weights come in, each as one nested dict with a Leaf where a tensor is. Nothing is unpickled.

model.safetensors                       safetensors
model.safetensors.index.json            the folder of a Hugging Face model in several files
weights.pt, pytorch_model.bin, …        torch.save
.metadata                               a folder of torch.distributed.checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from shoal.checkpoint.convert import dcp, torchfile
from shoal.checkpoint.layout.shard_file import ShardFile
from shoal.checkpoint.layout.tensor_stream import Leaf
from shoal.errors import ConfigError

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def open_source(path: Path) -> dict[object, object]:
    """What a file or folder holds; ConfigError if it is nothing of the above, ValueError if it is and is broken."""
    if not path.exists():
        raise ConfigError(f"there is no {path}; give a file or folder to import.")
    if path.is_file():
        return _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    if (path / dcp.METADATA).exists():
        return dcp.tree(path)
    if (path / _INDEX).exists():
        return _several(path)
    if (path / _ONE).exists():
        return _safetensors(path / _ONE)
    raise ConfigError(
        f"{path} holds neither {_ONE}, {_INDEX} nor {dcp.METADATA}; "
        "name a Hugging Face folder, a folder of torch.distributed.checkpoint, or one file."
    )


def _torch(path: Path) -> dict[object, object]:
    value = _leaves(torchfile.load(torchfile.map_file(path)))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not a dict of tensors")
    return value


def _leaves(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Leaf.of(value)
    if isinstance(value, dict):
        return {key: _leaves(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_leaves(entry) for entry in value]
    return value


def _safetensors(path: Path) -> dict[object, object]:
    shard = ShardFile(path)
    slots = shard.header().values()
    return {
        slot.key: Leaf(slot.dtype, slot.shape, lambda s=slot: shard.read(s).view(s.shape))  # type: ignore[misc]
        for slot in slots
    }


def _several(folder: Path) -> dict[object, object]:
    places = json.loads((folder / _INDEX).read_text())["weight_map"]
    for name in {*places.values()}:
        if "/" in name or name.startswith("."):
            raise ValueError(f"'{name}' is not a file of its folder")
    files = {name: _safetensors(folder / name) for name in sorted({*places.values()})}
    for key, name in places.items():
        if key not in files[name]:
            raise ValueError(f"'{key}' is not in {name}, where {_INDEX} says it is")
    return {key: files[name][key] for key, name in places.items()}
