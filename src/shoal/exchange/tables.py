"""The tables of a model: every SparseEmbedding, its rows spread over shards by a hash of their ids.

A forward pass fetches the rows of its ids from all shards at once. After the backward passes of a part its gradients
are staged at every shard of every table, an empty one where a shard has none of its ids: so a shard knows of every
part, and an update names the same parts everywhere. Updates and drops are those of the dense shards.

Rows follow the settings of the optimizer's first group, as its schedule changes them. They are summed, never compared:
of aggregates, only weighted sums know what to do with a row that one part has and another has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn, optim

from shoal.aggregate import make_aggregate
from shoal.embedding import SparseEmbedding, sum_rows
from shoal.errors import ConfigError
from shoal.exchange.base import Exchange, RowPiece, sum_of_squares
from shoal.exchange.rowlines import Claim, Line, Pending
from shoal.server.description import KINDS, describe
from shoal.server.packing import TYPES, divide, pack, pack_piece, shard_of, unpack_piece
from shoal.server.rows import Terms
from shoal.server.rowtable import RowTable
from shoal.server.rowwise import RULES, RowOptimizer

_PIECE = 8 * 2**20
"""Bytes of rows that are under way at a time, from each shard or to all, when a table is saved or loaded."""


def find_tables(model: nn.Module) -> dict[str, SparseEmbedding]:
    """Every SparseEmbedding by its name in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseEmbedding)}


def check_rows(model: nn.Module, chosen: type[Exchange]) -> None:
    """Refuse a model with tables where nobody can keep their rows."""
    for name in () if chosen.keeps_rows else find_tables(model):
        raise ConfigError(f"SparseEmbedding '{name}' keeps its rows on servers; use ps or solo.")


