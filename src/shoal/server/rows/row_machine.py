"""A shard of a table of rows, of which only those take memory that have had a gradient.

A row that has had none is computed from (seed, name, id) when it is read. Gradients of parts are staged, and an update
sums those it names in the order of parts, so that bits do not depend on who came first. Only rows with a gradient are
updated, each with its own state and its own count of steps.

With a capacity, the least recently used rows beyond it go after an update; one that comes back starts as it first did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

import torch

from shoal.server.protocol.optimizer_description import OptimizerDescription
from shoal.server.protocol.state_machine import Answer, Machine, Operation, Refused
from shoal.server.rows.initial_values import keyed_rows
from shoal.server.rows.pending_gradients import RowGradient, RowParts, RowPartsState
from shoal.server.rows.row_optimizers import STEP, RowOptimizer, Settings
from shoal.server.rows.row_packing import (
    TYPES,
    RowLayout,
    check_ids,
    cut,
    join,
    joined_size,
    pack_piece,
    unpack_piece,
)
from shoal.server.rows.row_packing import pack as pack
from shoal.server.rows.row_packing import unpack as unpack
from shoal.server.rows.row_table import VALUES, RowTable
from shoal.server.rows.slot_map import ABSENT, Ids

_CHUNK = 1 << 16
"""Numbers of each kind that an update works on at a time: what stays in the cache."""


@dataclass(frozen=True)
class TableTerms:
    """What a table is."""

    name: str
    rows: int
    """Ids are 0 to this, exclusively."""
    dim: int
    dtype: str
    seed: int
    std: float
    optimizer: OptimizerDescription
    """{"kind": "AdamW", "groups": [{settings}]}, one group."""
    capacity: int = 0
    """Rows of this shard that may take memory; 0: all."""

    @classmethod
    def of(cls, args: object) -> TableTerms:
        """From outside: checked."""
        fine = False
        try:
            made = cls(**args) if isinstance(args, dict) else None
            fine = made is not None and (
                made.dim > 0
                and made.rows > 0
                and made.capacity >= 0
                and made.std >= 0
                and made.dtype in TYPES
            )
        except TypeError:
            made = None
        if made is None or not fine:
            raise Refused(
                f"a table cannot be made of {args!r}; give name, seed, std, optimizer, a dtype of {', '.join(TYPES)}, "
                "and rows and dim of 1 or more."
            )
        return made


class RowState(TypedDict):
    """A snapshot of a shard, beside the columns of its rows and what is staged."""

    terms: dict[str, object]
    settings: Settings
    version: int
    parts: RowPartsState
    rows: int
    now: int
    evicted: int


class RowMachine(Machine):
    """One shard of a table of rows."""

    def __init__(self) -> None:
        self._terms: TableTerms | None = None

    def begin(self, terms: TableTerms, start: int) -> None:
        """Be an empty table whose first step is `start`."""
        self._optimizer = RowOptimizer.of(terms.optimizer)
        self._dtype = TYPES[terms.dtype]
        self._terms = terms
        self._version = 0
        self._table = RowTable(terms.dim, self._dtype, self._optimizer.state, terms.capacity)
        self._parts = RowParts(terms.dim, self._dtype, start)

    def _check_set_up(self) -> None:
        if self._terms is None:
            raise Refused("this shard of a table has not been set up; send it init first.")

    @property
    def _set(self) -> TableTerms:
        assert self._terms is not None
        return self._terms

    def apply(self, op: Operation) -> Answer:
        calls: dict[str, Callable[[Operation], Answer]] = {
            "init": self._init,
            "stage": self._stage,
            "apply": self._apply,
            "drop": self._drop,
            "load": self._load,
        }
        if op.name not in calls:
            raise Refused(f"a table of rows cannot '{op.name}'; it can {', '.join(calls)}.")
        if op.name != "init":
            self._check_set_up()
        return calls[op.name](op)

    def answer(self, op: Operation) -> Answer | None:
        questions: dict[str, Callable[[Operation], Answer | None]] = {
            "rows": self._read,
            "gradient": self._gradient,
            "squares": self._squares,
            "dump": self._dump,
            "facts": lambda _: Answer(self.facts()),
        }
        if op.name not in questions:
            raise Refused(f"a table of rows cannot be asked for '{op.name}'; ask for {', '.join(questions)}.")
        self._check_set_up()
        return questions[op.name](op)

    def _init(self, op: Operation) -> Answer:
        """Replaces everything, before training begins. The first step to come is that of the operation."""
        late = self._terms is not None and self._parts.begun  # of a worker that was thought lost
        # A late one is still checked, on a machine that is thrown away: every copy must refuse or accept alike.
        (RowMachine() if late else self).begin(TableTerms.of(op.args), op.clock)
        return Answer({})

    def _stage(self, op: Operation) -> Answer:
        part = _whole(op, "part")
        if self._parts.is_over(op.clock, part) or self._parts.has(op.clock, part):
            return Answer({"dup": True})
        ids, rows = unpack(op.tensor, self._set.dim, self._dtype)
        self._parts.stage(op.clock, part, check_ids(ids, self._set.rows), rows)
        return Answer({})

    def _apply(self, op: Operation) -> Answer:
        parts = _parts(op)
        floor = _whole(op, "floor", 0)
        factor = _number(op, "factor", 1.0)
        share = _number(op, "share", 1.0)
        limit = None if op.args.get("limit") is None else _number(op, "limit", 0.0)
        if any(self._parts.is_over(op.clock, part) for part in parts):
            return Answer({"dup": True})
        gradient = self._parts.sum(op.clock, parts)
        settings = op.args.get("settings")
        if settings is not None:
            self._optimizer = self._optimizer.with_settings(settings)
        if factor != 1.0:
            # In place: the sum of several parts is new memory, and a single part goes with this update.
            gradient.rows.mul_(factor)
        if limit is not None:
            gradient.rows.clamp_(-limit, limit)
        self._step(gradient, op.clock, share)
        self._parts.finish(op.clock, parts, floor, op.args.get("norm"))
        self._version += 1
        return Answer({"version": self._version})

    def _step(self, gradient: RowGradient, clock: int, share: float) -> None:
        """One step of the optimizer on the rows that have a gradient, which is used up."""
        table = self._table
        slots, new = table.enter(gradient.ids)
        values = table.columns[VALUES]
        steps = table.columns[STEP]
        # Rows come into being at their first update; before it, a read computes the same first values from the seed.
        if bool(new.any()):
            values.put(slots[new], self._first_rows(gradient.ids[new.numpy()]))
        each = max(1, _CHUNK // self._set.dim)
        # In pieces: the temporaries of an optimizer step stay in the cache.
        for start in range(0, len(slots), each):
            some = slots[start : start + each]
            part = gradient.rows[start : start + each]
            rows = values.take(some)
            state = {name: table.columns[key].take(some) for name, key in table.state.items()}
            self._optimizer.update(rows, part, state, steps.take(some).view(-1), share)
            values.put(some, rows)
            for name, key in table.state.items():
                table.columns[key].put(some, state[name])
        table.touch(slots, clock)
        table.evict()

    def _drop(self, op: Operation) -> Answer:
        self._parts.finish(op.clock, _parts(op), _whole(op, "floor", 0), op.args.get("norm"))
        return Answer({})

    def _load(self, op: Operation) -> Answer:
        """Rows with their state: a piece from a dump, which may be of any shard of this table."""
        layout, columns = unpack_piece(op.args, op.tensor)
        own = self._table.layout
        if list(layout) != list(own):
            raise Refused(
                f"rows with {_words(layout)} came for a table with {_words(own)}; load them with the dim, dtype and "
                "optimizer that they were saved with."
            )
        check_ids(columns[0].view(-1), self._set.rows)
        if not self._parts.begun:
            self._table.load(columns)
            self._table.evict()
        return Answer({})

    def _read(self, op: Operation) -> Answer | None:
        """Rows by id; an id may occur twice. Not before the steps below `applied` are."""
        terms = self._set
        # None: the question is parked until then.
        if op.args and self._parts.reached < _whole(op, "applied", 0):
            return None
        if op.tensor is None:
            raise Refused("rows were asked for without ids; give them as one flat int64 tensor.")
        ids = check_ids(op.tensor, terms.rows, unique=False)
        slots = self._table.find(ids)
        values = self._table.columns[VALUES]
        known = slots != ABSENT
        if known.all():
            rows = values.take(torch.from_numpy(slots))
        else:
            rows = torch.empty(ids.size, terms.dim, dtype=self._dtype)
            rows[torch.from_numpy(known)] = values.take(torch.from_numpy(slots[known]))
            rows[torch.from_numpy(~known)] = self._first_rows(ids[~known])
        return Answer({"version": self._version}, rows.view(-1))

    def _first_rows(self, ids: Ids) -> torch.Tensor:
        terms = self._set
        return keyed_rows(terms.seed, terms.name, ids, terms.dim, terms.std, self._dtype)

    def _gradient(self, op: Operation) -> Answer | None:
        """What an update of these parts would use, before its factor; not before all of them are here."""
        if (found := self._parts.look(op.clock, _parts(op))) is None:
            return None
        return Answer({"count": found.ids.size}, pack(torch.from_numpy(found.ids), found.rows))

    def _squares(self, op: Operation) -> Answer | None:
        """The sum of its squares; of a step whose update is made, the norm that it had."""
        parts = _parts(op)
        # Another worker was quicker with the update: all go by the norm it used.
        if all(self._parts.is_over(op.clock, part) for part in parts):
            return Answer({"norm": self._parts.norms.get(op.clock)})
        found = self._parts.look(op.clock, parts)
        return None if found is None else Answer([found.squares()])

    def _dump(self, op: Operation) -> Answer:
        """The next rows by id: `after` is the `last` of the piece before, at first -1. The end is an empty piece."""
        after = _whole(op, "after")
        limit = max(1, _whole(op, "limit"))
        slots = self._table.after(after, limit)
        columns = [column.take(slots) for column in self._table.columns.values()]
        value, packed = pack_piece(self._table.layout, columns)
        return Answer({**value, "last": int(columns[0][-1]) if len(slots) else after}, packed)

    def facts(self) -> dict[str, object]:
        """Name of the table, rows, bytes and evictions of this shard."""
        return {"name": self._set.name, **self._counts()}

    def _counts(self) -> dict[str, int]:
        counts = {"rows": len(self._table), "evicted": self._table.evicted, "bytes": self._table.nbytes}
        return {**counts, "staged": len(self._parts), "version": self._version}

    def metrics(self) -> dict[str, float]:
        counts = {} if self._terms is None else self._counts()
        return {key: float(value) for key, value in counts.items()}

    def snapshot(self) -> tuple[RowState | None, torch.Tensor]:
        if self._terms is None:
            return None, torch.empty(0, dtype=torch.uint8)
        parts, staged = self._parts.snapshot()
        value: RowState = {
            "terms": asdict(self._terms),
            "settings": dict(self._optimizer.settings),
            "version": self._version,
            "parts": parts,
            "rows": len(self._table),
            "now": self._table.now,
            "evicted": self._table.evicted,
        }
        return value, join([*(column.tensor for column in self._table.columns.values()), *staged])

    def restore(self, value: RowState | None, tensor: torch.Tensor) -> None:
        self._terms = None
        if value is None:
            return
        self.begin(TableTerms.of(value["terms"]), 0)
        self._optimizer = self._optimizer.with_settings([value["settings"]])
        self._version = value["version"]
        table = self._table
        kinds = [(value["rows"] * width, dtype) for _, dtype, width in table.layout]
        size = joined_size(kinds)
        held = cut(tensor[:size], kinds)
        table.load(
            [t.view(value["rows"], c.width) for t, c in zip(held, table.columns.values(), strict=True)]
        )
        table.now = value["now"]
        table.evicted = value["evicted"]
        self._parts.restore(value["parts"], tensor[size:])


def _words(layout: RowLayout) -> str:
    return ", ".join(f"{name} ({width} {str(dtype).removeprefix('torch.')})" for name, dtype, width in layout)


def _parts(op: Operation) -> list[int]:
    """Parts from outside: [part, count] each, or part alone; unique, in order."""
    named = op.args.get("parts") if isinstance(op.args, dict) else None
    listed: Sequence[object] = named if isinstance(named, list | tuple) else [None]
    found = [one[0] if isinstance(one, list | tuple) and one else one for one in listed]
    numbers = [one for one in found if isinstance(one, int) and not isinstance(one, bool)]
    if len(numbers) < len(found):
        raise Refused(f"'{op.name}' came with parts {named!r}; name them as [[part, count], ...].")
    return sorted(set(numbers))


def _whole(op: Operation, name: str, default: int | None = None) -> int:
    found = op.args.get(name, default) if isinstance(op.args, dict) else None
    if type(found) is not int:
        raise Refused(f"'{op.name}' came with {name}={found!r}; give a whole number.")
    return found


def _number(op: Operation, name: str, default: float) -> float:
    found = op.args.get(name, default)
    if type(found) not in (int, float):
        raise Refused(f"'{op.name}' came with {name}={found!r}; give a number.")
    return float(found)
