"""Tensors that are larger than memory: they come row by row, and go into files of their own as they come.

A piece is some rows of several tensors that grow together. Pieces are written at once, file by file, each of a size
that memory holds easily; how long the tensors are is known when the last has come, and only then does the manifest
need it. What has been written is seen on the disk later, before the checkpoint becomes one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias, TypedDict

import torch

from shoal.checkpoint.copies.peers import Peers
from shoal.checkpoint.folder import flush
from shoal.checkpoint.layout.manifest import FileFacts
from shoal.checkpoint.layout.region import Region, RegionJson
from shoal.checkpoint.layout.shard_file import NAMES, head, place
from shoal.checkpoint.layout.tensor_stream import raw
from shoal.sealed import checksum, write_file

Piece = tuple[str, Mapping[str, torch.Tensor]]
"""The path above some tensors, and the next rows of each: "rows/words", {"id": [n, 1], "values": [n, dim]}."""

SliceReport: TypeAlias = "tuple[str, str, list[int], str, RegionJson, str]"
"""A slice in a file: path of its tensor, type, shape, key in the file, region, checksum."""


class NamedFile(TypedDict):
    """A file that a rank has written."""

    name: str
    bytes: int
    head: str


class FileReport(TypedDict):
    """What a manifest needs of a file."""

    file: NamedFile
    slices: list[SliceReport]


_FILE = 128 * 2**20
"""Bytes of a file, about: what is in memory at a time."""


class PieceFiles:
    """The files that one rank writes of pieces, in one folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._rows: dict[str, int] = {}
        """How many have been written, by the path above."""
        self._written: list[tuple[str, FileFacts, list[_Part]]] = []
        self.error: OSError | None = None
        """Why the disk did not take what came."""

    def write(self, pieces: Iterable[Piece]) -> None:
        """Write all that come; those of one path come one after the other. What the disk says is kept for later."""
        try:
            self._write(pieces)
        except OSError as error:
            self.error = error

    def _write(self, pieces: Iterable[Piece]) -> None:
        above = ""
        held = list[Mapping[str, torch.Tensor]]()
        size = 0
        for path, tensors in pieces:
            if path != above or size >= _FILE:
                self._write_file(above, held)
                above = path
                held = []
                size = 0
            held.append(tensors)
            size += sum(tensor.nbytes for tensor in tensors.values())
        self._write_file(above, held)

    def _write_file(self, above: str, held: list[Mapping[str, torch.Tensor]]) -> None:
        if not held:
            return
        joined = {name: torch.cat([tensors[name] for tensors in held]) for name in held[0]}
        held.clear()
        start = self._rows.get(above, 0)
        stop = self._rows[above] = start + len(next(iter(joined.values())))
        # The widest numbers first: then each tensor begins where one of its kind may.
        names = sorted(joined, key=lambda name: -joined[name].dtype.itemsize)
        keys = {name: f"{above}/{name}[{start}:{stop}]" for name in names}
        slots = place([(keys[name], joined[name].dtype, tuple(joined[name].shape)) for name in names])
        header = head(slots)
        data = [raw(joined[name]) for name in names]
        file = f"rows-{self._rank:04}-{len(self._written):05}.safetensors"
        self._folder.mkdir(parents=True, exist_ok=True)
        write_file(self._folder / file, [header, *data], flush=False)
        facts = FileFacts(len(header) + slots[-1].stop, checksum(header))
        parts = [
            (
                f"{above}/{name}",
                joined[name].dtype,
                joined[name].shape[1],
                keys[name],
                start,
                stop,
                checksum(some),
            )
            for name, some in zip(names, data, strict=True)
        ]
        self._written.append((file, facts, parts))

    def settle(self, peers: Peers | None) -> list[FileReport]:
        """See them on the disk, and in the memory of peers; returns what a manifest needs of each file."""
        for file, _, _ in self._written:
            flush(self._folder / file)
            if peers is not None:
                with open(self._folder / file, "rb") as opened:
                    whole = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                    peers.put(self._folder.name, file, [memoryview(whole)])
        return [
            {
                "file": {"name": file, "bytes": facts.bytes, "head": facts.head},
                "slices": [self._slice(*part) for part in parts],
            }
            for file, facts, parts in self._written
        ]

    def _slice(
        self, path: str, dtype: torch.dtype, width: int, key: str, start: int, stop: int, total: str
    ) -> SliceReport:
        shape = (self._rows[path.rpartition("/")[0]], width)
        region = Region.whole(shape).within(start * width, stop * width)
        return path, NAMES[dtype], list(shape), key, region.to_json(), total


_Part = tuple[str, torch.dtype, int, str, int, int, str]
"""Path, type, width, key in the file, first row, the row after the last, checksum."""
