"""What cannot work: settings alone, with the plan, with the model, with the exchange; refused before anything runs."""

from __future__ import annotations

import os
import tempfile

from torch import nn

from shoal import exchange, partition, pipeline
from shoal.config import degree_of, fill_options
from shoal.data.feed import Feed
from shoal.data.source import is_stream
from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange
from shoal.pipeline.base import Schedule
from shoal.plan.check import (
    compressor_of,
    pipeline_options,
    tensor_options,
)
from shoal.train.balancing.balance_rules import check_balance
from shoal.train.model.divide import Divided
from shoal.train.model.sync_batchnorm import has_batchnorm
from shoal.train.run_config import RunConfig
from shoal.train.server_setup import sharers, uses_servers
from shoal.train.technique.schedule import check_every
from shoal.train.watch.replicas import check_comparable
from shoal.types import Plan
from shoal.world.mesh import Mesh

_DEEPEST = 107 - len("/pymp-01234567/listener-01234567")
"""Bytes of a temporary folder in which multiprocessing can have its sockets: the kernel takes 107."""


def check_numbers(config: RunConfig, plan: Plan, mesh: Mesh) -> None:
    """Refuse settings that cannot work, alone or with this plan."""
    check_every(config.schedule_every, config.schedule)
    if config.on_nan not in ("stop", "skip"):
        raise ConfigError(f"on_nan='{config.on_nan}'; it is 'stop' or 'skip'.")
    if config.batchnorm not in ("own", "sync"):
        raise ConfigError(
            f"batchnorm='{config.batchnorm}'; it is 'own' (each worker's samples) or 'sync' (all workers')."
        )
    if config.recompute not in (None, "blocks"):
        raise ConfigError(f"recompute='{config.recompute}'; it is 'blocks', or None.")
    if config.loss is None and tensor_options(plan).loss:
        raise ConfigError(
            f"{plan} leaves logits cut for loss=, and the model computes its own loss from whole ones; leave loss=true "
            "out, or give loss=."
        )
    if config.accumulate < 1:
        raise ConfigError(f"accumulate={config.accumulate}; it must be at least 1.")
    if config.loader_workers < 0:
        raise ConfigError(f"loader_workers={config.loader_workers}; it must be at least 0.")
    if config.loader_workers:
        _check_temporary_folder(config.loader_workers)
    _check_servers(config, plan, mesh)
    _check_stages(config, plan, mesh)
    parts = config.accumulate * pipeline_options(plan).microbatches
    among = sharers(plan, mesh)
    check_balance(config, plan, mesh, among.size)
    needed = among.size * parts
    if config.global_batch < needed:
        who = "workers" if mesh.model.size == 1 else "replicas"
        raise ConfigError(
            f"global_batch={config.global_batch} cannot be cut into {among.size} {who} × {parts} "
            f"micro-batches = {needed} parts; use global_batch={needed} or more, fewer micro-batches, or fewer {who}."
        )


def _check_stages(config: RunConfig, plan: Plan, mesh: Mesh) -> None:
    """Refuse what the stages of a pipeline cannot do."""
    if config.batchnorm == "sync" and mesh.stages.size > 1:
        raise ConfigError(
            f"batchnorm='sync' under {plan}: the micro-batches of a pipeline run one after the other and cannot be "
            "normalised together; leave batchnorm out, or the pipeline."
        )
    if mesh.stages.size > 1 and not partition.make_partition(config.partition).even:
        raise ConfigError(
            f"partition={config.partition} under {plan}: a pipeline needs micro-batches of equal size; use a partition "
            "with equal shares that cuts by count, such as block, or leave the pipeline out."
        )
    if config.recompute and plan_schedule(plan).halves_backward:
        raise ConfigError(
            f"recompute='{config.recompute}' under {plan}: a backward pass in two parts would compute every block "
            "twice more; use 1f1b."
        )


def _check_temporary_folder(loaders: int) -> None:
    """What a loader cannot hand over shows nowhere: who waits for it would wait for ever."""
    folder = tempfile.gettempdir()
    size = len(os.fsencode(folder))
    if size > _DEEPEST:
        raise ConfigError(
            f"loader_workers={loaders}: loader processes have sockets in the temporary folder, whose path of {size} "
            f"bytes ({folder}) leaves no room for their names; set TMPDIR to one of at most {_DEEPEST}."
        )


def _check_servers(config: RunConfig, plan: Plan, mesh: Mesh) -> None:
    """Refuse what needs all workers at once, or a number that all have, where they meet at servers only."""
    if uses_servers(plan) and (config.batchnorm == "sync" or is_stream(config.data)):
        what = (
            "batchnorm='sync' needs all workers at once"
            if config.batchnorm == "sync"
            else "a stream cannot go back"
        )
        raise ConfigError(
            f"{what}, and under {plan} each works on parts that servers hand out; leave it out, or use ddp."
        )
    agreed = [name for name in ("metrics", "early_stop") if getattr(config, name)]
    if agreed and uses_servers(plan) and mesh.world.size > 1:
        raise ConfigError(
            f"{agreed[0]}= under {plan}: {mesh.world.size} workers meet at servers only and have no number in common; "
            "leave it out, or use one worker, or ddp."
        )


