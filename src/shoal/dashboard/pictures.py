"""What the page draws, as plain values: each function answers one request about one run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from shoal.dashboard.columns import NAMES, Array, number, plain, thin
from shoal.dashboard.run_log import RunLog
from shoal.report.events import Event

EVERYTHING = 1 << 50
MOST_POINTS = 4000
MOST_TEXT = 500
MOST_STEPS_OF_NOISE = 10
"""A rank is slow if it is so for more than half of so many columns in a row."""
_SAID = ("why", "error", "text", "how", "what", "name")
"""Fields of an event that say what happened: they need no name before them."""
SLOW = 1.3
"""Times the median rank, from which a rank is slow."""
PARTS = ("data", "compute", "exposed", "update")


def summary(run: RunLog) -> dict[str, object]:
    """Who the run is, and how it does."""
    header = run.header
    ends = [event for event in run.events() if event.get("event") == "end" and "role" not in event]
    return {
        "name": run.name,
        "header": clean(header),
        "ranks": run.ranks(),
        "last": run.columns.last,
        "loaded": run.columns.loaded,
        "bad": run.columns.bad,
        "states": clean(run.state_rows()),
        "values": sorted(run.columns.values()),
        "version": run.version,
        "end": clean(ends[-1]) if ends else None,
    }


def series(run: RunLog, names: list[str], first: int, last: int, points: int) -> dict[str, object]:
    """Curves by name, in at most `points` points each."""
    points = max(2, min(points, MOST_POINTS))
    known = [name for name in names if name in NAMES]
    steps, found, exact = run.columns.read(known, first, last)
    curves = {name: thin(steps, values, points) for name, values in found.items()}
    own = run.columns.values()
    for name in names:
        if name.removeprefix("log:") in own and name not in known:
            at, values = own[name.removeprefix("log:")]
            inside = (at >= first) & (at <= last)
            curves[name] = thin(at[inside], values[inside], points)
    return {"curves": curves, "exact": exact, "first": first, "last": min(last, run.columns.last)}


def heat(run: RunLog, first: int, last: int, columns: int) -> dict[str, object]:
    """Rank by step: how long each rank was busy, as a multiple of the median over ranks.

    Waiting for others (`exposed`) is left out: else the victims of a straggler would look like it.
    """
    first, last = max(first, 1), max(1, min(last, run.columns.last))
    columns = max(1, min(columns, 1000, last - first + 1))
    edges = np.linspace(first, last + 1, columns + 1)
    ranks = run.ranks()
    most = max(64, min(2 * columns, 200_000 // max(1, len(ranks))))
    busy = np.full((len(ranks), columns), np.nan)
    for row, rank in enumerate(ranks):
        events = run.rank_steps(rank, first, last, most)
        if not events:
            continue
        steps = np.array([number(event.get("step")) for event in events])
        spent = np.array([_busy(e) for e in events])
        good = np.isfinite(spent)
        place = np.clip(np.searchsorted(edges, steps[good], "right") - 1, 0, columns - 1)
        sums, counts = (np.bincount(place, weights, columns) for weights in (spent[good], None))
        busy[row] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    median = median_of(busy)
    ratio = busy / median
    return {
        "first": first,
        "last": last,
        "ranks": ranks,
        "columns": columns,
        "ratio": [[None if v is None else round(v, 3) for v in plain(row)] for row in ratio],
        "median_seconds": plain(median),
        "slowest": _slowest(ratio, edges, ranks),
    }


def _busy(event: Event) -> float:
    between = number(event.get("between", 0.0))  # logs of earlier versions have none
    return sum(number(event.get(part)) for part in ("data", "compute", "update")) + between


def _slowest(ratio: Array, edges: Array, ranks: list[int]) -> dict[str, object] | None:
    """The rank that is slow for longest, by the medians of stretches: a few slow steps do not move those."""
    if len(ranks) < 2:
        return None
    wide = max(MOST_STEPS_OF_NOISE, -(-ratio.shape[1] // 30))
    starts = range(0, ratio.shape[1], wide)
    stretches = np.stack([median_of(ratio[:, start : start + wide].T) for start in starts], axis=1)
    if not np.isfinite(stretches).any():
        return None
    row, place = np.unravel_index(int(np.nanargmax(stretches)), stretches.shape)
    begin, end = int(place), int(place) + 1
    if stretches[row, place] > SLOW:  # all of the time for which it is so
        while begin > 0 and stretches[row, begin - 1] > SLOW:
            begin -= 1
        while end < stretches.shape[1] and stretches[row, end] > SLOW:
            end += 1
    left, right = starts[begin], min(starts[end - 1] + wide, ratio.shape[1])
    low, high = edges[left], edges[right]
    return {
        "rank": ranks[int(row)],
        "first": int(low),
        "last": max(int(low), int(high) - 1),
        "ratio": round(float(np.nanmedian(ratio[row, left:right])), 3),
    }


def median_of(table: Array) -> Array:
    """The median of each column, of what is known there."""
    out = np.full(table.shape[1], np.nan)
    known = np.isfinite(table).any(axis=0)
    # Of two, the lower: else the slower of two ranks would be compared with itself.
    out[known] = np.nanquantile(table[:, known], 0.5, axis=0, method="lower")
    return out


def split(run: RunLog, first: int, last: int) -> dict[str, object]:
    """Where the time of a mean step went, for each rank."""
    rows = []
    for rank in run.ranks():
        events = run.rank_steps(rank, max(first, 1), last, 256)
        names = (*PARTS, "seconds", "between")
        table = np.array([[number(e.get(name, 0.0)) for name in names] for e in events]).reshape(-1, 6)
        table = table[np.isfinite(table).all(axis=1)]
        if len(table):
            mean = np.clip(table, 0.0, 1e12).mean(axis=0)
            other = max(0.0, float(mean[4] - mean[:4].sum()))
            rows.append(
                {"rank": rank, "steps": len(table), "parts": plain(np.array([*mean[:4], other, mean[5]]))}
            )
    return {"names": [*PARTS, "other", "between"], "rows": rows}


def memory(run: RunLog) -> dict[str, object]:
    """Memory of each rank, and by kind where the log has it: predicted beside measured."""
    rows = []
    for rank in run.ranks():
        events = run.rank_steps(rank, max(1, run.columns.last - 20), EVERYTHING, 32)
        peak = max((number(event.get("peak_memory")) for event in events), default=float("nan"))
        rows.append({"rank": rank, "peak": peak if peak == peak else None})
    kinds = [event for event in run.events() if event.get("event") == "memory"]
    newest: dict[str, object] = {}
    for event in kinds:
        newest |= {side: numbers(event.get(side)) for side in ("predicted", "measured") if side in event}
    foreseen = number(run.header.get("predicted_memory"))
    return {"rows": rows, "foreseen": foreseen if foreseen == foreseen else None, **newest}


def numbers(value: object) -> dict[str, float]:
    """The numbers of an object of the log that may hold anything."""
    pairs = value.items() if isinstance(value, dict) else ()
    found = {str(name)[:80]: number(each) for name, each in pairs}
    return {name: each for name, each in found.items() if each == each}


def servers(run: RunLog) -> dict[str, object]:
    """Load and queues of parameter servers as time goes on, and how stale parts were in the end."""
    found = [event for event in run.events() if event.get("event") == "servers"]
    rows = [
        {"time": number(e.get("time")), "busy": listed(e.get("busy")), "queue": listed(e.get("queue"))}
        for e in found
    ]
    return {"rows": clean(rows), "staleness": numbers(found[-1].get("staleness")) if found else {}}


def listed(value: object) -> list[float | None]:
    """Numbers of a list of the log, or one number."""
    if isinstance(value, int | float):
        value = [value]
    return plain(np.array([number(each) for each in value[:256]])) if isinstance(value, list) else []


def marks(run: RunLog) -> list[dict[str, object]]:
    """What is marked on every chart: all that happened beside steps, with the step at which it did."""
    found: list[dict[str, object]] = []
    steps, columns, _ = run.columns.read(["time"])
    for event in run.events():
        kind = str(event.get("event"))[:40]
        if kind in ("servers", "memory", "clock"):
            continue
        after = event.get("after")
        if not isinstance(after, int) or isinstance(after, bool):
            at = int(np.searchsorted(columns["time"], number(event.get("time")))) if len(steps) else 0
            after = int(steps[at - 1]) if 0 < at <= len(steps) else 0
        found.append(
            {"kind": kind, "after": after, "time": number(event.get("time")), "text": describe(event)}
        )
    return [{name: clean(value) for name, value in mark.items()} for mark in found[-2000:]]


def describe(event: Event) -> str:
    """An event as a line of text; its fields may be anything.

    >>> describe({"event": "failure", "time": 1.0, "rank": 2, "why": "killed by SIGKILL."})
    'failure: killed by SIGKILL, rank 2'
    """
    hidden = ("event", "time", "after", "settings", "schema", "monotonic", "trace", "role", *_SAID)
    said = [str(event[key]).rstrip(".") for key in _SAID if event.get(key)]
    facts = [
        f"{key} {value}" for key, value in event.items() if key not in hidden and value not in (None, "")
    ]
    return f"{event.get('event')}: {', '.join([*said, *facts])}"[:MOST_TEXT]


def differences(runs: list[RunLog]) -> list[dict[str, object]]:
    """In what the settings of runs differ."""
    headers = [run.header for run in runs]
    flat: list[dict[str, object]] = []
    for header in headers:
        settings = header.get("settings")
        own: Mapping[str, object] = settings if isinstance(settings, dict) else {}
        top = {
            key: value
            for key, value in header.items()
            if key in ("workers", "device", "version", "torch", "host")
        }
        flat.append({**top, **own})
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [(name, [settings.get(name) for settings in flat]) for name in names[:500]]
    differ = [(name, values) for name, values in rows if any(a != b for a, b in pairwise(values))]
    return [{"name": name, "values": clean(values)} for name, values in differ]


def clean(value: object, depth: int = 0) -> object:
    """Plain values for JSON, whatever the log holds: no NaN, no number that JavaScript cannot hold, no endless text."""
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else str(value)[:40]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if depth > 6:
        return "…"
    if isinstance(value, dict):
        return {str(key)[:80]: clean(each, depth + 1) for key, each in list(value.items())[:1000]}
    if isinstance(value, list | tuple):
        return [clean(each, depth + 1) for each in value[:5000]]
    return str(value)[:MOST_TEXT]
