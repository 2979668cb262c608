"""What workers say to a dense shard, and get from it, as it travels. A server checks all of it before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from shoal.server.protocol.optimizer_description import OptimizerDescription, Settings


class InitArguments(TypedDict):
    """Arguments of `init`; the values themselves are the tensor."""

    pieces: list[list[int]]
    """[start, numel, group] of each piece."""
    optimizer: OptimizerDescription
    aggregate: str
    hold: bool
    """Whether parts are kept one by one until it is known which of them count."""
    code: NotRequired[str]
    """The compressor of gradients; empty: none."""


class NamedParts(TypedDict):
    """Arguments of `drop`: the parts of a step that will not be applied."""

    parts: Sequence[Sequence[float]]
    """[part, count]"""
    floor: NotRequired[int]
    """Every step before it is over."""
    norm: NotRequired[float | None]
    """Norm of the whole gradient, if it was computed: shards keep it for workers that ask late."""


class UpdateArguments(NamedParts):
    """Arguments of `apply`."""

    factor: NotRequired[float]
    limit: NotRequired[float | None]
    settings: NotRequired[list[Settings] | None]
    used: NotRequired[list[int] | None]
    """The pieces that have a gradient; None: all."""
    share: NotRequired[float]
    """The learning rate counts by so much."""
    keep: NotRequired[bool]
    """Whether the gradient can be asked for after the update."""


class StateEntry(TypedDict):
    """Arguments of `state`: one key of the optimizer's state. State by element travels as the tensor."""

    key: str
    each: bool
    """True: one number an element, in the tensor that goes with it. False: one a piece, in `values`."""
    pieces: list[int]
    values: list[float] | None
    dtype: str


class KnownNorm(TypedDict):
    """To `squares`, where the update is made already: the norm that it was made with, if one is remembered."""

    norm: float | None
