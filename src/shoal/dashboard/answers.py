"""The requests that the page makes, by name: the same for a live page and for one that was exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.dashboard import pictures
from shoal.dashboard.run_log import RunLog
from shoal.dashboard.timeline import packed, pipeline, timeline

Query = Mapping[str, str]

_CURVES = "loss,lr,grad_norm,samples_per_second"


def answer(runs: Sequence[RunLog], name: str, query: Query) -> object:
    """Plain values for JSON, or bytes; None if there is no such request, or no such run."""
    if name == "runs":
        return [pictures.summary(run) for run in runs]
    if name == "differences":
        return pictures.differences(list(runs))
    number = whole(query, "run", 0 if "run" not in query else -1)
    make = _OF_A_RUN.get(name)
    if make is None or not 0 <= number < len(runs):
        return None
    return make(runs[number], query)


def whole(query: Query, name: str, default: int) -> int:
    """A whole number of a query; whatever else is there counts as left out.

    >>> whole({"points": "20"}, "points", 5), whole({"points": "x"}, "points", 5)
    (20, 5)
    """
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else default


def _steps(query: Query) -> tuple[int, int]:
    return whole(query, "first", 0), whole(query, "last", pictures.EVERYTHING)


def _series(run: RunLog, query: Query) -> object:
    names = query.get("names", _CURVES).split(",")[:80]
    return pictures.series(run, names, *_steps(query), points=whole(query, "points", 800))


def _spans(run: RunLog, query: Query) -> object:
    return packed(timeline(run, *_steps(query), most=min(whole(query, "most", 400_000), 600_000)))


_OF_A_RUN: Mapping[str, Callable[[RunLog, Query], object]] = {
    "series": _series,
    "heat": lambda run, query: pictures.heat(run, *_steps(query), columns=whole(query, "columns", 300)),
    "split": lambda run, query: pictures.split(run, *_steps(query)),
    "spans": _spans,
    "pipeline": lambda run, query: pipeline(run, whole(query, "step", run.columns.last)),
    "memory": lambda run, _: pictures.memory(run),
    "servers": lambda run, _: pictures.servers(run),
    "marks": lambda run, _: pictures.marks(run),
}
