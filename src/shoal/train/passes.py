"""Forward and backward passes over a worker's samples of a step: through a pipeline, or one micro-batch at a time."""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter_ns

import torch

from shoal.call import call_model
from shoal.data.batch import Batch, convert, length
from shoal.data.feed import Portion
from shoal.exchange.contract import Tally
from shoal.report.spans import SpanKind
from shoal.train.first_look import look_at_first, look_at_samples, look_at_units
from shoal.train.model.gathered_penalty import add_gathered
from shoal.train.step_context import StepContext
from shoal.train.technique.loss import as_sum_and_count, check_gradient
from shoal.train.technique.penalty import add_penalty
from shoal.world.devices import fetch

_FORWARD = int(SpanKind.FORWARD)  # packing an enum costs twice as much
_BACKWARD = int(SpanKind.BACKWARD)


def run_passes(context: StepContext, step: int, portion: Portion, weight: float) -> Tally:
    """Forward and backward of a portion, each loss times `weight`; gradients are on their way when it returns."""
    context.learning.begin()
    looking, first = context.watch.new, context.first
    if looking:
        context.watch.before_first()
    if first is not None:
        look_at_units(context, portion)
        look_at_samples(context, step)
        first.before()
    if context.buffers is not None:
        context.buffers.open_step()
    with nullcontext() if first is None else first.explaining():
        if context.pipeline is not None:
            tally = context.pipeline.run(step, portion, weight)
            context.meter.waited(context.pipeline.waited)
            look_at_first(context, portion)
        else:
            tally = _without_pipeline(context, step, portion, weight)
    context.learning.computing = False
    if context.buffers is not None:
        context.buffers.close_step()
    if looking:
        context.watch.after_first()
    if first is not None:
        first.after()
    return tally


def _without_pipeline(context: StepContext, step: int, portion: Portion, weight: float) -> Tally:
    with (context.split_loss or nullcontext)():
        if not context.gather.meets(portion.samples):
            tally = _accumulate(context, step, portion, weight)
        else:
            with context.gather.meeting(attends=not any(portion.counts)):
                tally = _accumulate(context, step, portion, weight)
        look_at_first(context, portion)
    return tally


def _accumulate(context: StepContext, step: int, portion: Portion, weight: float) -> Tally:
    losses, count, streams, spans = [], 0.0, context.streams, context.meter.spans
    last = len(portion.batches) - 1
    # A penalty on weights that are all here goes with the last samples that count.
    adds = context.penalty is not None and context.outline is None
    final = max((i for i, own in enumerate(portion.counts) if own), default=-1) if adds else -1
    for i, (batch, counts) in enumerate(zip(portion.batches, portion.counts, strict=True)):
        total, begun = None, perf_counter_ns()
        if batch is not None:
            streams.begin(step, portion.first + i)
            context.presence.see(counts)
            if context.buffers is None:
                total, n = forward(context, batch)
            else:
                with context.buffers.micro_batch(portion.first + i, length(batch) if counts else 0):
                    total, n = forward(context, batch)
            if streams.watching:
                streams.settle()
            check_gradient(total)
            if counts:  # a filler has no samples of its own: it runs because others' collectives need it
                count += n
                if i == final and context.penalty is not None:
                    total = add_penalty(context.penalty, context.model, total, count)
                losses.append(total.detach())
        turned = perf_counter_ns()
        spans.add(_FORWARD, begun, turned, i)
        context.exchange.backward(total, weight if counts else 0.0, last=i == last)
        spans.add(_BACKWARD, turned, perf_counter_ns(), i)
        if not counts:
            context.presence.see(True)
    return Tally(sum(fetch(losses)), count)


def forward(context: StepContext, batch: Batch) -> tuple[torch.Tensor, float]:
    """The loss of one micro-batch as a sum and its count."""
    if context.converts:
        batch = convert(batch, context.world.device, context.precision.model)
    if context.precision.compute is None:  # a context that does nothing costs microseconds too
        output = call_model(context.model, context.inputs(batch))
        return as_sum_and_count(context.loss(output, batch), batch)
    with context.precision.context(context.world.device):
        output = call_model(context.model, context.inputs(batch))
        return as_sum_and_count(context.loss(output, batch), batch)


def over_stages(context: StepContext, tally: Tally, weight: float) -> Tally:
    """Only the last stage of a pipeline sees the loss; here all stages learn of it, and of the penalty. Collective."""
    if context.pipeline is not None:
        total, count = context.mesh.stages.gather_numbers([tally.total, tally.count]).sum(0).tolist()
        tally = Tally(total, count)
    if context.penalty is not None and context.outline is not None and tally.count > 0:
        value = add_gathered(
            context.penalty, context.outline, context.whole, context.exchange, weight * tally.count
        )
        tally = Tally(tally.total + value * tally.count, tally.count)
    return tally
