"""From what the user gave to the parts of a step. The only file that knows every slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shoal import exchange, partition, recipe
from shoal.blocks import find_blocks
from shoal.call import call_model
from shoal.config import degree_of
from shoal.data.augment import make_chain
from shoal.data.batch import ModelInputs, convert, length
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.data.stream import StreamLoader, make_loader
from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange
from shoal.exchange.embeddings.embedding_tables import check_rows
from shoal.exchange.setup import Setup
from shoal.functions import copy_of
from shoal.optimizer import check_trainable, outlines
from shoal.partition.block import BlockPartition
from shoal.plan.check import (
    check_device,
    check_text,
    compressor_of,
    pipeline_options,
    promise_of,
    replicas_of,
    tensor_options,
)
from shoal.recipe.recipes import Recipes
from shoal.report.meter import Meter
from shoal.report.spans import Spans
from shoal.report.words import Words
from shoal.tensor import loss_context
from shoal.train.balancing.balance_rules import balance_of
from shoal.train.balancing.balancing import key_for, stage_speeds
from shoal.train.model.buffer_rules import power_vectors, watched, words_for
from shoal.train.model.buffers import BufferWatch, Reconciled
from shoal.train.model.compile_blocks import Compiler, compile_blocks, compiler_for, uncompiled
from shoal.train.model.divide import Divided, Division, Trial, divide, find_division
from shoal.train.model.first_pass import FirstPass
from shoal.train.model.gathered_penalty import Outline
from shoal.train.model.gradient_hooks import HookRules, TrainedSet
from shoal.train.model.make import Values, agree_on_model, make_model
from shoal.train.model.random_streams import RandomStreams
from shoal.train.model.recompute import recompute_blocks
from shoal.train.model.restless import Restless
from shoal.train.model.sync_batchnorm import (
    Presence,
    own_batchnorm,
    say_of_own_batchnorm,
    sync_batchnorm,
)
from shoal.train.model.whole_model import ModelShape, Whole
from shoal.train.pipelined import Pipelined, StageJob
from shoal.train.record import Recorder
from shoal.train.rules import (
    check_compile,
    check_fit,
    check_layers,
    check_memory,
    check_numbers,
    check_own_batchnorm,
    cuts_parameters,
    facts_of,
    parts_models,
    plan_schedule,
    why_not_gather,
)
from shoal.train.run_config import RunConfig, adopt_loader, check_kinds
from shoal.train.server_setup import order_of_use, sharers, uses_servers
from shoal.train.state.recipes_of_run import open_recipes, prepare_model, run_recipes
from shoal.train.step_context import StepContext
from shoal.train.technique import precision
from shoal.train.technique.clip import make_clip
from shoal.train.technique.gather import Gather
from shoal.train.technique.metrics import TrainingMetrics
from shoal.train.technique.own_loss import OwnLoss, as_returned
from shoal.train.technique.split_check import FirstLoss, samples_meet_in
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def build(config: RunConfig, world: World, record: str) -> tuple[Plan, StepContext]:
    """Make every part of a step. Every rank calls it."""
    plan = check_text(config.strategy, world.size)
    check_device(plan, world.device.type)
    adopt_loader(config)
    check_kinds(config)
    mesh = Mesh.ungrouped(world) if uses_servers(plan) else open_mesh(plan, world)
    check_numbers(config, plan, mesh)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    context = _make_parts(config, plan, mesh, record)
    if context.recorder is not None:
        context.recorder.facts = _facts_from(context)
    return plan, context


def _facts_from(context: StepContext) -> Callable[[], dict[str, object]]:
    """What `shoal verify` wants to know of a program once it has made a step."""
    feed = context.loader.feed
    restless = Restless(context.model, feed)

    def facts() -> dict[str, object]:
        found = restless.facts(draws=bool(context.streams.by_module))
        gathers, parts = context.gather.used, feed.size * feed.accumulate
        return {**found, "gathers": gathers, "parts": parts, "finding": context.finding}

    return facts


def _make_parts(config: RunConfig, plan: Plan, mesh: Mesh, record: str) -> StepContext:
    world, feed, clip = mesh.world, make_feed(config, plan, mesh), make_clip(config.clip)
    chosen, recipes = precision.TABLE.look_up(config.precision), open_recipes(config, plan)
    model, values, compiler, recorder = _agreed_model(config, plan, mesh, record, feed, recipes)
    given = config.loss or make_own_loss(config, model, feed, world.device, whole=values is None)
    penalty = recipes.penalty(config.penalty)
    outline = Outline(model) if penalty is not None and parts_models(plan, mesh) else None
    rules = hook_rules(plan, mesh, config)
    rules.check(model, world.rank == 0)
    shape, blocks, said = ModelShape.of(model), find_blocks(model), Words(mesh)
    words = words_for(model, config.buffers)
    divided, elsewhere = divide_model(config, plan, mesh, model, feed, said)
    if compiler is not None:  # inside of what is computed again
        compile_blocks(model, blocks, compiler, lambda: not streams.watching)
    presence, metrics = prepare_layers(config, model, mesh, blocks), _make_metrics(config, plan, mesh)
    streams, loss = RandomStreams(model, blocks, config.seed), recipes.around(metrics.watch(given, presence))
    buffers, watch = reconcile_buffers(config, plan, mesh, model, words, said)
    looked, inputs = loss if isinstance(given, OwnLoss) else FirstLoss(loss, given), inputs_of(config, model)
    job = StageJob(inputs, looked, chosen, streams, presence, world.device, Spans(), buffers)
    pipelined = Pipelined.of(mesh.stages, job, plan_schedule(plan), model, divided, feed)
    order = order_of_use(make_trial(config, model, feed, world.device)) if uses_servers(plan) else ()
    root = pipelined.root if pipelined is not None else None
    setup = make_setup(config, plan, mesh, model, divided, recipes)
    setup = replace(setup, blocks=blocks, root=root, values=values, recorded=bool(record), order=order)
    made = exchange.make_exchange(plan.exchange, replace(setup, spans=job.spans, elsewhere=elsewhere))
    check_fit(config, plan, made, divided)
    options = tensor_options(plan)
    if pipelined is not None:
        pipelined.connect(made, partial(loss_context, options))
    if isinstance(given, OwnLoss) and not given.settled:
        settle(given, config, model, feed, world.device)
    return StepContext(
        mesh=mesh,
        model=model,
        pipeline=pipelined,
        loss=looked,
        inputs=job.inputs,
        loader=open_data(feed, plan, mesh),
        balance=balance_of(config, bool(record)),
        exchange=made,
        whole=run_recipes(config, Whole(mesh, made, shape, divided.layout, divided.same, recipes)),
        streams=streams,
        presence=presence,
        buffers=buffers,
        watch=watch,
        said=said,
        first=FirstPass.of(model, given, mesh, feed, said, _meets(made), made.one_copy),
        learning=TrainedSet(made.module, str(plan), rules, _shards(plan, mesh), mesh.tensor),
        split_loss=partial(loss_context, options) if options.loss else None,
        gather=Gather(mesh.data, why_not_gather(config, plan, feed), feed.fill, lambda: presence.counts),
        penalty=penalty,
        outline=outline,
        precision=chosen,
        scale=precision.LossScale(dynamic=chosen.scaled),
        clip=clip,
        skip_nan=config.on_nan == "skip",
        meter=Meter(job.spans),
        recorder=recorder,
        metrics=metrics,
    )


def _meets(made: Exchange) -> bool:
    """Whether all workers have the same whole parameters in each step."""
    return not (made.uses_servers or made.updates_alone or made.cuts_parameters)


def _agreed_model(
    config: RunConfig, plan: Plan, mesh: Mesh, record: str, feed: Feed, recipes: Recipes
) -> tuple[nn.Module, Values | None, Compiler | None, Recorder | None]:
    """The model before anything is cut, the same on all ranks; how to compile it, and who writes its steps down."""
    model, values, compiler = _make_model(config, plan, mesh, bool(record) or recipes.needs_values)
    alike = mesh.data if uses_servers(plan) else mesh.world
    if recipes.needs_values:  # they start from what all have
        agree_on_model(model, alike)
    prepare_model(recipes, config, plan, mesh, model)
    recorder = _make_recorder(record, config, plan, mesh.world, feed, model) if record else None
    agree_on_model(model, alike)
    _check_model(model, plan)
    check_layers(model, plan, feed)
    if config.batchnorm == "own" and not record and mesh.world.rank == 0:
        say_of_own_batchnorm(model, feed.parts)
    check_memory(model)
    return model, values, compiler, recorder


def _make_metrics(config: RunConfig, plan: Plan, mesh: Mesh) -> TrainingMetrics:
    return TrainingMetrics(config.metrics, mesh, facts_of(plan).updates_alone)


def make_setup(
    config: RunConfig,
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    divided: Divided,
    recipes: Recipes | None = None,
) -> Setup:
    """What the request, the mesh and the model's division say of the exchange."""
    make = config.optimizer
    if recipes is not None:
        make = recipes.optimizer(make, model, divided.same)
    return Setup(
        model=model,
        make_optimizer=make,
        world=sharers(plan, mesh),
        accumulate=config.accumulate,
        deterministic=config.deterministic,
        model_world=mesh.model,
        shares=divided.shares,
        same=divided.same,
        mesh=mesh.torch,
        seed=config.seed,
        peers=mesh.joined,
        compressor=compressor_of(plan),
    )


