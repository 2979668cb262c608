"""Weights beside the weights: an exponential moving average (EMA) or a plain mean (SWA) of a run's weights.

Each worker keeps the average of an equal share of the parameters, and moves it once a step, when the new values are
there. Where a worker holds only its rows of each parameter, it averages those. So an average costs the memory of one
more copy of the model, divided by the workers, and no communication before somebody looks at it.

When to use: the last steps of a run are noisy; the average is evaluated, and saved, in place of the weights.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Izmailov et al., "Averaging Weights
Leads to Wider Optima and Better Generalization", UAI 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange, ExtraState, LocalShard, trainable
from shoal.exchange.local_tensor import local
from shoal.recipe.contract import Recipe, Running, RunView
from shoal.table import Table
from shoal.torch_private import foreach_lerp_
from shoal.world.world import World

_REFUSES = {
    "uses_servers": "servers hold the parameters, and a worker that comes, goes or is slow does not see all of their "
    "values; leave ema out, or use ddp, a zero or shared",
    "updates_alone": "each worker trains alone between two meetings, and no weights are there to average; leave ema "
    "out, or use ddp, a zero or shared",
}

_GAP = 64
"""Elements between two parameters of one vector that are averaged with them, so that it is one operation."""


@dataclass(frozen=True)
class Ema(Recipe):
    """average = decay × average + (1 - decay) × weights, from the initial weights on."""

    summary: ClassVar[str] = "an exponential moving average of the weights, beside them"
    refuses: ClassVar[Mapping[str, str]] = _REFUSES
    decay: float
    every: int = 1
    """Steps between two updates of the average."""
    warmup: bool = False
    """Begin with a short memory: the decay of update n, from 0 on, is at most (1 + n) / (10 + n)."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or self.every < 1:
            raise ConfigError(
                f"ema: decay={self.decay:g}, every={self.every}; a decay is from 0 to below 1, such as 0.999, and "
                "every at least 1."
            )

    def run(self, view: RunView) -> Running:
        return Averages(self, view.exchange, view.mesh.data)

    def weight(self, step: int, updates: int) -> float:
        """How much the weights of this step count, the first being 1; 0 where they do not."""
        if step % self.every:
            return 0.0
        return 1 - (min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay)


@dataclass(frozen=True)
class Swa(Recipe):
    """The mean of the weights after step `start`, and after each `every` steps from then on."""

    summary: ClassVar[str] = "the mean of the weights from a step on, beside them"
    refuses: ClassVar[Mapping[str, str]] = _REFUSES
    start: int
    every: int = 1

    def __post_init__(self) -> None:
        if self.start < 1 or self.every < 1:
            raise ConfigError(f"swa: start={self.start}, every={self.every}; both are at least 1.")

    def run(self, view: RunView) -> Running:
        return Averages(self, view.exchange, view.mesh.data)

    def weight(self, step: int, updates: int) -> float:
        """How much the weights of this step count, the first being 1; 0 where they do not."""
        counts = step >= self.start and (step - self.start) % self.every == 0
        return 1 / (updates + 1) if counts else 0.0


Average = Ema | Swa
_KINDS: Table[type[Average]] = Table("average", {"ema": Ema, "swa": Swa})


def make_average(given: float | str | None) -> Average | None:
    """What `ema=` of `Run` stands for: a number is a decay; text names the way.

    >>> make_average(0.999), make_average("swa(start=100)")
    (Ema(decay=0.999, every=1, warmup=False), Swa(start=100, every=1))
    """
    if given is None:
        return None
    if not isinstance(given, str):
        return Ema(float(given))
    choice = parse_choice(given, "ema")
    made: Average = fill_options(choice, _KINDS.look_up(choice.name))
    return made


