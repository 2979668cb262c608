"""A few steps of the run as it would be under a plan, by all its workers; what was trained is thrown away."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from torch import nn

from shoal.errors import ShoalError
from shoal.plan.check import check_text
from shoal.plan.interval import ZERO, Interval
from shoal.train.build import build
from shoal.train.own_step.build import build_own_step
from shoal.train.own_step.run_own_step import run_own_step
from shoal.train.planning.rehearsal import allocated, forget_peak, resident, settle, unheard
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.world.world import World


@dataclass(frozen=True)
class Tried:
    """What was seen; the same on every worker."""

    seconds: Interval = ZERO
    """Of a step, by the worker whose steps took longest."""
    built: int = 0
    """Bytes of the worker that held the most until training could begin: code, and what it has allocated since."""
    peak: int = 0
    """The same until the last step."""
    failed: str = ""
    """Why the plan cannot be built; then the rest is 0."""


def try_plan(config: RunConfig, world: World, text: str, steps: int, warm: int) -> Tried:
    """Take some steps under `text`, of which the first do not count. Collective."""
    tried = replace(
        config,
        strategy=text,
        memory=None,
        checkpoint=None,
        checkpoint_every=None,
        copies="",
        loader_workers=0,
    )
    make, take = (build, run_step) if config.step is None else (build_own_step, run_own_step)
    settle()
    forget_peak()
    before = allocated()  # what earlier tries have left behind is no part of this one
    if isinstance(config.model, nn.Module):
        tried.model = copy.deepcopy(config.model)
    with unheard():
        failed, context = "", None
        try:
            check_text(text, world.size)
            context = make(tried, world, "")[1]
        except ShoalError as error:
            failed = str(error)
        reasons = [reason for reason in world.gather_values(failed) if reason]
        if reasons or context is None:
            return Tried(failed=reasons[0])
        context.exchange.start(0, context.join_state())
        built = resident("VmHWM") - before
        seen, done = [], 0
        for number in range(warm + steps):
            view = context.exchange.work.next(done, 10**9)
            assert view is not None
            report = take(context, view)
            done = report.number
            if number >= warm:
                seen.append(report.seconds)
        peak = resident("VmHWM") - before
        context.exchange.close()
        del context
        settle()
    mine = Interval.measured(seen)
    facts = world.gather_values([mine.low, mine.middle, mine.high, built, peak])
    slowest = max(facts, key=lambda one: float(one[1]))
    return Tried(
        Interval(*(float(value) for value in slowest[:3])),
        max(int(one[3]) for one in facts),
        max(int(one[4]) for one in facts),
    )
