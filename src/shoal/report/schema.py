"""What an event may say: the schema of the event logs, and the check of a line against it.

A log is lines of JSON. A line without "event" is a training step; every other line names its kind. Readers take unknown
kinds and unknown fields as they come: a later version may add some, and takes none away without a new number. "after"
is the number of steps that were done when it happened; "step" belongs to steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

SCHEMA = 1
"""Written into every start event."""


@dataclass(frozen=True)
class Kind:
    """One kind of event: what it is for, and its fields, each with its type in a word; "?" permits null."""

    summary: str
    fields: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)


STEP = Kind(
    "a training step; the loss is the whole job's, times, bytes and memory are this rank's",
    {
        "step": "int",
        "epoch": "int",
        "loss": "number?",
        "samples": "int",
        "count": "number?",
        "samples_per_second": "number",
        "counts_per_second": "number",
        "seconds": "number",
        "data": "number",
        "compute": "number",
        "exposed": "number",
        "update": "number",
        "bytes_sent": "int",
        "peak_memory": "int",
        "lr": "number?",
        "grad_norm": "number?",
        "skipped": "bool",
        "between": "number",
        "time": "number",
    },
    {"metrics": "object"},
)

EVENTS: Mapping[str, Kind] = {
    "start": Kind(
        "a process begins to train; the first event of each start",
        {"time": "number", "schema": "int", "monotonic": "number", "host": "text", "pid": "int"},
        {
            "rank": "int",
            "workers": "int",
            "strategy": "text",
            "precision": "text",
            "version": "text",
            "device": "text",
            "torch": "text",
            "python": "text",
            "steps": "int?",
            "settings": "object",
            "partition": "text",
            "skew": "number",
            "role": "text",
            "command": "text",
        },
    ),
    "end": Kind(
        "the process has stopped training: done, left, stopped, or failed",
        {"time": "number", "why": "text"},
        {"after": "int", "error": "text", "exit_code": "int"},
    ),
    "log": Kind(
        "what the script gave to run.log, or an evaluator measured",
        {"time": "number", "after": "int", "values": "object"},
        {"seconds": "number", "written": "text"},
    ),
    "note": Kind(
        "a sentence that was shown to the user", {"time": "number", "text": "text"}, {"after": "int"}
    ),
    "shares": Kind("from here on workers get other shares of a step", {"time": "number"}),
    "servers": Kind(
        "how parameter servers do",
        {"time": "number"},
        {
            "staleness": "object",
            "busy": "list",
            "queue": "int",
            "workers": "int",
            "bytes_sent": "int",
        },
    ),
    "memory": Kind(
        "bytes by kind, as predicted before the run and as measured",
        {"time": "number"},
        {"predicted": "object", "measured": "object"},
    ),
    "checkpoint": Kind(
        "a checkpoint is begun, and training goes on",
        {"time": "number", "after": "int", "name": "text"},
        {"seconds": "number"},
    ),
    "failure": Kind(
        "a worker, a server or a host is lost",
        {"time": "number", "why": "text"},
        {
            "rank": "int?",
            "host": "text",
            "pid": "int",
            "after": "int",
            "exit_code": "int",
            "signal": "text",
            "phase": "text",
            "trace": "text",
        },
    ),
    "recovery": Kind(
        "what was lost is replaced, and training goes on",
        {"time": "number", "how": "text"},
        {"rank": "int?", "after": "int", "seconds": "number", "workers": "int"},
    ),
    "resize": Kind(
        "the job goes on with another number of workers",
        {"time": "number", "before": "int", "workers": "int"},
        {"after": "int", "why": "text"},
    ),
    "stall": Kind(
        "a worker does not move",
        {"time": "number", "rank": "int", "seconds": "number"},
        {"after": "int", "phase": "text", "why": "text", "trace": "text"},
    ),
    "straggler": Kind(
        "a worker is slower than the others",
        {"time": "number", "rank": "int", "ratio": "number"},
        {"after": "int", "host": "text", "why": "text"},
    ),
    "clock": Kind(
        "a host's wall clock: add `offset` seconds to its times to get those of the reference host",
        {"time": "number", "host": "text", "offset": "number"},
        {"error": "number", "reference": "text"},
    ),
    "state_hash": Kind(
        "the replicas' parameters were compared",
        {"time": "number", "after": "int", "equal": "bool"},
        {"rank": "int?", "why": "text"},
    ),
    "chaos": Kind(
        "a fault was injected on purpose",
        {"time": "number", "what": "text"},
        {"rank": "int?", "after": "int"},
    ),
}
"""By the name in "event"."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "number": (int, float),
    "text": (str,),
    "bool": (bool,),
    "list": (list,),
    "object": (dict,),
}


def problems(event: object) -> list[str]:
    """What is wrong with an event; nothing if it keeps to the schema.

    >>> problems({"event": "stall", "time": 1.0, "rank": "two", "seconds": 12.5})
    ["stall: 'rank' is 'two' and should be int"]
    >>> problems({"event": "log", "time": 1.0, "after": 3, "values": {"accuracy": 0.5}})
    []
    """
    if not isinstance(event, dict):
        return [f"an event is an object, and this is {str(event)[:40]!r}"]
    name = event.get("event", "step")
    kind = STEP if "event" not in event else EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        return [f"there is no event {str(name)[:40]!r}"]
    found = [f"{name}: {key!r} is missing" for key in kind.fields if key not in event]
    wanted = {**kind.optional, **kind.fields}
    return found + [
        f"{name}: {key!r} is {str(value)[:40]!r} and should be {wanted[key]}"
        for key, value in event.items()
        if key in wanted and not _fits(value, wanted[key])
    ]


def _fits(value: object, word: str) -> bool:
    if value is None:
        return word.endswith("?")
    kinds = _TYPES[word.removesuffix("?")]
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and not (isinstance(value, float) and not isfinite(value))