def check_compile(config: RunConfig, plan: Plan) -> None:
    """Refuse what cannot be in a compiled graph."""
    if degree_of(plan.tensor) > 1 or degree_of(plan.pipeline) > 1:
        raise ConfigError(
            f"compile under {plan}: layers that are cut talk to other workers inside of a block, and a stage may end "
            "there; leave compile out, or tpN and ppN."
        )
    if config.batchnorm == "sync":
        raise ConfigError(
            "compile with batchnorm='sync': layers talk to other workers inside of a block; use one of the two."
        )


# Rules that need more than the plan: what the model is, and what the exchange turned out to be.


def check_own_batchnorm(model: nn.Module, feed: Feed) -> None:
    """Batch normalisation would take down statistics of a filler, which stands in for a micro-batch without samples."""
    # A stream may end anywhere.
    rest = 1 if is_stream(feed.data) else len(feed.data) % feed.global_batch
    if has_batchnorm(model) and 0 < rest < feed.parts:
        raise ConfigError(
            "a pipeline with batch normalisation needs samples in every micro-batch: the last batch of an epoch has "
            f"{rest} for {feed.parts} micro-batches; choose a global_batch that leaves more, or use LayerNorm or "
            "GroupNorm."
        )


def check_layers(model: nn.Module, plan: Plan, feed: Feed) -> None:
    """Refuse layers that compute something else of a part of a batch, and do so by their nature."""
    facts = facts_of(plan)
    alone = facts.updates_alone and not facts.uses_servers
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.max_norm is not None and not alone and (feed.size > 1 or cuts_parameters(plan)):
            raise ConfigError(
                f"'{name}' has max_norm={layer.max_norm:g}, which changes the rows that it looks up, and under {plan} "
                f"each of {feed.size} workers looks up others, so that its copies would drift apart; leave max_norm "
                "out and divide by the norm in forward, or use one worker."
            )
        if layer.scale_grad_by_freq and layer.weight.requires_grad and feed.parts > 1:
            raise ConfigError(
                f"'{name}' has scale_grad_by_freq=True, which divides by how often a row is in the batch, and here "
                f"each of {feed.parts} parts of a step would count for itself; leave it out, or use one worker with "
                "accumulate=1."
            )


def check_memory(model: nn.Module) -> None:
    """Refuse parameters that lie in the same memory without being one: exchanges give each a place of its own."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        other = seen.setdefault(parameter.data_ptr(), name)
        if other != name:
            path, _, key = name.rpartition(".")
            raise ConfigError(
                f"parameters '{other}' and '{name}' lie in the same memory and are two for torch, and workers would "
                f"part them; make them one, as in model.{path or 'layer'}.{key} = model.{other}."
            )


def why_not_gather(config: RunConfig, plan: Plan, feed: Feed) -> str:
    """Why `run.gather` cannot work with this plan; empty if it can."""
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    if chosen.uses_servers or chosen.updates_alone:
        return f"under {plan} workers need not be at the same step; use ddp, zero1, zero2, zero3 or shared."
    if degree_of(plan.pipeline) > 1:
        return f"under {plan} micro-batches come one after the other; leave the pipeline out."
    if config.accumulate > 1:
        return (
            f"accumulate={config.accumulate} computes a worker's samples in {config.accumulate} parts, one after the "
            "other; use accumulate=1, with more workers or a smaller global_batch."
        )
    if not feed.fill and (not feed.partition.even or config.balance != "even"):
        return (
            f"partition={config.partition} with balance={config.balance} may leave a worker without samples; use "
            "partition=block and balance=even."
        )
    return ""


def check_fit(config: RunConfig, plan: Plan, made: Exchange, divided: Divided) -> None:
    """Refuse what cannot work with this exchange and this model."""
    _check_meetings(config, plan, made)
    if config.check_replicas is not None:
        check_comparable(config.check_replicas, str(plan), made)
    _check_ties(plan, divided)


def _check_meetings(config: RunConfig, plan: Plan, made: Exchange) -> None:
    """Refuse what needs all workers at every step, where they need not be there."""
    if made.sync_interval > 1 and (config.batchnorm == "sync" or is_stream(config.data)):
        what = "batchnorm='sync'" if config.batchnorm == "sync" else "a stream"
        raise ConfigError(
            f"{what} under {plan}: with a quorum a slow worker leaves steps out, and {what} cannot; use quorum=1."
        )


def _check_ties(plan: Plan, divided: Divided) -> None:
    """Refuse what would let the copies of one weight, which several stages hold, drift apart."""
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    if divided.ties and (compressor_of(plan) is not None or getattr(options, "fragments", 1) > 1):
        raise ConfigError(
            f"{plan}: a weight that several stages share would travel with other neighbours from each, and its copies "
            "drift apart; leave the compressor and fragments out, or the pipeline, or untie the weight."
        )


# What a plan means


def plan_schedule(plan: Plan) -> type[Schedule]:
    """The pipeline schedule of a plan."""
    return pipeline.TABLE.look_up(pipeline_options(plan).schedule)


def parts_models(plan: Plan, mesh: Mesh) -> bool:
    """Whether a worker may hold parts of the model only."""
    return mesh.model.size > 1 or cuts_parameters(plan)


def cuts_parameters(plan: Plan) -> bool:
    return facts_of(plan).cuts_parameters


def facts_of(plan: Plan) -> type[Exchange]:
    return exchange.TABLE.look_up(plan.exchange.name)
