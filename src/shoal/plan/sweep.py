"""What more workers would bring: the best plan for each number of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal import exchange
from shoal.errors import ConfigError
from shoal.plan.predict import Prediction, Predictor
from shoal.plan.search import Wanted, search
from shoal.plan.show import span
from shoal.types import Promise


@dataclass(frozen=True)
class Point:
    """One number of workers."""

    workers: int
    best: Prediction
    efficiency: float
    """Of the speed of one worker times their number."""

    @property
    def cost(self) -> float:
        """Seconds of workers for a step."""
        return self.workers * self.best.seconds.middle

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "workers": self.workers,
            "strategy": str(self.best.plan),
            "seconds": self.best.seconds.middle,
            "efficiency": self.efficiency,
            "worker_seconds": self.cost,
        }


def sweep(predictor: Predictor, workers: Sequence[int], wanted: Wanted) -> list[Point]:
    """The best plan of data parallel kinds for each number of workers that the batch can be divided among."""
    found: list[Point] = []
    first = 0.0
    for count in sorted(set(workers)):
        if count > predictor.setting.global_batch:
            continue
        each = predictor.setting.workers // predictor.setting.hosts
        hosts = (
            -(-count // each) if predictor.setting.hosts > 1 else 1
        )  # one host has no more cores for more workers
        there = Predictor(
            predictor.work,
            predictor.machine,
            replace(predictor.setting, workers=count, hosts=hosts),
            predictor.residuals,
        )
        plans = search(there, replace(wanted, only=wanted.only or _plain())).plans
        if plans:
            first = first or plans[0].seconds.middle * count
            found.append(Point(count, plans[0], first / (count * plans[0].seconds.middle)))
    return found


def _plain() -> tuple[str, ...]:
    """Exchanges that keep numbers, and need neither servers nor a division of the model."""
    return tuple(
        name
        for name, kind in exchange.TABLE.items()
        if kind.promise is Promise.EXACT and not kind.uses_servers
    )


def show_sweep(points: Sequence[Point]) -> str:
    """A line for each number of workers, and where communication stops to matter."""
    lines = ["workers  step       efficiency  worker-seconds  strategy"]
    for point in points:
        step = span(point.best.seconds.middle)
        lines.append(
            f"{point.workers:7}  {step:9}  {point.efficiency:10.0%}  {point.cost:14.3g}  {point.best.plan}"
        )
    return "\n".join(lines)


def enough_batch(predictor: Predictor, one: Prediction, share: float = 0.1) -> int | None:
    """The global batch at which communication is at most such a share of a step; None if no batch is that large."""
    batch = predictor.setting.global_batch
    for doubling in range(16):
        larger = Predictor(
            predictor.work,
            predictor.machine,
            replace(predictor.setting, global_batch=batch << doubling),
            predictor.residuals,
        )
        found = larger.predict(one.plan, one.accumulate)
        if found.communication <= share * found.seconds.middle:
            return batch << doubling
    return None


def parse_sweep(text: str) -> tuple[int, ...]:
    """Numbers of workers from a text.

    >>> parse_sweep("workers=1..16"), parse_sweep("workers=2,3")
    ((1, 2, 4, 8, 16), (2, 3))
    """
    name, _, values = text.partition("=")
    first, dots, last = values.partition("..")
    try:
        if name != "workers":
            raise ValueError(name)
        if not dots:
            found = tuple(int(value) for value in values.split(","))
        else:
            low, high = int(first), int(last)
            found = tuple(dict.fromkeys([*(low << n for n in range(24) if low << n <= high), high]))
        if not found or min(found) < 1 or max(found) > 10**6:
            raise ValueError(values)
    except ValueError:
        raise ConfigError(f"--sweep {text}: write it like workers=1..64, or workers=1,2,3.") from None
    return found
