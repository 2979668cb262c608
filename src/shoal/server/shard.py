"""What a dense shard holds, and all of it as bytes for a server that joins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.aggregate import make_aggregate
from shoal.server import asked
from shoal.server.coded import Decoder, turn_of
from shoal.server.joined import join, separate
from shoal.server.machine import Operation, Refused
from shoal.server.staged import Micro, Staged
from shoal.server.trained import Entry, Trained
from shoal.server.values import Values
from shoal.world.memory import put

_GIVEN = ("pieces", "optimizer", "aggregate", "hold", "code")


class DenseShard:
    """Values with their optimizer, and staged gradients."""

    def __init__(self, given: Mapping[str, Any], memory: Values) -> None:
        """`given`: what `init` said. Values stay as they are. Raises if they cannot be trained so."""
        self.given = {key: given[key] for key in _GIVEN if key != "code" or key in given}
        self.memory = memory
        values = memory.tensor
        pieces = asked.pieces(given["pieces"], values.numel())
        aggregate = make_aggregate(str(given["aggregate"]))
        self.trained = Trained(values, pieces, given["optimizer"])
        self.staged = Staged(values.numel(), values.dtype, aggregate, bool(given["hold"]))
        ranges = [(piece.start, piece.numel) for piece in pieces]
        code = str(given.get("code", ""))
        self._decoder = Decoder(code, values.numel(), values.dtype, ranges) if code else None

    @classmethod
    def make(cls, given: Mapping[str, Any], values: torch.Tensor, before: Values | None) -> DenseShard:
        """With these values, in the memory of a shard before it if that fits, which changes last."""
        size, dtype = values.numel(), values.dtype
        fits = before is not None and before.fits(size, dtype)
        version = 0 if before is None else before.version
        memory = before if before is not None and fits else Values(size, dtype, version)
        shard = cls(given, memory)
        with memory.writing():
            put(memory.tensor, values)
        return shard

    def gradient_of(self, op: Operation, micro: int) -> torch.Tensor:
        """What came along, as one number a value; borrowed until the next."""
        if not op.codec:
            return asked.flat(op.tensor, self.size)
        if self._decoder is None:
            raise Refused("a coded gradient came, and this shard was not told of a code; name it in init.")
        return self._decoder.decode(op.tensor, turn_of(op.clock, micro))

    @property
    def size(self) -> int:
        """How many values there are."""
        return self.memory.tensor.numel()

    def save(self) -> tuple[dict[str, Any], torch.Tensor]:
        """A plain value and bytes that `load` makes the same shard from."""
        entries = [self.trained.read(key) for key in self.trained.state_keys()]
        vectors, staged = [], []
        for step, micros in sorted(self.staged.steps.items()):
            for number, micro in sorted(micros.items()):
                waiting = sorted(micro.waiting)
                staged.append([step, number, micro.summed, waiting])
                vectors += micro.vectors(micro.parts())
        layout, tensor = join([self.memory.tensor, *(entry.tensor for entry in entries), *vectors])
        value = {
            "given": self.given,
            "settings": self.trained.settings(),
            "version": self.memory.version,
            "entries": [[entry.key, entry.pieces, entry.each] for entry in entries],
            "staged": staged,
            "layout": layout,
        }
        return value, tensor

    @classmethod
    def load(cls, value: Mapping[str, Any], tensor: torch.Tensor) -> DenseShard:
        """What `save` gave, with memory of its own."""
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
        return shard

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
