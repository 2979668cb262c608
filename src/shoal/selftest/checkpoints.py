"""A checkpoint of one strategy, taken over by every other one and by one process, and trained on."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.checkpoint.folder import open_folder
from shoal.checkpoint.load import Reader
from shoal.errors import ConfigError
from shoal.selftest.row import Answer
from shoal.selftest.strategies import WITHIN, exact_strategies
from shoal.testing.parity import take_step, toy_parts
from shoal.testing.toys import TABLE as TOYS
from shoal.train.state.checkpoint_config import CheckpointConfig
from shoal.train.state.checkpoints import Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.step_context import StepContext
from shoal.world.world import World

TOY = TOYS["stack"]
ALONE = "solo"
BEFORE = 3
AFTER = 2


def subjects() -> list[str]:
    return exact_strategies()


def hand_over(folder: Path, world: World, subject: str) -> Answer:
    """Train, save, load under all strategies in turn, train on: all end as one process does. Collective."""
    if len(set(world.hosts)) > 1:
        raise ConfigError("hosts have no folder in common that is known here; not tried with several hosts.")
    wanted = _train_alone(world)
    parts = toy_parts(world, TOY, subject)
    try:
        for step in range(BEFORE):
            take_step(parts, step)
        checkpoints = Checkpoints(parts, subject, CheckpointConfig(folder))
        name = subject.partition("(")[0]
        checkpoints.save(name, Progress(BEFORE))
        checkpoints.wait()
    finally:
        parts.exchange.close()
    worst, at = 0.0, subject
    for other in [*exact_strategies(), ALONE]:
        among = World.alone(world.device) if other is ALONE else world
        gap = _go_on(among, other, world.size // among.size, folder / name, wanted)
        if not gap <= worst:
            worst, at = gap, other
    world.barrier()
    numbers = {"gap": worst}
    if worst <= WITHIN:
        return Answer(
            True,
            f"goes on under {len(exact_strategies())} others as one process does, to {worst:.0e}",
            numbers,
        )
    return Answer(
        False,
        f"differs by {worst:.1e} from one process when loaded under {at}; {WITHIN:g} is allowed",
        numbers,
    )


def _go_on(world: World, strategy: str, parts: int, folder: Path, wanted: dict[str, torch.Tensor]) -> float:
    """How far it ends from `wanted`. `parts`: micro-batches of each worker."""
    context = toy_parts(world, TOY, strategy, accumulate=parts)
    try:
        # No folder of its own: it only reads.
        Checkpoints(context, strategy, CheckpointConfig()).take_over(Reader.of(open_folder(folder)))
        _train(context, BEFORE, BEFORE + AFTER)
        found = context.whole.parameters()
    finally:
        context.exchange.close()
    return max(
        float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1.0)) for n in wanted
    )


def _train_alone(world: World) -> dict[str, torch.Tensor]:
    context = toy_parts(World.alone(world.device), TOY, ALONE, accumulate=world.size)
    _train(context, 0, BEFORE + AFTER)
    return context.whole.parameters()


def _train(context: StepContext, first: int, stop: int) -> None:
    for step in range(first, stop):
        take_step(context, step)
