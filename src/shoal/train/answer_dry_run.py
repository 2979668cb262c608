"""What a launcher asks about a model instead of training it.

    tensor 2      how would tp2 cut it?              for `shoal list tensor train.py`
    pipeline 4    what would four stages be?         for `shoal list pipeline train.py`
    check         would a run like this one start?   before `shoal run` starts workers whose strategy divides the model

Each is answered by the functions that build a run, in one process that waits for nobody.
"""

from __future__ import annotations

import torch

from shoal import exchange
from shoal.blocks import find_blocks
from shoal.config import degree_of
from shoal.data.stream import make_loader
from shoal.errors import ConfigError
from shoal.exchange.contract import trainable
from shoal.optimizer import (
    check_trainable,
    make_optimizer,
    names_in_groups,
    refuse_sparse,
    refuse_unless_by_parameter,
    refuse_unless_elementwise,
)
from shoal.pipeline.split import describe_split, find_split
from shoal.plan.check import check_text
from shoal.tensor import describe_cuts, find_cuts
from shoal.train.build import (
    find_in_model,
    make_feed,
    make_trial,
    prepare_layers,
)
from shoal.train.model.divide import Trial
from shoal.train.model.make import make_model
from shoal.train.own_step.check import check_own_step
from shoal.train.rules import check_numbers
from shoal.train.run_config import RunConfig, check_kinds
from shoal.train.technique import precision
from shoal.train.technique.clip import make_clip
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def answer(config: RunConfig, question: str, workers: int, device: torch.device) -> str:
    """The answer to one of the questions above, found as a run of so many workers would find it."""
    what, _, number = question.partition(" ")
    if what == "check":
        return f"ok: `{check_config(config, workers, device)}` can run on {workers} workers."
    if what not in ("tensor", "pipeline"):
        raise ConfigError(f"nothing is known about '{what}' of a model; ask for tensor, pipeline or check.")
    if config.step is not None:
        raise ConfigError(f"nothing is known about '{what}' of a run with step=: its models stay whole.")
    trial = _whole(config, device)
    with trial.calm():
        if what == "tensor":
            return describe_cuts(find_cuts(trial.model, trial.run, int(number), config.tensor_rules))
        return describe_split(find_split(trial.model, trial.inputs(trial.batch), int(number)))


def check_config(config: RunConfig, workers: int, device: torch.device) -> Plan:
    """Refuse what so many workers would refuse while they build a run whose plan divides the model.

    What only the workers together can know, such as a model that is another on every rank, is not seen here.
    """
    plan = check_text(config.strategy, workers)
    if config.step is not None:
        check_own_step(config, plan)
        return plan
    check_kinds(config)
    mesh = Mesh.imagine(World.alone(device), workers, degree_of(plan.tensor), degree_of(plan.pipeline))
    check_numbers(config, plan, mesh)
    if mesh.model.size == 1:
        return plan  # the model stays whole: to build it would tell nothing that is worth the time
    chosen = precision.TABLE.look_up(config.precision)
    make_clip(config.clip)
    feed = make_feed(config, plan, mesh)
    make_loader(feed)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=False)
    model.to(device)
    check_trainable(model)
    blocks = find_blocks(model)
    found = find_in_model(config, plan, mesh, model, feed)
    prepare_layers(config, model, mesh, blocks)
    learning = trainable(model)
    made = make_optimizer(config.optimizer, learning)
    refuse_sparse(made, plan.exchange.name)
    if not exchange.TABLE.look_up(plan.exchange.name).whole_updates:
        refuse_unless_elementwise(made, plan.exchange.name)
    elif found.cuts is not None:
        refuse_unless_elementwise(made, "tensor parallelism", "leave tpN out")
    if found.split is not None:
        refuse_unless_by_parameter(made)
    names_in_groups(made, learning, model)
    return plan


def _whole(config: RunConfig, device: torch.device) -> Trial:
    """The model undivided, with the micro-batch that one process would give it."""
    chosen = precision.TABLE.look_up(config.precision)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=False)
    feed = make_feed(config, check_text("ddp", 1), Mesh.open(World.alone(device)))
    return make_trial(config, model.to(device), feed, device)
