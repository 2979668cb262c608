"""Plans and sweeps as PNG; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.plan.predict import Prediction
from shoal.plan.show import best_of_each
from shoal.plan.sweep import Point

_ROWS = 14
_COLOURS = {"compute": "#4c78a8", "communication": "#f58518", "waiting": "#bab0ac"}


def draw_plans(plans: Sequence[Prediction], path: Path) -> None:
    """Step time of each plan by what it goes into, with its interval; memory beside it."""
    rows = best_of_each(plans)[:_ROWS]
    figure, (left, right) = _figure(1, 2, (11, 0.9 + 0.42 * len(rows)), {"width_ratios": [2, 1]})
    names = [str(one.plan) for one in rows]
    places = list(range(len(rows)))
    start = [0.0] * len(rows)
    for kind, colour in _COLOURS.items():
        values = [1e3 * max(0.0, getattr(one, kind)) for one in rows]
        left.barh(places, values, left=start, color=colour, label=kind, height=0.62)
        start = [a + b for a, b in zip(start, values, strict=True)]
    middles = [1e3 * one.seconds.middle for one in rows]
    spans = [
        [1e3 * (one.seconds.middle - one.seconds.low) for one in rows],
        [1e3 * (one.seconds.high - one.seconds.middle) for one in rows],
    ]
    left.errorbar(middles, places, xerr=spans, fmt="|", color="black", capsize=3, label="predicted, interval")
    left.set_yticks(places, names)
    left.invert_yaxis()
    left.set_xlabel("milliseconds a step")
    left.set_xlim(left=0)
    # Above the bars, where it hides none of them.
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize=8, frameon=False)
    right.barh(places, [one.total / 1e6 for one in rows], color="#54a24b", height=0.62)
    right.set_yticks(places, [""] * len(rows))
    right.invert_yaxis()
    right.set_xlabel("MB of the worker that holds most")
    _save(figure, path)


def draw_sweep(points: Sequence[Point], path: Path) -> None:
    """Step time, efficiency and cost over the number of workers."""
    figure, axes = _figure(1, 3, (12, 3.4), {})
    workers = [point.workers for point in points]
    times = [1e3 * point.best.seconds.middle for point in points]
    low = [1e3 * point.best.seconds.low for point in points]
    high = [1e3 * point.best.seconds.high for point in points]
    axes[0].plot(workers, times, "o-", color="#4c78a8")
    axes[0].fill_between(workers, low, high, alpha=0.2, color="#4c78a8")
    axes[0].set_ylabel("milliseconds a step")
    axes[1].plot(workers, [100 * point.efficiency for point in points], "o-", color="#f58518")
    axes[1].set_ylabel("efficiency, %")
    axes[2].plot(workers, [point.cost for point in points], "o-", color="#54a24b")
    axes[2].set_ylabel("worker-seconds a step")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(workers, [str(count) for count in workers])
        axis.set_xlabel("workers")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    _save(figure, path)


def _figure(rows: int, columns: int, size: tuple[float, float], widths: dict[str, Any]) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'shoal[plots]'.") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, gridspec_kw=widths)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
