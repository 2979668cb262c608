"""Numbers of a recipe's own, one for each element that this worker updates: masks, scores.

Parameters lie in buckets whose layout changes once, when the first step has shown in which order gradients become
ready, and again when a lost worker is replaced. These numbers follow.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from shoal.exchange.contract import ExtraState, LocalShard
from shoal.recipe.contract import RunView


class PerElement:
    """A number for each element of some parameters, 0 at first. All but `values` is collective where layouts move."""

    def __init__(self, view: RunView, names: Collection[str], dtype: torch.dtype | None = None) -> None:
        """`names`: as this worker's model has them. `dtype` None: that of each parameter, and at least float32."""
        self._view = view
        self._names = names
        self._dtype = dtype
        self._signs: tuple[tuple[str, int, int], ...] | None = None
        self.shards: list[LocalShard] = []
        """What this worker updates of these parameters."""
        self.values: list[torch.Tensor] = []
        """As large as each of the shards."""
        self.follow()

    def follow(self) -> None:
        """See where parameters lie now."""
        shards = [shard for shard in self._view.exchange.optimizer_shards() if shard.name in self._names]
        signs = tuple((shard.name, shard.start, shard.tensor.numel()) for shard in shards)
        if signs != self._signs:
            before = self._join() if self._signs is not None else {}
            self.values = [self._cut(shard, before.get(shard.name)) for shard in shards]
            self._signs = signs
        self.shards = shards

    def extras(self, kind: str) -> list[ExtraState]:
        """As a checkpoint has it."""
        self.follow()
        held = zip(self.shards, self.values, strict=True)
        return [ExtraState(kind, LocalShard(s.name, s.start, value), alike=True) for s, value in held]

    def clear(self) -> None:
        """Zero, as at first."""
        self.follow()
        for value in self.values:
            value.zero_()

    def counted(self) -> list[bool]:
        """Of each shard whether its elements count on this worker: every element counts on one worker. Collective."""
        view = self._view
        first = view.mesh.tensor.rank == 0
        return [
            alone and (first or shard.name in view.cut) and shard.name not in view.same
            for shard, alone in zip(self.shards, self._answers(), strict=True)
        ]

    def _answers(self) -> list[bool]:
        """Of each shard whether this worker answers for it among those who have other samples. Collective."""
        data = self._view.mesh.data
        mine = [(shard.name, shard.start, shard.tensor.numel()) for shard in self.shards]
        others = data.gather_values([list(entry) for entry in mine])
        before = {tuple(entry) for theirs in others[: data.rank] for entry in theirs}
        return [entry not in before for entry in mine]

    def _cut(self, shard: LocalShard, before: torch.Tensor | None) -> torch.Tensor:
        dtype = self._dtype or torch.promote_types(shard.tensor.dtype, torch.float32)
        if before is None:
            return torch.zeros_like(shard.tensor, dtype=dtype)
        stop = shard.start + shard.tensor.numel()
        return before[shard.start : stop].to(shard.tensor.device, dtype).view(shard.tensor.shape).clone()

    def _join(self) -> dict[str, torch.Tensor]:
        """Of all that tensor parallel has left of each parameter here. Collective."""
        world = self._view.mesh.data
        found = {}
        for held in self._view.exchange.parameter_shards():
            if held.name in self._names:
                size = self._view.region(held).part_shape
                found[held.name] = torch.zeros(size, dtype=torch.float64, device="cpu").view(-1)
        for shard, value, answers in zip(self.shards, self.values, self._answers(), strict=True):
            if answers:
                found[shard.name][shard.start : shard.start + value.numel()] = value.reshape(-1).cpu()
        for name in found:
            world.all_reduce(found[name]).wait()
        return found
