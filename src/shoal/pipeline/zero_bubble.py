"""Zero bubble (ZB-H1): the backward pass of the weights, for which nobody waits, fills the idle time.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024.
When to use: more than two ranks, and layers whose backward pass of the weights is a good part of the work. A
third of the idle time of 1f1b; every rank holds as many activations as the first rank of 1f1b. Two half
backward passes cost a little more than one whole: measure.
"""

from __future__ import annotations

from shoal.pipeline.base import EVEN, Action, ActionKind, Costs, Schedule, one_forward_one_backward


class ZeroBubble(Schedule):
    """1f1b, where rank r passes gradients of inputs on at once and works on weights r micro-batches later.

    Stage 0 passes nothing on, so its backward pass stays whole.

    >>> ZeroBubble.actions(ranks=2, microbatches=2)
    [[0F0, 0F1, 0B0, 0B1], [1F0, 1I0, 1F1, 1I1, 1W0, 1W1]]
    >>> round(ZeroBubble.bubble(ranks=4, microbatches=8), 3)
    0.111
    """

    halves_backward = True
    summary = "1f1b that fills idle time with the weights' part of the backward pass"

    @classmethod
    def order(cls, rank: int, ranks: int, microbatches: int) -> list[Action]:
        forwards = [Action(rank, ActionKind.F, micro) for micro in range(microbatches)]
        backwards = [cls._backward(rank, micro) for micro in range(microbatches)]
        # The weight passes that were put off when there were no more micro-batches.
        late = range(max(0, microbatches - rank), microbatches)
        order = one_forward_one_backward(forwards, backwards, ahead=ranks - 1 - rank)
        return order + [Action(rank, ActionKind.W, micro) for micro in late]

    @staticmethod
    def _backward(rank: int, micro: int) -> list[Action]:
        if rank == 0:
            return [Action(rank, ActionKind.B, micro)]
        # ZB-H1 delays W by as many micro-batches as there are ranks before this one: it falls into time in which 1F1B
        # waits, and no rank holds more activations than the first one of 1F1B.
        inputs = Action(rank, ActionKind.I, micro)
        return [inputs, Action(rank, ActionKind.W, micro - rank)] if micro >= rank else [inputs]

    @classmethod
    def makespan(cls, ranks: int, microbatches: int, costs: Costs = EVEN) -> float:
        """The longer of two chains of actions, each of which has to run one after the other.

        One ends with the weights on rank 0, after the last gradient came all the way back. The other ends with
        the weights that a later rank put off. With even costs and m ≥ p it is 3 m + p - 1.
        """
        f, i, w, m = costs.forward, costs.inputs, costs.weights, microbatches
        steady = max(0, m - ranks) * min(f, w) + (m - 1) * max(f, w)
        back_at_first = ranks * f + (ranks - 1 + m) * i + w + steady
        put_off = (ranks - 1) * f + m * costs.total + max(0, ranks - m) * i
        return max(back_at_first, put_off)

    @classmethod
    def peak(cls, rank: int, ranks: int, microbatches: int) -> int:
        del rank
        return min(ranks, microbatches)
