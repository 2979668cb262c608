"""What a run would cost each of its workers, found in one process: the model is made and tried, and nobody starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shoal.config import degree_of
from shoal.cost import Cost, ModelProfile
from shoal.plan.check import check_text, tensor_options
from shoal.plan.cost import plan_cost
from shoal.train.build import find_in_model, make_feed, make_trial
from shoal.train.model.make import make_model
from shoal.train.model.profile import profile_cuts, profile_model, profile_part
from shoal.train.rules import plan_schedule
from shoal.train.run_config import RunConfig
from shoal.train.server_setup import order_of_use
from shoal.train.technique import precision
from shoal.train.technique.clip import ByNorm, make_clip
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def cost_of(config: RunConfig, workers: int, rank: int = 0, hosts: Sequence[str] = ()) -> Cost:
    """The cost of one of so many workers. `hosts` names the host of each; all are on one if it is not given.

    Not counted: what batchnorm='sync' sends, and what recompute='blocks' sends again along the tensor axis.
    """
    plan = check_text(config.strategy, workers)
    degrees = degree_of(plan.tensor), degree_of(plan.pipeline)
    mesh = Mesh.imagine(World.alone(), workers, *degrees, rank, hosts)
    return plan_cost(plan, profile_run(config, plan, mesh), mesh)


def profile_run(config: RunConfig, plan: Plan, mesh: Mesh) -> ModelProfile:
    """What the worker at this place would hold, as `build` would lay it out."""
    chosen, device = precision.TABLE.look_up(config.precision), torch.device("cpu")
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=False)
    feed = make_feed(config, plan, mesh)
    trial = make_trial(config, model, feed, device)
    whole = replace(
        profile_model(model, config.optimizer, order_of_use(trial)),
        accumulate=config.accumulate,
        norm=chosen.scaled or config.on_nan == "skip" or isinstance(make_clip(config.clip), ByNorm),
        deterministic=config.deterministic,
    )
    if mesh.model.size == 1:
        return whole
    schedule, options = plan_schedule(plan), tensor_options(plan)
    division = find_in_model(config, plan, mesh, model, feed)
    size = -(-feed.global_batch // (feed.size * feed.accumulate))
    part = profile_part(whole, division, mesh, schedule, feed.accumulate, size)
    return replace(part, cut=profile_cuts(trial, division, mesh, options, schedule))
