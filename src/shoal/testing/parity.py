"""Does a strategy compute what one process computes? The same toy both ways, compared number by number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from shoal.testing.toys import Toy, classify
from shoal.train.build import Order, build
from shoal.train.step import Parts, run_step
from shoal.world.world import World


@dataclass(frozen=True)
class Trace:
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
) -> Trace:
    """Train a toy in this world; every rank calls it."""
    parts = toy_parts(world, toy, strategy, accumulate, precision, deterministic)
    losses = [run_step(parts, number).loss for number in range(steps)]
    parameters = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    return Trace(losses, parameters, parts.exchange.optimizer_state())


def toy_parts(
    world: World,
    toy: Toy,
    strategy: str,
    accumulate: int | None = None,
    precision: str = "fp64",
    deterministic: bool = False,
) -> Parts:
    """What it takes to train a toy, step by step."""
    order = Order(
        model=toy.model,
        loss=classify,
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
    return build(order, world, record="")[1]


def largest_difference(a: Trace, b: Trace) -> tuple[float, str]:
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
