"""One training step: the first file to read.

Values flow one way: a portion of the data, losses, gradients, a tally, an update, a report.
"""

from __future__ import annotations

import math

import torch

from shoal.data.batch import Batch, convert
from shoal.data.loader import Portion
from shoal.errors import NonFiniteLoss
from shoal.exchange.base import Tally
from shoal.report.meter import peak_memory
from shoal.train.clip import ByNorm, ByValue
from shoal.train.loss import as_sum_and_count, check_gradient
from shoal.train.parts import Parts
from shoal.types import StepReport


def run_step(parts: Parts, number: int) -> StepReport:
    """Train on step `number`, counted from 0: every rank calls it, and all get the same loss back."""
    meter, exchange, sent = parts.meter, parts.exchange, parts.world.traffic.bytes_sent
    meter.start()
    part = exchange.first_part(number, parts.loader.feed.rank)
    portion = parts.loader.take(number, part)
    parts.look_ahead(number, portion)
    meter.mark("data")

    exchange.begin()
    parts.recall(exchange.told)
    meter.mark("exposed")
    foreseen, mine = parts.count_per_sample * portion.samples, Tally(0.0, 0.0)
    while part >= 0:
        mine = _compute(parts, number, portion, parts.scale.value / foreseen)
        meter.mark("compute")
        part = exchange.next_part(mine, foreseen)
        meter.mark("exposed")
        if part >= 0:  # somebody is lost, and this is what was theirs
            portion = parts.loader.take(number, part)
            meter.mark("data")
    if parts.streams.watching:
        parts.streams.decide(parts.world)

    tally = exchange.finish(mine)
    if parts.pipeline is not None:
        tally = _over_stages(parts, tally)
    meter.mark("exposed")

    loss = tally.total / tally.count if tally.count > 0 else math.nan
    norm, skipped = _update(parts, number, loss, tally.count, foreseen)
    if tally.count > 0:
        parts.count_per_sample = tally.count / (portion.own if exchange.counts_own else portion.samples)
    exchange.memo = parts.memo()
    meter.mark("update")
    times = meter.stop()
    return StepReport(
        number=exchange.through(number) + 1,
        epoch=portion.epoch,
        loss=loss,
        samples=portion.samples,
        count=tally.count,
        seconds=times.seconds,
        data_seconds=times.data,
        compute_seconds=times.compute,
        exposed_seconds=times.exposed,
        update_seconds=times.update,
        bytes_sent=parts.world.traffic.bytes_sent - sent,
        peak_memory=peak_memory(),
        lr=float(exchange.optimizer.param_groups[0]["lr"]),
        grad_norm=norm,
        skipped=skipped,
    )


def _compute(parts: Parts, number: int, portion: Portion, weight: float) -> Tally:
    """Forward and backward passes of a portion."""
    if parts.pipeline is not None:
        return parts.pipeline.run(number, portion, weight)
    if parts.split_loss is None:
        return accumulate(parts, number, portion, weight)
    with parts.split_loss():
        return accumulate(parts, number, portion, weight)


def accumulate(parts: Parts, number: int, portion: Portion, weight: float) -> Tally:
    """Forward and backward, one micro-batch after the other: a pipeline of one stage."""
    losses, count, streams = [], 0.0, parts.streams
    last = len(portion.batches) - 1
    for i, (batch, counts) in enumerate(zip(portion.batches, portion.counts, strict=True)):
        total = None
        if batch is not None:
            streams.begin(number, portion.first + i)
            parts.presence.see(counts)
            total, n = forward(parts, batch)
            if streams.watching:
                streams.settle()
            check_gradient(total)
            if counts:
                losses.append(total.detach())
                count += n
        parts.exchange.backward(total, weight if counts else 0.0, last=i == last)
        if not counts:
            parts.presence.see(True)
    return Tally(sum([loss.item() for loss in losses]), count)


def _over_stages(parts: Parts, tally: Tally) -> Tally:
    """Only the last stage of a pipeline sees the loss; here all learn of it."""
    total, count = parts.mesh.stages.gather_numbers([tally.total, tally.count]).sum(0).tolist()
    return Tally(total, count)


def forward(parts: Parts, batch: Batch) -> tuple[torch.Tensor, float]:
    """The loss of one micro-batch as a sum and its count."""
    if parts.converts:
        batch = convert(batch, parts.world.device, parts.precision.model)
    if parts.precision.compute is None:  # a context that does nothing costs microseconds too
        return as_sum_and_count(parts.loss(parts.model(parts.inputs(batch)), batch), batch)
    with parts.precision.context(parts.world.device):
        return as_sum_and_count(parts.loss(parts.model(parts.inputs(batch)), batch), batch)


def _update(
    parts: Parts, number: int, loss: float, count: float, foreseen: float
) -> tuple[float | None, bool]:
    """Apply the gradients, or drop them; every rank decides alike, from numbers that are alike."""
    exchange, clip = parts.exchange, parts.clip
    if count == 0 and exchange.counts_own:  # the last batch of an epoch may have no samples for everybody
        exchange.drop()
        return None, False
    if not math.isfinite(loss):
        if not parts.skip_nan:
            raise NonFiniteLoss(
                f"the loss of step {number + 1} is {loss} (count {count:g}); lower the learning rate or look at that "
                "step's samples, or set on_nan='skip' to drop such steps."
            )
        exchange.drop()
        return None, True
    # Gradients hold sum × scale / foreseen: most often, this is 1.
    mean = foreseen / (count * parts.scale.value)
    norm = None
    if parts.scale.dynamic or parts.skip_nan or isinstance(clip, ByNorm):
        norm = exchange.norm() * mean
        if not math.isfinite(norm):
            return _not_finite(parts, number, norm)
    if parts.recorder is not None:
        parts.recorder.gradients(number, loss, parts.whole.gradients(), mean)
    factor = mean
    if isinstance(clip, ByNorm) and norm is not None:
        factor *= min(1.0, clip.limit / (norm + 1e-6))
    exchange.update(factor, clip.limit if isinstance(clip, ByValue) else None)
    if parts.recorder is not None:
        parts.recorder.parameters(number, parts.whole.parameters())
    exchange.rescale(parts.scale.succeeded())
    return norm, False


def _not_finite(parts: Parts, number: int, norm: float) -> tuple[float | None, bool]:
    if parts.scale.dynamic:
        parts.scale.overflowed()
    elif not parts.skip_nan:
        raise NonFiniteLoss(
            f"the gradient of step {number + 1} has norm {norm} though its loss is finite; lower the learning rate, "
            "or set on_nan='skip' to drop such steps."
        )
    parts.exchange.drop()
    return None, True
