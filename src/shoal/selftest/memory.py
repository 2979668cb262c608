"""What workers hold, against what `Facts.cost` says before anything runs."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.cost import Cost
from shoal.errors import ConfigError
from shoal.exchange import TABLE as EXCHANGES
from shoal.selftest.row import Answer
from shoal.selftest.strategies import exchanges, name_of
from shoal.testing.parity import take_step
from shoal.testing.toys import adamw
from shoal.train.build import build
from shoal.train.profile_run import cost_of
from shoal.train.run_config import RunConfig
from shoal.train.step_context import StepContext
from shoal.train.watch.memory import bytes_under, memory_by_kind
from shoal.world.world import World

WITHIN = 0.05
"""Of each kind of memory."""
SMALL = 0.01
"""Of all of it: a kind that is less than this, such as two step counts, may be off by more."""
WIDTH = 384
BLOCKS = 6
KINDS = ("parameters", "gradients", "optimizer")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Blocks(nn.Module):
    """Fourteen megabytes in fp32, in blocks that zero3 gathers one by one; few activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A sum over samples, and how many there are."""
    return (output - batch[1]).square().sum(), len(output)


def subjects() -> list[str]:
    return [f"{name}(2)" if EXCHANGES[name].updates_alone else name for name in exchanges()]


def compare(world: World, subject: str) -> Answer:
    """Hold what is alive when an update begins beside the formula, kind by kind. Collective."""
    if EXCHANGES[name_of(subject)].uses_servers:
        raise ConfigError(
            "servers hold gradients and optimizer state, in processes of their own; not measured here."
        )
    said = cost_of(replace(_config(), strategy=subject), world.size, world.rank, world.hosts)
    context = build(replace(_config(), strategy=subject), world, record="")[1]
    try:
        held: dict[str, int] = {}

        def look(gradients: object) -> None:
            del gradients
            held.update(_held(context))

        take_step(context, 0)
        take_step(context, 1)
        context.on_gradients = look
        take_step(context, 2)
    finally:
        context.on_gradients = None
        context.exchange.close()
    return _answer(said, held, world.device)


def _answer(said: Cost, held: dict[str, int], device: torch.device) -> Answer:
    numbers = {f"{kind} held": float(held[kind]) for kind in KINDS}
    numbers |= {f"{kind} said": float(said.resident.get(kind, 0)) for kind in KINDS}
    if device.type == "cuda":
        numbers["peak on the card"] = float(torch.cuda.max_memory_allocated(device))
    for kind in KINDS:
        formula = said.resident.get(kind, 0)
        if abs(formula - held[kind]) > max(WITHIN * held[kind], SMALL * said.total):
            why = f"the formula says {formula / 1e6:.2f} MB of {kind}, and {held[kind] / 1e6:.2f} MB are held"
            return Answer(False, why, numbers)
    total = sum(held[kind] for kind in KINDS)
    return Answer(True, f"{total / 1e6:.1f} MB as the formula says", numbers)


def _config() -> RunConfig:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(48, WIDTH, generator=generator, dtype=torch.float32, device="cpu"),
        torch.randn(48, 3, generator=generator, dtype=torch.float32, device="cpu"),
    )
    return RunConfig(
        model=Blocks,
        loss=squares,
        optimizer=adamw,
        data=data,
        global_batch=16,
        seed=3,
    )


def _held(context: StepContext) -> dict[str, int]:
    """Bytes of the memory under what a worker holds."""
    gc.collect()
    gradients = bytes_under(shard.tensor for shard in context.exchange.gradient_shards())
    return {**dict.fromkeys(KINDS, 0), **memory_by_kind(context), "gradients": gradients}
