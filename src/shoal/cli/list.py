"""`shoal list`: every slot with its choices."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from shoal.errors import ConfigError
from shoal.table import Table, did_you_mean


def list_choices(
    slot: Annotated[str | None, typer.Argument(help="Only this slot, such as exchange.")] = None,
) -> None:
    """Print every slot with its choices, their promise and what they do."""
    slots = _slots()
    if slot is not None and slot not in slots:
        raise ConfigError(f"unknown slot '{slot}'{did_you_mean(slot, slots)}")
    console = Console()
    for name, table in slots.items():
        if slot in (None, name):
            console.print(_grid(name, table))


def _slots() -> dict[str, Table[Any]]:
    from shoal import compress, exchange  # torch comes with these: not before they are needed
    from shoal.train import clip, precision, schedule

    return {
        "exchange": exchange.TABLE,
        "compress": compress.TABLE,
        "precision": precision.TABLE,
        "schedule": schedule.TABLE,
        "clip": clip.TABLE,
    }


def _grid(name: str, table: Table[Any]) -> Grid:
    grid = Grid(
        title=name, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0)
    )
    grid.add_column("choice", no_wrap=True)
    grid.add_column("options", no_wrap=True)
    grid.add_column("promise", no_wrap=True)
    grid.add_column("what it does")
    for choice, made in table.items():
        promise = getattr(made, "promise", None)
        grid.add_row(choice, ", ".join(_options(made)), promise.name if promise else "", _summary(made))
    return grid


def _options(made: Any) -> Iterator[str]:
    holder = getattr(made, "Options", made)
    if not (isinstance(holder, type) and dataclasses.is_dataclass(holder)):
        return
    for field in dataclasses.fields(holder):
        yield field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default}"


def _summary(made: Any) -> str:
    summary = getattr(made, "summary", None)
    return summary if isinstance(summary, str) else (inspect.getdoc(made) or "").splitlines()[0]
