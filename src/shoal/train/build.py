"""From what the user gave to the parts of a step. The only file that knows every slot."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shoal import exchange, partition, pipeline
from shoal.blocks import find_blocks
from shoal.config import degree_of
from shoal.data.batch import convert, default_inputs
from shoal.data.feed import Feed
from shoal.data.source import is_stream
from shoal.data.stream import make_loader
from shoal.errors import ConfigError
from shoal.exchange.setup import Setup
from shoal.exchange.tables import check_rows
from shoal.optimizer import check_trainable
from shoal.partition.block import Block
from shoal.pipeline.base import Schedule
from shoal.plan.check import (
    check_text,
    compressor_of,
    pipeline_options,
    promise_of,
    replicas_of,
    tensor_options,
)
from shoal.report.meter import Meter
from shoal.tensor import loss_context
from shoal.train import precision
from shoal.train.apart import apart, order_of_use, sharers
from shoal.train.balance_rules import balance_of, check_balance
from shoal.train.balancing import key_for, stage_speeds
from shoal.train.batchnorm import Presence, has_batchnorm, own_batchnorm, sync_batchnorm
from shoal.train.clip import make_clip
from shoal.train.divide import Divided, Found, Trial, divide, find_division
from shoal.train.model import Values, agree_on_model, make_model
from shoal.train.order import Order, check_kinds
from shoal.train.parts import Parts
from shoal.train.pipelined import Job, Pipelined
from shoal.train.recompute import recompute_blocks
from shoal.train.record import Recorder
from shoal.train.rules import check_fit
from shoal.train.streams import Streams
from shoal.train.whole import Shape, Whole
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def build(order: Order, world: World, record: str) -> tuple[Plan, Parts]:
    """Make every part of a step. Every rank calls it."""
    plan = check_text(order.strategy, world.size)
    check_kinds(order)
    mesh = Mesh.apart(world) if apart(plan) else open_mesh(plan, world)
    check_numbers(order, plan, mesh)
    if order.deterministic:
        torch.use_deterministic_algorithms(True)
    return plan, _make_parts(order, plan, mesh, record)


def _make_parts(order: Order, plan: Plan, mesh: Mesh, record: str) -> Parts:
    world, chosen, clip = mesh.world, precision.TABLE.look_up(order.precision), make_clip(order.clip)
    feed = make_feed(order, plan, mesh)
    model, values = _make_model(order, plan, mesh, record)
    recorder = Recorder(record, world.rank, _stands_for(order, feed), promise_of(plan)) if record else None
    if recorder is not None:
        recorder.start(model)
    agree_on_model(model, mesh.data if apart(plan) else world)
    _check_model(model, plan)
    shape, blocks, divided = Shape.of(model), find_blocks(model), divide_model(order, plan, mesh, model, feed)
    presence = prepare_layers(order, model, mesh, blocks)
    streams = Streams(model, blocks, order.seed)
    job = Job(order.inputs or default_inputs, order.loss, chosen, streams, presence, world.device)
    pipelined = Pipelined.of(mesh.stages, job, plan_schedule(plan), model, divided, feed)
    made = exchange.make_exchange(
        plan.exchange,
        Setup(
            model=model,
            make_optimizer=order.optimizer,
            world=sharers(plan, mesh),
            accumulate=order.accumulate,
            deterministic=order.deterministic,
            model_world=mesh.model,
            shares=divided.shares,
            mesh=mesh.torch,
            blocks=blocks,
            root=pipelined.root if pipelined is not None else None,
            values=values,
            seed=order.seed,
            recorded=bool(record),
            order=order_of_use(make_trial(order, model, feed, world.device)) if apart(plan) else (),
            peers=mesh.joined,
            compressor=compressor_of(plan),
        ),
    )
    check_fit(order, plan, made, divided)
    options = tensor_options(plan)
    if pipelined is not None:
        pipelined.connect(made, lambda: loss_context(options))
    return Parts(
        mesh=mesh,
        model=model,
        pipeline=pipelined,
        loss=order.loss,
        inputs=job.inputs,
        loader=make_loader(feed),
        balance=balance_of(order, bool(record)),
        exchange=made,
        whole=Whole(mesh, made, shape, divided.layout, divided.same),
        streams=streams,
        presence=presence,
        split_loss=(lambda: loss_context(options)) if options.loss else None,
        precision=chosen,
        scale=precision.LossScale(dynamic=chosen.scaled),
        clip=clip,
        skip_nan=order.on_nan == "skip",
        meter=Meter(),
        recorder=recorder,
        count_per_sample=1.0,
    )


def _make_model(order: Order, plan: Plan, mesh: Mesh, record: str) -> tuple[nn.Module, Values | None]:
    """The model on its device; or on none, where its parameters are made one by one when they have been cut."""
    lazily = _cuts_parameters(plan) and mesh.model.size == 1 and not record
    dtype = precision.TABLE.look_up(order.precision).model
    model, values = make_model(order.model, order.seed, dtype, lazily)
    return (model.to(mesh.world.device) if values is None else model), values


def _check_model(model: nn.Module, plan: Plan) -> None:
    check_trainable(model)
    check_rows(model, exchange.TABLE.look_up(plan.exchange.name))


def _stands_for(order: Order, feed: Feed) -> int:
    """How many micro-batches all replicas compute for each one that the script asks for."""
    if order.batchnorm != "sync":
        return feed.size * feed.accumulate // order.accumulate
    if order.accumulate > 1:
        raise ConfigError(
            f"verify cannot follow batchnorm='sync' with accumulate={order.accumulate}: one process would have to "
            "normalise samples of all workers together, micro-batch by micro-batch; verify with accumulate=1."
        )
    return 1  # all replicas normalise one batch together


def open_mesh(plan: Plan, world: World) -> Mesh:
    """The workers arranged as a plan wants them."""
    replicas = replicas_of(plan) if _cuts_parameters(plan) else 0
    return Mesh.open(world, degree_of(plan.tensor), degree_of(plan.pipeline), replicas)


def make_feed(order: Order, plan: Plan, mesh: Mesh) -> Feed:
    """Which samples this worker's replica gets, in how many micro-batches."""
    meets = mesh.model.size > 1 or exchange.TABLE.look_up(plan.exchange.name).every_worker_computes
    among = sharers(plan, mesh)
    return Feed(
        order.data,
        order.global_batch,
        among.rank,
        among.size,
        order.accumulate * pipeline_options(plan).microbatches,
        order.seed,
        order.shuffle,
        order.collate,
        order.loader_workers,
        fill=meets or order.batchnorm == "sync",
        partition=partition.make_partition(order.partition),
        columns=order.columns,
    )


