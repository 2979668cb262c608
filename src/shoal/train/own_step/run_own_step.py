"""One training step that the user has written: the counterpart of train/step.py."""

from __future__ import annotations

import sys

from shoal.data.batch import Batch, convert
from shoal.exchange.contract import StepView
from shoal.train.own_step.exchange_by_model import ExchangeByModel
from shoal.train.own_step.own_step import OwnStep
from shoal.train.own_step.same_calls import SameCalls
from shoal.train.step_context import StepContext
from shoal.types import StepReport


def run_own_step(context: StepContext, view: StepView) -> StepReport:
    """Train on one step: every rank calls it, and all get the same losses back."""
    meter, traffic, exchange = context.meter, context.world.traffic, context.exchange
    assert isinstance(exchange, ExchangeByModel)
    assert context.own_step is not None
    sent = traffic.bytes_sent
    meter.start(view.step + 1)
    portion = context.loader.take(view.step, view.part)
    (batch,), (counts,) = portion.batches, portion.counts
    meter.mark("data")

    exchange.begin(view)
    meter.mark("exposed")
    context.streams.begin(view.step, portion.first)
    context.presence.see(counts)
    ctx = OwnStep(context, exchange, SameCalls(context.mesh.data), view, portion.samples)
    with context.precision.context(context.world.device):
        returned = context.own_step(ctx, _prepared(context, batch))
    meter.mark("compute")
    loss, metrics = ctx.close(returned)
    if context.streams.watching:  # after the close, which has seen that all ranks are here
        _settle_streams(context)
    context.presence.see(True)
    exchange.optimizer.step()  # nothing; a schedule that advances now wants to have seen it
    meter.mark("exposed")

    times = meter.stop()
    return StepReport(
        number=view.step + 1,
        epoch=portion.epoch,
        loss=loss,
        samples=portion.samples,
        count=float(portion.samples),
        seconds=times.seconds,
        data_seconds=times.data,
        compute_seconds=times.compute,
        exposed_seconds=times.exposed,
        update_seconds=times.update,
        bytes_sent=traffic.bytes_sent - sent,
        peak_memory=meter.peak_memory(),
        lr=float(exchange.optimizer.param_groups[0]["lr"]),
        grad_norm=ctx.grad_norm,
        skipped=ctx.skipped,
        metrics=metrics,
    )


def _prepared(context: StepContext, batch: Batch) -> Batch:
    return convert(batch, context.world.device, context.precision.model) if context.converts else batch


def _settle_streams(context: StepContext) -> None:
    """After the first step: say so if draws depend on the number of workers."""
    context.streams.settle()
    context.streams.decide(context.world)
    if context.streams.by_module and context.world.size > 1 and context.world.rank == 0:
        text = "step= draws from torch's own generator (dropout, or torch.randn): other numbers at other worker counts"
        print(f"shoal: {text}; ctx.randn, ctx.rand and ctx.generator draw the same at any.", file=sys.stderr)
