"""A stream of record batches, cut into the files of a store.

Where a file ends depends on its rows alone, never on how they came in batches: so the same rows make the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shoal.data.store.arrow import RecordBatch, Schema, arrow, kind_of
from shoal.errors import ConfigError

Table = Any
"""pyarrow.Table"""


def cut(batches: Iterable[RecordBatch], schema: Schema, target: int) -> Iterator[RecordBatch]:
    """Record batches of as many rows as `target` bytes hold, in the types of `schema`."""
    pa = arrow()
    held: list[RecordBatch] = []
    size = 0
    for given in batches:
        batch = as_stored(given, schema)
        while batch.num_rows:
            ends = np.cumsum(row_bytes(batch)) + size
            fits = int(np.searchsorted(ends, target, side="right"))
            if fits == batch.num_rows:
                held.append(batch)
                size = int(ends[-1])
                break
            fits = fits if held or fits else 1  # one row larger than a file is a file
            held.append(batch.slice(0, fits))
            yield one_batch(pa.Table.from_batches(held, schema))
            batch = batch.slice(fits)
            held = []
            size = 0
    if held:
        yield one_batch(pa.Table.from_batches(held, schema))


def as_stored(batch: RecordBatch, schema: Schema) -> RecordBatch:
    """A batch with the store's columns, in its order and types."""
    pa = arrow()
    missing = [name for name in schema.names if name not in batch.schema.names]
    if missing:
        raise ConfigError(
            f"column '{missing[0]}' is missing in a part of the data, which has {', '.join(batch.schema.names)}; make "
            "all parts alike."
        )
    columns = [_cast(batch.column(field.name), field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(array: Any, field: Any) -> Any:
    pa = arrow()
    if pa.types.is_fixed_size_list(field.type) and not pa.types.is_fixed_size_list(array.type):
        return _fixed(array, field)
    try:
        made = array if array.type == field.type else array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"column '{field.name}' is {array.type} in a part of the data and {field.type} in the store ({error}); "
            "make all parts alike."
        ) from error
    if kind_of(field.name, field.type).kind == "list" and made.values.null_count:
        flat = made.flatten()
        if flat.null_count:
            raise ConfigError(
                f"column '{field.name}' has lists with {flat.null_count} nulls in them; give each a value."
            )
    return made


def _fixed(array: Any, field: Any) -> Any:
    """Lists that all have one length, as such."""
    pa = arrow()
    inner, width = field.type, 1
    while pa.types.is_fixed_size_list(inner):
        width *= inner.list_size
        inner = inner.value_type
    lengths = pa.compute.list_value_length(array)
    wrong = pa.compute.filter(lengths, pa.compute.not_equal(pa.compute.fill_null(lengths, -1), width))
    if len(wrong):
        raise ConfigError(
            f"column '{field.name}' has a row of {wrong[0].as_py()} numbers, and shapes= says {width} each; cut or "
            "fill them up."
        )
    made = array.flatten().cast(inner)
    for size in reversed(_sizes(field.type)):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return made


def _sizes(found: Any) -> list[int]:
    sizes = []
    while arrow().types.is_fixed_size_list(found):
        sizes.append(found.list_size)
        found = found.value_type
    return sizes


def digest_of(batches: Iterable[RecordBatch]) -> str:
    """A checksum of rows, as they come in batches."""
    whole = xxhash.xxh3_128()
    for batch in batches:
        whole.update(batch.serialize())
    return whole.hexdigest()


def row_bytes(batch: RecordBatch) -> npt.NDArray[np.int64]:
    """How many bytes each row takes, about: bits count as bytes."""
    pa = arrow()
    total = np.zeros(batch.num_rows, dtype=np.int64)
    for array, field in zip(batch.columns, batch.schema, strict=True):
        kind = kind_of(field.name, field.type)
        if kind.kind in ("text", "bytes"):
            total += (
                pa.compute.fill_null(pa.compute.binary_length(array), 0).to_numpy(zero_copy_only=False) + 4
            )
        elif kind.kind == "list":
            assert kind.dtype is not None
            lengths = pa.compute.fill_null(pa.compute.list_value_length(array), 0)
            total += lengths.to_numpy(zero_copy_only=False).astype(np.int64) * kind.dtype.itemsize + 4
        else:
            assert kind.dtype is not None
            total += int(np.prod(kind.shape, dtype=np.int64)) * kind.dtype.itemsize
    return total


def one_batch(table: Table) -> RecordBatch:
    """A table as one record batch, with nothing behind its nulls: equal rows make equal bytes."""
    pa = arrow()
    columns = []
    for array, field in zip(table.columns, table.schema, strict=True):
        whole = array.combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
        columns.append(_without_remains(whole, field) if whole.null_count else whole)
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def _without_remains(array: Any, field: Any) -> Any:
    """The same array with zeros where it is null."""
    pa = arrow()
    kind = kind_of(field.name, field.type)
    count = len(array)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if kind.kind not in ("numbers", "bool"):
        # Put together anew, text and lists take no bytes where they are null.
        return array.take(pa.array(np.arange(count)))
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    if kind.kind == "bool":
        values = pa.compute.fill_null(array, False).to_numpy(zero_copy_only=False)
        return pa.Array.from_buffers(
            array.type, count, [bitmap, pa.py_buffer(np.packbits(values, bitorder="little"))]
        )
    assert kind.dtype is not None
    width = int(np.prod(kind.shape, dtype=np.int64)) * kind.dtype.itemsize
    whole = np.frombuffer(array.buffers()[-1], dtype=np.uint8)
    cells = whole[array.offset * width : (array.offset + count) * width].reshape(count, width).copy()
    cells[~valid] = 0
    return _nested(array.type, count, bitmap, pa.py_buffer(cells))


def _nested(found: Any, count: int, bitmap: Any, cells: Any) -> Any:
    pa = arrow()
    if not pa.types.is_fixed_size_list(found):
        return pa.Array.from_buffers(found, count, [bitmap, cells])
    child = _nested(found.value_type, count * found.list_size, None, cells)
    return pa.Array.from_buffers(found, count, [bitmap], children=[child])
