"""Schedules in torch's own terms: what `torch.distributed.pipelining` validates, completes with messages and runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.pipelining.schedules import _Action, _ComputationType

from shoal.pipeline.base import Action, Kind

_KINDS = {
    Kind.F: _ComputationType.FORWARD,
    Kind.B: _ComputationType.FULL_BACKWARD,
    Kind.I: _ComputationType.BACKWARD_INPUT,
    Kind.W: _ComputationType.BACKWARD_WEIGHT,
}


def to_torch(actions: Sequence[Sequence[Action]]) -> dict[int, list[_Action | None]]:
    """Actions by rank, as `_PipelineScheduleRuntime._prepare_schedule_with_comms` takes them.

    The lists are new ones: torch's lowering empties them. They have no None for idle time, which torch would
    drop before it adds messages.

    >>> to_torch([[Action(0, Kind.F, 0), Action(0, Kind.B, 0)]])
    {0: [0F0, 0B0]}
    """
    return {
        rank: [_Action(action.stage, _KINDS[action.kind], action.micro) for action in order]
        for rank, order in enumerate(actions)
    }