def divide_model(order: Order, plan: Plan, mesh: Mesh, model: nn.Module, feed: Feed) -> Divided:
    """Cut the model to this worker's part of it, if the plan cuts it."""
    if mesh.model.size == 1:
        return Divided()
    found = find_in_model(order, plan, mesh, model, feed)
    return divide(model, found, mesh, tensor_options(plan), plan_schedule(plan))


def find_in_model(order: Order, plan: Plan, mesh: Mesh, model: nn.Module, feed: Feed) -> Found:
    """Where the model can be divided as the plan wants it; refuses what cannot be."""
    if mesh.stages.size > 1:
        _check_batchnorm(model, feed)
    trial, at = make_trial(order, model, feed, mesh.world.device), pipeline_options(plan).split
    speeds = partial(stage_speeds, balance_of(order), mesh, key_for(Shape.of(model), mesh.world))
    return find_division(
        trial, mesh, order.tensor_rules, tensor_options(plan), plan_schedule(plan), at, speeds
    )


def make_trial(order: Order, model: nn.Module, feed: Feed, device: torch.device) -> Trial:
    """One micro-batch, the same on every rank, so that all find the same."""
    chosen = precision.TABLE.look_up(order.precision)
    plain = replace(feed, rank=0, workers=0, partition=Block(), columns={})
    batch = convert(make_loader(plain).take(0).batches[0], device, chosen.model)
    return Trial(model, batch, order.inputs or default_inputs, order.loss, chosen, device)


