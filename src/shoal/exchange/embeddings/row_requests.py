"""Rows that have been request for: right now, or while the worker was still at the step before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.exchange.embeddings.back_ends import Pending


@dataclass(frozen=True)
class RowRequest:
    """A question to all shards of a table."""

    ids: torch.Tensor
    """Unique, in ascending order."""
    dim: int
    dtype: torch.dtype
    parts: Sequence[tuple[torch.Tensor, Pending]]
    """Which of the ids a shard was request for, and its answer."""

    def rows(self) -> torch.Tensor:
        """All of them, as soon as they are there."""
        found = torch.empty(len(self.ids), self.dim, dtype=self.dtype, device="cpu")
        for mine, answer in self.parts:
            rows = answer().tensor
            assert rows is not None
            found.index_copy_(0, mine, rows.view(len(mine), self.dim))
        return found


@dataclass(frozen=True)
class PrefetchedRows:
    """Rows that were request for ahead."""

    request: RowRequest
    fresh: torch.Tensor
    """Which of them are as good as newly read."""

    @staticmethod
    def of(request: RowRequest) -> PrefetchedRows:
        return PrefetchedRows(request, torch.ones(len(request.ids), dtype=torch.bool, device="cpu"))

    def without(self, ids: torch.Tensor) -> PrefetchedRows:
        """Not those of these ids: they have changed since."""
        return replace(self, fresh=self.fresh & ~torch.isin(self.request.ids, ids))

    def rows(self, ids: torch.Tensor, fetch: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The rows of these ids, of which `fetch` brings those that are not here.

        >>> from shoal.server.protocol.state_machine import Answer
        >>> answer = lambda: Answer(tensor=torch.tensor([1.0, 2.0, 3.0]))
        >>> request = RowRequest(torch.tensor([4, 5, 9]), 1, torch.float32, [(torch.arange(3), answer)])
        >>> known = PrefetchedRows.of(request).without(torch.tensor([5]))
        >>> known.rows(torch.tensor([3, 4, 5, 9]), lambda ids: torch.zeros(len(ids), 1)).view(-1).tolist()
        [0.0, 1.0, 0.0, 3.0]
        """
        if not len(self.request.ids):
            return fetch(ids)
        places = torch.searchsorted(self.request.ids, ids).clamp_(max=len(self.request.ids) - 1)
        here = (self.request.ids[places] == ids) & self.fresh[places]
        missing = torch.nonzero(~here).view(-1)
        fetched = fetch(ids.index_select(0, missing)) if len(missing) else None
        found = self.request.rows().index_select(0, places)
        if fetched is not None:
            found.index_copy_(0, missing, fetched)
        return found
