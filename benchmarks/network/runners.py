"""How a contestant trains on one host, step by step: a loop by hand around torch's DDP, or a `shoal.Run`.

All get the same initial weights, the same samples on the same worker in the same order, the same optimizer and rates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.contestants import Contestant
from benchmarks.workload.text import Size, kept_text, loss, make_reader, training_text
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.train.run import Run
from shoal.train.technique.learning_rate import advance, make_scheduler
from shoal.world.world import World


@dataclass(frozen=True)
class Case:
    """What is trained, and how long."""

    width: int
    depth: int
    batch: int
    """Samples of one worker in a step."""
    steps: int
    """As many as will be made at most: a falling rate ends there."""
    rate: float = 1e-3
    schedule: str = ""
    """Of the learning rate; empty keeps it as it is."""
    seed: int = 0

    @property
    def size(self) -> Size:
        """Of the model."""
        return Size(self.width, self.depth)

    def to_json(self) -> dict[str, Any]:
        """As a plain value, from which `Case(**value)` makes it again."""
        return asdict(self)


class Runner(ABC):
    """A contestant at work."""

    @abstractmethod
    def step(self) -> float:
        """Train one step on; the loss of it."""

    @abstractmethod
    def measure(self) -> float:
        """The mean loss over the text that nobody trains on. Every host calls it."""


def make_runner(contestant: Contestant, case: Case, world: World) -> Runner:
    """Build a contestant. Every host calls it."""
    return TorchRunner(contestant.name, case, world) if contestant.peer else ShoalRunner(contestant, case)


class ShoalRunner(Runner):
    """What a user writes, with another strategy."""

    def __init__(self, contestant: Contestant, case: Case) -> None:
        self._run = Run(
            model=make_reader(case.size, case.seed),
            loss=loss,
            optimizer=lambda params: torch.optim.AdamW(params, lr=case.rate, fused=True),
            data=training_text(2 * case.batch),
            global_batch=2 * case.batch,
            strategy=contestant.strategy,
            schedule=case.schedule or None,
            seed=case.seed,
            log=None,
            progress=False,
        )
        self._steps = self._run.steps(case.steps)

    def step(self) -> float:
        return next(self._steps).loss

    def measure(self) -> float:
        return self._run.evaluate(kept_text(), batch=64).loss


class TorchRunner(Runner):
    """What a user of torch writes."""

    def __init__(self, name: str, case: Case, world: World) -> None:
        self._world = world
        group = dist.new_group(backend="gloo")
        self._model = _wrap(make_reader(case.size, case.seed), name, group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=case.rate, fused=True)
        self._schedule = make_scheduler(case.schedule or None, self._optimizer, case.steps)
        self._loader = Loader(
            Feed(training_text(2 * case.batch), 2 * case.batch, world.rank, world.size, seed=case.seed)
        )
        self._number = 0

    def step(self) -> float:
        batch: Any = self._loader.take(self._number).batches[0]
        self._number += 1
        self._optimizer.zero_grad(set_to_none=True)
        total, count = loss(self._model(batch[0]), batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        mean = total.item() / count
        if self._schedule is not None:
            advance(self._schedule, mean)
        return mean

    def measure(self) -> float:
        rows = torch.arange(self._world.rank, len(kept_text()), self._world.size)
        sums = torch.zeros(2, dtype=torch.float64)
        inner: nn.Module = self._model.module
        with torch.no_grad():
            for part in torch.split(rows, 32):
                batch = kept_text()[part]
                total, count = loss(inner(batch[0]), (batch[0], batch[1]))
                sums += torch.tensor([total.item(), count], dtype=torch.float64)
        self._world.all_reduce(sums).wait()
        return float(sums[0] / sums[1])


def _wrap(model: nn.Module, name: str, group: dist.ProcessGroup) -> DistributedDataParallel:
    """The model under DDP, with the hook that a peer is named after."""
    if name.endswith("powersgd"):
        # Its second round starts when the first has come back, on a thread of gloo's: with several buckets under way
        # two hosts may start them in different orders, and gloo then ends the process. One bucket has one order.
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=10_000)
        # Two steps of whole gradients are the least it takes; left alone it would be a thousand.
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if name.endswith("fp16"):
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return wrapped
