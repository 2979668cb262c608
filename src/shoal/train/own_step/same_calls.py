"""All ranks make the same calls in the same order: checked with every call, so that none waits for ever."""

from __future__ import annotations

import sys

import torch
import xxhash

from shoal.errors import ConfigError
from shoal.world.world import World

_BITS = 20


class SameCalls:
    """One small all-reduce: it sums a count, and shows whether all ranks have come to the same call.

    >>> SameCalls(World.alone()).agree("ctx.backward('gen')", 8.0)
    8.0
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: list[str] = []
        """Since ranks were last seen to agree."""

    def note(self, call: str) -> None:
        """A call that needs no other rank; the next `agree` sees whether all ranks have made it."""
        if self._world.size > 1:
            self._made.append(call)

    def agree(self, call: str, count: float) -> float:
        """The sum of `count` over all ranks; refuses, on every rank, where one of them makes another call."""
        if self._world.size == 1:
            return count
        self._made.append(call)
        code = xxhash.xxh3_64_intdigest("\n".join(self._made).encode()) >> (64 - _BITS)
        numbers = torch.tensor([count, code, code * code], dtype=torch.float64, device="cpu")
        self._world.all_reduce(numbers).wait()
        total, codes, squares = numbers.tolist()
        size = self._world.size
        # Both sums are as they would be if all had this rank's code: on every rank, or on none.
        if codes != size * code or squares != size * code * code:
            raise ConfigError(self._disagreement())
        self._made.clear()
        return float(total)

    def _disagreement(self) -> str:
        found = self._world.gather_values([", ".join(self._made), _place()])
        calls = [f"{made} ({place})" for made, place in found]
        other = next((rank for rank, one in enumerate(calls) if one != calls[0]), 0)
        return (
            f"step= makes other calls on other ranks: rank 0 is at {calls[0]}, rank {other} at {calls[other]}; every "
            "rank must make the same calls in the same order, so decide by numbers that are the same on all of them, "
            "such as ctx.number or what ctx.update returns."
        )


def _place() -> str:
    """File and line of the user's call."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("shoal."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
