"""Prometheus' text format: a run's numbers for those who watch many."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shoal.dashboard.columns import number
from shoal.dashboard.run_log import RunLog

METRICS: Mapping[str, tuple[str, str]] = {
    "shoal_step": ("gauge", "The step that each rank has begun last."),
    "shoal_steps_total": ("gauge", "The steps that the run will have; absent where nobody knows."),
    "shoal_up": ("gauge", "1 while the rank trains, 0 when it has ended, failed or died."),
    "shoal_state": ("gauge", "1 for the state the rank is in: running, ended, failed, dead or silent."),
    "shoal_still_seconds": ("gauge", "How long the rank has been in the phase it is in."),
    "shoal_loss": ("gauge", "The loss of the newest step."),
    "shoal_samples_per_second": ("gauge", "Samples a second of the whole job."),
    "shoal_step_seconds": ("gauge", "Seconds that the newest step took on each rank."),
    "shoal_phase_seconds": ("gauge", "Seconds of the newest step by phase, on the first rank."),
    "shoal_memory_bytes": ("gauge", "Resident memory of each rank."),
    "shoal_peak_memory_bytes": ("gauge", "The highest resident memory of each rank so far."),
    "shoal_learning_rate": ("gauge", "The learning rate of the newest step."),
    "shoal_gradient_norm": ("gauge", "The gradient norm of the newest step, where it was computed."),
    "shoal_checkpoint_step": ("gauge", "The step of the newest checkpoint."),
    "shoal_events_total": ("counter", "Events in the run's logs, by kind."),
    "shoal_server_busy": ("gauge", "The share of time that a parameter server was busy."),
}
"""Every name, with its type and what it means."""

Sample = tuple[str, Mapping[str, str], float]


def metrics(runs: Sequence[RunLog]) -> str:
    """All runs' numbers as text."""
    found = [sample for run in runs for sample in _samples(run)]
    lines = []
    for name, (kind, meaning) in METRICS.items():
        mine = [(labels, value) for which, labels, value in found if which == name and value == value]
        if mine:
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{{{_labels(labels)}}} {value:.10g}" for labels, value in mine]
    return "\n".join(lines) + "\n"


def write_textfile(path: Path, runs: Sequence[RunLog]) -> None:
    """For the textfile collector of node_exporter, which must never read half a file."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(metrics(runs))
    os.replace(new, path)


def _samples(run: RunLog) -> Iterable[Sample]:
    name = {"run": run.name}
    for row in run.state_rows():
        rank = {**name, "rank": str(row["rank"]), "host": str(row["host"])}
        condition = str(row["condition"])
        yield "shoal_step", rank, number(row["step"])
        yield "shoal_up", rank, float(condition == "running")
        yield "shoal_state", {**rank, "state": condition}, 1.0
        yield "shoal_still_seconds", rank, max(0.0, number(row["written"]) - number(row["since"]))
        yield "shoal_step_seconds", rank, number(row["seconds"])
        yield "shoal_memory_bytes", rank, number(row["memory"])
        yield "shoal_peak_memory_bytes", rank, number(row["peak_memory"])
        if row["rank"] == run.ranks()[0]:
            yield "shoal_steps_total", name, number(row["steps"])
            yield "shoal_loss", name, number(row["loss"])
            yield "shoal_samples_per_second", name, number(row["samples_per_second"])
            yield "shoal_checkpoint_step", name, number(row["saved"])
    yield from _of_newest_step(run, name)
    events = run.events()
    kinds = [str(event.get("event"))[:40] for event in events]
    for kind in sorted(set(kinds)):
        yield "shoal_events_total", {**name, "event": kind}, float(kinds.count(kind))
    served = [event for event in events if event.get("event") == "servers"]
    busy = served[-1].get("busy") if served else None
    shares: list[object] = busy if isinstance(busy, list) else []
    for server, share in enumerate(shares):
        yield "shoal_server_busy", {**name, "server": str(server)}, number(share)


def _of_newest_step(run: RunLog, name: Mapping[str, str]) -> Iterable[Sample]:
    last = run.columns.last
    phases = ("data", "compute", "exposed", "update")
    steps, found, _ = run.columns.read([*phases, "lr", "grad_norm"], last, last)
    if len(steps):
        yield "shoal_learning_rate", name, float(found["lr"][-1])
        yield "shoal_gradient_norm", name, float(found["grad_norm"][-1])
        for phase in phases:
            yield "shoal_phase_seconds", {**name, "phase": phase}, float(found[phase][-1])


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    r"""As the text format wants it.

    >>> print(_escaped('a"b\\c\nd'))
    a\"b\\c\nd
    """
    return value[:200].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
