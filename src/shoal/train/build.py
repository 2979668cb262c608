"""From what the user gave to the parts of a step. The only file that knows every slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal import seeds
from shoal.data.batch import Collate, Inputs, default_inputs
from shoal.data.loader import Feed, Loader
from shoal.data.source import Source
from shoal.errors import ConfigError
from shoal.exchange import make_exchange
from shoal.exchange.base import MakeOptimizer, Setup
from shoal.plan.check import check_text
from shoal.report.meter import Meter
from shoal.train import precision
from shoal.train.clip import make_clip
from shoal.train.loss import Loss
from shoal.train.record import Recorder
from shoal.train.step import Parts
from shoal.types import Plan
from shoal.world.world import World

MakeModel = Callable[[], nn.Module]

_MODEL = "give an nn.Module or a function of no arguments that returns one."


@dataclass(frozen=True)
class Order:
    """What the user asked for, after overrides."""

    model: nn.Module | MakeModel
    loss: Loss
    optimizer: MakeOptimizer
    data: Source
    global_batch: int
    strategy: str = "ddp"
    precision: str = "fp32"
    clip: float | str | None = None
    accumulate: int = 1
    seed: int = 0
    inputs: Inputs | None = None
    collate: Collate | None = None
    shuffle: bool = True
    loader_workers: int = 0
    on_nan: str = "stop"
    deterministic: bool = False


def build(order: Order, world: World, record: str) -> tuple[Plan, Parts]:
    """Make every part of a step. Every rank calls it."""
    plan = check_text(order.strategy, world.size)
    chosen = precision.TABLE.look_up(order.precision)
    _check_kinds(order)
    _check_numbers(order, world)
    if order.deterministic:
        torch.use_deterministic_algorithms(True)
    clip = make_clip(order.clip)
    feed = Feed(
        order.data,
        order.global_batch,
        world.rank,
        world.size,
        order.accumulate,
        order.seed,
        order.shuffle,
        order.collate,
        order.loader_workers,
    )
    loader = Loader(feed)
    model = _make_model(order, chosen.model).to(world.device)
    recorder = Recorder(record, world.rank) if record else None
    if recorder is not None:
        recorder.start(model)
    _agree_on_model(model, world)
    setup = Setup(model, order.optimizer, world, order.accumulate, order.deterministic)
    parts = Parts(
        world=world,
        model=model,
        loss=order.loss,
        inputs=order.inputs or default_inputs,
        loader=loader,
        exchange=make_exchange(plan.exchange, setup),
        precision=chosen,
        scale=precision.LossScale(dynamic=chosen.scaled),
        clip=clip,
        skip_nan=order.on_nan == "skip",
        seed=order.seed,
        meter=Meter(),
        recorder=recorder,
        count_per_sample=1.0,
    )
    return plan, parts


def _check_kinds(order: Order) -> None:
    if not isinstance(order.model, nn.Module) and not callable(order.model):
        raise ConfigError(f"model= is a {type(order.model).__name__}; {_MODEL}")
    if not callable(order.optimizer):
        raise ConfigError(
            f"optimizer= is a {type(order.optimizer).__name__}; give a function of the parameters that returns "
            "a torch optimizer, such as lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    if not callable(order.loss):
        raise ConfigError(
            f"loss= is a {type(order.loss).__name__}; give a function (output, batch) -> (sum, count)."
        )
    for name, given in (("inputs", order.inputs), ("collate", order.collate)):
        if given is not None and not callable(given):
            raise ConfigError(f"{name}= is a {type(given).__name__}; give a function.")


def _check_numbers(order: Order, world: World) -> None:
    if order.on_nan not in ("stop", "skip"):
        raise ConfigError(f"on_nan='{order.on_nan}'; it is 'stop' or 'skip'.")
    if order.accumulate < 1:
        raise ConfigError(f"accumulate={order.accumulate}; it must be at least 1.")
    if order.loader_workers < 0:
        raise ConfigError(f"loader_workers={order.loader_workers}; it must be at least 0.")
    needed = world.size * order.accumulate
    if order.global_batch < needed:
        raise ConfigError(
            f"global_batch={order.global_batch} cannot be cut into {world.size} workers × {order.accumulate} "
            f"micro-batches = {needed} parts; use global_batch={needed} or more, or fewer workers."
        )


def _make_model(order: Order, dtype: torch.dtype | None) -> nn.Module:
    """Build the model from its factory, with initial values keyed by name; or take the one that was given."""
    given = order.model

    def make() -> nn.Module:
        made: Any = given()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model= made a {type(made).__name__}; {_MODEL}")
        return made

    model = given if isinstance(given, nn.Module) else seeds.build_by_name(make, order.seed)
    return model.train() if dtype is None else model.to(dtype).train()


def _agree_on_model(model: nn.Module, world: World) -> None:
    """All ranks must have the same parameters and buffers; then all take rank 0's values."""
    if world.size == 1:
        return
    mine = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]
    mine += [[n, list(b.shape), str(b.dtype), True] for n, b in model.named_buffers()]
    everyone = world.gather_values(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ConfigError(_disagreement(everyone[0], theirs, rank))
    with torch.no_grad():
        tensors = [*model.parameters(), *model.buffers()]
        for handle in [world.broadcast(t.detach()) for t in tensors if t.numel()]:
            handle.wait()


def _disagreement(first: list[Any], other: list[Any], rank: int) -> str:
    remedy = "build the same model on every rank."
    for a, b in zip(first, other, strict=False):
        if a != b:
            return f"ranks disagree on the model: rank 0 has {_line(a)}, rank {rank} has {_line(b)}; {remedy}"
    longer, owner = (first, 0) if len(first) > len(other) else (other, rank)
    extra = longer[min(len(first), len(other))]
    return f"ranks disagree on the model: only rank {owner} has {_line(extra)}; {remedy}"


def _line(entry: list[Any]) -> str:
    name, shape, dtype, learns = entry
    return f"'{name}' {shape} {dtype.removeprefix('torch.')}{'' if learns else ' frozen'}"
