"""The profile of a run: traced on tensors without memory, rehearsed for real where it fits, divided where it can be."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal import exchange
from shoal.cost import ModelProfile
from shoal.errors import ConfigError
from shoal.plan.check import check_text
from shoal.plan.cost import plan_cost
from shoal.plan.interval import ZERO, Interval
from shoal.plan.machine import Machine
from shoal.plan.search import COMPRESSORS, written_alone
from shoal.plan.work import Pass, Work
from shoal.train.build import make_feed, make_trial
from shoal.train.model.make import make_model
from shoal.train.model.profile import profile_model
from shoal.train.own_step.check import check_strategy
from shoal.train.own_step.models import make_models
from shoal.train.planning.divisions import Divisions, divide_all, tables_in, text_of, ways_to_divide
from shoal.train.planning.rehearsal import allocated, pass_alone, rehearse, resident
from shoal.train.planning.trace import CannotTrace, Traced, trace
from shoal.train.planning.try_plan import try_plan
from shoal.train.run_config import RunConfig, check_kinds
from shoal.train.server_setup import order_of_use
from shoal.train.technique import precision
from shoal.train.technique.clip import ByNorm, make_clip
from shoal.world.free_memory import free_memory
from shoal.world.mesh import Mesh
from shoal.world.world import World


@dataclass(frozen=True)
class Effort:
    """How much is done to find out."""

    seconds: float = 4.0
    """Of passes for real, over all sizes."""
    divide: bool = True
    run: bool = True
    """Whether anything may be run for real; else all follows from shapes."""


ROOM = 0.8
"""Of the memory that is free, which profiling may take."""
SMALL = 0.1
"""Of it, below which nobody asks how much a pass takes before it is run."""
_TRIES = 20.0
"""Seconds by the clock after which no other way to divide a model is tried by real workers."""
_RATE = 0.5
"""How uncertain seconds are that follow from counted operations only."""


def profile_work(config: RunConfig, world: World, workers: int, machine: Machine, effort: Effort) -> Work:
    """The profile of a run on so many workers. Every worker of `world` calls it: they are each other's neighbours."""
    if config.step is None:
        check_kinds(config)
    base, own = resident("VmRSS"), allocated()
    sizes = _sizes(config.global_batch, workers, world.size)
    whole, divisions = whole_profile(config), Divisions()
    model_bytes = plan_cost(check_text("ddp", 1), whole, Mesh.imagine(World.alone(), 1)).total
    traced, why, note = None, "", ""
    needed = world.size * 2 * model_bytes
    if (
        not effort.run or needed > SMALL * free_memory()
    ):  # how much a pass takes has to be known before one is run
        traced, why = _traced(config, max(sizes[-1], 1))
        needed = world.size * (model_bytes + (traced.peak if traced is not None else model_bytes))
        note = "" if traced is not None else f"not traced ({why}), so it was run"
    runs = world.gather_values(effort.run and needed < ROOM * free_memory())[0]
    if not runs and traced is None:
        raise ConfigError(
            f"the model can neither be traced ({why}) nor run: {needed / 1e9:.1f} GB are needed to run it on "
            f"{world.size} workers, and {free_memory() / 1e9:.1f} GB are free. Plan with fewer workers."
        )
    if not runs:
        assert traced is not None
        return replace(
            _counted(traced, whole, machine, sizes),
            key=key_of(config, _shapes(whole)),
            base=base,
            exchanges=_refused(config),
            compression=_compression(config),
        )
    # First of all: what imports and traces leave behind would count as what a pass takes.
    seen = rehearse(config, sizes, effort.seconds, base + model_bytes, world)
    if effort.divide and workers > 1:
        if world.rank == 0:
            divisions = _divisions(config, whole, workers)
        if workers == world.size:
            _try_divisions(config, divisions, world, own)
    alone = 1.0
    if world.size > 1:
        if world.rank == 0:
            single = pass_alone(config, sizes[-1], effort.seconds / 4)
            alone = min(1.0, single / seen.passes[-1].seconds.middle)
        world.barrier()
    return Work(
        key=key_of(config, _shapes(whole)),
        passes=seen.passes,
        update=Interval.measured(seen.update),
        data=Interval.measured(seen.data),
        whole=whole,
        divisions=divisions.found,
        refused=divisions.refused,
        exchanges=_refused(config),
        compression=_compression(config),
        base=base,
        neighbours=world.size,
        alone=alone,
        note=note,
    )


def _shapes(whole: ModelProfile) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in whole.parameters}


