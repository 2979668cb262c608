"""Schedules in torch's own terms: what `torch.distributed.pipelining` validates, completes with messages and runs."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipeline.base import Action, ActionKind
from shoal.torch_private import ComputationType, PipelineAction

_KINDS = {
    ActionKind.F: ComputationType.FORWARD,
    ActionKind.B: ComputationType.FULL_BACKWARD,
    ActionKind.I: ComputationType.BACKWARD_INPUT,
    ActionKind.W: ComputationType.BACKWARD_WEIGHT,
}


def to_torch(actions: Sequence[Sequence[Action]]) -> dict[int, list[PipelineAction | None]]:
    """Actions by rank, as `prepare_schedule` takes them.

    The lists are new ones: torch's lowering empties them. They have no None for idle time, which torch would
    drop before it adds messages.

    >>> to_torch([[Action(0, ActionKind.F, 0), Action(0, ActionKind.B, 0)]])
    {0: [0F0, 0B0]}
    """
    return {
        rank: [PipelineAction(action.stage, _KINDS[action.kind], action.micro) for action in order]
        for rank, order in enumerate(actions)
    }
