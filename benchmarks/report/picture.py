"""The one place that draws PNGs: of the network benchmark, step times at each rate, loss against time at the slowest.

A contestant has one colour in all panels; torch's are grey, and dashed where they are lines.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.network.measured import AtRate, Measured, measured_from
from benchmarks.report.draw import seconds
from benchmarks.report.origin import ROOT
from benchmarks.report.result import Result
from benchmarks.workload.rates import show_rate
from shoal.report.chart import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

PUBLISHED = ROOT / "docs" / "guides" / "slow-networks.png"
"""The one that the documentation shows."""

_GREYS = ("#2b2b2b", "#7a7a7a", "#b3b3b3")
_COLOURS = (
    "#1f6fb4",
    "#d9622b",
    "#2c8c5a",
    "#8a4fb0",
    "#c9a227",
    "#b0304f",
    "#17a2b8",
    "#e377c2",
    "#7f5a3a",
    "#8fbf3f",
    "#3d3db5",
    "#ff9f6e",
)
_MARKS = {
    0.001: "1 ms",
    0.003: "3 ms",
    0.01: "10 ms",
    0.03: "30 ms",
    0.1: "0.1 s",
    0.3: "0.3 s",
    1.0: "1 s",
    3.0: "3 s",
    10.0: "10 s",
    30.0: "30 s",
    60.0: "1 min",
    180.0: "3 min",
    600.0: "10 min",
    1800.0: "30 min",
    3600.0: "1 h",
    10800.0: "3 h",
    36000.0: "10 h",
}
WINDOW = 20
"""Steps whose losses are averaged into one point of a curve."""


def draws(result: Result) -> bool:
    """Whether there is a picture of this one."""
    return any(section.raw is not None for section in result.sections)


def save(result: Result, path: Path) -> bool:
    """Write its picture; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    for section in result.sections:
        if section.raw is not None:
            save_png(measured_from(section.raw), path)
    return True


def save_png(result: Measured, path: Path) -> None:
    """Step times as bars, losses as curves."""
    names, colours = result.names, colours_of(result.names)
    bars, curves = 0.3 * len(names) + 1.0, 5.6 if result.learned else 0.0
    figure = new_figure(13, bars + curves, dpi=130)
    above: SubFigure
    if curves:
        both = figure.subfigures(2, 1, squeeze=False, height_ratios=[bars, curves], hspace=0.04)
        above, below = both[:, 0]
        slowest = min(result.rates, key=lambda at: at.rate)
        _draw_curves(below.add_subplot(), result, slowest, colours)
    else:
        above = figure.subfigures(1, 1, squeeze=False)[0, 0]
    limits = _limits([timed.step_seconds for at in result.rates for timed in at.timed.values()])
    for column, at in enumerate(result.rates):
        axes = above.add_subplot(1, len(result.rates), column + 1)
        _draw_bars(axes, at, names, colours, limits, first=column == 0)
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.2)


def _limits(values: list[float]) -> tuple[float, float]:
    """One scale for all rates. A bar on a logarithmic scale has no zero: leave some of the shortest, and room for
    words behind the longest."""
    left = min(values) / 2
    return left, max(values) * (max(values) / left) ** 0.45


def colours_of(names: list[str]) -> dict[str, str]:
    """A colour for each name.

    >>> list(colours_of(["torch ddp", "ddp"]).values())
    ['#2b2b2b', '#1f6fb4']
    """
    torch = [name for name in names if name.startswith("torch")]
    ours = [name for name in names if not name.startswith("torch")]
    found = {name: _GREYS[i % len(_GREYS)] for i, name in enumerate(torch)}
    return found | {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(ours)}


def _draw_bars(
    axes: Axes,
    at: AtRate,
    names: list[str],
    colours: dict[str, str],
    limits: tuple[float, float],
    first: bool,
) -> None:
    known = [name for name in names if name in at.timed]
    values = [at.timed[name].step_seconds for name in known]
    places = [names.index(name) for name in known]
    axes.barh(places, values, color=[colours[name] for name in known], height=0.72)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    for place, name, value in zip(places, known, values, strict=True):
        label = f"  {seconds(value)}   {at.speed(name):.1f} ×"
        axes.text(value, place, label, va="center", ha="left", fontsize=8.5, color="#333333")
    axes.set_yticks(range(len(names)), names if first else [""] * len(names), fontsize=9.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    _style(axes, f"step time at {show_rate(at.rate)}", "", grid="x")
    _mark_times(axes, apart=0.15)


def _draw_curves(axes: Axes, result: Measured, at: AtRate, colours: dict[str, str]) -> None:
    known = [name for name in result.names if name in at.timed and name in result.learned]
    for name in known:
        step, losses = at.timed[name].step_seconds, result.learned[name].losses
        window = max(1, min(WINDOW, len(losses) // 10))
        whole = len(losses) // window
        times = [step * window * (place + 1) for place in range(whole)]
        means = [statistics.mean(losses[place * window : (place + 1) * window]) for place in range(whole)]
        dashes = (0, (4, 2)) if name.startswith("torch") else "-"
        label = f"{name}   {result.learned[name].final:.3f} after {seconds(step * len(losses))}"
        axes.plot(times, means, color=colours[name], linestyle=dashes, linewidth=1.7, label=label)
        axes.plot(times[-1:], means[-1:], "o", color=colours[name], markersize=5)
    axes.set_xscale("log")
    about = result.settings
    title = f"training loss against time at {show_rate(at.rate)}, {about['steps']} steps each"
    small, large = (about[f"{kind}_parameters"] / 1e6 for kind in ("learning", "timed"))
    _style(
        axes,
        title,
        f"step times of {large:.1f} M parameters × steps; losses of {small:.1f} M parameters, "
        "which do not depend on the network",
        grid="both",
    )
    _mark_times(axes, apart=0.07)
    axes.set_ylabel("loss", color="#555555")
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        fontsize=9,
        frameon=False,
        title="loss on unseen text at the end",
        alignment="left",
    )


def _mark_times(axes: Axes, apart: float) -> None:
    """Put marks where people read a clock, no two nearer than this part of the axis."""
    low, high = axes.get_xlim()
    chosen: list[float] = []
    for mark in (mark for mark in _MARKS if low <= mark <= high):
        if not chosen or math.log(mark / chosen[-1]) >= apart * math.log(high / low):
            chosen.append(mark)
    axes.minorticks_off()
    axes.set_xticks(chosen, [_MARKS[mark] for mark in chosen])


def _style(axes: Axes, title: str, xlabel: str, grid: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color="#222222", pad=8)
    axes.set_xlabel(xlabel, color="#555555", fontsize=9)
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(colors="#555555", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
