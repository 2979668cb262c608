"""One training step: the first file to read.

Values flow one way: a portion of the data, losses, gradients, a tally, an update, a report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from shoal import seeds
from shoal.data.batch import Batch, Inputs, convert
from shoal.data.loader import Loader
from shoal.errors import NonFiniteLoss
from shoal.exchange.base import Exchange, Tally
from shoal.report.meter import Meter, peak_memory
from shoal.train.clip import ByNorm, ByValue, Clip
from shoal.train.loss import Loss, as_sum_and_count, check_gradient
from shoal.train.precision import LossScale, Precision
from shoal.train.record import Recorder
from shoal.types import StepReport
from shoal.world.world import World


@dataclass
class Parts:
    """What a step works with. Made by build.py; only `scale` and `count_per_sample` change from step to step."""

    world: World
    model: nn.Module
    loss: Loss
    inputs: Inputs
    loader: Loader
    exchange: Exchange
    precision: Precision
    scale: LossScale
    clip: Clip | None
    skip_nan: bool
    seed: int
    meter: Meter
    recorder: Recorder | None
    count_per_sample: float
    """As in the last step. It tells the count of this step before it is known, and in most runs exactly."""


def run_step(parts: Parts, number: int) -> StepReport:
    """Train on step `number`, counted from 0: every rank calls it, and all get the same loss back."""
    meter, exchange = parts.meter, parts.exchange
    sent = parts.world.traffic.bytes_sent
    meter.start()
    portion = parts.loader.take(number)
    meter.mark("data")

    exchange.begin()
    losses, count = [], 0.0
    foreseen = parts.count_per_sample * portion.samples
    weight = parts.scale.value / foreseen
    for i, batch in enumerate(portion.batches):
        total = None
        if batch is not None:
            seeds.set_stream(parts.seed, "step", number, portion.first + i)
            total, n = forward(parts, batch)
            check_gradient(total)
            losses.append(total.detach())
            count += n
        exchange.backward(total, weight, last=i == len(portion.batches) - 1)
    meter.mark("compute")

    tally = exchange.finish(Tally(sum([loss.item() for loss in losses]), count))
    meter.mark("exposed")

    loss = tally.total / tally.count if tally.count > 0 else math.nan
    norm, skipped = _update(parts, number, loss, tally.count, foreseen)
    if tally.count > 0:
        parts.count_per_sample = tally.count / portion.samples
    meter.mark("update")
    times = meter.stop()
    return StepReport(
        number=number + 1,
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


def forward(parts: Parts, batch: Batch) -> tuple[torch.Tensor, float]:
    """The loss of one micro-batch as a sum and its count."""
    batch = convert(batch, parts.world.device, parts.precision.model)
    with parts.precision.context(parts.world.device):
        output = parts.model(parts.inputs(batch))
        return as_sum_and_count(parts.loss(output, batch), batch)


def _update(
    parts: Parts, number: int, loss: float, count: float, foreseen: float
) -> tuple[float | None, bool]:
    """Apply the gradients, or drop them; every rank decides alike, from numbers that are alike."""
    exchange, clip = parts.exchange, parts.clip
    if not math.isfinite(loss):
        if not parts.skip_nan:
            raise NonFiniteLoss(
                f"the loss of step {number + 1} is {loss} (count {count:g}); lower the learning rate or look at that "
                "step's samples, or set on_nan='skip' to drop such steps."
            )
        exchange.drop()
        return None, True
    mean = foreseen / (
        count * parts.scale.value
    )  # gradients hold sum × scale / foreseen: most often, this is 1
    norm = None
    if parts.scale.dynamic or parts.skip_nan or isinstance(clip, ByNorm):
        norm = exchange.norm() * mean
        if not math.isfinite(norm):
            return _not_finite(parts, number, norm)
    if parts.recorder is not None:
        parts.recorder.gradients(number, loss, exchange.gradients(), mean)
    factor = mean
    if isinstance(clip, ByNorm) and norm is not None:
        factor *= min(1.0, clip.limit / (norm + 1e-6))
    exchange.update(factor, clip.limit if isinstance(clip, ByValue) else None)
    if parts.recorder is not None:
        parts.recorder.parameters(number, parts.model)
    parts.scale.succeeded()
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
