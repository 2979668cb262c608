"""Chrome's trace format, which Perfetto reads too: all ranks on one clock, a process for each rank."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from shoal.dashboard.run_log import RunLog
from shoal.dashboard.timeline import PASSES, Timeline, timeline
from shoal.errors import ConfigError
from shoal.report.spans import MICROBATCHES, SpanKind

_THREADS = {"step": 0, "passes": 1, "collectives": 2, "checkpoint": 3}
_MOST = 5_000_000


def write_trace(run: RunLog, first: int, last: int, path: Path) -> int:
    """Write the steps from `first` to `last`; how many spans there were. A name that ends in .gz is compressed."""
    found = timeline(run, first, last, _MOST)
    if not len(found.spans):
        raise ConfigError(
            f"{run.folder} has no spans of steps {first} to {last}; `shoal status` says how far it is, and the newest "
            "32 to 64 MB of each rank's spans are kept."
        )
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(run, found)))
        file.write("\n]}\n")
    return len(found.spans)


def _events(run: RunLog, found: Timeline) -> Iterator[dict[str, object]]:
    for rank in run.ranks():
        host = str(run.header_of(rank).get("host", ""))[:80]
        yield _named("process_name", rank, 0, f"rank {rank} {host}".strip())
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for name, thread in _THREADS.items():
            yield _named("thread_name", rank, thread, name)
    spans = found.spans
    rows = zip(
        found.rank.tolist(),
        spans.step.tolist(),
        spans.kind.tolist(),
        spans.detail.tolist(),
        spans.begin.tolist(),
        spans.duration.tolist(),
        strict=True,
    )
    for rank, step, kind, detail, begin, duration in rows:
        yield {
            "name": _name(kind, detail),
            "ph": "X",
            "pid": rank,
            "tid": _thread(kind),
            "ts": round(begin * 1e6, 3),
            "dur": round(duration * 1e6, 3),
            "args": {"step": step},
        }
    for event in run.events():
        at = (
            float(str(event.get("time"))) if isinstance(event.get("time"), int | float) else 0.0
        ) - found.origin
        if at >= 0:
            yield {
                "name": str(event.get("event"))[:80],
                "ph": "i",
                "s": "g",
                "pid": 0,
                "tid": 0,
                "ts": at * 1e6,
            }


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _thread(kind: int) -> int:
    if kind in PASSES:
        return _THREADS["passes"]
    if kind == SpanKind.BUCKET:
        return _THREADS["collectives"]
    return _THREADS["checkpoint" if kind in (SpanKind.CHECKPOINT, SpanKind.RECOVERY) else "step"]


def _name(kind: int, detail: int) -> str:
    name = SpanKind(kind).name.lower()
    if kind in PASSES:
        stage = f" stage {detail // MICROBATCHES}" if detail >= MICROBATCHES else ""
        return f"{name} {detail % MICROBATCHES}{stage}"
    return f"{name} {detail}" if kind == SpanKind.BUCKET else name