class Averages(Running):
    """The average that a run keeps. All but `published` is collective."""

    def __init__(self, rule: Average, exchange: Exchange, data: World) -> None:
        """`data`: those who hold the same parameters for other samples."""
        self.name = type(rule).__name__.lower()
        self._rule = rule
        self._exchange = exchange
        self._data = data
        self._updates = 0
        self._parts: dict[str, tuple[int, torch.Tensor]] = {}
        """Of which parameters this worker has the average: from which element on, and its numbers."""
        self._averages: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        """What is averaged, in as few tensors as memory allows."""
        self._address = 0
        self._check(exchange)
        self._parameters = trainable(exchange.module)
        self._shares = self._divide()
        self._probe = next(iter(self._parameters.values()), None)
        self._follow()

    def published(self, step: int) -> None:
        """The weights of this step, counted from 0, are there."""
        weight = self._rule.weight(step + 1, self._updates)
        if weight == 0.0:
            return
        self._follow()
        self._updates += 1
        if not self._values:
            return  # a share of nothing
        values = self._values
        if self._converts:
            values = [value.to(a.dtype) for value, a in zip(values, self._averages, strict=True)]
        foreach_lerp_(self._averages, values, weight)

    @contextmanager
    def in_place(self, weights: str | None) -> Iterator[None]:
        """While it lasts, the model has the average for its weights, if that is what `weights` asks for. Collective."""
        if weights is None:
            yield
            return
        if weights != self.name:
            raise ConfigError(f"weights='{weights}': this run keeps {self.name}.")
        if self._updates == 0 and isinstance(self._rule, Swa):
            yield  # nothing has been averaged: the weights are all there is
            return
        here = self._here()
        own = {name: tensor.clone() for name, tensor in here.items()}
        found = self._gather()
        self._data.barrier()  # workers may share one copy: nobody writes before all have read
        self._fill(here, found)
        self._data.barrier()
        try:
            yield
        except BaseException:  # others may not come to a barrier
            self._fill(here, own)
            raise
        self._data.barrier()
        self._fill(here, own)
        self._data.barrier()
        self._here()  # what was gathered of the average is let go

    # What a checkpoint keeps.

    def extras(self) -> list[ExtraState]:
        """The average as it lies on this worker."""
        self._follow()
        held = [LocalShard(name, start, average) for name, (start, average) in self._parts.items()]
        return [ExtraState(self.name, shard, alike=True) for shard in held]

    def state(self) -> dict[str, object]:
        """What else to know of it."""
        return {"name": self.name, "updates": self._updates}

    def go_on(self, state: Mapping[str, object] | None) -> str:
        """After `extras` have been filled from a checkpoint; begins with the weights where it had no such average."""
        if state is not None and state["name"] == self.name:
            self._updates = int(str(state["updates"]))
            return ""
        here = self._here()
        self._updates = 0
        for name, (start, average) in self._parts.items():
            value = here[name]
            whole = value.numel() == average.numel()
            average.copy_(value if whole else value.view(-1)[start : start + average.numel()])
        return f"it has no {self.name}, which begins with the weights as they are now"

    # Where things lie.

    def _check(self, exchange: Exchange) -> None:
        for reason in ("uses_servers", "updates_alone"):
            if getattr(exchange, reason):
                raise ConfigError(f"ema={self.name}: {_REFUSES[reason]}.")
        if exchange.tables.names:
            raise ConfigError(
                f"ema={self.name}: the rows of '{exchange.tables.names[0]}' would not be averaged; leave ema out, or "
                "use nn.Embedding."
            )

    def _divide(self) -> dict[str, tuple[int, int]]:
        """Which elements of each parameter this worker averages: of all of them in a row, an equal share."""
        sizes = {name: local(p).numel() for name, p in self._parameters.items()}
        if self._exchange.cuts_parameters:
            return {shard.name: (0, shard.tensor.numel()) for shard in self._shards()}
        width = -(-sum(sizes.values()) // self._data.size)
        low, high, at, found = width * self._data.rank, width * (self._data.rank + 1), 0, {}
        for name, size in sizes.items():
            start, stop = max(low - at, 0), min(high - at, size)
            if start < stop:
                found[name] = (start, stop)
            at += size
        return found

    def _follow(self) -> None:
        """Parameters move to other memory when their order is known, or a group is replaced: follow them."""
        address = local(self._probe).data_ptr() if self._probe is not None else 0
        if address == self._address and self._address:
            return
        self._address = address
        before = self._parts
        self._parts = {}
        shards = {shard.name: shard for shard in self._shards()}
        pieces: list[LocalShard] = []
        for name, (start, stop) in self._shares.items():
            held = shards[name]
            if held.tensor.numel() == 0:
                continue
            whole = stop - start == held.tensor.numel()
            value = held.tensor if whole else held.tensor.view(-1)[start:stop]
            pieces.append(LocalShard(name, held.start + start, value))
        self._values = []
        self._averages = []
        for run in _runs(pieces):
            self._lay_out(run, before)
        self._converts = any(v.dtype != a.dtype for v, a in zip(self._values, self._averages, strict=True))

    def _lay_out(self, run: list[LocalShard], before: Mapping[str, tuple[int, torch.Tensor]]) -> None:
        """Make the average of parameters that lie one after the other, from what it was before or from their values."""
        first, last = run[0].tensor, run[-1].tensor
        if len(run) == 1:
            value = first
        else:
            span = last.storage_offset() + last.numel() - first.storage_offset()
            value = torch.as_strided(first, (span,), (1,), first.storage_offset())
        average = torch.zeros_like(value, dtype=_wide(value.dtype))
        self._values.append(value)
        self._averages.append(average)
        for shard in run:
            here = average
            if len(run) > 1:
                offset = shard.tensor.storage_offset() - first.storage_offset()
                here = average[offset : offset + shard.tensor.numel()].view(shard.tensor.shape)
            known = before.get(shard.name)
            here.copy_(known[1].view(here.shape) if known is not None else shard.tensor)
            self._parts[shard.name] = (shard.start, here)

    def _shards(self) -> list[LocalShard]:
        return [s for s in self._exchange.parameter_shards() if s.name in self._parameters]

    def _here(self) -> dict[str, torch.Tensor]:
        """What is here of every parameter that learns."""
        return {shard.name: shard.tensor for shard in self._shards()}

    def _gather(self) -> dict[str, torch.Tensor]:
        """The average of everything that is here of the parameters. Collective."""
        self._follow()
        if self._exchange.cuts_parameters or self._data.size == 1:
            return {name: average for name, (_, average) in self._parts.items()}
        found: dict[str, torch.Tensor] = {}
        for dtype in {p.dtype: None for p in self._parameters.values()}:
            sizes = {n: local(p).shape for n, p in self._parameters.items() if p.dtype == dtype}
            numels = [shape.numel() for shape in sizes.values()]
            whole = torch.zeros(sum(numels), dtype=_wide(dtype), device=self._data.device)
            for (name, shape), part in zip(sizes.items(), torch.split(whole, numels), strict=True):
                found[name] = part.view(shape)
                if name in self._parts:
                    start, average = self._parts[name]
                    part[start : start + average.numel()] = average.reshape(-1)
            self._data.all_reduce(whole).wait()  # everything else is zero, so the sum is exact
        return found

    @staticmethod
    def _fill(here: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                # By `.data` it is no change by hand, of which torch would keep count.
                here[name].data.copy_(value.view(here[name].shape))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which type weights of this one are averaged: steps of an average are too small for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _runs(shards: list[LocalShard]) -> list[list[LocalShard]]:
    """Tensors that lie one after the other in one memory, together: each run is one operation."""

    def place(shard: LocalShard) -> tuple[int, int]:
        return shard.tensor.untyped_storage().data_ptr(), int(shard.tensor.storage_offset())

    runs: list[list[LocalShard]] = []
    for shard in sorted(shards, key=place):
        last = runs[-1][-1].tensor if runs else None
        joins = (
            last is not None
            and last.untyped_storage().data_ptr() == shard.tensor.untyped_storage().data_ptr()
            and last.dtype == shard.tensor.dtype
            and last.is_contiguous()
            and shard.tensor.is_contiguous()
            and 0 <= shard.tensor.storage_offset() - last.storage_offset() - last.numel() < _GAP
        )
        if joins:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    return runs
