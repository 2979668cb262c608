"""Does a strategy compute what one process computes? The same toy both ways, compared number by number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shoal.exchange.base import Exchange
from shoal.testing.toys import Toy
from shoal.train.build import build
from shoal.train.order import Order
from shoal.train.parts import Parts
from shoal.train.step import run_step
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
    return run_order(world, toy_order(toy, strategy, accumulate, precision, deterministic), steps)


def run_order(world: World, order: Order, steps: int) -> Trace:
    """Train what is ordered in this world; every rank calls it."""
    parts = build(order, world, record="")[1]
    try:
        losses = [run_step(parts, number).loss for number in range(steps)]
        return Trace(losses, parts.whole.parameters(), parts.whole.optimizer_state())
    finally:
        parts.exchange.close()


def toy_parts(
    world: World,
    toy: Toy,
    strategy: str,
    accumulate: int | None = None,
    precision: str = "fp64",
    deterministic: bool = False,
) -> Parts:
    """What it takes to train a toy, step by step."""
    return build(toy_order(toy, strategy, accumulate, precision, deterministic), world, record="")[1]


def toy_order(
    toy: Toy,
    strategy: str,
    accumulate: int | None = None,
    precision: str = "fp64",
    deterministic: bool = False,
) -> Order:
    """A toy as `build` takes it; `dataclasses.replace` changes what else there is."""
    return Order(
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
        for held in exchange.held():
            part = values[held.name].reshape(-1)[held.start : held.start + held.tensor.numel()]
            held.tensor.copy_(part.view(held.tensor.shape))


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
