"""The result as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid

from shoal.bench.contestants import BASELINE
from shoal.bench.rates import show_rate
from shoal.bench.result import AtRate, Result


def show(result: Result, console: Console) -> None:
    """Print a table of step times and bytes, one of losses, and what must be known to read them."""
    about = result.settings
    console.print(
        f"\n2 hosts of 1 worker, {about['timed_parameters'] / 1e6:.1f} M parameters, "
        f"{about['timed_batch']} samples of 64 bytes a worker; {about['rounds']} rounds, contestants alternate",
        highlight=False,
    )
    for at in result.rates:
        console.print(_times(result, at))
        said = "\n".join([f"the wire carried {at.probed / 1e6:.0f} Mb/s when asked for more", *at.said])
        console.print(f"{said}\n", highlight=False, markup=False)
    if result.learned:
        console.print(_losses(result))
        console.print(f"\n{result.note}", highlight=False)
    for name, reason in result.failed.items():
        console.print(f"{name} did not take part to the end: {reason}", highlight=False, markup=False)


def _times(result: Result, at: AtRate) -> Grid:
    grid = _grid(f"{show_rate(at.rate)}: step time")
    for column in ("step", f"speed, {BASELINE} = 1", "MB sent a step", "times fewer", "steps"):
        grid.add_column(column, justify="right", no_wrap=True)
    plain = at.timed[BASELINE].step_bytes
    for name in (one for one in result.names if one in at.timed):
        timed = at.timed[name]
        grid.add_row(
            name,
            seconds(timed.step_seconds),
            f"{at.speed(name):.2f} ×",
            f"{timed.step_bytes / 1e6:.3f}",
            f"{plain / timed.step_bytes:.1f} ×" if timed.step_bytes else "-",
            str(timed.steps),
        )
    return grid


def _losses(result: Result) -> Grid:
    about = result.settings
    size = f"{about['learning_parameters'] / 1e6:.1f} M parameters"
    grid = _grid(f"loss after {about['steps']} steps on the same samples ({size})")
    for column in (
        "unseen text",
        f"above {BASELINE}",
        *(f"time at {show_rate(at.rate)}" for at in result.rates),
    ):
        grid.add_column(column, justify="right", no_wrap=True)
    for name in (one for one in result.names if one in result.learned):
        learned = result.learned[name]
        times = [
            seconds(len(learned.losses) * at.timed[name].step_seconds) if name in at.timed else "-"
            for at in result.rates
        ]
        grid.add_row(name, f"{learned.final:.4f}", f"{result.gap(name):+.2%}", *times)
    return grid


def _grid(title: str) -> Grid:
    grid = Grid(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    grid.padding = (0, 3, 0, 0)
    grid.add_column("contestant", no_wrap=True)
    return grid


def seconds(value: float) -> str:
    """A duration in the unit that suits it.

    >>> seconds(0.0123), seconds(6.8), seconds(2700)
    ('12.3 ms', '6.80 s', '45.0 min')
    """
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if value < 120 else f"{value / 60:.1f} min"
