"""`run.gather`: rows of all workers for a loss that compares samples with each other.

Every worker gets the rows of all, in the order of the global batch, and the gradient of each row goes back to the
worker it came from, summed over all who have used it. That is what one process computes, where all workers compute one
step with the same parameters, and each has all of its samples of that step at hand.

A worker that has a filler instead of samples sees its own rows besides, so that its loss finds them; it counts nothing.
One that has nothing at all, in the last step of an epoch, attends: it takes part in every collective and adds no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError
from shoal.world.world import World


@dataclass(frozen=True)
class _Call:
    """One gather, as all workers know it."""

    world: World
    rows: Sequence[int]
    """Of each worker."""
    attended: bool
    """Whether a worker has no samples, and waits to be told what comes next."""
    own: bool
    """Whether the rows of this worker are among those of all; else it has a filler."""

    @property
    def most(self) -> int:
        return max(self.rows)


class Gather:
    """Rows of all workers of the data axis.

    >>> Gather(World.alone(), "", fills=False, counts=lambda: True)(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, data: World, refusal: str, fills: bool, counts: Callable[[], bool]) -> None:
        """`refusal`: why it cannot be done, if so. `fills`: whether those without samples compute a filler; `counts`:
        whether the samples that are computed now are this worker's own."""
        self.refusal = refusal
        self.used = False
        """Whether any loss has asked."""
        self._data = data
        self._fills = fills
        self._counts = counts
        self._world: World | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all workers, one after the other."""
        if self.refusal:
            raise ConfigError(f"run.gather needs the whole global batch at once: {self.refusal}")
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor) or tensor.dim() == 0:
            what = (
                "a scalar"
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 0
                else type(tensor).__name__
            )
            raise ConfigError(
                f"run.gather was given {what}; give a plain tensor with one row for each sample."
            )
        self.used = True
        if self._data.size == 1:
            return tensor
        own, world = self._counts(), self._open()
        learns = tensor.requires_grad and torch.is_grad_enabled()
        kind = [list(tensor.shape[1:]), str(tensor.dtype)[6:], learns]
        table = world.gather_values(["gather", len(tensor) if own else 0, *kind])
        _check(table, kind)
        rows = [int(row[1]) for row in table]
        call = _Call(world, rows, any(row[0] == "attend" for row in table), own)
        gathered: torch.Tensor = _Gathered.apply(tensor, call)  # type: ignore[no-untyped-call]
        return gathered

    def meets(self, samples: int) -> bool:
        """Whether a step of so many samples leaves a worker without any, so that all compute it within `meeting`."""
        return samples < self._data.size and not (self._fills or self.refusal)

    def abort(self) -> None:
        """A peer is gone: end what is under way."""
        if self._world is not None:
            self._world.abort()

    def reopen(self, data: World) -> None:
        """After `abort`: among these workers, as many as before. The next call makes a group anew."""
        self._data = data
        self._world = None

    @contextmanager
    def meeting(self, attends: bool) -> Iterator[None]:
        """The passes of a step that leaves workers without samples; `attends`: this is one of them."""
        if not attends:
            yield
            self._open().gather_values(["done", 0])
            return
        # In a thread: others may meet this worker elsewhere, such as to agree on the order of their buckets.
        with ThreadPoolExecutor(1) as threads:
            attending = threads.submit(self._attend)
            yield
            attending.result()

    def _attend(self) -> None:
        """Take part in what the others gather until they are done, and add no row."""
        world = self._open()
        while True:
            table = world.gather_values(["attend", 0])
            asked = next((row for row in table if row[0] != "attend"), ["done"])
            if asked[0] == "done":
                return
            most = max(int(row[1]) for row in table)
            nothing = torch.zeros(most, *asked[2], dtype=getattr(torch, asked[3]), device=world.device)
            everything = nothing.new_zeros(world.size * most, *asked[2])
            if asked[0] == "gather":
                world.all_gather(everything, nothing).wait()
            else:
                world.reduce_scatter(nothing, everything).wait()

    def _open(self) -> World:
        """A group of its own: within a backward pass, gradients of parameters are on their way in the other."""
        if self._world is None:
            self._world = self._data.new_group()
        return self._world


class _Gathered(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward. Shares are lengthened to the longest on their way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.call = call
        ctx.rows = len(tensor)
        most, size = call.most, call.world.size
        mine = tensor.new_zeros(most, *tensor.shape[1:])
        if call.own:
            mine[: len(tensor)] = tensor
        table = mine.new_empty(size * most, *tensor.shape[1:])
        call.world.all_gather(table, mine).wait()
        parts = [table[rank * most : rank * most + rows] for rank, rows in enumerate(call.rows)]
        if not call.own:
            parts[call.world.rank] = tensor
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        call: _Call = ctx.call
        gradient, world, most, tail = gradients[0], call.world, call.most, list(gradients[0].shape[1:])
        table = gradient.new_zeros(world.size, most, *tail)
        if call.own:  # a filler counts nothing, whatever its loss was
            for place, part in zip(table, torch.split(gradient, list(call.rows)), strict=True):
                place[: len(part)] = part
        if call.attended:
            world.gather_values(["backward", call.rows[world.rank], tail, str(gradient.dtype)[6:], True])
        mine = gradient.new_empty(most, *tail)
        world.reduce_scatter(mine, table.view(world.size * most, *tail)).wait()
        return (mine[: ctx.rows] if call.own else gradient.new_zeros(ctx.rows, *tail)), None


def _check(table: Sequence[Sequence[object]], mine: Sequence[object]) -> None:
    """All workers gather the same kind of rows."""
    for rank, (what, _, *kind) in enumerate(table):
        if what == "attend":
            continue
        if what != "gather":
            raise ConfigError(
                f"run.gather was called once more here than on rank {rank}; let every worker's loss call it equally "
                "often."
            )
        if kind != list(mine):
            raise ConfigError(
                f"run.gather was given rows of shape {mine[0]} ({_named(mine)}) here and {kind[0]} ({_named(kind)}) on "
                f"rank {rank}; let every worker's loss gather the same tensors in the same order."
            )


def _named(kind: Sequence[object]) -> str:
    return f"{kind[1]}, {'with' if kind[2] else 'without'} gradient"
