"""Reading: any region of any logical tensor, whoever wrote its slices.

Where a slice and the region lie in the same part of a tensor, only the bytes wanted are copied. Where tensor parallel
has cut it in another way, the whole tensor is put together first, one at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.checkpoint.folder import CheckpointEntry
from shoal.checkpoint.layout.manifest import Logical, Manifest
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import ShardFile, Slot
from shoal.world.shm.memory import put


class Reader:
    """The tensors of a checkpoint whose files have been verified."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files: dict[str, tuple[ShardFile, dict[str, Slot]]] = {}
        self._joined: tuple[str, torch.Tensor] | None = None

    @staticmethod
    def of(found: CheckpointEntry) -> Reader:
        assert found.manifest is not None
        return Reader(found.folder, found.manifest)

    def read(self, path: str, region: Region | None = None) -> torch.Tensor:
        """The elements of a region as a flat tensor of its own; without a region the whole tensor in its shape."""
        tensor = self.manifest.tensors[path]
        if region is None:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.read_into(path, Region.whole(tensor.shape), whole)
            return whole
        out = torch.empty(region.numel, dtype=tensor.dtype)
        self.read_into(path, region, out)
        return out

    def read_into(self, path: str, region: Region, out: torch.Tensor) -> None:
        """Copy the elements of a region to where they belong; `out` has as many."""
        tensor = self.manifest.tensors[path]
        flat = out.view(-1) if out.is_contiguous() else torch.empty(region.numel, dtype=out.dtype)
        if all(piece.region.part == region.part for piece in tensor.slices):
            self._gather(tensor, region, flat)
        else:
            flat.copy_(region.of(self._whole(path, tensor)))
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))

    def _gather(self, tensor: Logical, region: Region, flat: torch.Tensor) -> None:
        for piece in tensor.slices:
            low, high = max(piece.region.start, region.start), min(piece.region.stop, region.stop)
            if low < high:
                stored = self._stored(piece.file, piece.key)
                first = piece.region.start
                put(flat[low - region.start : high - region.start], stored[low - first : high - first])

    def _whole(self, path: str, tensor: Logical) -> torch.Tensor:
        if self._joined is not None and self._joined[0] == path:
            return self._joined[1]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for part in dict.fromkeys(piece.region.part for piece in tensor.slices):
            inside = [piece for piece in tensor.slices if piece.region.part == part]
            shape = inside[0].region.part_shape
            room = torch.empty(shape, dtype=tensor.dtype)
            for piece in inside:
                stored = self._stored(piece.file, piece.key)
                room.view(-1)[piece.region.start : piece.region.stop].copy_(stored)
            inside[0].region.put_part(room, whole)
        self._joined = (path, whole)
        return whole

    def _stored(self, file: str, key: str) -> torch.Tensor:
        if file not in self._files:
            opened = ShardFile(self.folder / file)
            self._files[file] = (opened, opened.header())
        shard, slots = self._files[file]
        return shard.read(slots[key])

    def close(self) -> None:
        self._joined = None
        for shard, _ in self._files.values():
            shard.close()
        self._files = {}
