"""Curves: as text for a terminal, as PNG for a page, and the one-line bar of where a step's time went.

A text chart has two by four braille dots in each character, so 72 columns show some 130 distinct points.
A series longer than that is averaged into the dot columns, a shorter one is joined by straight lines, and
what is not a number leaves a gap, in which a broken run can be seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.report.meter import Times
from shoal.types import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The bit of each dot in a braille character: _DOTS[column][row], by the Unicode standard (U+2800).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

# The first series is drawn in dots, each further one with a sign of its own; colour would not survive a log.
_SIGNS = "•+xo*"

_BLOCKS = {"data": "▒", "compute": "█", "exposed": "░", "update": "▓", "other": "·"}


def draw(
    values: Sequence[float] | Mapping[str, Sequence[float]],
    width: int = 72,
    height: int = 12,
    title: str = "",
    first: int = 1,
) -> str:
    """A chart as text, `width` columns wide over all, the plot itself `height` lines high.

    `values` is one series or several by name; `first` is the number of the first value on the x axis.

    >>> print(draw([1, 2, 3, 4], width=20, height=3))
    4 ┤           ⢀⣀⠤⠔⠒⠉
      │     ⢀⣀⠤⠔⠒⠉⠁
    1 ┤⣀⠤⠔⠒⠉⠁
      └─────────────────
       1               4
    """
    series = dict(values) if isinstance(values, Mapping) else {"": values}
    low, high = _range(series)
    labels = _labels(low, high, height)
    margin = max(map(len, labels))
    columns = max(4, width - margin - 2)
    cells = [["\u2800"] * columns for _ in range(height)]
    for index, line in enumerate(series.values()):
        sign = "" if index == 0 else _SIGNS[(index - 1) % len(_SIGNS)]
        _plot(cells, line, low, high, sign)
    # In some fonts a blank braille character has another width than a blank: use blanks, and none at the end.
    rows = ["".join(row).replace("\u2800", " ").rstrip() for row in cells]
    out = [f"{label:>{margin}} {'┤' if label else '│'}{row}" for label, row in zip(labels, rows, strict=True)]
    out.append(" " * margin + " └" + "─" * columns)
    last = str(first + max(1, max(map(len, series.values()), default=1)) - 1)
    out.append(" " * margin + f"  {first!s:<{columns - len(last)}}{last}")
    return "\n".join([*_heading(title, series), *out])


def _heading(title: str, series: Mapping[str, Sequence[float]]) -> list[str]:
    signs = ["⠒", *_SIGNS]
    legend = "   ".join(f"{signs[i % len(signs)]} {name}" for i, name in enumerate(series) if name)
    heading = "   ".join(part for part in (title, legend) if part)
    return [heading] if heading else []


def _range(series: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    finite = [value for line in series.values() for value in line if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    # A constant series needs some height to stand in.
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _labels(low: float, high: float, height: int) -> list[str]:
    """A label for the top line, the bottom line, and every fourth or so between."""
    parts = max(1, round((height - 1) / 4))
    at = {round(i * (height - 1) / parts): high - (high - low) * i / parts for i in range(parts + 1)}
    return [f"{at[row]:.4g}" if row in at else "" for row in range(height)]


def _plot(cells: list[list[str]], line: Sequence[float], low: float, high: float, sign: str) -> None:
    """Draw one series into the characters, over whatever is there."""
    # A sign fills a whole character, a dot a part of one.
    across, down = (1, 1) if sign else (2, 4)
    steps = len(cells) * down - 1
    before = -1
    for x, value in enumerate(_resample(line, len(cells[0]) * across)):
        if not isfinite(value):
            before = -1
            continue
        y = round((high - value) / (high - low) * steps)
        # Join steep parts downwards or upwards, so that the curve is one line and not a cloud.
        near = y if before < 0 else before + (y > before) - (y < before)
        for row in range(min(near, y), max(near, y) + 1):
            if sign:
                cells[row][x] = sign
            else:
                old = ord(cells[row // 4][x // 2])
                cells[row // 4][x // 2] = chr(old | _DOTS[x % 2][row % 4])
        before = y


def _resample(line: Sequence[float], columns: int) -> list[float]:
    """`columns` values that stand for the whole line; NaN where there is nothing to show."""
    count = len(line)
    if count >= columns:
        bounds = [column * count // columns for column in range(columns + 1)]
        return [_mean(line[a:b]) for a, b in pairwise(bounds)]
    stretch = (columns - 1) / max(1, count - 1)
    out = []
    for column in range(columns if count > 1 else count):
        left = min(int(column / stretch), count - 1)
        right = min(left + 1, count - 1)
        part = column / stretch - left
        between = line[left] + (line[right] - line[left]) * part if part > 0 else line[left]
        # A single value between two gaps has no line to be on, but must not vanish.
        nearest = line[left] if part < 0.5 else line[right]
        on_point = min(part, 1 - part) * stretch <= 0.5
        out.append(between if isfinite(between) or not on_point else nearest)
    return out


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if isfinite(value)]
    return sum(finite) / len(finite) if finite else nan


def time_split(times: StepReport | Times | Mapping[str, float], width: int = 40) -> str:
    """Where the time went, as one line: a bar in proportion, then the shares.

    Takes a step, the sum of many (`Times.of(reports)`) or an event of the log.

    >>> time_split({"seconds": 2.0, "data": 0.1, "compute": 1.5, "exposed": 0.3, "update": 0.1}, width=20)
    '▒███████████████░░░▓  data 5% compute 75% exposed 15% update 5%'
    """
    if isinstance(times, StepReport):
        times = Times.of([times])
    elif not isinstance(times, Times):
        parts = [times.get(name, 0.0) for name in ("data", "compute", "exposed", "update")]
        times = Times(times.get("seconds", 0.0), *parts)
    shares = times.shares()
    bar = ""
    reached = 0.0
    for name, share in shares.items():
        # Rounding the ends and not the lengths keeps the whole exactly `width` long.
        reached += share
        bar += _BLOCKS[name] * (round(reached * width) - len(bar))
    shown = {name: share for name, share in shares.items() if name != "other" or share >= 0.005}
    return f"{bar}  " + " ".join(f"{name} {share:.0%}" for name, share in shown.items())


def save_png(
    path: str | os.PathLike[str],
    series: Mapping[str, Sequence[float]],
    title: str = "",
    xlabel: str = "step",
    ylabel: str = "loss",
) -> None:
    """Write the curves to a PNG: each smoothed over its faint raw self, named at its end.

    >>> save_png("loss.png", {"ddp": [5.5, 4.1, 3.2], "zero3": [5.5, 4.2, 3.1]}, "two runs")  # doctest: +SKIP
    """
    figure = new_figure(8, 4.5, dpi=150)
    axes = figure.add_subplot()
    _style(axes, title, xlabel, ylabel)
    ends: list[tuple[float, str, str]] = []
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        steps = range(1, len(line) + 1)
        smooth = _smooth(line)
        if smooth != list(line):
            axes.plot(steps, line, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth, color=colour, linewidth=1.8, solid_capstyle="round")
        last = next((value for value in reversed(smooth) if isfinite(value)), None)
        if last is not None:
            ends.append((last, f"{name} {last:.4g}".strip(), colour))
    axes.margins(x=0.01)
    _name_ends(axes, ends)
    figure.savefig(path, format="png")


def new_figure(width: float, height: float, dpi: int) -> Figure:
    """An empty picture of so many inches; refused where there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a PNG needs matplotlib; run `pip install shoal[plots]`.") from error
    # Not pyplot: its list of open figures and its backend belong to the program that called us.
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