def plan_schedule(plan: Plan) -> type[Schedule]:
    """The pipeline schedule of a plan."""
    return pipeline.TABLE.look_up(pipeline_options(plan).schedule)


def _cuts_parameters(plan: Plan) -> bool:
    return exchange.TABLE.look_up(plan.exchange.name).cuts_parameters


def prepare_layers(order: Order, model: nn.Module, mesh: Mesh, blocks: tuple[str, ...]) -> Presence:
    """Batch normalisation over all workers, and blocks that are computed twice."""
    presence = Presence() if order.batchnorm == "sync" else own_batchnorm(model)
    if order.batchnorm == "sync":
        sync_batchnorm(model, mesh.data.apart(), presence)  # its sums go between the gradients' in any order
    if order.recompute == "blocks":
        here = [name for name in blocks if next(model.get_submodule(name).parameters(), None) is not None]
        if here or not blocks:  # a stage may have none of them
            recompute_blocks(model, here)
    return presence


def check_numbers(order: Order, plan: Plan, mesh: Mesh) -> None:
    """Refuse settings that cannot work, alone or with this plan."""
    if order.on_nan not in ("stop", "skip"):
        raise ConfigError(f"on_nan='{order.on_nan}'; it is 'stop' or 'skip'.")
    if order.batchnorm not in ("own", "sync"):
        raise ConfigError(
            f"batchnorm='{order.batchnorm}'; it is 'own' (each worker's samples) or 'sync' (all workers')."
        )
    if order.recompute not in (None, "blocks"):
        raise ConfigError(f"recompute='{order.recompute}'; it is 'blocks', or None.")
    if order.accumulate < 1:
        raise ConfigError(f"accumulate={order.accumulate}; it must be at least 1.")
    if order.loader_workers < 0:
        raise ConfigError(f"loader_workers={order.loader_workers}; it must be at least 0.")
    if apart(plan) and (order.batchnorm == "sync" or is_stream(order.data)):
        what = (
            "batchnorm='sync' needs all workers at once"
            if order.batchnorm == "sync"
            else "a stream cannot go back"
        )
        raise ConfigError(
            f"{what}, and under {plan} each works on parts that servers hand out; leave it out, or use ddp."
        )
    if order.batchnorm == "sync" and mesh.stages.size > 1:
        raise ConfigError(
            f"batchnorm='sync' under {plan}: the micro-batches of a pipeline run one after the other and cannot be "
            "normalised together; leave batchnorm out, or the pipeline."
        )
    if mesh.stages.size > 1 and not partition.make_partition(order.partition).even:
        raise ConfigError(
            f"partition={order.partition} under {plan}: a pipeline needs micro-batches of equal size; use a partition "
            "with equal shares that cuts by count, such as block, or leave the pipeline out."
        )
    if order.recompute and plan_schedule(plan).halves_backward:
        raise ConfigError(
            f"recompute='{order.recompute}' under {plan}: a backward pass in two parts would compute every block "
            "twice more; use 1f1b."
        )
    parts = order.accumulate * pipeline_options(plan).microbatches
    among = sharers(plan, mesh)
    check_balance(order, plan, mesh, among.size)
    needed = among.size * parts
    if order.global_batch < needed:
        who = "workers" if mesh.model.size == 1 else "replicas"
        raise ConfigError(
            f"global_batch={order.global_batch} cannot be cut into {among.size} {who} × {parts} "
            f"micro-batches = {needed} parts; use global_batch={needed} or more, fewer micro-batches, or fewer {who}."
        )


def _check_batchnorm(model: nn.Module, feed: Feed) -> None:
    """Batch normalisation would take down statistics of a filler, which stands in for a micro-batch without samples."""
    # A stream may end anywhere.
    rest = 1 if is_stream(feed.data) else len(feed.data) % feed.global_batch
    if has_batchnorm(model) and 0 < rest < feed.parts:
        raise ConfigError(
            "a pipeline with batch normalisation needs samples in every micro-batch: the last batch of an epoch has "
            f"{rest} for {feed.parts} micro-batches; choose a global_batch that leaves more, or use LayerNorm or "
            "GroupNorm."
        )
