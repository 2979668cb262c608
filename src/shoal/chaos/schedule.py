"""Which fault comes when: drawn from a seed, kept as JSON, the same for the same seed, steps and workers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shoal.errors import ConfigError

KINDS = ("kill", "stop", "delay", "restart", "full", "cut")
"""SIGKILL; SIGSTOP for a while; many short stops; SIGKILL of the launcher and the same command again; a full disk under
the checkpoints; a link between two hosts that is down for a while."""
SECONDS = {"stop": (0.2, 1.5), "delay": (0.3, 1.0), "full": (0.3, 1.0), "cut": (0.2, 1.0)}
GAP = 2
"""Steps between two faults: what is lost twice in one place ends a run, and so it should."""
LAST = 5
"""Of the last fifth of the steps nothing is disturbed: the run could be over before the fault has struck."""
FORMAT = 1


@dataclass(frozen=True)
class Fault:
    """One fault: it strikes as soon as a worker is in this step."""

    kind: str
    step: int
    rank: int
    """Whom it strikes; for `cut` and `full` it means nothing."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """All faults of a run, by step."""

    seed: int
    steps: int
    workers: int
    faults: tuple[Fault, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read back what `to_json` wrote; ConfigError for anything else."""
        try:
            found = json.loads(text)
            faults = [
                Fault(str(f["kind"]), int(f["step"]), int(f["rank"]), float(f["seconds"]))
                for f in found["faults"]
            ]
            made = Schedule(int(found["seed"]), int(found["steps"]), int(found["workers"]), tuple(faults))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"this is no schedule of `shoal chaos` ({type(error).__name__}: {error})."
            ) from None
        for fault in made.faults:
            if fault.kind not in KINDS or not 0 <= fault.rank < made.workers or not 0 <= fault.seconds < 60:
                raise ConfigError(f"{fault} is no fault for {made.workers} workers.")
        return made


def draw(seed: int, steps: int, workers: int, counts: Mapping[str, int]) -> Schedule:
    """Faults of these kinds in a run of so many steps.

    >>> made = draw(7, 100, 4, {"kill": 2, "stop": 1})
    >>> [fault.kind for fault in made.faults], made == draw(7, 100, 4, {"kill": 2, "stop": 1})
    (['kill', 'kill', 'stop'], True)
    """
    wanted = sum(counts.values())
    places = range(2, steps - steps // LAST, GAP)
    if wanted > len(places):
        least = GAP * wanted * LAST // (LAST - 1) + LAST
        raise ConfigError(
            f"{wanted} faults need at least {least} steps, and this run has {steps}; give --steps, or fewer faults."
        )
    draws = random.Random(f"{seed} {steps} {workers} {sorted(counts.items())}")
    kinds = [kind for kind in KINDS for _ in range(counts.get(kind, 0))]
    draws.shuffle(kinds)
    faults = []
    for kind, step in zip(kinds, sorted(draws.sample(places, wanted)), strict=True):
        low, high = SECONDS.get(kind, (0.0, 0.0))
        faults.append(Fault(kind, step, draws.randrange(workers), round(draws.uniform(low, high), 3)))
    return Schedule(seed, steps, workers, tuple(faults))
