"""`shoal plan --review RUN`: what was predicted of a run, beside what it measured."""

from __future__ import annotations

import statistics
from pathlib import Path

import typer

from shoal.cli.text_columns import columns, size_text
from shoal.errors import ConfigError

_WARM = 3
"""First steps of a start, which load and grow what others find ready."""


def show_review(path: Path) -> None:
    """Every start of a run that was predicted, and what is learned from it."""
    from shoal.plan.cache import machine_key
    from shoal.plan.predict import family_of
    from shoal.plan.residuals import FAR, residuals_of
    from shoal.report.events import Event, read_events

    file = path / "events.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--review {path}: there is no events.jsonl; give the folder of a run, such as runs/train."
        )
    from shoal.config import parse_strategy

    rows = [
        ["strategy", "workers", "predicted", "measured", "error", "memory predicted", "measured", "error"]
    ]
    start: dict[str, object] | None = None
    steps: list[dict[str, object]] = []
    families: list[str] = []
    for event in [*read_events(file), Event(event="start")]:
        if event.get("event") == "start":
            if start is not None and "predicted_seconds" in start and len(steps) > _WARM:
                try:
                    rows.append(_row(start, steps[_WARM:]))
                except (KeyError, ValueError, TypeError, ZeroDivisionError):
                    raise ConfigError(
                        f"{file} has a start or a step without the numbers that Shoal writes; is it damaged?"
                    ) from None
                families.append(family_of(parse_strategy(str(start["strategy"]))))
            start, steps = {**event}, []
        elif "step" in event:
            steps.append({**event})
    if len(rows) == 1:
        raise ConfigError(
            f"{file} holds no step that was predicted; run `shoal plan` on the script first, or use strategy='auto'."
        )
    typer.echo(columns(rows, right=[1, 2, 3, 4, 5, 6, 7]))
    learned = residuals_of(machine_key())
    for family in dict.fromkeys(families):
        if family in learned:
            typer.echo(
                f"{family}: steps here take {learned[family]:.2f} times what was calculated; used from now on."
            )
    worst = max(abs(float(row[4].rstrip("%"))) / 100 for row in rows[1:])
    if worst > FAR:
        typer.echo(
            f"The worst is off by {worst:.0%}, more than {FAR:.0%}: `shoal plan --calibrate` measures anew."
        )


def _row(start: dict[str, object], steps: list[dict[str, object]]) -> list[str]:
    seconds = statistics.median(float(str(step["seconds"])) for step in steps)
    memory = max(int(str(step["peak_memory"])) for step in steps)
    wanted, held = float(str(start["predicted_seconds"])), int(str(start["predicted_memory"]))
    return [
        str(start.get("strategy")),
        str(start.get("workers")),
        f"{wanted * 1e3:.3g} ms",
        f"{seconds * 1e3:.3g} ms",
        f"{wanted / seconds - 1:+.0%}",
        size_text(held),
        size_text(memory),
        f"{held / memory - 1:+.0%}",
    ]
