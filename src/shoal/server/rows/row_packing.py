"""Rows as bytes: how ids and what belongs to them become one flat tensor, and are checked when they come back.

What comes from outside is looked at before it is believed. Numbers lie behind each other in whole words of 8 bytes,
so that each can be read where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from shoal.partition.hashes import hash_keys
from shoal.server.protocol.state_machine import Refused
from shoal.server.rows.slot_map import Ids

_WORD = 8
RowLayout = Sequence[tuple[str, torch.dtype, int]]
"""Name, type and width of what a row has."""

TYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
"""What a table may hold."""


class RowPieceHead(TypedDict):
    """What a piece of a table says of its bytes."""

    count: int
    columns: list[tuple[str, str, int]]
    """(name, type, width); the ids are the first."""


def pack(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Ids, [n] int64, and a row for each, [n, dim], as one flat uint8 tensor.

    >>> ids, rows = unpack(pack(torch.tensor([3, 5]), torch.ones(2, 4)), 4, torch.float32)
    >>> ids.tolist(), tuple(rows.shape)
    ([3, 5], (2, 4))
    """
    if ids.dtype != torch.int64 or ids.dim() != 1 or rows.dim() != 2 or len(rows) != len(ids):
        raise Refused(
            f"{tuple(ids.shape)} ids of {ids.dtype} and rows of shape {tuple(rows.shape)} do not belong together; "
            "give n int64 ids and n rows."
        )
    head = torch.tensor([len(ids), rows.shape[1]])
    return join([head, ids, rows])


def unpack(packed: torch.Tensor | None, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and rows from what `pack` made, as views. The ids are not checked here."""
    if packed is None or packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() < 2 * _WORD:
        raise Refused(
            "rows come as one flat tensor of bytes, and this is none; pack them with shoal's own pack."
        )
    count, width = _read(packed[: 2 * _WORD], torch.int64).tolist()
    if width != dim or count < 0:
        raise Refused(
            f"{count} rows of {width} numbers came for a table with rows of {dim}; use the table's own dim."
        )
    head, ids, rows = cut(packed, [(2, torch.int64), (count, torch.int64), (count * dim, dtype)])
    del head
    return ids, rows.view(count, dim)


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors behind each other, each from a whole word on."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    made = torch.zeros(sum(_padded(size) for size in sizes), dtype=torch.uint8)
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        made[start : start + size].view(tensor.dtype).copy_(tensor.reshape(-1))
        start += _padded(size)
    return made


def cut(packed: torch.Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """The reverse of `join`, for so many numbers of such types; the length has to fit exactly."""
    sizes = [count * dtype.itemsize for count, dtype in parts]
    wanted = joined_size(parts)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != wanted:
        raise Refused(
            f"{wanted} bytes of rows were to come, and {packed.numel()} came; send them again, whole."
        )
    found = []
    start = 0
    for (_, dtype), size in zip(parts, sizes, strict=True):
        found.append(_read(packed[start : start + size], dtype))
        start += _padded(size)
    return found


def joined_size(parts: Sequence[tuple[int, torch.dtype]]) -> int:
    """Bytes that so many numbers of such types take, joined."""
    return sum(_padded(count * dtype.itemsize) for count, dtype in parts)


def check_ids(ids: torch.Tensor, rows: int, unique: bool = True) -> Ids:
    """Ids from outside as an array: within the table, and none twice."""
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise Refused(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; give one flat int64 tensor.")
    found: Ids = np.ascontiguousarray(ids.numpy())
    if found.size and (found.min() < 0 or found.max() >= rows):
        raise Refused(
            f"ids from {found.min()} to {found.max()} came for a table of {rows} rows; give 0 to {rows - 1}."
        )
    if unique and not (found[1:] > found[:-1]).all():  # those in order are seen to be unique at once
        ordered = np.sort(found)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise Refused(f"id {twice[0]} came twice in one message; sum its rows first.")
    return found


def shard_of(ids: npt.NDArray[np.int64], shards: int) -> Ids:
    """Which of so many shards each id is in.

    >>> shard_of(np.arange(6), 2).tolist()
    [1, 1, 0, 1, 0, 0]
    """
    # By hash, not by range: ids in use are seldom spread evenly, frequent words come first.
    return (hash_keys(ids) % np.uint64(shards)).astype(np.int64)


def pack_piece(layout: RowLayout, columns: Sequence[torch.Tensor]) -> tuple[RowPieceHead, torch.Tensor]:
    """Rows with everything that belongs to them, ids first, as a plain value and bytes."""
    names = [(name, str(dtype).removeprefix("torch."), width) for name, dtype, width in layout]
    return {"count": len(columns[0]), "columns": names}, join(columns)


def unpack_piece(value: RowPieceHead, packed: torch.Tensor | None) -> tuple[RowLayout, list[torch.Tensor]]:
    """What `pack_piece` was given, each [count, width]."""
    types = {**TYPES, "int64": torch.int64, "int32": torch.int32}
    try:
        count = int(value["count"])
        layout = [(str(n), types[t], int(w)) for n, t, w in value["columns"]]
        fine = count >= 0 and packed is not None and layout[0] == ("id", torch.int64, 1)
        fine = fine and all(width > 0 for _, _, width in layout)
    except (KeyError, TypeError, ValueError, IndexError):
        fine = False
    if not fine or packed is None:
        raise Refused("a piece of a table came that does not say what it holds; give what a dump gave.")
    tensors = cut(packed, [(count * width, dtype) for _, dtype, width in layout])
    return layout, [t.view(count, width) for t, (_, _, width) in zip(tensors, layout, strict=True)]


def divide(value: RowPieceHead, packed: torch.Tensor, shards: int) -> list[tuple[RowPieceHead, torch.Tensor]]:
    """A piece from any shard as one piece for each of so many shards."""
    layout, columns = unpack_piece(value, packed)
    owners = torch.from_numpy(shard_of(columns[0].view(-1).numpy(), shards))
    own = [torch.nonzero(owners == shard).view(-1) for shard in range(shards)]
    return [pack_piece(layout, [column.index_select(0, mine) for column in columns]) for mine in own]


def _padded(size: int) -> int:
    return -(-size // _WORD) * _WORD


def _read(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers, in place where they lie on whole numbers."""
    if packed.storage_offset() % dtype.itemsize or packed.data_ptr() % dtype.itemsize:
        # A view as wider numbers needs an aligned address; a message may begin anywhere.
        packed = packed.clone()
    return packed.contiguous().view(dtype)