@dataclass(frozen=True)
class Table:
    """One of them."""

    module: SparseEmbedding
    terms: Terms
    """Of each of its shards."""
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

    def places(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each shard, and which of the ids are in it."""
        owners = torch.from_numpy(shard_of(ids.numpy(), len(self.shards)))
        for index, shard in enumerate(self.shards):
            yield shard, torch.nonzero(owners == index).view(-1)


class Tables:
    """All tables of a model, as one worker uses them."""

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, seed: int, shards: int, first: int
    ) -> None:
        """`shards` of each table, numbered from `first` on."""
        self._tables: dict[str, Table] = {}
        for name, module in find_tables(model).items():
            numbers = tuple(range(first, first + shards))
            self._tables[name] = Table(module, _terms(name, module, optimizer, seed, shards), numbers)
            first += shards
        self.applied: int | None = None
        """Rows are read with all steps below this one in them; None: as they are."""
        self._line: Line | None = None
        self._begun = False
        self._taken: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in self._tables}
        self._staged: list[torch.Tensor] = []
        self._pending: list[Pending] = []

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tables)

    @property
    def shards(self) -> list[int]:
        """The numbers of all shards of all tables."""
        return [shard for table in self._tables.values() for shard in table.shards]

    @property
    def sizes(self) -> list[int]:
        """Bytes that each shard takes if every row does."""
        return [
            table.terms.rows * table.row_bytes // len(table.shards) + 1
            for table in self._tables.values()
            for _ in table.shards
        ]

    def signature(self) -> list[Any]:
        """What workers must have alike."""
        return [[n, [t.terms.rows, t.terms.dim], str(t.dtype), True] for n, t in self._tables.items()]

    def check_aggregate(self, text: str) -> None:
        """Refuse an aggregate that does not sum."""
        if self._tables and not make_aggregate(text).sums:
            raise ConfigError(
                f"aggregate={text} does not know rows that some parts of a step have and others have not, as "
                f"SparseEmbedding '{self.names[0]}' has them; use aggregate=weighted."
            )

    def connect(self, line: Line) -> None:
        """Bring rows to the modules from now on."""
        self._line = line
        for name, table in self._tables.items():
            table.module.source, table.module.name = self, name

    @property
    def line(self) -> Line:
        assert self._line is not None
        return self._line

    def begin(self, step: int) -> None:
        """Have empty tables, whose first step is `step`; what has been loaded stays."""
        if not self._begun:
            self._begun = True
            self._settle(
                self.line.call(shard, "init", asdict(table.terms), step)
                for table in self._tables.values()
                for shard in table.shards
            )

    # The step.

    def fetch(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, which are unique."""
        table = self._tables[name]
        args = None if self.applied is None else {"applied": self.applied}
        asked = [
            (mine, self.line.ask(shard, "rows", args, tensor=ids.index_select(0, mine)))
            for shard, mine in table.places(ids)
            if len(mine)
        ]
        rows = torch.empty(len(ids), table.terms.dim, dtype=table.dtype)
        for mine, answer in asked:
            found = answer().tensor
            assert found is not None
            rows.index_copy_(0, mine, found.view(len(mine), -1))
        return rows

    def take(self, counts: bool) -> None:
        """A backward pass is over; one of a filler has nothing that counts."""
        for name, table in self._tables.items():
            touched = table.module.take_touched()
            if counts:
                self._taken[name] += touched

    def stage(self, claim: Claim) -> None:
        """All backward passes of a part are over: send what they came to."""
        self._staged = []
        for name, table in self._tables.items():
            taken, self._taken[name] = self._taken[name], []
            nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, table.terms.dim, dtype=table.dtype)
            ids, gradient = (sum_rows(taken) or [nothing])[0]
            self._staged.append(gradient)
            for shard, mine in table.places(ids):
                packed = pack(ids.index_select(0, mine), gradient.index_select(0, mine))
                self.line.stage(shard, claim, packed)

    def own_squares(self) -> float:
        """Σ g² of what was staged last."""
        return sum_of_squares(self._staged)

    def squares(self, step: int, parts: Sequence[Any]) -> list[Any]:
        """Σ g² of each shard as a list of one; or {"norm": ...} of the whole gradient, if the update is made."""
        asked = [self.line.ask(shard, "squares", {"parts": parts}, step) for shard in self.shards]
        return [answer().value for answer in asked]

    def send(self, name: str, step: int, args: Mapping[str, Any]) -> None:
        """Have an update made, or dropped, with what the dense shards get; `settle` waits for it."""
        if "settings" in args:
            args = {**args, "settings": args["settings"][:1]}
        self._pending = [self.line.call(shard, name, args, step) for shard in self.shards]

    def settle(self) -> None:
        """Until what was sent is done."""
        pending, self._pending = self._pending, []
        self._settle(pending)

    def facts(self) -> list[dict[str, Any]]:
        """What each shard says of itself: rows, bytes, evicted."""
        return [answer().value for answer in [self.line.ask(shard, "facts") for shard in self.shards]]

    # Checkpoints.

    def pieces(self) -> Iterator[RowPiece]:
        """All rows, piece by piece, those of a table by ascending ids wherever they are; of an empty one, no rows."""
        for name, table in self._tables.items():
            names = [column for column, _, _ in table.layout]
            yield name, {n: torch.empty(0, w, dtype=t) for n, t, w in table.layout}
            for columns in merge([self._dump(table, shard) for shard in table.shards]):
                yield name, dict(zip(names, columns, strict=True))

    def load(self, step: int, pieces: Iterable[RowPiece]) -> None:
        """Become what `pieces` gave, under any number of shards. The first step to come is `step`."""
        self._begun = False
        self.begin(step)
        for name, columns in pieces:
            table = self._tables[name]
            layout = _check_layout(name, table.layout, columns)
            value, packed = pack_piece(layout, [columns[n].to(t) for n, t, _ in layout])
            parts = divide(value, packed, len(table.shards))
            self._settle(
                self.line.call(shard, "load", args, step, tensor)
                for shard, (args, tensor) in zip(table.shards, parts, strict=True)
                if args["count"]
            )

    def _dump(self, table: Table, shard: int) -> Iterator[list[torch.Tensor]]:
        """One shard's rows by ascending ids; the next piece is asked for while this one is used."""
        limit = max(1, _PIECE // table.row_bytes)
        answer = self.line.ask(shard, "dump", {"after": -1, "limit": limit})()
        while answer.value["count"]:
            following = self.line.ask(shard, "dump", {"after": answer.value["last"], "limit": limit})
            yield unpack_piece(answer.value, answer.tensor)[1]
            answer = following()

    @staticmethod
    def _settle(pending: Iterable[Pending]) -> None:
        for answer in list(pending):
            answer()


def merge(streams: Sequence[Iterator[list[torch.Tensor]]]) -> Iterator[list[torch.Tensor]]:
    """Streams of columns, each by ascending ids in the first column, as one such stream.

    >>> one, other = iter([[torch.tensor([1, 4])], [torch.tensor([6])]]), iter([[torch.tensor([2, 9])]])
    >>> [columns[0].tolist() for columns in merge([one, other])]
    [[1, 2, 4], [6], [9]]
    """
    held = {stream: piece for stream in streams if (piece := next(stream, None)) is not None}
    while held:
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


def _terms(name: str, module: SparseEmbedding, optimizer: optim.Optimizer, seed: int, shards: int) -> Terms:
    kind, dtype = type(optimizer), str(module.dtype).removeprefix("torch.")
    if kind.__name__ not in RULES or KINDS.get(kind.__name__) is not kind:
        raise ConfigError(
            f"{kind.__name__} has no rule for single rows, which SparseEmbedding '{name}' needs; use "
            f"{', '.join(RULES)}."
        )
    if dtype not in TYPES:
        raise ConfigError(f"SparseEmbedding '{name}' is of {dtype}; rows can be {', '.join(TYPES)}.")
    description = describe(optimizer)
    return Terms(
        name=name,
        rows=module.rows,
        dim=module.dim,
        dtype=dtype,
        seed=seed,
        std=module.std,
        optimizer={"kind": description["kind"], "groups": description["groups"][:1]},
        capacity=max(1, module.capacity // shards) if module.capacity else 0,
    )


def _check_layout(
    name: str, own: Sequence[tuple[str, torch.dtype, int]], columns: Mapping[str, torch.Tensor]
) -> Sequence[tuple[str, torch.dtype, int]]:
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
