"""What the ledger answers to workers, call by call, as it travels."""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict

from shoal.server.protocol.messages import Plain

JoinMessage: TypeAlias = "list[float] | None"
"""A worker's join state as it travels, for workers that come later. The ledger keeps it and does not read it."""
Parameters: TypeAlias = "list[list[Plain]] | None"
"""Name, shape and type of every parameter, as a worker has them."""


class OldestAnswer(TypedDict):
    """To `agree`: where work is."""

    oldest: int
    """Every step before it is over."""


class ReadyAnswer(OldestAnswer):
    """To `ready`, once the shards have their first values."""

    join_state: JoinMessage


class JoinAnswer(ReadyAnswer):
    """To `join`."""

    ready: bool
    """Whether the shards have values already, so that the job is under way."""


class ClaimAnswer(TypedDict):
    """To `claim`: a part to compute, or with `step` None nothing for now."""

    step: int | None
    part: NotRequired[int]
    """-1: nothing to compute, but the step waits for somebody to finish it."""
    join_state: NotRequired[JoinMessage]
    floor: NotRequired[int]
    """Every step below is over."""
    end: NotRequired[bool]
    """With `step` None: whether there will be no more work."""


class TakeAnswer(TypedDict):
    """To `take`: a part whose worker is lost; -1 if another worker was faster."""

    part: int


class DoneAnswer(TypedDict, total=False):
    """To `done`."""

    dup: bool
    """This part was done before."""
    late: bool
    """The step is complete without this part: backup workers made it unnecessary."""
    complete: bool
    """This part was the step's last."""


class StepSum(TypedDict):
    """What a step came to."""

    parts: list[list[float]]
    """[part, count], by part."""
    total: float
    count: float
    used: str
    """A bit for every parameter that any part has used, as hexadecimal text."""


class TallyAnswer(TypedDict, total=False):
    """To `tally`: what a step came to (`StepSum`), or one of `over`, `free` and `part`."""

    parts: list[list[float]]
    total: float
    count: float
    used: str
    over: bool
    """The step is over, and its sums are no longer remembered."""
    free: bool
    """A part of the step has lost its worker."""
    part: int
    """This worker has taken that part."""


class LedgerStatus(TypedDict):
    """To `status`, for reports."""

    oldest: int
    claimed: int
    """Parts that are being computed."""
    workers: int
    ids: list[list[int]]
    """[worker, rank]"""
    staleness: list[list[int]]
    """[steps ahead of the oldest, how many claims were granted that far ahead]"""
