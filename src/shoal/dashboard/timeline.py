"""Every rank's spans on one clock: for the page's timeline and for traces; and a pipeline's schedule as it ran."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import numpy as np

from shoal.dashboard.columns import Array
from shoal.dashboard.run_log import RunLog
from shoal.report.span_table import SpanTable, read_spans, step_range
from shoal.report.spans import MICROBATCHES, SpanKind

MOST_SPANS = 600_000
PASSES = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WEIGHT)


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, each rank's together and in order of time; times count from `origin`."""

    origin: float
    first: int
    last: int
    rank: Array
    spans: SpanTable


def timeline(run: RunLog, first: int, last: int, most: int = MOST_SPANS) -> Timeline:
    """Spans of the steps from `first` to `last`: the newest of them, where all are too many."""
    ranks = run.ranks()
    ranges = [step_range(run.folder, rank) for rank in ranks]
    first = max(first, 1)
    last = min(last, max((high for _, high in ranges), default=0))
    # One step of the first rank tells about how many spans all of them have.
    probe = len(read_spans(run.folder, ranks[0], last - 3, last)) / 4 if ranks else 0.0
    per_step = max(1.0, probe * len(ranks))
    first = max(first, last + 1 - max(1, int(most / per_step)))
    tables = [read_spans(run.folder, rank, first, last) for rank in ranks]
    columns: list[list[Array]] = [[] for _ in range(5)]
    owners = []
    for rank, table in zip(ranks, tables, strict=True):
        begin = table.begin + run.clock_offset(rank)
        order = np.argsort(begin, kind="stable")
        for place, column in enumerate((table.step, table.kind, table.detail, begin, table.duration)):
            columns[place].append(column[order])
        owners.append(np.full(len(table), rank, np.int64))
    step, kind, detail, begin, duration = (
        np.concatenate(parts) if parts else np.empty(0) for parts in columns
    )
    origin = float(begin.min()) if len(begin) else 0.0
    table = SpanTable(step, kind, detail, begin - origin, duration)
    return Timeline(origin, first, last, np.concatenate(owners) if owners else np.empty(0, np.int64), table)


def packed(found: Timeline) -> bytes:
    """For the page: a length, a head of JSON, and columns of numbers, each beginning at a multiple of 8 bytes."""
    spans = found.spans
    columns = (
        spans.begin.astype("<f8"),
        spans.duration.astype("<f4"),
        spans.step.astype("<u4"),
        found.rank.astype("<u2"),
        spans.detail.astype("<u2"),
        spans.kind.astype("u1"),
    )
    facts = {
        "count": len(spans),
        "origin": found.origin,
        "first": found.first,
        "last": found.last,
        "ranks": np.unique(found.rank).tolist(),
        "kinds": [kind.name.lower() for kind in SpanKind],
    }
    head = json.dumps(facts).encode()
    head += b" " * (-(len(head) + 4) % 8)
    bodies = [column.tobytes() + bytes(-column.nbytes % 8) for column in columns]
    return struct.pack("<I", len(head)) + head + b"".join(bodies)


def pipeline(run: RunLog, step: int) -> dict[str, object]:
    """One step's passes on each rank, by micro-batch and stage, and the part of the time that was none: the bubble."""
    found = timeline(run, step, step)
    spans = found.spans
    lanes = []
    passes = np.isin(spans.kind, PASSES) & (spans.step == step)
    if not passes.any():
        return {"step": step, "lanes": []}
    low, high = spans.begin[passes].min(), (spans.begin + spans.duration)[passes].max()
    for rank in np.unique(found.rank).tolist():
        mine = passes & (found.rank == rank)
        rows = zip(
            spans.kind[mine].tolist(),
            spans.detail[mine].tolist(),
            (spans.begin[mine] - low).round(7).tolist(),
            spans.duration[mine].round(7).tolist(),
            strict=True,
        )
        busy = float(spans.duration[mine].sum())
        lanes.append(
            {
                "rank": rank,
                "bubble": round(max(0.0, 1.0 - busy / (high - low)), 4) if high > low else 0.0,
                "passes": [
                    [SpanKind(k).name[0], d % MICROBATCHES, d // MICROBATCHES, b, t] for k, d, b, t in rows
                ],
            }
        )
    return {"step": step, "seconds": float(high - low), "lanes": lanes}
