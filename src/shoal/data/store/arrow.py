"""Arrow as a store uses it: the package, if it is here, and which of its types a store holds."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from shoal.errors import ConfigError

Schema = Any
"""pyarrow.Schema"""
RecordBatch = Any
"""pyarrow.RecordBatch"""
ArrowType = Any
"""pyarrow.DataType"""


def arrow() -> ModuleType:
    """pyarrow, or how to get it."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
    except ImportError as error:
        raise ConfigError(
            f"stores and flows need pyarrow, which is not here ({error}); run pip install 'shoal[data]'."
        ) from error
    module: ModuleType = pyarrow
    return module


@dataclass(frozen=True)
class ColumnKind:
    """How a column lies in a file, and what it becomes."""

    kind: str
    """"numbers" (of one shape in every row), "bool", "list" (of numbers, as many as there are), "text" or "bytes"."""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


_DTYPES = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "halffloat": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "date32": torch.int32,
    "date64": torch.int64,
    "time32": torch.int32,
    "time64": torch.int64,
    "timestamp": torch.int64,
    "duration": torch.int64,
}
HELD = "numbers, bool, text, bytes, dates and times, and lists of numbers"


def kind_of(name: str, found: ArrowType) -> ColumnKind:
    """How a column of this type is held, or a refusal.

    >>> kind_of("x", arrow().list_(arrow().float32(), 3))
    ColumnKind(kind='numbers', dtype=torch.float32, shape=(3,))
    >>> kind_of("x", arrow().struct([]))
    Traceback (most recent call last):
    shoal.errors.ConfigError: column 'x' has type struct<>, and a store holds numbers, bool, text, bytes, dates and \
times, and lists of numbers; make such columns of it, or leave it out.
    """
    pa = arrow()
    plain = _plain(found)
    shape: tuple[int, ...] = ()
    inner = plain
    while pa.types.is_fixed_size_list(inner):
        shape = (*shape, inner.list_size)
        inner = inner.value_type
    dtype = _dtype(inner)
    if dtype is not None:
        return ColumnKind("numbers", dtype, shape)
    if not shape and pa.types.is_boolean(plain):
        return ColumnKind("bool", torch.bool)
    if pa.types.is_list(plain) and _dtype(plain.value_type) is not None:
        return ColumnKind("list", _dtype(plain.value_type))
    if pa.types.is_string(plain):
        return ColumnKind("text")
    if pa.types.is_binary(plain):
        return ColumnKind("bytes")
    raise ConfigError(
        f"column '{name}' has type {found}, and a store holds {HELD}; make such columns of it, or leave it out."
    )


def _dtype(found: ArrowType) -> torch.dtype | None:
    return _DTYPES.get(str(found).partition("[")[0])


def _plain(found: ArrowType) -> ArrowType:
    """The type as it is stored: engines have several for the same values."""
    pa = arrow()
    kinds = pa.types
    if kinds.is_dictionary(found):
        return _plain(found.value_type)
    if kinds.is_large_string(found) or str(found) == "string_view":
        return pa.string()
    if kinds.is_large_binary(found) or kinds.is_fixed_size_binary(found) or str(found) == "binary_view":
        return pa.binary()
    if kinds.is_fixed_size_list(found):
        return pa.list_(_plain(found.value_type), found.list_size)
    if kinds.is_list(found) or kinds.is_large_list(found):
        return pa.list_(_plain(found.value_type))
    return found


def stored_schema(schema: Schema, shapes: dict[str, tuple[int, ...]]) -> Schema:
    """The schema of a store's files: plain types, no metadata; `shapes` makes lists of one length of some columns."""
    pa = arrow()
    fields = []
    missing = sorted(set(shapes) - set(schema.names))
    if missing:
        raise ConfigError(f"shapes= names column '{missing[0]}', and there are {', '.join(schema.names)}.")
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigError(f"there are two columns '{twice[0]}'; give one of them another name.")
    for field in schema:
        plain = _plain(field.type)
        if field.name in shapes:
            plain = _shaped(field.name, plain, shapes[field.name])
        kind_of(field.name, plain)
        fields.append(pa.field(field.name, plain))
    return pa.schema(fields)


def _shaped(name: str, plain: ArrowType, shape: tuple[int, ...]) -> ArrowType:
    pa = arrow()
    if not pa.types.is_list(plain) or not shape or min(shape) < 1:
        raise ConfigError(
            f"shapes= gives column '{name}' the shape {shape}, and its type is {plain}; it needs lists."
        )
    made = plain.value_type
    for size in reversed(shape):
        made = pa.list_(made, size)
    return made
