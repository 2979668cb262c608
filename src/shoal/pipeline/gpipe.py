"""GPipe: all micro-batches forward, then all of them backward.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
When to use: to see what a pipeline does, or where activations are small: a rank holds those of every
micro-batch. With one micro-batch it is plain layer placement: one rank works at a time.
"""

from __future__ import annotations

from shoal.pipeline.base import EVEN, Action, ActionKind, Costs, Schedule


class GPipe(Schedule):
    """Ranks fill and drain once forward and once backward; (p - 1) / (m + p - 1) of the time is idle.

    >>> GPipe.actions(ranks=2, microbatches=2)
    [[0F0, 0F1, 0B0, 0B1], [1F0, 1F1, 1B0, 1B1]]
    >>> GPipe.bubble(ranks=4, microbatches=1)
    0.75
    """

    summary = "all micro-batches forward, then all backward"

    @classmethod
    def order(cls, rank: int, ranks: int, microbatches: int) -> list[Action]:
        del ranks
        return [
            Action(rank, kind, micro)
            for kind in (ActionKind.F, ActionKind.B)
            for micro in range(microbatches)
        ]

    @classmethod
    def makespan(cls, ranks: int, microbatches: int, costs: Costs = EVEN) -> float:
        return (microbatches + ranks - 1) * costs.total

    @classmethod
    def peak(cls, rank: int, ranks: int, microbatches: int) -> int:
        del rank, ranks
        return microbatches
