"""Interleaved 1F1B: each rank runs two thin stages that lie half a model apart.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
When to use: few micro-batches and cheap messages. A rank waits for thin stages, so the idle time is half of
1f1b's; there are twice as many messages, and the first rank holds up to 1.5 times the activations.
"""

from __future__ import annotations

from shoal.pipeline.base import EVEN, Action, ActionKind, Costs, Schedule, one_forward_one_backward


class Interleaved(Schedule):
    """Micro-batches go in rounds of p: a round through the rank's first stage, then through its second.

    The paper needs whole rounds. Here a last round that is not full is planned as if it were and the
    micro-batches that do not exist are left out of it: what remains keeps its order, so it cannot deadlock.

    >>> Interleaved.actions(ranks=2, microbatches=1)
    [[0F0, 2F0, 2B0, 0B0], [1F0, 3F0, 3B0, 1B0]]
    >>> round(Interleaved.bubble(ranks=4, microbatches=8), 3)
    0.158
    """

    summary = "two thin stages a rank: half the idle time of 1f1b, twice the messages"
    stages_per_rank = 2

    @classmethod
    def order(cls, rank: int, ranks: int, microbatches: int) -> list[Action]:
        first, second = rank, rank + ranks
        forwards, backwards = [], []
        for start in range(0, microbatches, ranks):
            turn = range(start, start + ranks)
            forwards += [Action(stage, ActionKind.F, micro) for stage in (first, second) for micro in turn]
            backwards += [[Action(stage, ActionKind.B, micro)] for stage in (second, first) for micro in turn]
        # The last rank begins to go back when its second stage has its first micro-batch: after one round.
        # Each rank before it needs two more: a micro-batch's way there and its gradient's way back.
        order = one_forward_one_backward(forwards, backwards, ahead=ranks + 2 * (ranks - 1 - rank))
        # Planned as a full round; leaving out a micro-batch everywhere leaves every dependency of the others as it was.
        return [action for action in order if action.micro < microbatches]

    @classmethod
    def makespan(cls, ranks: int, microbatches: int, costs: Costs = EVEN) -> float:
        """Exact for whole rounds; for others where the backward pass takes no less than the forward pass.

        A micro-batch missing in the only round saves one pass each way. One missing in a later round saves a
        forward pass more; the rest of its place stays empty.
        """
        rounds = -(-microbatches // ranks)
        missing = rounds * ranks - microbatches
        saved = costs.total if rounds == 1 else costs.total + costs.forward
        return (2 * rounds * ranks + ranks - 1) * costs.total - missing * saved

    @classmethod
    def peak(cls, rank: int, ranks: int, microbatches: int) -> int:
        """A bound; with whole rounds it is reached."""
        return min(3 * ranks - 2 * rank - 1, 2 * microbatches)
