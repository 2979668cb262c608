"""Every strategy that fits these workers, against one process on toys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shoal.compress import TABLE as COMPRESSORS
from shoal.config import degree_of, parse_strategy
from shoal.errors import ConfigError
from shoal.exchange import TABLE as EXCHANGES
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.pipeline import TABLE as SCHEDULES
from shoal.plan.check import check_text, pipeline_options, promise_of
from shoal.selftest.row import Answer
from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.toys import TABLE as TOYS
from shoal.types import Plan, Promise
from shoal.world.world import World

WITHIN = 1e-9
"""Of float64, relative: what `shoal verify` allows."""
NARROW = 5e-2
"""Of bf16 and fp16."""
MAY_LOSE = 0.5
"""Of what one process learns in as many steps, where equal numbers are not promised."""
STEPS = 6
LESSONS = 24
"""Steps, where it is learning that is compared."""
SPLIT = "microbatches=2, split=blocks.2"
AT = " at "
"""Between a strategy and a number format other than fp64."""


@dataclass(frozen=True)
class Comparison:
    """A strategy on toys, in a number format."""

    strategy: str
    toys: tuple[str, ...]
    precision: str = "fp64"

    @property
    def subject(self) -> str:
        return self.strategy if self.precision == "fp64" else f"{self.strategy}{AT}{self.precision}"


def comparisons() -> list[Comparison]:
    """Every exchange, compressor, schedule and number format at least once."""
    alone = [Comparison(_written(name), _toys(name)) for name in exchanges()]
    lossy = [Comparison(f"ddp + {name}", ("odd",)) for name in COMPRESSORS if name != "none"]
    cut = [Comparison(f"{name} * tp2", ("stack",)) for name in ("ddp", "zero1", "zero3")]
    for name, schedule in SCHEDULES.items():
        split = SPLIT if schedule.stages_per_rank == 1 else "microbatches=2"
        cut.append(Comparison(f"ddp * pp2({name}, {split})", ("stack",)))
    cut += [Comparison(f"zero3 * pp2({SPLIT})", ("stack",))]
    cut += [Comparison(f"zero1 * tp2 * pp2({SPLIT})", ("stack",))]
    narrow = [Comparison(name, ("odd",), p) for name in ("ddp", "zero3") for p in ("bf16", "fp16")]
    return [*alone, *lossy, *cut, *narrow]


def subjects() -> list[str]:
    return [comparison.subject for comparison in comparisons()]


def compare(world: World, subject: str) -> Answer:
    """Train each toy under the strategy and in one process on the same device. Collective."""
    asked = next(comparison for comparison in comparisons() if comparison.subject == subject)
    plan = check_text(asked.strategy, world.size)
    parts = _parts(plan, world.size)
    if promise_of(plan) is Promise.EXACT:
        return _equal(world, asked, parts)
    return _learns(world, asked, parts, promise_of(plan))


def _equal(world: World, asked: Comparison, parts: int) -> Answer:
    """Losses and parameters, number by number."""
    worst, where = 0.0, ""
    for name in asked.toys:
        found = run_toy(world, TOYS[name], asked.strategy, STEPS, precision=asked.precision)
        gap, place = largest_difference(_alone(world.device, name, asked.precision, parts, STEPS), found)
        if not gap <= worst:
            worst, where = gap, f"{place} of {name}"
    allowed = WITHIN if asked.precision == "fp64" else NARROW
    if worst <= allowed:
        return Answer(True, f"equals one process to {worst:.0e}", {"gap": worst})
    said = f"differs by {worst:.1e} from one process, most in {where}; {allowed:g} is allowed"
    return Answer(False, said, {"gap": worst})


def _learns(world: World, asked: Comparison, parts: int, promise: Promise) -> Answer:
    """How much of what one process learns is lost: at the end, all workers have what all have learned."""
    toy = asked.toys[0]
    found = run_toy(world, TOYS[toy], asked.strategy, LESSONS, precision=asked.precision)
    wanted = _alone(world.device, toy, asked.precision, parts, LESSONS)
    begin, end, mine = _mean(wanted.losses[:2]), _mean(wanted.losses[-4:]), _mean(found.losses[-4:])
    lost = (mine - end) / (begin - end)
    if not math.isfinite(lost):
        return Answer(False, f"its loss is {mine} after {LESSONS} steps")
    said = f"{promise.name}: its loss goes from {begin:.3f} to {mine:.3f}, that of one process to {end:.3f}"
    if lost <= MAY_LOSE:
        return Answer(True, said, {"lost": lost})
    return Answer(False, f"{said}: it lost {lost:.0%} of what there was to learn", {"lost": lost})


def _written(name: str) -> str:
    """An exchange with several buckets even on a toy, and with options where it needs them."""
    chosen = EXCHANGES[name]
    if issubclass(chosen, BucketedExchange) and not (chosen.updates_alone or chosen.uses_servers):
        return f"{name}(bucket_mb=0.002)"
    return f"{name}(2)" if chosen.updates_alone else name


def _toys(name: str) -> tuple[str, ...]:
    """A launcher has servers for one run, and of what only converges one curve is enough."""
    one = EXCHANGES[name].uses_servers or EXCHANGES[name].promise is not Promise.EXACT
    return ("odd",) if one else ("odd", "stack")


def _parts(plan: Plan, workers: int) -> int:
    """Micro-batches of a step over all replicas."""
    replicas = workers // (degree_of(plan.tensor) * degree_of(plan.pipeline))
    return replicas * pipeline_options(plan).microbatches


def _alone(device: torch.device, toy: str, precision: str, parts: int, steps: int) -> ParityTrace:
    chosen = TOYS[toy]
    accumulate = parts * chosen.accumulate
    return run_toy(World.alone(device), chosen, "solo", steps, accumulate=accumulate, precision=precision)


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def exact_strategies() -> list[str]:
    """Exchanges whose state can be handed over bit by bit, one worker's state being the same as all workers'."""
    exact = [name for name in exchanges() if EXCHANGES[name].promise is Promise.EXACT]
    return [_written(name) for name in exact if not EXCHANGES[name].uses_servers]


def exchanges() -> list[str]:
    """The exchanges that several workers can have."""
    return [name for name in EXCHANGES if _takes_two(_written(name))]


def _takes_two(strategy: str) -> bool:
    try:
        check_text(strategy, 2)
    except ConfigError:
        return False
    return True


def name_of(strategy: str) -> str:
    """The exchange of a strategy, by its name alone."""
    return parse_strategy(strategy).exchange.name
