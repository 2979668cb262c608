"""A folder of torch.distributed.checkpoint, read without unpickling and without torch's own reader.

    .metadata           a pickle: which tensors there are, cut into which chunks, and which bytes of which file each is
    __0_0.distcp, …     one file a writer: what torch.save makes of each chunk, one after the other

`.metadata` is read as plain data (pickled.py); the chunks as any other file of torch.save (torchfile.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.pickled import Made, read
from shoal.checkpoint.stream import Leaf
from shoal.checkpoint.torchfile import DTYPES, dtype_named, load, map_file

METADATA = ".metadata"
_HOME = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED = frozenset(
    [
        *(f"{_HOME}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"{_HOME}.metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        *(f"{_HOME}.metadata.{name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
        *(f"{_OLD}.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        f"{_HOME}.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "torch.Size",
        *DTYPES,
        "collections.OrderedDict",
        *(f"{home}.{name}Path" for home in ("pathlib", "pathlib._local") for name in ("Posix", "Windows")),
    ]
)


@dataclass(frozen=True)
class Later:
    """A value that is no tensor; `read` brings it here."""

    read: Callable[[], Any]


def tree(folder: Path) -> dict[Any, Any]:
    """What was saved, as it was nested: dicts, with a Leaf or a Later at each end. ValueError, with a reason, if it
    cannot be read."""
    facts = _fields(read((folder / METADATA).read_bytes(), _ALLOWED), "Metadata")
    files = _Files(folder)
    chunks: dict[str, dict[tuple[int, ...], Mapping[str, Any]]] = {}
    for index, info in (facts.get("storage_data") or {}).items():
        where = _fields(index, "MetadataIndex")
        offset = tuple(where.get("offset") or ())
        chunks.setdefault(where["fqn"], {})[offset] = _fields(info, "_StorageInfo")
    found: dict[Any, Any] = {}
    paths = facts.get("planner_data") or {}
    entries = facts["state_dict_metadata"]
    # In the order of the state dict that was saved: that of the entries depends on who wrote what.
    for name in dict.fromkeys([*(name for name in paths if name in entries), *entries]):
        end = _end(name, entries[name], chunks.get(name, {}), files)
        *above, last = paths.get(name, (name,))
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[last] = end
    return found


def _end(
    name: str, entry: Any, stored: Mapping[tuple[int, ...], Mapping[str, Any]], files: _Files
) -> Leaf | Later:
    if entry.name.endswith(".BytesStorageMetadata"):
        info = stored.get(())
        if info is None:
            raise ValueError(f"'{name}' is in none of its files")
        return Later(lambda: files.load(info))
    about = _fields(entry, "TensorStorageMetadata")
    shape, parts = tuple(about["size"]), []
    for chunk in about["chunks"]:
        where = _fields(chunk, "ChunkStorageMetadata")
        offset, size = tuple(where["offsets"]), tuple(where["sizes"])
        inside = len(offset) == len(size) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= whole for a, n, whole in zip(offset, size, shape, strict=True)
        )
        if not inside or offset not in stored:
            raise ValueError(f"a part of '{name}' is in none of its files")
        parts.append((offset, size, stored[offset]))
    if sum(math.prod(size) for _, size, _ in parts) != math.prod(shape):
        raise ValueError(f"the parts of '{name}' do not make up its shape {list(shape)}")
    properties = about["properties"].state
    dtype = dtype_named((properties[0] if isinstance(properties, tuple) else properties["dtype"]).text)

    def join() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for offset, size, info in parts:
            part, place = files.load(info), whole
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != size:
                raise ValueError(f"a part of '{name}' is not of the shape {list(size)} that is said of it")
            for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
                place = place.narrow(dim, start, length)
            place.copy_(part)
        return whole

    return Leaf(dtype, shape, join)


@dataclass
class _Files:
    folder: Path
    opened: dict[str, torch.Tensor] = field(default_factory=dict)

    def load(self, info: Mapping[str, Any]) -> Any:
        """What is at a place of a file."""
        name, start, length = info["relative_path"], info["offset"], info["length"]
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} has been transformed by {', '.join(info['transform_descriptors'])}")
        if "/" in name or name.startswith("."):
            raise ValueError(f"'{name}' is not a file of its folder")
        if name not in self.opened:
            self.opened[name] = map_file(self.folder / name)
        data = self.opened[name]
        if not 0 <= start <= start + length <= data.numel():
            raise ValueError(f"{name} has {data.numel()} bytes, and {start + length} are needed")
        return load(data[start : start + length])


def _fields(thing: Any, kind: str) -> Mapping[str, Any]:
    """The attributes of an object of a class, as they were set."""
    if not isinstance(thing, Made) or thing.name.rpartition(".")[2] != kind:
        raise ValueError(f"{METADATA} has something else where a {kind} belongs")
    return thing.state if isinstance(thing.state, dict) else {}