def _make_recorder(
    folder: str, config: RunConfig, plan: Plan, world: World, feed: Feed, model: nn.Module
) -> Recorder:
    """Writes every step down for `shoal verify`, beginning with the model as it is now."""
    recorder = Recorder(folder, world.rank, _stands_for(config, feed), promise_of(plan))
    recorder.start(model)
    return recorder


def _make_model(
    config: RunConfig, plan: Plan, mesh: Mesh, whole: bool
) -> tuple[nn.Module, Values | None, Compiler | None]:
    """The model on its device, or on none where its parameters are made when they have been cut; how to compile it."""
    deferred = cuts_parameters(plan) and mesh.model.size == 1 and not whole
    dtype = precision.TABLE.look_up(config.precision).model
    made, values = make_model(config.model, config.seed, dtype, deferred)
    model, theirs = uncompiled(made)
    compiler = compiler_for(config.compile) or theirs
    if compiler is not None:
        check_compile(config, plan)
    return (model.to(mesh.world.device) if values is None else model), values, compiler


def _check_model(model: nn.Module, plan: Plan) -> None:
    check_trainable(model)
    check_rows(model, exchange.TABLE.look_up(plan.exchange.name))


def _stands_for(config: RunConfig, feed: Feed) -> int:
    """How many micro-batches all replicas compute for each one that the script asks for."""
    if config.batchnorm != "sync":
        return feed.size * feed.accumulate // config.accumulate
    if config.accumulate > 1:
        raise ConfigError(
            f"verify cannot follow batchnorm='sync' with accumulate={config.accumulate}: one process would have to "
            "normalise samples of all workers together, micro-batch by micro-batch; verify with accumulate=1."
        )
    return 1  # all replicas normalise one batch together


