"""A shard of dense parameters: values, their optimizer, and gradients that wait for their update.

Changes
    init     values, pieces and optimizer; `clock` is the step that training begins with
    state    one key of the optimizer's state, from a checkpoint
    stage    the gradient of a part of a step
    apply    make one gradient of the named parts, and one optimizer step with it
    drop     forget the named parts instead
Questions
    values   the values, as soon as all steps below a number are over: applied or dropped
    gradient, squares    the gradient of staged parts, or Σ g² over ranges of it; after the update, the norm it had
    keys, state          the optimizer's state, for a checkpoint

Everything that can be said twice is done once: who does not know whether a call arrived sends it again. Every operation
is checked in full before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import torch

from shoal.errors import ConfigError
from shoal.server.dense import arguments
from shoal.server.dense.arguments import Named
from shoal.server.dense.dense_shard import DenseShard, ShardState
from shoal.server.protocol.session import MALFORMED
from shoal.server.protocol.state_machine import Answer, Machine, Operation, Refused, natural

_LATE = 8
"""Norms of so many steps before the floor are remembered: a slow worker may still ask for them."""
_UNREADABLE = (Refused, ConfigError, AssertionError, *MALFORMED)  # torch asserts that its optimizers can run


class DenseState(TypedDict):
    """A snapshot of the machine, beside the tensors of its shard."""

    shard: ShardState
    floor: int
    done: list[tuple[int, list[int]]]
    """(step, its parts that are done)"""
    norms: list[tuple[int, float | None]]
    kept: int | None
    """The step of the gradient that is kept."""


class Dense(Machine):
    """The state machine of one dense shard."""

    def __init__(self) -> None:
        self._shard: DenseShard | None = None
        self._floor = 0
        """All steps below are over."""
        self._done: dict[int, set[int]] = {}
        """By step from the floor on: parts that were applied or dropped."""
        self._norms: dict[int, float | None] = {}
        """By step: the norm that an update was made with, for workers that come to it later."""
        self._kept: tuple[int, torch.Tensor] | None = None
        """The gradient of the last update, where it was to be kept."""
        self._seen: tuple[int, Named, torch.Tensor] | None = None
        """The last gradient that was asked for and had to be computed: its update mostly follows."""

    def apply(self, op: Operation) -> Answer:
        changes = {
            "init": self._init,
            "state": self._load,
            "stage": self._stage,
            "apply": self._apply,
            "drop": self._drop,
        }
        if op.name not in changes:
            raise Refused(f"a dense shard knows no operation '{op.name}'.")
        return changes[op.name](op)

    def answer(self, op: Operation) -> Answer | None:
        questions = {
            "values": self._values,
            "gradient": self._gradient,
            "squares": self._squares,
            "keys": self._keys,
            "state": self._state,
        }
        if op.name not in questions:
            raise Refused(f"a dense shard knows no question '{op.name}'.")
        if self._shard is None:
            return None
        try:
            return questions[op.name](self._shard, op)
        except _UNREADABLE as error:
            raise arguments.refusal(op, error) from None

    # Changes.

    @property
    def _begun(self) -> bool:
        """Whether training has: first values are for a shard that has had no gradient."""
        return bool(self._done) or (self._shard is not None and bool(self._shard.staged.steps))

    def _init(self, op: Operation) -> Answer:
        # Initial values may come twice; memory is used again, so that workers which have it mapped see the new ones.
        before = None if self._shard is None or self._begun else self._shard.memory
        try:
            clock = natural(op.clock, "the step")
            shard = DenseShard.make(op.args, arguments.flat(op.tensor), before)
        except _UNREADABLE as error:
            raise arguments.refusal(op, error) from None
        if self._begun:  # of a worker that was thought lost, and comes late
            shard.memory.close()
            return Answer({"dup": True})
        if before is not None and before is not shard.memory:
            before.close()
        self._shard = shard
        self._seen = None
        self._floor = clock
        self._done = {}
        self._norms = {}
        self._kept = None
        return Answer({"dup": False, "version": shard.memory.version})

    def _load(self, op: Operation) -> Answer:
        shard = self._ready(op)
        try:
            entry = arguments.entry(op.args, op.tensor, shard.size, len(shard.trained.pieces))
            takes = shard.trained.takes(entry) and not self._begun
        except _UNREADABLE as error:
            raise arguments.refusal(op, error) from None
        if takes:
            shard.trained.write(entry)
        return Answer({"kept": takes})

    def _stage(self, op: Operation) -> Answer:
        shard = self._ready(op)
        try:
            part = natural(op.args["part"], "the part")
            micro = natural(op.args.get("micro", 0), "the micro-batch")
            gradient = shard.gradient_of(op, micro)
        except _UNREADABLE as error:
            raise arguments.refusal(op, error) from None
        # A call that comes again after a change of head, or the part of a worker that was thought lost.
        if self._is_done(op.clock, part) or shard.staged.has(op.clock, part, micro):
            return Answer({"dup": True})
        self._unsee(op.clock)
        shard.staged.add(op.clock, part, micro, gradient)
        return Answer({"dup": False})

    def _apply(self, op: Operation) -> Answer:
        shard = self._ready(op)
        try:
            update = arguments.update(op.args, len(shard.trained.pieces))
            parts = update.named.parts
            if self._are_done(op.clock, parts):
                return Answer({"dup": True, "version": shard.memory.version})
            self._check(op.clock, parts, needed=True)
            shard.trained.check(update.settings)
            shard.trained.check_state()
        except _UNREADABLE as error:
            raise arguments.refusal(op, error) from None
        # All checks are over: from here on nothing may fail, or copies would differ.
        gradient = self._take(shard, op.clock, update.named)
        if op.args.get("keep"):
            self._kept = (op.clock, gradient.clone())
        shard.trained.set(update.settings)
        # Readers on this host look into the memory itself; the sequence number is odd while it changes.
        with shard.memory.writing():
            shard.trained.step(gradient, update.used, update.factor, update.limit, update.share)
        shard.staged.pool.give_back(gradient)
        self._finish(shard, op, parts, update.floor)
        return Answer({"dup": False, "version": shard.memory.version})

    def _drop(self, op: Operation) -> Answer:
        shard = self._ready(op)
        try:
            words = [part[0] if isinstance(part, list | tuple) else part for part in op.args["parts"]]
            parts = arguments.distinct(words)
            floor = natural(op.args.get("floor", 0), "floor")
            if self._are_done(op.clock, parts):
                return Answer({"dup": True})
            self._check(op.clock, parts, needed=False)
        except _UNREADABLE as error:
            raise arguments.refusal(op, error) from None
        self._unsee(op.clock)
        shard.staged.forget(op.clock, parts)
        self._finish(shard, op, parts, floor)
        return Answer({"dup": False})

    def _ready(self, op: Operation) -> DenseShard:
        if self._shard is None:
            raise Refused(f"{op.name} came before init; give the shard its values first.")
        if op.clock < 0:
            raise Refused(f"{op.name} of step {op.clock}: steps are counted from 0 on.")
        return self._shard

    def _is_done(self, step: int, part: int) -> bool:
        return step < self._floor or part in self._done.get(step, ())

    def _are_done(self, step: int, parts: Iterable[int]) -> bool:
        over = step < self._floor or step in self._done
        return over and all(self._is_done(step, part) for part in parts)

    def _check(self, step: int, parts: tuple[int, ...], needed: bool) -> None:
        """Whether these parts can be taken by themselves."""
        assert self._shard is not None
        done = [part for part in parts if self._is_done(step, part)]
        if needed and done:
            raise Refused(f"parts {done} are done and others named with them are not; name those alone.")
        missing = [part for part in parts if not self._shard.staged.has(step, part)]
        if needed and missing:
            raise Refused(f"parts {missing} are not staged; stage them first.")
        others = self._shard.staged.inseparable(step, parts)
        if others:
            raise Refused(
                f"parts {others} are in one sum with those named; name all, or init the shard with hold."
            )

    def _take(self, shard: DenseShard, step: int, named: Named) -> torch.Tensor:
        seen = self._seen
        self._seen = None
        # The sum was made for the norm already; clipping asks first, and the update takes it over.
        if seen is not None and seen[:2] == (step, named):
            shard.staged.forget(step, named.parts)
            return seen[2]
        if seen is not None:
            shard.staged.pool.give_back(seen[2])
        return shard.staged.take(step, named.parts, named.counts)

    def _unsee(self, step: int) -> None:
        if self._shard is not None and self._seen is not None and self._seen[0] == step:
            self._shard.staged.pool.give_back(self._seen[2])
            self._seen = None

    def _finish(self, shard: DenseShard, op: Operation, parts: Iterable[int], floor: int) -> None:
        self._done.setdefault(op.clock, set()).update(parts)
        norm = op.args.get("norm")
        self._norms[op.clock] = None if norm is None else float(norm)
        if floor > self._floor:
            self._floor = floor
            if self._seen is not None and self._seen[0] < floor:
                self._unsee(self._seen[0])
            shard.staged.forget_below(floor)
            self._done = {step: parts for step, parts in self._done.items() if step >= floor}
            # Kept for some steps below the floor, for workers that are late.
            self._norms = {step: norm for step, norm in self._norms.items() if step >= floor - _LATE}

    # Questions.

    def _values(self, shard: DenseShard, op: Operation) -> Answer | None:
        wanted = natural((op.args or {}).get("applied", 0), "applied")
        over = self._floor
        # Steps that are applied here, though the ledger has not moved the floor yet.
        while over in self._done:
            over += 1
        if over < wanted:
            return None
        return Answer({"version": shard.memory.version}, shard.memory.tensor, shard.memory.where)

    def _gradient(self, shard: DenseShard, op: Operation) -> Answer | None:
        found = self._look(shard, op)
        return None if found is None else Answer(tensor=found.clone())

    def _squares(self, shard: DenseShard, op: Operation) -> Answer | None:
        ranges = [tuple(natural(end, "the end of a range") for end in pair) for pair in op.args["ranges"]]
        if not all(start <= stop <= shard.size for start, stop in ranges):
            raise Refused(f"the ranges {ranges} are not all within the shard's {shard.size} values.")
        if self._are_done(op.clock, arguments.named(op.args["parts"]).parts):
            return Answer({"norm": self._norms.get(op.clock)})
        found = self._look(shard, op)
        if found is None:
            return None
        norms = [float(torch.linalg.vector_norm(found[start:stop])) for start, stop in ranges]
        return Answer([norm * norm for norm in norms])  # not ** 2, which raises where a product is infinite

    def _look(self, shard: DenseShard, op: Operation) -> torch.Tensor | None:
        """The gradient of the parts that a question names; None if one is not staged yet."""
        named = arguments.named(op.args["parts"])
        if self._kept is not None and self._kept[0] == op.clock:
            return self._kept[1]
        if self._seen is not None and self._seen[:2] == (op.clock, named):
            return self._seen[2]
        if any(self._is_done(op.clock, part) for part in named.parts):
            raise Refused(f"of parts {list(named.parts)} some are done, and their gradients are gone.")
        if not all(shard.staged.has(op.clock, part) for part in named.parts):
            return None
        self._check(op.clock, named.parts, needed=True)
        gradient, mine = shard.staged.look(op.clock, named.parts, named.counts)
        if mine:
            if self._seen is not None:
                shard.staged.pool.give_back(self._seen[2])
            self._seen = (op.clock, named, gradient)
        return gradient

    def _keys(self, shard: DenseShard, op: Operation) -> Answer:
        del op
        return Answer(shard.trained.state_keys())

    def _state(self, shard: DenseShard, op: Operation) -> Answer:
        entry = shard.trained.read(str(op.args["key"]))
        return Answer(entry.plain(), entry.tensor if entry.each else None)

    # The whole.

    def snapshot(self) -> tuple[DenseState | None, torch.Tensor]:
        if self._shard is None:
            return None, torch.empty(0, dtype=torch.uint8)
        # A kept gradient is an answer that workers may still ask for: a copy that joins now must be able to give it.
        kept = self._kept
        value, tensor = self._shard.save(None if kept is None else kept[1])
        done = [(step, sorted(parts)) for step, parts in sorted(self._done.items())]
        state: DenseState = {
            "shard": value,
            "floor": self._floor,
            "done": done,
            "norms": list(self._norms.items()),
            "kept": kept and kept[0],
        }
        return state, tensor

    def restore(self, value: DenseState | None, tensor: torch.Tensor) -> None:
        before = None if self._shard is None else self._shard.memory
        shard, kept = (None, None) if value is None else DenseShard.load(value["shard"], tensor)
        if before is not None:
            before.close()
        self._shard = shard
        self._seen = None
        self._floor = 0 if value is None else int(value["floor"])
        self._done = {} if value is None else {int(step): set(parts) for step, parts in value["done"]}
        self._norms = dict(() if value is None else value["norms"])
        self._kept = None
        if value is not None and value["kept"] is not None and kept is not None:
            self._kept = (value["kept"], kept)

    def metrics(self) -> dict[str, float]:
        return {} if self._shard is None else self._shard.metrics()
