"""A safetensors file written one tensor at a time: what is converted need not fit into memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint.layout.manifest import FileFacts
from shoal.checkpoint.layout.shard_file import check_type, head, place
from shoal.sealed import checksum, write_file


@dataclass(frozen=True)
class Leaf:
    """A tensor that is somewhere; `read` brings it here."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    same: object = None
    """Two leaves with an equal value here, not None, are one tensor."""

    @property
    def nbytes(self) -> int:
        return place([("", self.dtype, self.shape)])[0].stop

    @staticmethod
    def of(tensor: torch.Tensor) -> Leaf:
        """A tensor that is here already.

        >>> Leaf.of(torch.zeros(4, 3)).nbytes
        48
        """
        where = (tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype) if tensor.numel() else None
        return Leaf(tensor.dtype, tuple(tensor.shape), lambda: tensor, where)


@dataclass(frozen=True)
class Written:
    """What a file has become: facts for a manifest."""

    facts: FileFacts
    checksums: Mapping[str, str]
    """By key."""


def write_stream(
    path: Path, leaves: Mapping[str, Leaf], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write tensors into one file, and see it on the disk before returning."""
    for key, leaf in leaves.items():
        check_type(key, leaf.dtype)
    # The widest numbers first: then each tensor begins where one of its kind may.
    keys = sorted(leaves, key=lambda key: -leaves[key].dtype.itemsize)
    slots = place([(key, leaves[key].dtype, leaves[key].shape) for key in keys])
    header = _with_metadata(head(slots), metadata) if metadata else head(slots)
    sums: dict[str, str] = {}
    write_file(path, _parts(header, keys, leaves, sums))
    size = len(header) + (slots[-1].stop if slots else 0)
    return Written(FileFacts(size, checksum(header)), sums)


def _parts(
    header: bytes, keys: Sequence[str], leaves: Mapping[str, Leaf], sums: dict[str, str]
) -> Iterator[bytes | memoryview]:
    yield header
    for key in keys:
        leaf = leaves[key]
        data = raw(leaf.read().to(leaf.dtype))
        assert len(data) == leaf.nbytes, key
        sums[key] = checksum(data)
        yield data


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's numbers, one after the other.

    >>> bytes(raw(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T))
    b'\\x01\\x03\\x02\\x04'
    """
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def _with_metadata(header: bytes, metadata: Mapping[str, str]) -> bytes:
    entries = {"__metadata__": dict(metadata), **json.loads(header[8:])}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
