"""Vectors as blocks with a scale each: what `int8`, `int4` and `sign` have in common."""

from __future__ import annotations

from abc import abstractmethod

import torch

from shoal.compress.base import Code, Layout, aligned, part
from shoal.compress.cast import CHUNK, chunks


class Blockwise(Code):
    """The payload: a float32 scale for each block, then the elements of all blocks, in whole bytes.

    The last block is filled up with zeros. Arithmetic is float32, whatever the vector's type.
    """

    summable = False
    elementwise = False

    def __init__(self, layout: Layout, block: int, per_byte: int) -> None:
        """`per_byte` elements go into a byte. A vector shorter than a block has a block of its own size."""
        super().__init__(layout)
        self.block = max(8, min(block, aligned(layout.size)))
        self._per_byte = per_byte
        self._blocks = -(-layout.size // self.block)
        self._begin = aligned(4 * self._blocks)
        self._rows = max(1, CHUNK // self.block)
        self._scratch: torch.Tensor | None = None
        self._filled: torch.Tensor | None = None

    @abstractmethod
    def pack(self, rows: torch.Tensor, work: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the scale of each row of float32, and its elements as bytes. `work` has the shape of `rows`."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows of float32 that bytes and scales stand for."""

    def payload(self) -> torch.Tensor:
        return torch.zeros(self.nbytes(), dtype=torch.uint8, device=self.layout.device)

    def nbytes(self) -> int:
        return self._begin + aligned(self._blocks * self.block // self._per_byte)

    def kept(self, feedback: bool) -> int:
        del feedback
        room = min(self._rows, self._blocks) * self.block * 4
        in_place = self.layout.dtype == torch.float32 and self.layout.size % self.block == 0
        return room if in_place else 2 * room

    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        del turn
        scales, packed = self._parts(out)
        out[4 * self._blocks : self._begin].zero_()
        out[self._begin + packed.numel() :].zero_()
        for first, last in chunks(self._blocks, self._rows):
            stretch = vector[first * self.block : last * self.block]
            rows = stretch
            if not self._is_rows(stretch):
                rows = self._room_for_copies(last - first)
                rows[stretch.numel() :].zero_()
                rows[: stretch.numel()].copy_(stretch)
            shape = (last - first, self.block)
            self.pack(rows.view(shape), self._room(last - first), scales[first:last], packed[first:last])

    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        scales, packed = self._parts(payload)
        for first, last in chunks(self._blocks, self._rows):
            stretch = out[first * self.block : last * self.block]
            if factor is None and self._is_rows(stretch):
                self.unpack(packed[first:last], scales[first:last], stretch.view(-1, self.block))
                continue
            rows = self._room(last - first)
            self.unpack(packed[first:last], scales[first:last], rows)
            said = rows.view(-1)[: stretch.numel()]
            if factor is None:
                stretch.copy_(said)
            else:
                stretch.add_(said, alpha=factor)

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales, and the bytes of each block."""
        scales = part(payload, 0, self._blocks, torch.float32)
        width = self.block // self._per_byte
        return scales, part(payload, self._begin, self._blocks * width, torch.uint8).view(-1, width)

    def _is_rows(self, stretch: torch.Tensor) -> bool:
        return stretch.dtype == torch.float32 and stretch.numel() % self.block == 0

    def _room(self, blocks: int) -> torch.Tensor:
        if self._scratch is None:
            rows = min(self._rows, self._blocks)
            self._scratch = torch.empty(rows, self.block, dtype=torch.float32, device=self.layout.device)
        return self._scratch[:blocks]

    def _room_for_copies(self, blocks: int) -> torch.Tensor:
        if self._filled is None:
            rows = min(self._rows, self._blocks)
            self._filled = torch.empty(rows * self.block, dtype=torch.float32, device=self.layout.device)
        return self._filled[: blocks * self.block]
