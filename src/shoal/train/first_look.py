"""The look at a loss and a model in the first step, from what it has just computed: what would be another number than
that of one process is said by the first worker, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shoal.call import call_model
from shoal.data.batch import Batch, convert, length, tensors_of
from shoal.data.collate_check import look_at_collate
from shoal.data.feed import Portion
from shoal.errors import ConfigError
from shoal.functions import Copy
from shoal.pipeline.spine import undisturbed
from shoal.torch_private import module_forward_hooks_of
from shoal.train.model.gradient_hooks import of_the_user
from shoal.train.model.sync_batchnorm import has_batchnorm
from shoal.train.step_context import StepContext
from shoal.train.technique.split_check import (
    FirstCall,
    FirstLoss,
    can_split,
    couples,
    does_not_split,
    meets,
    samples_meet_in,
    unseen,
)


def look_at_first(context: StepContext, portion: Portion) -> None:
    """The first step's passes are over, and nothing is updated yet."""
    looked = context.loss
    if not isinstance(looked, FirstLoss):
        return
    context.loss = looked.given
    if context.pipeline is not None:
        context.pipeline.take_loss(looked.given)
    if looked.first is None or context.gather.used:
        return  # a loss that gathers rows is meant to see other samples than its own
    _check_rows(looked.first, portion)
    for sentence in _found(context, looked, looked.first):
        if context.recorder is None:
            context.said.say(sentence)


def _found(context: StepContext, looked: FirstLoss, first: FirstCall) -> Iterator[str]:
    _look_at_loss(context, looked, first)
    if context.finding:
        yield f"{context.finding} `shoal verify` compares the run with one process."
        return
    mine = {id(parameter) for parameter in context.exchange.module.parameters()}
    # zero3 computes with parameters of its own, which keep no gradient.
    cuts = context.exchange.cuts_parameters
    others = [p for p in looked.learned if id(p) not in mine and (p.grad is not None or not cuts)]
    if others:
        yield (
            f"shoal: loss= depends on {len(others)} learning parameters that are not the model's, the first of shape "
            f"{list(others[0].shape)}, and nothing trains them; make them part of the model, or freeze them with "
            "requires_grad_(False)."
        )
    if _samples_meet(context, looked, first):
        yield samples_meet_in(length((looked.together() or first).batch))


def look_at_units(context: StepContext, portion: Portion) -> None:
    """Before the first step, where every worker takes part in all forward passes: do samples meet in the model?"""
    if context.mesh.model.size > 1 or not context.exchange.cuts_parameters or context.recorder is not None:
        return
    batch, model = portion.batches[0], context.model
    can = batch is not None and not _watched(model) and context.precision.compute is None
    if can:
        batch = convert(batch, context.world.device, context.precision.model)
        can = can_split(batch)
    if not context.world.gather_numbers([float(can)]).all():
        return
    with unseen(), undisturbed(model) as put_back:
        restored = _calmly(model, put_back)
        restored()
        meet = meets(lambda some: call_model(model, context.inputs(some)), batch, restored)
    if meet and not context.gather.used:
        context.said.say(samples_meet_in(length(batch)))


def look_at_samples(context: StepContext, step: int) -> None:
    """Before the first step: does collate= mix the samples of a batch?"""
    if context.world.rank > 0 or context.recorder is not None:
        return
    with unseen():
        sentence = look_at_collate(context.loader, step)
    if sentence:
        context.said.say(sentence)


def _check_rows(first: FirstCall, portion: Portion) -> None:
    """A mean has to be weighted by samples: a batch must tell how many it has."""
    counted = [batch for batch, counts in zip(portion.batches, portion.counts, strict=True) if counts]
    rows = [len(tensor) for tensor in tensors_of(first.batch) if tensor.dim()]
    if not first.scalar or len(set(rows)) <= 1 or sum(map(length, counted)) == portion.own:
        return
    raise ConfigError(
        f"loss= returned one mean, and over how many samples nobody can tell: the tensors of its batch have "
        f"{', '.join(map(str, rows[:6]))} rows, where this worker has {portion.own} samples; return (sum, count)."
    )


def _again(context: StepContext) -> Any:
    """The model as it may run once more: whole on this worker, in its own number format, unseen by the user's hooks."""
    exchange, model = context.exchange, context.model
    in_one_piece = context.mesh.model.size == 1 and not exchange.cuts_parameters and not exchange.tables.names
    if not in_one_piece or _watched(model) or context.precision.compute is not None:
        return None
    return lambda batch: call_model(model, context.inputs(batch))


def _watched(model: nn.Module) -> bool:
    """Whether hooks of the user's would see that it runs again."""
    return any(of_the_user(module_forward_hooks_of(module)) for module in model.modules())


def _look_at_loss(context: StepContext, looked: FirstLoss, first: FirstCall) -> None:
    """The loss over halves. The model runs once more only if its outputs cannot be cut."""
    model = context.model

    def loss(output: object, batch: Batch) -> object:  # each time as it stands now, if it counts its calls
        return Copy(model).of(looked.plain)(output, batch)

    with unseen(), undisturbed(model):
        model.eval()
        context.finding = does_not_split(loss, looked.together() or first, _again(context))


def _samples_meet(context: StepContext, looked: FirstLoss, first: FirstCall) -> bool:
    """Whether samples act on each other within the model, where more than one part of a batch is computed."""
    model, run = context.model, _again(context)
    feed = context.loader.feed
    if run is None or feed.size * feed.accumulate == 1:
        return False
    call = looked.together() or first
    # Dropout draws and batch normalisation measures anew: then both runs are in evaluation mode.
    calm = context.streams.drawn or has_batchnorm(model) or call is not first
    with unseen(), undisturbed(model) as put_back:
        restored = _calmly(model, put_back) if calm else put_back
        restored()
        if not calm:
            return couples(run, first, first.output, restored)
        try:
            return can_split(call.batch) and meets(run, call.batch, restored)
        except Exception:  # a model that fails on half a batch has said nothing
            return False


def _calmly(model: nn.Module, put_back: Callable[[], None]) -> Callable[[], None]:
    """What puts a model back, and then in evaluation mode."""

    def restored() -> None:
        put_back()
        model.eval()

    return restored
