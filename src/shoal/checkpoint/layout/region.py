"""Which elements of a tensor something holds: the one way in which state is described, whoever has cut it.

Two cuts can lie on top of each other. Tensor parallel leaves some spans along one dimension; an exchange leaves a
range of what that is, counted flat. A region is both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

Span = tuple[int, int]
"""Start and length."""
RegionJson: TypeAlias = "tuple[int, Sequence[Sequence[int]], int, int]"
"""Dimension, spans, start and stop of a region, as a manifest has them."""


@dataclass(frozen=True)
class Region:
    """Elements [start, stop) of a part of a tensor, counted flat; the part is what `spans` along `dim` leave of it.

    >>> Region.whole((4, 3)).numel
    12
    >>> columns = Region((4, 3), dim=1, spans=((0, 1), (2, 1)), start=2, stop=4)
    >>> columns.part_shape, columns.of(torch.arange(12).view(4, 3))
    ((4, 2), tensor([3, 5]))
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    spans: tuple[Span, ...]
    start: int
    stop: int

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        """All of a tensor."""
        size = tuple(shape)
        return Region(size, 0, ((0, size[0]),) if size else (), 0, math.prod(size))

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of what the spans leave."""
        if not self.shape:
            return ()
        shape = list(self.shape)
        shape[self.dim] = sum(length for _, length in self.spans)
        return tuple(shape)

    @property
    def part(self) -> tuple[int, tuple[Span, ...]]:
        """Which part of the tensor it lies in; all of it is the same part however it is cut."""
        everything = (0, ((0, self.shape[0]),)) if self.shape else (0, ())
        return everything if self.part_shape == self.shape else (self.dim, self.spans)

    @property
    def is_part(self) -> bool:
        """Whether it is a part with nothing left out."""
        return (self.start, self.stop) == (0, math.prod(self.part_shape))

    def within(self, start: int, stop: int) -> Region:
        """Elements [start, stop) of this region."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a whole tensor, flat."""
        part = whole
        if self.part_shape != self.shape:
            cuts = [whole.narrow(self.dim, *span) for span in self.spans]
            part = torch.cat(cuts, self.dim) if len(cuts) > 1 else cuts[0]
        return part.reshape(-1)[self.start : self.stop]

    def put_part(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy a complete part to its place in the whole tensor."""
        if self.part_shape == self.shape:
            whole.copy_(part.view(self.shape))
            return
        taken = 0
        for start, length in self.spans:
            whole.narrow(self.dim, start, length).copy_(part.narrow(self.dim, taken, length))
            taken += length

    def to_json(self) -> RegionJson:
        """As a manifest has it; the shape stands elsewhere."""
        return self.dim, self.spans, self.start, self.stop

    @staticmethod
    def from_json(shape: Sequence[int], given: RegionJson) -> Region:
        """Reads what `to_json` wrote; ValueError for anything that is not a region of such a tensor."""
        dim, spans, start, stop = given
        region = Region(
            tuple(shape), int(dim), tuple((int(a), int(n)) for a, n in spans), int(start), int(stop)
        )
        inside = all(a >= 0 and n >= 0 and a + n <= region.shape[region.dim] for a, n in region.spans)
        if not inside or not 0 <= region.start <= region.stop <= math.prod(region.part_shape):
            raise ValueError(f"{given} is not a region of a tensor of shape {list(shape)}")
        return region


def covers(regions: Sequence[Region]) -> bool:
    """Whether regions of one tensor, of which none overlap within a part, leave nothing of it out.

    >>> whole = Region.whole((4, 3))
    >>> covers([whole.within(0, 5), whole.within(5, 12)]), covers([whole.within(0, 5), whole.within(6, 12)])
    (True, False)
    """
    if not regions:
        return False
    parts: dict[tuple[int, tuple[Span, ...]], list[Region]] = {}
    for region in regions:
        parts.setdefault(region.part, []).append(region)
    spans: list[Span] = []
    for inside in parts.values():
        end = 0
        for region in sorted(inside, key=lambda r: r.start):
            if region.start > end:
                return False
            end = max(end, region.stop)
        if end < math.prod(inside[0].part_shape):
            return False
        spans += inside[0].spans
    return (len(parts) == 1 and inside[0].part_shape == inside[0].shape) or _fill(regions, spans)


def _fill(regions: Sequence[Region], spans: Sequence[Span]) -> bool:
    """Whether complete parts put together have every index along their dimension."""
    dims = {region.dim for region in regions}
    if len(dims) > 1:
        return any(region.part_shape == region.shape for region in regions)
    end = 0
    for start, length in sorted(spans):
        if start > end:
            return False
        end = max(end, start + length)
    return end >= regions[0].shape[dims.pop()]
