"""`shoal status`: what every rank of a run is doing, or did last, from the files in its folder alone."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.text_columns import size_text
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.report.state import RankState

LOOK_SECONDS = 1.0
_COLOURS = {"running": "green", "ended": "dim", "failed": "red", "dead": "red", "silent": "yellow"}


def status(
    folder: Annotated[
        Path, typer.Argument(help="A run's folder, that of its event logs.", show_default=False)
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every second, until the run is over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a rank, one a line.")] = False,
) -> None:
    """Show what every rank of a run is doing, or did last; exit code 1 if one has failed or is gone.

    \b
    shoal status runs/first
    shoal status runs/first --watch
    """
    states = _read(folder)
    if as_json:
        here, now = socket.gethostname(), time.time()
        for state in states:
            print(json.dumps({**asdict(state), "condition": state.condition(now, here)}, allow_nan=False))
    else:
        states = _show(folder, states, watch)
    sys.exit(1 if _conditions(states) & {"failed", "dead"} else 0)


def _read(folder: Path) -> list[RankState]:
    from shoal.report.state import read_states

    states = read_states(folder)
    if not states:
        raise ConfigError(
            f"no rank has a state file in {folder}; give the folder of a run's event logs, as its log= says."
        )
    return states


def _conditions(states: list[RankState]) -> set[str]:
    here, now = socket.gethostname(), time.time()
    return {state.condition(now, here) for state in states}


def _show(folder: Path, states: list[RankState], watch: bool) -> list[RankState]:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not watch:
        console.print(_table(states))
        _show_clocks(folder)
        return states
    with Live(_table(states), console=console, auto_refresh=False) as live:
        while _conditions(states) & {"running", "silent"}:
            time.sleep(LOOK_SECONDS)
            states = _read(folder)
            live.update(_table(states), refresh=True)
    _show_clocks(folder)
    return states


def _show_clocks(folder: Path) -> None:
    from shoal.report.host_clocks import clock_sentences

    for sentence in clock_sentences(folder):
        print(plain(sentence))


def _table(states: list[RankState]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    here, now = socket.gethostname(), time.time()
    hosts = {state.host for state in states}
    table = Table(box=None, pad_edge=False, header_style="bold")
    right = {"rank", "for", "step", "loss", "step ms", "memory"}
    names = ["rank", "host", "state", "step", "doing", "for", "loss", "step ms", "memory"]
    if len(hosts) == 1:
        names.remove("host")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != "doing")
    for state in states:
        condition = state.condition(now, here)
        doing = state.why if condition in ("failed", "ended") else state.doing
        until = now if condition == "running" else state.written
        cells = {
            "rank": str(state.rank),
            "host": plain(state.host),
            "state": condition,
            "step": f"{state.step}" if state.steps is None else f"{state.step}/{state.steps}",
            "doing": plain(doing),
            "for": _duration(max(0.0, until - state.since)) if condition != "ended" else "",
            "loss": "" if state.loss is None else f"{state.loss:.4f}",
            "step ms": f"{state.seconds * 1e3:.1f}" if state.seconds else "",
            "memory": size_text(state.memory) if state.memory else "",
        }
        style = _COLOURS.get(condition, "")
        table.add_row(*(Text(cells[name], style if name == "state" else "") for name in names))
    return Group(Text(_summary(states, now, here), "bold"), table)


def _summary(states: list[RankState], now: float, here: str) -> str:
    conditions = [state.condition(now, here) for state in states]
    counts = [f"{conditions.count(c)} {c}" for c in _COLOURS if c in conditions]
    first = states[0]
    said = f"{plain(first.strategy)}: {', '.join(counts)} of {max(first.workers, len(states))}"
    if first.samples_per_second and conditions[0] == "running":
        said += f"; {first.samples_per_second:.0f} samples/s"
        if first.steps and first.steps > first.step and first.seconds:
            said += f"; {_duration((first.steps - first.step) * first.seconds)} left"
    quiet = max(0.0, now - max(state.written for state in states))
    return said if "running" in conditions else f"{said}; last heard of {_duration(quiet)} ago"


def _duration(seconds: float) -> str:
    """Time as people read it.

    >>> _duration(7.2), _duration(750), _duration(200_000)
    ('7 s', '12 min', '2.3 d')
    """
    for unit, size in (("s", 60.0), ("min", 60.0), ("h", 24.0)):
        if seconds < size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.1f} d"


def plain(text: str, most: int = 200) -> str:
    """Text of a file that anybody may have written: no control characters reach a terminal, and no end of it either.

    >>> plain("a" + chr(27) + "[2Jb" + chr(10) + "c")
    'a?[2Jb?c'
    """
    shown = "".join(c if c.isprintable() else "?" for c in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"