def _sizes(batch: int, workers: int, here: int) -> list[int]:
    """Samples of the passes that are measured: those of plain data parallel, half of them, and a few more."""
    each = max(1, -(-batch // workers))
    found = {each, max(1, each // 4), min(batch, 2 * each)} if here > 1 else {each, max(1, each // 2)}
    return sorted(found)


def _traced(config: RunConfig, samples: int) -> tuple[Traced | None, str]:
    try:
        return trace(config, samples), ""
    except CannotTrace as error:
        return None, str(error)


def whole_profile(config: RunConfig) -> ModelProfile:
    """What the whole model consists of; nothing is allocated where its factory allows that."""
    chosen = precision.TABLE.look_up(config.precision)
    if config.step is not None:
        models = make_models(config.models, config.seed, chosen.model)
        made = [profile_model(models.get_submodule(name), make) for name, make in config.optimizers.items()]
        parameters = tuple(p for one in made for p in one.parameters)
        return ModelProfile(parameters, sum(one.buffers for one in made), deterministic=config.deterministic)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=True)
    return replace(
        profile_model(model, config.optimizer),
        accumulate=config.accumulate,
        norm=chosen.scaled or config.on_nan == "skip" or isinstance(make_clip(config.clip), ByNorm),
        deterministic=config.deterministic,
    )


def _divisions(config: RunConfig, whole: ModelProfile, workers: int) -> Divisions:
    why = ""
    if config.step is not None:
        why = "a step of your own needs whole models; leave tpN and ppN out."
    elif config.batchnorm == "sync" or config.compile:
        why = "with batchnorm='sync' or compile=True no way to divide the model is tried."
    if why:
        return Divisions(refused=dict.fromkeys(ways_to_divide(workers), why))
    chosen = precision.TABLE.look_up(config.precision)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=False)
    feed = make_feed(config, check_text("ddp", 1), Mesh.open(World.alone()))
    order = order_of_use(make_trial(config, model, feed, torch.device("cpu")))
    ranked = replace(whole, parameters=profile_model(model, config.optimizer, order).parameters)
    return divide_all(config, model, ranked, workers)


def _try_divisions(config: RunConfig, divisions: Divisions, world: World, own: int) -> None:
    """Let the workers take a few steps of each way to divide the model: what they hold and take is then known.

    `own`: bytes that a process has allocated before anything of a run.
    """
    end = time.monotonic() + _TRIES
    ways: list[list[int]] = world.gather_values([list(way) for way in divisions.found])[0]
    for tensor, stages, each in ways:
        if world.gather_values(time.monotonic() > end)[0]:
            return
        degree = (tensor, stages, each)
        text = text_of(degree)
        seen = try_plan(config, world, text, steps=3, warm=2)
        if world.rank == 0 and not seen.failed:
            divisions.found[degree] = replace(
                divisions.found[degree],
                text=text,
                batch=config.global_batch,
                accumulate=config.accumulate,
                seconds=seen.seconds,
                built=own + seen.built,
                peak=own + seen.peak,
            )
        elif world.rank == 0:
            del divisions.found[degree]
            divisions.refused[degree] = seen.failed


def _counted(traced: Traced, whole: ModelProfile, machine: Machine, sizes: list[int]) -> Work:
    """Without running: operations at the speed of this machine's products of matrices, and bytes from shapes."""
    rate = machine.flops or 1e9
    seconds = Interval.exact(traced.flops / rate).widened(_RATE)
    one = Pass(traced.samples, seconds, traced.peak)
    held = sum(p.nbytes for p in whole.trained)
    update = Interval.exact(6 * held / max(rate, 1e9)).widened(_RATE)
    del sizes
    return Work("", [one], update, ZERO, whole, traced=True, note="counted, not run: it would not fit here")


def _compression(config: RunConfig) -> str:
    """Why nothing can be compressed, if so."""
    if config.step is not None:
        try:
            check_strategy(check_text(f"ddp + {COMPRESSORS[0]}", 1))
        except ConfigError as error:
            return str(error)
    return ""


def _refused(config: RunConfig) -> dict[str, str]:
    """Exchanges that cannot train this model."""
    found: dict[str, str] = {}
    if config.step is not None:
        for name in exchange.TABLE:
            try:
                check_strategy(check_text(written_alone(name), 1))
            except ConfigError as error:
                found[name] = str(error)
        return found
    chosen = precision.TABLE.look_up(config.precision)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=True)
    for table in tables_in(model)[:1]:
        for name, kind in exchange.TABLE.items():
            if not kind.keeps_rows:
                found[name] = f"SparseEmbedding '{table}' keeps its rows on servers; use ps or solo."
    return found


def key_of(config: RunConfig, shapes: Mapping[str, Sequence[int]]) -> str:
    """Names what is trained: shapes of parameters, and the settings on which its times depend; without saying which."""
    listed = sorted((name, list(shape)) for name, shape in shapes.items())
    settings = [
        config.global_batch,
        config.precision,
        config.accumulate,
        config.recompute,
        str(config.compile),
    ]
    return hashlib.sha256(json.dumps([listed, settings]).encode()).hexdigest()[:24]
