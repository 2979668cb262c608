"""The tables of a model: every SparseEmbedding, its rows spread over shards by a hash of their ids.

A forward pass fetches the rows of its ids from all shards at once. After the backward passes of a part its gradients
are staged at every shard of every table, an empty one where a shard has none of its ids: so a shard knows of every
part, and an update names the same parts everywhere. Updates and drops are those of the dense shards.

Rows follow the settings of the optimizer's first group, as its schedule changes them. They are summed, never compared:
of aggregates, only weighted sums know what to do with a row that one part has and another has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

import torch
from torch import nn, optim

from shoal.aggregate import make_aggregate
from shoal.embedding import SparseEmbedding, sum_rows
from shoal.errors import ConfigError
from shoal.exchange.buckets.norms import sum_of_squares
from shoal.exchange.contract import Exchange
from shoal.exchange.embeddings.back_ends import Claim, Pending, RowBackend
from shoal.exchange.embeddings.row_requests import PrefetchedRows, RowRequest
from shoal.exchange.embeddings.sharded_table import ShardedTable, check_layout, merge, terms_of
from shoal.exchange.row_tables import RowPiece, RowTables
from shoal.server.protocol.dense_messages import KnownNorm, NamedParts, UpdateArguments
from shoal.server.protocol.messages import Plain
from shoal.server.rows.row_packing import divide, pack, pack_piece, unpack_piece

_PIECE = 8 * 2**20
"""Bytes of rows that are under way at a time, from each shard or to all, when a table is saved or loaded."""


def find_tables(model: nn.Module) -> dict[str, SparseEmbedding]:
    """Every SparseEmbedding by its name in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseEmbedding)}


def check_rows(model: nn.Module, chosen: type[Exchange]) -> None:
    """Refuse a model with tables where nobody can keep their rows."""
    for name in () if chosen.keeps_rows else find_tables(model):
        raise ConfigError(f"SparseEmbedding '{name}' keeps its rows on servers; use ps or solo.")


class StepClaim(Protocol):
    """What tables ask about the step that this worker has claimed from the ledger."""

    @property
    def together(self) -> bool:
        """Whether all workers do the same step."""

    def may_prefetch(self, step: int) -> bool:
        """Whether rows of that step may be asked for already."""


