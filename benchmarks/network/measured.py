"""What the contest found: plain numbers, and the few that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.network.contestants import BASELINE

NOTE = (
    "Losses do not depend on the network, so they are those of a smaller model, trained once by each contestant "
    "without a limit on the rate; loss against time is the loss after so many steps at that many times the step "
    "time measured at the rate."
)


@dataclass(frozen=True)
class Lap:
    """Some steps in a row, between turns of the others."""

    steps: int
    seconds: float
    bytes: float
    """That left a host, as the kernel counts them; the mean of the two hosts."""


@dataclass(frozen=True)
class Timed:
    """A contestant at one rate."""

    period: int
    laps: tuple[Lap, ...]

    @property
    def step_seconds(self) -> float:
        """The median over the laps; over a whole period where steps differ, there is only the mean."""
        if self.period > 1:
            return sum(lap.seconds for lap in self.laps) / self.steps
        return statistics.median(lap.seconds / lap.steps for lap in self.laps)

    @property
    def step_bytes(self) -> float:
        """Bytes that a host sent for each step."""
        return sum(lap.bytes for lap in self.laps) / self.steps

    @property
    def steps(self) -> int:
        """How many were measured."""
        return sum(lap.steps for lap in self.laps)


@dataclass(frozen=True)
class AtRate:
    """Everybody at one rate."""

    rate: int
    """Bits a second that the wire was limited to."""
    probed: float
    """Bits a second that it carried when asked for more."""
    timed: dict[str, Timed]
    said: tuple[str, ...] = ()
    """What Shoal said meanwhile, such as why a compressor stays on."""

    def speed(self, name: str) -> float:
        """How many times the speed of torch DDP."""
        return self.timed[BASELINE].step_seconds / self.timed[name].step_seconds

    def slowdown(self, name: str, other: str) -> float:
        """The median over the rounds of how many times another's time one took: load meets both alike."""
        pairs = zip(self.timed[name].laps, self.timed[other].laps, strict=False)
        return statistics.median((a.seconds / a.steps) / (b.seconds / b.steps) for a, b in pairs)


@dataclass(frozen=True)
class Learned:
    """A contestant's losses on the smaller model."""

    losses: tuple[float, ...]
    """Of each step, on the samples of that step; the mean of the two hosts."""
    final: float
    """At the end, on text that nobody trains on."""


@dataclass(frozen=True)
class Measured:
    """Everything that one run of the benchmark found."""

    settings: dict[str, Any]
    rates: tuple[AtRate, ...]
    learned: dict[str, Learned]
    failed: dict[str, str] = field(default_factory=dict)
    """Who could not take part to the end, and why."""
    note: str = NOTE

    @property
    def names(self) -> list[str]:
        """Everybody who was measured, in the order in which they were named."""
        seen = [name for at in self.rates for name in at.timed]
        return list(dict.fromkeys([*seen, *self.learned]))

    def gap(self, name: str, plain: str = BASELINE) -> float:
        """How far a final loss is above the one without compression, relative to it."""
        return self.learned[name].final / self.learned[plain].final - 1.0

    def to_json(self) -> dict[str, Any]:
        """As plain values, from which `measured_from` makes it again."""
        return asdict(self)


def measured_from(found: Mapping[str, Any]) -> Measured:
    """Read back what `Measured.to_json` gave."""
    rates = [
        AtRate(
            at["rate"],
            at["probed"],
            {
                name: Timed(one["period"], tuple(Lap(**lap) for lap in one["laps"]))
                for name, one in at["timed"].items()
            },
            tuple(at["said"]),
        )
        for at in found["rates"]
    ]
    learned = {name: Learned(tuple(one["losses"]), one["final"]) for name, one in found["learned"].items()}
    return Measured(found["settings"], tuple(rates), learned, found["failed"], found["note"])
