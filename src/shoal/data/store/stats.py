"""What is in a store: ranges, means, nulls, frequent values, histograms; and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.data.store.arrow import arrow, kind_of
from shoal.data.store.store import Store

BINS = 20
_SAMPLE = 1_000_000
"""Rows that histograms and frequent values are taken from, evenly spread; ranges and means are of all."""
DRIFT = 0.2
"""A population stability index from here on is a shift: 0.1 is small, 0.25 large by common use."""


@dataclass(frozen=True)
class ColumnStats:
    """One column."""

    name: str
    kind: str
    rows: int
    nulls: int
    low: float | str | None = None
    high: float | str | None = None
    mean: float | None = None
    deviation: float | None = None
    distinct: int | None = None
    """Among the sampled rows."""
    top: tuple[tuple[str, int], ...] = ()
    """Frequent values, of columns that are no measurements."""
    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """The histogram: of numbers, or of the lengths of lists and texts."""


def stats_of(store: Store) -> list[ColumnStats]:
    """Every column of a store."""
    pa = arrow()
    table = pa.Table.from_batches(store.record_batches())
    return [_column(name, table.column(name)) for name in table.column_names]


def _column(name: str, values: Any) -> ColumnStats:
    compute = arrow().compute
    kind = kind_of(name, values.type)
    facts: dict[str, Any] = {
        "name": name,
        "kind": str(values.type),
        "rows": len(values),
        "nulls": values.null_count,
    }
    step = max(1, len(values) // _SAMPLE)
    few = values if step == 1 else values.take(arrow().array(np.arange(0, len(values), step)))
    if kind.kind == "numbers" and not kind.shape and kind.dtype is not None:
        numbers = _floats(values)
        if len(numbers):
            facts |= {"low": float(numbers.min()), "high": float(numbers.max())}
            facts |= {"mean": float(numbers.mean()), "deviation": float(numbers.std())}
        facts |= _histogram(_floats(few))
        facts["distinct"] = int(compute.count_distinct(few).as_py())
        if facts["distinct"] <= BINS:
            facts["top"] = _top(few)
    elif kind.kind in ("text", "bool"):
        ends = compute.min_max(values)
        facts |= {"low": str(ends["min"].as_py()), "high": str(ends["max"].as_py())}
        facts |= {"distinct": int(compute.count_distinct(few).as_py()), "top": _top(few)}
    elif kind.kind in ("list", "bytes"):
        count = compute.list_value_length if kind.kind == "list" else compute.binary_length
        lengths = _floats(count(values))
        if len(lengths):
            facts |= {
                "low": float(lengths.min()),
                "high": float(lengths.max()),
                "mean": float(lengths.mean()),
            }
        facts |= _histogram(lengths)
    return ColumnStats(**facts)


def _floats(values: Any) -> Any:
    plain = values.cast(arrow().int64()) if str(values.type).startswith(("date", "time", "dur")) else values
    numbers = plain.drop_null().to_numpy().astype(np.float64)
    return numbers[np.isfinite(numbers)]


def _histogram(numbers: Any) -> dict[str, Any]:
    if not len(numbers):
        return {}
    counts, edges = np.histogram(numbers, BINS)
    return {"edges": tuple(edges.tolist()), "counts": tuple(counts.tolist())}


def _top(values: Any, count: int = 5) -> tuple[tuple[str, int], ...]:
    found = values.drop_null().value_counts().to_pylist()
    ranked = sorted(found, key=lambda entry: (-entry["counts"], str(entry["values"])))
    return tuple((str(entry["values"])[:40], int(entry["counts"])) for entry in ranked[:count])


def drift(old: Store, new: Store) -> dict[str, float]:
    """How far the columns of two stores are apart: the population stability index of each that both have.

    It is 0 where shares are equal; from `DRIFT` on the new rows are of another kind.
    """
    before, after = ({one.name: one for one in stats_of(store)} for store in (old, new))
    found = {}
    for name in before:
        if name in after:
            shares = _shares(before[name], after[name])
            if shares is not None:
                first, second = (np.maximum(share, 1e-4) for share in shares)
                found[name] = float(((second - first) * np.log(second / first)).sum())
    return found


def _shares(before: ColumnStats, after: ColumnStats) -> tuple[Any, Any] | None:
    if before.counts and after.counts:
        low, high = min(before.edges[0], after.edges[0]), max(before.edges[-1], after.edges[-1])
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
        return _binned(before, edges), _binned(after, edges)
    if before.top and after.top:
        names = sorted({name for name, _ in (*before.top, *after.top)})
        return _named(before, names), _named(after, names)
    return None


def _binned(stats: ColumnStats, edges: Any) -> Any:
    """Shares in other bins: what a bin holds is spread evenly over it."""
    reached = np.interp(edges, stats.edges, np.concatenate([[0], np.cumsum(stats.counts)]))
    return np.diff(reached) / max(sum(stats.counts), 1)


def _named(stats: ColumnStats, names: list[str]) -> object:
    known: Mapping[str, int] = dict(stats.top)
    counts = [known.get(name, 0) for name in names]
    total = max(stats.rows - stats.nulls, 1)
    return np.array([*(count / total for count in counts), 1 - sum(counts) / total])


def bars(stats: ColumnStats, width: int = 30) -> list[str]:
    """The histogram as text, one line a bin.

    >>> print(*bars(ColumnStats("x", "double", 3, 0, edges=(0.0, 1.0, 2.0), counts=(1, 2)), width=4), sep="\\n")
             0  ██    1
             1  ████  2
    """
    most = max(stats.counts, default=0)
    if not most:
        return []
    return [
        f"{edge:>10.4g}  {'█' * round(width * count / most):{width}}  {count}"
        for edge, count in zip(stats.edges, stats.counts, strict=False)
    ]


def save_histograms(path: str, stats: list[ColumnStats]) -> None:
    """A PNG with the histogram of each column that has one."""
    from shoal.report.chart import new_figure

    drawn = [one for one in stats if one.counts]
    across = min(3, max(len(drawn), 1))
    down = -(-len(drawn) // across) or 1
    figure = new_figure(4 * across, 2.6 * down, dpi=110)
    for number, one in enumerate(drawn, 1):
        axes = figure.add_subplot(down, across, number)
        widths = np.diff(one.edges)
        axes.bar(one.edges[:-1], one.counts, width=widths, align="edge", color="#1f6fb4")
        axes.set_title(one.name, loc="left", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, format="png")
