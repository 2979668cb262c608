"""One training step: the first file to read. docs/step.md walks through it.

Values flow one way: a portion of the data, losses, gradients, a tally, an update, a report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.exchange.contract import Stepper, StepView, Tally
from shoal.train.passes import over_stages, run_passes
from shoal.train.step_context import StepContext
from shoal.train.technique.clip import ByNorm, ByValue
from shoal.train.watch.not_finite import not_finite
from shoal.types import StepReport


def run_step(context: StepContext, view: StepView) -> StepReport:
    """Train on one step: every rank calls it, and all get the same loss back."""
    meter, loader, traffic = context.meter, context.loader, context.world.traffic
    exchange: Stepper = context.exchange
    work = context.exchange.work
    sent = traffic.bytes_sent
    meter.start(view.step + 1)
    portion = loader.take(view.step, view.part)
    context.prefetch_rows(view.step, portion)
    meter.mark("data")

    exchange.begin(view)
    context.open_step(view)
    meter.mark("exposed")

    # The global count is known only after the step; the last step's count per sample foretells it, most often exactly.
    expected = context.count_per_sample * portion.samples
    mine, part = Tally(0.0, 0.0), view
    while part.computes:  # once; under a parameter server again for each part that a lost worker has left
        mine = run_passes(context, part.step, portion, context.scale.value / expected)
        meter.mark("compute")
        context.portion = portion
        context.tally = mine
        part = work.next_part(part, mine, expected)
        meter.mark("exposed")
        if part.computes:
            portion = loader.take(part.step, part.part)
            meter.mark("data")
    if context.streams.watching or context.first is not None:
        context.end_first_passes()

    tally = over_stages(context, exchange.finish(mine), context.scale.value / expected)
    meter.mark("exposed")

    loss = tally.total / tally.count if tally.count > 0 else math.nan
    if tally.count > 0:
        context.count_per_sample = tally.count / (portion.own if work.loss_is_local else portion.samples)
    done = _update(context, view.step, loss, tally.count, expected)
    context.portion = None  # or its batches would stay until the next step has its own
    completed = work.committed(view, context.join_state())
    meter.mark("update")
    times = meter.stop()
    return StepReport(
        number=completed,
        epoch=portion.epoch,
        loss=loss,
        samples=portion.samples,
        count=tally.count,
        seconds=times.seconds,
        data_seconds=times.data,
        compute_seconds=times.compute,
        exposed_seconds=times.exposed,
        update_seconds=times.update,
        bytes_sent=traffic.bytes_sent - sent,
        peak_memory=meter.peak_memory(),
        lr=float(exchange.optimizer.param_groups[0]["lr"]),
        grad_norm=done.norm,
        skipped=done.skipped,
        metrics={**context.metrics.take(), **context.recipes.report()},
    )


@dataclass(frozen=True)
class _Update:
    """What became of a step's gradients."""

    norm: float | None = None
    skipped: bool = False


def _update(context: StepContext, step: int, loss: float, count: float, expected: float) -> _Update:
    """Apply the gradients, or discard them; every rank decides alike, from numbers that are alike."""
    exchange: Stepper = context.exchange
    clip, scale, recorder = context.clip, context.scale, context.recorder
    # An epoch's last batch may have no samples for some worker.
    if count == 0 and context.exchange.work.loss_is_local:
        exchange.discard()
        return _Update()
    if not math.isfinite(loss):
        what = f"the loss of step {step + 1} is {loss} (count {count:g})"
        not_finite(context, step, what, "lower the learning rate or look at that step's samples")
        exchange.discard()
        return _Update(skipped=True)

    # Gradients hold sum × scale / expected, so this is 1 wherever the count was foretold and nothing is scaled.
    mean = context.show_gradients(step, expected / (count * scale.value))
    norm = None
    if scale.dynamic or context.skip_nan or isinstance(clip, ByNorm):
        norm = exchange.grad_norm() * mean
        if not math.isfinite(norm):
            if not scale.dynamic:
                what = f"the gradient of step {step + 1} has norm {norm} though its loss is finite"
                not_finite(context, step, what, "lower the learning rate")
            scale.overflowed()
            exchange.discard()
            return _Update(skipped=True)
    if recorder is not None:
        recorder.gradients(step, loss, context.whole.gradients(), mean)

    factor = mean
    if isinstance(clip, ByNorm) and norm is not None:
        factor *= min(1.0, clip.limit / (norm + 1e-6))
    with context.drawing(exchange.optimizer, step):
        exchange.apply(factor, clip.limit if isinstance(clip, ByValue) else None)
    context.recipes.applied(step)
    exchange.publish()
    context.recipes.published(step)
    if recorder is not None:
        recorder.parameters(step, context.whole.parameters())
    exchange.rescale(scale.succeeded())
    return _Update(norm)
