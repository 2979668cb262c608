"""Does a strategy compute what one process computes? The same toy both ways, compared number by number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shoal.exchange.contract import Exchange
from shoal.testing.toys import Toy
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.train.step_context import StepContext
from shoal.types import StepReport
from shoal.world.world import World


@dataclass(frozen=True)
class ParityTrace:
    """What a run left behind."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def run_toy(
    world: World,
    toy: Toy,
    strategy: str,
    steps: int = 20,
    accumulate: int | None = None,
    precision: str = "fp64",
    deterministic: bool = False,
) -> ParityTrace:
    """Train a toy in this world; every rank calls it."""
    return trace_run(world, toy_order(toy, strategy, accumulate, precision, deterministic), steps)


def trace_run(world: World, config: RunConfig, steps: int) -> ParityTrace:
    """Train what is ordered in this world; every rank calls it."""
    parts = build(config, world, record="")[1]
    try:
        losses, work = [], parts.exchange.work
        # Servers hand out steps until there are none before `steps`; elsewhere a step without a stop is only a step.
        stop = steps if parts.exchange.uses_servers else None
        done = 0
        while (stop or done < steps) and (view := work.next(done, stop)) is not None:
            report = run_step(parts, view)
            losses.append(report.loss)
            done = max(done, report.number)
        return ParityTrace(losses, parts.whole.parameters(), parts.whole.optimizer_state())
    finally:
        parts.exchange.close()


def take_step(context: StepContext, number: int) -> StepReport:
    """Train on one step by its number; a loop asks the work source which one comes next."""
    view = context.exchange.work.next(number, None)
    assert view is not None, f"step {number} is not to be had"
    return run_step(context, view)


def toy_parts(
    world: World,
    toy: Toy,
    strategy: str,
    accumulate: int | None = None,
    precision: str = "fp64",
    deterministic: bool = False,
) -> StepContext:
    """What it takes to train a toy, step by step."""
    return build(toy_order(toy, strategy, accumulate, precision, deterministic), world, record="")[1]


def toy_order(
    toy: Toy,
    strategy: str,
    accumulate: int | None = None,
    precision: str = "fp64",
    deterministic: bool = False,
) -> RunConfig:
    """A toy as `build` takes it; `dataclasses.replace` changes what else there is."""
    return RunConfig(
        model=toy.model,
        loss=toy.loss,
        optimizer=toy.optimizer,
        data=toy.data(),  # type: ignore[arg-type]
        global_batch=toy.global_batch,
        strategy=strategy,
        precision=precision,
        clip=toy.clip,
        accumulate=toy.accumulate if accumulate is None else accumulate,
        seed=3,
        deterministic=deterministic,
    )


def give_parameters(exchange: Exchange, values: Mapping[str, torch.Tensor]) -> None:
    """Fill what an exchange holds with whole values, such as its `parameters` gives without tensor parallel."""
    with torch.no_grad():
        for held in exchange.parameter_shards():
            part = values[held.name].reshape(-1)[held.start : held.start + held.tensor.numel()]
            held.tensor.copy_(part.view(held.tensor.shape))


def largest_difference(a: ParityTrace, b: ParityTrace) -> tuple[float, str]:
    """The largest difference between two runs, relative to the size of the numbers, and where it is."""
    worst = (0.0, "nowhere")
    for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)):
        worst = _worse(worst, abs(x - y) / max(abs(x), 1.0), f"loss of step {i + 1}")
    for name, value in a.parameters.items():
        gap = (value - b.parameters[name]).abs().max() / value.abs().max().clamp(min=1.0)
        worst = _worse(worst, float(gap), name)
    return worst


def _worse(worst: tuple[float, str], gap: float, where: str) -> tuple[float, str]:
    if math.isnan(gap):  # compares false with everything, and so would never be the largest
        gap = math.inf
    return (gap, where) if gap > worst[0] else worst
