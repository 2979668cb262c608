"""Why the first plan is first, and what would change that: one paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.plan.predict import Prediction, Predictor


def explain(plans: Sequence[Prediction], predictor: Predictor) -> str:
    """The paragraph under the table."""
    best = plans[0]
    said = [f"{best.plan} is first: {_step(best)}, of which {_parts(best)}."]
    others = [one for one in plans[1:] if str(one.plan) != str(best.plan)]
    if others:
        said.append(_beside(best, others))
    lean = min(plans, key=lambda one: one.total)
    if lean.total < 0.9 * best.total:
        said.append(
            f"If memory were what counts, {lean.plan} would do with {_size(lean.total)} instead of {_size(best.total)} "
            f"and take {lean.seconds.middle / best.seconds.middle:.2f} times as long."
        )
    said.append(_more_samples(best, others, predictor))
    return " ".join(filter(None, said))


def _beside(best: Prediction, others: Sequence[Prediction]) -> str:
    second = others[0]
    gap = second.seconds.middle / best.seconds.middle - 1
    if second.seconds.low <= best.seconds.high:
        return (
            f"{second.plan} is {gap:.1%} behind, which is less than what is known of either: only a try can tell them "
            "apart (strategy='auto' makes one)."
        )
    more = (
        "communication"
        if second.communication - best.communication > second.compute - best.compute
        else "compute"
    )
    return f"{second.plan} comes next, {gap:.1%} slower, mostly by its {more}."


def _more_samples(best: Prediction, others: Sequence[Prediction], predictor: Predictor) -> str:
    """Whether twice the batch makes another plan the first, and when communication stops to matter."""
    doubled = Predictor(
        predictor.work,
        predictor.machine,
        replace(predictor.setting, global_batch=2 * predictor.setting.global_batch),
        {},
    )
    again = [doubled.predict(one.plan, one.accumulate) for one in (best, *others[:6])]
    winner = min(again, key=lambda one: one.seconds.middle)
    if str(winner.plan) != str(best.plan):
        return f"With twice the batch {winner.plan} would be first."
    if best.communication <= 0.1 * best.seconds.middle:
        return "Communication is less than a tenth of it, so a faster network would change little."
    return f"Twice the batch changes nothing in the order; communication would be {_share(winner)} of a step then."


def _step(one: Prediction) -> str:
    low, middle, high = (1e3 * s for s in (one.seconds.low, one.seconds.middle, one.seconds.high))
    return f"a step of {middle:.3g} ms ({low:.3g} to {high:.3g})"


def _parts(one: Prediction) -> str:
    waiting = f", {one.waiting / one.seconds.middle:.0%} waiting of stages" if one.waiting else ""
    return f"{one.compute / one.seconds.middle:.0%} is compute and {_share(one)} communication{waiting}"


def _share(one: Prediction) -> str:
    return f"{one.communication / one.seconds.middle:.0%}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
