"""What is different where workers meet at servers, and run no collective among them."""

from __future__ import annotations

import torch

from shoal import exchange
from shoal.config import fill_options, parse_strategy
from shoal.embedding import SparseEmbedding
from shoal.exchange.base import trainable
from shoal.exchange.ps_options import PsOptions
from shoal.exchange.readiness import ForwardOrder
from shoal.train.divide import Trial
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def apart(plan: Plan) -> bool:
    """Whether workers meet at servers."""
    return exchange.TABLE.look_up(plan.exchange.name).apart


def meets_at_servers(strategy: str) -> bool:
    """Whether workers under a strategy meet at servers only, and not within their host either."""
    plan = parse_strategy(strategy)
    if not apart(plan):
        return False
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    return not isinstance(options, PsOptions) or options.tier == "worker"


def sharers(plan: Plan, mesh: Mesh) -> World:
    """Those who divide a step's samples among them."""
    return mesh.world if apart(plan) else mesh.data


def order_of_use(trial: Trial) -> list[str]:
    """Parameters by one trial pass, the last used first: where they lie must be known before the first step.

    Rows of an embedding are on servers that are not there yet; then the order of definition has to do.
    """
    model = trial.model
    if any(isinstance(module, SparseEmbedding) for module in model.modules()):
        return []
    watch = ForwardOrder(model, trainable(model))
    model.eval()
    try:
        with torch.no_grad(), trial.precision.context(trial.device):
            model(trial.inputs(trial.batch))
    finally:
        model.train()
        seen = watch.close()
    return seen
