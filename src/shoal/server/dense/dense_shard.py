"""What a dense shard holds, and all of it as bytes for a server that joins."""

from __future__ import annotations

from typing import TypedDict

import torch

from shoal.aggregate import make_aggregate
from shoal.server.dense import arguments
from shoal.server.dense.shard_values import Values
from shoal.server.dense.staged_gradients import Micro, Staged
from shoal.server.dense.trained_vector import Entry, Trained
from shoal.server.protocol.dense_messages import InitArguments
from shoal.server.protocol.encoded_gradient import Decoder, turn_of
from shoal.server.protocol.joined_tensors import join, separate
from shoal.server.protocol.optimizer_description import Settings
from shoal.server.protocol.state_machine import Operation, Refused
from shoal.world.shm.memory import put


class ShardState(TypedDict):
    """A snapshot of a shard, beside its tensors joined."""

    given: InitArguments
    settings: list[Settings]
    version: int
    entries: list[tuple[str, list[int], bool]]
    """(key, pieces, each) of the optimizer's state"""
    staged: list[tuple[int, int, int, list[int]]]
    """(step, micro-batch, parts that are summed, parts that wait one by one)"""
    layout: list[list[int | str]]


class DenseShard:
    """Values with their optimizer, and staged gradients."""

    def __init__(self, given: InitArguments, memory: Values) -> None:
        """`given`: what `init` said. Values stay as they are. Raises if they cannot be trained so."""
        self.given: InitArguments = {
            "pieces": given["pieces"],
            "optimizer": given["optimizer"],
            "aggregate": given["aggregate"],
            "hold": given["hold"],
        }
        if "code" in given:
            self.given["code"] = given["code"]
        self.memory = memory
        values = memory.tensor
        pieces = arguments.pieces(given["pieces"], values.numel())
        aggregate = make_aggregate(str(given["aggregate"]))
        self.trained = Trained(values, pieces, given["optimizer"])
        self.staged = Staged(values.numel(), values.dtype, aggregate, bool(given["hold"]))
        ranges = [(piece.start, piece.numel) for piece in pieces]
        code = str(given.get("code", ""))
        self._decoder = Decoder(code, values.numel(), values.dtype, ranges) if code else None

    @classmethod
    def make(cls, given: InitArguments, values: torch.Tensor, before: Values | None) -> DenseShard:
        """With these values, in the memory of a shard before it if that fits, which changes last."""
        size = values.numel()
        dtype = values.dtype
        fits = before is not None and before.fits(size, dtype)
        # Versions go on, so that a reader that has the old memory mapped notices the change.
        version = 0 if before is None else before.version
        memory = before if before is not None and fits else Values(size, dtype, version)
        # Before the values are written: if the optimizer is refused, the shard before it is as it was.
        shard = cls(given, memory)
        with memory.writing():
            put(memory.tensor, values)
        return shard

    def gradient_of(self, op: Operation, micro: int) -> torch.Tensor:
        """What came along, as one number a value; borrowed until the next."""
        if not op.codec:
            return arguments.flat(op.tensor, self.size)
        if self._decoder is None:
            raise Refused("a coded gradient came, and this shard was not told of a code; name it in init.")
        return self._decoder.decode(op.tensor, turn_of(op.clock, micro))

    @property
    def size(self) -> int:
        """How many values there are."""
        return self.memory.tensor.numel()

    def save(self, kept: torch.Tensor | None = None) -> tuple[ShardState, torch.Tensor]:
        """A plain value and bytes that `load` makes the same shard from, and the gradient that is `kept` with it."""
        entries = [self.trained.read(key) for key in self.trained.state_keys()]
        vectors = []
        staged: list[tuple[int, int, int, list[int]]] = []
        for step, micros in sorted(self.staged.steps.items()):
            for number, micro in sorted(micros.items()):
                waiting = sorted(micro.waiting)
                staged.append((step, number, micro.summed, waiting))
                vectors += micro.vectors(micro.parts())
        if kept is not None:
            vectors.append(kept)
        layout, tensor = join([self.memory.tensor, *(entry.tensor for entry in entries), *vectors])
        value: ShardState = {
            "given": self.given,
            "settings": self.trained.settings(),
            "version": self.memory.version,
            "entries": [(entry.key, entry.pieces, entry.each) for entry in entries],
            "staged": staged,
            "layout": layout,
        }
        return value, tensor

    @classmethod
    def load(cls, value: ShardState, tensor: torch.Tensor) -> tuple[DenseShard, torch.Tensor | None]:
        """What `save` was given, with memory of its own: the shard, and the kept gradient."""
        values, *rest = separate(value["layout"], tensor)
        memory = Values(values.numel(), values.dtype, value["version"])
        put(memory.tensor, values)
        shard = cls(value["given"], memory)
        shard.trained.set(value["settings"])
        vectors = iter(rest)
        for key, pieces, each in value["entries"]:
            found = next(vectors)
            shard.trained.write(Entry(key, list(pieces), each, found.dtype, found))
        for step, number, summed, waiting in value["staged"]:
            micro = Micro(summed, shard.staged.pool.copy_of(next(vectors)) if summed else None)
            micro.waiting = {part: shard.staged.pool.copy_of(next(vectors)) for part in waiting}
            shard.staged.steps.setdefault(step, {})[number] = micro
        kept = next(vectors, None)
        return shard, None if kept is None else kept.clone()

    def metrics(self) -> dict[str, float]:
        """What a report may show."""
        waiting = sum(
            len(micro.parts()) for micros in self.staged.steps.values() for micro in micros.values()
        )
        return {
            "values": float(self.size),
            "version": float(self.memory.version),
            "steps_staged": float(len(self.staged.steps)),
            "parts_staged": float(waiting),
        }
