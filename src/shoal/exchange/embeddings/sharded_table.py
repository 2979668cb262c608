"""One table: what its shards are, which ids each has, and how their rows become one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import optim

from shoal.embedding import SparseEmbedding
from shoal.errors import ConfigError
from shoal.server.protocol.optimizer_description import KINDS, describe
from shoal.server.rows.row_machine import TableTerms
from shoal.server.rows.row_optimizers import RULES, RowOptimizer
from shoal.server.rows.row_packing import TYPES, shard_of
from shoal.server.rows.row_table import ID, VALUES, RowTable


@dataclass(frozen=True)
class ShardedTable:
    """A SparseEmbedding with its shards."""

    module: SparseEmbedding
    terms: TableTerms
    """The terms of each of its shards."""
    shards: tuple[int, ...]
    """Their numbers."""

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.terms.dtype]

    @cached_property
    def layout(self) -> list[tuple[str, torch.dtype, int]]:
        """What a row has: name, type and width."""
        state = RowOptimizer.of(self.terms.optimizer).state
        return list(RowTable(self.terms.dim, self.dtype, state, 0).layout)

    @cached_property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * width for _, dtype, width in self.layout)

    def new_rows(self, ids: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows that begin with these values, with all that belongs to them; or a refusal."""
        wrong = values.shape != (len(ids), self.terms.dim)
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if wrong or low < 0 or high >= self.terms.rows:
            raise ConfigError(
                f"initial= of SparseEmbedding '{self.terms.name}' gave values {tuple(values.shape)} for ids from {low} "
                f"to {high}; the table has rows 0 to {self.terms.rows - 1} of {self.terms.dim} numbers."
            )
        made = {
            name: torch.zeros(len(ids), width, dtype=kind, device="cpu") for name, kind, width in self.layout
        }
        return {**made, ID: ids.view(-1, 1), VALUES: values}

    def places(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each shard, and which of the ids are in it."""
        owners = torch.from_numpy(shard_of(ids.numpy(), len(self.shards)))
        for index, shard in enumerate(self.shards):
            yield shard, torch.nonzero(owners == index).view(-1)


def terms_of(
    name: str, module: SparseEmbedding, optimizer: optim.Optimizer, seed: int, shards: int
) -> TableTerms:
    """What each of so many shards of a table is; refuses what no shard could be."""
    kind, dtype = type(optimizer), str(module.dtype).removeprefix("torch.")
    if kind.__name__ not in RULES or KINDS.get(kind.__name__) is not kind:
        raise ConfigError(
            f"{kind.__name__} has no rule for single rows, which SparseEmbedding '{name}' needs; use "
            f"{', '.join(RULES)}."
        )
    if dtype not in TYPES:
        raise ConfigError(f"SparseEmbedding '{name}' is of {dtype}; rows can be {', '.join(TYPES)}.")
    description = describe(optimizer)
    return TableTerms(
        name=name,
        rows=module.rows,
        dim=module.dim,
        dtype=dtype,
        seed=seed,
        std=module.std,
        optimizer={"kind": description["kind"], "groups": description["groups"][:1]},
        capacity=max(1, module.capacity // shards) if module.capacity else 0,
    )


def check_layout(
    name: str, own: Sequence[tuple[str, torch.dtype, int]], columns: Mapping[str, torch.Tensor]
) -> Sequence[tuple[str, torch.dtype, int]]:
    """Its own layout, if that is the one that rows come with."""
    wanted = {column: width for column, _, width in own}
    given = {column: tensor.shape[1] for column, tensor in columns.items()}
    if wanted != given:
        raise ConfigError(
            f"the rows of '{name}' were saved with {_words(given)} and have {_words(wanted)} now; use the same dim and "
            "the same kind of optimizer, or another checkpoint folder."
        )
    return own


def _words(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({width})" for name, width in widths.items())


def merge(streams: Sequence[Iterator[list[torch.Tensor]]]) -> Iterator[list[torch.Tensor]]:
    """Streams of columns, each by ascending ids in the first column, as one such stream.

    >>> one, other = iter([[torch.tensor([1, 4])], [torch.tensor([6])]]), iter([[torch.tensor([2, 9])]])
    >>> [columns[0].tolist() for columns in merge([one, other])]
    [[1, 2, 4], [6], [9]]
    """
    held = {stream: piece for stream in streams if (piece := next(stream, None)) is not None}
    while held:
        # Up to here every stream is known completely, so these rows can be put in order for good.
        bound = min(int(columns[0].view(-1)[-1]) for columns in held.values())
        ready: list[list[torch.Tensor]] = []
        for stream, columns in list(held.items()):
            count = int(torch.searchsorted(columns[0].view(-1), bound, right=True))
            ready.append([column[:count] for column in columns])
            held[stream] = [column[count:] for column in columns]
            if not len(held[stream][0]):
                following = next(stream, None)
                if following is None:
                    del held[stream]
                else:
                    held[stream] = following
        joined = [torch.cat(column) for column in zip(*ready, strict=True)]
        order = torch.argsort(joined[0].view(-1))
        yield [column.index_select(0, order) for column in joined]