def open_mesh(plan: Plan, world: World) -> Mesh:
    """The workers arranged as a plan wants them."""
    replicas = replicas_of(plan) if cuts_parameters(plan) else 0
    return Mesh.open(world, degree_of(plan.tensor), degree_of(plan.pipeline), replicas)


def make_feed(config: RunConfig, plan: Plan, mesh: Mesh) -> Feed:
    """Which samples this worker's replica gets, in how many micro-batches."""
    meets = mesh.model.size > 1 or exchange.TABLE.look_up(plan.exchange.name).every_worker_computes
    among = sharers(plan, mesh)
    feed = Feed(
        config.data,
        config.global_batch,
        among.rank,
        among.size,
        config.accumulate * pipeline_options(plan).microbatches,
        config.seed,
        config.shuffle,
        config.collate,
        config.loader_workers,
        fill=meets or config.batchnorm == "sync",
        partition=partition.make_partition(config.partition),
        columns=config.columns,
        sampler=config.sampler,
        drop_last=config.drop_last,
        pin_memory=config.pin_memory,
        worker_init=config.worker_init_fn,
        augment=make_chain(config.augment),
    )
    for one in recipe.make_recipes(config.recipes):
        feed = one.feed(feed)
    return feed


def open_data(feed: Feed, plan: Plan, mesh: Mesh) -> Loader | StreamLoader:
    """The loader; where a sampler gives the order, all workers must have got the same."""
    loader = make_loader(feed)
    if feed.sampler is None or isinstance(loader, StreamLoader):
        return loader
    name = type(feed.sampler).__name__
    if mesh.stages.size > 1 and loader.own_batches:
        raise ConfigError(
            f"{plan} needs batches of one size, and the sampler {name} makes batches of its own; give one that gives "
            "single samples, or leave the pipeline out."
        )
    if not uses_servers(plan):
        sums = mesh.world.gather_numbers([float(loader.checksum())])[:, 0].tolist()
        other = next((rank for rank, theirs in enumerate(sums) if theirs != sums[0]), None)
        if other is not None:
            raise ConfigError(
                f"the sampler {name} gave rank {other} another order than rank 0; let it draw from torch's, numpy's or "
                "Python's global generators, and give all ranks the same samples."
            )
    return loader


def divide_model(
    config: RunConfig, plan: Plan, mesh: Mesh, model: nn.Module, feed: Feed, said: Words
) -> tuple[Divided, dict[str, nn.Parameter]]:
    """Cut the model to this worker's part of it, if the plan cuts it; in a pipeline also outlines of what learns."""
    if mesh.model.size == 1:
        return Divided(), {}
    elsewhere = outlines(model) if mesh.stages.size > 1 else {}
    trial = make_trial(config, model, feed, mesh.world.device)
    if feed.parts > 1 and trial.samples_meet():
        said.say(samples_meet_in(length(trial.batch)))
    found = find_in_model(config, plan, mesh, model, feed)
    return divide(model, found, mesh, tensor_options(plan), plan_schedule(plan)), elsewhere


