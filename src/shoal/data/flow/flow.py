"""`shoal.data.flow`: a flow is written once, and runs on DuckDB or on Spark.

A `Flow` is an ibis table with a memory of what it was made of. Nothing is computed before it is asked for: by `write`,
`arrow`, `head`, `count`. What cannot work is refused in one sentence, where the flow is written if that tells already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.flow.engine import Engine, Table, Value, need_ibis
from shoal.data.flow.errors import expressions, running
from shoal.data.flow.functions import name_of, signature_of, source_of, with_row
from shoal.data.flow.parts import check_parts, unit
from shoal.data.store.arrow import RecordBatch
from shoal.data.store.build import BuildOptions, build
from shoal.data.store.places.open_place import open_place
from shoal.data.store.store import Store
from shoal.errors import ConfigError

_HOW = ("inner", "left", "right", "outer", "semi", "anti")
By = str | Sequence[str]
Facts = Callable[[], list[dict[str, object]]]
"""What there is to say of an input."""
Tell = Callable[[int, int, float], None]
"""(rows, bytes, part of the query that is done)"""


@dataclass(frozen=True)
class Flow:
    """A table to be. Each method gives another; `_` names columns, as in `flow.filter(_.age > 18)`."""

    engine: Engine
    table: Table
    """The table as ibis knows it; `apply` changes it by what ibis offers and this does not."""
    inputs: tuple[Facts, ...] = ()
    """What was read; sizes and checksums are found out when something is written."""
    ordered: bool = False
    """Whether rows come in the order of the input."""
    code: tuple[str, ...] = ()
    """The text of Python functions in it."""
    checks: tuple[Callable[[], None], ...] = ()
    """What has to hold of the data, found out before it runs."""
    features: Mapping[str, object] = field(default_factory=dict)
    """Fitted features in it, by name: kept beside what is written."""

    @property
    def columns(self) -> list[str]:
        """Their names, in order."""
        return list(self.table.columns)

    @property
    def schema(self) -> dict[str, str]:
        """Each column's type in words."""
        return {name: str(kind) for name, kind in self.table.schema().items()}

    def filter(self, *conditions: Value) -> Flow:
        """Only rows for which all conditions hold: expressions, or Python functions of columns."""
        made, code = self._values(dict(enumerate(conditions)))
        with expressions(self.columns):
            return replace(self, table=self.table.filter(*made.values()), code=code)

    def map(self, columns: Mapping[str, Value]) -> Flow:
        """Add or replace columns: by expressions, or by Python functions whose parameters are named like columns."""
        made, code = self._values(columns)
        with expressions(self.columns):
            return replace(self, table=self.table.mutate(**made), code=code)

    def select(self, *columns: str) -> Flow:
        """Only these columns, in this order."""
        return self.apply(lambda table: table.select(*columns))

    def drop(self, *columns: str) -> Flow:
        """All columns but these."""
        return self.apply(lambda table: table.drop(*columns))

    def rename(self, columns: Mapping[str, str]) -> Flow:
        """New names: rename({"new": "old"})."""
        return self.apply(lambda table: table.rename(columns))

    def cast(self, columns: Mapping[str, str]) -> Flow:
        """Other types: cast({"age": "int32"})."""
        return self.apply(lambda table: table.cast(columns))

    def fill_null(self, values: Mapping[str, object]) -> Flow:
        """A value in place of null: fill_null({"age": 0})."""
        return self.apply(lambda table: table.fill_null(values))

    def order(self, *columns: Value) -> Flow:
        """Sorted by these columns."""
        return replace(self.apply(lambda table: table.order_by(list(columns))), ordered=True)

    def limit(self, rows: int) -> Flow:
        """The first so many rows."""
        return self.apply(lambda table: table.limit(rows))

    def union(self, other: Flow) -> Flow:
        """The rows of both; their columns are the same."""
        made = self.apply(lambda table: table.union(other.table), ordered=False)
        return replace(made, **_together(self, other))

    def distinct(self, *columns: str) -> Flow:
        """One row of each kind: of all equal ones, or of those equal in `columns`; then no others are kept."""
        return self.apply(
            lambda table: (table.select(*columns) if columns else table).distinct(), ordered=False
        )

    def join(self, other: Flow, on: By, how: str = "inner", unique: bool = False) -> Flow:
        """Rows of both that agree in columns. `unique`: no two rows of `other` may agree, or the flow is refused."""
        keys = _names(on)
        if how not in _HOW:
            raise ConfigError(f"join(how={how!r}); it is {', '.join(_HOW)}.")
        with expressions([*self.columns, *other.columns]):
            made = self.table.join(other.table, keys, how=how)
        # Of outer joins ibis keeps both keys, of which either may be null.
        both = {name: f"{name}_right" for name in keys if f"{name}_right" in made.columns}
        if both:
            merged = {name: need_ibis().coalesce(made[name], made[right]) for name, right in both.items()}
            made = made.mutate(**merged).drop(*both.values())
        checks = (lambda: other.check_unique(keys),) if unique else ()
        found = _together(self, other)
        return replace(self, table=made, ordered=False, **{**found, "checks": (*found["checks"], *checks)})

    def group(self, by: By, values: Mapping[str, Value]) -> Flow:
        """One row for each group: group("user", {"n": _.count(), "mean": _.value.mean()}); one of all, by ()."""
        names = _names(by)
        return self.apply(
            lambda table: (table.group_by(names) if names else table).agg(**values), ordered=False
        )

    def window(
        self, by: By, order: By, columns: Mapping[str, Value], rows: tuple[int, int] | None = None
    ) -> Flow:
        """Columns from the neighbours of each row: window("user", "time", {"before": _.value.lag()}).

        `rows`: so many before it and after it.
        """
        ibis = need_ibis()
        with expressions(self.columns):
            over = ibis.window(group_by=_names(by), order_by=_names(order), rows=rows and (-rows[0], rows[1]))
            made = self.table.mutate(**{name: value.over(over) for name, value in columns.items()})
        return replace(self, table=made, ordered=False)

    def sample(self, fraction: float, key: By, seed: int = 0) -> Flow:
        """Rows whose key falls below a fraction: the same on every engine, and more for a larger fraction."""
        if not 0 < fraction <= 1:
            raise ConfigError(f"sample({fraction}): give a fraction above 0 and up to 1.")
        with expressions(self.columns):
            place = unit(self.engine, self.table, _names(key), seed, "sample")
            return replace(self, table=self.table.filter(place < fraction))

    def split(self, key: By, parts: Mapping[str, float], seed: int = 0) -> dict[str, Flow]:
        """Parts by a hash of a key; rows with one key stay together: split("user", {"train": 0.9, "test": 0.1})."""
        bounds = check_parts(parts)
        with expressions(self.columns):
            place = unit(self.engine, self.table, _names(key), seed, "split")
            return {
                name: replace(self, table=self.table.filter((place >= begin) & (place < end)))
                for name, begin, end in bounds
            }

    def apply(self, change: Callable[[Table], Table], ordered: bool | None = None) -> Flow:
        """What ibis offers and this does not: a function of the ibis table."""
        with expressions(self.columns):
            made = change(self.table)
        return replace(self, table=made, ordered=self.ordered if ordered is None else ordered)

    def check_unique(self, keys: Sequence[str]) -> None:
        """Refuse rows that agree in these columns."""
        from ibis import _ as row

        with running("looking for duplicate keys"):
            twice = self.table.group_by(list(keys)).agg(n=row.count()).filter(row.n > 1).limit(1).to_pyarrow()
        if twice.num_rows:
            found = twice.to_pylist()[0]
            count = found.pop("n")
            shown = ", ".join(f"{name}={value!r}" for name, value in found.items())
            raise ConfigError(
                f"the join wants unique keys, and {count} rows have {shown}; make them one, or leave unique out."
            )

    def batches(self, first: int = 0) -> Iterator[RecordBatch]:
        """The rows as Arrow's record batches, from a number on."""
        for check in self.checks:
            check()
        with running("the flow"):
            yield from self.engine.batches(self.table, first)

    def arrow(self) -> Any:
        """All rows as an Arrow table."""
        from shoal.data.store.arrow import arrow

        schema = self.table.schema().to_pyarrow()
        found = list(self.batches())
        with running("the flow"):
            return arrow().Table.from_batches(found).cast(schema) if found else schema.empty_table()

    def head(self, rows: int = 10) -> list[dict[str, Any]]:
        """The first rows as Python values."""
        found: list[dict[str, object]] = self.limit(rows).arrow().to_pylist()
        return found

    def count(self) -> int:
        """How many rows there are."""
        with running("the flow"):
            return int(self.table.count().to_pyarrow().as_py())

    def write(
        self,
        url: str | Path,
        *,
        order: By | None = None,
        options: BuildOptions | None = None,
        tell: Tell | None = None,
    ) -> Store:
        """Compute it, into a store.

        Rows come in the order of the input, or of `order`; where neither tells, as after a join, they are sorted by all
        columns, so that the same input makes the same bytes.
        """
        made = self
        if order is not None:
            made = self.order(*_names(order))
        elif not self.ordered:
            made = self.order(*_sortable(self))
        schema = self.table.schema().to_pyarrow()

        def heard(rows: int, size: int) -> None:
            if tell is not None:
                tell(rows, size, self.engine.progress())

        def rows(first: int) -> Iterable[RecordBatch]:
            return made.batches(first)

        build(open_place(url), schema, rows, made.lineage(), options, made.features, heard)
        return Store(url)

    def lineage(self) -> dict[str, object]:
        """What it is made of: inputs with sizes and checksums, engine, query, and the text of Python functions."""
        with running("the flow"):
            # ibis numbers functions in the order in which a process makes them: no part of what they are.
            query = re.sub(r"(_[0-9A-Fa-f]{8,16})_\d+\b", r"\1", str(need_ibis().to_sql(self.table)))
            inputs = [fact for facts in self.inputs for fact in facts()]
        return {"engine": self.engine.version(), "inputs": inputs, "query": query, "code": list(self.code)}

    def _values(self, given: Mapping[Any, Value]) -> tuple[dict[Any, Value], tuple[str, ...]]:
        """Values for columns: Python functions become functions of columns."""
        ibis = need_ibis()
        made = {}
        code = [*self.code]
        for name, value in given.items():
            expression = isinstance(value, ibis.Deferred | ibis.expr.types.Value)
            if callable(value) and not expression:
                made[name] = self._function(value)
                code.append(source_of(value))
            else:
                made[name] = value
        return made, tuple(code)

    def _function(self, call: Callable[..., object]) -> Value:
        known = dict(self.table.schema().items())
        names, gives = signature_of(call, known)
        takes = [known[name] for name in names]
        mark = xxhash.xxh3_64_hexdigest(f"{source_of(call)} {takes} {gives}".encode())[:8]
        made = self.engine.function(with_row(call, names), f"{name_of(call)}_{mark}", takes, gives)
        return made(*(self.table[name] for name in names))


def _names(by: By) -> list[str]:
    return [by] if isinstance(by, str) else list(by)


def _together(one: Flow, other: Flow) -> dict[str, Any]:
    """What a flow of two remembers."""
    if one.engine is not other.engine:
        raise ConfigError("two flows of different sessions meet; read both with one session.")
    return {
        "inputs": (*one.inputs, *other.inputs),
        "code": (*one.code, *other.code),
        "checks": (*one.checks, *other.checks),
        "features": {**one.features, **other.features},
    }


def _sortable(flow: Flow) -> list[str]:
    """Columns that every engine can sort by."""
    kinds = flow.table.schema().items()
    return [name for name, kind in kinds if not (kind.is_nested() or kind.is_binary())] or flow.columns
