"""Gradients that come compressed: by which code, and what they say.

A shard is told at its beginning how its gradients come (`describe_code`). Each then says by the codec of its frame that
it is coded, and is decoded before it is staged: all servers of a chain decode the same bytes to the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from shoal import compress
from shoal.compress.base import Compressor, Layout
from shoal.config import parse_choice
from shoal.server.protocol.state_machine import Refused
from shoal.types import Choice
from shoal.world.buckets import gaps_of

_CPU = torch.device("cpu")


def describe_code(compressor: Compressor | None) -> str:
    """A compressor as the grammar writes it; empty where there is none.

    >>> from shoal.compress.topk import TopK
    >>> describe_code(TopK(0.05)), describe_code(None)
    ('topk(ratio=0.05, feedback=true)', '')
    """
    if compressor is None:
        return ""
    name = next(name for name, kind in compress.TABLE.items() if kind is type(compressor))
    assert dataclasses.is_dataclass(compressor)
    fields = [field for field in dataclasses.fields(compressor) if field.init]
    return str(Choice(name, options=tuple((field.name, getattr(compressor, field.name)) for field in fields)))


def turn_of(step: int, micro: int) -> int:
    """The number of a use, the same for who encodes and who decodes.

    >>> turn_of(2, 1)
    131073
    """
    return step << 16 | micro


class Decoder:
    """What a shard makes of coded gradients. `pieces` are its parameters, by start and length."""

    def __init__(self, text: str, size: int, dtype: torch.dtype, pieces: Sequence[tuple[int, int]]) -> None:
        self._code = compress.make_compressor(parse_choice(text, "compressor")).code(
            Layout(size, dtype, _CPU)
        )
        if self._code.rounds > 1:
            raise Refused(
                f"{text} needs the sum of all workers before it is done; servers take codes of one round."
            )
        self._wanted = self._code.payload()
        self._gaps = gaps_of(pieces, size)
        self._out = torch.empty(size, dtype=dtype)

    def decode(self, payload: torch.Tensor | None, turn: int) -> torch.Tensor:
        """The gradient; it is there until the next one comes."""
        wanted = self._wanted
        if payload is None or payload.shape != wanted.shape or payload.dtype != wanted.dtype:
            came = "nothing" if payload is None else f"{payload.numel()} of {payload.dtype}"
            raise Refused(f"{came} came as a coded gradient, which is {wanted.numel()} of {wanted.dtype}.")
        self._code.turn_to(turn)
        try:
            self._code.decode(payload, self._out, add=False)
        except (RuntimeError, IndexError) as error:
            raise Refused(f"a coded gradient makes no sense: {error}") from None
        for start, stop in self._gaps:
            self._out[start:stop].zero_()
        return self._out