class Tables(RowTables):
    """All tables of a model, as one worker uses them."""

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, seed: int, shards: int, first: int
    ) -> None:
        """`shards` of each table, numbered from `first` on."""
        self._tables: dict[str, ShardedTable] = {}
        for name, module in find_tables(model).items():
            numbers = tuple(range(first, first + shards))
            self._tables[name] = ShardedTable(
                module, terms_of(name, module, optimizer, seed, shards), numbers
            )
            first += shards
        self.applied: int | None = None
        """Rows are read with all steps below this one in them; None: as they are."""
        self._coming: dict[int, dict[str, PrefetchedRows]] = {}
        """By step: what has been asked for ahead."""
        self._known: dict[str, PrefetchedRows] = {}
        """Prefetched rows of this step, by table."""
        self._own: dict[str, torch.Tensor] = {}
        """Ids that this worker has changed last."""
        self.names = tuple(self._tables)
        self._line: RowBackend | None = None
        self._turn: StepClaim | None = None
        self._begun = False
        self._taken: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in self._tables}
        self._staged: list[torch.Tensor] = []
        self._pending: list[Pending] = []

    def __len__(self) -> int:
        return len(self._tables)

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

    def signature(self) -> list[list[Plain]]:
        """Name, shape and type of each table: equal on all workers."""
        return [[n, [t.terms.rows, t.terms.dim], str(t.dtype), True] for n, t in self._tables.items()]

    def check_aggregate(self, text: str) -> None:
        """Refuse an aggregate that does not sum."""
        if self._tables and not make_aggregate(text).sums:
            raise ConfigError(
                f"aggregate={text} does not know rows that some parts of a step have and others have not, as "
                f"SparseEmbedding '{self.names[0]}' has them; use aggregate=weighted."
            )

    def connect(self, line: RowBackend, turn: StepClaim | None = None) -> None:
        """Bring rows to the modules from now on, by the clock of a worker's turn."""
        self._line = line
        self._turn = turn
        for name, table in self._tables.items():
            table.module.source = self
            table.module.name = name

    @property
    def line(self) -> RowBackend:
        assert self._line is not None
        return self._line

    def begin(self, step: int, first_rows: bool = True) -> None:
        """Have tables of first values alone, whose first step is `step`; what has been loaded stays."""
        if not self._begun:
            self._begun = True
            self._settle(
                self.line.call(shard, "init", asdict(table.terms), step)
                for table in self._tables.values()
                for shard in table.shards
            )
            for name, table in self._tables.items() if first_rows else ():
                for ids, values in table.module.initial() if table.module.initial is not None else ():
                    self._put(step, name, table.new_rows(ids, values))

    # The step.

    def fetch(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, which are unique."""
        known = self._known.get(name)
        if known is None:
            return self._ask(name, ids, self.applied).rows()
        return known.rows(ids, lambda some: self._ask(name, some, self.applied).rows())

    def _ask(self, name: str, ids: torch.Tensor, applied: int | None) -> RowRequest:
        table, args = self._tables[name], None if applied is None else {"applied": applied}
        width = table.terms.dim * table.dtype.itemsize
        parts = [
            (
                mine,
                self.line.ask(
                    shard, "rows", args, tensor=ids.index_select(0, mine), expects=len(mine) * width
                ),
            )
            for shard, mine in table.places(ids)
            if len(mine)
        ]
        return RowRequest(ids, table.terms.dim, table.dtype, parts)

    def may_prefetch(self, step: int) -> bool:
        said = any(table.module.ids is not None for table in self._tables.values())
        return said and self._turn is not None and self._turn.may_prefetch(step)

    def prefetch(self, step: int, now: Sequence[object], coming: Sequence[object]) -> None:
        """Ask for the rows of the next step's batches, while this worker computes with those of `now`.

        Where all parts make one update, the question waits at its server until that is made, and what comes is
        what a later question would get. Elsewhere it is answered at once, but for ids that this worker is about to
        change: what it has done itself, it must see.
        """
        self._coming[step], together = {}, self._together
        for name, table in self._tables.items():
            ids = table.module.coming_ids(coming)
            mine = None if together else table.module.coming_ids(now)
            if ids is not None:
                ids = ids if mine is None else ids[~torch.isin(ids, mine)]
                self._coming[step][name] = PrefetchedRows.of(self._ask(name, ids, step if together else None))

    @property
    def _together(self) -> bool:
        return self._turn is None or self._turn.together

    def enter(self, step: int) -> None:
        """The step begins. What was asked for ahead is used now, or never."""
        self.applied = step if self._together else None
        self._known = self._coming.pop(step, {})
        if not self._together:
            self._known = {name: known.without(self._own[name]) for name, known in self._known.items()}
        self._coming = {later: known for later, known in self._coming.items() if later > step}

    def leave(self) -> None:
        """The step is over."""
        self.applied = None
        self._known = {}

    def take(self, counts: bool) -> None:
        """A backward pass is over; one of a filler has nothing that counts."""
        for name, table in self._tables.items():
            # Taken even if they do not count: a filler's rows must not be found by the next pass.
            touched = table.module.take_touched()
            if counts:
                self._taken[name] += touched

    def stage(self, claim: Claim) -> None:
        """All backward passes of a part are over: send what they came to."""
        self._staged = []
        for name, table in self._tables.items():
            taken, self._taken[name] = self._taken[name], []
            nothing = (
                torch.empty(0, dtype=torch.int64, device="cpu"),
                torch.empty(0, table.terms.dim, dtype=table.dtype, device="cpu"),
            )
            ids, gradient = (sum_rows(taken) or [nothing])[0]
            self._staged.append(gradient)
            self._own[name] = ids
            for shard, mine in table.places(ids):
                # Sent to every shard, also where it has no rows: a part counts as staged only when all shards have
                # heard of it.
                packed = pack(ids.index_select(0, mine), gradient.index_select(0, mine))
                self.line.stage(shard, claim, packed)

    def own_squares(self) -> float:
        """Σ g² of what was staged last."""
        return sum_of_squares(self._staged)

    def squares(self, step: int, parts: Sequence[Sequence[float]]) -> list[list[float] | KnownNorm]:
        """Σ g² of each shard as a list of one; or {"norm": ...} of the whole gradient, if the update is made."""
        answers = [self.line.ask(shard, "squares", {"parts": parts}, step) for shard in self.shards]
        return [answer().value for answer in answers]

    def send(self, name: str, step: int, args: NamedParts | UpdateArguments) -> None:
        """Have an update made, or dropped, with what the dense shards get; `settle` waits for it."""
        mine: dict[str, object] = {**args}
        if isinstance(settings := args.get("settings"), list):
            mine["settings"] = settings[:1]  # the rows of a table share one group
        self._pending = [self.line.call(shard, name, mine, step) for shard in self.shards]

    def settle(self) -> None:
        """Until what was sent is done."""
        pending = self._pending
        self._pending = []
        self._settle(pending)

    def facts(self) -> list[dict[str, object]]:
        """What each shard says of itself: rows, bytes, evicted."""
        return [answer().value for answer in [self.line.ask(shard, "facts") for shard in self.shards]]

    # Checkpoints.

    def pieces(self) -> Iterator[RowPiece]:
        """Piece by piece, those of a table by ascending ids wherever they are; of an empty one, no rows."""
        for name, table in self._tables.items():
            names = [column for column, _, _ in table.layout]
            yield name, {n: torch.empty(0, w, dtype=t, device="cpu") for n, t, w in table.layout}
            for columns in merge([self._dump(table, shard) for shard in table.shards]):
                yield name, dict(zip(names, columns, strict=True))

    def load(self, step: int, pieces: Iterable[RowPiece]) -> None:
        """Become what `pieces` gave, under any number of shards. The first step to come is `step`."""
        self._begun = False
        self.begin(step, first_rows=False)
        for name, columns in pieces:
            self._put(step, name, columns)

    def _put(self, step: int, name: str, columns: Mapping[str, torch.Tensor]) -> None:
        """Rows with all that belongs to them, to the shards that they are of."""
        table = self._tables[name]
        layout = check_layout(name, table.layout, columns)
        value, packed = pack_piece(layout, [columns[n].to(t) for n, t, _ in layout])
        parts = divide(value, packed, len(table.shards))
        self._settle(
            self.line.call(shard, "load", args, step, tensor)
            for shard, (args, tensor) in zip(table.shards, parts, strict=True)
            if args["count"]
        )

    def _dump(self, table: ShardedTable, shard: int) -> Iterator[list[torch.Tensor]]:
        """One shard's rows by ascending ids; the next piece is asked for while this one is used."""
        limit = max(1, _PIECE // table.row_bytes)

        def ask(after: int) -> Pending:
            return self.line.ask(shard, "dump", {"after": after, "limit": limit}, expects=_PIECE)

        answer = ask(-1)()
        while answer.value["count"]:
            # Before this piece is used: the shard works on the next one meanwhile.
            following = ask(answer.value["last"])
            yield unpack_piece(answer.value, answer.tensor)[1]
            answer = following()

    @staticmethod
    def _settle(pending: Iterable[Pending]) -> None:
        for answer in list(pending):
            answer()
