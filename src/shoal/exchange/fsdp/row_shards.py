"""What a worker holds of each parameter under zero3: some of its rows.

`fully_shard` leaves a contiguous range of rows of every parameter on each worker. Seen flat, that is the slice of a
bucket that holds this one parameter, and so everything that is known about buckets holds here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn, optim

from shoal.exchange.buckets.optimizer_state import Kept, cut_state, join_state
from shoal.exchange.contract import LocalShard, State, detached
from shoal.exchange.fsdp.units import Unit
from shoal.exchange.local_tensor import local
from shoal.torch_private import FsdpParameter, fsdp_has_gathered, fsdp_lazy_init, fsdp_shape
from shoal.world.buckets import Bucket, Piece, Place, pieces_of, slice_of
from shoal.world.world import World


@dataclass(frozen=True)
class Part:
    """A parameter that is cut by rows, and what is here of it."""

    cell: FsdpParameter
    """FSDP2's own record of it."""
    bucket: Bucket
    shape: torch.Size
    """Shape of the parameter, as the workers hold it between them."""
    held: torch.Tensor
    """The rows that are here: always the same memory. May be empty."""
    pieces: tuple[Piece, ...]
    """`held` as a piece of the bucket; none if it is empty."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is between steps: a DTensor around `held`."""
        return self.cell.sharded_param

    @property
    def gathered(self) -> nn.Parameter:
        """The parameter as the model computes with it; exists from the first forward pass on, always the same."""
        return self.cell.unsharded_param

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of the whole parameter waits to be summed."""
        kept = self.cell.unsharded_accumulated_grad is not None
        return kept or (fsdp_has_gathered(self.cell) and self.gathered.grad is not None)

    def take(self, whole: torch.Tensor) -> None:
        """Keep this worker's rows of a whole value."""
        self.held.copy_(self.rows_of(whole))

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This worker's rows of a whole value; as empty as `held` where it has none."""
        flat = whole.detach().reshape(self.shape).reshape(-1)
        start = self.pieces[0].offset if self.pieces else 0
        return flat[start : start + self.held.numel()].view(self.held.shape)

    def join(self, rows: torch.Tensor, world: World) -> torch.Tensor:
        """The whole of something that every worker has its rows of. Collective."""
        # FSDP2 cuts by rows, rounded up, so the last ranks may have fewer: all_gather takes equal parts.
        padded = torch.zeros(self.bucket.size // world.size, dtype=rows.dtype, device=rows.device)
        padded[: rows.numel()] = rows.reshape(-1)
        whole = torch.empty(self.bucket.size, dtype=rows.dtype, device=rows.device)
        world.all_gather(whole, padded).wait()
        return whole[: self.shape.numel()].view(self.shape).clone()


class RowShards:
    """Every parameter of a model: what is here of it, and how the whole comes together."""

    def __init__(
        self, units: Sequence[Unit], model: nn.Module, world: World, shares: Mapping[str, float]
    ) -> None:
        self.world = world
        """The group over which parameters are cut by rows."""
        self.parts: dict[str, Part] = {}
        """The parameters that are cut. From now on their rows stay where they are."""
        if units:
            fsdp_lazy_init(units[-1].module)  # else they would move once more, at the first step
        cells = {id(cell.sharded_param): cell for unit in units for cell in unit.cells}
        for name, parameter in model.named_parameters():
            if id(parameter) in cells:
                share = shares.get(name, 1.0)
                self.parts[name] = self._part(len(self.parts), name, cells[id(parameter)], share)
        self.whole = {name: p for name, p in model.named_parameters() if name not in self.parts}
        """The parameters that are not cut: all of them for a single worker, else a few, such as single numbers."""

    def has_gradient(self, name: str) -> bool:
        """Whether a gradient of this worker's own waits to be summed."""
        return self.parts[name].has_gradient if name in self.parts else self.whole[name].grad is not None

    def of(self, name: str) -> torch.Tensor:
        """This worker's rows of a parameter."""
        return self.parts[name].held if name in self.parts else local(self.whole[name]).detach()

    def held(self, name: str) -> LocalShard:
        """This worker's rows of a parameter, with the place where they begin."""
        pieces = self.parts[name].pieces if name in self.parts else ()
        return LocalShard(name, pieces[0].offset if pieces else 0, self.of(name))

    def join(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of its gradient, of which every worker has such rows. Collective."""
        return self.parts[name].join(rows, self.world) if name in self.parts else rows.clone()

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This worker's rows of a whole value."""
        return self.parts[name].rows_of(whole) if name in self.parts else whole

    def take(self, name: str, whole: torch.Tensor) -> None:
        """Keep this worker's rows of a whole value."""
        if name in self.parts:
            self.parts[name].take(whole)
        else:
            local(self.whole[name]).detach().copy_(whole)

    def fill(self, model: nn.Module, values: Callable[[str], torch.Tensor]) -> None:
        """Keep this worker's rows of every initial value, one tensor at a time."""
        for name, _ in model.named_parameters():
            self.take(name, values(name))
        for name, buffer in model.named_buffers():
            buffer.copy_(values(name))

    def state(self, optimizer: optim.Optimizer, targets: Mapping[str, torch.Tensor]) -> State:
        """The whole optimizer state of those who learn, from the tensors that the optimizer knows. Collective."""
        here = {n: t for n, t in targets.items() if n in self.whole and t in optimizer.state}
        found = {name: detached(optimizer.state[target]) for name, target in here.items()}
        if self.parts:
            found |= join_state(self._kept(optimizer, targets))
        return {name: found[name] for name in targets if name in found}

    def load_state(
        self,
        optimizer: optim.Optimizer,
        targets: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> None:
        """Give the optimizer what belongs here of a whole state."""
        parts = {name: entries for name, entries in state.items() if name in self.parts}
        cut_state(self._kept(optimizer, targets), parts)
        for name, entries in state.items():
            if name not in parts:
                optimizer.state[targets[name]] = detached(entries)

    def _kept(self, optimizer: optim.Optimizer, learning: Collection[str]) -> Kept:
        """The optimizer state of what is cut."""
        mine = {name: part for name, part in self.parts.items() if name in learning}
        pieces = [(piece, part.held) for part in mine.values() for piece in part.pieces]
        shapes = {name: part.shape for name, part in mine.items()}
        return Kept(shapes, [part.bucket for part in mine.values()], pieces, optimizer, self.world)

    def _part(self, index: int, name: str, cell: FsdpParameter, share: float) -> Part:
        shape = fsdp_shape(cell)
        # As a bucket of its own, so that optimizer state is joined and cut by the code that all bucketed exchanges use.
        size = cell.padded_sharded_param_size.numel() * self.world.size
        bucket = Bucket(index, cell.sharded_param.dtype, (Place(name, 0, shape.numel()),), size, share)
        pieces = pieces_of(bucket, *slice_of(bucket, self.world.size, self.world.rank))
        return Part(cell, bucket, shape, local(cell.sharded_param).detach(), pieces)


def watch(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a hook whenever a gradient has arrived in `tensor.grad`."""
    tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
