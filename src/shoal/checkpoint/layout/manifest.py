"""What a checkpoint consists of: logical tensors, where each slice of them is, and the checksum of every byte.

    {"checksum": "…", "manifest": {
      "format": 1, "name": "step-300", "step": 300, "written": "…", "plan": "zero1 * tp2", "workers": 4,
      "keep": "3",                                   by which retention it goes; empty if it was saved by name
      "versions": {"shoal": "…", "torch": "…"},
      "state": {…},                                 cursor, learning rate, loss scale, random streams, …
      "files": {"rank-0000.safetensors": {"bytes": 1234, "head": "…"}},
      "tensors": {"parameter/up.weight": {"dtype": "F32", "shape": [8, 4], "slices": [
        {"file": "rank-0000.safetensors", "key": "…", "region": [0, [[0, 8]], 0, 32], "checksum": "…"}]}}}}

The text is exactly what `dumps` makes of it, so a change of any bit of it shows too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from shoal.checkpoint.layout.head import FILE as FILE
from shoal.checkpoint.layout.head import FORMAT, head_of
from shoal.checkpoint.layout.region import Region, RegionJson, covers
from shoal.checkpoint.layout.shard_file import DTYPES, NAMES
from shoal.sealed import seal, unseal


@dataclass(frozen=True)
class Slice:
    """Some elements of a logical tensor, in a file."""

    file: str
    key: str
    region: Region
    checksum: str


@dataclass(frozen=True)
class Logical:
    """A tensor of the run, whoever held it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        return Region.whole(self.shape).numel * self.dtype.itemsize


class SliceEntry(TypedDict):
    """A slice as the text of a manifest has it."""

    file: str
    key: str
    region: RegionJson
    checksum: str


class TensorEntry(TypedDict):
    """A logical tensor as the text of a manifest has it."""

    dtype: str
    shape: list[int]
    slices: list[SliceEntry]


@dataclass(frozen=True)
class FileFacts:
    """What a file must look like."""

    bytes: int
    head: str
    """Checksum of everything before the data."""


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint, without the numbers themselves."""

    name: str
    step: int
    written: str
    """When, in UTC."""
    plan: str
    workers: int
    tensors: Mapping[str, Logical]
    """By path: parameter/NAME, buffer/NAME, optimizer/KEY/NAME, rows/NAME/COLUMN."""
    files: Mapping[str, FileFacts]
    state: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    keep: str = ""
    """The retention that it was saved under and goes by; empty where somebody has asked for it by name."""

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dumps(self) -> bytes:
        """As text, with a checksum of its own."""
        body = {
            "format": FORMAT,
            "name": self.name,
            "step": self.step,
            "written": self.written,
            "plan": self.plan,
            "workers": self.workers,
            "keep": self.keep,
            "versions": dict(self.versions),
            "state": dict(self.state),
            "files": {n: {"bytes": f.bytes, "head": f.head} for n, f in self.files.items()},
            "tensors": {path: _tensor_to_json(tensor) for path, tensor in self.tensors.items()},
        }
        return seal(body)

    @staticmethod
    def loads(text: bytes) -> Manifest:
        """Reads what `dumps` wrote; ValueError, with a reason, for anything else."""
        body = unseal(text)
        head = head_of(body)
        try:
            manifest = Manifest(
                name=head.name,
                step=head.step,
                written=head.written,
                plan=head.plan,
                workers=head.workers,
                tensors={path: _tensor_from_json(entry) for path, entry in body["tensors"].items()},
                files={
                    _plain(n): FileFacts(int(f["bytes"]), str(f["head"])) for n, f in body["files"].items()
                },
                state=dict(body["state"]),
                versions=dict(body["versions"]),
                keep=head.keep,
            )
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"an entry is missing or of the wrong kind ({error})") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        for path, tensor in self.tensors.items():
            for piece in tensor.slices:
                if piece.file not in self.files:
                    raise ValueError(f"'{path}' is said to be in {piece.file}, which it does not list")
            if not covers([piece.region for piece in tensor.slices]):
                raise ValueError(f"a part of '{path}' is in none of its files")


def _tensor_to_json(tensor: Logical) -> TensorEntry:
    slices: list[SliceEntry] = [
        {"file": s.file, "key": s.key, "region": s.region.to_json(), "checksum": s.checksum}
        for s in tensor.slices
    ]
    return {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "slices": slices}


def _tensor_from_json(entry: TensorEntry) -> Logical:
    shape = tuple(int(length) for length in entry["shape"])
    slices = tuple(
        Slice(_plain(s["file"]), str(s["key"]), Region.from_json(shape, s["region"]), str(s["checksum"]))
        for s in entry["slices"]
    )
    return Logical(DTYPES[entry["dtype"]], shape, slices)


def _plain(name: str) -> str:
    """A file of the folder itself: nothing that leads out of it."""
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"'{name}' is not a plain file name")
    return name
