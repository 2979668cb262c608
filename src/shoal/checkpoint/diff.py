"""In which tensors, and by how much, two checkpoints differ. Equal means: bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal.checkpoint.folder import CheckpointEntry
from shoal.checkpoint.layout.manifest import Logical
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import NAMES
from shoal.checkpoint.load import Reader

_AT_ONCE = 2**22
"""Elements compared at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """What is not the same about a tensor."""

    path: str
    problem: str = ""
    """Where there is nothing to subtract: only one has it, or the shapes are others."""
    elements: int = 0
    """How many differ in at least one bit."""
    numel: int = 0
    absolute: float = 0.0
    """The largest."""
    relative: float = 0.0
    """The largest, to the larger of the two numbers."""

    @property
    def weight(self) -> tuple[bool, float, float]:
        """To sort by: what cannot be compared first, then by size; a number that is none counts as infinite."""
        relative, absolute = (math.inf if math.isnan(x) else x for x in (self.relative, self.absolute))
        return bool(self.problem), relative, absolute


def compare(a: CheckpointEntry, b: CheckpointEntry) -> Iterator[Difference]:
    """The tensors that are not the same; none if the two are equal. Both must be whole."""
    left, right = Reader.of(a), Reader.of(b)
    for path in sorted(left.manifest.tensors.keys() | right.manifest.tensors.keys()):
        one, other = left.manifest.tensors.get(path), right.manifest.tensors.get(path)
        if one is None or other is None:
            yield Difference(path, f"only in {'B' if one is None else 'A'}")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            yield Difference(path, f"{_title(one)} in A, {_title(other)} in B")
        else:
            found = _numbers(path, one, left, right)
            if found.elements:
                yield found
    left.close()
    right.close()


def _numbers(path: str, tensor: Logical, left: Reader, right: Reader) -> Difference:
    whole = Region.whole(tensor.shape)
    elements, absolute, relative = 0, 0.0, 0.0
    for start in range(0, whole.numel, _AT_ONCE):
        region = whole.within(start, min(start + _AT_ONCE, whole.numel))
        count, *sizes = difference(left.read(path, region), right.read(path, region))
        elements += count
        absolute, relative = _larger(absolute, sizes[0]), _larger(relative, sizes[1])
    return Difference(path, "", elements, whole.numel, absolute, relative)


def difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    """How many elements differ, and the largest absolute and relative difference of two flat tensors of one kind.

    >>> difference(torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1.0, 4.0, math.nan]))
    (1, 2.0, 0.5)
    """
    bits = _BITS[a.dtype.itemsize]
    changed = a.view(bits) != b.view(bits)  # as bits: a NaN equals itself, and -0.0 is not 0.0
    count = int(changed.sum())
    if count == 0:
        return 0, 0.0, 0.0
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    one, other = a[changed].to(wide), b[changed].to(wide)
    gap = (one - other).abs()
    scale = torch.maximum(one.abs(), other.abs())
    relative = torch.where(gap == 0, torch.zeros_like(gap), gap / scale)
    return count, float(gap.max()), float(relative.max())


def _larger(a: float, b: float) -> float:
    """The larger; a number that is none is larger than any."""
    return b if math.isnan(b) or b > a else a


def _title(tensor: Logical) -> str:
    return f"{NAMES[tensor.dtype]} {list(tensor.shape)}"
