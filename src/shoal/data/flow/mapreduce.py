"""Map and reduce by Python functions, for what expressions cannot say.

`map(row)` gives any number of (key, value) pairs; `reduce(key, values)` makes one row of all values of a key. `combine`
may join values early, within each batch of rows that is mapped: it takes and gives a list of values, and a sum or a
count then moves a few numbers where there were millions. Values come to `reduce` sorted, so that results do not depend
on which worker was first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from shoal.data.flow.engine import MARK, need_ibis
from shoal.data.flow.errors import running
from shoal.data.flow.flow import Flow
from shoal.data.flow.functions import RowError, name_of, source_of
from shoal.data.store.arrow import RecordBatch, arrow
from shoal.errors import ConfigError

Row = Mapping[str, Any]
MapRow = Callable[[Row], Iterable[tuple[Any, Any]]]
Combine = Callable[[list[Any]], list[Any]]
Reduce = Callable[[Any, list[Any]], Any]

KEY, VALUE, VALUES = "key", "value", "values"


def map_reduce(
    flow: Flow,
    map: MapRow,
    reduce: Reduce,
    *,
    key: str = "string",
    value: str = "int64",
    gives: str | None = None,
    combine: Combine | None = None,
) -> Flow:
    """A flow of the columns "key" and "value": one row a key.

    `key`, `value` and `gives` are the types of keys, of mapped values and of what `reduce` makes.

    >>> import pyarrow as pa
    >>> from shoal.data.flow import session
    >>> with session() as data:
    ...     lines = data.rows(pa.table({"text": ["a b a", "b"]}))
    ...     words = map_reduce(lines, lambda row: [(w, 1) for w in row["text"].split()], lambda key, ones: sum(ones))
    ...     words.order("key").head()
    [{'key': 'a', 'value': 2}, {'key': 'b', 'value': 2}]
    """
    pa = arrow()
    ibis = need_ibis()
    try:
        kinds = {name: ibis.dtype(kind).to_pyarrow() for name, kind in (("key", key), ("value", value))}
        result = ibis.dtype(gives or value).to_pyarrow()
    except Exception as error:
        raise ConfigError(
            f"map_reduce: key={key}, value={value}, gives={gives} are no types ({error})."
        ) from error
    pairs = pa.schema([pa.field(KEY, kinds["key"]), pa.field(VALUE, kinds["value"])])
    reduced = pa.schema([pa.field(KEY, kinds["key"]), pa.field(VALUE, result)])
    for check in flow.checks:
        check()
    with running("map_reduce"):
        mapped = flow.engine.map_batches(flow.table, _Mapper(map, combine, pairs), pairs)
        grouped = mapped.group_by(KEY).agg(**{VALUES: mapped[VALUE].collect()})
        table = flow.engine.map_batches(grouped, _Reducer(reduce, reduced), reduced)
    code = (*flow.code, *(source_of(one) for one in (map, reduce, combine) if one is not None))
    return replace(flow, table=table, ordered=False, code=code, checks=())


class _Mapper:
    """A batch of rows to a batch of pairs."""

    def __init__(self, map: MapRow, combine: Combine | None, schema: Any) -> None:
        self._map = map
        self._combine = combine
        self._schema = schema

    def __call__(self, batch: RecordBatch) -> RecordBatch:
        pa = arrow()
        pairs: list[tuple[Any, Any]] = []
        for row in batch.to_pylist():
            try:
                pairs.extend(self._map(row))
            except Exception as error:
                raise _said(self._map, f"row={row!r}", error) from error
        if self._combine is not None:
            held: dict[Any, list[Any]] = {}
            for key, value in pairs:
                held.setdefault(key, []).append(value)
            pairs = [(key, value) for key, values in held.items() for value in self._combine(values)]
        columns = [[pair[place] for pair in pairs] for place in (0, 1)]
        arrays = [pa.array(c, entry.type) for c, entry in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class _Reducer:
    """A batch of keys with their values to a batch of results."""

    def __init__(self, reduce: Reduce, schema: Any) -> None:
        self._reduce = reduce
        self._schema = schema

    def __call__(self, batch: RecordBatch) -> RecordBatch:
        pa = arrow()
        keys = batch.column(0).to_pylist()
        results = []
        for key, values in zip(keys, batch.column(1).to_pylist(), strict=True):
            try:
                results.append(self._reduce(key, _sorted(values)))
            except Exception as error:
                raise _said(self._reduce, f"key={key!r}, {len(values)} values", error) from error
        arrays = [pa.array(keys, self._schema[0].type), pa.array(results, self._schema[1].type)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _sorted(values: list[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # records, or null among them
        return sorted(values, key=repr)


def _said(call: Callable[..., Any], given: str, error: Exception) -> RowError:
    return RowError(f"{MARK}{name_of(call)}({given[:200]}) raised {type(error).__name__}: {error}")
