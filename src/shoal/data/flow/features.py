"""Features that are fitted: on the training rows, once; the same numbers then serve validation, resuming and serving.

A feature is fitted by a query, becomes a few numbers in JSON, and transforms any flow by them, or a single row in
Python. What is written with fitted features keeps them in the store's manifest: `Fitted.load(store.manifest.features)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.flow.engine import Engine, Table, Value, need_ibis
from shoal.data.flow.errors import expressions, running
from shoal.data.flow.flow import Flow
from shoal.errors import ConfigError
from shoal.sealed import read_file, unseal
from shoal.table import Table as Names

State = Mapping[str, Any]
"""What was fitted: JSON."""


@dataclass(frozen=True)
class Feature:
    """What is to be fitted."""

    kind: str
    column: str
    options: Mapping[str, Any]


def standardise(column: str) -> Feature:
    """(x - mean) / deviation, of the fitted rows."""
    return Feature("standardise", column, {})


def bucketise(column: str, bins: int = 10) -> Feature:
    """The number of the bin that a value falls into; bins hold equally many of the fitted rows."""
    if not 2 <= bins <= 1000:
        raise ConfigError(f"bucketise({column}, bins={bins}): give 2 to 1000 bins.")
    return Feature("bucketise", column, {"bins": bins})


def hashed(column: str, buckets: int) -> Feature:
    """A hash of a value below `buckets`: for categories that nobody can list. Nothing is fitted."""
    if buckets < 1:
        raise ConfigError(f"hashed({column}, buckets={buckets}): give at least one bucket.")
    return Feature("hashed", column, {"buckets": buckets})


def vocabulary(column: str, size: int = 1000) -> Feature:
    """1 for the most frequent value, 2 for the next, up to `size`; 0 for all others."""
    return Feature("vocabulary", column, {"size": size})


class Fitted:
    """Features with their numbers.

    >>> fitted = Fitted({"age": {"kind": "standardise", "column": "years", "mean": 40.0, "deviation": 10.0}})
    >>> fitted.row({"years": 60})
    {'years': 60, 'age': 2.0}
    """

    def __init__(self, states: Mapping[str, State]) -> None:
        self.states = {name: dict(state) for name, state in states.items()}
        for name, state in self.states.items():
            KINDS.look_up(str(state.get("kind")))
            if "column" not in state:
                raise ConfigError(f"feature '{name}' does not say its column; it was not written by shoal.")

    @staticmethod
    def load(states: Mapping[str, State]) -> Fitted:
        """From the features of a store's manifest."""
        return Fitted(states)

    @staticmethod
    def of_checkpoint(folder: str | Path) -> Fitted:
        """Those of the data that a checkpoint was trained on."""
        path = Path(folder) / "manifest.json"
        try:
            states = unseal(read_file(path))["state"].get("features", {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no manifest of a checkpoint ({error}).") from error
        if not states:
            raise ConfigError(f"{folder} was trained on data without fitted features.")
        return Fitted(states)

    def transform(self, flow: Flow) -> Flow:
        """The flow with one more column a feature."""
        made = {}
        with expressions(flow.columns):
            for name, state in self.states.items():
                made[name] = KINDS[state["kind"]].column(flow.engine, flow.table, state)
            table = flow.table.mutate(**made)
        return replace(flow, table=table, features={**flow.features, **self.states})

    def row(self, row: Mapping[str, object]) -> dict[str, object]:
        """One row of Python values with its features, as `transform` makes them."""
        made = dict(row)
        for name, state in self.states.items():
            if state["column"] not in row:
                raise ConfigError(f"feature '{name}' needs '{state['column']}', which the row does not have.")
            made[name] = KINDS[state["kind"]].value(state)(row[state["column"]])
        return made


def fit(flow: Flow, features: Mapping[str, Feature]) -> Fitted:
    """Find the numbers of features on the rows of a flow: those of training alone."""
    states = {}
    for name, feature in features.items():
        if feature.column not in flow.columns:
            with expressions(flow.columns):
                _ = flow.table[feature.column]
        with running(f"fitting '{name}'"):
            found = KINDS[feature.kind].fit(flow, feature)
        states[name] = {"kind": feature.kind, "column": feature.column, **feature.options, **found}
    return Fitted(states)


@dataclass(frozen=True)
class Kind:
    """How one kind of feature is fitted and used."""

    fit: Callable[[Flow, Feature], dict[str, object]]
    column: Callable[[Engine, Table, State], Value]
    value: Callable[[State], Callable[[object], object]]


def _one(flow: Flow, **values: Value) -> dict[str, object]:
    for check in flow.checks:
        check()
    found: dict[str, object] = flow.table.agg(**values).to_pyarrow().to_pylist()[0]
    return found


def _number_column(table: Table, name: str) -> Value:
    """A column as numbers; what is not a number is null: engines compare and add it each in its own way."""
    column = table[name].cast("float64")
    return need_ibis().ifelse(column.isnan(), None, column)


def _is_missing(value: Any) -> bool:
    return value is None or float(value) != float(value)


def _fit_standard(flow: Flow, feature: Feature) -> dict[str, Any]:
    column = _number_column(flow.table, feature.column)
    found = _one(flow, mean=column.mean(), deviation=column.std(how="pop"))
    if found["mean"] is None:
        raise ConfigError(f"standardise({feature.column}): there are no rows to fit.")
    return {"mean": found["mean"], "deviation": found["deviation"] or 1.0}


def _standard_column(engine: Engine, table: Table, state: State) -> Value:
    del engine
    return (_number_column(table, state["column"]) - state["mean"]) / state["deviation"]


def _standard_value(state: State) -> Callable[[Any], Any]:
    return lambda x: None if _is_missing(x) else (float(x) - state["mean"]) / state["deviation"]


def _fit_buckets(flow: Flow, feature: Feature) -> dict[str, object]:
    """Edges are values that occur: every engine finds the same."""
    column = _number_column(flow.table, feature.column)
    values = flow.table.select(x=column).filter(column.notnull()).order_by("x")
    total = int(values.count().to_pyarrow().as_py())
    if not total:
        raise ConfigError(f"bucketise({feature.column}): there are no rows to fit.")
    ibis = need_ibis()
    places = sorted(
        {total * number // feature.options["bins"] for number in range(1, feature.options["bins"])}
    )
    numbered = values.mutate(place=ibis.row_number().over(order_by="x"))
    edges = numbered.filter(numbered.place.isin(places)).order_by("place").x.to_pyarrow().to_pylist()
    return {"edges": sorted(set(edges))}


def _buckets_column(engine: Engine, table: Table, state: State) -> Value:
    del engine
    column = _number_column(table, state["column"])
    total = need_ibis().literal(0, "int64")
    for edge in state["edges"]:
        total = total + (column >= edge).cast("int64")
    return total


def _buckets_value(state: State) -> Callable[[Any], Any]:
    return lambda x: None if _is_missing(x) else sum(float(x) >= edge for edge in state["edges"])


def _fit_nothing(flow: Flow, feature: Feature) -> dict[str, object]:
    del flow, feature
    return {}


def _hashed_value(state: State) -> Callable[[object], int]:
    buckets = int(state["buckets"])
    return lambda x: xxhash.xxh3_64_intdigest(b"" if x is None else str(x).encode()) % buckets


def _fit_vocabulary(flow: Flow, feature: Feature) -> dict[str, object]:
    from ibis import _ as row
    from ibis import desc

    counted = flow.table.group_by(word=flow.table[feature.column].cast("string")).agg(n=row.count())
    # Of equally frequent values the first in the alphabet: every engine has the same vocabulary.
    first = counted.filter(row.word.notnull()).order_by([desc("n"), "word"]).limit(feature.options["size"])
    return {"words": first.word.to_pyarrow().to_pylist()}


def _vocabulary_value(state: State) -> Callable[[object], int]:
    numbers = {word: number for number, word in enumerate(state["words"], 1)}
    return lambda x: 0 if x is None else numbers.get(str(x), 0)


def _by_text(engine: Engine, table: Table, state: State) -> Value:
    """A column by a Python function of a column's text."""
    ibis = need_ibis()
    given = table[state["column"]].cast("string")
    column = ibis.coalesce(given, "")
    call = KINDS[state["kind"]].value(state)
    mark = xxhash.xxh3_64_hexdigest(repr(sorted(state.items())).encode())[:8]
    text, number = ibis.dtype("string"), ibis.dtype("int64")
    made = engine.function(call, f"{state['kind']}_{mark}", [text], number)(column)
    return ibis.ifelse(given.isnull(), call(None), made)  # null is not the empty text


KINDS: Names[Kind] = Names(
    "feature",
    {
        "standardise": Kind(_fit_standard, _standard_column, _standard_value),
        "bucketise": Kind(_fit_buckets, _buckets_column, _buckets_value),
        "hashed": Kind(_fit_nothing, _by_text, _hashed_value),
        "vocabulary": Kind(_fit_vocabulary, _by_text, _vocabulary_value),
    },
)
