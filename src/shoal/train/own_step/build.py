"""From what the user gave to the parts of a step of the user's own: the counterpart of train/build.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from shoal import exchange
from shoal.blocks import find_blocks
from shoal.data.batch import Batch
from shoal.embedding import SparseEmbedding
from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange
from shoal.exchange.setup import Setup
from shoal.optimizer import check_trainable
from shoal.plan.check import check_device, check_text, promise_of
from shoal.recipe.recipes import Recipes
from shoal.report.meter import Meter
from shoal.report.spans import Spans
from shoal.report.words import Words
from shoal.train.balancing.balance_rules import balance_of
from shoal.train.build import make_feed, open_data, open_mesh, prepare_layers, reconcile_buffers
from shoal.train.model.buffer_rules import words_for
from shoal.train.model.divide import Divided
from shoal.train.model.gradient_hooks import HookRules, TrainedSet
from shoal.train.model.make import agree_on_model
from shoal.train.model.random_streams import RandomStreams
from shoal.train.model.sync_batchnorm import say_of_own_batchnorm
from shoal.train.model.whole_model import ModelShape, Whole
from shoal.train.own_step.check import check_own_step
from shoal.train.own_step.exchange_by_model import ExchangeByModel
from shoal.train.own_step.models import Models, make_models
from shoal.train.record import Recorder
from shoal.train.rules import check_layers, check_numbers
from shoal.train.run_config import RunConfig
from shoal.train.step_context import StepContext
from shoal.train.technique import precision
from shoal.train.technique.clip import make_clip
from shoal.train.technique.gather import Gather
from shoal.train.technique.metrics import TrainingMetrics
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World

_NO_GATHER = "a step of your own cannot; a run with loss= can."


def build_own_step(config: RunConfig, world: World, record: str) -> tuple[Plan, StepContext]:
    """Make every part of a step of the user's own. Every rank calls it."""
    plan = check_text(config.strategy, world.size)
    check_device(plan, world.device.type)
    check_own_step(config, plan)
    mesh = open_mesh(plan, world)
    check_numbers(config, plan, mesh)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    chosen = precision.TABLE.look_up(config.precision)
    models = make_models(config.models, config.seed, chosen.model).to(world.device)
    _check_models(models, config)
    recorder = None
    if record:  # one process computes a step as it is, on the whole global batch
        recorder = Recorder(record, world.rank, 1, promise_of(plan))
        recorder.start(models)
    agree_on_model(models, world)
    shape = ModelShape.of(models)
    presence = prepare_layers(config, models, mesh, find_blocks(models))
    streams = RandomStreams(models, (), config.seed)
    spans = Spans()
    said = Words(mesh)
    check_layers(models, plan, make_feed(config, plan, mesh))
    if config.batchnorm == "own" and not record and world.rank == 0:
        say_of_own_batchnorm(models, mesh.data.size)
    made = ExchangeByModel(
        models, {n: _make_exchange(config, plan, mesh, models, n, spans) for n in config.optimizers}
    )
    # A worker without samples gets one all the same: it makes the calls that others wait for.
    feed = replace(make_feed(config, plan, mesh), fill=True)
    return plan, StepContext(
        mesh=mesh,
        model=models,
        pipeline=None,
        loss=_no_loss,
        inputs=_whole_batch,
        loader=open_data(feed, plan, mesh),
        balance=balance_of(config, bool(record)),
        exchange=made,
        whole=Whole(mesh, made, shape, Divided().layout, {}, Recipes()),
        streams=streams,
        presence=presence,
        buffers=None,
        watch=reconcile_buffers(config, plan, mesh, models, words_for(models, config.buffers), said)[1],
        said=said,
        learning=TrainedSet(models, str(plan), HookRules(str(plan), 1, ""), True, World.alone()),
        split_loss=None,
        gather=Gather(mesh.data, _NO_GATHER, fills=True, counts=lambda: presence.counts),
        penalty=None,
        metrics=TrainingMetrics({}, mesh, local=False),
        outline=None,
        precision=chosen,
        scale=precision.LossScale(dynamic=False),
        clip=make_clip(config.clip),
        skip_nan=config.on_nan == "skip",
        meter=Meter(spans),
        recorder=recorder,
        count_per_sample=1.0,
        own_step=config.step,
    )


def _make_exchange(
    config: RunConfig, plan: Plan, mesh: Mesh, models: Models, name: str, spans: Spans
) -> Exchange:
    return exchange.make_exchange(
        plan.exchange,
        Setup(
            model=models[name],
            make_optimizer=config.optimizers[name],
            world=mesh.data,
            # Terms round as micro-batches do: in deterministic mode each is summed over the workers by itself.
            accumulate=2 if config.deterministic else 1,
            deterministic=config.deterministic,
            seed=config.seed,
            recorded=False,
            peers=mesh.joined,
            spans=spans,
        ),
    )


def _check_models(models: Models, config: RunConfig) -> None:
    for name, model in models.items():
        if any(isinstance(module, SparseEmbedding) for module in model.modules()):
            raise ConfigError(
                f"models['{name}'] has a SparseEmbedding, whose rows a step of your own cannot bring; use "
                "nn.Embedding."
            )
        if name in config.optimizers:
            check_trainable(model)
        else:
            model.requires_grad_(False)


def _whole_batch(batch: Batch) -> Batch:
    return batch


def _no_loss(models: object, batch: Batch) -> object:
    """An evaluation measures "loss" unless the user gives a metric of that name."""
    del models, batch
    raise ConfigError(
        "evaluate of a run with step= has no loss= to measure: give a metric of that name, such as "
        'metrics={"loss": lambda models, batch: (sum, count)}.'
    )