_COLOURS = ("#1f6fb4", "#d9622b", "#2c8c5a", "#8a4fb0", "#b0304f", "#6b6b6b")


def _style(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#222222", pad=10)
    axes.set_xlabel(xlabel, color="#555555")
    axes.set_ylabel(ylabel, color="#555555")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#777777", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def _name_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each name beside the end of its curve, pushed apart where they would overlap."""
    bottom, top = axes.get_ylim()
    gap = (top - bottom) * 0.05
    floor = bottom
    for value, text, colour in sorted(ends):
        place = max(value, floor)
        floor = place + gap
        axes.annotate(
            text,
            xy=(1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
        )


def _smooth(line: Sequence[float]) -> list[float]:
    """A straight line fitted around each point to a tenth of the whole; short series stay as they are.

    A fitted line neither lags behind a slope nor bends at the end, as running means do. Near the start it
    looks less far, because a loss falls in its first steps as much as in all the others. Sums from the start
    to each point make it one pass for windows of any size.
    """
    if len(line) < 40:
        return list(line)
    import numpy as np  # not above: its threads would keep a launcher from forking

    y = np.asarray(line, dtype=np.float64)
    known = np.isfinite(y)
    x = np.arange(len(y), dtype=np.float64)
    one = known.astype(np.float64)
    y = np.where(known, y, 0.0)
    sums = np.cumsum([one, one * x, one * x * x, y, x * y], axis=1)
    sums = np.concatenate([np.zeros((5, 1)), sums], axis=1)
    place = np.arange(len(y))
    half = np.minimum(place // 4, max(2, len(y) // 20))
    begin, end = place - half, np.minimum(len(y), place + half + 1)
    n, sx, sxx, sy, sxy = sums[:, end] - sums[:, begin]
    spread = n * sxx - sx * sx
    slope = np.where(spread > 0.5, (n * sxy - sx * sy) / np.maximum(spread, 0.5), 0.0)
    fitted = sy / np.maximum(n, 1) + slope * (x - sx / np.maximum(n, 1))
    smooth: list[float] = np.where(known, fitted, nan).tolist()
    return smooth
