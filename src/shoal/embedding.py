"""An embedding whose rows live elsewhere: on the servers of ps, or beside the model in solo.

A table of a billion rows fits into no worker, and a batch touches few of them. So the module asks for the rows of its
batch, computes with a copy, and afterwards hands over the gradient of that copy: what travels is as large as the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from shoal.errors import ConfigError


class RowSource(Protocol):
    """Where rows come from."""

    def fetch(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows, [n, dim], of the table `name` for ids that are flat, int64, unique and on the CPU."""


FirstRows = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Gives ids, [n], and their first values, [n, dim], piece by piece; each id once."""


class SparseEmbedding(nn.Module):
    """Rows by id, as nn.Embedding gives them; the module itself holds none.

    A row begins normally distributed with the deviation `std`, a value that follows from the run's seed, the module's
    name and the id; it takes memory from its first gradient on. With a `capacity`, at most so many rows do: those
    whose last gradient is longest ago are given up, and begin again when they come back. Only rows with a gradient
    are updated, so momentum and weight decay do not reach the others.

    >>> class Zeros:
    ...     def fetch(self, name, ids):
    ...         return torch.zeros(len(ids), 2)
    >>> words = SparseEmbedding(rows=1_000_000, dim=2)
    >>> words.source = Zeros()
    >>> out = words(torch.tensor([[7, 7], [9, 7]]))
    >>> out.shape
    torch.Size([2, 2, 2])
    >>> out.sum().backward()
    >>> [(ids, gradient)] = words.take_touched()
    >>> ids.tolist(), gradient.tolist()
    ([7, 9], [[3.0, 3.0], [1.0, 1.0]])
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        std: float = 0.02,
        capacity: int = 0,
        ids: Callable[[Any], torch.Tensor] | None = None,
        initial: FirstRows | None = None,
    ) -> None:
        """`initial`: rows that begin with other values, such as `KeyIndex(store, "item").first_rows("vector")`.

        `ids`: batch -> the ids that this module will be given for it, as `lambda batch: batch[0]`.

        With it, rows of the next batch are fetched while this one is computed. What it leaves out is fetched later.
        """
        super().__init__()
        if rows < 1 or dim < 1 or std < 0 or capacity < 0:
            raise ConfigError(
                f"SparseEmbedding(rows={rows}, dim={dim}, std={std}, capacity={capacity}) cannot be; rows and dim are "
                "1 or more, std and capacity 0 or more."
            )
        if initial is not None and capacity:
            raise ConfigError(
                f"SparseEmbedding(capacity={capacity}) gives up rows, and those of initial= could not come back as "
                "they began; leave one of them out."
            )
        self.rows = rows
        self.dim = dim
        self.std = std
        self.capacity = capacity
        self.ids = ids
        self.initial = initial
        self.dtype = torch.get_default_dtype()
        """The dtype of rows as the model sees them."""
        self.source: RowSource | None = None
        """Set by the exchange."""
        self.name = ""
        """Name of the table: the module's name in the model, set with the source."""
        self._touched: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids of any shape, [*shape, dim]."""
        unique, inverse = torch.unique(self._checked(ids), return_inverse=True)
        wanted = unique.to(device="cpu", dtype=torch.int64)
        if self.source is None:
            raise ConfigError(
                f"SparseEmbedding {self.name!r} has no rows by itself; use the model in shoal.Run with strategy ps or "
                "solo, which bring them."
            )
        rows = self.source.fetch(self.name, wanted)
        if rows.shape != (len(wanted), self.dim):
            raise ConfigError(
                f"the source of SparseEmbedding {self.name!r} gave {tuple(rows.shape)} for {len(wanted)} rows of "
                f"{self.dim}; it must give one row an id."
            )
        leaf = rows.detach().to(device=ids.device, dtype=self.dtype)
        if self.training and torch.is_grad_enabled():
            leaf = leaf.requires_grad_()
            self._touched.append((wanted, leaf))
        return functional.embedding(inverse, leaf)

    def coming_ids(self, batches: Iterable[object]) -> torch.Tensor | None:
        """The ids that batches will ask for, as a source wants them; None where that is not known."""
        if self.ids is None:
            return None
        found = [self._checked(self.ids(batch)).reshape(-1) for batch in batches if batch is not None]
        together = torch.cat(
            [torch.empty(0, dtype=torch.int64, device="cpu"), *(ids.cpu().long() for ids in found)]
        )
        unique: torch.Tensor = torch.unique(together)
        return unique

    def take_touched(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The ids used since the last call and the gradient of their rows, on the CPU; forgets them.

        Empty, or one pair: several uses of a row are summed, in the order of the calls.
        """
        touched = self._touched
        self._touched = []
        # A forward pass that was run again to save memory, or whose result was not used, has no gradient.
        return sum_rows([(ids, leaf.grad.detach().cpu()) for ids, leaf in touched if leaf.grad is not None])

    def extra_repr(self) -> str:
        shown = f"rows={self.rows}, dim={self.dim}, std={self.std}"
        return shown + (f", capacity={self.capacity}" if self.capacity else "")

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"SparseEmbedding {self.name!r} got ids of {ids.dtype}; give int64 or int32.")
        if ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.rows:
                raise ConfigError(
                    f"SparseEmbedding {self.name!r} got ids from {low} to {high} and has rows 0 to {self.rows - 1}; "
                    "make rows= larger, or check the data."
                )
        return ids

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SparseEmbedding:
        """What .to(), .double() and the like do to every tensor of a model; here there is only a type to change."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self


def sum_rows(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of unique ids and a row for each, as one such pair with ids in ascending order; none stay none.

    >>> one, other = (torch.tensor([2, 5]), torch.ones(2, 1)), (torch.tensor([5, 1]), torch.ones(2, 1))
    >>> [(ids.tolist(), rows.tolist()) for ids, rows in sum_rows([one, other])]
    [([1, 2, 5], [[1.0], [1.0], [2.0]])]
    """
    if len(found) < 2:
        return list(found)
    together = torch.unique(torch.cat([ids for ids, _ in found]))
    total = found[0][1].new_zeros(len(together), found[0][1].shape[1])
    for ids, rows in found:
        places = torch.searchsorted(together, ids)
        total.index_copy_(0, places, total.index_select(0, places).add_(rows))
    return [(together, total)]
