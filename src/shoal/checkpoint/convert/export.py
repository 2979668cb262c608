"""Export: a checkpoint's model as others read it. One tensor at a time is in memory.

model.safetensors                                       one file
model-00001-of-00003.safetensors, …, and an index       a folder as Hugging Face's from_pretrained takes it
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from shoal.checkpoint.folder import CheckpointEntry, flush
from shoal.checkpoint.layout.manifest import Manifest
from shoal.checkpoint.layout.tensor_stream import Leaf, write_stream
from shoal.checkpoint.load import Reader
from shoal.errors import ConfigError

_FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_METADATA = {"format": "pt"}
"""What Hugging Face asks of a file before it reads it."""


def format_named(name: str) -> torch.dtype | None:
    """The format that floating-point tensors are converted to; None for "", which leaves them."""
    if name and name not in _FORMATS:
        raise ConfigError(f"--dtype {name}: it is one of {', '.join(_FORMATS)}.")
    return _FORMATS.get(name)


def parse_size(text: str) -> int:
    """Bytes.

    >>> parse_size("5GB"), parse_size("1.5 MB")
    (5000000000, 1500000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)", text)
    size = round(float(match[1]) * _UNITS[match[2]]) if match is not None else 0
    if size < 1:
        raise ConfigError(f"--shard-size {text}: write it like 5GB or 500MB.")
    return size


def state_dict(found: CheckpointEntry, dtype: torch.dtype | None = None) -> dict[str, Leaf]:
    """What the model's own `state_dict` would have: parameters and buffers, a tied tensor under each of its names."""
    reader = Reader.of(found)
    leaves = {}
    left = set()
    for path in reader.manifest.tensors:
        kind, _, name = path.partition("/")
        if kind in ("parameter", "buffer"):
            leaves[name] = _leaf(reader, path, dtype)
        elif kind == "rows":
            left.add(name.rpartition("/")[0])
    if left:
        text = f"the rows of {', '.join(sorted(left))} stay behind: a state dict has no place for rows by id"
        print(f"shoal: {text}.", file=sys.stderr)
    for other, first in _ties(reader.manifest).items():
        if first in leaves:
            leaves[other] = leaves[first]
    return leaves


def export_file(leaves: Mapping[str, Leaf], target: Path) -> list[Path]:
    """Write one safetensors file."""
    _refuse_existing(target)
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_stream(part, leaves, _METADATA)
        os.replace(part, target)
        flush(target.parent)
    finally:
        part.unlink(missing_ok=True)
    return [target]


def export_folder(
    leaves: Mapping[str, Leaf], target: Path, shard_size: int, config: Path | None = None
) -> list[Path]:
    """Write a folder in the layout of Hugging Face; `config` becomes its config.json."""
    _refuse_existing(target)
    if config is not None and not config.is_file():
        raise ConfigError(f"--config {config}: there is no such file.")
    groups = list(_groups(leaves, shard_size))
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        places: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
            name = name if len(groups) > 1 else "model.safetensors"
            write_stream(part / name, group, _METADATA)
            places.update(dict.fromkeys(group, name))
        if len(groups) > 1:
            total = sum(leaf.nbytes for leaf in leaves.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        if config is not None:
            shutil.copyfile(config, part / "config.json")
        flush(part)
        os.rename(part, target)
        flush(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(target.iterdir())


def _leaf(reader: Reader, path: str, dtype: torch.dtype | None) -> Leaf:
    tensor = reader.manifest.tensors[path]
    wanted = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    return Leaf(wanted, tensor.shape, lambda: reader.read(path))


def _ties(manifest: Manifest) -> Mapping[str, str]:
    given = manifest.state.get("ties")
    return given if isinstance(given, dict) else {}


def _groups(leaves: Mapping[str, Leaf], limit: int) -> Iterator[dict[str, Leaf]]:
    """Tensors that go into one file: no more bytes than allowed, unless one tensor alone has more."""
    group: dict[str, Leaf] = {}
    size = 0
    for name, leaf in leaves.items():
        if group and size + leaf.nbytes > limit:
            yield group
            group = {}
            size = 0
        group[name] = leaf
        size += leaf.nbytes
    yield group


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another target, or remove it first.")
