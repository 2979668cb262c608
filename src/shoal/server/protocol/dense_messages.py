"""What workers say to a dense shard, and get from it, as it travels. A server checks all of it before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from shoal.server.protocol.optimizer_description import OptimizerDescription, Settings


class InitArguments(TypedDict):
    """Of `init`, beside the values themselves."""

    pieces: list[list[int]]
    """[start, numel, group] of each piece."""
    optimizer: OptimizerDescription
    aggregate: str
    hold: bool
    """Whether parts are kept one by one until it is known which of them count."""
    code: NotRequired[str]
    """The compressor of gradients; empty: none."""


class NamedParts(TypedDict):
    """Of `drop`: the parts of a step that are over with it."""

    parts: Sequence[Sequence[float]]
    """[part, count]"""
    floor: NotRequired[int]
    """Every step before it is over."""
    norm: NotRequired[float | None]
    """Of the whole gradient, if somebody has asked for it: shards remember it for workers that ask late."""


class UpdateArguments(NamedParts):
    """Of `apply`."""

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
    """Of `state`: one key of the optimizer's state, but for a tensor with one number an element."""

    key: str
    each: bool
    """True: one number an element, in the tensor that goes with it. False: one a piece, in `values`."""
    pieces: list[int]
    values: list[float] | None
    dtype: str


class KnownNorm(TypedDict):
    """To `squares`, where the update is made already: the norm that it was made with, if one is remembered."""

    norm: float | None
