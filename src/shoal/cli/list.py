"""`shoal list`: every slot with its choices."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from shoal.config import options_of
from shoal.errors import ConfigError
from shoal.table import Table, did_you_mean


def list_choices(
    slot: Annotated[str | None, typer.Argument(help="Only this slot, such as exchange.")] = None,
    script: Annotated[
        str | None, typer.Argument(help="With tensor or pipeline: how this script's model would be divided.")
    ] = None,
    degree: Annotated[int, typer.Option(help="With tensor: cut layers so many ways.")] = 2,
    stages: Annotated[int, typer.Option(help="With pipeline: so many stages over all workers.")] = 4,
    microbatches: Annotated[int, typer.Option(help="With pipeline: so many micro-batches.")] = 8,
    schedule: Annotated[str, typer.Option(help="With pipeline: only this schedule.")] = "",
) -> None:
    """Print every slot with its choices, or how a model would be divided.

    \b
    shoal list exchange
    shoal list tensor train.py --degree 2
    shoal list pipeline --stages 4 --microbatches 8
    shoal list pipeline train.py --stages 2
    """
    slots = _slots()
    if slot is not None and slot not in (*slots, "tensor"):
        raise ConfigError(f"unknown slot '{slot}'{did_you_mean(slot, (*slots, 'tensor'))}")
    if slot == "tensor" and script is None:
        raise ConfigError(
            "shoal list tensor shows how a model is cut; name its script: shoal list tensor train.py."
        )
    if script is not None and slot not in ("tensor", "pipeline"):
        raise ConfigError(f"shoal list {slot} takes no script; tensor and pipeline do.")
    if degree < 2 or stages < 2:
        raise ConfigError(f"--degree {degree} --stages {stages}: a model is divided into 2 parts or more.")
    if script is not None:
        _ask(script, f"tensor {degree}" if slot == "tensor" else f"pipeline {stages}")
        return
    console = Console()
    for name, table in slots.items():
        if slot in (None, name):
            console.print(_grid(name, table))
    if slot == "pipeline":
        _draw(schedule, stages, microbatches)


def _ask(script: str, question: str) -> None:
    from shoal.cluster.local import Job, check
    from shoal.cluster.recovery.supervise import run_job

    job = Job(script, output="first", environment={"SHOAL_DRY_RUN": question})
    check(job)
    run_job(job)


def _draw(schedule: str, stages: int, microbatches: int) -> None:
    from shoal import pipeline
    from shoal.pipeline.grid import draw

    for name in [schedule] if schedule else pipeline.TABLE:
        chosen = pipeline.TABLE.look_up(name)
        ranks = stages // chosen.stages_per_rank
        if ranks * chosen.stages_per_rank == stages:
            print(f"\n{draw(name, ranks, microbatches)}")
        else:
            print(f"\n{name}: {chosen.stages_per_rank} stages a worker, which do not divide {stages}")


def _slots() -> dict[str, Table[Any]]:
    from shoal import (
        aggregate,
        balance,
        clock,
        compress,
        exchange,
        jobs,
        partition,
        pipeline,
        recipe,
    )  # torch comes with these: not before they are needed
    from shoal.data import augment
    from shoal.report import trackers
    from shoal.train.technique import clip, learning_rate, precision

    return {
        "exchange": exchange.TABLE,
        "pipeline": pipeline.TABLE,
        "compress": compress.TABLE,
        "partition": partition.TABLE,
        "augment": augment.TABLE,
        "balance": balance.TABLE,
        "clock": clock.TABLE,
        "aggregate": aggregate.TABLE,
        "precision": precision.TABLE,
        "schedule": learning_rate.TABLE,
        "clip": clip.TABLE,
        "recipe": recipe.TABLE,
        "trackers": trackers.TABLE,
        "engine": jobs.TABLE,
    }


def _grid(name: str, table: Table[Any]) -> Grid:
    grid = Grid(
        title=name, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0)
    )
    grid.add_column("choice", no_wrap=True)
    grid.add_column("options", max_width=32)
    grid.add_column("promise", no_wrap=True)
    grid.add_column("what it does")
    for choice, made in table.items():
        promise = getattr(made, "promise", None)
        grid.add_row(choice, ", ".join(_options(made)), promise.name if promise else "", _summary(made))
    return grid


def _options(made: object) -> Iterator[str]:
    holder = getattr(made, "Options", made)
    if not (isinstance(holder, type) and dataclasses.is_dataclass(holder)):
        return
    for field in options_of(holder):
        yield field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default}"


def _summary(made: object) -> str:
    summary = getattr(made, "summary", None)
    return summary if isinstance(summary, str) else (inspect.getdoc(made) or "").splitlines()[0]
