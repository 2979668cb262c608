"""1F1B: as soon as a micro-batch has come through, its backward pass goes before new forward passes.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, in the form that
flushes at the end of every batch ("Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021).
When to use: first. It is as fast as gpipe, and a rank holds the activations of at most p micro-batches
however many there are, so more micro-batches make the idle share small at no cost in memory.
"""

from __future__ import annotations

from shoal.pipeline.base import EVEN, Action, ActionKind, Costs, Schedule, one_forward_one_backward


class OneFOneB(Schedule):
    """A rank starts as many micro-batches as there are ranks from it to the end; then one in, one out.

    >>> OneFOneB.actions(ranks=2, microbatches=3)
    [[0F0, 0F1, 0B0, 0F2, 0B1, 0B2], [1F0, 1B0, 1F1, 1B1, 1F2, 1B2]]
    >>> OneFOneB.bubble(ranks=4, microbatches=9)
    0.25
    """

    summary = "one forward, one backward: activations of at most p micro-batches"

    @classmethod
    def order(cls, rank: int, ranks: int, microbatches: int) -> list[Action]:
        forwards = [Action(rank, ActionKind.F, micro) for micro in range(microbatches)]
        backwards = [[Action(rank, ActionKind.B, micro)] for micro in range(microbatches)]
        return one_forward_one_backward(forwards, backwards, ahead=ranks - 1 - rank)

    @classmethod
    def makespan(cls, ranks: int, microbatches: int, costs: Costs = EVEN) -> float:
        return (microbatches + ranks - 1) * costs.total

    @classmethod
    def peak(cls, rank: int, ranks: int, microbatches: int) -> int:
        return min(ranks - rank, microbatches)
