"""`strategy="auto"` becomes a strategy: profile, search, try the best, remember. Every rank calls it; rank 0 decides.

A try builds the run as it would be under a plan, takes its first steps on the real samples, and is thrown away: the run
then begins at its first step as if nothing had been tried, with the same samples in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from shoal import exchange
from shoal.errors import ConfigError
from shoal.plan.automatic import AutoOptions, automatic_options, remember, remembered
from shoal.plan.cache import keep, machine_key
from shoal.plan.machine import Machine
from shoal.plan.predict import Prediction, Predictor, Setting, degrees_of
from shoal.plan.residuals import residuals_of
from shoal.plan.search import Wanted, search
from shoal.plan.show import best_of_each, span
from shoal.train.planning.answer_plan import keep_predictions, machine_of
from shoal.train.planning.calibrate import calibrate
from shoal.train.planning.calibrate_worker import TABLES, key_of
from shoal.train.planning.profile_work import Effort, profile_work
from shoal.train.planning.rehearsal import unheard
from shoal.train.planning.try_plan import try_plan
from shoal.train.run_config import RunConfig
from shoal.world.free_memory import free_memory
from shoal.world.world import World

_WARM = 3
"""First steps of a try, which do not count."""


def choose_strategy(config: RunConfig, world: World) -> None:
    """Put a strategy in the place of `auto`. Collective."""
    options = automatic_options(config.strategy)
    if options is None:
        return
    if world.size == 1:
        config.strategy = "solo"
        return
    machine = _machine(world)
    with unheard():
        work = profile_work(replace(config, strategy="ddp"), world, world.size, machine, Effort(seconds=2.0))
    candidates: list[str] = []
    if world.rank == 0:
        known = None if options.replan else remembered(work.key, world.size)
        setting = Setting(world.size, config.global_batch, config.accumulate)
        predictor = Predictor(work, machine, setting, residuals_of(machine_key()))
        wanted = Wanted(free_memory() / world.size + work.base, True, device=world.device.type)
        plans = [one for one in search(predictor, wanted).plans if _may_be(one)]
        if plans:
            keep_predictions(work.key, plans)
        candidates = [known] if known else [str(one.plan) for one in _unlike(best_of_each(plans))]
        if known:
            _say(
                f"auto: {known}, which was the best for this model here before (auto(replan=true) plans anew)"
            )
    candidates = world.gather_values(candidates)[0]
    if not candidates:
        raise ConfigError("auto: no strategy fits this model on these workers; `shoal plan` says why not.")
    chosen = candidates[0]
    if len(candidates) > 1 and options.tries > 1:
        chosen = _try(config, world, candidates[: options.tries], options)
    elif len(candidates) > 1 and world.rank == 0:
        _say(f"auto: {chosen}, by prediction")
    if world.rank == 0:
        remember(work.key, world.size, chosen)
    config.strategy = chosen


def _unlike(plans: Sequence[Prediction]) -> list[Prediction]:
    """The best first, then the best of those that divide the model in another way: predictions of these differ most."""
    seen: set[object] = set()
    first = []
    for one in plans:
        if degrees_of(one.plan) not in seen:
            seen.add(degrees_of(one.plan))
            first.append(one)
    return [*first, *(one for one in plans if one not in first)]


def _may_be(one: Prediction) -> bool:
    """Workers have joined each other by now, so what meets at servers only is left out."""
    return not exchange.TABLE[one.plan.exchange.name].uses_servers


def _machine(world: World) -> Machine:
    """The tables of this machine, which the workers measure themselves if nobody has."""
    known: bool = world.gather_values(bool(machine_of(world.size).added))[0]
    if known:
        return machine_of(world.size)
    if world.rank == 0:
        _say("auto: measuring this machine, once (about 20 s)")
    with unheard():
        made = calibrate(world, servers=False)
    if world.rank == 0:
        keep(TABLES, key_of(world.size), {"machine": made.to_json()})
    return made


def _try(config: RunConfig, world: World, candidates: Sequence[str], options: AutoOptions) -> str:
    """Take some steps under each, and give the fastest."""
    times: dict[str, float] = {}
    for text in candidates:
        found = try_plan(config, world, text, options.steps, _WARM)
        if not found.failed:
            times[text] = found.seconds.middle
        elif world.rank == 0:
            _say(f"auto: {text} is left out: {found.failed}")
    if not times:
        return candidates[0]
    best = min(times, key=lambda text: times[text])
    if world.rank == 0:
        told = ", ".join(f"{text} {span(seconds)}" for text, seconds in times.items())
        _say(f"auto: {best}; tried for {options.steps} steps each: {told}")
    return best


def _say(sentence: str) -> None:
    print(f"shoal: {sentence}.", file=sys.stderr, flush=True)