def find_in_model(config: RunConfig, plan: Plan, mesh: Mesh, model: nn.Module, feed: Feed) -> Division:
    """Where the model can be divided as the plan wants it; refuses what cannot be."""
    if mesh.stages.size > 1:
        check_own_batchnorm(model, feed)
    trial, at = make_trial(config, model, feed, mesh.world.device), pipeline_options(plan).split
    speeds = partial(stage_speeds, balance_of(config), mesh, key_for(ModelShape.of(model), mesh.world))
    return find_division(
        trial, mesh, config.tensor_rules, tensor_options(plan), plan_schedule(plan), at, speeds
    )


def make_trial(config: RunConfig, model: nn.Module, feed: Feed, device: torch.device) -> Trial:
    """One micro-batch, the same on every rank, so that all find the same."""
    chosen = precision.TABLE.look_up(config.precision)
    plain = replace(feed, rank=0, workers=0, partition=BlockPartition(), columns={})
    batch = convert(make_loader(plain).take(0).batches[0], device, chosen.model)
    loss = FirstLoss(copy_of(config.loss, model)) if config.loss is not None else as_returned
    return Trial(model, batch, inputs_of(config, model), loss, chosen, device)


def inputs_of(config: RunConfig, model: nn.Module) -> ModelInputs:
    """From a batch to how the model is called."""
    return ModelInputs(model, config.inputs, config.loss is None)


def make_own_loss(
    config: RunConfig, model: nn.Module, feed: Feed, device: torch.device, whole: bool
) -> OwnLoss:
    """The loss of a model that returns its own; it is settled now if the model has values and is whole."""
    loss = OwnLoss()
    if whole:
        settle(loss, config, model, feed, device)
    return loss


def settle(loss: OwnLoss, config: RunConfig, model: nn.Module, feed: Feed, device: torch.device) -> None:
    """Let the model show what it divides its loss by, on a few samples that all ranks have."""
    few = replace(feed, global_batch=min(_FEW, feed.global_batch), accumulate=1, size=1)
    trial = make_trial(config, model, few, device)
    loss.settle(model, lambda batch: call_model(model, trial.inputs(batch)), trial.batch)


def prepare_layers(config: RunConfig, model: nn.Module, mesh: Mesh, blocks: tuple[str, ...]) -> Presence:
    """Batch normalisation over all workers, and blocks that are computed twice."""
    presence = Presence() if config.batchnorm == "sync" else own_batchnorm(model)
    if config.batchnorm == "sync":
        sync_batchnorm(
            model, mesh.data.new_group(), presence
        )  # its sums go between the gradients' in any order
    if config.recompute == "blocks":
        here = [name for name in blocks if next(model.get_submodule(name).parameters(), None) is not None]
        if here or not blocks:  # a stage may have none of them
            recompute_blocks(model, here)
    return presence


def hook_rules(plan: Plan, mesh: Mesh, config: RunConfig) -> HookRules:
    """What becomes of hooks on gradients under this plan."""
    replicas = sharers(plan, mesh).size
    parts = replicas * config.accumulate * pipeline_options(plan).microbatches
    cut = f"tp{degree_of(plan.tensor)}" if degree_of(plan.tensor) > 1 else ""
    return HookRules(str(plan), parts, plan.exchange.name if _shards(plan, mesh) else cut)


def _shards(plan: Plan, mesh: Mesh) -> bool:
    """Whether a worker holds some rows of each parameter only."""
    return cuts_parameters(plan) and mesh.data.size > 1


def reconcile_buffers(
    config: RunConfig, plan: Plan, mesh: Mesh, model: nn.Module, words: Mapping[str, str], said: Words
) -> tuple[Reconciled | None, BufferWatch]:
    """Buffers that are to have one value on all workers, and those that are watched."""
    kind = exchange.TABLE.look_up(plan.exchange.name)
    alone = str(plan) if kind.uses_servers or kind.updates_alone else ""
    powers = set(power_vectors(model))
    asked = [word for name, word in words.items() if name not in powers and word != "own"]
    if alone and asked:
        raise ConfigError(
            f"buffers={config.buffers!r}: under {plan} workers do not meet at every step, and '{asked[0]}' needs them "
            "all; use 'own', or ddp."
        )
    own = [name for name, word in words.items() if word == "own"]
    parts = sharers(plan, mesh).size * config.accumulate * pipeline_options(plan).microbatches
    watch = BufferWatch(model, watched(model, words), own, mesh, parts, alone, said)
    return Reconciled.of(model, words, World.alone(mesh.world.device) if alone else mesh.data), watch


_FEW = 8
"""Samples that show what a loss is divided by."""
