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

import torch

from shoal.checkpoint.convert.pickled import Made, Name, read, whole_numbers
from shoal.checkpoint.convert.torchfile import DTYPES, dtype_named, load, map_file
from shoal.checkpoint.layout.tensor_stream import Leaf

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

    read: Callable[[], object]


def tree(folder: Path) -> dict[object, object]:
    """What was saved, as it was nested: dicts, with a Leaf or a Later at each end. ValueError, with a reason, if it
    cannot be read."""
    facts = _fields(read((folder / METADATA).read_bytes(), _ALLOWED), "Metadata")
    files = _Files(folder)
    chunks: dict[object, dict[tuple[int, ...], _Chunk]] = {}
    for index, info in _table(facts.get("storage_data")).items():
        where = _fields(index, "MetadataIndex")
        offset = whole_numbers(where.get("offset") or ())
        chunks.setdefault(where["fqn"], {})[offset] = _Chunk.of(_fields(info, "_StorageInfo"))
    found: dict[object, object] = {}
    paths = _table(facts.get("planner_data"))
    entries = _table(facts["state_dict_metadata"])
    # In the order of the state dict that was saved: that of the entries depends on who wrote what.
    for name in dict.fromkeys([*(name for name in paths if name in entries), *entries]):
        end = _end(str(name), entries[name], chunks.get(name, {}), files)
        path = paths.get(name, (name,))
        if not isinstance(path, list | tuple) or not path:
            raise ValueError(f"{METADATA} does not say where '{name}' belongs")
        *above, last = path
        place = found
        for key in above:
            below = place.setdefault(key, {})
            if not isinstance(below, dict):
                raise ValueError(f"{METADATA} has '{name}' inside something that is no dict")
            place = below
        place[last] = end
    return found


@dataclass(frozen=True)
class _Chunk:
    """The bytes of a file that torch.save made of one part of a tensor, or of a value."""

    file: str
    start: int
    length: int
    transforms: tuple[str, ...]

    @classmethod
    def of(cls, info: Mapping[str, object]) -> _Chunk:
        start, length = whole_numbers((info["offset"], info["length"]))
        given = info.get("transform_descriptors") or ()
        transforms = tuple(map(str, given)) if isinstance(given, list | tuple) else (str(given),)
        return cls(str(info["relative_path"]), start, length, transforms)


def _end(name: str, entry: object, stored: Mapping[tuple[int, ...], _Chunk], files: _Files) -> Leaf | Later:
    if isinstance(entry, Made) and entry.name.endswith(".BytesStorageMetadata"):
        info = stored.get(())
        if info is None:
            raise ValueError(f"'{name}' is in none of its files")
        return Later(lambda: files.load(info))
    about = _fields(entry, "TensorStorageMetadata")
    shape = whole_numbers(about["size"])
    chunks = about["chunks"]
    parts = []
    for chunk in chunks if isinstance(chunks, list | tuple) else ():
        where = _fields(chunk, "ChunkStorageMetadata")
        offset, size = whole_numbers(where["offsets"]), whole_numbers(where["sizes"])
        inside = len(offset) == len(size) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= whole for a, n, whole in zip(offset, size, shape, strict=True)
        )
        if not inside or offset not in stored:
            raise ValueError(f"a part of '{name}' is in none of its files")
        parts.append((offset, size, stored[offset]))
    if sum(math.prod(size) for _, size, _ in parts) != math.prod(shape):
        raise ValueError(f"the parts of '{name}' do not make up its shape {list(shape)}")
    dtype = _dtype(about["properties"])

    def join() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for offset, size, info in parts:
            part = files.load(info)
            place = whole
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

    def load(self, chunk: _Chunk) -> object:
        """What is at a place of a file."""
        name = chunk.file
        stop = chunk.start + chunk.length
        if chunk.transforms:
            raise ValueError(f"{name} has been transformed by {', '.join(chunk.transforms)}")
        if "/" in name or name.startswith("."):
            raise ValueError(f"'{name}' is not a file of its folder")
        if name not in self.opened:
            self.opened[name] = map_file(self.folder / name)
        data = self.opened[name]
        if not 0 <= chunk.start <= stop <= data.numel():
            raise ValueError(f"{name} has {data.numel()} bytes, and {stop} are needed")
        return load(data[chunk.start : stop])


def _dtype(properties: object) -> torch.dtype:
    """The number format in a TensorProperties, whose state is a tuple or, in older files, a dict."""
    state = properties.state if isinstance(properties, Made) else None
    found = state[0] if isinstance(state, tuple) and state else _table(state).get("dtype")
    if not isinstance(found, Name):
        raise ValueError(f"{METADATA} does not say what numbers a tensor holds")
    return dtype_named(found.text)


def _table(value: object) -> dict[object, object]:
    if not isinstance(value, dict | None):
        raise ValueError(f"{METADATA} has a {type(value).__name__} where a dict belongs")
    return value or {}


def _fields(thing: object, kind: str) -> Mapping[str, object]:
    """The attributes of an object of a class, as they were set."""
    if not isinstance(thing, Made) or thing.name.rpartition(".")[2] != kind:
        raise ValueError(f"{METADATA} has something else where a {kind} belongs")
    return thing.state if isinstance(thing.state, dict) else {}
